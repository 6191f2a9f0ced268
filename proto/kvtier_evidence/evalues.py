"""The one mechanism behind every statistical verdict: a test martingale of constant bets.

Constant bets need only counts per value, so evidence merges over nodes in any order and is valid at
every look. Knows units in [0, 1] and a limit on their mean; no metric, no histogram, no budget.

Formulas: section 2 of the evidence specification. All e-values are natural logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import Enum
from functools import lru_cache
from operator import mul
from typing import Final

NEG: Final = -math.inf
PASS_BETS: Final = 8
FEW_CELLS: Final = 16
"""Up to so many distinct values what was computed is remembered."""
_ZERO_FACTOR: Final = -1.0 + 1e-15


class Side(Enum):
    """Which claim the e-value speaks against."""

    PASS = -1
    """Against "the mean is at least the limit"."""
    FAIL = 1
    """Against "the mean is at most the limit"."""


@lru_cache(maxsize=1024)
def bets(side: Side, m: float) -> tuple[float, ...]:
    """The fixed grid of bets for a limit `m` in (0, 1); the last one, zero, is the share never bet."""
    if not 0.0 < m < 1.0:
        raise ValueError("the limit of a mean lies strictly between 0 and 1")
    if side is Side.PASS:
        return (*(2.0**-j / (1.0 - m) for j in range(PASS_BETS)), 0.0)
    return (*(2.0**-j / m for j in range(5 + max(0, math.ceil(-math.log2(m))))), 0.0)


def log_sum_exp(values: Sequence[float]) -> float:
    """log of the sum of exponentials; -inf for none."""
    top = max(values, default=NEG)
    if math.isinf(top):
        return top
    return top + math.log(sum(math.exp(v - top) for v in values))


def log_e(side: Side, m: float, cells: Iterable[tuple[float, float]], k: float = 1.0) -> float:
    """log e-value from cells (value in [0, 1], count >= 0) with design effect `k` >= 1."""
    pairs = [cell for cell in cells if cell[1] > 0]
    if not pairs:
        return 0.0
    return _log_e_few(side, m, tuple(pairs), k) if len(pairs) <= FEW_CELLS else _log_e(side, m, pairs, k)


def _log_e(side: Side, m: float, pairs: Sequence[tuple[float, float]], k: float) -> float:
    totals = _bet_logs(side, m, pairs)
    return log_sum_exp([t / k for t in totals]) - math.log(len(totals))


# Of two hundred agents most have counted nothing new since the last look, or the same as others.
_log_e_few = lru_cache(maxsize=4096)(_log_e)


def log_e_above(side: Side, m: float, n: float, s: float, k: float = 1.0) -> float:
    """log e-value of `s` units of value 1 among `n`, the others 0.

    `s` may be fractional: a fraction replaced by its linear interpolation is on the safe side.
    """
    if not 0.0 <= s <= n:
        raise ValueError("more units above than units")
    out = []
    for one, none in _log_factors(side, m):
        # 0 * -inf would be NaN: a factor of zero counts only for units that exist.
        t = (s * one if s > 0 else 0.0) + ((n - s) * none if n > s else 0.0)
        out.append(t / k)
    return log_sum_exp(out) - math.log(len(out))


log_e_counts = lru_cache(maxsize=8192)(log_e_above)
"""The same, remembered: of two hundred agents most have counted nothing new, or the same as others."""


def growth(side: Side, m: float, cells: Sequence[tuple[float, float]]) -> float:
    """Largest expected log growth per unit over the bets, for a law given as (value, probability)."""
    return max(_bet_logs(side, m, [(x, p) for x, p in cells if p > 0]))


def min_units_without_event(m: float, alpha: float, k: float = 1.0) -> int:
    """Units, none of them above, until the evidence reaches 1/alpha; the floor of the mechanism itself."""
    need = math.log(1.0 / alpha)

    def reached(n: int) -> bool:
        return log_e_counts(Side.PASS, m, n, 0, k) >= need

    hi = 1
    while not reached(hi):
        hi *= 2
    lo = hi // 2
    while lo + 1 < hi:
        mid = (lo + hi) // 2
        lo, hi = (lo, mid) if reached(mid) else (mid, hi)
    return hi


@lru_cache(maxsize=1024)
def _log_factors(side: Side, m: float) -> tuple[tuple[float, float], ...]:
    """Per bet: log factor of a unit of value 1 and of a unit of value 0."""

    def log_factor(f: float) -> float:
        return NEG if f <= _ZERO_FACTOR else math.log1p(f)

    return tuple(
        (log_factor(side.value * lam * (1.0 - m)), log_factor(-side.value * lam * m)) for lam in bets(side, m)
    )


def _bet_logs(side: Side, m: float, pairs: Sequence[tuple[float, float]]) -> list[float]:
    """Per bet: the sum of log factors over cells (value, weight > 0), of which there is at least one."""
    over = [x - m for x, _ in pairs]
    weights = [w for _, w in pairs]
    # The value that a bet loses most on decides whether it loses all.
    worst = max(over) if side is Side.PASS else min(over)
    out = []
    for lam in bets(side, m):
        c = side.value * lam
        if c == 0.0:
            out.append(0.0)
        elif c * worst <= _ZERO_FACTOR:
            out.append(NEG)
        else:
            out.append(sum(map(mul, weights, map(math.log1p, [c * d for d in over]))))
    return out
