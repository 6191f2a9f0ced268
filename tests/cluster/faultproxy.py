"""A proxy before a real API server that goes wrong as it is told.

Why it exists: conflicts, throttling, lost answers and stale watches come from a real server too rarely to be
tested. What is not named by a fault passes unchanged, so objects, schemas and rights stay the server's. Plain
HTTP on loopback. It must not know who asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

from tests.cluster.loopthread import LoopThread

_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "content-length", "host"}
MAX_LOG = 50_000


@dataclass(frozen=True, slots=True)
class Seen:
    """A request, before anybody acts on it."""

    method: str
    path: str
    watch: bool

    @property
    def write(self) -> bool:
        return self.method != "GET"

    def of(self, plural: str) -> bool:
        return f"/{plural}/" in f"{self.path}/"


@dataclass(frozen=True, slots=True)
class Passed:
    """A request that was answered; status 0: its answer was lost. at: monotonic seconds."""

    seen: Seen
    status: int
    at: float


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answered here: the server never hears of it."""

    status: int
    reason: str
    retry_after: str = ""


@dataclass(frozen=True, slots=True)
class Delay:
    seconds: float


@dataclass(frozen=True, slots=True)
class Lose:
    """The server acts on it; the connection breaks before its answer arrives."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Of a watch: the connection breaks after so many seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Expire:
    """Of a watch: "410 Gone", as when its resourceVersion is too old."""


@dataclass(frozen=True, slots=True)
class Hide:
    """Of a watch: these events never arrive."""

    which: Callable[[dict[str, Any]], bool]


Action = Refuse | Delay | Lose | Cut | Expire | Hide


@dataclass(eq=False)
class Fault:
    """hits: how often it struck. left: how often it may still; None without end."""

    when: Callable[[Seen], bool]
    action: Action
    left: int | None = None
    hits: int = 0


class FaultProxy(LoopThread):
    """`with FaultProxy(url, ca, ...) as proxy`, then `with proxy.fault(when, action): ...`."""

    def __init__(self, target: str, ca_file: str) -> None:
        super().__init__()
        self.target = target
        self.ca_file = ca_file
        self.log: list[Passed] = []
        self.url = ""
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._open: dict[int, web.Request] = {}

    @contextlib.contextmanager
    def fault(
        self, when: Callable[[Seen], bool], action: Action, *, times: int | None = None
    ) -> Iterator[Fault]:
        made = Fault(when, action, times)
        with self._lock:
            self._faults.append(made)
        try:
            yield made
        finally:
            with self._lock:
                self._faults.remove(made)

    def cut_watches(self) -> int:
        """Breaks every connection on which events come; how many there were."""
        return asyncio.run_coroutine_threadsafe(self._cut_all(), self.loop).result(60)

    def passed(self, since: float = 0.0) -> list[Passed]:
        with self._lock:
            return [one for one in self.log if one.at >= since]

    async def _cut_all(self) -> int:
        found = list(self._open.values())
        for request in found:
            if request.transport is not None:
                request.transport.abort()
        return len(found)

    async def serve(self, ready: Callable[[], None], stop: asyncio.Event) -> None:
        trust = ssl.create_default_context(cafile=self.ca_file)
        connector = aiohttp.TCPConnector(ssl=trust, limit=0)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=60)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False
        ) as client:
            app = web.Application(client_max_size=8 << 20)

            async def handle(request: web.Request) -> web.StreamResponse:
                return await self._handle(request, client)

            app.router.add_route("*", "/{path:.*}", handle)
            runner = web.AppRunner(app, shutdown_timeout=1.0, access_log=None)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            ready()
            await stop.wait()
            await runner.cleanup()

    def _strikes(self, seen: Seen) -> list[Action]:
        with self._lock:
            found = []
            for fault in self._faults:
                if fault.left != 0 and fault.when(seen):
                    fault.hits += 1
                    fault.left = None if fault.left is None else fault.left - 1
                    found.append(fault.action)
            return found

    def _note(self, seen: Seen, status: int) -> None:
        with self._lock:
            self.log.append(Passed(seen, status, time.monotonic()))
            del self.log[:-MAX_LOG]

    async def _handle(self, request: web.Request, client: aiohttp.ClientSession) -> web.StreamResponse:
        seen = Seen(request.method, request.path, request.query.get("watch") in ("true", "1"))
        actions = self._strikes(seen)
        for action in actions:
            if isinstance(action, Delay):
                await asyncio.sleep(action.seconds)
            if isinstance(action, Refuse):
                self._note(seen, action.status)
                return _refusal(action)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP}
        async with client.request(
            request.method, self.target + request.path_qs, headers=headers, data=await request.read() or None
        ) as answer:
            if any(isinstance(action, Lose) for action in actions):
                await answer.read()
                self._note(seen, 0)
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
            self._note(seen, answer.status)
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP}
            if not seen.watch or answer.status != 200:
                return web.Response(status=answer.status, body=await answer.read(), headers=kept)
            return await self._stream(request, answer, kept, actions)

    async def _stream(
        self,
        request: web.Request,
        answer: aiohttp.ClientResponse,
        headers: dict[str, str],
        actions: list[Action],
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        if any(isinstance(action, Expire) for action in actions):
            gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
            await response.write(json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
            return response
        limit = min((action.seconds for action in actions if isinstance(action, Cut)), default=None)
        hidden = [action.which for action in actions if isinstance(action, Hide)]
        self._open[id(request)] = request
        try:
            async with asyncio.timeout(limit):
                async for line in _lines(answer):
                    if not any(which(json.loads(line)) for which in hidden):
                        await response.write(line + b"\n")
        except (TimeoutError, ConnectionError):
            if request.transport is not None:
                request.transport.abort()
        finally:
            self._open.pop(id(request), None)
        return response


async def _lines(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    rest = b""
    async for chunk in answer.content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.strip():
                yield line


def _refusal(action: Refuse) -> web.Response:
    body = {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "reason": action.reason,
        "code": action.status,
        "message": f"{action.reason}, made up by a test",
    }
    headers = {"Retry-After": action.retry_after} if action.retry_after else {}
    return web.json_response(body, status=action.status, headers=headers)
