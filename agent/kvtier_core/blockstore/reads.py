"""Reading blocks: what is in memory is pinned in the same step that finds it, what is not is fetched once for
all.

Why it exists: between a hit and its use lies every eviction there is, so finding and pinning are one step
under the lock; and 32 requests for one prefix are one read of each block. It must not know who asks or how
room is made.
"""

from __future__ import annotations

import heapq
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvtier_core.admission import AdmissionPolicy
from kvtier_core.blockstore.outcomes import Found
from kvtier_core.blockstore.parts import Parts
from kvtier_core.directory import Directory
from kvtier_core.errors import CoreError, Reason
from kvtier_core.layout import CODEC_IDENTITY, LAYOUT_ID
from kvtier_core.tiers.slots import SlotRef
from kvtier_core.transactions import Move, MoveKind, MoveReason, MoveRefused, Transactions, TxnState
from kvtier_core.transactions.eviction import Room
from kvtier_core.transactions.flights import Asker, Flight, FlightKey, Ticket, TicketState
from kvtier_core.transactions.reasons import refusal
from kvtier_core.transactions.singleflight import SingleFlight
from kvtier_core.transactions.transfers import Settled

_Order = Callable[[Flight], tuple[float, ...]]


def _urgency(flight: Flight) -> tuple[float, ...]:
    """Priority first; then by place in the prefix, so that requests take turns and a short one does not wait
    for a long one's tail; then by deadline."""
    return (-flight.priority, flight.place, flight.deadline, flight.number)


def _arrival(flight: Flight) -> tuple[float, ...]:
    """As `_urgency`, but by arrival among equal places."""
    return (-flight.priority, flight.place, flight.number)


def _deadline(flight: Flight) -> tuple[float, ...]:
    return (-flight.priority, flight.deadline, flight.place, flight.number)


def _deadline_shared(flight: Flight) -> tuple[float, ...]:
    """Of equal deadlines first the read that most requests wait for. All reads of blocks are exact."""
    return (-flight.priority, flight.deadline, -len(flight.waiters), flight.place, flight.number)


_ORDERS: Mapping[AdmissionPolicy | None, _Order] = {
    None: _urgency,
    AdmissionPolicy.FIFO: _arrival,
    AdmissionPolicy.EARLIEST_DEADLINE: _deadline,
    AdmissionPolicy.EXACT_DEADLINE_COALESCING: _deadline_shared,
}
# Lack of credits that reads under way give back as they end.
_PRESSED = (MoveReason.CREDIT_PRESSURE, MoveReason.QUEUE_FULL)


_REPRESENTATION = f"{LAYOUT_ID}|{CODEC_IDENTITY}"
_BAD = (MoveReason.CHECKSUM_MISMATCH, MoveReason.IDENTITY_MISMATCH)


class Fetch:
    """A request's scope over the leading blocks of its prefix. What is ready stays where it is, at its bytes,
    until the scope is left; leaving it while blocks are on their way lets them go."""

    def __init__(self, reads: Reads, ticket: Ticket, asked: int, changed: threading.Event) -> None:
        self._reads = reads
        self._ticket = ticket
        self._asked = asked
        self.changed = changed
        # A scope that is dropped without being left must not hold its blocks for ever.
        self._finalizer = weakref.finalize(self, reads.dropped.append, ticket)
        self._finalizer.atexit = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return self._asked

    @property
    def over(self) -> bool:
        """Nothing more will come."""
        return self._ticket.over

    @property
    def ready(self) -> int:
        """How many leading blocks are pinned and readable now."""
        return self._ticket.ready

    @property
    def reason(self) -> MoveReason:
        """Why the prefix ends at `ready`; READY when nothing is missing."""
        reason = self._ticket.reason
        return (
            MoveReason.MISS if reason is MoveReason.READY and len(self._ticket.keys) < self._asked else reason
        )

    def body(self, index: int) -> memoryview:
        """The payload of a ready block, in place, not to be written. NOT_VISIBLE for one that is not
        ready."""
        return self._reads.body(self._ticket, index)

    def tier(self, index: int) -> str:
        """Name of the memory tier that serves a ready block."""
        return self._reads.tier(self._ticket, index)

    def found(self, index: int) -> Found:
        """The copy that serves a ready block: what its bytes must hash to, and its generation."""
        return self._reads.found(self._ticket, index)

    def of(self, directory: Directory) -> bool:
        """Whether its lines, tiers and slots are those of that directory: in another one the same numbers
        mean somebody else's bytes."""
        return self._reads.parts_of(directory)

    def place(self, index: int) -> tuple[int, int, SlotRef]:
        """(directory line, tier, slot) of a ready block, for who takes a lease of its own on it."""
        return self._reads._pin(self._ticket, index)

    def close(self) -> None:
        """Lets every pin and wait of this scope go. A second call has no effect."""
        if self._finalizer.detach() is not None:
            self._reads.close(self._ticket)


