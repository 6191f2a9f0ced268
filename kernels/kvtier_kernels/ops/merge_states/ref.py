"""The fp64 references of merging and finishing states: one softmax over all parts, no fold.

They exist to be checked by eye and share nothing with the implementations they judge.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def merge_states_ref(
    m: Tensor, l: Tensor, u: Tensor, counts: Tensor | None, *, frame: Any, estimated: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """(m, l [B,H], u [B,H,d]) in float64."""
    batch, states, heads = m.shape
    top = torch.full((batch, heads), -math.inf, dtype=torch.float64)
    mass = torch.zeros(batch, heads, dtype=torch.float64)
    total = torch.zeros(batch, heads, u.shape[3], dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            n = states if counts is None else int(counts[b, h])
            parts = [s for s in range(n) if l[b, s, h] > 0]
            if not parts:
                continue
            top[b, h] = max(float(m[b, s, h]) for s in parts)
            for s in parts:
                w = math.exp(float(m[b, s, h]) - float(top[b, h]))
                mass[b, h] += w * float(l[b, s, h])
                total[b, h] += w * u[b, s, h].double()
    return top, mass, total


def merge_state_ref(
    m: Tensor, l: Tensor, u: Tensor, other_m: Tensor, other_l: Tensor, other_u: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The union of two supports, element by element, in float64."""
    heads = m.numel()
    pair_m = torch.stack((m.reshape(heads), other_m.reshape(heads)))[None]
    pair_l = torch.stack((l.reshape(heads), other_l.reshape(heads)))[None]
    pair_u = torch.stack((u.reshape(heads, u.shape[-1]), other_u.reshape(heads, u.shape[-1])))[None]
    top, mass, total = merge_states_ref(pair_m, pair_l, pair_u, None, frame=None, estimated=None)
    return top.view(m.shape), mass.view(l.shape), total.view(u.shape)


def finalize_state_ref(m: Tensor, l: Tensor, u: Tensor, *, dtype: torch.dtype) -> dict[str, Tensor]:
    """o = u / l and lse = m + ln l in float64; (0, -inf) without rows."""
    o, lse = torch.zeros(u.shape, dtype=torch.float64), torch.full(m.shape, -math.inf, dtype=torch.float64)
    for r in range(m.shape[0]):
        if l[r] > 0:
            o[r] = u[r].double() / l[r].double()
            lse[r] = m[r].double() + math.log(float(l[r]))
    return {"o": o, "lse": lse}
