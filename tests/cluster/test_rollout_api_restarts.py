"""SIGKILL of the API server in the middle of a rollout, right after it accepted a write, and another on the
same store: one operator finishes it as if nothing had been. All writes: `make soak ARGS="--kills --api"`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from tests.cluster.kill_harness import (
    COMPLETES,
    RETURNS,
    STEP_SECONDS,
    KillHarness,
    Outcome,
    Ran,
    Scenario,
    differs,
    kill_harness,
)
from tests.cluster.kvtier_localplane import LocalControlPlane

pytestmark = pytest.mark.timeout(600, func_only=True)
NAMESPACE = "api-restarts"
BOTH = (f"{NAMESPACE}-a", f"{NAMESPACE}-b")
UNDISTURBED = 15
"""Writes of each of these rollouts without an outage, at most."""


@pytest.fixture(scope="module")
def plane() -> Iterator[LocalControlPlane]:
    """Of its own: who else uses an API server does not expect that it is killed."""
    with LocalControlPlane(restarts=True) as made:
        yield made


@pytest.fixture(scope="module")
def harness(plane: LocalControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KillHarness]:
    with kill_harness(plane.cluster, tmp_path_factory.mktemp("restarts"), NAMESPACE) as made:
        yield made


@pytest.mark.parametrize(
    ("scenario", "write", "expected"),
    [
        pytest.param(
            COMPLETES,
            "swap KVCache status fence #2",
            Outcome(COMPLETES.ends, 1, (0, 0), approved=True, adopted=False, holders=BOTH),
            id="completing-fence-moved-and-status-not-written",
        ),
        pytest.param(
            RETURNS,
            "status RollingBack ExactBaseline/0 #1",
            Outcome(RETURNS.ends, 1, (2, 2), approved=False, adopted=False, holders=()),
            id="returning-written-and-nobody-told",
        ),
    ],
)
def test_an_api_server_killed_in_mid_rollout_changes_no_outcome(
    harness: KillHarness, plane: LocalControlPlane, scenario: Scenario, write: str, expected: Outcome
) -> None:
    before = plane.pids["kube-apiserver"]
    ran = harness.interrupted(scenario, write, plane.restart_api_server)
    assert plane.pids["kube-apiserver"] != before
    # Leases may have ended meanwhile, and steps were opened again.
    assert not differs(Ran(expected, (), UNDISTURBED, died=False), dataclasses.replace(ran, gap=STEP_SECONDS))
