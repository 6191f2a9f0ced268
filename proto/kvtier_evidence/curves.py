"""Evidence at every edge of a histogram, as steps, and the least sum of two such curves.

Between two bins that hold units nothing changes, and over the edges each side only rises or only falls: so
few places are looked at, and each is computed once. Knows counts and a share; no gate, no ratio, no verdict.

Formulas: section 4.2 and 4.3 of the evidence specification.
"""

from __future__ import annotations

from bisect import bisect_right

from kvtier_evidence.evalues import Side, log_e_above
from kvtier_evidence.grid import Histogram


class Curve:
    """log e-value, by edge, of the units above it against a share of them.

    Missing units are read unfavourably: as above for Pass, as not above for Fail. A Pass curve rises with
    the edge, a Fail curve falls.
    """

    def __init__(self, side: Side, share: float, h: Histogram, k: float) -> None:
        self._side, self._share, self._n, self._k = side, share, float(h.n), k
        self.starts, self._above = h.steps(worst=side is Side.PASS)
        """Step `j` holds at edges `starts[j - 1]` to `starts[j] - 1`; the first and last have no end."""
        self._known: list[float | None] = [None] * len(self._above)

    def __len__(self) -> int:
        return len(self._above)

    def at(self, step: int) -> float:
        found = self._known[step]
        if found is None:
            above = float(self._above[step])
            found = self._known[step] = log_e_above(self._side, self._share, self._n, above, self._k)
        return found

    def step_of(self, edge: int) -> int:
        return bisect_right(self.starts, edge)

    def first_reaching(self, need: float) -> int | None:
        """Of a Pass curve the first step that is at least `need`."""
        return self._split(need, rising=True)

    def last_reaching(self, need: float) -> int | None:
        """Of a Fail curve the last step that is at least `need`."""
        beyond = self._split(need, rising=False)
        last = len(self) - 1 if beyond is None else beyond - 1
        return last if last >= 0 else None

    def _split(self, need: float, *, rising: bool) -> int | None:
        lo, hi = 0, len(self)
        while lo < hi:
            mid = (lo + hi) // 2
            lo, hi = (lo, mid) if (self.at(mid) >= need) is rising else (mid + 1, hi)
        return lo if lo < len(self) else None


def least_sum(rising: Curve, falling: Curve, offset: int) -> float:
    """Minimum over all places e of `rising` at edge e + offset plus `falling` at edge e."""
    return _Sums(rising, falling, offset).least()


def least_sum_reaches(rising: Curve, falling: Curve, offset: int, need: float) -> bool:
    """Whether that minimum is at least `need`."""
    return _Sums(rising, falling, offset).reaches(need)


class _Sums:
    """The rising curve is least where a step of the falling one begins, so only those places count."""

    def __init__(self, rising: Curve, falling: Curve, offset: int) -> None:
        self._rising, self._falling, self._offset = rising, falling, offset

    def _low(self, step: int) -> float:
        # Before its first step the falling curve goes on without end, and the rising one is at its own first.
        if step == 0:
            return self._rising.at(0)
        return self._rising.at(self._rising.step_of(self._falling.starts[step - 1] + self._offset))

    def least(self) -> float:
        last = len(self._falling) - 1
        best = min(self._low(0) + self._falling.at(0), self._low(last) + self._falling.at(last))
        spans = [(0, last)]
        while spans:
            lo, hi = spans.pop()
            # Nowhere between them can the sum be less than the least of each.
            if hi - lo > 1 and self._low(lo) + self._falling.at(hi) < best:
                mid = (lo + hi) // 2
                best = min(best, self._low(mid) + self._falling.at(mid))
                spans += [(lo, mid), (mid, hi)]
        return best

    def reaches(self, need: float) -> bool:
        last = len(self._falling) - 1
        if min(self._low(0) + self._falling.at(0), self._low(last) + self._falling.at(last)) < need:
            return False
        spans = [(0, last)]
        while spans:
            lo, hi = spans.pop()
            if hi - lo > 1 and self._low(lo) + self._falling.at(hi) < need:
                mid = (lo + hi) // 2
                if self._low(mid) + self._falling.at(mid) < need:
                    return False
                spans += [(lo, mid), (mid, hi)]
        return True
