"""A small Prometheus: raw samples of named series behind /api/v1/query, and faults on demand."""

from __future__ import annotations

import json
import re
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Sample = tuple[float, Any]


@dataclass
class FakePrometheus:
    """Knows `name[Ns]` and, by their text, whole expressions. A sample that is a dict is a histogram."""

    series: list[tuple[dict[str, str], list[Sample]]] = field(default_factory=list)
    expressions: dict[str, Any] = field(default_factory=dict)
    asked: list[dict[str, str]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    answer: web.Response | None = None
    """Instead of everything."""
    warnings: list[str] = field(default_factory=list)
    url: str = ""

    def count(self, name: str, samples: list[Sample], **labels: str) -> None:
        given = {"__name__": name, "job": "gateway", "instance": "a:1", **labels}
        self.series.append((given, samples))

    async def query(self, request: web.Request) -> web.Response:
        form = {k: str(v) for k, v in (await request.post()).items()}
        self.asked.append(form)
        self.headers.append(dict(request.headers))
        if self.answer is not None:
            return self.answer
        text, at = form["query"], float(form["time"])
        ranged = re.fullmatch(r"(\w+)\[(\d+)s\]", text)
        if ranged is None:
            return self._success(self.expressions[text])
        rows = []
        for labels, samples in self.series:
            if labels["__name__"] != ranged[1]:
                continue
            inside = [s for s in samples if at - int(ranged[2]) < s[0] <= at]
            values = [[t, str(v)] for t, v in inside if not isinstance(v, dict)]
            histograms = [[t, v] for t, v in inside if isinstance(v, dict)]
            row: dict[str, Any] = {"metric": labels}
            row |= {"values": values} if values else {}
            row |= {"histograms": histograms} if histograms else {}
            if inside:
                rows.append(row)
        return self._success({"resultType": "matrix", "result": rows})

    def _success(self, data: Any) -> web.Response:
        body: dict[str, Any] = {"status": "success", "data": data}
        if self.warnings:
            body["warnings"] = self.warnings
        return web.Response(text=json.dumps(body), content_type="application/json")


@asynccontextmanager
async def serving(application: web.Application, context: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """On a free port of the loopback address; its URL."""
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    scheme = "http" if context is None else "https"
    try:
        yield f"{scheme}://localhost:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def application(fake: FakePrometheus) -> web.Application:
    made = web.Application()
    made.add_routes([web.post("/api/v1/query", fake.query)])
    return made


def native(scale: int, buckets: dict[int, int], zero: int = 0) -> dict[str, Any]:
    """A native histogram as the API prints it: [rule, lower, upper, count]."""
    base = 2.0 ** (2.0**-scale)
    rows: list[list[Any]] = [[3, "-0.001", "0.001", str(zero)]] if zero else []
    rows += [[0, repr(base**i), repr(base ** (i + 1)), str(n)] for i, n in sorted(buckets.items())]
    return {"count": str(zero + sum(buckets.values())), "sum": "0", "buckets": rows}
