# mypy: disable-error-code="import-untyped,no-untyped-def"
"""Swapping units in on a GPU: entries are judged and counted a row, then listed; copies run over the list.

It exists for Hopper; here it is compiled ahead of time and run in the interpreter, which prove its
semantics and its resources, never its speed. It must not know why a unit is missing. The host's rows may
lie in pinned memory that the device reads.
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
from kvtier_kernels.ops.swap_in.torch_impl import SwapPlan, check_apply, check_plan

MAX_WIDTH = 4096
# Words a program has in flight, of one row or of several short ones; 8 programs on each of 132 processors.
TILE = 512
PROGRAMS = 1056


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit  # type: ignore[untyped-decorator]
def _judged(
    miss_ptr, victim_ptr, host_ptr, row, width, units, slots, stride_m, stride_v, stride_h, W: tl.constexpr
):
    """(slot, host row, asked, known, there) of a row's entries."""
    i = tl.arange(0, W)
    live = i < width
    miss = tl.load(miss_ptr + row * stride_m + i, mask=live, other=-1)
    victim = tl.load(victim_ptr + row * stride_v + i, mask=live, other=-1)
    asked = (miss >= 0) & (victim >= 0)
    slot = tl.where(asked, victim, -1)
    # An entry ascends if no earlier one, and of equal ones none before it, is the highest so far.
    packed = (tl.cast(slot, tl.int64) << 32) | (W - i)
    ascends = asked & (tl.associative_scan(packed, 0, _larger) == packed)
    known = ascends & (slot < slots) & (miss < units)
    at = tl.load(host_ptr + row * stride_h + miss, mask=known, other=-1)
    return slot, at, asked, known, known & (at >= 0)


@triton.jit  # type: ignore[untyped-decorator]
def count_kernel(
    miss_ptr,
    victim_ptr,
    host_ptr,
    row_copies_ptr,
    absent_ptr,
    refused_ptr,
    width,
    units,
    slots,
    stride_m,
    stride_v,
    stride_h,
    W: tl.constexpr,
):
    """Copies, absent and refused entries of each row."""
    r = tl.program_id(0)
    row = r.to(tl.int64)
    _, _, asked, known, there = _judged(
        miss_ptr, victim_ptr, host_ptr, row, width, units, slots, stride_m, stride_v, stride_h, W
    )
    tl.store(row_copies_ptr + r, tl.sum(there.to(tl.int32), 0))
    tl.store(absent_ptr + r, tl.sum((known & ~there).to(tl.int32), 0))
    tl.store(refused_ptr + r, tl.sum((asked & ~known).to(tl.int32), 0))


@triton.jit  # type: ignore[untyped-decorator]
def list_kernel(
    miss_ptr,
    victim_ptr,
    host_ptr,
    row_copies_ptr,
    src_ptr,
    dst_ptr,
    copies_ptr,
    width,
    units,
    slots,
    stride_m,
    stride_v,
    stride_h,
    W: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A row's copies, behind those of the rows before it; the last row states how many there are in all."""
    r = tl.program_id(0)
    row = r.to(tl.int64)
    before = tl.zeros([ROWS], tl.int32)
    for start in range(0, r, ROWS):
        rows = start + tl.arange(0, ROWS)
        before += tl.load(row_copies_ptr + rows, mask=rows < r, other=0)
    base = tl.sum(before, 0)
    slot, at, _, _, there = _judged(
        miss_ptr, victim_ptr, host_ptr, row, width, units, slots, stride_m, stride_v, stride_h, W
    )
    place = base + tl.cumsum(there.to(tl.int32), 0) - 1
    tl.store(src_ptr + place, at, mask=there)
    tl.store(dst_ptr + place, r * slots + slot, mask=there)
    tl.store(copies_ptr, base + tl.sum(there.to(tl.int32), 0), mask=r == tl.num_programs(0) - 1)


@triton.jit  # type: ignore[untyped-decorator]
def copy_kernel(
    host_ptr,
    pool_ptr,
    src_ptr,
    dst_ptr,
    copies_ptr,
    words,
    host_rows,
    pool_rows,
    stride_h,
    stride_p,
    T: tl.constexpr,
    R: tl.constexpr,
):
    """R copies at a time, T words of each; rows outside the pools are left out."""
    copies = tl.load(copies_ptr)
    word = tl.arange(0, T)
    for first in range(tl.program_id(0) * R, copies, tl.num_programs(0) * R):
        i = first + tl.arange(0, R)
        src = tl.load(src_ptr + i, mask=i < copies, other=-1)
        dst = tl.load(dst_ptr + i, mask=i < copies, other=-1)
        inside = (src >= 0) & (src < host_rows) & (dst >= 0) & (dst < pool_rows)
        a = host_ptr + src.to(tl.int64)[:, None] * stride_h
        b = pool_ptr + dst.to(tl.int64)[:, None] * stride_p
        for start in range(0, words, T):
            at = (start + word)[None, :]
            mask = inside[:, None] & (at < words)
            tl.store(b + at, tl.load(a + at, mask=mask), mask=mask)


def swap_in_plan_triton(miss: Tensor, victim: Tensor, host_row: Tensor, *, slots: int) -> SwapPlan:
    """See the package. Two launches; at most 4,096 entries a row. Raises ShapeError."""
    rows, width = check_plan(miss, victim, host_row, slots)
    if width > MAX_WIDTH:
        raise ShapeError(f"{width} entries a row, at most {MAX_WIDTH}")
    src, dst = torch.full((2, rows * width), -1, dtype=torch.int32, device=miss.device)
    row_copies, absent, refused = torch.empty(3, rows, dtype=torch.int32, device=miss.device)
    copies = torch.zeros(1, dtype=torch.int32, device=miss.device)
    if rows:
        strides = (miss.stride(0), victim.stride(0), host_row.stride(0))
        shape = (width, host_row.shape[1], slots)
        wide = max(16, triton.next_power_of_2(width))
        warps = 4 if wide <= 1024 else 8
        count_kernel[(rows,)](
            miss, victim, host_row, row_copies, absent, refused, *shape, *strides, W=wide, num_warps=warps
        )
        list_kernel[(rows,)](
            miss,
            victim,
            host_row,
            row_copies,
            src,
            dst,
            copies,
            *shape,
            *strides,
            W=wide,
            ROWS=64,
            num_warps=warps,
        )
    return SwapPlan(src, dst, copies, absent, refused)


def swap_in_apply_triton(host: Tensor, pool: Tensor, src: Tensor, dst: Tensor, copies: Tensor) -> Tensor:
    """See the package. One launch, however many copies."""
    a, b, _ = check_apply(host, pool, src, dst, copies)
    wide = min(TILE, max(16, triton.next_power_of_2(a.shape[1])))
    rows = TILE // wide
    programs = min(PROGRAMS, triton.cdiv(len(src), rows))
    if programs and a.numel() and b.numel():
        copy_kernel[(programs,)](
            a,
            b,
            src,
            dst,
            copies,
            a.shape[1],
            len(a),
            len(b),
            a.stride(0),
            b.stride(0),
            T=wide,
            R=rows,
            num_warps=4,
        )
    return pool
