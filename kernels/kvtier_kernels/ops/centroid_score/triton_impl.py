# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator"
"""Centroid scores and the estimated tail on a GPU: two passes of dots for the scores, split-K for the state.

The second pass of the scores reads the centroids again rather than keep G logits a cluster. Hazards: request,
head and cluster times strides overflow int32, so they are widened first; a cluster without rows may hold
anything and is masked on load, since 0 * NaN is NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtier_kernels.ops.centroid_score.torch_impl import check_clusters, check_estimate
from kvtier_kernels.ops.merge_states.triton_impl import merge_states_triton
from kvtier_kernels.ops.scoring import Scores, check_strides, padded_heads, want
from kvtier_kernels.ops.scoring_jit import join_lse, tile_lse
from kvtier_kernels.state import AttentionState, LogitFrame

BLOCK_C = 64
SPLIT_C = 256
NUM_WARPS = 4
NUM_STAGES = 3


@triton.jit
def _query(q_ptr, b, kv_head, stride_qb, stride_qh, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
           BM: tl.constexpr):  # fmt: skip
    """q of one KV head [BM, BD], zero in rows past G and channels past D."""
    rows = tl.arange(0, BM)
    cols = tl.arange(0, BD)
    heads = kv_head * G + rows
    at = q_ptr + b.to(tl.int64) * stride_qb + heads.to(tl.int64)[:, None] * stride_qh + cols[None, :]
    return tl.load(at, mask=(rows < G)[:, None] & (cols < D)[None, :], other=0.0)


@triton.jit
def _products(q, cent, at, there, stride_cc, D: tl.constexpr, BD: tl.constexpr):
    """q . cent [BM, BC] of the clusters `at` of one head; zero where there is none."""
    cols = tl.arange(0, BD)
    c_at = cent + at.to(tl.int64)[None, :] * stride_cc + cols[:, None]
    c = tl.load(c_at, mask=there[None, :] & (cols < D)[:, None], other=0.0)
    return tl.dot(q, c, input_precision="ieee")


@triton.jit
def part_kernel(
    q_ptr,
    cent_ptr,
    counts_ptr,
    m_ptr,
    l_ptr,
    scale,
    clusters,
    stride_qb,
    stride_qh,
    stride_cb,
    stride_ch,
    stride_cc,
    HK: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    BY_ROWS: tl.constexpr,
):
    """m (base 2), l [B, HK * G, blocks] of block `program_id(2)`."""
    b = tl.program_id(0)
    kv_head = tl.program_id(1)
    block = tl.program_id(2)
    blocks = tl.num_programs(2)
    segment = b.to(tl.int64) * HK + kv_head
    at = block * BC + tl.arange(0, BC)
    n = tl.load(counts_ptr + segment * clusters + at, mask=at < clusters, other=0)
    there = n > 0
    q = _query(q_ptr, b, kv_head, stride_qb, stride_qh, G, D, BD, BM)
    cent = cent_ptr + b.to(tl.int64) * stride_cb + kv_head.to(tl.int64) * stride_ch
    s = _products(q, cent, at, there, stride_cc, D, BD) * (scale * 1.4426950408889634)
    s = tl.where(there[None, :], s, float("-inf"))
    if BY_ROWS:
        s += tl.log2(tl.where(there, n, 1).to(tl.float32))[None, :]
    m, l = tile_lse(s)
    rows = tl.arange(0, BM)
    out = (segment * G + rows) * blocks + block
    tl.store(m_ptr + out, m, mask=rows < G)
    tl.store(l_ptr + out, l, mask=rows < G)


@triton.jit
def score_kernel(
    q_ptr,
    cent_ptr,
    counts_ptr,
    lse_ptr,
    score_ptr,
    scale,
    clusters,
    stride_qb,
    stride_qh,
    stride_cb,
    stride_ch,
    stride_cc,
    HK: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    """score [B, HK, clusters] of block `program_id(2)`."""
    b = tl.program_id(0)
    kv_head = tl.program_id(1)
    segment = b.to(tl.int64) * HK + kv_head
    at = tl.program_id(2) * BC + tl.arange(0, BC)
    there = tl.load(counts_ptr + segment * clusters + at, mask=at < clusters, other=0) > 0
    q = _query(q_ptr, b, kv_head, stride_qb, stride_qh, G, D, BD, BM)
    cent = cent_ptr + b.to(tl.int64) * stride_cb + kv_head.to(tl.int64) * stride_ch
    s = _products(q, cent, at, there, stride_cc, D, BD) * scale
    rows = tl.arange(0, BM)
    lse = tl.load(lse_ptr + segment * G + rows, mask=rows < G, other=0.0)
    p = tl.exp2((s - lse[:, None]) * 1.4426950408889634)
    total = tl.sum(tl.where((rows < G)[:, None] & there[None, :], p, 0.0), 0)
    out = score_ptr + segment * clusters + at
    tl.store(out, tl.where(there, total, float("-inf")), mask=at < clusters)


@triton.jit
def estimate_kernel(
    q_ptr,
    cent_ptr,
    counts_ptr,
    v_ptr,
    take_ptr,
    m_ptr,
    l_ptr,
    u_ptr,
    scale,
    clusters,
    stride_qb,
    stride_qh,
    stride_cb,
    stride_ch,
    stride_cc,
    stride_vb,
    stride_vh,
    stride_vc,
    HK: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    DV: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """m, l [B, splits, HK * G] and u [B, splits, HK * G, DV] of split `program_id(2)`."""
    b = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    segment = b.to(tl.int64) * HK + kv_head
    rows = tl.arange(0, BM)
    wide = tl.arange(0, DV)
    q = _query(q_ptr, b, kv_head, stride_qb, stride_qh, G, D, BD, BM)
    cent = cent_ptr + b.to(tl.int64) * stride_cb + kv_head.to(tl.int64) * stride_ch
    values = v_ptr + b.to(tl.int64) * stride_vb + kv_head.to(tl.int64) * stride_vh
    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    u = tl.zeros([BM, DV], tl.float32)
    lo = split * SPLIT
    for start in range(lo, tl.minimum(clusters, lo + SPLIT), BC):
        at = start + tl.arange(0, BC)
        n = tl.load(counts_ptr + segment * clusters + at, mask=at < clusters, other=0)
        taken = tl.load(take_ptr + segment * clusters + at, mask=at < clusters, other=0)
        there = (n > 0) & (taken != 0)
        v_at = values + at.to(tl.int64)[:, None] * stride_vc + wide[None, :]
        v = tl.load(v_at, mask=there[:, None], other=0.0)
        s = _products(q, cent, at, there, stride_cc, D, BD) * (scale * 1.4426950408889634)
        s = tl.where(there[None, :], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        anchor = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s - anchor[:, None])
        fade = tl.exp2(m - anchor)
        l = l * fade + tl.sum(p * n.to(tl.float32)[None, :], 1)
        u = u * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        m = m_new
    out = (b.to(tl.int64) * splits + split) * (HK * G) + kv_head * G + rows
    tl.store(m_ptr + out, m * 0.6931471805599453, mask=rows < G)
    tl.store(l_ptr + out, l, mask=rows < G)
    tl.store(u_ptr + out[:, None] * DV + wide[None, :], u, mask=(rows < G)[:, None])


def _checked(q: Tensor, cent: Tensor, group: int) -> dict[str, int]:
    want(q.dtype == cent.dtype, f"one dtype for q and cent, got {q.dtype} and {cent.dtype}")
    want(q.stride(-1) == 1, "q's last dimension must be contiguous")
    check_strides(cent=cent)
    return {
        "HK": cent.shape[1],
        "G": group,
        "D": cent.shape[3],
        "BD": max(16, triton.next_power_of_2(cent.shape[3])),
        "BM": padded_heads(group),
        "BC": BLOCK_C,
    }


def centroid_score_triton(
    q: Tensor, cent: Tensor, counts: Tensor, *, scale: float, by_rows: bool = False
) -> Scores:
    """See centroid_score_torch. q and cent of one dtype; at most 16 query heads a KV head; every stride of
    cent but the last a multiple of 16 elements. Raises ShapeError."""
    group = check_clusters(q, cent, counts)
    sizes = _checked(q, cent, group)
    batch, hk, clusters, _ = cent.shape
    blocks = max(1, -(-clusters // BLOCK_C))
    counts = counts.contiguous()
    score = torch.empty(batch, hk, clusters, dtype=torch.float32, device=q.device)
    m = torch.empty(batch, hk * group, blocks, dtype=torch.float32, device=q.device)
    l = torch.empty_like(m)
    if not batch:
        return Scores(score, join_lse(m, l))
    grid = (batch, hk, blocks)
    steps = (*q.stride()[:2], *cent.stride()[:3])
    part_kernel[grid](
        q, cent, counts, m, l, scale, clusters, *steps, **sizes, BY_ROWS=by_rows, num_warps=NUM_WARPS
    )
    lse = join_lse(m, l)
    score_kernel[grid](q, cent, counts, lse, score, scale, clusters, *steps, **sizes, num_warps=NUM_WARPS)
    return Scores(score, lse)


def centroid_estimate_triton(
    q: Tensor, cent: Tensor, counts: Tensor, v_sum: Tensor, take: Tensor, *, scale: float
) -> AttentionState:
    """See centroid_estimate_torch. v_sum of any float dtype, dv a power of two >= 16. Raises ShapeError."""
    group = check_estimate(q, cent, counts, v_sum, take)
    sizes = _checked(q, cent, group)
    check_strides(v_sum=v_sum)
    batch, hk, clusters, width = v_sum.shape
    want(width >= 16 and width & (width - 1) == 0, f"dv {width} is no power of two >= 16")
    splits = max(1, -(-clusters // SPLIT_C))
    shape = (batch, splits, hk * group)
    m = torch.empty(shape, dtype=torch.float32, device=q.device)
    l = torch.empty_like(m)
    u = torch.empty(*shape, width, dtype=torch.float32, device=q.device)
    if batch:
        estimate_kernel[(batch, hk, splits)](
            q,
            cent,
            counts.contiguous(),
            v_sum,
            take.contiguous(),
            m,
            l,
            u,
            scale,
            clusters,
            *q.stride()[:2],
            *cent.stride()[:3],
            *v_sum.stride()[:3],
            **sizes,
            DV=width,
            SPLIT=SPLIT_C,
            num_warps=NUM_WARPS,
            num_stages=NUM_STAGES,
        )
    return merge_states_triton(m, l, u, None, frame=LogitFrame(scale), estimated=True)
