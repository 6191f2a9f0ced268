"""Queries over all of their chunks, down to their outputs: what decode frames are.

Why it exists: a frame may look at the clock between some of its chunks, so its states are merged part by part
and divided once. It must not know where chunks live.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvtier_kernels.ops.chunk_attention.decode import Reading, attend_into, no_rows
from kvtier_kernels.ops.chunk_attention.plain import States


def attend(scaled: Tensor, readings: Sequence[Reading]) -> Tensor:
    """Outputs [B, Hq, d] of queries [B, Hq, d] times their scale, each over its readings in ascending order.
    Every query has a reading; 0 where all of its logits are -inf."""
    totals = no_rows(*scaled.shape)
    attend_into(totals, scaled, readings)
    return outputs(totals)


def outputs(totals: States) -> Tensor:
    """u / l, 0 where there are no rows."""
    _, l, u = totals
    return u / torch.where(l == 0, 1.0, l).unsqueeze(-1)
