"""One gate's readings of one window: samples taken once each into its books, and what they say now.

A book belongs to one window of one rollout. After a restart of the operator it is read again from the
window's opening, where the source keeps its samples. It must not know how a source is asked, nor verdicts.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from kvtier_evidence.design import BlockSums
from kvtier_evidence.external import (
    MAX_SERIES,
    Above,
    CounterBook,
    ExternalReading,
    Form,
    HistogramBook,
    ResetUnknown,
    Streak,
    above_of_buckets,
    above_of_histogram,
    external_basis,
)
from kvtier_evidence.gatespec import GateSpec
from kvtier_evidence.limits import share_above
from kvtier_evidence.verdicts import Basis, Reason
from kvtier_operator.external.query import Query
from kvtier_operator.external.samples import CounterSample, HistogramSample, Provider, SourceError

PAGE_SECONDS = 1800.0
PAGES = 4


@dataclass(frozen=True)
class Pace:
    """scrape: seconds between samples of the source. lag: what is younger may not be whole yet."""

    scrape: float = 30.0
    lag: float = 15.0

    @property
    def gap(self) -> float:
        """Longer without a sample, and a reset would not show."""
        return 2.5 * self.scrape


class GateBook:
    """Reads one gate. Not thread-safe. `opened_at`: of the window, seconds of the Unix epoch."""

    def __init__(self, gate: GateSpec, query: Query, opened_at: float, pace: Pace) -> None:
        if gate.external is None:
            raise ValueError(f"gate {gate.name} is not external")
        self._gate, self._terms, self._query, self._pace = gate, gate.external, query, pace
        self._opened_at = opened_at
        self._cursor = opened_at - pace.gap
        self._counters = CounterBook(gap=pace.gap)
        self._histograms = HistogramBook(gap=pace.gap)
        self._streak = Streak()
        self._count: int | None = None
        self._blocks = BlockSums()
        self._unknown = 0
        self._broken: SourceError | None = None

    async def read(self, provider: Provider, now: float, interval: float) -> ExternalReading:
        """Never raises: what goes wrong is in the reading."""
        try:
            if self._broken is not None:
                raise self._broken
            if not self._terms.form.counts:
                await self._read_point(provider, now, interval)
            else:
                await self._read_counts(provider, now, interval)
            return self._now(now, None)
        except ResetUnknown as error:
            # Nothing can mend a book that may have missed a reset: the window stays unreadable.
            self._broken = SourceError(str(error), Reason.RESET_UNKNOWN)
            return self._now(now, self._broken)
        except SourceError as error:
            return self._now(now, error)
        except ValueError as error:
            return self._now(now, SourceError(str(error)))
        except (LookupError, TypeError, ArithmeticError) as error:
            # An answer of another shape than its source's API has: it must not stop the other gates' look.
            return self._now(now, SourceError(f"not an answer of its source: {type(error).__name__}"))

    async def _read_point(self, provider: Provider, now: float, interval: float) -> None:
        found = await provider.point(self._query.parts[0], now)
        self._streak.value = None
        if found is not None:
            self._check_fresh(found.at, now, interval)
            self._streak.take(found.at, found.value, float(self._gate.limit))
            self._streak.value = found.value
        if self._terms.point:
            count = await provider.point(self._query.parts[1], now)
            if count is not None:
                self._check_fresh(count.at, now, interval)
            self._count = None if count is None else int(count.value)

    async def _read_counts(self, provider: Provider, now: float, interval: float) -> None:
        until = now - self._pace.lag
        for _ in range(PAGES):
            if self._cursor >= until:
                break
            upto = min(until, self._cursor + PAGE_SECONDS)
            # Some of what was read before again, so that a reset between pages shows. Repeats add nothing.
            since = max(self._opened_at - self._pace.gap, self._cursor - self._pace.gap)
            if self._terms.form is Form.EXPONENTIAL_HISTOGRAM:
                for sample in await provider.histograms(self._query.parts[0], since, upto):
                    self._take_histogram(sample)
            else:
                for one in await provider.counters(self._query.parts, since, upto):
                    self._take_counters(one)
            self._cursor = upto
        newest = self._newest()
        if newest is not None:
            self._check_fresh(newest, now, interval)

    def _check_fresh(self, newest: float, now: float, interval: float) -> None:
        if now - newest > 2.0 * max(self._pace.scrape, interval) + self._pace.lag:
            raise SourceError("no sample for longer than two intervals")

    def _newest(self) -> float | None:
        exponential = self._terms.form is Form.EXPONENTIAL_HISTOGRAM
        return (self._histograms if exponential else self._counters).newest

    def _take_counters(self, sample: CounterSample) -> None:
        if len(sample.counters) > MAX_SERIES:
            raise SourceError(f"more than {MAX_SERIES} series of one process")
        counters = {f"{part}|{rest}": v for (part, rest), v in sample.counters.items()}
        book = self._counters
        if self._only_begins(book.knows(sample.target), sample):
            book.begin(sample.target, sample.start, sample.at, counters)
            return
        fresh = book.take(sample.target, sample.start, sample.at, counters)
        if not fresh:
            return
        if self._terms.form is Form.COUNTER_PAIR:
            n = sum(v for name, v in fresh.items() if name.startswith("1|"))
            bad = sum(v for name, v in fresh.items() if name.startswith("0|"))
            if not any(name.startswith("0|") for name in counters):
                # A process without the other counter: nobody knows how many of its units were bad.
                self._unknown += n
            if bad > n:
                raise SourceError(f"{sample.target}: {bad} bad of {n}")
            self._block(n, bad)
        else:
            above = self._above_buckets(fresh)
            self._block(above.n, above.up)

    def _take_histogram(self, sample: HistogramSample) -> None:
        book = self._histograms
        if self._only_begins(book.knows(sample.target), sample):
            book.begin(sample.target, sample.start, sample.at, sample.histogram)
            return
        above = above_of_histogram(
            book.take(sample.target, sample.start, sample.at, sample.histogram), float(self._gate.limit)
        )
        self._block(above.n, above.up)

    def _only_begins(self, known: bool, sample: CounterSample | HistogramSample) -> bool:
        """What a process counted before the window is not of it, nor, without a start time, what it had
        counted when it was first seen."""
        born_inside = sample.start is not None and sample.start >= self._opened_at
        return not born_inside and (sample.at <= self._opened_at or not known)

    def _block(self, n: int, over: int) -> None:
        if n:
            self._blocks.add_one_arm(n, over)

    def _above_buckets(self, counts: dict[str, int]) -> Above:
        cumulative: dict[float, int] = {}
        for name, v in counts.items():
            labels = json.loads(name.partition("|")[2])
            if "le" not in labels:
                raise SourceError("a series without le where buckets are expected")
            cumulative[float(labels["le"])] = cumulative.get(float(labels["le"]), 0) + v
        return above_of_buckets(cumulative, float(self._gate.limit))

    def _now(self, now: float, error: SourceError | None) -> ExternalReading:
        form, terms = self._terms.form, self._terms
        above, value, basis = self._above(error)
        return ExternalReading(
            form,
            basis,
            None if error is None else error.reason,
            "" if error is None else str(error),
            above,
            self._blocks.copy(),
            value if form.counts else self._streak.value,
            self._streak.breaches,
            self._count,
            complete=not terms.form.counts or self._cursor >= now - self._pace.lag,
        )

    def _above(self, error: SourceError | None) -> tuple[Above | None, float | None, Basis]:
        form = self._terms.form
        if not form.counts:
            return None, None, Basis.POINT if self._terms.point else Basis.GUARD_ONLY
        totals = self._counters.totals
        if form is Form.COUNTER_PAIR:
            n = sum(v for name, v in totals.items() if name.startswith("1|"))
            bad = sum(v for name, v in totals.items() if name.startswith("0|"))
            # No series of bad ones at all may be a selector that matches nothing.
            seen = n > 0 and any(name.startswith("0|") for name in totals)
            return (Above(n, min(n, bad + self._unknown), bad, True) if seen else None), None, Basis.ANYTIME
        share = share_above(self._gate.quantile) if self._gate.quantile is not None else 0.0
        if form is Form.EXPONENTIAL_HISTOGRAM:
            h = self._histograms.total
            found = above_of_histogram(h, float(self._gate.limit)) if h.n else None
            return found, h.quantile(1.0 - share), Basis.ANYTIME
        if not totals:
            return None, None, Basis.ANYTIME
        try:
            counted = self._above_buckets(totals)
        except (ValueError, SourceError):
            if error is None:
                raise
            return None, None, Basis.BRACKET
        basis = external_basis(form, has_edge=counted.exact)
        return (
            counted if counted.n else None,
            _bucket_quantile(totals, 1.0 - share),
            basis if isinstance(basis, Basis) else Basis.BRACKET,
        )


def _bucket_quantile(totals: dict[str, int], p: float) -> float | None:
    cumulative: dict[float, int] = {}
    for name, v in totals.items():
        edge = float(json.loads(name.partition("|")[2])["le"])
        cumulative[edge] = cumulative.get(edge, 0) + v
    n = max(cumulative.values(), default=0)
    rank = math.ceil(p * n - 1e-9)
    return next((edge for edge, count in sorted(cumulative.items()) if n and count >= rank), None)
