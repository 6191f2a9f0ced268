"""Boxes of paged keys on the CPU: one gather of the pages listed, and one pair of reductions.

It must not know which pages are read later, nor that boxes rank them (Quest).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvtier_kernels.ops.chunk_attention import ShapeError


class Boxes(NamedTuple):
    """kmin, kmax: [N,Hk,d] of the keys' dtype; sealed: uint8 [N], 1 when the page's last slot is in."""

    kmin: Tensor
    kmax: Tensor
    sealed: Tensor


def check_inputs(
    k_cache: Tensor,
    page_ids: Tensor,
    first: Tensor,
    count: Tensor,
    kmin: Tensor,
    kmax: Tensor,
    sealed: Tensor,
) -> None:
    """Shapes, dtypes and, on the CPU, entries. Raises ShapeError."""
    if k_cache.dim() != 4:
        raise ShapeError(f"want k_cache [N,P,Hk,d], got {tuple(k_cache.shape)}")
    pages, tokens, heads, d = k_cache.shape
    if kmin.shape != (pages, heads, d) or kmax.shape != kmin.shape or sealed.shape != (pages,):
        raise ShapeError(
            f"want kmin and kmax {(pages, heads, d)} and sealed {(pages,)}, got {tuple(kmin.shape)}, "
            f"{tuple(kmax.shape)}, {tuple(sealed.shape)}"
        )
    if not k_cache.dtype == kmin.dtype == kmax.dtype or sealed.dtype != torch.uint8:
        raise ShapeError(
            f"keys and boxes have one dtype and sealed is uint8, got {k_cache.dtype}, {kmin.dtype}, "
            f"{kmax.dtype}, {sealed.dtype}"
        )
    entries = (page_ids, first, count)
    if any(x.dtype != torch.int32 or x.dim() != 1 or x.shape != page_ids.shape for x in entries):
        raise ShapeError(f"page_ids, slots and counts are int32 [W], got {[tuple(x.shape) for x in entries]}")
    if page_ids.device.type == "cpu":
        _check_entries(page_ids, first, count, pages, tokens)


def _check_entries(page_ids: Tensor, first: Tensor, count: Tensor, pages: int, tokens: int) -> None:
    real = page_ids >= 0
    if bool((page_ids >= pages).any()):
        raise ShapeError(f"page {int(page_ids.max())} of {pages}")
    bad = real & ((first < 0) | (count < 0) | (first + count > tokens))
    if bool(bad.any()):
        raise ShapeError(f"slots [{int(first[bad][0])}, +{int(count[bad][0])}) of a page of {tokens}")
    entries = set(map(tuple, torch.stack((page_ids, first, count), 1)[real].tolist()))
    if len(entries) != len({page for page, _, _ in entries}):
        raise ShapeError("two different entries of one page in a call")


def page_minmax_torch(
    k_cache: Tensor,
    page_ids: Tensor,
    first: Tensor,
    count: Tensor,
    kmin: Tensor,
    kmax: Tensor,
    sealed: Tensor,
) -> Boxes:
    """See the package. Any float dtype."""
    check_inputs(k_cache, page_ids, first, count, kmin, kmax, sealed)
    real = page_ids >= 0
    ids, lo, n = page_ids[real].long(), first[real], count[real]
    if ids.numel():
        tokens = k_cache.shape[1]
        slot = torch.arange(tokens, device=k_cache.device)
        there = (slot >= lo[:, None]) & (slot < (lo + n)[:, None])
        rows = k_cache[ids]
        outside = ~there[:, :, None, None]
        fresh = (lo == 0)[:, None, None]
        low = rows.masked_fill(outside, torch.inf).amin(1)
        high = rows.masked_fill(outside, -torch.inf).amax(1)
        kmin[ids] = torch.minimum(low, kmin[ids].masked_fill(fresh, torch.inf))
        kmax[ids] = torch.maximum(high, kmax[ids].masked_fill(fresh, -torch.inf))
        full = (lo + n == tokens).to(torch.uint8)
        sealed[ids] = torch.where(lo == 0, full, torch.maximum(full, sealed[ids]))
    return Boxes(kmin, kmax, sealed)


def page_minmax_build_torch(
    k_cache: Tensor, page_ids: Tensor, filled: Tensor, kmin: Tensor, kmax: Tensor, sealed: Tensor
) -> Boxes:
    """The first `filled` rows of each page."""
    return page_minmax_torch(k_cache, page_ids, torch.zeros_like(filled), filled, kmin, kmax, sealed)


def page_minmax_append_torch(
    k_cache: Tensor, page_ids: Tensor, slots: Tensor, kmin: Tensor, kmax: Tensor, sealed: Tensor
) -> Boxes:
    """One more row of each page."""
    return page_minmax_torch(k_cache, page_ids, slots, torch.ones_like(slots), kmin, kmax, sealed)
