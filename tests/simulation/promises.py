"""What must hold in the simulated world after each step, and when all has come to rest.

It must not cause anything but the end."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from kvtier_core.blockstore.reads import Fetch
from kvtier_core.blockstore.store import BlockStore
from kvtier_core.credits import slots
from kvtier_core.directory import ChunkState, ReplicaState
from kvtier_core.tiers.cpu import CpuTier
from kvtier_core.tiers.nvme import NvmeTier
from kvtier_core.tiers.slots import SlotState
from kvtier_core.transactions.deletion import Deletion
from tests.simulation.model import Block, HeldFetch, HeldPin, HeldStore, tenant_digest
from tests.simulation.simfiles import FaultyFiles
from tests.simulation.simpool import SimPool


class Promises(ABC):
    """The part of a world that judges."""

    store: BlockStore
    ram: CpuTier
    disk: NvmeTier
    pool: SimPool
    files: FaultyFiles
    blocks: list[Block]
    fetches: list[HeldFetch]
    pins: list[HeldPin]
    stores: list[HeldStore]
    orders: list[Deletion]
    seen: Counter[str]
    now: float
    disk_slots: int

    @abstractmethod
    def pump(self) -> None:
        """Moves the store on as its driver would."""

    def _keys(self, blocks: list[Block]) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return np.frombuffer(b"".join(block.key for block in blocks), dtype=np.uint8).reshape(-1, 32)

    def _covers(self, order: Deletion, block: Block) -> bool:
        return block.key in order.keys or order.namespace == tenant_digest(block.tenant)

    def found(self, block: Block) -> int:
        return len(self.store.lookup(self._keys([block]), tenant_digest(block.tenant)))

    def _look(self, block: Block) -> None:
        found = self.found(block)
        if found:
            assert block.live and not block.deleting, f"{block.name} is found, and is not there"
        elif block.must_be_there:
            raise AssertionError(f"{block.name} is missing: {self.store.explain(block.key)}")

    def _verify(self, held: HeldFetch | HeldPin) -> None:
        ready = held.scope.ready if isinstance(held.scope, Fetch) else len(held.scope)
        for index in range(ready):
            block = Block(held.blocks[index].tenant, held.blocks[index].number, held.versions[index])
            assert bytes(held.scope.body(index)) == block.content(), f"wrong bytes of {block.name}"
        if isinstance(held, HeldFetch):
            assert ready >= held.seen, "what was ready is so no more"
            held.seen = ready
            if held.scope.over and ready < len(held.blocks):
                self.seen[f"fetch-{held.scope.reason}"] += 1

    def check(self) -> None:
        self.store.check()
        self.store.reads.flights.check()
        self._slots_have_one_owner()
        for tier, held in enumerate(self.store.parts.tiers):
            ledger, resource = self.store.ledger, slots(tier)
            taken = ledger.total(resource) - ledger.available(resource)
            assert taken == held.slots.used, f"{held.name}: {taken} slots are paid, {held.slots.used} taken"
        self._kept_are_few()

    def _kept_are_few(self) -> None:
        """Blocks that may not be lost, on their way or deleted but not yet forgotten, too, never exceed what
        the disk can hold of them."""
        directory = self.store.directory
        there = directory.state[: directory.used] != ChunkState.FREE
        kept = int((directory.droppable[: directory.used][there] == 0).sum())
        assert kept == directory.kept, f"{directory.kept} blocks are said to be kept, {kept} are"
        assert kept < self.disk_slots, f"{kept} blocks that may not be lost for {self.disk_slots} slots"

    def _slots_have_one_owner(self) -> None:
        directory = self.store.directory
        for tier, held in enumerate(self.store.parts.tiers):
            columns = directory.replicas.tiers[tier]
            lines = np.flatnonzero(columns.state.array[: directory.used] != ReplicaState.ABSENT)
            taken = columns.slot.array[lines].tolist()
            assert len(set(taken)) == len(taken), f"{held.name}: a slot has two owners"
            published = lines[columns.state.array[lines] == ReplicaState.PUBLISHED]
            for line in published.tolist():
                slot = int(columns.slot.cells[line])
                assert held.slots.generation(slot) == columns.slot_generation.cells[line]
                assert held.slots._state[slot] == SlotState.PUBLISHED

    def deep_check(self) -> None:
        """As `check`, with every byte that somebody holds and every block that must be there."""
        for held in (*self.fetches, *self.pins):
            self._verify(held)
        for block in self.blocks:
            self._look(block)

    def finish(self) -> None:
        """Calm weather, everyone leaves: all comes to rest, and what must be there is read."""
        self.files.calm = True
        for held in (*self.fetches, *self.pins):
            self._verify(held)
            held.scope.close()
        for store in self.stores:
            store.scope.close()
        self.fetches, self.pins, self.stores = [], [], []
        gc.collect()
        self.rest()
        assert not self.orders, "a deletion never ended"
        for block in self.blocks:
            self._look(block)
            if self.found(block):
                self._read(block)
        self.rest()
        assert not self.store.moves.open_moves() and not self.store.reads.flights.flights()
        assert not len(self.store.through), "a write is waited for by nobody"
        assert self.store.ledger.outstanding() == 0, "credits are held by nobody"
        self._memory_can_be_emptied()
        leases = [int(columns.leases.array.sum()) for columns in self.store.directory.replicas.tiers]
        assert leases == [0, 0], f"leases that nobody has: {leases}"
        assert self.ram.slots.used == self.store.directory.replicas.counts[0]
        assert self.disk.slots.used == self.store.directory.replicas.counts[1]

    def _read(self, block: Block) -> None:
        for _ in range(20):
            held = HeldFetch(
                self.store.fetch(
                    [block.key], namespace=tenant_digest(block.tenant), deadline=self.now + 1000
                ),
                [block],
                [block.version],
            )
            self.rest(until=partial(_is_over, held.scope))
            self._verify(held)
            ready, reason = held.scope.ready, held.scope.reason
            held.scope.close()
            if ready:
                return
            if reason.value in ("CHECKSUM_MISMATCH", "IDENTITY_MISMATCH", "SHORT_COPY", "MISS"):
                evicted = block.droppable and reason.value == "MISS"
                assert evicted or not block.safe, f"{block.name}: {reason}"
                return
            self.now += 2
        raise AssertionError(f"{block.name} cannot be read: {reason}")

    def _memory_can_be_emptied(self) -> None:
        """Rows of a session can have all of memory, whatever blocks are there."""
        for _ in range(20):
            if not self.ram.slots.used:
                return
            self.store.reclaim.make_room(0, self.ram.slots.capacity)
            self.rest()
            self.now += 2
        raise AssertionError(f"{self.ram.slots.used} slots of memory cannot be emptied")

    def rest(self, until: Callable[[], bool] = lambda: False) -> None:
        for turn in range(400):
            while self.pool.hung:
                self.pool.come_back(0)
            while self.pool.queue:
                self.pool.run(0)
            self.pump()
            if until():
                return
            quiet = self.pool.idle and not self.store.moves.open_moves() and not self.orders
            if quiet and turn > 3:
                return
            self.now += 0.5
            self.pool.expire()
        raise AssertionError(f"never at rest: {self.store.moves.open_moves()} {self.orders}")


def _is_over(scope: Fetch) -> bool:
    return scope.over
