"""The absolute limit on the tail in Full: what it is a multiple of, and how soon it fails."""

from __future__ import annotations

import math
from dataclasses import replace
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_evidence import metrics
from kvtier_evidence.bounds import quantile_upper
from kvtier_evidence.carry import Carry
from kvtier_evidence.design import BlockSums, Estimate, design_effect, one_arm
from kvtier_evidence.gates import Effect
from kvtier_evidence.gatespec import GateDeclaration, GateSpec, resolve
from kvtier_evidence.grid import Histogram, edge, index
from kvtier_evidence.judge import GateResult, Judgement, Terms, judge
from kvtier_evidence.measure import REFERENCE_ALPHA, estimates, references
from kvtier_evidence.metrics import Stage
from kvtier_evidence.verdicts import Reason, Verdict
from kvtier_evidence.window import WindowCounts
from tests.unit.evidence.evidence_builders import Counts, evidence, key, lognormal, terms

DECLARED = GateDeclaration(
    "tail",
    metrics.TPOT_RATIO,
    Decimal("1.25"),
    Decimal(99),
    design_effect=Decimal(1),
    absolute=Decimal("1.5"),
)
GUARD = "tail-absolute"
MEASURED_K = replace(DECLARED, design_effect=None)


def gates(stage: Stage = Stage.FULL, declared: GateDeclaration = DECLARED) -> list[GateSpec]:
    return [g for g in resolve([declared], stage, exact=False) if g.name.startswith("tail")]


def full(reference: float | None, fraction: float = 0.98) -> Terms:
    known = {} if reference is None else {GUARD: reference}
    return replace(terms(fraction), references=known)


def look(counts: Counts, how: Terms, declared: GateDeclaration = DECLARED) -> Judgement:
    return judge(gates(declared=declared), evidence(counts, window=key("Full", 0, 9)), how, Carry())


def guard_of(judgement: Judgement) -> GateResult:
    return next(r for r in judgement.results if r.name == GUARD)


def tail_of(n: int, over: int, value: float, usual: float = 0.03) -> Histogram:
    h = Histogram()
    h.add(usual, n - over)
    h.add(value, over)
    return h


# ---------------------------------------------------------------- what it is a multiple of


def test_the_reference_is_the_upper_bound_of_the_baselines_quantile() -> None:
    baseline = lognormal(4000, 0.03)
    closed = Counts().tpot(lognormal(900, 0.09), baseline).counts
    found = references(gates(Stage.RAMP), closed)
    assert found == {GUARD: quantile_upper(baseline, 0.01, REFERENCE_ALPHA)}
    quantile = baseline.quantile(0.99)
    assert quantile is not None and quantile < found[GUARD] < 1.3 * quantile


@pytest.mark.parametrize("n", [0, 300])
def test_too_few_of_the_baseline_say_no_reference(n: int) -> None:
    closed = Counts().tpot(lognormal(900, 0.03), lognormal(n, 0.03)).counts
    assert references(gates(Stage.RAMP), closed) == {}
    assert references(gates(Stage.RAMP, replace(DECLARED, absolute=None)), closed) == {}


def test_what_the_baseline_shares_makes_the_reference_larger() -> None:
    baseline = lognormal(40_000, 0.03)
    closed = Counts().tpot(lognormal(900, 0.03), baseline).counts
    assert references(gates(Stage.RAMP, MEASURED_K), closed) == {}, "nobody knows what the units are worth"
    sums = closed.blocks["tail"] = BlockSums()
    for i in range(400):
        sums.add_two_arm(2, i % 2, 100, 10 if i % 10 == 0 else 0)
    k = 1.5 * design_effect(one_arm(sums, candidate=False))
    assert k > 10.0
    found = references(gates(Stage.RAMP, MEASURED_K), closed)
    assert found == {GUARD: quantile_upper(baseline, 0.01, REFERENCE_ALPHA, Effect(k, k))}
    assert found[GUARD] > references(gates(Stage.RAMP), closed)[GUARD]


# ---------------------------------------------------------------- verdicts


