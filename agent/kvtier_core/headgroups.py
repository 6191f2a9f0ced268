"""Attention over a history that comes in slices of KV heads, two buffers in turn (HeadInfer, specification
E.4).

Why it exists: with one group of heads at a time, what is held at once is a group's rows and not all heads'
rows. Each head still sees its full support, and a slice's state has the bits of the same heads of a whole
chunk, so the answer is that of every other plan. It must not know sessions or why this plan was chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtier_core.appends import Append, Rows
from kvtier_core.arrivals import Meter
from kvtier_core.cost import KvGeometry
from kvtier_core.errors import CoreError, Reason
from kvtier_core.exact_placements import HeadGroup, HeadGroupStaging, PlacementRefused
from kvtier_core.folding import Fold, Query
from kvtier_core.layout import FLOAT_BYTES
from kvtier_core.planner import ChunkRead, Path, Plan
from kvtier_core.streaming import READ_TIMEOUT_SECONDS
from kvtier_core.tiers.base import PoolTier
from kvtier_kernels.ops.chunk_attention import chunk_state
from kvtier_kernels.ops.chunk_attention.decode import reads_in_place
from kvtier_kernels.state import AttentionState


@dataclass(frozen=True, slots=True)
class Sliced:
    """state: of all heads, in model order. groups: what was in which buffer when. buffer_bytes: both
    buffers."""

    state: AttentionState
    groups: tuple[HeadGroup, ...]
    transfer_seconds: float
    stall_seconds: float
    buffer_bytes: int


class HeadGroups:
    """Two slice buffers of one engine, made when first needed. One frame at a time."""

    def __init__(self, store: Rows, clock: Callable[[], float], executor: Executor | None) -> None:
        self._store = store
        self._clock = clock
        self._executor = executor
        self._memory = torch.empty(0)

    def run(self, plan: Plan, append: Append, query: Query) -> Sliced:
        """The plan's chunks, group by group. DEADLINE between chunks and while a slice is awaited;
        TRANSFER_TIMEOUT when a slice hangs before it."""
        run = _Run(self._store, self._clock, self._executor, plan, append, query)
        floats = 2 * run.slice_floats
        if self._memory.numel() < floats:
            with torch.inference_mode(mode=False):
                self._memory = torch.empty(floats)
        try:
            return run.all(self._memory)
        except BaseException:
            # A copy may still be under way into it.
            self._memory = torch.empty(0)
            raise


class _Run:
    def __init__(
        self,
        store: Rows,
        clock: Callable[[], float],
        executor: Executor | None,
        plan: Plan,
        append: Append,
        query: Query,
    ) -> None:
        self._store = store
        self._clock = clock
        self._executor = executor
        self._plan = plan
        self._append = append
        self._query = query
        self._meter = Meter(clock)
        layout = store.layout
        self._group = plan.group_heads
        self._sliced = [read for read in plan.reads if read.path is Path.SLICED]
        self._each = 2 * self._group * layout.chunk_tokens * layout.head_dim
        self.slice_floats = len(self._sliced) * self._each
        size, d = layout.chunk_tokens, layout.head_dim
        self._batch = query.q.shape[0] == 1 and reads_in_place(size, d)

    def all(self, memory: Tensor) -> Sliced:
        layout, clock = self._store.layout, self._clock
        spans = [
            (low, min(low + self._group, layout.kv_heads)) for low in range(0, layout.kv_heads, self._group)
        ]
        buffers = (memory[: self.slice_floats], memory[self.slice_floats : 2 * self.slice_floats])
        groups: list[HeadGroup] = []
        states: list[AttentionState] = []
        stall = 0.0
        filling = self._fill(buffers[0], spans[0])
        begun = clock()
        for index, span in enumerate(spans):
            waited = clock()
            self._await(filling)
            stall += clock() - waited
            filled, buffer = begun, buffers[index % 2]
            if index + 1 < len(spans):
                begun = clock()
                filling = self._fill(buffers[(index + 1) % 2], spans[index + 1])
            states.append(self._attend(buffer, span))
            groups.append(HeadGroup(tuple(range(*span)), index % 2, filled, clock()))
        self._check(groups)
        return Sliced(
            _concatenated(states),
            tuple(groups),
            self._meter.seconds,
            stall,
            min(2, len(spans)) * self.slice_floats * FLOAT_BYTES,
        )

    def _fill(self, buffer: Tensor, span: tuple[int, int]) -> Future[None] | None:
        """Begins to copy the heads' rows of every sliced chunk; None: it is done."""
        if not self._sliced:
            return None
        payloads = [self._payload(read) for read in self._sliced]
        if self._executor is None:
            self._copy(buffer, span, payloads)
            return None
        return self._executor.submit(self._copy, buffer, span, payloads)

    def _copy(self, buffer: Tensor, span: tuple[int, int], payloads: Sequence[Tensor]) -> None:
        self._meter.begin()
        try:
            with torch.inference_mode(mode=False):
                for at, payload in enumerate(payloads):
                    self._slice(buffer, at, span).copy_(payload[:, span[0] : span[1]])
        finally:
            self._meter.end()

    def _slice(self, buffer: Tensor, at: int, span: tuple[int, int]) -> Tensor:
        layout = self._store.layout
        heads = span[1] - span[0]
        floats = 2 * heads * layout.chunk_tokens * layout.head_dim
        flat = buffer[at * self._each : at * self._each + floats]
        return flat.view(2, heads, layout.chunk_tokens, layout.head_dim)

    def _await(self, filling: Future[None] | None) -> None:
        if filling is None:
            return
        deadline = self._query.deadline
        left = READ_TIMEOUT_SECONDS
        if deadline is not None:
            left = max(0.0, min(left, deadline - self._clock()))
        try:
            filling.result(timeout=left)
        except FutureTimeout as error:
            if left < READ_TIMEOUT_SECONDS:
                raise CoreError(Reason.DEADLINE, "the deadline passed while a slice was copied") from error
            message = f"a slice was not copied within {left:.3f} s"
            raise CoreError(Reason.TRANSFER_TIMEOUT, message) from error

    def _payload(self, read: ChunkRead) -> Tensor:
        tier = self._store.tiers[read.tier]
        assert isinstance(tier, PoolTier)
        ref = self._store.ref(read.line)
        tier.slots.check(ref)
        return tier.payload(ref.slot)

    def _attend(self, buffer: Tensor, span: tuple[int, int]) -> AttentionState:
        """The group's queries over every chunk, ascending."""
        query, size = self._query, self._store.layout.chunk_tokens
        group = query.q.shape[1] // self._store.layout.kv_heads
        # A copy, since a kernel may read its queries flat.
        q = query.q[:, span[0] * group : span[1] * group].contiguous()
        fold = Fold(Query(q, query.first_position, query.frame, query.deadline))
        at = 0
        for read in self._plan.reads:
            if query.deadline is not None and self._clock() > query.deadline:
                raise CoreError(Reason.DEADLINE, f"the deadline passed before chunk {read.chunk}")
            if read.path is Path.FRAME:
                low = read.chunk * size - self._append.first
                k = self._append.k[low : low + read.rows, span[0] : span[1]]
                v = self._append.v[low : low + read.rows, span[0] : span[1]]
            else:
                if read.path is Path.SLICED:
                    payload = self._slice(buffer, at, span)
                    at += 1
                else:
                    payload = self._payload(read)[:, span[0] : span[1]]
                if self._batch and read.rows == size:
                    fold.add_full(payload)
                    continue
                k, v = self._store.layout.rows(payload, read.rows)
            fold.add(
                chunk_state(
                    q,
                    k,
                    v,
                    scale=query.frame.scale,
                    q_pos0=query.first_position,
                    row_pos0=read.chunk * size,
                    frame=query.frame,
                )
            )
        return fold.result()

    def _check(self, groups: Sequence[HeadGroup]) -> None:
        """That this was HeadInfer's contract: each KV head once, in model order, no buffer filled while it
        was read."""
        layout = self._store.layout
        geometry = KvGeometry(
            1, self._query.q.shape[1], layout.kv_heads, layout.head_dim, FLOAT_BYTES, FLOAT_BYTES
        )
        order = tuple(head for group in groups for head in group.heads)
        try:
            HeadGroupStaging(geometry, self._group, tuple(groups), order).check()
        except PlacementRefused as refused:
            raise CoreError(Reason.INTERNAL, str(refused)) from refused


def _concatenated(states: Sequence[AttentionState]) -> AttentionState:
    """Along the heads, in the order of the groups."""
    return AttentionState(
        m=torch.cat([state.m for state in states], dim=1),
        l=torch.cat([state.l for state in states], dim=1),
        u=torch.cat([state.u for state in states], dim=1),
        frame=states[0].frame,
        estimated=any(state.estimated for state in states),
    )
