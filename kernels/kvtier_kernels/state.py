"""Attention states: what every attention operation returns and how two of them become one.

A state is a softmax that has not been divided yet. It exists so that rows may be attended where
they are and joined afterwards. It must not know which rows it came from, nor where they live.

For one query and head over rows ``i`` with logits ``s_i`` (already scaled) and values ``v_i``:

    m = max s_i        l = sum exp(s_i - m)        u = sum exp(s_i - m) v_i

``log`` is natural at every boundary. No rows means ``(-inf, 0, 0)`` and nothing else, so that two
empty states merge without ever evaluating ``-inf - (-inf)``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvtier_kernels.compiled import library
from kvtier_kernels.numerics import LANES, exp_plain

_LOWEST = torch.finfo(torch.float32).min


class FrameMismatch(ValueError):
    """Two states whose logits mean different things were about to be merged."""


class LogitFrame(NamedTuple):
    """What a logit means. States merge only when all of it agrees.

    scale: factor on q.k. key_shift_id: 0 for raw keys, else names the vector subtracted from each
    key (softmax ignores the shift, ``l`` and ``m`` do not). rope_epoch: grows when rows are
    re-positioned. softcap: logits s became softcap tanh(s / softcap), where it is not None. Which rows
    were attended, a window of them for one, is not part of it.
    """

    scale: float
    key_shift_id: int = 0
    rope_epoch: int = 0
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class AttentionState:
    """m, l: float32 [..., Hq]; u: float32 [..., Hq, d]. estimated: l and u stand for rows that nobody
    read (a cluster's sums, a mean of V), so that l bounds nothing; what it merges into is estimated too."""

    m: Tensor
    l: Tensor
    u: Tensor
    frame: LogitFrame
    estimated: bool = False

    def __post_init__(self) -> None:
        if self.m.shape != self.l.shape or self.u.shape[:-1] != self.m.shape:
            raise ValueError(
                f"state shapes disagree: m {tuple(self.m.shape)}, l {tuple(self.l.shape)}, "
                f"u {tuple(self.u.shape)}"
            )
        if not (self.m.dtype == self.l.dtype == self.u.dtype == torch.float32):
            raise ValueError(f"a state is float32, got {self.m.dtype}, {self.l.dtype}, {self.u.dtype}")


def identity(
    lead: Sequence[int], head_dim: int, frame: LogitFrame, *, device: torch.device | str = "cpu"
) -> AttentionState:
    """The state of no rows; ``lead`` is the shape before the head dimension, e.g. (Nq, Hq)."""
    shape = tuple(lead)
    return AttentionState(
        m=torch.full(shape, -torch.inf, dtype=torch.float32, device=device),
        l=torch.zeros(shape, dtype=torch.float32, device=device),
        u=torch.zeros((*shape, head_dim), dtype=torch.float32, device=device),
        frame=frame,
    )


def merge(a: AttentionState, b: AttentionState) -> AttentionState:
    """The state of the union of two disjoint supports.

    Formula: m = max(m_a, m_b); w_x = exp(m_x - m), with m replaced by the lowest finite number when
    both are empty; l = w_a l_a + w_b l_b; u likewise. Merging with the identity changes no bit.
    Raises FrameMismatch.
    """
    if a.frame != b.frame:
        raise FrameMismatch(f"{a.frame} and {b.frame} do not merge")
    shape = torch.maximum(a.m, b.m).shape
    m, l = a.m.expand(shape).clone(), a.l.expand(shape).clone()
    u = a.u.expand(*shape, a.u.shape[-1]).clone(memory_format=torch.contiguous_format)
    totals = m.contiguous(), l.contiguous(), u
    fold(totals, (b.m.expand(shape)[None], b.l.expand(shape)[None], b.u.expand(u.shape)[None]))
    return AttentionState(*totals, frame=a.frame, estimated=a.estimated or b.estimated)


States = tuple[Tensor, Tensor, Tensor]


def fold(totals: States, states: States) -> None:
    """`merge`s states m, l [n, ...], u [n, ..., d], in their order, into totals m, l [...], u [..., d], which
    are contiguous. By the compiled kernels where there are any; plain operations give the same bits."""
    m, _, u = totals
    if m.numel() == 0 or states[0].shape[0] == 0:
        return
    compiled = library() if m.is_cpu and u.shape[-1] % LANES == 0 else None
    if compiled is None:
        fold_plain(totals, states)
        return
    count, d = states[0].shape[0], u.shape[-1]
    stacked = (
        states[0].reshape(count, -1).contiguous(),
        states[1].reshape(count, -1).contiguous(),
        states[2].reshape(count, -1, d).contiguous(),
    )
    compiled.fold(stacked, totals)


def fold_plain(totals: States, states: States) -> None:
    """`fold` with tensor operations."""
    m, l, u = totals
    exp = exp_plain if m.is_cpu else torch.exp
    for other_m, other_l, other_u in zip(*states, strict=True):
        both = torch.maximum(m, other_m)
        anchor = both.clamp_min(_LOWEST)
        keep, take = exp(m - anchor), exp(other_m - anchor)
        l.copy_(torch.addcmul(keep * l, take, other_l))
        u.copy_(torch.addcmul(keep.unsqueeze(-1) * u, take.unsqueeze(-1), other_u))
        m.copy_(both)


def merge_ascending(states: Iterable[AttentionState]) -> AttentionState:
    """Left fold of `merge`. Callers pass chunks in ascending order of their rows.

    Merging is associative only up to rounding, so this order is part of the numerics version.
    Raises ValueError for an empty sequence, since the shapes would be a guess.
    """
    total: AttentionState | None = None
    for state in states:
        total = state if total is None else merge(total, state)
    if total is None:
        raise ValueError("nothing to merge; use identity() for a query without rows")
    return total


def finalize(state: AttentionState) -> tuple[Tensor, Tensor]:
    """Returns (o, lse): o = u / l, or 0 where there are no rows; lse = m + ln l, -inf there."""
    empty = state.l == 0
    o = state.u / torch.where(empty, 1.0, state.l).unsqueeze(-1)
    return o, state.m + torch.log(state.l)
