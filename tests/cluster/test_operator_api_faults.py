"""The operator before an API server that goes wrong: storms, throttling, lost answers, stale watches.

Rollouts walk from Off to Full through it, and the same holds as without faults: each agent sees each stage
once and in order, fences only grow, and the outcome is what the evidence says.
"""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from kvtier_core.release.enforcement import ReturnReason
from kvtier_operator.kube import access
from kvtier_operator.ports import Kind
from tests.cluster.faultproxy import Cut, Delay, Expire, Fault, FaultProxy, Hide, Lose, Refuse, Seen
from tests.cluster.kvtier_localplane import Cluster, eventually
from tests.cluster.operator_harness import (
    SYSTEM,
    RunningOperator,
    agent_pool,
    apply,
    install,
    kv_cache,
    operator,
    tier_class,
    wait_condition,
)
from tests.cluster.relay import Relay
from tests.cluster.rollout_fake_agent import RolloutFakeAgent
from tests.cluster.test_rollout_end_to_end import PLAN, PROBES, rollout, selector

pytestmark = pytest.mark.timeout(600)
NAMESPACE = "api-faults"
TIERS = (("gpu-sim", "8Mi"), ("cpu-dram", "16Mi"))
"""Of each cache: all of this module's lie on one agent, and stay until its end."""
STAGES = ["Shadow", "Canary", "Ramp", "Full"]


class Token:
    """Of the operator, in a file, as a kubelet keeps it: bound to a Pod, with which it ends."""

    def __init__(self, cluster: Cluster, file: Path) -> None:
        self.file = file
        self._cluster = cluster
        self._count = 0
        self.renew()

    @property
    def _pod(self) -> str:
        return f"faults-operator-{self._count}"

    def renew(self) -> None:
        self._count += 1
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": self._pod, "namespace": SYSTEM},
            "spec": {
                "serviceAccountName": "kvtier-operator",
                "containers": [{"name": "never-runs", "image": "none"}],
            },
        }
        apply(self._cluster, pod)
        token = self._cluster.service_account_token(SYSTEM, "kvtier-operator", bound_pod=self._pod)
        fresh = self.file.with_suffix(".new")
        fresh.write_text(token, encoding="utf-8")
        fresh.replace(self.file)

    def end(self) -> None:
        self._cluster.kubectl("delete", "pod", self._pod, "-n", SYSTEM, "--wait=false")


@dataclass
class World:
    cluster: Cluster
    proxy: FaultProxy
    agent: RolloutFakeAgent
    operator: RunningOperator
    token: Token

    def begin(self, name: str, **spec: Any) -> str:
        """A cache with its baseline, and a rollout on it, of which `spec` may say more; the cache's uid."""
        made = kv_cache(name, NAMESPACE, NAMESPACE, TIERS, contract={"exactness": "approximate"})
        apply(self.cluster, made)
        wait_condition(self.cluster, f"kvcache/{name}", NAMESPACE, "Ready", "True", timeout=90)
        made = rollout(name, name, **spec)
        made["metadata"]["namespace"] = NAMESPACE
        apply(self.cluster, made)
        return str(self.cluster.get("kvcache", name, "-n", NAMESPACE)["metadata"]["uid"])

    def status(self, name: str) -> dict[str, Any]:
        return dict(self.cluster.get("kvr", name, "-n", NAMESPACE).get("status") or {})

    def completes(self, name: str, uid: str, seconds: float = 240.0) -> dict[str, Any]:
        """The status of the completed rollout, having held what holds without faults."""

        def look() -> dict[str, Any] | None:
            found = self.status(name)
            return found if found.get("phase") in ("Completed", "RolledBack", "Invalid") else None

        def explain() -> str:
            """When what was tried for it, and what the server or the proxy said."""
            mine = [one for one in self.proxy.passed() if f"/{name}" in one.seen.path]
            tries = [
                f"{one.at - mine[0].at:7.1f} {one.seen.method} {one.seen.path[-40:]} {one.status}"
                for one in mine
            ]
            return "\n".join([str(self.status(name)), *tries[-60:]])

        found = eventually(look, seconds, what=f"{name} ends", on_failure=explain)
        assert found is not None and found["phase"] == "Completed", found
        seen = [stage for stage in self.agent.state.stages_of_cache[uid] if stage]
        assert list(dict.fromkeys(seen)) == STAGES
        assert seen == sorted(seen, key=STAGES.index), "a stage came back"
        cache = self.cluster.get("kvcache", name, "-n", NAMESPACE)["status"]
        assert cache["approved"]["digest"] == found["candidate"]["digest"]
        assert cache["fence"] == found["fence"]
        return found


