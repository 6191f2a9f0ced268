"""The loop that keeps leases alive: in time, in one call per agent, and only while both fences agree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvtier.v1 import common_pb2 as common
from kvtier.v1 import control_pb2 as control
from kvtier_operator.agents.errors import ERROR_KEY, error_for
from kvtier_operator.agents.renewal import LeaseRenewer
from kvtier_operator.ports import CACHE_FINALIZER, AgentError, AgentUnreachable, NodeView, NotLeader
from kvtier_operator.rollout.status import StatusUnreadable
from tests.unit.rollout.rollout_world import World, copied, held


async def granted() -> World:
    world = World()
    await world.until("Progressing", "Canary")
    await world.pass_()
    assert len(held(world)) == 2
    return world


async def beat(world: World, renewer: LeaseRenewer, seconds: float) -> int:
    """Lets only the renewals work; returns how often they looked."""
    end, looks = world.clock.seconds + seconds, 0
    while world.clock.seconds < end:
        world.clock.seconds += await renewer.tick()
        looks += 1
    return looks


async def test_leases_outlive_their_ttl_without_any_reconcile() -> None:
    world = await granted()
    await beat(world, LeaseRenewer(world.deps), 60)
    assert held(world) == ["node-0", "node-1"]


async def test_one_call_for_each_agent_at_a_third_of_the_ttl() -> None:
    world = await granted()
    calls: list[str] = []
    original = world.deps.agents.renew

    async def counted(node: Any, request: Any, **options: Any) -> Any:
        calls.append(node.name)
        return await original(node, request, **options)

    world.deps.agents.renew = counted  # type: ignore[method-assign]
    await beat(world, LeaseRenewer(world.deps), 30)
    assert 9 <= calls.count("node-0") <= 11
    assert calls.count("node-0") == calls.count("node-1")


async def test_nothing_is_renewed_once_the_fence_has_moved() -> None:
    """The number moved and nothing else did: the operator died between the two writes."""
    world = await granted()
    renewer = LeaseRenewer(world.deps)
    await beat(world, renewer, 5)
    world.cache_status["fence"] += 1
    await beat(world, renewer, 11)
    assert held(world) == []


@pytest.mark.parametrize(
    "state", ["RolledBack", "Deleted", "MadeAgain", "CacheDeleted", "CacheLeaves", "CacheWithoutStatus"]
)
async def test_nothing_is_renewed_for_what_has_ended(state: str) -> None:
    """By what the server says: the read cache has not heard of it yet."""
    world = await granted()
    before = copied(world.api.objects[world.rollout])
    world.deps.store.list_all = lambda kind, namespace="": [before]  # type: ignore[method-assign]
    metadata = world.api.objects[world.rollout]["metadata"]
    if state == "RolledBack":
        world.status.update(phase="RolledBack", stage="ExactBaseline")
        metadata["resourceVersion"] = "900"
    elif state == "Deleted":
        world.api.ask_to_delete(world.rollout)
    elif state == "MadeAgain":
        metadata["uid"] = "uid-of-another"
    elif state == "CacheDeleted":
        del world.api.objects[world.cache_key]
    elif state == "CacheLeaves":
        world.api.objects[world.cache_key]["metadata"]["finalizers"] = [CACHE_FINALIZER]
        world.api.ask_to_delete(world.cache_key)
    else:
        del world.api.objects[world.cache_key]["status"]
    await beat(world, LeaseRenewer(world.deps), 11)
    assert held(world) == []


@pytest.mark.parametrize("how", ["cordoned", "dead"])
async def test_who_is_out_of_service_is_not_renewed(how: str) -> None:
    """Though it would take it: on a Node that is to be emptied, or whose agent's Lease has ended."""
    world = await granted()
    members = world.deps.fleet.members

    def without_first(pool_namespace: str, pool_name: str) -> list[NodeView]:
        first, *rest = members(pool_namespace, pool_name)
        return [replace(first, cordoned=how == "cordoned", live=how != "dead"), *rest]

    world.deps.fleet.members = without_first  # type: ignore[method-assign]
    await beat(world, LeaseRenewer(world.deps), 11)
    assert held(world) == ["node-1"]


@pytest.mark.parametrize(
    ("fails", "woken"),
    [
        pytest.param(AgentUnreachable("n", "UNAVAILABLE", "no answer"), False, id="silent"),
        pytest.param(AgentError("n", "BOOT_ID_MISMATCH", "restarted", 0.0, {}), True, id="restarted"),
        pytest.param(NotLeader(), False, id="another-leads"),
        pytest.param(common.LEASE_EXPIRED, True, id="the-lease-has-ended"),
        pytest.param(common.FENCE_STALE, False, id="another-fence-is-on-its-way"),
    ],
)
async def test_whom_a_renewal_that_fails_wakes(fails: Any, woken: bool) -> None:
    world = await granted()
    world.woken.clear()

    async def failing(node: Any, request: control.RenewRequest, **_: Any) -> control.RenewResponse:
        if isinstance(fails, Exception):
            raise fails
        answer = control.RenewResponse()
        for item in request.items:
            answer.results.add(cache=item.cache).error.reason = fails
        return answer

    world.deps.agents.renew = failing  # type: ignore[method-assign]
    await LeaseRenewer(world.deps).tick()
    assert (world.rollout in world.woken) is woken


