"""Metrics of other systems: what a source ships decides what may be concluded from it.

Of raw cumulative counts each increment is taken once, so they are evidence like ours. A value that somebody
else has computed is a point: it can warn and, if declared, fail, and never pass by itself. Knows counts,
times and names of series; no query language and no transport.

Section 8 of the evidence specification.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from kvtier_evidence.design import BlockSums
from kvtier_evidence.grid import MAX_SHIFT, Histogram, edge
from kvtier_evidence.verdicts import Basis, Reason

MAX_TARGETS: Final = 4096
MAX_SERIES: Final = 65_536
DEFAULT_CONSECUTIVE: Final = 3
GRID_SCALE: Final = 8
"""The exponential scale that is our grid."""
COARSEST_SCALE: Final = GRID_SCALE - MAX_SHIFT


class Form(StrEnum):
    """What a source ships."""

    COUNTER_PAIR = "counterPair"
    CLASSIC_HISTOGRAM = "classicHistogram"
    EXPONENTIAL_HISTOGRAM = "exponentialHistogram"
    GAUGE = "gauge"
    SUMMARY = "summary"
    EXPRESSION = "expression"

    @property
    def counts(self) -> bool:
        return self in (Form.COUNTER_PAIR, Form.CLASSIC_HISTOGRAM, Form.EXPONENTIAL_HISTOGRAM)


def external_basis(
    form: Form,
    *,
    has_edge: bool = False,
    cumulative: bool = False,
    reset_marked: bool = False,
    declared_point: bool = False,
    counted: bool = False,
) -> Basis | Reason:
    """The table of section 8. has_edge: a bucket ends at the limit. counted: a count query is declared."""
    if form.counts:
        if form is Form.CLASSIC_HISTOGRAM and not has_edge:
            return Basis.BRACKET
        return Reason.RESET_UNKNOWN if cumulative and not reset_marked else Basis.ANYTIME
    return Basis.POINT if declared_point and counted else Basis.GUARD_ONLY


class ResetUnknown(ValueError):
    """Whether a cumulative series began again cannot be told."""


@dataclass(slots=True)
class _Target:
    start: float | None
    at: float
    last: dict[str, int]


class CounterBook:
    """Increments of raw cumulative counters since the window opened, each sample once.

    A target is one process that counts: its series begin again together. A start time, where the source ships
    one, marks that; else a decrease does, which only shows while no sample was missed for longer than `gap`.
    """

    def __init__(self, *, gap: float) -> None:
        self._gap = gap
        self._targets: dict[str, _Target] = {}
        self.totals: dict[str, int] = {}
        """By series name without its target."""
        self.newest: float | None = None

    def take(
        self, target: str, start: float | None, at: float, counters: Mapping[str, int]
    ) -> dict[str, int]:
        """Adds one sample of all series of a target; what it brought. The first one seen of a target that was
        there before the window says only where to count from: `begin`.

        Raises ResetUnknown when samples lie too far apart, a counter with a start time decreased, or a series
        is gone and no other one says whether its process began again.
        """
        if any(v < 0 for v in counters.values()):
            raise ResetUnknown(f"{target}: a counter is negative")
        known = self._targets.get(target)
        if known is not None and at <= known.at:
            return {}
        if known is None:
            self._admit(target)
            fresh = dict(counters)
        else:
            fresh = self._fresh(target, known, start, at, counters)
        self._targets[target] = _Target(start, at, dict(counters))
        self.newest = at if self.newest is None else max(self.newest, at)
        for name, v in fresh.items():
            self.totals[name] = self.totals.get(name, 0) + v
        return fresh

    def begin(self, target: str, start: float | None, at: float, counters: Mapping[str, int]) -> None:
        """Where a target stood before what is counted; the newest one stands."""
        known = self._targets.get(target)
        if known is not None and at <= known.at:
            return
        if known is None:
            self._admit(target)
        self._targets[target] = _Target(start, at, dict(counters))
        self.newest = at if self.newest is None else max(self.newest, at)
        for name in counters:
            self.totals.setdefault(name, 0)

    def knows(self, target: str) -> bool:
        return target in self._targets

    def _fresh(
        self, target: str, known: _Target, start: float | None, at: float, counters: Mapping[str, int]
    ) -> dict[str, int]:
        decreased = any(name in counters and counters[name] < v for name, v in known.last.items())
        if start is not None and known.start is not None:
            if start == known.start and decreased:
                raise ResetUnknown(f"{target}: a counter decreased within one life")
            again = start != known.start
        else:
            if at - known.at > self._gap:
                raise ResetUnknown(f"{target}: no sample for {at - known.at:.0f} s, a reset would not show")
            if not decreased and not known.last.keys() <= counters.keys():
                raise ResetUnknown(f"{target}: a series ended while others went on")
            again = decreased
        if again:
            return dict(counters)
        return {name: v - known.last.get(name, 0) for name, v in counters.items()}

    def _admit(self, target: str) -> None:
        if len(self._targets) >= MAX_TARGETS:
            raise ValueError(f"more than {MAX_TARGETS} targets")


def rescaled(scale: int, zero: int, buckets: Mapping[int, int], negative: int = 0) -> Histogram:
    """An exponential histogram on our grid: bucket i of `scale` holds (b^i, b^(i+1)], b = 2^(2^-scale).

    Finer scales are merged, coarser ones keep theirs. Raises ValueError for one coarser than the grid can be.
    """
    if scale < COARSEST_SCALE:
        raise ValueError(f"scale {scale} is coarser than {COARSEST_SCALE}")
    finer = max(0, scale - GRID_SCALE)
    h = Histogram(shift=max(0, GRID_SCALE - scale), zero=zero, missing=negative)
    for i, count in buckets.items():
        h.bins[i >> finer] = h.bins.get(i >> finer, 0) + count
    h.n = zero + negative + sum(h.bins.values())
    if not h.consistent():
        raise ValueError("an exponential histogram that does not add up")
    return h


class HistogramBook:
    """The same for exponential histograms, whose scale may fall while they grow."""

    def __init__(self, *, gap: float) -> None:
        self._gap = gap
        self._targets: dict[str, tuple[float | None, float, Histogram]] = {}
        self.total = Histogram()
        self.newest: float | None = None

    def take(self, target: str, start: float | None, at: float, now: Histogram) -> Histogram:
        """Adds one cumulative sample; what it brought. Raises as `CounterBook.take`."""
        known = self._targets.get(target)
        fresh = now
        if known is not None:
            if at <= known[1]:
                return Histogram()
            fresh = self._fresh(target, known, start, at, now)
        elif len(self._targets) >= MAX_TARGETS:
            raise ValueError(f"more than {MAX_TARGETS} targets")
        self._targets[target] = (start, at, now.copy())
        self.newest = at if self.newest is None else max(self.newest, at)
        self.total.merge(fresh)
        return fresh

    def begin(self, target: str, start: float | None, at: float, now: Histogram) -> None:
        known = self._targets.get(target)
        if known is None or at > known[1]:
            self._targets[target] = (start, at, now.copy())
            self.newest = at if self.newest is None else max(self.newest, at)

    def knows(self, target: str) -> bool:
        return target in self._targets

    def _fresh(
        self,
        target: str,
        known: tuple[float | None, float, Histogram],
        start: float | None,
        at: float,
        now: Histogram,
    ) -> Histogram:
        began, last_at, before = known
        marked = start is not None and began is not None
        if marked and start != began:
            return now
        if not marked and at - last_at > self._gap:
            raise ResetUnknown(f"{target}: no sample for {at - last_at:.0f} s, a reset would not show")
        try:
            return now.since(before)
        except ValueError as error:
            if marked:
                raise ResetUnknown(f"{target}: a histogram decreased within one life") from error
            return now


@dataclass(frozen=True, slots=True)
class Above:
    """Units over a limit among `n`, by the unfavourable and by the favourable reading of each bucket."""

    n: int
    up: int
    down: int
    exact: bool
    """A bucket ends at the limit: both readings are one."""


def above_of_buckets(cumulative: Mapping[float, int], limit: float) -> Above:
    """A classic histogram: `cumulative` units at most an edge, +inf included, by edge.

    Without an edge at the limit, the next lower edge counts for Pass and the next higher one for Fail.
    Raises ValueError without the bucket +inf, or where counts fall from edge to edge.
    """
    edges = sorted(cumulative)
    if not edges or not math.isinf(edges[-1]):
        raise ValueError("a classic histogram has a bucket le=+Inf")
    counts = [cumulative[e] for e in edges]
    if any(a > b for a, b in itertools.pairwise(counts)):
        raise ValueError("cumulative buckets fall")
    n = counts[-1]
    under = [c for e, c in zip(edges, counts, strict=True) if e <= limit]
    over = next(c for e, c in zip(edges, counts, strict=True) if e >= limit)
    return Above(n, n - (under[-1] if under else 0), n - over, limit in cumulative)


def above_of_histogram(h: Histogram, limit: float) -> Above:
    """An exponential histogram: the bin in which the limit lies is above for Pass and below for Fail."""
    up = h.missing + sum(c for i, c in h.bins.items() if edge(i + 1, h.shift) > limit)
    down = sum(c for i, c in h.bins.items() if edge(i, h.shift) >= limit)
    return Above(h.n, up, down, up - h.missing == down)


@dataclass(frozen=True, slots=True)
class ExternalReading:
    """What one look has of one external gate. error: the source could not be read, or not be trusted;
    `detail` says why for people."""

    form: Form
    basis: Basis
    error: Reason | None = None
    detail: str = ""
    above: Above | None = None
    """Counting sources; None: no data yet."""
    blocks: BlockSums = field(default_factory=BlockSums)
    """Increments of one target between two samples."""
    value: float | None = None
    """Point sources: the newest value; of counting ones as displayed."""
    breaches: int = 0
    """Point sources: values over the limit in a row, each taken once."""
    count: int | None = None
    """Point sources: units that the count query tells of."""
    complete: bool = True
    """Every sample since the window opened was read."""


class Streak:
    """Breaches of a point value in a row; a value is taken once per time stamp."""

    def __init__(self) -> None:
        self._at: float | None = None
        self.breaches = 0
        self.value: float | None = None

    def take(self, at: float, value: float, limit: float) -> None:
        if self._at is not None and at <= self._at:
            return
        self._at, self.value = at, value
        self.breaches = self.breaches + 1 if value > limit else 0
