"""One cache's shared blocks as the event loop sees them: threads for what blocks, waits without threads,
pins by id.

Why it exists: the store is synchronous and moves on in a thread of its own. Calls must neither block the loop
nor hold a thread each while they wait for a disk, and what a call held must come back however it ends. It
must not know a wire message.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Protocol, TypeVar, runtime_checkable

from kvtier_agent.blockpins import PinBook
from kvtier_core.blockstore.driver import Driver
from kvtier_core.blockstore.store import BlockStore
from kvtier_core.errors import CoreError, Reason

T = TypeVar("T")
THREADS = 4
MAX_CALLS = 256
MAX_QUEUED = 1024
# A turn that was missed costs at most this much.
_PATIENCE_SECONDS = 1.0


class BlockHost:
    """Made and used on the event loop. `clock`: seconds, the store's."""

    def __init__(
        self,
        store: BlockStore,
        driver: Driver,
        clock: Callable[[], float],
        *,
        threads: int = THREADS,
        max_calls: int = MAX_CALLS,
        max_queued: int = MAX_QUEUED,
    ) -> None:
        self.store = store
        self.clock = clock
        self.pins = PinBook(store, clock)
        self.calls = 0
        self._driver = driver
        self._max_calls = max_calls
        self._max_queued = max_queued
        self._queued = 0
        self._lock = Lock()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="blocks")
        self._loop = asyncio.get_running_loop()
        self._turned = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._announced = False
        self._closed = self._removed = False
        driver.listen(self._on_turn)

    @property
    def block_bytes(self) -> int:
        return self.store.parts.block_bytes

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """One place among the calls in flight. QUEUE_FULL, CACHE_UNKNOWN once the cache is being removed,
        INTERNAL and DRAINING when nothing moves on any more."""
        self._check_open()
        self._check_moving()
        if self.calls >= self._max_calls:
            raise CoreError(
                Reason.QUEUE_FULL,
                f"{self.calls} calls on this cache's blocks are in flight",
                {"bound": self._max_calls},
            )
        self.calls += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.calls -= 1
            if not self.calls:
                self._idle.set()

    # Threads.

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Runs it in a thread. QUEUE_FULL, CACHE_UNKNOWN."""
        with self._lock:
            if self._queued >= self._max_queued:
                raise CoreError(
                    Reason.QUEUE_FULL, f"{self._queued} steps wait for a thread", {"bound": self._max_queued}
                )
            self._queued += 1
        try:
            future = self._pool.submit(function)
        except RuntimeError as error:
            self._done(None)
            raise self._over() from error
        future.add_done_callback(self._done)
        return future

    def _done(self, _future: Future[T] | None) -> None:
        with self._lock:
            self._queued -= 1

    async def run(self, function: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self.submit(function))

    def give_back(self, function: Callable[[], None]) -> None:
        """Runs what returns things, soon and whatever the bounds; nobody waits for it."""
        try:
            self._pool.submit(function)
        except RuntimeError:
            function()

    # Waiting.

    def _on_turn(self) -> None:
        """From the driver's thread. Many turns before the loop's next one are one."""
        if self._announced:
            return
        self._announced = True
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._announced = False
        self._turned.set()
        self._turned = asyncio.Event()

    async def until(self, done: Callable[[], bool], deadline: float) -> bool:
        """Waits for what a turn of the store may bring about; False at the deadline. CACHE_UNKNOWN once the
        cache is being removed, DRAINING when there will be no more turns."""
        while not done():
            if self._removed:
                raise self._over()
            self._check_moving()
            left = deadline - self.clock()
            if left <= 0:
                return False
            await self._next_turn(min(left, _PATIENCE_SECONDS))
        return True

    def mark(self) -> object:
        """This turn, to wait for a later one with `turn`."""
        return self._turned

    async def turn(self, mark: object, deadline: float) -> bool:
        """Waits for a turn after that of `mark`; False at the deadline."""
        return await self.until(lambda: self._turned is not mark, deadline)

    async def _next_turn(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._turned.wait()

    @property
    def failure(self) -> str:
        """What ended the store's thread, if anything did: nothing moves on any more."""
        return "" if self._driver.failure is None else repr(self._driver.failure)

    def _check_moving(self) -> None:
        if self.failure:
            raise CoreError(Reason.INTERNAL, "the block store has failed; the agent's log has the details")
        if self._driver.stopping:
            raise CoreError(Reason.DRAINING, "the block store has stopped")

    def _check_open(self) -> None:
        if self._closed:
            raise self._over()

    def _over(self) -> CoreError:
        what = "the cache was removed" if self._removed else "an engine that was replaced had these blocks"
        return CoreError(Reason.CACHE_UNKNOWN, what)

    async def tend(self) -> None:
        """Ends pins whose time is over; call it now and then."""
        if len(self.pins) and not self._closed:
            await self.run(self.pins.expire)

    # Ending.

    async def close(self, seconds: float, *, removed: bool = True) -> bool:
        """Refuses new calls, lets those in flight end, gives every pin back. Whether all that is done within
        the time; the store may be closed only then. removed: the cache goes, and what waits is told so; else
        it waits on until it has what it wants: the cache goes on with other blocks."""
        self._closed = True
        self._removed = self._removed or removed
        self._wake()
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
                await self._loop.run_in_executor(None, self._end)
        except TimeoutError:
            return False
        return True

    def _end(self) -> None:
        self._pool.shutdown(wait=True)
        self.pins.close()


class Strand:
    """The steps of one call, in threads but one after another: what a call began is over before what it held
    goes back, also when its caller left in the middle."""

    def __init__(self, host: BlockHost) -> None:
        self._host = host
        self._last: Future[object] | None = None

    async def run(self, function: Callable[[], T]) -> T:
        future = self._host.submit(function)
        self._last = future  # type: ignore[assignment]
        return await asyncio.wrap_future(future)

    def finish(self, function: Callable[[], None]) -> None:
        """Runs it after the last step. Does not wait."""
        last = self._last
        if last is None or last.done():
            self._host.give_back(function)
        else:
            last.add_done_callback(lambda _: self._host.give_back(function))


class _Shared(Protocol):
    @property
    def store(self) -> BlockStore: ...
    @property
    def driver(self) -> Driver: ...


@runtime_checkable
class SharesBlocks(Protocol):
    """An engine that has a block store beside its sessions."""

    def shared(self) -> _Shared:
        """TIER_INCAPABLE when the cache has no memory for it."""


def blocks_of(engine: object) -> BlockHost | None:
    """The shared blocks of a new engine, on the running loop; None where it has none."""
    if not isinstance(engine, SharesBlocks):
        return None
    try:
        shared = engine.shared()
    except CoreError as error:
        if error.reason is Reason.TIER_INCAPABLE:
            return None
        raise
    return BlockHost(shared.store, shared.driver, shared.store.parts.clock)
