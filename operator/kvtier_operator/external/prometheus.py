"""Prometheus over its HTTP API: raw samples by range selectors, values by instant queries.

Everything that is not one complete, well-formed, successful answer within time and size is an error: part of
an answer would be evidence with the bad part missing. It must not know gates.
"""

from __future__ import annotations

import json
import math
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from kvtier_evidence.external import rescaled
from kvtier_evidence.grid import Histogram
from kvtier_operator.external.samples import CounterSample, HistogramSample, PointSample, SourceError

TARGET_LABELS = ("job", "instance")
MAX_SAMPLES = 200_000
MAX_SAID = 500


@dataclass(frozen=True)
class PrometheusOptions:
    """ca_file: absent: the system's. token_file: a bearer token, read at each request: it may rotate."""

    url: str
    ca_file: Path | None = None
    token_file: Path | None = None
    timeout_seconds: float = 5.0
    max_bytes: int = 8 << 20

    def __post_init__(self) -> None:
        if "@" in self.url:
            # Errors name the URL, in logs and in statuses.
            raise ValueError("prometheus.url: no user or password in it; a secret is named by tokenFile")
        if not self.url.startswith(("https://", "http://")):
            raise ValueError(f"prometheus.url: {self.url!r} is neither https:// nor http://")
        if self.token_file is not None and not self.url.startswith("https://"):
            raise ValueError("prometheus.tokenFile: a token is sent over https:// only")


class PrometheusProvider:
    """Implements Provider. One connection pool; `close` ends it."""

    def __init__(self, options: PrometheusOptions) -> None:
        self._options = options
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def counters(self, selectors: tuple[str, ...], since: float, until: float) -> list[CounterSample]:
        found: dict[tuple[float, str], dict[tuple[int, str], int]] = {}
        for part, selector in enumerate(selectors):
            for labels, row in await self._matrix(selector, since, until):
                if "values" not in row:
                    raise SourceError(f"{selector}: native histograms where counters are expected")
                target, rest = _target(labels)
                for at, text in row["values"]:
                    found.setdefault((float(at), target), {})[part, rest] = _count(text, selector)
        return [CounterSample(target, None, at, found[at, target]) for at, target in sorted(found)]

    async def histograms(self, selector: str, since: float, until: float) -> list[HistogramSample]:
        found: dict[tuple[float, str], Histogram] = {}
        for labels, row in await self._matrix(selector, since, until):
            if "histograms" not in row:
                raise SourceError(f"{selector}: plain values where native histograms are expected")
            target, _ = _target(labels)
            for at, body in row["histograms"]:
                h = _native(body, selector)
                if (float(at), target) in found:
                    found[float(at), target].merge(h)
                else:
                    found[float(at), target] = h
        return [HistogramSample(target, None, at, found[at, target]) for at, target in sorted(found)]

    async def point(self, expression: str, at: float) -> PointSample | None:
        data = await self._ask(expression, at)
        kind, result = data.get("resultType"), data.get("result")
        if kind == "scalar" and isinstance(result, list) and len(result) == 2:
            pairs = [result]
        elif kind == "vector" and isinstance(result, list):
            pairs = [one["value"] for one in result if "value" in one]
            if len(pairs) != len(result):
                raise SourceError(f"{expression}: a histogram where a value is expected")
        else:
            raise SourceError(f"{expression}: a {kind} where one value is expected")
        if len(pairs) > 1:
            raise SourceError(f"{expression}: {len(pairs)} series where one is expected")
        if not pairs or math.isnan(value := float(pairs[0][1])):
            return None
        return PointSample(float(pairs[0][0]), value)

    async def _matrix(
        self, selector: str, since: float, until: float
    ) -> list[tuple[dict[str, str], Mapping[str, Any]]]:
        seconds = max(1, math.ceil(until - since))
        data = await self._ask(f"{selector}[{seconds}s]", until)
        if data.get("resultType") != "matrix":
            raise SourceError(f"{selector}: a {data.get('resultType')} where raw samples are expected")
        rows = [(dict(row["metric"]), row) for row in data["result"]]
        if sum(len(row.get("values", ())) + len(row.get("histograms", ())) for _, row in rows) > MAX_SAMPLES:
            raise SourceError(f"{selector}: more than {MAX_SAMPLES} samples")
        return rows

    async def _ask(self, query: str, at: float) -> Mapping[str, Any]:
        """Raises SourceError, whose text goes into logs and statuses: without the token, which the other side
        may repeat in what it says of a request."""
        token = ""
        try:
            token = self._token()
            return _data(await self._answer(query, at, token), query)
        except SourceError as error:
            said = str(error).replace(token, "(the token)") if token else str(error)
            raise SourceError(said[:MAX_SAID], error.reason) from error.__cause__
        except (aiohttp.ClientError, OSError, TimeoutError, ssl.SSLError) as error:
            raise SourceError(f"{self._options.url}: {type(error).__name__}: {error}") from error

    async def _answer(self, query: str, at: float, token: str) -> bytes:
        options = self._options
        form = {"query": query, "time": f"{at:.3f}", "timeout": f"{options.timeout_seconds:g}s"}
        headers = {"Accept": "application/json"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        request = self._client().post(
            f"{options.url.rstrip('/')}/api/v1/query", data=form, headers=headers, allow_redirects=False
        )
        async with request as response:
            body = await self._bounded(response)
            if response.status != 200:
                raise SourceError(f"HTTP {response.status} from {options.url}: {_why(body)}")
            return body

    async def _bounded(self, response: aiohttp.ClientResponse) -> bytes:
        body = bytearray()
        async for chunk in response.content.iter_chunked(1 << 16):
            body += chunk
            if len(body) > self._options.max_bytes:
                raise SourceError(f"an answer of more than {self._options.max_bytes} bytes")
        return bytes(body)

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            verify: ssl.SSLContext | bool = True
            if self._options.ca_file is not None:
                verify = ssl.create_default_context(cafile=self._options.ca_file)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=verify, limit=4),
                timeout=aiohttp.ClientTimeout(total=self._options.timeout_seconds),
            )
        return self._session

    def _token(self) -> str:
        """Read at each request; empty where none is declared. Raises OSError."""
        file = self._options.token_file
        return "" if file is None else file.read_text().strip()


