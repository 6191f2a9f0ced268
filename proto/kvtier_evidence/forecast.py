"""How many units a gate will need, said before it starts and while it waits.

Forecasts for people (status, Feasible); no verdict depends on them. Knows laws and budgets only.

Formulas: section 6.1 of the evidence specification.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from kvtier_evidence.evalues import PASS_BETS, Side, growth, min_units_without_event
from kvtier_evidence.grid import GAMMA, Histogram

PLANNED_SHARE: Final = 0.25
"""Before there is data: the part of its allowance a candidate is expected to use."""
NEAREST_SHARE: Final = 0.9
"""Nearer to the limit than this, a forecast says nothing any more."""
_L_MEDIAN: Final = ((0.05, 11.0), (0.25, 8.0), (0.5, 7.0))
_NEIGHBOURS: Final = 8


def units_for_law(m: float, cells: Sequence[tuple[float, float]], alpha: float, k: float = 1.0) -> float:
    """Units until Pass when values follow `cells` (value, probability); infinite when they never will."""
    g = growth(Side.PASS, m, cells)
    return math.inf if g <= 0.0 else k * (math.log(1.0 / alpha) + math.log(PASS_BETS + 1)) / g


def units_for_share(share: float, above: float, n: int, alpha: float, k: float = 1.0) -> float:
    """Units until Pass of a quantile or proportion gate whose limit is `share`.

    `above` of `n` units were over the limit so far; with none seen yet a quarter of it is assumed.
    """
    # A quarter of the allowance counts as one unit's worth of belief, so the figure does not jump.
    believed = min((above + PLANNED_SHARE * share * 100.0) / (n + 100.0), NEAREST_SHARE * share)
    floor = min_units_without_event(share, alpha)
    if believed * floor <= math.log(2.0):
        # More likely than not, none is seen before the mechanism's own minimum.
        return k * floor
    return max(k * floor, units_for_law(share, [(1.0, believed), (0.0, 1.0 - believed)], alpha, k))


def tail_variance(baseline: Histogram, p: float) -> float | None:
    """V = p(1 - p)/(Q f(Q))^2, density from 8 bins either side of the p-quantile; None when it has none."""
    if baseline.measured == 0 or not baseline.bins:
        return None
    rank, seen, at = p * baseline.measured, baseline.zero, None
    for i in sorted(baseline.bins):
        seen += baseline.bins[i]
        if seen >= rank:
            at = i
            break
    if at is None:
        return None
    near = sum(baseline.bins.get(at + d, 0) for d in range(1 - _NEIGHBOURS, _NEIGHBOURS + 1))
    if near == 0:
        return None
    width = 2 * _NEIGHBOURS * math.log(GAMMA) * (1 << baseline.shift)
    density = near / baseline.measured / width
    return p * (1.0 - p) / density**2


def units_for_ratio(
    baseline: Histogram, share: float, ratio: float, fraction: float, k: float = 1.0, expected: float = 1.0
) -> float | None:
    """Median of the candidate units until Pass.

    None without a baseline; infinite when the `expected` true ratio leaves no room under the limit.
    """
    variance = tail_variance(baseline, 1.0 - share)
    if variance is None or not 0.0 < fraction < 1.0:
        return None
    return units_for_variance(variance, share, ratio, fraction, k, expected)


def units_for_variance(
    variance: float, share: float, ratio: float, fraction: float, k: float = 1.0, expected: float = 1.0
) -> float:
    """The same from V itself, see `tail_variance`; infinite also without a concurrent baseline."""
    margin = math.log(ratio) - math.log(GAMMA) - math.log(expected)
    if margin <= 0.0 or not 0.0 < fraction < 1.0:
        return math.inf
    n = 2.0 * _interpolate(fraction) * variance / ((1.0 - fraction) * margin * margin)
    # 1,900 units at p99; the floor of the mechanism scales with the share above.
    return k * max(19.0 / share, n)


def hours(units: float, units_per_second: float) -> float:
    """Hours until `units` have been seen; infinite without traffic."""
    return units / units_per_second / 3600.0 if units_per_second > 0.0 else math.inf


def _interpolate(fraction: float) -> float:
    points = _L_MEDIAN
    if fraction <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in pairwise(points):
        if fraction <= x1:
            return y0 + (y1 - y0) * (fraction - x0) / (x1 - x0)
    return points[-1][1]
