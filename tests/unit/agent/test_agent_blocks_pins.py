"""Pins by id against a plain model: what is held is what the model holds, whatever the order of takes, uses,
returns and deadlines."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtier_agent.blockpins import MAX_SECONDS, PinBook
from kvtier_core.blockstore.outcomes import PutOutcome
from kvtier_core.blockstore.store import BlockStore
from kvtier_core.errors import CoreError, Reason
from kvtier_core.layout import ChunkLayout
from kvtier_core.tiers.arena import ArenaOptions
from kvtier_core.tiers.cpu import CpuTier

LAYOUT = ChunkLayout(1, 16, 32)
TENANTS = [hashlib.sha256(name).digest() for name in (b"a", b"b")]
BLOCKS = 4
MEMORY = 12
MAX_PINS = 3
MAX_BLOCKS = 8


def key(tenant: int, block: int) -> bytes:
    return hashlib.sha256(bytes([tenant, block])).digest()


@dataclass
class Held:
    tenant: int
    blocks: int
    until: float


class PinMachine(RuleBasedStateMachine):
    """One memory tier, so each pin holds memory; the model is a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        # A segment a slot: namespaces share none.
        options = ArenaOptions(segment_bytes=LAYOUT.payload_bytes)
        self.tier = CpuTier("dram", LAYOUT, MEMORY, clock=lambda: self.now, options=options)
        self.store = BlockStore([self.tier], lambda: self.now, capacity=256)
        for tenant, namespace in enumerate(TENANTS):
            keys = [key(tenant, block) for block in range(BLOCKS)]
            payloads = [bytes(LAYOUT.payload_bytes)] * BLOCKS
            stored = self.store.put(keys, payloads, namespace=namespace, deadline=1e9)
            assert {each.outcome for each in stored} == {PutOutcome.STORED}
        names = iter(str(number) for number in range(10_000))
        self.book = PinBook(
            self.store, lambda: self.now, max_pins=MAX_PINS, max_blocks=MAX_BLOCKS, name=lambda: next(names)
        )
        self.open: dict[str, Held] = {}
        self.used: list[tuple[Callable[[], None], int]] = []
        self.room = MEMORY // 2

    def _expire(self) -> None:
        for pin_id in [name for name, held in self.open.items() if held.until <= self.now]:
            del self.open[pin_id]

    def _held(self) -> int:
        return sum(held.blocks for held in self.open.values()) + sum(blocks for _, blocks in self.used)

    @rule(
        tenant=st.integers(0, 1),
        asks_of=st.integers(0, 1),
        blocks=st.integers(1, BLOCKS + 2),
        seconds=st.sampled_from([0.5, 1.0, 5.0, 2 * MAX_SECONDS]),
    )
    def take(self, tenant: int, asks_of: int, blocks: int, seconds: float) -> None:
        wanted = np.frombuffer(b"".join(key(asks_of, at) for at in range(blocks)), dtype=np.uint8)
        self._expire()
        there = min(blocks, BLOCKS) if tenant == asks_of else 0
        by_id = sum(held.blocks for held in self.open.values())
        refused = None
        if there and (len(self.open) >= MAX_PINS or by_id + there > MAX_BLOCKS):
            refused = Reason.QUEUE_FULL
        elif there > self.room - self._held():
            refused = Reason.ADMISSION_PINNED
        if refused is not None:
            with pytest.raises(CoreError) as error:
                self.book.take(wanted.reshape(-1, 32), TENANTS[tenant], seconds)
            assert error.value.reason is refused
            return
        pin_id, found = self.book.take(wanted.reshape(-1, 32), TENANTS[tenant], seconds)
        assert (len(found), bool(pin_id)) == (there, there > 0)
        if there:
            self.open[pin_id] = Held(tenant, there, self.now + min(seconds, MAX_SECONDS))

    @rule(pick=st.integers(0, 5), tenant=st.integers(0, 1))
    def use(self, pick: int, tenant: int) -> None:
        self._expire()
        names = [*self.open, "nobody's"]
        pin_id = names[pick % len(names)]
        held = self.open.get(pin_id)
        if held is None or held.tenant != tenant:
            with pytest.raises(CoreError) as error:
                self.book.use(pin_id, TENANTS[tenant])
            assert error.value.reason is Reason.LEASE_EXPIRED
            return
        self.used.append((self.book.use(pin_id, TENANTS[tenant]), held.blocks))
        del self.open[pin_id]

    @rule(pick=st.integers(0, 5))
    def give_back(self, pick: int) -> None:
        if self.used:
            give_back, _ = self.used.pop(pick % len(self.used))
            give_back()

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, MAX_SECONDS]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def expire(self) -> None:
        before = len(self.open)
        self._expire()
        assert self.book.expire() == before - len(self.open)

    @invariant()
    def what_is_leased_is_what_is_held(self) -> None:
        self._expire()
        self.book.expire()
        leases = self.store.directory.replicas.tiers[0].leases.array.sum()
        assert int(leases) == self._held()
        assert len(self.book) == len(self.open)
        assert self.book.blocks == sum(held.blocks for held in self.open.values())

    def teardown(self) -> None:
        for give_back, _ in self.used:
            give_back()
        self.book.close()
        assert int(self.store.directory.replicas.tiers[0].leases.array.sum()) == 0
        self.store.check()
        self.tier.close()


TestPins = PinMachine.TestCase
TestPins.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
