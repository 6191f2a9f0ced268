# mypy: disable-error-code="import-untyped,no-untyped-def"
"""Layout translation on a GPU: one program moves a row of tiles, or a part of it.

It exists for Hopper; here it is compiled ahead of time and run in the interpreter, which prove its
semantics and its resources, never its speed. It must not know whether x is K or V.

Elements travel as integers of their size, so no dtype has arithmetic here.
"""

from __future__ import annotations

import os

# Triton 3.10 turns FP fusion off by default; recorded resources and bits must not move with it.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtier_kernels.ops.fractal.torch_impl import check_rows, check_tiles

# Columns of a program: eight bfloat16 tiles of 16 are the 4 KiB of a page of 16 tokens and d = 128.
COLUMNS = 128
NUM_WARPS = 4
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit  # type: ignore[untyped-decorator]
def to_kernel(
    x_ptr,
    out_ptr,
    heads,
    seq,
    dim,
    down,
    across,
    stride_b,
    stride_h,
    stride_s,
    T: tl.constexpr,
    BD: tl.constexpr,
):
    """Rows [T, BD] of head `program_id(2)` to their tiles."""
    s_tile = tl.program_id(0)
    block = tl.program_id(1)
    head = tl.program_id(2)
    s = s_tile * T + tl.arange(0, T)
    d = block * BD + tl.arange(0, BD)
    start = (head // heads).to(tl.int64) * stride_b + (head % heads).to(tl.int64) * stride_h
    at = start + s.to(tl.int64)[:, None] * stride_s + d[None, :]
    x = tl.load(x_ptr + at, mask=(s < seq)[:, None] & (d < dim)[None, :], other=0)
    first = (head.to(tl.int64) * down + s_tile) * across * (T * T)
    inside = (d // T)[None, :] * (T * T) + tl.arange(0, T)[:, None] * T + (d % T)[None, :]
    tl.store(out_ptr + first + inside, x, mask=(d < across * T)[None, :] & (s >= 0)[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def from_kernel(
    tiles_ptr,
    out_ptr,
    heads,
    seq,
    dim,
    stride_b,
    stride_h,
    stride_s,
    stride_d,
    T: tl.constexpr,
    BD: tl.constexpr,
):
    """Tiles of head `program_id(2)` to rows [T, BD]."""
    s_tile = tl.program_id(0)
    block = tl.program_id(1)
    head = tl.program_id(2)
    s = s_tile * T + tl.arange(0, T)
    d = block * BD + tl.arange(0, BD)
    live = (s < seq)[:, None] & (d < dim)[None, :]
    start = (head // heads).to(tl.int64) * stride_b + (head % heads).to(tl.int64) * stride_h
    start += s_tile.to(tl.int64) * stride_s
    inside = tl.arange(0, T)[:, None] * T + (d % T)[None, :]
    x = tl.load(tiles_ptr + start + (d // T).to(tl.int64)[None, :] * stride_d + inside, mask=live, other=0)
    at = (head.to(tl.int64) * seq + s)[:, None] * dim + d[None, :]
    tl.store(out_ptr + at, x, mask=live)


def to_fractal_triton(x: Tensor, *, tile: int = 16) -> Tensor:
    """See the package. One launch."""
    down, across = check_rows(x, tile)
    batch, heads, seq, dim = x.shape
    out = torch.empty(batch, heads, down, across, tile, tile, dtype=x.dtype, device=x.device)
    if out.numel():
        words = _SAME_SIZE[x.element_size()]
        columns = min(COLUMNS, max(tile, triton.next_power_of_2(dim)))
        to_kernel[(down, triton.cdiv(dim, columns), batch * heads)](
            x.view(words),
            out.view(words),
            heads,
            seq,
            dim,
            down,
            across,
            *x.stride()[:3],
            T=tile,
            BD=columns,
            num_warps=NUM_WARPS,
        )
    return out


def from_fractal_triton(tiles: Tensor, *, seq: int, dim: int) -> Tensor:
    """See the package. One launch."""
    tile = check_tiles(tiles, seq, dim)
    batch, heads, down = tiles.shape[:3]
    out = torch.empty(batch, heads, seq, dim, dtype=tiles.dtype, device=tiles.device)
    if out.numel():
        words = _SAME_SIZE[tiles.element_size()]
        columns = min(COLUMNS, max(tile, triton.next_power_of_2(dim)))
        from_kernel[(down, triton.cdiv(dim, columns), batch * heads)](
            tiles.view(words),
            out.view(words),
            heads,
            seq,
            dim,
            *tiles.stride()[:4],
            T=tile,
            BD=columns,
            num_warps=NUM_WARPS,
        )
    return out
