"""The fixed log-grid on which values are counted, and the histogram over it.

Counts on one grid shared by every node add up exactly, whatever the order, so no sketch error ever
reaches a verdict. Knows numbers only: no gate, no arm, no node.

Formulas: section 3.1 and 3.4 of the evidence specification.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field
from decimal import Decimal, localcontext
from typing import Final

SUB: Final = 256
"""Bins per octave at full resolution (an exponential histogram of scale 8)."""
GAMMA: Final = 2.0 ** (1.0 / SUB)
"""Ratio of two neighbouring edges at full resolution."""
MAX_BINS: Final = 4096
"""Non-empty bins a histogram may hold before it halves its resolution."""
MAX_SHIFT: Final = 8
"""Coarsest resolution: one bin per octave."""


def _mantissa_edges() -> tuple[float, ...]:
    """Correctly rounded 2**(j/256 - 1), so that every platform and language has the same table."""
    with localcontext() as ctx:
        ctx.prec = 50
        return tuple(float(Decimal(2) ** (Decimal(j) / SUB - 1)) for j in range(SUB))


_EDGES: Final = _mantissa_edges()


def edge(i: int, shift: int = 0) -> float:
    """Lower edge of bin `i`: 2**((i << shift)/256)."""
    octave, j = divmod(i << shift, SUB)
    return math.ldexp(_EDGES[j], octave + 1)


def index(x: float) -> int:
    """Bin of a finite `x` > 0 at full resolution: edge(i) < x <= edge(i + 1)."""
    if not x > 0.0 or math.isinf(x):
        raise ValueError("only finite positive values have a bin")
    mantissa, exponent = math.frexp(x)
    return (exponent - 1) * SUB + bisect_left(_EDGES, mantissa) - 1


def is_value(x: float | None) -> bool:
    """Whether `x` can be counted as a value; anything else is missing, never dropped."""
    return x is not None and math.isfinite(x) and x >= 0.0


@dataclass(slots=True)
class Histogram:
    """Exact counts: `bins` at resolution `shift`, `zero`, `missing`; `n` is their sum."""

    bins: dict[int, int] = field(default_factory=dict)
    zero: int = 0
    missing: int = 0
    n: int = 0
    shift: int = 0

    def add(self, x: float | None, count: int = 1) -> None:
        """Counts one value `count` times; None, NaN, infinite and negative ones are missing."""
        if count < 0:
            raise ValueError("a count never decreases")
        self._own()
        if count == 0:
            return
        self.n += count
        if x is None or not is_value(x):
            self.missing += count
        elif x == 0.0:
            self.zero += count
        else:
            i = index(x) >> self.shift
            self.bins[i] = self.bins.get(i, 0) + count
            self._bound()

    def merge(self, other: Histogram) -> None:
        """Adds `other`; the result has the coarser of the two resolutions."""
        self._own()
        self.coarsen(max(self.shift, other.shift))
        step = self.shift - other.shift
        for i, c in other.bins.items():
            j = i >> step
            self.bins[j] = self.bins.get(j, 0) + c
        self.zero += other.zero
        self.missing += other.missing
        self.n += other.n
        self._bound()

    def since(self, earlier: Histogram) -> Histogram:
        """Increments from `earlier` to this one, at this resolution. Raises ValueError on a decrease."""
        ref = earlier.copy()
        ref.coarsen(self.shift)
        if ref.shift != self.shift:
            raise ValueError("an earlier version is coarser than a later one")
        bins = {i: c - ref.bins.get(i, 0) for i, c in self.bins.items() if c != ref.bins.get(i, 0)}
        out = Histogram(bins, self.zero - ref.zero, self.missing - ref.missing, self.n - ref.n, self.shift)
        if min([out.zero, out.missing, out.n, *bins.values()]) < 0 or not ref.bins.keys() <= self.bins.keys():
            raise ValueError("a cumulative histogram decreased")
        return out

    def coarsen(self, shift: int) -> None:
        """Lowers the resolution to `shift` by an exact merge of neighbouring bins; never raises it."""
        step = min(shift, MAX_SHIFT) - self.shift
        if step <= 0:
            return
        self._own()
        merged: dict[int, int] = {}
        for i, c in self.bins.items():
            merged[i >> step] = merged.get(i >> step, 0) + c
        self.bins, self.shift = merged, self.shift + step

    def copy(self) -> Histogram:
        return Histogram(dict(self.bins), self.zero, self.missing, self.n, self.shift)

    def consistent(self) -> bool:
        """n = zero + missing + bins, nothing negative, at most MAX_BINS bins; checked on receipt."""
        return (
            0 <= self.shift <= MAX_SHIFT
            and len(self.bins) <= MAX_BINS
            and min([self.zero, self.missing, *self.bins.values()]) >= 0
            and self.n == self.zero + self.missing + sum(self.bins.values())
        )

    @property
    def measured(self) -> int:
        """Units with a value."""
        return self.n - self.missing

    def exceed(self, i: int, *, worst: bool) -> int:
        """Units above edge(i, shift); missing ones too when that is the unfavourable reading."""
        return sum(c for b, c in self.bins.items() if b >= i) + (self.missing if worst else 0)

    def steps(self, *, worst: bool) -> tuple[list[int], list[int]]:
        """`exceed` as steps: where each begins after the first, ascending, and the units above each.

        One more count than beginnings: `above[k]` holds at edges `starts[k - 1]` to `starts[k] - 1`.
        """
        starts = sorted(self.bins)
        above = [self.missing if worst else 0]
        for i in reversed(starts):
            above.append(above[-1] + self.bins[i])
        return [i + 1 for i in starts], above[::-1]

    def cells(self, *, upper: bool) -> list[tuple[float, int]]:
        """(value, count > 0), each value rounded outward to an edge and clipped to [0, 1].

        `upper` rounds up and reads missing as 1; otherwise down and missing as 0.
        """
        out = [(0.0, self.zero), (1.0 if upper else 0.0, self.missing)]
        shift, mask, octave = self.shift, SUB - 1, SUB.bit_length() - 1
        for i, c in self.bins.items():
            # `edge`, without its call: thousands of these are made at a look.
            j = (i + upper) << shift
            x = math.ldexp(_EDGES[j & mask], (j >> octave) + 1)
            out.append((x if x < 1.0 else 1.0, c))
        return [one for one in out if one[1] > 0]

    def quantile(self, p: float) -> float | None:
        """Sample p-quantile of the measured units (upper edge of its bin); None without any."""
        if self.measured == 0:
            return None
        rank, seen = max(1, math.ceil(p * self.measured - 1e-9)), self.zero
        if seen >= rank:
            return 0.0
        for i in sorted(self.bins):
            seen += self.bins[i]
            if seen >= rank:
                return edge(i + 1, self.shift)
        raise ValueError("histogram does not add up")

    def _bound(self) -> None:
        while len(self.bins) > MAX_BINS and self.shift < MAX_SHIFT:
            self.coarsen(self.shift + 1)

    def _own(self) -> None:
        if self is NO_UNITS:
            raise TypeError("the histogram that all share counts nothing; take a copy")


NO_UNITS: Final = Histogram()
"""Of what was never counted; one for all, and it refuses to be changed."""
