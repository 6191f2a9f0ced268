"""The reference of bucketed LRU: a full sort of every slot by hand, nothing shared with the fast paths."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_BUCKETS = 256
_LIMIT = 2**15 - 1


def bucket_lru_ref(
    want: Tensor, slot_tok: Tensor, age: Tensor, loc: Tensor, pin: Tensor, epoch: Tensor
) -> dict[str, Tensor]:
    """The outputs by name, as the package states them; writes slot_tok, age, loc and epoch."""
    rows, width = want.shape
    out: dict[str, Any] = {n: [] for n in ("hit_slot", "victim", "miss", "evicted", "n_miss", "shortfall")}
    for r in range(rows):
        now = int(epoch[r])
        if now > _LIMIT:
            back = now - (_BUCKETS - 1)
            age[r] = (age[r].int() - back).clamp_min(0).to(age.dtype)
            now = _BUCKETS - 1
            epoch[r] = now
        hits, misses = [], []
        for unit in want[r].tolist():
            slot = int(loc[r, unit]) if unit >= 0 else -1
            held = slot >= 0 and int(slot_tok[r, slot]) == unit
            hits.append(slot if held else -1)
            if unit >= 0 and not held and unit not in misses:
                misses.append(unit)
        for slot in hits:
            if slot >= 0:
                age[r, slot] = now
        evictable = []
        for slot, unit in enumerate(slot_tok[r].tolist()):
            used_now = unit >= 0 and int(age[r, slot]) == now
            if not used_now and not bool(pin[r, slot]):
                distance = min(now - int(age[r, slot]), _BUCKETS - 2) if unit >= 0 else _BUCKETS - 1
                evictable.append((-distance, slot))
        victims = sorted(slot for _, slot in sorted(evictable)[: len(misses)])
        evicted = [int(slot_tok[r, slot]) for slot in victims]
        for unit in evicted:
            if unit >= 0:
                loc[r, unit] = -1
        for unit, slot in zip(misses, victims, strict=False):
            slot_tok[r, slot] = unit
            loc[r, unit] = slot
            age[r, slot] = now
        for name, values in (("victim", victims), ("miss", misses), ("evicted", evicted)):
            out[name].append(values + [-1] * (width - len(values)))
        out["hit_slot"].append(hits)
        out["n_miss"].append(len(misses))
        out["shortfall"].append(len(misses) - len(victims))
    lists = ("hit_slot", "victim", "miss", "evicted")
    named = {
        n: torch.tensor(x, dtype=torch.int32).view((rows, width) if n in lists else (rows,))
        for n, x in out.items()
    }
    return named | {"slot_tok": slot_tok, "age": age, "loc": loc, "epoch": epoch}
