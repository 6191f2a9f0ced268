"""Which kernels run is settled, and said, before an agent is ready."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvtier_agent import attentionkernels
from kvtier_agent.kvnode import conditions_of
from kvtier_agent.node import Node
from kvtier_kernels import compiled


def ready(node: Any) -> tuple[str, str, str]:
    condition = conditions_of(cast(Node, node), [])[0]
    return condition.type, condition.status, condition.message


NODE = SimpleNamespace(draining=False, faults={}, differences=dict)


def test_compiled_kernels_need_no_remark(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    attentionkernels.prepare_kernels()
    assert "compiled in" in caplog.text
    assert ready(NODE) == ("Ready", "True", "")


def test_their_absence_is_said_in_the_log_and_in_the_status(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled, "library", lambda: None)
    monkeypatch.setattr(compiled, "missing", lambda: "llvmlite is not installed")
    attentionkernels.prepare_kernels()
    text = "attention runs on plain tensor operations, several times slower: llvmlite is not installed"
    assert [(one.levelname, one.message) for one in caplog.records] == [("WARNING", text)]
    assert ready(NODE) == ("Ready", "True", text)
