"""What the I/O threads do: reads, writes and erasures of runs of neighbouring slots.

Why it exists: a run is one system call, and each of its blocks succeeds or fails by itself. It must not know
queues; its deadline is kept by the pool.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from kvtier_core.errors import CoreError, Reason
from kvtier_core.telling import tell_each
from kvtier_core.tiers.base import TierMeasurement
from kvtier_core.tiers.fileops import Buffer
from kvtier_core.tiers.nvme.batch import Batch, runs
from kvtier_core.tiers.nvme.endurance import WriteBudget
from kvtier_core.tiers.nvme.groupcommit import GroupCommit
from kvtier_core.tiers.nvme.pace import Load, Pace, Way
from kvtier_core.tiers.nvme.store import Pieces, Store
from kvtier_core.tiers.slots import SlotRef, SlotState
from kvtier_core.tiers.transfer import TransferItem

SHARE_BYTES = 256 << 10


class IoCounts:
    """System calls and bytes since the store was opened. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reads = self.writes = self.erasures = 0
        self.read_bytes = self.written_bytes = 0

    def read(self, size: int) -> None:
        with self._lock:
            self.reads += 1
            self.read_bytes += size

    def written(self, size: int) -> None:
        with self._lock:
            self.writes += 1
            self.written_bytes += size

    def erased(self, size: int) -> None:
        with self._lock:
            self.erasures += 1
            self.written_bytes += size


class Health(Protocol):
    """Turns failures into typed refusals and keeps the tier's condition."""

    def failed(self, what: str, error: OSError) -> CoreError: ...
    def short(self, what: str, done: int, wanted: int, ref: SlotRef) -> CoreError: ...
    def worked(self, what: str) -> None: ...


@dataclass(slots=True)
class Backend:
    """What jobs share. threads: that run them. measured: of the device."""

    store: Store
    commit: GroupCommit
    health: Health
    settled: Callable[[Settling], None]
    lead_later: Callable[[], None]
    counts: IoCounts
    read_back: bool = False
    budget: WriteBudget | None = None
    threads: int = 1
    measured: TierMeasurement = field(default_factory=TierMeasurement)
    pace: Pace | None = None


class Settling(Protocol):
    """What the pool knows of a job."""

    deadline: float
    items: int
    load: Load | None

    def run(self) -> bool: ...
    def expire(self) -> None: ...
    def refuse(self, error: CoreError) -> None: ...


class Job(ABC):
    """Base of the three: reports each of its items once, whatever happens."""

    def __init__(self, backend: Backend, batch: Batch, indexes: Sequence[int], deadline: float) -> None:
        self.deadline = deadline
        self.items = len(indexes)
        self.load: Load | None = None
        self._to = backend
        self._batch = batch
        self._indexes = indexes

    def run(self) -> bool:
        try:
            return self._run()
        except Exception as defect:
            self.refuse(CoreError(Reason.INTERNAL, f"{type(defect).__name__}: {defect}"))
            raise

    @abstractmethod
    def _run(self) -> bool:
        """As `IoPool.Job.run`."""

    def expire(self) -> None:
        late = CoreError(Reason.DEADLINE, "storage did not end in time; it may still do so")
        tell_each(partial(self._batch.done, index, late) for index in self._indexes)

    def refuse(self, error: CoreError) -> None:
        self._end(error)

    def _end(self, error: CoreError | None) -> None:
        tell_each(partial(self._batch.over, index, error) for index in self._indexes)


class ReadJob(Job):
    def __init__(
        self,
        backend: Backend,
        batch: Batch,
        items: Sequence[TransferItem],
        indexes: Sequence[int],
        deadline: float,
    ) -> None:
        super().__init__(backend, batch, indexes, deadline)
        self._items = items
        self.load = Load(Way.READ, len(indexes) * backend.store.form.stride)

    def _run(self) -> bool:
        store, scratch = self._to.store, self._to.store.scratch()
        buffers: dict[int, Pieces] = {}
        at: dict[int, int] = {}
        for place, index in enumerate(self._indexes):
            item = self._items[index]
            try:
                store.slots.check(item.ref, SlotState.PUBLISHED)
                buffers[index] = store.pieces(item, scratch, place)
                at[index] = place
            except CoreError as error:
                self._batch.over(index, error)
        slots = slots_of(self._items, self._indexes)
        for run in runs(slots, buffers, store.run_blocks):
            for index, failed in self._read(run, buffers):
                outcome = failed
                if outcome is None:
                    try:
                        store.believe(self._items[index], buffers[index], scratch, at[index])
                    except CoreError as raised:
                        outcome = raised
                self._batch.over(index, outcome)
        return True

    def _read(self, run: Sequence[int], buffers: dict[int, Pieces]) -> list[tuple[int, CoreError | None]]:
        to, first = self._to, self._items[run[0]].ref
        wanted = len(run) * to.store.form.stride
        try:
            done = to.store.file.read(joined(run, buffers), to.store.file.offset(first.slot))
        except OSError as error:
            if len(run) > 1:
                return [result for index in run for result in self._read([index], buffers)]
            return [(run[0], to.health.failed("read", error))]
        to.counts.read(done)
        if done == wanted:
            to.health.worked("read")
        whole = done // to.store.form.stride
        return [
            (index, None if place < whole else self._short(index, done, wanted))
            for place, index in enumerate(run)
        ]

    def _short(self, index: int, done: int, wanted: int) -> CoreError:
        return self._to.health.short("read", done, wanted, self._items[index].ref)


def shares(backend: Backend, items: Sequence[TransferItem], indexes: Sequence[int]) -> list[list[int]]:
    """Runs of neighbours, no longer than `run_bytes`, and shorter where all threads can have one."""
    store = backend.store
    share = -(-len(indexes) // backend.threads)
    limit = min(store.run_blocks, max(share, SHARE_BYTES // store.form.stride, 1))
    return runs(slots_of(items, indexes), indexes, limit)


def slots_of(items: Sequence[TransferItem], indexes: Sequence[int]) -> dict[int, int]:
    return {index: items[index].ref.slot for index in indexes}


def joined(run: Sequence[int], pieces: dict[int, Pieces]) -> list[Buffer]:
    return [buffer for index in run for buffer in pieces[index].buffers]
