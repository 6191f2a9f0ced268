"""One p99 gate judged from the same units by the rules that other tools use, beside the production's judge.

Each rule is the decision as its tool documents it, on the same counts, at the same looks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri

from kvtier_evidence import metrics
from kvtier_evidence.carry import Carry
from kvtier_evidence.gates import ONE
from kvtier_evidence.judge import Terms, judge
from kvtier_evidence.metrics import Arm, Stage
from kvtier_evidence.reader import WindowEvidence
from kvtier_evidence.verdicts import Verdict
from kvtier_evidence.window import WindowCounts, WindowKey
from tests.soak.gates.traffic import Ints, Step
from tests.soak.gates.walk import SHARE_OVER, Scenario, gates_of

LOOKS, PER_LOOK = 30, 200
SHARES = (0.01, 0.0075, 0.005, 0.002, 0.02, 0.05, 0.17)
OURS = "this judge"
_STEP = Step(Stage.SHADOW, 0, 0.0, 0, PER_LOOK, LOOKS)
_SPEC = Scenario("contrast", "contrast", (_STEP,), (), gates=("output",), cells=30)
_KEY = WindowKey("soak", 1, "Shadow", 0, "sha256:c", "sha256:b", "sha256:g", 2)


@dataclass
class Tally:
    """Of one rule at one true share."""

    promoted: int = 0
    rolled_back: int = 0
    held: int = 0
    units: int = 0


Rule = Callable[[Ints], tuple[str, int]]
"""Counts over the limit per look, to what is decided and after how many looks."""


def intervals(allowed: int) -> Rule:
    """Rolled back at more than `allowed` looks whose share is over the limit, else promoted at the end."""

    def rule(over: Ints) -> tuple[str, int]:
        bad = np.cumsum(over > SHARE_OVER * PER_LOOK)
        if bad[-1] > allowed:
            return "rolled_back", int(np.argmax(bad > allowed)) + 1
        return "promoted", LOOKS

    return rule


def first_favourable(over: Ints) -> tuple[str, int]:
    """Promoted at the first look, from 2,000 units on, whose cumulative share is under the limit."""
    n = PER_LOOK * np.arange(1, LOOKS + 1)
    good = (np.cumsum(over) / n < SHARE_OVER) & (n >= 2000)
    return ("promoted", int(np.argmax(good)) + 1) if good.any() else ("rolled_back", LOOKS)


def z_test(looks: Ints) -> Rule:
    """One-sided tests at .05 of the cumulative share against the limit, at these looks."""

    def rule(over: Ints) -> tuple[str, int]:
        total = np.cumsum(over)
        for look in looks.tolist():
            n = PER_LOOK * look
            z = (total[look - 1] / n - SHARE_OVER) / math.sqrt(SHARE_OVER * (1.0 - SHARE_OVER) / n)
            if abs(z) > float(ndtri(0.95)):
                return ("promoted" if z < 0.0 else "rolled_back"), look
        return "held", LOOKS

    return rule


RULES: dict[str, Rule] = {
    "each interval's point value, no failure allowed": intervals(0),
    "the same, 3 failures allowed": intervals(3),
    "the same, rolled back at 5 failed checks": intervals(4),
    "cumulative point value, promoted at the first look under the limit from 2,000 on": first_favourable,
    "z-test at every look, .05": z_test(np.arange(1, LOOKS + 1)),
    "z-test once at 6,000, .05": z_test(np.asarray([LOOKS])),
}


def ours(over: Ints) -> tuple[str, int]:
    gates = gates_of(_SPEC, _STEP)
    counts, carry = WindowCounts(), Carry()
    terms = Terms(fraction=0.0, share=1, planned_cells=30)
    for look, above in enumerate(over.tolist(), 1):
        c = counts.of(metrics.OUTPUT_RELATIVE_ERROR, Arm.CANDIDATE)
        c.histogram.add(0.01, PER_LOOK - above)
        c.histogram.add(0.2, above)
        for sums in (c.above_up, c.above_down):
            sums["output"] = sums.get("output", 0) + above * ONE
        evidence = WindowEvidence(_KEY, counts, {"node-0": counts}, True)
        got = judge(gates, evidence, terms, carry, display=False)
        carry = got.carry
        if got.failed is not None:
            return "rolled_back", look
        if all(r.verdict is Verdict.PASS for r in got.results if r.required):
            return "promoted", look
    return "held", LOOKS


def run(rng: np.random.Generator, share: float, runs: int) -> dict[str, Tally]:
    """`runs` steps of 30 looks at one true share, each judged by every rule."""
    out = {name: Tally() for name in (*RULES, OURS)}
    counts = rng.binomial(PER_LOOK, share, (runs, LOOKS))
    for over in counts:
        for name, rule in (*RULES.items(), (OURS, ours)):
            decision, looks = rule(over)
            tally = out[name]
            setattr(tally, decision, getattr(tally, decision) + 1)
            tally.units += looks * PER_LOOK
    return out
