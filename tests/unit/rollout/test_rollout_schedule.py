"""Time and rest: ticks that were missed, the deadline that nothing moves, and a cache that is suspended."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvtier_crds.quantity import parse_duration
from kvtier_operator.agents.recent import RecentAgents
from kvtier_operator.metrics import Metrics
from kvtier_operator.ports import AgentTarget, Requeue
from kvtier_operator.reconcile.kvrollout import KVRolloutReconciler
from kvtier_operator.rollout.beats import PoolBeats, next_beat
from kvtier_operator.rollout.vocabulary import Verdict
from tests.unit.rollout.rollout_world import World, copied, held

TICK = 10.0 / 6


def suspend(world: World, on: bool = True) -> None:
    obj = copied(world.api.objects[world.cache_key])
    obj["spec"]["suspend"] = on
    world.api.put(obj)


async def test_ticks_that_were_missed_run_once_and_the_grid_stays() -> None:
    world = World(leaseTTL="60s")
    world.feed.default = Verdict.INSUFFICIENT
    await world.until("Progressing", "Shadow")
    await world.run(25)
    looks, due = world.feed.looks, world.operator._kept["uid-quest"].schedule
    assert due is not None
    world.clock.seconds += 27.0
    for _ in range(5):
        await world.pass_()
    after = world.operator._kept["uid-quest"].schedule
    assert world.feed.looks == looks + 1
    assert after is not None
    assert after.late_by == pytest.approx(world.clock.seconds - due.due_at, abs=1e-3)
    assert after.due_at > world.clock.seconds
    assert (after.due_at - due.due_at) % 10.0 == pytest.approx(0.0, abs=1e-3)


async def test_a_late_look_is_written_with_how_late_it_was() -> None:
    world = World(leaseTTL="60s")
    world.feed.default = Verdict.INSUFFICIENT
    await world.until("Progressing", "Shadow")
    await world.run(25)
    due = world.operator._kept["uid-quest"].schedule
    assert due is not None
    world.clock.seconds = due.due_at + 27.0
    # What cannot be read is written at once, and its look's times with it.
    world.feed.default = Verdict.PROVIDER_ERROR
    await world.pass_()
    told = world.status["schedule"]
    assert set(told) >= {"dueAt", "ranAt", "lateBy", "deadlineAt"}
    assert parse_duration(told["lateBy"], "lateBy") == pytest.approx(27.0, abs=0.01)


async def test_each_look_is_told_once_with_how_late_it_was() -> None:
    """In parts of the interval of 10 s, also those that write nothing."""
    world = World(leaseTTL="60s")
    world.feed.default = Verdict.INSUFFICIENT
    told: list[float] = []
    world.deps = replace(world.deps, looked=told.append)
    world.operator = KVRolloutReconciler(world.deps, feed=world.feed)
    await world.until("Progressing", "Shadow")
    await world.run(25)
    due = world.operator._kept["uid-quest"].schedule
    assert due is not None and len(told) >= 2
    told.clear()
    writes = len(world.api.events)
    world.clock.seconds = due.due_at + 27.0
    for _ in range(5):
        await world.pass_()
    assert told == [pytest.approx(2.7, abs=1e-3)]
    assert len(world.api.events) == writes
    # To the next operator what it reads in the status is no look, nor the grid that its first is late by.
    told.clear()
    world.operator = KVRolloutReconciler(world.deps, feed=world.feed)
    await world.pass_()
    assert told == []
    metrics = Metrics(CollectorRegistry())
    metrics.looked(2.7)
    shown = generate_latest(metrics.registry).decode()
    assert 'kvtier_operator_look_lateness_intervals_bucket{le="5.0"} 1.0' in shown
    assert 'kvtier_operator_look_lateness_intervals_bucket{le="2.0"} 0.0' in shown


@pytest.mark.parametrize("what", ["pause", "edit", "resume", "crash-loop"])
async def test_the_deadline_is_absolute(what: str) -> None:
    """Neither a pause, nor an edit of the gates, nor a step that is opened again moves it, nor an agent that
    starts and starts again."""
    world = World(progressDeadline="4m")
    world.feed.default = Verdict.INSUFFICIENT
    await world.until("Progressing", "Shadow")
    began, until = world.clock.seconds, world.status["schedule"]["deadlineAt"]
    # Or a deadline that counts from the step's last opening could not be told from this one.
    await world.run(60)
    if what == "pause":
        world.intent("Pause", 1)
    elif what == "edit":
        gates = [dict(gate) for gate in world.api.objects[world.rollout]["spec"]["gates"]]
        gates[0]["max"] = "0.07"
        world.edit(gates=gates)
    elif what == "resume":
        world.clock.seconds += 15

    async def run(seconds: float) -> None:
        end = world.clock.seconds + seconds
        while world.clock.seconds < end:
            if what == "crash-loop":
                world.sims["node-1"].boot()
            await world.run(min(3.0, end - world.clock.seconds))

    await run(20)
    assert world.status["schedule"]["deadlineAt"] == until
    await run(began + 230 - world.clock.seconds)
    assert "rollback" not in world.status
    await run(20)
    assert world.status["rollback"]["cause"] == "DeadlineExceeded"


async def test_a_shorter_wait_is_due_before_the_next_tick() -> None:
    world = World()
    await world.until("Progressing", "Shadow")
    outcome: Any = await world.pass_()
    assert 0 < outcome.after_seconds <= TICK + 1e-3


class TestSuspended:
    """No node is changed: nothing begins and nothing goes on, but what does harm still returns."""

    async def test_nothing_begins(self) -> None:
        world = World()
        suspend(world)
        await world.run(10)
        assert world.where[:2] == ("Pending", "Off")
        assert world.condition("Progressing")["reason"] == "CacheSuspended"
        assert all(sim.grants == [] for sim in world.sims.values())
        suspend(world, on=False)
        await world.until("Progressing", "Shadow", limit=30)

    async def test_a_passing_step_is_held_with_its_leases(self) -> None:
        world = World()
        await world.until("Progressing", "Canary")
        await world.run(3)
        suspend(world)
        await world.run(60)
        assert world.where == ("Progressing", "Canary", 0)
        assert held(world) == ["node-0", "node-1"]
        found = world.condition("Progressing")
        assert (found["status"], found["reason"]) == ("False", "CacheSuspended")
        suspend(world, on=False)
        await world.until("Progressing", "Ramp", limit=30)

    async def test_a_quiet_suspended_rollout_is_not_written(self) -> None:
        world = World()
        await world.until("Progressing", "Canary")
        suspend(world)
        await world.run(15)
        before = world.api.writes
        await world.run(5)
        assert world.api.writes <= before + 1

    async def test_an_agent_that_restarts_meanwhile_is_granted_nothing(self) -> None:
        world = World()
        await world.until("Progressing", "Canary")
        await world.run(3)
        suspend(world)
        world.sims["node-0"].boot()
        await world.run(10)
        assert held(world) == ["node-1"]

    @pytest.mark.parametrize(
        ("stage", "what", "holders"),
        [
            pytest.param(stage, what, holders, id=f"{stage}-{name}")
            for what, holders, name, stages in [
                ("pause", ["node-0", "node-1", "node-2"], "a pause", ["Canary"]),
                ("edit", ["node-0", "node-1", "node-2"], "an edit of the spec", ["Canary", "Completed"]),
                ("fence", ["node-0", "node-1", "node-2"], "a fence that moved", ["Canary", "Completed"]),
                ("cordon", ["node-1", "node-2"], "a cordon", ["Canary", "Completed"]),
                ("expiry", ["node-1", "node-2"], "a lease that ended", ["Canary", "Completed"]),
            ]
            for stage in stages
        ],
    )
    async def test_who_holds_it_keeps_it_whatever_needs_another_fence(
        self, stage: str, what: str, holders: list[str]
    ) -> None:
        world = World(nodes=3)
        await (world.until(stage) if stage == "Completed" else world.until("Progressing", stage))
        await world.run(3)
        suspend(world)
        spent = world.status["digestBudget"]
        granted = len(world.sims["node-0"].grants)
        if what == "pause":
            world.intent("Pause", 1)
        elif what == "edit":
            world.edit(leaseTTL="20s")
        elif what == "fence":
            world.cache_status["fence"] += 3
        elif what == "cordon":
            world.sims["node-0"].cordoned = True
        else:
            world.sims["node-0"].cut_off = True
            await world.run(11)
            world.sims["node-0"].cut_off = False
        await world.run(40)
        assert held(world) == holders
        if "node-0" not in holders:
            assert len(world.sims["node-0"].grants) == granted
            assert world.status["digestBudget"] == spent
        suspend(world, on=False)
        world.sims["node-0"].cordoned = False
        await world.run(10)
        assert held(world) == ["node-0", "node-1", "node-2"]

    async def test_a_lease_that_ended_returns_where_that_is_declared(self) -> None:
        world = World(onLeaseExpired="RollBack")
        await world.until("Progressing", "Canary")
        await world.run(3)
        suspend(world)
        world.sims["node-0"].cut_off = True
        await world.run(10.5)
        world.sims["node-0"].cut_off = False
        await world.until("RolledBack", limit=30)
        assert world.status["rollback"]["cause"] == "LeaseExpired"

    async def test_harm_returns_all_the_same(self) -> None:
        world = World()
        await world.until("Progressing", "Canary")
        suspend(world)
        world.feed.gates["output"] = Verdict.FAIL
        await world.until("RolledBack", limit=30)
        assert held(world) == []

    async def test_a_promotion_by_hand_is_refused_and_says_why(self) -> None:
        world = World()
        await world.until("Progressing", "Canary")
        suspend(world)
        world.intent("Promote", 1)
        await world.run(3)
        assert world.status["lastIntent"]["result"] == "NotApplicable"
        assert "suspended" in world.status["lastIntent"]["message"]

    async def test_an_abort_is_obeyed(self) -> None:
        world = World()
        await world.until("Progressing", "Canary")
        suspend(world)
        world.intent("Abort", 1)
        await world.until("RolledBack", limit=30)


async def test_who_ends_a_look_says_what_the_next_one_will_ask_and_when() -> None:
    world = World(leaseTTL="60s")
    world.feed.default = Verdict.INSUFFICIENT
    await world.until("Progressing", "Shadow")
    await world.run(25)
    schedule = world.operator._kept["uid-quest"].schedule
    reading, due_at = world.feed.expected[-1]
    assert schedule is not None and reading is not None
    assert due_at == schedule.due_at > world.clock.seconds
    assert (reading.fence.value, reading.key.rollout_uid) == (world.status["fence"], "uid-quest")
    assert [node.name for node in reading.nodes] == sorted(world.sims) and not reading.unopened
    world.intent("Abort", 1)
    await world.until("RolledBack")
    assert world.feed.expected[-1][0] is None, "its window is closed"


async def test_who_waits_to_begin_comes_behind_its_pools_beats_by_answers_that_others_got() -> None:
    world = World()
    world.edit(candidate={"selectorRef": {"name": "absent"}})
    asked: list[str] = []
    said = world.deps.agents.get_state

    async def get_state(node: AgentTarget, cache_uid: str = "", **how: Any) -> Any:
        asked.append(node.name)
        return await said(node, cache_uid, **how)

    world.deps.agents.get_state = get_state  # type: ignore[method-assign]
    agents = RecentAgents(world.deps.agents, world.clock)
    world.deps = replace(world.deps, agents=agents)
    world.operator = KVRolloutReconciler(world.deps, feed=world.feed)
    await world.pass_()
    assert world.says("Pending")
    share = PoolBeats(world.deps.store).share("serving", cache_pool(world))
    for _ in range(3):
        outcome = await world.pass_()
        assert isinstance(outcome, Requeue)
        world.clock.seconds += outcome.after_seconds
        behind = world.clock.seconds - next_beat(share, 10.0, world.clock.seconds - 1.0)
        assert behind == pytest.approx(0.5, abs=0.02)
    # Somebody else has asked on that beat.
    for target in [member.target for member in world.deps.fleet.members("serving", cache_pool(world))]:
        await agents.recent_state(target, "another", 0.1, for_all=True)
    asked.clear()
    world.clock.seconds += 1.0
    await world.pass_()
    assert asked == []
    # What it waited for is there: nothing begins by what was told to others.
    world.edit(candidate={"selectorRef": {"name": "quest-64"}})
    await world.pass_()
    assert sorted(set(asked)) == sorted(world.sims) and world.says("Progressing")


def cache_pool(world: World) -> str:
    return str(world.api.objects[world.cache_key]["spec"]["poolRef"]["name"])
