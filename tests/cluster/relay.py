"""A TCP relay on loopback through which nothing passes while it is cut: no reset, no answer, only silence.

What was sent meanwhile is delivered when it flows again, as after a partition. It must not know what passes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from tests.cluster.loopthread import LoopThread


class Relay(LoopThread):
    """`with Relay(port) as relay`: whoever connects to `relay.port` speaks to that port."""

    def __init__(self, target: int) -> None:
        super().__init__()
        self._target = target
        self._flowing: asyncio.Event | None = None
        self.port = 0

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        """Nothing passes inside, in either direction."""
        assert self._flowing is not None
        self.loop.call_soon_threadsafe(self._flowing.clear)
        try:
            yield
        finally:
            self.loop.call_soon_threadsafe(self._flowing.set)

    async def serve(self, ready: Callable[[], None], stop: asyncio.Event) -> None:
        self._flowing = asyncio.Event()
        self._flowing.set()
        server = await asyncio.start_server(self._meet, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        ready()
        await stop.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError):
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
            pumps = [self._pump(reader, back), self._pump(there, writer)]
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        assert self._flowing is not None
        try:
            while data := await source.read(65536):
                await self._flowing.wait()
                sink.write(data)
                await sink.drain()
        finally:
            sink.close()
