"""Runs a plan: one state per aligned chunk, merged in ascending order.

Why it exists: this order and this unit are the numerics version; whoever computes a chunk's state, its bits
are the same, so placement cannot change an answer. It must not know why rows were chosen or placed.
Formula: specification E.5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtier_core.appends import Append, Rows
from kvtier_core.errors import CoreError, Reason
from kvtier_core.planner import ChunkRead, Path, Plan
from kvtier_core.positions import Piece, PositionView
from kvtier_core.rope import RopeTable
from kvtier_core.staged import Job, StagedReads
from kvtier_core.tiers.base import SlotRef
from kvtier_core.tiers.staging import StagingBuffer
from kvtier_kernels.ops.chunk_attention import chunk_state
from kvtier_kernels.ops.chunk_attention.decode import decode_states, merge_stacked, reads_in_place
from kvtier_kernels.state import AttentionState, LogitFrame, finalize, identity, merge

_BATCH = 8


@dataclass(frozen=True, slots=True)
class Attended:
    """out: float32 [Nq, Hq, d]. bytes_by_tier: payload bytes read, by tier name."""

    out: Tensor
    bytes_by_tier: dict[str, int]
    stall_seconds: float


@dataclass(frozen=True, slots=True)
class Query:
    """q float32 [Nq, Hq, d]; query i stands at first_position + i. deadline on the engine's clock."""

    q: Tensor
    first_position: int
    frame: LogitFrame
    deadline: float | None


class _Fold:
    """Merges states in the order they are added. Full chunks in place wait for each other, since one call
    over several costs little more than one; the bits are those of one after the other."""

    def __init__(self, query: Query) -> None:
        self._query = query
        self._total: AttentionState | None = None
        self._waiting: list[Tensor] = []

    def add(self, state: AttentionState) -> None:
        self._flush()
        self._total = state if self._total is None else merge(self._total, state)

    def add_full(self, payload: Tensor) -> None:
        """A payload [2, Hk, C, d] whose rows are all visible."""
        self._waiting.append(payload)
        if len(self._waiting) == _BATCH:
            self._flush()

    def _flush(self) -> None:
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        keys, values = [payload[0] for payload in waiting], [payload[1] for payload in waiting]
        states = decode_states(self._query.q, keys, values, self._query.frame)
        if self._total is not None:
            states = _prepend(self._total, states)
        self._total = merge_stacked(states)

    def result(self) -> AttentionState:
        self._flush()
        if self._total is None:
            raise CoreError(Reason.SUPPORT_GAP, "there is no row to attend")
        return self._total


def _prepend(first: AttentionState, rest: AttentionState) -> AttentionState:
    return AttentionState(
        m=torch.cat((first.m.unsqueeze(0), rest.m)),
        l=torch.cat((first.l.unsqueeze(0), rest.l)),
        u=torch.cat((first.u.unsqueeze(0), rest.u)),
        frame=first.frame,
    )


