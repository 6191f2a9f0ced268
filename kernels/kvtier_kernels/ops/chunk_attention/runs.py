"""Chunks of one layout that follow each other: what one call reads in place.

Why it exists: a cache's slots have one layout, so what a call must know of them is little, and stays the same
from frame to frame. It must not know slots, tiers or queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from kvtier_kernels.compiled.layout import LANES
from kvtier_kernels.ops.chunk_attention.jobs import Integers, jobs_of, readable, tables
from kvtier_kernels.ops.chunk_attention.torch_impl import ShapeError


@dataclass(frozen=True, slots=True)
class ChunkRun:
    """n chunks in ascending order of their rows. keys, values: each chunk's float32 [Hk, R, d], rows
    contiguous. jobs: what the compiled kernels are told of each, good as long as the run is kept; `table`
    is what they point to."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    jobs: Integers
    table: Integers

    @property
    def count(self) -> int:
        return len(self.keys)

    @property
    def rows(self) -> int:
        return int(self.keys[0].shape[1])

    def cut(self, first: int, last: int) -> ChunkRun:
        """Its chunks [first, last)."""
        if first == 0 and last == self.count:
            return self
        part = slice(first, last)
        return ChunkRun(self.keys[part], self.values[part], self.jobs[part], self.table)


def chunk_runs(keys: Sequence[Tensor], values: Sequence[Tensor], most: int = 1 << 30) -> list[ChunkRun]:
    """Groups neighbours of n chunks, float32 [Hk, R, d] in CPU memory, into runs of at most `most`; their
    order stays. A chunk that does not have the run's layout begins another. ShapeError for what would be read
    as something else."""
    runs: list[ChunkRun] = []
    first = 0
    while first < len(keys):
        end = first + 1
        while end < len(keys) and end - first < most and _alike(keys, values, first, end):
            end += 1
        runs.append(_run(keys[first:end], values[first:end]))
        first = end
    return runs


def _alike(keys: Sequence[Tensor], values: Sequence[Tensor], a: int, b: int) -> bool:
    """Whether two chunks have the same shape, layout and numbers."""
    return all(
        x[a].shape == x[b].shape and x[a].stride() == x[b].stride() and x[a].dtype is x[b].dtype
        for x in (keys, values)
    )


def _run(keys: Sequence[Tensor], values: Sequence[Tensor]) -> ChunkRun:
    k, v = keys[0], values[0]
    # Of the others `_alike` says the same.
    if k.shape != v.shape or not (readable(k) and readable(v)):
        raise ShapeError(
            f"want float32 [Hk,R,d] in CPU memory, rows contiguous, got {k.dtype} {tuple(k.shape)} and "
            f"{v.dtype} {tuple(v.shape)}"
        )
    rows = k.shape[1]
    addresses = [np.array([x.data_ptr() for x in some], np.int64) for some in (keys, values)]
    table = tables(addresses[0], addresses[1], 4 * k.stride(1), 4 * v.stride(1), rows)
    strides = (4 * k.stride(1), 4 * k.stride(0), 4 * v.stride(1), 4 * v.stride(0))
    jobs = jobs_of(table, len(keys), -(-rows // LANES), strides, rows)
    return ChunkRun(tuple(keys), tuple(values), jobs, table)
