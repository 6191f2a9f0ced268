"""Edits on a client whose agent is a double: what it is asked for, and for how long this end waits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier.v1 import attention_pb2
from kvtier_client.client import AttentionClient


@pytest.mark.parametrize(
    ("waits", "stated_ms", "asked_ms"),
    [
        pytest.param(10.0, 30_000, 9_000, id="frames-may-take-longer"),
        pytest.param(10.0, 2_000, 2_000, id="frames-may-not"),
        pytest.param(10.0, 0, 9_000, id="unstated"),
        pytest.param(0.0005, 30_000, 1, id="no-time"),
    ],
)
def test_the_agent_gives_an_edit_up_before_its_caller_does(
    waits: float, stated_ms: int, asked_ms: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What is made behind that is nobody's: no one here knows a fork's id."""
    asked: list[attention_pb2.EditSessionRequest] = []

    def call(_: AttentionClient, method: Callable[..., Any], request: Any) -> Any:
        asked.append(request)
        return attention_pb2.EditSessionResponse()

    monkeypatch.setattr(AttentionClient, "_unary", call)
    stated = attention_pb2.EditSessionRequest(session_id="s", deadline_ms=stated_ms)
    with AttentionClient(tmp_path / "engine.sock", timeout=waits) as client:
        client.edit_session(stated)
    assert [(one.session_id, one.deadline_ms) for one in asked] == [("s", asked_ms)]
    assert stated.deadline_ms == stated_ms
