"""Single blocks on their way, each in a buffer of its own from its first byte until nothing can arrive there.

Why it exists: a tier may be slow, may fail, may answer late or twice, and several readers may want the same
block: it is read once, and its buffer is free when the last of them is done with it and no byte can come any
more. It must not know order, windows or who waits for what.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import groupby, takewhile

import torch

from kvtier_core.errors import CoreError, Reason
from kvtier_core.layout import ChunkLayout
from kvtier_core.tiers.base import PoolTier, Tier
from kvtier_core.tiers.slots import BlockIdentity, SlotRef
from kvtier_core.tiers.staging import StagingBuffer, StagingRoom, block_bytes
from kvtier_core.tiers.transfer import Landing, Ranges, TransferItem


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
    buffer goes back to the pool when all its readers are done with it and no byte can arrive any more,
    whichever is later.

    over: its bytes are there, or what ended the read is in `error`. launched: bytes may arrive, so that the
    buffer is given back by `leave` and by nobody else. Others may `join`: each of them is a reader too."""

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
        self._told = self._drained = self._left = self._returned = self._counted = False
        self._joined = 0

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
            if self._left and not self._joined:
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

    def join(self) -> Joined | None:
        """Another reader of the same bytes; None when nobody reads them any more, or they did not come."""
        with self._lock:
            if self.error is not None or not self.launched or (self._left and not self._joined):
                return None
            self._joined += 1
        return Joined(self)

    def part(self) -> None:
        """One who joined is done with it."""
        self._give_back(parted=1)

    def count(self) -> bool:
        """Whether its bytes are used for the first time: they are read once, whoever joined. Of the engine's
        thread."""
        first, self._counted = not self._counted, True
        return first

    def _give_back(self, *, left: bool = False, drained: bool = False, parted: int = 0) -> None:
        with self._lock:
            self._left, self._drained = self._left or left, self._drained or drained
            self._joined -= parted
            if self._returned or self._joined or not (self._left and self._drained):
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


class Joined:
    """A reader's hold on a read that another one began; as an `Arrival` that was launched."""

    __slots__ = ("_left", "_of", "block", "buffer")
    launched = True

    def __init__(self, of: Arrival) -> None:
        self._of, self._left = of, False
        self.block, self.buffer = of.block, of.buffer

    @property
    def over(self) -> bool:
        return self._of.over

    @property
    def error(self) -> CoreError | None:
        return self._of.error

    def wait(self, seconds: float) -> bool:
        return self._of.wait(seconds)

    def is_of(self, block: Block) -> bool:
        return self._of.is_of(block)

    def join(self) -> Joined | None:
        return self._of.join()

    def count(self) -> bool:
        return self._of.count()

    def leave(self) -> None:
        if not self._left:
            self._left = True
            self._of.part()


Coming = Arrival | Joined
"""A block on its way, as one of its readers holds it."""


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


def launched(arrivals: Iterable[Coming]) -> int:
    """How many of these have begun before the first that has not."""
    return sum(1 for _ in takewhile(lambda arrival: arrival.launched, arrivals))


def by_tier(arrivals: Sequence[Arrival]) -> list[list[Arrival]]:
    """Neighbours of one tier together."""
    return [list(group) for _, group in groupby(arrivals, key=lambda one: id(one.block.tier))]
