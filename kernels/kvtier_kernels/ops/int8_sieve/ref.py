"""The fp64 reference of the certified scan and of the union of choices: plain loops, nothing shared."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def int8_scan_ref(q: Tensor, cq: Tensor, scale: Tensor, seq_lens: Tensor) -> dict[str, Tensor]:
    batch, drafts, hq, d = q.shape
    hk, n = cq.shape[1], cq.shape[2]
    upper = torch.full((batch, drafts, hq, n), -math.inf, dtype=torch.float64)
    lower = upper.clone()
    for b in range(batch):
        for j in range(drafts):
            for g in range(hq):
                h, x = g * hk // hq, q[b, j, g].double()
                for c in range(int(seq_lens[b])):
                    step = float(scale[b, h, c])
                    middle = step * float(cq[b, h, c].double() @ x)
                    radius = step * (float(x.abs().sum()) * (0.5 + (d + 8) / 2**16) + 2**-100) + 2**-100
                    known = math.isfinite(middle) and math.isfinite(radius)
                    upper[b, j, g, c] = middle + radius if known else math.inf
                    lower[b, j, g, c] = middle - radius if known else -math.inf
    return {"upper": upper, "lower": lower}


def int8_select_ref(
    upper: Tensor, seq_lens: Tensor, candidates: Tensor, *, hk: int, k: int, cap: int
) -> dict[str, Tensor]:
    batch, drafts, hq, _ = upper.shape
    group = hq // hk
    indptr, units, member = [0], [], []
    dropped = torch.zeros(batch, hk, drafts, dtype=torch.int64)
    kth = torch.full((batch, hk, drafts), math.inf, dtype=torch.float64)
    runner_up = torch.full((batch, hk, drafts), -math.inf, dtype=torch.float64)
    for b in range(batch):
        n, live = int(seq_lens[b]), int(candidates[b])
        for h in range(hk):
            score = [
                [max(_known(x) for x in upper[b, j, h * group : (h + 1) * group, c]) for c in range(n)]
                for j in range(live)
            ]
            ranked = [sorted(range(n), key=lambda c, s=s: (-s[c], c)) for s in score]  # type: ignore[misc]
            level = max((i for i in range(k + 1) if len(_union(ranked, i)) <= cap), default=0)
            chosen = _union(ranked, level)
            if live:
                best = [max(s[c] for s in score) for c in range(n)]
                rest = sorted(set(range(n)) - chosen, key=lambda c: (-best[c], c))
                chosen |= set(rest[: cap - len(chosen)])
            for c in sorted(chosen):
                units.append(c)
                member.append(sum(1 << j for j in range(live) if c in ranked[j][:k]))
            indptr.append(len(units))
            for j in range(live):
                own = ranked[j][:k]
                dropped[b, h, j] = len(set(own) - chosen)
                kth[b, h, j] = score[j][own[-1]] if own else math.inf
                runner_up[b, h, j] = max(
                    (score[j][c] for c in range(n) if c not in chosen), default=-math.inf
                )
    room = batch * hk * cap
    return {
        "indptr": torch.tensor(indptr),
        "units": torch.tensor(units + [-1] * (room - len(units)), dtype=torch.int64),
        "member": torch.tensor(member + [0] * (room - len(member)), dtype=torch.int64),
        "dropped": dropped,
        "kth": kth,
        "runner_up": runner_up,
    }


def _known(x: Tensor) -> float:
    return math.inf if bool(torch.isnan(x)) else float(x)


def _union(ranked: list[list[int]], k: int) -> set[int]:
    return {c for own in ranked for c in own[:k]}
