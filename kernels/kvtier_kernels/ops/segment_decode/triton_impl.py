# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator"
"""Segment decode on a GPU: q rotated once a segment, then one program per request, KV head and aligned chunk.

It exists for Hopper; here it is compiled ahead of time and run in the interpreter, which prove its
semantics and its resources, never its speed. It must not know why rows moved.

Hazards: page ids times strides overflow int32, so page ids are widened first; rows outside a segment are
masked on load, since 0 * NaN is NaN. Tiles are aligned to the chunk, not to the segment: so delta 0 over
one segment computes what paged decode computes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtier_kernels.ops.attention_jit import (
    BLOCK_M,
    BLOCK_N,
    LOG2_E,
    NUM_WARPS,
    check_layout,
    empty_state,
    fold_tile,
    store_state,
)
from kvtier_kernels.ops.chunk_attention import ShapeError
from kvtier_kernels.ops.merge_states.triton_impl import merge_states_triton
from kvtier_kernels.ops.segment_decode.torch_impl import angles, check_inputs, join_runs
from kvtier_kernels.state import AttentionState, LogitFrame

NUM_STAGES = 5


@triton.jit
def rotate_kernel(
    q_ptr,
    owner_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    stride_qb,
    stride_qh,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    D: tl.constexpr,
):
    """out [NS, Hq, D]: q of the segment's request turned by minus its angle, in float64."""
    i = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1).to(tl.int64)
    heads = tl.num_programs(1)
    cols = tl.arange(0, D)
    if INTERLEAVED:
        pair = cols // 2
        first = cols % 2 == 0
        other = tl.where(first, cols + 1, cols - 1)
    else:
        first = cols < PAIRS
        pair = tl.where(first, cols, cols - PAIRS)
        other = tl.where(first, cols + PAIRS, cols - PAIRS)
    turns = cols < 2 * PAIRS
    b = tl.load(owner_ptr + i).to(tl.int64)
    row = q_ptr + b * stride_qb + h * stride_qh
    x = tl.load(row + cols).to(tl.float32).to(tl.float64)
    y = tl.load(row + other, mask=turns, other=0.0).to(tl.float32).to(tl.float64)
    c = tl.load(cos_ptr + i * PAIRS + pair, mask=turns, other=1.0)
    s = tl.load(sin_ptr + i * PAIRS + pair, mask=turns, other=0.0)
    turned = x * c + tl.where(first, y, -y) * s
    turned = tl.where(turns, turned, x).to(tl.float32)
    tl.store(out_ptr + (i * heads + h) * D + cols, turned.to(out_ptr.dtype.element_ty))


