"""Opening a store: the superblock's epoch, recovery of what is there, and the frontier kept from then on.

Why it exists: what must be durable in which order at opening is one argument, and a crash may fall between
any two steps of it. It must not know transfers.

Order: lock; new epoch durable; headers read; torn blocks overwritten, durable; only then do new commit
groups, which begin after all that were found, move the recorded frontier past those blocks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
from collections.abc import Callable

import numpy as np

from kvtier_core.errors import CoreError, Reason
from kvtier_core.tiers.block import BlockFormat, erased_page
from kvtier_core.tiers.nvme import superblock
from kvtier_core.tiers.nvme.crypto import BlockCipher, KeyProvider
from kvtier_core.tiers.nvme.file import BlockFile
from kvtier_core.tiers.nvme.recovery import (
    DropReason,
    Findings,
    KeyCheck,
    RecoveryReport,
    Scanned,
    Scanner,
    SuperblockState,
)
from kvtier_core.tiers.nvme.slots import NvmeSlots
from kvtier_core.tiers.nvme.superblock import SUPERBLOCK_BYTES, Superblock
from kvtier_core.tiers.slots import SlotRef
from kvtier_core.tiers.staging import PAGE


class SuperblockKeeper:
    """Reads and writes the two copies. Raises OSError of the file; STORAGE_LOCKED when a later opening has
    taken the store over, which a filesystem without working locks allows."""

    def __init__(self, file: BlockFile, form: BlockFormat, capacity: int) -> None:
        self._file = file
        self._form = form
        self._page = memoryview(mmap.mmap(-1, SUPERBLOCK_BYTES))
        self._capacity = capacity
        self.state = SuperblockState.NEW
        self.found: Superblock | None = None
        self.current: Superblock | None = None

    def begin(self) -> None:
        """Takes the next epoch, durably. Blocks that are laid out otherwise are dropped with their bytes."""
        size = self._file.size()
        self.found = self._newest() if size >= SUPERBLOCK_BYTES else None
        if self.found is not None:
            self.state = SuperblockState.INTACT
        elif size > SUPERBLOCK_BYTES:
            self.state = SuperblockState.REBUILT
        if self.found is not None and not self.found.fits(self._form):
            self._file.truncate(SUPERBLOCK_BYTES)
        known = self.found or Superblock(0, 0, 0, 0, 0, 0, "", "")
        form = self._form
        self.current = dataclasses.replace(
            known,
            epoch=known.epoch + 1,
            stride=form.stride,
            payload_bytes=form.payload_bytes,
            capacity=self._capacity,
            layout=form.layout,
            kind=form.kind,
            clean=False,
        )
        self._write(self.current)
        if self.state is not SuperblockState.INTACT:
            # The second copy of a new or rebuilt store must not be garbage.
            self._write(self.current)
        self._file.sync()
        if size == 0:
            self._file.sync_folder()

    def raise_epoch(self, seen: int) -> None:
        """Blocks of a later epoch than the superblock's were found: it was restored from a copy."""
        assert self.current is not None
        if seen >= self.current.epoch:
            self._write(dataclasses.replace(self.current, epoch=seen + 1))
            self._file.sync()

    def record(self, frontier: int, clean: bool = False) -> None:
        """Writes, and leaves the flush to the caller."""
        assert self.current is not None
        newest = self._newest()
        if newest is not None and newest.epoch > self.current.epoch:
            raise CoreError(
                Reason.STORAGE_LOCKED,
                f"epoch {newest.epoch} has taken {self._file.path.name} over, this is {self.current.epoch}",
                {"epoch": self.current.epoch},
            )
        self._write(dataclasses.replace(self.current, frontier=frontier, clean=clean))

    def record_clean(self, frontier: int) -> None:
        """At the end, durably. A store that could not be marked is recovered as after a crash."""
        with contextlib.suppress(OSError, CoreError):
            self._file.sync()
            self.record(frontier, clean=True)
            self._file.sync()

    def _newest(self) -> Superblock | None:
        done = self._file.read([self._page], 0)
        pages = [self._page[at : at + PAGE] for at in range(0, done, PAGE)]
        return superblock.newest(pages)

    def _write(self, block: Superblock) -> None:
        block = dataclasses.replace(block, serial=block.serial + 1)
        page = self._page[:PAGE]
        page[:] = superblock.encode(block)
        if self._file.write([page], block.offset) != PAGE:
            raise OSError(5, "a superblock was written short")
        self.current = block


