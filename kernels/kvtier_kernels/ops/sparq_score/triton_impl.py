# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator"
"""SparQ on a GPU: one program per request, KV head and block of rows; the share of a selection by segment.

The keys lie channel by channel, so the chosen channels are read in whole lines. Hazards: channel ids times
strides overflow int32, so they are widened first; a padded channel and a row past the length are masked on
load, since 0 * NaN is NaN; after a load everything is float32 except the operands of a dot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtier_kernels.ops.scoring import Scores, check_lens, check_strides, padded_heads, want
from kvtier_kernels.ops.scoring_jit import join_lse, tile_lse
from kvtier_kernels.ops.sparq_score.torch_impl import check_selection, check_sparq

BLOCK_N = 128
BLOCK_IDS = 64
NUM_WARPS = 4


@triton.jit
def _few(q_ptr, dims_ptr, heads, live, D: tl.constexpr, BD: tl.constexpr, R: tl.constexpr, BR: tl.constexpr,
         BM: tl.constexpr, stride_h):  # fmt: skip
    """(q on the chosen channels [BM, BR] as loaded, factor [BM], channels int64 [BR], which are real)."""
    lane = tl.arange(0, BR)
    j = tl.load(dims_ptr + lane, mask=lane < R, other=-1)
    real = j >= 0
    at = tl.where(real, j, 0).to(tl.int64)
    row = q_ptr + heads.to(tl.int64)[:, None] * stride_h
    few = tl.load(row + at[None, :], mask=live[:, None] & real[None, :], other=0.0)
    cols = tl.arange(0, BD)
    whole = tl.load(row + cols[None, :], mask=live[:, None] & (cols < D)[None, :], other=0.0).to(tl.float32)
    covered = tl.sum(tl.abs(few.to(tl.float32)), 1)
    total = tl.sum(tl.abs(whole), 1)
    factor = tl.where(covered > 0, tl.sqrt(total / tl.where(covered > 0, covered, 1.0)), 0.0)
    return few, factor, at, real


@triton.jit
def score_kernel(
    q_ptr,
    k_ptr,
    dims_ptr,
    lens_ptr,
    score_ptr,
    m_ptr,
    l_ptr,
    scale,
    capacity,
    stride_qb,
    stride_qh,
    stride_kb,
    stride_kh,
    stride_kd,
    HK: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    R: tl.constexpr,
    BR: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """score [B, HK, capacity]; m (base 2), l [B, HK * G, blocks] of block `program_id(2)`."""
    b = tl.program_id(0)
    kv_head = tl.program_id(1)
    block = tl.program_id(2)
    blocks = tl.num_programs(2)
    n = tl.load(lens_ptr + b)
    rows = tl.arange(0, BM)
    live = rows < G
    heads = kv_head * G + rows
    q_row = q_ptr + b.to(tl.int64) * stride_qb
    segment = b.to(tl.int64) * HK + kv_head
    few, factor, at, real = _few(q_row, dims_ptr + segment * R, heads, live, D, BD, R, BR, BM, stride_qh)

    tokens = block * BN + tl.arange(0, BN)
    there = tokens < n
    k_head = k_ptr + b.to(tl.int64) * stride_kb + kv_head.to(tl.int64) * stride_kh
    k_at = k_head + at[:, None] * stride_kd + tokens[None, :]
    k = tl.load(k_at, mask=real[:, None] & there[None, :], other=0.0)
    s = tl.dot(few, k, input_precision="ieee") * (factor * scale)[:, None]
    total = tl.sum(tl.where(live[:, None], s, 0.0), 0)
    out = score_ptr + segment * capacity + tokens
    tl.store(out, tl.where(there, total, float("-inf")), mask=tokens < capacity)
    m, l = tile_lse(tl.where(there[None, :], s * 1.4426950408889634, float("-inf")))
    part = (b.to(tl.int64) * (HK * G) + heads) * blocks + block
    tl.store(m_ptr + part, m, mask=live)
    tl.store(l_ptr + part, l, mask=live)


@triton.jit
def alpha_kernel(
    q_ptr,
    k_ptr,
    dims_ptr,
    lse_ptr,
    indptr_ptr,
    ids_ptr,
    alpha_ptr,
    scale,
    stride_qb,
    stride_qh,
    stride_kb,
    stride_kh,
    stride_kd,
    HK: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    R: tl.constexpr,
    BR: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """alpha [B, HK * G]: sum of 2^(s - lse) over the ids of segment (b, kv_head); each id once."""
    b = tl.program_id(0)
    kv_head = tl.program_id(1)
    rows = tl.arange(0, BM)
    live = rows < G
    heads = kv_head * G + rows
    q_row = q_ptr + b.to(tl.int64) * stride_qb
    segment = b.to(tl.int64) * HK + kv_head
    few, factor, at, real = _few(q_row, dims_ptr + segment * R, heads, live, D, BD, R, BR, BM, stride_qh)
    lse = tl.load(lse_ptr + b.to(tl.int64) * (HK * G) + heads, mask=live, other=0.0)
    lo = tl.load(indptr_ptr + segment)
    hi = tl.load(indptr_ptr + segment + 1)
    k_head = k_ptr + b.to(tl.int64) * stride_kb + kv_head.to(tl.int64) * stride_kh
    share = tl.zeros([BM], tl.float32)
    for start in range(lo, hi, BN):
        e = start + tl.arange(0, BN)
        i = tl.load(ids_ptr + e, mask=e < hi, other=-1)
        before = tl.load(ids_ptr + e - 1, mask=(e > lo) & (e < hi), other=-1)
        first = (i >= 0) & (i != before)
        k_at = k_head + at[:, None] * stride_kd + tl.where(first, i, 0).to(tl.int64)[None, :]
        k = tl.load(k_at, mask=real[:, None] & first[None, :], other=0.0)
        s = tl.dot(few, k, input_precision="ieee") * (factor * scale)[:, None]
        p = tl.exp2((s - lse[:, None]) * 1.4426950408889634)
        share += tl.sum(tl.where(first[None, :], p, 0.0), 1)
    # Not a minimum: the hardware's drops NaN.
    share = tl.where(share > 1.0, 1.0, share)
    tl.store(alpha_ptr + b.to(tl.int64) * (HK * G) + heads, share, mask=live)


def _tiles(d: int, r: int) -> dict[str, int]:
    return {
        "D": d,
        "BD": max(16, triton.next_power_of_2(d)),
        "R": r,
        "BR": max(16, triton.next_power_of_2(r)),
    }


def _checked(q: Tensor, k_t: Tensor, dims: Tensor) -> tuple[int, Tensor]:
    group = check_sparq(q, k_t, dims)
    want(q.dtype == k_t.dtype, f"one dtype for q and k_t, got {q.dtype} and {k_t.dtype}")
    want(q.stride(-1) == 1, "q's last dimension must be contiguous")
    check_strides(k_t=k_t)
    return group, dims.contiguous()


def sparq_score_triton(q: Tensor, k_t: Tensor, dims: Tensor, seq_lens: Tensor, *, scale: float) -> Scores:
    """See sparq_score_torch. q and k_t of one dtype; at most 16 query heads a KV head; every stride of k_t
    but the last a multiple of 16 elements. Raises ShapeError."""
    group, dims = _checked(q, k_t, dims)
    batch, hk, d, capacity = k_t.shape
    check_lens(seq_lens, batch, capacity)
    blocks = max(1, -(-capacity // BLOCK_N))
    score = torch.empty(batch, hk, capacity, dtype=torch.float32, device=q.device)
    m = torch.empty(batch, hk * group, blocks, dtype=torch.float32, device=q.device)
    l = torch.empty_like(m)
    if batch:
        score_kernel[(batch, hk, blocks)](
            q,
            k_t,
            dims,
            seq_lens,
            score,
            m,
            l,
            scale,
            capacity,
            *q.stride()[:2],
            *k_t.stride()[:3],
            HK=hk,
            G=group,
            **_tiles(d, dims.shape[2]),
            BM=padded_heads(group),
            BN=BLOCK_N,
            num_warps=NUM_WARPS,
        )
    return Scores(score, join_lse(m, l))


def sparq_alpha_triton(
    q: Tensor, k_t: Tensor, dims: Tensor, lse: Tensor, indptr: Tensor, ids: Tensor, *, scale: float
) -> Tensor:
    """See sparq_alpha_torch. Raises ShapeError."""
    group, dims = _checked(q, k_t, dims)
    batch, hk, d, _ = k_t.shape
    check_selection(indptr, ids, batch * hk)
    want(lse.shape == q.shape[:2], f"want lse {tuple(q.shape[:2])}, got {tuple(lse.shape)}")
    alpha = torch.empty(batch, hk * group, dtype=torch.float32, device=q.device)
    if batch:
        alpha_kernel[(batch, hk)](
            q,
            k_t,
            dims,
            lse.contiguous(),
            indptr,
            ids,
            alpha,
            scale,
            *q.stride()[:2],
            *k_t.stride()[:3],
            HK=hk,
            G=group,
            **_tiles(d, dims.shape[2]),
            BM=padded_heads(group),
            BN=BLOCK_IDS,
            num_warps=NUM_WARPS,
        )
    return alpha
