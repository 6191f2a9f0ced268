"""The machine against its reference for a few seconds, and the reference against machines that are wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvtier_operator.rollout import holding, machine
from kvtier_operator.rollout.inputs import Inputs
from kvtier_operator.rollout.state import RolloutState
from tests.unit.rollout import machine_fuzz
from tests.unit.rollout.machine_fuzz import SEQUENCE, Broken, run

STEPS = 1600


def test_nothing_differs_in_a_slice_of_all_seeds() -> None:
    seen = run(seed=7, steps=STEPS)
    assert seen["passes"] > STEPS
    assert seen["killed"] > 3
    assert sum(count for name, count in seen.items() if name.startswith("ended ")) == STEPS // SEQUENCE
    often = [event for event in machine_fuzz.EVENTS if seen[event.__name__]]
    assert len(often) >= len(machine_fuzz.EVENTS) - 2


def test_a_seed_replays_its_run() -> None:
    assert run(seed=3, steps=100) == run(seed=3, steps=100)


def without_harm(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(holding, "failed_gate", lambda state, inputs: None)


def promoting_while_paused(patch: pytest.MonkeyPatch) -> None:
    original = holding._plan_on

    def wrong(state: RolloutState, inputs: Inputs, spec: Any) -> Any:
        onward = holding._onward(state, inputs, spec) if holding._ready(state, inputs) else None
        return onward or original(state, inputs, spec)

    patch.setattr(holding, "_plan_on", wrong)


def believing_any_intent(patch: pytest.MonkeyPatch) -> None:
    original = machine.judge_intent
    patch.setattr(
        machine,
        "judge_intent",
        lambda state, intent, **more: original(replace(state, attempt=intent.attempt), intent, **more),
    )


def resuming_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(holding, "MAX_RESUMES", 99)


def obeying_what_it_was_created_with(patch: pytest.MonkeyPatch) -> None:
    original = machine.judge_intent

    def wrong(state: RolloutState, intent: Any, **more: Any) -> Any:
        return original(state, intent, **{**more, "created_with": False})

    patch.setattr(machine, "judge_intent", wrong)


def obeying_whatever_the_spec_is(patch: pytest.MonkeyPatch) -> None:
    original = machine.judge_intent

    def wrong(state: RolloutState, intent: Any, **more: Any) -> Any:
        return original(state, intent, **{**more, "spec_error": ""})

    patch.setattr(machine, "judge_intent", wrong)


def not_saying_what_was_read(patch: pytest.MonkeyPatch) -> None:
    """As if only a rollout that moves told of the spec that it follows."""
    original = machine.with_conditions

    def wrong(state: RolloutState, inputs: Inputs) -> RolloutState:
        told = original(state, inputs)
        return told if state.holds_candidate else replace(told, observed_generation=1)

    patch.setattr(machine, "with_conditions", wrong)


@pytest.mark.parametrize(
    ("mistake", "seed"),
    [
        pytest.param(without_harm, 1, id="without-harm"),
        pytest.param(promoting_while_paused, 26, id="promoting-while-paused"),
        pytest.param(believing_any_intent, 24, id="believing-any-intent"),
        pytest.param(resuming_for_ever, 14, id="resuming-for-ever"),
        pytest.param(obeying_what_it_was_created_with, 1, id="obeying-what-it-was-created-with"),
        pytest.param(obeying_whatever_the_spec_is, 1, id="obeying-whatever-the-spec-is"),
        pytest.param(not_saying_what_was_read, 1, id="not-saying-what-was-read"),
    ],
)
def test_a_wrong_machine_is_found(
    monkeypatch: pytest.MonkeyPatch, mistake: Callable[[pytest.MonkeyPatch], None], seed: int
) -> None:
    """Soon, from a seed that is known to meet it; a later one meets it as well, in more steps."""
    mistake(monkeypatch)
    with pytest.raises(Broken, match="seed"):
        run(seed=seed, steps=20_000)
