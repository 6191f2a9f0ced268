"""The agent's side: settled cohorts, missing values, warm-up, probes, bounds on memory."""

from __future__ import annotations

import math
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_evidence import metrics
from kvtier_evidence.assignment import is_candidate
from kvtier_evidence.collector import (
    AttemptProbes,
    CollectorPlan,
    Counted,
    WindowCollector,
    cohort_seconds,
)
from kvtier_evidence.design import design_effect, design_effect_pair
from kvtier_evidence.gates import ONE, Pair
from kvtier_evidence.units import CollectedGate, Recent
from kvtier_evidence.window import MetricCounts, WindowCounts
from tests.unit.evidence.evidence_builders import ROLLOUT, Clock, key

GATES = (
    CollectedGate("output", metrics.OUTPUT_RELATIVE_ERROR, Decimal("0.05"), Decimal(99)),
    CollectedGate("loose", metrics.OUTPUT_RELATIVE_ERROR, Decimal("0.5"), Decimal(75)),
    CollectedGate("tail", metrics.TPOT_RATIO, Decimal("1.25"), Decimal(99), pair_threshold=0.1),
    CollectedGate("stall", metrics.EXPOSED_STALL_FRACTION, Decimal("0.02")),
    CollectedGate("illegalFallbacks", metrics.ILLEGAL_FALLBACKS, Decimal(0)),
)


class Rig:
    """One collector under a clock that moves when told."""

    def __init__(
        self, *, settle: float = 30.0, warmup: float = 0.0, fraction: float = 0.0, max_open: int = 1000
    ) -> None:
        self.clock = Clock()
        self.probes = AttemptProbes()
        self.plan = CollectorPlan(key(), GATES, fraction, settle, warmup, 10.0, max_open)
        self.collector = self.window()

    def window(self) -> WindowCollector:
        return WindowCollector(self.plan, epoch="boot1", clock=self.clock, probes=self.probes)

    def assign(self, unit: str, *, candidate: bool = True, compared: bool = False, root: str = "") -> Counted:
        return self.collector.assign(
            unit, tenant="beta", session_root_id=root or unit, candidate=candidate, compared=compared
        )

    def end(self, unit: str, *, tokens: int = 11, first: float = 1.0, last: float = 2.0) -> Counted:
        return self.collector.outcome(unit, tokens=tokens, first_token=first, last_token=last)

    @property
    def counts(self) -> WindowCounts:
        return self.collector.read("", 0).increments

    def of(self, metric: str, arm: str = "candidate") -> MetricCounts:
        return self.counts.get(metric, arm)

    @property
    def settled(self) -> int:
        return self.collector.read("", 0).settled_cohort


def test_a_cohort_is_published_when_its_units_ended() -> None:
    rig = Rig()
    rig.assign("a")
    rig.end("a")
    assert rig.counts.total() == 0, "the cohort is still open"
    rig.clock.advance(10.0)
    assert (rig.settled, rig.of(metrics.TPOT_RATIO).histogram.n) == (1, 1)
    assert rig.of(metrics.TPOT_RATIO).histogram.quantile(0.5) == pytest.approx(0.1, rel=0.003)


def test_fast_units_never_overtake_slow_ones() -> None:
    rig = Rig(settle=30.0)
    rig.assign("slow")
    rig.clock.advance(10.0)
    rig.assign("fast")
    rig.end("fast")
    rig.clock.advance(10.0)
    assert (rig.settled, rig.counts.total()) == (0, 0), "cohort 0 still waits, so cohort 1 does too"
    rig.clock.advance(10.0)
    tpot = rig.of(metrics.TPOT_RATIO).histogram
    assert (rig.settled, tpot.n, tpot.missing) == (3, 2, 1), "settle passed: the slow one is missing"


