"""The demo decides nothing: with the two budgets swapped, the outcomes swap.

Runs the demo as a user does, in a process of its own, on real parts. The demo's
own claims must then fail, and only those that speak of the outcomes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.e2e


def test_swapped_budgets_swap_the_outcomes(tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    argv = [sys.executable, "-m", "tests.e2e.demo", "--only", "promote-and-rollback", "--swap"]
    done = subprocess.run(
        [*argv, "--report", str(report)], cwd=ROOT, capture_output=True, text=True, timeout=1400
    )
    tail = done.stdout[-6000:] + done.stderr[-3000:]
    assert report.is_file(), tail
    summary = json.loads(report.with_suffix(".json").read_text())
    first, second = summary["outcomes"]["a-sane"], summary["outcomes"]["b-ruinous"]
    assert (first["phase"], first["cause"], first["fromStage"]) == ("RolledBack", "GateFailed", "Shadow"), (
        tail
    )
    assert first["restored"] == [2, 2], tail
    assert second["phase"] == "Completed", tail
    held = {c["key"] for c in summary["claims"] if c["holds"]}
    assert held == {"ready", "exact"}, tail
    assert done.returncode == 1, tail
