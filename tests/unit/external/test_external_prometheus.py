"""Prometheus through its HTTP API, on a small server of our own: what is an answer, and what is none."""

from __future__ import annotations

import asyncio
import datetime
import ssl
import traceback
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from kvtier_evidence.verdicts import Reason
from kvtier_operator.external.prometheus import PrometheusOptions, PrometheusProvider
from kvtier_operator.external.samples import SourceError
from tests.unit.external.prometheus_fake import FakePrometheus, application, native, serving


@pytest.fixture
async def fake() -> AsyncIterator[FakePrometheus]:
    one = FakePrometheus()
    async with serving(application(one)) as url:
        one.url = url
        yield one


@pytest.fixture
async def provider(fake: FakePrometheus) -> AsyncIterator[PrometheusProvider]:
    one = PrometheusProvider(PrometheusOptions(fake.url, timeout_seconds=60.0, max_bytes=200_000))
    yield one
    await one.close()


async def test_series_of_one_process_at_one_scrape_are_one_sample(
    fake: FakePrometheus, provider: PrometheusProvider
) -> None:
    fake.count("errors", [(10.0, 1), (20.0, 2)], code="500")
    fake.count("errors", [(10.0, 0), (20.0, 1)], code="503")
    fake.count("requests", [(10.0, 100), (20.0, 150), (99.0, 900)])
    fake.count("requests", [(15.0, 7)], instance="b:1")
    got = await provider.counters(("errors", "requests"), 0.0, 30.0)
    assert [(one.at, sum(v for (part, _), v in one.counters.items() if part == 0)) for one in got] == [
        (10.0, 1),
        (15.0, 0),
        (20.0, 3),
    ]
    assert len({one.target for one in got}) == 2
    assert fake.asked[0]["query"] == "errors[30s]"
    assert fake.asked[0]["time"] == "30.000"


async def test_a_native_histogram_lands_on_the_grid(
    fake: FakePrometheus, provider: PrometheusProvider
) -> None:
    fake.count("latency", [(10.0, native(3, {-8: 4, 0: 6}, zero=2))])
    (one,) = await provider.histograms("latency", 0.0, 30.0)
    assert (one.histogram.shift, one.histogram.zero, one.histogram.bins, one.histogram.n) == (
        5,
        2,
        {-8: 4, 0: 6},
        12,
    )


@pytest.mark.parametrize(
    ("result", "want"),
    [
        ({"resultType": "vector", "result": []}, None),
        ({"resultType": "vector", "result": [{"metric": {}, "value": [5.0, "NaN"]}]}, None),
        ({"resultType": "vector", "result": [{"metric": {}, "value": [5.0, "1.5"]}]}, 1.5),
        ({"resultType": "scalar", "result": [5.0, "2"]}, 2.0),
    ],
    ids=["empty", "NaN", "one", "scalar"],
)
async def test_a_point(
    fake: FakePrometheus, provider: PrometheusProvider, result: Any, want: float | None
) -> None:
    fake.expressions["x"] = result
    got = await provider.point("x", 30.0)
    assert (None if got is None else got.value) == want


TWO = {"resultType": "vector", "result": [{"metric": {}, "value": [5.0, "1"]}] * 2}
HISTOGRAM = {"resultType": "vector", "result": [{"metric": {}, "histogram": [5.0, {}]}]}
ANSWERS: dict[str, tuple[web.Response, str]] = {
    "400": (web.Response(status=400, text='{"status":"error","error":"parse error"}'), "parse error"),
    "401": (web.Response(status=401, text="no"), "HTTP 401"),
    "503": (web.Response(status=503), "HTTP 503"),
    "a redirect is not followed": (web.Response(status=302, headers={"Location": "http://x"}), "HTTP 302"),
    "an error within 200": (web.Response(text='{"status":"error","error":"timed out"}'), "timed out"),
    "not JSON": (web.Response(text="<html>"), "not an answer"),
    "JSON of another kind": (web.Response(text="[1]"), "not an answer"),
    "too much": (web.Response(text="x" * 300_000), "more than 200000 bytes"),
    "a part did not answer": (
        web.Response(text='{"status":"success","data":{},"warnings":["store b is down"]}'),
        "store b is down",
    ),
    "a scalar for samples": (
        web.Response(text='{"status":"success","data":{"resultType":"scalar","result":[1,"1"]}}'),
        "raw samples",
    ),
}


@pytest.mark.parametrize("case", ANSWERS)
async def test_what_is_no_answer(fake: FakePrometheus, provider: PrometheusProvider, case: str) -> None:
    response, message = ANSWERS[case]
    fake.answer = response
    with pytest.raises(SourceError, match=message) as raised:
        await provider.counters(("a", "b"), 0.0, 30.0)
    assert raised.value.reason is Reason.QUERY_FAILED


