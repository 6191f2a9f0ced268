"""Intervals and paired tests for counts of prompts.

Why it exists: six prompts of one cell say nothing, and selectors see the same prompts, so the comparison is
paired. Exact where that is cheap, without a library. It must not know what was counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist


@dataclass(frozen=True, slots=True)
class Proportion:
    """hits of tries, with the Wilson interval [low, high]; of no tries it is [0, 1] and the rate is nan."""

    hits: int
    tries: int
    low: float
    high: float

    @property
    def rate(self) -> float:
        return self.hits / self.tries if self.tries else math.nan


def wilson(hits: int, tries: int, alpha: float = 0.05) -> Proportion:
    """Wilson, 1927: the roots of |p - hits/tries| = z sqrt(p (1 - p) / tries). ValueError for hits outside
    [0, tries] or alpha outside (0, 1)."""
    if not 0 <= hits <= tries:
        raise ValueError(f"{hits} hits of {tries}")
    if not 0 < alpha < 1:
        raise ValueError(f"alpha {alpha}")
    if tries == 0:
        return Proportion(0, 0, 0.0, 1.0)
    z = NormalDist().inv_cdf(1 - alpha / 2)
    rate = hits / tries
    scale = 1 + z * z / tries
    centre = (rate + z * z / (2 * tries)) / scale
    half = z / scale * math.sqrt(rate * (1 - rate) / tries + z * z / (4 * tries * tries))
    low = 0.0 if hits == 0 else max(0.0, centre - half)
    high = 1.0 if hits == tries else min(1.0, centre + half)
    return Proportion(hits, tries, low, high)


@dataclass(frozen=True, slots=True)
class Paired:
    """only_first, only_second: prompts that one of the two answers alone. p: exact, two-sided."""

    only_first: int
    only_second: int
    p: float


def mcnemar(first: Sequence[bool], second: Sequence[bool]) -> Paired:
    """McNemar, 1947, in its exact form: of b + c discordant pairs each falls on either side with 1/2.
    ValueError for unequal lengths."""
    if len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} prompts are no pairs")
    b = sum(one and not other for one, other in zip(first, second, strict=True))
    c = sum(other and not one for one, other in zip(first, second, strict=True))
    discordant = b + c
    if discordant == 0:
        return Paired(0, 0, 1.0)
    tail = sum(math.comb(discordant, i) for i in range(min(b, c) + 1))
    return Paired(b, c, min(1.0, 2 * tail / 2**discordant))


def holm(values: Sequence[float]) -> tuple[float, ...]:
    """Holm, 1979: p values adjusted for all of them being looked at, in the order given."""
    order = sorted(range(len(values)), key=lambda at: values[at])
    adjusted = [0.0] * len(values)
    worst = 0.0
    for rank, at in enumerate(order):
        worst = max(worst, min(1.0, (len(values) - rank) * values[at]))
        adjusted[at] = worst
    return tuple(adjusted)


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def quantile(values: Sequence[float], q: float) -> float:
    """Linear between order statistics (Hyndman and Fan's type 7); nan of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])
