"""Displayed values and bounds: the limit at which the same evidence would have been enough.

For people only; no verdict is taken from a bound. Rounded outward to the grid, by one bin at most.

Formulas: section 4.2 of the evidence specification, and its inversion for means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Decimal, localcontext

import numpy as np

from kvtier_evidence.evalues import Side, log_e, log_e_array, log_e_counts
from kvtier_evidence.gates import NO_EFFECT, Effect, Pair, paired_cells
from kvtier_evidence.grid import Histogram, edge


def quantile_upper(h: Histogram, share: float, alpha: float, effect: Effect = NO_EFFECT) -> float:
    """Smallest edge that the (1 - share)-quantile is shown to lie under; infinite when none is."""
    if h.n == 0:
        return math.inf
    lo, hi = (min(h.bins), max(h.bins) + 1) if h.bins else (0, 0)
    above = h.survival(lo, hi, worst=True).astype(np.float64)
    enough = log_e_array(Side.PASS, share, float(h.n), above, effect.k_pass) >= -math.log(alpha)
    if not enough.any():
        return math.inf
    first = int(np.argmax(enough))
    # Everything above the lowest edge is everything that is not zero.
    return 0.0 if first == 0 else edge(lo + first, h.shift)


def quantile_lower(h: Histogram, share: float, alpha: float, effect: Effect = NO_EFFECT) -> float:
    """Largest edge that the (1 - share)-quantile is shown to lie over; 0 when none is."""
    if not h.bins:
        return 0.0
    lo, hi = min(h.bins), max(h.bins) + 1
    above = h.survival(lo, hi, worst=False).astype(np.float64)
    enough = np.nonzero(log_e_array(Side.FAIL, share, float(h.n), above, effect.k_fail) >= -math.log(alpha))[
        0
    ]
    return edge(lo + int(enough[-1]), h.shift) if len(enough) else 0.0


def proportion_upper(n: int, above: int, alpha: float, effect: Effect = NO_EFFECT) -> float:
    """Smallest proportion that `above` of `n` units are shown to lie under; 1 when none is."""
    return _smallest(lambda m: log_e_counts(Side.PASS, m, n, above, effect.k_pass) >= -math.log(alpha))


def proportion_lower(n: int, above: int, alpha: float, effect: Effect = NO_EFFECT) -> float:
    """Largest proportion that `above` of `n` units are shown to lie over; 0 when none is."""
    return _largest(lambda m: log_e_counts(Side.FAIL, m, n, above, effect.k_fail) >= -math.log(alpha))


def mean_upper(h: Histogram, alpha: float, effect: Effect = NO_EFFECT) -> float:
    """Smallest limit that the mean of values in [0, 1] is shown to lie under; 1 when none is."""
    cells = list(h.cells(upper=True))
    return _smallest(lambda m: log_e(Side.PASS, m, cells, effect.k_pass) >= -math.log(alpha))


def mean_lower(h: Histogram, alpha: float, effect: Effect = NO_EFFECT) -> float:
    """Largest limit that the mean of values in [0, 1] is shown to lie over; 0 when none is."""
    cells = list(h.cells(upper=False))
    return _largest(lambda m: log_e(Side.FAIL, m, cells, effect.k_fail) >= -math.log(alpha))


def paired_upper(pairs: Sequence[Pair], alpha: float, effect: Effect = NO_EFFECT) -> float:
    """Smallest drop, in [-1, 1], that the mean difference is shown to lie under."""
    cells = paired_cells(pairs, upper=True)
    return 2.0 * _smallest(lambda m: log_e(Side.PASS, m, cells, effect.k_pass) >= -math.log(alpha)) - 1.0


def paired_lower(pairs: Sequence[Pair], alpha: float, effect: Effect = NO_EFFECT) -> float:
    """Largest drop, in [-1, 1], that the mean difference is shown to lie over."""
    cells = paired_cells(pairs, upper=False)
    return 2.0 * _largest(lambda m: log_e(Side.FAIL, m, cells, effect.k_fail) >= -math.log(alpha)) - 1.0


def sample_mean(h: Histogram) -> float | None:
    """Mean of the measured units by the geometric middle of their bins; None without any."""
    if h.measured == 0:
        return None
    total = sum(c * math.sqrt(edge(i, h.shift) * edge(i + 1, h.shift)) for i, c in h.bins.items())
    return min(1.0, total / h.measured)


def value_text(x: float | None) -> str:
    """Four significant digits; empty when there is no value."""
    return _text(x, ROUND_HALF_EVEN)


def bound_text(x: float | None, *, upper: bool) -> str:
    """Four significant digits, rounded away from the safe side: an upper bound up, a lower one down."""
    return _text(x, ROUND_CEILING if upper else ROUND_FLOOR)


def _text(x: float | None, rounding: str) -> str:
    if x is None:
        return ""
    if math.isinf(x) or math.isnan(x):
        return "inf" if x > 0 else "-inf" if x < 0 else ""
    if x == 0.0:
        return "0"
    with localcontext() as ctx:
        ctx.prec, ctx.rounding = 4, rounding
        # Plus rounds to the context; twelve digits first, so that 0.05 does not become 0.05001.
        return f"{+Decimal(f'{x:.12g}'):f}"


def _smallest(ok: Callable[[float], bool]) -> float:
    lo, hi = 0.0, 1.0
    for _ in range(22):
        mid = (lo + hi) / 2.0
        lo, hi = (lo, mid) if ok(mid) else (mid, hi)
    return hi


def _largest(ok: Callable[[float], bool]) -> float:
    lo, hi = 0.0, 1.0
    for _ in range(22):
        mid = (lo + hi) / 2.0
        lo, hi = (mid, hi) if ok(mid) else (lo, mid)
    return lo
