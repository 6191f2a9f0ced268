"""Decode frames of one call that want the same blocks of storage: each block is read and verified once.

Why it exists: sessions that were forked from one hold the same copies, and what storage gives for one of them
is what it gives for all. A block is attended by every frame that wants it while it is here, so that no more
blocks are held than for one frame; each frame has states, receipts, a deadline and an end of its own. It must
not know sessions, plans or what is done about a refusal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

from kvtier_core.arrivals import Block, BufferPool, Coming
from kvtier_core.errors import CoreError
from kvtier_core.neardata import TOGETHER
from kvtier_core.promises import IdentifiedRows, Promise
from kvtier_core.streamedframe import Asked, Copy, Streamed, StreamedFrame, copy_of
from kvtier_core.streaming import BlockStream, add_shared
from kvtier_core.tiers.staging import StagingBuffer
from kvtier_kernels.ops.chunk_attention.kept import DecodeRoom
from kvtier_kernels.ops.chunk_attention.runs import ChunkRun

MOST_STATES = 1024
"""Of all frames that read together: a state of each chunk of each frame is held at once."""


def alike(asked: Sequence[Asked]) -> list[list[int]]:
    """Frames in groups: two that want the same block are in one, as far as their states have room. In
    order."""
    leads = list(range(len(asked)))

    def leader(number: int) -> int:
        while leads[number] != number:
            leads[number] = number = leads[leads[number]]
        return number

    first: dict[Copy, int] = {}
    for number, one in enumerate(asked):
        for other in {first.setdefault(copy, number) for copy in one.kept.copies}:
            mine, theirs = leader(number), leader(other)
            leads[max(mine, theirs)] = min(mine, theirs)
    found: dict[int, list[int]] = {}
    for number in range(len(asked)):
        found.setdefault(leader(number), []).append(number)
    return [part for group in found.values() for part in _with_room(group, asked)]


def _with_room(group: Sequence[int], asked: Sequence[Asked]) -> list[list[int]]:
    parts: list[list[int]] = []
    room = 0
    for number in group:
        states = asked[number].kept.states.least
        if not parts or states > room:
            parts.append([])
            room = MOST_STATES
        parts[-1].append(number)
        room -= states
    return parts


@dataclass(slots=True, eq=False)
class _Part:
    """One frame of a reading. result: None while nothing is wrong with it and it is not over."""

    asked: Asked
    frame: StreamedFrame | None = None
    result: Streamed | CoreError | None = None
    promised: int = 0
    shared: dict[str, int] = field(default_factory=dict)
    came: list[tuple[int, Coming]] = field(default_factory=list)


class SharedStreams:
    """Of one engine; its lock is held."""

    def __init__(
        self,
        store: IdentifiedRows,
        clock: Callable[[], float],
        executor: Executor | None,
        buffers: BufferPool,
        shape: tuple[int, int, int, int],
        runs_of: Callable[[Sequence[StagingBuffer]], list[ChunkRun]],
    ) -> None:
        """As `Attention`; shape: of its rooms. runs_of: of buffers of the pool, for good."""
        self._store, self._clock, self._executor, self._buffers = store, clock, executor, buffers
        self._shape, self._runs_of = shape, runs_of
        self._room: DecodeRoom | None = None
        self._rooms: dict[tuple[int, int], DecodeRoom] = {}

    def attend(
        self, asked: Sequence[Asked], promises: Sequence[Promise | None]
    ) -> list[Streamed | CoreError | None]:
        """Of frames of different sessions in one group of `alike`: each one's answer, or what
        `Attention.exact` would raise for it; None for those that nothing is wrong with and that must be
        answered alone, since blocks could not be asked for. promises: blocks of each that are on their way
        already."""
        return _Reading(self, asked).run(promises)

    def room(self, first: int, states: int) -> DecodeRoom:
        if self._room is None:
            self._room = DecodeRoom(*self._shape, queries=MOST_STATES)
        room = self._rooms.get((first, states))
        if room is None:
            if len(self._rooms) >= MOST_STATES:
                self._rooms.clear()
            room = self._rooms[first, states] = self._room.part(first, states)
        return room


class _Reading:
    """One call's."""

    def __init__(self, of: SharedStreams, asked: Sequence[Asked]) -> None:
        self._of = of
        self._parts = [_Part(one) for one in asked]
        self._blocks: dict[Copy, Block] = {}
        # Who wants a block, and as which of its blocks.
        self._wanted: dict[Copy, list[tuple[_Part, int]]] = {}
        for part in self._parts:
            kept = part.asked.kept
            for at, (copy, block) in enumerate(zip(kept.copies, kept.blocks, strict=True)):
                self._blocks.setdefault(copy, block)
                self._wanted.setdefault(copy, []).append((part, at))
        self._waits = 0

    def run(self, promises: Sequence[Promise | None]) -> list[Streamed | CoreError | None]:
        readers = self._of._store.directory.readers
        for part in self._parts:
            readers[part.asked.kept.lines] += 1
        try:
            with self._stream(promises) as stream:
                self._begin(stream)
                while stream.left and self._open():
                    self._go_on(stream)
        except CoreError:
            # Of frames that are over it is no affair, and of the others each has reads of its own.
            pass
        finally:
            for part in self._open():
                readers[part.asked.kept.lines] -= 1
        return [part.result for part in self._parts]

    def _open(self) -> list[_Part]:
        return [part for part in self._parts if part.result is None]

    def _stream(self, promises: Sequence[Promise | None]) -> BlockStream:
        of, queries = self._of, [part.asked.query for part in self._parts]
        deadlines = [query.deadline for query in queries if query.deadline is not None]
        given = [promise for promise in promises if promise is not None]
        return BlockStream(
            list(self._blocks.values()),
            of._buffers,
            of._clock,
            window=min(part.asked.kept.window for part in self._parts),
            executor=of._executor,
            # A read ends with the last frame that may want it.
            deadline=max(deadlines) if len(deadlines) == len(queries) else None,
            promised=[arrival for promise in given for arrival in promise.arrivals],
            meter=given[0].meter if given else None,
        )

    def _begin(self, stream: BlockStream) -> None:
        first = 0
        for part in self._parts:
            states = part.asked.kept.states.least
            try:
                room = self._of.room(first, states)
                part.frame = StreamedFrame(self._of._store, self._of._clock, part.asked, room)
                part.frame.reduce()
            except CoreError as error:
                self._end(part, error)
            first += states
        self._only_wanted(stream)

    def _go_on(self, stream: BlockStream) -> None:
        """Attends what comes next."""
        before = len(self._open())
        for part in self._open():
            assert part.frame is not None
            try:
                part.frame.check_time()
            except CoreError as error:
                self._end(part, error)
        going = self._open()
        if going and not stream.some_here():
            # In turn, since each may have something of its own to begin.
            going[self._waits % len(going)].asked.follow()
            self._waits += 1
        deadlines = [part.asked.query.deadline for part in going]
        until = min((one for one in deadlines if one is not None), default=None)
        if going:
            for one, failed in stream.come(TOGETHER, until):
                self._came(stream, one, failed)
        for part in going:
            if part.came and part.result is None:
                self._attend(stream, part)
        if len(self._open()) < before:
            self._only_wanted(stream)

    def _came(self, stream: BlockStream, one: Coming, error: CoreError | None) -> None:
        for part, at in self._wanted[copy_of(one.block)]:
            if part.result is not None:
                continue
            if error is not None:
                self._end(part, error)
                continue
            part.came.append((at, one))
            part.promised += stream.was_promised(one)
            if not one.count():
                add_shared(part.shared, one.block, self._of._buffers)

    def _attend(self, stream: BlockStream, part: _Part) -> None:
        frame, came = part.frame, sorted(part.came, key=lambda one: one[0])
        assert frame is not None
        part.came = []
        try:
            at = 0
            while at < len(came):
                end = at + 1
                while end < len(came) and came[end][0] == came[end - 1][0] + 1:
                    end += 1
                some = [one for _, one in came[at:end]]
                given = [identity for one in some if (identity := one.block.identity) is not None]
                frame.take(came[at][0], self._of._runs_of([one.buffer for one in some]), given)
                at = end
            if frame.reduce():
                self._end(part, self._answer(stream, part, frame))
        except CoreError as error:
            self._end(part, error)

    def _answer(self, stream: BlockStream, part: _Part, frame: StreamedFrame) -> Streamed:
        return Streamed(
            frame.output(),
            stream.stall_seconds,
            max(0.0, stream.transfer_seconds - stream.stall_seconds),
            stream.buffer_bytes,
            part.promised * self._of._store.layout.payload_bytes,
            part.shared,
        )

    def _end(self, part: _Part, result: Streamed | CoreError) -> None:
        """The frame's rows are read for it no more."""
        part.result = result
        self._of._store.directory.readers[part.asked.kept.lines] -= 1

    def _only_wanted(self, stream: BlockStream) -> None:
        """What nobody wants any more is not read."""
        stream.only(lambda block: any(part.result is None for part, _ in self._wanted[copy_of(block)]))
