"""Metrics that are pushed: what is kept, what is refused, and who may push."""

from __future__ import annotations

import gzip
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality, Metric

from kvtier_evidence.external import ExternalReading, Form
from kvtier_evidence.verdicts import Reason
from kvtier_operator.external.otlp import KEPT_POINTS, MAX_SERIES, OtlpReceiver, OtlpStore, token_of
from kvtier_operator.external.query import parse_query
from kvtier_operator.external.reading import GateBook
from kvtier_operator.external.samples import SourceError
from tests.unit.external.prometheus_fake import serving
from tests.unit.external.test_external_reading import OPENED, PACE, gate

CUMULATIVE = AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
DELTA = AggregationTemporality.AGGREGATION_TEMPORALITY_DELTA


def export(*metrics: Metric, instance: str = "a") -> ExportMetricsServiceRequest:
    request = ExportMetricsServiceRequest()
    resource = request.resource_metrics.add()
    if instance:
        resource.resource.attributes.append(
            KeyValue(key="service.instance.id", value=AnyValue(string_value=instance))
        )
    resource.scope_metrics.add().metrics.extend(metrics)
    return request


def total(
    name: str,
    at: float,
    value: int,
    *,
    start: float = OPENED + 1,
    temporality: Any = CUMULATIVE,
    monotonic: bool = True,
) -> Metric:
    metric = Metric(name=name)
    metric.sum.aggregation_temporality, metric.sum.is_monotonic = temporality, monotonic
    metric.sum.data_points.add(
        as_int=value, time_unix_nano=int(at * 1e9), start_time_unix_nano=int(start * 1e9)
    )
    return metric


def gauge(name: str, at: float, value: float) -> Metric:
    metric = Metric(name=name)
    metric.gauge.data_points.add(as_double=value, time_unix_nano=int(at * 1e9))
    return metric


def exponential(at: float, scale: int, counts: list[int], *, start: float = OPENED + 1) -> Metric:
    metric = Metric(name="latency")
    metric.exponential_histogram.aggregation_temporality = CUMULATIVE
    point = metric.exponential_histogram.data_points.add(
        scale=scale,
        count=sum(counts),
        time_unix_nano=int(at * 1e9),
        start_time_unix_nano=int(start * 1e9),
    )
    point.positive.bucket_counts.extend(counts)
    return metric


def classic(at: float, counts: list[int], *, start: float = OPENED + 1) -> Metric:
    metric = Metric(name="latency")
    metric.histogram.aggregation_temporality = CUMULATIVE
    point = metric.histogram.data_points.add(
        count=sum(counts), time_unix_nano=int(at * 1e9), start_time_unix_nano=int(start * 1e9)
    )
    point.explicit_bounds.extend([0.1, 0.5])
    point.bucket_counts.extend(counts)
    return metric


async def read(store: OtlpStore, text: str, now: float, limit: str = "0.05") -> ExternalReading:
    return await GateBook(gate(text, limit), parse_query(text), OPENED, PACE).read(store, now, 10.0)


COUNTERS = "otlp: counters(errors; requests)"


async def test_a_start_time_marks_a_life_and_says_what_is_of_the_window() -> None:
    store = OtlpStore()
    for at, bad, n in ((1010.0, 1, 50), (1040.0, 2, 90)):
        store.take(export(total("errors", at, bad), total("requests", at, n)))
    store.take(export(total("errors", 1070.0, 3, start=1060.0), total("requests", 1070.0, 95, start=1060.0)))
    got = await read(store, COUNTERS, 1086.0)
    assert got.above is not None
    assert (got.above.n, got.above.up) == (90 + 95, 2 + 3)


async def test_what_was_counted_before_the_window_is_not_of_it() -> None:
    store = OtlpStore()
    for at, bad, n in ((990.0, 40, 5000), (1020.0, 41, 5100)):
        store.take(export(total("errors", at, bad, start=10.0), total("requests", at, n, start=10.0)))
    got = await read(store, COUNTERS, 1036.0)
    assert got.above is not None and (got.above.n, got.above.up) == (100, 1)


async def test_deltas_are_added_and_a_repeat_is_not() -> None:
    store = OtlpStore()
    for at, bad, n in ((1010.0, 1, 50), (1040.0, 2, 40), (1040.0, 2, 40)):
        store.take(
            export(
                total("errors", at, bad, temporality=DELTA, start=at - 5),
                total("requests", at, n, temporality=DELTA, start=at - 5),
            )
        )
    got = await read(store, COUNTERS, 1056.0)
    assert got.above is not None and (got.above.n, got.above.up) == (90, 3)


