# mypy: disable-error-code="import-untyped,no-untyped-def"
"""Paged decode on a GPU: one program per request, KV head and aligned chunk, then an ascending merge.

It exists for Hopper; here it is compiled ahead of time and run in the interpreter, which prove its
semantics and its resources, never its speed. It must not know who filled the pages.

Maths, per program over the rows of one chunk (logits in base 2 inside, natural at the boundary):
    s = (q . k) scale log2(e);  m' = max(m, max s);  p = 2^(s - m');  l = l 2^(m - m') + sum p
    u = u 2^(m - m') + p V, with m' = 0 in exponents while it is still -inf.
Hazards: page ids times strides overflow int32, so page ids are widened first; rows beyond the length
are masked to 0 on load, since 0 * NaN is NaN; after a load everything is float32 except dot operands.
"""

from __future__ import annotations

import os

# Triton 3.10 turns FP fusion off by default; recorded resources and bits must not move with it.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtier_kernels.ops.chunk_attention import ShapeError
from kvtier_kernels.ops.paged_decode.torch_impl import check_inputs
from kvtier_kernels.state import AttentionState, LogitFrame

LOG2_E = 1.4426950408889634
BLOCK_M = 16
BLOCK_N = 64
NUM_WARPS = 4
# Latency of the pipeline is (stages - 1) // 2 with the page table's indirection: 5 gives two buffers.
NUM_STAGES = 5


@triton.jit  # type: ignore[untyped-decorator]
def split_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    lens_ptr,
    m_ptr,
    l_ptr,
    u_ptr,
    qk_scale,
    stride_qb,
    stride_qh,
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
    """m, l [B, S, Hq] and u [B, S, Hq, D] of split `program_id(2)`; strides in elements."""
    b = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    n = tl.load(lens_ptr + b)
    lo = split * SPLIT
    hi = tl.minimum(n, lo + SPLIT)

    rows = tl.arange(0, BM)
    cols = tl.arange(0, D)
    tokens = tl.arange(0, BN)
    live = rows < G
    heads = kv_head * G + rows
    q_at = q_ptr + b.to(tl.int64) * stride_qb + heads.to(tl.int64)[:, None] * stride_qh + cols[None, :]
    q = tl.load(q_at, mask=live[:, None], other=0.0)

    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    u = tl.zeros([BM, D], tl.float32)
    k_head = k_ptr + kv_head.to(tl.int64) * stride_kh
    v_head = v_ptr + kv_head.to(tl.int64) * stride_vh
    table = table_ptr + b.to(tl.int64) * stride_tb
    for start in range(lo, hi, BN):
        at = start + tokens
        seen = at < hi
        page = tl.load(table + at // PAGE, mask=seen, other=0).to(tl.int64)
        slot = (at % PAGE).to(tl.int64)
        k_at = k_head + (page * stride_kp + slot * stride_kt)[None, :] + cols[:, None]
        v_at = v_head + (page * stride_vp + slot * stride_vt)[:, None] + cols[None, :]
        k = tl.load(k_at, mask=seen[None, :], other=0.0)
        v = tl.load(v_at, mask=seen[:, None], other=0.0)
        s = tl.dot(q, k, input_precision="ieee") * qk_scale
        s = tl.where(seen[None, :], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        anchor = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s - anchor[:, None])
        fade = tl.exp2(m - anchor)
        l = l * fade + tl.sum(p, 1)
        u = u * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        m = m_new

    out = (b * splits + split).to(tl.int64) * (HK * G) + heads
    tl.store(m_ptr + out, m * 0.6931471805599453, mask=live)
    tl.store(l_ptr + out, l, mask=live)
    tl.store(u_ptr + out[:, None] * D + cols[None, :], u, mask=live[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def merge_kernel(
    m_ptr,
    l_ptr,
    u_ptr,
    m_out,
    l_out,
    u_out,
    splits,
    HQ: tl.constexpr,
    D: tl.constexpr,
):
    """Left fold of [B, S, HQ] states over S, ascending; one program per request and query head."""
    b = tl.program_id(0)
    h = tl.program_id(1)
    cols = tl.arange(0, D)
    base = (b * splits).to(tl.int64) * HQ + h
    m = tl.load(m_ptr + base)
    l = tl.load(l_ptr + base)
    u = tl.load(u_ptr + base * D + cols)
    for s in range(1, splits):
        at = base + s * HQ
        mb = tl.load(m_ptr + at)
        lb = tl.load(l_ptr + at)
        ub = tl.load(u_ptr + at * D + cols)
        m_new = tl.maximum(m, mb)
        anchor = tl.where(m_new == float("-inf"), 0.0, m_new)
        wa = tl.exp2((m - anchor) * 1.4426950408889634)
        wb = tl.exp2((mb - anchor) * 1.4426950408889634)
        l = wa * l + wb * lb
        u = wa * u + wb * ub
        m = m_new
    out = (b * HQ + h).to(tl.int64)
    tl.store(m_out + out, m)
    tl.store(l_out + out, l)
    tl.store(u_out + out * D + cols, u)


def paged_decode_triton(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    split_tokens: int = 256,
) -> AttentionState:
    """See the package. q and caches of one dtype: float32, float16 or bfloat16; d a power of two >= 16;
    at most 16 query heads a KV head. Every stride but the last must be a multiple of 16 elements, since
    one odd stride silently costs the asynchronous copies. Raises ShapeError."""
    check_inputs(q, k_cache, v_cache, page_table, seq_lens, split_tokens)
    batch, hq, d = q.shape
    _, page, hk, _ = k_cache.shape
    if not (q.dtype == k_cache.dtype == v_cache.dtype):
        raise ShapeError(f"one dtype for q, k and v, got {q.dtype}, {k_cache.dtype}, {v_cache.dtype}")
    if d < 16 or d & (d - 1) or hq // hk > BLOCK_M:
        raise ShapeError(f"head dim {d} is no power of two >= 16, or {hq // hk} query heads share a KV head")
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if x.stride(-1) != 1 or any(s % 16 for s in x.stride()[:-1]):
            raise ShapeError(f"strides of {name} {x.stride()} are not multiples of 16 before a last of 1")
    if page_table.stride(-1) != 1:
        raise ShapeError("page_table's last dimension must be contiguous")
    splits = max(1, -(-page_table.shape[1] * page // split_tokens))
    m, l, u = _empty(q, (batch, splits, hq), d)
    split_kernel[(batch, hk, splits)](
        q,
        k_cache,
        v_cache,
        page_table,
        seq_lens,
        m,
        l,
        u,
        scale * LOG2_E,
        *q.stride()[:2],
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
    m_out, l_out, u_out = _empty(q, (batch, hq), d)
    merge_kernel[(batch, hq)](m, l, u, m_out, l_out, u_out, splits, HQ=hq, D=d, num_warps=1)
    return AttentionState(m=m_out, l=l_out, u=u_out, frame=LogitFrame(scale))


def _empty(like: Tensor, shape: tuple[int, ...], d: int) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.empty(shape, dtype=torch.float32, device=like.device),
        torch.empty(shape, dtype=torch.float32, device=like.device),
        torch.empty((*shape, d), dtype=torch.float32, device=like.device),
    )
