"""Probe Jobs where no Job controller runs: made once, told with the command, replaced with an edited plan."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.kvtier_localplane import Cluster, eventually
from tests.cluster.operator_harness import (
    agent_pool,
    apply,
    condition,
    install,
    kv_cache,
    operator,
    tier_class,
    wait_condition,
)
from tests.cluster.rollout_fake_agent import RolloutFakeAgent
from tests.cluster.test_controllers import long_rollout, selector

pytestmark = pytest.mark.timeout(600)
NAMESPACE = "probes"


def golden(seed: int) -> dict[str, Any]:
    plan = {"model": {"path": "/models/tiny"}, "tasks": ["passkey"], "lengths": [128], "seeds": [seed]}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "golden", "namespace": NAMESPACE},
        "data": {"plan.json": json.dumps(plan)},
    }


@pytest.fixture(scope="module")
def cluster(control_plane: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cache that is served by one agent, and an operator; no rollout."""
    folder: Path = tmp_path_factory.mktemp("probes")
    install(control_plane)
    control_plane.ensure_namespace(NAMESPACE)
    apply(control_plane, tier_class("gpu-sim", "gpu"), tier_class("cpu-dram", "cpu"), selector(NAMESPACE))
    with operator(control_plane, folder, "probes"):
        apply(control_plane, agent_pool(NAMESPACE, NAMESPACE))
        agent = RolloutFakeAgent(
            control_plane,
            folder,
            "probes-a",
            namespace=NAMESPACE,
            pool=NAMESPACE,
            lease_seconds=6 * 3600,
            probe_digest="",
        )
        try:
            agent.start()
            apply(
                control_plane,
                kv_cache("cache", NAMESPACE, NAMESPACE, contract={"exactness": "approximate"}),
            )
            wait_condition(control_plane, "kvcache/cache", NAMESPACE, "Ready", "True", timeout=60)
            yield control_plane
        finally:
            agent.cleanup()


def test_a_missing_plan_is_waited_for_and_a_job_that_nobody_runs_is_told(cluster: Cluster) -> None:
    apply(cluster, long_rollout(NAMESPACE))
    found = wait_condition(
        cluster, "kvrollout/rollout", NAMESPACE, "Feasible", "False", reason="ReferenceMissing", timeout=60
    )
    assert condition(found, "Feasible")["message"] == "ConfigMap golden: does not exist"
    apply(cluster, golden(1))

    def jobs() -> list[dict[str, Any]]:
        return list(cluster.get("jobs", "-n", NAMESPACE)["items"])

    [job] = eventually(jobs, 60, what="a Job is made")
    wait_condition(
        cluster, "kvselector/quest-64", NAMESPACE, "IndexReady", "Unknown", reason="NoSessions", timeout=60
    )
    [indexes] = cluster.get("kvselector/quest-64", "-n", NAMESPACE)["status"]["indexes"]
    assert (indexes["cache"], indexes["agents"], indexes["ready"]) == ("cache", 1, 0)
    name = job["metadata"]["name"]
    told = wait_condition(
        cluster, "kvrollout/rollout", NAMESPACE, "Degraded", "True", reason="ProbeJobIdle", timeout=90
    )
    assert name in condition(told, "Degraded")["message"]
    assert len(jobs()) == 1
    command = job["metadata"]["annotations"]["kvtier.dev/by-hand"]
    assert "kvtier-eval probe" in command

    def noted() -> bool:
        notes = cluster.get("events", "-n", NAMESPACE)["items"]
        return any(event["reason"] == "ProbeJobIdle" and command in event["message"] for event in notes)

    eventually(noted, 60, what="an Event, which follows the status that it tells of")

    apply(cluster, golden(2))

    def replaced() -> bool:
        found = [one["metadata"]["name"] for one in jobs()]
        return len(found) == 1 and found[0] != name

    eventually(replaced, 60, what="the edited plan's Job takes the place of the old one")
    cluster.kubectl("delete", "kvrollout", "rollout", "-n", NAMESPACE, "--timeout=60s")
