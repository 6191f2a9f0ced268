"""Golden values of the rules: budgets, limits, verdict order, external metrics, delta protocol.

The ids are those of the specification's vectors; the figures are literals, computed by its reference.
"""

from __future__ import annotations

import math
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from kvtier_evidence.budgets import LOG_E_CAP, Cell, alpha_promote, cause, fail_total
from kvtier_evidence.delta import Delta, DeltaLog
from kvtier_evidence.evalues import NEG
from kvtier_evidence.limits import LimitError, LimitRange, check_range, parse_limit, parse_quantile
from kvtier_evidence.reader import Applied, WindowReader
from kvtier_evidence.verdicts import (
    VERDICT_OF,
    Outcome,
    Reason,
    Statistics,
    Verdict,
    statistical_outcome,
    zero_outcome,
)
from kvtier_evidence.window import WindowCounts, WindowKey

# ---------------------------------------------------------------- budgets


def portfolio(high: int, log_e: float, low: float) -> float:
    return fail_total(Cell(f"g{i}", "w", 1 / 30, log_e if i < high else low) for i in range(30))


def test_b1_shares_of_attempts() -> None:
    assert [alpha_promote(0.05, i) for i in (1, 2, 3)] == pytest.approx([0.04, 0.008, 0.0016], rel=1e-12)


def test_b2_shares_sum_to_the_budget() -> None:
    assert sum(alpha_promote(0.05, i) for i in range(1, 61)) == pytest.approx(0.05, rel=1e-12)


def test_b3_weighted_sum_over_thirty_cells() -> None:
    assert portfolio(1, 8.1, -2.0) == pytest.approx(4.6999932164, rel=1e-9)


def test_b4_threshold() -> None:
    assert -math.log(0.01) == pytest.approx(4.60517018599, rel=1e-9)


@pytest.mark.parametrize(("gates_high", "over"), [(2, True), (1, False)], ids=["B5-together", "B5-alone"])
def test_b5_two_gates_together(gates_high: int, over: bool) -> None:
    assert (portfolio(gates_high, 7.6, -5.0) >= math.log(100)) is over


def test_shares_are_counted_from_one() -> None:
    with pytest.raises(ValueError, match="from 1"):
        alpha_promote(0.05, 0)


def test_a_cell_is_capped_and_nothing_is_nan() -> None:
    cells = [Cell("a", "w", 0.5, math.inf), Cell("b", "w", 0.5, NEG)]
    assert fail_total(cells) == pytest.approx(LOG_E_CAP - math.log(2))
    assert fail_total([]) == NEG
    assert fail_total([Cell("b", "w", 0.5, NEG)]) == NEG
    found = cause(cells)
    assert found is not None
    assert found.gate == "a"


def test_weights_over_one_are_scaled_down() -> None:
    """A window opened again adds cells; the budget does not grow."""
    assert fail_total([Cell(f"g{i}", "w", 0.5, 5.0) for i in range(4)]) == pytest.approx(5.0)


# ---------------------------------------------------------------- limits


@pytest.mark.parametrize(
    ("text", "want"),
    [("0.05", "0.05"), ("5%", "0.05"), ("50m", "0.05"), (1, "1"), ("1.05", "1.05"), ("0", "0")],
    ids=["L1-decimal", "L1-percent", "L1-milli", "L1-int", "L1-ratio", "L1-zero"],
)
def test_l1_limits(text: object, want: str) -> None:
    assert parse_limit(text) == Decimal(want)


@pytest.mark.parametrize(
    "text",
    [
        "-1",
        "1e-3",
        "NaN",
        ".5",
        "05",
        "",
        0.05,
        True,
        "1.5m",
        "1.0000000001",
        "1000000",
        10**6,
        -1,
        "5 %",
        "\u0661",
        None,
    ],
    ids=repr,
)
def test_l2_refused(text: object) -> None:
    with pytest.raises(LimitError):
        parse_limit(text)


