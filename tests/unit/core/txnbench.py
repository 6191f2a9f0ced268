"""A cache of shared blocks over tiers whose I/O ends when a test says so, with the whole state in view.

`HeldTier` keeps every submitted item until it is told to land, fail, time out, drain or report twice: 50
ms, a failure halfway and a hang are all one thing to it. `BlockBench` puts directory, tiers, transactions
and credits together and checks, after any step, what must always hold.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from kvtier_core.checksums import checksum
from kvtier_core.directory import ChunkState, Directory, ReplicaState
from kvtier_core.directory.replicas import Replica
from kvtier_core.errors import CoreError, Reason
from kvtier_core.layout import ChunkLayout
from kvtier_core.tiers.base import DEFAULT_CAPABILITY, MediumKind, Tier
from kvtier_core.tiers.slots import BlockIdentity, SlotRef, SlotState
from kvtier_core.tiers.staging import StagingBuffer
from kvtier_core.tiers.transfer import Landing, TransferItem, TransferSink
from kvtier_core.transactions.flights import OrphanPolicy
from kvtier_core.transactions.moves import NO_BINDING, Binding, Move
from kvtier_core.transactions.reasons import MoveKind, MoveReason, TxnState
from kvtier_core.transactions.transfers import Settled, Transactions

LAYOUT = ChunkLayout(1, 4, 2)
SIZE = LAYOUT.payload_bytes
GPU, CPU, NVME = 0, 1, 2


@dataclass(eq=False)
class HeldItem:
    """One item in flight: a test decides what becomes of it."""

    tier: HeldTier
    item: TransferItem
    sink: TransferSink
    index: int
    writes: bool
    deadline: float
    told: bool = False
    drained: bool = False

    def land(self) -> None:
        """All bytes arrive and are verified; then it is drained."""
        if not self.told:
            self.tell(self.tier.perform(self))
        self.drain()

    def arrive(self) -> None:
        """All bytes arrive, as `land`, but the device is not drained yet."""
        if not self.told:
            self.tell(self.tier.perform(self))

    def spill(self) -> None:
        """Bytes arrive though the caller was told otherwise: into the landing or slot they were meant for."""
        self.tier.scribble(self)

    def fail(self, reason: Reason = Reason.STORAGE_UNAVAILABLE) -> None:
        if not self.told:
            self.tell(CoreError(reason, "as the test says"))

    def tell(self, error: CoreError | None) -> None:
        self.told = True
        self.sink.done(self.index, error)

    def again(self) -> None:
        """A second completion of the same item, which a broken device may send."""
        self.sink.done(self.index, None)

    def drain(self) -> None:
        if self.told and not self.drained:
            self.drained = True
            self.tier.held.remove(self)
            self.sink.drained(self.index)


class HeldTier(Tier):
    """Slots of plain bytes. With `memory` it has landings; without, it is storage. I/O is held by the
    test."""

    host_memory = True

    def __init__(self, name: str, slots: int, *, memory: bool, medium: MediumKind) -> None:
        super().__init__(name, LAYOUT, DEFAULT_CAPABILITY[medium], slots)
        self.medium = medium
        self.memory = memory
        self.data = [bytearray(SIZE) for _ in range(slots)]
        self.held: list[HeldItem] = []
        self.reads = 0
        self.batches: list[int] = []
        self.queue = math.inf

    @property
    def slot_bytes(self) -> int:
        return SIZE

    def write(
        self, ref: SlotRef, payload: torch.Tensor, identity: BlockIdentity, deadline: float | None = None
    ) -> int:
        raise AssertionError("blocks are not written synchronously here")

    def validate(self, ref: SlotRef, identity: BlockIdentity, deadline: float | None = None) -> None:
        self.slots.check(ref, SlotState.WRITTEN)
        self._verify(self.data[ref.slot], identity)
        self.slots.advance(ref, SlotState.VALIDATED, SlotState.WRITTEN)

    def read(
        self, ref: SlotRef, identity: BlockIdentity, buffer: StagingBuffer, deadline: float | None = None
    ) -> None:
        self.slots.check(ref, SlotState.PUBLISHED)
        self._verify(self.data[ref.slot], identity)
        buffer.body[:] = self.data[ref.slot]

    def landing(self, ref: SlotRef) -> Landing:
        if not self.memory:
            return super().landing(ref)
        self.slots.check(ref, SlotState.RESERVED, SlotState.PUBLISHED)
        return Landing(memoryview(self.data[ref.slot]))

    def filled(self, ref: SlotRef) -> None:
        self.slots.advance(ref, SlotState.WRITTEN, SlotState.RESERVED)

    def submit_read(self, items: Sequence[TransferItem], deadline: float, sink: TransferSink) -> None:
        self._hold(items, deadline, sink, writes=False)
        self.reads += len(items)

    def submit_write(self, items: Sequence[TransferItem], deadline: float, sink: TransferSink) -> None:
        self._hold(items, deadline, sink, writes=True)

    def _hold(self, items: Sequence[TransferItem], deadline: float, sink: TransferSink, writes: bool) -> None:
        if len(self.held) + len(items) > self.queue:
            raise CoreError(Reason.QUEUE_FULL, f"{self.queue} items are in flight")
        self.batches.append(len(items))
        for index, item in enumerate(items):
            self.held.append(HeldItem(self, item, sink, index, writes, deadline))

    def perform(self, held: HeldItem) -> CoreError | None:
        """Moves the bytes and verifies them; the error that a real tier would report."""
        item = held.item
        try:
            if held.writes:
                self.slots.check(item.ref, SlotState.RESERVED)
                self.scribble(held)
                self._verify(self.data[item.ref.slot], item.identity)
                self.slots.advance(item.ref, SlotState.WRITTEN, SlotState.RESERVED)
                self.slots.advance(item.ref, SlotState.VALIDATED, SlotState.WRITTEN)
            else:
                self.slots.check(item.ref, SlotState.PUBLISHED)
                self.scribble(held)
                self._verify(item.landing.body, item.identity)
        except CoreError as error:
            return error
        return None

    def scribble(self, held: HeldItem) -> None:
        """The bare bytes, whatever became of slot and landing: what a device does that knows of no cancel."""
        slot = self.data[held.item.ref.slot]
        if held.writes:
            slot[:] = held.item.landing.body
        else:
            held.item.landing.body[:] = slot

    def _verify(self, body: bytes | bytearray | memoryview, identity: BlockIdentity) -> None:
        if checksum("xxh3", memoryview(body)) != identity.checksum:
            raise CoreError(Reason.CHECKSUM_MISMATCH, f"tier {self.name} holds other bytes")


class Credits:
    """Counts slots by tier and bytes in flight; refuses on demand and notices a double release."""

    def __init__(self, tiers: int) -> None:
        self.slots = [0] * tiers
        self.links: dict[int, int] = {}
        self.limit = math.inf
        self._next = 0

    def take(self, line: int, tier: int) -> int:
        self.slots[tier] += 1
        return 0

    def settle(self, line: int, tier: int, source: int, token: int) -> int:
        return 0

    def give(self, line: int, tier: int, token: int) -> None:
        self.slots[tier] -= 1
        assert self.slots[tier] >= 0

    def acquire(self, source: int, tier: int, size: int, namespace: int) -> int:
        if len(self.links) >= self.limit:
            raise CoreError(Reason.CREDIT_PRESSURE, "no link credit", {"retry_after_ms": 5})
        self._next += 1
        self.links[self._next] = size
        return self._next

    def release(self, token: int) -> None:
        del self.links[token]


class Facts:
    """The live state of blocks and requests, as the test sets it."""

    def __init__(self) -> None:
        self.bindings: dict[int, Binding] = {}
        self.requests: dict[int, int] = {}
        self.untrusted: set[int] = set()
        self.duration = 0.0

    def binding(self, line: int) -> Binding:
        return self.bindings.get(line, NO_BINDING)

    def request_generation(self, request: int) -> int:
        return self.requests.get(request, 0)

    def trusted(self, line: int, tier: int) -> bool:
        return tier not in self.untrusted

    def seconds(self, source: int, tier: int, size: int) -> float:
        return self.duration


@cache
def content(name: int, version: int = 0) -> bytes:
    """The bytes of block `name`: different for each, so that a mix-up shows."""
    return (hashlib.sha256(f"{name}/{version}".encode()).digest() * (SIZE // 32 + 1))[:SIZE]


@cache
def block_key(name: int) -> bytes:
    return hashlib.sha256(f"key {name}".encode()).digest()


class BlockBench:
    """Directory, three tiers (two of memory, one of storage) and transactions over shared blocks."""

    def __init__(
        self,
        slots: tuple[int, int, int] = (3, 3, 4),
        *,
        survival: int = 1,
        late: OrphanPolicy = OrphanPolicy.KEEP,
        gpu_memory: bool = True,
    ) -> None:
        self.tiers: list[HeldTier] = [
            HeldTier("hbm", slots[0], memory=gpu_memory, medium=MediumKind.GPU),
            HeldTier("ram", slots[1], memory=True, medium=MediumKind.CPU),
            HeldTier("flash", slots[2], memory=False, medium=MediumKind.NVME),
        ]
        self.directory = Directory(tiers=3, capacity=64)
        self.credits = Credits(3)
        self.facts = Facts()
        self.woken = 0
        self.published: dict[tuple[int, int], bytes] = {}
        """(owner, replica generation) -> the bytes that were published under them."""
        self.moves = Transactions(
            self.directory,
            None,
            self.tiers,
            self.identity,
            self._on_published,
            purse=self.credits,
            link=self.credits,
            live=self.facts,
            survival=survival,
            wake=self._wake,
            late=late,
        )
        self.names: dict[int, int] = {}
        self.versions: dict[int, int] = {}

    def _wake(self) -> None:
        self.woken += 1

    def identity(self, line: int, generation: int) -> BlockIdentity:
        directory = self.directory
        return BlockIdentity(
            chunk_digest=directory.key_of(line),
            logical=int(directory.logical[line]),
            replica_generation=generation,
            rows=4,
            length=SIZE,
            checksum=int(directory.checksum[line]),
            epoch=int(directory.epoch[line]),
        )

    def _on_published(self, line: int, identity: BlockIdentity) -> None:
        self.published[(identity.logical, identity.replica_generation)] = self.bytes_of(line)

    def bytes_of(self, line: int) -> bytes:
        """What the block of a line is."""
        owner = int(self.directory.logical[line])
        return content(self.names[owner], self.versions[owner])

    # Blocks.

    def insert(self, name: int, version: int = 0, namespace: int = 0) -> int:
        """A line for a block that has no copy yet."""
        line = self.directory.insert_block(
            block_key(name),
            namespace=namespace,
            rows=4,
            checksum=checksum("xxh3", memoryview(content(name, version))),
        )
        owner = int(self.directory.logical[line])
        self.names[owner] = name
        self.versions[owner] = version
        return line

    def put(self, name: int, tier: int = CPU, version: int = 0, namespace: int = 0) -> int:
        """A published block whose bytes were written in place (memory) or stored (storage)."""
        line = self.insert(name, version, namespace)
        move = self.moves.begin(MoveKind.STORE, line, tier)
        if self.tiers[tier].memory:
            self.tiers[tier].landing(move.destination).body[:] = content(name, version)
            self.moves.seal(move, int(self.directory.checksum[line]))
        else:
            payload = Landing(memoryview(bytearray(content(name, version))))
            assert self.moves.start([move], {move.id: payload}) == []
            self.held(move).land()
            assert [item.reason for item in self.moves.reap()] == [MoveReason.READY]
        return line

    def spread(self, name: int, *tiers: int) -> int:
        """A block with copies in several tiers; the authority is the last."""
        line = self.put(name, tiers[0])
        for tier in tiers[1:]:
            move = self.begin(line, tier, keep_source=True)
            assert self.moves.start([move]) == []
            self.held(move).land()
            assert [item.reason for item in self.moves.reap()] == [MoveReason.READY]
        return line

    def begin(self, line: int, tier: int, **options: object) -> Move:
        source = options.get("source_tier", int(self.directory.tier[line]))
        kind = MoveKind.DEMOTE if tier > int(str(source)) else MoveKind.PROMOTE
        return self.moves.begin(kind, line, tier, **options)  # type: ignore[arg-type]

    def fly(self, line: int, tier: int, **options: object) -> Move:
        """A move whose copy is in flight."""
        move = self.begin(line, tier, **options)
        assert self.moves.start([move]) == []
        return move

    def held(self, move: Move) -> HeldItem:
        """The item that carries a move's bytes: the newest, since a dead one may still read the same slot."""
        tier = self.tiers[move.tier if move.by_write else move.source_tier]
        ref = move.destination if move.by_write else move.source
        for item in reversed(tier.held):
            if (item.item.ref, item.item.identity.logical) == (ref, move.owner):
                return item
        raise AssertionError(f"nothing carries move {move.id}")

    def all_held(self) -> list[HeldItem]:
        return [item for tier in self.tiers for item in tier.held]

    def settle(self) -> list[Settled]:
        """Lands all that flies and reaps until nothing is left to do."""
        settled: list[Settled] = []
        for item in self.all_held():
            item.land()
        settled += self.moves.reap()
        return settled

    def slot(self, line: int, tier: int) -> SlotRef:
        copy = self.directory.replica(line, tier)
        return SlotRef(copy.slot, copy.slot_generation)

    def spoil(self, line: int, tier: int) -> None:
        """Flips a byte of a copy where it lies."""
        self.tiers[tier].data[self.slot(line, tier).slot][0] ^= 0x40

    def serve(self, line: int, tier: int) -> bytes:
        """What a reader of the copy gets, without any check of its own."""
        return bytes(self.tiers[tier].data[self.slot(line, tier).slot])

    # What must always hold.

    def lines(self) -> list[int]:
        states = self.directory.cells("state")[: self.directory.used]
        return [line for line, state in enumerate(states) if state != ChunkState.FREE]

    def check(self, spoiled: frozenset[tuple[int, int]] = frozenset(), *, deep: bool = True) -> None:
        """`spoiled`: copies whose bytes a test has changed. deep: the directory's whole columns as well."""
        if deep:
            self.directory.check()
        owners: dict[tuple[int, int], str] = {}
        for line in self.lines():
            for tier in range(3):
                if not self.directory.replicas.tiers[tier].state.cells[line]:
                    continue
                copy = self.directory.replica(line, tier)
                self._own(owners, tier, copy.slot, f"line {line}")
                state = self.tiers[tier].slots.state(SlotRef(copy.slot, copy.slot_generation))
                if copy.state is ReplicaState.PUBLISHED:
                    assert state is SlotState.PUBLISHED
                    if copy.leases or self.directory.state[line] != ChunkState.TOMBSTONED:
                        # Of a deleted block that nobody reads, bytes may be half erased.
                        self._check_bytes(line, tier, copy, spoiled)
                elif copy.state is ReplicaState.RESERVED:
                    assert state is not SlotState.PUBLISHED
        dead = [move for move in self.moves.open_moves() if move.state is TxnState.DEAD]
        for move in dead:
            self._own(owners, move.tier, move.destination.slot, f"dead move {move.id}")
            assert self.tiers[move.tier].slots.state(move.destination) is SlotState.QUARANTINED
        for index, tier in enumerate(self.tiers):
            taken = sum(1 for found, _ in owners if found == index)
            assert tier.slots.used == taken == self.credits.slots[index], (index, taken, self.credits.slots)
        links = [move.link for move in self.moves.open_moves() if move.link]
        assert sorted(links) == sorted(self.credits.links)
        for item in self.all_held():
            self._check_held(item)

    def _check_bytes(self, line: int, tier: int, copy: Replica, spoiled: frozenset[tuple[int, int]]) -> None:
        """A byte that can be served was published under that key and generation."""
        expected = self.published[(self.directory.logical_of(line), copy.generation)]
        assert (line, tier) in spoiled or self.tiers[tier].data[copy.slot] == expected

    def _check_held(self, item: HeldItem) -> None:
        """What a device may still write into belongs to an open move, or is quarantined."""
        target = item.item.ref if item.writes else None
        if target is not None:
            assert item.tier.slots.generation(target.slot) == target.generation
        else:
            # The slot that is read may not be recycled while it is.
            assert item.tier.slots.generation(item.item.ref.slot) == item.item.ref.generation

    def _own(self, owners: dict[tuple[int, int], str], tier: int, slot: int, who: str) -> None:
        assert (tier, slot) not in owners, f"slot {slot} of tier {tier}: {owners[(tier, slot)]} and {who}"
        owners[(tier, slot)] = who

    def at_rest(self) -> bool:
        """Nothing is in flight, leased, claimed or quarantined."""
        leased = any(tier.leases.array[: self.directory.used].any() for tier in self.directory.replicas.tiers)
        return not (
            self.moves.open_moves()
            or leased
            or self.credits.links
            or self.directory.write_txn[: self.directory.used].any()
        )
