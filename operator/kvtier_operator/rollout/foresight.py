"""How many requests and hours the rest of a rollout will need, as the condition Feasible says it.

Pure over a spec and a rate. Nothing waits for a forecast and no verdict depends on one. It must not know how
the rate was found.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from kvtier_evidence.budgets import alpha_promote
from kvtier_evidence.metrics import Kind, Scope
from kvtier_evidence.plan import min_prompts, need
from kvtier_operator.rollout.spec import RolloutSpec, Step

HOUR = 3600.0
STILL_SLOW = 0.8
"""Once slow, a rollout stays slow until it needs less than this share of its deadline: rates swing."""


@dataclass(frozen=True)
class StepNeed:
    """requests: of the blast radius in both arms, until every required gate passes (median); infinite when
    one of them never will. gate: the one that takes longest; empty when the step's time is all it takes.
    never: why that one cannot pass; empty where it can."""

    label: str
    requests: float
    gate: str
    least_seconds: float
    never: str = ""

    def seconds(self, rate: float) -> float:
        """At `rate` requests a second; infinite when nothing comes and something must."""
        if self.requests <= 0.0:
            return self.least_seconds
        return max(self.least_seconds, self.requests / rate if rate > 0.0 else math.inf)


def step_needs(spec: RolloutSpec, share: int, from_step: Step | None = None) -> tuple[StepNeed, ...]:
    """From `from_step` on, or of the whole ladder. `share`: which part of the false-promotion budget."""
    place = 0 if from_step is None else spec.position(from_step.stage, from_step.index) or 0
    return _ladder_needs(spec, max(1, share))[place:]


@lru_cache(maxsize=1024)
def _ladder_needs(spec: RolloutSpec, share: int) -> tuple[StepNeed, ...]:
    alpha = alpha_promote(float(spec.alpha_promotion), share)
    return tuple(_step_need(spec, step, alpha) for step in spec.ladder)


def _step_need(spec: RolloutSpec, step: Step, alpha: float) -> StepNeed:
    needs = [
        need(gate, fraction=float(step.traffic), sample=float(step.sample), alpha=alpha)
        for gate in spec.gates_of(step)
        if gate.required
    ]
    longest = max(needs, key=lambda one: one.requests, default=None)
    requests = longest.requests if longest is not None else 0.0
    return StepNeed(
        label=step.label,
        requests=requests,
        gate=longest.gate if longest is not None and requests > 0.0 else "",
        # Warm-up does not count for a Pass, and the last unit settles.
        least_seconds=max(step.min_seconds, spec.warmup + spec.settle),
        never=longest.never if longest is not None else "",
    )


def too_few_prompts(spec: RolloutSpec, share: int) -> str:
    """The population gate whose probe set cannot bring a Pass whatever it says, with both numbers; empty when
    there is none. A set of unknown size is not judged."""
    alpha = alpha_promote(float(spec.alpha_promotion), max(1, share))
    for gate in spec.gates_of(spec.ladder[0]):
        if gate.metric.kind is not Kind.PAIRED or gate.scope is not Scope.POPULATION or not gate.required:
            continue
        least = min_prompts(float(gate.limit), alpha)
        if 0 < gate.probe_set_size < least:
            return (
                f"gate {gate.name}: {gate.probe_set_size} prompts, and a Pass at {gate.limit} takes {least}"
            )
    return ""


@dataclass(frozen=True)
class Foresight:
    """The sentence for people, and whether the evidence comes too slowly for the deadline."""

    message: str
    slow: bool


def foresee(
    needs: Sequence[StepNeed], *, rate: float, spent: float, deadline: float, was_slow: bool
) -> Foresight:
    """`rate`: requests a second in the blast radius, 0 when it is not known yet. `spent`: seconds of the
    deadline that are used up already."""
    total = sum(one.requests for one in needs)
    left = max(0.0, deadline - spent)
    if math.isinf(total):
        bad = next(one for one in needs if math.isinf(one.requests))
        return Foresight(f"{bad.label}: gate {bad.gate} can never pass: {bad.never}", True)
    if rate <= 0.0:
        return Foresight(f"{_least_rate(tuple(needs), left)}: {_steps(needs, rate)}", _never(needs, left))
    seconds = sum(one.seconds(rate) for one in needs)
    slow = seconds > left * (STILL_SLOW if was_slow else 1.0)
    head = f"about {_hours(seconds)} of the {_hours(left)} left, at {float(f'{rate:.2g}'):g} requests/s"
    return Foresight(f"{head}: {_steps(needs, rate)}", slow)


def _never(needs: Sequence[StepNeed], left: float) -> bool:
    return sum(one.least_seconds for one in needs) > left


@lru_cache(maxsize=4096)
def _least_rate(needs: tuple[StepNeed, ...], left: float) -> str:
    """The rate at which the deadline is just kept: steps take longer than their least time below it."""
    if _never(needs, left):
        return (
            f"the steps alone take {_hours(sum(one.least_seconds for one in needs))}, {_hours(left)} are left"
        )
    if not any(one.requests for one in needs):
        return "no gate waits for traffic"
    low, high = 0.0, 1e-6
    while sum(one.seconds(high) for one in needs) > left:
        low, high = high, 2.0 * high
    for _ in range(20):
        middle = (low + high) / 2.0
        low, high = (middle, high) if sum(one.seconds(middle) for one in needs) > left else (low, middle)
    return f"needs {float(f'{high:.2g}'):g} requests/s in the blast radius to end within {_hours(left)}"


def _steps(needs: Sequence[StepNeed], rate: float) -> str:
    return "; ".join(_step(one, rate) for one in needs)


def _step(one: StepNeed, rate: float) -> str:
    time = f" {_hours(one.seconds(rate))}" if rate > 0.0 or one.requests <= 0.0 else ""
    if not one.gate:
        return f"{one.label}{time}"
    return f"{one.label} ~{_count(one.requests)}{time} ({one.gate})"


def _count(requests: float) -> str:
    """Two digits: 530, 3.3k, 18k, 1.2M."""
    rounded = float(f"{requests:.2g}")
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if rounded >= size:
            return f"{rounded / size:.2g}{letter}" if rounded / size < 10 else f"{rounded / size:.0f}{letter}"
    return f"{rounded:.0f}"


def _hours(seconds: float) -> str:
    if math.isinf(seconds):
        return "for ever"
    if seconds < HOUR:
        return f"{float(f'{seconds / 60:.2g}'):g} min"
    return f"{float(f'{seconds / HOUR:.2g}'):g} h"
