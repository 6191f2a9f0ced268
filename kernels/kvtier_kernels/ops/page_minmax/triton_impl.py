# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator"
"""Boxes of paged keys on a GPU: one program per page listed and KV head.

It exists for Hopper; here it is compiled ahead of time and run in the interpreter. Hazards: page ids times
strides overflow int32; the hardware's min and max drop NaN, which would leave a box too small, so NaN is
looked for apart; rows outside the entry may hold anything and are never loaded.
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
from kvtier_kernels.ops.page_minmax.torch_impl import Boxes, check_inputs

BLOCK_ROWS = 16


@triton.jit
def minmax_kernel(
    k_ptr,
    ids_ptr,
    first_ptr,
    count_ptr,
    min_ptr,
    max_ptr,
    sealed_ptr,
    stride_kp,
    stride_kt,
    stride_kh,
    stride_bp,
    stride_bh,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Entry `program_id(0)` of KV head `program_id(1)`; kmin and kmax share their strides."""
    w = tl.program_id(0)
    h = tl.program_id(1)
    page = tl.load(ids_ptr + w)
    first = tl.load(first_ptr + w)
    count = tl.load(count_ptr + w)
    cols = tl.arange(0, D)
    steps = tl.arange(0, ROWS)
    if page >= 0:
        wide = page.to(tl.int64)
        head = h.to(tl.int64)
        box = wide * stride_bp + head * stride_bh + cols
        old = cols < tl.where(first > 0, D, 0)
        low = tl.load(min_ptr + box, mask=old, other=float("inf")).to(tl.float32)
        high = tl.load(max_ptr + box, mask=old, other=float("-inf")).to(tl.float32)
        unknown = ((low != low) | (high != high)).to(tl.int32)
        rows = k_ptr + wide * stride_kp + head * stride_kh
        for start in range(0, count, ROWS):
            inside = start + steps
            slot = (first + inside).to(tl.int64)
            at = rows + slot[:, None] * stride_kt + cols[None, :]
            seen = (inside < count)[:, None]
            x = tl.load(at, mask=seen, other=0.0).to(tl.float32)
            unknown = tl.maximum(unknown, tl.max((x != x).to(tl.int32), 0))
            low = tl.minimum(low, tl.min(tl.where(seen, x, float("inf")), 0))
            high = tl.maximum(high, tl.max(tl.where(seen, x, float("-inf")), 0))
        low = tl.where(unknown > 0, float("nan"), low)
        high = tl.where(unknown > 0, float("nan"), high)
        tl.store(min_ptr + box, low.to(min_ptr.dtype.element_ty))
        tl.store(max_ptr + box, high.to(max_ptr.dtype.element_ty))
        if h == 0:
            full = first + count == PAGE
            if (first == 0) | full:
                tl.store(sealed_ptr + wide, full.to(tl.uint8))


def page_minmax_triton(
    k_cache: Tensor,
    page_ids: Tensor,
    first: Tensor,
    count: Tensor,
    kmin: Tensor,
    kmax: Tensor,
    sealed: Tensor,
) -> Boxes:
    """See the package. d a power of two >= 16; last dimensions contiguous; kmin and kmax of one layout.
    Raises ShapeError."""
    check_inputs(k_cache, page_ids, first, count, kmin, kmax, sealed)
    _, tokens, heads, d = k_cache.shape
    if d < 16 or d & (d - 1):
        raise ShapeError(f"head dim {d} is no power of two >= 16")
    if k_cache.stride(-1) != 1 or kmin.stride(-1) != 1 or kmin.stride() != kmax.stride():
        raise ShapeError("last dimensions must be contiguous and kmin and kmax of one layout")
    if page_ids.numel() and heads:
        minmax_kernel[(page_ids.numel(), heads)](
            k_cache,
            page_ids.contiguous(),
            first.contiguous(),
            count.contiguous(),
            kmin,
            kmax,
            sealed,
            *k_cache.stride()[:3],
            *kmin.stride()[:2],
            PAGE=tokens,
            D=d,
            ROWS=BLOCK_ROWS,
            num_warps=4,
        )
    return Boxes(kmin, kmax, sealed)


def page_minmax_build_triton(
    k_cache: Tensor, page_ids: Tensor, filled: Tensor, kmin: Tensor, kmax: Tensor, sealed: Tensor
) -> Boxes:
    """The first `filled` rows of each page."""
    return page_minmax_triton(k_cache, page_ids, torch.zeros_like(filled), filled, kmin, kmax, sealed)


def page_minmax_append_triton(
    k_cache: Tensor, page_ids: Tensor, slots: Tensor, kmin: Tensor, kmax: Tensor, sealed: Tensor
) -> Boxes:
    """One more row of each page."""
    return page_minmax_triton(k_cache, page_ids, slots, torch.ones_like(slots), kmin, kmax, sealed)
