"""Single-flight: one read per block whatever the fan-in, and every waiter its own life (B.4)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtier_core.transactions.flights import (
    Asker,
    Flight,
    FlightKey,
    FlightState,
    OrphanPolicy,
    Ticket,
    TicketState,
)
from kvtier_core.transactions.reasons import MoveReason, MoveRefused
from kvtier_core.transactions.singleflight import SingleFlight

TENANT, OTHER = b"a" * 32, b"b" * 32


def key(block: int, **changes: object) -> FlightKey:
    base = FlightKey(TENANT, block.to_bytes(32, "big"), "kv-f32/identity", (0, 1), 1, 1, 7, 0)
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def asker(
    request: int = 1,
    priority: int = 0,
    deadline: float = 100.0,
    generation: int = 1,
    namespace: bytes = TENANT,
) -> Asker:
    return Asker(request, generation, namespace, priority, deadline)


class Backend:
    """Counts what single-flight causes; what is visible is decided by the test."""

    def __init__(self) -> None:
        self.visible: set[FlightKey] = set()
        self.reads: list[FlightKey] = []
        self.batches: list[int] = []
        self.urgencies: list[tuple[int, int, float, float]] = []
        self.handovers: list[tuple[int, int, int]] = []
        self.abandoned: list[int] = []
        self.woken: list[int] = []
        self.claims: set[tuple[int, int]] = set()
        self.stale: set[int] = set()
        self.broken: MoveReason | None = None

    def claim(self, ticket: Ticket, index: int) -> MoveReason:
        if ticket.asker.request in self.stale:
            return MoveReason.REQUEST_STALE
        if ticket.keys[index] not in self.visible:
            return MoveReason.MISS
        self.claims.add((ticket.number, index))
        return MoveReason.READY

    def start(self, flights: Sequence[Flight]) -> Mapping[int, MoveReason]:
        if self.broken is not None:
            return {flight.number: self.broken for flight in flights}
        self.batches.append(len(flights))
        self.reads += [flight.key for flight in flights]
        return {}

    def urgency(self, flight: Flight) -> None:
        self.urgencies.append((flight.number, flight.priority, flight.deadline, flight.expiry))

    def handed_over(self, flight: Flight, former: int) -> None:
        self.handovers.append((flight.number, former, flight.leader))

    def abandon(self, flight: Flight) -> None:
        self.abandoned.append(flight.number)

    def settled(self, ticket: Ticket) -> None:
        self.woken.append(ticket.number)


class Desk:
    """A single-flight with its backend."""

    def __init__(
        self, orphans: OrphanPolicy = OrphanPolicy.KEEP, max_flights: int = 64, max_tickets: int = 64
    ) -> None:
        self.backend = Backend()
        self.flights = SingleFlight(
            self.backend, orphans=orphans, max_flights=max_flights, max_tickets=max_tickets
        )

    def join(self, who: Asker, *blocks: int | FlightKey, now: float = 0.0) -> Ticket:
        keys = [key(block) if isinstance(block, int) else block for block in blocks]
        return self.flights.join(who, keys, now)

    def arrive(self, wanted: int | FlightKey) -> None:
        found = key(wanted) if isinstance(wanted, int) else wanted
        flight = self.flights.flight_of(found)
        assert flight is not None
        self.backend.visible.add(found)
        assert self.flights.complete(flight.number)


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_b4_01_one_of_three_waiters_cancels_and_the_shared_read_goes_on(desk: Desk) -> None:
    a, b, c = (desk.join(asker(request), 1) for request in (1, 2, 3))
    assert len(desk.backend.reads) == 1
    desk.flights.cancel(b)
    flight = desk.flights.flight_of(key(1))
    assert flight is not None
    assert [len(flight.waiters), flight.state is FlightState.INFLIGHT] == [2, True]
    desk.arrive(1)
    assert (a.state, b.state, c.state) == (
        TicketState.SETTLED,
        TicketState.CANCELLED,
        TicketState.SETTLED,
    )
    assert a.ready == c.ready == 1
    assert desk.backend.claims == {(a.number, 0), (c.number, 0)}


def test_thirty_two_requests_for_one_prefix_read_each_block_once(desk: Desk) -> None:
    tickets = [desk.join(asker(request), *range(8)) for request in range(32)]
    assert [int.from_bytes(found.block, "big") for found in desk.backend.reads] == list(range(8))
    assert desk.backend.batches == [8]
    for block in range(8):
        desk.arrive(block)
    assert all(ticket.state is TicketState.SETTLED and ticket.ready == 8 for ticket in tickets)
    assert len(desk.flights) == 0
    late = desk.join(asker(99), *range(8))
    assert late.ready == 8 and len(desk.backend.reads) == 8


def test_a_short_request_wakes_when_its_own_prefix_is_there(desk: Desk) -> None:
    long = desk.join(asker(1), *range(16))
    short = desk.join(asker(2), 0, 1)
    desk.arrive(0)
    assert not short.over
    desk.arrive(1)
    assert short.over and short.ready == 2 and desk.backend.woken == [short.number]
    assert not long.over and long.ready == 2


DIFFERENCES = [
    ("representation", "kv-f16/identity"),
    ("layers", (1, 2)),
    ("generation", 2),
    ("authority_epoch", 2),
    ("integrity", 8),
    ("destination", 1),
]


@pytest.mark.parametrize(("name", "value"), DIFFERENCES, ids=[name for name, _ in DIFFERENCES])
def test_a_key_that_differs_in_one_field_is_a_read_of_its_own(desk: Desk, name: str, value: object) -> None:
    first = desk.join(asker(1), 1)
    other = key(1, **{name: value})
    second = desk.join(asker(2), other)
    assert len(desk.backend.reads) == 2
    assert second.separate == {0: name}
    desk.arrive(other)
    assert second.over and not first.over


def test_lmcache_2961_two_adapters_over_the_same_tokens_never_coalesce(desk: Desk) -> None:
    """The adapter is sealed in the block key: two keys, two reads, and neither wakes the other."""
    under_a, under_b = desk.join(asker(1), 1), desk.join(asker(2), 2)
    assert len(desk.backend.reads) == 2
    desk.arrive(1)
    assert under_a.over and not under_b.over


def test_sglang_26747_a_read_is_never_shared_across_namespaces(desk: Desk) -> None:
    """Not even when two tenants' keys were to collide; and nobody joins with a key that is not its own."""
    mine = desk.join(asker(1), 1)
    theirs = key(1, namespace=OTHER)
    with pytest.raises(MoveRefused) as refused:
        desk.join(asker(2), theirs)
    assert refused.value.code is MoveReason.COALESCE_KEY_MISMATCH
    ticket = desk.join(asker(2, namespace=OTHER), theirs)
    assert len(desk.backend.reads) == 2
    assert ticket.separate == {0: "namespace"}
    desk.arrive(1)
    assert mine.over and not ticket.over