CASES: dict[str, tuple[Histogram, float | None, Reason]] = {
    "twice the reference": (tail_of(100, 20, 0.1), 0.05, Reason.BOUND_OUTSIDE_LIMIT),
    "slower, within its slack": (tail_of(3000, 600, 0.074), 0.05, Reason.BOUND_INSIDE_LIMIT),
    "at its limit exactly": (tail_of(3000, 600, 0.075), 0.05, Reason.BOUND_STRADDLES_LIMIT),
    "just over, in a bin beyond": (tail_of(3000, 600, 0.0755), 0.05, Reason.BOUND_OUTSIDE_LIMIT),
    "a hundredth over": (tail_of(3000, 30, 0.2), 0.05, Reason.BOUND_STRADDLES_LIMIT),
    "no earlier window said": (tail_of(3000, 3000, 9.0), None, Reason.NO_DATA),
}


@pytest.mark.parametrize("case", CASES)
def test_reason(case: str) -> None:
    candidate, reference, reason = CASES[case]
    got = look(Counts().tpot(candidate, Histogram()), full(reference))
    row = guard_of(got)
    assert row.reason is reason
    assert not row.required
    assert (got.failed is not None) is (row.verdict is Verdict.FAIL)
    cell = next(c for c in got.carry.cells if c.gate == GUARD)
    assert math.isinf(cell.log_e) is (reference is None), "without a reference nothing is evidence"


def test_what_is_shown_are_multiples_of_the_reference() -> None:
    candidate = lognormal(4000, 0.03)
    row = guard_of(look(Counts().tpot(candidate, Histogram()), full(0.08)))
    quantile = candidate.quantile(0.99)
    assert quantile is not None
    assert row.value == pytest.approx(quantile / 0.08)
    assert row.value is not None and row.bound is not None
    assert row.value < row.bound <= 1.5
    assert (row.limit_text, row.n, row.expected_n) == ("1.5", 4000, None)
    slow = guard_of(look(Counts().tpot(lognormal(400, 0.09), Histogram()), full(0.05)))
    assert slow.value is not None and slow.bound is not None
    assert 1.5 < slow.bound < slow.value


def test_without_anything_held_back_it_is_the_only_watch_of_the_tail() -> None:
    counts = Counts().tpot(tail_of(200, 20, 0.3), Histogram())
    got = look(counts, full(0.05, fraction=1.0))
    said = {r.name: r.reason for r in got.results}
    assert said["tail"] is Reason.NO_CONCURRENT_BASELINE
    assert said[GUARD] is Reason.BOUND_OUTSIDE_LIMIT
    assert got.failed is not None and got.failed.gate == GUARD


def test_missing_is_no_harm_and_warm_up_is() -> None:
    candidate = tail_of(100, 0, 0.1)
    candidate.add(None, 2000)
    counts = Counts().tpot(candidate, Histogram())
    assert guard_of(look(counts, full(0.05, 1.0))).verdict is Verdict.INSUFFICIENT
    counts.counts.of(metrics.TPOT_RATIO, "candidate").warmup.merge(tail_of(100, 60, 0.1))
    assert guard_of(look(counts, full(0.05, 1.0))).verdict is Verdict.FAIL


def test_one_arm_that_does_not_fit_its_split_still_fails() -> None:
    counts = Counts().tpot(tail_of(100, 40, 0.1), Histogram()).sessions(5000, 10_000)
    got = look(counts, full(0.05))
    assert next(r for r in got.results if r.name == "tail").reason is Reason.SAMPLE_RATIO_MISMATCH
    assert got.failed is not None and got.failed.gate == GUARD


# ---------------------------------------------------------------- the design effect


def shared(blocks: int, each: int = 20) -> BlockSums:
    """Both arms stall together in every fifth block: of their difference nothing is left."""
    sums = BlockSums()
    for i in range(blocks):
        slow = each if i % 5 == 0 else 0
        sums.add_two_arm(each, slow, each, slow)
    return sums


def test_what_both_arms_share_counts_against_one_arm_alone() -> None:
    closed = Counts().tpot(lognormal(900, 0.03), lognormal(900, 0.03)).counts
    closed.blocks["tail"] = shared(300)
    found = estimates(gates(Stage.RAMP, MEASURED_K), closed, 0.5)
    assert found["tail"].k_hat == 1.0, "shared shocks cancel in a ratio"
    assert found[GUARD].k_hat == pytest.approx(20.0, rel=0.01)
    assert (found[GUARD].blocks, found[GUARD].mean_block) == (300, 20.0)
    assert GUARD not in estimates(gates(Stage.RAMP, replace(MEASURED_K, absolute=None)), closed, 0.5)


