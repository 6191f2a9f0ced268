"""A block store, its clients, its device and the weather, all on one clock and one seed.

Each step draws one thing that happens next: a client calls, an I/O ends (in any order), hangs or comes back,
time passes, the store is pumped, a bit flips, the process dies and another opens the store. After each step
everything that was promised must hold.
"""

from __future__ import annotations

import dataclasses
import gc
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvtier_core.blockstore.keptnotes import KeptNotes
from kvtier_core.blockstore.outcomes import PutOutcome, Stored
from kvtier_core.blockstore.store import BlockStore
from kvtier_core.errors import CoreError
from kvtier_core.layout import ChunkLayout
from kvtier_core.tiers.arena import ArenaOptions
from kvtier_core.tiers.base import DEFAULT_CAPABILITY, MediumKind
from kvtier_core.tiers.cpu import CpuTier
from kvtier_core.tiers.nvme import NvmeOptions, NvmeTier
from kvtier_core.transactions import MoveReason
from kvtier_core.transactions.deletion import Deletion, DeletionState
from kvtier_core.transactions.erasing import JournalFile
from kvtier_core.transactions.eviction import Watermarks
from tests.simulation.model import Block, HeldFetch, HeldPin, HeldStore, HeldWrite, tenant_digest
from tests.simulation.promises import Promises
from tests.simulation.simfiles import FaultyFiles
from tests.simulation.simpool import SimPool, simulated_pools
from tests.unit.core.nvme_files import MemoryFiles

LAYOUT = ChunkLayout(1, 16, 32)
FOLDER = Path("/sim")
TENANTS, KEYS = 3, 9
PATIENCE = (0.5, 2.0, 5.0, 30.0)
Choice = tuple[float, str, Callable[[], None]]
"""How likely, its name, what it does."""


class SimulationFailed(AssertionError):
    """seed and steps repeat it."""