def test_a_read_takes_the_most_urgent_of_its_waiters_and_gives_it_back(desk: Desk) -> None:
    desk.join(asker(1, priority=1, deadline=50.0), 1)
    flight = desk.flights.flight_of(key(1))
    assert flight is not None
    assert (flight.priority, flight.deadline, flight.expiry) == (1, 50.0, 50.0)
    urgent = desk.join(asker(2, priority=9, deadline=20.0), 1)
    desk.join(asker(3, priority=0, deadline=80.0), 1)
    assert (flight.priority, flight.deadline, flight.expiry) == (9, 20.0, 80.0)
    desk.flights.cancel(urgent)
    assert (flight.priority, flight.deadline, flight.expiry) == (1, 50.0, 80.0)
    assert desk.backend.urgencies == [
        (flight.number, 9, 20.0, 50.0),
        (flight.number, 9, 20.0, 80.0),
        (flight.number, 1, 50.0, 80.0),
    ]


def test_a_cancelled_leader_hands_over_to_the_most_urgent(desk: Desk) -> None:
    leader = desk.join(asker(1), 1)
    desk.join(asker(2, priority=1), 1)
    heir = desk.join(asker(3, priority=5), 1)
    desk.flights.cancel(leader)
    flight = desk.flights.flight_of(key(1))
    assert flight is not None and flight.leader == heir.number
    assert desk.backend.handovers == [(flight.number, leader.number, heir.number)]
    desk.flights.cancel(leader)
    assert len(desk.backend.handovers) == 1
    desk.arrive(1)
    assert heir.ready == 1


