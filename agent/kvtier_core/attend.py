"""Runs a plan: one state per aligned chunk, merged in ascending order.

Why it exists: this order and this unit are the numerics version; whoever computes a chunk's state, its bits
are the same, so placement cannot change an answer. It must not know why rows were chosen or placed.
Formula: specification E.5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kvtier_core.appends import Append
from kvtier_core.arrivals import BufferPool
from kvtier_core.errors import CoreError, Reason
from kvtier_core.exact_ledger import LayerLedger, check_layer
from kvtier_core.folding import Fold, Query
from kvtier_core.headgroups import HeadGroups
from kvtier_core.hotunits import HotUnits, UnitGrid
from kvtier_core.neardata import (
    TOGETHER,
    NearProducer,
    Ran,
    Reduction,
    near_groups,
    producer_of,
    query_digest,
    reduction_of,
    stacked,
)
from kvtier_core.planner import STREAMED, ChunkRead, Path, Plan, check_cover, window_of
from kvtier_core.positions import Piece, PositionView
from kvtier_core.promises import IdentifiedRows, Promise, block_of
from kvtier_core.rope import RopeTable
from kvtier_core.selectedreads import SelectedReads
from kvtier_core.streaming import Stream, stream_of
from kvtier_core.supports import Support
from kvtier_core.tiers.base import BlockIdentity, SlotRef
from kvtier_core.tiers.staging import StagingBuffer
from kvtier_kernels.ops.chunk_attention import chunk_state
from kvtier_kernels.ops.chunk_attention.decode import decode_states, reads_in_place
from kvtier_kernels.state import AttentionState, finalize


@dataclass(frozen=True, slots=True)
class Attended:
    """out: float32 [Nq, Hq, d]. bytes_by_tier: bytes read, by tier name: payloads, and of a selection what
    left the tier for it. stall_seconds: computation
    waited for blocks; transfer_seconds: blocks were on their way. peak_buffer_bytes: of the buffers held at
    once. promised_bytes: of blocks that were on their way before the frame came. receipts: of states that
    were formed elsewhere. read: the state of the rows that were read, where others stand for the rest.
    hot_bytes: of pages that were in memory from an earlier selection, and are in no tier's bytes. shared: of
    bytes_by_tier, those that were read for another frame."""

    out: Tensor
    bytes_by_tier: dict[str, int]
    stall_seconds: float
    transfer_seconds: float = 0.0
    peak_buffer_bytes: int = 0
    promised_bytes: int = 0
    receipts: int = 0
    read: AttentionState | None = None
    hot_bytes: int = 0
    shared: dict[str, int] = field(default_factory=dict)

    @property
    def hidden_seconds(self) -> float:
        """Transfer that computation covered (C.1)."""
        return max(0.0, self.transfer_seconds - self.stall_seconds)


def check_read(state: AttentionState) -> None:
    """UNDECLARED_APPROXIMATION when part of an exact answer's state stands for rows that nobody read."""
    if state.estimated:
        raise CoreError(Reason.UNDECLARED_APPROXIMATION, "an estimated state in an exact answer")


