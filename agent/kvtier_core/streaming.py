"""Blocks on their way through a bounded set of buffers: read, verified, handed over in order.

Why it exists: a context that does not fit must never be in memory as a whole, storage should work while rows
are attended, and a tier may be slow, may fail, may answer late or twice. So a block has one buffer from its
first byte until nothing can arrive there any more, and there are only so many. It must not know attention,
plans or sessions.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import chain, groupby, islice, takewhile
from typing import Self

import torch

from kvtier_core.errors import CoreError, Reason
from kvtier_core.layout import ChunkLayout
from kvtier_core.tiers.base import PoolTier, Tier
from kvtier_core.tiers.slots import BlockIdentity, SlotRef
from kvtier_core.tiers.staging import StagingBuffer, StagingRoom, block_bytes
from kvtier_core.tiers.transfer import Landing, Ranges, TransferItem

READ_TIMEOUT_SECONDS = 30.0
POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Block:
    """One block to bring. identity None: an open chunk, which has no checksum yet and never left memory.
    ranges: all that is needed of it; None: the whole."""

    tier: Tier
    ref: SlotRef
    identity: BlockIdentity | None
    ranges: Ranges | None = None


class BufferPool:
    """At most `limit` staging buffers, made when first needed. Threads give back what late bytes held."""

    def __init__(self, layout: ChunkLayout, limit: int) -> None:
        self.layout = layout
        self.limit = limit
        self.block_bytes = block_bytes(layout)
        self._lock = threading.Lock()
        self._free: list[StagingBuffer] = []
        self._made = 0
        self._room: StagingRoom | None = None

    @property
    def bytes(self) -> int:
        """Of all buffers that were made."""
        return self._made * self.block_bytes

    @property
    def available(self) -> int:
        with self._lock:
            return self.limit - self._made + len(self._free)

    def take(self) -> StagingBuffer | None:
        """None when all are in use."""
        with self._lock:
            if self._free:
                return self._free.pop()
            if self._made == self.limit:
                return None
            if self._room is None:
                self._room = StagingRoom(self.layout, self.limit)
            room, at = self._room, self._made
            self._made += 1
        # It outlives the frame that asks first, whose mode must not stick to it.
        with torch.inference_mode(mode=False):
            return room.buffer(at)

    def give(self, buffer: StagingBuffer) -> None:
        with self._lock:
            self._free.append(buffer)


class Meter:
    """Seconds in which at least one block is on its way, of all that report here."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._flying = 0
        self._since = 0.0
        self.seconds = 0.0

    def begin(self) -> None:
        with self._lock:
            if not self._flying:
                self._since = self._clock()
            self._flying += 1

    def end(self) -> None:
        with self._lock:
            self._flying -= 1
            if not self._flying:
                self.seconds += max(0.0, self._clock() - self._since)