async def test_silent_agent_is_tried_again_before_its_lease_ends() -> None:
    world = await granted()
    renewer = LeaseRenewer(world.deps)
    await beat(world, renewer, 4)
    world.sims["node-0"].cut_off = True
    await beat(world, renewer, 5)
    world.sims["node-0"].cut_off = False
    await beat(world, renewer, 20)
    assert held(world) == ["node-0", "node-1"]


async def test_unreadable_status_ends_its_own_leases_and_nobody_elses() -> None:
    """Of another version, or edited by hand: the loop and the other rollouts go on, and it is told once."""
    world = await granted()
    broken = world.add_rollout("broken")
    world.api.objects[broken]["status"] = {"phase": "Hovering", "stage": "Canary", "fence": 9}
    woken: list[object] = []
    object.__setattr__(world.deps, "wake", woken.append)
    renewer = LeaseRenewer(world.deps)
    await beat(world, renewer, 30)
    assert held(world) == ["node-0", "node-1"]
    assert woken == [broken]


async def test_status_that_becomes_unreadable_is_not_renewed_until_it_is_mended() -> None:
    world = await granted()
    kept = world.status.get("carry")
    renewer = LeaseRenewer(world.deps)
    await beat(world, renewer, 5)
    world.status["carry"] = {"cells": [{"gate": "output"}]}
    world.api.objects[world.rollout]["metadata"]["resourceVersion"] = "900"
    await beat(world, renewer, 11)
    assert held(world) == []
    world.status["carry"] = kept
    world.api.objects[world.rollout]["metadata"]["resourceVersion"] = "901"
    await world.until("Progressing", "Canary", limit=30)
    await world.pass_()
    await beat(world, renewer, 30)
    assert held(world) == ["node-0", "node-1"]


async def test_reconcile_tells_once_of_an_unreadable_status_and_fails() -> None:
    world = await granted()
    world.status["carry"] = {"cells": [{"gate": "output"}]}
    world.api.objects[world.rollout]["metadata"]["resourceVersion"] = "900"
    for _ in range(3):
        with pytest.raises(StatusUnreadable):
            await world.operator.reconcile(world.rollout)
    told = [text for reason, text in world.api.events if reason == "StatusUnreadable"]
    assert len(told) == 1
    assert "window" in told[0]


async def test_who_does_not_lead_renews_nothing() -> None:
    world = await granted()

    def refuse() -> None:
        raise NotLeader

    world.deps.leader.check = refuse  # type: ignore[method-assign]
    await beat(world, LeaseRenewer(world.deps), 11)
    assert held(world) == []


async def test_ended_lease_wakes_the_rollout() -> None:
    world = await granted()
    woken: list[object] = []
    world.clock.seconds += 11
    object.__setattr__(world.deps, "wake", woken.append)
    await LeaseRenewer(world.deps).tick()
    assert world.rollout in woken


def test_refusals_are_typed_and_everything_else_is_unreachable() -> None:
    detail = common.ErrorDetail(reason=common.FENCE_STALE, message="below 9", retry_after_ms=1500)
    detail.facts["highest_fence"] = "9"
    typed = error_for("n", "FAILED_PRECONDITION", "", [(ERROR_KEY, detail.SerializeToString())])
    assert isinstance(typed, AgentError)
    assert (typed.reason, typed.retry_after_seconds, typed.facts) == (
        "FENCE_STALE",
        1.5,
        {"highest_fence": "9"},
    )
    assert isinstance(error_for("n", "UNAVAILABLE", "refused", []), AgentUnreachable)
    broken = error_for("n", "UNKNOWN", "", [(ERROR_KEY, b"\xff\xff\xff")])
    assert isinstance(broken, AgentUnreachable)


async def test_a_rollout_that_has_not_changed_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a thousand, each would be parsed twenty times a second."""
    world = await granted()
    renewer = LeaseRenewer(world.deps)
    await renewer.tick()
    parsed: list[Any] = []
    monkeypatch.setattr("kvtier_operator.agents.renewal.from_status", lambda status: parsed.append(status))
    for _ in range(5):
        await renewer.tick()
    assert parsed == []
    world.edit(progressDeadline="2h")
    await renewer.tick()
    assert len(parsed) == 1
