"""The fp64 reference of SparQ's score and alpha: plain loops, nothing shared with the fast paths."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvtier_kernels.ops.scoring import Scores


def _logits(q: Tensor, k_t: Tensor, dims: list[int], n: int, scale: float) -> Tensor:
    """[n] of one query head: q[I].k[I] scale / sqrt(|q[I]|_1 / |q|_1)."""
    chosen = q[dims].double()
    total = q.double().abs().sum()
    coverage = float(chosen.abs().sum() / total) if total > 0 else 1.0
    if coverage == 0:
        return torch.zeros(n, dtype=torch.float64)
    return (chosen @ k_t[dims, :n].double()) * (scale / math.sqrt(coverage))


def sparq_score_ref(q: Tensor, k_t: Tensor, dims: Tensor, seq_lens: Tensor, *, scale: float) -> Scores:
    batch, hq, _ = q.shape
    hk, capacity = k_t.shape[1], k_t.shape[3]
    score = torch.full((batch, hk, capacity), -math.inf, dtype=torch.float64)
    lse = torch.full((batch, hq), -math.inf, dtype=torch.float64)
    for b in range(batch):
        n = int(seq_lens[b])
        if n == 0:
            continue
        for h in range(hk):
            listed = [int(j) for j in dims[b, h] if j >= 0]
            score[b, h, :n] = 0
            for g in range(h * hq // hk, (h + 1) * hq // hk):
                s = _logits(q[b, g], k_t[b, h], listed, n, scale)
                score[b, h, :n] += s
                lse[b, g] = torch.logsumexp(s, 0)
    return Scores(score, lse)


def sparq_alpha_ref(
    q: Tensor, k_t: Tensor, dims: Tensor, lse: Tensor, indptr: Tensor, ids: Tensor, *, scale: float
) -> Tensor:
    batch, hq, _ = q.shape
    hk = k_t.shape[1]
    alpha = torch.zeros(batch, hq, dtype=torch.float64)
    for b in range(batch):
        for h in range(hk):
            r = b * hk + h
            rows = sorted({int(i) for i in ids[int(indptr[r]) : int(indptr[r + 1])] if i >= 0})
            if not rows:
                continue
            listed = [int(j) for j in dims[b, h] if j >= 0]
            for g in range(h * hq // hk, (h + 1) * hq // hk):
                # Rows past the selected ones may hold anything: only those are touched.
                s = _logits(q[b, g], k_t[b, h][:, rows], listed, len(rows), scale)
                alpha[b, g] = torch.exp(s - lse[b, g].double()).sum().clamp_max(1.0)
    return alpha
