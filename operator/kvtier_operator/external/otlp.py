"""Metrics that a collector pushes by OTLP over HTTP: the newest points of bounded many series.

Cumulative points carry the time they began, so a reset is marked; deltas are added up. Memory is bounded and
lost with the process: after a restart counting begins anew. It must not know gates.
"""

from __future__ import annotations

import hmac
import json
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality, Metric

from kvtier_evidence.external import rescaled
from kvtier_evidence.grid import Histogram
from kvtier_evidence.verdicts import Reason
from kvtier_operator.external.query import matchers
from kvtier_operator.external.samples import CounterSample, HistogramSample, PointSample, SourceError

MAX_SERIES = 8192
KEPT_POINTS = 128
NANOS = 1e9
Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class _Point:
    """start: when it began to count, 0 for values. counts: by edge, None key for a plain sum."""

    start: float
    at: float
    counts: Mapping[float | None, int] = field(default_factory=dict)
    histogram: Histogram | None = None
    value: float | None = None


@dataclass
class _Series:
    name: str
    labels: dict[str, str]
    points: deque[_Point] = field(default_factory=lambda: deque(maxlen=KEPT_POINTS))


class OtlpStore:
    """Implements Provider. `take` and the reads are called in one thread."""

    def __init__(self) -> None:
        self._series: OrderedDict[tuple[str, Labels], _Series] = OrderedDict()
        self.refused = 0
        """Points that could not be used: no start time, no counts, or a count that is none."""

    def take(self, request: ExportMetricsServiceRequest) -> None:
        for resource in request.resource_metrics:
            of_resource = _attributes(resource.resource.attributes)
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    for labels, point, delta in self._points(metric):
                        self._keep(metric.name, {**of_resource, **labels}, point, delta=delta)

    async def counters(self, selectors: tuple[str, ...], since: float, until: float) -> list[CounterSample]:
        found: dict[tuple[float, str], dict[tuple[int, str], int]] = {}
        starts: dict[tuple[float, str], float] = {}
        for part, selector in enumerate(selectors):
            for series in self._matching(selector):
                target, rest = _target(series.labels)
                for point in series.points:
                    if not since < point.at <= until or not point.counts:
                        continue
                    where = (point.at, target)
                    if starts.setdefault(where, point.start) != point.start:
                        raise SourceError(
                            f"{selector}: series of one process began at two times", Reason.RESET_UNKNOWN
                        )
                    into = found.setdefault(where, {})
                    for edge, count in point.counts.items():
                        key = rest if edge is None else json.dumps({**json.loads(rest), "le": repr(edge)})
                        into[part, key] = count
        return [
            CounterSample(target, starts[at, target], at, found[at, target]) for at, target in sorted(found)
        ]

    async def histograms(self, selector: str, since: float, until: float) -> list[HistogramSample]:
        out = []
        for series in self._matching(selector):
            # Each series is a life of its own here: its start time is.
            name = json.dumps(series.labels, sort_keys=True)
            out += [
                HistogramSample(name, point.start, point.at, point.histogram)
                for point in series.points
                if since < point.at <= until and point.histogram is not None
            ]
        return sorted(out, key=lambda one: one.at)

    async def point(self, expression: str, at: float) -> PointSample | None:
        matching = self._matching(expression)
        if len(matching) > 1:
            raise SourceError(f"{expression}: {len(matching)} series where one is expected")
        points = [p for series in matching for p in series.points if p.at <= at and p.value is not None]
        if not points or points[-1].value is None or math.isnan(points[-1].value):
            return None
        return PointSample(points[-1].at, points[-1].value)

    async def close(self) -> None:
        self._series.clear()

    def _matching(self, selector: str) -> list[_Series]:
        name, labels = matchers(selector)
        return [
            series
            for series in self._series.values()
            if name in ("", series.name) and labels.items() <= series.labels.items()
        ]

    def _keep(self, name: str, labels: dict[str, str], point: _Point, *, delta: bool) -> None:
        key = (name, tuple(sorted(labels.items())))
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = _Series(name, labels)
            while len(self._series) > MAX_SERIES:
                self._series.popitem(last=False)
        self._series.move_to_end(key)
        last = series.points[-1] if series.points else None
        if last is not None and point.at <= last.at:
            return
        series.points.append(_added(last, point) if delta else point)

    def _points(self, metric: Metric) -> Iterable[tuple[dict[str, str], _Point, bool]]:
        kind = metric.WhichOneof("data")
        data: Any = getattr(metric, kind) if kind else None
        if data is None:
            return
        delta = (
            getattr(data, "aggregation_temporality", 0)
            == AggregationTemporality.AGGREGATION_TEMPORALITY_DELTA
        )
        for raw in data.data_points:
            point = self._point_of(kind, data, raw)
            if point is None:
                self.refused += 1
            else:
                yield _attributes(raw.attributes), point, delta

    def _point_of(self, kind: str | None, data: Any, raw: Any) -> _Point | None:
        at, start = raw.time_unix_nano / NANOS, raw.start_time_unix_nano / NANOS
        try:
            if kind == "gauge" or (kind == "sum" and not data.is_monotonic):
                return _Point(0.0, at, value=_number(raw))
            # A count without the time it began cannot tell a reset from growth.
            if not raw.start_time_unix_nano or kind == "summary":
                return None
            if kind == "sum":
                return _Point(start, at, {None: _whole(_number(raw))})
            if kind == "histogram":
                return _Point(start, at, _edges(raw.explicit_bounds, raw.bucket_counts))
            if kind == "exponential_histogram":
                buckets = {raw.positive.offset + i: n for i, n in enumerate(raw.positive.bucket_counts) if n}
                negative = sum(raw.negative.bucket_counts)
                return _Point(start, at, histogram=rescaled(raw.scale, raw.zero_count, buckets, negative))
        except ValueError:
            return None
        return None


