"""Deletion: tombstone, drain, erase in every tier, durable receipt; a late completion never resurrects
(H.1.8).

Why it exists: a block that was deleted may survive in a queue, in a slot that an eviction left behind, on a
device that is slow or in a process that died half way. So its end is a protocol with a durable beginning
and a durable end, and what happens in between can be repeated. It must not know who asked, nor how a tier
erases.

Order: lookups refuse at once; the intent is durable before anything is erased; copies are erased when
nobody reads them and no byte can arrive; the line is forgotten when the receipt is durable, and not before.
The caller holds the metadata lock; tiers and journal report from any thread, and `pump` takes their
reports.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvtier_core.directory import NO_LINE, ChunkState, Directory
from kvtier_core.errors import CoreError
from kvtier_core.tiers.slots import SlotRef
from kvtier_core.tiers.transfer import EraseItem, TransferSink
from kvtier_core.transactions.reasons import MoveReason, MoveRefused
from kvtier_core.transactions.singleflight import SingleFlight
from kvtier_core.transactions.transfers import Transactions


class DeletionState(StrEnum):
    """INTENDING: refused to lookups, not yet durable. DRAINING: waits for readers and bytes in flight.
    ERASING: tiers are at it. RECEIPTING: all is erased, the receipt is not yet durable. DONE."""

    INTENDING = "INTENDING"
    DRAINING = "DRAINING"
    ERASING = "ERASING"
    RECEIPTING = "RECEIPTING"
    DONE = "DONE"


class EntryKind(StrEnum):
    INTENT = "intent"
    RECEIPT = "receipt"


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One durable line. keys: of single blocks; namespace: digest when a whole namespace goes. generation:
    of the last tombstone. tiers: names of those that have erased, in a receipt."""

    kind: EntryKind
    number: int
    keys: tuple[bytes, ...]
    namespace: bytes
    generation: int
    tiers: tuple[str, ...] = ()


class DeletionJournal(Protocol):
    def append(self, entry: JournalEntry, done: Callable[[CoreError | None], None]) -> None:
        """Makes an entry durable and then says so, from any thread; with an error it may be there or not."""
        ...


class Eraser(Protocol):
    def erase(self, tier: int, items: Sequence[EraseItem], deadline: float, sink: TransferSink) -> None:
        """Starts erasing. `done(index, None)`: nothing of it can be read from the tier again, also after a
        crash. Raises CoreError before anything starts."""
        ...


@dataclass(slots=True, eq=False)
class Deletion:
    """One order to delete: some blocks by their keys, or a namespace. lines: line -> logical id of what is
    not yet erased; cleared: the same for what is, its line kept until the receipt. error: why the last step
    did not succeed; it is tried again at `retry_at`. waiting: reports of the step that runs; undrained:
    items, of any step, whose tier may still be at it. receipted: the receipt is durable, and lines are being
    forgotten."""

    number: int
    keys: tuple[bytes, ...]
    namespace: bytes
    generation: int
    state: DeletionState = DeletionState.INTENDING
    lines: dict[int, int] = field(default_factory=dict)
    cleared: dict[int, int] = field(default_factory=dict)
    error: CoreError | None = None
    retry_at: float = 0.0
    waiting: int = 0
    undrained: int = 0
    failed: bool = False
    turn: int = 0
    erasing: list[int] = field(default_factory=list)
    receipted: bool = False

    def __len__(self) -> int:
        """Blocks that it has, until it is DONE: those it names, or what is known of a namespace, at least
        1."""
        return max(len(self.keys), len(self.lines) + len(self.cleared), 1)


@dataclass(frozen=True, slots=True)
class _Report:
    """turn: of the step that caused it. drained: the tier is through with an item."""

    number: int
    turn: int
    error: CoreError | None = None
    drained: bool = False


