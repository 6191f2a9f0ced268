"""One query over the same chunks, call after call: what the kernels are told is kept, and little else done.

Why it exists: between two layers of a token a model's weights go through a processor's caches, so a decode
frame runs cold, and then what its calls of libraries touch costs more than a thousand rows. The bits are
those of `outputs.attend`. It must not know where chunks live.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import memmove
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kvtier_kernels.compiled.layout import LANES, DecodeWord, Job, Word, scratch_floats
from kvtier_kernels.ops.chunk_attention.runs import ChunkRun

if TYPE_CHECKING:
    from kvtier_kernels.compiled.machine import Library


class DecodeRoom:
    """Memory that calls of one geometry use one after the other: the query times its scale, the totals and
    scratch. rows: of the largest chunk."""

    def __init__(self, query_heads: int, kv_heads: int, head_dim: int, rows: int) -> None:
        self.query_heads, self.kv_heads, self.head_dim = query_heads, kv_heads, head_dim
        self.rows = -(-rows // LANES) * LANES
        vectors = query_heads * head_dim
        scratch = scratch_floats(kv_heads, query_heads // kv_heads, head_dim, self.rows)
        sizes = (vectors, vectors, query_heads, query_heads, scratch)
        self._memory = np.empty(sum(sizes), np.float32)
        ends = (4 * np.cumsum(sizes)).tolist()
        self.q, self.u, self.m, self.l, self.scratch = (
            self._memory.ctypes.data + end - 4 * size for end, size in zip(ends, sizes, strict=True)
        )


class KeptDecode:
    """Of full chunks in ascending order and the open one behind them. Calls that share a room must not
    overlap."""

    __slots__ = ("_address", "_call", "_heads", "_jobs", "_kept", "_row", "_seen", "_to", "_words")

    def __init__(
        self, compiled: Library, room: DecodeRoom, runs: Sequence[ChunkRun], open_run: ChunkRun, scale: float
    ) -> None:
        """runs: float32 [Hk, R, d] of the room's geometry, whose memory must stay."""
        jobs = np.concatenate([*(run.jobs for run in runs), open_run.jobs])
        jobs[:, Job.FIRST] = np.arange(len(jobs))
        only, factor = np.zeros(len(jobs), np.int64), np.array([scale], np.float32)
        self._jobs, self._seen = jobs, jobs[:, Job.VISIBLE].copy()
        attend = np.empty(len(Word), np.int64)
        attend[Word.Q], attend[Word.M], attend[Word.L], attend[Word.U] = room.q, room.m, room.l, room.u
        attend[Word.JOBS], attend[Word.JOB_COUNT] = jobs.ctypes.data, len(jobs)
        attend[Word.QUERIES] = attend[Word.SLOTS] = only.ctypes.data
        attend[Word.SEEN] = self._seen.ctypes.data
        attend[Word.HEADS], attend[Word.GROUP] = room.kv_heads, room.query_heads // room.kv_heads
        attend[Word.HEAD_DIM], attend[Word.SCRATCH], attend[Word.ROOM] = (
            room.head_dim,
            room.scratch,
            room.rows,
        )
        words = np.empty(len(DecodeWord), np.int64)
        words[DecodeWord.ATTEND], words[DecodeWord.SCALE] = attend.ctypes.data, factor.ctypes.data
        self._words, self._address = words, int(words.ctypes.data)
        self._call = compiled.decode
        # What the addresses stand for.
        self._kept = room, tuple(runs), open_run, only, factor, attend
        key, value = open_run.keys[0], open_run.values[0]
        self._row = 4 * room.head_dim
        self._heads = [
            (4 * head * key.stride(0), 4 * head * value.stride(0)) for head in range(room.kv_heads)
        ]
        self._to = key.data_ptr(), 4 * key.stride(1), value.data_ptr(), 4 * value.stride(1)

    def write(self, k: Tensor, v: Tensor, at: int) -> None:
        """Row `at` of the open chunk. k, v: float32 [1, Hk, d]."""
        k, v = k.contiguous(), v.contiguous()
        key, key_step, value, value_step = self._to
        key, value = key + at * key_step, value + at * value_step
        from_key, from_value, size = k.data_ptr(), v.data_ptr(), self._row
        for key_head, value_head in self._heads:
            memmove(key + key_head, from_key, size)
            memmove(value + value_head, from_value, size)
            from_key += size
            from_value += size

    def output(self, q: Tensor, visible: int) -> Tensor:
        """[1, Hq, d] of a query float32 [1, Hq, d] that sees `visible` rows of the open chunk, at least 1,
        and all of the others."""
        q = q.contiguous()
        out = torch.empty_like(q)
        self._jobs[-1, Job.VISIBLE] = self._seen[-1] = visible
        words = self._words
        words[DecodeWord.QUERY], words[DecodeWord.OUT] = q.data_ptr(), out.data_ptr()
        self._call(self._address)
        return out
