"""Whatever comes in, counts stay within their bounds; and verdicts keep their order whatever the numbers."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_evidence import metrics
from kvtier_evidence.collector import MAX_SESSIONS, AttemptProbes, CollectorPlan, Counted, WindowCollector
from kvtier_evidence.delta import DeltaLog
from kvtier_evidence.evalues import NEG
from kvtier_evidence.grid import MAX_BINS, MAX_SHIFT, NO_UNITS, Histogram
from kvtier_evidence.reader import Applied, WindowReader
from kvtier_evidence.verdicts import VERDICT_OF, Reason, Statistics, Verdict, statistical_outcome
from kvtier_evidence.window import MAX_PROBES, NO_COUNTS, WindowCounts
from tests.unit.evidence.evidence_builders import Clock, key

# ---------------------------------------------------------------- memory


def deep_bytes(x: object) -> int:
    """Bytes of an object and of what it holds; shared constants count each time."""
    size = sys.getsizeof(x)
    if isinstance(x, dict):
        return size + sum(deep_bytes(k) + deep_bytes(v) for k, v in x.items())
    if isinstance(x, (list, tuple, set, frozenset)):
        return size + sum(deep_bytes(v) for v in x)
    if is_dataclass(x):
        return size + sum(deep_bytes(getattr(x, f.name)) for f in fields(x))
    return size


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(min_value=5e-324, max_value=1.7e308), max_size=60), st.integers(0, 2**32))
def test_bins_stay_bounded_over_the_whole_range_of_floats(values: list[float], seed: int) -> None:
    """Merged from many agents, in pieces, over 2,098 octaves: never over the bound, and nothing is lost."""
    rng = np.random.default_rng(seed)
    merged, n = Histogram(), len(values)
    for v in values:
        merged.add(v)
    for _ in range(4):
        piece = Histogram()
        for v in np.exp(rng.uniform(-700.0, 700.0, 1500)).tolist():
            piece.add(v)
        merged.merge(piece)
        n += 1500
        assert len(merged.bins) <= MAX_BINS
        assert merged.shift <= MAX_SHIFT
    assert merged.n == n == sum(merged.bins.values())
    assert merged.consistent()


def latencies(n: int) -> WindowCounts:
    counts, rng = WindowCounts(), np.random.default_rng(1)
    for metric in (metrics.TPOT_RATIO, metrics.EXPOSED_STALL_FRACTION):
        for arm in ("candidate", "baseline"):
            h = counts.of(metric, arm).histogram
            for v in (0.03 * np.exp(0.35 * rng.standard_normal(n))).tolist():
                h.add(v)
    return counts


def test_a_window_of_ten_thousand_units_is_small() -> None:
    counts = latencies(10_000)
    one = counts.get(metrics.TPOT_RATIO, "candidate").histogram
    assert 600 < len(one.bins) < 900, "765 in the specification"
    log = DeltaLog("boot", counts)
    log.changed()
    log.read("boot", 0, settled_cohort=1, assigned_units=1)
    log.read("boot", 1, settled_cohort=1, assigned_units=1)
    versions = (log._current, log._sent, log._acked)
    assert sum(map(deep_bytes, versions)) < 2 << 20


def test_an_agent_of_a_two_arm_metric_is_kept_without_its_histograms() -> None:
    counts = latencies(10_000)
    log = DeltaLog("boot", counts)
    log.changed()
    op = WindowReader(key(), opened_at=0.0, cohort=10.0, settle=0.0)
    for i in range(20):
        reply = log.read("", 0, settled_cohort=1, assigned_units=1)
        assert op.apply(f"n{i}", reply, now=0.0) is Applied.APPLIED
    seen = op.evidence([f"n{i}" for i in range(20)], now=0.0, interval=1.0)
    assert all((metrics.TPOT_RATIO, "candidate") not in c.metrics for c in seen.agents.values())


def counted(units: int, *, warm: int = 0, gate: str = "") -> WindowCounts:
    """Of one metric of the candidate, as an agent would send it."""
    counts = WindowCounts()
    of = counts.of(metrics.EXPOSED_STALL_FRACTION, "candidate")
    of.histogram.add(0.25, units)
    of.warmup.add(0.25, warm)
    if gate:
        of.above_up[gate] = of.above_down[gate] = units << 32
    return counts


def containers(x: object) -> Iterator[dict[object, object] | list[object] | Histogram]:
    """All dicts, lists and histograms in it."""
    if isinstance(x, (dict, list, Histogram)):
        yield x
    parts: Iterable[object] = ()
    if x is NO_UNITS:
        return
    if isinstance(x, dict):
        parts = x.values()
    elif isinstance(x, (list, tuple)):
        parts = x
    elif is_dataclass(x):
        parts = [getattr(x, f.name) for f in fields(x)]
    for part in parts:
        yield from containers(part)


def test_what_was_never_counted_takes_no_memory() -> None:
    """Of each metric of each agent of a thousand windows nearly all that can be counted is not."""
    op = WindowReader(key(), opened_at=0.0, cohort=10.0, settle=0.0)
    for i in range(5):
        log = DeltaLog("boot", counted(100))
        log.changed()
        reply = log.read("", 0, settled_cohort=1, assigned_units=100)
        assert op.apply(f"n{i}", reply, now=0.0) is Applied.APPLIED
    found = list(containers([*op._agents.values(), op._merged]))
    assert [one for one in found if not one] == [], "an empty dict or list of its own"
    histograms = [one for one in found if isinstance(one, Histogram)]
    assert len({id(one) for one in histograms if one.n}) == 6
    assert {id(one) for one in histograms if not one.n} == {id(NO_UNITS)}


def test_what_is_shared_while_it_is_empty_is_not_shared_afterwards() -> None:
    """One agent counts warm-up units and some above a limit: nobody else's counts change, in this window or
    in another, and counts without sharing add up to the same."""
    logs = {name: DeltaLog("boot", counted(100)) for name in ("a", "b")}
    readers = [WindowReader(key(), opened_at=0.0, cohort=10.0, settle=0.0) for _ in range(2)]
    for log in logs.values():
        log.changed()
    for op in readers:
        for name, log in logs.items():
            reply = log.read("", 0, settled_cohort=1, assigned_units=100)
            assert op.apply(name, reply, now=0.0) is Applied.APPLIED
    more = counted(10, warm=7, gate="stall")
    more.zero_tolerance["x"] = 1
    logs["a"]._current.merge(more)
    logs["a"].changed()
    reply = logs["a"].read("boot", 1, settled_cohort=2, assigned_units=120)
    assert readers[0].apply("a", reply, now=10.0) is Applied.APPLIED
    plain, both = counted(100), WindowCounts()
    for one in (plain, more):
        both.merge(one)
    seen = readers[0].evidence(["a", "b"], now=10.0, interval=10.0)
    assert seen.agents == {"a": both, "b": plain}
    assert seen.merged.get(metrics.EXPOSED_STALL_FRACTION, "candidate").warmup.n == 7
    assert readers[1].evidence(["a", "b"], now=0.0, interval=10.0).agents == {"a": plain, "b": plain}
    assert Histogram() == NO_UNITS and dict(NO_COUNTS) == {}


@pytest.mark.parametrize(
    "change",
    [lambda h: h.add(1.0), lambda h: h.add(None), lambda h: h.merge(Histogram()), lambda h: h.coarsen(1)],
    ids=["a-value", "a-missing-one", "a-merge", "a-coarser-grid"],
)
def test_the_empty_histogram_that_all_share_refuses_a_change(change: Callable[[Histogram], None]) -> None:
    with pytest.raises(TypeError, match="take a copy"):
        change(NO_UNITS)
    assert Histogram() == NO_UNITS
    with pytest.raises(TypeError):
        NO_COUNTS["gate"] = 1


def test_lives_are_remembered_up_to_a_bound() -> None:
    op = WindowReader(key(), opened_at=0.0, cohort=10.0, settle=0.0)
    for life in range(50):
        log = DeltaLog(f"boot{life}", WindowCounts())
        log.changed()
        assert (
            op.apply("n", log.read("", 0, settled_cohort=1, assigned_units=0), now=float(life))
            is Applied.APPLIED
        )
    assert len(op._agents["n"].past) <= 8


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 40), st.integers(1, 60), st.integers(0, 3))
def test_a_collector_holds_at_most_its_table(table: int, units: int, tick: int) -> None:
    clock = Clock()
    plan = CollectorPlan(key(), (), 0.0, settle=100.0, warmup=0.0, max_open_units=table)
    collector = WindowCollector(plan, epoch="boot", clock=clock, probes=AttemptProbes())
    answers = []
    for i in range(units):
        answers.append(
            collector.assign(f"u{i}", tenant="t", session_root_id=f"s{i}", candidate=True, compared=False)
        )
        assert collector.open_units <= table
        clock.advance(float(tick))
    assert answers.count(Counted.TABLE_FULL) == max(0, units - table) or tick > 0
    assert len(collector._settled_ids) <= table
    assert len(collector._sessions) <= MAX_SESSIONS
    clock.advance(200.0)
    requests = collector.read("", 0).increments.get(metrics.REQUESTS, "candidate").histogram
    assert requests.n == units, "none is dropped"


def test_probes_are_bounded() -> None:
    probes = AttemptProbes()
    taken = [probes.add("g", "set", f"p{i}", 0.0) for i in range(MAX_PROBES + 5)]
    assert taken.count(True) == len(probes) == MAX_PROBES


# ---------------------------------------------------------------- order of verdicts

LOGS = st.floats(-50.0, 50.0) | st.just(NEG)
ERRORS = st.sampled_from([None, *(r for r in Reason if VERDICT_OF[r] is Verdict.PROVIDER_ERROR)])
LOOKS = st.builds(
    Statistics,
    log_pass=LOGS,
    alpha_pass=st.just(0.04),
    n=st.floats(0.0, 5000.0),
    min_samples=st.integers(0, 3000),
    log_fail_total=LOGS,
    alpha_fail=st.just(0.01),
    two_arm=st.booleans(),
    error=ERRORS,
    split_log_e=LOGS,
    complete=st.booleans(),
    k_known=st.booleans(),
    blocked=st.sampled_from([None, Reason.NO_DATA, Reason.NO_CONCURRENT_BASELINE]),
)


@settings(max_examples=400, deadline=None)
@given(LOOKS)
def test_the_order_of_verdicts(s: Statistics) -> None:
    """Split mismatch (two arms), Fail, unreadable, split mismatch, coverage, k, floor, Pass, Insufficient."""
    mismatch = s.split_log_e >= math.log(1e4)
    harm = s.log_fail_total >= math.log(100.0)
    got = statistical_outcome(s)
    if mismatch and s.two_arm:
        assert got.reason is Reason.SAMPLE_RATIO_MISMATCH
    elif harm:
        assert got.verdict is Verdict.FAIL
    elif s.error is not None:
        assert got.reason is s.error
    elif mismatch:
        assert got.reason is Reason.SAMPLE_RATIO_MISMATCH
    elif not s.complete:
        assert got.reason is Reason.COVERAGE_INCOMPLETE
    if got.verdict is Verdict.PASS:
        assert s.log_pass >= math.log(25.0) and s.n >= s.min_samples and s.k_known and s.complete
        assert s.error is None and s.blocked is None and not mismatch and not harm


@settings(max_examples=300, deadline=None)
@given(
    LOOKS, st.sampled_from(["error", "complete", "k_known", "n", "blocked", "split_log_e", "log_fail_total"])
)
def test_nothing_unfavourable_makes_a_pass(s: Statistics, what: str) -> None:
    worse = {
        "error": Reason.AGENT_UNREACHABLE,
        "complete": False,
        "k_known": False,
        "n": 0.0,
        "blocked": Reason.NO_DATA,
        "split_log_e": 20.0,
        "log_fail_total": 20.0,
    }
    changed = replace(s, **{what: worse[what]})  # type: ignore[arg-type]
    if statistical_outcome(s).verdict is not Verdict.PASS or what != "n" or s.min_samples > 0:
        assert statistical_outcome(changed).verdict is not Verdict.PASS


@pytest.mark.parametrize("reason", list(Reason))
def test_only_three_reasons_promote(reason: Reason) -> None:
    assert (VERDICT_OF[reason] is Verdict.PASS) == (
        reason in (Reason.BOUND_INSIDE_LIMIT, Reason.NONE_IN_N, Reason.POINT_THRESHOLD)
    )
