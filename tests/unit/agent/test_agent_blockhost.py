"""How a cache's shared blocks end: the cache goes with them, or goes on with others."""

from __future__ import annotations

import asyncio

import pytest

from kvtier_agent.blockhost import BlockHost
from kvtier_core.blockstore.driver import Bell, Driver
from kvtier_core.errors import CoreError, Reason
from tests.unit.core.storebench import StoreBench

WAIT_SECONDS = 60.0


class Waiting:
    """A call that waits in the store until `done`, or is told why it need not."""

    def __init__(self, host: BlockHost) -> None:
        self.host = host
        self.done = False
        self.entered = asyncio.Event()
        self.task = asyncio.create_task(self._call())

    async def _call(self) -> bool:
        with self.host.call():
            self.entered.set()
            return await self.host.until(lambda: self.done, self.host.clock() + WAIT_SECONDS)


@pytest.mark.parametrize("removed", [False, True], ids=["others-take-their-place", "the-cache-is-removed"])
async def test_what_waits_is_let_end_unless_the_cache_goes(removed: bool) -> None:
    blocks = StoreBench()
    host = BlockHost(blocks.store, Driver(blocks.store, Bell(), blocks.clock), blocks.clock)
    waiting = Waiting(host)
    async with asyncio.timeout(WAIT_SECONDS):
        await waiting.entered.wait()
        closing = asyncio.create_task(host.close(WAIT_SECONDS, removed=removed))
        while not host._closed:  # noqa: ASYNC110
            await asyncio.sleep(0)
        with pytest.raises(CoreError) as refused, host.call():
            raise AssertionError("nothing new begins")
        assert refused.value.reason is Reason.CACHE_UNKNOWN
        if not removed:
            waiting.done = True
            host._wake()
            assert await waiting.task
        else:
            with pytest.raises(CoreError) as told:
                await waiting.task
            assert told.value.reason is Reason.CACHE_UNKNOWN
        assert await closing


async def test_what_waits_on_blocks_that_were_replaced_is_told_when_their_cache_goes_too() -> None:
    blocks = StoreBench()
    host = BlockHost(blocks.store, Driver(blocks.store, Bell(), blocks.clock), blocks.clock)
    waiting = Waiting(host)
    async with asyncio.timeout(WAIT_SECONDS):
        await waiting.entered.wait()
        assert not await host.close(0.0, removed=False)
        assert await host.close(WAIT_SECONDS)
        with pytest.raises(CoreError) as told:
            await waiting.task
    assert told.value.reason is Reason.CACHE_UNKNOWN
