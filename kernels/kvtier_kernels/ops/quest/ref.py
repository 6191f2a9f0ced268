"""The fp64 reference of Quest's boxes and scores: plain loops, nothing shared with the fast path."""

from __future__ import annotations

import torch
from torch import Tensor


def quest_boxes_ref(k: Tensor, page_tokens: int) -> tuple[Tensor, Tensor]:
    """(kmin, kmax) [P, Hk, d] in float64."""
    pages = [k[lo : lo + page_tokens].double() for lo in range(0, k.shape[0], page_tokens)]
    if not pages:
        return torch.empty(0, *k.shape[1:]).double(), torch.empty(0, *k.shape[1:]).double()
    return torch.stack([p.min(0).values for p in pages]), torch.stack([p.max(0).values for p in pages])


def quest_score_ref(q: Tensor, kmin: Tensor, kmax: Tensor) -> Tensor:
    """[Hk, P] in float64: max over the group of sum over channels of max(q kmin, q kmax)."""
    pages, hk, _ = kmin.shape
    group = q.shape[0] // hk
    out = torch.empty(hk, pages, dtype=torch.float64)
    for h in range(hk):
        for c in range(pages):
            out[h, c] = max(
                float(torch.maximum(x * kmin[c, h].double(), x * kmax[c, h].double()).sum())
                for x in q[h * group : (h + 1) * group].double()
            )
    return out


def quest_score_paged_ref(
    q: Tensor, kmin: Tensor, kmax: Tensor, page_table: Tensor, n_pages: Tensor, *, reduce: str = "max"
) -> Tensor:
    """[B,Hk,X] or [B,Hq,X] in float64, page by page."""
    batch, hq, _ = q.shape
    hk, width = kmin.shape[1], page_table.shape[1]
    out = torch.full((batch, hq, width), -torch.inf, dtype=torch.float64)
    for b in range(batch):
        for x in range(int(n_pages[b])):
            page = int(page_table[b, x])
            for h in range(hq if page >= 0 else 0):
                one = q[b, h].double()
                low, high = kmin[page, h * hk // hq].double(), kmax[page, h * hk // hq].double()
                out[b, h, x] = torch.maximum(one * low, one * high).sum()
    return out.view(batch, hk, hq // hk, width).amax(2) if reduce == "max" and hq else out
