"""The Prometheus endpoint of the process, from its start to its end. It must not know what is measured."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, start_http_server

from kvtier_agent.endings import BlockingEnd


class MetricsHttp:
    """Serves a registry over HTTP in a thread of its own until `stop`."""

    def __init__(self, port: int, host: str, registry: CollectorRegistry) -> None:
        """Raises OSError when it cannot listen."""
        self._server, self._thread = start_http_server(port, host, registry=registry)
        self._end = BlockingEnd(self._stop, "close-metrics")

    async def stop(self, seconds: float) -> Sequence[str]:
        """Closes the port and ends the thread; the names of what did not end in time."""
        return [] if await self._end.within(seconds) else ["metrics thread"]

    def _stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
