"""Feasible says before the start, and while it goes on, what evidence the rest takes and whether it fits."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from kvtier_operator.ports import Kind, ObjectKey
from kvtier_operator.rollout.feed import MIN_RATE_SECONDS
from kvtier_operator.rollout.foresight import StepNeed, foresee, step_needs
from kvtier_operator.rollout.inputs import Look
from kvtier_operator.rollout.readings import Reading
from kvtier_operator.rollout.spec import RolloutSpec, parse_spec
from kvtier_operator.rollout.state import RolloutState
from kvtier_operator.rollout.vocabulary import Verdict
from tests.unit.rollout.rollout_world import World, copied

HOUR = 3600.0
NEEDS = (
    StepNeed("Shadow", 36_000.0, "output", 600.0),
    StepNeed("Canary", 360_000.0, "tail", 600.0),
    StepNeed("Full", 0.0, "", 2 * HOUR),
)


@pytest.mark.parametrize(
    ("rate", "spent", "slow", "says"),
    [
        pytest.param(10.0, 0.0, False, "about 13 h of the 24 h left, at 10 requests/s", id="in-time"),
        pytest.param(10.0, 12 * HOUR, True, "about 13 h of the 12 h left", id="late-by-what-is-spent"),
        pytest.param(1.0, 0.0, True, "about 110 h of the 24 h left, at 1 requests/s", id="too-slow"),
        pytest.param(1000.0, 0.0, False, "Shadow ~36k 10 min", id="never-less-than-the-step-lasts"),
        pytest.param(
            0.0, 0.0, False, "needs 5 requests/s in the blast radius to end within 24 h", id="unknown"
        ),
        pytest.param(
            0.0, 22.5 * HOUR, True, "the steps alone take 2.3 h, 1.5 h are left", id="no-rate-helps"
        ),
    ],
)
def test_what_is_said(rate: float, spent: float, slow: bool, says: str) -> None:
    told = foresee(NEEDS, rate=rate, spent=spent, deadline=24 * HOUR, was_slow=False)
    assert told.slow is slow
    assert says in told.message
    for name in ("Shadow ~36k", "(output)", "Canary ~360k", "(tail)"):
        assert name in told.message


def test_slow_stays_slow_until_there_is_room() -> None:
    """Rates swing; a condition must not."""
    deadline = 14 * HOUR
    assert not foresee(NEEDS, rate=10.0, spent=0.0, deadline=deadline, was_slow=False).slow
    assert foresee(NEEDS, rate=10.0, spent=0.0, deadline=deadline, was_slow=True).slow
    assert not foresee(NEEDS, rate=20.0, spent=0.0, deadline=deadline, was_slow=True).slow


def test_gate_that_leaves_no_room_is_named() -> None:
    needs = (StepNeed("Shadow", 0.0, "", 60.0), StepNeed("Canary", math.inf, "tail", 60.0, "its limit"))
    told = foresee(needs, rate=100.0, spent=0.0, deadline=24 * HOUR, was_slow=False)
    assert told.slow
    assert "Canary: gate tail can never pass" in told.message


@pytest.mark.parametrize(
    ("stage", "changes", "says"),
    [
        (
            "Shadow",
            {"sampleFraction": "0%"},
            "Shadow: gate output can never pass: no request is answered twice",
        ),
        (
            "Canary",
            {"sampleFraction": "100%"},
            "Canary: gate tail can never pass: every request is answered twice, which leaves none",
        ),
        (
            "Full",
            {"holdback": "0%"},
            "Full: gate tail can never pass: no request is left on the baseline to compare with",
        ),
        ("Full", {"holdback": "0%", "sampleFraction": "1%"}, "no request is left on the baseline"),
    ],
    ids=["compares-none", "times-none", "holds-none-back", "holds-none-back-and-compares"],
)
async def test_a_step_without_what_a_gate_counts_is_said_before_the_start(
    stage: str, changes: dict[str, str], says: str
) -> None:
    world = World()
    stages = [
        {**one, **changes} if one["name"] == stage else one
        for one in copied(world.api.objects[world.rollout]["spec"]["stages"])
    ]
    world = World(stages=stages)
    await world.pass_()
    found = world.condition("Feasible")
    assert (found["status"], found["reason"]) == ("True", "EvidenceSlow")
    assert says in found["message"]


def test_every_step_is_planned_with_its_own_fraction_and_a_retry_takes_more() -> None:
    world = World()
    spec = parse_spec(world.api.objects[world.rollout]["spec"])
    needs = step_needs(spec, 1)
    assert [one.label for one in needs] == ["Shadow", "Canary", "Ramp step 0", "Ramp step 1", "Full"]
    assert step_needs(spec, 1, spec.ladder[2]) == needs[2:]
    again = step_needs(spec, 2)
    assert again[0].requests > needs[0].requests
    assert all(later.requests >= first.requests for first, later in zip(needs, again, strict=True))
    assert all(one.least_seconds == 20.0 for one in needs)


async def test_feasible_carries_the_forecast_before_the_start() -> None:
    world = World(progressDeadline="30h")
    world.feed.default = Verdict.INSUFFICIENT
    first = world.rollout
    second = world.add_rollout("zebra", progressDeadline="30h")
    await world.run(3, keys=[first, second])
    assert world.status_of(second)["phase"] == "Pending"
    feasible = world.condition("Feasible", second)
    assert (feasible["status"], feasible["reason"]) == ("True", "Forecast")
    assert "requests/s in the blast radius to end within 30 h" in feasible["message"]
    assert "Shadow ~" in feasible["message"]
    assert "Full ~" in feasible["message"]


def with_rate(world: World, rate: float) -> None:
    """As a window of evidence tells it: not while it is young."""
    original = world.feed.look

    async def look(reading: Reading, state: RolloutState, spec: RolloutSpec, now: float) -> Look:
        assert state.window is not None
        told = rate if now - state.window.opened_at >= MIN_RATE_SECONDS else 0.0
        return replace(await original(reading, state, spec, now), requests_per_second=told)

    world.feed.look = look  # type: ignore[method-assign]


async def test_evidence_that_comes_too_slowly_is_said_and_told_once() -> None:
    world = World(progressDeadline="30h")
    world.feed.default = Verdict.INSUFFICIENT
    with_rate(world, 0.5)
    await world.until("Progressing", "Shadow")
    await world.run(60)
    feasible = world.condition("Feasible")
    assert (feasible["status"], feasible["reason"]) == ("True", "EvidenceSlow")
    assert "at 0.5 requests/s" in feasible["message"]
    told = [text for reason, text in world.api.events if reason == "EvidenceSlow"]
    assert told == [feasible["message"]]
    before = world.api.writes
    await world.run(60)
    assert world.api.writes == before


async def test_a_step_that_begins_does_not_forget_the_rate() -> None:
    """Its own window is too young to tell; what the one before told still holds."""
    world = World(
        progressDeadline="30h",
        stages=[
            {"name": "Shadow", "minDuration": "40s", "minSamples": 30},
            {"name": "Canary", "trafficFraction": "5%", "minDuration": "40s"},
            {"name": "Full", "soak": "40s", "holdback": "2%"},
        ],
    )
    with_rate(world, 0.5)
    await world.until("Progressing", "Canary")
    await world.run(5)
    feasible = world.condition("Feasible")
    assert feasible["reason"] == "EvidenceSlow"
    assert "at 0.5 requests/s: Canary ~" in feasible["message"]
    await world.until("Completed")
    assert [reason for reason, _ in world.api.events].count("EvidenceSlow") == 1


async def test_traffic_that_stops_is_not_forecast_by_the_rate_of_old() -> None:
    world = World(progressDeadline="30h")
    world.feed.default = Verdict.INSUFFICIENT
    with_rate(world, 0.5)
    await world.until("Progressing", "Shadow")
    await world.run(60)
    with_rate(world, 0.0)
    await world.run(60)
    assert "needs " in world.condition("Feasible")["message"]


async def test_steps_that_are_behind_are_not_counted_any_more() -> None:
    world = World(progressDeadline="30h")
    with_rate(world, 100.0)
    await world.until("Progressing", "Canary")
    await world.run(15)
    message = world.condition("Feasible")["message"]
    assert "Shadow" not in message
    assert "Canary ~" in message
    await world.until("Completed")
    assert world.condition("Feasible")["reason"] == "Feasible"


@pytest.mark.parametrize(("prompts", "waits"), [(526, True), (527, False)])
async def test_probe_set_that_is_too_small_for_a_population_is_not_feasible(
    prompts: int, waits: bool
) -> None:
    world = World()
    gates = [dict(gate) for gate in world.api.objects[world.rollout]["spec"]["gates"]]
    quality = next(gate for gate in gates if gate["metric"] == "taskScoreDrop")
    quality |= {"scope": "Population", "max": "0.01"}
    world.edit(gates=gates)
    plan = world.api.objects[ObjectKey(Kind.CONFIG_MAP, "serving", quality["probeRef"]["name"])]
    rows = ", ".join(f'{{"digest": "p{index}"}}' for index in range(prompts))
    plan["data"]["plan.json"] = f'{{"prompts": [{rows}]}}'
    await world.run(3)
    if not waits:
        assert world.where[:2] == ("Progressing", "Shadow")
        return
    feasible = world.condition("Feasible")
    assert (feasible["status"], feasible["reason"]) == ("False", "ProbeSetTooSmall")
    assert "526 prompts" in feasible["message"]
    assert "takes 527" in feasible["message"]
