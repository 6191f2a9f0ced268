"""Liveness, readiness and metrics over HTTP. Answers questions; decides nothing.

Live means: the loop runs, and the watches have not been down for long. Ready means: everything that exists
has been listed once; until then the answer says what is waited for. A standby is ready, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest


@dataclass(frozen=True)
class Health:
    """waits_for: what it needs to start, empty when it has. standing_by: why it does not lead, or empty."""

    alive: Callable[[], bool]
    waits_for: Callable[[], str]
    standing_by: Callable[[], str]


class HealthServer:
    """Serves /healthz and /readyz on the liveness port, /metrics on the metrics port. A port of None is not
    served; 0 takes a free one, told by `ports`."""

    def __init__(
        self,
        health: Health,
        registry: CollectorRegistry,
        liveness_port: int | None,
        metrics_port: int | None,
        *,
        host: str,
    ) -> None:
        self._health = health
        self._registry = registry
        self._wanted = (liveness_port, metrics_port)
        self._host = host
        self._runners: list[web.AppRunner] = []
        self.ports: list[int] = []

    async def start(self) -> None:
        liveness, metrics = web.Application(), web.Application()
        liveness.add_routes([web.get("/healthz", self._healthz), web.get("/readyz", self._readyz)])
        metrics.add_routes([web.get("/metrics", self._metrics)])
        for application, port in zip((liveness, metrics), self._wanted, strict=True):
            if port is None:
                continue
            runner = web.AppRunner(application, access_log=None)
            await runner.setup()
            self._runners.append(runner)
            site = web.TCPSite(runner, self._host, port, shutdown_timeout=1.0)
            await site.start()
            self.ports.append(runner.addresses[0][1])

    async def stop(self) -> None:
        for runner in self._runners:
            await runner.cleanup()

    async def _healthz(self, _: web.Request) -> web.Response:
        return _answer(self._health.alive(), "ok", "the watches are down")

    async def _readyz(self, _: web.Request) -> web.Response:
        waits_for = self._health.waits_for()
        return _answer(not waits_for, self._health.standing_by() or "leading", f"waiting for {waits_for}")

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), content_type="text/plain", charset="utf-8")


def _answer(good: bool, yes: str, no: str) -> web.Response:
    return web.Response(status=200 if good else 503, text=yes if good else no)
