"""States merged in the order in which they come, full chunks several at a time.

Why it exists: whoever attends, whole heads or some of them, from memory or from storage, must merge in one
way, since the order is part of the numerics version. It must not know where rows lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtier_core.errors import CoreError, Reason
from kvtier_kernels.ops.chunk_attention.decode import decode_states, merge_stacked
from kvtier_kernels.state import AttentionState, FrameMismatch, LogitFrame, merge

BATCH = 8


@dataclass(frozen=True, slots=True)
class Query:
    """q float32 [Nq, Hq, d]; query i stands at first_position + i. deadline on the engine's clock."""

    q: Tensor
    first_position: int
    frame: LogitFrame
    deadline: float | None


class Fold:
    """Merges states in the order they are added. Full chunks in place wait for each other, since one call
    over several costs little more than one; the bits are those of one after the other."""

    def __init__(self, query: Query) -> None:
        self._query = query
        self._total: AttentionState | None = None
        self._waiting: list[Tensor] = []

    def add(self, state: AttentionState) -> None:
        self._flush()
        self._total = state if self._total is None else merge(self._total, state)

    def add_all(self, states: Sequence[AttentionState]) -> None:
        """One after the other."""
        self._flush()
        if len(states) > 1 and states[0].m.shape[0] == 1:
            parts = states if self._total is None else (self._total, *states)
            frame = states[0].frame
            if any(part.frame != frame for part in parts):
                raise FrameMismatch(f"states of other frames than {frame} do not merge")
            self._total = merge_stacked(
                AttentionState(
                    m=torch.stack([part.m for part in parts]),
                    l=torch.stack([part.l for part in parts]),
                    u=torch.stack([part.u for part in parts]),
                    frame=frame,
                    estimated=any(part.estimated for part in parts),
                )
            )
            return
        for state in states:
            self._total = state if self._total is None else merge(self._total, state)

    def add_full(self, payload: Tensor) -> None:
        """A payload [2, Hk, C, d] whose rows are all visible."""
        self._waiting.append(payload)
        if len(self._waiting) == BATCH:
            self._flush()

    def _flush(self) -> None:
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        keys, values = [payload[0] for payload in waiting], [payload[1] for payload in waiting]
        states = decode_states(self._query.q, keys, values, self._query.frame)
        if self._total is not None:
            states = _prepend(self._total, states)
        self._total = merge_stacked(states)

    def result(self) -> AttentionState:
        self._flush()
        if self._total is None:
            raise CoreError(Reason.SUPPORT_GAP, "there is no row to attend")
        return self._total


def _prepend(first: AttentionState, rest: AttentionState) -> AttentionState:
    return AttentionState(
        m=torch.cat((first.m.unsqueeze(0), rest.m)),
        l=torch.cat((first.l.unsqueeze(0), rest.l)),
        u=torch.cat((first.u.unsqueeze(0), rest.u)),
        frame=first.frame,
        estimated=first.estimated or rest.estimated,
    )
