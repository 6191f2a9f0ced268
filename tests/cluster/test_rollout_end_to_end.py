"""Rollouts on a real API server: the operator as shipped, agents of the real protocol, made-up traffic."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvtier_operator.ports import ROLE_LABEL
from tests.cluster.kvtier_localplane import Cluster, eventually
from tests.cluster.operator_harness import (
    RunningOperator,
    agent_pool,
    apply,
    condition,
    install,
    kv_cache,
    operator,
    start_operator,
    tier_class,
    wait_condition,
)
from tests.cluster.rollout_fake_agent import RolloutFakeAgent

pytestmark = pytest.mark.timeout(600)
NAMESPACE = "kvr"
POOL = "kvr"
PLAN = json.dumps({"prompts": [{"digest": "a"}, {"digest": "b"}]})
UNKNOWN_QUERY = {"name": "slo", "metric": "external", "max": "0.5", "query": "quantiles(errors over requests"}
PROBES = f"sha256:{hashlib.sha256(PLAN.encode()).hexdigest()}"


@dataclass
class World:
    cluster: Cluster
    folder: Path
    agents: tuple[RolloutFakeAgent, ...]
    operator: RunningOperator
    caches: list[str] = field(default_factory=list)

    def cache(self, name: str) -> str:
        """Makes a cache and waits for its baseline."""
        # Small, since the caches of all tests of this module lie on the same two nodes.
        small = (("gpu-sim", "8Mi"), ("cpu-dram", "16Mi"))
        made = kv_cache(name, NAMESPACE, POOL, small, contract={"exactness": "approximate"})
        apply(self.cluster, made)
        wait_condition(self.cluster, f"kvcache/{name}", NAMESPACE, "Ready", "True", timeout=60)
        return str(self.get("kvcache", name)["metadata"]["uid"])

    def get(self, kind: str, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.cluster.get(f"{kind}/{name}", "-n", NAMESPACE)
        return found

    def status(self, name: str) -> dict[str, Any]:
        return dict(self.get("kvrollout", name).get("status") or {})

    def reach(self, name: str, phase: str, stage: str = "", timeout: float = 180.0) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            status = self.status(name)
            good = status.get("phase") == phase and stage in ("", status.get("stage"))
            return status if good else None

        def explain() -> str:
            shown = self.cluster.kubectl("get", "kvr", name, "-n", NAMESPACE, "-o", "yaml", check=False)
            return shown.stdout

        found = eventually(look, timeout, what=f"{name} is {phase} {stage}", on_failure=explain)
        assert found is not None
        return found

    def intent(self, name: str, verb: str, seq: int, attempt: int = 1, **more: Any) -> None:
        patch = {"spec": {"intent": {"seq": seq, "verb": verb, "attempt": attempt, **more}}}
        self.cluster.kubectl("patch", "kvr", name, "-n", NAMESPACE, "--type=merge", "-p", json.dumps(patch))

    def harm(self, *, bad_output: bool = False) -> None:
        for agent in self.agents:
            agent.state.harm.bad_output = bad_output

    def holders(self, uid: str) -> list[str]:
        return [agent.state.node for agent in self.agents if agent.state.candidate(uid)]

    def lease_fences(self, uid: str) -> list[int]:
        """The fence of each agent's lease; nothing for an agent without one."""
        leases = [agent.state.enforcement(uid).lease() for agent in self.agents]
        return [lease.terms.fence.value for lease in leases if lease is not None]

    def events(self, name: str) -> list[str]:
        about = ("--field-selector", f"involvedObject.name={name}")
        return [event["reason"] for event in self.cluster.get("events", "-n", NAMESPACE, *about)["items"]]

    def told(self, name: str, *reasons: str) -> None:
        """Waits for the Events: they are posted after the status that they tell of."""
        eventually(lambda: set(reasons) <= set(self.events(name)), 60, what=f"{name} is told {reasons}")


def selector(name: str, tokens: int) -> dict[str, Any]:
    return {
        "apiVersion": "kvtier.dev/v1alpha1",
        "kind": "KVSelector",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "family": "quest",
            "quest": {},
            "budget": {"tokens": tokens, "capPolicy": "truncate"},
            "persistentRows": {"sink": 4, "recent": 8},
        },
    }


