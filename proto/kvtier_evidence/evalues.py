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
from typing import Final

import numpy as np
import numpy.typing as npt

NEG: Final = -math.inf
PASS_BETS: Final = 8
FEW_CELLS: Final = 16
"""Up to so many distinct values what was computed is remembered."""
_ZERO_FACTOR: Final = -1.0 + 1e-15
_IMPOSSIBLE: Final = -1e200

FloatArray = npt.NDArray[np.float64]


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
    pairs = tuple((x, w) for x, w in cells if w > 0)
    if not pairs:
        return 0.0
    return _log_e_few(side, m, pairs, k) if len(pairs) <= FEW_CELLS else _log_e(side, m, pairs, k)


def _log_e(side: Side, m: float, pairs: tuple[tuple[float, float], ...], k: float) -> float:
    x, w = np.asarray(pairs, np.float64).T
    logs = _log_factor_array(side, m, x)
    return log_sum_exp([float(t) / k for t in logs @ w]) - math.log(len(logs))


# Of two hundred agents most have counted nothing new since the last look, or the same as others.
_log_e_few = lru_cache(maxsize=4096)(_log_e)


@lru_cache(maxsize=8192)
def log_e_counts(side: Side, m: float, n: float, s: float, k: float = 1.0) -> float:
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


def log_e_array(side: Side, m: float, n: float | FloatArray, s: FloatArray, k: float = 1.0) -> FloatArray:
    """`log_e_counts` for many counts at once; `s` any shape, `n` a scalar or of the same shape."""
    ones, nones = _finite_log_factors(side, m)
    t = (np.multiply.outer(ones, s) + np.multiply.outer(nones, n - s)) / k
    # The last bet is zero, so the maximum over bets is never -inf.
    top = t.max(axis=0)
    return np.asarray(top + np.log(np.exp(t - top).sum(axis=0)) - math.log(len(ones)), np.float64)


def growth(side: Side, m: float, cells: Sequence[tuple[float, float]]) -> float:
    """Largest expected log growth per unit over the bets, for a law given as (value, probability)."""
    pairs = [(x, p) for x, p in cells if p > 0]
    logs = _log_factor_array(side, m, np.asarray([x for x, _ in pairs], np.float64))
    return float((logs @ np.asarray([p for _, p in pairs], np.float64)).max())


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


@lru_cache(maxsize=1024)
def _finite_log_factors(side: Side, m: float) -> tuple[FloatArray, FloatArray]:
    """The same as two arrays. A factor of zero is finite here, so that no unit of it gives 0 and not NaN; one
    unit of it is beyond every other bet."""
    pairs = np.maximum(np.asarray(_log_factors(side, m)), _IMPOSSIBLE)
    return pairs[:, 0].copy(), pairs[:, 1].copy()


def _log_factor_array(side: Side, m: float, x: FloatArray) -> FloatArray:
    """log factors, one row per bet and one column per value."""
    factor = side.value * np.asarray(bets(side, m))[:, None] * (x - m)[None, :]
    dead = factor <= _ZERO_FACTOR
    return np.where(dead, NEG, np.log1p(np.where(dead, 0.0, factor)))
