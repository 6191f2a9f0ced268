"""The fp64 reference of segment decode: every key is rotated to its new position, pair by pair.

It exists to be checked by eye; it rotates keys, where the implementations it judges rotate q. Only the
rounding of the rotated q to its dtype is theirs, and a float32 q shows what that hides.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rotated(x: Tensor, position: int, inv_freq: Tensor, interleaved: bool) -> Tensor:
    """x float64 [d] turned by position * inv_freq[i] in the plane of its i-th pair."""
    pairs = inv_freq.numel()
    i = torch.arange(pairs)
    a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + pairs)
    angle = position * inv_freq.double()
    out = x.clone()
    out[a] = x[a] * torch.cos(angle) - x[b] * torch.sin(angle)
    out[b] = x[a] * torch.sin(angle) + x[b] * torch.cos(angle)
    return out


def segment_decode_ref(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seg_ptr: Tensor,
    seg_tok: Tensor,
    delta: Tensor,
    inv_freq: Tensor,
    *,
    scale: float,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(m, l [B,Hq], u [B,Hq,d]) in float64."""
    batch, hq, d = q.shape
    page, hk = k_cache.shape[1], k_cache.shape[2]
    m = torch.full((batch, hq), -math.inf, dtype=torch.float64)
    l = torch.zeros(batch, hq, dtype=torch.float64)
    u = torch.zeros(batch, hq, d, dtype=torch.float64)
    for b in range(batch):
        for h in range(hq):
            logits, values = [], []
            for i in range(int(seg_ptr[b]), int(seg_ptr[b + 1])):
                shift = int(delta[i])
                back = rotated(q[b, h].double(), -shift, inv_freq, interleaved)
                lost = rotated(back.float().to(q.dtype).double() - back, shift, inv_freq, interleaved)
                for t in range(int(seg_tok[i, 0]), int(seg_tok[i, 1])):
                    where = (int(page_table[b, t // page]), t % page, h * hk // hq)
                    key = rotated(k_cache[where].double(), shift, inv_freq, interleaved)
                    logits.append(float((q[b, h].double() + lost) @ key) * scale)
                    values.append(v_cache[where].double())
            if not logits or max(logits) == -math.inf:
                continue
            m[b, h] = max(logits)
            for s, v in zip(logits, values, strict=True):
                l[b, h] += math.exp(s - float(m[b, h]))
                u[b, h] += math.exp(s - float(m[b, h])) * v
    return m, l, u