def test_an_orphan_is_kept_and_can_be_joined_again(desk: Desk) -> None:
    desk.flights.cancel(desk.join(asker(1), 1))
    flight = desk.flights.flight_of(key(1))
    assert flight is not None and flight.state is FlightState.ORPHAN and flight.leader == 0
    again = desk.join(asker(2, priority=3, deadline=70.0), 1)
    assert (flight.state, flight.leader) == (FlightState.INFLIGHT, again.number)
    assert desk.backend.urgencies == [(flight.number, 3, 70.0, 70.0)]
    assert len(desk.backend.reads) == 1
    desk.arrive(1)
    assert again.ready == 1
    desk.flights.cancel(desk.join(asker(3), 2))
    desk.arrive(2)
    assert len(desk.flights) == 0


def test_an_orphan_is_discarded_and_its_late_completion_is_nobodys() -> None:
    desk = Desk(OrphanPolicy.DISCARD)
    desk.flights.cancel(desk.join(asker(1), 1))
    assert desk.flights.flight_of(key(1)) is None
    assert desk.backend.abandoned == [1]
    again = desk.join(asker(2), 1)
    assert len(desk.backend.reads) == 2
    assert not desk.flights.complete(1)
    assert not again.over
    desk.arrive(1)
    assert again.ready == 1


def test_a_read_that_cannot_start_leaves_no_future_behind(desk: Desk) -> None:
    desk.backend.broken = MoveReason.CREDIT_PRESSURE
    ticket = desk.join(asker(1), 1, 2)
    assert (ticket.state, ticket.ready, ticket.reason) == (
        TicketState.SETTLED,
        0,
        MoveReason.CREDIT_PRESSURE,
    )
    assert len(desk.flights) == 0
    desk.backend.broken = None
    again = desk.join(asker(2), 1)
    desk.arrive(1)
    assert again.ready == 1


def test_what_was_never_started_is_not_abandoned() -> None:
    """Two reads are refused at once: the first ends the prefix, and the second is nobody's to cancel."""
    desk = Desk(OrphanPolicy.DISCARD)
    desk.backend.broken = MoveReason.NO_STAGING
    ticket = desk.join(asker(1), 1, 2, 3)
    assert (ticket.ready, ticket.reason) == (0, MoveReason.NO_STAGING)
    assert desk.backend.abandoned == [] and len(desk.flights) == 0


def test_a_failed_read_tells_every_waiter_the_same_reason(desk: Desk) -> None:
    """Each keeps the blocks before the failed one, and no longer waits for those after it."""
    one, two = desk.join(asker(1), 0, 1, 2), desk.join(asker(2), 0, 1)
    apart = desk.join(asker(3), 2)
    desk.arrive(0)
    flight = desk.flights.flight_of(key(1))
    assert flight is not None
    assert desk.flights.fail(flight.number, MoveReason.TRANSFER_FAILED)
    for ticket in (one, two):
        assert (ticket.state, ticket.ready, ticket.reason) == (
            TicketState.SETTLED,
            1,
            MoveReason.TRANSFER_FAILED,
        )
    assert not apart.over
    shared = desk.flights.flight_of(key(2))
    assert shared is not None and set(shared.waiters) == {apart.number}
    assert not desk.flights.fail(flight.number, MoveReason.TRANSFER_FAILED)


