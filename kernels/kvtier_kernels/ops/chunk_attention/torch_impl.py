"""Attention of some queries over one chunk of rows on the CPU, with bits that depend on nothing else.

The exact path computes one state per aligned chunk of rows and merges them in ascending order. That
is only "exact" as a test, not a tolerance, if the state of a chunk is the same bits however it was
asked for: one query or a block of 256, the chunk still open or sealed, its rows in this buffer or in
that one. BLAS does not promise that, so the shapes are made regular here. It must not know where rows
live or which chunk this is.

Measured (torch 2.15, MKL, fp32), and held by tests/unit/kernels/test_chunk_bits.py:
- matrix products with 1-3 rows, or one query, take other paths: queries are padded to multiples of 4;
- a product over more than 128 rows is split by the library at a point that depends on the number of
  rows: the product with V runs in fixed blocks of 128 rows;
- a sum over a row of logits groups its lanes by length: rows are padded to a multiple of 64.

Fast inputs: k and v with a contiguous last dimension and 64-byte aligned rows are read in place when
the number of visible rows is a multiple of 64 (a sealed chunk); else they are copied once, padded.
Row-major [R, Hk, d] and head-major [Hk, R, d] viewed as [R, Hk, d] are equally good.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvtier_kernels.state import AttentionState, LogitFrame, identity

QUERY_PAD = 4
ROW_PAD = 64
VALUE_BLOCK = 128
ALIGN_BYTES = 64

_LOWEST = torch.finfo(torch.float32).min


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
    nq, hq, d = q.shape
    hk = k.shape[1]
    group = hq // hk
    visible, positions = _visible(row_pos0, k.shape[0], q_pos0 + nq - 1)
    if nq == 0 or visible == 0:
        return identity((nq, hq), d, frame)

    used = nq * group
    rows = (q * scale).view(nq, hk, group, d).transpose(0, 1).reshape(hk, used, d)
    qs = pad(rows, (0, 0, 0, -used % QUERY_PAD)) if used % QUERY_PAD else rows

    kr = _rows(k, visible)
    vr = _rows(v, visible)
    s = torch.bmm(qs, kr.transpose(1, 2))
    if kr.shape[1] != visible:
        s[:, :, visible:] = -torch.inf
    masked = _mask(s[:, :used, :visible].view(hk, nq, group, visible), q_pos0, row_pos0, positions)

    m = s.amax(-1)
    p = torch.exp(s - m.clamp_min(_LOWEST).unsqueeze(-1))
    u = _weighted(p, vr)
    if masked and not bool(torch.isfinite(u).all()):
        u = _weighted_guarded(p, vr)
    total = p.sum(-1)

    def unpack(x: Tensor) -> Tensor:
        rest = x.shape[2:]
        if nq == 1:
            return x[:, :used].reshape(1, hq, *rest)
        return x[:, :used].reshape(hk, nq, group, *rest).transpose(0, 1).reshape(nq, hq, *rest)

    return AttentionState(m=unpack(m), l=unpack(total), u=unpack(u), frame=frame)


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or q.shape[2] != k.shape[2]:
        raise ShapeError(
            f"want q [Nq,Hq,d], k and v [R,Hk,d], got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ShapeError(f"{q.shape[1]} query heads do not divide over {k.shape[1]} KV heads")
    if not (q.dtype == k.dtype == v.dtype == torch.float32):
        raise ShapeError(f"chunk_state computes in float32, got {q.dtype}, {k.dtype}, {v.dtype}")


def _visible(row_pos0: int | Tensor, rows: int, last_query: int) -> tuple[int, Tensor | None]:
    """Rows that the last query sees (a prefix, since positions ascend), and their positions if given."""
    if isinstance(row_pos0, int):
        return min(rows, max(0, last_query - row_pos0 + 1)), None
    if row_pos0.shape != (rows,) or row_pos0.dtype != torch.int64:
        raise ShapeError(f"want int64 positions [{rows}], got {row_pos0.dtype} {tuple(row_pos0.shape)}")
    visible = int(torch.searchsorted(row_pos0, last_query, right=True))
    return visible, row_pos0[:visible]


def _mask(s: Tensor, q_pos0: int, row_pos0: int | Tensor, positions: Tensor | None) -> bool:
    """Sets logits [Hk, Nq, G, R] of rows after their query to -inf; False if there are none."""
    nq, rows = s.shape[1], s.shape[3]
    if positions is None:
        assert isinstance(row_pos0, int)
        if row_pos0 + rows - 1 <= q_pos0:
            return False
        positions = torch.arange(row_pos0, row_pos0 + rows)
    elif int(positions[-1]) <= q_pos0:
        return False
    queries = torch.arange(q_pos0, q_pos0 + nq)
    hidden = positions.unsqueeze(0) > queries.unsqueeze(1)
    s.masked_fill_(hidden[None, :, None, :], -torch.inf)
    return True


def _rows(x: Tensor, visible: int) -> Tensor:
    """The first `visible` rows as [Hk, padded rows, d]; rows beyond are zeros, never foreign memory."""
    _, heads, d = x.shape
    step = ALIGN_BYTES // x.element_size()
    if (
        visible % ROW_PAD == 0
        and x.stride(2) == 1
        and x.stride(0) >= d
        and x.stride(0) % step == 0
        and (heads == 1 or x.stride(1) % step == 0)
        and x.data_ptr() % ALIGN_BYTES == 0
    ):
        return x[:visible].transpose(0, 1)
    out = x.new_empty(heads, -(-visible // ROW_PAD) * ROW_PAD, d)
    out[:, :visible].copy_(x[:visible].transpose(0, 1))
    out[:, visible:].zero_()
    return out


def _weighted(p: Tensor, v: Tensor) -> Tensor:
    """p [Hk, M, R] @ v [Hk, R, d] in fixed blocks of rows, ascending."""
    rows = p.shape[2]
    u = torch.bmm(p[:, :, :VALUE_BLOCK], v[:, :VALUE_BLOCK])
    for lo in range(VALUE_BLOCK, rows, VALUE_BLOCK):
        hi = lo + VALUE_BLOCK
        u += torch.bmm(p[:, :, lo:hi], v[:, lo:hi])
    return u


def _weighted_guarded(p: Tensor, v: Tensor) -> Tensor:
    """As `_weighted`, but a weight of 0 hides a non-finite V, which 0 * inf would not."""
    bad = ~torch.isfinite(v)
    u = _weighted(p, torch.where(bad, 0.0, v))
    for head, row in torch.nonzero(bad.any(-1)).tolist():
        weight = p[head, :, row].unsqueeze(-1)
        value = torch.where(bad[head, row], v[head, row], 0.0).unsqueeze(0)
        u[head] += torch.where(weight > 0, weight * value, 0.0)
    return u
