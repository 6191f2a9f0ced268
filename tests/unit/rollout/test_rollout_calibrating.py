"""Without a declared design effect the first windows of a step measure; it is opened again for free."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from kvtier_evidence.metrics import Kind
from kvtier_operator.rollout.inputs import Look
from kvtier_operator.rollout.moves import current_step
from kvtier_operator.rollout.readings import Reading
from kvtier_operator.rollout.spec import RolloutSpec
from kvtier_operator.rollout.state import DesignEffect, RolloutState
from kvtier_operator.rollout.vocabulary import Verdict
from tests.unit.rollout.rollout_world import ScriptedFeed, World


@dataclass
class Measuring(ScriptedFeed):
    """Gates of blocks pass once the window has their design effect; ratio gates need a threshold before."""

    blocks: int = 0
    n: int = 600

    async def look(self, reading: Reading, state: RolloutState, spec: RolloutSpec, now: float) -> Look:
        said = await super().look(reading, state, spec, now)
        window = state.window
        assert window is not None
        known = {one.gate for one in window.effects if one.blocks >= 200}
        measured = [
            gate
            for gate in spec.gates_of(current_step(state, spec))
            if gate.metric.kind in (Kind.QUANTILE, Kind.RATIO, Kind.MEAN)
        ]
        unknown = {gate.name for gate in measured if gate.name not in known}
        verdicts = tuple(
            replace(item, verdict=Verdict.INSUFFICIENT, reason="DesignEffectUnknown", n=self.n)
            if item.name in unknown and item.required
            else item
            for item in said.verdicts
        )
        counted = [
            gate
            for gate in measured
            if gate.metric.kind is not Kind.RATIO or gate.name in dict(window.pair_thresholds)
        ]
        effects = tuple(DesignEffect(gate.name, "1.2", self.blocks, "20") for gate in counted)
        ratios = {gate.name: "0.03" for gate in measured if gate.metric.kind is Kind.RATIO}
        return replace(
            said, verdicts=verdicts, effects=effects, pair_thresholds=tuple(sorted(ratios.items()))
        )


def world_of(**changes: Any) -> tuple[World, Measuring]:
    world = World()
    feed = Measuring(**changes)
    world.feed = feed
    world.restart()
    return world, feed


async def test_a_rollout_without_a_declared_design_effect_completes() -> None:
    world, feed = world_of(blocks=300)
    await world.until("Completed", "Full", limit=400)
    assert feed.looks > 5
    assert world.status["digestBudget"]["attemptsUsed"] == 1, "measuring spends nothing"


async def test_a_step_is_opened_again_once_for_blocks_and_once_more_for_a_threshold() -> None:
    world, _ = world_of(blocks=300)
    await world.until("Progressing", "Shadow")
    first = world.status["window"]["openingFence"]
    await world.until("Progressing", "Canary")
    entered = [event for event in world.api.events if "measured what" in str(event)]
    assert len([event for event in entered if "Shadow" in str(event)]) == 1
    assert world.status["window"]["openingFence"] > first
    await world.until("Progressing", "Ramp", limit=200)
    entered = [event for event in world.api.events if "measured what" in str(event)]
    assert len([event for event in entered if "Canary" in str(event)]) == 2


@pytest.mark.parametrize(("blocks", "n"), [(199, 600), (300, 100)], ids=["few blocks", "few requests"])
async def test_too_little_opens_nothing(blocks: int, n: int) -> None:
    world, _ = world_of(blocks=blocks, n=n)
    await world.until("Progressing", "Shadow")
    opened = world.status["window"]["openingFence"]
    await world.run(30)
    stage = world.status["stage"]
    if blocks < 200:
        assert (stage, world.status["window"]["openingFence"]) == ("Shadow", opened)
    else:
        assert stage == "Canary", "Shadow has no ratio gate"
        opened = world.status["window"]["openingFence"]
        await world.run(30)
        assert (world.status["stage"], world.status["window"]["openingFence"]) == ("Canary", opened)


async def test_a_harmful_candidate_is_not_given_another_window() -> None:
    world, feed = world_of(blocks=300)
    await world.until("Progressing", "Shadow")
    feed.gates = {"quality": Verdict.FAIL}
    await world.until("RolledBack", limit=60)
    assert world.status["rollback"]["cause"] == "GateFailed"
