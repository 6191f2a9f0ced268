"""Blocks on their way through a bounded set of buffers: read, verified, handed over in order.

Why it exists: a context that does not fit must never be in memory as a whole, and storage should work while
rows are attended. So there are only so many buffers, and a window of them for one reader. It must not know
attention, plans or sessions.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from itertools import chain, islice
from typing import Self

from kvtier_core.arrivals import Arrival, Block, BufferPool, Coming, Meter, by_tier, launch, launched
from kvtier_core.errors import CoreError, Reason
from kvtier_core.tiers.slots import BlockIdentity
from kvtier_core.tiers.staging import StagingBuffer

READ_TIMEOUT_SECONDS = 30.0
POLL_SECONDS = 0.05


class BlockStream:
    """Blocks in order, `window` buffers at most, the next ones on their way while one is used. promised:
    arrivals that began before; each is used in place of a read of its own when it is of the block asked for.
    Not thread safe: one thread asks, by `some` and `next`, or by `come`.

    transfer_seconds: in which blocks were on their way. stall_seconds: in which `some` or `come` waited.
    peak: buffers held at once. shared: bytes, by tier, of blocks that `some` gave and others had used
    before."""

    def __init__(
        self,
        blocks: Sequence[Block],
        pool: BufferPool,
        clock: Callable[[], float],
        *,
        window: int,
        executor: Executor | None = None,
        deadline: float | None = None,
        promised: Sequence[Coming] = (),
        meter: Meter | None = None,
    ) -> None:
        """meter: of the promised arrivals, so that their time counts here."""
        self._pool = pool
        self._clock = clock
        self._executor = executor
        self._deadline = deadline
        self._window = window
        self._meter = meter or Meter(clock)
        self._waiting: deque[Coming] = deque()
        self._held: list[Coming] = []
        self._idle = 0.0
        self.stall_seconds = 0.0
        self.promised_blocks = 0
        self.peak = 0
        self.shared: dict[str, int] = {}
        kept = list(promised)
        self._blocks: deque[Block | Coming] = deque()
        for block in blocks:
            early = next((one for one in kept if one.is_of(block) and one.error is None), None)
            if early is None:
                self._blocks.append(block)
            else:
                kept.remove(early)
                self._blocks.append(early)
                self.promised_blocks += 1
        for one in kept:
            one.leave()
        self._early = {id(one) for one in self._blocks if not isinstance(one, Block)}
        try:
            self._fill()
        except BaseException:
            # Nobody enters a stream that was not made, so nobody would leave it.
            self.__exit__()
            raise

    @property
    def transfer_seconds(self) -> float:
        return self._meter.seconds

    @property
    def buffer_bytes(self) -> int:
        """Of all buffers that were held at once."""
        return self.peak * self._pool.block_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing further begins. What is on its way keeps its buffer until nothing can arrive there."""
        for arrival in (*self._held, *self._waiting):
            arrival.leave()
        for one in self._blocks:
            if not isinstance(one, Block):
                one.leave()
        self._held.clear()
        self._waiting.clear()
        self._blocks.clear()

    def only(self, wanted: Callable[[Block], bool]) -> None:
        """Lets go of all others of what was not given yet, also where it is on its way."""
        for arrival in list(self._waiting):
            if not wanted(arrival.block):
                self._waiting.remove(arrival)
                arrival.leave()
        for one in list(self._blocks):
            if not wanted(one if isinstance(one, Block) else one.block):
                self._blocks.remove(one)
                if not isinstance(one, Block):
                    one.leave()

    def _patience(self) -> float:
        """Seconds that a wait may take from now."""
        if self._deadline is None:
            return READ_TIMEOUT_SECONDS
        return max(0.0, min(READ_TIMEOUT_SECONDS, self._deadline - self._clock()))

    def _fill(self) -> None:
        """Starts reads while the window has room, as many as can be in one call. A full queue or an empty
        pool stops it for now."""
        fresh: list[Arrival] = []
        while self._blocks and len(self._waiting) + len(self._held) < self._window:
            first = self._blocks[0]
            if isinstance(first, Block):
                arrival = self._arrival(first)
                if arrival is None:
                    break
                fresh.append(arrival)
                self._waiting.append(arrival)
            else:
                self._waiting.append(first)
            self._blocks.popleft()
        for group in by_tier(fresh):
            if not self._begin(group):
                break
        early = sum(not isinstance(one, Block) for one in self._blocks)
        self.peak = max(self.peak, len(self._waiting) + len(self._held) + early)

    def _arrival(self, block: Block) -> Arrival | None:
        """A buffer for the block; None when there is none."""
        buffer = self._pool.take()
        return None if buffer is None else Arrival(block, buffer, self._pool, self._meter)

    def _begin(self, group: list[Arrival]) -> bool:
        """Whether all reads of the group began. Those that did not, and all behind them, wait in their turn;
        QUEUE_FULL when nothing is on its way whose end would make room."""
        deadline = math.inf if self._deadline is None else self._deadline
        try:
            refused = launch(group, deadline, self._executor)
        except BaseException:
            self._take_back()
            raise
        if refused is None:
            return True
        self._take_back()
        if not self._waiting and not self._held:
            raise refused
        return False

    def _take_back(self) -> None:
        """Of what waits, the first that has not begun and all behind it."""
        begun = launched(self._waiting)
        while len(self._waiting) > begun:
            last = self._waiting.pop()
            if id(last) in self._early:
                self._blocks.appendleft(last)
            else:
                self._pool.give(last.buffer)
                self._blocks.appendleft(last.block)

    def here(self, most: int) -> bool:
        """Whether `some(most)` would not wait: the next blocks have come, or what ended their reads has."""
        following = list(islice(chain(self._waiting, self._blocks), most))
        return bool(following) and all(not isinstance(one, Block) and one.over for one in following)

    def next(self) -> StagingBuffer:
        """The next block; see `some`."""
        return self.some(1)[0]

    def some(self, most: int) -> list[StagingBuffer]:
        """The next `most` blocks, or as many as are left or have buffers: verified, in order, valid until the
        next call. Raises what the read of one of them ended with; DEADLINE when that has come;
        STORAGE_UNAVAILABLE on a hang before it; NO_STAGING when every buffer waits for late bytes."""
        started = self._clock()
        try:
            self._next()
            while self._waiting and len(self._held) < most:
                self._held.append(self._first())
            self._fill()
            return [arrival.buffer for arrival in self._held]
        finally:
            self.stall_seconds += self._clock() - started

    def _next(self) -> None:
        """What was given last goes back, and what comes next is on its way. NO_STAGING, and what a tier
        refuses at once."""
        for arrival in self._held:
            arrival.leave()
        self._held.clear()
        self._fill()
        if not self._waiting:
            raise CoreError(
                Reason.NO_STAGING,
                f"all {self._pool.limit} buffers wait for late bytes",
                {"buffers": self._pool.limit},
            )

    @property
    def left(self) -> int:
        """Blocks that were not given yet."""
        return len(self._waiting) + len(self._blocks)

    def some_here(self) -> bool:
        """Whether `come` would not wait."""
        return any(one.over for one in self._waiting)

    def come(self, most: int, until: float | None) -> list[tuple[Coming, CoreError | None]]:
        """Up to `most` blocks in the order in which they come, valid until the next call, each with what its
        read ended with: STORAGE_UNAVAILABLE for all that are waited for when nothing comes for long. None
        when none came by `until`, or soon, so that who waits can look up. Raises what keeps blocks from
        being asked for: NO_STAGING, and what a tier refuses at once."""
        started = self._clock()
        try:
            self._next()
            first = self._waiting[0]
            if not self.some_here():
                first.block.tier.poll()
            if not self.some_here():
                patience = POLL_SECONDS if until is None else min(POLL_SECONDS, until - self._clock())
                patience = max(0.0, patience)
                if not first.wait(patience):
                    # A slow one keeps no other from being waited for.
                    self._waiting.rotate(-1)
                    self._idle += patience
            for one in [one for one in self._waiting if one.over][:most]:
                self._waiting.remove(one)
                if one.error is not None and id(one) in self._early:
                    self._waiting.append(self._anew(one))
                else:
                    self._held.append(one)
            found = [(one, one.error) for one in self._held]
            if found:
                self._idle = 0.0
            elif self._idle >= READ_TIMEOUT_SECONDS:
                text = f"a staged read did not end within {READ_TIMEOUT_SECONDS} s"
                hangs = CoreError(Reason.STORAGE_UNAVAILABLE, text)
                found = [(one, hangs) for one in self._waiting]
                self._held.extend(self._waiting)
                self._waiting.clear()
                self._idle = 0.0
            self._fill()
            return found
        finally:
            self.stall_seconds += self._clock() - started

    def was_promised(self, one: Coming) -> bool:
        """Whether a block that was given was on its way before."""
        return id(one) in self._early

    def given(self) -> list[BlockIdentity]:
        """What the blocks are that `some` gave last: their bytes were verified against it."""
        return [one.block.identity for one in self._held if one.block.identity is not None]

    def _first(self) -> Coming:
        arrival = self._waiting[0]
        self._until_over(arrival)
        self._waiting.popleft()
        if arrival.error is not None and id(arrival) in self._early:
            arrival = self._again(arrival)
        if arrival.error is not None:
            arrival.leave()
            raise arrival.error
        if not arrival.count():
            add_shared(self.shared, arrival.block, self._pool)
        return arrival

    def _again(self, early: Coming) -> Arrival:
        """A promise that failed costs its own time and nothing else: the block is read as if there had been
        none."""
        arrival = self._anew(early)
        try:
            self._until_over(arrival)
        except BaseException:
            arrival.leave()
            raise
        return arrival

    def _anew(self, early: Coming) -> Arrival:
        """Another read of a block that was promised and failed."""
        early.leave()
        self.promised_blocks -= 1
        arrival = self._arrival(early.block)
        if arrival is None:
            raise CoreError(Reason.NO_STAGING, f"none of {self._pool.limit} buffers is free")
        deadline = math.inf if self._deadline is None else self._deadline
        try:
            refused = launch([arrival], deadline, self._executor)
            if refused is not None:
                raise refused
        except BaseException:
            if arrival.launched:
                arrival.leave()
            else:
                self._pool.give(arrival.buffer)
            raise
        return arrival

    def _until_over(self, arrival: Coming) -> None:
        waited = 0.0
        while not arrival.over:
            arrival.block.tier.poll()
            if arrival.over:
                return
            if self._deadline is not None and self._clock() >= self._deadline:
                raise CoreError(Reason.DEADLINE, "the deadline passed during a staged read")
            if waited >= READ_TIMEOUT_SECONDS:
                raise CoreError(
                    Reason.STORAGE_UNAVAILABLE, f"a staged read did not end within {READ_TIMEOUT_SECONDS} s"
                )
            step = min(POLL_SECONDS, self._patience(), READ_TIMEOUT_SECONDS - waited)
            arrival.wait(step)
            waited += step


