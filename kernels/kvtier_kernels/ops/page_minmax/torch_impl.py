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
    # Not their sum, which may wrap around.
    bad = real & ((first < 0) | (count < 0) | (count > tokens) | (first > tokens - count))
    if bool(bad.any()):
        raise ShapeError(f"slots [{int(first[bad][0])}, +{int(count[bad][0])}) of a page of {tokens}")
    order = page_ids.argsort(stable=True)
    page, entry = page_ids[order], (first * (tokens + 1) + count)[order]
    if bool(((page[1:] == page[:-1]) & (page[1:] >= 0) & (entry[1:] != entry[:-1])).any()):
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
    if not ids.numel():
        return Boxes(kmin, kmax, sealed)
    tokens = k_cache.shape[1]
    if int(n.max()):
        # A short entry's last row stands for those it has not: that changes neither min nor max.
        step = torch.arange(int(n.max()))
        slot = (lo[:, None] + torch.minimum(step, n[:, None] - 1)).clamp_min_(0).long()
        low, high = _extremes(_rows(k_cache, ids, slot.T))
    else:
        low, high = kmin[ids], kmax[ids]
    for box, new, none, better in (
        (kmin, low, torch.inf, torch.minimum),
        (kmax, high, -torch.inf, torch.maximum),
    ):
        if bool((n == 0).any()):
            new = new.masked_fill((n == 0)[:, None, None], none)
        if bool((lo > 0).any()):
            new = better(new, box[ids].masked_fill((lo == 0)[:, None, None], none))
        box.index_copy_(0, ids, new)
    full = (lo + n == tokens).to(torch.uint8)
    sealed[ids] = torch.where(lo == 0, full, torch.maximum(full, sealed[ids]))
    return Boxes(kmin, kmax, sealed)


def _rows(k_cache: Tensor, ids: Tensor, slot: Tensor) -> Tensor:
    """[n,W,Hk,d]: rows slot[:,w] of page ids[w], copied row by row where they lie one behind the other."""
    if not k_cache.is_contiguous():
        return k_cache[ids, slot]
    flat = ids * k_cache.shape[1] + slot
    rows = k_cache.flatten(0, 1).index_select(0, flat.flatten())
    return rows.view(*slot.shape, *k_cache.shape[2:])


def _extremes(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest over the first dimension, NaN where there is one. Slice by slice: five times as
    fast as one reduction over a dimension that is not the last."""
    low, high = rows[0].clone(), rows[0].clone()
    for row in rows[1:]:
        torch.minimum(low, row, out=low)
        torch.maximum(high, row, out=high)
    return low, high


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
