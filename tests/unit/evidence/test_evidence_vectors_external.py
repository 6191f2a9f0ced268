"""Golden values of section 8, and what the books of external counts do with resets, gaps and repeats."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_evidence import metrics
from kvtier_evidence.carry import Carry
from kvtier_evidence.design import MIN_BLOCKS, BlockSums
from kvtier_evidence.external import (
    Above,
    CounterBook,
    ExternalReading,
    Form,
    HistogramBook,
    ResetUnknown,
    Streak,
    above_of_buckets,
    above_of_histogram,
    external_basis,
    rescaled,
)
from kvtier_evidence.gatespec import ExternalTerms, GateDeclaration, GateSpec, planned_cells, resolve
from kvtier_evidence.grid import MAX_SHIFT, Histogram, edge
from kvtier_evidence.judge import GateResult, judge
from kvtier_evidence.limits import LimitError
from kvtier_evidence.measure import estimates
from kvtier_evidence.metrics import Stage
from kvtier_evidence.verdicts import Basis, Reason, Verdict
from kvtier_evidence.window import WindowCounts
from tests.unit.evidence.evidence_builders import Counts, evidence, key, terms

BASES: dict[str, tuple[Basis | Reason, Basis | Reason]] = {
    "X1": (external_basis(Form.COUNTER_PAIR, cumulative=True, reset_marked=True), Basis.ANYTIME),
    "X2": (external_basis(Form.COUNTER_PAIR, cumulative=True), Reason.RESET_UNKNOWN),
    "X3-edge": (external_basis(Form.CLASSIC_HISTOGRAM, has_edge=True), Basis.ANYTIME),
    "X3-no edge": (external_basis(Form.CLASSIC_HISTOGRAM), Basis.BRACKET),
    "X4-gauge": (external_basis(Form.GAUGE), Basis.GUARD_ONLY),
    "X4-declared": (external_basis(Form.GAUGE, declared_point=True, counted=True), Basis.POINT),
    "X4-summary": (external_basis(Form.SUMMARY), Basis.GUARD_ONLY),
    "delta": (external_basis(Form.EXPONENTIAL_HISTOGRAM), Basis.ANYTIME),
    "declared without a count": (external_basis(Form.EXPRESSION, declared_point=True), Basis.GUARD_ONLY),
}


@pytest.mark.parametrize("vid", BASES)
def test_basis(vid: str) -> None:
    got, want = BASES[vid]
    assert got == want


# ---------------------------------------------------------------- books


def book(*samples: tuple[float | None, float, int, int]) -> CounterBook:
    """Samples (start, at, bad, total) of one target."""
    out = CounterBook(gap=60.0)
    for start, at, bad, total in samples:
        out.take("a", start, at, {"bad": bad, "total": total})
    return out


COUNTED: dict[str, tuple[CounterBook, tuple[int, int]]] = {
    "growth": (book((None, 0, 1, 10), (None, 10, 2, 30)), (2, 30)),
    "a repeated scrape adds nothing": (book((None, 0, 1, 10), (None, 0, 1, 10)), (1, 10)),
    "an older scrape adds nothing": (book((None, 10, 1, 10), (None, 0, 5, 50)), (1, 10)),
    "a decrease is a new life": (book((None, 0, 5, 90), (None, 10, 1, 20)), (6, 110)),
    "one series that falls resets its target": (book((None, 0, 5, 9), (None, 10, 1, 20)), (6, 29)),
    "a start time marks a life that grew past the old one": (
        book((1.0, 0, 5, 90), (2.0, 10, 6, 95)),
        (11, 185),
    ),
}


@pytest.mark.parametrize("case", COUNTED)
def test_increments(case: str) -> None:
    got, want = COUNTED[case]
    assert (got.totals["bad"], got.totals["total"]) == want


UNKNOWN: dict[str, Callable[[], object]] = {
    "no sample for longer than the gap": lambda: book((None, 0, 1, 10), (None, 61, 2, 20)),
    "a decrease within one life": lambda: book((1.0, 0, 1, 10), (1.0, 10, 0, 20)),
    "a negative counter": lambda: book((None, 0, -1, 10)),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_a_reset_that_cannot_be_told_is_no_evidence(case: str) -> None:
    with pytest.raises(ResetUnknown):
        UNKNOWN[case]()


def test_a_start_time_bridges_a_gap() -> None:
    assert book((1.0, 0, 1, 10), (1.0, 500, 3, 70)).totals == {"bad": 3, "total": 70}


def test_what_was_counted_before_the_window_is_not_of_it() -> None:
    one = CounterBook(gap=60.0)
    one.begin("a", None, 0.0, {"bad": 100, "total": 1000})
    one.take("a", None, 10.0, {"bad": 101, "total": 1010})
    one.take("b", None, 10.0, {"bad": 1, "total": 5})
    assert one.totals == {"bad": 2, "total": 15}


@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 9), st.integers(0, 9), st.booleans()),
        min_size=1,
        max_size=40,
    )
)
def test_increments_are_what_was_counted(events: list[tuple[int, int, int, bool]]) -> None:
    """Two targets that grow, begin again with a new start time, and are scraped twice or in vain."""
    one, truth = CounterBook(gap=1e9), {"bad": 0, "total": 0}
    state: list[dict[str, int]] = [{"bad": 0, "total": 0}, {"bad": 0, "total": 0}]
    starts, last = [0.0, 0.0], {}
    for now, (target, bad, good, restart) in enumerate(events):
        if restart:
            state[target], starts[target] = {"bad": 0, "total": 0}, float(now)
        state[target]["bad"] += bad
        state[target]["total"] += bad + good
        truth["bad"] += bad
        truth["total"] += bad + good
        sample = (f"t{target}", starts[target], float(now), dict(state[target]))
        one.take(*sample)
        one.take(*sample)
        if target in last:
            one.take(*last[target])
        last[target] = sample
    assert one.totals == truth


def exponential(*values: float, scale: int = 8) -> Histogram:
    base = 2.0 ** (2.0**-scale)
    buckets: dict[int, int] = {}
    for v in values:
        i = math.ceil(math.log(v, base) - 1e-9) - 1
        buckets[i] = buckets.get(i, 0) + 1
    return rescaled(scale, 0, buckets)


@pytest.mark.parametrize("scale", [0, 3, 8, 10, 20])
def test_exponential_scales_land_on_the_grid(scale: int) -> None:
    got = exponential(0.03, 0.51, 7.0, scale=scale)
    assert got.shift == max(0, 8 - scale)
    for value, i in zip((0.03, 0.51, 7.0), sorted(got.bins), strict=True):
        assert edge(i, got.shift) < value <= edge(i + 1, got.shift)


def test_a_scale_that_the_grid_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="coarser"):
        rescaled(8 - MAX_SHIFT - 1, 0, {0: 1})


def test_a_scale_may_fall_while_counting_goes_on() -> None:
    one = HistogramBook(gap=60.0)
    one.take("a", None, 0.0, exponential(0.1, 0.2, scale=8))
    one.take("a", None, 10.0, exponential(0.1, 0.2, 0.4, scale=3))
    assert (one.total.n, one.total.shift) == (3, 5)
    one.take("a", None, 20.0, exponential(0.4, scale=3))
    assert one.total.n == 4, "fewer than before: a new life"
    with pytest.raises(ResetUnknown):
        one.take("a", None, 99.0, exponential(0.4, 0.5, scale=3))


BUCKETS = {0.1: 50, 0.25: 80, 0.5: 95, math.inf: 100}
BRACKETS = {
    "edge at the limit": (0.25, Above(100, 20, 20, True)),
    "between two edges": (0.3, Above(100, 20, 5, False)),
    "under the first": (0.05, Above(100, 100, 50, False)),
    "over the last": (9.0, Above(100, 5, 0, False)),
}


@pytest.mark.parametrize("case", BRACKETS)
def test_buckets_are_read_on_the_unfavourable_side(case: str) -> None:
    limit, want = BRACKETS[case]
    assert above_of_buckets(BUCKETS, limit) == want


@pytest.mark.parametrize("bad", [{}, {0.1: 5}, {0.1: 5, math.inf: 4}], ids=["empty", "no +Inf", "falls"])
def test_buckets_that_cannot_be(bad: dict[float, int]) -> None:
    with pytest.raises(ValueError, match=r"bucket|fall"):
        above_of_buckets(bad, 0.1)


@given(st.lists(st.floats(1e-3, 10.0), min_size=1, max_size=50), st.floats(1e-3, 10.0), st.integers(0, 8))
def test_a_histogram_brackets_the_truth(values: list[float], limit: float, shift: int) -> None:
    h = Histogram(shift=shift)
    for v in values:
        h.add(v)
    got, truth = above_of_histogram(h, limit), sum(v > limit for v in values)
    assert got.down <= truth <= got.up


# ---------------------------------------------------------------- verdicts


def gate(form: Form = Form.COUNTER_PAIR, limit: str = "0.05", **changes: Any) -> GateSpec:
    external = ExternalTerms(form, changes.pop("can_fail", True), point=changes.pop("point", False))
    quantile = Decimal(99) if form in (Form.CLASSIC_HISTOGRAM, Form.EXPONENTIAL_HISTOGRAM) else None
    spec = GateSpec(
        "errors",
        metrics.METRICS[metrics.EXTERNAL],
        Decimal(limit),
        quantile,
        min_samples=100,
        design_effect=Decimal(1),
        required=external.waited_for,
        external=external,
    )
    return replace(spec, **changes)


def reading(n: int = 0, up: int = 0, down: int | None = None, **changes: Any) -> ExternalReading:
    counts = Above(n, up, up if down is None else down, down is None)
    base = ExternalReading(Form.COUNTER_PAIR, Basis.ANYTIME, above=counts if n else None)
    return replace(base, **changes)


def point(
    value: float | None, breaches: int = 0, count: int | None = None, **changes: Any
) -> ExternalReading:
    base = ExternalReading(Form.GAUGE, Basis.GUARD_ONLY, value=value, breaches=breaches, count=count)
    return replace(base, **changes)


def judged(spec: GateSpec, found: ExternalReading | None) -> GateResult:
    look = replace(evidence(Counts(), window=key()), external={"errors": found} if found else {})
    return judge([spec], look, terms(0.5), Carry()).results[0]


GAUGE = gate(Form.GAUGE, "2")
POINT = gate(Form.GAUGE, "2", point=True)
VERDICTS: dict[str, tuple[GateSpec, ExternalReading | None, Reason]] = {
    "few bad": (gate(), reading(1000, 20), Reason.BOUND_INSIDE_LIMIT),
    "many bad": (gate(), reading(1000, 120), Reason.BOUND_OUTSIDE_LIMIT),
    "at the limit": (gate(), reading(1000, 50), Reason.BOUND_STRADDLES_LIMIT),
    "few units": (gate(min_samples=2000), reading(1000, 2), Reason.BELOW_MIN_SAMPLES),
    "nothing counted": (gate(), reading(), Reason.NO_DATA),
    "no such source": (gate(), None, Reason.QUERY_FAILED),
    "query failed beside good counts": (
        gate(),
        reading(1000, 2, error=Reason.QUERY_FAILED),
        Reason.QUERY_FAILED,
    ),
    "reset unknown": (gate(), reading(1000, 2, error=Reason.RESET_UNKNOWN), Reason.RESET_UNKNOWN),
    "harm outranks an unreadable source": (
        gate(),
        reading(1000, 120, error=Reason.QUERY_FAILED),
        Reason.BOUND_OUTSIDE_LIMIT,
    ),
    "not all read": (gate(), reading(1000, 2, complete=False), Reason.COVERAGE_INCOMPLETE),
    "k unknown": (gate(design_effect=None), reading(1000, 2), Reason.DESIGN_EFFECT_UNKNOWN),
    "brackets disagree": (gate(), reading(1000, 90, 10, basis=Basis.BRACKET), Reason.BOUND_STRADDLES_LIMIT),
    "may not fail": (gate(can_fail=False), reading(1000, 120), Reason.BOUND_STRADDLES_LIMIT),
    "a value under the limit never passes": (GAUGE, point(1.0), Reason.BOUND_STRADDLES_LIMIT),
    "two breaches": (GAUGE, point(3.0, 2), Reason.BOUND_STRADDLES_LIMIT),
    "three breaches": (GAUGE, point(3.0, 3), Reason.BOUND_OUTSIDE_LIMIT),
    "three breaches that may not fail": (
        gate(Form.GAUGE, "2", can_fail=False),
        point(3.0, 3),
        Reason.BOUND_STRADDLES_LIMIT,
    ),
    "an empty vector": (GAUGE, point(None), Reason.NO_DATA),
    "a value that failed to come": (GAUGE, point(None, error=Reason.QUERY_FAILED), Reason.QUERY_FAILED),
    "declared point": (POINT, point(1.0, count=500), Reason.POINT_THRESHOLD),
    "declared point, few units": (POINT, point(1.0, count=50), Reason.BELOW_MIN_SAMPLES),
    "declared point without its count": (POINT, point(1.0), Reason.NO_DATA),
    "declared point over the limit": (POINT, point(2.5, count=500), Reason.BOUND_STRADDLES_LIMIT),
}


@pytest.mark.parametrize("case", VERDICTS)
def test_verdict(case: str) -> None:
    spec, found, reason = VERDICTS[case]
    assert judged(spec, found).reason is reason


def test_what_is_shown() -> None:
    got = judged(gate(), reading(1000, 20))
    assert (got.value, got.n, got.basis, got.k) == (0.02, 1000, Basis.ANYTIME, 1.0)
    assert got.bound is not None and 0.02 < got.bound < 0.05
    assert judged(gate(), reading(1000, 20, basis=Basis.BRACKET)).basis is Basis.BRACKET
    assert judged(POINT, point(1.0, count=500)).basis is Basis.POINT


def test_nothing_waits_for_a_value_that_cannot_pass() -> None:
    assert not GAUGE.required
    assert POINT.required


DECLARED = GateDeclaration(
    "errors", metrics.EXTERNAL, Decimal("0.05"), external=ExternalTerms(Form.COUNTER_PAIR, True)
)


def test_a_counting_gate_has_cells_and_counts_where_requests_are_served() -> None:
    alone = planned_cells((), [Stage.SHADOW, Stage.CANARY, Stage.FULL], exact=False)
    with_it = planned_cells((DECLARED,), [Stage.SHADOW, Stage.CANARY, Stage.FULL], exact=False)
    assert with_it == alone + 2
    assert "errors" not in {g.name for g in resolve((DECLARED,), Stage.SHADOW, exact=False)}


IMPOSSIBLE: dict[str, dict[str, Any]] = {
    "no query": {"external": None},
    "a histogram without a quantile": {"external": ExternalTerms(Form.CLASSIC_HISTOGRAM, True)},
    "counters with a quantile": {"quantile": Decimal(99)},
    "a share of one": {"limit": Decimal(1)},
    "counts judged by value": {"external": ExternalTerms(Form.COUNTER_PAIR, True, point=True)},
    "a query for another metric": {"metric": metrics.EXPOSED_STALL_FRACTION},
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_declarations_that_cannot_be(case: str) -> None:
    with pytest.raises(LimitError):
        replace(DECLARED, **IMPOSSIBLE[case])


def test_blocks_of_a_window_give_the_next_its_design_effect() -> None:
    sums = BlockSums()
    for i in range(MIN_BLOCKS):
        sums.add_one_arm(20, 10 if i % 10 == 0 else 0)
    spec = gate(design_effect=None)
    found = estimates([spec], WindowCounts(), 0.5, {"errors": reading(4000, 200, blocks=sums)})
    assert found["errors"].k_hat > 5
    look = replace(evidence(Counts(), window=key()), external={"errors": reading(1000, 2)})
    got = judge([spec], look, replace(terms(0.5), estimates=found), Carry()).results[0]
    assert got.k is not None and got.k > 7.5


def test_a_streak_takes_each_time_once_and_ends_at_a_good_value() -> None:
    streak = Streak()
    for at, value in ((0.0, 3.0), (0.0, 3.0), (10.0, 3.0), (20.0, 1.0), (30.0, 3.0)):
        streak.take(at, value, 2.0)
    assert (streak.breaches, streak.value) == (1, 3.0)


@given(st.sampled_from(list(Form)), st.floats(0.0, 1.0), st.integers(0, 5), st.booleans())
def test_what_cannot_be_read_never_passes(
    form: Form, value: float, breaches: int, point_declared: bool
) -> None:
    limit = "0.5"
    spec = gate(form, limit, point=point_declared and not form.counts)
    found = ExternalReading(
        form,
        Basis.ANYTIME,
        error=Reason.QUERY_FAILED,
        above=Above(5000, 0, 0, True),
        value=value,
        breaches=breaches,
        count=5000,
    )
    assert judged(spec, found).verdict is not Verdict.PASS
