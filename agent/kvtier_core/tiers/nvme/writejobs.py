"""Jobs that change the device: writes and erasures, and how they end together in one flush.

Why it exists: a durable block is acknowledged only after its flush, and a writer that hangs must not keep the
others from theirs. It must not know queues; its deadline is kept by the pool.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvtier_core.errors import CoreError, Reason
from kvtier_core.tiers.block import erased_page
from kvtier_core.tiers.nvme.batch import Batch, runs
from kvtier_core.tiers.nvme.jobs import Backend, Job, joined, slots_of
from kvtier_core.tiers.nvme.pace import Load, Way
from kvtier_core.tiers.nvme.store import Pieces
from kvtier_core.tiers.slots import SlotRef, SlotState
from kvtier_core.tiers.staging import PAGE
from kvtier_core.tiers.transfer import EraseItem, Landing, TransferItem


class WriteJob(Job):
    """Blocks of one durability. Durable ones end when they are flushed, volatile ones when they are
    written."""

    def __init__(
        self,
        backend: Backend,
        batch: Batch,
        items: Sequence[TransferItem],
        indexes: Sequence[int],
        deadline: float,
        durable: bool,
    ) -> None:
        super().__init__(backend, batch, indexes, deadline)
        self.load = Load(Way.WRITE, len(indexes) * backend.store.form.stride)
        self._items = items
        self.durable = durable
        self._written: list[int] = []
        self._expectation = _Expectation(backend, durable)

    @property
    def weight(self) -> int:
        return len(self._written)

    def expire(self) -> None:
        super().expire()
        if self._expectation.withdraw():
            self._to.lead_later()

    def refuse(self, error: CoreError) -> None:
        super().refuse(error)
        if self._expectation.withdraw():
            self._to.lead_later()

    def _run(self) -> bool:
        store = self._to.store
        group = self._to.commit.stamp() if self.durable else 0
        with store.guard.holding([self._items[index].ref.slot for index in self._indexes]):
            buffers = self._encode(group)
            for run in runs(slots_of(self._items, self._indexes), buffers, store.run_blocks):
                self._write(run, buffers, group)
        if not self.durable:
            self._finish(None)
            return True
        if not self._written or not self._expectation.arrive():
            self._to.commit.doubt(group)
            self._to.commit.drop(group)
            self._finish(CoreError(Reason.DEADLINE, "written after the deadline, and not flushed"))
            if self._expectation.withdraw():
                self._to.commit.lead()
            return True
        self._to.commit.arrive(self, group)
        return False

    def committed(self, error: CoreError | None) -> None:
        try:
            self._finish(error)
        finally:
            self._to.settled(self)

    def _finish(self, error: CoreError | None) -> None:
        for index in self._written:
            ref, failed = self._items[index].ref, error
            if failed is None:
                try:
                    self._to.store.slots.advance(ref, SlotState.VALIDATED, SlotState.RESERVED)
                except CoreError as raised:
                    failed = raised
            self._batch.over(index, failed)

    def _encode(self, group: int) -> dict[int, Pieces]:
        store, scratch = self._to.store, self._to.store.scratch()
        buffers: dict[int, Pieces] = {}
        for place, index in enumerate(self._indexes):
            item = self._items[index]
            try:
                if self._batch.is_done(index):
                    raise CoreError(Reason.DEADLINE, "the deadline came before the block was written")
                store.slots.check(item.ref, SlotState.RESERVED)
                buffers[index] = store.encode(item, store.check_source(item), scratch, place, group)
            except CoreError as error:
                self._batch.over(index, error)
                continue
            if self.durable:
                store.slots.mark(item.ref.slot, item.identity.chunk_digest, item.identity.namespace)
        return buffers

    def _write(self, run: Sequence[int], buffers: dict[int, Pieces], group: int) -> None:
        to, first = self._to, self._items[run[0]].ref
        wanted = len(run) * to.store.form.stride
        try:
            done = to.store.file.write(joined(run, buffers), to.store.file.offset(first.slot))
        except OSError as error:
            if len(run) > 1:
                for index in run:
                    self._write([index], buffers, group)
                return
            self._failed(run[0], group, to.health.failed("write", error))
            return
        to.counts.written(done)
        if done == wanted:
            to.health.worked("write")
        whole = done // to.store.form.stride
        for place, index in enumerate(run):
            ref = self._items[index].ref
            if place >= whole:
                self._failed(index, group, to.health.short("write", done, wanted, ref))
                continue
            if self.durable:
                to.store.slots.written(ref.slot)
            else:
                to.store.slots.clean(ref.slot)
            self._written.append(index)
        if to.read_back:
            self._compare(run[:whole], group)

    def _compare(self, run: Sequence[int], group: int) -> None:
        """Reads what was written and keeps what is believed."""
        store = self._to.store
        for index in run:
            item = self._items[index]
            scratch = store.probe()
            landing = Landing(scratch.block(1)[PAGE : PAGE + store.form.payload_bytes])
            probe = TransferItem(item.ref, item.identity, landing)
            pieces = store.pieces(probe, scratch, 0)
            try:
                done = store.file.read(pieces.buffers, store.file.offset(item.ref.slot))
                if done != store.form.stride:
                    raise self._to.health.short("read", done, store.form.stride, item.ref)
                store.believe(probe, pieces, scratch, 0)
            except OSError as error:
                self._written.remove(index)
                self._failed(index, group, self._to.health.failed("read", error))
            except CoreError as error:
                self._written.remove(index)
                self._failed(index, group, error)

    def _failed(self, index: int, group: int, error: CoreError) -> None:
        if self.durable:
            self._to.commit.doubt(group)
        self._batch.over(index, error)


class EraseJob(Job):
    """Overwrites headers and flushes: `done(None)` is the durable receipt of a deletion in this tier."""

    def __init__(
        self,
        backend: Backend,
        batch: Batch,
        items: Sequence[EraseItem],
        indexes: Sequence[int],
        deadline: float,
    ) -> None:
        super().__init__(backend, batch, indexes, deadline)
        self._items = items
        self._erased: list[int] = []
        self._expectation = _Expectation(backend, True)

    @property
    def weight(self) -> int:
        return 1

    def expire(self) -> None:
        super().expire()
        if self._expectation.withdraw():
            self._to.lead_later()

    def refuse(self, error: CoreError) -> None:
        super().refuse(error)
        if self._expectation.withdraw():
            self._to.lead_later()

    def _run(self) -> bool:
        for index in self._indexes:
            try:
                self._erase(self._items[index])
                self._erased.append(index)
            except CoreError as error:
                self._batch.over(index, error)
        if not self._erased or not self._expectation.arrive():
            self._finish(CoreError(Reason.DEADLINE, "erased after the deadline, and not flushed"))
            if self._expectation.withdraw():
                self._to.commit.lead()
            return True
        self._to.commit.arrive(self, None)
        return False

    def committed(self, error: CoreError | None) -> None:
        try:
            self._finish(error)
        finally:
            self._to.settled(self)

    def _finish(self, error: CoreError | None) -> None:
        for index in self._erased:
            self._batch.over(index, error)

    def _erase(self, item: EraseItem) -> None:
        slots = self._to.store.slots
        if item.ref is not None:
            slots.check(item.ref)
            with self._to.store.guard.holding([item.ref.slot]):
                slots.check(item.ref)
                self._overwrite(item.ref)
        if item.key is None and item.namespace is None:
            return
        for slot in slots.remnants(item.key, item.namespace):
            with self._to.store.guard.holding([slot]):
                # Another block may have been written over it meanwhile.
                if slots.is_remnant(slot, item.key, item.namespace):
                    self._overwrite(SlotRef(slot, slots.generation(slot)))

    def _overwrite(self, ref: SlotRef) -> None:
        to = self._to
        page = to.store.scratch().header(0)
        page[:] = erased_page(ref, to.store.epoch)
        to.store.pages.forget(ref.slot)
        try:
            done = to.store.file.write([page], to.store.file.offset(ref.slot))
        except OSError as error:
            raise to.health.failed("erase", error) from error
        if done != PAGE:
            raise to.health.short("erase", done, PAGE, ref)
        to.counts.erased(done)
        if to.budget is not None:
            to.budget.charge(done)
        to.store.slots.clean(ref.slot)


class _Expectation:
    """A durable job is expected by the commit from its submission until it arrives or withdraws, once."""

    def __init__(self, backend: Backend, durable: bool) -> None:
        self._to = backend
        self._open = durable
        self._lock = threading.Lock()

    def arrive(self) -> bool:
        """False: it has withdrawn."""
        return self._close()

    def withdraw(self) -> bool:
        closed = self._close()
        if closed:
            self._to.commit.withdraw()
        return closed

    def _close(self) -> bool:
        with self._lock:
            was, self._open = self._open, False
            return was
