"""SIGKILL of a real operator at a write of a rollout, and the next one finishes it. Every write is tried by
`make soak ARGS=--kills`; here are the three at which one object knows what the other does not. SIGSTOP of one
that leads, until another leads.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.kill_harness import (
    ADOPTS,
    COMPLETES,
    EXTRA_WRITES,
    RETURNS,
    STEP_SECONDS,
    KillHarness,
    Outcome,
    Scenario,
    kill_harness,
)
from tests.cluster.kill_lives import Point
from tests.cluster.kvtier_localplane import Cluster

pytestmark = pytest.mark.timeout(600, func_only=True)
NAMESPACE = "killed"
BOTH = (f"{NAMESPACE}-a", f"{NAMESPACE}-b")
UNDISTURBED = 15
"""Writes of each of these rollouts without a death, at most."""


@pytest.fixture(scope="module")
def harness(control_plane: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KillHarness]:
    with kill_harness(control_plane, tmp_path_factory.mktemp("killed"), NAMESPACE) as made:
        yield made


@pytest.mark.parametrize(
    ("scenario", "point", "expected"),
    [
        pytest.param(
            COMPLETES,
            Point("swap KVCache status fence+approved #1", after=True),
            Outcome(COMPLETES.ends, 1, (0, 0), approved=True, adopted=False, holders=BOTH),
            id="approved-and-not-completed",
        ),
        pytest.param(
            ADOPTS,
            Point("swap KVCache status fence+baseline #1", after=True),
            Outcome(ADOPTS.ends, 1, (0, 0), approved=False, adopted=True, holders=()),
            id="adopted-and-not-completed",
        ),
        pytest.param(
            RETURNS,
            Point("revoke killed-a ExactBaseline/0 #1", after=False),
            Outcome(RETURNS.ends, 1, (2, 2), approved=False, adopted=False, holders=()),
            id="returning-and-nobody-told",
        ),
    ],
)
def test_the_next_operator_finishes_it(
    harness: KillHarness, scenario: Scenario, point: Point, expected: Outcome
) -> None:
    ran = harness.run(scenario, point)
    assert ran.died
    assert ran.outcome == expected
    if ran.gap < STEP_SECONDS / 2:
        assert ran.cost <= UNDISTURBED + EXTRA_WRITES, ran.writes


def test_a_leader_that_was_stopped_past_its_lease_writes_nothing_when_it_goes_on(
    harness: KillHarness,
) -> None:
    """Between its decision and the write; by then another has finished the rollout under higher fences."""
    overtaken = harness.overtake(RETURNS, Point("swap KVCache status fence #2", after=False))
    assert overtaken.outcome == Outcome(RETURNS.ends, 1, (2, 2), approved=False, adopted=False, holders=())
    assert overtaken.tried
    assert overtaken.accepted == ()
    assert overtaken.unchanged
