"""Any sequence of calls on a small store against a plain model of what was promised (hypothesis)."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)

from kvtier_core.blockstore.outcomes import PutOutcome
from kvtier_core.directory import ChunkState
from kvtier_core.errors import CoreError, Reason
from kvtier_core.transactions import MoveReason
from kvtier_core.transactions.deletion import DeletionState
from tests.unit.core.storebench import ALPHA, BETA, StoreBench, content, key, matrix

NAMES = [f"{tenant}{number}" for tenant in "ab" for number in range(5)]


def namespace(name: str) -> bytes:
    return ALPHA if name.startswith("a") else BETA


class StoreMachine(RuleBasedStateMachine):
    """kept: stored, not deleted, not droppable: must be found. there: may be found. orders: open deletions.
    Device faults spoil single reads; nothing that is served may ever be other bytes."""

    fetches = Bundle("fetches")
    pins = Bundle("pins")
    scopes = Bundle("scopes")

    def __init__(self) -> None:
        super().__init__()
        self.bench = StoreBench(memory=4, storage=6, persistent=True)
        self.waits: dict[str, Any] = {}
        self.lasting: set[str] = set()
        self.kept: set[str] = set()
        self.there: set[str] = set()
        self.orders: dict[str, Any] = {}
        self.open: list[Any] = []

    @rule(name=st.sampled_from(NAMES), droppable=st.booleans())
    def put(self, name: str, droppable: bool) -> None:
        (stored,) = self.bench.put(name, namespace=namespace(name), droppable=droppable)
        if stored.outcome is PutOutcome.STORED:
            assert name not in self.orders
            self.there.add(name)
            if not droppable:
                self.kept.add(name)
        elif stored.outcome is PutOutcome.EXISTED:
            assert name in self.there
        if name in self.orders:
            assert stored.outcome is PutOutcome.REFUSED
        if stored.reason is MoveReason.KEPT_CAPACITY:
            assert not droppable and self.bench.store.directory.kept == self.bench.store.kept_limit

    @rule(target=scopes, name=st.sampled_from(NAMES), seconds=st.sampled_from([1.0, 50.0]))
    def reserve(self, name: str, seconds: float) -> Any:
        scope = self.bench.reserve(name, seconds=seconds, namespace=namespace(name))
        self.open.append(scope)
        return name, scope

    @rule(held=consumes(scopes), publish=st.booleans())
    def publish(self, held: tuple[str, Any], publish: bool) -> None:
        name, scope = held
        landing = scope.landing(0)
        if landing is not None and publish:
            landing[:] = content(name)
            (stored,) = scope.publish()
            if stored.outcome is PutOutcome.STORED:
                assert name not in self.orders
                self.there.add(name)
                self.kept.add(name)
        scope.close()

    @rule(
        target=fetches,
        names=st.lists(st.sampled_from(NAMES[:5]), min_size=1, max_size=4, unique=True),
        seconds=st.sampled_from([1.0, 50.0]),
    )
    def fetch(self, names: list[str], seconds: float) -> Any:
        fetch = self.bench.fetch(*names, seconds=seconds)
        self.open.append(fetch)
        return names, fetch

    @rule(held=consumes(fetches))
    def leave_fetch(self, held: tuple[list[str], Any]) -> None:
        names, fetch = held
        for index in range(fetch.ready):
            assert bytes(fetch.body(index)) == content(names[index])
        fetch.close()

    @rule(target=pins, names=st.lists(st.sampled_from(NAMES[5:]), min_size=1, max_size=3, unique=True))
    def pin(self, names: list[str]) -> Any:
        pin = self.bench.pin(*names, namespace=BETA)
        if not len(pin):
            return multiple()
        self.open.append(pin)
        return names, pin

    @rule(held=consumes(pins))
    def leave_pin(self, held: tuple[list[str], Any]) -> None:
        names, pin = held
        for index in range(len(pin)):
            assert bytes(pin.body(index)) == content(names[index])
        pin.close()

    @rule(name=st.sampled_from(NAMES))
    def delete(self, name: str) -> None:
        (self.orders[name],) = self.bench.store.delete([key(name)])
        self.there.discard(name)
        self.kept.discard(name)
        self.lasting.discard(name)

    @rule(name=st.sampled_from(NAMES), seconds=st.sampled_from([1.0, 50.0]))
    def write_through(self, name: str, seconds: float) -> None:
        if name not in self.waits:
            deadline = self.bench.clock.now + seconds
            self.waits[name] = self.bench.store.persist(
                [key(name)], namespace=namespace(name), deadline=deadline
            )

    @rule(name=st.sampled_from(NAMES))
    def leave_write(self, name: str) -> None:
        scope = self.waits.pop(name, None)
        if scope is not None:
            self.bench.store.through_with(scope)

    @rule(seconds=st.sampled_from([0.5, 2.0, 60.0]))
    def time(self, seconds: float) -> None:
        self.bench.clock.now += seconds

    @rule()
    def pump(self) -> None:
        self.bench.store.pump()
        done = [name for name, order in self.orders.items() if order.state is DeletionState.DONE]
        for name in done:
            del self.orders[name]

    @precondition(lambda self: self.bench.disk.held)
    @rule(data=st.data(), how=st.sampled_from(["whole", "whole", "broken", "late"]))
    def device(self, data: st.DataObject, how: str) -> None:
        held = data.draw(st.sampled_from(self.bench.disk.held), label="item")
        if how == "late":
            if not held.told:
                held.late()
        elif how == "broken":
            held.finish(CoreError(Reason.STORAGE_UNAVAILABLE, "halfway"), part=1000)
        else:
            held.finish()

    @rule(tier=st.sampled_from([0, 1]), count=st.integers(1, 3))
    def make_room(self, tier: int, count: int) -> None:
        with self.bench.store.parts.lock:
            self.bench.store.reclaim.make_room(tier, count)

    @invariant()
    def promises_hold(self) -> None:
        self.bench.store.check()
        self.bench.store.reads.flights.check()
        directory = self.bench.store.directory
        there = directory.state[: directory.used] != ChunkState.FREE
        kept = int((directory.droppable[: directory.used][there] == 0).sum())
        assert len(self.kept) <= kept == directory.kept <= self.bench.store.kept_limit == 5
        for name, scope in list(self.waits.items()):
            if scope.over:
                assert scope.reasons[0] is not MoveReason.READY or name in self.there
                if scope.reasons[0] is MoveReason.READY and name in self.kept:
                    self.lasting.add(name)
                del self.waits[name]
        for name in self.lasting:
            assert directory.counts(directory.find(key(name)), 1), f"{name} is not in storage any more"
        for name in NAMES:
            found = len(self.bench.store.lookup(matrix(name), namespace(name)))
            assert not found or name in self.there, f"{name} is found, and is not there"
            assert found or name not in self.kept, f"{name} is missing"
            other = BETA if namespace(name) == ALPHA else ALPHA
            assert not self.bench.store.lookup(matrix(name), other)

    def teardown(self) -> None:
        """Everyone leaves: nothing is left over."""
        for scope in self.open:
            scope.close()
        self.bench.clock.now += 100
        for _ in range(3):
            self.bench.settle()
        self.bench.rest()
        assert not len(self.bench.store.through)
        leases = [int(part.leases.array.sum()) for part in self.bench.store.directory.replicas.tiers]
        assert leases == [0, 0]
        assert not self.bench.store.deletions.open()
        # Whatever may not be lost, a session can have all of memory.
        for _ in range(3):
            self.bench.store.reclaim.make_room(0, 4)
            self.bench.settle()
        assert self.bench.ram.slots.used == 0
        assert all(self.bench.store.lookup(matrix(name), namespace(name)) for name in self.kept)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=40, stateful_step_count=40)
