"""The operator dies right after any effect was accepted, which is also before the next one is sent: the next
operator goes on from the objects alone, to the same outcome, with the same write budget."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from kvtier_operator.ports import JsonObject, ObjectKey, PatchOp, PatchVerb
from kvtier_operator.reconcile.kvrollout import KVRolloutReconciler
from kvtier_operator.rollout.vocabulary import Verdict
from tests.unit.rollout.rollout_world import World, held

STAGES = [
    {"name": "Shadow", "minDuration": "2s"},
    {"name": "Canary", "trafficFraction": "5%", "minDuration": "2s"},
    {"name": "Ramp", "steps": ["10%", "50%"], "stepDuration": "2s"},
    {"name": "Full", "soak": "2s"},
]
EXTRA_WRITES = 4
"""What a crash may cost: a number burned, a swap and a status that take the next one for the same step, and
the write that was lost, once more."""


@dataclass(frozen=True)
class Outcome:
    """Where it all ends. Fences and shares are left out: a crash burns numbers, nothing else."""

    phase: str
    stage: str
    cause: str
    approved: str
    baseline: str
    holders: tuple[str, ...]
    restored: tuple[int, int]
    finalizers: int


async def completes(world: World) -> None:
    await settle(world, "Completed")


async def fails_in_ramp(world: World) -> None:
    await settle(world, "Progressing", "Ramp")
    world.feed.gates["output"] = Verdict.FAIL
    await settle(world, "RolledBack")


async def is_aborted_in_canary(world: World) -> None:
    await settle(world, "Progressing", "Canary")
    if (world.status.get("lastIntent") or {}).get("seq") != 1:
        world.intent("Abort", 1)
    await settle(world, "RolledBack")


async def is_edited_in_canary(world: World) -> None:
    await settle(world, "Progressing", "Canary")
    world.edit(candidate={"selectorRef": {"name": "quest-32"}})
    await settle(world, "Completed")


async def becomes_the_baseline(world: World) -> None:
    placement = {"policy": "headGroups", "headGroups": {"stagingBytes": "8Mi"}}
    world.edit(candidate={"overrides": {"placement": placement}}, gates=[])
    await settle(world, "Completed")
    world.converge()


async def is_revoked_after_completion(world: World) -> None:
    await settle(world, "Completed")
    world.feed.gates["output"] = Verdict.FAIL
    await settle(world, "RolledBack")


async def is_deleted_in_canary(world: World) -> None:
    await settle(world, "Progressing", "Canary")
    world.api.ask_to_delete(world.rollout)
    for _ in range(20):
        if world.rollout not in world.api.objects:
            return
        await world.pass_()
        world.clock.seconds += 1
    raise AssertionError("the finalizer is still there")


async def settle(world: World, phase: str, stage: str = "") -> None:
    for _ in range(120):
        await world.pass_()
        if world.where[0] == phase and stage in ("", world.where[1]):
            return
        world.renew()
        world.clock.seconds += 1
    raise AssertionError(f"not {phase} {stage}: {world.status}")


def outcome(world: World) -> Outcome:
    gone = world.rollout not in world.api.objects
    status: dict[str, Any] = {} if gone else world.status
    rollback = status.get("rollback") or {}
    finalizers = [] if gone else world.api.objects[world.rollout]["metadata"].get("finalizers") or []
    return Outcome(
        phase="Gone" if gone else status["phase"],
        stage="" if gone else status["stage"],
        cause=rollback.get("cause", ""),
        approved=(world.cache_status.get("approved") or {}).get("digest", ""),
        baseline=world.cache_status["baseline"]["digest"],
        holders=tuple(held(world)),
        restored=(rollback.get("agentsRestored", 0), rollback.get("agentsTotal", 0)),
        finalizers=len(finalizers),
    )


Scenario = Callable[[World], Awaitable[None]]
SCENARIOS: list[Scenario] = [
    completes,
    becomes_the_baseline,
    fails_in_ramp,
    is_aborted_in_canary,
    is_edited_in_canary,
    is_revoked_after_completion,
    is_deleted_in_canary,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
async def test_killed_at_every_effect(scenario: Scenario) -> None:
    nodes = 2 if scenario is fails_in_ramp else 1
    reference = World(nodes, stages=STAGES)
    await scenario(reference)
    expected, effects, writes = outcome(reference), reference.faults.count, reference.api.writes
    assert effects > 10
    for n in range(effects + 1):
        world = World(nodes, stages=STAGES)
        world.faults.kill_at, world.faults.after = max(1, n), n > 0
        await scenario(world)
        where = f"killed after effect {n} of {reference.faults.names}"
        assert world.faults.count >= n, where
        assert outcome(world) == expected, where
        assert world.api.writes <= writes + EXTRA_WRITES, where


@pytest.mark.parametrize(
    "scenario", [completes, becomes_the_baseline, fails_in_ramp], ids=lambda scenario: scenario.__name__
)
async def test_dead_for_longer_than_a_lease_at_every_effect(scenario: Scenario) -> None:
    """Agents return alone, the next operator finds LeaseExpired, resumes the same step, and still arrives."""
    reference = World(stages=STAGES)
    await scenario(reference)
    for n in range(2, reference.faults.count + 1, 2):
        world = World(stages=STAGES)
        world.dead_for = 15.0
        world.faults.kill_at = n
        await scenario(world)
        assert outcome(world) == outcome(reference), reference.faults.names[n - 1]


async def test_nothing_is_sent_before_it_is_written() -> None:
    """Every grant and revocation carries a fence that both objects carried at that moment."""
    world = World(stages=STAGES)
    for sim in world.sims.values():
        for verb in ("grant", "revoke"):
            original = getattr(sim, verb)

            def checked(request: Any, original: Any = original) -> Any:
                assert request.fence.value == world.status["fence"] == world.cache_status["fence"]
                assert request.fence.stage == world.status["stage"]
                return original(request)

            setattr(sim, verb, checked)
    await fails_in_ramp(world)


async def test_two_operators_at_once_are_harmless() -> None:
    """Both act on every tick; the number decides who was first, and the rollout still arrives."""
    world = World(stages=STAGES)
    first = world.operator
    world.restart()
    second = world.operator
    for turn in range(120):
        world.operator = first if turn % 2 else second
        await world.pass_()
        if world.where[0] == "Completed":
            break
        world.renew()
        world.clock.seconds += 0.5
    assert world.where[0] == "Completed"
    assert len(held(world)) == 2


EFFECTS = ("apply", "compare_and_swap", "delete", "grant", "revoke")


class Stopping:
    """A port of the older operator, which waits before each of its effects."""

    def __init__(self, port: Any, wait: Callable[[], Awaitable[None]]) -> None:
        self._port, self._wait = port, wait

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._port, name)
        if name not in EFFECTS:
            return call

        async def later(*given: Any, **named: Any) -> Any:
            await self._wait()
            return await call(*given, **named)

        return later


async def stopped_before(n: int, harm: bool) -> bool:
    """An operator stops before its n-th effect, another works meanwhile, then the first goes on with what it
    had decided. Whether it came so far at all. `harm`: it is seen after the first has stopped."""
    world = World(stages=STAGES)
    deps, effects, numbers, written = world.deps, 0, list[int](), list[int]()
    world.restart()
    newer, swap = world.operator, world.api.compare_and_swap

    async def watched(key: ObjectKey, ops: Sequence[PatchOp], *, subresource: str = "status") -> JsonObject:
        answer = await swap(key, ops, subresource=subresource)
        if key == world.cache_key and (PatchVerb.ADD, "/status/fence") in [(op.verb, op.path) for op in ops]:
            numbers.append(answer["status"]["fence"])
        if key == world.rollout and "fence" in (answer.get("status") or {}):
            written.append(answer["status"]["fence"])
        return answer

    async def meanwhile() -> None:
        nonlocal effects
        effects += 1
        if effects != n:
            return
        world.operator = newer
        if harm:
            world.feed.gates["output"] = Verdict.FAIL
        for _ in range(8):
            await world.pass_()
            world.renew()
            world.clock.seconds += 1

    world.api.compare_and_swap = watched  # type: ignore[method-assign]
    api: Any = Stopping(world.api, meanwhile)
    agents: Any = Stopping(deps.agents, meanwhile)
    world.operator = KVRolloutReconciler(replace(deps, api=api, agents=agents), feed=world.feed)
    for _ in range(120):
        await world.pass_()
        if world.where[0] == "RolledBack" or (world.where[0] == "Completed" and not (harm and effects >= n)):
            break
        world.renew()
        world.clock.seconds += 1
    reached = effects >= n
    assert world.where[0] == ("RolledBack" if harm and reached else "Completed")
    assert numbers == sorted(set(numbers)), "a number was used twice"
    assert written == sorted(written), "a status was written over by who had been overtaken"
    for sim in world.sims.values():
        fences = [fence for fence, _, _ in sim.grants]
        assert fences == sorted(fences), "an agent obeyed who had been overtaken"
        assert len({(fence, stage) for fence, stage, _ in sim.grants}) == len(set(fences))
    assert len(held(world)) == (0 if harm and reached else 2)
    return reached


@pytest.mark.parametrize("harm", [False, True], ids=["it-goes-on", "it-returns"])
async def test_an_overtaken_operator_that_goes_on_before_any_effect_takes_nothing_back(harm: bool) -> None:
    """As if no gate had kept it: its numbers are refused by the API server, and by agents."""
    n = 1
    while await stopped_before(n, harm):
        n += 1
    assert n > 20
