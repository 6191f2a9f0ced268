"""What a manifest may promise and Quest cannot keep is refused, never ignored."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier_core.errors import CoreError, Reason
from kvtier_core.selectors.quest import QuestFamily
from kvtier_crds.manifest import Selector

QUEST: dict[str, Any] = {
    "family": "quest",
    "parameters": {"pageTokens": 16},
    "budget": {"tokens": 64, "capPolicy": "truncate"},
}


def _family(document: dict[str, Any]) -> QuestFamily:
    selector = Selector.model_validate(document)
    return QuestFamily.from_manifest(selector, page_tokens=16, kv_heads=3, head_dim=64)


def test_a_plain_selector_is_taken() -> None:
    assert _family(QUEST).pages == 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gate": {"minConfidence": "0.9"}}, "selector.gate cannot be kept"),
        ({"budget": {"tokens": 64, "capPolicy": "error"}}, "capPolicy error cannot run; legal: truncate"),
        ({"budget": {"tokens": 64, "capPolicy": "dense"}}, "capPolicy dense cannot run; legal: truncate"),
    ],
    ids=["gate", "cap-error", "cap-dense"],
)
def test_promises_it_cannot_keep_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(CoreError) as refused:
        _family(QUEST | change)
    assert refused.value.reason is Reason.MANIFEST_INVALID
    assert words in str(refused.value)
