# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator"
"""Sparse paged decode on a GPU: one program per request, list and split of it, then an ascending merge.

It exists for Hopper; here it is compiled ahead of time and run in the interpreter, which prove its
semantics and its resources, never its speed. It must not know how units were chosen.

Hazards: page ids times strides overflow int32, so page ids are widened first; what is not attended is
masked on load, since 0 * NaN is NaN. A row is reached over two tables (unit, page), so the pipeline needs
three loads in flight for each buffer.
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
)
from kvtier_kernels.ops.chunk_attention import ShapeError
from kvtier_kernels.ops.merge_states.triton_impl import merge_states_triton
from kvtier_kernels.ops.sparse_paged_decode.torch_impl import check_inputs
from kvtier_kernels.state import AttentionState, LogitFrame

NUM_STAGES = 3


@triton.jit
def find_rows(units, table, at, hi, UNIT: tl.constexpr, PAGE: tl.constexpr):
    """Of tokens `at` [BN] of a list: place in it, slot in the page, page id, which is -1 for no row."""
    place = at // UNIT
    unit = tl.load(units + place, mask=at < hi, other=-1)
    token = unit * UNIT + at % UNIT
    page = tl.load(table + token // PAGE, mask=unit >= 0, other=-1)
    return place, token % PAGE, page


@triton.jit
def sparse_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    indptr_ptr,
    units_ptr,
    last_ptr,
    weight_ptr,
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
    LISTS: tl.constexpr,
    HEADS: tl.constexpr,
    HK: tl.constexpr,
    ROWS: tl.constexpr,
    UNIT: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    SPLIT: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """m, l [B, splits, Hq] and u [B, splits, Hq, D] of split `program_id(2)`; strides in elements.

    Program (b, h) attends with query heads [h * ROWS, (h+1) * ROWS), which share a list and a KV head.
    """
    b = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    own = b * LISTS + head * LISTS // HEADS
    kv_head = head * HK // HEADS
    first = tl.load(indptr_ptr + own)
    count = tl.load(indptr_ptr + own + 1) - first
    n = tl.where(count > 0, (count - 1) * UNIT + tl.load(last_ptr + own), 0)
    lo = split * SPLIT
    hi = tl.minimum(n, lo + SPLIT)

    rows = tl.arange(0, BM)
    cols = tl.arange(0, D)
    tokens = tl.arange(0, BN)
    live = rows < ROWS
    heads = head * ROWS + rows
    q_at = q_ptr + b.to(tl.int64) * stride_qb + heads.to(tl.int64)[:, None] * stride_qh + cols[None, :]
    q = tl.load(q_at, mask=live[:, None], other=0.0)

    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    u = tl.zeros([BM, D], tl.float32)
    k_head = k_ptr + kv_head.to(tl.int64) * stride_kh
    v_head = v_ptr + kv_head.to(tl.int64) * stride_vh
    table = table_ptr + b.to(tl.int64) * stride_tb
    # Where the next tile's rows lie is looked up one tile ahead, so that the loads of K and V do not wait
    # for two tables in a row; the pipeline then has nothing but K and V in it.
    place, row, page = find_rows(units_ptr + first, table, lo + tokens, hi, UNIT, PAGE)
    for start in range(lo, hi, BN):
        seen = page >= 0
        wide = tl.maximum(page, 0).to(tl.int64)
        slot = row.to(tl.int64)
        k_at = k_head + (wide * stride_kp + slot * stride_kt)[None, :] + cols[:, None]
        v_at = v_head + (wide * stride_vp + slot * stride_vt)[:, None] + cols[None, :]
        k = tl.load(k_at, mask=seen[None, :], other=0.0)
        v = tl.load(v_at, mask=seen[:, None], other=0.0)
        s = tl.dot(q, k, input_precision="ieee") * qk_scale
        if WEIGHTED:
            weight = tl.load(weight_ptr + first + place, mask=seen, other=0.0)
            s += weight[None, :] * 1.4426950408889634
        s = tl.where(seen[None, :], s, float("-inf"))
        m, l, u = fold_tile(s, v, m, l, u)
        place, row, page = find_rows(units_ptr + first, table, start + BN + tokens, hi, UNIT, PAGE)

    out = (b * splits + split).to(tl.int64) * (HEADS * ROWS) + heads
    store_state(m_ptr, l_ptr, u_ptr, out, m, l, u, live, D)


def sparse_paged_decode_triton(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    indptr: Tensor,
    units: Tensor,
    last_unit_len: Tensor,
    log_weight: Tensor | None,
    *,
    scale: float,
    unit_tokens: int,
    max_units: int | None = None,
    split_tokens: int = 256,
) -> AttentionState:
    """See the package. q and caches of one dtype: float32, float16 or bfloat16; d a power of two >= 16;
    at most 16 query heads a list; strides multiples of 16 elements; split_tokens a multiple of 64.
    Raises ShapeError."""
    lists = check_inputs(
        q, k_cache, v_cache, page_table, indptr, units, last_unit_len, log_weight, unit_tokens, max_units
    )
    batch, hq, d = q.shape
    page, hk = k_cache.shape[1:3]
    heads = hk if lists <= hk else hq
    check_layout(hq // heads, q=q, k_cache=k_cache, v_cache=v_cache)
    if page_table.stride(-1) != 1 or split_tokens < 1 or split_tokens % BLOCK_N:
        raise ShapeError(f"page_table's last dimension must be contiguous, {split_tokens} a multiple of 64")
    longest = int(indptr.diff().max()) if max_units is None and indptr.numel() > 1 else max_units or 0
    splits = max(1, -(-longest * unit_tokens // split_tokens))
    frame = LogitFrame(scale)
    m, l, u = empty_state(q, (batch, splits, hq), d)
    estimated = log_weight is not None
    if not m.numel():
        return AttentionState(m=m[:, 0], l=l[:, 0], u=u[:, 0], frame=frame, estimated=estimated)
    sparse_kernel[(batch, heads, splits)](
        q,
        k_cache,
        v_cache,
        page_table,
        indptr,
        units,
        last_unit_len,
        m if log_weight is None else log_weight,
        m,
        l,
        u,
        scale * LOG2_E,
        *q.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        page_table.stride(0),
        LISTS=lists,
        HEADS=heads,
        HK=hk,
        ROWS=hq // heads,
        UNIT=unit_tokens,
        PAGE=page,
        D=d,
        SPLIT=split_tokens,
        WEIGHTED=log_weight is not None,
        BM=BLOCK_M,
        BN=BLOCK_N,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )
    return merge_states_triton(m, l, u, None, frame=frame, estimated=estimated)
