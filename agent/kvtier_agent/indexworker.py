"""The thread in which selectors' indexes are built, and what is told of it.

Why it exists: the core decides what is built next and how long to rest behind it; somebody has to call it.
One thread for all caches of the process, since the share of a processor that it may use is the node's. A
build is one call, which nothing can end: one that takes too long is given up with its thread, and another
thread builds the rest. It must not know what an index is."""

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
JOB_SECONDS = 600.0
"""What one job may take before it is given up; the longest builds of 8,192 rows take some seconds."""
SPARE_THREADS = 2
"""That may take the place of threads whose job was given up and has not returned."""


class IndexWorker:
    """A Runner of IndexWorks; its threads start with the first work."""

    def __init__(self, job_seconds: float = JOB_SECONDS, look_seconds: float = IDLE_SECONDS) -> None:
        """job_seconds: of the works' clock. look_seconds: how often a job's time is looked at."""
        self._job_seconds = job_seconds
        self._look_seconds = look_seconds
        self._stopped = threading.Event()
        self._watch: threading.Thread | None = None
        self._given_up: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._something = threading.Event()
        self._ending = False
        self._thread: threading.Thread | None = None

    def wake(self, works: IndexWorks) -> None:
        """There may be work."""
        with self._lock:
            if self._ending:
                return
            if self._watch is None:
                self._begin(works)
                self._watch = threading.Thread(
                    target=self._look, args=(works,), name="index-watch", daemon=True
                )
                self._watch.start()
        self._something.set()

    def _begin(self, works: IndexWorks) -> None:
        """The lock is held."""
        self._thread = threading.Thread(target=self._run, args=(works,), name="index-worker", daemon=True)
        self._thread.start()

    def _look(self, works: IndexWorks) -> None:
        while not self._stopped.wait(self._look_seconds):
            with self._lock:
                thread = self._thread
                self._given_up = [one for one in self._given_up if one.is_alive()]
                if self._ending:
                    return
                if thread is None:
                    # All places are taken by jobs that did not return; one that does gives its place back.
                    if len(self._given_up) <= SPARE_THREADS:
                        self._begin(works)
                elif thread.ident is not None and works.give_up(thread.ident, self._job_seconds):
                    log.error("an index job was given up after %g s", self._job_seconds)
                    self._given_up.append(thread)
                    self._thread = None
                    if len(self._given_up) <= SPARE_THREADS:
                        self._begin(works)

    def close(self, seconds: float) -> list[str]:
        """No further work begins; what still runs after `seconds`, by name."""
        with self._lock:
            self._ending = True
            threads = [one for one in (*self._given_up, self._thread) if one is not None]
            watch = self._watch
        self._stopped.set()
        self._something.set()
        until = time.monotonic() + seconds
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        if watch is not None:
            watch.join(max(0.0, until - time.monotonic()))
        return [thread.name for thread in threads if thread.is_alive()]

    def _run(self, works: IndexWorks) -> None:
        with contextlib.suppress(OSError):
            # Of this thread alone: on Linux a priority is a thread's.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while not self._ending and self._thread is threading.current_thread():
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
