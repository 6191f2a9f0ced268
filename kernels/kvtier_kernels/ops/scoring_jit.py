# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator"
"""Small pieces that the scoring kernels share. It must not know what a logit is of.

Hazard: -inf - (-inf) is NaN, so an exponent's reference point is 0 while the maximum is still -inf.
"""

from __future__ import annotations

import os

# Triton 3.10 turns FP fusion off by default; recorded resources and bits must not move with it.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634


@triton.jit
def tile_lse(s):
    """(m, l) [BM] of a tile s [BM, BN] of logits in base 2: l = sum 2^(s - m)."""
    m = tl.max(s, 1)
    anchor = tl.where(m == float("-inf"), 0.0, m)
    return m, tl.sum(tl.exp2(s - anchor[:, None]), 1)


@triton.jit
def lse_kernel(m_ptr, l_ptr, out_ptr, blocks, BLOCK: tl.constexpr):
    """out [R]: natural lse of partial (m in base 2, l) [R, blocks]; one program a row, ascending."""
    r = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    m = tl.full([BLOCK], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK], tl.float32)
    for start in range(0, blocks, BLOCK):
        at = start + lane
        mb = tl.load(m_ptr + r * blocks + at, mask=at < blocks, other=float("-inf"))
        lb = tl.load(l_ptr + r * blocks + at, mask=at < blocks, other=0.0)
        new = tl.maximum(m, mb)
        anchor = tl.where(new == float("-inf"), 0.0, new)
        l = l * tl.exp2(m - anchor) + lb * tl.exp2(mb - anchor)
        m = new
    top = tl.max(m, 0)
    anchor = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(l * tl.exp2(m - anchor), 0)
    # NaN stays NaN: only a sum of nothing is 0.
    lse = (anchor + tl.log2(tl.where(total == 0, 1.0, total))) * 0.6931471805599453
    lse = tl.where(total == 0, float("-inf"), lse)
    tl.store(out_ptr + r, lse)


def join_lse(m: Tensor, l: Tensor) -> Tensor:
    """float32 [B, Hq] from partials [B, Hq, blocks]; see lse_kernel."""
    out = torch.empty(m.shape[:2], dtype=torch.float32, device=m.device)
    if out.numel():
        lse_kernel[(out.numel(),)](m, l, out, m.shape[2], BLOCK=128, num_warps=1)
    return out
