"""A KVCache from apply to removal: the operator on a real API server, agents that speak the real protocol."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.cluster.fake_agent import FakeAgent
from tests.cluster.kvtier_localplane import Cluster, eventually
from tests.cluster.operator_harness import (
    RunningOperator,
    agent_pool,
    apply,
    condition,
    install,
    kv_cache,
    operator,
    tier_class,
    wait_condition,
)

pytestmark = pytest.mark.timeout(600)
NAMESPACE = "op-cache"
POOL = "op-cache"


@dataclass(frozen=True)
class World:
    cluster: Cluster
    operator: RunningOperator
    agents: tuple[FakeAgent, ...]

    def cache(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.cluster.get("kvcache", name, "-n", NAMESPACE)
        return found

    def wait(self, name: str, type: str, status: str, reason: str = "") -> dict[str, Any]:
        return wait_condition(self.cluster, f"kvcache/{name}", NAMESPACE, type, status, reason=reason)

    def remove(self, name: str) -> None:
        self.cluster.kubectl("delete", "kvcache", name, "-n", NAMESPACE, "--timeout=60s")


@pytest.fixture(scope="module")
def world(control_plane: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("op-cache")
    install(control_plane)
    control_plane.ensure_namespace(NAMESPACE)
    apply(control_plane, tier_class("gpu-sim", "gpu"), tier_class("cpu-dram", "cpu"))
    agents: list[FakeAgent] = []
    with operator(control_plane, folder, "op-cache") as running:
        apply(control_plane, agent_pool(POOL, NAMESPACE))
        try:
            for node in ("op-cache-a", "op-cache-b"):
                agent = FakeAgent(
                    control_plane, folder, node, namespace=NAMESPACE, pool=POOL, lease_seconds=6 * 3600
                )
                agents.append(agent)
                agent.start()
            yield World(control_plane, running, tuple(agents))
        finally:
            for agent in agents:
                agent.cleanup()


def test_a_cache_becomes_ready_with_a_proof_from_every_node(world: World) -> None:
    apply(world.cluster, kv_cache("proved", NAMESPACE, POOL, prefillFlopPerToken="1000000000"))
    cache = world.wait("proved", "Ready", "True")
    assert condition(cache, "BaselineVerified")["status"] == "True"
    assert condition(cache, "Feasible")["status"] == "True"
    assert condition(cache, "SpecApplied")["status"] == "True"
    status = cache["status"]
    assert status["fence"] == 1
    assert status["servingNodes"] == 2
    plan = status["plan"]
    assert (plan["predictedStall"], plan["schedule"]) == ("0.25", "layerwiseTwoSlot")
    assert plan["inputs"]["node"] in {agent.state.node for agent in world.agents}
    # (1e9 / 1024) * (2^30 / 1e12), of the spec's arithmetic and the agents' measurements.
    assert float(plan["kappaCrit"]) == pytest.approx(1e9 / 1024 * 2**30 / 1e12, rel=1e-4)
    uid = cache["metadata"]["uid"]
    for agent in world.agents:
        assert agent.state.caches[uid].digest == status["baseline"]["digest"]
    revision = world.cluster.get("controllerrevision", status["baseline"]["revision"], "-n", NAMESPACE)
    assert revision["metadata"]["labels"]["kvtier.dev/role"] == "baseline"
    assert revision["metadata"]["ownerReferences"][0]["uid"] == uid
    assert revision["data"]["digest"] == status["baseline"]["digest"]
    world.remove("proved")
    eventually(lambda: all(uid not in agent.state.caches for agent in world.agents), 60)
    assert all(agent.state.removed[uid] > 1 for agent in world.agents)


def test_a_missing_tier_class_is_named_and_its_arrival_is_noticed(world: World) -> None:
    late = kv_cache("late", NAMESPACE, POOL, tiers=(("gpu-sim", "32Mi"), ("op-late", "64Mi")))
    apply(world.cluster, late)
    cache = world.wait("late", "Ready", "False", "ReferenceMissing")
    assert "TierClass op-late" in condition(cache, "Ready")["message"]
    assert "baseline" not in cache["status"]
    apply(world.cluster, tier_class("op-late", "cpu"))
    # It exists now; no node of the pool offers it, which is said with the names of the nodes.
    cache = world.wait("late", "Feasible", "False", "TierMissing")
    message = condition(cache, "Feasible")["message"]
    assert "op-cache-a: has no tier op-late" in message
    assert "op-cache-b: has no tier op-late" in message
    world.remove("late")


def test_a_budget_that_does_not_fit_is_refused_with_numbers_and_can_be_mended(world: World) -> None:
    apply(world.cluster, kv_cache("large", NAMESPACE, POOL, tiers=(("gpu-sim", "1Gi"), ("cpu-dram", "1Mi"))))
    cache = world.wait("large", "Feasible", "False", "BudgetExceedsCapacity")
    message = condition(cache, "Feasible")["message"]
    assert "op-cache-a: tier gpu-sim has 268435456 bytes, this cache needs 1073741824" in message
    assert "baseline" not in cache["status"]
    apply(world.cluster, kv_cache("large", NAMESPACE, POOL))
    cache = world.wait("large", "Ready", "True")
    assert cache["status"]["fence"] == 1
    world.remove("large")


def test_an_edited_spec_waits_for_a_rollout(world: World) -> None:
    apply(world.cluster, kv_cache("edited", NAMESPACE, POOL))
    before = world.wait("edited", "Ready", "True")
    apply(
        world.cluster, kv_cache("edited", NAMESPACE, POOL, tiers=(("gpu-sim", "48Mi"), ("cpu-dram", "64Mi")))
    )
    after = world.wait("edited", "SpecApplied", "False", "RolloutRequired")
    assert "tiers" in condition(after, "SpecApplied")["message"]
    assert condition(after, "Servable")["status"] == "True"
    assert after["status"]["baseline"] == before["status"]["baseline"]
    assert after["status"]["fence"] == before["status"]["fence"]
    # An edit that shapes nothing is applied as it stands.
    apply(world.cluster, kv_cache("edited", NAMESPACE, POOL, sessions={"ttl": "2h"}))
    world.wait("edited", "SpecApplied", "True")
    world.remove("edited")


def test_a_lost_status_is_rebuilt_from_the_revision_with_a_higher_fence(world: World) -> None:
    apply(world.cluster, kv_cache("lost", NAMESPACE, POOL))
    before = world.wait("lost", "Ready", "True")
    world.cluster.kubectl(
        "patch", "kvcache", "lost", "-n", NAMESPACE, "--subresource=status", "--type=json",
        '-p=[{"op":"remove","path":"/status"}]',
    )  # fmt: skip

    def rebuilt() -> dict[str, Any] | None:
        # A pass that was under way may still write its conditions first.
        obj = world.cluster.get("kvcache/lost", "-n", NAMESPACE)
        return obj if (obj.get("status") or {}).get("baseline") else None

    eventually(rebuilt, 60.0, what="a baseline again")
    after = world.wait("lost", "Ready", "True")
    assert after["status"]["baseline"] == before["status"]["baseline"]
    assert after["status"]["fence"] == before["status"]["fence"] + 1
    world.remove("lost")


def test_an_agent_that_runs_something_else_is_not_believed(world: World) -> None:
    liar = world.agents[1]
    liar.state.lie = True
    try:
        apply(world.cluster, kv_cache("doubted", NAMESPACE, POOL))
        cache = world.wait("doubted", "BaselineVerified", "False", "ProofMissing")
        assert "op-cache-b (DigestMismatch" in condition(cache, "BaselineVerified")["message"]
        assert "op-cache-a" not in condition(cache, "BaselineVerified")["message"]
        assert condition(cache, "Servable")["status"] == "True"
    finally:
        liar.state.lie = False
    world.wait("doubted", "BaselineVerified", "True")
    world.remove("doubted")


def test_a_restarted_agent_is_asked_for_a_new_proof(world: World) -> None:
    agent = world.agents[0]
    apply(world.cluster, kv_cache("reboot", NAMESPACE, POOL))
    cache = world.wait("reboot", "Ready", "True")
    uid = cache["metadata"]["uid"]
    old = agent.state.boot_id
    agent.stop()
    world.wait("reboot", "Degraded", "True", "AgentLost")
    assert condition(world.cache("reboot"), "Servable")["status"] == "True"
    agent.state.caches.clear()  # its disk is new, too
    agent.state.calls.clear()
    agent.start()
    assert agent.state.boot_id != old
    world.wait("reboot", "Degraded", "False")
    world.wait("reboot", "Ready", "True")
    assert uid in agent.state.caches
    assert {"ApplyBaseline", "Prove"} <= set(agent.state.calls)
    world.remove("reboot")


def test_a_fence_that_an_agent_has_passed_is_overtaken(world: World) -> None:
    apply(world.cluster, kv_cache("behind", NAMESPACE, POOL))
    cache = world.wait("behind", "Ready", "True")
    held = world.agents[0].state.caches[cache["metadata"]["uid"]]
    held.fence, held.digest = 7, f"sha256:{'1' * 64}"  # as a later leader, whose status was lost, left it
    world.cluster.kubectl("annotate", "kvcache", "behind", "-n", NAMESPACE, "look=again")
    eventually(lambda: world.cache("behind")["status"]["fence"] == 8, 60)
    eventually(lambda: held.digest != world.agents[0].state.caches[cache["metadata"]["uid"]].digest, 60)
    world.wait("behind", "Ready", "True")
    world.remove("behind")


def test_a_selector_that_no_agent_carries_out_is_not_accepted(world: World) -> None:
    spec = {
        "family": "infLlm",
        "infLlm": {"unitTokens": 8, "representatives": 2},
        "budget": {"tokens": 64},
        "gate": {"minConfidence": "0.9"},
    }
    quest = {"family": "quest", "quest": {"pageTokens": 16}, "budget": {"tokens": 64}}
    for name, one in (("op-inf-llm", spec), ("op-quest", quest)):
        apply(
            world.cluster,
            {
                "apiVersion": "kvtier.dev/v1alpha1",
                "kind": "KVSelector",
                "metadata": {"name": name, "namespace": NAMESPACE},
                "spec": one,
            },
        )
    refused = wait_condition(
        world.cluster, "kvselector/op-inf-llm", NAMESPACE, "Accepted", "False", reason="NotImplemented"
    )
    assert "infLlm has no estimator of omitted mass" in condition(refused, "Accepted")["message"]
    accepted = wait_condition(world.cluster, "kvselector/op-quest", NAMESPACE, "Accepted", "True")
    assert accepted["status"]["guarantee"] == "upperBound"


def test_the_pool_becomes_owned_objects_and_counts_live_agents(world: World) -> None:
    pool = wait_condition(world.cluster, f"agentpool/{POOL}", NAMESPACE, "Available", "True")
    assert (pool["status"]["desired"], pool["status"]["ready"]) == (2, 2)
    name = f"kvtier-agent-{POOL}"
    for kind in ("daemonset", "serviceaccount", "service", "rolebinding"):
        found = world.cluster.get(kind, name, "-n", NAMESPACE)
        assert found["metadata"]["ownerReferences"][0]["uid"] == pool["metadata"]["uid"], kind
    arguments = world.cluster.get("daemonset", name, "-n", NAMESPACE)["spec"]["template"]["spec"][
        "containers"
    ][0]["args"]
    assert f"--pool={NAMESPACE}/{POOL}" in arguments
    assert '--tier={"capacity":268435456,"className":"cpu-dram","medium":"cpu","reserve":0}' in arguments


def test_a_quiet_cluster_is_not_written_to(world: World) -> None:
    """Everything is looked at again (a relist), and nothing but the operator's own Lease is written."""
    apply(world.cluster, kv_cache("quiet", NAMESPACE, POOL))
    world.wait("quiet", "Ready", "True")
    eventually(world.operator.idle, 60, what="nothing is due")
    versions = _versions(world)
    before = world.operator.writes()
    done = world.operator.reconcile_everything()
    eventually(done, 60, what="every key was reconciled once more")
    assert world.operator.writes() == before
    assert _versions(world) == versions
    world.remove("quiet")


def _versions(world: World) -> dict[str, str]:
    kinds = "tierclasses,agentpools,kvcaches,kvselectors,daemonsets,controllerrevisions"
    items = world.cluster.get(kinds, "-n", NAMESPACE)["items"]
    return {f"{one['kind']}/{one['metadata']['name']}": one["metadata"]["resourceVersion"] for one in items}