def _added(last: _Point | None, delta: _Point) -> _Point:
    """A delta on top of what was counted; the sum began with the first of them."""
    if last is None:
        return delta
    if delta.histogram is not None and last.histogram is not None:
        total = last.histogram.copy()
        total.merge(delta.histogram)
        return _Point(last.start, delta.at, histogram=total)
    names = last.counts.keys() | delta.counts.keys()
    return _Point(last.start, delta.at, {n: last.counts.get(n, 0) + delta.counts.get(n, 0) for n in names})


def _edges(bounds: Iterable[float], counts: Iterable[int]) -> dict[float | None, int]:
    """Cumulative counts by upper edge, +inf last."""
    out: dict[float | None, int] = {}
    total = 0
    for edge, count in zip((*bounds, math.inf), counts, strict=True):
        total += count
        out[edge] = total
    return out


def _number(raw: Any) -> float:
    return float(raw.as_int if raw.WhichOneof("value") == "as_int" else raw.as_double)


def _whole(value: float) -> int:
    if not math.isfinite(value) or value < 0 or value != int(value):
        raise ValueError("not a count")
    return int(value)


def _attributes(pairs: Iterable[Any]) -> dict[str, str]:
    out = {}
    for pair in pairs:
        kind = pair.value.WhichOneof("value")
        if kind in ("string_value", "int_value", "double_value", "bool_value"):
            value = getattr(pair.value, kind)
            out[pair.key] = str(value).lower() if kind == "bool_value" else str(value)
    return out


def _target(labels: Mapping[str, str]) -> tuple[str, str]:
    """A process is its resource's instance; without one each series is a process of its own."""
    name = labels.get("service.instance.id", "")
    rest = json.dumps({k: v for k, v in labels.items() if k != "service.instance.id"}, sort_keys=True)
    return (json.dumps([labels.get("service.name", ""), name]), rest) if name else (rest, rest)


class OtlpReceiver:
    """POST /v1/metrics: protobuf, plain or gzip, under a bearer token; a body is bounded, also unpacked."""

    def __init__(self, store: OtlpStore, token: Callable[[], str], max_bytes: int = 4 << 20) -> None:
        self._store, self._token, self._max = store, token, max_bytes

    def application(self) -> web.Application:
        made = web.Application(client_max_size=self._max)
        made.add_routes([web.post("/v1/metrics", self._post)])
        return made

    async def _post(self, request: web.Request) -> web.Response:
        given = request.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self._token()}".encode()):
            return web.Response(status=401)
        if request.content_type != "application/x-protobuf":
            return web.Response(status=415, text="application/x-protobuf only")
        try:
            body = await request.read()
            message = ExportMetricsServiceRequest.FromString(body)
        except (DecodeError, ValueError):
            return web.Response(status=400, text="not an export request")
        self._store.take(message)
        return web.Response(
            body=ExportMetricsServiceResponse().SerializeToString(), content_type="application/x-protobuf"
        )


def token_of(path: Path) -> Callable[[], str]:
    """Read at each request, so that it may rotate. An empty one admits nobody."""

    def read() -> str:
        text = path.read_text().strip()
        if not text:
            raise ValueError(f"{path}: empty")
        return text

    return read
