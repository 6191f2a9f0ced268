"""Displayed values and bounds: the limit at which the same evidence would have been enough.

For people only; no verdict is taken from a bound. Rounded outward to the grid, by one bin at most.

Formulas: section 4.2 of the evidence specification, and its inversion for means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Decimal, localcontext
from typing import Final

from kvtier_evidence.curves import Curve
from kvtier_evidence.evalues import Side, log_e, log_e_counts
from kvtier_evidence.gates import NO_EFFECT, Effect, Pair, paired_cells
from kvtier_evidence.grid import Histogram, edge

PLACES: Final = 1 << 22
"""Limits between 0 and 1 at which a bound may lie."""
HALVES: Final = 5
MOST_LINES: Final = 16
"""How often a place is asked for before and after which it is looked for by halves."""


def quantile_upper(h: Histogram, share: float, alpha: float, effect: Effect = NO_EFFECT) -> float:
    """Smallest edge that the (1 - share)-quantile is shown to lie under; infinite when none is."""
    if h.n == 0:
        return math.inf
    curve = Curve(Side.PASS, share, h, effect.k_pass)
    first = curve.first_reaching(-math.log(alpha))
    if first is None:
        return math.inf
    # Everything above the lowest edge is everything that is not zero.
    return 0.0 if first == 0 else edge(curve.starts[first - 1], h.shift)


def quantile_lower(h: Histogram, share: float, alpha: float, effect: Effect = NO_EFFECT) -> float:
    """Largest edge that the (1 - share)-quantile is shown to lie over; 0 when none is."""
    if not h.bins:
        return 0.0
    curve = Curve(Side.FAIL, share, h, effect.k_fail)
    last = curve.last_reaching(-math.log(alpha))
    if last is None:
        return 0.0
    # A step holds up to the edge before the next; the last one is asked for where nothing is above.
    return edge(curve.starts[last] - 1 if last < len(curve.starts) else curve.starts[-1], h.shift)


def proportion_upper(n: int, above: int, alpha: float, effect: Effect = NO_EFFECT) -> float:
    """Smallest proportion that `above` of `n` units are shown to lie under; 1 when none is."""
    return _smallest(lambda m: log_e_counts(Side.PASS, m, n, above, effect.k_pass), alpha)


def proportion_lower(n: int, above: int, alpha: float, effect: Effect = NO_EFFECT) -> float:
    """Largest proportion that `above` of `n` units are shown to lie over; 0 when none is."""
    return _largest(lambda m: log_e_counts(Side.FAIL, m, n, above, effect.k_fail), alpha)


def mean_upper(h: Histogram, alpha: float, effect: Effect = NO_EFFECT) -> float:
    """Smallest limit that the mean of values in [0, 1] is shown to lie under; 1 when none is."""
    cells = h.cells(upper=True)
    return _smallest(lambda m: log_e(Side.PASS, m, cells, effect.k_pass), alpha)


def mean_lower(h: Histogram, alpha: float, effect: Effect = NO_EFFECT) -> float:
    """Largest limit that the mean of values in [0, 1] is shown to lie over; 0 when none is."""
    cells = h.cells(upper=False)
    return _largest(lambda m: log_e(Side.FAIL, m, cells, effect.k_fail), alpha)


def paired_upper(pairs: Sequence[Pair], alpha: float, effect: Effect = NO_EFFECT) -> float:
    """Smallest drop, in [-1, 1], that the mean difference is shown to lie under."""
    cells = paired_cells(pairs, upper=True)
    return 2.0 * _smallest(lambda m: log_e(Side.PASS, m, cells, effect.k_pass), alpha) - 1.0


def paired_lower(pairs: Sequence[Pair], alpha: float, effect: Effect = NO_EFFECT) -> float:
    """Largest drop, in [-1, 1], that the mean difference is shown to lie over."""
    cells = paired_cells(pairs, upper=False)
    return 2.0 * _largest(lambda m: log_e(Side.FAIL, m, cells, effect.k_fail), alpha) - 1.0


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


def _smallest(log_pass: Callable[[float], float], alpha: float) -> float:
    """Smallest limit of the grid at which the evidence, rising with the limit, is enough; 1 when none is."""
    need = -math.log(alpha)
    return _first(lambda m: log_pass(m) - need, lambda gap: gap >= 0.0) / PLACES


def _largest(log_fail: Callable[[float], float], alpha: float) -> float:
    """Largest limit of the grid at which the evidence, falling with the limit, is enough; 0 when none is."""
    need = -math.log(alpha)
    return (_first(lambda m: log_fail(m) - need, lambda gap: gap < 0.0) - 1) / PLACES


def _first(gap: Callable[[float], float], beyond: Callable[[float], bool]) -> int:
    """First of 1..PLACES whose gap is beyond zero; gaps go one way, and PLACES itself is taken to be.

    The same place as by halves alone. They begin; then it is looked where a straight line between both sides
    crosses zero, and a side that stays counts half each time, so that the other one moves too.
    """
    lo, hi = 0, PLACES
    below, above = -math.inf, math.inf
    asked, side = 0, 0
    while hi - lo > 1:
        at = (lo + hi) // 2
        apart = abs(below) + abs(above)
        if HALVES <= asked < MOST_LINES and math.isfinite(apart) and apart > 0.0:
            at = min(max(lo + int((hi - lo) * (abs(below) / apart)), lo + 1), hi - 1)
        found = gap(at / PLACES)
        asked += 1
        if beyond(found):
            hi, above, below, side = at, found, below / (2.0 if side > 0 else 1.0), 1
        else:
            lo, below, above, side = at, found, above / (2.0 if side < 0 else 1.0), -1
    return hi
