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
