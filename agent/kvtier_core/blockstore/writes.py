"""Storing blocks: a reservation that only its writer sees, filled in place, published whole or not at all
(B.2).

Why it exists: the bytes of a put move once, from the client's memory into the slot that will be read, and no
reader may meet the slot before all of them are there and sealed. A writer that stalls or goes loses its
reservation, and whatever it still writes lands in a slot that is nobody's. It must not know how room is made.

States of a block: RESERVED (a line, a slot and a credit, seen by the writer alone) > PUBLISHED, or gone. The
line carries the reservation's number as its claim, so that evictions, moves and deletions keep off it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set

from kvtier_core.blockstore.batches import BATCH_FROM, Batches
from kvtier_core.blockstore.outcomes import PutOutcome, Stored, all_stored, compared
from kvtier_core.blockstore.parts import Parts
from kvtier_core.blockstore.reservation import Held, Reservation
from kvtier_core.checksums import digests
from kvtier_core.credits import CreditRefused, Ledger, slots
from kvtier_core.directory import KEY_BYTES, NO_LINE, StoreFacts
from kvtier_core.directory.compiled import steps
from kvtier_core.errors import CoreError, Reason
from kvtier_core.tiers.base import PoolTier
from kvtier_core.tiers.slots import SlotRef
from kvtier_core.transactions import MoveReason
from kvtier_core.transactions.eviction import Room
from kvtier_core.transactions.reasons import refusal

_KEY_LENGTHS = frozenset((KEY_BYTES,))
# Claims of reservations and numbers of moves never meet.
FIRST_CLAIM = 1 << 62
MAX_COST_SECONDS = 1e9
_IN_FLIGHT = Stored(PutOutcome.IN_FLIGHT, reason=MoveReason.WRITE_TXN_BUSY)
_DELETING = Stored(PutOutcome.REFUSED, reason=MoveReason.TOMBSTONED, message="the block is being deleted")
_PRESSURE = Stored(PutOutcome.REFUSED, reason=MoveReason.CREDIT_PRESSURE, message="copies leave")
_CANCELLED = Stored(PutOutcome.REFUSED, reason=MoveReason.CANCELLED, message="the scope was left")
_LATE = Stored(PutOutcome.REFUSED, reason=MoveReason.TRANSFER_TIMEOUT, message="the writer was too slow")


class Writes:
    """All open reservations of one store, at most `max_open` blocks."""

    def __init__(
        self,
        parts: Parts,
        ledger: Ledger,
        make_room: Callable[[int, int, bytes], Room],
        make_memory: Callable[[int, bytes], Room],
        published: Callable[[int], None] | None,
        keep: Callable[[int], Stored | None],
        max_open: int = 65536,
        kept_limit: int | None = None,
        compiled: bool = True,
    ) -> None:
        """keep: what holds for all who stored a block; see `Keeping.keep`. compiled: many blocks of a call by
        machine code, where there is any."""
        home = parts.tiers[parts.home]
        if not isinstance(home, PoolTier):
            raise CoreError(Reason.TIER_INCAPABLE, f"tier {home.name} has no memory to store into")
        self._parts = parts
        self._ledger = ledger
        self._make_room = make_room
        self._make_memory = make_memory
        self._published = published
        self._keep = keep
        self._max_open = max_open
        self._kept_limit = parts.directory.capacity if kept_limit is None else kept_limit
        self._home = home
        self._resource = slots(parts.home)
        code = steps() if compiled else None
        self._batches = Batches(code, parts.directory, parts.home, home.slots) if code else None
        self._open: dict[int, Held] = {}
        self._dying: dict[int, Held] = {}
        self._next = FIRST_CLAIM
        self.abandoned: deque[Held] = deque()
        self.forbidden: Set[bytes] = frozenset()
        """Keys under which nothing may be stored now."""
        self.digests: Callable[[Sequence[memoryview]], list[int]] = digests
        """What seals blocks: the checksums of their bytes."""
        self.open_blocks = 0
        self.expired = 0
        self._made_memory = 0

    def body(self, slot: int) -> memoryview:
        return self._home.body(slot)

    # Reserving.

    def reserve(
        self,
        keys: Sequence[bytes],
        *,
        namespace: bytes,
        rows: int,
        cost: float,
        producer: int,
        droppable: bool,
        deadline: float,
    ) -> Reservation:
        """Takes a slot in the home tier for every key that is not there. Per block: a landing, or EXISTED,
        IN_FLIGHT, or REFUSED with its reason (NO_DESTINATION_CAPACITY, KEPT_CAPACITY, QUOTA_EXCEEDED,
        CREDIT_PRESSURE while copies leave, TOMBSTONED). Raises QUEUE_FULL, DEADLINE, BAD_ARGUMENT; nothing is
        held then. The lock of metadata is held."""
        parts, count = self._parts, len(keys)
        if len(keys[0]) != KEY_BYTES if count == 1 else not set(map(len, keys)) <= _KEY_LENGTHS:
            raise CoreError(Reason.BAD_ARGUMENT, f"a block's key has {KEY_BYTES} bytes")
        # An order by cost has no place for what is no number, and infinity would be the age of all to come.
        if not 0.0 <= cost <= MAX_COST_SECONDS:
            raise CoreError(Reason.BAD_ARGUMENT, f"{cost} seconds to recompute a block")
        if parts.clock() >= deadline:
            raise CoreError(Reason.DEADLINE, "the deadline passed before the blocks were stored")
        if self.open_blocks + count > self._max_open:
            raise CoreError(
                Reason.QUEUE_FULL,
                f"{self.open_blocks} blocks are being stored, {self._max_open} may be",
                {"open": self.open_blocks},
            )
        owner = parts.namespaces.index(namespace)
        self._next += 1
        held = Held(tuple(keys), self._next, deadline, owner)
        facts = StoreFacts(owner, rows, producer, cost, droppable, parts.next_tick(), held.claim)
        try:
            if count != 1 or not self._fill_one(held, keys[0], namespace, facts):
                self._fill(held, keys, namespace, facts)
        except BaseException:
            self.open_blocks += held.waiting
            self._end(held, _CANCELLED)
            raise
        made = Reservation(self, keys, held)
        if held.waiting:
            self.open_blocks += held.waiting
            self._open[held.claim] = held
        return made

    def _fill_one(self, held: Held, key: bytes, namespace: bytes, facts: StoreFacts) -> bool:
        """The short way of one block that is not there and has room. False, with nothing changed, for any
        other: it goes the way of many."""
        directory, table, ledger = self._parts.directory, self._home.slots, self._ledger
        if directory.locate(key) != NO_LINE or key in self.forbidden or ledger.offered(self._resource) < 1:
            return False
        if not facts.droppable and directory.kept >= self._kept_limit:
            return False
        try:
            slot = table.begin(namespace)
        except CoreError:
            return False
        try:
            ledger.occupy(self._resource, 1, held.namespace)
            try:
                line = directory.begin_store(key, facts, self._parts.home, *slot)
            except BaseException:
                ledger.vacate(self._resource, 1, held.namespace)
                raise
        except CoreError:
            table.release(SlotRef(*slot))
            return False
        except BaseException:
            table.release(SlotRef(*slot))
            raise
        held.lines, held.slots, held.ended, held.waiting = [line], [slot], [None], 1
        return True

    def _fill(self, held: Held, keys: Sequence[bytes], namespace: bytes, facts: StoreFacts) -> None:
        batches, locate = self._batches, self._parts.directory.locate
        found = [locate(key) for key in keys] if batches is None else batches.locate(keys)
        absent = missing = found.count(NO_LINE)
        before = self._parts.directory.directory_generation
        if not facts.droppable:
            # No room is made for what may not be stored.
            missing = min(missing, max(0, self._kept_limit - self._parts.directory.kept))
        paid, refused = self._pay(held, missing) if missing else (0, None)
        # Making room may have ended blocks that were there; and a key may be named twice.
        again = before != self._parts.directory.directory_generation or (
            len(keys) > 1 and len(set(keys)) < len(keys)
        )
        begun: Iterator[tuple[int, tuple[int, int]]] = iter(())
        spare: list[tuple[int, int]] = []
        try:
            if (
                batches is not None
                and len(keys) >= BATCH_FROM
                and not again
                and paid == absent
                and self.forbidden.isdisjoint(keys)
            ):
                fresh = keys
                if absent < len(keys):
                    fresh = [key for key, line in zip(keys, found, strict=True) if line == NO_LINE]
                lines, places, spare = batches.begin(fresh, namespace, facts)
                paid -= len(lines)
                if len(lines) == len(keys):
                    held.lines, held.slots, held.waiting = lines, places, len(lines)
                    held.ended = [None] * len(lines)
                    return
                begun = zip(lines, places, strict=True)
            elif not again:
                spare = self._home.slots.begin_many(namespace, min(paid, missing))
            spare.reverse()
            for key, line in zip(keys, found, strict=True):
                ended: Stored | None = None
                slot = (-1, 0)
                if again:
                    line = locate(key)
                if line != NO_LINE:
                    ended = self._there(line, facts)
                elif (ready := next(begun, None)) is not None:
                    line, slot = ready
                elif key in self.forbidden:
                    ended = _DELETING
                elif not facts.droppable and self._parts.directory.kept >= self._kept_limit:
                    ended = self._no_more_kept()
                elif paid == 0:
                    ended = refused or _PRESSURE
                else:
                    made = self._made_memory
                    line, slot, ended = self._begin(key, namespace, facts, spare.pop() if spare else None)
                    paid -= ended is None
                    # Blocks of this very call may have made way; their lines may be others' by now.
                    again = again or made != self._made_memory
                held.lines.append(line if ended is None else NO_LINE)
                held.slots.append(slot)
                held.ended.append(ended)
                held.waiting += ended is None
        finally:
            paid += 0 if batches is None else batches.undo(begun, facts.txn)
            for unused in spare:
                self._home.slots.release(SlotRef(*unused))
            if paid:
                self._ledger.vacate(self._resource, paid, held.namespace)

    def _pay(self, held: Held, count: int) -> tuple[int, Stored | None]:
        """Credits for up to `count` slots; how many there are, and why there are no more."""
        try:
            self._ledger.occupy(self._resource, count, held.namespace)
            return count, None
        except CreditRefused as short:
            refused = _refused(short)
        if refused.reason is not MoveReason.QUOTA_EXCEEDED:
            namespace = self._parts.namespaces.digest(held.namespace)
            room = self._make_room(self._parts.home, count, namespace)
            if room.leaving:
                refused = _PRESSURE
            elif not room.now:
                refused = Stored(PutOutcome.REFUSED, reason=room.reason, message=refused.message)
        while count > 0:
            try:
                self._ledger.occupy(self._resource, count, held.namespace)
                return count, refused
            except CreditRefused as short:
                count = min(count - 1, short.available)
        return 0, refused

    def _begin(
        self, key: bytes, namespace: bytes, facts: StoreFacts, slot: tuple[int, int] | None
    ) -> tuple[int, tuple[int, int], Stored | None]:
        directory, table = self._parts.directory, self._home.slots
        if slot is None:
            try:
                slot = table.begin(namespace)
            except CoreError as error:
                self._made_memory += 1
                room = self._make_memory(self._parts.home, namespace)
                if not room.now:
                    return NO_LINE, (-1, 0), _PRESSURE if room.leaving else _refused(error)
                try:
                    slot = table.begin(namespace)
                except CoreError as still:
                    return NO_LINE, (-1, 0), _refused(still)
        try:
            line = directory.begin_store(key, facts, self._parts.home, *slot)
        except CoreError as error:
            table.release(SlotRef(*slot))
            return NO_LINE, (-1, 0), _refused(error)
        except BaseException:
            table.release(SlotRef(*slot))
            raise
        return line, slot, None

    def _no_more_kept(self) -> Stored:
        kept, limit = self._parts.directory.kept, self._kept_limit
        return Stored(
            PutOutcome.REFUSED,
            reason=MoveReason.KEPT_CAPACITY,
            message=f"{kept} blocks that may not be lost are stored, {limit} may be",
        )

    def _there(self, line: int, facts: StoreFacts) -> Stored:
        directory = self._parts.directory
        if directory.find(directory.key_of(line)) == NO_LINE:
            return _DELETING
        if int(directory.namespace[line]) != facts.namespace:
            return Stored(
                PutOutcome.REFUSED,
                reason=MoveReason.TENANT_MISMATCH,
                message="the key is another namespace's",
            )
        copy = directory.authority(line)
        if copy is not None:
            if not facts.droppable:
                # The stronger promise holds for all who stored it.
                if directory.droppable[line] and directory.kept >= self._kept_limit:
                    return self._no_more_kept()
                if (refused := self._keep(line)) is not None:
                    return refused
            return Stored(PutOutcome.EXISTED, copy.generation, checksum=int(directory.checksum[line]))
        if directory.write_txn[line] >= FIRST_CLAIM:
            return _IN_FLIGHT
        return Stored(
            PutOutcome.REFUSED,
            reason=MoveReason.LEASES_HELD,
            message="what is left of a bad copy is still being read; ask again",
        )

    # Publishing.

    def publish(self, held: Held, stated: Sequence[int] | None) -> list[Stored]:
        if stated is not None and len(stated) != len(held.ended):
            raise CoreError(
                Reason.BAD_ARGUMENT, f"{len(stated)} checksums for {len(held.ended)} blocks were stated"
            )
        if len(held.ended) == 1:
            return self._publish_one(held, None if stated is None else stated[0])
        body = self._home.body
        # The bytes are the writer's until here, and nobody else's: hashing needs no lock.
        waiting = [index for index, ended in enumerate(held.ended) if ended is None]
        sums = self.digests([body(held.slots[index][0]) for index in waiting])
        if len(waiting) < len(held.ended):
            found = dict(zip(waiting, sums, strict=True))
            sums = [found.get(index, 0) for index in range(len(held.ended))]
        with self._parts.lock:
            failed = done = 0
            if (
                self._batches is not None
                and BATCH_FROM <= held.waiting == len(sums)
                and stated in (None, sums)
            ):
                generations = self._batches.publish(held.keys, held.lines, held.slots, held.claim, sums)
                done = len(generations)
                held.ended[:done] = all_stored(generations)
                if self._published is not None:
                    for line in held.lines[:done]:
                        self._published(line)
            for index, ended in enumerate(held.ended if done < len(sums) else ()):
                if ended is None:
                    wanted = None if stated is None else stated[index]
                    stored = self._seal(held, index, sums[index], wanted)
                    held.ended[index] = stored
                    done += stored.outcome is PutOutcome.STORED
                    failed += stored.outcome is not PutOutcome.STORED
                elif stated is not None:
                    held.ended[index] = compared(ended, stated[index])
            self.open_blocks -= done + failed
            held.waiting = 0
            self._open.pop(held.claim, None)
            if failed:
                self._ledger.vacate(self._resource, failed, held.namespace)
        return [ended or _IN_FLIGHT for ended in held.ended]

    def _publish_one(self, held: Held, stated: int | None) -> list[Stored]:
        ended = held.ended[0]
        found = 0 if ended is not None else self.digests((self._home.body(held.slots[0][0]),))[0]
        with self._parts.lock:
            ended = held.ended[0]
            if ended is None:
                ended = held.ended[0] = self._seal(held, 0, found, stated)
                self.open_blocks -= 1
                held.waiting = 0
                del self._open[held.claim]
                if ended.outcome is not PutOutcome.STORED:
                    self._ledger.vacate(self._resource, 1, held.namespace)
            elif stated is not None:
                ended = held.ended[0] = compared(ended, stated)
        return [ended]

    def _seal(self, held: Held, index: int, found: int, wanted: int | None) -> Stored:
        line, slot = held.lines[index], held.slots[index]
        if wanted is not None and wanted != found:
            self._drop(held, index)
            return Stored(
                PutOutcome.REFUSED,
                reason=MoveReason.CHECKSUM_MISMATCH,
                message=f"xxh3:{wanted:016x} was stated, xxh3:{found:016x} arrived",
            )
        directory = self._parts.directory
        try:
            self._home.slots.publish_filled(*slot)
            generation = directory.publish_store(line, self._parts.home, held.claim, found)
        except CoreError as error:
            deleted = directory.find(directory.key_of(line)) == NO_LINE
            self._drop(held, index)
            if deleted:
                return Stored(
                    PutOutcome.REFUSED, reason=MoveReason.TOMBSTONED, message="it was deleted meanwhile"
                )
            return _refused(error)
        if self._published is not None:
            self._published(line)
        return Stored(PutOutcome.STORED, generation)

    def _drop(self, held: Held, index: int) -> None:
        """Takes a block that is not published back: its line first, then its slot."""
        self._parts.directory.abort_store(held.lines[index], self._parts.home, held.claim)
        self._home.slots.release(SlotRef(*held.slots[index]))

    # Ending without publishing.

    def close(self, held: Held) -> None:
        with self._parts.lock:
            self._end(held, _CANCELLED)
            if held.claim in self._dying:
                self._bury(held)

    def expire(self, now: float) -> int:
        """Ends reservations whose deadline has come. Their slots stay quarantined until the writer's scope
        ends, since it may still be writing. Returns how many blocks were ended."""
        count = 0
        while self.abandoned:
            held = self.abandoned.popleft()
            self._end(held, _CANCELLED)
            if held.claim in self._dying:
                self._bury(held)
        for held in [each for each in self._open.values() if now >= each.deadline]:
            count += self._suspend(held)
        self.expired += count
        return count

    def _end(self, held: Held, why: Stored) -> None:
        if not held.waiting:
            return
        for index, ended in enumerate(held.ended):
            if ended is None:
                held.ended[index] = why
                self._drop(held, index)
        self._ledger.vacate(self._resource, held.waiting, held.namespace)
        self.open_blocks -= held.waiting
        held.waiting = 0
        self._open.pop(held.claim, None)

    def _suspend(self, held: Held) -> int:
        count = held.waiting
        for index, ended in enumerate(held.ended):
            if ended is None:
                held.ended[index] = _LATE
                self._parts.directory.abort_store(held.lines[index], self._parts.home, held.claim)
                self._home.quarantine(SlotRef(*held.slots[index]))
            else:
                held.slots[index] = (-1, 0)
        self.open_blocks -= count
        held.waiting = 0
        self._open.pop(held.claim, None)
        held.late = True
        self._dying[held.claim] = held
        return count

    def _bury(self, held: Held) -> None:
        """The writer is gone: its quarantined slots are free again, and so are their credits."""
        del self._dying[held.claim]
        held.late = False
        mine = [SlotRef(*slot) for slot in held.slots if slot[0] >= 0]
        for ref in mine:
            self._home.slots.release(ref)
        self._ledger.vacate(self._resource, len(mine), held.namespace)


def _refused(error: CoreError) -> Stored:
    return Stored(PutOutcome.REFUSED, reason=refusal(error).code, message=error.message)
