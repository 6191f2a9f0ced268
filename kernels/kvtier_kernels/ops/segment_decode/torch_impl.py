"""Segment decode on the CPU: q rotated once a run of rows, the chunk path over the run, merged ascending.

It must not know why rows moved. Runs are segments joined where one continues the other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvtier_kernels.ops.chunk_attention import ShapeError, chunk_state
from kvtier_kernels.ops.gather import head_rows
from kvtier_kernels.state import AttentionState, LogitFrame, identity, merge_ascending


def check_inputs(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seg_ptr: Tensor,
    seg_tok: Tensor,
    delta: Tensor,
    inv_freq: Tensor,
    split_tokens: int,
) -> None:
    """Shapes, dtypes and, on the CPU, segments. Raises ShapeError."""
    if q.dim() != 3 or k_cache.dim() != 4 or k_cache.shape != v_cache.shape:
        raise ShapeError(
            f"want q [B,Hq,d], caches [N,P,Hk,d], got {tuple(q.shape)}, {tuple(k_cache.shape)}, "
            f"{tuple(v_cache.shape)}"
        )
    batch, hq, d = q.shape
    _, page, hk, kd = k_cache.shape
    if kd != d or hk == 0 or hq % hk:
        raise ShapeError(f"q has {hq} heads of {d}, the cache {hk} of {kd}")
    ids = {"page_table": page_table, "seg_ptr": seg_ptr, "seg_tok": seg_tok, "delta": delta}
    if wrong := [name for name, x in ids.items() if x.dtype != torch.int32]:
        raise ShapeError(f"{', '.join(wrong)} must be int32")
    count = delta.numel()
    if page_table.shape[0] != batch or seg_ptr.shape != (batch + 1,) or seg_tok.shape != (count, 2):
        raise ShapeError(
            f"{batch} requests and {count} deltas, page_table {tuple(page_table.shape)}, "
            f"seg_ptr {tuple(seg_ptr.shape)}, seg_tok {tuple(seg_tok.shape)}"
        )
    if inv_freq.dim() != 1 or inv_freq.dtype != torch.float32 or 2 * inv_freq.numel() > d:
        raise ShapeError(f"inv_freq is float32 [r/2], r <= {d}, got {inv_freq.dtype} {tuple(inv_freq.shape)}")
    if split_tokens < 1 or split_tokens % page:
        raise ShapeError(f"a split of {split_tokens} tokens is not whole pages of {page}")
    if seg_tok.device.type == "cpu":
        _check_segments(seg_ptr, seg_tok, page_table.shape[1] * page)
        if page_table.device.type == "cpu":
            _check_pages(page_table, seg_ptr, seg_tok, page, k_cache.shape[0])


def _check_segments(seg_ptr: Tensor, seg_tok: Tensor, room: int) -> None:
    # In int64: a difference that wraps around ascends.
    steps = seg_ptr.long().diff()
    if int(seg_ptr[0]) != 0 or int(seg_ptr[-1]) != seg_tok.shape[0] or bool((steps < 0).any()):
        raise ShapeError(f"seg_ptr must ascend from 0 to {seg_tok.shape[0]}")
    if not seg_tok.numel():
        return
    if int(seg_tok.min()) < 0 or int(seg_tok.max()) > room or bool((seg_tok[:, 1] < seg_tok[:, 0]).any()):
        raise ShapeError(f"segments must lie in [0, {room}] and end where they begin or later")
    late = seg_tok[1:, 0] >= seg_tok[:-1, 1]
    late |= _opens(seg_ptr, seg_tok.shape[0])[1:]
    if not bool(late.all()):
        raise ShapeError("segments of a request must ascend and not overlap")


def _check_pages(page_table: Tensor, seg_ptr: Tensor, seg_tok: Tensor, page: int, pool: int) -> None:
    """Pages of rows in segments. An id below 0 would be a page counted from the pool's end."""
    owner = torch.repeat_interleave(torch.arange(page_table.shape[0]), seg_ptr.diff().long())
    first, end = seg_tok.long().unbind(1)
    some = end > first
    edges = page_table.new_zeros(page_table.shape[0], page_table.shape[1] + 1, dtype=torch.int64)
    one = torch.ones(int(some.sum()), dtype=torch.int64)
    edges.index_put_((owner[some], first[some] // page), one, accumulate=True)
    edges.index_put_((owner[some], -(-end[some] // page)), -one, accumulate=True)
    ids = page_table[edges.cumsum(1)[:, :-1] > 0]
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < pool:
        raise ShapeError(f"page ids of rows must lie in [0, {pool})")


def _opens(seg_ptr: Tensor, count: int) -> Tensor:
    """bool [count]: whether a segment is its request's first."""
    out = torch.zeros(count + 1, dtype=torch.bool, device=seg_ptr.device)
    out[seg_ptr[:-1].long()] = True
    return out[:count]


def join_runs(seg_ptr: Tensor, seg_tok: Tensor, delta: Tensor) -> Tensor:
    """Segments [NS,2] with each run of adjacent segments of equal delta as one, at the place of its first;
    the others of a run are empty. So cutting a segment changes no bit. Does not wait for a device."""
    count = seg_tok.shape[0]
    if not count:
        return seg_tok
    first, end = seg_tok.unbind(1)
    head = _opens(seg_ptr, count)
    head[1:] |= (first[1:] != end[:-1]) | (delta[1:] != delta[:-1])
    head[0] = True
    run = head.cumsum(0) - 1
    last = torch.zeros_like(end).scatter_reduce_(0, run, end, "amax", include_self=True)
    return torch.stack((first, torch.where(head, last[run], first)), 1)


def angles(delta: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """(cos, sin) float64 [NS, r/2] of delta * inv_freq; the product is exact up to float64's rounding."""
    angle = delta.double().unsqueeze(1) * inv_freq.double()
    return angle.cos(), angle.sin()


def rotate(x: Tensor, delta: Tensor, inv_freq: Tensor, *, interleaved: bool) -> Tensor:
    """x [NS,...,d] of any float dtype, segment i turned by -delta[i] * inv_freq, in float64;
    rounded to float32 and from there to x's dtype.

    So rotate(q, delta) . k = q . R(delta) k, and rotate(., -delta) undoes it within 2 ulp of a pair's length.
    """
    pairs = inv_freq.numel()
    lead = (x.shape[0], *(1,) * (x.dim() - 2), pairs)
    c, s = (t.view(lead) for t in angles(delta, inv_freq))
    wide = x.double()
    out = wide.clone()
    if interleaved:
        a, b = wide[..., 0 : 2 * pairs : 2], wide[..., 1 : 2 * pairs : 2]
        out[..., 0 : 2 * pairs : 2], out[..., 1 : 2 * pairs : 2] = a * c + b * s, b * c - a * s
    else:
        a, b = wide[..., :pairs], wide[..., pairs : 2 * pairs]
        out[..., :pairs], out[..., pairs : 2 * pairs] = a * c + b * s, b * c - a * s
    return out.float().to(x.dtype)


def segment_decode_torch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seg_ptr: Tensor,
    seg_tok: Tensor,
    delta: Tensor,
    inv_freq: Tensor,
    *,
    scale: float,
    interleaved: bool,
    split_tokens: int = 256,
) -> AttentionState:
    """See the package. Inputs of any float dtype; rows are widened to float32 after the gather."""
    check_inputs(q, k_cache, v_cache, page_table, seg_ptr, seg_tok, delta, inv_freq, split_tokens)
    batch, hq, d = q.shape
    page, hk = k_cache.shape[1:3]
    heads = torch.arange(hk)
    frame = LogitFrame(scale)
    owner = torch.repeat_interleave(torch.arange(batch), seg_ptr.diff().long())
    turned = rotate(q[owner], delta, inv_freq, interleaved=interleaved).float()
    runs = join_runs(seg_ptr, seg_tok, delta).tolist()
    parts: list[list[AttentionState]] = [[] for _ in range(batch)]
    for i, (b, (first, end)) in enumerate(zip(owner.tolist(), runs, strict=True)):
        for chunk in range(first // split_tokens * split_tokens, end, split_tokens):
            lo, hi = max(first, chunk), min(end, chunk + split_tokens)
            token = torch.arange(lo, hi)
            where = (page_table[b, token // page].long().expand(hk, -1), (token % page).expand(hk, -1), heads)
            k, v = (head_rows(x, *where).transpose(0, 1) for x in (k_cache, v_cache))
            parts[b].append(
                chunk_state(turned[i : i + 1], k, v, scale=scale, q_pos0=hi - 1, row_pos0=lo, frame=frame)
            )
    answers = [merge_ascending(own) if own else identity((1, hq), d, frame) for own in parts]
    answers.append(identity((0, hq), d, frame))
    return AttentionState(
        m=torch.cat([a.m for a in answers]),
        l=torch.cat([a.l for a in answers]),
        u=torch.cat([a.u for a in answers]),
        frame=frame,
    )
