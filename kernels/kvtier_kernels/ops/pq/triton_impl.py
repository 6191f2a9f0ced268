# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator"
"""Product-quantised scores on a GPU: a table by dots, then two passes over the codes (lse, then scores).

The codes lie part by part, so that a block of rows reads whole lines of each. The second pass reads them
again rather than keep G logits a row: a row is m bytes, its logits 4 G. Hazards: request, head and part times
strides overflow int32, so they are widened first; rows past the length are masked on load; a code past the
codebook reads NaN, never a neighbour's table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtier_kernels.ops.pq.torch_impl import check_codes, check_lut
from kvtier_kernels.ops.scoring import Scores, check_strides, padded_heads, want
from kvtier_kernels.ops.scoring_jit import join_lse, tile_lse

BLOCK_C = 64
BLOCK_N = 256
NUM_WARPS = 4


@triton.jit
def lut_kernel(
    q_ptr,
    cent_ptr,
    lut_ptr,
    stride_qb,
    stride_qh,
    stride_cb,
    stride_ch,
    stride_cm,
    stride_cc,
    HK: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
    BW: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    """lut [B, HK, M, G, C]; one program per request, KV head and part."""
    b = tl.program_id(0)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    rows = tl.arange(0, BM)
    cols = tl.arange(0, BW)
    live = rows < G
    real = cols < W
    heads = kv_head * G + rows
    q_at = q_ptr + b.to(tl.int64) * stride_qb + heads.to(tl.int64)[:, None] * stride_qh + part * W
    q = tl.load(q_at + cols[None, :], mask=live[:, None] & real[None, :], other=0.0)
    book = cent_ptr + b.to(tl.int64) * stride_cb + kv_head.to(tl.int64) * stride_ch
    book += part.to(tl.int64) * stride_cm
    out = lut_ptr + ((b.to(tl.int64) * HK + kv_head) * M + part) * (G * C)
    for start in range(0, C, BC):
        entry = start + tl.arange(0, BC)
        c_at = book + entry.to(tl.int64)[None, :] * stride_cc + cols[:, None]
        cent = tl.load(c_at, mask=real[:, None] & (entry < C)[None, :], other=0.0)
        product = tl.dot(q, cent, input_precision="ieee")
        at = out + rows[:, None] * C + entry[None, :]
        tl.store(at, product, mask=live[:, None] & (entry < C)[None, :])


@triton.jit
def _logits(table, code_row, tokens, there, scale, stride_m, G: tl.constexpr, M: tl.constexpr,
            C: tl.constexpr, BG: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """[BG, BN] scaled logits; 0 in rows past G."""
    heads = tl.arange(0, BG)
    s = tl.zeros([BG, BN], tl.float32)
    for j in range(M):
        code = tl.load(code_row + tl.cast(j, tl.int64) * stride_m + tokens, mask=there, other=0).to(tl.int32)
        at = table + j * (G * C) + heads[:, None] * C + code[None, :]
        known = (code < C)[None, :]
        term = tl.load(at, mask=(heads < G)[:, None] & known, other=0.0)
        s += tl.where(known, term, float("nan"))
    return s * scale


@triton.jit
def part_kernel(
    lut_ptr,
    codes_ptr,
    lens_ptr,
    m_ptr,
    l_ptr,
    scale,
    stride_b,
    stride_h,
    stride_m,
    HK: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    BG: tl.constexpr,
    BN: tl.constexpr,
):
    """m (base 2), l [B, HK * G, blocks] of block `program_id(2)`."""
    b = tl.program_id(0)
    kv_head = tl.program_id(1)
    block = tl.program_id(2)
    blocks = tl.num_programs(2)
    tokens = block * BN + tl.arange(0, BN)
    there = tokens < tl.load(lens_ptr + b)
    row = codes_ptr + b.to(tl.int64) * stride_b + kv_head.to(tl.int64) * stride_h
    table = lut_ptr + (b.to(tl.int64) * HK + kv_head) * (M * G * C)
    s = _logits(table, row, tokens, there, scale, stride_m, G, M, C, BG, BN)
    m, l = tile_lse(tl.where(there[None, :], s * 1.4426950408889634, float("-inf")))
    heads = tl.arange(0, BG)
    at = (b.to(tl.int64) * (HK * G) + kv_head * G + heads) * blocks + block
    tl.store(m_ptr + at, m, mask=heads < G)
    tl.store(l_ptr + at, l, mask=heads < G)


@triton.jit
def score_kernel(
    lut_ptr,
    codes_ptr,
    lens_ptr,
    lse_ptr,
    score_ptr,
    scale,
    capacity,
    stride_b,
    stride_h,
    stride_m,
    HK: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    BG: tl.constexpr,
    BN: tl.constexpr,
):
    """score [B, HK, capacity] of block `program_id(2)`."""
    b = tl.program_id(0)
    kv_head = tl.program_id(1)
    tokens = tl.program_id(2) * BN + tl.arange(0, BN)
    there = tokens < tl.load(lens_ptr + b)
    row = codes_ptr + b.to(tl.int64) * stride_b + kv_head.to(tl.int64) * stride_h
    segment = b.to(tl.int64) * HK + kv_head
    s = _logits(lut_ptr + segment * (M * G * C), row, tokens, there, scale, stride_m, G, M, C, BG, BN)
    heads = tl.arange(0, BG)
    lse = tl.load(lse_ptr + segment * G + heads, mask=heads < G, other=0.0)
    p = tl.exp2((s - lse[:, None]) * 1.4426950408889634)
    total = tl.sum(tl.where((heads < G)[:, None] & there[None, :], p, 0.0), 0)
    out = score_ptr + segment * capacity + tokens
    tl.store(out, tl.where(there, total, float("-inf")), mask=tokens < capacity)


def pq_lut_triton(q: Tensor, cent: Tensor) -> Tensor:
    """See pq_lut_torch. q and cent of one dtype; at most 16 query heads a KV head; every stride of cent but
    the last a multiple of 16 elements, or of no step. Raises ShapeError."""
    group = check_lut(q, cent)
    want(q.dtype == cent.dtype, f"one dtype for q and cent, got {q.dtype} and {cent.dtype}")
    want(q.stride(-1) == cent.stride(-1) == 1, "the last dimension of q and cent must be contiguous")
    batch, hk, m, entries, width = cent.shape
    lut = torch.empty(batch, hk, m, group, entries, dtype=torch.float32, device=q.device)
    if batch:
        lut_kernel[(batch, hk, m)](
            q,
            cent,
            lut,
            *q.stride()[:2],
            *cent.stride()[:4],
            HK=hk,
            G=group,
            M=m,
            C=entries,
            W=width,
            BW=max(16, triton.next_power_of_2(width)),
            BM=padded_heads(group),
            BC=BLOCK_C,
            num_warps=NUM_WARPS,
        )
    return lut


def pq_score_triton(lut: Tensor, codes: Tensor, seq_lens: Tensor, *, scale: float) -> Scores:
    """See pq_score_torch. Every stride of codes but the last a multiple of 16. A code past the codebook makes
    its row's score and its heads' lse NaN. Raises ShapeError."""
    check_codes(lut, codes, seq_lens)
    check_strides(codes=codes)
    batch, hk, parts, group, entries = lut.shape
    capacity = codes.shape[3]
    blocks = max(1, -(-capacity // BLOCK_N))
    lut = lut.contiguous()
    score = torch.empty(batch, hk, capacity, dtype=torch.float32, device=lut.device)
    m = torch.empty(batch, hk * group, blocks, dtype=torch.float32, device=lut.device)
    l = torch.empty_like(m)
    sizes = {
        "HK": hk,
        "G": group,
        "M": parts,
        "C": entries,
        "BG": triton.next_power_of_2(group),
        "BN": BLOCK_N,
    }
    if not batch:
        return Scores(score, join_lse(m, l))
    grid = (batch, hk, blocks)
    steps = codes.stride()[:3]
    part_kernel[grid](lut, codes, seq_lens, m, l, scale, *steps, **sizes, num_warps=NUM_WARPS)
    lse = join_lse(m, l)
    score_kernel[grid](
        lut, codes, seq_lens, lse, score, scale, capacity, *steps, **sizes, num_warps=NUM_WARPS
    )
    return Scores(score, lse)