RANGES = {
    "fraction 1": (LimitRange.FRACTION, "1", False),
    "fraction 0": (LimitRange.FRACTION, "0", False),
    "fraction .999": (LimitRange.FRACTION, "0.999", True),
    "ratio .5": (LimitRange.RATIO, "0.5", True),
    "ratio .49": (LimitRange.RATIO, "0.49", False),
    "zero 0": (LimitRange.ZERO, "0", True),
    "zero 1m": (LimitRange.ZERO, "1m", False),
    "positive 0": (LimitRange.POSITIVE, "0", False),
    "positive 2": (LimitRange.POSITIVE, "2", True),
}


@pytest.mark.parametrize("case", RANGES)
def test_ranges_by_kind(case: str) -> None:
    legal, text, accepted = RANGES[case]
    if accepted:
        assert check_range(parse_limit(text), legal) == parse_limit(text)
    else:
        with pytest.raises(LimitError, match="is not"):
            check_range(parse_limit(text), legal)


@pytest.mark.parametrize(
    ("q", "legal"), [(99, True), ("99.9", True), (50, False), (100, False), ("99%", False)]
)
def test_quantiles_are_percent(q: object, legal: bool) -> None:
    if legal:
        assert parse_quantile(q) == Decimal(str(q))
    else:
        with pytest.raises(LimitError):
            parse_quantile(q)


# ---------------------------------------------------------------- verdicts

FAVOURABLE = Statistics(
    log_pass=-math.log(0.04) + 0.1,
    alpha_pass=0.04,
    n=3000,
    min_samples=2000,
    log_fail_total=-3.0,
    alpha_fail=0.01,
    two_arm=True,
)
UNREADABLE = Reason.AGENT_UNREACHABLE

VERDICTS: dict[str, tuple[dict[str, Any], Reason]] = {
    "T1": ({}, Reason.BOUND_INSIDE_LIMIT),
    "T2": ({"n": 1999}, Reason.BELOW_MIN_SAMPLES),
    "T3": ({"log_pass": 1.0}, Reason.BOUND_STRADDLES_LIMIT),
    "T4": ({"log_pass": NEG, "n": 40, "log_fail_total": 4.7}, Reason.BOUND_OUTSIDE_LIMIT),
    "T5": (
        {"log_pass": NEG, "n": 400, "log_fail_total": 5.0, "error": UNREADABLE},
        Reason.BOUND_OUTSIDE_LIMIT,
    ),
    "T6": (
        {"log_pass": 9.0, "n": 9000, "log_fail_total": NEG, "error": UNREADABLE},
        Reason.AGENT_UNREACHABLE,
    ),
    "T7": (
        {"log_pass": 9.0, "n": 9000, "log_fail_total": 6.0, "split_log_e": 9.3},
        Reason.SAMPLE_RATIO_MISMATCH,
    ),
    "T8": (
        {"log_pass": NEG, "n": 9000, "log_fail_total": 6.0, "split_log_e": 9.3, "two_arm": False},
        Reason.BOUND_OUTSIDE_LIMIT,
    ),
    "T9": (
        {"log_pass": 9.0, "n": 9000, "log_fail_total": NEG, "complete": False},
        Reason.COVERAGE_INCOMPLETE,
    ),
    "T10": ({"log_pass": 0.0, "n": 0, "log_fail_total": 0.0}, Reason.BELOW_MIN_SAMPLES),
    "T11": (
        {"log_pass": 9.0, "n": 9000, "log_fail_total": NEG, "k_known": False},
        Reason.DESIGN_EFFECT_UNKNOWN,
    ),
    "mismatch, one arm, no harm": ({"split_log_e": 9.3, "two_arm": False}, Reason.SAMPLE_RATIO_MISMATCH),
    "split just under 10^4": ({"split_log_e": 9.2}, Reason.BOUND_INSIDE_LIMIT),
    "blocked before k": (
        {"blocked": Reason.NO_CONCURRENT_BASELINE, "k_known": False},
        Reason.NO_CONCURRENT_BASELINE,
    ),
    "incomplete before blocked": ({"blocked": Reason.NO_DATA, "complete": False}, Reason.COVERAGE_INCOMPLETE),
}


@pytest.mark.parametrize("vid", VERDICTS)
def test_statistical_verdict(vid: str) -> None:
    change, reason = VERDICTS[vid]
    assert statistical_outcome(replace(FAVOURABLE, **change)) == Outcome(reason)


