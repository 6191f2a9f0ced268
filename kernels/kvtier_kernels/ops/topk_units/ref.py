"""The reference of the selection: sort every row by hand, nothing shared with the fast paths."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def topk_units_ref(
    score: Tensor, valid_len: Tensor, k: Tensor, *, max_k: int | None = None
) -> dict[str, Tensor]:
    """The outputs by name, as the package states them."""
    rows, _ = score.shape
    most = max([0, *k.tolist()]) if max_k is None else max_k
    indptr, units, kth, runner_up = [0], [], [], []
    for r in range(rows):
        values = score[r, : int(valid_len[r])].tolist()

        def rank(i: int, values: list[float] = values) -> tuple[bool, float, int]:
            unknown = math.isnan(values[i])
            return (not unknown, 0.0 if unknown else -values[i], i)

        order = sorted(range(len(values)), key=rank)
        take = min(int(k[r]), len(values), most)
        units += sorted(order[:take])
        indptr.append(len(units))
        kth.append(values[order[take - 1]] if take else math.inf)
        runner_up.append(values[order[take]] if take < len(values) else -math.inf)
    units += [-1] * (rows * most - len(units))
    return {
        "indptr": torch.tensor(indptr, dtype=torch.int32),
        "units": torch.tensor(units, dtype=torch.int32),
        "kth": torch.tensor(kth, dtype=torch.float32),
        "runner_up": torch.tensor(runner_up, dtype=torch.float32),
    }