def rollout(name: str, cache: str, selector_name: str = "quest-64", **spec: Any) -> dict[str, Any]:
    small = {"quantile": 75, "minSamples": 30, "designEffect": "1"}
    stage = {"minSamples": 30}
    return {
        "apiVersion": "kvtier.dev/v1alpha1",
        "kind": "KVRollout",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "cacheRef": {"name": cache},
            "candidate": {"selectorRef": {"name": selector_name}},
            "stages": [
                {"name": "Shadow", "minDuration": "1s", "sampleFraction": "100%", **stage},
                {"name": "Canary", "trafficFraction": "50%", "minDuration": "1s", **stage},
                {"name": "Ramp", "steps": ["50%"], "stepDuration": "1s", **stage},
                {"name": "Full", "soak": "1s", "holdback": "50%", **stage},
            ],
            "gates": [
                {"name": "output", "metric": "outputRelativeError", "max": "0.5", **small},
                {"name": "tail", "metric": "tpotRatio", "max": "2", **small},
                {
                    "name": "stall",
                    "metric": "exposedStallFraction",
                    "max": "0.5",
                    "minSamples": 30,
                    "designEffect": "1",
                },
                {
                    "name": "quality",
                    "metric": "taskScoreDrop",
                    "max": "0.25",
                    "probeRef": {"name": "golden"},
                    "scope": "ProbeSet",
                },
            ],
            "evidence": {"settle": "1s", "warmup": "0s"},
            "leaseTTL": "12s",
            "progressDeadline": "10m",
            **spec,
        },
    }


GATES = rollout("x", "x")["spec"]["gates"]


