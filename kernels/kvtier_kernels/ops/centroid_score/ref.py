"""The fp64 reference of centroid scores and the estimate: plain loops, nothing shared with the fast paths."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvtier_kernels.ops.scoring import Scores


def centroid_score_ref(
    q: Tensor, cent: Tensor, counts: Tensor, *, scale: float, by_rows: bool = False
) -> Scores:
    batch, hq, _ = q.shape
    hk, clusters = cent.shape[1], cent.shape[2]
    score = torch.full((batch, hk, clusters), -math.inf, dtype=torch.float64)
    lse = torch.full((batch, hq), -math.inf, dtype=torch.float64)
    for b in range(batch):
        for h in range(hk):
            there = [c for c in range(clusters) if counts[b, h, c] > 0]
            if not there:
                continue
            score[b, h, there] = 0
            weight = counts[b, h, there].double() if by_rows else torch.ones(len(there)).double()
            for g in range(h * hq // hk, (h + 1) * hq // hk):
                s = (cent[b, h, there].double() @ q[b, g].double()) * scale
                lse[b, g] = torch.logsumexp(s + torch.log(weight), 0)
                score[b, h, there] += torch.exp(s - lse[b, g])
    return Scores(score, lse)


def centroid_estimate_ref(
    q: Tensor, cent: Tensor, counts: Tensor, v_sum: Tensor, take: Tensor, *, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    batch, hq, _ = q.shape
    hk, clusters, width = cent.shape[1], cent.shape[2], v_sum.shape[3]
    m = torch.full((batch, hq), -math.inf, dtype=torch.float64)
    l = torch.zeros(batch, hq, dtype=torch.float64)
    u = torch.zeros(batch, hq, width, dtype=torch.float64)
    for b in range(batch):
        for h in range(hk):
            taken = [c for c in range(clusters) if counts[b, h, c] > 0 and take[b, h, c]]
            if not taken:
                continue
            for g in range(h * hq // hk, (h + 1) * hq // hk):
                s = (cent[b, h, taken].double() @ q[b, g].double()) * scale
                m[b, g] = s.max()
                w = torch.exp(s - m[b, g])
                l[b, g] = w @ counts[b, h, taken].double()
                u[b, g] = w @ v_sum[b, h, taken].double()
    return m, l, u