@pytest.fixture(scope="module")
def world(control_plane: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("faults")
    install(control_plane)
    control_plane.ensure_namespace(NAMESPACE)
    apply(control_plane, tier_class("gpu-sim", "gpu"), tier_class("cpu-dram", "cpu"))
    quest = selector("quest-64", 64)
    quest["metadata"]["namespace"] = NAMESPACE
    golden = {"name": "golden", "namespace": NAMESPACE}
    plan = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": golden, "data": {"plan.json": PLAN}}
    apply(control_plane, quest, plan)
    token = Token(control_plane, folder / "token")
    with (
        # So that its file is never read again because it was due.
        patch.object(access, "TOKEN_SECONDS", 3600.0),
        FaultProxy(control_plane.url, str(control_plane.ca_file)) as proxy,
        operator(control_plane, folder, "faults", server=proxy.url, token_file=token.file) as running,
    ):
        apply(control_plane, agent_pool(NAMESPACE, NAMESPACE))
        agent = RolloutFakeAgent(
            control_plane,
            folder,
            "faults-a",
            namespace=NAMESPACE,
            pool=NAMESPACE,
            lease_seconds=6 * 3600,
            probe_digest=PROBES,
        )
        try:
            agent.start()
            yield World(control_plane, proxy, agent, running, token)
            # An approval that no agent can renew would keep the operators of other modules busy.
            for kind in ("kvrollouts", "kvcaches", "agentpools"):
                control_plane.kubectl("delete", kind, "--all", "-n", NAMESPACE, "--timeout=60s", timeout=90)
        finally:
            agent.cleanup()
            token.end()


def sometimes(share: float, seed: int, when: Callable[[Seen], bool]) -> Callable[[Seen], bool]:
    """Strikes that share of what `when` takes; the same for the same order of requests, and with the seeds
    used here one of the first of them."""
    source = random.Random(seed)
    return lambda seen: when(seen) and source.random() < share


def a_write(seen: Seen) -> bool:
    """Of anything but the operator's Lease: to lose that is a test of its own."""
    return seen.write and not seen.of("leases")


def a_watch(seen: Seen) -> bool:
    return seen.watch


def a_read(seen: Seen) -> bool:
    return seen.method == "GET" and not seen.watch and not seen.of("leases")


STORMS: dict[str, list[tuple[Callable[[Seen], bool], Any]]] = {
    "conflicts, failures and lost answers": [
        (sometimes(0.1, 2, a_write), Refuse(409, "Conflict")),
        (sometimes(0.05, 71, a_write), Refuse(500, "InternalError")),
        (sometimes(0.1, 23, a_write), Lose()),
        (sometimes(0.05, 42, a_read), Refuse(500, "InternalError")),
    ],
    "slow answers and watches that break": [
        (sometimes(0.5, 5, lambda seen: not seen.watch), Delay(0.3)),
        (a_watch, Cut(0.7)),
    ],
    "watches that expire and events that never arrive": [
        (sometimes(0.3, 6, a_watch), Expire()),
        (a_watch, Cut(1.5)),
        (sometimes(0.5, 7, a_watch), Hide(lambda event: event.get("type") == "MODIFIED")),
    ],
}


@pytest.mark.parametrize(
    "storm", list(STORMS), ids=[name.replace(" ", "-").replace(",", "") for name in STORMS]
)
def test_a_rollout_walks_through_a_storm(world: World, storm: str) -> None:
    name = f"storm-{list(STORMS).index(storm)}"
    uid = world.begin(name)
    with contextlib.ExitStack() as stack:
        faults: list[Fault] = [
            stack.enter_context(world.proxy.fault(when, action)) for when, action in STORMS[storm]
        ]
        world.proxy.cut_watches()
        world.completes(name, uid)
        assert all(fault.hits for fault in faults), "a fault that never struck shows nothing"
    assert world.agent.state.candidate(uid)


def test_throttling_is_obeyed(world: World) -> None:
    """429 with Retry-After: nothing more is written for that object until the time has passed."""
    made = kv_cache("throttled", NAMESPACE, NAMESPACE, TIERS)

    def ours(seen: Seen) -> bool:
        return seen.write and seen.path.endswith("/throttled/status")

    began = time.monotonic()
    with world.proxy.fault(ours, Refuse(429, "TooManyRequests", "2"), times=2) as fault:
        apply(world.cluster, made)
        wait_condition(world.cluster, "kvcache/throttled", NAMESPACE, "Ready", "True", timeout=90)
        assert fault.hits == 2
    tries = [one.at for one in world.proxy.passed(began) if ours(one.seen)]
    assert len(tries) > 2
    for refused, again in pairwise(tries[:3]):
        assert again - refused > 1.9, "the server asked for two seconds"


def status_of(name: str) -> Callable[[Seen], bool]:
    return lambda seen: seen.write and seen.path.endswith(f"/kvrollouts/{name}/status")


def object_of(name: str) -> Callable[[Seen], bool]:
    return lambda seen: seen.write and seen.path.endswith(f"/kvrollouts/{name}")


@pytest.mark.parametrize(
    ("name", "which"),
    [
        pytest.param("throttled-status", status_of, id="status"),
        pytest.param("throttled-object", object_of, id="finalizer"),
    ],
)
def test_a_rollout_whose_writes_are_throttled_waits_as_asked_and_completes(
    world: World, name: str, which: Callable[[str], Callable[[Seen], bool]]
) -> None:
    """429 with Retry-After on each of its first writes of a kind: no other is tried before."""
    ours, began = which(name), time.monotonic()
    with world.proxy.fault(ours, Refuse(429, "TooManyRequests", "2"), times=2) as fault:
        uid = world.begin(name)
        world.completes(name, uid)
    assert fault.hits == 2
    tries = [one for one in world.proxy.passed(began) if ours(one.seen)]
    assert [one.status for one in tries[:3]] == [429, 429, 200]
    for refused, again in pairwise(tries[:3]):
        assert again.at - refused.at > 1.9, "the server asked for two seconds"


def test_a_return_whose_status_is_throttled_is_told_to_agents_after_it_was_written(world: World) -> None:
    """An agent is told nothing under a fence that the rollout does not carry; then the return is proved."""
    name = "throttled-return"
    stages = rollout(name, name)["spec"]["stages"]
    stages[1]["minDuration"] = "10m"
    uid = world.begin(name, stages=stages)
    core = world.agent.state.enforcement(uid)

    def in_canary() -> bool:
        lease = core.lease()
        return lease is not None and lease.terms.fence.stage == "Canary"

    eventually(in_canary, 120, what="the agent serves the candidate")
    with world.proxy.fault(status_of(name), Refuse(429, "TooManyRequests", "1"), times=2) as fault:
        began = time.monotonic()
        abort = json.dumps({"spec": {"intent": {"seq": 1, "verb": "Abort", "attempt": 1}}})
        world.cluster.kubectl("patch", "kvr", name, "-n", NAMESPACE, "--type=merge", "-p", abort)
        eventually(lambda: core.lease() is None, 60, what="the candidate is revoked", interval=0.02)
        revoked = time.monotonic()
    assert fault.hits == 2
    written = [one for one in world.proxy.passed(began) if status_of(name)(one.seen) and one.status == 200]
    assert written and written[0].at <= revoked
    eventually(lambda: world.status(name)["phase"] == "RolledBack", 60, what="the return is proved")
    assert world.status(name)["rollback"]["agentsRestored"] == 1


def test_a_token_that_ends_is_replaced_without_a_change_of_leaders(world: World) -> None:
    """The API server refuses it in earnest: its Pod is gone. The file that holds it is renewed a moment
    later, and is read then, not when it was due."""
    name = "token"
    uid = world.begin(name)
    eventually(lambda: world.agent.state.candidate(uid), 120, what="the rollout has begun")
    began, leading = time.monotonic(), world.operator.operator.election
    assert leading is not None
    since = leading.leading_since()
    world.token.end()

    def refused() -> bool:
        return any(one.status == 401 for one in world.proxy.passed(began))

    # The API server may hold a token for good for ten seconds more.
    eventually(refused, 60, what="the server refuses the token", interval=0.05)
    world.token.renew()
    world.completes(name, uid)
    assert leading.leading_since() == since, "another term began"


def test_an_outage_and_an_expired_token_are_waited_out(world: World) -> None:
    """Everything is refused for longer than the operator's Lease lasts; agents fall back alone meanwhile, and
    afterwards the rollout goes on by its rules."""
    uid = world.begin("outage")
    eventually(lambda: world.agent.state.candidate(uid), 120, what="the rollout has begun")
    for refusal in (Refuse(503, "ServiceUnavailable"), Refuse(401, "Unauthorized")):
        with world.proxy.fault(lambda seen: True, refusal) as fault:
            world.proxy.cut_watches()
            eventually(lambda: not world.operator.leading(), 60, what="it stops leading")
            assert fault.hits
            eventually(lambda: not world.agent.state.candidate(uid), 120, what="it returned by itself")
        eventually(world.operator.leading, 60, what="it leads again")
    found = world.status("outage")
    assert found["phase"] in ("Progressing", "Completed"), found
    eventually(lambda: world.status("outage").get("phase") == "Completed", 240, what="outage completes")


def test_a_candidate_ends_with_its_lease_when_its_agent_cannot_be_reached(world: World) -> None:
    """The agent asks nobody, and the step goes on when the network is back."""
    name, agent = "cut-off", world.agent
    stages = rollout(name, name)["spec"]["stages"]
    stages[1]["minDuration"] = "10m"
    direct = agent.port
    with Relay(direct) as relay:
        agent.register_at(relay.port)
        try:
            uid = world.begin(name, stages=stages)
            core = agent.state.enforcement(uid)

            def in_canary() -> bool:
                lease = core.lease()
                return lease is not None and lease.terms.fence.stage == "Canary"

            def explain() -> str:
                return str(world.status(name))

            eventually(in_canary, 120, what="the agent serves the candidate", on_failure=explain)
            with relay.cut():
                eventually(lambda: core.lease() is None, 120, what="it is on the baseline")
                returned = core.returned
                assert returned is not None and returned.reason is ReturnReason.LEASE_EXPIRED
            eventually(in_canary, 240, what="the step is resumed", on_failure=explain)
            assert world.status(name)["phase"] == "Progressing"
        finally:
            agent.register_at(direct)
    for kind in ("kvr", "kvc"):
        world.cluster.kubectl("delete", kind, name, "-n", NAMESPACE, "--timeout=240s", timeout=300)


def test_a_deletion_that_no_watch_told_is_found_by_the_relist(world: World) -> None:
    made = kv_cache("vanishes", NAMESPACE, NAMESPACE, TIERS, deletion={"policy": "delete"})
    apply(world.cluster, made)
    wait_condition(world.cluster, "kvcache/vanishes", NAMESPACE, "Ready", "True", timeout=90)

    def of_it(event: dict[str, Any]) -> bool:
        return bool(event["object"].get("metadata", {}).get("name") == "vanishes")

    def known() -> bool:
        held = world.operator.operator.store.list_all(Kind.KV_CACHE, NAMESPACE)
        return "vanishes" in [one["metadata"]["name"] for one in held]

    def watched() -> bool:
        return any(one.seen.watch and one.seen.of("kvcaches") for one in world.proxy.passed(began))

    with world.proxy.fault(a_watch, Hide(of_it)):
        began = time.monotonic()
        world.proxy.cut_watches()
        # What is listed when a watch begins again has it still; later nothing but a relist tells.
        eventually(watched, 60, what="caches are watched again")
        # Its finalizer is the operator's to remove; without it no operator would be asked.
        freed = json.dumps({"metadata": {"finalizers": None}})
        world.cluster.kubectl("patch", "kvcache", "vanishes", "-n", NAMESPACE, "--type=merge", "-p", freed)
        world.cluster.kubectl("delete", "kvcache", "vanishes", "-n", NAMESPACE, "--wait=false")
        eventually(
            lambda: (
                world.cluster.kubectl("get", "kvcache", "vanishes", "-n", NAMESPACE, check=False).returncode
            ),
            60,
            what="it is gone from the server",
        )
        assert known()
        world.operator.loop.call_soon_threadsafe(world.operator.operator.relist_soon)
        eventually(lambda: not known(), 60, what="the relist has told")
