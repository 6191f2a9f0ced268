"""The thread in which selectors' indexes are built, and what is told of it.

Why it exists: the core decides what is built next and how long to rest behind it; somebody has to call it.
One thread for all caches of the process, since the share of a processor that it may use is the node's. It
must not know what an index is."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvtier_core.selectors.lifecycle.grades import BOUNDS, Grades
from kvtier_core.selectors.lifecycle.memory import IndexMemory
from kvtier_core.selectors.lifecycle.works import IndexWorks

log = logging.getLogger(__name__)

NICENESS = 10
"""Of the thread, on Linux: steps come first even within the share."""
IDLE_SECONDS = 5.0


class IndexWorker:
    """A Runner of IndexWorks; its thread starts with the first work."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._something = threading.Event()
        self._ending = False
        self._thread: threading.Thread | None = None

    def wake(self, works: IndexWorks) -> None:
        """There may be work."""
        with self._lock:
            if self._ending:
                return
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, args=(works,), name="index-worker", daemon=True
                )
                self._thread.start()
        self._something.set()

    def close(self, seconds: float) -> list[str]:
        """No further work begins; what still runs after `seconds`, by name."""
        with self._lock:
            self._ending = True
            thread = self._thread
        self._something.set()
        if thread is None:
            return []
        thread.join(seconds)
        return [thread.name] if thread.is_alive() else []

    def _run(self, works: IndexWorks) -> None:
        with contextlib.suppress(OSError):
            # Of this thread alone: on Linux a priority is a thread's.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while not self._ending:
            self._something.clear()
            try:
                rest = works.run_next()
            except Exception:
                # The state of the job is the works' to keep; a thread that ended would build nothing more.
                log.exception("an index job ended the wrong way")
                rest = IDLE_SECONDS
            if rest is None:
                self._something.wait(IDLE_SECONDS)
            elif rest > 0.0:
                self._sleep(rest)

    def _sleep(self, seconds: float) -> None:
        """The rest that a share demands: work that comes does not shorten it, an end does."""
        until = time.monotonic() + seconds
        while not self._ending and (left := until - time.monotonic()) > 0.0:
            self._something.wait(left)
            self._something.clear()


def make_works(worker: IndexWorker, share: float, memory_bytes: int) -> IndexWorks:
    """What builds the indexes of all caches of this process."""
    return IndexWorks(
        time.monotonic,
        runner=worker,
        share=share,
        spent=time.thread_time,
        memory=IndexMemory(memory_bytes),
    )


class IndexCollector(Collector):
    """Read at each scrape. Labels are families, of which there are few, and reasons."""

    def __init__(self, registry: CollectorRegistry, works: IndexWorks) -> None:
        self._works = works
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        sessions = GaugeMetricFamily(
            "kvtier_agent_index_sessions",
            "Sessions by the state of their indexes",
            labels=["family", "state"],
        )
        held = GaugeMetricFamily(
            "kvtier_agent_index_bytes", "Bytes of indexes and of rows that wait", labels=["family", "kind"]
        )
        seconds = CounterMetricFamily(
            "kvtier_agent_index_build_seconds",
            "Hidden: of builds that nobody waited for; exposed: steps were exact for want of an index",
            labels=["family", "kind"],
        )
        jobs = CounterMetricFamily(
            "kvtier_agent_index_jobs",
            "Builds and appends that were published, and attempts that failed",
            labels=["family", "kind"],
        )
        refusals = CounterMetricFamily(
            "kvtier_agent_index_refusals", "Sessions that are exact for good", labels=["family", "reason"]
        )
        totals: dict[tuple[str, str, str], float] = {}

        def add(metric: str, family: str, label: str, value: float) -> None:
            totals[metric, family, label] = totals.get((metric, family, label), 0.0) + value

        for state in self._works.states():
            family, counted = state.name.family, state.counted
            for label, count in (
                ("ready", state.ready),
                ("building", state.building),
                ("refused", state.refused),
            ):
                add("sessions", family, label, count)
            add("held", family, "index", state.index_bytes)
            add("held", family, "waiting", state.waiting_bytes)
            add("seconds", family, "hidden", counted.hidden_seconds)
            add("seconds", family, "exposed", counted.exposed_seconds)
            for label, count in (
                ("build", counted.builds),
                ("append", counted.appends),
                ("failure", counted.failures),
            ):
                add("jobs", family, label, count)
            for reason, count in counted.refusals.items():
                add("refusals", family, reason, count)
        metrics: dict[str, GaugeMetricFamily | CounterMetricFamily] = {
            "sessions": sessions,
            "held": held,
            "seconds": seconds,
            "jobs": jobs,
            "refusals": refusals,
        }
        for (metric, family, label), value in totals.items():
            metrics[metric].add_metric([family, label], value)
        yield from metrics.values()
        yield from self._audits()

    def _audits(self) -> Iterator[Metric]:
        shares = HistogramMetricFamily(
            "kvtier_agent_audit_certified_share",
            "Sound lower bound of the attention that graded selections read, of the head with least",
            labels=["family"],
        )
        failures = CounterMetricFamily(
            "kvtier_agent_audit_failures",
            "Gradings that came to nothing, by reason",
            labels=["family", "reason"],
        )
        by_family: dict[str, Grades] = {}
        for name, grades in self._works.audits.read().items():
            joined = by_family.setdefault(name.family, Grades())
            joined.counts = [mine + more for mine, more in zip(joined.counts, grades.counts, strict=True)]
            joined.total += grades.total
            for reason, count in grades.failures.items():
                joined.failures[reason] = joined.failures.get(reason, 0) + count
        for family, grades in by_family.items():
            below = [float(count) for count in itertools.accumulate(grades.counts)]
            buckets = [(str(bound), count) for bound, count in zip(BOUNDS, below, strict=True)]
            shares.add_metric([family], [*buckets, ("+Inf", below[-1])], grades.total)
            for reason, count in grades.failures.items():
                failures.add_metric([family, reason], count)
        yield from (shares, failures)
