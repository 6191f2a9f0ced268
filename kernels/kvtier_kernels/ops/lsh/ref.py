"""The fp64 reference of LSH hashing and collisions: plain loops, nothing shared with the fast paths."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def lsh_hash_ref(x: Tensor, planes: Tensor, *, bits: int) -> Tensor:
    tables = planes.shape[1] // bits
    rows = x.reshape(-1, x.shape[-1])
    codes = torch.zeros(rows.shape[0], tables, dtype=torch.int64)
    for i, row in enumerate(rows):
        side = row.double() @ planes.double()
        for t in range(tables):
            codes[i, t] = sum(1 << b for b in range(bits) if side[t * bits + b] > 0)
    return codes.view(*x.shape[:-1], tables)


def collision_probability(same: float, bits: int, tables: int, min_hits: int) -> float:
    """P(at least min_hits of the tables agree in all bits), one bit agreeing with probability `same`."""
    r = same**bits
    return sum(math.comb(tables, j) * r**j * (1 - r) ** (tables - j) for j in range(min_hits, tables + 1))


def _bit_agrees(q: Tensor, k: Tensor) -> float:
    """1 - angle / pi; vectors of zeros hash alike, and each bit of anything else is 0 half the time."""
    nq, nk = float(q.norm()), float(k.norm())
    if nq == 0 or nk == 0:
        return 1.0 if nq == nk else 0.5
    a, b = q / nq, k / nk
    return 1 - 2 * math.atan2(float((a - b).norm()), float((a + b).norm())) / math.pi


def lsh_collide_ref(
    q: Tensor,
    q_codes: Tensor,
    keys: Tensor,
    starts: Tensor,
    ends: Tensor,
    content: Tensor,
    *,
    min_hits: int,
    cap: int,
) -> dict[str, Tensor]:
    batch, hq, _ = q.shape
    hk, n = keys.shape[1], keys.shape[2]
    tables, bits = starts.shape[2], (starts.shape[3] - 1).bit_length()
    indptr, total = [0], []
    ids = torch.full((batch * hq * cap,), -1)
    log_p = torch.zeros(batch * hq * cap, dtype=torch.float64)
    for b in range(batch):
        for g in range(hq):
            h = g * hk // hq
            hits = [0] * n
            for t in range(tables):
                bucket = int(q_codes[b, g, t])
                for e in range(int(starts[b, h, t, bucket]), int(ends[b, h, t, bucket])):
                    if content[b, h, t, e] >= 0:
                        hits[int(content[b, h, t, e])] += 1
            found = [i for i in range(n) if hits[i] >= min_hits]
            total.append(len(found))
            at = indptr[-1]
            for i in found[:cap]:
                same = _bit_agrees(q[b, g].double(), keys[b, h, i].double())
                p = collision_probability(same, bits, tables, min_hits)
                ids[at], log_p[at] = i, math.log(p) if p > 0 else -math.inf
                at += 1
            indptr.append(at)
    return {"indptr": torch.tensor(indptr), "ids": ids, "log_p": log_p, "total": torch.tensor(total)}
