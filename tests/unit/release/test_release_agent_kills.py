"""A slice of all points at which an agent's node may be killed while it makes a fence durable; all of them,
and pairs of them, are in `make soak ARGS=--fences`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
EVERY = 27
PAIRS = 2


@pytest.mark.timeout(600)
def test_no_fence_is_lost_and_no_candidate_survives_a_kill() -> None:
    """In a process of its own, since it forks."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.release.agent_kills", f"--every={EVERY}", f"--pairs={PAIRS}"],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        timeout=500,
        check=False,
    )
    assert done.stdout, done.stderr
    *rows, counts = map(json.loads, done.stdout.splitlines())
    assert [row for row in rows if row["problems"]] == []
    assert done.returncode == 0, (counts, done.stderr)
    assert len(rows) == counts["tried"] == len(range(0, counts["points"], EVERY)) + PAIRS
    # Three calls to open the folder; a command makes one file durable by eight calls, a baseline two.
    assert counts["calls"] == 3 + 8 * (8 + 2 * 3)
    tried = {(point["call"], point["how"]) for row in rows for point in row["points"]}
    assert {call for call, _ in tried} == {"open", "write", "fsync", "close", "rename"}
    assert {how for _, how in tried} == {"before", "half", "after"}
    assert counts["unseenMistakes"] == []
