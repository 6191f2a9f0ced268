"""Chunks at equal distances in one memory: what one product over several of them needs.

Why it exists: a cache's slots are at regular distances, so the chunks of a layer mostly are, in one order or
the other; then one call reads them all in place. It must not know slots, tiers or queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from kvtier_kernels.ops.chunk_attention.products import Floats


@dataclass(frozen=True, slots=True)
class ChunkRun:
    """n chunks in ascending order of their rows. keys, values: each chunk's float32 [Hk, R, d], rows
    contiguous; key_array, value_array: the same memory as one view [n, Hk, R, d], which may reach over
    several allocations and is good as long as the tensors are kept."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    key_array: Floats
    value_array: Floats

    @property
    def count(self) -> int:
        return len(self.keys)

    @property
    def rows(self) -> int:
        return int(self.key_array.shape[2])

    def cut(self, first: int, last: int) -> ChunkRun:
        """Its chunks [first, last)."""
        if first == 0 and last == self.count:
            return self
        part = slice(first, last)
        return ChunkRun(self.keys[part], self.values[part], self.key_array[part], self.value_array[part])


def chunk_runs(keys: Sequence[Tensor], values: Sequence[Tensor], most: int = 1 << 30) -> list[ChunkRun]:
    """Groups neighbours of n chunks, float32 [Hk, R, d] in CPU memory, into runs of at most `most`; their
    order stays. A chunk whose distance to the one before is not the run's begins another."""
    runs: list[ChunkRun] = []
    first = 0
    addresses = [(k.data_ptr(), v.data_ptr()) for k, v in zip(keys, values, strict=True)]
    while first < len(keys):
        end, step = first + 1, None
        while end < len(keys) and end - first < most and _alike(keys, values, first, end):
            here, before = addresses[end], addresses[end - 1]
            distance = (here[0] - before[0], here[1] - before[1])
            if step is not None and distance != step:
                break
            step, end = distance, end + 1
        runs.append(_run(keys[first:end], values[first:end], step or (0, 0)))
        first = end
    return runs


def _alike(keys: Sequence[Tensor], values: Sequence[Tensor], a: int, b: int) -> bool:
    """Whether two chunks have the same shape and layout."""
    return all(x[a].shape == x[b].shape and x[a].stride() == x[b].stride() for x in (keys, values))


def _run(keys: Sequence[Tensor], values: Sequence[Tensor], step: tuple[int, int]) -> ChunkRun:
    return ChunkRun(
        tuple(keys),
        tuple(values),
        _spread(keys[0], len(keys), step[0]),
        _spread(values[0], len(keys), step[1]),
    )


def _spread(first: Tensor, count: int, step: int) -> Floats:
    base: Floats = first.numpy()
    return np.lib.stride_tricks.as_strided(base, (count, *base.shape), (step, *base.strides), writeable=False)
