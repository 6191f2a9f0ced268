"""Four verdicts, a closed set of reasons, and the order in which they are decided.

Proved harm outranks an unreadable source, which outranks everything favourable. Knows e-values, counts
and flags; not where they come from.

Section 6 of the evidence specification.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from kvtier_evidence.budgets import SPLIT_ALPHA
from kvtier_evidence.evalues import NEG


class Verdict(StrEnum):
    PASS = "Pass"
    FAIL = "Fail"
    INSUFFICIENT = "Insufficient"
    PROVIDER_ERROR = "ProviderError"


class Basis(StrEnum):
    """What a verdict rests on."""

    ANYTIME = "Anytime"
    """A statement that holds at every look."""
    PROBE_SET = "ProbeSet"
    """An exact statement on one finite set; no error budget."""
    EVENT_COUNT = "EventCount"
    """Events among units."""
    BRACKET = "Bracket"
    """At every look, with the nearest bucket's edge on the unfavourable side for the limit."""
    GUARD_ONLY = "GuardOnly"
    """Values that another system has computed: they can fail, never pass."""
    POINT = "Point"
    """The same, declared to pass by value: outside every error budget."""
    CARRIED = "Carried"
    """A Pass on the same candidate and probe set earlier in the attempt."""


class Reason(StrEnum):
    """Every reason belongs to one verdict; see `VERDICT_OF`."""

    BOUND_INSIDE_LIMIT = "BoundInsideLimit"
    NONE_IN_N = "NoneInN"
    POINT_THRESHOLD = "PointThreshold"
    BOUND_OUTSIDE_LIMIT = "BoundOutsideLimit"
    ZERO_TOLERANCE_MOVED = "ZeroToleranceMoved"
    AGENT_UNREACHABLE = "AgentUnreachable"
    EVIDENCE_INCONSISTENT = "EvidenceInconsistent"
    SAMPLE_RATIO_MISMATCH = "SampleRatioMismatch"
    RESET_UNKNOWN = "ResetUnknown"
    QUERY_FAILED = "QueryFailed"
    BOUND_STRADDLES_LIMIT = "BoundStraddlesLimit"
    BELOW_MIN_SAMPLES = "BelowMinSamples"
    COVERAGE_INCOMPLETE = "CoverageIncomplete"
    DESIGN_EFFECT_UNKNOWN = "DesignEffectUnknown"
    NO_CONCURRENT_BASELINE = "NoConcurrentBaseline"
    NO_DATA = "NoData"


VERDICT_OF = {
    Reason.BOUND_INSIDE_LIMIT: Verdict.PASS,
    Reason.NONE_IN_N: Verdict.PASS,
    Reason.POINT_THRESHOLD: Verdict.PASS,
    Reason.BOUND_OUTSIDE_LIMIT: Verdict.FAIL,
    Reason.ZERO_TOLERANCE_MOVED: Verdict.FAIL,
    Reason.AGENT_UNREACHABLE: Verdict.PROVIDER_ERROR,
    Reason.EVIDENCE_INCONSISTENT: Verdict.PROVIDER_ERROR,
    Reason.SAMPLE_RATIO_MISMATCH: Verdict.PROVIDER_ERROR,
    Reason.RESET_UNKNOWN: Verdict.PROVIDER_ERROR,
    Reason.QUERY_FAILED: Verdict.PROVIDER_ERROR,
    Reason.BOUND_STRADDLES_LIMIT: Verdict.INSUFFICIENT,
    Reason.BELOW_MIN_SAMPLES: Verdict.INSUFFICIENT,
    Reason.COVERAGE_INCOMPLETE: Verdict.INSUFFICIENT,
    Reason.DESIGN_EFFECT_UNKNOWN: Verdict.INSUFFICIENT,
    Reason.NO_CONCURRENT_BASELINE: Verdict.INSUFFICIENT,
    Reason.NO_DATA: Verdict.INSUFFICIENT,
}
"""The verdict that each reason stands for."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One reason; the verdict follows from it."""

    reason: Reason

    @property
    def verdict(self) -> Verdict:
        return VERDICT_OF[self.reason]


@dataclass(frozen=True, slots=True)
class Statistics:
    """What a statistical gate's verdict depends on, and nothing else."""

    log_pass: float
    alpha_pass: float
    n: float
    """Units with a value, divided by the design effect."""
    min_samples: int
    log_fail_total: float
    """log SUM w e of every cell begun in the attempt."""
    alpha_fail: float
    two_arm: bool
    error: Reason | None = None
    split_log_e: float = NEG
    complete: bool = True
    k_known: bool = True
    blocked: Reason | None = None
    """Insufficient for a reason of its kind: NoConcurrentBaseline or NoData."""


def statistical_outcome(s: Statistics) -> Outcome:
    """Split mismatch (two arms) > Fail > unreadable > split mismatch > coverage > k > n > Pass."""
    mismatch = s.split_log_e >= -math.log(SPLIT_ALPHA)
    if mismatch and s.two_arm:
        return Outcome(Reason.SAMPLE_RATIO_MISMATCH)
    if s.log_fail_total >= -math.log(s.alpha_fail):
        return Outcome(Reason.BOUND_OUTSIDE_LIMIT)
    if s.error is not None:
        return Outcome(s.error)
    if mismatch:
        return Outcome(Reason.SAMPLE_RATIO_MISMATCH)
    if not s.complete:
        return Outcome(Reason.COVERAGE_INCOMPLETE)
    if s.blocked is not None:
        return Outcome(s.blocked)
    if not s.k_known:
        return Outcome(Reason.DESIGN_EFFECT_UNKNOWN)
    if s.n < s.min_samples:
        return Outcome(Reason.BELOW_MIN_SAMPLES)
    if s.log_pass >= -math.log(s.alpha_pass):
        return Outcome(Reason.BOUND_INSIDE_LIMIT)
    return Outcome(Reason.BOUND_STRADDLES_LIMIT)


def point_outcome(
    value: float | None,
    limit: float,
    *,
    breaches: int,
    fails_at: int | None,
    passes_from: int | None,
    count: int | None,
    error: Reason | None = None,
) -> Outcome:
    """A value that another system computed. fails_at: values over the limit in a row that are a Fail, None:
    never one. passes_from: units that a declared point gate needs, None: it never passes."""
    if fails_at is not None and breaches >= fails_at:
        return Outcome(Reason.BOUND_OUTSIDE_LIMIT)
    if error is not None:
        return Outcome(error)
    if value is None or (passes_from is not None and count is None):
        return Outcome(Reason.NO_DATA)
    if passes_from is None or count is None or value > limit:
        return Outcome(Reason.BOUND_STRADDLES_LIMIT)
    return Outcome(Reason.POINT_THRESHOLD if count >= passes_from else Reason.BELOW_MIN_SAMPLES)


def zero_outcome(
    events: int,
    n: float,
    min_samples: int,
    *,
    error: Reason | None = None,
    mismatch: bool = False,
    complete: bool = True,
) -> Outcome:
    """One event is a Fail whatever else is unreadable; none in enough units, all covered, is a Pass."""
    if events > 0:
        return Outcome(Reason.ZERO_TOLERANCE_MOVED)
    if error is not None:
        return Outcome(error)
    if mismatch:
        return Outcome(Reason.SAMPLE_RATIO_MISMATCH)
    if not complete:
        return Outcome(Reason.COVERAGE_INCOMPLETE)
    return Outcome(Reason.NONE_IN_N if n >= min_samples else Reason.BELOW_MIN_SAMPLES)