@pytest.fixture(scope="module")
def world(control_plane: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("kvr")
    install(control_plane)
    control_plane.ensure_namespace(NAMESPACE)
    apply(control_plane, tier_class("gpu-sim", "gpu"), tier_class("cpu-dram", "cpu"))
    apply(control_plane, selector("quest-64", 64), selector("quest-32", 32))
    golden = {"name": "golden", "namespace": NAMESPACE}
    apply(
        control_plane,
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": golden, "data": {"plan.json": PLAN}},
    )
    agents: list[RolloutFakeAgent] = []
    with operator(control_plane, folder, "kvr") as running:
        apply(control_plane, agent_pool(POOL, NAMESPACE))
        try:
            for node in ("kvr-a", "kvr-b"):
                agent = RolloutFakeAgent(
                    control_plane,
                    folder,
                    node,
                    namespace=NAMESPACE,
                    pool=POOL,
                    lease_seconds=6 * 3600,
                    probe_digest=PROBES,
                )
                agents.append(agent)
                agent.start()
            yield World(control_plane, folder, tuple(agents), running)
        finally:
            for agent in agents:
                agent.cleanup()


@pytest.fixture(autouse=True)
def harmless(world: World) -> None:
    world.harm()


def test_a_passing_rollout_is_approved(world: World) -> None:
    uid = world.cache("passes")
    apply(world.cluster, rollout("passing", "passes"))
    status = world.reach("passing", "Completed", "Full")
    cache = world.get("kvcache", "passes")
    assert cache["status"]["approved"]["digest"] == status["candidate"]["digest"]
    assert cache["status"]["baseline"]["digest"] == status["baseline"]["digest"]
    assert cache["status"]["fence"] == status["fence"]
    assert status["verdict"] == "Pass"
    assert world.holders(uid) == ["kvr-a", "kvr-b"]
    stages = [stage for stage in world.agents[0].state.stages if stage]
    assert list(dict.fromkeys(stages)) == ["Shadow", "Canary", "Ramp", "Full"]
    world.told("passing", "StageEntered", "Completed")
    shown = world.cluster.kubectl("get", "kvr", "passing", "-n", NAMESPACE, "-o", "wide").stdout
    assert status["candidate"]["short"] in shown
    assert "Completed" in shown
    spans = [span for span in world.operator.spans.get_finished_spans() if span.name == "rollout.stage"]
    trace = status["traceID"]
    assert any(f"{span.context.trace_id:032x}" == trace for span in spans if span.context)
    # An approval goes on for longer than one lease: it is renewed.
    lease = world.agents[0].state.enforcement(uid).lease()
    assert lease is not None
    eventually(
        lambda: (world.agents[0].state.enforcement(uid).lease() or lease).expires_ns > lease.expires_ns,
        60,
        what="the approved candidate's lease is renewed",
    )


def test_a_failing_rollout_returns_to_the_proved_baseline(world: World) -> None:
    uid = world.cache("fails")
    world.harm(bad_output=True)
    apply(world.cluster, rollout("failing", "fails"))
    world.cluster.kubectl(
        "wait", "kvr/failing", "-n", NAMESPACE, "--for=condition=BaselineRestored", "--timeout=180s"
    )
    found = world.status("failing")
    assert found["phase"] == "RolledBack"
    rollback = found["rollback"]
    assert (rollback["cause"], rollback["gate"], rollback["fromStage"]) == ("GateFailed", "output", "Shadow")
    assert (rollback["agentsRestored"], rollback["agentsTotal"]) == (2, 2)
    assert rollback["targetDigest"] == world.get("kvcache", "fails")["status"]["baseline"]["digest"]
    assert world.holders(uid) == []
    world.told("failing", "RollingBack")
    shown = world.cluster.kubectl("get", "kvr", "failing", "-n", NAMESPACE, "-o", "wide").stdout
    assert "GateFailed" in shown


def test_abort_in_canary_outranks_and_is_answered(world: World) -> None:
    uid = world.cache("aborts")
    stages = rollout("x", "x")["spec"]["stages"]
    stages[1]["minDuration"] = "10m"
    apply(world.cluster, rollout("aborting", "aborts", stages=stages))
    world.reach("aborting", "Progressing", "Canary")
    world.intent("aborting", "Abort", 1)
    status = world.reach("aborting", "RolledBack")
    assert status["rollback"]["cause"] == "IntentAbort"
    assert status["lastIntent"]["result"] == "Accepted"
    assert world.holders(uid) == []
    world.intent("aborting", "Promote", 2, expectedStage="Canary", expectedStep=0)
    eventually(
        lambda: world.status("aborting")["lastIntent"]["seq"] == 2, 60, what="the late intent is answered"
    )
    assert world.status("aborting")["lastIntent"]["result"] == "NotApplicable"


def test_a_second_rollout_waits_and_names_the_first(world: World) -> None:
    world.cache("busy")
    stages = rollout("x", "x")["spec"]["stages"]
    stages[0]["minDuration"] = "10m"
    apply(world.cluster, rollout("first", "busy", stages=stages))
    world.reach("first", "Progressing", "Shadow")
    apply(world.cluster, rollout("second", "busy", "quest-32"))
    world.reach("second", "Pending", "Off")
    busy = condition(world.get("kvrollout", "second"), "Progressing")
    assert busy["reason"] == "CacheBusy"
    assert "first" in busy["message"]
    world.intent("first", "Abort", 1)
    world.reach("first", "RolledBack")
    world.reach("second", "Completed")


def test_deletion_in_canary_revokes_first(world: World) -> None:
    uid = world.cache("deleted")
    stages = rollout("x", "x")["spec"]["stages"]
    stages[1]["minDuration"] = "10m"
    apply(world.cluster, rollout("leaving", "deleted", stages=stages))
    world.reach("leaving", "Progressing", "Canary")
    eventually(lambda: len(world.holders(uid)) == 2, 60, what="both agents hold the candidate")
    world.cluster.kubectl("delete", "kvr", "leaving", "-n", NAMESPACE, "--timeout=180s")
    assert world.holders(uid) == []


@pytest.mark.parametrize(
    ("name", "patch", "options"),
    [
        pytest.param(
            "unread",
            {"status": {"schedule": {"dueAt": "2030-01-01T00:00:00Z", "lateBy": "soon"}}},
            ["--subresource=status"],
            id="status",
        ),
        pytest.param("unrun", {"spec": {"gates": [*GATES, UNKNOWN_QUERY]}}, [], id="spec"),
    ],
)
def test_what_this_version_cannot_read_is_let_go_when_it_is_deleted_and_revoked_first(
    world: World, name: str, patch: dict[str, Any], options: list[str]
) -> None:
    """Within less than its lease, so agents were asked. The schema takes both, as that of a newer one may."""
    uid = world.cache(name)
    stages = rollout("x", "x")["spec"]["stages"]
    stages[1]["minDuration"] = "10m"
    apply(world.cluster, rollout(name, name, stages=stages, leaseTTL="5m"))
    world.reach(name, "Progressing", "Canary")
    eventually(lambda: len(world.holders(uid)) == 2, 60, what="both agents hold the candidate")
    edit = ("patch", "kvr", name, "-n", NAMESPACE, "--type=merge", "-p", json.dumps(patch))
    world.cluster.kubectl(*edit, *options)
    if options:
        world.told(name, "StatusUnreadable")
    world.cluster.kubectl("delete", "kvr", name, "-n", NAMESPACE, "--timeout=120s", timeout=150)
    assert world.holders(uid) == []
    world.told(name, "RollingBack")


def test_a_finished_rollout_goes_after_its_time(world: World) -> None:
    uid = world.cache("brief")
    stages = rollout("x", "x")["spec"]["stages"]
    stages[0]["minDuration"] = "10m"
    apply(world.cluster, rollout("brief", "brief", stages=stages, ttlAfterFinished="3s"))
    world.reach("brief", "Progressing", "Shadow")
    world.intent("brief", "Abort", 1)
    world.cluster.kubectl("wait", "kvr/brief", "-n", NAMESPACE, "--for=delete", "--timeout=180s", timeout=200)
    assert world.holders(uid) == []
    assert world.get("kvcache", "brief")["status"]["baseline"]["digest"]


def test_an_edited_spec_is_brought_by_a_rollout_and_becomes_the_baseline(world: World) -> None:
    """An exact candidate: no gate is declared, and that its outputs are the baseline's is waited for."""
    uid = world.cache("edited")
    before = world.get("kvcache", "edited")["status"]["baseline"]["digest"]
    placement = {"placement": {"policy": "headGroups", "headGroups": {"stagingBytes": "4Mi"}}}
    patch = json.dumps({"spec": placement})
    world.cluster.kubectl("patch", "kvc", "edited", "-n", NAMESPACE, "--type=merge", "-p", patch)
    wait_condition(
        world.cluster, "kvcache/edited", NAMESPACE, "SpecApplied", "False", reason="RolloutRequired"
    )
    gates = [gate for gate in rollout("x", "x")["spec"]["gates"] if gate["name"] in ("tail", "stall")]
    apply(world.cluster, rollout("brings", "edited", candidate={"fromCacheSpec": True}, gates=gates))
    status = world.reach("brings", "Completed", "Full")
    assert status["candidate"]["class"] == "exact"
    assert {"outputMismatches", "illegalFallbacks"} <= {gate["name"] for gate in status["gates"]}
    wait_condition(world.cluster, "kvcache/edited", NAMESPACE, "SpecApplied", "True", reason="Applied")
    verified = wait_condition(world.cluster, "kvcache/edited", NAMESPACE, "BaselineVerified", "True")
    assert verified["status"]["baseline"]["digest"] == status["candidate"]["digest"] != before
    assert "approved" not in verified["status"]
    assert world.holders(uid) == []
    selected = f"{ROLE_LABEL}=baseline"
    kept = world.cluster.get("controllerrevision", "-n", NAMESPACE, "-l", selected)["items"]
    newest = max((one for one in kept if one["metadata"]["name"].startswith("edited-")), key=_revision)
    assert newest["data"]["digest"] == status["candidate"]["digest"]


def _revision(obj: dict[str, Any]) -> int:
    return int(obj["revision"])


def test_a_candidate_with_other_tiers_needs_room_and_then_becomes_the_baseline(world: World) -> None:
    """And the next one returns to it."""
    uid = world.cache("tiers")
    gates = [gate for gate in rollout("x", "x")["spec"]["gates"] if gate["name"] in ("tail", "stall")]

    def tiers(memory: str) -> dict[str, Any]:
        budgets = (("gpu-sim", "4Mi", "resident"), ("cpu-dram", memory, "backing"))
        named = [{"tierClassName": name, "budget": size, "role": role} for name, size, role in budgets]
        return {"candidate": {"overrides": {"tiers": named}}, "gates": gates}

    apply(world.cluster, rollout("resizes", "tiers", **tiers("100Gi")))
    wait_condition(
        world.cluster, "kvrollout/resizes", NAMESPACE, "Feasible", "False", reason="NoRoomBeside", timeout=90
    )
    told = condition(world.get("kvrollout", "resizes"), "Feasible")["message"]
    assert "kvr-a: tier cpu-dram has" in told and str(100 << 30) in told
    assert world.holders(uid) == []

    patch = json.dumps({"spec": tiers("20Mi")})
    world.cluster.kubectl("patch", "kvr", "resizes", "-n", NAMESPACE, "--type=merge", "-p", patch)
    status = world.reach("resizes", "Completed", "Full")
    digest = status["candidate"]["digest"]
    verified = wait_condition(
        world.cluster, "kvcache/tiers", NAMESPACE, "BaselineVerified", "True", timeout=90
    )
    assert verified["status"]["baseline"]["digest"] == digest != status["baseline"]["digest"]

    stages = rollout("x", "x")["spec"]["stages"]
    stages[1]["minDuration"] = "10m"
    apply(world.cluster, rollout("again", "tiers", stages=stages, **tiers("24Mi")))
    world.reach("again", "Progressing", "Canary")
    world.intent("again", "Abort", 1)
    back = world.reach("again", "RolledBack")["rollback"]
    assert (back["targetDigest"], back["agentsRestored"]) == (digest, 2)
    assert world.holders(uid) == []


def test_bounds_of_transfers_are_a_candidate_and_from_then_on_the_baselines(world: World) -> None:
    """An edit of them is taken at once before, and asks for a rollout afterwards."""
    uid = world.cache("bounded")
    gates = [gate for gate in rollout("x", "x")["spec"]["gates"] if gate["name"] in ("tail", "stall")]
    bounds = {"queue": 4, "policy": "earliestDeadline"}
    overrides = {"overrides": {"admission": bounds}}
    apply(world.cluster, rollout("bounds", "bounded", candidate=overrides, gates=gates))
    status = world.reach("bounds", "Completed", "Full")
    digest = status["candidate"]["digest"]
    assert status["candidate"]["class"] == "exact" and digest != status["baseline"]["digest"]
    told = wait_condition(
        world.cluster, "kvcache/bounded", NAMESPACE, "SpecApplied", "False", reason="RolloutRequired"
    )
    assert "admission" in condition(told, "SpecApplied")["message"]
    assert told["status"]["baseline"]["digest"] == digest
    assert world.holders(uid) == []
    eventually(
        lambda: [agent.state.admissions.get(uid) for agent in world.agents] == [(4, "earliestDeadline")] * 2,
        60,
        what="both agents act on the bounds",
    )
    patch = json.dumps({"spec": {"admission": bounds}})
    world.cluster.kubectl("patch", "kvc", "bounded", "-n", NAMESPACE, "--type=merge", "-p", patch)
    wait_condition(world.cluster, "kvcache/bounded", NAMESPACE, "SpecApplied", "True", reason="Applied")


def test_an_operator_killed_in_canary_is_followed_by_one_that_resumes(world: World) -> None:
    """Last in this module: it ends the module's operator and goes on with another."""
    uid = world.cache("killed")
    stages = rollout("x", "x")["spec"]["stages"]
    stages[1]["minDuration"] = "20s"
    apply(world.cluster, rollout("survivor", "killed", stages=stages))
    before = world.reach("survivor", "Progressing", "Canary")
    # Not Shadow's lease, which they hold until then: losing that one would say nothing about this step.
    eventually(
        lambda: world.lease_fences(uid) == [before["fence"]] * 2, 60, what="both agents hold Canary's lease"
    )
    world.operator.stop()
    eventually(lambda: world.holders(uid) == [], 60, what="the agents returned to the baseline alone")
    world.operator = start_operator(world.cluster, world.folder, "kvr-next")
    try:
        eventually(world.operator.leading, 60, what="the next operator leads")
        status = world.reach("survivor", "Completed")
        world.told("survivor", "LeaseExpired")
        assert status["traceID"] == before["traceID"]
        assert status["fence"] > before["fence"]
    finally:
        world.operator.stop()
