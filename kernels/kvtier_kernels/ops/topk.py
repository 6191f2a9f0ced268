"""Choosing the best units of a list, the same ones every time.

It exists because ties decide which rows are read, and a receipt must be reproducible. It must not know
what a unit is.
"""

from __future__ import annotations

import torch
from torch import Tensor


def topk_units(scores: Tensor, k: int) -> Tensor:
    """Ids of the k largest scores of each row; ties go to the lowest id; ids ascend.

    scores: float [H, P]. Returns int64 [H, min(k, P)]. NaN counts as largest: a unit whose score is
    unknown is read, not dropped. Raises ValueError for k < 0.
    """
    if scores.dim() != 2 or k < 0:
        raise ValueError(f"want scores [H,P] and k >= 0, got {tuple(scores.shape)} and {k}")
    order = torch.sort(scores, dim=1, descending=True, stable=True).indices
    return torch.sort(order[:, :k], dim=1).values
