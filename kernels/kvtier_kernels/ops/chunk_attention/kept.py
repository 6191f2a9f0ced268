"""Queries over the same chunks, call after call: what the kernels are told is kept, and little else done.

Why it exists: between two layers of a token a model's weights go through a processor's caches, so a decode
frame runs cold, and then what its calls of libraries touch costs more than a thousand rows. The bits are
those of `outputs.attend`. It must not know where chunks live.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from copy import copy
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kvtier_kernels.compiled.layout import LANES, BatchWord, DecodeWord, Job, Word, scratch_floats
from kvtier_kernels.ops.chunk_attention.decode import Reading
from kvtier_kernels.ops.chunk_attention.jobs import Integers, Work, at_once, grouped
from kvtier_kernels.ops.chunk_attention.runs import ChunkRun

if TYPE_CHECKING:
    from kvtier_kernels.compiled.machine import Library


# Keeps the interpreter's lock: to let it go and take it again costs more than a row's copy.
_copy = ctypes.cast(
    ctypes.memmove, ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
)
# Plain numbers, for the same reason.
_QUERY, _OUT = int(DecodeWord.QUERY), int(DecodeWord.OUT)


class DecodeRoom:
    """Memory that calls of one geometry use one after the other: the queries times their scales, the totals
    and scratch. rows: of the largest chunk; queries: of a call."""

    def __init__(self, query_heads: int, kv_heads: int, head_dim: int, rows: int, queries: int = 1) -> None:
        self.query_heads, self.kv_heads, self.head_dim = query_heads, kv_heads, head_dim
        self.rows, self.queries = -(-rows // LANES) * LANES, queries
        group = query_heads // kv_heads
        vectors = queries * query_heads * head_dim
        states = group * min(queries, at_once(group))
        scratch = scratch_floats(kv_heads, states, head_dim, self.rows)
        sizes = (vectors, vectors, queries * query_heads, queries * query_heads, scratch)
        self._memory = np.empty(sum(sizes), np.float32)
        ends = (4 * np.cumsum(sizes)).tolist()
        self.q, self.u, self.m, self.l, self.scratch = (
            self._memory.ctypes.data + end - 4 * size for end, size in zip(ends, sizes, strict=True)
        )
        _, u, m, l, _ = np.split(self._memory, np.cumsum(sizes)[:-1])
        self.totals = (
            m.reshape(queries, query_heads),
            l.reshape(queries, query_heads),
            u.reshape(queries, query_heads, head_dim),
        )

    def part(self, first: int, queries: int) -> DecodeRoom:
        """The room's own memory for so many of its queries, from `first` on. Calls of parts may overlap, but
        for the work on scratch, which all of them share."""
        if not 0 <= first < first + queries <= self.queries:
            raise ValueError(f"queries {first} to {first + queries} of a room of {self.queries}")
        part = copy(self)
        part.queries = queries
        vector = 4 * self.query_heads * self.head_dim
        part.q, part.u = self.q + first * vector, self.u + first * vector
        part.m, part.l = (address + 4 * first * self.query_heads for address in (self.m, self.l))
        m, l, u = self.totals
        last = first + queries
        part.totals = m[first:last], l[first:last], u[first:last]
        return part


class OpenRows:
    """Where rows of an open chunk are written: float32 [Hk, R, d] of keys and of values, rows contiguous,
    whose memory must stay."""

    __slots__ = ("_heads", "_row", "_run", "_to")

    def __init__(self, run: ChunkRun) -> None:
        key, value = run.keys[0], run.values[0]
        heads, _, width = key.shape
        self._run, self._row = run, 4 * width
        self._heads = [(4 * head * key.stride(0), 4 * head * value.stride(0)) for head in range(heads)]
        self._to = key.data_ptr(), 4 * key.stride(1), value.data_ptr(), 4 * value.stride(1)

    def write(self, k: Tensor, v: Tensor, at: int) -> None:
        """Row `at` of the chunk. k, v: float32 [1, Hk, d]."""
        k, v = k.contiguous(), v.contiguous()
        key, key_step, value, value_step = self._to
        key, value = key + at * key_step, value + at * value_step
        from_key, from_value, size = k.data_ptr(), v.data_ptr(), self._row
        for key_head, value_head in self._heads:
            _copy(key + key_head, from_key, size)
            _copy(value + value_head, from_value, size)
            from_key += size
            from_value += size


class KeptDecode:
    """Of full chunks in ascending order and the open one behind them. Calls that share a room must not
    overlap."""

    __slots__ = ("_address", "_call", "_kept", "_visible", "_words", "write")

    def __init__(
        self, compiled: Library, room: DecodeRoom, runs: Sequence[ChunkRun], open_run: ChunkRun, scale: float
    ) -> None:
        """runs: float32 [Hk, R, d] of the room's geometry, whose memory must stay."""
        jobs = np.concatenate([*(run.jobs for run in runs), open_run.jobs])
        jobs[:, Job.FIRST] = np.arange(len(jobs))
        only, factor = np.zeros(len(jobs), np.int64), np.array([scale], np.float32)
        seen = jobs[:, Job.VISIBLE].copy()
        attend = attend_words(room, Work(jobs, only, only, seen))
        words = np.empty(len(DecodeWord), np.int64)
        words[DecodeWord.ATTEND], words[DecodeWord.SCALE] = attend.ctypes.data, factor.ctypes.data
        # As plain memory: an array takes three times as long for a number.
        self._words, self._address = words.data, int(words.ctypes.data)
        self._visible = jobs[-1, Job.VISIBLE :].data, seen[-1:].data
        self._call = compiled.decode
        # What the addresses stand for.
        self._kept = room, tuple(runs), open_run, only, factor, attend
        self.write = OpenRows(open_run).write

    def output(self, q: Tensor, visible: int) -> Tensor:
        """[1, Hq, d] of a query float32 [1, Hq, d] that sees `visible` rows of the open chunk, at least 1,
        and all of the others."""
        q = q.contiguous()
        out = torch.empty_like(q)
        job, seen = self._visible
        job[0] = seen[0] = visible
        words = self._words
        words[_QUERY], words[_OUT] = q.data_ptr(), out.data_ptr()
        self._call(self._address)
        return out


