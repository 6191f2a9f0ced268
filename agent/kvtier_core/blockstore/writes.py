"""Storing blocks: a reservation that only its writer sees, filled in place, published whole or not at all
(B.2).

Why it exists: the bytes of a put move once, from the client's memory into the slot that will be read, and no
reader may meet the slot before all of them are there and sealed. A writer that stalls or goes loses its
reservation, and whatever it still writes lands in a slot that is nobody's. It must not know how room is made.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from kvtier_core.blockstore.outcomes import PutOutcome, Stored
from kvtier_core.blockstore.parts import Parts
from kvtier_core.checksums import checksum
from kvtier_core.directory import NO_LINE
from kvtier_core.errors import CoreError, Reason
from kvtier_core.transactions import Move, MoveKind, MoveReason, MoveRefused, Transactions, TxnState
from kvtier_core.transactions.eviction import Room
from kvtier_core.transactions.reasons import refusal

_IN_FLIGHT = Stored(PutOutcome.IN_FLIGHT, reason=MoveReason.WRITE_TXN_BUSY)


@dataclass(slots=True)
class _Slot:
    """One block of a reservation: its move while it is ours to write, else how it ended."""

    move: Move | None
    ended: Stored | None = None


@dataclass(frozen=True, slots=True)
class _About:
    """What all blocks of one reservation have in common."""

    namespace: int
    rows: int
    cost: float
    producer: int
    droppable: bool
    tick: int
    deadline: float


class Reservation:
    """A writer's scope over some blocks, in the order of its keys. Leaving it gives back what is not
    published.

    Not for several threads at once; other reservations are independent of it."""

    def __init__(self, writes: Writes, keys: Sequence[bytes], slots: list[_Slot], deadline: float) -> None:
        self._writes = writes
        self.keys = tuple(keys)
        self.slots = slots
        self.deadline = deadline
        self._views: list[memoryview | None] = [None] * len(slots)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self.slots)

    def outcome(self, index: int) -> Stored | None:
        """How block `index` ended; None while it waits for its bytes."""
        return self.slots[index].ended

    def landing(self, index: int) -> memoryview | None:
        """Where block `index` is to be written, exactly a payload long; None when it needs no bytes. Writing
        to it after the scope ended is the writer's defect: the slot may be another's."""
        slot = self.slots[index]
        if slot.ended is not None or slot.move is None:
            return None
        if self._views[index] is None:
            self._views[index] = self._writes.body(slot.move)
        return self._views[index]

    def publish(self, stated: Sequence[int] | None = None) -> list[Stored]:
        """Seals every block by the XXH3-64 of what lies in its slot and makes it readable. stated: what the
        writer says the checksums are; a difference is CHECKSUM_MISMATCH and that block is not published."""
        return self._writes.publish(self, self.slots, stated)

    def close(self) -> None:
        """Gives back what is not published. A second call has no effect."""
        self._writes.close(self, self.slots)


class Writes:
    """All open reservations of one store, at most `max_open` blocks."""

    def __init__(
        self, parts: Parts, moves: Transactions, make_room: Callable[[int, int], Room], max_open: int = 65536
    ) -> None:
        self._parts = parts
        self._moves = moves
        self._make_room = make_room
        self._max_open = max_open
        self._open: dict[int, Reservation] = {}
        self._abandoned: deque[list[_Slot]] = deque()
        self._blocks = 0
        self.expired = 0

    @property
    def open_blocks(self) -> int:
        return self._blocks

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
        IN_FLIGHT, or REFUSED with its reason (NO_DESTINATION_CAPACITY, QUOTA_EXCEEDED, CREDIT_PRESSURE,
        TOMBSTONED). Raises QUEUE_FULL, DEADLINE."""
        parts = self._parts
        with parts.lock:
            now = parts.clock()
            if now >= deadline:
                raise CoreError(Reason.DEADLINE, "the deadline passed before the blocks were stored")
            if self._blocks + len(keys) > self._max_open:
                raise CoreError(
                    Reason.QUEUE_FULL,
                    f"{self._blocks} blocks are being stored, {self._max_open} may be",
                    {"open": self._blocks},
                )
            owner = parts.namespaces.index(namespace)
            tick = parts.next_tick()
            about = _About(owner, rows, cost, producer, droppable, tick, deadline)
            slots = [self._begin(key, about) for key in keys]
            made = Reservation(self, keys, slots, deadline)
            self._blocks += len(slots)
            self._open[id(made)] = made
            # A scope that ended by its deadline and is never left: its writer is gone with it.
            weakref.finalize(made, self._abandoned.append, slots).atexit = False
            return made

    def _begin(self, key: bytes, about: _About) -> _Slot:
        directory, home = self._parts.directory, self._parts.home
        line = directory.locate(key)
        if line != NO_LINE:
            return _Slot(None, self._there(line, about.namespace))
        try:
            line = directory.insert_block(
                key,
                namespace=about.namespace,
                rows=about.rows,
                producer=about.producer,
                cost=about.cost,
                tick=about.tick,
            )
        except CoreError as error:
            return _Slot(None, _refused(error))
        if about.droppable:
            directory.droppable[line] = 1
        try:
            try:
                move = self._moves.begin(MoveKind.STORE, line, home, deadline=about.deadline)
            except MoveRefused as full:
                if full.code is not MoveReason.NO_DESTINATION_CAPACITY:
                    raise
                room = self._make_room(home, 1)
                if not room.now:
                    raise MoveRefused(_full(room), full.message, full.facts) from full
                move = self._moves.begin(MoveKind.STORE, line, home, deadline=about.deadline)
        except CoreError as error:
            directory.remove(line)
            return _Slot(None, _refused(error))
        self._moves.lend(move)
        return _Slot(move)

    def _there(self, line: int, namespace: int) -> Stored:
        directory = self._parts.directory
        if directory.find(directory.key_of(line)) == NO_LINE:
            return Stored(
                PutOutcome.REFUSED, reason=MoveReason.TOMBSTONED, message="the block is being deleted"
            )
        if int(directory.namespace[line]) != namespace:
            return Stored(
                PutOutcome.REFUSED,
                reason=MoveReason.TENANT_MISMATCH,
                message="the key is another namespace's",
            )
        copy = directory.authority(line)
        return _IN_FLIGHT if copy is None else Stored(PutOutcome.EXISTED, copy.generation)

    def body(self, move: Move) -> memoryview:
        return self._parts.tiers[move.tier].landing(move.destination).body

    def publish(
        self, reservation: Reservation, slots: list[_Slot], stated: Sequence[int] | None
    ) -> list[Stored]:
        sums: list[int | None] = [None] * len(slots)
        for index, slot in enumerate(slots):
            # The bytes are the writer's until here, and nobody else's: hashing needs no lock.
            view = reservation.landing(index)
            if view is not None and slot.move is not None:
                sums[index] = checksum("xxh3", view)
        with self._parts.lock:
            for index, slot in enumerate(slots):
                found = sums[index]
                if slot.ended is None and slot.move is not None and found is not None:
                    wanted = None if stated is None else stated[index]
                    slot.ended = self._seal(slot.move, found, wanted)
            self._forget(reservation, slots)
        return [slot.ended or _IN_FLIGHT for slot in slots]

    def _seal(self, move: Move, found: int, wanted: int | None) -> Stored:
        if move.state is not TxnState.RESERVED:
            return Stored(PutOutcome.REFUSED, reason=move.reason, message="the reservation has ended")
        if wanted is not None and wanted != found:
            self._drop(move, MoveReason.CHECKSUM_MISMATCH)
            return Stored(
                PutOutcome.REFUSED,
                reason=MoveReason.CHECKSUM_MISMATCH,
                message=f"xxh3:{wanted:016x} was stated, xxh3:{found:016x} arrived",
            )
        try:
            self._moves.seal(move, found)
        except CoreError as error:
            self._remove(move)
            return _refused(error)
        return Stored(PutOutcome.STORED, move.identity.replica_generation)

    def expire(self, now: float) -> int:
        """Ends reservations whose deadline has come. Their slots stay quarantined until the writer's scope
        ends, since it may still be writing. Returns how many blocks were ended."""
        count = 0
        while self._abandoned:
            for slot in self._abandoned.popleft():
                if slot.move is not None:
                    self._moves.returned(slot.move)
        for reservation in list(self._open.values()):
            if now < reservation.deadline:
                continue
            for slot in reservation.slots:
                if slot.ended is None and slot.move is not None:
                    self._moves.cancel(slot.move, MoveReason.TRANSFER_TIMEOUT)
                    self._remove(slot.move)
                    slot.ended = Stored(
                        PutOutcome.REFUSED,
                        reason=MoveReason.TRANSFER_TIMEOUT,
                        message="the writer was too slow",
                    )
                    count += 1
            self._forget(reservation, reservation.slots)
        self.expired += count
        return count

    def close(self, reservation: Reservation, slots: list[_Slot]) -> None:
        with self._parts.lock:
            for slot in slots:
                if slot.move is None or slot.move.state in (TxnState.PUBLISHED, TxnState.RELEASED):
                    continue
                if slot.ended is None:
                    self._drop(slot.move, MoveReason.CANCELLED)
                    slot.ended = Stored(PutOutcome.REFUSED, reason=MoveReason.CANCELLED)
                self._moves.returned(slot.move)
            self._forget(reservation, slots)

    def _drop(self, move: Move, reason: MoveReason) -> None:
        self._moves.cancel(move, reason)
        self._remove(move)

    def _remove(self, move: Move) -> None:
        """A block that was never published leaves no line behind."""
        directory = self._parts.directory
        if directory.line_of(move.owner) == move.line and not directory.replicas.held_in(move.line):
            directory.remove(move.line)

    def _forget(self, reservation: Reservation, slots: list[_Slot]) -> None:
        if (
            all(slot.ended is not None for slot in slots)
            and self._open.pop(id(reservation), None) is not None
        ):
            self._blocks -= len(slots)


def _refused(error: CoreError) -> Stored:
    return Stored(PutOutcome.REFUSED, reason=refusal(error).code, message=error.message)


def _full(room: Room) -> MoveReason:
    """Why there is no slot now: copies that leave make it worth asking again."""
    return MoveReason.CREDIT_PRESSURE if room.leaving else room.reason