@triton.jit
def segment_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    seg_ptr,
    runs_ptr,
    m_ptr,
    l_ptr,
    u_ptr,
    qk_scale,
    stride_kp,
    stride_kt,
    stride_kh,
    stride_vp,
    stride_vt,
    stride_vh,
    stride_tb,
    HK: tl.constexpr,
    G: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    SPLIT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """m, l [B, splits, Hq] and u [B, splits, Hq, D] of split `program_id(2)`; q [NS, Hq, D] rotated."""
    b = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    lo = split * SPLIT

    rows = tl.arange(0, BM)
    cols = tl.arange(0, D)
    tokens = tl.arange(0, BN)
    live = rows < G
    heads = kv_head * G + rows
    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    u = tl.zeros([BM, D], tl.float32)
    k_head = k_ptr + kv_head.to(tl.int64) * stride_kh
    v_head = v_ptr + kv_head.to(tl.int64) * stride_vh
    table = table_ptr + b.to(tl.int64) * stride_tb
    for i in range(tl.load(seg_ptr + b), tl.load(seg_ptr + b + 1)):
        first = tl.maximum(tl.load(runs_ptr + 2 * i), lo)
        end = tl.minimum(tl.load(runs_ptr + 2 * i + 1), lo + SPLIT)
        stop = tl.where(end > first, end, lo)
        start = lo + (first - lo) // BN * BN
        q_at = q_ptr + (i * (HK * G) + heads).to(tl.int64)[:, None] * D + cols[None, :]
        q = tl.load(q_at, mask=live[:, None], other=0.0)
        for tile in range(start, stop, BN):
            at = tile + tokens
            seen = (at >= first) & (at < end)
            page = tl.load(table + at // PAGE, mask=seen, other=0).to(tl.int64)
            slot = (at % PAGE).to(tl.int64)
            k_at = k_head + (page * stride_kp + slot * stride_kt)[None, :] + cols[:, None]
            v_at = v_head + (page * stride_vp + slot * stride_vt)[:, None] + cols[None, :]
            k = tl.load(k_at, mask=seen[None, :], other=0.0)
            v = tl.load(v_at, mask=seen[:, None], other=0.0)
            s = tl.dot(q, k, input_precision="ieee") * qk_scale
            s = tl.where(seen[None, :], s, float("-inf"))
            m, l, u = fold_tile(s, v, m, l, u)

    out = (b * splits + split).to(tl.int64) * (HK * G) + heads
    store_state(m_ptr, l_ptr, u_ptr, out, m, l, u, live, D)


def rotate_triton(q: Tensor, owner: Tensor, delta: Tensor, inv_freq: Tensor, *, interleaved: bool) -> Tensor:
    """[NS,Hq,d] of q's dtype: q [B,Hq,d] of each segment's owner (int32 [NS]) turned by minus its angle."""
    count, heads, d = delta.numel(), q.shape[1], q.shape[2]
    out = torch.empty(count, heads, d, dtype=q.dtype, device=q.device)
    if out.numel():
        cos, sin = angles(delta, inv_freq)
        rotate_kernel[(count, heads)](
            q,
            owner,
            cos,
            sin,
            out,
            *q.stride()[:2],
            PAIRS=inv_freq.numel(),
            INTERLEAVED=interleaved,
            D=d,
            num_warps=1,
        )
    return out


def segment_decode_triton(
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
    """See the package. q and caches of one dtype: float32, float16 or bfloat16; d a power of two >= 16;
    at most 16 query heads a KV head; strides multiples of 16 elements; split_tokens a multiple of 64.
    Raises ShapeError."""
    check_inputs(q, k_cache, v_cache, page_table, seg_ptr, seg_tok, delta, inv_freq, split_tokens)
    batch, hq, d = q.shape
    _, page, hk, _ = k_cache.shape
    check_layout(hq // hk, q=q, k_cache=k_cache, v_cache=v_cache)
    if page_table.stride(-1) != 1 or split_tokens % BLOCK_N:
        raise ShapeError(f"page_table's last dimension must be contiguous, {split_tokens} a multiple of 64")
    splits = max(1, -(-page_table.shape[1] * page // split_tokens))
    frame = LogitFrame(scale)
    m, l, u = empty_state(q, (batch, splits, hq), d)
    if not m.numel():
        return AttentionState(m=m[:, 0], l=l[:, 0], u=u[:, 0], frame=frame)
    number = torch.arange(delta.numel(), dtype=torch.int32, device=q.device)
    owner = (torch.searchsorted(seg_ptr, number, right=True) - 1).int()
    turned = rotate_triton(q, owner, delta, inv_freq, interleaved=interleaved)
    segment_kernel[(batch, hk, splits)](
        turned,
        k_cache,
        v_cache,
        page_table,
        seg_ptr,
        join_runs(seg_ptr, seg_tok, delta).contiguous(),
        m,
        l,
        u,
        scale * LOG2_E,
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        page_table.stride(0),
        HK=hk,
        G=hq // hk,
        PAGE=page,
        D=d,
        SPLIT=split_tokens,
        BM=BLOCK_M,
        BN=BLOCK_N,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )
    return merge_states_triton(m, l, u, None, frame=frame, estimated=False)
