"""One query over chunks of which some come to other places at each call: a state of each, merged at last.

Why it exists: what storage brings lands in whatever buffer is free, while chunks in memory, and all else that
the kernels are told, stay the same from token to token. So only the addresses of what came are set, chunks in
memory are attended before it comes, and each chunk's state can be looked at before it counts. The bits are
those of `outputs.attend` over all chunks in ascending order. It must not know where chunks come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtier_kernels.compiled.layout import BatchWord, FoldWord, Job, Word
from kvtier_kernels.ops.chunk_attention.jobs import Work
from kvtier_kernels.ops.chunk_attention.kept import DecodeRoom, attend_words
from kvtier_kernels.ops.chunk_attention.runs import ChunkRun

if TYPE_CHECKING:
    from kvtier_kernels.compiled.machine import Library

Floats = NDArray[np.float32]


class KeptStates:
    """Of full chunks in ascending order and the open one behind them. A call is `begin`, `take` until all
    that comes has come, and `output`. Calls that share a room must not overlap.
    least: queries that a room of it has space for."""

    __slots__ = (
        "_addresses",
        "_at",
        "_attend",
        "_begin",
        "_compiled",
        "_end",
        "_first_job",
        "_fold",
        "_jobs",
        "_kept",
        "_own",
        "_places",
        "_queries",
        "_room",
        "_seen",
        "least",
    )

    def __init__(
        self,
        compiled: Library,
        room: DecodeRoom,
        chunks: Sequence[ChunkRun | int],
        open_run: ChunkRun,
        scale: float,
    ) -> None:
        """chunks: runs, float32 [Hk, R, d] of the room's geometry, whose memory must stay, and between them
        how many chunks of R rows come there. room: for a query more than there are chunks."""
        own: list[int] = []
        coming: list[int] = []
        runs: list[ChunkRun] = []
        at = 1
        for part in chunks:
            count = part if isinstance(part, int) else part.count
            places = range(at, at + count)
            if isinstance(part, int):
                coming += places
            else:
                own += places
                runs.append(part)
            at += count
        own.append(at)
        if room.queries <= at:
            raise ValueError(f"{at} chunks and their total in a room of {room.queries}")
        self._compiled, self.least = compiled, at + 1
        self._own, self._places = len(own), coming
        jobs = np.zeros((at, len(Job)), np.int64)
        jobs[: len(own)] = np.concatenate([*(run.jobs for run in runs), open_run.jobs])
        jobs[:, Job.FIRST], jobs[:, Job.COUNT] = np.arange(at), 1
        jobs[len(own) :, Job.VISIBLE] = open_run.rows
        self._jobs, self._first_job = jobs, int(jobs.ctypes.data)
        self._seen = jobs[:, Job.VISIBLE].copy()
        # Place 0 is the total's.
        work = Work(jobs, np.zeros(at, np.int64), np.array(own + coming, np.int64), self._seen)
        self._attend = attend_words(room, work)
        self._at = int(self._attend.ctypes.data)
        self._queries = np.empty(at + 1, np.int64)
        factors = np.full(at + 1, scale, np.float32)
        self._begin, self._end = (np.empty(len(BatchWord), np.int64) for _ in range(2))
        for words, count in ((self._begin, at + 1), (self._end, 1)):
            words[BatchWord.ATTEND], words[BatchWord.COUNT] = self._at, count
            words[BatchWord.QUERIES], words[BatchWord.SCALES] = (
                self._queries.ctypes.data,
                factors.ctypes.data,
            )
        self._fold = np.empty(len(FoldWord), np.int64)
        self._fold[FoldWord.STATES] = at
        self._fold[FoldWord.ROWS], self._fold[FoldWord.HEAD_DIM] = room.query_heads, room.head_dim
        self._use(room)
        self._addresses = tuple(int(one.ctypes.data) for one in (self._begin, self._fold, self._end))
        # What the addresses stand for.
        self._kept = tuple(runs), open_run, work, factors

    def _use(self, room: DecodeRoom) -> None:
        self._room = room
        attend, fold, heads = self._attend, self._fold, room.query_heads
        attend[Word.Q], attend[Word.SCRATCH] = room.q, room.scratch
        attend[Word.M], attend[Word.L], attend[Word.U] = room.m, room.l, room.u
        fold[FoldWord.M], fold[FoldWord.L], fold[FoldWord.U] = room.m, room.l, room.u
        fold[FoldWord.M_OF], fold[FoldWord.L_OF] = room.m + 4 * heads, room.l + 4 * heads
        fold[FoldWord.U_OF] = room.u + 4 * heads * room.head_dim

    def begin(self, q: Tensor, visible: int, room: DecodeRoom | None = None) -> None:
        """Of a query float32 [1, Hq, d] that sees `visible` rows of the open chunk, at least 1, and all of
        the others: attends what is there. room: of this call, of the geometry that was given; None: as at the
        last one."""
        if room is not None and room is not self._room:
            if room.queries < self.least:
                raise ValueError(f"{self.least} states in a room of {room.queries}")
            self._use(room)
        q = q.contiguous()
        own = self._own
        self._jobs[own - 1, Job.VISIBLE] = self._seen[own - 1] = visible
        self._queries.fill(q.data_ptr())
        begin, _, _ = self._addresses
        self._compiled.decode_begin(begin)
        self._attend[Word.JOBS], self._attend[Word.JOB_COUNT] = self._first_job, own
        self._compiled.attend_words(self._at)

    def take(self, first: int, chunks: Sequence[ChunkRun]) -> None:
        """Attends those that came, runs of one chunk: [first, first + n) of all that come, all of whose rows
        are seen. Their memory may be another's afterwards."""
        jobs, at = self._jobs, self._own + first
        for number, run in enumerate(chunks, at):
            jobs[number] = run.jobs[0]
            jobs[number, Job.FIRST] = number
        self._attend[Word.JOBS] = self._first_job + at * jobs.strides[0]
        self._attend[Word.JOB_COUNT] = len(chunks)
        self._compiled.attend_words(self._at)

    def states(self, first: int, last: int) -> tuple[Floats, Floats, Floats]:
        """m, l [n, 1, Hq], u [n, 1, Hq, d] of chunks [first, last) of those that came, which are neighbours;
        in place, until the next `begin`."""
        low, high = self._places[first], self._places[last - 1] + 1
        if high - low != last - first:
            raise ValueError(f"chunks {first} to {last} of those that come are no neighbours")
        m, l, u = self._room.totals
        return m[low:high, None], l[low:high, None], u[low:high, None]

    def output(self) -> Tensor:
        """[1, Hq, d]: all states merged in ascending order, and divided."""
        room = self._room
        out = torch.empty((1, room.query_heads, room.head_dim), dtype=torch.float32)
        _, fold, end = self._addresses
        self._compiled.fold_words(fold)
        self._end[BatchWord.OUT] = out.data_ptr()
        self._compiled.decode_end(end)
        return out
