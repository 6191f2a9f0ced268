"""The fp64 reference of sparse paged decode: token by token, one softmax a query head.

It exists to be checked by eye. It must share nothing with the implementations it judges.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sparse_paged_decode_ref(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    indptr: Tensor,
    units: Tensor,
    last_unit_len: Tensor,
    log_weight: Tensor | None,
    *,
    scale: float,
    unit_tokens: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(m, l [B,Hq], u [B,Hq,d]) in float64."""
    batch, hq, d = q.shape
    page, hk = k_cache.shape[1], k_cache.shape[2]
    lists = last_unit_len.numel() // batch if batch else 1
    m = torch.full((batch, hq), -math.inf, dtype=torch.float64)
    l = torch.zeros(batch, hq, dtype=torch.float64)
    u = torch.zeros(batch, hq, d, dtype=torch.float64)
    for b in range(batch):
        for h in range(hq):
            own = b * lists + h * lists // hq
            first, end = int(indptr[own]), int(indptr[own + 1])
            logits, values = [], []
            for i in range(first, end):
                tokens = int(last_unit_len[own]) if i == end - 1 else unit_tokens
                if units[i] < 0:
                    continue
                for t in range(int(units[i]) * unit_tokens, int(units[i]) * unit_tokens + tokens):
                    where = (int(page_table[b, t // page]), t % page, h * hk // hq)
                    s = float(q[b, h].double() @ k_cache[where].double()) * scale
                    logits.append(s + (0.0 if log_weight is None else float(log_weight[i])))
                    values.append(v_cache[where].double())
            if not logits or max(logits) == -math.inf:
                continue
            m[b, h] = max(logits)
            for s, v in zip(logits, values, strict=True):
                l[b, h] += math.exp(s - float(m[b, h]))
                u[b, h] += math.exp(s - float(m[b, h])) * v
    return m, l, u