class Attention:
    """Attends rows of one engine's store. Single-threaded: the engine's lock is held."""

    def __init__(
        self,
        store: Rows,
        clock: Callable[[], float],
        executor: Executor | None,
        buffers: Sequence[StagingBuffer],
    ) -> None:
        self._store = store
        self._clock = clock
        self._executor = executor
        self._buffers = list(buffers)

    def exact(self, plan: Plan, append: Append, query: Query) -> Attended:
        """All visible rows of the plan. DEADLINE between chunks; typed errors of tiers."""

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
        return self._run(plan, append, query, state, batch=batch)

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

    def selected(
        self, plan: Plan, append: Append, query: Query, positions: Sequence[NDArray[np.int64]]
    ) -> Attended:
        """Only rows at `positions` (ascending, one array per KV head), still one state per aligned chunk.
        The plan holds exactly the chunks with a row of some head."""
        size = self._store.layout.chunk_tokens
        heads = len(positions)
        group = query.q.shape[1] // heads

        def state(read: ChunkRead, k: Tensor, v: Tensor) -> Iterator[AttentionState]:
            first = read.chunk * size
            parts = []
            for head, rows in enumerate(positions):
                lo, hi = np.searchsorted(rows, (first, first + size))
                q = query.q[:, head * group : (head + 1) * group]
                if lo == hi:
                    parts.append(identity((q.shape[0], group), q.shape[2], query.frame))
                    continue
                chosen = torch.from_numpy(rows[lo:hi])
                local = chosen - first
                parts.append(
                    chunk_state(
                        q,
                        k[:, head].index_select(0, local).unsqueeze(1),
                        v[:, head].index_select(0, local).unsqueeze(1),
                        scale=query.frame.scale,
                        q_pos0=query.first_position,
                        row_pos0=chosen,
                        frame=query.frame,
                    )
                )
            yield AttentionState(
                m=torch.cat([part.m for part in parts], dim=1),
                l=torch.cat([part.l for part in parts], dim=1),
                u=torch.cat([part.u for part in parts], dim=1),
                frame=query.frame,
            )

        return self._run(plan, append, query, state, batch=False)

    def _run(
        self,
        plan: Plan,
        append: Append,
        query: Query,
        states_of: Callable[[ChunkRead, Tensor, Tensor], Iterator[AttentionState]],
        *,
        batch: bool,
    ) -> Attended:
        fold = _Fold(query)
        bytes_by_tier: dict[str, int] = {}
        with (
            self._leases(plan),
            self._staged(plan, query.deadline) as staged,
        ):
            for read in plan.reads:
                if query.deadline is not None and self._clock() > query.deadline:
                    raise CoreError(
                        Reason.DEADLINE,
                        f"the deadline passed before chunk {read.chunk}",
                        {"chunk": read.chunk, "chunks": len(plan.reads)},
                    )
                if batch and read.path is Path.PARTIAL and read.rows == self._store.layout.chunk_tokens:
                    fold.add_full(self._view(read))
                else:
                    k, v = self._rows(read, append, staged)
                    for state in states_of(read, k, v):
                        fold.add(state)
                self._account(read, bytes_by_tier)
            out, _ = finalize(fold.result())
        return Attended(out, bytes_by_tier, staged.stall_seconds)

    @contextmanager
    def _leases(self, plan: Plan) -> Iterator[None]:
        """Holds what another thread reads. Rows attended in place are held by the engine's lock."""
        lines = [read.line for read in plan.reads if read.path is Path.STAGED]
        if not lines:
            yield
            return
        self._store.directory.readers[lines] += 1
        try:
            yield
        finally:
            self._store.directory.readers[lines] -= 1

    @contextmanager
    def _staged(self, plan: Plan, deadline: float | None) -> Iterator[StagedReads]:
        """A buffer whose read outlasts the frame is never used again."""
        reads = StagedReads(self._jobs(plan), self._buffers, self._executor, self._clock, deadline)
        try:
            with reads:
                yield reads
        finally:
            for buffer in reads.abandoned:
                self._buffers[self._buffers.index(buffer)] = StagingBuffer(self._store.layout)

    def _jobs(self, plan: Plan) -> list[Job]:
        return [self._store.staging_job(read.line) for read in plan.reads if read.path is Path.STAGED]

    def _rows(self, read: ChunkRead, append: Append, staged: StagedReads) -> tuple[Tensor, Tensor]:
        store = self._store
        if read.path is Path.FRAME:
            lo = read.chunk * store.layout.chunk_tokens - append.first
            return append.k[lo : lo + read.rows], append.v[lo : lo + read.rows]
        if read.path is Path.STAGED:
            return store.layout.rows(staged.next().payload, read.rows)
        return store.layout.rows(self._view(read), read.rows)

    def _view(self, read: ChunkRead) -> Tensor:
        ref: SlotRef = self._store.ref(read.line)
        return self._store.tiers[read.tier].view(ref)

    def _account(self, read: ChunkRead, bytes_by_tier: dict[str, int]) -> None:
        if read.path is Path.FRAME:
            return
        layout = self._store.layout
        name = self._store.tiers[read.tier].name
        size = layout.payload_bytes if read.path is Path.STAGED else read.rows * layout.row_bytes
        bytes_by_tier[name] = bytes_by_tier.get(name, 0) + size