class Attention:
    """Attends rows of one engine's store. Single-threaded: the engine's lock is held."""

    def __init__(
        self,
        store: IdentifiedRows,
        clock: Callable[[], float],
        executor: Executor | None,
        buffers: BufferPool,
        window: int = 2 * TOGETHER,
        hot: HotUnits | None = None,
    ) -> None:
        """buffers: for blocks on their way, `window` of them for one frame's own. hot: what selections read
        from storage lately; None: nothing is kept."""
        self._store = store
        self._clock = clock
        self._executor = executor
        self._buffers = buffers
        self._window = window
        self._hot = hot
        self._grid = UnitGrid(store.layout) if hot is None else hot.grid
        self._assembly: StagingBuffer | None = None
        self._head_groups = HeadGroups(store, clock, executor)

    def exact(self, plan: Plan, append: Append, query: Query, promise: Promise | None = None) -> Attended:
        """All visible rows of the plan. promise: blocks of these rows that are on their way already. DEADLINE
        between chunks; typed errors of tiers, and of states that were formed elsewhere."""
        check_cover(plan, self._store.layout.chunk_tokens)
        if plan.group_heads:
            return self._by_heads(plan, append, query)

        def state(read: ChunkRead, k: Tensor, v: Tensor) -> Iterator[AttentionState]:
            yield chunk_state(
                query.q,
                k,
                v,
                scale=query.frame.scale,
                q_pos0=query.first_position,
                row_pos0=read.chunk * self._store.layout.chunk_tokens,
                frame=query.frame,
            )

        size = self._store.layout.chunk_tokens
        batch = query.q.shape[0] == 1 and reads_in_place(size, query.q.shape[2])
        return self._run(plan, append, query, state, batch=batch, promise=promise, whole=True)

    def viewed(
        self, plan: Plan, append: Append, query: Query, view: PositionView, turning: RopeTable | None
    ) -> Attended:
        """All rows of an edited view: one state per segment and chunk, merged ascending. Of rows that moved
        by delta the query is turned by -delta, not the keys (selectors_kernels 1.13). The plan holds exactly
        the chunks with a row that is seen."""
        size = self._store.layout.chunk_tokens
        pieces: dict[int, list[Piece]] = {}
        for piece in view.pieces(size, query.first_position + query.q.shape[0]):
            pieces.setdefault(piece.chunk, []).append(piece)
        turned = {0: query.q}

        def turn(delta: int) -> Tensor:
            if delta not in turned:
                assert turning is not None
                turned[delta] = turning.turned(query.q, -delta)
            return turned[delta]

        def states(read: ChunkRead, k: Tensor, v: Tensor) -> Iterator[AttentionState]:
            for piece in pieces[read.chunk]:
                yield chunk_state(
                    turn(piece.delta),
                    k[piece.first : piece.last],
                    v[piece.first : piece.last],
                    scale=query.frame.scale,
                    q_pos0=query.first_position,
                    row_pos0=read.chunk * size + piece.first,
                    frame=query.frame,
                )

        return self._run(plan, append, query, states, batch=False)

    def selected(self, plan: Plan, append: Append, query: Query, support: Support) -> Attended:
        """Only the rows of `support`, still one state per aligned chunk. The plan holds exactly the chunks
        with a row of some list."""
        layout = self._store.layout
        states = support.states(query, layout.chunk_tokens)
        rows = support.rows_of(layout.kv_heads)
        if self._assembly is None:
            with torch.inference_mode(mode=False):
                self._assembly = StagingBuffer(layout)
        taken = SelectedReads(self._store, self._grid, self._hot, plan, rows, self._assembly)

        def read_bytes(read: ChunkRead) -> int:
            first = read.chunk * layout.chunk_tokens
            ends = [np.searchsorted(one, (first, first + layout.chunk_tokens)) for one in rows]
            return sum(int(high - low) for low, high in ends) * layout.row_bytes // layout.kv_heads

        return self._run(
            taken.plan,
            append,
            query,
            states,
            batch=False,
            complete=support.complete,
            exact=False,
            taken=taken,
            read_bytes=read_bytes,
        )

    def _by_heads(self, plan: Plan, append: Append, query: Query) -> Attended:
        bytes_by_tier: dict[str, int] = {}
        with self._leases(plan):
            sliced = self._head_groups.run(plan, append, query)
        for read in plan.reads:
            self._account(read, bytes_by_tier)
        check_read(sliced.state)
        out, _ = finalize(sliced.state)
        return Attended(
            out,
            bytes_by_tier,
            sliced.stall_seconds,
            sliced.transfer_seconds,
            sliced.buffer_bytes,
        )

    def _run(
        self,
        plan: Plan,
        append: Append,
        query: Query,
        states_of: Callable[[ChunkRead, Tensor, Tensor], Iterator[AttentionState]],
        *,
        batch: bool,
        promise: Promise | None = None,
        whole: bool = False,
        exact: bool = True,
        complete: Callable[[AttentionState], AttentionState] | None = None,
        taken: SelectedReads | None = None,
        read_bytes: Callable[[ChunkRead], int] | None = None,
    ) -> Attended:
        """whole: every row of every chunk is attended, so that a state stands for its chunk's rows and may
        come with a receipt. exact: no state may be an estimate. complete: makes the answer's state of that of
        the rows read. taken: what of the blocks is read. read_bytes: of a chunk that is attended in place;
        None: of all its visible rows."""
        fold = Fold(query)
        bytes_by_tier: dict[str, int] = {}
        groups = near_groups(plan.reads, query.q.shape[0])
        reduction: Reduction | None = None
        producer: NearProducer | None = None
        came: list[BlockIdentity] = []
        arrived: list[BlockIdentity] = []
        away: list[ChunkRead] = []
        away_bytes = 0
        tiers, handed = self._store.tiers, b""
        if whole and any(group[0].path is Path.NEAR for group in groups):
            last = plan.reads[-1]
            visible = last.chunk * self._store.layout.chunk_tokens + last.rows
            layout = self._store.layout
            reduction = reduction_of(groups, append, query, layout, tiers, visible)
            producer = producer_of(append.session, layout, self._store.cache_generation)
            handed = query_digest(query.q)
        with (
            self._leases(plan),
            self._streamed(plan, query.deadline, promise, taken) as stream,
        ):
            for group in groups:
                self._check_time(query, group[0], plan)
                read = group[0]
                if batch and read.path in (Path.PARTIAL, Path.NEAR) and self._full(group[-1]):
                    if read.path is Path.PARTIAL:
                        fold.add_full(self._view(read))
                    states = [] if read.path is Path.PARTIAL else _near_states(group, query, stream, came)
                else:
                    states = []
                    for read in group:
                        states += states_of(read, *self._rows(read, append, stream, taken))
                        if whole and read.path in STREAMED:
                            # What memory lends has no identity that bytes were held against.
                            came += stream.given()
                for read in group:
                    counted = self._account(read, bytes_by_tier, read_bytes, taken)
                    away_bytes += counted if came else 0
                    if reduction is not None and read.path is not Path.NEAR:
                        reduction.own(read)
                if reduction is not None and producer is not None and read.path is Path.NEAR:
                    name, rows = tiers[read.tier].name, [read.rows for read in group]
                    ran = Ran(handed, query.first_position, states[0].frame.scale)
                    receipt = producer.receipt(name, came, rows, ran, stacked(states), self._clock())
                    reduction.take(receipt, came)
                if came:
                    away += group
                    arrived += came
                came.clear()
                fold.add_all(states)
            if reduction is not None:
                reduction.close()
            if arrived:
                self._check_ledger(plan, away, arrived, away_bytes)
            total = fold.result()
            if exact:
                check_read(total)
            out, _ = finalize(total if complete is None else complete(total))
        return Attended(
            out,
            bytes_by_tier,
            stream.stall_seconds,
            stream.transfer_seconds,
            stream.buffer_bytes,
            stream.promised_blocks * self._store.layout.payload_bytes,
            0 if reduction is None else reduction.receipts,
            None if exact else total,
            0 if taken is None else taken.hot_bytes,
            stream.shared,
        )

    def _check_ledger(
        self,
        plan: Plan,
        away: Sequence[ChunkRead],
        arrived: Sequence[BlockIdentity],
        counted: int,
    ) -> None:
        """That the blocks which came are those of the rows that were away, and are what the receipt says."""
        layout = self._store.layout
        ledger = LayerLedger(
            rows=sum(read.rows for read in plan.reads),
            cold=sum(read.rows for read in away),
            blocks=len(arrived),
            received=sum(block.length for block in arrived),
        )
        check_layer(ledger, counted, layout.chunk_tokens, layout.row_bytes)

    def _full(self, read: ChunkRead) -> bool:
        return read.rows == self._store.layout.chunk_tokens

    def _check_time(self, query: Query, read: ChunkRead, plan: Plan) -> None:
        if query.deadline is not None and self._clock() > query.deadline:
            raise CoreError(
                Reason.DEADLINE,
                f"the deadline passed before chunk {read.chunk}",
                {"chunk": read.chunk, "chunks": len(plan.reads)},
            )

    @contextmanager
    def _leases(self, plan: Plan) -> Iterator[None]:
        """Holds what another thread reads. Rows attended in place are held by the engine's lock."""
        lines = [read.line for read in plan.reads if read.path in (*STREAMED, Path.SLICED)]
        if not lines:
            yield
            return
        self._store.directory.readers[lines] += 1
        try:
            yield
        finally:
            self._store.directory.readers[lines] -= 1

    def _streamed(
        self, plan: Plan, deadline: float | None, promise: Promise | None, taken: SelectedReads | None
    ) -> Stream:
        reads = [read for read in plan.reads if read.path in STREAMED]
        return stream_of(
            [block_of(self._store, read.line) if taken is None else taken.block(read) for read in reads],
            self._buffers,
            self._clock,
            window=window_of(plan, self._window),
            executor=self._executor,
            deadline=deadline,
            promised=() if promise is None else promise.arrivals,
            meter=None if promise is None else promise.meter,
        )

    def _rows(
        self, read: ChunkRead, append: Append, stream: Stream, taken: SelectedReads | None = None
    ) -> tuple[Tensor, Tensor]:
        store = self._store
        if read.path is Path.FRAME:
            lo = read.chunk * store.layout.chunk_tokens - append.first
            return append.k[lo : lo + read.rows], append.v[lo : lo + read.rows]
        if taken is not None and read.path is Path.HOT:
            return store.layout.rows(taken.hot(read), read.rows)
        if read.path in STREAMED:
            payload = stream.next().payload
            if taken is not None:
                taken.arrived(read, payload)
            return store.layout.rows(payload, read.rows)
        return store.layout.rows(self._view(read), read.rows)

    def _view(self, read: ChunkRead) -> Tensor:
        ref: SlotRef = self._store.ref(read.line)
        return self._store.tiers[read.tier].view(ref)

    def _account(
        self,
        read: ChunkRead,
        bytes_by_tier: dict[str, int],
        read_bytes: Callable[[ChunkRead], int] | None = None,
        taken: SelectedReads | None = None,
    ) -> int:
        """Bytes of the read, which are added to those of its tier."""
        if read.path in (Path.FRAME, Path.HOT):
            return 0
        layout = self._store.layout
        name = self._store.tiers[read.tier].name
        size = layout.payload_bytes if taken is None else taken.read_bytes(read)
        if read.path is Path.PARTIAL:
            size = read.rows * layout.row_bytes if read_bytes is None else read_bytes(read)
        bytes_by_tier[name] = bytes_by_tier.get(name, 0) + size
        return size


def _near_states(
    group: Sequence[ChunkRead], query: Query, stream: Stream, came: list[BlockIdentity]
) -> list[AttentionState]:
    """One query over full chunks as they come: several that are there cost little more than one. came: gets
    what they are."""
    states: list[AttentionState] = []
    while len(states) < len(group):
        payloads = [buffer.payload for buffer in stream.some(min(TOGETHER, len(group) - len(states)))]
        came += stream.given()
        keys, values = [payload[0] for payload in payloads], [payload[1] for payload in payloads]
        many = decode_states(query.q, keys, values, query.frame)
        states += [
            AttentionState(many.m[at], many.l[at], many.u[at], many.frame) for at in range(len(payloads))
        ]
    return states
