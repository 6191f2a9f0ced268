"""What the operator writes of a rollout in which nothing happens: nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvtier_operator.ports import ApiError, EventType, JsonObject, Kind, ObjectKey, PatchOp
from kvtier_operator.reconcile.kvrollout import AUDIT_WRITE_SECONDS, VERDICT_SECONDS
from kvtier_operator.revisions import read_revision
from kvtier_operator.rollout.inputs import Look
from kvtier_operator.rollout.readings import Reading
from kvtier_operator.rollout.spec import RolloutSpec
from kvtier_operator.rollout.state import RolloutState
from kvtier_operator.rollout.vocabulary import Verdict
from tests.unit.rollout.rollout_world import World

QUICK = [
    {"name": "Shadow", "minDuration": "1s"},
    {"name": "Canary", "trafficFraction": "5%", "minDuration": "1s"},
    {"name": "Full", "soak": "1s", "holdback": "2%"},
]


def slimmed(world: World) -> bool:
    """Whether the status had no room for all that there was to say."""
    gates = world.status.get("gates") or []
    return bool(gates) and not any("expectedN" in gate for gate in gates)


async def test_quiet_rollout_is_not_written() -> None:
    world = World(stages=[{"name": "Shadow", "minDuration": "1h"}, {"name": "Full", "soak": "1h"}])
    await world.until("Progressing", "Shadow")
    await world.run(30)
    before = world.api.writes
    await world.run(120)
    assert world.api.writes == before


@pytest.mark.parametrize("phase", ["Progressing", "RollingBack", "Pending"])
async def test_quiet_rollout_whose_status_has_no_room_is_not_written(phase: str) -> None:
    """What is left out for room is missing in what is read back; that is no reason to write it again."""
    gates = [
        {"name": f"output-{index}-{'x' * 57}", "metric": "outputRelativeError", "quantile": 99, "max": "0.05"}
        for index in range(14)
    ]
    template = World()
    declared = [*template.api.objects[template.rollout]["spec"]["gates"], *gates]
    stages = [{"name": "Shadow", "minDuration": "9h"}, {"name": "Full", "soak": "1h"}]
    world = World(nodes=0, gates=declared, stages=stages, leaseTTL="100s")
    for index in range(20):
        world.add_node(f"node-{index:02d}-{'n' * 240}")
    await world.until("Progressing", "Shadow")
    if phase == "Progressing":
        for sim in list(world.sims.values())[:12]:
            sim.cut_off = True
    if phase == "RollingBack":
        for sim in world.sims.values():
            sim.lie_about_baseline = "sha256:" + "0" * 64
        world.intent("Abort", 1)
    if phase == "Pending":
        world.intent("Abort", 1)
        await world.until("RolledBack")
        world.sims.clear()
        world.intent("Retry", 2, stage="ExactBaseline")
    await world.run(40)
    assert world.where[0] == phase
    assert slimmed(world) == (phase != "Pending")
    before = world.api.writes
    await world.run(120)
    assert world.api.writes == before


async def test_half_a_step_is_looked_at_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No lease is renewed before the status has the fence's number, and no watch tells of an own write."""
    world = World()
    await world.until("Progressing", "Shadow")
    swap, fence = world.api.compare_and_swap, world.cache_status["fence"]

    async def fails(key: ObjectKey, ops: Sequence[PatchOp], *, subresource: str = "status") -> JsonObject:
        if key == world.rollout and world.cache_status["fence"] != fence:
            raise ApiError(500, "InternalError", "etcd is away")
        return await swap(key, ops, subresource=subresource)

    monkeypatch.setattr(world.api, "compare_and_swap", fails)
    assert not world.woken
    with pytest.raises(ApiError, match="etcd is away"):
        await world.run(120)
    assert world.woken == [world.rollout]


async def test_a_step_costs_two_writes_and_its_gates_no_further_one() -> None:
    """The fence in the KVCache and the status that carries it; what the gates have said goes with it."""
    world = World(
        stages=[
            {"name": "Shadow", "minDuration": "5s"},
            {"name": "Canary", "trafficFraction": "5%", "minDuration": "5s"},
            {"name": "Ramp", "steps": ["10%", "50%"], "stepDuration": "5s"},
            {"name": "Full", "soak": "1h", "holdback": "2%"},
        ]
    )
    await world.until("Progressing", "Canary")
    fence, before = world.status["fence"], world.api.writes
    await world.until("Progressing", "Full")
    moves = world.status["fence"] - fence
    assert moves == 3
    assert world.api.writes - before == 2 * moves


async def test_gates_that_pass_are_written_within_some_seconds_of_a_long_step() -> None:
    world = World(stages=[{"name": "Shadow", "minDuration": "9h"}, {"name": "Full", "soak": "1h"}])
    await world.until("Progressing", "Shadow")
    before = world.api.writes
    await world.run(25)
    assert {row["verdict"] for row in world.status["gates"]} == {"Pass"}
    assert world.api.writes <= before + 1


