"""The references of swapping in: one entry after the other, nothing shared with the fast paths."""

from __future__ import annotations

import torch
from torch import Tensor


def swap_in_plan_ref(miss: Tensor, victim: Tensor, host_row: Tensor, *, slots: int) -> dict[str, Tensor]:
    """The outputs by name, as the package states them."""
    rows, width = miss.shape
    src: list[int] = []
    dst: list[int] = []
    absent, refused = [0] * rows, [0] * rows
    for r in range(rows):
        highest = -1
        for unit, slot in zip(miss[r].tolist(), victim[r].tolist(), strict=True):
            if unit < 0 or slot < 0:
                continue
            ascends, highest = slot > highest, max(slot, highest)
            if not ascends or slot >= slots or unit >= host_row.shape[1]:
                refused[r] += 1
            elif int(host_row[r, unit]) < 0:
                absent[r] += 1
            else:
                src.append(int(host_row[r, unit]))
                dst.append(r * slots + slot)
    count = len(src)
    padding = [-1] * (rows * width - count)
    named = {
        "src": src + padding,
        "dst": dst + padding,
        "copies": [count],
        "absent": absent,
        "refused": refused,
    }
    return {n: torch.tensor(x, dtype=torch.int32) for n, x in named.items()}


def swap_in_apply_ref(host: Tensor, pool: Tensor, src: Tensor, dst: Tensor, copies: Tensor) -> Tensor:
    """The pool, after the copies."""
    for i in range(int(copies)):
        pool[int(dst[i])] = host[int(src[i])]
    return pool