class World(Promises):
    """memory and disk: slots. rate: of faults, per file operation."""

    def __init__(self, seed: int, memory: int = 6, disk: int = 14) -> None:
        self.chance = random.Random(seed)
        self.rate = self.chance.choice((0.0, 0.01, 0.05, 0.15))
        # Slots of memory that pass from tenant to tenant together.
        self.segment = self.chance.choice((1, 2, 3))
        self.policy = self.chance.choice(("greedyDual", "lru", "arc"))
        self.now = 1000.0
        self.memory, self.disk_slots = memory, disk
        self.blocks = [Block(tenant, number) for tenant in range(TENANTS) for number in range(KEYS)]
        self.by_key = {block.key: block for block in self.blocks}
        self.trace: list[str] = []
        self.seen: Counter[str] = Counter()
        self.disk_files = MemoryFiles()
        self.memories: list[CpuTier] = []
        self.open()

    # Opening and dying.

    def clock(self) -> float:
        return self.now

    def open(self) -> None:
        self.files = FaultyFiles(self.disk_files, self.chance, self.rate, self.meanwhile, self.damaged)
        self.fetches: list[HeldFetch] = []
        self.pins: list[HeldPin] = []
        self.stores: list[HeldStore] = []
        self.writes: list[HeldWrite] = []
        self.orders: list[Deletion] = []
        able = dataclasses.replace(DEFAULT_CAPABILITY[MediumKind.NVME], persistence="node")
        with simulated_pools():
            self.disk = NvmeTier(
                "disk",
                LAYOUT,
                self.disk_slots,
                folder=FOLDER,
                file_key="cache",
                files=self.files,
                capability=able,
                clock=self.clock,
                options=NvmeOptions(threads=1, random=self.chance.randbytes),
            )
        assert isinstance(self.disk._pool, SimPool)
        self.pool = self.disk._pool
        self.ram = CpuTier(
            "ram",
            LAYOUT,
            self.memory,
            clock=self.clock,
            options=ArenaOptions(segment_bytes=self.segment * 4096),
        )
        self.memories.append(self.ram)
        self.store = BlockStore(
            [self.ram, self.disk],
            self.clock,
            policy=self.policy,
            watermarks=Watermarks(0.9, 0.7),
            capacity=4096,
            journal=JournalFile(FOLDER, "deletions", self.files),
            notes={1: KeptNotes(FOLDER, "kept", self.files)},
        )
        for block in self.blocks:
            order = any(self._covers(found, block) for found in self.store.deletions.open())
            if block.deleting and not order:
                # Done, or never durable: what is there tells.
                if self.found(block) == 0:
                    block.deleted()
                else:
                    block.deleting = False
                    block.live = True
            block.deleting = order
        self.orders = list(self.store.deletions.open())
        self.files.calm = False

    def crash(self, power: bool) -> None:
        """What was acknowledged and down must be found again; what was in memory may be gone."""
        directory = self.store.directory
        self._hear_writers()
        for block in self.blocks:
            line = directory.find(block.key)
            down = line >= 0 and directory.counts(line, 1)
            block.safe = block.safe and down
            if block.durable and block.must_be_there:
                assert down, f"{block.name} was said to be durable and is not in storage"
            if block.live and not down:
                # In memory alone, or half way down: there or not, and in the right bytes if it is.
                block.safe = False
        durable = {
            number
            for number, order in enumerate(self.orders)
            if order.state in (DeletionState.DRAINING, DeletionState.ERASING, DeletionState.RECEIPTING)
        }
        ordered = [block for n in durable for block in self.blocks if self._covers(self.orders[n], block)]
        self.disk_files = self.disk_files.after_power_loss(self.chance) if power else self.disk_files.copied()
        self.open()
        for block in ordered:
            assert self.found(block) == 0, f"{block.name} is served after its deletion was durable"

    def close(self) -> None:
        """Gives the descriptors of all its lives back; of a thousand worlds no process can hold them."""
        for memory in self.memories:
            memory.close()

    # What can happen.

    def step(self) -> None:
        clients: list[Choice] = [
            (12, "put", self.put),
            (4, "reserve", self.reserve),
            (10, "fetch", self.fetch),
            (6, "pin", self.pin),
            (1.5, "delete", self.delete),
            (0.2, "deleteNamespace", self.delete_namespace),
            (5, "lookup", self.lookup),
            (8, "leave", self.leave),
            (5, "publish", self.publish),
            (4, "writeThrough", self.write_through),
            (14, "pump", self.pump),
            (4, "time", self.time),
        ]
        device: list[Choice] = [
            (30 if self.pool.queue else 0, "io", self.io),
            (1 if self.pool.queue else 0, "hang", self.hang),
            (4 if self.pool.hung else 0, "return", self.come_back),
            (1 if self.rate else 0, "flip", self.flip),
            (4 if self.orders else 1, "crash", self.maybe_crash),
        ]
        self._draw([*clients, *device])
        self.check()

    def meanwhile(self) -> None:
        """Others go on while one system call takes its time."""
        self.files.in_job = False
        for _ in range(self.chance.choice((1, 2, 3, 12))):
            self._draw(
                [
                    (3, "pump", self.pump),
                    (2, "put", self.put),
                    (2, "fetch", self.fetch),
                    (2, "leave", self.leave),
                    (2, "delete", self.delete),
                    (1, "time", self.time),
                ]
            )
        self.files.in_job = True

    def _draw(self, choices: list[Choice]) -> None:
        weights = [weight for weight, _, _ in choices]
        _, name, action = self.chance.choices(choices, weights)[0]
        self.trace.append(name)
        self.seen[name] += 1
        action()

    def _some(self, most: int) -> list[Block]:
        tenant = self.chance.randrange(TENANTS)
        mine = [block for block in self.blocks if block.tenant == tenant]
        return self.chance.sample(mine, self.chance.randrange(1, most + 1))

    def put(self) -> None:
        blocks, droppable = self._some(3), self.chance.random() < 0.4
        try:
            stored = self.store.put(
                [block.key for block in blocks],
                [block.content() for block in blocks],
                namespace=tenant_digest(blocks[0].tenant),
                deadline=self.now + self.chance.choice(PATIENCE),
                cost=self.chance.random(),
                droppable=droppable,
            )
        except CoreError as error:
            self._refused("put", error)
            return
        for block, each in zip(blocks, stored, strict=True):
            self._stored(block, block.version, each, droppable)

    def _stored(self, block: Block, version: int, stored: Stored, droppable: bool) -> None:
        self.seen[f"put-{stored.outcome}-{stored.reason}"] += 1
        if stored.outcome is PutOutcome.STORED:
            assert not block.deleting and version == block.version, f"{block.name} was stored while deleted"
            block.live, block.safe, block.droppable, block.durable = True, True, droppable, False
        if stored.outcome is PutOutcome.EXISTED:
            assert not block.deleting and version == block.version, f"{block.name} is there with other bytes"
            block.droppable = block.droppable and droppable
        assert stored.reason.value not in ("IDENTITY_MISMATCH", "TENANT_MISMATCH"), stored

    def _refused(self, what: str, error: CoreError) -> None:
        reason = error.facts.get("move", error.reason.value)
        assert reason in ("TOMBSTONED", "DEADLINE", "QUEUE_FULL"), error
        self.seen[f"{what}-{reason}"] += 1

    def reserve(self) -> None:
        blocks, droppable = self._some(2), self.chance.random() < 0.4
        try:
            scope = self.store.reserve(
                [block.key for block in blocks],
                namespace=tenant_digest(blocks[0].tenant),
                deadline=self.now + self.chance.choice(PATIENCE),
                droppable=droppable,
            )
        except CoreError as error:
            self._refused("reserve", error)
            return
        self.stores.append(HeldStore(scope, blocks, [block.version for block in blocks], droppable))

    def publish(self) -> None:
        if not self.stores:
            return
        held = self.stores.pop(self.chance.randrange(len(self.stores)))
        fate = self.chance.random()
        for index, block in enumerate(held.blocks):
            landing = held.scope.landing(index)
            if landing is not None:
                data = Block(block.tenant, block.number, held.versions[index]).content()
                landing[:] = data if fate < 0.7 else data[:100] + bytes(len(data) - 100)
        if fate < 0.7:
            for index, stored in enumerate(held.scope.publish()):
                if stored.outcome is PutOutcome.STORED and held.versions[index] != held.blocks[index].version:
                    raise AssertionError(f"{held.blocks[index].name}: published across its deletion")
                if stored.outcome is PutOutcome.STORED:
                    self._stored(held.blocks[index], held.versions[index], stored, held.droppable)
        if fate < 0.85:
            held.scope.close()
        # Otherwise the writer is gone, and its scope with it.

    def write_through(self) -> None:
        blocks = self._some(3)
        try:
            scope = self.store.persist(
                [block.key for block in blocks],
                namespace=tenant_digest(blocks[0].tenant),
                deadline=self.now + self.chance.choice(PATIENCE),
            )
        except CoreError as error:
            self._refused("writeThrough", error)
            return
        self.writes.append(HeldWrite(scope, blocks, [block.version for block in blocks]))
        self._hear_writers()

    def _hear_writers(self) -> None:
        """What writers were told; some have not waited for it."""
        for held in list(self.writes):
            for index, block in enumerate(held.blocks):
                if held.scope.reasons[index] is MoveReason.READY and held.versions[index] == block.version:
                    block.durable = block.live
            if held.scope.over:
                self.seen.update(f"through-{reason}" for reason in held.scope.reasons)
                self.writes.remove(held)
            elif self.chance.random() < 0.05:
                self.store.through_with(held.scope)
                self.writes.remove(held)

    def fetch(self) -> None:
        blocks = self._some(4)
        try:
            scope = self.store.fetch(
                [block.key for block in blocks],
                namespace=tenant_digest(blocks[0].tenant),
                deadline=self.now + self.chance.choice(PATIENCE),
                priority=self.chance.randrange(3),
            )
        except CoreError as error:
            self._refused("fetch", error)
            return
        self.fetches.append(HeldFetch(scope, blocks, [block.version for block in blocks]))

    def pin(self) -> None:
        blocks = self._some(3)
        scope = self.store.pin(self._keys(blocks), tenant_digest(blocks[0].tenant), self.now + 10)
        if len(scope):
            self.pins.append(HeldPin(scope, blocks, [block.version for block in blocks]))

    def leave(self) -> None:
        """Some scope ends, by being left or by being dropped."""
        held: list[Any] = [*self.fetches, *self.pins]
        if not held:
            return
        gone = self.chance.choice(held)
        self._verify(gone)
        if self.chance.random() < 0.8:
            gone.scope.close()
        (self.fetches if isinstance(gone, HeldFetch) else self.pins).remove(gone)

    def lookup(self) -> None:
        for block in self._some(4):
            self._look(block)
            other = tenant_digest((block.tenant + 1) % TENANTS)
            assert not self.store.lookup(self._keys([block]), other), "another tenant sees it"
            self.seen[f"explain-{self.store.explain(block.key).state}"] += 1

    def delete(self) -> None:
        blocks = self._some(2)
        self._ordered(self.store.delete([block.key for block in blocks]))

    def delete_namespace(self) -> None:
        self._ordered([self.store.delete_namespace(tenant_digest(self.chance.randrange(TENANTS)))])

    def _ordered(self, orders: list[Deletion]) -> None:
        for order in orders:
            if order not in self.orders:
                self.orders.append(order)
            for block in self.blocks:
                if self._covers(order, block):
                    block.deleting = True

    def pump(self) -> None:
        self.store.pump()
        self._hear_writers()
        done = [order for order in self.orders if order.state is DeletionState.DONE]
        self.orders = [order for order in self.orders if order.state is not DeletionState.DONE]
        for order in done:
            self.seen["deleted"] += 1
            for block in self.blocks:
                if self._covers(order, block) and not any(self._covers(o, block) for o in self.orders):
                    block.deleted()

    def time(self) -> None:
        self.now += self.chance.choice((0.01, 0.3, 1.0, 4.0, 40.0))
        self.pool.expire()

    # The device.

    def _in_job(self, work: Callable[[], None]) -> None:
        self.files.in_job = True
        try:
            work()
        finally:
            self.files.in_job = False

    def io(self) -> None:
        index = self.chance.randrange(len(self.pool.queue))
        self._in_job(lambda: self.pool.run(index))

    def hang(self) -> None:
        self.pool.hang(self.chance.randrange(len(self.pool.queue)))

    def come_back(self) -> None:
        index = self.chance.randrange(len(self.pool.hung))
        self._in_job(lambda: self.pool.come_back(index))

    def flip(self) -> None:
        slot = self.chance.randrange(self.disk_slots)
        self.files.flip_at_rest(self.disk._file.offset(slot), self.disk.slot_bytes)

    def damaged(self, offset: int, size: int) -> None:
        """Blocks there may be lost from now on; wrong they may never be."""
        columns = self.store.directory.replicas.tiers[1]
        block_bytes, first = self.disk.slot_bytes, self.disk._file.offset(0)
        hit = range((offset - first) // block_bytes, -(-(offset + size - first) // block_bytes))
        for block in self.blocks:
            line = self.store.directory.locate(block.key)
            if line >= 0 and columns.state.cells[line] and columns.slot.cells[line] in hit:
                block.safe = False

    def maybe_crash(self) -> None:
        if self.chance.random() < 0.25:
            power = self.chance.random() < 0.5
            self.seen["powerLoss" if power else "kill"] += 1
            self.crash(power)


def simulate(seed: int, steps: int) -> World:
    """One world for so many steps. SimulationFailed says how to repeat it.

    Garbage is collected at steps of the simulation and at no others: scopes that were dropped end then."""
    gc.collect()
    gc.freeze()
    gc.disable()
    world = World(seed)
    try:
        for number in range(steps):
            world.step()
            if number % 16 == 0:
                gc.collect()
                world.deep_check()
        world.trace.append("finish")
        world.finish()
    except Exception as error:
        command = f"python -m tests.simulation --seed {seed} --steps {steps}"
        last = " ".join(world.trace[-40:])
        raise SimulationFailed(f"{error!r}\nafter: {last}\nrepeat: {command}") from error
    finally:
        gc.enable()
        gc.unfreeze()
        world.close()
    return world