def test_the_value_at_settle_counts_and_a_later_outcome_does_not() -> None:
    rig = Rig(settle=15.0)
    rig.assign("a")
    rig.collector.progress("a", tokens=3, first_token=1.0, last_token=5.0)
    rig.clock.advance(15.0)
    assert rig.end("a") is Counted.SETTLED
    assert rig.of(metrics.TPOT_RATIO).histogram.quantile(0.5) == pytest.approx(2.0, rel=0.003)


def test_an_outcome_after_settle_is_refused_while_the_cohort_waits_for_others() -> None:
    rig = Rig(settle=12.0)
    rig.assign("early")
    rig.clock.advance(9.0)
    rig.assign("late")
    rig.clock.advance(4.0)
    assert rig.end("early") is Counted.SETTLED
    assert rig.end("late") is Counted.COUNTED
    tpot = rig.of(metrics.TPOT_RATIO).histogram
    assert (tpot.n, tpot.missing) == (2, 1)


ENDS = {
    "two tokens": (2, 1.0, 3.0, True, (1, 0), (1, 0)),
    "one token leaves the latency gates": (1, 1.0, 1.0, True, (0, 0), (1, 1)),
    "one token and still running is missing": (1, 1.0, 1.0, False, (1, 1), (1, 1)),
    "no token is missing": (0, 0.0, 0.0, True, (1, 1), (1, 1)),
    "a clock that ran backwards is missing": (5, 3.0, 1.0, True, (1, 1), (1, 0)),
    "NaN is missing": (5, math.nan, 1.0, True, (1, 1), (1, 0)),
}


@pytest.mark.parametrize("case", ENDS)
def test_what_is_a_value(case: str) -> None:
    tokens, first, last, ended, tpot, measured = ENDS[case]
    rig = Rig(settle=10.0)
    rig.assign("a")
    rig.collector.progress("a", tokens=tokens, first_token=first, last_token=last)
    if ended:
        rig.collector.finish("a")
    rig.clock.advance(20.0)
    got = rig.of(metrics.TPOT_RATIO).histogram
    assert (got.n, got.missing) == tpot
    got = rig.of(metrics.MEASURED).histogram
    assert (got.n, got.missing) == measured
    assert rig.of(metrics.REQUESTS).histogram.n == 1


STALLS = {
    "a tenth": (0.1, 1.0, 2.0, 0.1),
    "none": (0.0, 1.0, 2.0, 0.0),
    "more than the wall time": (9.0, 1.0, 2.0, 1.0),
    "no wall time": (0.5, 1.0, 1.0, 1.0),
}


@pytest.mark.parametrize("case", STALLS)
def test_stall_is_a_share_of_decode_time(case: str) -> None:
    stall, first, last, want = STALLS[case]
    rig = Rig()
    rig.assign("a")
    for part in (stall / 2, stall / 2):
        rig.collector.record_stall("a", part)
    rig.end("a", first=first, last=last)
    rig.clock.advance(10.0)
    assert rig.of(metrics.EXPOSED_STALL_FRACTION).histogram.quantile(0.5) == pytest.approx(want, rel=0.003)


