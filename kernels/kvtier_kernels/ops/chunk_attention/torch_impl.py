"""Attention of some queries over one chunk of rows on the CPU, with bits that depend on nothing else.

The exact path computes one state per aligned chunk of rows and merges them in ascending order. That
is only "exact" as a test, not a tolerance, if the state of a chunk is the same bits however it was
asked for: one query or a block of 256, the chunk still open or sealed, its rows in this buffer or in
that one, by the compiled kernels or by plain tensor operations. It must not know where rows live or which
chunk this is. Held by tests/unit/kernels/test_chunk_bits.py and test_compiled_bits.py.

Rows are read where they are when their last dimension is contiguous and a multiple of 16, whatever their
alignment; else they are copied once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from kvtier_kernels.compiled import library
from kvtier_kernels.compiled.layout import LANES
from kvtier_kernels.ops.chunk_attention.jobs import jobs_of, of_block, readable, tables
from kvtier_kernels.ops.chunk_attention.plain import States, state_plain
from kvtier_kernels.state import AttentionState, LogitFrame, identity

if TYPE_CHECKING:
    from kvtier_kernels.compiled.machine import Library


class ShapeError(ValueError):
    """A tensor does not have the shape, dtype or layout that the operation states."""


def chunk_state(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    q_pos0: int,
    row_pos0: int | Tensor,
    frame: LogitFrame | None = None,
) -> AttentionState:
    """State of each query over the rows of one chunk that it may see.

    q: float32 [Nq, Hq, d]; k, v: float32 [R, Hk, d], CPU; Hq a multiple of Hk; R may be 0.
    row_pos0: position of row 0 when rows are consecutive, or int64 [R] ascending positions (rows
    gathered by a selector). Query i stands at q_pos0 + i and sees rows at positions up to its own.
    frame: what the logits mean; default LogitFrame(scale). Its scale must equal `scale`.
    Returns a state with m, l [Nq, Hq] and u [Nq, Hq, d]; queries that see no row get the identity.
    A non-finite K or V reaches only the queries that see its row. Raises ShapeError.
    """
    _check(q, k, v)
    if frame is None:
        frame = LogitFrame(scale)
    elif frame.scale != scale:
        raise ShapeError(f"frame says scale {frame.scale}, the call says {scale}")
    check_uncapped(frame)
    nq, hq, d = q.shape
    seen = _seen(row_pos0, k.shape[0], q_pos0, nq)
    if nq == 0 or not seen[-1]:
        return identity((nq, hq), d, frame)
    scaled = q * scale
    compiled = library()
    if compiled is not None:
        m, l, u = _compiled(compiled, scaled, k, v, seen)
        return AttentionState(m=m, l=l, u=u, frame=frame)
    first = int(np.searchsorted(seen, 1))
    m, l, u = state_plain(scaled[first:].contiguous(), k, v, torch.from_numpy(seen[first:]))
    if first:
        none = identity((first, hq), d, frame)
        m, l, u = (torch.cat(pair) for pair in ((none.m, m), (none.l, l), (none.u, u)))
    return AttentionState(m=m, l=l, u=u, frame=frame)


def check_uncapped(frame: LogitFrame) -> None:
    """Who does not cap logits says so of no state. Raises ShapeError."""
    if frame.softcap is not None:
        raise ShapeError(f"logits are not capped here, and the frame says softcap {frame.softcap}")


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or q.shape[2] != k.shape[2]:
        raise ShapeError(
            f"want q [Nq,Hq,d], k and v [R,Hk,d], got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ShapeError(f"{q.shape[1]} query heads do not divide over {k.shape[1]} KV heads")
    if not (q.dtype == k.dtype == v.dtype == torch.float32):
        raise ShapeError(f"chunk_state computes in float32, got {q.dtype}, {k.dtype}, {v.dtype}")
    if not (q.is_cpu and k.is_cpu and v.is_cpu):
        # What is handed on are bare addresses, and one of a device's memory would end the process.
        raise ShapeError(f"chunk_state reads CPU memory, not {q.device}, {k.device}, {v.device}")


def _seen(row_pos0: int | Tensor, rows: int, q_pos0: int, queries: int) -> np.ndarray:
    """How many rows each query sees: a prefix, since positions ascend. int64 [Nq]."""
    if isinstance(row_pos0, int):
        if queries == 1:
            return np.array([min(rows, max(0, q_pos0 - row_pos0 + 1))], np.int64)
        return np.clip(np.arange(q_pos0 - row_pos0 + 1, q_pos0 - row_pos0 + 1 + queries), 0, rows)
    if row_pos0.shape != (rows,) or row_pos0.dtype != torch.int64:
        raise ShapeError(f"want int64 positions [{rows}], got {row_pos0.dtype} {tuple(row_pos0.shape)}")
    return np.searchsorted(row_pos0.numpy(), np.arange(q_pos0, q_pos0 + queries), side="right")


def _compiled(compiled: Library, scaled: Tensor, k: Tensor, v: Tensor, seen: np.ndarray) -> States:
    nq, hq, d = scaled.shape
    rows, heads, _ = k.shape
    spare = -d % LANES
    if spare:
        scaled, k, v = pad(scaled, (0, spare)), pad(k, (0, spare)), pad(v, (0, spare))
    k, v = (x if readable(x) else x.contiguous() for x in (k, v))
    q = scaled.contiguous().view(nq, heads, hq // heads, d + spare)
    table = tables(np.array([k.data_ptr()]), np.array([v.data_ptr()]), 4 * k.stride(0), 4 * v.stride(0), rows)
    strides = (4 * k.stride(0), 4 * k.stride(1), 4 * v.stride(0), 4 * v.stride(1))
    job = jobs_of(table, 1, -(-rows // LANES), strides, rows)
    for apart in (False, True):
        state = identity((nq, hq), d + spare, LogitFrame(1.0))
        totals = (state.m, state.l, state.u)
        work = of_block(job, seen, hq // heads, apart=apart)
        compiled.attend(q, work.jobs, work.queries, work.slots, work.seen, totals)
        # A weight of 0 does not hide what is not finite, so then no query meets what it does not see.
        if len(work.queries) == 1 or work.seen[0] == seen[-1] or bool(torch.isfinite(state.u).all()):
            break
    return (state.m, state.l, state.u[..., :d].contiguous() if spare else state.u)
