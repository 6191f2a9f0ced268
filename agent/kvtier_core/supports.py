"""Attention over the rows that a selector chose, one state per aligned chunk.

Why it exists: a selection has one list of rows a query head, a KV head or a layer, may weigh its rows and may
say what stands for the others; the rows come chunk by chunk from wherever they lie. It must not know how rows
were chosen or placed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvtier_core.folding import Query
from kvtier_core.planner import ChunkRead
from kvtier_kernels.ops.chunk_attention.listed import listed_states
from kvtier_kernels.state import AttentionState


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
        # Where each chunk's rows stand in each list. The query sees no row behind its own.
        edges = np.arange(0, query.first_position + 1 + chunk_tokens, chunk_tokens)
        edges[-1] = query.first_position + 1
        cuts = [np.searchsorted(rows, edges).tolist() for rows in self.lists]

        def of(read: ChunkRead, k: Tensor, v: Tensor) -> Iterator[AttentionState]:
            at, first = read.chunk, read.chunk * chunk_tokens
            parts = [slice(cut[at], cut[at + 1]) for cut in cuts]
            rows = [one[part] for one, part in zip(self.lists, parts, strict=True)]
            weights = None
            if self.log_weight is not None:
                weights = [one[part] for one, part in zip(self.log_weight, parts, strict=True)]
            yield listed_states(query.q, k, v, rows, weights, query.frame, first)

        return of
