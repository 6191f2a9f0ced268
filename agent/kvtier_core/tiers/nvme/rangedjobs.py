"""Reads of parts of blocks: only the segments that hold what is wanted, each verified by itself.

Why it exists: a selection names a few rows of a block, and bytes of storage are what it should save. What a
read in part believes and how it fails is what a read of the whole does. It must not know rows.

Which segments are read: those that hold wanted bytes, and what lies between two of them where one call more
would cost more than it. A call costs `seek_bytes`: what the device reads in the time of one more, as measured
at start. Where all calls and bytes cost as much as the payload, the block is read whole, and in one call with
its neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvtier_core.errors import CoreError, Reason
from kvtier_core.tiers.block import HEADER_BYTES
from kvtier_core.tiers.nvme.batch import Batch
from kvtier_core.tiers.nvme.file import aligned
from kvtier_core.tiers.nvme.jobs import Backend, Job, ReadJob, shares
from kvtier_core.tiers.nvme.pace import Load, Way
from kvtier_core.tiers.segments import table_bytes
from kvtier_core.tiers.slots import SlotRef, SlotState
from kvtier_core.tiers.staging import PAGE
from kvtier_core.tiers.transfer import TransferItem

Parts = list[tuple[int, int]]


def parts_of(
    spans: Sequence[tuple[int, int]], segment: int, payload_bytes: int, seek_bytes: int
) -> Parts | None:
    """Segments [first, last) of each call, ascending; None: the block is read whole. BAD_ARGUMENT for spans
    that are not ascending, or not in the payload."""
    parts: Parts = []
    before = 0
    for low, high in spans:
        if not before <= low < high <= payload_bytes:
            raise CoreError(Reason.BAD_ARGUMENT, f"bytes {low} to {high} are no part of {payload_bytes}")
        before = high
        first, last = low // segment, -(-high // segment)
        if parts and (first - parts[-1][1]) * segment <= seek_bytes:
            parts[-1] = (parts[-1][0], max(last, parts[-1][1]))
        else:
            parts.append((first, last))
    cost = sum((last - first) * segment + seek_bytes for first, last in parts)
    return None if cost >= payload_bytes else parts


def read_jobs(backend: Backend, batch: Batch, items: Sequence[TransferItem], deadline: float) -> list[Job]:
    """Neighbouring slots are read by one call, up to `run_bytes`; blocks that are read in part are shared
    out among the threads."""
    whole: list[int] = []
    ranged: dict[int, int] = {}
    for index, item in enumerate(items):
        size = _size(backend, item)
        if size is None:
            whole.append(index)
        else:
            ranged[index] = size
    jobs: list[Job] = [
        ReadJob(backend, batch, items, part, deadline) for part in shares(backend, items, whole)
    ]
    indexes = list(ranged)
    for at in range(min(backend.threads, len(indexes))):
        mine = {index: ranged[index] for index in indexes[at :: backend.threads]}
        jobs.append(RangedJob(backend, batch, items, mine, deadline))
    return jobs


def _size(backend: Backend, item: TransferItem) -> int | None:
    """Bytes of the segments that are read; None: the whole block."""
    if item.ranges is None:
        return None
    store = backend.store
    segment, payload = store.segment_bytes, store.form.payload_bytes
    try:
        parts = parts_of(item.ranges.spans, segment, payload, backend.measured.seek_bytes)
    except CoreError:
        # The item's own error, which its job tells.
        return 0
    return None if parts is None else sum(last - first for first, last in parts) * segment


class RangedJob(Job):
    """Blocks that are read in part, one after the other. sizes: by index, bytes that this is about."""

    def __init__(
        self,
        backend: Backend,
        batch: Batch,
        items: Sequence[TransferItem],
        sizes: Mapping[int, int],
        deadline: float,
    ) -> None:
        super().__init__(backend, batch, tuple(sizes), deadline)
        self.load = Load(Way.READ, sum(sizes.values()))
        self._items = items
        self._sizes = sizes

    def _run(self) -> bool:
        whole: list[int] = []
        for index in self._indexes:
            try:
                if self._batch.is_done(index):
                    raise CoreError(Reason.DEADLINE, "the deadline came before the block was read")
                if not self._read(self._items[index]):
                    whole.append(index)
                    continue
            except CoreError as error:
                self._batch.over(index, error)
            else:
                self._batch.over(index, None)
        if not whole:
            return True
        if self._to.pace is not None:
            # It is under way and cannot wait: those that come after it do.
            more = sum(self._to.store.form.stride - self._sizes[index] for index in whole)
            self._to.pace.charge(Load(Way.READ, max(0, more)))
        return ReadJob(self._to, self._batch, self._items, whole, self.deadline).run()

    def _read(self, item: TransferItem) -> bool:
        """False: as it lies there it has to be read whole."""
        store, ranges = self._to.store, item.ranges
        assert ranges is not None
        store.slots.check(item.ref, SlotState.PUBLISHED)
        if len(item.landing.body) != store.form.payload_bytes:
            raise CoreError(
                Reason.SHORT_COPY,
                f"a landing of {len(item.landing.body)} bytes is no payload of {store.form.payload_bytes}",
            )
        known = store.pages.find(item.ref)
        page = memoryview(known) if known is not None else self._page(item.ref)
        header, table = store.named(page, item)
        if table is None:
            parts_of(ranges.spans, PAGE, header.length, 0)
            return False
        if known is None:
            store.pages.remember(item.ref, bytes(page[: HEADER_BYTES + table_bytes(table)]))
        parts = parts_of(ranges.spans, table.segment, header.length, self._to.measured.seek_bytes)
        if parts is None:
            return False
        total = 0 if known is not None else PAGE
        scratch = store.scratch().body(0)
        for first, last in parts:
            start, stop = first * table.segment, min(last * table.segment, header.length)
            size = -(-stop // PAGE) * PAGE - start
            target = item.landing.body[start:stop]
            direct = store.cipher is None and size == stop - start
            direct = direct and not (store.file.direct and not aligned(target))
            stored = target if direct else scratch[:size]
            self._fill(stored, item.ref, store.file.offset(item.ref.slot) + PAGE + start)
            total += size
            if store.cipher is not None:
                store.cipher.decrypt_segments(header, page, table, first, scratch, target)
                continue
            table.check(store.form.kind, first, stored[: stop - start], item.ref.slot)
            if not direct:
                target[:] = stored[: stop - start]
        ranges.read_bytes = total
        self._to.health.worked("read")
        return True

    def _page(self, ref: SlotRef) -> memoryview:
        page = self._to.store.scratch().header(0)
        self._fill(page, ref, self._to.store.file.offset(ref.slot))
        return page

    def _fill(self, buffer: memoryview, ref: SlotRef, offset: int) -> None:
        try:
            done = self._to.store.file.read([buffer], offset)
        except OSError as error:
            raise self._to.health.failed("read", error) from error
        self._to.counts.read(done)
        if done != len(buffer):
            raise self._to.health.short("read", done, len(buffer), ref)