class Arrival:
    """One block in its buffer: the sink of its read. A second report of the same read changes nothing. The
    buffer goes back to the pool when its reader is done with it and no byte can arrive any more, whichever is
    later.

    over: its bytes are there, or what ended the read is in `error`. launched: bytes may arrive, so that the
    buffer is given back by `leave` and by nobody else."""

    def __init__(self, block: Block, buffer: StagingBuffer, pool: BufferPool, meter: Meter) -> None:
        self.block = block
        self.buffer = buffer
        self._pool = pool
        self._meter = meter
        self._lock = threading.Lock()
        # Held until the read is over. An event is a dozen objects, and there is one of these for each block.
        self._on_its_way = threading.Lock()
        self._on_its_way.acquire()
        self.error: CoreError | None = None
        self.over = self.launched = False
        self._told = self._drained = self._left = self._returned = False

    def begin(self) -> TransferItem | None:
        """Counts the read as under way; None when the block is an open chunk, which is copied here and
        now."""
        self._meter.begin()
        block, buffer = self.block, self.buffer
        if block.identity is not None:
            landing = Landing(buffer.body, buffer.header)
            return TransferItem(block.ref, block.identity, landing, ranges=block.ranges)
        try:
            buffer.payload.copy_(block.tier.view(block.ref))
        except CoreError as error:
            self.done(0, error)
        else:
            self.done(0, None)
        self.drained(0)
        return None

    def unbegun(self) -> None:
        """The read was refused before anything started."""
        self.launched = False
        self._meter.end()

    def run(self, deadline: float) -> None:
        """The whole read here, of a tier that reads inline: what it refuses is the block's error. A block
        that nobody waits for any more is not read."""
        item = self.begin()
        if item is None:
            return
        try:
            if self._left:
                raise CoreError(Reason.CANCELLED, "nobody waits for this block")
            self.block.tier.submit_read([item], deadline, self)
        except CoreError as error:
            self.done(0, error)
            self.drained(0)
        except BaseException as defect:
            # On an executor nobody else hears of it, and the frame would wait.
            self.done(0, CoreError(Reason.INTERNAL, f"a read failed: {defect!r}"))
            self.drained(0)
            raise

    def done(self, index: int, error: CoreError | None) -> None:
        with self._lock:
            if self._told:
                return
            self._told, self.error = True, error
        self._meter.end()
        self.over = True
        self._on_its_way.release()

    def drained(self, index: int) -> None:
        self._give_back(drained=True)

    def wait(self, seconds: float) -> bool:
        """Whether it is over within so many seconds."""
        if not self.over and self._on_its_way.acquire(timeout=seconds):
            # Somebody else may wait as well.
            self._on_its_way.release()
        return self.over

    def leave(self) -> None:
        """The reader needs the buffer no more."""
        if not self._returned:
            self._give_back(left=True)

    def _give_back(self, *, left: bool = False, drained: bool = False) -> None:
        with self._lock:
            self._left, self._drained = self._left or left, self._drained or drained
            if self._returned or not (self._left and self._drained):
                return
            self._returned = True
        self._pool.give(self.buffer)

    def is_of(self, block: Block) -> bool:
        """Whether what arrives is all of what `block` names: the same copy in the same life of its slot."""
        mine = self.block
        if mine is block:
            return mine.ranges is None
        return (
            mine.ranges is None
            and mine.tier is block.tier
            and mine.ref == block.ref
            and mine.identity == block.identity
        )


class _Batch:
    """The sink of reads that began together."""

    def __init__(self, arrivals: Sequence[Arrival]) -> None:
        self._arrivals = arrivals

    def done(self, index: int, error: CoreError | None) -> None:
        self._arrivals[index].done(0, error)

    def drained(self, index: int) -> None:
        self._arrivals[index].drained(0)


def launch(arrivals: Sequence[Arrival], deadline: float, executor: Executor | None) -> CoreError | None:
    """Begins reads of one tier, in order; QUEUE_FULL when not all did. Whichever way it ends, those that did
    are `launched`. Storage takes them in one call and reads on threads of its own; memory is copied by who
    asks, so on the executor where there is one that takes it."""
    tier = arrivals[0].block.tier
    if isinstance(tier, PoolTier):
        for arrival in arrivals:
            arrival.launched = True
            if executor is None or arrival.block.identity is None:
                arrival.run(deadline)
                continue
            try:
                executor.submit(arrival.run, deadline)
            except RuntimeError:
                # The engine ends, and its frames with it: as for one without an executor.
                arrival.run(deadline)
        return None
    items = [item for arrival in arrivals if (item := arrival.begin()) is not None]
    for arrival in arrivals:
        # Of what fails in another way than the tier's contract says nobody knows what has begun.
        arrival.launched = True
    try:
        tier.submit_read(items, deadline, _Batch(arrivals))
    except CoreError as error:
        for arrival in arrivals:
            arrival.unbegun()
        if error.reason is not Reason.QUEUE_FULL:
            raise
        if len(arrivals) > 1:
            launch(arrivals[:1], deadline, executor)
        return error
    return None


def launched(arrivals: Iterable[Arrival]) -> int:
    """How many of these have begun before the first that has not."""
    return sum(1 for _ in takewhile(lambda arrival: arrival.launched, arrivals))


