"""The reference of page boxes: entry by entry and channel by channel, in float64. Checked by eye."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def page_minmax_ref(
    k_cache: Tensor,
    page_ids: Tensor,
    first: Tensor,
    count: Tensor,
    kmin: Tensor,
    kmax: Tensor,
    sealed: Tensor,
) -> dict[str, Tensor]:
    """kmin, kmax, sealed after the call; its inputs are left alone."""
    page_tokens, heads, d = k_cache.shape[1:]
    low, high, full = kmin.double(), kmax.double(), sealed.clone()
    for page, lo, n in zip(page_ids.tolist(), first.tolist(), count.tolist(), strict=True):
        if page < 0:
            continue
        if lo == 0:
            low[page], high[page], full[page] = math.inf, -math.inf, 0
        for slot in range(lo, lo + n):
            for h in range(heads):
                row = k_cache[page, slot, h].double()
                for c in range(d):
                    x = float(row[c])
                    unknown = math.isnan(x) or math.isnan(float(low[page, h, c]))
                    low[page, h, c] = math.nan if unknown else min(float(low[page, h, c]), x)
                    high[page, h, c] = math.nan if unknown else max(float(high[page, h, c]), x)
        if lo + n == page_tokens:
            full[page] = 1
    return {"kmin": low, "kmax": high, "sealed": full}


def page_minmax_build_ref(
    k_cache: Tensor, page_ids: Tensor, filled: Tensor, kmin: Tensor, kmax: Tensor, sealed: Tensor
) -> dict[str, Tensor]:
    """The first `filled` rows of each page."""
    return page_minmax_ref(k_cache, page_ids, torch.zeros_like(filled), filled, kmin, kmax, sealed)


def page_minmax_append_ref(
    k_cache: Tensor, page_ids: Tensor, slots: Tensor, kmin: Tensor, kmax: Tensor, sealed: Tensor
) -> dict[str, Tensor]:
    """One more row of each page."""
    return page_minmax_ref(k_cache, page_ids, slots, torch.ones_like(slots), kmin, kmax, sealed)