ZERO: dict[str, tuple[Outcome, Reason]] = {
    "T12": (zero_outcome(1, 5, 2000, error=UNREADABLE), Reason.ZERO_TOLERANCE_MOVED),
    "T13-enough": (zero_outcome(0, 2500, 2000), Reason.NONE_IN_N),
    "T13-few": (zero_outcome(0, 500, 2000), Reason.BELOW_MIN_SAMPLES),
    "T13-unreadable": (zero_outcome(0, 2500, 2000, error=Reason.QUERY_FAILED), Reason.QUERY_FAILED),
    "incomplete": (zero_outcome(0, 2500, 2000, complete=False), Reason.COVERAGE_INCOMPLETE),
    "mismatch": (zero_outcome(0, 2500, 2000, mismatch=True), Reason.SAMPLE_RATIO_MISMATCH),
    "event beside a mismatch": (zero_outcome(1, 9, 2000, mismatch=True), Reason.ZERO_TOLERANCE_MOVED),
}


@pytest.mark.parametrize("vid", ZERO)
def test_zero_tolerance_verdict(vid: str) -> None:
    got, reason = ZERO[vid]
    assert got == Outcome(reason)


def test_every_reason_has_one_verdict_and_all_four_exist() -> None:
    assert set(VERDICT_OF) == set(Reason)
    assert set(VERDICT_OF.values()) == set(Verdict)
    assert [v.value for v in Verdict] == ["Pass", "Fail", "Insufficient", "ProviderError"]


# ---------------------------------------------------------------- delta protocol

KEY = WindowKey("uid", 1, "Shadow", 0, "sha256:c", "sha256:b", "sha256:g", 3)


class Agent:
    """One window on one agent, its cells being event counters."""

    def __init__(self, epoch: str) -> None:
        self.counts = WindowCounts()
        self.log = DeltaLog(epoch, self.counts)

    def record(self, *cells: str) -> None:
        for cell in cells:
            self.counts.zero_tolerance[cell] = self.counts.zero_tolerance.get(cell, 0) + 1
            self.log.changed()

    def read(self, epoch: str, ack: int) -> Delta:
        return self.log.read(epoch, ack, settled_cohort=1, assigned_units=0)


class Operator:
    def __init__(self) -> None:
        self.reader = WindowReader(KEY, opened_at=0.0, cohort=10.0, settle=0.0)

    def apply(self, agent: str, reply: Delta) -> Applied:
        return self.reader.apply(agent, reply, now=0.0)

    @property
    def merged(self) -> dict[str, int]:
        return self.reader.evidence(["n1"], now=0.0, interval=1.0).merged.zero_tolerance


def test_k1_k2_repeat_loss_late_arrival_and_restart() -> None:
    agent, operator = Agent("boot1"), Operator()
    agent.record("a", "b")
    first = agent.read("boot1", 0)
    log = [operator.apply("n1", first), operator.apply("n1", first)]
    agent.record("a")
    lost = agent.read("boot1", 2)
    agent.record("c")
    again = agent.read("boot1", 2)
    log += [operator.apply("n1", again), operator.apply("n1", lost)]
    assert log == [Applied.APPLIED, Applied.DUPLICATE, Applied.APPLIED, Applied.DUPLICATE]
    assert (sum(operator.merged.values()), operator.merged["a"]) == (4, 2)

    restarted = Agent("boot2")
    restarted.record("a")
    reply = restarted.read("boot1", 4)
    assert reply.full
    assert operator.apply("n1", reply) is Applied.APPLIED
    assert (operator.merged["a"], sum(operator.merged.values())) == (3, 5)
    assert operator.apply("n1", lost) is Applied.DUPLICATE, "a late reply of the old life"
    assert operator.reader.position("n1").epoch == "boot2"


def test_k3_k4_a_new_operator_reads_from_zero_and_a_gap_is_never_bridged() -> None:
    agent, operator = Agent("boot2"), Operator()
    agent.record("a")
    reply = agent.read("boot2", 0)
    assert operator.apply("n1", reply) is Applied.APPLIED
    assert sum(operator.merged.values()) == 1
    assert operator.apply("n1", replace(reply, from_seq=7, to_seq=9)) is Applied.REBUILD
    assert sum(operator.merged.values()) == 0, "a rebuild drops what was merged"
    assert operator.reader.position("n1").ack_seq == 0