async def test_a_decrease_within_a_life_is_an_error() -> None:
    store = OtlpStore()
    for at, bad, n in ((1010.0, 5, 50), (1040.0, 2, 90)):
        store.take(export(total("errors", at, bad), total("requests", at, n)))
    assert (await read(store, COUNTERS, 1056.0)).error is Reason.RESET_UNKNOWN


async def test_histograms_of_both_kinds() -> None:
    store = OtlpStore()
    store.take(export(classic(1010.0, [900, 95, 5])))
    got = await read(store, "otlp: buckets(latency)", 1026.0, "0.5")
    assert got.above is not None and (got.above.n, got.above.up, got.above.exact) == (1000, 5, True)
    store = OtlpStore()
    store.take(export(exponential(1010.0, 10, [50] * 8)))
    store.take(export(exponential(1040.0, 3, [500, 7])))
    got = await read(store, "otlp: exponential(latency)", 1056.0, "1.09")
    assert got.above is not None and (got.above.n, got.above.down) == (507, 7)


async def test_a_value() -> None:
    store = OtlpStore()
    store.take(export(gauge("depth", 1010.0, 7.5), total("level", 1010.0, 3, monotonic=False)))
    assert (await store.point("depth", 1020.0)) is not None
    got = await read(store, "otlp: depth", 1020.0, "5")
    assert (got.form, got.value, got.breaches) == (Form.GAUGE, 7.5, 1)
    assert await store.point("level", 1020.0) is not None
    assert await store.point("other", 1020.0) is None
    store.take(export(gauge("depth", 1010.0, 1.0), instance="b"))
    with pytest.raises(SourceError, match="2 series"):
        await store.point("depth", 1020.0)


async def test_what_cannot_tell_a_reset_is_refused() -> None:
    store = OtlpStore()
    store.take(export(total("errors", 1010.0, 5, start=0.0)))
    metric = Metric(name="s")
    metric.summary.data_points.add(count=1, time_unix_nano=1, start_time_unix_nano=1)
    store.take(export(metric))
    assert store.refused == 2
    assert await store.counters(("errors", "s"), 0.0, 2000.0) == []


async def test_memory_is_bounded() -> None:
    store = OtlpStore()
    for i in range(MAX_SERIES + 10):
        store.take(export(gauge("g", 1.0, 1.0), instance=f"i{i}"))
    for i in range(KEPT_POINTS + 10):
        store.take(export(gauge("h", float(i), 1.0)))
    assert len(store._series) == MAX_SERIES
    assert max(len(one.points) for one in store._series.values()) == KEPT_POINTS


# ---------------------------------------------------------------- the port


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[tuple[str, OtlpStore, Path]]:
    token = tmp_path / "token"
    token.write_text("secret\n")
    store = OtlpStore()
    async with serving(OtlpReceiver(store, token_of(token), max_bytes=20_000).application()) as url:
        yield f"{url}/v1/metrics", store, token


BODY = export(gauge("depth", 1.0, 2.0)).SerializeToString()
PROTO = {"Content-Type": "application/x-protobuf"}
AUTH = {"Authorization": "Bearer secret"}
PUSHES: dict[str, tuple[dict[str, str], bytes, int]] = {
    "good": ({**PROTO, **AUTH}, BODY, 200),
    "packed": ({**PROTO, **AUTH, "Content-Encoding": "gzip"}, gzip.compress(BODY), 200),
    "no token": (PROTO, BODY, 401),
    "another token": ({**PROTO, "Authorization": "Bearer guess"}, BODY, 401),
    "JSON": ({**AUTH, "Content-Type": "application/json"}, b"{}", 415),
    "junk": ({**PROTO, **AUTH}, b"\xff\xff\xff", 400),
    "too large": ({**PROTO, **AUTH}, b"x" * 30_000, 413),
    "a bomb": ({**PROTO, **AUTH, "Content-Encoding": "gzip"}, gzip.compress(b"\0" * 5_000_000), 413),
}


@pytest.mark.parametrize("case", PUSHES)
async def test_pushes(port: tuple[str, OtlpStore, Path], case: str) -> None:
    url, store, _ = port
    headers, body, status = PUSHES[case]
    async with (
        aiohttp.ClientSession(auto_decompress=False) as client,
        client.post(url, data=body, headers=headers) as response,
    ):
        assert response.status == status
    assert (await store.point("depth", 2.0) is not None) is (status == 200)


async def test_an_empty_token_admits_nobody(port: tuple[str, OtlpStore, Path]) -> None:
    url, store, token = port
    token.write_text("")
    async with (
        aiohttp.ClientSession() as client,
        client.post(url, data=BODY, headers={**PROTO, "Authorization": "Bearer "}) as response,
    ):
        assert response.status >= 400
    assert await store.point("depth", 2.0) is None
