"""Windows, assignment, the metric table, and gates resolved for a stage."""

from __future__ import annotations

from dataclasses import fields, replace
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_evidence import metrics
from kvtier_evidence.assignment import assign, is_candidate, sampled, step_sampled
from kvtier_evidence.design import BlockSums
from kvtier_evidence.external import Form
from kvtier_evidence.gates import ONE, Pair
from kvtier_evidence.gatespec import ExternalTerms, GateDeclaration, planned_cells, resolve, with_defaults
from kvtier_evidence.grid import MAX_BINS, Histogram
from kvtier_evidence.limits import LimitError
from kvtier_evidence.metrics import METRICS, Kind, Scope, Stage
from kvtier_evidence.window import MetricCounts, WindowCounts
from tests.unit.evidence.evidence_builders import DECLARED, key

# ---------------------------------------------------------------- assignment

TEXT = st.text(max_size=12)


@settings(max_examples=80, deadline=None)
@given(TEXT, TEXT, TEXT, st.floats(0, 1), st.floats(0, 1))
def test_assignment_is_stable_and_monotone(uid: str, tenant: str, root: str, f: float, g: float) -> None:
    place = assign(uid, tenant, root)
    assert place == assign(uid, tenant, root)
    assert 0.0 <= place < 1.0
    low, high = sorted((f, g))
    assert is_candidate(uid, tenant, root, high) or not is_candidate(uid, tenant, root, low)
    assert sampled(uid, root, high) or not sampled(uid, root, low)
    assert is_candidate(uid, tenant, root, 1.0)
    assert not is_candidate(uid, tenant, root, 0.0)


def test_assignment_is_pinned() -> None:
    """Agents of different versions must agree: these places never change."""
    places = [assign("uid", "beta", "root"), assign("uid", "betar", "oot"), assign("", "", "")]
    assert places == pytest.approx([0.0672744752, 0.2417841261, 0.4688583297], abs=1e-10)


def test_assignment_sampling_and_steps_are_independent() -> None:
    n = 4000
    arms = [is_candidate("uid", "t", f"r{i}", 0.3) for i in range(n)]
    samples = [sampled("uid", f"r{i}", 0.3) for i in range(n)]
    steps = [step_sampled("uid", f"r{i}", 0, 0.3) for i in range(n)]
    for chosen in (arms, samples, steps):
        assert sum(chosen) / n == pytest.approx(0.3, abs=0.03)
    for x, y in ((arms, samples), (samples, steps), (arms, steps)):
        assert sum(a and b for a, b in zip(x, y, strict=True)) / n == pytest.approx(0.09, abs=0.02)


# ---------------------------------------------------------------- windows

CHANGES = {f.name: (9 if f.type == "int" else "other") for f in fields(key())}


@pytest.mark.parametrize("name", CHANGES)
def test_any_field_of_the_key_opens_another_window(name: str) -> None:
    assert replace(key(), **{name: CHANGES[name]}).digest() != key().digest()
    assert key().digest() == key().digest()


COUNTS = st.builds(
    lambda values, above, events, sessions, probes, blocks: _counts(
        values, above, events, sessions, probes, blocks
    ),
    st.lists(st.one_of(st.none(), st.floats(1e-6, 1e3), st.just(0.0)), max_size=12),
    st.integers(0, ONE),
    st.integers(0, 3),
    st.tuples(st.integers(0, 5), st.integers(0, 5)),
    st.lists(
        st.tuples(st.integers(0, 3), st.one_of(st.none(), st.sampled_from([-1.0, 0.0, 0.5]))), max_size=3
    ),
    st.lists(st.tuples(st.integers(1, 50), st.floats(0, 1)), max_size=3),
)