async def test_no_revocation_waits_for_an_event() -> None:
    """An API server that takes its time with them must not keep a candidate alive."""
    world = World()
    await world.until("Progressing", "Canary")
    told: list[tuple[str, bool]] = []  # and whether a candidate was alive then
    post = world.api.event

    async def event(regarding: JsonObject, type: EventType, reason: str, message: str) -> None:
        told.append((reason, any(sim.candidate for sim in world.sims.values())))
        await post(regarding, type, reason, message)

    world.api.event = event  # type: ignore[method-assign]
    world.intent("Abort", 1)
    await world.until("RolledBack")
    assert ("RollingBack", False) in told
    assert [reason for reason, _ in told if reason != "IntentAccepted"] == ["RollingBack", "BaselineRestored"]


async def test_a_gate_that_cannot_be_read_is_written_at_once() -> None:
    world = World(stages=[{"name": "Shadow", "minDuration": "9h"}, {"name": "Full", "soak": "1h"}])
    look = world.feed.look

    async def unreadable(reading: Reading, state: RolloutState, spec: RolloutSpec, now: float) -> Look:
        found = await look(reading, state, spec, now)
        verdicts = tuple(replace(one, verdict=Verdict.PROVIDER_ERROR) for one in found.verdicts)
        return replace(found, verdicts=verdicts)

    world.feed.look = unreadable  # type: ignore[method-assign]
    await world.until("Progressing", "Shadow")
    await world.run(2)
    assert world.condition("Degraded")["reason"] == "ProviderError"


async def test_numbers_that_move_are_written_now_and_then() -> None:
    world = World(stages=[{"name": "Shadow", "minDuration": "9h"}, {"name": "Full", "soak": "1h"}])
    await world.until("Progressing", "Shadow")
    await world.run(15)
    before = world.api.writes
    look = world.feed.look

    async def moving(reading: Reading, state: RolloutState, spec: RolloutSpec, now: float) -> Look:
        found = await look(reading, state, spec, now)
        return replace(found, verdicts=tuple(replace(one, n=int(now) % 10_000) for one in found.verdicts))

    world.feed.look = moving  # type: ignore[method-assign]
    await world.run(100)
    assert 8 <= world.api.writes - before <= 11


async def test_a_forecast_alone_is_not_written_and_goes_with_the_next_number() -> None:
    """Without requests the rate falls with each second, and with it every text that names it."""
    world = World(stages=[{"name": "Shadow", "minDuration": "9h"}, {"name": "Full", "soak": "1h"}])
    look, units, rate = world.feed.look, 0, 50.0

    async def falling(reading: Reading, state: RolloutState, spec: RolloutSpec, now: float) -> Look:
        found = await look(reading, state, spec, now)
        verdicts = tuple(replace(one, n=one.n + units) for one in found.verdicts)
        return replace(found, verdicts=verdicts, requests_per_second=rate)

    world.feed.look = falling  # type: ignore[method-assign]
    await world.until("Progressing", "Shadow")
    await world.run(60)
    before, text = world.api.writes, world.condition("Feasible")["message"]
    for _ in range(6):
        rate /= 2
        await world.run(20)
    assert world.api.writes == before
    units = 7
    await world.run(20)
    assert world.api.writes > before
    assert world.condition("Feasible")["message"] != text


async def test_one_that_waits_for_another_does_not_list_all_rollouts_each_time() -> None:
    """Who begins asks the server; that it is not yet its turn, the watch cache may tell."""
    world = World(stages=[{"name": "Shadow", "minDuration": "9h"}, {"name": "Full", "soak": "1h"}])
    await world.until("Progressing", "Shadow")
    second = world.add_rollout("zebra", candidate={"selectorRef": {"name": "quest-32"}})
    original, lists = world.api.list_all, 0

    async def counted(kind: Kind, *arguments: str, **more: str) -> list[JsonObject]:
        nonlocal lists
        lists += kind is Kind.KV_ROLLOUT
        return await original(kind, *arguments, **more)

    world.api.list_all = counted  # type: ignore[method-assign]
    await world.run(30, keys=[world.rollout, second])
    assert world.status_of(second)["phase"] == "Pending"
    assert lists == 0
    world.intent("Abort", 1)
    await world.run(10, keys=[world.rollout, second])
    assert world.status_of(second)["stage"] == "Shadow"
    assert lists > 0


