"""One backend read per block, whatever the fan-in: join, wait, hand over, complete, fail (specification B.4).

Why it exists: 32 requests for one prefix are one read of each block, a short request wakes when its own
blocks are there, and no request hears of another tenant's. It must not know tiers, moves or credits: what
they do is behind `FlightActions`. The caller holds the metadata lock around every call, so that looking,
joining and starting are one step.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

from kvtier_core.transactions.flights import (
    Asker,
    BlockState,
    Flight,
    FlightKey,
    FlightState,
    OrphanPolicy,
    Ticket,
    TicketState,
)
from kvtier_core.transactions.reasons import MoveReason, MoveRefused

_HEAP_SLACK = 256


class FlightActions(Protocol):
    """What single-flight causes elsewhere. Called with the metadata lock held; must not wait."""

    def claim(self, ticket: Ticket, index: int) -> MoveReason:
        """Re-validates this waiter and pins block `index` for it in the same step. READY: visible and pinned.
        MISS: not visible. Anything else: this waiter may not have it (REQUEST_STALE, TENANT_MISMATCH...)."""

    def start(self, flights: Sequence[Flight]) -> Mapping[int, MoveReason]:
        """Starts the reads of new flights, as one batch; returns flight number -> reason of those that could
        not be started."""

    def urgency(self, flight: Flight) -> None:
        """Priority, deadline or expiry of a read in flight changed."""

    def handed_over(self, flight: Flight, former: int) -> None:
        """The leader `former` left; `flight.leader` pays for the read from now on."""

    def abandon(self, flight: Flight) -> None:
        """Nobody waits and the policy is DISCARD: cancel the read."""

    def settled(self, ticket: Ticket) -> None:
        """The ticket is over: wake its request. What was claimed for it at and after `ticket.ready`, or at
        all when it is cancelled, is given back by whoever claimed."""


class SingleFlight:
    """All reads in flight of one cache on one node. Bounds: `max_flights` reads, `max_tickets` requests."""

    def __init__(
        self,
        actions: FlightActions,
        *,
        orphans: OrphanPolicy = OrphanPolicy.KEEP,
        max_flights: int = 4096,
        max_tickets: int = 4096,
    ) -> None:
        self._actions = actions
        self._orphans = orphans
        self._max_flights = max_flights
        self._max_tickets = max_tickets
        self._flights: dict[int, Flight] = {}
        self._index: dict[FlightKey, Flight] = {}
        self._blocks: dict[bytes, list[Flight]] = {}
        self._tickets: dict[int, Ticket] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._next_flight = 1
        self._next_ticket = 1
        self.counts: Counter[str] = Counter()
        """started, joined, separate, handed_over, orphaned, adopted, late, ignored: events since start."""

    def __len__(self) -> int:
        return len(self._flights)

    def bound(self, max_tickets: int) -> None:
        """Another number of requests that may wait; those that do stay."""
        self._max_tickets = max_tickets

    def flights(self) -> tuple[Flight, ...]:
        return tuple(self._flights.values())

    def tickets(self) -> tuple[Ticket, ...]:
        """Those that wait."""
        return tuple(self._tickets.values())

    def flight_of(self, key: FlightKey) -> Flight | None:
        return self._index.get(key)

    # Joining.

    def join(self, asker: Asker, keys: Sequence[FlightKey], now: float) -> Ticket:
        """Waits for blocks, in the order of the asker's prefix: what is visible is claimed, what is in flight
        is joined when its key is equal in every field, the rest is started. The ticket may be over at once:
        all was visible, or no more fits the bounds and its prefix ends there with QUEUE_FULL.

        Raises COALESCE_KEY_MISMATCH for a key of another namespace, DEADLINE when it has passed; nothing is
        started or held then."""
        self._admit(asker, keys, now)
        ticket = Ticket(
            self._next_ticket, asker, tuple(keys), [BlockState.PENDING] * len(keys), limit=len(keys)
        )
        self._next_ticket += 1
        started: list[Flight] = []
        for index, key in enumerate(ticket.keys):
            claimed = self._actions.claim(ticket, index)
            if claimed is MoveReason.READY:
                ticket.blocks[index] = BlockState.READY
            elif claimed is not MoveReason.MISS:
                self._cut(ticket, index, claimed)
                break
            elif not self._room_for(ticket, key):
                self._cut(ticket, index, MoveReason.QUEUE_FULL)
                break
            else:
                ticket.pending += 1
                self._join_one(ticket, index, key, started)
        if ticket.pending:
            self._tickets[ticket.number] = ticket
            heapq.heappush(self._deadlines, (asker.deadline, ticket.number))
        refused = self._actions.start(started) if started else {}
        # All of them go before any waiter hears of one: what was never started cannot be abandoned.
        gone = [(self._remove(number), reason) for number, reason in refused.items()]
        for flight, reason in gone:
            if flight is not None:
                self._fail_waiters(flight, reason)
        self._settle(ticket)
        return ticket

    def _admit(self, asker: Asker, keys: Sequence[FlightKey], now: float) -> None:
        for key in keys:
            if key.namespace != asker.namespace:
                raise MoveRefused(
                    MoveReason.COALESCE_KEY_MISMATCH, "a block of another namespace is never waited for"
                )
        if now >= asker.deadline:
            raise MoveRefused(MoveReason.DEADLINE, "the deadline passed before the blocks were asked for")

    def _room_for(self, ticket: Ticket, key: FlightKey) -> bool:
        """Whether one more wait fits the bounds. What is visible is served even when it does not."""
        return (ticket.pending > 0 or len(self._tickets) < self._max_tickets) and (
            key in self._index or len(self._flights) < self._max_flights
        )

    def _join_one(self, ticket: Ticket, index: int, key: FlightKey, started: list[Flight]) -> None:
        flight = self._index.get(key)
        known = flight is not None
        if flight is None:
            others = self._blocks.setdefault(key.block, [])
            if others:
                ticket.separate[index] = key.difference(others[0].key)
                self.counts["separate"] += 1
            flight = Flight(self._next_flight, key, leader=ticket.number)
            self._next_flight += 1
            self._flights[flight.number] = self._index[key] = flight
            others.append(flight)
            started.append(flight)
            self.counts["started"] += 1
        else:
            self.counts["joined"] += 1
            if flight.state is FlightState.ORPHAN:
                flight.state = FlightState.INFLIGHT
                flight.leader = ticket.number
                self.counts["adopted"] += 1
        alone = not flight.waiters
        flight.waiters.setdefault(ticket.number, (ticket, []))[1].append(index)
        flight.place = index if alone else min(flight.place, index)
        self._inherit(flight, ticket.asker, alone, announce=known)

    def _inherit(self, flight: Flight, asker: Asker, alone: bool, announce: bool) -> None:
        """The read is as urgent as the most urgent of its waiters, and lives as long as the most patient."""
        before = (flight.priority, flight.deadline, flight.expiry)
        if alone:
            flight.priority, flight.deadline, flight.expiry = asker.priority, asker.deadline, asker.deadline
        else:
            flight.priority = max(flight.priority, asker.priority)
            flight.deadline = min(flight.deadline, asker.deadline)
            flight.expiry = max(flight.expiry, asker.deadline)
        if announce and before != (flight.priority, flight.deadline, flight.expiry):
            self._actions.urgency(flight)

    def _disinherit(self, flight: Flight, gone: Asker) -> None:
        """What only the leaving waiter asked for no longer counts."""
        before = (flight.priority, flight.deadline, flight.expiry)
        if gone.priority == flight.priority or gone.deadline in (flight.deadline, flight.expiry):
            askers = [ticket.asker for ticket, _ in flight.waiters.values()]
            flight.priority = max(asker.priority for asker in askers)
            flight.deadline = min(asker.deadline for asker in askers)
            flight.expiry = max(asker.deadline for asker in askers)
        if before != (flight.priority, flight.deadline, flight.expiry):
            self._actions.urgency(flight)

    # Ending of reads.

    def complete(self, number: int) -> bool:
        """The block of a flight is published: the entry goes and each waiter is re-validated on its own. Call
        it in the same lock hold as the publication. False: no such flight (late, repeated or discarded), and
        nothing happened."""
        flight = self._remove(number)
        if flight is None:
            return False
        for ticket, indexes in flight.waiters.values():
            for index in indexes:
                if ticket.over or index >= ticket.limit:
                    continue
                claimed = self._actions.claim(ticket, index)
                if claimed is MoveReason.READY:
                    ticket.blocks[index] = BlockState.READY
                    ticket.pending -= 1
                else:
                    self._cut(ticket, index, claimed)
            self._settle(ticket)
        return True

    def fail(self, number: int, reason: MoveReason) -> bool:
        """The read failed: no future is left behind, and every waiter gets the same reason."""
        flight = self._remove(number)
        if flight is None:
            return False
        self._fail_waiters(flight, reason)
        return True

    def _fail_waiters(self, flight: Flight, reason: MoveReason) -> None:
        for ticket, indexes in flight.waiters.values():
            if not ticket.over and indexes[0] < ticket.limit:
                self._cut(ticket, indexes[0], reason)
            self._settle(ticket)

    def blocks(self) -> tuple[bytes, ...]:
        """Keys of what is in flight."""
        return tuple(self._blocks)

    def fail_block(self, block: bytes, reason: MoveReason) -> int:
        """Fails every flight of a block, whatever its other fields; for deletion. Returns how many."""
        found = [flight.number for flight in self._blocks.get(block, ())]
        return sum(self.fail(number, reason) for number in found)

    def _remove(self, number: int) -> Flight | None:
        flight = self._flights.pop(number, None)
        if flight is None:
            self.counts["ignored"] += 1
            return None
        del self._index[flight.key]
        same = self._blocks[flight.key.block]
        same.remove(flight)
        if not same:
            del self._blocks[flight.key.block]
        return flight

    # Ending of waits.

    def cancel(self, ticket: Ticket) -> None:
        """The request goes. Reads that others wait for go on. Cancelling what is over has no effect."""
        self._leave_all(ticket, TicketState.CANCELLED, MoveReason.CANCELLED)

    def expire(self, now: float) -> list[Ticket]:
        """Lets every waiter whose deadline has come go to its fallback (FETCH_LATE), and returns them. A
        block that arrives later is a replica, and is no answer to these."""
        late: list[Ticket] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            ticket = self._tickets.get(heapq.heappop(self._deadlines)[1])
            if ticket is not None:
                self._leave_all(ticket, TicketState.LATE, MoveReason.FETCH_LATE)
                self.counts["late"] += 1
                late.append(ticket)
        return late

    def next_deadline(self) -> float | None:
        """When `expire` is next worth calling; None when nobody waits."""
        while self._deadlines and self._deadlines[0][1] not in self._tickets:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def _leave_all(self, ticket: Ticket, state: TicketState, reason: MoveReason) -> None:
        if ticket.over:
            return
        ticket.state = state
        ticket.reason = reason
        self._detach(ticket, range(len(ticket.keys)))
        self._finish(ticket)

    def _cut(self, ticket: Ticket, index: int, reason: MoveReason) -> None:
        """Block `index` will not come: what follows it in the prefix is of no use to this request."""
        ticket.blocks[index] = BlockState.FAILED
        ticket.reason = reason
        gone = range(index, ticket.limit)
        ticket.limit = index
        ticket.pending = sum(block is BlockState.PENDING for block in ticket.blocks[:index])
        self._detach(ticket, gone)

    def _detach(self, ticket: Ticket, indexes: range) -> None:
        for index in indexes:
            flight = self._index.get(ticket.keys[index])
            entry = flight.waiters.get(ticket.number) if flight is not None else None
            if flight is None or entry is None or index not in entry[1]:
                continue
            entry[1].remove(index)
            if not entry[1]:
                del flight.waiters[ticket.number]
                self._left(flight, ticket)

    def _left(self, flight: Flight, ticket: Ticket) -> None:
        if flight.waiters:
            if flight.leader == ticket.number:
                flight.leader = min(
                    flight.waiters.values(),
                    key=lambda entry: (-entry[0].asker.priority, entry[0].asker.deadline, entry[0].number),
                )[0].number
                self.counts["handed_over"] += 1
                self._actions.handed_over(flight, ticket.number)
            flight.place = _place(flight)
            self._disinherit(flight, ticket.asker)
            return
        self.counts["orphaned"] += 1
        flight.state = FlightState.ORPHAN
        flight.leader = 0
        if self._orphans is OrphanPolicy.DISCARD:
            self._remove(flight.number)
            self._actions.abandon(flight)

    def _settle(self, ticket: Ticket) -> None:
        if not ticket.over and ticket.pending == 0:
            ticket.state = TicketState.SETTLED
            self._finish(ticket)

    def _finish(self, ticket: Ticket) -> None:
        self._tickets.pop(ticket.number, None)
        if len(self._deadlines) > 2 * len(self._tickets) + _HEAP_SLACK:
            self._deadlines = [(left.asker.deadline, left.number) for left in self._tickets.values()]
            heapq.heapify(self._deadlines)
        self._actions.settled(ticket)

    def check(self) -> None:
        """Every flight, ticket and index entry agrees. Raises AssertionError; for tests."""
        assert len(self._index) == len(self._flights) == sum(len(same) for same in self._blocks.values())
        for flight in self._flights.values():
            assert self._index[flight.key] is flight
            assert (flight.state is FlightState.ORPHAN) == (not flight.waiters)
            if not flight.waiters:
                assert flight.leader == 0 and self._orphans is OrphanPolicy.KEEP
                continue
            askers = [ticket.asker for ticket, _ in flight.waiters.values()]
            assert flight.leader in flight.waiters
            assert flight.priority == max(asker.priority for asker in askers)
            assert flight.deadline == min(asker.deadline for asker in askers)
            assert flight.expiry == max(asker.deadline for asker in askers)
            assert flight.place == _place(flight)
            for ticket, indexes in flight.waiters.values():
                assert ticket.number in self._tickets and not ticket.over
                assert all(ticket.blocks[index] is BlockState.PENDING for index in indexes)
        for ticket in self._tickets.values():
            waits = [index for index in range(ticket.limit) if ticket.blocks[index] is BlockState.PENDING]
            assert len(waits) == ticket.pending > 0
            for index in waits:
                assert index in self._index[ticket.keys[index]].waiters[ticket.number][1]


def _place(flight: Flight) -> int:
    return min(indexes[0] for _, indexes in flight.waiters.values())
