"""Ends of blocking things, with a deadline: what does not end in time is left to the process's end.

Why it exists: a call that hangs in storage cannot be stopped, but it must not stop the agent from ending. It
must not know engines, sockets or caches.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future


class BlockingEnd:
    """One function that ends something and may block; it runs once, in a thread the process does not wait
    for."""

    def __init__(self, function: Callable[[], None], name: str) -> None:
        self._function = function
        self._name = name
        self._done: Future[None] | None = None

    async def within(self, seconds: float) -> bool:
        """Starts the end, or waits for it again; whether it is over. Raises what the function raised."""
        if self._done is None:
            self._done = Future()
            threading.Thread(target=self._run, args=(self._done,), name=self._name, daemon=True).start()
        waiting = asyncio.wrap_future(self._done)
        # Not asyncio.timeout: that would cancel the future, and with it what the thread has to say.
        done, _ = await asyncio.wait([waiting], timeout=seconds)
        if not done:
            return False
        waiting.result()
        return True

    def _run(self, done: Future[None]) -> None:
        try:
            self._function()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)
