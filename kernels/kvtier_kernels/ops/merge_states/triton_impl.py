# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator"
"""Joining attention states on a GPU: one program per answer, an ascending fold, no atomics.

It must not know which rows a state came from. Hazard: a request or a head times a stride passes int32, so
ids are widened first; over states, pointers walk.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtier_kernels.ops.attention_jit import empty_state, join_states
from kvtier_kernels.ops.chunk_attention import ShapeError
from kvtier_kernels.ops.merge_states.torch_impl import Finalized, check_one, check_pair, check_states
from kvtier_kernels.state import AttentionState, LogitFrame, States


@triton.jit
def merge_kernel(
    m_ptr,
    l_ptr,
    u_ptr,
    counts_ptr,
    m_out,
    l_out,
    u_out,
    states,
    stride_mb,
    stride_ms,
    stride_mh,
    stride_lb,
    stride_ls,
    stride_lh,
    stride_ub,
    stride_us,
    stride_uh,
    HAS_COUNTS: tl.constexpr,
    D: tl.constexpr,
):
    """Left fold of states [B, S, H] over S, from the identity; one program an answer, contiguous."""
    b = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1).to(tl.int64)
    heads = tl.num_programs(1)
    cols = tl.arange(0, D)
    out = b * heads + h
    n = states
    if HAS_COUNTS:
        n = tl.load(counts_ptr + out)
    m_at = m_ptr + b * stride_mb + h * stride_mh
    l_at = l_ptr + b * stride_lb + h * stride_lh
    u_at = u_ptr + b * stride_ub + h * stride_uh + cols
    m = tl.full([], float("-inf"), tl.float32)
    l = tl.full([], 0.0, tl.float32)
    u = tl.zeros([D], tl.float32)
    for _ in range(n):
        m, l, u = join_states(m, l, u, tl.load(m_at), tl.load(l_at), tl.load(u_at))
        m_at += stride_ms
        l_at += stride_ls
        u_at += stride_us
    tl.store(m_out + out, m)
    tl.store(l_out + out, l)
    tl.store(u_out + out * D + cols, u)


@triton.jit
def merge_into_kernel(m_ptr, l_ptr, u_ptr, other_m, other_l, other_u, D: tl.constexpr):
    """State `program_id(0)` of the first three becomes its union with the same of the others; contiguous."""
    r = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, D)
    m, l, u = join_states(
        tl.load(m_ptr + r),
        tl.load(l_ptr + r),
        tl.load(u_ptr + r * D + cols),
        tl.load(other_m + r),
        tl.load(other_l + r),
        tl.load(other_u + r * D + cols),
    )
    tl.store(m_ptr + r, m)
    tl.store(l_ptr + r, l)
    tl.store(u_ptr + r * D + cols, u)


@triton.jit
def finalize_kernel(m_ptr, l_ptr, u_ptr, o_ptr, lse_ptr, stride_ur, D: tl.constexpr):
    """o = u / l in o's dtype and lse = m + ln l of state `program_id(0)`."""
    r = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, D)
    l = tl.load(l_ptr + r)
    u = tl.load(u_ptr + r * stride_ur + cols)
    some = l > 0
    tl.store(o_ptr + r * D + cols, (u / tl.where(some, l, 1.0)).to(o_ptr.dtype.element_ty))
    lse = tl.load(m_ptr + r) + tl.log(tl.where(some, l, 1.0))
    tl.store(lse_ptr + r, tl.where(some, lse, float("-inf")))


def merge_states_triton(
    m: Tensor, l: Tensor, u: Tensor, counts: Tensor | None, *, frame: LogitFrame, estimated: bool
) -> AttentionState:
    """See the package. d a power of two; u's last dimension contiguous. Raises ShapeError."""
    check_states(m, l, u, counts)
    batch, _, heads = m.shape
    out = empty_state(u, (batch, heads), u.shape[3])
    merge_into(m, l, u, counts, out)
    return AttentionState(*out, frame=frame, estimated=estimated)


def merge_into(m: Tensor, l: Tensor, u: Tensor, counts: Tensor | None, out: States) -> None:
    """`merge_states_triton` of checked states into the memory of m, l [B,H], u [B,H,d], contiguous."""
    _check_dim(u)
    batch, states, heads = m.shape
    m_out, l_out, u_out = out
    if m_out.numel():
        merge_kernel[(batch, heads)](
            m,
            l,
            u,
            m_out if counts is None else counts.contiguous(),
            m_out,
            l_out,
            u_out,
            states,
            *m.stride(),
            *l.stride(),
            *u.stride()[:3],
            HAS_COUNTS=counts is not None,
            D=u.shape[3],
            num_warps=1,
        )


def merge_state_triton_(
    m: Tensor, l: Tensor, u: Tensor, other_m: Tensor, other_l: Tensor, other_u: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See the package. All contiguous; d a power of two. Raises ShapeError."""
    check_pair(m, l, u, other_m, other_l, other_u)
    _check_dim(u)
    if not all(x.is_contiguous() for x in (m, l, u, other_m, other_l, other_u)):
        raise ShapeError("states that are merged in place must be contiguous")
    if m.numel():
        merge_into_kernel[(m.numel(),)](m, l, u, other_m, other_l, other_u, D=u.shape[-1], num_warps=1)
    return m, l, u


def finalize_state_triton(m: Tensor, l: Tensor, u: Tensor, *, dtype: torch.dtype) -> Finalized:
    """See the package. d a power of two; u's last dimension contiguous. Raises ShapeError."""
    check_one(m, l, u)
    _check_dim(u)
    rows, d = u.shape
    o = torch.empty(rows, d, dtype=dtype, device=u.device)
    lse = torch.empty(rows, dtype=torch.float32, device=u.device)
    if rows:
        finalize_kernel[(rows,)](m.contiguous(), l.contiguous(), u, o, lse, u.stride(0), D=d, num_warps=1)
    return Finalized(o, lse)


def _check_dim(u: Tensor) -> None:
    d = u.shape[-1]
    if d < 16 or d & (d - 1) or u.stride(-1) != 1:
        raise ShapeError(f"head dim {d} is no power of two >= 16, or its stride {u.stride(-1)} is not 1")
