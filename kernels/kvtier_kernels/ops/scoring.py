"""What the scoring operations share: the shape of an answer and the checks of an input.

They rank rows (or clusters) that were not read. The module must not know how any of them scores.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvtier_kernels.ops.chunk_attention import ShapeError


class Scores(NamedTuple):
    """score: float32 [B, Hk, N], larger is better, -inf where there is no such row.
    lse: float32 [B, Hq], natural log of the sum of exp over the approximate logits of one query head;
    -inf without rows."""

    score: Tensor
    lse: Tensor


def want(holds: bool, text: str) -> None:
    """Raises ShapeError with that text unless it holds."""
    if not holds:
        raise ShapeError(text)


def check_heads(q: Tensor, hk: int) -> int:
    """Query heads a KV head of q [B,Hq,d]. Raises ShapeError."""
    want(
        q.dim() == 3 and q.is_floating_point(), f"want q [B,Hq,d] of floats, got {tuple(q.shape)}, {q.dtype}"
    )
    want(hk > 0 and q.shape[1] % hk == 0, f"{q.shape[1]} query heads do not divide over {hk} KV heads")
    return int(q.shape[1]) // hk


def check_lens(lens: Tensor, batch: int, capacity: int, name: str = "seq_lens") -> None:
    """int32 [B], each in [0, capacity]. Lengths on a GPU are not looked at: that would wait for it on
    every call. Raises ShapeError."""
    want(
        lens.dtype == torch.int32 and lens.shape == (batch,),
        f"want {name} int32 [{batch}], got {lens.dtype} {tuple(lens.shape)}",
    )
    if batch and lens.device.type == "cpu":
        want(int(lens.min()) >= 0 and int(lens.max()) <= capacity, f"{name} must lie in [0, {capacity}]")


def check_strides(**tensors: Tensor) -> None:
    """What a kernel needs for wide loads: last dimension contiguous, others multiples of 16 elements (one
    odd stride silently costs them). Dimensions of size 1 are never stepped over. Raises ShapeError."""
    for name, x in tensors.items():
        steps = [s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1]
        last = x.stride(-1) == 1 or x.shape[-1] <= 1
        inner = steps[:-1] if x.shape[-1] > 1 else steps
        want(
            last and not any(s % 16 for s in inner),
            f"strides of {name} {x.stride()} are not multiples of 16 before a last of 1",
        )


def padded_heads(group: int) -> int:
    """Rows of a tile that holds a group of query heads: 16, the least a dot takes. Raises ShapeError."""
    want(group <= 16, f"{group} query heads share a KV head, at most 16 fit a tile")
    return 16


def seen(lens: Tensor, n: int) -> Tensor:
    """bool [B, n]: which rows exist."""
    return torch.arange(n, device=lens.device) < lens.unsqueeze(1)
