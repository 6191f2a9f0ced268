"""When a selection is too uncertain to be published, and how much more may be read before it is given up.

Why it exists: specification B.8 orders what is done with an uncertain selection, and an answer must not be
published by any other order. Widening is one action of up to `widenSteps` doublings of the budget, and does
not come twice. It must not know how rows are chosen or attended.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal

from kvtier_core.admission import UNAVAILABLE, FallbackChoice, choose_fallback
from kvtier_core.admission import Fallback as Action
from kvtier_core.errors import CoreError, Reason
from kvtier_core.receiptcheck.fallbacks import (
    LABELS,
    Estimate,
    EstimateSource,
    FallbackRecord,
    Phase,
    check_fallback,
    uncertain,
)
from kvtier_core.receiptcheck.fallbacks import Gate as DeclaredGate
from kvtier_core.receiptcheck.outcomes import OutcomeRefused
from kvtier_core.receipts import SelectionFacts
from kvtier_core.selectors.base import Selection as Stated
from kvtier_core.selectors.contract import Selection, SelectionReceipt
from kvtier_crds.manifest import Fallback, Selector

NO_LIMITS = (math.nan, math.nan)
_ROUNDING = 1e-5


@dataclass(frozen=True, slots=True)
class Gate:
    """None: not judged. widen_steps: most doublings of the budget."""

    max_omitted: float | None
    min_confidence: float | None
    widen_steps: int = 0

    @property
    def declared(self) -> DeclaredGate:
        """As a decision is checked against it; a limit that is absent is one that nothing passes."""
        return DeclaredGate(
            1.0 if self.max_omitted is None else self.max_omitted,
            0.0 if self.min_confidence is None else self.min_confidence,
        )

    @property
    def limits(self) -> tuple[float, float]:
        """Largest omitted mass and least confidence, NaN for none."""
        largest = math.nan if self.max_omitted is None else self.max_omitted
        return largest, math.nan if self.min_confidence is None else self.min_confidence

    def estimate(self, omitted: float, confidence: float) -> Estimate:
        """What is judged: what no limit is held against passes."""
        return Estimate(
            0.0 if self.max_omitted is None else _rounded(omitted),
            1.0 if self.min_confidence is None else _rounded(confidence),
            EstimateSource.ESTIMATOR,
        )

    def uncertain(self, receipt: SelectionReceipt) -> bool:
        """Whether the estimate fails. An estimate that is none, or that is absent, always does."""
        try:
            return uncertain(self.declared, self.estimate(*estimate_of(receipt)))
        except OutcomeRefused:
            return True


def gate_of(selector: Selector, estimates: bool) -> Gate | None:
    """The gate that a manifest declares. MANIFEST_INVALID: the family has no estimate to hold against it."""
    given = selector.gate
    if given is None:
        return None
    if not estimates:
        raise CoreError(
            Reason.MANIFEST_INVALID,
            f"selector.gate cannot be kept: {selector.family} has no estimator of omitted mass",
        )
    limits = (given.max_estimated_omitted_mass, given.min_confidence)
    omitted, confidence = (None if limit is None else float(Decimal(limit)) for limit in limits)
    return Gate(omitted, confidence, given.widen_steps)


def estimate_of(receipt: SelectionReceipt) -> tuple[float, float]:
    """Omitted mass of the query head with most, and confidence; NaN for what the family does not say."""
    omitted = math.nan if not receipt.omitted_mass else max(receipt.omitted_mass)
    return omitted, math.nan if receipt.confidence is None else receipt.confidence


@dataclass(frozen=True, slots=True)
class Judged:
    """A selection and what the gate said. widened: doublings of the budget that led to it."""

    selection: Selection
    widened: int
    uncertain: bool


class GateFailed(CoreError):
    """GATE_FAILED with the selection that failed, for who may publish it as a declared degradation."""

    def __init__(self, gate: Gate, judged: Judged, selection: Stated) -> None:
        omitted, confidence = estimate_of(judged.selection.receipt)
        super().__init__(
            Reason.GATE_FAILED,
            f"an estimated {omitted:.4g} of the attention is left out with confidence {confidence:.4g} after "
            f"{judged.widened} doublings of the budget; the gate is {gate.max_omitted} and "
            f"{gate.min_confidence}",
            {
                "omitted": omitted,
                "limit": gate.max_omitted,
                "confidence": confidence,
                "wanted": gate.min_confidence,
                "widened": judged.widened,
            },
        )
        self.selection = selection


def judged(gate: Gate | None, choose: Callable[[int], Selection | None], *, may_widen: bool) -> Judged:
    """The first selection that passes, or the last one that was tried. choose: with so many doublings of the
    budget; None: that would read every row, or is none. may_widen: whether the contract allows it.

    One widening of B.8: from the initial phase to the one after it, and no further."""
    first = choose(0)
    assert first is not None
    found = Judged(first, 0, gate is not None and gate.uncertain(first.receipt))
    steps = gate.widen_steps if gate is not None and may_widen else 0
    if _next(found, Phase.INITIAL, can_widen=steps > 0) is not Action.WIDEN_SEARCH:
        return found
    assert gate is not None
    for doublings in range(1, steps + 1):
        wider = choose(doublings)
        if wider is None:
            return found
        found = Judged(wider, doublings, gate.uncertain(wider.receipt))
        if _next(found, Phase.POST_WIDEN, can_widen=False) is Action.ACCEPT_APPROXIMATE:
            return found
    return found


def illegal(told: SelectionFacts | None, allowed: frozenset[Fallback], *, approximate: bool) -> bool:
    """Whether an answer took a way that is not its contract's or not the next one of B.8: it was widened, its
    gate failed and it was published all the same, or it was published as one that passed a gate which its
    estimate fails. allowed: of the contract, besides the exact fetch."""
    if told is None:
        return False
    if told.widened > 0 and Fallback.WIDEN not in allowed:
        return True
    if not approximate:
        return False
    largest, least = (
        None if math.isnan(limit) else limit for limit in (told.max_omitted_mass, told.min_confidence)
    )
    gate = Gate(largest, least)
    estimate = gate.estimate(told.omitted_mass, told.confidence)
    if told.failed:
        # Of a selection that failed its gate there may be no estimate at all.
        gate, estimate = Gate(0.0, 1.0), Estimate(1.0, 0.0, EstimateSource.ESTIMATOR)
    action = Action.ACCEPT_DECLARED_DEGRADED if told.failed else Action.ACCEPT_APPROXIMATE
    record = FallbackRecord(
        exact=False,
        approximation_allowed=not told.failed or Fallback.DEGRADE in allowed,
        phase=Phase.POST_WIDEN if told.widened else Phase.INITIAL,
        can_widen=False,
        # Every exact way has been tried by then: an answer of one would not be approximate.
        slack=0.0,
        fetch=UNAVAILABLE,
        recompute=UNAVAILABLE,
        retryable=False,
        retry_window=None,
        action=action,
        published=LABELS[action],
    )
    try:
        check_fallback(record, gate.declared, estimate)
    except OutcomeRefused:
        return True
    return False


def _rounded(share: float) -> float:
    """A share of one that float32 sums put a little outside."""
    return min(max(share, 0.0), 1.0) if -_ROUNDING <= share <= 1.0 + _ROUNDING else share


def _next(found: Judged, phase: Phase, *, can_widen: bool) -> Action:
    """B.8 of what is known here; the exact ways are the caller's."""
    return choose_fallback(
        FallbackChoice(
            slack=UNAVAILABLE,
            fetch=0.0,
            exact=False,
            approximation_allowed=True,
            uncertain=found.uncertain,
            widened=phase is Phase.POST_WIDEN,
            can_widen=can_widen,
        )
    )
