"""What users of other systems reported, as small cases: races, publication, cancellation, stale handles."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import pytest

from kvtier_core.checksums import checksum
from kvtier_core.directory import NO_LINE
from kvtier_core.errors import CoreError, Reason
from kvtier_core.tiers.transfer import Landing
from kvtier_core.transactions.flights import Asker, Flight, FlightKey, Ticket, TicketState
from kvtier_core.transactions.pins import Pins
from kvtier_core.transactions.reasons import MoveKind, MoveReason, MoveRefused, TxnState
from kvtier_core.transactions.singleflight import SingleFlight
from tests.unit.core.txnbench import CPU, GPU, NVME, BlockBench, block_key, content

SPACE = b"s" * 32


@pytest.fixture
def bench() -> BlockBench:
    return BlockBench()


def wanted(name: int) -> FlightKey:
    return FlightKey(SPACE, block_key(name), "f32", (0, 1), 1, 1, 0, CPU)


def asker(request: int = 1) -> Asker:
    return Asker(request, 1, SPACE, 0, 100.0)


class Desk:
    """Single-flight whose reads start as `begin` says; the order of events is written down."""

    def __init__(self) -> None:
        self.flights = SingleFlight(self)
        self.visible: set[bytes] = set()
        self.inline: set[bytes] = set()
        self.events: list[str] = []

    def claim(self, ticket: Ticket, index: int) -> MoveReason:
        return MoveReason.READY if ticket.keys[index].block in self.visible else MoveReason.MISS

    def start(self, flights: Sequence[Flight]) -> Mapping[int, MoveReason]:
        self.events.append(f"start {len(flights)}")
        for flight in flights:
            if flight.key.block in self.inline:
                self.visible.add(flight.key.block)
                self.flights.complete(flight.number)
        return {}

    def urgency(self, flight: Flight) -> None: ...

    def handed_over(self, flight: Flight, former: int) -> None: ...

    def abandon(self, flight: Flight) -> None: ...

    def settled(self, ticket: Ticket) -> None:
        self.events.append(f"settled {ticket.ready}")


def test_vllm_31210_what_comes_back_is_what_was_stored_under_concurrency() -> None:
    """Blocks go down and come back while others do; each is, bit for bit, what it was when it was stored."""
    bench = BlockBench((3, 3, 8))
    sums = {name: checksum("xxh3", memoryview(content(name))) for name in range(3)}
    lines = {name: bench.put(name, CPU) for name in range(3)}
    for tier in (NVME, GPU, NVME, CPU, NVME, GPU):
        flights = [bench.begin(line, tier) for line in lines.values()]
        assert bench.moves.start(flights) == []
        for item in reversed(bench.all_held()):
            item.land()
        assert {found.reason for found in bench.moves.reap()} == {MoveReason.READY}
        for name, line in lines.items():
            assert checksum("xxh3", memoryview(bench.serve(line, tier))) == sums[name]
        bench.check()


def test_lmcache_4385_a_buffer_that_is_reused_before_the_flush_is_never_published(bench: BlockBench) -> None:
    """Two sessions share a staging buffer; the second fills it before the first one's write has run."""
    first = bench.insert(1)
    move = bench.moves.begin(MoveKind.STORE, first, NVME)
    buffer = bytearray(content(1))
    assert bench.moves.start([move], {move.id: Landing(memoryview(buffer))}) == []
    buffer[:] = content(2)
    bench.held(move).land()
    (settled,) = bench.moves.reap()
    assert settled.reason is MoveReason.CHECKSUM_MISMATCH
    assert not bench.directory.readable(first)
    bench.check()
    assert bench.at_rest()