def _counts(
    values: list[float | None],
    above: int,
    events: int,
    sessions: tuple[int, int],
    probes: list[tuple[int, float | None]],
    blocks: list[tuple[int, float]],
) -> WindowCounts:
    out = WindowCounts(sessions_candidate=sessions[0], sessions_total=sum(sessions))
    for i, v in enumerate(values):
        c = out.of(metrics.OUTPUT_RELATIVE_ERROR, "candidate")
        (c.warmup if i % 3 == 0 else c.histogram).add(v)
    if out.get(metrics.OUTPUT_RELATIVE_ERROR, "candidate").histogram.measured:
        out.of(metrics.OUTPUT_RELATIVE_ERROR, "candidate").above_up["output"] = above
    if events:
        out.zero_tolerance["illegalFallbacks"] = events
    for prompt, d in probes:
        out.probes["quality", "sha256:s", f"p{prompt}"] = Pair.of(d)
    for n, q in blocks:
        out.blocks.setdefault("output", BlockSums()).add_one_arm(n, n * q)
    return out


def merged(*parts: WindowCounts) -> WindowCounts:
    out = WindowCounts()
    for p in parts:
        out.merge(p)
    return out


@settings(max_examples=100, deadline=None)
@given(COUNTS, COUNTS, COUNTS)
def test_merging_is_commutative_and_associative_to_the_bit(
    a: WindowCounts, b: WindowCounts, c: WindowCounts
) -> None:
    assert merged(a, b, c) == merged(c, a, b) == merged(a, merged(b, c))
    assert merged(a, b).total() == a.total() + b.total()
    assert merged(a, b, c).consistent()


@settings(max_examples=100, deadline=None)
@given(COUNTS, COUNTS)
def test_increments_lead_from_one_version_to_the_next(a: WindowCounts, b: WindowCounts) -> None:
    b.probes = {p: v for p, v in b.probes.items() if p not in a.probes}
    later = merged(a, b)
    increments = later.since(a)
    assert merged(a, increments) == later
    assert later.since(later).total() == 0
    assert increments.consistent()


def test_a_decrease_is_refused() -> None:
    more = merged(_counts([0.1, 0.1, 0.1], 0, 1, (1, 1), [], [(3, 0.5)]))
    for less in (WindowCounts(), _counts([], 0, 1, (1, 1), [], [(3, 0.5)])):
        with pytest.raises(ValueError, match="decreased"):
            less.since(more)


def test_a_histogram_stays_within_its_bound() -> None:
    h = Histogram()
    for i in range(9000):
        h.add(2.0 ** (i / 200))
    assert (h.shift, h.n) == (2, 9000)
    assert len(h.bins) <= MAX_BINS
    fine = Histogram()
    fine.add(1.5)
    before = merged(WindowCounts({("tpotRatio", "baseline"): MetricCounts(fine)}))
    coarse = fine.copy()
    coarse.merge(h)
    later = WindowCounts({("tpotRatio", "baseline"): MetricCounts(coarse)})
    assert merged(before, later.since(before)).get("tpotRatio", "baseline").histogram == coarse


# ---------------------------------------------------------------- metrics and gates


def test_the_table_says_what_counts_where() -> None:
    shadow = {m.name for m in METRICS.values() if Stage.SHADOW in m.stages and m.kind is not Kind.COUNT}
    assert shadow == {metrics.OUTPUT_RELATIVE_ERROR, metrics.TASK_SCORE_DROP, *metrics.ZERO_TOLERANCE}
    served = {m.name for m in METRICS.values() if Stage.CANARY in m.stages}
    assert served == set(METRICS) - {metrics.TPOT_REFERENCE}
    full = {m.name for m in METRICS.values() if Stage.FULL in m.stages}
    assert full == set(METRICS)
    assert [m.name for m in METRICS.values() if m.carried] == [metrics.TASK_SCORE_DROP]


def names(stage: Stage, *, exact: bool = False) -> list[str]:
    return [g.name for g in resolve(DECLARED, stage, exact=exact)]


ZEROS = ["illegalFallbacks", "isolationFailures", "allocationFailures", "replayFailures"]


def test_built_in_gates_by_stage() -> None:
    assert names(Stage.SHADOW) == ["output", "quality", *ZEROS]
    assert names(Stage.CANARY) == ["output", "quality", "tail", "tail-median", "stall", *ZEROS]
    assert names(Stage.FULL, exact=True)[-1] == "outputMismatches"