def test_a_compared_request_counts_its_error_and_no_latency() -> None:
    rig = Rig()
    rig.assign("a", candidate=False, compared=True)
    for step, error in enumerate((0.01, 0.05, 0.06, 0.7)):
        rig.collector.record_step("a", step, error)
    rig.end("a")
    rig.clock.advance(10.0)
    c = rig.of(metrics.OUTPUT_RELATIVE_ERROR)
    assert (c.histogram.n, c.histogram.missing) == (1, 0)
    assert c.above_up == {"output": ONE // 2, "loose": ONE // 4}, "0.05 is not above a limit of 0.05"
    assert c.above_down == c.above_up
    compared = {metrics.OUTPUT_RELATIVE_ERROR, metrics.OUTPUT_MISMATCHES, metrics.REQUESTS}
    assert {m for m, _ in rig.counts.metrics} == compared
    assert rig.of(metrics.REQUESTS).histogram.n == 1, "the candidate computed for it"


def test_only_a_request_that_was_looked_at_counts_as_without_a_mismatch() -> None:
    rig = Rig()
    for unit, compared in (("served", False), ("looked-at", True), ("never-looked-at", True)):
        rig.assign(unit, compared=compared)
    rig.collector.record_step("looked-at", 0, 0.0)
    for unit in ("served", "looked-at", "never-looked-at"):
        rig.collector.finish(unit)
    rig.clock.advance(10.0)
    found = rig.of(metrics.OUTPUT_MISMATCHES).histogram
    assert (found.measured, found.missing) == (1, 1)
    assert rig.of(metrics.REQUESTS).histogram.measured == 3


def test_thirds_are_rounded_outward() -> None:
    rig = Rig()
    rig.assign("a", compared=True)
    for step, error in enumerate((0.01, 0.01, 0.06)):
        rig.collector.record_step("a", step, error)
    rig.collector.finish("a")
    rig.clock.advance(10.0)
    c = rig.of(metrics.OUTPUT_RELATIVE_ERROR)
    assert (c.above_down["output"], c.above_up["output"]) == (ONE // 3, ONE // 3 + 1)


def test_a_step_without_a_value_is_above_for_pass_and_under_for_fail() -> None:
    rig = Rig()
    rig.assign("a", compared=True)
    for step, error in enumerate((0.01, math.nan, None, math.inf)):
        rig.collector.record_step("a", step, error)
    rig.assign("b", compared=True)
    rig.collector.record_step("b", 0, None)
    rig.assign("c", compared=True)
    for unit in "abc":
        rig.collector.finish(unit)
    rig.clock.advance(10.0)
    c = rig.of(metrics.OUTPUT_RELATIVE_ERROR)
    assert (c.above_up["output"], c.above_down.get("output", 0)) == (ONE * 3 // 4, 0)
    assert (c.histogram.n, c.histogram.missing) == (3, 2), "no compared step with a value is no value"


def test_warm_up_is_kept_apart() -> None:
    rig = Rig(warmup=15.0)
    for i in range(3):
        rig.assign(f"u{i}", compared=True)
        rig.collector.record_step(f"u{i}", 0, 0.9)
        rig.collector.finish(f"u{i}")
        rig.clock.advance(10.0)
    c = rig.of(metrics.OUTPUT_RELATIVE_ERROR)
    assert (c.warmup.n, c.histogram.n) == (2, 1), "cohorts that begin before the warm-up is over"
    assert (c.warmup_above_down["output"], c.above_down["output"]) == (2 * ONE, ONE)


def test_events_are_visible_at_once() -> None:
    rig = Rig()
    rig.assign("a")
    assert rig.collector.record_event(metrics.ILLEGAL_FALLBACKS) is Counted.COUNTED
    assert rig.counts.zero_tolerance == {metrics.ILLEGAL_FALLBACKS: 1}
    assert rig.collector.record_event("tpotRatio") is Counted.NOT_A_METRIC
    assert rig.collector.record_event(metrics.ILLEGAL_FALLBACKS, 0) is Counted.NOT_A_METRIC


def test_a_prompt_counts_once_per_attempt_and_in_each_of_its_windows() -> None:
    rig = Rig()
    assert rig.collector.record_probe("quality", "sha256:s", "p1", 0.25) is Counted.COUNTED
    assert rig.collector.record_probe("quality", "sha256:s", "p1", -1.0) is Counted.PROBE_REPEATED
    assert rig.collector.record_probe("quality", "sha256:s", "p2", math.nan) is Counted.COUNTED
    first = rig.counts.probes
    rig.collector = rig.window()
    assert rig.counts.probes == first
    assert first["quality", "sha256:s", "p1"] == Pair(0.25, 0.25)
    assert first["quality", "sha256:s", "p2"].missing
    assert rig.collector.record_probe("quality", "sha256:s", "p1", 0.0) is Counted.PROBE_REPEATED


def test_a_pair_that_comes_after_its_stage_is_shown_in_the_next_window_once() -> None:
    rig = Rig()
    before = rig.collector
    rig.collector = rig.window()
    epoch, seen = "boot1", rig.collector.read("", 0).to_seq
    assert before.record_probe("quality", "sha256:s", "p1", 0.25) is Counted.COUNTED
    delta = rig.collector.read(epoch, seen)
    assert delta.increments.probes == {("quality", "sha256:s", "p1"): Pair(0.25, 0.25)}
    assert rig.collector.read(epoch, delta.to_seq).increments == WindowCounts()


def test_retries_are_one_unit_before_and_after_settling() -> None:
    rig = Rig()
    rig.assign("a")
    assert rig.assign("a", candidate=False) is Counted.ALREADY_ASSIGNED
    rig.end("a")
    rig.clock.advance(10.0)
    assert rig.assign("a") is Counted.ALREADY_ASSIGNED
    assert rig.end("never") is Counted.UNKNOWN_UNIT
    assert rig.of(metrics.REQUESTS).histogram.n == 1


def test_units_over_the_table_are_missing_not_dropped() -> None:
    rig = Rig(max_open=2)
    assert [rig.assign(u) for u in "abc"] == [Counted.COUNTED, Counted.COUNTED, Counted.TABLE_FULL]
    for u in "ab":
        rig.end(u)
    rig.clock.advance(10.0)
    tpot = rig.of(metrics.TPOT_RATIO).histogram
    assert (tpot.n, tpot.missing) == (3, 1)
    assert rig.collector.open_units == 0


def test_sessions_are_counted_once_and_hashes_recomputed() -> None:
    rig = Rig(fraction=0.5)
    roots = [f"root{i}" for i in range(200)]
    arms = {r: is_candidate(ROLLOUT, "beta", r, 0.5) for r in roots}
    for i, root in enumerate(roots * 2):
        rig.assign(f"u{i}", candidate=arms[root], root=root)
    counts = rig.counts
    assert (counts.sessions_total, counts.sessions_candidate) == (200, sum(arms.values()))
    assert counts.assignment_disagreements == 0
    rig.assign("wrong", candidate=not arms["root0"], root="root0")
    assert rig.counts.assignment_disagreements == 1


def test_blocks_are_cohorts_and_sessions() -> None:
    rig = Rig()
    for cohort in range(6):
        for i in range(10):
            unit = f"{cohort}.{i}"
            rig.assign(unit, compared=True, root=f"root{i % 2}")
            rig.collector.record_step(unit, 0, 0.9 if cohort < 2 and i < 5 else 0.01)
            rig.collector.finish(unit)
        rig.clock.advance(10.0)
    blocks = rig.counts.blocks
    assert (blocks["output"].blocks, blocks["output"].units) == (6, 60)
    # Reference: six blocks of ten, two of them with five exceedances.
    assert design_effect(blocks["output"]) == pytest.approx(
        1.2 * (2 * (5 - 10 / 6) ** 2 + 4 * (10 / 6) ** 2) / (60 * (1 / 6) * (5 / 6))
    )
    assert blocks["output/session"].blocks == 2
    assert blocks["output/session"].sums["n*n"] == 2 * 30.0**2


def test_pair_blocks_count_both_arms_against_their_lines() -> None:
    rig = Rig(fraction=0.0)
    for i, (candidate, tpot) in enumerate([(True, 0.12), (True, 0.13), (False, 0.09), (False, 0.11)]):
        rig.assign(f"u{i}", candidate=candidate)
        rig.end(f"u{i}", tokens=2, first=0.0, last=tpot)
    rig.clock.advance(10.0)
    sums = rig.counts.blocks["tail"].sums
    assert [sums[v] for v in ("nc", "xc", "nb", "xb")] == [2.0, 1.0, 2.0, 1.0]


def test_sessions_are_blocks_of_a_ratio_too() -> None:
    """Whole sessions are slow: cohorts mix ten of them and do not show it, sessions do."""
    rig = Rig(fraction=0.0)
    for _ in range(8):
        for s in range(20):
            rig.assign(f"u{rig.clock.now}.{s}", candidate=s < 10, root=f"root{s}")
            slow = s % 5 == 0
            rig.end(f"u{rig.clock.now}.{s}", tokens=2, first=0.0, last=0.2 if slow else 0.01)
        rig.clock.advance(10.0)
    cohorts, sessions = rig.counts.blocks["tail"], rig.counts.blocks["tail/session"]
    assert (cohorts.blocks, sessions.blocks) == (8, 20)
    assert cohorts.sums["xc"] == sessions.sums["xc"] == 16.0
    assert sessions.sums["xc*xc"] == 2 * 8.0**2
    assert design_effect_pair(cohorts, 0.5) == 1.0
    assert design_effect_pair(sessions, 0.5) == pytest.approx(8.0 * 20 / 19)


def test_a_repeated_look_at_a_quiet_window_brings_nothing() -> None:
    rig = Rig()
    rig.assign("a")
    rig.end("a")
    rig.clock.advance(10.0)
    first = rig.collector.read("", 0)
    second = rig.collector.read("boot1", first.to_seq)
    assert (second.full, second.increments.total(), second.to_seq) == (False, 0, first.to_seq)
    assert second.total_units == first.total_units == first.increments.total()


@pytest.mark.parametrize(("settle", "want"), [(120.0, 10.0), (30.0, 10.0), (6.0, 2.0), (0.0, 1.0)])
def test_cohort_length_follows_settle(settle: float, want: float) -> None:
    assert cohort_seconds(settle) == want


def test_recent_forgets_the_longest_unused() -> None:
    seen: Recent[str, int] = Recent(2)
    seen.put("a", 1)
    seen.put("b", 2)
    assert seen.get("a") == 1
    seen.put("c", 3)
    assert ("a" in seen, "b" in seen, len(seen)) == (True, False, 2)


@pytest.mark.parametrize(
    "bad", [{"fraction": 1.1}, {"settle": -1.0}, {"warmup": -1.0}], ids=["fraction", "settle", "warmup"]
)
def test_a_plan_that_cannot_be_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="fraction in"):
        Rig(**bad)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["assign", "step", "end", "finish", "tick"]),
        st.integers(0, 15),
        st.floats(0.0, 30.0),
        st.booleans(),
        st.booleans(),
    ),
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(EVENTS, st.sampled_from([0.0, 5.0, 40.0]), st.sampled_from([0.0, 25.0]))
def test_every_assigned_unit_is_counted_exactly_once(
    events: list[tuple[str, int, float, bool, bool]], settle: float, warmup: float
) -> None:
    rig = Rig(settle=settle, warmup=warmup, max_open=8)
    assigned = compared = 0
    for what, i, x, candidate, sample in events:
        unit = f"u{i}"
        match what:
            case "assign":
                if rig.assign(unit, candidate=candidate, compared=sample) is not Counted.ALREADY_ASSIGNED:
                    assigned, compared = assigned + 1, compared + sample
            case "step":
                rig.collector.record_step(unit, i, x / 100)
            case "end":
                rig.end(unit, tokens=i, first=1.0, last=1.0 + x)
            case "finish":
                rig.collector.finish(unit)
            case _:
                rig.clock.advance(x)
    rig.clock.advance(settle + 20.0)
    reply = rig.collector.read("", 0)
    counts = reply.increments
    assert counts.consistent()

    def n(metric: str) -> int:
        arms = [counts.get(metric, a) for a in ("candidate", "baseline")]
        return sum(c.histogram.n + c.warmup.n for c in arms)

    assert (n(metrics.REQUESTS), reply.assigned_units) == (assigned, assigned)
    assert n(metrics.OUTPUT_RELATIVE_ERROR) == compared
    assert n(metrics.MEASURED) == assigned - compared
    assert n(metrics.TPOT_RATIO) <= assigned - compared
    assert rig.collector.open_units == 0
