"""The fp64 reference of paged decode: dense softmax over the rows a table names.

It exists to be checked by eye. It must share nothing with the implementations it judges, so it knows
no splits, no blocks and no merge.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def paged_decode_ref(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(m, l [B,Hq], u [B,Hq,d]) in float64. A request without rows gives (-inf, 0, 0)."""
    batch, hq, d = q.shape
    page, hk = k_cache.shape[1], k_cache.shape[2]
    m = torch.full((batch, hq), -math.inf, dtype=torch.float64)
    l = torch.zeros(batch, hq, dtype=torch.float64)
    u = torch.zeros(batch, hq, d, dtype=torch.float64)
    for b in range(batch):
        n = int(seq_lens[b])
        seen = [t for t in range(n) if window is None or n - 1 - t < window]
        if not seen:
            continue
        where = [(int(page_table[b, t // page]), t % page) for t in seen]
        k = torch.stack([k_cache[p, t] for p, t in where]).double()
        v = torch.stack([v_cache[p, t] for p, t in where]).double()
        for h in range(hq):
            head = h * hk // hq
            s = (k[:, head] @ q[b, h].double()) * scale
            if softcap is not None:
                s = softcap * torch.tanh(s / softcap)
            m[b, h] = s.max()
            if m[b, h] == -math.inf:
                continue
            w = torch.exp(s - m[b, h])
            l[b, h] = w.sum()
            u[b, h] = w @ v[:, head]
    return m, l, u