def test_default_limits_and_those_of_a_stage() -> None:
    limits = {
        stage: {g.name: str(g.limit) for g in resolve(DECLARED, stage, exact=False)}
        for stage in (Stage.CANARY, Stage.RAMP, Stage.FULL)
    }
    assert [limits[s]["tail"] for s in limits] == ["1.25", "1.05", "1.25"]
    assert [limits[s]["tail-median"] for s in limits] == ["1.25", "1.25", "1.25"]
    assert limits[Stage.RAMP]["stall"] == "0.02"


def test_a_guard_is_never_stricter_than_its_gate() -> None:
    wide = GateDeclaration("slow-ok", metrics.TPOT_RATIO, Decimal(3), Decimal(75))
    gates = {g.name: g for g in resolve([wide], Stage.CANARY, exact=False)}
    assert gates["slow-ok-median"].limit == 3
    assert (gates["slow-ok-median"].quantile, gates["slow-ok-median"].required) == (50, False)
    assert "tail" not in gates, "a declared tail gate takes the default's place"


def test_where_a_gate_must_pass_and_what_it_inherits() -> None:
    g = GateDeclaration(
        "output", metrics.OUTPUT_RELATIVE_ERROR, Decimal("0.05"), Decimal(99), stages=(Stage.SHADOW,)
    )
    at = {s: resolve([g], s, exact=False, min_samples=30, design_effect=Decimal(2))[0] for s in Stage}
    assert [at[s].required for s in Stage] == [True, False, False, False]
    assert (at[Stage.SHADOW].min_samples, at[Stage.SHADOW].design_effect) == (30, 2)
    own = replace(g, min_samples=7, design_effect=Decimal(1))
    spec = resolve([own], Stage.SHADOW, exact=False, min_samples=30, design_effect=Decimal(2))[0]
    assert (spec.min_samples, spec.design_effect) == (7, 1)
    assert resolve([g], Stage.SHADOW, exact=False)[0].min_samples == 500


@pytest.mark.parametrize("metric", [metrics.EXTERNAL, metrics.EXPOSED_STALL_FRACTION])
def test_a_gate_that_names_only_stages_in_which_it_is_not_counted_is_waited_for(metric: str) -> None:
    """Else no step would wait for it, and nobody would know."""
    counts = ExternalTerms(Form.COUNTER_PAIR, can_fail=True) if metric == metrics.EXTERNAL else None
    gate = GateDeclaration("mine", metric, Decimal("0.01"), stages=(Stage.SHADOW,), external=counts)
    for named, waits in (((Stage.SHADOW,), 3), ((Stage.SHADOW, Stage.RAMP), 1), ((), 3)):
        declared = [replace(gate, stages=named)]
        all_stages = [one for stage in Stage for one in resolve(declared, stage, exact=False)]
        found = [one for one in all_stages if one.name == "mine"]
        assert (len(found), sum(one.required for one in found)) == (3, waits)


def test_planned_cells_count_budgeted_gates_over_all_steps() -> None:
    # Shadow: output, quality. Served steps: also tail, its guard and stall.
    steps = [Stage.SHADOW, Stage.CANARY, Stage.RAMP, Stage.RAMP, Stage.FULL]
    assert planned_cells(DECLARED, steps, exact=False) == 2 + 4 * 5
    probe_set = (DECLARED[0], replace(DECLARED[1], scope=Scope.PROBE_SET))
    assert planned_cells(probe_set, steps, exact=False) == 1 + 4 * 4


