"""The same evidence another way: at every edge, in arrays, with no step skipped. For comparison only."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from kvtier_evidence.evalues import Side, bets
from kvtier_evidence.gates import Effect
from kvtier_evidence.grid import Histogram, edge

IMPOSSIBLE = -1e200
"""One unit of it is beyond every other bet, and no unit of it is nothing."""
OCTAVES = 6

Floats = npt.NDArray[np.float64]


def log_factors(side: Side, m: float, x: Floats) -> Floats:
    """One row per bet, one column per value."""
    factor = side.value * np.asarray(bets(side, m))[:, None] * (x - m)[None, :]
    dead = factor <= -1.0 + 1e-15
    return np.where(dead, IMPOSSIBLE, np.log1p(np.where(dead, 0.0, factor)))


def mixed(logs: Floats, k: float) -> Floats:
    """log of the mean over bets; logs: one row per bet."""
    t = logs / k
    top = t.max(axis=0)
    return np.asarray(top + np.log(np.exp(t - top).sum(axis=0)) - math.log(len(t)), np.float64)


def log_e_array(side: Side, m: float, n: float | Floats, s: Floats, k: float = 1.0) -> Floats:
    """`log_e_counts` for many counts at once; `s` any shape, `n` a scalar or of the same shape."""
    one, none = log_factors(side, m, np.array([1.0, 0.0])).T
    return mixed(np.multiply.outer(one, s) + np.multiply.outer(none, n - s), k)


def log_e_cells(side: Side, m: float, cells: list[tuple[float, float]], k: float = 1.0) -> float:
    x, w = np.asarray([c for c in cells if c[1] > 0] or [(0.0, 0.0)], np.float64).T
    return float(mixed(log_factors(side, m, x) @ w, k))


def exceed(h: Histogram, lo: int, hi: int, *, worst: bool) -> Floats:
    """Units above each edge of lo..hi inclusive."""
    bins, counts = np.array(list(h.bins), np.int64), np.array(list(h.bins.values()), np.int64)
    above = (bins >= np.arange(lo, hi + 1)[:, None]) @ counts
    return np.asarray(above + (h.missing if worst else 0), np.float64)


class RatioByArrays:
    """What the least over every place is, by looking at every place."""

    def __init__(self, c: Histogram, b: Histogram, share: float, effect: Effect) -> None:
        lo, hi = min([*c.bins, *b.bins]), max([*c.bins, *b.bins]) + 1
        self.width, self.per_octave = hi - lo, 256 >> c.shift

        def curve(side: Side, h: Histogram, worst: bool, k: float) -> Floats:
            return log_e_array(side, share, float(h.n), exceed(h, lo, hi, worst=worst), k)

        self._pass_c = curve(Side.PASS, c, True, effect.k_pass)
        self._fail_b = curve(Side.FAIL, b, False, effect.k_pass)
        self._fail_c = curve(Side.FAIL, c, False, effect.k_fail)
        self._pass_b = curve(Side.PASS, b, True, effect.k_fail)

    def log_pass(self, r: int) -> float:
        t = self._places(r)
        return float((self._at(self._pass_c, t + r) + self._at(self._fail_b, t + 1)).min())

    def log_fail(self, r: int) -> float:
        t = self._places(r)
        return float((self._at(self._fail_c, t + 1 + r) + self._at(self._pass_b, t)).min())

    def upper(self, alpha: float) -> float:
        reached = [r for r in self._ratios() if self.log_pass(r) >= -math.log(alpha)]
        return math.inf if not reached else 2.0 ** (reached[0] / self.per_octave)

    def lower(self, alpha: float) -> float:
        reached = [r for r in self._ratios() if self.log_fail(r) >= -math.log(alpha)]
        return 0.0 if not reached else 2.0 ** (reached[-1] / self.per_octave)

    def _ratios(self) -> range:
        return range(-OCTAVES * self.per_octave, OCTAVES * self.per_octave + 1)

    def _places(self, r: int) -> npt.NDArray[np.int64]:
        d = abs(r) + 2
        return np.arange(-d, self.width + d + 1, dtype=np.int64)

    def _at(self, curve: Floats, i: npt.NDArray[np.int64]) -> Floats:
        return np.asarray(curve[np.clip(i, 0, self.width)], np.float64)


def quantile_upper(h: Histogram, share: float, alpha: float, k: float) -> float:
    lo, hi = min(h.bins), max(h.bins) + 1
    enough = log_e_array(Side.PASS, share, float(h.n), exceed(h, lo, hi, worst=True), k) >= -math.log(alpha)
    if not enough.any():
        return math.inf
    first = int(np.argmax(enough))
    return 0.0 if first == 0 else edge(lo + first, h.shift)


def quantile_lower(h: Histogram, share: float, alpha: float, k: float) -> float:
    lo, hi = min(h.bins), max(h.bins) + 1
    enough = log_e_array(Side.FAIL, share, float(h.n), exceed(h, lo, hi, worst=False), k) >= -math.log(alpha)
    return edge(lo + int(np.nonzero(enough)[0][-1]), h.shift) if enough.any() else 0.0


def halved(side: Side, cells: list[tuple[float, float]], alpha: float, k: float) -> float:
    """The bound on a mean, by 22 halves."""
    lo, hi = 0.0, 1.0
    for _ in range(22):
        mid = (lo + hi) / 2.0
        enough = log_e_cells(side, mid, cells, k) >= -math.log(alpha)
        lo, hi = (lo, mid) if enough is (side is Side.PASS) else (mid, hi)
    return hi if side is Side.PASS else lo
