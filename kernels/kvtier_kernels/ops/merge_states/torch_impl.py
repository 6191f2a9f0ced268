"""Joining attention states in torch: the bits of `kvtier_kernels.state.merge`, over many at once.

It must not know which rows a state came from. Formula: kvtier_kernels.state.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from kvtier_kernels.ops.chunk_attention import ShapeError
from kvtier_kernels.ops.chunk_attention.decode import merge_stacked
from kvtier_kernels.state import AttentionState, LogitFrame, finalize, identity, merge


class Finalized(NamedTuple):
    """o: [R,d] of the dtype asked for; lse: float32 [R], natural log."""

    o: Tensor
    lse: Tensor


def check_states(m: Tensor, l: Tensor, u: Tensor, counts: Tensor | None) -> None:
    """Shapes, dtypes and, on the CPU, counts. Raises ShapeError."""
    if m.dim() != 3 or l.shape != m.shape or u.shape[:-1] != m.shape:
        raise ShapeError(
            f"want m and l [B,S,H], u [B,S,H,d], got {tuple(m.shape)}, {tuple(l.shape)}, {tuple(u.shape)}"
        )
    check_float32(m, l, u)
    if counts is None:
        return
    if counts.shape != (m.shape[0], m.shape[2]) or counts.dtype != torch.int32:
        raise ShapeError(f"counts is int32 [B,H], got {counts.dtype} {tuple(counts.shape)}")
    if (
        counts.device.type == "cpu"
        and counts.numel()
        and not 0 <= int(counts.min()) <= int(counts.max()) <= m.shape[1]
    ):
        raise ShapeError(f"counts must lie in [0, {m.shape[1]}]")


def check_float32(*tensors: Tensor) -> None:
    """Raises ShapeError."""
    if any(x.dtype != torch.float32 for x in tensors):
        raise ShapeError(f"states are float32, got {[str(x.dtype) for x in tensors]}")


def check_pair(m: Tensor, l: Tensor, u: Tensor, other_m: Tensor, other_l: Tensor, other_u: Tensor) -> None:
    """Two states of one shape. Raises ShapeError."""
    if not (
        m.shape == l.shape == other_m.shape == other_l.shape == u.shape[:-1] and u.shape == other_u.shape
    ):
        raise ShapeError(
            f"two states of one shape, got m {tuple(m.shape)}, l {tuple(l.shape)}, u {tuple(u.shape)} and "
            f"{tuple(other_m.shape)}, {tuple(other_l.shape)}, {tuple(other_u.shape)}"
        )
    check_float32(m, l, u, other_m, other_l, other_u)


def check_one(m: Tensor, l: Tensor, u: Tensor) -> None:
    """m, l [R], u [R,d]. Raises ShapeError."""
    if m.dim() != 1 or l.shape != m.shape or u.dim() != 2 or u.shape[0] != m.shape[0]:
        raise ShapeError(
            f"want m and l [R], u [R,d], got {tuple(m.shape)}, {tuple(l.shape)}, {tuple(u.shape)}"
        )
    check_float32(m, l, u)


def merge_states_torch(
    m: Tensor, l: Tensor, u: Tensor, counts: Tensor | None, *, frame: LogitFrame, estimated: bool
) -> AttentionState:
    """See the package. A state behind its count takes the identity's place, which changes no bit."""
    check_states(m, l, u, counts)
    batch, states, heads = m.shape
    if states == 0:
        return replace(identity((batch, heads), u.shape[3], frame, device=m.device), estimated=estimated)
    if counts is not None:
        there = torch.arange(states, device=m.device)[None, :, None] < counts[:, None, :]
        m, l = torch.where(there, m, -torch.inf), torch.where(there, l, 0.0)
        u = torch.where(there.unsqueeze(-1), u, 0.0)
    m, l, u = (x.transpose(0, 1).contiguous() for x in (m, l, u))
    return merge_stacked(AttentionState(m, l, u, frame, estimated))


def merge_state_torch_(
    m: Tensor, l: Tensor, u: Tensor, other_m: Tensor, other_l: Tensor, other_u: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See the package."""
    check_pair(m, l, u, other_m, other_l, other_u)
    frame = LogitFrame(1.0)
    both = merge(AttentionState(m, l, u, frame), AttentionState(other_m, other_l, other_u, frame))
    return m.copy_(both.m), l.copy_(both.l), u.copy_(both.u)


def finalize_state_torch(m: Tensor, l: Tensor, u: Tensor, *, dtype: torch.dtype) -> Finalized:
    """See the package."""
    check_one(m, l, u)
    o, lse = finalize(AttentionState(m, l, u, LogitFrame(1.0)))
    return Finalized(o.to(dtype), lse)
