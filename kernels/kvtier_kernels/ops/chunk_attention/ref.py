"""The fp64 reference of chunk attention: one query, one head, one row at a time.

It exists to be checked by eye. It must share nothing with the implementation it judges.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def chunk_state_ref(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, q_pos0: int, row_pos0: int | Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(m, l [Nq, Hq], u [Nq, Hq, d]) in float64, of the same inputs as `chunk_state`."""
    nq, hq, d = q.shape
    rows, hk, _ = k.shape
    m = torch.full((nq, hq), -math.inf, dtype=torch.float64)
    l = torch.zeros(nq, hq, dtype=torch.float64)
    u = torch.zeros(nq, hq, d, dtype=torch.float64)
    for i in range(nq):
        seen = [r for r in range(rows) if _position(row_pos0, r) <= q_pos0 + i]
        for h in range(hq):
            head = h * hk // hq
            logits = [float(q[i, h].double() @ k[r, head].double()) * scale for r in seen]
            if not logits:
                continue
            top = max(logits)
            m[i, h] = top
            if top == -math.inf:
                continue
            for r, s in zip(seen, logits, strict=True):
                w = math.exp(s - top)
                l[i, h] += w
                u[i, h] += w * v[r, head].double()
    return m, l, u


def _position(row_pos0: int | Tensor, row: int) -> int:
    return row_pos0 + row if isinstance(row_pos0, int) else int(row_pos0[row])