async def test_what_a_run_that_was_cut_off_had_not_told_the_next_one_tells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As by the deadline of a run, where many agents do not answer their revocation."""
    world = World()
    await world.until("Progressing", "Canary")
    world.intent("Abort", 1)
    sending = asyncio.Event()

    async def hangs(*_: object) -> None:
        sending.set()
        await asyncio.Event().wait()

    with monkeypatch.context() as patched:
        patched.setattr(world.operator._messenger, "send", hangs)
        running = asyncio.ensure_future(world.operator.reconcile(world.rollout))
        async with asyncio.timeout(60):
            await sending.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    told = [reason for reason, _ in world.api.events]
    assert world.status["phase"] == "RollingBack" and "RollingBack" not in told
    await world.until("RolledBack")
    told = [reason for reason, _ in world.api.events]
    assert [told.count(reason) for reason in ("IntentAccepted", "RollingBack", "BaselineRestored")] == [
        1,
        1,
        1,
    ]


async def test_no_agent_is_told_later_because_another_ones_refusal_is_an_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Events may have a store of their own, which may hang."""
    world = World()
    world.sims["node-0"].refuse = "BUDGET_EXCEEDED"
    post, send = world.api.event, world.operator._messenger.send
    under_way = 0

    async def watched(*arguments: Any) -> Any:
        nonlocal under_way
        under_way += 1
        try:
            return await send(*arguments)
        finally:
            under_way -= 1

    async def event(regarding: JsonObject, type: EventType, reason: str, message: str) -> None:
        assert not under_way, f"{reason} while agents are told"
        await post(regarding, type, reason, message)

    monkeypatch.setattr(world.operator._messenger, "send", watched)
    monkeypatch.setattr(world.api, "event", event)
    await world.run(30)
    assert "GrantRefused" in [reason for reason, _ in world.api.events]


async def test_what_is_written_before_an_agent_knows_the_candidate() -> None:
    """Finalizer and manifest, the cache's fence, the status that carries it: whoever dies in between
    leaves nothing that an agent holds and nobody can name."""
    world = World()
    await world.until("Progressing", "Shadow")
    await world.run(1)
    assert world.faults.names[:6] == [
        "patch KVRollout",
        "apply ControllerRevision",
        "patch KVCache status",
        "patch KVRollout status",
        "Grant node-0",
        "Grant node-1",
    ]
    kept = [obj for key, obj in world.api.objects.items() if key.kind is Kind.CONTROLLER_REVISION]
    named = {world.status[manifest]["digest"] for manifest in ("baseline", "candidate")}
    assert {read_revision(obj).digest for obj in kept} == named


async def approved_and_told_insufficient() -> World:
    """An approved rollout whose status was written as a look was incomplete, for another reason: an agent
    that did not answer answers again."""
    world = World(stages=QUICK)
    await world.until("Completed")
    await world.run(30)
    world.sims["node-1"].cut_off = True
    world.feed.default = Verdict.INSUFFICIENT
    await world.run(3)
    world.sims["node-1"].cut_off = False
    await world.run(3)
    assert world.status["verdict"] == "Insufficient"
    assert world.condition("Degraded")["status"] == "False"
    return world


async def test_an_approved_candidates_verdict_is_told_within_a_minute_and_not_after_ten() -> None:
    world = await approved_and_told_insufficient()
    before = world.api.writes
    world.feed.default = Verdict.PASS
    await world.run(VERDICT_SECONDS - 5)
    assert world.api.writes == before
    await world.run(15)
    assert world.status["verdict"] == "Pass"
    await world.run(AUDIT_WRITE_SECONDS + 60)
    assert world.api.writes == before + 1, "and then nobody has more to say"


async def test_a_look_at_an_approved_candidate_that_is_incomplete_for_a_moment_is_not_written() -> None:
    """However long nothing was written: ten minutes later it would have to be taken back."""
    world = World(stages=QUICK)
    await world.until("Completed")
    await world.run(AUDIT_WRITE_SECONDS + 30)
    before = world.api.writes
    for _ in range(4):
        world.feed.default = Verdict.INSUFFICIENT
        await world.run(VERDICT_SECONDS / 2)
        world.feed.default = Verdict.PASS
        await world.run(10)
    assert world.api.writes == before


async def test_what_nobody_has_looked_at_for_a_while_is_not_told_as_if_it_had_stayed_so() -> None:
    world = await approved_and_told_insufficient()
    before = world.api.writes
    look = world.feed.look

    async def of_another_window(reading: Reading, state: RolloutState, spec: RolloutSpec, now: float) -> Look:
        found = await look(reading, state, spec, now)
        return replace(found, opening_fence=found.opening_fence - 1)

    world.feed.default = Verdict.PASS
    await world.run(10)
    world.feed.look = of_another_window  # type: ignore[method-assign]
    await world.run(VERDICT_SECONDS)
    world.feed.look = look  # type: ignore[method-assign]
    await world.run(VERDICT_SECONDS - 10)
    assert world.api.writes == before
    await world.run(20)
    assert world.status["verdict"] == "Pass" and world.api.writes == before + 1