def test_sessions_count_as_blocks_too() -> None:
    closed = WindowCounts()
    closed.blocks["tail"] = BlockSums()
    for _ in range(300):
        closed.blocks["tail"].add_two_arm(10, 1, 10, 1)
    closed.blocks["tail/session"] = shared(300)
    found = estimates(gates(Stage.RAMP, MEASURED_K), closed, 0.5)
    assert found[GUARD].k_hat == pytest.approx(20.0, rel=0.01)


@pytest.mark.parametrize(
    ("estimate", "open_window", "k", "fails"),
    [
        pytest.param(Estimate(1.0, 300, 20.0), False, 1.0, True, id="calm"),
        pytest.param(Estimate(20.0, 300, 20.0), False, 30.0, False, id="shared-before"),
        pytest.param(Estimate(1.0, 300, 20.0), True, 20.0, False, id="shared-now"),
        pytest.param(Estimate(1.0, 80, 20.0), False, None, False, id="too-few-blocks"),
        pytest.param(None, False, None, False, id="unknown"),
    ],
)
def test_a_measured_design_effect(
    estimate: Estimate | None, open_window: bool, k: float | None, fails: bool
) -> None:
    """Twenty requests of one stall are not twenty pieces of evidence."""
    counts = Counts().tpot(tail_of(400, 20, 0.1), Histogram())
    if open_window:
        counts.counts.blocks["tail"] = shared(200)
    known = {} if estimate is None else {GUARD: estimate}
    got = guard_of(look(counts, replace(full(0.05), estimates=known), MEASURED_K))
    assert (None if got.k is None else round(got.k)) == k
    assert (got.verdict is Verdict.FAIL) is fails


# ---------------------------------------------------------------- how soon, how falsely


def units_until_fail(rng: np.random.Generator, slower: float, share: float, most: int) -> float:
    """Candidate units, ten at each look; the slowest `share` of them are `slower` times as slow."""
    reference = references(gates(Stage.RAMP), Counts().tpot(Histogram(), lognormal(4000, 0.03)).counts)[GUARD]
    counts, line = Counts().tpot(Histogram(), Histogram()), 0.35 * 1.2816
    h = counts.counts.of(metrics.TPOT_RATIO, "candidate").histogram
    only = [g for g in gates() if g.name == GUARD]
    while h.n < most:
        logs = 0.35 * rng.standard_normal(10)
        for one in np.where((logs > line) | (share >= 1.0), logs + math.log(slower), logs).tolist():
            h.add(0.03 * math.exp(one))
        window = evidence(counts, window=key("Full", 0, 9))
        if judge(only, window, full(reference), Carry(), display=False).failed is not None:
            return h.n
    return math.inf


def test_a_tail_of_twice_the_limit_is_found_within_some_hundred_units() -> None:
    """The ratio's p99 cannot fail before 62,300 of them, and the median does not move."""
    rng = np.random.default_rng(3)
    got = sorted(units_until_fail(rng, 3.0, 0.1, 400) for _ in range(40))
    assert got[37] <= 150, got


def test_a_candidate_like_its_baseline_is_not_returned() -> None:
    rng = np.random.default_rng(4)
    assert {units_until_fail(rng, 1.0, 1.0, 1500) for _ in range(4)} == {math.inf}


# ---------------------------------------------------------------- the grid


@settings(max_examples=60, deadline=None)
@given(st.floats(0.001, 10.0), st.integers(0, 8), st.floats(0.25, 4.0))
def test_units_beside_the_line_are_read_outward(reference: float, shift: int, times: float) -> None:
    """None of a bin in which the line lies speaks for harm, and all of it against harmlessness."""
    line = 1.5 * reference
    value = line * times
    h = Histogram(shift=shift)
    h.add(value, 3000)
    row = guard_of(look(Counts().tpot(h, Histogram()), full(reference)))
    at = index(line) >> shift
    if row.verdict is Verdict.FAIL:
        assert value > line and edge(at + 1, shift) < value
    elif row.verdict is Verdict.PASS:
        assert value <= line and value <= edge(at, shift)
    else:
        assert index(value) >> shift == at