class Recovered:
    """What opening found: the slots as they are, the report, and the kept blocks until they are fetched."""

    def __init__(self, slots: NvmeSlots, report: RecoveryReport, findings: Findings, keys: KeyCheck) -> None:
        self.slots = slots
        self.report = report
        self.findings = findings
        self.keys = keys


def recover(
    file: BlockFile,
    keeper: SuperblockKeeper,
    form: BlockFormat,
    capacity: int,
    threads: int,
    keys: KeyProvider | None,
    cipher: BlockCipher | None,
    fail: Callable[[str, OSError], CoreError],
) -> Recovered:
    """Reads all headers and proves what the frontier does not. STORAGE_UNAVAILABLE, KEY_UNAVAILABLE."""
    assert keeper.current is not None
    found, check = Findings(), KeyCheck(keys, cipher)
    held = (file.size() - SUPERBLOCK_BYTES) // form.stride
    trusted = keeper.found.frontier if keeper.found is not None and keeper.found.fits(form) else 0
    scanner = Scanner(file.read, form, SUPERBLOCK_BYTES, trusted)
    for one in scanner.scan(max(0, held), threads):
        _take(one, capacity, check, found)
    if keeper.found is not None and not keeper.found.fits(form):
        found.dropped[DropReason.LAYOUT_CHANGED] += keeper.found.capacity
    try:
        keeper.raise_epoch(found.highest_epoch)
        _settle(file, keeper.current.epoch, capacity, found)
    except OSError as error:
        raise fail("recovery", error) from error
    slots = _slots(capacity, keeper.current.epoch, found)
    file.allocated = min(capacity, max(0, held))
    report = RecoveryReport(
        superblock=keeper.state,
        epoch=keeper.current.epoch,
        clean=keeper.found is None or keeper.found.clean,
        kept=len(found.kept),
        empty=found.empty,
        proven=found.proven,
        dropped=dict(found.dropped),
        examples=tuple(found.examples),
    )
    return Recovered(slots, report, found, check)


def _take(one: Scanned, capacity: int, check: KeyCheck, found: Findings) -> None:
    header, reason = one.header, one.reason
    found.proven += one.proven
    if header is not None:
        found.saw(header)
        if reason is DropReason.TORN_PAYLOAD:
            found.torn.append(SlotRef(one.slot, header.slot_generation))
        if reason is None:
            reason = check.reason(header) or (DropReason.BEYOND_BUDGET if one.slot >= capacity else None)
    if reason is not None:
        found.drop(one.slot, reason, header.key if header else b"")
    elif header is not None:
        found.keep(one.slot, header, one.page)
    else:
        found.empty += 1


def _settle(file: BlockFile, epoch: int, capacity: int, found: Findings) -> None:
    """Torn blocks lose their headers for good, and a store over its budget its end."""
    page = memoryview(mmap.mmap(-1, PAGE))
    for ref in found.torn:
        page[:] = erased_page(ref, epoch)
        if file.write([page], file.offset(ref.slot)) != PAGE:
            raise OSError(5, "an erasure was written short")
    if found.torn:
        file.sync()
    if file.size() > file.offset(capacity):
        file.truncate(file.offset(capacity))
        file.sync()


def _slots(capacity: int, epoch: int, found: Findings) -> NvmeSlots:
    slots = NvmeSlots(capacity, epoch)
    kept = list(found.headers())
    if kept:
        refs = np.array([(header.slot, header.slot_generation) for header in kept], dtype=np.int64)
        owners = np.array([header.logical for header in kept], dtype=np.uint64).view(np.int64)
        slots.restore(refs, owners)
    for header in kept:
        slots.mark(header.slot, header.key, header.namespace)
    for slot, key, namespace in found.remnants:
        if slot < capacity:
            slots.mark(slot, key, namespace)
    return slots
