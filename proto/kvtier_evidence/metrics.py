"""The table of metrics: what each measures, of which arms, and in which stages it counts.

One place that both ends of the wire read. Knows names and kinds; computes nothing.

Section 1 of the evidence specification and the table "Gates that count" of the release design.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from typing import Final

from kvtier_evidence.limits import LimitRange


class Stage(StrEnum):
    SHADOW = "Shadow"
    CANARY = "Canary"
    RAMP = "Ramp"
    FULL = "Full"


class Arm(StrEnum):
    CANDIDATE = "candidate"
    BASELINE = "baseline"
    PAIR = "pair"


class Kind(StrEnum):
    QUANTILE = "quantile"
    """Quantile of a unit's value against a known limit (4.1)."""
    RATIO = "ratioOfQuantiles"
    """Two concurrent arms (4.3)."""
    MEAN = "boundedMean"
    """Mean of values in [0, 1] (4.4)."""
    PAIRED = "pairedDifference"
    """Mean of differences in [-1, 1], one per prompt (4.5)."""
    ZERO = "zeroTolerance"
    """No event at all (4.6)."""
    SPLIT = "split"
    """Sample ratio of the assignment (4.7)."""
    EXTERNAL = "external"
    """A metric of another system, one-arm (8)."""
    REFERENCE = "quantileAgainstReference"
    """One arm's quantile against a bound that an earlier window had for the other arm (9); never declared."""
    COUNT = "count"
    """Units counted for others' sake; never gated."""


class Scope(StrEnum):
    POPULATION = "Population"
    PROBE_SET = "ProbeSet"


ALL: Final = frozenset(Stage)
SERVED: Final = frozenset({Stage.CANARY, Stage.RAMP, Stage.FULL})


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table. The harmful side of every metric is the high one."""

    name: str
    kind: Kind
    unit: str
    value: str
    arms: tuple[Arm, ...]
    stages: frozenset[Stage]
    """Where it counts for Pass and Fail."""
    limits: LimitRange | None = None
    """Legal limits; None: it takes none."""
    carried: bool = False
    """A Pass in Shadow stands in later stages of the attempt, by digest."""
    exact_only: bool = False
    """Built in for candidates that are exact."""

    @property
    def two_arm(self) -> bool:
        return self.kind in (Kind.RATIO, Kind.SPLIT)


OUTPUT_RELATIVE_ERROR: Final = "outputRelativeError"
TPOT_RATIO: Final = "tpotRatio"
TPOT_REFERENCE: Final = "tpotReference"
EXPOSED_STALL_FRACTION: Final = "exposedStallFraction"
TASK_SCORE_DROP: Final = "taskScoreDrop"
ILLEGAL_FALLBACKS: Final = "illegalFallbacks"
ISOLATION_FAILURES: Final = "isolationFailures"
ALLOCATION_FAILURES: Final = "allocationFailures"
REPLAY_FAILURES: Final = "replayFailures"
OUTPUT_MISMATCHES: Final = "outputMismatches"
SESSION_SPLIT: Final = "sessionSplit"
REQUESTS: Final = "requests"
MEASURED: Final = "measured"
EXTERNAL: Final = "external"

_ONE: Final = (Arm.CANDIDATE,)
_TWO: Final = (Arm.CANDIDATE, Arm.BASELINE)


def _zero(name: str, value: str, *, exact_only: bool = False) -> Metric:
    return Metric(name, Kind.ZERO, "event", value, _ONE, ALL, LimitRange.ZERO, exact_only=exact_only)


_ROWS: Final = (
    Metric(
        OUTPUT_RELATIVE_ERROR,
        Kind.QUANTILE,
        "request",
        "fraction of its compared steps with max over layers of |o_c - o_e|/|o_e| above the limit",
        _ONE,
        ALL,
        LimitRange.POSITIVE,
    ),
    Metric(
        TPOT_RATIO,
        Kind.RATIO,
        "request",
        "(t_last - t_first)/(tokens - 1), seconds",
        _TWO,
        SERVED,
        LimitRange.RATIO,
    ),
    Metric(
        TPOT_REFERENCE,
        Kind.REFERENCE,
        "request",
        "that of tpotRatio, over the bound of the baseline's quantile in the last step before Full",
        _ONE,
        frozenset({Stage.FULL}),
    ),
    Metric(
        EXPOSED_STALL_FRACTION,
        Kind.MEAN,
        "request",
        "exposed transfer stall / decode wall time, in [0, 1]",
        _TWO,
        SERVED,
        LimitRange.FRACTION,
    ),
    Metric(
        TASK_SCORE_DROP,
        Kind.PAIRED,
        "prompt",
        "score(exact) - score(candidate), in [-1, 1]",
        (Arm.PAIR,),
        ALL,
        LimitRange.FRACTION,
        carried=True,
    ),
    _zero(ILLEGAL_FALLBACKS, "answers by a fallback that the contract forbids"),
    _zero(ISOLATION_FAILURES, "bytes or rows of another tenant or cache offered to a request"),
    _zero(ALLOCATION_FAILURES, "reservations that the plan had promised and that failed"),
    _zero(REPLAY_FAILURES, "replays of uncommitted rows that did not reproduce them"),
    _zero(OUTPUT_MISMATCHES, "compared steps of an exact candidate that differ in a bit", exact_only=True),
    Metric(EXTERNAL, Kind.EXTERNAL, "unit", "as its source counts it", _ONE, SERVED, LimitRange.POSITIVE),
    Metric(SESSION_SPLIT, Kind.SPLIT, "session", "assigned to the candidate, 0 or 1", _TWO, SERVED),
    Metric(REQUESTS, Kind.COUNT, "request", "every assigned unit by what computed for it", _TWO, ALL),
    Metric(MEASURED, Kind.COUNT, "request", "units of latency gates, missing without a value", _TWO, SERVED),
)

METRICS: Final = {m.name: m for m in _ROWS}
"""Every metric by name."""
ZERO_TOLERANCE: Final = tuple(m.name for m in _ROWS if m.kind is Kind.ZERO)

DEFAULT_TAIL_QUANTILE: Final = Decimal(99)
DEFAULT_TAIL_LIMIT: Final = Decimal("1.05")
DEFAULT_TAIL_PER_STAGE: Final = ((Stage.CANARY, Decimal("1.25")), (Stage.FULL, Decimal("1.25")))
DEFAULT_STALL_LIMIT: Final = Decimal("0.02")
DEFAULT_MIN_SAMPLES: Final = 500
MEDIAN_GUARD_LIMIT: Final = Decimal("1.25")
MEDIAN_GUARD_SUFFIX: Final = "-median"
ABSOLUTE_SUFFIX: Final = "-absolute"
