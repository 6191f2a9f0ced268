"""Shared blocks beside a cache's sessions: one set of tiers, one directory, one ledger, one metadata lock.

Why it exists: rows of sessions and cached blocks want the same slots, and one of them must give way: blocks
do, and never the other way round. It must not know sessions, steps or who asks for blocks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from kvtier_core.blockstore.admitting import READ, UNLIMITED, WRITE
from kvtier_core.blockstore.driver import Bell, Driver
from kvtier_core.blockstore.keptnotes import KEPT_SUFFIX, KeptNotes
from kvtier_core.blockstore.recovery import Recovers
from kvtier_core.blockstore.store import BlockStore
from kvtier_core.credits import PINNED, QUEUE, STAGING, Ledger, Limit, slots
from kvtier_core.directory import Directory
from kvtier_core.errands import Errands
from kvtier_core.errors import CoreError
from kvtier_core.placement import ROWS, has_memory
from kvtier_core.receipts import RecoveryStats
from kvtier_core.tiers.base import Tier
from kvtier_core.tiers.fileops import FileOps
from kvtier_core.tiers.nvme import NvmeTier
from kvtier_core.transactions.erasing import JournalFile

QUEUE_TRANSFERS = 4096
LEAVE_SECONDS = 5.0
POLL_SECONDS = 0.05
STOP_SECONDS = 10.0
JOURNAL_SUFFIX = ".deletions"


def directory_of(tiers: Sequence[Tier]) -> Directory:
    """Lines for every slot, and as many again and more for blocks that are gone but whose deletion is not yet
    confirmed. Untouched lines cost address space only."""
    total = sum(tier.slots.capacity for tier in tiers)
    return Directory(tiers=max(1, len(tiers)), capacity=4 * total + 65536)


def ledger_of(tiers: Sequence[Tier], staging_bytes: int, clock: Callable[[], float]) -> Ledger:
    """All there is of this cache on this node: slots by tier, transfers at a time, page-locked and staging
    bytes."""
    limits = {slots(index): Limit(tier.slots.capacity) for index, tier in enumerate(tiers)}
    limits[QUEUE] = Limit(QUEUE_TRANSFERS)
    limits[STAGING] = Limit(staging_bytes)
    limits[PINNED] = Limit(sum(tier.pinned_bytes for tier in tiers))
    limits[READ] = limits[WRITE] = Limit(UNLIMITED)
    return Ledger(limits, clock=clock)


class SharedBlocks:
    """The block store of a cache and what moves it on. store: to put, find, fetch and delete. driver: waits
    for it; its thread runs once `start` was called, and without it somebody calls `store.pump`."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        homes: Sequence[int],
        clock: Callable[[], float],
        directory: Directory,
        ledger: Ledger,
        lock: threading.RLock,
        files: FileOps,
        spare: int = 0,
    ) -> None:
        """Takes over what persistent tiers kept. spare: slots that one session needs, which a cache without
        storage keeps free of blocks that may not be lost. TIER_INCAPABLE without a tier whose memory the CPU
        reads, STORAGE_UNAVAILABLE; holds nothing then."""
        self._tiers = tiers
        self._clock = clock
        self._ledger = ledger
        self._lock = lock
        self._rang = threading.Event()
        self._bell = Bell()
        self._errands: Errands | None = None
        self._journal: JournalFile | None = None
        self._notes: dict[int, KeptNotes] = {}
        kept = next((tiers[index] for index in homes if tiers[index].persistent), None)
        if isinstance(kept, NvmeTier):
            self._errands = Errands("kvtier-deletions")
            path = kept.path.with_suffix(JOURNAL_SUFFIX)
            try:
                self._journal = JournalFile(path.parent, path.name, files, self._errands.run)
                for index in homes:
                    tier = tiers[index]
                    if tier.persistent and isinstance(tier, NvmeTier):
                        noted = tier.path.with_suffix(KEPT_SUFFIX)
                        self._notes[index] = KeptNotes(noted.parent, noted.name, files, self._errands.run)
            except CoreError:
                self._end_journal(STOP_SECONDS)
                raise
        try:
            self.store = BlockStore(
                tiers,
                clock,
                directory=directory,
                ledger=ledger,
                lock=lock,
                wake=self._wake,
                journal=self._journal,
                notes=self._notes,
                homes=homes,
                max_flights=QUEUE_TRANSFERS,
                spare=spare,
            )
        except BaseException:
            self._end_journal(STOP_SECONDS)
            raise
        self.driver = Driver(self.store, self._bell, clock)
        self._started = False

    def _wake(self) -> None:
        self._bell.ring()
        self._rang.set()

    def start(self) -> None:
        """Starts the thread that moves the store on."""
        self._started = True
        self.driver.start()

    def close(self, seconds: float = STOP_SECONDS) -> None:
        """Ends the thread and gives the journal back, before the tiers close. DEADLINE."""
        try:
            if self._started:
                self.driver.close(seconds)
        finally:
            self._end_journal(seconds)

    def _end_journal(self, seconds: float) -> None:
        # While a write hangs, descriptor and lock stay taken: its bytes may still arrive.
        if self._errands is not None and self._errands.close(seconds):
            for file in (self._journal, *self._notes.values()):
                if file is not None:
                    file.close()

    # Giving way to rows.

    def leave(self, tier: int, count: int, deadline: float | None) -> bool:
        """Whether `count` slots of a tier, claimed before, are free for rows now, and memory for one: copies
        that others survive or that may be lost are dropped, the rest moves down, until `deadline` or
        LEAVE_SECONDS. The metadata lock is not held. Never touches a row."""
        now = self._clock()
        until = now + LEAVE_SECONDS if deadline is None else min(deadline, now + LEAVE_SECONDS)
        failures = self._failures()
        while True:
            self._rang.clear()
            with self._lock:
                leaving = self._ask(tier, count)
                if self._ledger.available(slots(tier)) >= count and has_memory(self._tiers[tier]):
                    return True
            if not leaving or self._failures() > failures or self._clock() >= until:
                return False
            self._rang.wait(POLL_SECONDS)
            self.store.pump()

    def _ask(self, tier: int, count: int) -> bool:
        """Drops what may go and begins to move down what may not; whether something is on its way."""
        resource = slots(tier)
        if not self._ledger.resident(resource):
            return False
        leaving = 0
        if self._ledger.available(resource) < count:
            # What is claimed counts as taken, so no slot beyond that is asked for.
            leaving = self.store.reclaim.make_room(tier, 0).leaving
        if not leaving and not has_memory(self._tiers[tier]):
            leaving = self.store.reclaim.make_memory(tier, ROWS).leaving
        return leaving > 0

    def _failures(self) -> int:
        return sum(self.store.reclaim.failed.values())


