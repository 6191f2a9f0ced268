"""Single queries over many chunks: the states of `chunk_state`, bit for bit, in one call.

Why it exists: a decode step is bound by memory and by the number of calls, not by arithmetic. Chunks are read
where they are, and those that several queries share are read once for all of them. It must not know where
chunks live. Bit equality with `chunk_state` and `merge` is held by test_decode_states.py and
test_decode_many.py in tests/unit/kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvtier_kernels.compiled import library
from kvtier_kernels.ops.chunk_attention.jobs import grouped, one_each
from kvtier_kernels.ops.chunk_attention.plain import ROW_PAD, States, state_plain
from kvtier_kernels.ops.chunk_attention.runs import ChunkRun, chunk_runs
from kvtier_kernels.ops.chunk_attention.torch_impl import ShapeError, check_uncapped
from kvtier_kernels.state import AttentionState, LogitFrame, fold, identity

_LINE_BYTES = 64


@dataclass(frozen=True, slots=True)
class Reading:
    """A run, the queries (rows of q) that attend it, and how many rows of each of its chunks they see. What
    they do not see is not read."""

    run: ChunkRun
    queries: tuple[int, ...]
    visible: int


def reads_in_place(rows: int, head_dim: int) -> bool:
    """Whether full chunks of `rows` rows can be given to `decode_states`: no row would need padding."""
    return rows % ROW_PAD == 0 and head_dim * 4 % _LINE_BYTES == 0


def decode_states(
    q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], frame: LogitFrame
) -> AttentionState:
    """States of one query over each of n chunks, all of whose rows it sees.

    q: float32 [1, Hq, d]; keys, values: n times float32 [Hk, R, d], CPU, head-major, rows contiguous,
    `reads_in_place(R, d)`. Returns a state with m, l [n, 1, Hq] and u [n, 1, Hq, d]. Raises ShapeError.
    """
    count = len(keys)
    plain = q.dtype is torch.float32 and q.is_cpu
    if not count or q.dim() != 3 or q.shape[0] != 1 or not plain:
        raise ShapeError(f"want q float32 [1,Hq,d] and a chunk, got {q.dtype} {tuple(q.shape)} and {count}")
    check_uncapped(frame)
    heads, rows, d = keys[0].shape
    hq = q.shape[1]
    if hq % heads or not reads_in_place(rows, d):
        raise ShapeError(f"{hq} query heads over {heads}, chunks of {rows} rows of {d}")
    scaled = q * frame.scale
    runs = chunk_runs(keys, values)
    if q.shape[2] != d or any(run.keys[0].shape != keys[0].shape for run in runs):
        raise ShapeError(f"chunks are not all {heads} heads of {rows} rows of {q.shape[2]}")
    compiled = library()
    if compiled is None:
        found = [state_plain(scaled, *rows_of(run, i), all_of(run)) for run in runs for i in range(run.count)]
        m, l, u = (torch.stack(part) for part in zip(*found, strict=True))
        return AttentionState(m=m, l=l, u=u, frame=frame)
    state = identity((count, hq), d, frame)
    at = 0
    for run in runs:
        work = one_each(run.jobs, np.arange(at, at + run.count))
        totals = (state.m, state.l, state.u)
        grouped_q = scaled.contiguous().view(1, heads, hq // heads, d)
        compiled.attend(grouped_q, work.jobs, work.queries, work.slots, work.seen, totals)
        at += run.count
    return AttentionState(m=state.m[:, None], l=state.l[:, None], u=state.u[:, None], frame=frame)


def rows_of(run: ChunkRun, index: int) -> tuple[Tensor, Tensor]:
    """K and V [R, Hk, d] of one of its chunks."""
    return run.keys[index].transpose(0, 1), run.values[index].transpose(0, 1)


def all_of(run: ChunkRun) -> Tensor:
    return torch.tensor([run.rows])


def no_rows(batch: int, heads: int, head_dim: int) -> States:
    """(m, l [B, Hq], u [B, Hq, d]) into which `attend_into` merges."""
    state = identity((batch, heads), head_dim, LogitFrame(1.0))
    return state.m, state.l, state.u


def attend_into(totals: States, scaled: Tensor, readings: Sequence[Reading]) -> None:
    """Merges into each query's state those of its readings, in their order. scaled: float32 [B, Hq, d],
    queries times their scale; runs are of one geometry, `reads_in_place`."""
    compiled = library()
    batch, hq, d = scaled.shape
    if compiled is not None:
        heads = readings[0].run.keys[0].shape[0]
        group = hq // heads
        work = grouped([(each.run.jobs, each.queries, each.visible) for each in readings], group)
        q = scaled.contiguous().view(batch, heads, group, d)
        compiled.attend(q, work.jobs, work.queries, work.slots, work.seen, totals)
        return
    for each in readings:
        seen = torch.tensor([each.visible])
        for index in range(each.run.count):
            k, v = rows_of(each.run, index)
            for query in each.queries:
                state = state_plain(scaled[query : query + 1], k, v, seen)
                into = tuple(part[query] for part in totals)
                fold((into[0], into[1], into[2]), state)


def merge_stacked(state: AttentionState) -> AttentionState:
    """Left fold of `merge` over the first dimension, in its order.

    state: m, l [n, ..., Hq], u [n, ..., Hq, d], n >= 1. Returns m, l [..., Hq], u [..., Hq, d].
    """
    m, l, u = merge_first(state.m, state.l, state.u)
    return AttentionState(m=m, l=l, u=u, frame=state.frame, estimated=state.estimated)


def merge_first(m: Tensor, l: Tensor, u: Tensor) -> States:
    """`merge_stacked` of bare tensors."""
    if m.shape[0] == 1:
        return m[0], l[0], u[0]
    totals = m[0].clone(), l[0].clone(), u[0].clone()
    fold(totals, (m[1:], l[1:], u[1:]))
    return totals