class _Round:
    """The sink of one step in one tier, stamped with its turn."""

    def __init__(self, number: int, turn: int, inbox: deque[_Report], wake: Callable[[], None]) -> None:
        self._number = number
        self._turn = turn
        self._inbox = inbox
        self._wake = wake

    def done(self, index: int, error: CoreError | None) -> None:
        self._inbox.append(_Report(self._number, self._turn, error))
        self._wake()

    def drained(self, index: int) -> None:
        self._inbox.append(_Report(self._number, self._turn, drained=True))
        self._wake()


class Deletions:
    """All deletions of one cache on one node. `names`: of the tiers, fastest first. `seconds`: how long a
    tier may take for a batch. `retry`: how long a failed step waits before it is tried again. `batch`: blocks
    that are erased in one step, so that a large namespace does not hold the lock for long, and keys of one
    order."""

    def __init__(
        self,
        directory: Directory,
        moves: Transactions,
        eraser: Eraser,
        journal: DeletionJournal,
        names: Sequence[str],
        *,
        flights: SingleFlight | None = None,
        wake: Callable[[], None] | None = None,
        seconds: float = 30.0,
        retry: float = 1.0,
        batch: int = 1024,
    ) -> None:
        self._directory = directory
        self._moves = moves
        self._eraser = eraser
        self._journal = journal
        self._names = tuple(names)
        self._flights = flights
        self._wake = wake or (lambda: None)
        self._seconds = seconds
        self._retry = retry
        self._batch = batch
        self._open: dict[int, Deletion] = {}
        self._of_key: dict[bytes, Deletion] = {}
        self.keys: Set[bytes] = self._of_key.keys()
        """Of single blocks that are being deleted: nothing may be stored under them, for an erasure by key
        must not meet the bytes of a newer block."""
        self._inbox: deque[_Report] = deque()
        self._next = 1
        self._turns = 0

    def open(self) -> tuple[Deletion, ...]:
        return tuple(self._open.values())

    def refuses(self, namespace: bytes) -> bool:
        """Whether a namespace is being deleted, so that nothing may be stored in it (TOMBSTONED)."""
        return bool(self._open) and any(
            found.namespace == namespace for found in self._open.values() if found.namespace
        )

    # Beginning.

    def delete(self, key: bytes) -> Deletion:
        """Deletes one block. From here no lookup finds it. A second order for it joins the first. A block
        that is not there is erased from the tiers all the same: an eviction may have left it on a
        device."""
        return self.delete_many((key,))[0]

    def delete_many(self, keys: Sequence[bytes]) -> list[Deletion]:
        """As `delete`, in one order for `batch` keys that none has yet, so that they share intent and
        receipt. Returns each order that covers one of the keys, once."""
        orders: dict[int, Deletion] = {}
        fresh: dict[bytes, int] = {}
        for key in keys:
            if key in fresh:
                continue
            line = self._directory.locate(key)
            known = self._order_of(key, line)
            if known is None:
                fresh[key] = line
            else:
                orders[known.number] = known
        left = iter(fresh.items())
        while part := dict(islice(left, self._batch)):
            begun = self._begin(tuple(part), b"", _some(part.values()))
            orders[begun.number] = begun
        return list(orders.values())

    def _order_of(self, key: bytes, line: int) -> Deletion | None:
        known = self._of_key.get(key)
        if known is None and line != NO_LINE and self._directory.state[line] == ChunkState.TOMBSTONED:
            for found in self._open.values():
                if line in found.lines or line in found.cleared:
                    return found
        return known

    def delete_namespace(self, namespace: bytes, index: int) -> Deletion:
        """Deletes every block of a namespace, given its digest and its index in the directory."""
        for found in self._open.values():
            if found.namespace == namespace:
                return found
        return self._begin((), namespace, self._not_taken(self._directory.lines_of(index)))

    def _not_taken(self, lines: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those that no deletion has: what one has is tombstoned from its beginning to its end."""
        free: NDArray[np.int64] = lines[self._directory.state[lines] != ChunkState.TOMBSTONED]
        return free

    def resume(self, entries: Sequence[JournalEntry], index_of: Callable[[bytes], int]) -> int:
        """After a start, before anything is served: goes on with every intent that has no receipt.
        index_of: a namespace's index in the directory. Returns how many there are."""
        ended = {entry.number for entry in entries if entry.kind is EntryKind.RECEIPT}
        begun = [entry for entry in entries if entry.kind is EntryKind.INTENT]
        self._next = max([self._next, *(entry.number + 1 for entry in entries)])
        left = [entry for entry in begun if entry.number not in ended]
        for entry in left:
            if entry.namespace:
                lines = self._directory.lines_of(index_of(entry.namespace))
            else:
                lines = _some(map(self._directory.locate, entry.keys))
            self._begin(entry.keys, entry.namespace, self._not_taken(lines), entry.number)
        return len(left)

    def _begin(
        self, keys: tuple[bytes, ...], namespace: bytes, lines: NDArray[np.int64], number: int = 0
    ) -> Deletion:
        directory = self._directory
        resumed = number > 0
        found = Deletion(number or self._next, keys, namespace, directory.tombstone_many(lines))
        self._next = max(self._next, found.number + 1)
        found.lines = dict(zip(lines.tolist(), directory.logicals_of(lines).tolist(), strict=True))
        self._open[found.number] = found
        self._of_key.update(dict.fromkeys(keys, found))
        self._fail_flights(found)
        self._stop(found)
        if resumed:
            found.state = DeletionState.DRAINING
        else:
            self._write(found, EntryKind.INTENT)
        return found

    def _fail_flights(self, found: Deletion) -> None:
        flights, directory = self._flights, self._directory
        if flights is None:
            return
        if len(found.lines) <= len(flights):
            keys = [directory.key_of(line) for line in found.lines]
        else:
            # Nobody may hold the lock for as long as a whole namespace takes one by one.
            keys = [key for key in flights.blocks() if directory.locate(key) in found.lines]
        for key in keys:
            flights.fail_block(key, MoveReason.TOMBSTONED)

    def _stop(self, found: Deletion) -> None:
        """Queued and flying copies die; a published one only gives its old copy up."""
        for move in self._moves.open_moves():
            if found.lines.get(move.line) != move.owner:
                continue
            try:
                self._moves.cancel(move, MoveReason.TOMBSTONED)
            except MoveRefused:
                continue

    # Going on.

    def pump(self, now: float) -> list[Deletion]:
        """Takes what tiers and journal reported and goes on where it can. Returns the deletions that are
        done now. Call it after `Transactions.reap` and `Pins.reap`."""
        self._take(now)
        for found in list(self._open.values()):
            if not found.waiting and now >= found.retry_at:
                self._advance(found, now)
        # What reports at once (memory tiers, a journal without a thread of its own) need not wait for a call.
        self._take(now)
        done = [found for found in self._open.values() if found.state is DeletionState.DONE]
        for found in done:
            del self._open[found.number]
            for key in found.keys:
                if self._of_key.get(key) is found:
                    del self._of_key[key]
        return done

    def _take(self, now: float) -> None:
        while self._inbox:
            report = self._inbox.popleft()
            found = self._open.get(report.number)
            if found is None:
                continue
            if report.drained:
                found.undrained -= 1
            elif report.turn == found.turn and found.waiting:
                found.waiting -= 1
                if report.error is not None:
                    found.error, found.failed = report.error, True
            else:
                continue
            if not found.waiting:
                self._after(found, now)

    def _advance(self, found: Deletion, now: float) -> None:
        if found.state is DeletionState.INTENDING:
            self._write(found, EntryKind.INTENT)
        elif found.receipted:
            self._forget(found)
        elif found.state is DeletionState.RECEIPTING:
            self._write(found, EntryKind.RECEIPT)
        elif found.state is DeletionState.DRAINING:
            idle = (line for line, owner in found.lines.items() if self._idle(line, owner))
            ready = list(islice(idle, self._batch))
            # What lies about on devices goes with the last of the copies.
            if ready or not found.lines:
                self._erase(found, ready, now)

    def _idle(self, line: int, owner: int) -> bool:
        directory = self._directory
        if self._moves.moves_of(owner) or directory.readers[line] or directory.write_txn[line]:
            return False
        return not any(directory.leases(line, tier) for tier in range(len(self._names)))

    def _erase(self, found: Deletion, lines: list[int], now: float) -> None:
        self._begin_turn(found)
        found.state = DeletionState.ERASING
        found.erasing = lines
        last = len(lines) == len(found.lines)
        batches = [self._items(found, lines, tier, last) for tier in range(len(self._names))]
        found.waiting = sum(len(items) for items in batches)
        if not found.waiting:
            self._after(found, now)
            return
        for tier, items in enumerate(batches):
            if not items:
                continue
            sink = _Round(found.number, found.turn, self._inbox, self._wake)
            try:
                self._eraser.erase(tier, items, now + self._seconds, sink)
            except CoreError as error:
                self._inbox.extend(_Report(found.number, found.turn, error) for _ in items)
            else:
                found.undrained += len(items)

    def _begin_turn(self, found: Deletion) -> None:
        self._turns += 1
        found.turn = self._turns
        found.failed = False

    def _items(self, found: Deletion, lines: list[int], tier: int, last: bool) -> list[EraseItem]:
        directory = self._directory
        items: list[EraseItem] = []
        for line in lines:
            copy = directory.replica(line, tier)
            ref = SlotRef(copy.slot, copy.slot_generation) if copy.state else None
            items.append(EraseItem(ref, directory.key_of(line)))
        if last:
            named = {item.key for item in items} | {directory.key_of(line) for line in found.cleared}
            items += [EraseItem(None, key) for key in found.keys if key not in named]
            if found.namespace:
                items.append(EraseItem(None, None, found.namespace))
        return items

    def _after(self, found: Deletion, now: float) -> None:
        """What follows a step that every part of has reported."""
        if found.failed:
            found.failed = False
            found.retry_at = now + self._retry
            if found.state is DeletionState.ERASING:
                found.state = DeletionState.DRAINING
            return
        if found.state is DeletionState.INTENDING:
            found.state = DeletionState.DRAINING
        elif found.state is DeletionState.RECEIPTING:
            found.receipted = True
        elif found.state is DeletionState.ERASING:
            if found.undrained:
                # A tier that was given up on may still write: its slot may not be another's before.
                return
            self._clear(found, found.erasing)
            found.erasing = []
            found.state = DeletionState.DRAINING if found.lines else DeletionState.RECEIPTING
            if found.lines:
                # One batch a pump: whoever waits for the lock has it in between.
                found.error = None
                self._wake()
                return
        else:
            return
        found.error = None
        self._advance(found, now)

    def _clear(self, found: Deletion, lines: list[int]) -> None:
        """The erased copies' slots are free again."""
        for line in lines:
            self._moves.discard(line)
            found.cleared[line] = found.lines.pop(line)

    def _forget(self, found: Deletion) -> None:
        for line in list(islice(found.cleared, self._batch)):
            owner = found.cleared.pop(line)
            if int(self._directory.logical[line]) == owner and self._directory.state[line] != ChunkState.FREE:
                self._directory.remove(line)
        if found.cleared:
            self._wake()
        else:
            found.state = DeletionState.DONE

    def _write(self, found: Deletion, kind: EntryKind) -> None:
        self._begin_turn(found)
        turn = found.turn
        found.waiting = 1
        tiers = self._names if kind is EntryKind.RECEIPT else ()
        entry = JournalEntry(kind, found.number, found.keys, found.namespace, found.generation, tiers)

        def written(error: CoreError | None) -> None:
            self._inbox.append(_Report(found.number, turn, error))
            self._wake()

        try:
            self._journal.append(entry, written)
        except CoreError as error:
            written(error)


def _some(lines: Iterable[int]) -> NDArray[np.int64]:
    """Those that hold a block."""
    return np.array([line for line in lines if line != NO_LINE], dtype=np.int64)
