"""Threads that attend chunks beside the thread that calls: kept, woken by a semaphore, without any Python.

Why it exists: a decode over some thousand rows is half a millisecond of memory's time, and a pool of Python
threads takes as long to begin and to be heard of. It owns all memory that helpers touch but the rows and
queries, which a call outlives. It must not know pages.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvtier_kernels.compiled import library
from kvtier_kernels.compiled.layout import (
    LANES,
    CrewWord,
    FoldWord,
    HelperWord,
    Word,
    scratch_floats,
)

if TYPE_CHECKING:
    from kvtier_kernels.compiled.machine import Library

Integers = NDArray[np.int64]

_SEMAPHORE_BYTES = 32
"""Of a `sem_t` on x86-64, which is all that anything is compiled for."""
_PATIENCE = 10_000
_LOOK_SECONDS = 50e-6
_END_SECONDS = 5.0
_Room = tuple[int, int, int, int]


class Listed(NamedTuple):
    """Chunks of one query by addresses, of memory that stays while a call runs. rows: of the largest; jobs:
    int64 [chunks, len(Job)], job i of one query, whose rows are counted by the i-th of seen."""

    chunks: int
    rows: int
    jobs: int
    seen: int


class Crew:
    """Helpers of one caller at a time. Safe to call from several threads: who finds it busy is told so.
    Without compiled kernels it has no threads. A context manager, or call `close`."""

    def __init__(self, helpers: int) -> None:
        """helpers: threads beside the caller's, at least 1."""
        if helpers < 1:
            raise ValueError(f"{helpers} helpers")
        self._compiled: Library | None = library()
        self._lock, self._never = threading.Lock(), threading.Event()
        # Room for chunks, their rows of states, numbers of these, and scratch.
        self._room: _Room = (0, 0, 0, 0)
        self._kept: list[Any] = []
        self._close: Callable[[], object] = lambda: None
        if self._compiled is None:
            return
        self._crew, self._attend = np.zeros(len(CrewWord), np.int64), np.zeros(len(Word), np.int64)
        self._fold, self._scale = np.zeros(len(FoldWord), np.int64), np.zeros(1, np.float32)
        semaphore = self._semaphore = ctypes.create_string_buffer(_SEMAPHORE_BYTES)
        if ctypes.CDLL(None).sem_init(semaphore, 0, 0):
            raise OSError("no semaphore")
        crew = self._crew
        crew[CrewWord.PATIENCE], crew[CrewWord.SEMAPHORE] = _PATIENCE, ctypes.addressof(semaphore)
        crew[CrewWord.ATTEND], crew[CrewWord.FOLD] = _address(self._attend), _address(self._fold)
        crew[CrewWord.SCALE] = _address(self._scale)
        # Of the caller, and of each helper.
        self._threads = 1 + helpers
        self._own = np.zeros((1 + helpers, len(Word)), np.int64)
        self._words = np.zeros((1 + helpers, len(HelperWord)), np.int64)
        self._words[:, HelperWord.CREW] = _address(crew)
        self._words[:, HelperWord.ATTEND] = (
            _address(self._own) + np.arange(1 + helpers) * self._own.strides[0]
        )
        self._words[1:, HelperWord.HELPS] = 1
        held = crew, self._attend, self._fold, self._scale, semaphore, self._own, self._words
        self._first = first = _address(self._words)
        step = self._words.strides[0]
        given = [(self._compiled, first + (1 + i) * step, held) for i in range(helpers)]
        threads = [threading.Thread(target=_help, args=one, name="crew", daemon=True) for one in given]
        for thread in threads:
            thread.start()
        # Also when the process ends: helpers stand in code that goes with it.
        self._close = weakref.finalize(self, _end, crew, semaphore, threads)

    def attend(self, q: Tensor, scale: float, heads: int, listed: Listed, totals: Sequence[Tensor]) -> bool:
        """Sets totals m, l [Hq], u [Hq, d] to the state of a query over all jobs, ascending; False: it is
        busy or closed, and nothing was done.

        q: float32 [Hq, d]; heads: of keys. All contiguous."""
        compiled = self._compiled
        if compiled is None or not self._lock.acquire(blocking=False):
            return False
        try:
            crew, attend, fold = self._crew, self._attend, self._fold
            if crew[CrewWord.STOP]:
                return False
            hq, d = q.shape
            count, rows, jobs, seen = listed
            room = -(-rows // LANES) * LANES
            self._make_room(count, hq, d, scratch_floats(heads, hq // heads, d, room))
            attend[Word.JOBS], attend[Word.JOB_COUNT] = jobs, count
            attend[Word.SEEN], attend[Word.ROOM] = seen, room
            attend[Word.HEADS], attend[Word.GROUP], attend[Word.HEAD_DIM] = heads, hq // heads, d
            fold[FoldWord.STATES], fold[FoldWord.ROWS], fold[FoldWord.HEAD_DIM] = count, hq, d
            fold[FoldWord.M], fold[FoldWord.L], fold[FoldWord.U] = (x.data_ptr() for x in totals)
            crew[CrewWord.QUERY], self._scale[0] = q.data_ptr(), scale
            crew[CrewWord.WAKES] = min(count, self._threads) - 1
            compiled.attend_shared(self._first)
            if not crew[CrewWord.FOLDED]:
                # Somebody who has begun a chunk does not run. He reads rows that may go once we leave: an
                # interrupt does not end the wait for him.
                try:
                    self._all_left()
                finally:
                    self._all_left()
                compiled.fold_words(int(crew[CrewWord.FOLD]))
            return True
        finally:
            self._lock.release()

    def _all_left(self) -> None:
        while self._crew[CrewWord.INSIDE]:
            self._never.wait(_LOOK_SECONDS)

    def close(self) -> None:
        """Ends the threads. Idempotent; a call that runs is waited for."""
        with self._lock:
            self._close()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make_room(self, chunks: int, hq: int, d: int, scratch: int) -> None:
        """For states of so many chunks, and scratch of each thread. Nobody is inside."""
        wanted = (chunks, chunks * hq, chunks * hq * d, scratch)
        if all(one <= has for one, has in zip(wanted, self._room, strict=True)):
            return
        chunks, rows, floats, scratch = self._room = _largest(wanted, self._room)
        attend, fold = self._attend, self._fold
        query, u = np.empty(floats, np.float32), np.empty(floats, np.float32)
        m, l = np.empty(rows, np.float32), np.empty(rows, np.float32)
        first, slots = np.zeros(chunks, np.int64), np.arange(chunks)
        scratches = np.empty((len(self._own), scratch), np.float32)
        self._kept = [query, m, l, u, first, slots, scratches]
        attend[Word.Q], attend[Word.M], attend[Word.L], attend[Word.U] = map(_address, (query, m, l, u))
        attend[Word.QUERIES], attend[Word.SLOTS] = _address(first), _address(slots)
        fold[FoldWord.M_OF], fold[FoldWord.L_OF], fold[FoldWord.U_OF] = map(_address, (m, l, u))
        self._own[:, Word.SCRATCH] = _address(scratches) + np.arange(len(self._own)) * scratches.strides[0]


def _largest(a: _Room, b: _Room) -> _Room:
    return max(a[0], b[0]), max(a[1], b[1]), max(a[2], b[2]), max(a[3], b[3])


def _address(array: Any) -> int:
    return int(array.ctypes.data)


def _help(compiled: Library, words: int, _held: tuple[Any, ...]) -> None:
    """A helper's whole life. _held: what the words point to."""
    compiled.help(words)


def _end(crew: Integers, semaphore: Any, threads: Sequence[threading.Thread]) -> None:
    crew[CrewWord.STOP] = 1
    for _ in threads:
        _post(semaphore)
    for thread in threads:
        thread.join(_END_SECONDS)


def _post(semaphore: Any) -> None:
    ctypes.CDLL(None).sem_post(semaphore)
