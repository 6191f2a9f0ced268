# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator"
"""The certified scan on a GPU: one program per request, KV head and block of units, all drafts at once.

int8 images become the query's dtype in registers, exactly. Hazards: request, head and unit times strides
overflow int32, so they are widened first; units past the length are masked; bf16 is only a dot operand.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtier_kernels.ops.int8_sieve.torch_impl import Bounds, check_scan, radius_factor
from kvtier_kernels.ops.scoring import check_strides, want

MAX_ROWS = 64
NUM_WARPS = 4


@triton.jit
def scan_kernel(
    q_ptr,
    cq_ptr,
    scale_ptr,
    lens_ptr,
    upper_ptr,
    lower_ptr,
    factor,
    units,
    stride_qb,
    stride_qk,
    stride_qh,
    stride_cb,
    stride_ch,
    stride_cc,
    HK: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    """upper, lower [B, K, HK * G, units] of block `program_id(2)`; row r is draft r // G, head r % G."""
    b = tl.program_id(0)
    kv_head = tl.program_id(1)
    at = tl.program_id(2) * BC + tl.arange(0, BC)
    n = tl.load(lens_ptr + b)
    there = at < n
    rows = tl.arange(0, BM)
    cols = tl.arange(0, BD)
    live = rows < K * G
    draft = rows // G
    head = kv_head * G + rows % G
    q_row = q_ptr + b.to(tl.int64) * stride_qb + draft.to(tl.int64) * stride_qk
    q_row += head.to(tl.int64) * stride_qh
    q = tl.load(q_row[:, None] + cols[None, :], mask=live[:, None] & (cols < D)[None, :], other=0.0)
    reach = tl.sum(tl.abs(q.to(tl.float32)), 1) * factor + 7.888609052210118e-31
    image = cq_ptr + b.to(tl.int64) * stride_cb + kv_head.to(tl.int64) * stride_ch
    c_at = image + at.to(tl.int64)[None, :] * stride_cc + cols[:, None]
    c = tl.load(c_at, mask=there[None, :] & (cols < D)[:, None], other=0)
    segment = b.to(tl.int64) * HK + kv_head
    step = tl.load(scale_ptr + segment * units + at, mask=there, other=0.0)
    # By way of float32: the interpreter has no int8 to bfloat16.
    middle = tl.dot(q, c.to(tl.float32).to(q.dtype), input_precision="ieee") * step[None, :]
    radius = step[None, :] * reach[:, None] + 7.888609052210118e-31
    known = (tl.abs(middle) < float("inf")) & (radius < float("inf"))
    upper = tl.where(known, middle + radius, float("inf"))
    lower = tl.where(known, middle - radius, float("-inf"))
    out = ((b.to(tl.int64) * K + draft) * (HK * G) + head) * units
    mask = live[:, None] & (at < units)[None, :]
    where = out[:, None] + at[None, :]
    tl.store(upper_ptr + where, tl.where(there[None, :], upper, float("-inf")), mask=mask)
    tl.store(lower_ptr + where, tl.where(there[None, :], lower, float("-inf")), mask=mask)


def block_units(rows: int) -> int:
    """Units a program: fewer for many rows, whose bounds would not fit the registers."""
    return 128 if rows <= 16 else 64


def int8_scan_triton(q: Tensor, cq: Tensor, scale: Tensor, seq_lens: Tensor) -> Bounds:
    """See int8_scan_torch. At most 64 drafts times query heads a KV head; every stride of cq but the last a
    multiple of 16. Raises ShapeError."""
    group = check_scan(q, cq, scale, seq_lens)
    want(q.stride(-1) == 1, "q's last dimension must be contiguous")
    check_strides(cq=cq)
    batch, hk, units, d = cq.shape
    drafts, hq = q.shape[1], q.shape[2]
    rows = drafts * group
    want(rows <= MAX_ROWS, f"{drafts} drafts of {group} query heads share a KV head, at most {MAX_ROWS}")
    upper = torch.empty(batch, drafts, hq, units, dtype=torch.float32, device=q.device)
    lower = torch.empty_like(upper)
    if upper.numel():
        block = block_units(rows)
        scan_kernel[(batch, hk, -(-units // block))](
            q,
            cq,
            scale.contiguous(),
            seq_lens,
            upper,
            lower,
            radius_factor(d),
            units,
            *q.stride()[:3],
            *cq.stride()[:3],
            HK=hk,
            G=group,
            K=drafts,
            D=d,
            BD=max(16, triton.next_power_of_2(d)),
            BM=max(16, triton.next_power_of_2(rows)),
            BC=block,
            num_warps=NUM_WARPS,
        )
    return Bounds(upper, lower)