class ArrivedStream:
    """As a `BlockStream`, of promised blocks that have all come: nothing is begun and nothing waited for."""

    stall_seconds = 0.0

    def __init__(self, pool: BufferPool, promised: Sequence[Coming], meter: Meter) -> None:
        self._arrivals, self._pool = promised, pool
        self._first = self._came = 0
        self.transfer_seconds = meter.seconds
        self.promised_blocks = len(promised)
        self.buffer_bytes = len(promised) * pool.block_bytes
        self.shared: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for arrival in self._arrivals:
            arrival.leave()

    def here(self, most: int) -> bool:
        return True

    def next(self) -> StagingBuffer:
        return self.some(1)[0]

    def some(self, most: int) -> list[StagingBuffer]:
        self._first, self._came = self._came, self._came + most
        given = self._arrivals[self._first : self._came]
        for one in given:
            if not one.count():
                add_shared(self.shared, one.block, self._pool)
        return [one.buffer for one in given]

    def given(self) -> list[BlockIdentity]:
        came = self._arrivals[self._first : self._came]
        return [one.block.identity for one in came if one.block.identity is not None]


Stream = BlockStream | ArrivedStream


def stream_of(
    blocks: Sequence[Block],
    pool: BufferPool,
    clock: Callable[[], float],
    *,
    window: int,
    executor: Executor | None,
    deadline: float | None,
    promised: Sequence[Coming],
    meter: Meter | None,
) -> Stream:
    """What brings these blocks, as a `BlockStream` is told; without one where all of them have come, each
    verified, in this order and no others."""
    if meter is not None and len(promised) == len(blocks) and _are_here(promised, blocks):
        return ArrivedStream(pool, promised, meter)
    return BlockStream(
        blocks,
        pool,
        clock,
        window=window,
        executor=executor,
        deadline=deadline,
        promised=promised,
        meter=meter,
    )


def _are_here(promised: Sequence[Coming], blocks: Sequence[Block]) -> bool:
    return all(
        one.over and one.error is None and one.is_of(block)
        for one, block in zip(promised, blocks, strict=True)
    )


def add_shared(to: dict[str, int], block: Block, pool: BufferPool) -> None:
    """Counts a block that was read for somebody else."""
    name = block.tier.name
    to[name] = to.get(name, 0) + pool.layout.payload_bytes
