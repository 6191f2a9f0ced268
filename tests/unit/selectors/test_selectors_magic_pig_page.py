"""The page on families that sample or recall: its objects are valid and make the families described."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtier_core.selectors.contract import Shape
from kvtier_core.selectors.families.registry import make_family
from kvtier_crds.models.kvselector import KVSelector
from tests.unit.selectors.selector_cases import selector

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "selectors-sampled-and-recalled.md"
LLAMA = Shape(query_heads=32, kv_heads=8, head_dim=128, scale=128**-0.5)


def objects() -> list[dict[str, Any]]:
    return [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.S)]


@pytest.mark.parametrize("document", objects(), ids=lambda one: one["spec"]["family"])
def test_an_object_of_published_settings_makes_its_family(document: dict[str, Any]) -> None:
    spec = document["spec"]
    KVSelector.model_validate(document)
    made = make_family(
        selector(spec["family"], spec[spec["family"]], spec["budget"], persistentRows=spec["persistentRows"]),
        LLAMA,
        16,
    )
    text = PAGE.read_text()
    section = text[text.index(f"\n## {spec['family']}\n") :]
    assert made.facts.family == spec["family"]
    assert f"**Guarantee.** `{made.facts.guarantee.value}`" in section
    needed = section[section.index("**Needs.**") :].split("\n- **", 1)[0]
    assert all(need.value in needed for need in made.facts.needs if need.value != "query")
