# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator"
"""Small pieces that the attention kernels share. It must not know where rows lie.

Hazards: -inf - (-inf) is NaN, so an exponent's reference point is 0 while the maximum is still -inf; a dot
on float32 is TF32 unless told otherwise; probabilities take V's dtype for the product, and nothing else does.
"""

from __future__ import annotations

import os

# Triton 3.10 turns FP fusion off by default; recorded resources and bits must not move with it.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtier_kernels.ops.chunk_attention import ShapeError

LOG2_E = 1.4426950408889634
BLOCK_M = 16
BLOCK_N = 64
NUM_WARPS = 4


@triton.jit
def fold_tile(s, v, m, l, u):
    """The state (m, l [BM], u [BM, D]; m in base 2) after rows of logits s [BM, BN] and values v [BN, D]:
    m' = max(m, max s); p = 2^(s - m'); l = l 2^(m - m') + sum p; u = u 2^(m - m') + p V."""
    m_new = tl.maximum(m, tl.max(s, 1))
    anchor = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s - anchor[:, None])
    fade = tl.exp2(m - anchor)
    l = l * fade + tl.sum(p, 1)
    u = u * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
    return m_new, l, u


@triton.jit
def tanh_tile(x):
    """tanh(x) of float32; NaN of NaN. Below 5/8 a polynomial (Cephes' tanhf), since 1 - exp(-2 |x|) loses
    what is small; beyond it (1 - e) / (1 + e) with x's sign."""
    size = tl.abs(x)
    e = tl.exp2(size * -2.8853900817779268)
    square = x * x
    y = square * -5.70498872745e-3 + 2.06390887954e-2
    y = y * square - 5.37397155531e-2
    y = y * square + 1.33314422036e-1
    y = y * square - 3.33332819422e-1
    large = (1.0 - e) / (1.0 + e)
    return tl.where(size < 0.625, y * square * x + x, tl.where(x < 0, -large, large))


@triton.jit
def join_states(ma, la, ua, mb, lb, ub):
    """merge of two states with natural m, elementwise; u one dimension more than m and l, if any."""
    m = tl.maximum(ma, mb)
    anchor = tl.where(m == float("-inf"), 0.0, m)
    wa = tl.exp2((ma - anchor) * 1.4426950408889634)
    wb = tl.exp2((mb - anchor) * 1.4426950408889634)
    return m, wa * la + wb * lb, wa * ua + wb * ub


@triton.jit
def store_state(m_ptr, l_ptr, u_ptr, out, m, l, u, live, D: tl.constexpr):
    """m (base 2, stored natural), l at `out` [BM] int64 and u at out * D, where `live`."""
    cols = tl.arange(0, D)
    tl.store(m_ptr + out, m * 0.6931471805599453, mask=live)
    tl.store(l_ptr + out, l, mask=live)
    tl.store(u_ptr + out[:, None] * D + cols[None, :], u, mask=live[:, None])


def empty_state(like: Tensor, shape: tuple[int, ...], d: int) -> tuple[Tensor, Tensor, Tensor]:
    """m, l of `shape` and u of (*shape, d), float32, not initialised."""
    return (
        torch.empty(shape, dtype=torch.float32, device=like.device),
        torch.empty(shape, dtype=torch.float32, device=like.device),
        torch.empty((*shape, d), dtype=torch.float32, device=like.device),
    )


def check_layout(rows: int, **tensors: Tensor) -> None:
    """What the attention kernels want of q and caches: one dtype, d a power of two >= 16, at most 16 rows
    a tile, and every stride but the last a multiple of 16 elements, since one odd stride silently costs
    the asynchronous copies. Raises ShapeError."""
    dtypes = {x.dtype for x in tensors.values()}
    if len(dtypes) != 1:
        raise ShapeError(f"one dtype for {', '.join(tensors)}, got {sorted(str(t) for t in dtypes)}")
    d = next(iter(tensors.values())).shape[-1]
    if d < 16 or d & (d - 1) or rows > BLOCK_M:
        raise ShapeError(f"head dim {d} is no power of two >= 16, or {rows} query heads share a KV head")
    for name, x in tensors.items():
        if x.stride(-1) != 1 or any(s % 16 for s in x.stride()[:-1]):
            raise ShapeError(f"strides of {name} {x.stride()} are not multiples of 16 before a last of 1")
