"""What was decided before an answer was published, against what the request allowed and what was known.

Why it exists: an exact request that is served an approximation, a search that widens for ever and a decision
made from a number that nobody could have online all look like an answer in time. It must not decide: that is
`admission.choose_fallback`. Rules: specification B.8; order of guards and names: N.9, items 39 to 51.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvtier_core.admission import UNAVAILABLE, Fallback, FallbackChoice, choose_fallback
from kvtier_core.receiptcheck.outcomes import OutcomeReason, OutcomeRefused, refuse_if


class EstimateSource(StrEnum):
    """Where an omitted mass comes from. Dense is offline only, unless a dense shadow path ran."""

    ESTIMATOR = "estimator"
    INTERVAL = "interval"
    CALIBRATION = "calibration"
    VERIFIER = "verifier"
    DENSE = "dense"


@dataclass(frozen=True, slots=True)
class Gate:
    """Limits of an estimate, each in [0, 1]."""

    max_omitted_mass: float
    min_confidence: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """dense_shadow: whether a dense path ran beside this answer."""

    omitted_mass: float
    confidence: float
    source: EstimateSource
    dense_shadow: bool = False


def uncertain(gate: Gate | None, estimate: Estimate) -> bool:
    """Whether the estimate fails its gate. GATE_INPUT for a gate that is missing or none, an estimate outside
    [0, 1], or dense mass online."""
    reason = OutcomeReason.GATE_INPUT
    if gate is None:
        raise OutcomeRefused(reason, "no gate is declared")
    refuse_if(
        estimate.source is EstimateSource.DENSE and not estimate.dense_shadow,
        reason,
        "dense mass is known offline only",
    )
    for name, value in (
        ("max_omitted_mass", gate.max_omitted_mass),
        ("min_confidence", gate.min_confidence),
        ("omitted_mass", estimate.omitted_mass),
        ("confidence", estimate.confidence),
    ):
        refuse_if(not 0.0 <= value <= 1.0, reason, f"{name} of {value} is no part of one")
    return estimate.omitted_mass > gate.max_omitted_mass or estimate.confidence < gate.min_confidence


class Phase(StrEnum):
    INITIAL = "initial"
    POST_WIDEN = "post_widen"


class Label(StrEnum):
    """What an answer calls itself; NOTHING: none was published."""

    EXACT = "exact"
    APPROXIMATE = "approximate"
    DEGRADED = "declaredDegraded"
    NOTHING = "nothing"


LABELS = {
    Fallback.ACCEPT_APPROXIMATE: Label.APPROXIMATE,
    Fallback.WIDEN_SEARCH: Label.NOTHING,
    Fallback.FULL_EXACT_FETCH: Label.EXACT,
    Fallback.RECOMPUTE_EXACT: Label.EXACT,
    Fallback.POSTPONE_FOR_EXACT_RETRY: Label.NOTHING,
    Fallback.ACCEPT_DECLARED_DEGRADED: Label.DEGRADED,
    Fallback.REJECT_NO_LEGAL_PATH: Label.NOTHING,
}


@dataclass(frozen=True, slots=True)
class FallbackRecord:
    """What was known and what was done. exact: the request asked for exact; None: it did not say. Times in
    seconds; fetch, recompute: UNAVAILABLE where there is no such path. retryable with retry_window: None: no
    window is declared. published: what left as the answer."""

    exact: bool | None
    approximation_allowed: bool
    phase: str
    can_widen: bool
    slack: float
    fetch: float
    recompute: float
    retryable: bool
    retry_window: float | None
    action: Fallback
    published: Label


def check_fallback(record: FallbackRecord, gate: Gate | None, estimate: Estimate) -> None:
    """EXACTNESS_MISSING, EXACTNESS_CONFLICT, FALLBACK_PHASE (unknown, widened twice), DEADLINE,
    RETRY_CONTRACT, GATE_INPUT, ILLEGAL_ACTION: another action than B.8 gives, or a label that is not the
    action's."""
    if record.exact is None:
        raise OutcomeRefused(OutcomeReason.EXACTNESS_MISSING, "the request does not say whether it is exact")
    refuse_if(
        record.exact and record.approximation_allowed,
        OutcomeReason.EXACTNESS_CONFLICT,
        "an exact request allows no approximation",
    )
    refuse_if(record.phase not in set(Phase), OutcomeReason.FALLBACK_PHASE, f"{record.phase!r} is no phase")
    refuse_if(
        record.phase == Phase.POST_WIDEN and record.action is Fallback.WIDEN_SEARCH,
        OutcomeReason.FALLBACK_PHASE,
        "a search widens once",
    )
    refuse_if(record.slack < 0.0, OutcomeReason.DEADLINE, f"{-record.slack} s after the deadline")
    if record.retryable and record.retry_window is None:
        raise OutcomeRefused(OutcomeReason.RETRY_CONTRACT, "a retry without a window")
    expected = choose_fallback(
        FallbackChoice(
            slack=record.slack,
            fetch=record.fetch,
            recompute=record.recompute,
            retry=UNAVAILABLE if not record.retryable or record.retry_window is None else record.retry_window,
            exact=record.exact,
            approximation_allowed=record.approximation_allowed,
            uncertain=uncertain(gate, estimate),
            widened=record.phase == Phase.POST_WIDEN,
            can_widen=record.can_widen,
        )
    )
    illegal = OutcomeReason.ILLEGAL_ACTION
    refuse_if(record.action is not expected, illegal, f"{record.action.value}, {expected.value} is next")
    refuse_if(
        record.published is not LABELS[record.action],
        illegal,
        f"{record.action.value} publishes {LABELS[record.action].value}, not {record.published.value}",
    )