def test_lmcache_1858_slots_have_one_owner_whatever_threads_report() -> None:
    """Eight threads report ends of copies while slots are taken and freed: no slot is given out twice."""
    bench = BlockBench((1, 4, 6))
    lines = [bench.put(name, CPU) for name in range(4)]
    for round_ in range(12):
        tier = NVME if round_ % 2 == 0 else CPU
        moves = [bench.begin(line, tier) for line in lines]
        assert bench.moves.start(moves) == []
        slots = {(move.tier, move.destination.slot) for move in moves}
        assert len(slots) == len(moves)
        gate = threading.Barrier(len(moves))
        held = bench.all_held()

        def report(index: int, gate: threading.Barrier = gate, held: list = held) -> None:  # type: ignore[type-arg]
            gate.wait(120)
            held[index].arrive()
            held[index].again()

        threads = [threading.Thread(target=report, args=(index,)) for index in range(len(held))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        settled = bench.moves.reap()
        assert [found.reason for found in settled] == [MoveReason.READY] * len(moves)
        for item in held:
            item.drain()
        bench.moves.reap()
        bench.check()
        assert bench.at_rest()


@pytest.mark.parametrize("cancelled", [False, True], ids=["flying", "cancelled"])
def test_vllm_46951_a_block_with_a_store_in_flight_is_not_given_away(cancelled: bool) -> None:
    """The slot that a store still reads is nobody else's, not even when the store was given up."""
    bench = BlockBench((1, 1, 2))
    line = bench.spread(1, CPU, GPU)
    move = bench.fly(line, NVME, source_tier=CPU, keep_source=True)
    if cancelled:
        bench.moves.cancel(move)
    with pytest.raises(MoveRefused) as refused:
        bench.moves.drop(line, CPU)
    assert refused.value.code is (MoveReason.WOULD_EVICT_PINNED if cancelled else MoveReason.WRITE_TXN_BUSY)
    other = bench.insert(2)
    with pytest.raises(MoveRefused) as full:
        bench.moves.begin(MoveKind.STORE, other, CPU)
    assert full.value.code is MoveReason.NO_DESTINATION_CAPACITY
    bench.held(move).land()
    bench.moves.reap()
    bench.moves.drop(line, CPU)
    assert bench.moves.begin(MoveKind.STORE, other, CPU).state is TxnState.RESERVED
    bench.check()


def test_sglang_9397_nothing_of_nothing_is_not_done_before_it_was_planned() -> None:
    """A wait for blocks that arrive while they are being asked for ends once, after all were asked for."""
    desk = Desk()
    desk.inline = {block_key(1), block_key(2)}
    ticket = desk.flights.join(asker(), [wanted(1), wanted(2), wanted(3)], 0.0)
    assert desk.events == ["start 3"] and not ticket.over and ticket.ready == 2
    desk.visible.add(block_key(3))
    flight = desk.flights.flight_of(wanted(3))
    assert flight is not None and desk.flights.complete(flight.number)
    assert desk.events == ["start 3", "settled 3"]
    # All of them at once: over when it returns, and told once.
    desk.inline = {block_key(4), block_key(5)}
    again = desk.flights.join(asker(), [wanted(4), wanted(5)], 0.0)
    assert (again.state, again.ready) == (TicketState.SETTLED, 2)
    assert desk.events[2:] == ["start 2", "settled 2"]
    desk.flights.check()
    # A wait for nothing is over, and says that it was for nothing.
    empty = desk.flights.join(asker(), [], 0.0)
    assert (empty.state, empty.ready, empty.reason) == (TicketState.SETTLED, 0, MoveReason.READY)


@pytest.mark.parametrize("when", ["queued", "over", "late", "twice"])
def test_vllm_49118_aborting_a_request_is_never_an_assertion(when: str) -> None:
    desk = Desk()
    ticket = desk.flights.join(asker(), [wanted(1)], 0.0)
    if when == "over":
        desk.visible.add(block_key(1))
        flight = desk.flights.flight_of(wanted(1))
        assert flight is not None
        desk.flights.complete(flight.number)
    if when == "late":
        desk.flights.expire(200.0)
    if when == "twice":
        desk.flights.cancel(ticket)
    before = ticket.state
    desk.flights.cancel(ticket)
    assert ticket.state is (TicketState.CANCELLED if when == "queued" else before)
    desk.flights.check()
    assert len([event for event in desk.events if event.startswith("settled")]) == 1


def test_vllm_46014_a_store_in_flight_defers_the_next_one(bench: BlockBench) -> None:
    """A preempted request comes back while its block is being stored: it is told, and may come again."""
    line = bench.put(1, CPU)
    move = bench.fly(line, NVME, keep_source=True)
    with pytest.raises(MoveRefused) as refused:
        bench.begin(line, GPU)
    assert refused.value.code is MoveReason.WRITE_TXN_BUSY
    bench.held(move).land()
    bench.moves.reap()
    assert bench.begin(line, GPU).state is TxnState.RESERVED


def test_a_failed_load_wakes_its_request_by_itself() -> None:
    """local-inference-lab/vllm#191: not at the next arrival of somebody else."""
    desk = Desk()
    ticket = desk.flights.join(asker(), [wanted(1), wanted(2)], 0.0)
    flight = desk.flights.flight_of(wanted(1))
    assert flight is not None
    desk.flights.fail(flight.number, MoveReason.TRANSFER_FAILED)
    assert ticket.over and desk.events[-1] == "settled 0"


def test_aibrix_2231_stale_handles_are_refusals(bench: BlockBench) -> None:
    """Of lines, copies, moves and pins that are gone; none is a KeyError, and none touches a successor."""
    line = bench.put(1, CPU)
    done = bench.fly(line, NVME, keep_source=True)
    bench.settle()
    owner = int(bench.directory.logical[line])
    bench.moves.drop(line, NVME)
    bench.moves.drop(line, CPU, last=True)
    pins = Pins(bench.directory)
    calls = {
        "drop": lambda: bench.moves.drop(line, CPU),
        "begin": lambda: bench.moves.begin(MoveKind.PROMOTE, line, GPU),
        "store": lambda: bench.moves.begin(MoveKind.STORE, line, GPU),
        "submit": lambda: bench.moves.submit(done),
        "publish": lambda: bench.moves.publish(done),
        "release": lambda: bench.moves.release(done),
        "cancel": lambda: bench.moves.cancel(done),
        "hold": lambda: pins.hold([line], CPU),
    }
    for name, call in calls.items():
        with pytest.raises(CoreError) as refused:
            call()
        assert refused.value.reason is not Reason.INTERNAL, name
    successor = bench.put(2, CPU)
    assert successor == line and int(bench.directory.logical[line]) != owner
    for name in ("submit", "publish", "release", "cancel"):
        with pytest.raises(CoreError):
            calls[name]()
    assert bench.directory.line_of(owner) is None
    assert bench.directory.find(block_key(1)) == NO_LINE
    assert bench.serve(successor, CPU) == content(2)
    bench.check()
