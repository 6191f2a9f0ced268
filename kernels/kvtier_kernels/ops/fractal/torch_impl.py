"""Layout translation between rows and tiles by strided copies: whole tiles at once, then the ragged edges.

It exists because some devices read 16 x 16 tiles. It must not know whether x is K or V.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvtier_kernels.ops.chunk_attention import ShapeError

TILES = (16, 32)


def check_rows(x: Tensor, tile: int) -> tuple[int, int]:
    """Tiles along S and D. Raises ShapeError."""
    if x.dim() != 4 or (x.numel() and x.stride(3) != 1):
        raise ShapeError(f"want x [B,H,S,D], the last contiguous, got {list(x.shape)} {list(x.stride())}")
    if tile not in TILES:
        raise ShapeError(f"tiles of {' or '.join(map(str, TILES))}, got {tile}")
    return -(-x.shape[2] // tile), -(-x.shape[3] // tile)


def check_tiles(tiles: Tensor, seq: int, dim: int) -> int:
    """The size of a tile. Raises ShapeError."""
    if tiles.dim() != 6 or tiles.shape[4] != tiles.shape[5] or tiles.shape[4] not in TILES:
        raise ShapeError(f"want tiles [B,H,S/T,D/T,T,T], T one of {TILES}, got {list(tiles.shape)}")
    tile = tiles.shape[4]
    if min(seq, dim) < 0 or (-(-seq // tile), -(-dim // tile)) != tuple(tiles.shape[2:4]):
        raise ShapeError(f"{seq} rows of {dim} are not {list(tiles.shape[2:4])} tiles of {tile}")
    if tiles.numel() and (tiles.stride(5), tiles.stride(4)) != (1, tile):
        raise ShapeError(f"a tile must be contiguous, got strides {list(tiles.stride())}")
    return int(tile)


def to_fractal_torch(x: Tensor, *, tile: int = 16) -> Tensor:
    """See the package. Returns new tiles, contiguous."""
    down, across = check_rows(x, tile)
    batch, heads, seq, dim = x.shape
    out = torch.empty(batch, heads, down, across, tile, tile, dtype=x.dtype, device=x.device)
    if seq % tile:
        out[:, :, -1].zero_()
    if dim % tile:
        out[:, :, :, -1].zero_()
    for rows, tiles in _pairs(x, out, tile):
        tiles.copy_(rows)
    return out


def from_fractal_torch(tiles: Tensor, *, seq: int, dim: int) -> Tensor:
    """See the package. Returns new rows, contiguous."""
    tile = check_tiles(tiles, seq, dim)
    out = torch.empty(*tiles.shape[:2], seq, dim, dtype=tiles.dtype, device=tiles.device)
    for rows, part in _pairs(out, tiles, tile):
        rows.copy_(part)
    return out


def _pairs(x: Tensor, tiles: Tensor, tile: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The same elements seen in both layouts, [B,H,m,n,h,w] each: inner tiles, right edge, bottom, corner."""
    seq, dim = x.shape[2:]
    for s0, s1, h in _spans(seq, tile):
        for d0, d1, w in _spans(dim, tile):
            shape = (*x.shape[:2], (s1 - s0) // h, h, (d1 - d0) // w, w)
            rows = x[:, :, s0:s1, d0:d1].view(shape).transpose(3, 4)
            at = tiles[:, :, s0 // tile : -(-s1 // tile), d0 // tile : -(-d1 // tile), :h, :w]
            yield rows, at


def _spans(size: int, tile: int) -> list[tuple[int, int, int]]:
    """(from, to, height of each piece): the whole tiles, then the rest."""
    full = size - size % tile
    spans = [(0, full, tile), (full, size, size - full)]
    return [s for s in spans if s[0] < s[1]]
