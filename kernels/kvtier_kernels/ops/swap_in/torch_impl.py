"""Swapping units in on the CPU: the plan vectorised, its copies in pieces that stay in the cache.

It exists so that what moves is decided once and moved as often as layers share it. It must not know why a
unit is missing, nor which layer a pool belongs to.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvtier_kernels.ops.chunk_attention import ShapeError

# What is gathered before it is scattered: fits in a core's cache beside what is read.
_PIECE_BYTES = 128 << 10
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class SwapPlan(NamedTuple):
    """src, dst int32 [R*W]: rows of the host's pool and of the slots' pool, by row and in the order of its
    list, -1 from `copies` on. copies int32 [1]. absent, refused int32 [R]: units that no host row holds, and
    entries that would write a slot twice or name what does not exist; their slots keep what they held."""

    src: Tensor
    dst: Tensor
    copies: Tensor
    absent: Tensor
    refused: Tensor


def check_plan(miss: Tensor, victim: Tensor, host_row: Tensor, slots: int) -> tuple[int, int]:
    """(R, W). Raises ShapeError."""
    if miss.dim() != 2 or host_row.dim() != 2 or victim.shape != miss.shape or len(host_row) != len(miss):
        raise ShapeError(
            f"want miss and victim [R,W] and host_row [R,U], got {list(miss.shape)}, {list(victim.shape)} "
            f"and {list(host_row.shape)}"
        )
    for name, x in (("miss", miss), ("victim", victim), ("host_row", host_row)):
        if x.dtype != torch.int32 or (x.numel() and x.stride(1) != 1):
            raise ShapeError(f"want {name} int32 with contiguous rows, got {x.dtype} {x.stride()}")
    rows, width = miss.shape
    if slots < 1 or rows * slots >= 2**31 or rows * width >= 2**31:
        raise ShapeError(f"{rows} rows of {slots} slots and {width} entries: from 1 slot, to 2^31 in all")
    return rows, width


def swap_in_plan_torch(miss: Tensor, victim: Tensor, host_row: Tensor, *, slots: int) -> SwapPlan:
    """See the package."""
    rows, width = check_plan(miss, victim, host_row, slots)
    src, dst = miss.new_full((2, rows * width), -1)
    if rows == 0 or width == 0 or host_row.shape[1] == 0:
        asked = ((miss >= 0) & (victim >= 0)).sum(1, dtype=torch.int32)
        return SwapPlan(src, dst, miss.new_zeros(1), torch.zeros_like(asked), asked)
    asked = (miss >= 0) & (victim >= 0)
    slot = torch.where(asked, victim, -1)
    highest = slot.cummax(1).values
    ascends = asked.clone()
    ascends[:, 1:] &= slot[:, 1:] > highest[:, :-1]
    known = ascends & (slot < slots) & (miss < host_row.shape[1])
    at = host_row.gather(1, torch.where(known, miss, 0).long())
    there = known & (at >= 0)
    copies = there.sum(dtype=torch.int32).view(1)
    sources = at[there]
    src[: sources.numel()] = sources
    base = slots * torch.arange(rows, dtype=torch.int32, device=miss.device)
    dst[: sources.numel()] = (slot + base[:, None])[there]
    absent = (known & ~there).sum(1, dtype=torch.int32)
    return SwapPlan(src, dst, copies, absent, (asked & ~known).sum(1, dtype=torch.int32))


def check_apply(
    host: Tensor, pool: Tensor, src: Tensor, dst: Tensor, copies: Tensor
) -> tuple[Tensor, Tensor, int]:
    """Host and pool as rows of words [.., E]; the copies, or -1 where only a GPU knows. Raises ShapeError."""
    if host.dim() < 2 or host.shape[1:] != pool.shape[1:] or host.dtype != pool.dtype:
        raise ShapeError(
            f"rows of one shape and dtype, got {list(host.shape[1:])} {host.dtype} "
            f"and {list(pool.shape[1:])} {pool.dtype}"
        )
    for name, x in (("src", src), ("dst", dst), ("copies", copies)):
        if x.dim() != 1 or x.dtype != torch.int32 or x.shape != (copies if name == "copies" else src).shape:
            raise ShapeError(f"want {name} int32, src and dst of one length, got {x.dtype} {list(x.shape)}")
    if copies.shape != (1,) or not src.is_contiguous() or not dst.is_contiguous():
        raise ShapeError("want copies [1], src and dst contiguous")
    a, b = _words(host, pool)
    if copies.device.type != "cpu":
        return a, b, -1
    n = int(copies)
    if not 0 <= n <= len(src):
        raise ShapeError(f"{n} copies of a list of {len(src)}")
    for name, x, size in (("src", src[:n], len(host)), ("dst", dst[:n], len(pool))):
        if n and not (int(x.min()) >= 0 and int(x.max()) < size):
            raise ShapeError(f"{name} outside of {size} rows")
    return a, b, n


def swap_in_apply_torch(host: Tensor, pool: Tensor, src: Tensor, dst: Tensor, copies: Tensor) -> Tensor:
    """See the package. Returns the pool."""
    rows, slots, n = check_apply(host, pool, src, dst, copies)
    if n < 0:
        n = int(copies)
    if pool.device.type != "cpu":
        slots.index_copy_(0, dst[:n].long(), rows.index_select(0, src[:n]))
        return pool
    # numpy's gather is three times as fast as torch's: measured with rows of 256 bytes to 4 KiB.
    a, b, at, to = rows.numpy(), slots.numpy(), src.numpy(), dst.numpy()
    piece = max(1, _PIECE_BYTES // max(1, rows.shape[1] * rows.element_size()))
    for lo in range(0, n, piece):
        hi = min(n, lo + piece)
        b[to[lo:hi]] = a.take(at[lo:hi], 0)
    return pool


def _words(host: Tensor, pool: Tensor) -> tuple[Tensor, Tensor]:
    """Both as [rows, words] of the widest integer that fits rows, strides and places of both."""
    flat = []
    for name, x in (("host", host), ("pool", pool)):
        if len(x) and not x[0].is_contiguous():
            raise ShapeError(f"a row of {name} must be contiguous")
        flat.append(x.flatten(1))
    bytes_each = flat[0].shape[1] * host.element_size()
    odd = [bytes_each] + [n for x in flat for n in (x.stride(0) * x.element_size(), x.data_ptr())]
    word = next(w for w in _WORDS if all(n % w.itemsize == 0 for n in odd))
    return flat[0].view(word), flat[1].view(word)