REFUSED = {
    "a reference": ("g", metrics.TPOT_REFERENCE, "1.5", "99"),
    "unknown metric": ("g", "latency", "0.05", None),
    "a count": ("g", metrics.REQUESTS, "0.05", None),
    "the split": ("g", metrics.SESSION_SPLIT, "0.05", None),
    "no quantile": ("g", metrics.TPOT_RATIO, "1.05", None),
    "a quantile too many": ("g", metrics.EXPOSED_STALL_FRACTION, "0.02", "99"),
    "a ratio under .5": ("g", metrics.TPOT_RATIO, "0.4", "99"),
    "a drop of 1": ("g", metrics.TASK_SCORE_DROP, "1", None),
    "a tolerance of 1": ("g", metrics.ILLEGAL_FALLBACKS, "1", None),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_declarations(case: str) -> None:
    name, metric, limit, quantile = REFUSED[case]
    with pytest.raises(LimitError, match=r"^gate g: "):
        GateDeclaration(name, metric, Decimal(limit), Decimal(quantile) if quantile else None)


def test_refused_scope_effect_and_names() -> None:
    with pytest.raises(LimitError, match="ProbeSet"):
        GateDeclaration("s", metrics.EXPOSED_STALL_FRACTION, Decimal("0.02"), scope=Scope.PROBE_SET)
    with pytest.raises(LimitError, match="at least 1"):
        GateDeclaration("s", metrics.EXPOSED_STALL_FRACTION, Decimal("0.02"), design_effect=Decimal("0.5"))
    with pytest.raises(LimitError, match="used twice"):
        with_defaults([DECLARED[0], replace(DECLARED[1], name="tail")], exact=False)
    with pytest.raises(LimitError, match=r"^gate t: perStage Canary: 0\.1 is not a ratio of at least 0\.5"):
        GateDeclaration(
            "t", metrics.TPOT_RATIO, Decimal("1.05"), Decimal(99), per_stage=((Stage.CANARY, Decimal("0.1")),)
        )


def test_an_absolute_limit_in_full_is_a_guard_of_its_own_and_exists_where_it_is_declared() -> None:
    plain = GateDeclaration("tail", metrics.TPOT_RATIO, Decimal("1.25"), Decimal(99))
    bound = replace(plain, absolute=Decimal("1.5"), min_samples=70, design_effect=Decimal(2))
    for stage in (Stage.CANARY, Stage.RAMP):
        assert [g.name for g in resolve([bound], stage, exact=False)][:3] == ["tail", "tail-median", "stall"]
        assert resolve([bound], stage, exact=False)[0].absolute == Decimal("1.5"), "they measure for it"
    guard = resolve([bound], Stage.FULL, exact=False)[2]
    assert (guard.name, guard.metric.kind, guard.metric.two_arm) == ("tail-absolute", Kind.REFERENCE, False)
    assert (guard.limit, guard.quantile, guard.required) == (Decimal("1.5"), 99, False)
    assert (guard.min_samples, guard.design_effect, guard.budgeted) == (70, 2, True)
    assert "tail-absolute" not in [g.name for g in resolve([plain], Stage.FULL, exact=False)]
    steps = [Stage.SHADOW, Stage.CANARY, Stage.RAMP, Stage.FULL]
    assert planned_cells([bound], steps, exact=False) == planned_cells([plain], steps, exact=False) + 1


@pytest.mark.parametrize("limit", ["0.99", "100.5"])
def test_an_absolute_limit_has_a_range(limit: str) -> None:
    tail = GateDeclaration("tail", metrics.TPOT_RATIO, Decimal("1.25"), Decimal(99))
    with pytest.raises(LimitError, match="tail: absoluteInFull is for tpotRatio, at least 1 and at most"):
        replace(tail, absolute=Decimal(limit))
    for legal in ("1", "100"):
        assert replace(tail, absolute=Decimal(legal)).absolute == Decimal(legal)
    with pytest.raises(LimitError, match="absoluteInFull is for tpotRatio"):
        GateDeclaration("stall", metrics.EXPOSED_STALL_FRACTION, Decimal("0.02"), absolute=Decimal(2))


def test_an_absolute_guards_name_is_taken() -> None:
    tail = GateDeclaration("tail", metrics.TPOT_RATIO, Decimal("1.25"), Decimal(99), absolute=Decimal(2))
    other = GateDeclaration("tail-absolute", metrics.EXPOSED_STALL_FRACTION, Decimal("0.02"))
    with pytest.raises(LimitError, match="gate name tail-absolute is used twice"):
        with_defaults([tail, other], exact=False)
    with_defaults([replace(tail, absolute=None), other], exact=False)
