"""The near-data half of the short way: a decode frame over chunks of which some come from storage.

Why it exists: what storage must be asked for, and what its states' receipts must say, stays the same from
token to token while chunks lie where they lie; only bytes and numbers are new. Those are read, verified,
attended and receipted at each frame as `attend` does it, in the same order and with the same bits. It must
not know when a frame may come this way, nor what happens when it fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from kvtier_core.appends import Session
from kvtier_core.arrivals import BufferPool
from kvtier_core.errors import CoreError
from kvtier_core.neardata import TOGETHER, near_groups, producer_of
from kvtier_core.planner import ChunkRead, Path, Plan, check_cover, window_of
from kvtier_core.promises import IdentifiedRows, Promise, block_of
from kvtier_core.sharedstreams import SharedStreams
from kvtier_core.streamedframe import Asked, Streamed, StreamedFrame, StreamedLayer, copy_of
from kvtier_core.streaming import Stream, stream_of
from kvtier_core.tiers.staging import StagingBuffer
from kvtier_kernels.compiled import library
from kvtier_kernels.ops.chunk_attention.kept import DecodeRoom
from kvtier_kernels.ops.chunk_attention.keptstates import KeptStates
from kvtier_kernels.ops.chunk_attention.runs import ChunkRun, chunk_runs

if TYPE_CHECKING:
    from kvtier_kernels.compiled.machine import Library

MOST_CHUNKS = 511
"""Of a layer that is kept: a state of each is held at once."""


class StreamedDecode:
    """Of one engine; its lock is held."""

    def __init__(
        self,
        store: IdentifiedRows,
        clock: Callable[[], float],
        executor: Executor | None,
        buffers: BufferPool,
        window: int,
        query_heads: int,
    ) -> None:
        """As `Attention`."""
        self._store = store
        self._clock = clock
        self._executor = executor
        self._buffers = buffers
        self._window = window
        layout = store.layout
        self._shape = query_heads, layout.kv_heads, layout.head_dim, layout.chunk_tokens
        # By how many states they have room for, powers of two.
        self._rooms: dict[int, DecodeRoom] = {}
        self._runs: dict[StagingBuffer, ChunkRun] = {}
        self._shared = SharedStreams(store, clock, executor, buffers, self._shape, self.runs_of)

    def keep(self, plan: Plan, session: Session, scale: float) -> StreamedLayer | None:
        """For frames of the session while its history is what it is now. None for a plan whose reads are not
        all in place or near, the last in place, or too many. SUPPORT_OVERLAP, SUPPORT_GAP."""
        reads, compiled = plan.reads, library()
        able = compiled is not None and 1 < len(reads) <= MOST_CHUNKS and reads[-1].path is Path.PARTIAL
        if not able or any(read.path not in (Path.PARTIAL, Path.NEAR) for read in reads):
            return None
        assert compiled is not None
        check_cover(plan, self._store.layout.chunk_tokens)
        near = [read for read in reads if read.path is Path.NEAR]
        blocks = tuple(block_of(self._store, read.line) for read in near)
        return StreamedLayer(
            groups=tuple(tuple(group) for group in near_groups(reads, 1)),
            blocks=blocks,
            copies=tuple(copy_of(block) for block in blocks),
            lines=np.array([read.line for read in near], np.int64),
            states=self._states(compiled, reads, scale),
            producer=producer_of(session, self._store.layout, self._store.cache_generation),
            scale=scale,
            kind=plan.kind,
            seconds=plan.seconds,
            window=window_of(plan, self._window),
        )

    def _states(self, compiled: Library, reads: Sequence[ChunkRead], scale: float) -> KeptStates:
        parts: list[ChunkRun | int] = []
        for read in reads:
            if read.path is Path.PARTIAL:
                parts += _runs(self._store.tiers[read.tier].view(self._store.ref(read.line)))
            elif parts and isinstance(parts[-1], int):
                parts[-1] += 1
            else:
                parts.append(1)
        open_run = parts.pop()
        assert isinstance(open_run, ChunkRun)
        return KeptStates(compiled, self._room(len(reads) + 1), parts, open_run, scale)

    def attend(self, asked: Asked, promise: Promise | None) -> Streamed:
        """One frame's answer. promise: blocks of these rows that are on their way already. Raises what
        `Attention.exact` does."""
        kept, deadline = asked.kept, asked.query.deadline
        readers = self._store.directory.readers
        readers[kept.lines] += 1
        try:
            with self._stream(kept, deadline, promise) as stream:
                frame = StreamedFrame(self._store, self._clock, asked, self._room(kept.states.least))
                came = 0
                for group in kept.groups:
                    if group[0].path is Path.PARTIAL:
                        continue
                    # Chunks in memory that lie before it.
                    frame.reduce()
                    last = came + len(group)
                    while came < last:
                        # All that have come in one call: between two, threads that read want the interpreter.
                        most = last - came
                        if not stream.here(most):
                            most = min(TOGETHER, most)
                            if not stream.here(most):
                                asked.follow()
                        buffers = stream.some(most)
                        frame.take(came, self.runs_of(buffers), stream.given())
                        came += len(buffers)
                frame.reduce()
                out = frame.output()
        finally:
            readers[kept.lines] -= 1
        return Streamed(
            out,
            stream.stall_seconds,
            max(0.0, stream.transfer_seconds - stream.stall_seconds),
            stream.buffer_bytes,
            stream.promised_blocks * self._store.layout.payload_bytes,
            stream.shared,
        )

    def attend_together(
        self, asked: Sequence[Asked], promises: Sequence[Promise | None]
    ) -> list[Streamed | CoreError | None]:
        """As `SharedStreams.attend`."""
        return self._shared.attend(asked, promises)

    def _stream(self, kept: StreamedLayer, deadline: float | None, promise: Promise | None) -> Stream:
        return stream_of(
            kept.blocks,
            self._buffers,
            self._clock,
            window=kept.window,
            executor=self._executor,
            deadline=deadline,
            promised=() if promise is None else promise.arrivals,
            meter=None if promise is None else promise.meter,
        )

    def _room(self, states: int) -> DecodeRoom:
        size = 1 << (states - 1).bit_length()
        room = self._rooms.get(size)
        if room is None:
            room = self._rooms[size] = DecodeRoom(*self._shape, queries=size)
        return room

    def runs_of(self, buffers: Iterable[StagingBuffer]) -> list[ChunkRun]:
        """A buffer of the pool has one payload for good."""
        runs: list[ChunkRun] = []
        for buffer in buffers:
            run = self._runs.get(buffer)
            if run is None:
                [run] = _runs(buffer.payload)
                self._runs[buffer] = run
            runs.append(run)
        return runs


def _runs(payload: Tensor) -> list[ChunkRun]:
    return chunk_runs([payload[0]], [payload[1]])