def test_a_waiter_past_its_deadline_leaves_alone(desk: Desk) -> None:
    hasty, patient = desk.join(asker(1, deadline=5.0), 1), desk.join(asker(2, deadline=9.0), 1)
    assert desk.flights.next_deadline() == 5.0
    assert desk.flights.expire(4.9) == []
    assert desk.flights.expire(5.0) == [hasty]
    assert (hasty.state, hasty.reason, hasty.ready) == (TicketState.LATE, MoveReason.FETCH_LATE, 0)
    assert desk.flights.next_deadline() == 9.0
    desk.arrive(1)
    assert patient.ready == 1 and hasty.ready == 0
    assert (hasty.number, 0) not in desk.backend.claims
    assert desk.flights.next_deadline() is None


def test_a_stale_request_is_refused_alone_when_the_block_arrives(desk: Desk) -> None:
    stale, live = desk.join(asker(1), 1), desk.join(asker(2), 1)
    desk.backend.stale.add(1)
    desk.arrive(1)
    assert (stale.ready, stale.reason) == (0, MoveReason.REQUEST_STALE)
    assert (live.ready, live.reason) == (1, MoveReason.READY)


def test_two_completions_of_one_read_wake_once(desk: Desk) -> None:
    ticket = desk.join(asker(1), 1)
    desk.arrive(1)
    assert not desk.flights.complete(1)
    assert not desk.flights.fail(1, MoveReason.TRANSFER_FAILED)
    assert ticket.ready == 1 and desk.backend.woken == [ticket.number]
    assert desk.flights.counts["ignored"] == 2


def test_deletion_fails_every_flight_of_the_block(desk: Desk) -> None:
    one, two = desk.join(asker(1), 1), desk.join(asker(2), key(1, destination=1))
    assert desk.flights.fail_block(key(1).block, MoveReason.TOMBSTONED) == 2
    assert one.reason is two.reason is MoveReason.TOMBSTONED


def test_a_request_that_comes_too_late_starts_nothing(desk: Desk) -> None:
    with pytest.raises(MoveRefused) as refused:
        desk.join(asker(3, deadline=10.0), 1, 2, now=10.0)
    assert refused.value.code is MoveReason.DEADLINE
    assert desk.backend.reads == [] and len(desk.flights) == 0


@pytest.mark.parametrize("bound", ["tickets", "flights"])
def test_a_bound_ends_the_prefix_and_what_is_visible_is_still_served(bound: str) -> None:
    desk = Desk(max_flights=3 if bound == "flights" else 64, max_tickets=1 if bound == "tickets" else 64)
    desk.join(asker(1), 0, 1, 2)
    desk.arrive(0)
    hit = desk.join(asker(2), 0)
    assert (hit.state, hit.ready, hit.reason) == (TicketState.SETTLED, 1, MoveReason.READY)
    beyond = desk.join(asker(3), 0, 4, 5)
    if bound == "tickets":
        assert (beyond.state, beyond.ready, beyond.reason) == (TicketState.SETTLED, 1, MoveReason.QUEUE_FULL)
        assert len(desk.backend.reads) == 3
    else:
        assert (beyond.state, beyond.limit, len(desk.backend.reads)) == (TicketState.WAITING, 2, 4)
        desk.arrive(4)
        assert (beyond.state, beyond.ready, beyond.reason) == (TicketState.SETTLED, 2, MoveReason.QUEUE_FULL)
    desk.flights.check()


def test_a_block_wanted_twice_by_one_request_is_read_once(desk: Desk) -> None:
    ticket = desk.join(asker(1), 1, 1)
    assert len(desk.backend.reads) == 1
    desk.arrive(1)
    assert ticket.ready == 2


def test_finished_waits_leave_no_deadlines_behind(desk: Desk) -> None:
    for request in range(2000):
        desk.flights.cancel(desk.join(asker(request), 1))
    assert len(desk.flights._deadlines) < 600


