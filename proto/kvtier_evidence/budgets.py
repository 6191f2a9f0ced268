"""Two error budgets: false promotion over attempts, false rollback over gates and steps.

Nothing is spent by looking. Knows shares and e-values; no gate kind, no rollout object.

Formulas: section 5 of the evidence specification.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kvtier_evidence.evalues import NEG, log_sum_exp

FIRST_SHARE: Final = 0.8
LATER_SHARE: Final = 0.2
SPLIT_ALPHA: Final = 1e-4
"""Budget of the split check per window, counted to neither of the two."""
LEAST_ALPHA: Final = 1e-300
LOG_E_CAP: Final = 300.0 * math.log(10.0)
"""An e-value is capped at 1e300 before it is weighted."""


def alpha_promote(total: float, share: int) -> float:
    """The `share`-th part (1, 2, ...) of the false-promotion budget: 0.8, 0.16, 0.032 ... of `total`.
    Never nothing: after some 430 of them a Pass takes an e-value of 1e300, and harm is still looked for."""
    if share < 1:
        raise ValueError("shares are counted from 1")
    return max(total * FIRST_SHARE * LATER_SHARE ** (share - 1), LEAST_ALPHA)


@dataclass(frozen=True, slots=True)
class Cell:
    """Evidence of harm of one gate in one window; frozen at its last value when the window closes."""

    gate: str
    window: str
    """Which window: stage/step/opening fence."""
    weight: float
    log_e: float

    @property
    def weighted(self) -> float:
        """log of weight times the capped e-value."""
        if self.weight <= 0.0:
            return NEG
        return math.log(self.weight) + min(self.log_e, LOG_E_CAP)


def fail_total(cells: Iterable[Cell]) -> float:
    """log SUM w e over every cell begun in the attempt; weights that sum to more than 1 are scaled down."""
    items = [c for c in cells if c.weight > 0.0]
    return log_sum_exp([c.weighted for c in items]) - math.log(max(1.0, math.fsum(c.weight for c in items)))


def cause(cells: Iterable[Cell]) -> Cell | None:
    """The cell with the largest w e: the gate reported as the cause."""
    return max(cells, key=lambda c: (c.weighted, c.gate, c.window), default=None)