def _data(body: bytes, query: str) -> Mapping[str, Any]:
    try:
        answer = json.loads(body)
        if answer["status"] != "success":
            raise SourceError(f"{query}: {answer.get('error', 'not a success')}")
        # A warning is how a federation says that a part of it did not answer.
        if answer.get("warnings"):
            raise SourceError(f"{query}: {answer['warnings'][0]}")
        data = answer["data"]
    except (ValueError, KeyError, TypeError) as error:
        raise SourceError(f"{query}: not an answer of Prometheus") from error
    if not isinstance(data, dict):
        raise SourceError(f"{query}: not an answer of Prometheus")
    return data


def _why(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return "no reason given"


def _target(labels: dict[str, str]) -> tuple[str, str]:
    """What names the process, and the rest. Without an instance each series is a process of its own."""
    rest = {k: v for k, v in labels.items() if k not in ("__name__", *TARGET_LABELS)}
    if "instance" not in labels:
        return json.dumps(labels, sort_keys=True), json.dumps(rest, sort_keys=True)
    return (
        json.dumps([labels.get(name, "") for name in TARGET_LABELS]),
        json.dumps(rest, sort_keys=True),
    )


def _count(text: str, selector: str) -> int:
    value = float(text)
    if not math.isfinite(value) or value < 0 or value != int(value):
        raise SourceError(f"{selector}: {text} is not a count; counts are read from raw counters")
    return int(value)


def _native(body: Mapping[str, Any], selector: str) -> Histogram:
    """Buckets are [rule, lower, upper, count]; the zero bucket spans zero, negative ones lie under it."""
    zero, negative = 0, 0
    scale: int | None = None
    bounds: list[tuple[float, int]] = []
    for _, low, high, count in body.get("buckets", ()):
        lower, upper, n = float(low), float(high), _count(count, selector)
        if lower < 0.0 < upper or (lower <= 0.0 <= upper):
            zero += n
        elif upper <= 0.0:
            negative += n
        else:
            scale = round(-math.log2(math.log2(upper / lower))) if scale is None else scale
            bounds.append((upper, n))
    try:
        buckets = {round(math.log2(upper) * 2.0 ** (scale or 0)) - 1: n for upper, n in bounds}
        h = rescaled(8 if scale is None else scale, zero, buckets, negative)
    except ValueError as error:
        raise SourceError(f"{selector}: {error}") from error
    if h.n != _count(body["count"], selector):
        raise SourceError(f"{selector}: a histogram whose buckets do not add up to its count")
    return h