class Model(RuleBasedStateMachine):
    """Against a plain model: a set of blocks in flight and, for each request, what it still waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.desk = Desk(max_flights=6, max_tickets=5)
        self.now = 0.0
        self.inflight: set[int] = set()
        self.visible: set[int] = set()
        self.reads = 0
        self.waiting: dict[int, tuple[Ticket, list[int], float]] = {}
        self.expected: dict[int, tuple[Ticket, TicketState, int]] = {}
        self.requests = 0

    def _ready(self, blocks: list[int]) -> int:
        ready = 0
        for block in blocks:
            if block not in self.visible:
                break
            ready += 1
        return ready

    def _over(self, number: int, state: TicketState, ready: int) -> None:
        ticket, _, _ = self.waiting.pop(number)
        self.expected[number] = (ticket, state, ready)

    @rule(
        blocks=st.lists(st.integers(0, 7), min_size=1, max_size=4, unique=True),
        priority=st.integers(0, 3),
        patience=st.integers(1, 9),
    )
    def join(self, blocks: list[int], priority: int, patience: int) -> None:
        self.requests += 1
        who = asker(self.requests, priority, self.now + patience)
        ticket = self.desk.join(who, *blocks, now=self.now)
        kept: list[int] = []
        pending = 0
        for block in blocks:
            if block not in self.visible:
                full = block not in self.inflight and len(self.inflight) == 6
                if full or (not pending and len(self.waiting) == 5):
                    break
                pending += 1
                self.reads += block not in self.inflight
                self.inflight.add(block)
            kept.append(block)
        assert ticket.reason is (MoveReason.READY if kept == blocks else MoveReason.QUEUE_FULL)
        self.waiting[ticket.number] = (ticket, kept, who.deadline)
        if not pending:
            self._over(ticket.number, TicketState.SETTLED, len(kept))

    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        if self.inflight:
            block = data.draw(st.sampled_from(sorted(self.inflight)))
            self.desk.arrive(block)
            self.inflight.discard(block)
            self.visible.add(block)
            for number, (_, blocks, _) in list(self.waiting.items()):
                if self._ready(blocks) == len(blocks):
                    self._over(number, TicketState.SETTLED, len(blocks))

    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        if not self.inflight:
            return
        block = data.draw(st.sampled_from(sorted(self.inflight)))
        flight = self.desk.flights.flight_of(key(block))
        assert flight is not None
        self.desk.flights.fail(flight.number, MoveReason.TRANSFER_FAILED)
        self.inflight.discard(block)
        for number, (ticket, blocks, deadline) in list(self.waiting.items()):
            if block in blocks:
                kept = blocks[: blocks.index(block)]
                self.waiting[number] = (ticket, kept, deadline)
                if self._ready(kept) == len(kept):
                    self._over(number, TicketState.SETTLED, len(kept))

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        """A block that nobody waits with leaves the tier."""
        held = {block for _, blocks, _ in self.waiting.values() for block in blocks}
        free = sorted(self.visible - held)
        if free:
            block = data.draw(st.sampled_from(free))
            self.visible.discard(block)
            self.desk.backend.visible.discard(key(block))

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.waiting:
            number = data.draw(st.sampled_from(sorted(self.waiting)))
            ticket, blocks, _ = self.waiting[number]
            self.desk.flights.cancel(ticket)
            self._over(number, TicketState.CANCELLED, self._ready(blocks))

    @rule(step=st.integers(1, 4))
    def tick(self, step: int) -> None:
        self.now += step
        self.desk.flights.expire(self.now)
        for number, (_, blocks, deadline) in list(self.waiting.items()):
            if deadline <= self.now:
                self._over(number, TicketState.LATE, self._ready(blocks))

    @invariant()
    def agrees(self) -> None:
        self.desk.flights.check()
        found = {int.from_bytes(flight.key.block, "big") for flight in self.desk.flights.flights()}
        assert found == self.inflight
        assert len(self.desk.backend.reads) == self.reads
        assert {ticket.number for ticket in self.desk.flights.tickets()} == set(self.waiting)
        for ticket, blocks, _ in self.waiting.values():
            assert not ticket.over and ticket.ready == self._ready(blocks)
        for ticket, state, ready in self.expected.values():
            assert (ticket.state, ticket.ready) == (state, ready)


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
