"""The fp64 reference of product-quantised scores: plain loops, nothing shared with the fast paths."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvtier_kernels.ops.scoring import Scores


def pq_lut_ref(q: Tensor, cent: Tensor) -> Tensor:
    batch, hk, m, entries, width = cent.shape
    group = q.shape[1] // hk
    lut = torch.empty(batch, hk, m, group, entries, dtype=torch.float64)
    for b in range(batch):
        for h in range(hk):
            for j in range(m):
                for g in range(group):
                    part = q[b, h * group + g, j * width : (j + 1) * width].double()
                    lut[b, h, j, g] = cent[b, h, j].double() @ part
    return lut


def pq_score_ref(lut: Tensor, codes: Tensor, seq_lens: Tensor, *, scale: float) -> Scores:
    batch, hk, m, group, _ = lut.shape
    score = torch.full((batch, hk, codes.shape[3]), -math.inf, dtype=torch.float64)
    lse = torch.full((batch, hk * group), -math.inf, dtype=torch.float64)
    for b in range(batch):
        n = int(seq_lens[b])
        if n == 0:
            continue
        for h in range(hk):
            score[b, h, :n] = 0
            for g in range(group):
                s = torch.zeros(n, dtype=torch.float64)
                for t in range(n):
                    s[t] = sum(float(lut[b, h, j, g, int(codes[b, h, j, t])]) for j in range(m)) * scale
                lse[b, h * group + g] = torch.logsumexp(s, 0)
                score[b, h, :n] += torch.softmax(s, 0)
    return Scores(score, lse)
