"""A small server of a test on an event loop in a thread of its own.

It must not know what it serves.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Self

WAIT_SECONDS = 60


class LoopThread(ABC):
    """`with` starts the thread and waits until `serve` says that it is ready."""

    def __init__(self) -> None:
        self._ready = threading.Event()
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    @abstractmethod
    async def serve(self, ready: Callable[[], None], stop: asyncio.Event) -> None:
        """Serves from when it calls `ready` until `stop` is set, and cleans up."""

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(WAIT_SECONDS), f"{type(self).__name__} did not start"
        return self

    def __exit__(self, *_: object) -> None:
        assert self._stop is not None
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(WAIT_SECONDS)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Of the thread; only while it runs."""
        assert self._loop is not None
        return self._loop

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        await self.serve(self._ready.set, self._stop)
