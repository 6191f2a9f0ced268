"""Caches that are about to be served: whoever asks for one waits, and is not told that there is none.

Why it exists: a baseline that takes a new engine is served by nobody while that is built. It must not know
engines or sessions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from kvtier_agent.cachesession import CacheName

PATIENCE_SECONDS = 5.0
"""For a call that says nothing of its deadline."""


class Arriving:
    """Of one node; on the event loop."""

    def __init__(self) -> None:
        self._expected: dict[CacheName, asyncio.Event] = {}

    @contextmanager
    def expected(self, cache: CacheName) -> Iterator[None]:
        """Inside, an engine of it is replaced or built. One command of a cache at a time."""
        arrived = self._expected[cache] = asyncio.Event()
        try:
            yield
        finally:
            del self._expected[cache]
            arrived.set()

    async def wait(self, cache: CacheName, seconds: float = PATIENCE_SECONDS) -> None:
        """Until it is known whether the cache is served, at most so long; at once for one that nobody waits
        for. cache: by uid, or by name where that is empty."""
        for name, arrived in list(self._expected.items()):
            if (name.uid if cache.uid else "") != cache.uid:
                continue
            if (name.namespace, name.name) == (cache.namespace, cache.name):
                try:
                    async with asyncio.timeout(max(0.0, seconds)):
                        await arrived.wait()
                except TimeoutError:
                    return
