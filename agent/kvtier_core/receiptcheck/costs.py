"""Decisions to keep or drop a block, and ledgers of what keeping costs, against their own inputs.

Why it exists: a decision that ignores the chance of reuse, or a peak that leaves a buffer out, looks like any
other number. It must not know tiers or eviction. Formulas: specification C.1 (save versus discard, F17, F20).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvtier_core.cost import HostLedger
from kvtier_core.errors import CoreError, Reason


@dataclass(frozen=True, slots=True)
class ReuseCosts:
    """Inputs of save versus discard, in one currency. p: probability of reuse. resume, suffix: time and
    compute to go on from a copy; full_time, full_compute: to recompute all. bytes times move_rate is paid
    when saving and again at reuse; bytes times hold_rate times hold_time is the rent; visible_save: exposed
    stall."""

    p: float
    resume: float
    suffix: float
    full_time: float
    full_compute: float
    bytes: int
    move_rate: float
    hold_rate: float
    hold_time: float
    visible_save: float

    def persist(self) -> float:
        """J_persist."""
        reuse = self.p * (self.resume + self.suffix + self.move_rate * self.bytes)
        return (
            reuse
            + self.visible_save
            + self.move_rate * self.bytes
            + self.hold_rate * self.bytes * self.hold_time
        )

    def discard(self) -> float:
        """J_discard."""
        return self.p * (self.full_time + self.full_compute)


@dataclass(frozen=True, slots=True)
class KeepDecision:
    """What was decided by which numbers. persists: the block went to another tier; else it was dropped."""

    persists: bool
    j_persist: float
    j_discard: float


def check_decision(costs: ReuseCosts, decision: KeepDecision) -> None:
    """COST_MODEL when the numbers are not those of the costs, or the dearer side was taken."""
    right = (costs.persist(), costs.discard())
    stated = (decision.j_persist, decision.j_discard)
    if not all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(right, stated, strict=True)):
        raise CoreError(Reason.COST_MODEL, f"persist and discard cost {right}, the decision says {stated}")
    if decision.persists != (right[0] < right[1]):
        raise CoreError(
            Reason.COST_MODEL, f"persist costs {right[0]:g} and discard {right[1]:g}: the dearer was taken"
        )


WASTE_UNIT = "byte_ms"


@dataclass(frozen=True, slots=True)
class Waste:
    """Capacity held for nothing: bytes times milliseconds (F20)."""

    value: float
    unit: str
    bytes: int
    milliseconds: float


def check_waste(waste: Waste) -> None:
    """UNIT_MISMATCH unless the value is bytes times milliseconds and says so."""
    if waste.unit != WASTE_UNIT or not math.isclose(
        waste.value, waste.bytes * waste.milliseconds, rel_tol=1e-9
    ):
        raise CoreError(
            Reason.UNIT_MISMATCH,
            f"{waste.value:g} {waste.unit} is not {waste.bytes} B for {waste.milliseconds} ms",
        )


def check_host_peak(peak: HostLedger, stated: int) -> None:
    """PEAK_INCOMPLETE when the total that was reserved by it leaves a part out (F17)."""
    if stated != peak.total:
        raise CoreError(Reason.PEAK_INCOMPLETE, f"a host peak of {stated} bytes whose parts are {peak.total}")
