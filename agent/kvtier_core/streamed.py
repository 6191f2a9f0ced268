"""The near-data half of the short way: a decode frame over chunks of which some come from storage.

Why it exists: what storage must be asked for, and what its states' receipts must say, stays the same from
token to token while chunks lie where they lie; only bytes and numbers are new. Those are read, verified,
attended and receipted at each frame as `attend` does it, in the same order and with the same bits. It must
not know when a frame may come this way, nor what happens when it fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvtier_core.appends import Append, Session
from kvtier_core.errors import CoreError, Reason
from kvtier_core.folding import Query
from kvtier_core.neardata import (
    TOGETHER,
    NearProducer,
    Ran,
    near_groups,
    producer_of,
    query_digest,
    reduction_of,
)
from kvtier_core.placements.preference import PlanKind
from kvtier_core.planner import ChunkRead, Path, Plan, check_cover, window_of
from kvtier_core.promises import IdentifiedRows, Promise, block_of
from kvtier_core.streaming import Block, BlockStream, BufferPool
from kvtier_core.tiers.base import BlockIdentity
from kvtier_core.tiers.staging import StagingBuffer
from kvtier_kernels.compiled import library
from kvtier_kernels.ops.chunk_attention.kept import DecodeRoom
from kvtier_kernels.ops.chunk_attention.keptstates import KeptStates
from kvtier_kernels.ops.chunk_attention.runs import ChunkRun, chunk_runs

if TYPE_CHECKING:
    from kvtier_kernels.compiled.machine import Library

MOST_CHUNKS = 511
"""Of a layer that is kept: a state of each is held at once."""


@dataclass(frozen=True, slots=True, eq=False)
class StreamedLayer:
    """What frames of one layer have in common while its chunks lie where they lie. groups: reads as receipts
    of states hold them. producer, scale: of the states. seconds: that the plan is predicted to take, None
    without a price. window: buffers of its stream."""

    groups: tuple[tuple[ChunkRead, ...], ...]
    blocks: tuple[Block, ...]
    lines: NDArray[np.int64]
    states: KeptStates
    producer: NearProducer
    scale: float
    kind: PlanKind
    seconds: float | None
    window: int


@dataclass(frozen=True, slots=True)
class Streamed:
    """As `Attended`, of a frame with chunks from storage."""

    out: Tensor
    stall_seconds: float
    hidden_seconds: float
    peak_buffer_bytes: int
    promised_bytes: int


class _Arrived:
    """As a `BlockStream`, of a promise whose blocks have all come."""

    stall_seconds = 0.0

    def __init__(self, promise: Promise, block_bytes: int) -> None:
        self._arrivals = promise.arrivals
        self._first = self._came = 0
        self.transfer_seconds = promise.meter.seconds
        self.promised_blocks = len(promise.arrivals)
        self.buffer_bytes = len(promise.arrivals) * block_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for arrival in self._arrivals:
            arrival.leave()

    def here(self, most: int) -> bool:
        return True

    def some(self, most: int) -> list[StagingBuffer]:
        self._first, self._came = self._came, self._came + most
        return [arrival.buffer for arrival in self._arrivals[self._first : self._came]]

    def given(self) -> list[BlockIdentity]:
        came = self._arrivals[self._first : self._came]
        return [one.block.identity for one in came if one.block.identity is not None]


def _has_come(promise: Promise, blocks: Sequence[Block]) -> bool:
    """Whether these blocks, in this order and no others, are here, each verified."""
    arrivals = promise.arrivals
    return len(arrivals) == len(blocks) and all(
        arrival.over and arrival.error is None and arrival.is_of(block)
        for arrival, block in zip(arrivals, blocks, strict=True)
    )


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
        return StreamedLayer(
            groups=tuple(tuple(group) for group in near_groups(reads, 1)),
            blocks=tuple(block_of(self._store, read.line) for read in near),
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
                parts += self._run(self._store.tiers[read.tier].view(self._store.ref(read.line)))
            elif parts and isinstance(parts[-1], int):
                parts[-1] += 1
            else:
                parts.append(1)
        open_run = parts.pop()
        assert isinstance(open_run, ChunkRun)
        size = 1 << len(reads).bit_length()
        room = self._rooms.get(size)
        if room is None:
            room = self._rooms[size] = DecodeRoom(*self._shape, queries=size)
        return KeptStates(compiled, room, parts, open_run, scale)

    @staticmethod
    def _run(payload: Tensor) -> list[ChunkRun]:
        return chunk_runs([payload[0]], [payload[1]])

    def attend(
        self,
        kept: StreamedLayer,
        append: Append,
        query: Query,
        promise: Promise | None,
        follow: Callable[[], object],
    ) -> Streamed:
        """Over rows [0, first position + 1) of the append's layer, the query's own row written.
        promise: blocks of these rows that are on their way already; follow: called whenever this frame waits
        for storage, to begin what comes next behind its reads. Raises what `Attention.exact` does."""
        visible = query.first_position + 1
        layout, states, deadline = self._store.layout, kept.states, query.deadline
        readers = self._store.directory.readers
        readers[kept.lines] += 1
        try:
            with self._stream(kept, deadline, promise) as stream:
                tiers = self._store.tiers
                reduction = reduction_of(kept.groups, append, query, layout, tiers, visible)
                ran = Ran(query_digest(query.q), query.first_position, kept.scale)
                states.begin(query.q, (visible - 1) % layout.chunk_tokens + 1)
                came = 0
                for group in kept.groups:
                    if deadline is not None and self._clock() > deadline:
                        raise self._late(group[0], kept)
                    if group[0].path is Path.PARTIAL:
                        read = group[0]
                        rows = min(layout.chunk_tokens, visible - read.chunk * layout.chunk_tokens)
                        reduction.own(read, rows)
                        continue
                    first, last = came, came + len(group)
                    blocks: list[BlockIdentity] = []
                    while came < last:
                        # All that have come in one call: between two, threads that read want the interpreter.
                        most = last - came
                        if not stream.here(most):
                            most = min(TOGETHER, most)
                            if not stream.here(most):
                                follow()
                        buffers = stream.some(most)
                        states.take(came, [self._run_of(buffer) for buffer in buffers])
                        blocks += stream.given()
                        came += len(buffers)
                    formed, name = states.states(first, last), tiers[group[0].tier].name
                    whole = [layout.chunk_tokens] * len(group)
                    receipt = kept.producer.receipt(name, blocks, whole, ran, formed, self._clock())
                    reduction.take(receipt, blocks)
                reduction.close()
                out = states.output()
        finally:
            readers[kept.lines] -= 1
        return Streamed(
            out,
            stream.stall_seconds,
            max(0.0, stream.transfer_seconds - stream.stall_seconds),
            stream.buffer_bytes,
            stream.promised_blocks * layout.payload_bytes,
        )

    def _stream(
        self, kept: StreamedLayer, deadline: float | None, promise: Promise | None
    ) -> BlockStream | _Arrived:
        if promise is not None and _has_come(promise, kept.blocks):
            return _Arrived(promise, self._buffers.block_bytes)
        return BlockStream(
            kept.blocks,
            self._buffers,
            self._clock,
            window=kept.window,
            executor=self._executor,
            deadline=deadline,
            promised=() if promise is None else promise.arrivals,
            meter=None if promise is None else promise.meter,
        )

    @staticmethod
    def _late(read: ChunkRead, kept: StreamedLayer) -> CoreError:
        chunks = sum(len(group) for group in kept.groups)
        return CoreError(
            Reason.DEADLINE,
            f"the deadline passed before chunk {read.chunk}",
            {"chunk": read.chunk, "chunks": chunks},
        )

    def _run_of(self, buffer: StagingBuffer) -> ChunkRun:
        """A buffer of the pool has one payload for good."""
        run = self._runs.get(buffer)
        if run is None:
            [run] = self._run(buffer.payload)
            self._runs[buffer] = run
        return run
