"""A deletion office for tests: moves, pins, reads in flight and deletions over one bench."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier_core.directory import NO_LINE
from kvtier_core.transactions.deletion import Deletion, Deletions, EntryKind
from kvtier_core.transactions.flights import Ticket
from kvtier_core.transactions.pins import Pins
from kvtier_core.transactions.reasons import MoveReason
from kvtier_core.transactions.singleflight import SingleFlight
from tests.unit.core.txnbench import BlockBench, block_key
from tests.unit.core.txndoubles import Paper, Shredder

SPACE = b"n" * 32


class Claims:
    """The least that single-flight needs."""

    def __init__(self) -> None:
        self.settled_tickets: list[Ticket] = []

    def claim(self, ticket: Ticket, index: int) -> MoveReason:
        return MoveReason.MISS

    def start(self, flights: Sequence[object]) -> dict[int, MoveReason]:
        return {}

    def urgency(self, flight: object) -> None: ...

    def handed_over(self, flight: object, former: int) -> None: ...

    def abandon(self, flight: object) -> None: ...

    def settled(self, ticket: Ticket) -> None:
        self.settled_tickets.append(ticket)


class Office:
    def __init__(self, bench: BlockBench | None = None, paper: Paper | None = None) -> None:
        self.bench = bench or BlockBench()
        self.paper = paper or Paper()
        self.shredder = Shredder(self.bench)
        self.pins = Pins(self.bench.directory)
        self.flights = SingleFlight(Claims())
        self.now = 0.0
        self.deletions = Deletions(
            self.bench.directory,
            self.bench.moves,
            self.shredder,
            self.paper,
            [tier.name for tier in self.bench.tiers],
            flights=self.flights,
        )

    def pump(self) -> list[Deletion]:
        self.pins.reap()
        self.bench.moves.reap()
        return self.deletions.pump(self.now)

    def found(self, name: int) -> bool:
        return self.bench.directory.find(block_key(name)) != NO_LINE

    def kinds(self) -> list[EntryKind]:
        return [entry.kind for entry in self.paper.entries]
