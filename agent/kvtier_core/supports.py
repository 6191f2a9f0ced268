"""Attention over the rows that a selector chose, one state per aligned chunk.

Why it exists: a selection has one list of rows a query head, a KV head or a layer, may weigh its rows and may
say what stands for the others; the rows come chunk by chunk from wherever they lie. It must not know how rows
were chosen or placed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtier_core.folding import Query
from kvtier_core.planner import ChunkRead
from kvtier_kernels.ops.chunk_attention import chunk_state
from kvtier_kernels.ops.chunk_attention.weighted import weighted_state
from kvtier_kernels.state import AttentionState, identity


@dataclass(frozen=True, slots=True)
class Support:
    """lists: rows to read, ascending, one array a query head or a KV head. log_weight: added to the logits of
    those rows. complete: makes the answer's state of that of the rows read."""

    lists: tuple[NDArray[np.int64], ...]
    log_weight: tuple[NDArray[np.float32], ...] | None = None
    complete: Callable[[AttentionState], AttentionState] | None = None

    def rows_of(self, kv_heads: int) -> tuple[NDArray[np.int64], ...]:
        """The rows that each KV head's query heads read, ascending."""
        group = len(self.lists) // kv_heads
        if group == 1:
            return self.lists
        groups = [self.lists[head * group : (head + 1) * group] for head in range(kv_heads)]
        return tuple(np.unique(np.concatenate(lists)) for lists in groups)

    def states(
        self, query: Query, chunk_tokens: int
    ) -> Callable[[ChunkRead, Tensor, Tensor], Iterator[AttentionState]]:
        """What makes the state of one chunk's rows k, v [n, Hk, d] that some list holds."""
        group = query.q.shape[1] // len(self.lists)

        def of(read: ChunkRead, k: Tensor, v: Tensor) -> Iterator[AttentionState]:
            shared = query.q.shape[1] // k.shape[1]
            parts = [
                self._part(
                    at, query, group, at * group // shared, read.chunk * chunk_tokens, chunk_tokens, k, v
                )
                for at in range(len(self.lists))
            ]
            yield AttentionState(
                m=torch.cat([part.m for part in parts], dim=1),
                l=torch.cat([part.l for part in parts], dim=1),
                u=torch.cat([part.u for part in parts], dim=1),
                frame=query.frame,
                estimated=any(part.estimated for part in parts),
            )

        return of

    def _part(
        self, at: int, query: Query, group: int, head: int, first: int, size: int, k: Tensor, v: Tensor
    ) -> AttentionState:
        rows = self.lists[at]
        lo, hi = np.searchsorted(rows, (first, first + size))
        q = query.q[:, at * group : (at + 1) * group]
        if lo == hi:
            return identity((q.shape[0], group), q.shape[2], query.frame)
        chosen = torch.from_numpy(rows[lo:hi])
        local = chosen - first
        keys, values = k[:, head].index_select(0, local), v[:, head].index_select(0, local)
        if self.log_weight is not None:
            weights = torch.from_numpy(self.log_weight[at][lo:hi])
            return weighted_state(q, keys, values, weights, query.frame)
        return chunk_state(
            q,
            keys.unsqueeze(1),
            values.unsqueeze(1),
            scale=query.frame.scale,
            q_pos0=query.first_position,
            row_pos0=chosen,
            frame=query.frame,
        )
