"""Where chunks lie, as the compiled kernels are told: addresses, strides, and who sees how many rows.

Why it exists: what is handed over are bare addresses, so that which memory they stand for, and that it stays,
is decided in one place. It must not know what is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtier_kernels.compiled.layout import AHEAD, LANES, Job

Integers = NDArray[np.int64]

_AT_ONCE = 96
"""Query heads per KV head of one job: their weights over a chunk stay in the second level of cache."""


@dataclass(frozen=True, slots=True)
class Work:
    """What `Library.attend` takes. Whoever holds it keeps the memory that `jobs` points to."""

    jobs: Integers
    queries: Integers
    slots: Integers
    seen: Integers


def at_once(group: int) -> int:
    """Queries of one job, at most, of so many heads per KV head."""
    return max(1, _AT_ONCE // group)


def readable(x: Tensor) -> bool:
    """Whether rows [..., d] can be read where they are: float32 in the CPU's memory, d contiguous."""
    return x.dtype is torch.float32 and x.is_cpu and x.stride(-1) == 1 and x.shape[-1] % LANES == 0


def tables(keys: Integers, values: Integers, key_step: int, value_step: int, rows: int) -> Integers:
    """int64 [n, 2, blocks] and spare entries behind: addresses of blocks of 16 rows. keys, values: addresses
    of each chunk's first row [n]; steps: bytes from row to row."""
    count, blocks = len(keys), -(-rows // LANES)
    table = np.empty(2 * count * blocks + AHEAD, np.int64)
    by_chunk = table[: 2 * count * blocks].reshape(count, 2, blocks)
    offsets = np.arange(blocks) * LANES
    np.add(keys[:, None], offsets * key_step, out=by_chunk[:, 0])
    np.add(values[:, None], offsets * value_step, out=by_chunk[:, 1])
    table[2 * count * blocks :] = table[-AHEAD - 1]
    return table


def jobs_of(
    table: Integers, count: int, blocks: int, strides: tuple[int, int, int, int], rows: int
) -> Integers:
    """[count, len(Job)], one for each chunk of a table, all rows visible to one query. strides: bytes from
    row to row and from head to head of keys, then of values."""
    jobs = np.empty((count, len(Job)), np.int64)
    jobs[:, Job.KEYS] = table.ctypes.data + np.arange(count) * (16 * blocks)
    jobs[:, Job.VALUES] = jobs[:, Job.KEYS] + 8 * blocks
    jobs[:, Job.VISIBLE] = rows
    jobs[:, Job.FIRST] = 0
    jobs[:, Job.COUNT] = 1
    jobs[:, Job.BIAS] = 0
    columns = [Job.KEY_ROW, Job.KEY_HEAD, Job.VALUE_ROW, Job.VALUE_HEAD]
    jobs[:, columns] = strides
    return jobs


def one_each(jobs: Integers, slots: Integers) -> Work:
    """Jobs of one query, the first, each merged into its slot."""
    jobs = jobs.copy()
    jobs[:, Job.FIRST] = np.arange(len(jobs))
    return Work(jobs, np.zeros(len(jobs), np.int64), slots, jobs[:, Job.VISIBLE].copy())


def of_block(job: Integers, seen: Integers, group: int, *, apart: bool = False) -> Work:
    """A block of queries over one chunk [1, len(Job)], each in a slot of its own. seen: rows that each sees,
    ascending; queries that see none have no job. apart: a job for each query, so that it meets no row that it
    does not see."""
    first = int(np.searchsorted(seen, 1))
    queries = np.arange(first, len(seen))
    most = 1 if apart else at_once(group)
    starts = np.arange(0, len(queries), most)
    ends = np.minimum(starts + most, len(queries))
    jobs = np.repeat(job, len(starts), 0)
    jobs[:, Job.FIRST], jobs[:, Job.COUNT] = starts, ends - starts
    own = np.ascontiguousarray(seen[first:])
    jobs[:, Job.VISIBLE] = own[ends - 1]
    return Work(jobs, queries, queries, own)


def grouped(parts: Sequence[tuple[Integers, Sequence[int], int]], group: int) -> Work:
    """parts: jobs [n, len(Job)], the queries that attend all of them, and how many rows of each these see.
    Each query's states go to its own slot, in the order of the parts."""
    found: list[Integers] = []
    queries: list[int] = []
    seen: list[int] = []
    most = at_once(group)
    for jobs, own, visible in parts:
        for lo in range(0, len(own), most):
            piece = jobs.copy()
            piece[:, Job.VISIBLE] = visible
            piece[:, Job.FIRST] = len(queries) + lo
            piece[:, Job.COUNT] = min(most, len(own) - lo)
            found.append(piece)
        queries += own
        seen += [visible] * len(own)
    which = np.array(queries, np.int64)
    every = found[0] if len(found) == 1 else np.concatenate(found)
    return Work(every, which, which, np.array(seen, np.int64))
