"""Metrics of what happens in each frame: to count is one step, and a scrape reads what it reads of any.

Why it exists: an agent counts between the answer to a layer and the next layer's frame, and then none of its
code is in a processor's caches, so that the client library's five calls for an observation take longer than
all that is counted. It must not know what is counted.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

C = TypeVar("C")


class ChildOf(dict[tuple[str, ...], C]):
    """A metric's children by their label values, each looked up once: the library's own look-up locks, checks
    and converts, which costs more than the observation itself. As bounded as the labels are."""

    def __init__(self, labels: Callable[..., C]) -> None:
        super().__init__()
        self._labels = labels

    def __missing__(self, values: tuple[str, ...]) -> C:
        # Of two threads that ask at once both get the same.
        return self.setdefault(values, self._labels(*values))


class Duration:
    """How often something took how long, in buckets, and how long all of it. Safe from any thread."""

    __slots__ = ("_bounds", "_counts", "_lock", "_seconds", "created")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds, self._counts = bounds, [0] * (len(bounds) + 1)
        self._seconds = 0.0
        self._lock = threading.Lock()
        self.created = time.time()

    def observe(self, seconds: float) -> None:
        with self._lock:
            self._counts[bisect_left(self._bounds, seconds)] += 1
            self._seconds += seconds

    def read(self) -> tuple[list[int], float]:
        """Observations up to each bound, and up to none; the sum of them all."""
        with self._lock:
            return list(accumulate(self._counts)), self._seconds


class Total:
    """A sum that only grows. Safe from any thread."""

    __slots__ = ("_lock", "created", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self._lock = threading.Lock()
        self.created = time.time()

    def inc(self, amount: float) -> None:
        with self._lock:
            self.value += amount


class Durations(Collector):
    """A histogram with labels."""

    def __init__(
        self,
        name: str,
        documentation: str,
        labels: Sequence[str],
        bounds: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        """bounds: ascending."""
        self._name, self._documentation, self._labels = name, documentation, labels
        self._buckets = [*map(floatToGoString, bounds), "+Inf"]
        self.children = ChildOf(lambda *values: Duration(bounds))
        registry.register(self)

    def describe(self) -> Iterator[Metric]:
        yield HistogramMetricFamily(self._name, self._documentation, labels=self._labels)

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labels)
        for values, one in list(self.children.items()):
            counts, seconds = one.read()
            names = list(map(str, values))
            family.add_metric(names, list(zip(self._buckets, counts, strict=True)), seconds)
            labels = dict(zip(self._labels, names, strict=True))
            family.add_sample(f"{self._name}_created", labels, one.created)
        yield family


class Totals(Collector):
    """A counter with labels."""

    def __init__(
        self, name: str, documentation: str, labels: Sequence[str], registry: CollectorRegistry
    ) -> None:
        self._name, self._documentation, self._labels = name, documentation, labels
        self.children = ChildOf(lambda *values: Total())
        registry.register(self)

    def describe(self) -> Iterator[Metric]:
        yield CounterMetricFamily(self._name, self._documentation, labels=self._labels)

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._documentation, labels=self._labels)
        for values, one in list(self.children.items()):
            family.add_metric(list(map(str, values)), one.value, created=one.created)
        yield family
