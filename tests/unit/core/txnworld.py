"""One cache of blocks under everything at once: stores, moves, faults, pins, reads, evictions, deletions.

The actions are what a scheduler may draw; `check` is what must hold after any of them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest

from kvtier_core.directory import NO_LINE, ReplicaState
from kvtier_core.errors import Reason
from kvtier_core.tiers.slots import SlotRef
from kvtier_core.tiers.transfer import Landing
from kvtier_core.transactions.deletion import Deletions
from kvtier_core.transactions.flights import (
    Asker,
    Flight,
    FlightKey,
    OrphanPolicy,
    Ticket,
    TicketState,
)
from kvtier_core.transactions.moves import Move
from kvtier_core.transactions.pins import Pin, Pins
from kvtier_core.transactions.reasons import MoveKind, MoveReason, MoveRefused, TxnState
from kvtier_core.transactions.singleflight import SingleFlight
from kvtier_core.transactions.transfers import Settled
from tests.unit.core.interleave import Action
from tests.unit.core.txnbench import CPU, GPU, NVME, BlockBench, HeldItem, block_key, content
from tests.unit.core.txndoubles import Paper, Shredder

NAMES = range(5)
SPACE = b"s" * 32
FAULTS = (Reason.STORAGE_UNAVAILABLE, Reason.SHORT_COPY, Reason.DEADLINE, Reason.INTERNAL)


class BlockWorld:
    """One cache under everything at once. `home` is the tier that reads bring blocks to."""

    home = CPU

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        policy = rng.choice(list(OrphanPolicy))
        self.bench = BlockBench((2, 3, 4), survival=1, late=policy)
        self.bench.credits.limit = rng.choice([2, 6, 99])
        for tier in self.bench.tiers:
            tier.queue = rng.choice([2, 99])
        self.pins = Pins(self.bench.directory)
        self.flights = SingleFlight(self, orphans=policy, max_flights=4, max_tickets=4)
        self.paper = Paper()
        self.shredder = Shredder(self.bench)
        self.deletions = Deletions(
            self.bench.directory,
            self.bench.moves,
            self.shredder,
            self.paper,
            [tier.name for tier in self.bench.tiers],
            flights=self.flights,
        )
        self.now = 0.0
        self.alive: dict[int, int] = {}
        self.tainted: set[int] = set()
        self.versions = dict.fromkeys(NAMES, 0)
        self.spoiled: dict[tuple[int, int], SlotRef] = {}
        self.old: list[HeldItem] = []
        self.scopes: list[tuple[Pin, list[bytes]]] = []
        self.tickets: list[Ticket] = []
        self.claims: dict[int, dict[int, tuple[int, int, bytes]]] = {}
        self.of_move: dict[int, int] = {}
        self.moving: dict[int, Move] = {}
        self.requests = 0
        self.reads: dict[tuple[bytes, int], int] = {}
        self.steps = 0

    # What can happen.

    def actions(self) -> Sequence[Action]:
        bench = self.bench
        found: list[Action] = [
            ("put", self.put),
            ("store", self.store),
            ("move", self.move),
            ("move", self.move),
            ("join", self.join),
            ("join", self.join),
            ("reap", self.reap),
            ("reap", self.reap),
            ("tick", self.tick),
            ("pin", self.pin),
            ("drop", self.drop),
        ]
        if self.rng.random() < 0.15:
            found += [("delete", self.delete), ("spoil", self.spoil), ("generation", self.generation)]
        if self.rng.random() < 0.05:
            found.append(("reset", self.reset))
        if bench.moves.open_moves():
            found.append(("cancel", self.cancel))
        if self.scopes:
            found.append(("unpin", self.unpin))
        if self.tickets:
            found.append(("leave", self.leave))
        if self.deletions.open():
            found += [("pump", self.pump), ("writer", self.paper_works)]
        for item in bench.all_held():
            if not item.told:
                found += [("land", item.land), ("arrive", item.arrive), ("fail", lambda i=item: self.fail(i))]
            else:
                found += [("drain", item.drain), ("again", item.again), ("spill", item.spill)]
        if self.old:
            found.append(("ghost", self.ghost))
        return found

    def line(self, name: int) -> int:
        return self.bench.directory.find(block_key(name))

    def any_line(self) -> int:
        lines = [line for line in map(self.line, NAMES) if line != NO_LINE]
        return self.rng.choice(lines) if lines else NO_LINE

    def name_of(self, line: int) -> int:
        return self.bench.names[int(self.bench.directory.logical[line])]

    def absent(self) -> int | None:
        free = [name for name in NAMES if self.bench.directory.locate(block_key(name)) == NO_LINE]
        return self.rng.choice(free) if free else None

    def put(self) -> None:
        name = self.absent()
        slots = self.bench.tiers[CPU].slots
        if name is None or slots.used == slots.capacity:
            return
        self.versions[name] += 1
        self.bench.put(name, CPU, self.versions[name])
        self.alive[name] = self.versions[name]
        self.tainted.discard(name)

    def store(self) -> None:
        """A block whose first copy is written by a tier's threads."""
        name = self.absent()
        if name is None:
            return
        self.versions[name] += 1
        line = self.bench.insert(name, self.versions[name])
        try:
            move = self.bench.moves.begin(MoveKind.STORE, line, NVME, deadline=self.now + 3)
        except MoveRefused:
            self.bench.directory.remove(line)
            return
        payload = Landing(memoryview(bytearray(content(name, self.versions[name]))))
        self.route(self.bench.moves.start([move], {move.id: payload}))

    def move(self) -> None:
        line = self.any_line()
        if line == NO_LINE:
            return
        tier = self.rng.choice([GPU, CPU, NVME])
        kind = MoveKind.DEMOTE if tier > int(self.bench.directory.tier[line]) else MoveKind.PROMOTE
        try:
            move = self.bench.moves.begin(
                kind, line, tier, keep_source=self.rng.random() < 0.5, now=self.now, deadline=self.now + 3
            )
        except MoveRefused:
            return
        self.route(self.bench.moves.start([move]))

    def cancel(self) -> None:
        move = self.rng.choice(self.bench.moves.open_moves())
        if move.state is TxnState.PUBLISHED:
            with pytest.raises(MoveRefused):
                self.bench.moves.cancel(move)
            return
        self.remember()
        self.bench.moves.cancel(move)
        self.gone(move)

    def remember(self) -> None:
        """Keeps items whose reports may come again long after."""
        self.old = (self.old + self.bench.all_held())[-6:]

    def ghost(self) -> None:
        """A device repeats what it said of something long over."""
        item = self.rng.choice(self.old)
        if item.drained:
            item.again()
            item.sink.drained(item.index)

    def fail(self, item: HeldItem) -> None:
        item.fail(self.rng.choice(FAULTS))

    def tick(self) -> None:
        self.now += 1.0
        self.flights.expire(self.now)
        self.route(self.bench.moves.expire(self.now))

    def reap(self) -> None:
        self.pins.reap()
        self.remember()
        self.route(self.bench.moves.reap())

    def reset(self) -> None:
        self.remember()
        self.route(self.bench.moves.reset())

    def generation(self) -> None:
        self.bench.moves.cache_generation += 1

    def drop(self) -> None:
        line = self.any_line()
        if line == NO_LINE:
            return
        tier = self.rng.choice([GPU, CPU, NVME])
        last = self.rng.random() < 0.2
        name = self.name_of(line)
        if self.bench.directory.replica(line, tier).state is ReplicaState.ABSENT:
            return
        try:
            if self.bench.moves.drop(line, tier, last=last):
                self.alive.pop(name, None)
        except MoveRefused:
            return

    def spoil(self) -> None:
        """A byte of a copy on storage flips; every read must find that."""
        line = self.any_line()
        copy = None if line == NO_LINE else self.bench.directory.replica(line, NVME)
        if copy is not None and copy.state is ReplicaState.PUBLISHED and (line, NVME) not in self.spoiled:
            # Device blocks that are being read, or pinned in place, stay as the test compares them.
            if copy.leases:
                return
            self.bench.spoil(line, NVME)
            self.spoiled[(line, NVME)] = SlotRef(copy.slot, copy.slot_generation)
            self.tainted.add(self.name_of(line))

    def pin(self) -> None:
        line = self.any_line()
        if line == NO_LINE:
            return
        tiers = [tier for tier in (GPU, CPU) if self.bench.directory.counts(line, tier)]
        if tiers and self.bench.directory.readable(line):
            pin = self.pins.hold([line], tiers[0])
            self.scopes.append((pin, [self.bench.bytes_of(line)]))

    def unpin(self) -> None:
        pin, _ = self.scopes.pop(self.rng.randrange(len(self.scopes)))
        if self.rng.random() < 0.8:
            pin.close()
        # Otherwise it is dropped, which must come to the same.

    def delete(self) -> None:
        line = self.any_line()
        if line == NO_LINE:
            return
        name = self.name_of(line)
        self.remember()
        if self.rng.random() < 0.5:
            self.paper.held = self.paper.held or []
        self.deletions.delete(block_key(name))
        self.alive.pop(name, None)

    def pump(self) -> None:
        self.paper.failures = int(self.rng.random() < 0.2)
        self.shredder.failures = int(self.rng.random() < 0.2)
        self.deletions.pump(self.now)
        self.paper.failures = self.shredder.failures = 0

    def paper_works(self) -> None:
        held, self.paper.held = self.paper.held or [], None
        for write in held:
            write()

    # Reads through single-flight.

    def join(self) -> None:
        names = self.rng.sample(NAMES, self.rng.randint(1, 3))
        self.requests += 1
        who = Asker(self.requests, 1, SPACE, self.rng.randint(0, 2), self.now + self.rng.randint(1, 4))
        ticket = self.flights.join(who, [self.flight_key(name) for name in names], self.now)
        if not ticket.over:
            self.tickets.append(ticket)
        elif ticket.state is TicketState.SETTLED:
            self.release(ticket)

    def flight_key(self, name: int) -> FlightKey:
        directory = self.bench.directory
        line = self.line(name)
        epoch = int(directory.epoch[line]) if line != NO_LINE else 0
        return FlightKey(
            SPACE, block_key(name), "f32", (0, 1), self.bench.moves.cache_generation, epoch, 0, self.home
        )

    def leave(self) -> None:
        ticket = self.tickets.pop(self.rng.randrange(len(self.tickets)))
        self.flights.cancel(ticket)
        self.release(ticket)

    def claim(self, ticket: Ticket, index: int) -> MoveReason:
        directory = self.bench.directory
        line = directory.find(ticket.keys[index].block)
        if line == NO_LINE or not directory.readable(line) or not directory.counts(line, self.home):
            return MoveReason.MISS
        directory.lease(line, self.home)
        # The answer that this request gets, byte for byte.
        served = self.bench.serve(line, self.home)
        assert served == self.bench.bytes_of(line)
        self.claims.setdefault(ticket.number, {})[index] = (line, self.home, served)
        return MoveReason.READY

    def start(self, flights: Sequence[Flight]) -> Mapping[int, MoveReason]:
        refused: dict[int, MoveReason] = {}
        moves: list[Move] = []
        for flight in flights:
            line = self.bench.directory.find(flight.key.block)
            if line == NO_LINE:
                refused[flight.number] = MoveReason.MISS
                continue
            try:
                move = self.bench.moves.begin(
                    MoveKind.PROMOTE, line, self.home, keep_source=True, now=self.now, deadline=flight.expiry
                )
            except MoveRefused as error:
                refused[flight.number] = error.code
                continue
            self.of_move[move.id] = flight.number
            self.moving[flight.number] = move
            moves.append(move)
        for settled in self.bench.moves.start(moves):
            refused[self.of_move.pop(settled.move.id)] = settled.reason
        return refused

    def urgency(self, flight: Flight) -> None:
        self.moving[flight.number].deadline = flight.expiry

    def handed_over(self, flight: Flight, former: int) -> None:
        assert flight.leader != former

    def abandon(self, flight: Flight) -> None:
        move = self.moving.pop(flight.number)
        self.of_move.pop(move.id, None)
        if move.state is not TxnState.PUBLISHED:
            self.bench.moves.cancel(move)

    def settled(self, ticket: Ticket) -> None:
        if ticket in self.tickets:
            self.tickets.remove(ticket)
            self.release(ticket)

    def release(self, ticket: Ticket) -> None:
        for line, tier, served in self.claims.pop(ticket.number, {}).values():
            assert self.bench.serve(line, tier) == served
            self.bench.directory.unlease(line, tier)

    def gone(self, move: Move) -> None:
        number = self.of_move.pop(move.id, None)
        if number is not None:
            self.moving.pop(number, None)
            self.flights.fail(number, move.reason)

    def route(self, settled: Sequence[Settled]) -> None:
        for item in settled:
            move = item.move
            name = self.bench.names.get(move.owner)
            if item.lost and name is not None:
                self.alive.pop(name, None)
            if move.kind is MoveKind.STORE and name is not None:
                self.after_store(item, name)
            if item.late and item.reason is MoveReason.FETCH_LATE and move.state is TxnState.COPYING:
                continue
            number = self.of_move.pop(move.id, None)
            if number is None:
                continue
            self.moving.pop(number, None)
            if item.reason is MoveReason.READY:
                self.flights.complete(number)
            else:
                self.flights.fail(number, item.reason)

    def after_store(self, item: Settled, name: int) -> None:
        line = item.move.line
        mine = int(self.bench.directory.logical[line]) == item.move.owner
        if item.reason is MoveReason.READY:
            self.alive[name] = self.bench.versions[item.move.owner]
            self.tainted.discard(name)
        elif mine and self.bench.directory.find(block_key(name)) == line:
            # Nothing was stored: the name is free for the next writer.
            self.bench.directory.remove(line)

    # What must hold.

    def check(self) -> None:
        self.steps += 1
        bench = self.bench
        for where, ref in list(self.spoiled.items()):
            copy = bench.directory.replica(where[0], where[1]) if where[0] in bench.lines() else None
            if copy is None or not copy.state or SlotRef(copy.slot, copy.slot_generation) != ref:
                del self.spoiled[where]
        bench.check(frozenset(self.spoiled), deep=self.steps % 16 == 0)
        for pin, expected in self.scopes:
            held = zip(pin.lines, pin.tiers, strict=True)
            assert [bench.serve(line, tier) for line, tier in held] == expected
        for claims in self.claims.values():
            for line, tier, served in claims.values():
                assert bench.serve(line, tier) == served
        for name, version in self.alive.items():
            if name in self.tainted:
                continue
            line = self.line(name)
            assert line != NO_LINE and bench.directory.readable(line), f"block {name} is gone"
            assert bench.directory.survivors(line) >= bench.moves.survival
            assert bench.bytes_of(line) == content(name, version)
        if self.steps % 4 == 0:
            self.flights.check()

    def finish(self) -> None:
        for ticket in list(self.tickets):
            self.flights.cancel(ticket)
        for ticket_claims in list(self.claims):
            for line, tier, _ in self.claims.pop(ticket_claims).values():
                self.bench.directory.unlease(line, tier)
        self.tickets.clear()
        for pin, _ in self.scopes:
            pin.close()
        self.scopes.clear()
        for _ in range(12):
            for item in self.bench.all_held():
                item.land()
            self.reap()
            self.paper_works()
            self.now += 2.0
            self.deletions.pump(self.now)
        assert self.deletions.open() == ()
        assert len(self.flights) == 0, self.flights.flights()
        assert self.bench.at_rest(), self.bench.moves.open_moves()
        assert self.pins.open == 0