def by_tier(arrivals: Sequence[Arrival]) -> list[list[Arrival]]:
    """Neighbours of one tier together."""
    return [list(group) for _, group in groupby(arrivals, key=lambda one: id(one.block.tier))]


class BlockStream:
    """Blocks in order, `window` buffers at most, the next ones on their way while one is used. promised:
    arrivals that began before; each is used in place of a read of its own when it is of the block asked for.
    Not thread safe: `next` is called by one thread.

    transfer_seconds: in which blocks were on their way. stall_seconds: in which `some` waited. peak: buffers
    held at once."""

    def __init__(
        self,
        blocks: Sequence[Block],
        pool: BufferPool,
        clock: Callable[[], float],
        *,
        window: int,
        executor: Executor | None = None,
        deadline: float | None = None,
        promised: Sequence[Arrival] = (),
        meter: Meter | None = None,
    ) -> None:
        """meter: of the promised arrivals, so that their time counts here."""
        self._pool = pool
        self._clock = clock
        self._executor = executor
        self._deadline = deadline
        self._window = window
        self._meter = meter or Meter(clock)
        self._waiting: deque[Arrival] = deque()
        self._held: list[Arrival] = []
        self.stall_seconds = 0.0
        self.promised_blocks = 0
        self.peak = 0
        kept = list(promised)
        self._blocks: deque[Block | Arrival] = deque()
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
        self._early = {id(one) for one in self._blocks if isinstance(one, Arrival)}
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
            if isinstance(one, Arrival):
                one.leave()
        self._held.clear()
        self._waiting.clear()
        self._blocks.clear()

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
            arrival = first if isinstance(first, Arrival) else self._arrival(first)
            if arrival is None:
                break
            if arrival is not first:
                fresh.append(arrival)
            self._blocks.popleft()
            self._waiting.append(arrival)
        for group in by_tier(fresh):
            if not self._begin(group):
                break
        early = sum(isinstance(one, Arrival) for one in self._blocks)
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
        return bool(following) and all(isinstance(one, Arrival) and one.over for one in following)

    def next(self) -> StagingBuffer:
        """The next block; see `some`."""
        return self.some(1)[0]

    def some(self, most: int) -> list[StagingBuffer]:
        """The next `most` blocks, or as many as are left or have buffers: verified, in order, valid until the
        next call. Raises what the read of one of them ended with; DEADLINE when that has come;
        STORAGE_UNAVAILABLE on a hang before it; NO_STAGING when every buffer waits for late bytes."""
        for arrival in self._held:
            arrival.leave()
        self._held.clear()
        started = self._clock()
        try:
            self._fill()
            if not self._waiting:
                raise CoreError(
                    Reason.NO_STAGING,
                    f"all {self._pool.limit} buffers wait for late bytes",
                    {"buffers": self._pool.limit},
                )
            while self._waiting and len(self._held) < most:
                self._held.append(self._first())
            self._fill()
            return [arrival.buffer for arrival in self._held]
        finally:
            self.stall_seconds += self._clock() - started

    def given(self) -> list[BlockIdentity]:
        """What the blocks are that `some` gave last: their bytes were verified against it."""
        return [one.block.identity for one in self._held if one.block.identity is not None]

    def _first(self) -> Arrival:
        arrival = self._waiting[0]
        self._until_over(arrival)
        self._waiting.popleft()
        if arrival.error is not None and id(arrival) in self._early:
            arrival = self._again(arrival)
        if arrival.error is not None:
            arrival.leave()
            raise arrival.error
        return arrival

    def _again(self, early: Arrival) -> Arrival:
        """A promise that failed costs its own time and nothing else: the block is read as if there had been
        none."""
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
            self._until_over(arrival)
        except BaseException:
            if arrival.launched:
                arrival.leave()
            else:
                self._pool.give(arrival.buffer)
            raise
        return arrival

    def _until_over(self, arrival: Arrival) -> None:
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
