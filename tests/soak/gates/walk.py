"""One simulated rollout: windows opened one after the other, each look judged by the production's judge.

Nothing waits for time, so a step is left at the first look at which every gate passes: the most that luck can
do. Knows scenarios; not how results are kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from decimal import Decimal
from enum import StrEnum
from functools import cache

import numpy as np

from kvtier_evidence import metrics
from kvtier_evidence.carry import Carry
from kvtier_evidence.design import MIN_BLOCKS, Estimate
from kvtier_evidence.gatespec import GateDeclaration, GateSpec, planned_cells, resolve
from kvtier_evidence.judge import Judgement, Terms, judge
from kvtier_evidence.measure import estimates, pair_thresholds
from kvtier_evidence.verdicts import Verdict
from kvtier_evidence.window import WindowKey
from tests.soak.gates.counting import STALL_LIMIT, Counter, DirectSource, ReaderSource, Source, closing
from tests.soak.gates.traffic import Step, Traffic, Truth, draw_window

SHARE_OVER = 0.01


class End(StrEnum):
    COMPLETED = "completed"
    ROLLED_BACK = "rolled back"
    PROMOTED = "falsely promoted"
    """Left a step in which it was at or over a limit; the simulation ends there."""
    HELD = "held"


@dataclass(frozen=True)
class Scenario:
    """One row of the table. truths: by step from the first on, the last one stays. from_random: the last
    truth begins at a step drawn at random. gates: those declared. effect: declared design effect; empty:
    measured."""

    name: str
    group: str
    steps: tuple[Step, ...]
    truths: tuple[Truth, ...]
    traffic: Traffic = field(default_factory=Traffic)
    gates: tuple[str, ...] = ("output", "tail", "stall")
    tail_limit: str = "1.25"
    effect: str = "1"
    from_random: bool = False
    min_samples: int = 500
    harms: bool = False
    """Over a limit somewhere: a return is no false one."""
    cells: int = 0
    """Weight of a cell is one over it; 0: as planned."""


@dataclass(frozen=True)
class Result:
    end: End
    gate: str
    """Which one failed."""
    step: int
    units: int
    """Candidate units judged, from the first harmful step on (from the first step where none is)."""
    served: int
    """Requests that the candidate served, over all steps."""
    in_step: int
    """Candidate units of the last step until its decision."""


@cache
def declarations(names: tuple[str, ...], tail_limit: str, effect: str) -> tuple[GateDeclaration, ...]:
    k = Decimal(effect) if effect else None
    every = {
        "output": GateDeclaration(
            "output", metrics.OUTPUT_RELATIVE_ERROR, Decimal("0.05"), Decimal(99), design_effect=k
        ),
        "proportion": GateDeclaration(
            "output", metrics.OUTPUT_RELATIVE_ERROR, Decimal("0.05"), Decimal(95), design_effect=k
        ),
        "tail": GateDeclaration(
            "tail", metrics.TPOT_RATIO, Decimal(tail_limit), Decimal(99), design_effect=k
        ),
        "stall": GateDeclaration("stall", metrics.EXPOSED_STALL_FRACTION, Decimal("0.02"), design_effect=k),
    }
    return tuple(every[name] for name in names)


@cache
def gates_of(scenario: Scenario, step: Step) -> tuple[GateSpec, ...]:
    """Statistical gates that the scenario declares, median guards with them; no others."""
    declared = declarations(scenario.gates, scenario.tail_limit, scenario.effect)
    wanted = {g.name for g in declared} | {g.name + metrics.MEDIAN_GUARD_SUFFIX for g in declared}
    found = resolve(declared, step.stage, exact=False, min_samples=scenario.min_samples)
    return tuple(g for g in found if g.name in wanted)


def harmful(scenario: Scenario, step: Step, truth: Truth) -> bool:
    """At or over a limit of this step."""
    over = {
        "output": truth.output >= SHARE_OVER,
        "proportion": truth.output >= 0.05,
        "tail": truth.tail >= float(scenario.tail_limit),
        "stall": truth.stall >= STALL_LIMIT,
    }
    here = {g.name for g in gates_of(scenario, step)}
    return any(over[name] for name in scenario.gates if (name if name != "proportion" else "output") in here)


class Rollout:
    """Runs once. Randomness is the given generator's alone."""

    def __init__(self, scenario: Scenario, rng: np.random.Generator) -> None:
        self._scenario, self._rng = scenario, rng
        self._effects: dict[str, Estimate] = {}
        self._thresholds: dict[str, float] = {}
        self._carry = Carry()
        self._cells = scenario.cells or planned_cells(
            declarations(scenario.gates, scenario.tail_limit, scenario.effect),
            [s.stage for s in scenario.steps],
            exact=False,
        )
        self._units = self._served = self._in_step = 0

    def run(self) -> Result:
        truths, was_bad = self._truths(), False
        for number, (step, truth) in enumerate(zip(self._scenario.steps, truths, strict=True)):
            bad = harmful(self._scenario, step, truth)
            if bad and not was_bad:
                self._units = 0
            was_bad = bad
            if not self._scenario.effect and not self._known(step):
                self._measure(replace(step, looks=12), truth)
                self._measure(step, truth)
            judgement, passed = self._window(number, step, truth)
            if judgement.failed is not None:
                return self._result(End.ROLLED_BACK, judgement.failed.gate, number)
            if not passed:
                return self._result(End.HELD, "", number)
            if bad:
                return self._result(End.PROMOTED, "", number)
        return self._result(End.COMPLETED, "", len(self._scenario.steps) - 1)

    def _truths(self) -> list[Truth]:
        given, steps = self._scenario.truths, len(self._scenario.steps)
        if self._scenario.from_random:
            begin = int(self._rng.integers(0, steps))
            return [given[0]] * begin + [given[-1]] * (steps - begin)
        return [given[min(i, len(given) - 1)] for i in range(steps)]

    def _known(self, step: Step) -> bool:
        return all(
            self._effects.get(g.name, Estimate(1.0, 0, 1.0)).blocks >= MIN_BLOCKS
            for g in gates_of(self._scenario, step)
        )

    def _measure(self, step: Step, truth: Truth) -> None:
        """An earlier window of the same kind that is only measured in."""
        counter = self._counter(step, truth)
        source = DirectSource(_key(-1, step), counter)
        for look in range(step.looks):
            source.look(look)
        self._close(step, counter, source, step.looks)

    def _counter(self, step: Step, truth: Truth) -> Counter:
        traffic = self._scenario.traffic
        # Without what sessions share, each request is a session of its own.
        return Counter(
            draw_window(self._rng, traffic, step, truth), traffic.agents, sessions=traffic.session > 0.0
        )

    def _window(self, number: int, step: Step, truth: Truth) -> tuple[Judgement, bool]:
        scenario, gates = self._scenario, gates_of(self._scenario, step)
        counter = self._counter(step, truth)
        source: Source = DirectSource(_key(number, step), counter)
        if scenario.traffic.restarts > 0.0:
            source = ReaderSource(_key(number, step), counter, scenario.traffic, self._rng)
        terms = Terms(
            fraction=step.fraction if step.served else 0.0,
            share=1,
            planned_cells=self._cells,
            estimates=dict(self._effects),
        )
        self._in_step, passed, judgement = 0, False, None
        for look in range(step.looks):
            evidence = source.look(look)
            mine = int(counter.served[1][look].sum())
            by_compared = not step.served or scenario.gates in (("output",), ("proportion",))
            judged = int(counter.compared[look].sum()) if by_compared else mine
            self._served += mine
            self._units += judged
            self._in_step += judged
            if not scenario.effect:
                blocks = counter.blocks(look + 1, self._lines(gates))
                evidence = replace(evidence, merged=replace(evidence.merged, blocks=blocks))
            judgement = judge(gates, evidence, terms, self._carry, display=False)
            self._carry = judgement.carry
            passed = all(r.verdict is Verdict.PASS for r in judgement.results if r.required)
            if judgement.failed is not None or passed:
                break
        if judgement is None:
            raise ValueError("a step without looks")
        if not scenario.effect:
            self._close(step, counter, source, look + 1)
        return judgement, passed

    def _close(self, step: Step, counter: Counter, source: Source, looks: int) -> None:
        """What the window that closes says to the next, by the production's rules."""
        gates = gates_of(self._scenario, step)
        closed = closing(counter, looks, source.merged, self._lines(gates))
        for name, one in estimates(gates, closed, step.fraction).items():
            known = self._effects.get(name)
            if known is None or one.blocks >= min(MIN_BLOCKS, known.blocks):
                self._effects[name] = one
        if step.served:
            self._thresholds |= pair_thresholds(gates, closed)

    def _lines(self, gates: tuple[GateSpec, ...]) -> dict[str, tuple[float, float]]:
        """Where blocks of ratio gates are counted above: an earlier window's quantile, and the limit."""
        return {
            g.name: (self._thresholds[g.name], float(g.limit)) for g in gates if g.name in self._thresholds
        }

    def _result(self, end: End, gate: str, step: int) -> Result:
        return Result(end, gate, step, self._units, self._served, self._in_step)


@cache
def _key(number: int, step: Step) -> WindowKey:
    return WindowKey("soak", 1, step.stage.value, step.index, "sha256:c", "sha256:b", "sha256:g", number + 2)