class KeptBatch:
    """Several queries, each over its full chunks in ascending order and the open one behind them; chunks that
    they share are read once. It keeps no chunk: whoever calls does. Calls that share a room must not
    overlap."""

    __slots__ = ("_address", "_at", "_attend", "_compiled", "_jobs", "_kept", "_open", "_parts", "_words")

    def __init__(
        self,
        compiled: Library,
        room: DecodeRoom,
        readings: Sequence[Reading],
        scales: Sequence[float],
        states: int,
    ) -> None:
        """readings: of all queries, in each one's order, its last that of its open chunk alone. scales: of
        each query. states: about as many are formed between two looks at the clock."""
        count, group = len(scales), room.query_heads // room.kv_heads
        work = grouped([(each.run.jobs, each.queries, each.visible) for each in readings], group)
        factors, addresses = np.array(scales, np.float32), np.empty(count, np.int64)
        attend, words = attend_words(room, work), np.empty(len(BatchWord), np.int64)
        words[BatchWord.ATTEND], words[BatchWord.COUNT] = attend.ctypes.data, count
        words[BatchWord.QUERIES], words[BatchWord.SCALES] = addresses.ctypes.data, factors.ctypes.data
        self._compiled, self._jobs, self._attend, self._words = compiled, work.jobs, attend, words
        self._address, self._at = int(words.ctypes.data), int(attend.ctypes.data)
        last = [max(np.flatnonzero(work.queries == query)) for query in range(count)]
        job_of = np.repeat(np.arange(len(work.jobs)), work.jobs[:, Job.COUNT])
        seen_of = np.concatenate(
            [np.arange(first, first + n) for first, n in work.jobs[:, [Job.FIRST, Job.COUNT]]]
        )
        self._open = np.array([job_of[np.flatnonzero(seen_of == at)[-1]] for at in last]), np.array(last)
        self._parts = _parts(work.jobs[:, Job.COUNT], states)
        # What the addresses stand for; of runs their tables, and not their chunks.
        self._kept = room, work, [each.run.table for each in readings], factors, addresses

    def output(
        self, q: Sequence[Tensor], visible: Sequence[int], over: Callable[[], bool] = lambda: False
    ) -> Tensor | None:
        """[B, Hq, d] of queries float32 [1, Hq, d] that see so many rows of their open chunks, at least 1,
        and all of the others. over: asked between some of the states whether to give up; None then."""
        _, work, _, _, addresses = self._kept
        q = [one.contiguous() for one in q]
        jobs, seen = self._open
        self._jobs[jobs, Job.VISIBLE] = work.seen[seen] = visible
        addresses[:] = [one.data_ptr() for one in q]
        out = torch.empty((len(q), *q[0].shape[1:]), dtype=torch.float32)
        words, attend = self._words, self._attend
        words[BatchWord.OUT] = out.data_ptr()
        self._compiled.decode_begin(self._address)
        row = self._jobs.strides[0]
        for first, count in self._parts:
            if first and over():
                return None
            attend[Word.JOBS], attend[Word.JOB_COUNT] = self._jobs.ctypes.data + first * row, count
            self._compiled.attend_words(self._at)
        self._compiled.decode_end(self._address)
        return out


def attend_words(room: DecodeRoom, work: Work) -> Integers:
    """Arguments of `attend` for work whose queries and totals are a room's."""
    words = np.empty(len(Word), np.int64)
    words[Word.Q], words[Word.M], words[Word.L], words[Word.U] = room.q, room.m, room.l, room.u
    words[Word.JOBS], words[Word.JOB_COUNT] = work.jobs.ctypes.data, len(work.jobs)
    words[Word.QUERIES], words[Word.SLOTS] = work.queries.ctypes.data, work.slots.ctypes.data
    words[Word.SEEN] = work.seen.ctypes.data
    words[Word.HEADS], words[Word.GROUP] = room.kv_heads, room.query_heads // room.kv_heads
    words[Word.HEAD_DIM], words[Word.SCRATCH], words[Word.ROOM] = room.head_dim, room.scratch, room.rows
    return words


def _parts(counts: Integers, states: int) -> list[tuple[int, int]]:
    """(first, count) of jobs that follow each other, each part of about that many states."""
    parts: list[tuple[int, int]] = []
    first, formed = 0, 0
    for job, count in enumerate(counts.tolist()):
        if job > first and formed + count > states:
            parts.append((first, job - first))
            first, formed = job, 0
        formed += count
    parts.append((first, len(counts) - first))
    return parts