def let_go(tiers: Sequence[Tier]) -> None:
    """Slots of recovered blocks that nobody can serve here are free for rows. The bytes stay on the device
    until they are overwritten, for an opening that can."""
    for tier in tiers:
        if isinstance(tier, Recovers):
            for block in tier.recovered():
                tier.release(block.ref)


def recoveries(tiers: Sequence[Tier]) -> tuple[RecoveryStats, ...]:
    """What each persistent tier kept of earlier processes, and why it dropped the rest."""
    return tuple(_recovery(tier) for tier in tiers if tier.persistent and isinstance(tier, NvmeTier))


def _recovery(tier: NvmeTier) -> RecoveryStats:
    report = tier.recovery
    dropped = {reason.value: count for reason, count in sorted(report.dropped.items()) if count}
    listed = ", ".join(f"{reason} {count}" for reason, count in dropped.items())
    end = "clean" if report.clean else "not clean"
    message = (
        f"tier {tier.name}: {report.kept} blocks of earlier processes are served, "
        f"{sum(dropped.values())} are not{f' ({listed})' if listed else ''}; "
        f"superblock {report.superblock.value}, last end {end}, {report.seconds:.3f} s"
    )
    return RecoveryStats(
        class_name=tier.name,
        kept=report.kept,
        dropped=dropped,
        proven=report.proven,
        seconds=report.seconds,
        clean=report.clean,
        message=message,
    )
