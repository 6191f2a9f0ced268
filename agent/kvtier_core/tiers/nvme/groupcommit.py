"""Group commit: one flush of the device makes a whole batch of writes durable.

Why it exists: a flush costs as much as a write, so writers share it. The last writer to arrive flushes for
all and nobody waits in a thread; a batch that is submitted at once is flushed once. It must not know blocks.

Commit groups are numbered. A write is stamped with the group that is open when it is encoded, which is the
group it is flushed in or an earlier one; so when all writes stamped up to n are durable, no payload of a
header with a stamp up to n needs to be read to be believed. That n is the frontier.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Protocol

from kvtier_core.errors import CoreError, Reason
from kvtier_core.telling import tell_each


class Writer(Protocol):
    """Something written whose caller waits for the flush."""

    @property
    def weight(self) -> int:
        """Blocks."""

    def committed(self, error: CoreError | None) -> None:
        """Durable, or why it is not known to be."""


class GroupCommit:
    """flush: makes durable all that was written before; raises CoreError. flushed(frontier, blocks): told
    after each, one at a time, when its writers have been told. limit: blocks that are flushed at the latest,
    though more are expected."""

    def __init__(
        self, flush: Callable[[], None], flushed: Callable[[int, int], None], limit: int, frontier: int
    ) -> None:
        self._flush = flush
        self._flushed = flushed
        self._limit = limit
        self._lock = threading.Lock()
        self._group = frontier + 1
        self._stamped: Counter[int] = Counter()
        self._pending: list[tuple[int | None, Writer]] = []
        self._weight = 0
        self._expected = 0
        self._flushing = False
        self._frontier = frontier
        self._frozen: int | None = None
        self.flushes = 0

    @property
    def frontier(self) -> int:
        with self._lock:
            return self._frontier

    def expect(self, writers: int) -> None:
        """So many will arrive or withdraw."""
        with self._lock:
            self._expected += writers

    def stamp(self) -> int:
        """The group to write into headers now; `arrive` or `drop` gives it back."""
        with self._lock:
            self._stamped[self._group] += 1
            return self._group

    def arrive(self, writer: Writer, group: int | None) -> None:
        """A writer is written. May flush, in this thread, for all who wait."""
        with self._lock:
            self._expected -= 1
            self._pending.append((group, writer))
            self._weight += writer.weight
        self.lead()

    def withdraw(self) -> None:
        """A writer that was expected will not arrive, or too late for others to wait for it. The caller sees
        to it that `lead` is called by someone who may block."""
        with self._lock:
            self._expected -= 1

    def drop(self, group: int) -> None:
        """Gives a stamp back without a flush: nothing of it need be durable."""
        with self._lock:
            self._unstamp(group)

    def doubt(self, group: int) -> None:
        """A write stamped with `group` failed and may have left anything: payloads from this group on stay
        unproven in this opening, since later flushes may report success though its bytes were lost."""
        with self._lock:
            self._frozen = group - 1 if self._frozen is None else min(self._frozen, group - 1)

    def lead(self) -> None:
        """Flushes as long as someone waits and nobody else is expected or the limit is reached. A defect, in
        the flush or in what a writer does with its end, is raised when there is nobody left: those who came
        meanwhile have nobody else."""
        defects: list[Exception] = []
        while (batch := self._ready()) is not None:
            try:
                self._lead(batch, defects)
            finally:
                with self._lock:
                    self._flushing = False
        if defects:
            raise defects[0]

    def _ready(self) -> list[tuple[int | None, Writer]] | None:
        """Takes what is to be flushed now, by whoever asks; None: nothing, or another is at it."""
        with self._lock:
            ready = self._pending and (self._expected <= 0 or self._weight >= self._limit)
            if self._flushing or not ready:
                return None
            batch, self._pending, self._weight = self._pending, [], 0
            self._flushing = True
            self._group += 1
            return batch

    def _lead(self, batch: list[tuple[int | None, Writer]], defects: list[Exception]) -> None:
        error: CoreError | None = None
        try:
            self._flush()
        except CoreError as raised:
            error = raised
        except Exception as defect:
            defects.append(defect)
            error = CoreError(Reason.INTERNAL, f"{type(defect).__name__}: {defect}")
        with self._lock:
            self.flushes += 1
            for group, _ in batch:
                if group is not None:
                    self._unstamp(group)
                    if error is not None:
                        self._frozen = group - 1 if self._frozen is None else min(self._frozen, group - 1)
            lowest = min(self._stamped, default=self._group)
            self._frontier = max(self._frontier, self._bounded(lowest - 1))
            frontier = self._frontier
        told: list[Callable[[], object]] = [partial(writer.committed, error) for _, writer in batch]
        if error is None:
            told.append(partial(self._flushed, frontier, sum(writer.weight for _, writer in batch)))
        try:
            tell_each(told)
        except Exception as defect:
            defects.append(defect)

    def _bounded(self, frontier: int) -> int:
        return frontier if self._frozen is None else min(frontier, self._frozen)

    def _unstamp(self, group: int) -> None:
        self._stamped[group] -= 1
        if not self._stamped[group]:
            del self._stamped[group]
