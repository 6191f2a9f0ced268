"""Simulated rollouts through the production judge: budgets are kept, harm is found, safety is let through.

Fixed seeds; a few hundred rollouts a case. The nightly protocol runs ten thousand (section 10 of the
specification).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal

import numpy as np
import pytest

from kvtier_evidence import metrics
from kvtier_evidence.carry import Carry
from kvtier_evidence.gatespec import GateSpec
from kvtier_evidence.judge import judge
from tests.unit.evidence.evidence_builders import (
    OUTPUT,
    Counts,
    Decision,
    decision_of,
    evidence,
    gate,
    key,
    terms,
)

RUNS = 250
LOOKS = 15
UNITS = 200


@dataclass(frozen=True)
class Outcomes:
    decisions: Counter[Decision]
    units: list[int]
    """Units at which a rollout was decided; only of those that were."""

    def share(self, decision: Decision) -> float:
        return self.decisions[decision] / self.decisions.total()


def simulate(
    gates: list[GateSpec],
    draw: Callable[[np.random.Generator, Counts], None],
    *,
    seed: int,
    per_look: int = UNITS,
    looks: int = LOOKS,
    runs: int = RUNS,
    fraction: float = 0.5,
) -> Outcomes:
    """One step of each rollout: a look after every `per_look` units, until a decision or the last look."""
    rng = np.random.default_rng(seed)
    decisions: Counter[Decision] = Counter()
    units = []
    for _ in range(runs):
        counts, carry, decision = Counts(), Carry(), Decision.HOLD
        for look in range(1, looks + 1):
            draw(rng, counts)
            got = judge(gates, evidence(counts, window=key()), terms(fraction), carry, display=False)
            decision, carry = decision_of(got), got.carry
            if decision in (Decision.PROMOTE, Decision.FAIL):
                units.append(look * per_look)
                break
        decisions[decision] += 1
    return Outcomes(decisions, units)


def errors(share: float, per_look: int = UNITS) -> Callable[[np.random.Generator, Counts], None]:
    """Each unit lies above the limit with probability `share`."""

    def draw(rng: np.random.Generator, counts: Counts) -> None:
        counts.output(per_look, int(rng.binomial(per_look, share)))

    return draw


def test_a_candidate_at_its_limit_is_neither_promoted_nor_rolled_back() -> None:
    """Budgets .04 and .01; measured on 10,000 runs: .6 % and 0."""
    got = simulate([OUTPUT], errors(0.01), seed=1)
    assert got.share(Decision.PROMOTE) <= 0.04
    assert got.share(Decision.FAIL) <= 0.01
    assert got.share(Decision.HOLD) >= 0.95


def test_twice_the_limit_in_value_is_failed_within_a_hundred_units() -> None:
    """A lognormal error of sigma .5 at twice its limit has 17 % above it; G2 asks for 100 units, 95 %."""
    got = simulate([OUTPUT], errors(0.17, 20), seed=2, per_look=20, looks=5)
    assert got.share(Decision.FAIL) >= 0.95
    assert got.share(Decision.PROMOTE) == 0.0


def test_twice_the_share_above_is_failed_and_never_promoted() -> None:
    got = simulate([OUTPUT], errors(0.02, 500), seed=3, per_look=500, looks=14, runs=150)
    assert got.share(Decision.FAIL) >= 0.9
    assert got.share(Decision.PROMOTE) == 0.0


def test_a_safe_candidate_is_promoted() -> None:
    got = simulate([OUTPUT], errors(0.001), seed=4)
    assert got.share(Decision.PROMOTE) >= 0.97
    assert got.share(Decision.FAIL) == 0.0
    assert np.median(got.units) <= 800


def stalls(mean: float, per_look: int) -> Callable[[np.random.Generator, Counts], None]:
    """Sixty per cent without a stall, the others uniform up to five times the mean."""

    def draw(rng: np.random.Generator, counts: Counts) -> None:
        values = np.where(rng.random(per_look) < 0.6, 0.0, rng.random(per_look) * 5.0 * mean)
        counts.stall(
            [(float(v), int(n)) for v, n in zip(*np.unique(values.round(3), return_counts=True), strict=True)]
        )

    return draw


STALL = gate("stall", metrics.EXPOSED_STALL_FRACTION, "0.02")


@pytest.mark.parametrize(
    ("mean", "promoted", "failed"),
    [(0.02, (0.0, 0.04), (0.0, 0.01)), (0.04, (0.0, 0.0), (0.95, 1.0)), (0.005, (0.97, 1.0), (0.0, 0.0))],
    ids=["at the limit", "twice", "a quarter"],
)
def test_stall_gate(mean: float, promoted: tuple[float, float], failed: tuple[float, float]) -> None:
    got = simulate([STALL], stalls(mean, 50), seed=5, per_look=50, looks=12, runs=50)
    assert promoted[0] <= got.share(Decision.PROMOTE) <= promoted[1]
    assert failed[0] <= got.share(Decision.FAIL) <= failed[1]


def latencies(
    ratio: float, candidates: int, fraction: float
) -> Callable[[np.random.Generator, Counts], None]:
    """Lognormal time per token in both arms, with a shock that they share at each look."""

    def draw(rng: np.random.Generator, counts: Counts) -> None:
        shock = float(np.exp(rng.normal(0.0, 0.1)))
        baseline = round(candidates * (1 - fraction) / fraction)
        for arm, n, scale in (("candidate", candidates, ratio), ("baseline", baseline, 1.0)):
            h = counts.counts.of(metrics.TPOT_RATIO, arm).histogram
            values = 0.03 * scale * shock * np.exp(rng.normal(0.0, 0.35, n).round(2))
            for x, c in zip(*np.unique(values, return_counts=True), strict=True):
                h.add(float(x), int(c))

    return draw


TAIL = gate("tail", metrics.TPOT_RATIO, "1.25", "99")


def test_a_ratio_at_its_limit_keeps_both_budgets() -> None:
    got = simulate([TAIL], latencies(1.25, 100, 0.25), seed=6, per_look=100, looks=8, runs=40, fraction=0.25)
    assert got.share(Decision.PROMOTE) <= 0.04
    assert got.share(Decision.FAIL) <= 0.02


def test_a_ratio_of_twice_the_limit_is_failed_in_canary() -> None:
    """G2: p99 ratio, 250 candidate units at f = 5 %, 95 %."""
    got = simulate([TAIL], latencies(2.5, 50, 0.05), seed=7, per_look=50, looks=5, runs=60, fraction=0.05)
    assert got.share(Decision.FAIL) >= 0.95


def test_units_that_share_a_stall_need_their_design_effect() -> None:
    """Blocks of 20, all above or none, at the limit: k = 20 keeps the budget that k = 1 breaks."""

    def blocks(rng: np.random.Generator, counts: Counts) -> None:
        for _ in range(UNITS // 20):
            counts.output(20, 20 if rng.random() < 0.01 else 0)

    def promoted(k: str) -> float:
        spec = gate("output", metrics.OUTPUT_RELATIVE_ERROR, "0.05", "99", min_samples=10, k=k)
        return simulate([spec], blocks, seed=8, runs=150).share(Decision.PROMOTE)

    assert promoted("1") > 0.3
    assert promoted("20") <= 0.04


def test_all_gates_must_pass_at_one_look() -> None:
    """One gate at its limit keeps the other from promoting."""
    loose = gate("loose", metrics.OUTPUT_RELATIVE_ERROR, "0.05", "75")
    assert loose.quantile == Decimal(75)

    def draw(rng: np.random.Generator, counts: Counts) -> None:
        above = int(rng.binomial(UNITS, 0.01))
        counts.output(UNITS, above)
        counts.counts.of(metrics.OUTPUT_RELATIVE_ERROR, "candidate").above_up["loose"] = 0

    got = simulate([OUTPUT, loose], draw, seed=9, runs=100)
    assert got.share(Decision.PROMOTE) <= 0.04
