# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator"
"""Paged decode on a GPU: one program per request, KV head and aligned chunk, then an ascending merge.

It exists for Hopper; here it is compiled ahead of time and run in the interpreter, which prove its
semantics and its resources, never its speed. It must not know who filled the pages.

Maths, per program over the rows of one chunk (logits in base 2 inside, natural at the boundary):
s = (q . k) scale log2(e), or cap log2(e) tanh((q . k) scale / cap), folded into (m, l, u) tile by tile
(`attention_jit.fold_tile`). With a window a request's programs begin with the chunk of its oldest row, and
only rows of the window are read. An option that is None is not compiled.
Hazards: page ids times strides overflow int32, so page ids are widened first; rows beyond the length
are masked to 0 on load, since 0 * NaN is NaN; after a load everything is float32 except dot operands.
"""

from __future__ import annotations

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
    tanh_tile,
)
from kvtier_kernels.ops.chunk_attention import ShapeError
from kvtier_kernels.ops.merge_states.triton_impl import merge_into
from kvtier_kernels.ops.paged_decode.arguments import check_inputs, frame_of, room
from kvtier_kernels.state import AttentionState, States

# Latency of the pipeline is (stages - 1) // 2 with the page table's indirection: 5 gives two buffers.
NUM_STAGES = 5


@triton.jit
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
    window,
    cap,
    HK: tl.constexpr,
    G: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    SPLIT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """m, l [B, S, Hq] and u [B, S, Hq, D] of split `program_id(2)` from the first one that the request sees;
    strides in elements. window: rows, or None. cap: softcap log2(e), qk_scale then being scale / softcap, or
    None."""
    b = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    n = tl.load(lens_ptr + b)
    lo = split * SPLIT
    if window is not None:
        oldest = tl.maximum(n - window, 0)
        lo += oldest // SPLIT * SPLIT
    hi = tl.minimum(n, lo + SPLIT)
    begin = lo
    if window is not None:
        begin = lo + tl.maximum(oldest - lo, 0) // BN * BN

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
    for start in range(begin, hi, BN):
        at = start + tokens
        seen = at < hi
        if window is not None:
            seen = seen & (at >= oldest)
        page = tl.load(table + at // PAGE, mask=seen, other=0).to(tl.int64)
        slot = (at % PAGE).to(tl.int64)
        k_at = k_head + (page * stride_kp + slot * stride_kt)[None, :] + cols[:, None]
        v_at = v_head + (page * stride_vp + slot * stride_vt)[:, None] + cols[None, :]
        k = tl.load(k_at, mask=seen[None, :], other=0.0)
        v = tl.load(v_at, mask=seen[:, None], other=0.0)
        s = tl.dot(q, k, input_precision="ieee") * qk_scale
        if cap is not None:
            s = tanh_tile(s) * cap
        s = tl.where(seen[None, :], s, float("-inf"))
        m, l, u = fold_tile(s, v, m, l, u)

    out = (b * splits + split).to(tl.int64) * (HK * G) + heads
    store_state(m_ptr, l_ptr, u_ptr, out, m, l, u, live, D)


def paged_decode_triton(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    split_tokens: int = 256,
    window: int | None = None,
    softcap: float | None = None,
    out: States | None = None,
) -> AttentionState:
    """See the package. q and caches of one dtype: float32, float16 or bfloat16; d a power of two >= 16;
    at most 16 query heads a KV head. Every stride but the last must be a multiple of 16 elements, since
    one odd stride silently costs the asynchronous copies. Raises ShapeError."""
    check_inputs(q, k_cache, v_cache, page_table, seq_lens, split_tokens, window, softcap)
    batch, hq, d = q.shape
    _, page, hk, _ = k_cache.shape
    check_layout(hq // hk, q=q, k_cache=k_cache, v_cache=v_cache)
    if page_table.stride(-1) != 1:
        raise ShapeError("page_table's last dimension must be contiguous")
    answer = room(out, q)
    frame = frame_of(scale, softcap)
    if not answer[0].numel():
        return AttentionState(*answer, frame=frame)
    most = page_table.shape[1] * page
    splits = max(1, -(-most // split_tokens))
    if window is not None:
        # So many splits hold rows of a window, wherever it begins; nothing longer than the table is a number.
        window = min(window, most)
        splits = min(splits, max(1, 1 - (1 - window) // split_tokens))
    m, l, u = empty_state(q, (batch, splits, hq), d)
    split_kernel[(batch, hk, splits)](
        q,
        k_cache,
        v_cache,
        page_table,
        seq_lens,
        m,
        l,
        u,
        scale * LOG2_E if softcap is None else scale / softcap,
        *q.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        page_table.stride(0),
        window,
        None if softcap is None else softcap * LOG2_E,
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
    merge_into(m, l, u, None, answer)
    return AttentionState(*answer, frame=frame)
