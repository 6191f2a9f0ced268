"""How a node's caches end: calls on their blocks first, then their engines, all within one deadline.

Why it exists: a call that hangs in storage must neither keep the agent from ending nor have its store closed
underneath. It must not know fences, leases or why something ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from kvtier_agent.blockhost import BlockHost
from kvtier_agent.cachehost import CacheHost
from kvtier_agent.endings import BlockingEnd
from kvtier_agent.engine_port import EngineRunner

log = logging.getLogger(__name__)


class CacheEnds:
    """Engines and blocks that serve no more and have not all ended. On the event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: in seconds."""
        self._clock = clock
        self._runners: dict[str, EngineRunner] = {}
        self._blocks: dict[str, list[BlockHost]] = {}

    def begin(self, uid: str, host: CacheHost) -> None:
        """From here on it is to end; `end` and `close` wait for it."""
        self._runners[uid] = host.runner
        if blocks := host.all_blocks:
            self._blocks[uid] = blocks

    async def end(self, uid: str, seconds: float) -> str:
        """Waits at most so long in total; what does not end, or an empty text. May be called again."""
        until = self._clock() + seconds
        blocks, runner = self._blocks.get(uid), self._runners.get(uid)
        if blocks is not None:
            if not await _closed(blocks, seconds):
                return f"a call on blocks of cache {uid} does not end"
            self._blocks.pop(uid, None)
        if runner is not None:
            if not await runner.close(self._left(until)):
                return f"a call of the engine of cache {uid} does not end"
            self._runners.pop(uid, None)
        return ""

    async def close(self, others: Mapping[str, BlockingEnd], seconds: float) -> list[str]:
        """Ends everything that has begun to, and `others` beside the engines. Waits at most `seconds` in
        total; returns the names of what did not end."""
        until = self._clock() + seconds
        ending = dict(self._blocks)
        closing = (_closed(blocks, seconds) for blocks in ending.values())
        over = await asyncio.gather(*closing, return_exceptions=True)
        # What still runs on a store must not have it closed underneath.
        stuck = [uid for uid, ended in zip(ending, over, strict=True) if ended is not True]
        left = self._left(until)
        ends = {
            f"engine of cache {uid}": runner.close(left)
            for uid, runner in self._runners.items()
            if uid not in stuck
        }
        ends |= {name: one.within(left) for name, one in others.items()}
        outcomes = await asyncio.gather(*ends.values(), return_exceptions=True)
        _tell_failures((*ending, *ends), (*over, *outcomes))
        going_on = [f"calls on blocks of cache {uid}" for uid in stuck]
        return going_on + [name for name, done in zip(ends, outcomes, strict=True) if done is False]

    def _left(self, until: float) -> float:
        return max(0.0, until - self._clock())


async def _closed(blocks: Sequence[BlockHost], seconds: float) -> bool:
    return all(await asyncio.gather(*(one.close(seconds) for one in blocks)))


def _tell_failures(names: Iterable[str], outcomes: Iterable[bool | BaseException]) -> None:
    for name, outcome in zip(names, outcomes, strict=True):
        if isinstance(outcome, BaseException):
            log.error("%s ended badly", name, exc_info=outcome)
