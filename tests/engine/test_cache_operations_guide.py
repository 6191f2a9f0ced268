"""The example of the guide runs as it is printed, against a real agent."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier.v1 import common_pb2
from tests.engine.agent_process import baseline_manifest, running_agent, tiny_geometry

pytestmark = pytest.mark.timeout(180)

GUIDE = Path(__file__).parents[2] / "docs/guides/cache-operations.md"
CHAT = common_pb2.CacheRef(namespace="serving", name="chat", uid="chat-uid")


def test_the_example_runs(tiny_model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    random = torch.Generator().manual_seed(1)
    with running_agent() as agent:
        agent.apply_baseline(baseline_manifest(tiny_geometry(layers=3), cache=CHAT), cache=CHAT)
        names = {
            "socket_path": agent.socket_path,
            "model": tiny_model,
            "prompt": torch.randint(2, 97, (1, 300), generator=random),
            "question": torch.randint(2, 97, (1, 12), generator=random),
        }
        exec(compile(example, str(GUIDE), "exec"), names)
        names["client"].close()
    assert capsys.readouterr().out.splitlines() == [
        "236 positions are left",
        "EXACT_OVER_EDITED_HISTORY",
    ]