class Reads:
    """Fetches of one store, over one SingleFlight."""

    def __init__(
        self,
        parts: Parts,
        moves: Transactions,
        make_room: Callable[[int, int], Room],
        make_memory: Callable[[int, bytes], Room],
        *,
        max_flights: int,
        max_tickets: int,
        window_bytes: int = 2 << 20,
    ) -> None:
        self._parts = parts
        self._moves = moves
        self._make_room = make_room
        self._make_memory = make_memory
        self.flights = SingleFlight(self, max_flights=max_flights, max_tickets=max_tickets)
        self._held: dict[int, dict[int, tuple[int, int, SlotRef]]] = {}
        self._changed: dict[int, threading.Event] = {}
        self._of_move: dict[int, Flight] = {}
        self._moving: dict[int, Move] = {}
        self._parked: dict[int, Flight] = {}
        # Bytes that a newcomer may find ahead of it; enough for every I/O thread to have its next block.
        self._window = max(8, window_bytes // parts.block_bytes)
        # Reads that are ahead of all but a few of those under way need not wait until some of them end: a
        # long request fills the window, and a short one that comes after it would wait for all of that.
        self._lane = 8
        self._order: _Order = _urgency
        self.dropped: deque[Ticket] = deque()
        self.hits = 0
        self.fetched = 0
        self.retried = 0
        self.leaked = 0

    def by(self, policy: AdmissionPolicy | None) -> None:
        """Who goes first from now on."""
        self._order = _ORDERS[policy]

    # Opening and closing.

    def fetch(self, keys: Sequence[bytes], asker: Asker) -> Fetch:
        """Waits for the leading blocks among `keys`. Raises DEADLINE, QUEUE_FULL."""
        parts = self._parts
        with parts.lock:
            # What lies behind a hole in the prefix is of no use, and is not read.
            wanted: list[FlightKey] = []
            for key in keys:
                line = parts.directory.find(key)
                if line < 0 or not parts.directory.readable(line):
                    break
                wanted.append(self._key(key, line, asker.namespace))
            ticket = self.flights.join(asker, wanted, parts.clock())
            changed = threading.Event()
            if ticket.over:
                changed.set()
            else:
                self._changed[ticket.number] = changed
            return Fetch(self, ticket, len(keys), changed)

    def _key(self, key: bytes, line: int, namespace: bytes) -> FlightKey:
        directory = self._parts.directory
        return FlightKey(
            namespace=namespace,
            block=key,
            representation=_REPRESENTATION,
            layers=(0, 0),
            generation=self._moves.cache_generation,
            authority_epoch=int(directory.epoch[line]),
            integrity=int(directory.checksum[line]),
            destination=self._parts.home,
        )

    def body(self, ticket: Ticket, index: int) -> memoryview:
        held = self._pin(ticket, index)
        return self._parts.tiers[held[1]].landing(held[2]).body.toreadonly()

    def tier(self, ticket: Ticket, index: int) -> str:
        return self._parts.tiers[self._pin(ticket, index)[1]].name

    def found(self, ticket: Ticket, index: int) -> Found:
        line, tier, _ = self._pin(ticket, index)
        directory = self._parts.directory
        # It is leased, so neither moves on.
        return Found(tier, directory.replica(line, tier).generation, int(directory.checksum[line]))

    def parts_of(self, directory: Directory) -> bool:
        """Whether what this store serves is kept in that directory."""
        return self._parts.directory is directory

    def _pin(self, ticket: Ticket, index: int) -> tuple[int, int, SlotRef]:
        held = self._held.get(ticket.number, {}).get(index)
        if held is None or index >= ticket.ready:
            raise CoreError(Reason.NOT_VISIBLE, f"block {index} of this fetch is not ready")
        return held

    def close(self, ticket: Ticket) -> None:
        with self._parts.lock:
            self._end(ticket)
        self.released()

    def _end(self, ticket: Ticket) -> None:
        self.flights.cancel(ticket)
        self._changed.pop(ticket.number, None)
        self._let_go(ticket, 0)

    def reap(self) -> None:
        """Gives back what scopes held that were dropped without being left."""
        while self.dropped:
            self._end(self.dropped.popleft())
            self.leaked += 1

    def released(self) -> None:
        """Somebody let copies go: what waits for that need not wait for the next report."""
        if self._parts.waiting:
            self._parts.wake()

    def _let_go(self, ticket: Ticket, first: int) -> None:
        held = self._held.get(ticket.number)
        if not held:
            return
        for index in [item for item in held if item >= first]:
            line, tier, _ = held.pop(index)
            self._parts.directory.unlease(line, tier)
        if not held:
            del self._held[ticket.number]

    # What single-flight causes. The lock is held.

    def claim(self, ticket: Ticket, index: int) -> MoveReason:
        parts = self._parts
        directory = parts.directory
        key = ticket.keys[index]
        line = directory.find(key.block)
        if line < 0:
            return MoveReason.MISS
        if int(directory.namespace[line]) != parts.namespaces.known(key.namespace):
            return MoveReason.TENANT_MISMATCH
        tier = parts.readable(line)
        if tier < 0:
            return MoveReason.MISS
        try:
            directory.lease(line, tier)
        except CoreError as error:
            return refusal(error, MoveReason.NOT_VISIBLE).code
        copy = directory.replica(line, tier)
        ref = SlotRef(copy.slot, copy.slot_generation)
        self._held.setdefault(ticket.number, {})[index] = (line, tier, ref)
        directory.touch(np.asarray([line]), parts.next_tick())
        self.hits += 1
        return MoveReason.READY

    def start(self, flights: Sequence[Flight]) -> Mapping[int, MoveReason]:
        return self._start(flights)

    def _start(self, flights: Sequence[Flight]) -> dict[int, MoveReason]:
        """Begins the reads of flights, the most urgent first. What goes beyond the window, finds no slot
        while copies leave, or whose block is being moved by another, is parked until that is over."""
        self._bury()
        refused: dict[int, MoveReason] = {}
        moves: list[Move] = []
        room: Room | None = None
        behind = False
        for flight in sorted(flights, key=self._order):
            ahead = len(self._moving) >= self._window
            if ahead and (behind or not self._overtakes(flight)):
                # Neither do those that come after it in the order.
                behind = True
                self._park(flight)
                continue
            try:
                try:
                    move = self._begin(flight)
                except MoveRefused as full:
                    if full.code is not MoveReason.NO_STAGING:
                        raise
                    if room is None:
                        room = self._make_room(self._parts.home, len(flights) - len(moves))
                    if room.now:
                        room = self._make_memory(self._parts.home, flight.key.namespace)
                    move = self._begin(flight)
            except MoveRefused as error:
                leaving = room is not None and room.leaving > 0
                if (
                    error.code is MoveReason.WRITE_TXN_BUSY
                    or (error.code is MoveReason.NO_STAGING and leaving)
                    or (error.code in _PRESSED and (moves or self._moving))
                ):
                    self._park(flight)
                else:
                    refused[flight.number] = error.code
                continue
            move.ahead = ahead
            self._of_move[move.id] = flight
            self._moving[flight.number] = move
            moves.append(move)
        for settled in self._moves.start(moves):
            ended = self._forget(settled.move)
            if ended is not None:
                refused[ended.number] = settled.reason
        return refused

    def _overtakes(self, flight: Flight) -> bool:
        """Whether a read may begin though the window is full: by the order of reads few of those under way go
        before it, and the lane has room."""
        if len(self._moving) >= self._window + self._lane:
            return False
        mine = self._order(flight)
        return sum(self._order(other) <= mine for other in self._of_move.values()) < self._lane

    def _bury(self) -> None:
        """Forgets reads whose moves others ended, as a deletion does: nothing is reported of those, and each
        would take a place in the window for ever."""
        for move in [each for each in self._moving.values() if each.state is TxnState.DEAD]:
            self._forget(move)

    def _park(self, flight: Flight) -> None:
        self._parked[flight.number] = flight
        self._parts.waiting = True

    @property
    def flying(self) -> int:
        """Reads that take a place in the window."""
        return len(self._moving)

    @property
    def parked(self) -> int:
        """Reads that wait for a slot, or for their block to come to rest."""
        return len(self._parked)

    def retry(self) -> None:
        """Begins the most urgent of the parked reads, as many as window and lane take. A read that nobody
        waits for, or whose block is deleted, is let go."""
        self._bury()
        free = self._window + self._lane - len(self._moving)
        if not self._parked or free <= 0:
            return
        for flight in list(self._parked.values()):
            if self.flights.flight_of(flight.key) is not flight:
                # A deletion ended it.
                del self._parked[flight.number]
            elif not flight.waiters:
                del self._parked[flight.number]
                self.flights.fail(flight.number, MoveReason.FETCH_LATE)
        chosen = heapq.nsmallest(free, self._parked.values(), key=self._order)
        for flight in chosen:
            del self._parked[flight.number]
        for number, reason in self._start(chosen).items():
            self.flights.fail(number, reason)

    def _begin(self, flight: Flight) -> Move:
        parts = self._parts
        line = parts.directory.find(flight.key.block)
        if line < 0:
            raise MoveRefused(MoveReason.MISS, "no such block")
        return self._moves.begin(
            MoveKind.PROMOTE,
            line,
            parts.home,
            keep_source=True,
            now=parts.clock(),
            deadline=flight.expiry,
        )

    def urgency(self, flight: Flight) -> None:
        move = self._moving.get(flight.number)
        if move is not None:
            move.deadline = flight.expiry

    def handed_over(self, flight: Flight, former: int) -> None:
        """The read belongs to nobody in particular: its slot becomes the block's replica."""

    def abandon(self, flight: Flight) -> None:
        self._parked.pop(flight.number, None)
        move = self._moving.get(flight.number)
        if move is not None and move.state is not TxnState.PUBLISHED:
            self._forget(move)
            self._moves.cancel(move)

    def settled(self, ticket: Ticket) -> None:
        # Somebody may be reading what was ready when its deadline came: that stays until the scope is left.
        self._let_go(ticket, 0 if ticket.state is TicketState.CANCELLED else ticket.ready)
        changed = self._changed.pop(ticket.number, None)
        if changed is not None:
            changed.set()

    # What moves report. The lock is held.

    def on_settled(self, settled: Settled) -> bool:
        """Tells the waiters of a promotion that ended; False when it is no fetch of ours."""
        if settled.reason is MoveReason.FETCH_LATE and settled.move.state is TxnState.COPYING:
            # It flies on and ends later: as a replica, or as a failure.
            return settled.move.id in self._of_move
        flight = self._forget(settled.move)
        if flight is None:
            return False
        if settled.reason is MoveReason.READY:
            self.fetched += 1
            self.flights.complete(flight.number)
        elif self._worth_another(flight, settled):
            self.retried += 1
            self._park(flight)
            self._parts.wake()
        else:
            self.flights.fail(flight.number, settled.reason)
        return True

    def _worth_another(self, flight: Flight, settled: Settled) -> bool:
        """Whether another read may succeed for those who still wait: of another copy, when this one was found
        bad and will never be read again; of the same, when only the more patient ones' time is not up."""
        directory, move = self._parts.directory, settled.move
        if not flight.waiters:
            return False
        if settled.reason is MoveReason.FETCH_LATE:
            return flight.expiry > self._parts.clock()
        if settled.reason not in _BAD or directory.line_of(move.owner) != move.line:
            return False
        return directory.readable(move.line) and not directory.counts(move.line, move.source_tier)

    def _forget(self, move: Move) -> Flight | None:
        flight = self._of_move.pop(move.id, None)
        if flight is not None:
            self._moving.pop(flight.number, None)
        return flight


def leading(flags: NDArray[np.bool_]) -> int:
    """How many of `flags` [n] are true before the first that is not."""
    return len(flags) if flags.all() else int(flags.argmin())
