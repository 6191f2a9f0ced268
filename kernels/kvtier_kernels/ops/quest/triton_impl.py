# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator"
"""Quest's scores on a GPU: one program per request, KV head and run of pages, two products a tile.

It exists for Hopper; here it is compiled ahead of time and run in the interpreter. It must not know which
pages are mandatory. Hazards: page ids times strides overflow int32; a box that is not there is masked on
load; relu of q is exact in any dtype, and the rest is float32; the hardware's max drops NaN, and a page whose
score is unknown must not become the worst one.
"""

from __future__ import annotations

import os

# Triton 3.10 turns FP fusion off by default; recorded resources and bits must not move with it.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtier_kernels.ops.attention_jit import BLOCK_M, NUM_WARPS, check_layout
from kvtier_kernels.ops.quest.paged import check_inputs

PAGES_A_TILE = 64
PAGES_A_PROGRAM = 512
NUM_STAGES = 3


@triton.jit
def quest_kernel(
    q_ptr,
    min_ptr,
    max_ptr,
    table_ptr,
    count_ptr,
    out_ptr,
    width,
    stride_qb,
    stride_qh,
    stride_np,
    stride_nh,
    stride_xp,
    stride_xh,
    stride_tb,
    HK: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    REDUCE: tl.constexpr,
    RUN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """out [B, HK, width], or [B, HK * G, width] unless REDUCE, contiguous; pages [run * RUN, +RUN)."""
    b = tl.program_id(0)
    kv_head = tl.program_id(1)
    run = tl.program_id(2)
    n = tl.load(count_ptr + b)
    rows = tl.arange(0, BM)
    cols = tl.arange(0, D)
    step = tl.arange(0, BN)
    live = rows < G
    heads = kv_head * G + rows
    q_at = q_ptr + b.to(tl.int64) * stride_qb + heads.to(tl.int64)[:, None] * stride_qh + cols[None, :]
    q = tl.load(q_at, mask=live[:, None], other=0.0)
    above = tl.maximum(q.to(tl.float32), 0.0).to(q.dtype)
    below = tl.minimum(q.to(tl.float32), 0.0).to(q.dtype)
    low_head = min_ptr + kv_head.to(tl.int64) * stride_nh
    high_head = max_ptr + kv_head.to(tl.int64) * stride_xh
    table = table_ptr + b.to(tl.int64) * stride_tb
    first = run * RUN
    # One tile ahead, so that only boxes are in the pipeline.
    page = tl.load(table + first + step, mask=first + step < n, other=-1)
    for start in range(first, tl.minimum(first + RUN, width), BN):
        seen = page >= 0
        wide = tl.maximum(page, 0).to(tl.int64)
        low = tl.load(low_head + (wide * stride_np)[None, :] + cols[:, None], mask=seen[None, :], other=0.0)
        high = tl.load(high_head + (wide * stride_xp)[None, :] + cols[:, None], mask=seen[None, :], other=0.0)
        s = tl.dot(above, high, input_precision="ieee") + tl.dot(below, low, input_precision="ieee")
        s = tl.where(seen[None, :], s, float("-inf"))
        at = start + step
        if REDUCE:
            best = tl.max(tl.where(live[:, None], s, float("-inf")), 0)
            unknown = tl.max(((s != s) & live[:, None]).to(tl.int32), 0)
            best = tl.where(unknown > 0, float("nan"), best)
            out = (b * HK + kv_head).to(tl.int64) * width + at
            tl.store(out_ptr + out, best, mask=at < width)
        else:
            out = (b * (HK * G) + heads).to(tl.int64)[:, None] * width + at[None, :]
            tl.store(out_ptr + out, s, mask=live[:, None] & (at < width)[None, :])
        page = tl.load(table + at + BN, mask=at + BN < n, other=-1)


def quest_score_paged_triton(
    q: Tensor, kmin: Tensor, kmax: Tensor, page_table: Tensor, n_pages: Tensor, *, reduce: str = "max"
) -> Tensor:
    """See the package. q and boxes of one dtype; d a power of two >= 16; at most 16 query heads a KV head;
    strides multiples of 16 elements. Raises ShapeError."""
    check_inputs(q, kmin, kmax, page_table, n_pages, reduce)
    batch, hq, d = q.shape
    hk, width = kmin.shape[1], page_table.shape[1]
    check_layout(hq // hk, q=q, kmin=kmin, kmax=kmax)
    table = page_table if page_table.stride(-1) == 1 else page_table.contiguous()
    shape = (batch, hk if reduce == "max" else hq, width)
    out = torch.empty(shape, dtype=torch.float32, device=q.device)
    if out.numel():
        quest_kernel[(batch, hk, -(-width // PAGES_A_PROGRAM))](
            q,
            kmin,
            kmax,
            table,
            n_pages,
            out,
            width,
            *q.stride()[:2],
            *kmin.stride()[:2],
            *kmax.stride()[:2],
            table.stride(0),
            HK=hk,
            G=hq // hk,
            D=d,
            REDUCE=reduce == "max",
            RUN=PAGES_A_PROGRAM,
            BM=BLOCK_M,
            BN=PAGES_A_TILE,
            num_warps=NUM_WARPS,
            num_stages=NUM_STAGES,
        )
    return out