@pytest.mark.parametrize("result", [TWO, HISTOGRAM], ids=["two series", "a histogram"])
async def test_a_point_that_is_none(fake: FakePrometheus, provider: PrometheusProvider, result: Any) -> None:
    fake.expressions["x"] = result
    with pytest.raises(SourceError):
        await provider.point("x", 30.0)


@pytest.mark.parametrize("value", [1.5, -1, "NaN", "+Inf"])
async def test_what_is_no_count(fake: FakePrometheus, provider: PrometheusProvider, value: object) -> None:
    """A fraction is the mark of rate() or increase()."""
    fake.count("errors", [(10.0, value)])
    with pytest.raises(SourceError, match="not a count"):
        await provider.counters(("errors", "errors"), 0.0, 30.0)


async def test_a_histogram_that_does_not_add_up(fake: FakePrometheus, provider: PrometheusProvider) -> None:
    fake.count("latency", [(10.0, {**native(3, {0: 5}), "count": "9"})])
    with pytest.raises(SourceError, match="add up"):
        await provider.histograms("latency", 0.0, 30.0)


async def test_nobody_answers_in_time() -> None:
    held = asyncio.Event()

    async def never(_: web.Request) -> web.Response:
        await held.wait()
        return web.Response()

    made = web.Application()
    made.add_routes([web.post("/api/v1/query", never)])
    async with serving(made) as url:
        one = PrometheusProvider(PrometheusOptions(url, timeout_seconds=0.05))
        with pytest.raises(SourceError, match="Timeout"):
            await one.point("x", 1.0)
        await one.close()
        held.set()


async def test_nobody_listens() -> None:
    one = PrometheusProvider(PrometheusOptions("http://127.0.0.1:9", timeout_seconds=60.0))
    with pytest.raises(SourceError, match=r"127\.0\.0\.1"):
        await one.point("x", 1.0)
    await one.close()


def certificate(folder: Path) -> tuple[Path, Path]:
    """A self-signed one for localhost, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    cert_path, key_path = folder / "tls.crt", folder / "tls.key"
    cert_path.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    key_path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return cert_path, key_path


def known_by(folder: Path) -> tuple[Path, ssl.SSLContext]:
    """What a server's certificate is verified with, and the server's side."""
    cert, key = certificate(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    return cert, context


SECRET = "s3cr3t-" + "x" * 20
REPEATS: dict[str, tuple[int, dict[str, Any]]] = {
    "who refuses it": (401, {"status": "error", "error": f"Bearer {SECRET} is not known"}),
    "a proxy, at length": (502, {"status": "error", "error": "y" * 490 + SECRET}),
    "who found no success": (200, {"status": "error", "error": f"no tenant for {SECRET}"}),
    "a warning": (200, {"status": "success", "warnings": [f"{SECRET} is deprecated"], "data": {}}),
}


@pytest.mark.parametrize("who", REPEATS)
async def test_a_token_that_is_repeated_by_its_receiver_is_in_no_error(tmp_path: Path, who: str) -> None:
    """Errors are shown in logs and in the status of a rollout."""
    cert, context = known_by(tmp_path)
    status, body = REPEATS[who]
    answer = web.json_response(body, status=status)
    fake, token = FakePrometheus(answer=answer), tmp_path / "token"
    token.write_text(f"{SECRET}\n")
    async with serving(application(fake), context) as url:
        one = PrometheusProvider(PrometheusOptions(url, ca_file=cert, token_file=token))
        with pytest.raises(SourceError) as refused:
            await one.point("x", 1.0)
        await one.close()
    assert fake.headers[0]["Authorization"] == f"Bearer {SECRET}"
    shown = "".join(traceback.format_exception(refused.value)) + str(refused.value)
    assert SECRET[:10] not in shown
    assert "(the token)" in str(refused.value) or len(str(refused.value)) >= 400


async def test_tls_is_verified_and_the_token_is_read_at_each_request(tmp_path: Path) -> None:
    cert, context = known_by(tmp_path)
    fake = FakePrometheus(expressions={"x": {"resultType": "scalar", "result": [1.0, "1"]}})
    token = tmp_path / "token"
    token.write_text("first\n")
    async with serving(application(fake), context) as url:
        stranger = PrometheusProvider(PrometheusOptions(url))
        with pytest.raises(SourceError, match="ertificate"):
            await stranger.point("x", 1.0)
        await stranger.close()
        assert fake.asked == [], "nothing was sent to one that is not known"
        one = PrometheusProvider(PrometheusOptions(url, ca_file=cert, token_file=token))
        await one.point("x", 1.0)
        token.write_text("second\n")
        await one.point("x", 1.0)
        assert [h["Authorization"] for h in fake.headers] == ["Bearer first", "Bearer second"]
        token.unlink()
        with pytest.raises(SourceError, match="FileNotFound"):
            await one.point("x", 1.0)
        await one.close()
