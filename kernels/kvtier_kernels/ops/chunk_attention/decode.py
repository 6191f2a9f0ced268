"""One query over many full chunks: the states of `chunk_state`, bit for bit, at half the tensor calls.

It exists because a decode step is bound by the number of calls, not by arithmetic. Products stay one per
chunk, in place and in the shapes that `chunk_state` uses; what is element by element or row by row runs
over all chunks at once. It must not know where chunks live. Bit equality with `chunk_state` and `merge` is
held by tests/unit/kernels/test_decode_states.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvtier_kernels.ops.chunk_attention.torch_impl import (
    ALIGN_BYTES,
    QUERY_PAD,
    ROW_PAD,
    VALUE_BLOCK,
    ShapeError,
)
from kvtier_kernels.state import AttentionState, LogitFrame

_LOWEST = torch.finfo(torch.float32).min


def reads_in_place(rows: int, head_dim: int) -> bool:
    """Whether full chunks of `rows` rows can be given to `decode_states`: no row would need padding."""
    return rows % ROW_PAD == 0 and head_dim * 4 % ALIGN_BYTES == 0


def decode_states(
    q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], frame: LogitFrame
) -> AttentionState:
    """States of one query over each of n chunks, all of whose rows it sees.

    q: float32 [1, Hq, d]; keys, values: n times float32 [Hk, R, d], CPU, head-major, rows contiguous and
    64-byte aligned, `reads_in_place(R, d)`. Returns a state with m, l [n, 1, Hq] and u [n, 1, Hq, d].
    Raises ShapeError.
    """
    count = len(keys)
    if not count or q.dim() != 3 or q.shape[0] != 1:
        raise ShapeError(f"want q [1,Hq,d] and at least one chunk, got {tuple(q.shape)} and {count}")
    heads, rows, d = keys[0].shape
    hq = q.shape[1]
    if hq % heads or not reads_in_place(rows, d):
        raise ShapeError(f"{hq} query heads over {heads}, chunks of {rows} rows of {d}")
    group = hq // heads
    packed = (q * frame.scale).view(heads, group, d)
    qs = pad(packed, (0, 0, 0, -group % QUERY_PAD)) if group % QUERY_PAD else packed
    width = qs.shape[1]

    s = q.new_empty(count, heads, width, rows)
    for i, k in enumerate(keys):
        torch.bmm(qs, k.transpose(1, 2), out=s[i])
    m = s.amax(-1)
    p = s.sub_(m.clamp_min(_LOWEST).unsqueeze(-1)).exp_()
    total = p.sum(-1)
    u = q.new_empty(count, heads, width, d)
    part = torch.empty_like(u) if rows > VALUE_BLOCK else u
    for lo in range(0, rows, VALUE_BLOCK):
        hi = lo + VALUE_BLOCK
        into = part if lo else u
        for i, v in enumerate(values):
            torch.bmm(p[i, :, :, lo:hi], v[:, lo:hi], out=into[i])
        if lo:
            u += part
    return AttentionState(
        m=m[:, :, :group].reshape(count, 1, hq),
        l=total[:, :, :group].reshape(count, 1, hq),
        u=u[:, :, :group].reshape(count, 1, hq, d),
        frame=frame,
    )


def merge_stacked(state: AttentionState) -> AttentionState:
    """Left fold of `merge` over the first dimension, in its order.

    state: m, l [n, ..., Hq], u [n, ..., Hq, d], n >= 1. Returns m, l [..., Hq], u [..., Hq, d].
    """
    running = torch.cummax(state.m, 0).values
    anchor = running.clamp_min(_LOWEST)
    keep = torch.exp(running[:-1] - anchor[1:]).unsqueeze(-1)
    take = torch.exp(state.m - anchor).unsqueeze(-1)
    both = torch.cat((state.u, state.l.unsqueeze(-1)), -1)
    total = both[0]
    for i in range(1, both.shape[0]):
        total = torch.addcmul(keep[i - 1] * total, take[i], both[i])
    return AttentionState(m=running[-1], l=total[..., -1], u=total[..., :-1], frame=state.frame)
