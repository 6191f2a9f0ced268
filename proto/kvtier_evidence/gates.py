"""Evidence by kind of gate: what counts turn into, for and against harm.

Each function answers with two log e-values, one against "harmful" and one against "harmless". Knows
counts and limits; no budget, no verdict, no wire.

Formulas: section 4 of the evidence specification (subsections named at each function).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from kvtier_evidence.curves import Curve, least_sum, least_sum_reaches
from kvtier_evidence.evalues import NEG, Side, log_e, log_e_counts, log_sum_exp
from kvtier_evidence.grid import SUB, Histogram

ONE: Final = 1 << 32
"""The fixed-point unit (32.32) of sums of fractions."""
SPAN_OCTAVES: Final = 6
"""Displayed ratio bounds are searched between 2**-6 and 2**6."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """log e-values: `log_pass` against "at or over the limit", `log_fail` against "at or under it"."""

    log_pass: float
    log_fail: float


@dataclass(frozen=True, slots=True)
class Effect:
    """Design effects that the two sides are divided by; at least 1 (section 4.9)."""

    k_pass: float = 1.0
    k_fail: float = 1.0


NO_EFFECT: Final = Effect()


def to_fixed(numerator: int, denominator: int) -> tuple[int, int]:
    """`numerator/denominator` in 32.32 fixed point, rounded (up, down)."""
    if not 0 <= numerator <= denominator or denominator < 1:
        raise ValueError("not a fraction of a whole")
    down, rest = divmod(numerator * ONE, denominator)
    return down + (rest > 0), down


def quantile_evidence(
    share: float, n: int, above_up: int, above_down: int, missing: int, effect: Effect = NO_EFFECT
) -> Evidence:
    """4.1: at most `share` = 1 - p of the units lie above the limit; or a proportion's limit itself.

    `above_up` and `above_down` are 32.32 fixed-point sums over the `n - missing` units with a value.
    """
    up = min(float(n), above_up / ONE + missing)
    return Evidence(
        log_e_counts(Side.PASS, share, n, up, effect.k_pass), quantile_harm(share, n, above_down, effect)
    )


def quantile_harm(share: float, n: int, above_down: int, effect: Effect = NO_EFFECT) -> float:
    """4.1, the Fail side alone, which is all that is asked of a single agent (4.8)."""
    return log_e_counts(Side.FAIL, share, n, min(float(n), above_down / ONE), effect.k_fail)


def mean_evidence(h: Histogram, limit: float, effect: Effect = NO_EFFECT) -> Evidence:
    """4.4: mean of values in [0, 1]; cells rounded outward, missing as 1 (Pass) or 0 (Fail)."""
    return Evidence(log_e(Side.PASS, limit, h.cells(upper=True), effect.k_pass), mean_harm(h, limit, effect))


def mean_harm(h: Histogram, limit: float, effect: Effect = NO_EFFECT) -> float:
    """4.4, the Fail side alone, which is all that is asked of a single agent (4.8)."""
    return log_e(Side.FAIL, limit, h.cells(upper=False), effect.k_fail)


@dataclass(frozen=True, slots=True)
class Pair:
    """Score(exact) - score(candidate) of one prompt, known to lie in [lo, hi] within [-1, 1].

    One report has lo = hi; a missing one is [-1, 1]; two reports of one prompt widen to both, so that
    neither side gains and the order of merging cannot matter.
    """

    lo: float
    hi: float

    @staticmethod
    def of(difference: float | None) -> Pair:
        """A difference out of [-1, 1], NaN or None is missing."""
        if difference is None or not -1.0 <= difference <= 1.0:
            return Pair(-1.0, 1.0)
        return Pair(difference, difference)

    @property
    def missing(self) -> bool:
        return self.lo == -1.0 and self.hi == 1.0

    def widen(self, other: Pair) -> Pair:
        return Pair(min(self.lo, other.lo), max(self.hi, other.hi))


def paired_cells(pairs: Iterable[Pair], *, upper: bool) -> list[tuple[float, int]]:
    """Cells (X, count) of X = (1 + D)/2."""
    counts: dict[float, int] = {}
    for p in pairs:
        x = (1.0 + (p.hi if upper else p.lo)) / 2.0
        counts[x] = counts.get(x, 0) + 1
    return sorted(counts.items())


def paired_evidence(pairs: Sequence[Pair], limit: float, effect: Effect = NO_EFFECT) -> Evidence:
    """4.5, scope Population: the mean drop over the law that the prompts were drawn from."""
    m = (1.0 + limit) / 2.0
    return Evidence(
        log_e(Side.PASS, m, paired_cells(pairs, upper=True), effect.k_pass),
        log_e(Side.FAIL, m, paired_cells(pairs, upper=False), effect.k_fail),
    )


@dataclass(frozen=True, slots=True)
class ProbeSetOutcome:
    """4.5, scope ProbeSet: exact statement on one finite set; no error budget is involved."""

    scored: int
    size: int
    inside: bool
    """Every prompt was scored and the mean drop is at most the limit."""
    outside: bool
    """The mean is over the limit whatever the prompts still to come score."""
    low: float
    """Smallest mean still possible."""
    high: float
    """Largest mean still possible."""


def probe_set_outcome(pairs: Sequence[Pair], size: int, limit: Fraction) -> ProbeSetOutcome:
    """Exact arithmetic over `size` prompts; a missing or unseen prompt may be anything in [-1, 1].

    A difference means its shortest decimal, as a limit does: ten prompts of which one lost 0.1 drop by 0.01.
    """
    if not 0 <= len(pairs) <= size or size < 1:
        raise ValueError("more prompts scored than the set holds")
    unseen = size - len(pairs)
    low = (sum((Fraction(repr(p.lo)) for p in pairs), Fraction(0)) - unseen) / size
    high = (sum((Fraction(repr(p.hi)) for p in pairs), Fraction(0)) + unseen) / size
    scored = sum(not p.missing for p in pairs)
    return ProbeSetOutcome(
        scored=scored,
        size=size,
        inside=scored == size and high <= limit,
        outside=low > limit,
        low=float(low),
        high=float(high),
    )


class RatioEvidence:
    """4.3: ratio of the p-quantiles of two concurrent arms, the baseline's quantile being unknown.

    The e-value is the minimum over every place the baseline's quantile may have, so it is valid at the
    true one. What the counts say at a place is computed when it is first asked for, and serves any ratio.
    """

    def __init__(
        self, candidate: Histogram, baseline: Histogram, share: float, effect: Effect = NO_EFFECT
    ) -> None:
        self._shift = max(candidate.shift, baseline.shift)
        c, b = candidate.copy(), baseline.copy()
        c.coarsen(self._shift)
        b.coarsen(self._shift)
        self._empty = not c.bins and not b.bins
        self._pass_c = Curve(Side.PASS, share, c, effect.k_pass)
        self._fail_b = Curve(Side.FAIL, share, b, effect.k_pass)
        self._fail_c = Curve(Side.FAIL, share, c, effect.k_fail)
        self._pass_b = Curve(Side.PASS, share, b, effect.k_fail)

    @property
    def bins_per_octave(self) -> int:
        return SUB >> self._shift

    def log_pass(self, ratio: float) -> float:
        """Against "Q(candidate) >= ratio * Q(baseline)"."""
        return self._log_pass(math.floor(self.bins_per_octave * math.log2(ratio) + 1e-9))

    def log_fail(self, ratio: float) -> float:
        """Against "Q(candidate) <= ratio * Q(baseline)"."""
        return self._log_fail(math.ceil(self.bins_per_octave * math.log2(ratio) - 1e-9))

    def evidence(self, ratio: float) -> Evidence:
        return Evidence(self.log_pass(ratio), self.log_fail(ratio))

    def upper(self, alpha: float) -> float:
        """Smallest ratio on the grid that is shown not to be reached; infinite when none is."""
        need = -math.log(alpha)
        r = self._search(lambda i: least_sum_reaches(self._pass_c, self._fail_b, i - 1, need))
        return math.inf if r is None else float(2.0 ** (r / self.bins_per_octave))

    def lower(self, alpha: float) -> float:
        """Largest ratio on the grid that is shown to be exceeded; 0 when none is."""
        need = -math.log(alpha)
        r = self._search(lambda i: least_sum_reaches(self._pass_b, self._fail_c, i - 1, need))
        return 0.0 if r is None else float(2.0 ** (-r / self.bins_per_octave))

    def _log_pass(self, r: int) -> float:
        # At place t the candidate is compared at edge t + r, the baseline at t + 1.
        return NEG if self._empty else least_sum(self._pass_c, self._fail_b, r - 1)

    def _log_fail(self, r: int) -> float:
        # At place t the candidate is compared at edge t + 1 + r, the baseline at t.
        return NEG if self._empty else least_sum(self._pass_b, self._fail_c, -r - 1)

    def _search(self, ok: Callable[[int], bool]) -> int | None:
        lo, hi = -SPAN_OCTAVES * self.bins_per_octave, SPAN_OCTAVES * self.bins_per_octave
        if self._empty or not ok(hi):
            return None
        while lo < hi:
            mid = (lo + hi) // 2
            lo, hi = (lo, mid) if ok(mid) else (mid + 1, hi)
        return lo


def zero_rate_bound(n: int, alpha: float) -> float:
    """4.6: upper bound on an event's rate after `n` units without one, valid at every n at once."""
    return 1.0 if n == 0 else 1.0 - float(alpha ** (1.0 / n))


def split_log_e(candidate: int, total: int, fraction: float, prior: float = 100.0) -> float:
    """4.7: log e-value against "each unit goes to the candidate with probability `fraction`"."""
    if not 0 <= candidate <= total or not 0.0 < fraction < 1.0:
        raise ValueError("a split needs 0 <= candidate <= total and a fraction inside (0, 1)")

    def log_beta(a: float, b: float) -> float:
        return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)

    a, b, rest = prior * fraction, prior * (1.0 - fraction), total - candidate
    return (
        log_beta(a + candidate, b + rest)
        - log_beta(a, b)
        - candidate * math.log(fraction)
        - rest * math.log1p(-fraction)
    )


def mean_log_e(values: Sequence[float]) -> float:
    """log of the mean of e-values; 0 (no evidence) for none."""
    return log_sum_exp(values) - math.log(len(values)) if values else 0.0


def pool_and_agents(pool: float, agents: Mapping[str, float]) -> float:
    """4.8: half the weight on the pool, half shared by its agents; one bad agent shows."""
    if not agents:
        return pool
    return log_sum_exp([math.log(0.5) + pool, math.log(0.5) + mean_log_e(list(agents.values()))])
