"""The operator's own measurements, with units in their names and bounded labels.

No label ever holds an object's name or uid: a cluster with many caches must not blow up its time series.
The registry is passed in, so two operators in one process do not share counters.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_INTERVALS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class Metrics:
    """Implements `kvtier_operator.ports.RpcMetrics`; also what queue, API client and election report."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._children: dict[tuple[MetricWrapperBase, tuple[str, ...]], Any] = {}
        self._queue_depth = Gauge(
            "kvtier_operator_queue_depth", "Keys waiting to be reconciled.", ["kind"], registry=registry
        )
        self._queue_wait = Histogram(
            "kvtier_operator_queue_wait_seconds",
            "From the moment a key was due until its reconcile began.",
            ["kind"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._queue_refused = Counter(
            "kvtier_operator_queue_refused_total", "Keys not taken: queue full.", ["kind"], registry=registry
        )
        self._reconcile = Histogram(
            "kvtier_operator_reconcile_duration_seconds",
            "One reconcile.",
            ["kind", "result"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._writes = Counter(
            "kvtier_operator_api_writes_total",
            "Writes sent to the API server, refused ones included.",
            ["kind", "verb"],
            registry=registry,
        )
        self._requests = Histogram(
            "kvtier_operator_api_request_duration_seconds",
            "One request to the API server.",
            ["verb", "code"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._rpc = Histogram(
            "kvtier_operator_agent_rpc_duration_seconds",
            "One call to an agent.",
            ["method", "code"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._leader = Gauge(
            "kvtier_operator_leader", "1 while this process holds the operator's Lease.", registry=registry
        )
        self._rollbacks = Counter(
            "kvtier_operator_rollbacks_total",
            "Returns to the exact baseline that this process has written down, by cause.",
            ["cause"],
            registry=registry,
        )
        self._lateness = Histogram(
            "kvtier_operator_look_lateness_intervals",
            "How late the looks at rollouts' evidence were, in parts of their interval.",
            buckets=_INTERVALS,
            registry=registry,
        )
        self._watched = Gauge(
            "kvtier_operator_watched_objects", "Objects in the read cache.", ["kind"], registry=registry
        )

    def from_zero(self, kinds: Iterable[str], causes: Iterable[str]) -> None:
        """Shows 0 for what has not happened yet: `increase` sees nothing of a series that begins with 1, so
        an alert would miss the first rollback of each cause, and the first refusal of each queue."""
        for kind in kinds:
            self._of(self._queue_refused, kind)
        for cause in causes:
            self._of(self._rollbacks, cause)

    def _of(self, metric: MetricWrapperBase, *labels: str) -> Any:
        """The time series of these labels: looked up once, not by each of some hundred calls a second."""
        key = metric, labels
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = metric.labels(*labels)
        return child

    def queue_depth(self, kind: str, depth: int) -> None:
        self._of(self._queue_depth, kind).set(depth)

    def queue_wait(self, kind: str, seconds: float) -> None:
        self._of(self._queue_wait, kind).observe(seconds)

    def queue_refused(self, kind: str) -> None:
        self._of(self._queue_refused, kind).inc()

    def reconciled(self, kind: str, result: str, seconds: float) -> None:
        self._of(self._reconcile, kind, result).observe(seconds)

    def api_write(self, kind: str, verb: str) -> None:
        self._of(self._writes, kind, verb).inc()

    def api_request(self, verb: str, code: str, seconds: float) -> None:
        self._of(self._requests, verb, code).observe(seconds)

    def observe_rpc(self, method: str, code: str, seconds: float) -> None:
        self._of(self._rpc, method, code).observe(seconds)

    def leader(self, leading: bool) -> None:
        self._leader.set(1 if leading else 0)

    def rolled_back(self, cause: str) -> None:
        self._of(self._rollbacks, cause).inc()

    def looked(self, late: float) -> None:
        self._lateness.observe(late)

    def watched(self, kind: str, objects: int) -> None:
        self._of(self._watched, kind).set(objects)
