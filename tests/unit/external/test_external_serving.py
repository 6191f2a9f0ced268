"""Sources are opened as configured, and a pushed count reaches a gate's reading."""

from __future__ import annotations

from pathlib import Path

import aiohttp

from kvtier_evidence.verdicts import Reason
from kvtier_operator.external.config import ExternalOptions, OtlpOptions
from kvtier_operator.external.prometheus import PrometheusOptions
from kvtier_operator.external.query import parse_query
from kvtier_operator.external.serving import sources
from tests.ports import free_port
from tests.unit.evidence.evidence_builders import key
from tests.unit.external.prometheus_fake import FakePrometheus, application, serving
from tests.unit.external.test_external_otlp import PROTO, export, total
from tests.unit.external.test_external_reading import OPENED, PACE, gate


async def test_none_is_none() -> None:
    async with sources(None) as reader:
        assert reader is None


async def test_a_push_becomes_a_reading_and_the_port_closes(tmp_path: Path) -> None:
    token, port = tmp_path / "token", free_port()
    token.write_text("secret")
    text = "otlp: counters(errors; requests)"
    options = ExternalOptions(otlp=OtlpOptions(port, token, "127.0.0.1"), pace=PACE)
    url = f"http://127.0.0.1:{port}/v1/metrics"
    body = export(total("errors", 1010.0, 1), total("requests", 1010.0, 50)).SerializeToString()
    async with aiohttp.ClientSession(headers={**PROTO, "Authorization": "Bearer secret"}) as client:
        async with sources(options) as reader:
            assert reader is not None
            async with client.post(url, data=body) as response:
                assert response.status == 200
            got = await reader.read(
                key(), [(gate(text), parse_query(text))], opened_at=OPENED, now=1026.0, interval=10.0
            )
        assert got["errors"].above is not None and got["errors"].above.n == 50
        try:
            async with client.post(url, data=body) as response:
                raise AssertionError(f"still answers: {response.status}")
        except aiohttp.ClientError:
            pass


async def test_one_source_of_two() -> None:
    fake = FakePrometheus()
    async with (
        serving(application(fake)) as url,
        sources(ExternalOptions(PrometheusOptions(url), pace=PACE)) as reader,
    ):
        assert reader is not None
        asked = [(gate(text), parse_query(text)) for text in ("counters(a; b)", "otlp: counters(a; b)")]
        here = await reader.read(key(), asked[:1], opened_at=OPENED, now=1026.0, interval=10.0)
        there = await reader.read(key(fence=9), asked[1:], opened_at=OPENED, now=1026.0, interval=10.0)
    assert here["errors"].error is None
    assert there["errors"].error is Reason.QUERY_FAILED
    assert "otlp" in there["errors"].detail
