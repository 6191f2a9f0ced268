"""The references of the layout translation: one element after the other, by its place."""

from __future__ import annotations

import torch
from torch import Tensor


def to_fractal_ref(x: Tensor, *, tile: int = 16) -> Tensor:
    """[B,H,S,D] to [B,H,ceil(S/T),ceil(D/T),T,T]."""
    batch, heads, seq, dim = x.shape
    shape = (batch, heads, -(-seq // tile), -(-dim // tile), tile, tile)
    out = torch.zeros(shape, dtype=x.dtype)
    for s in range(seq):
        for d in range(dim):
            out[:, :, s // tile, d // tile, s % tile, d % tile] = x[:, :, s, d]
    return out


def from_fractal_ref(tiles: Tensor, *, seq: int, dim: int) -> Tensor:
    """[B,H,ceil(S/T),ceil(D/T),T,T] to [B,H,S,D]."""
    batch, heads, _, _, tile, _ = tiles.shape
    out = torch.zeros(batch, heads, seq, dim, dtype=tiles.dtype)
    for s in range(seq):
        for d in range(dim):
            out[:, :, s, d] = tiles[:, :, s // tile, d // tile, s % tile, d % tile]
    return out
