"""A small block store without a thread: pumped by hand, on a clock of its own, over storage that the test
holds."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvtier_core.blockstore.outcomes import Stored
from kvtier_core.blockstore.store import BlockStore
from kvtier_core.checksums import checksum
from kvtier_core.credits import slots as resource_of
from kvtier_core.errors import CoreError, Reason
from kvtier_core.layout import ChunkLayout
from kvtier_core.tiers.arena import ArenaOptions
from kvtier_core.tiers.base import DEFAULT_CAPABILITY, BlockIdentity, MediumKind, SlotRef, SlotState, Tier
from kvtier_core.tiers.cpu import CpuTier
from kvtier_core.tiers.staging import StagingBuffer
from kvtier_core.tiers.transfer import TransferItem, TransferSink
from kvtier_core.transactions.eviction import Watermarks

LAYOUT = ChunkLayout(1, 16, 32)
SIZE = LAYOUT.payload_bytes
NEVER = Watermarks(1.0, 1.0)
ALPHA, BETA = (hashlib.sha256(name).digest() for name in (b"alpha", b"beta"))


def key(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def content(name: str) -> bytes:
    return np.random.default_rng(list(name.encode())).bytes(SIZE)


def matrix(*names: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(b"".join(map(key, names)), dtype=np.uint8).reshape(-1, 32)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass(eq=False)
class Held:
    """One block on its way to or from a slow tier."""

    tier: SlowTier
    item: TransferItem
    sink: TransferSink
    index: int
    writes: bool
    deadline: float
    told: bool = False

    def finish(self, error: CoreError | None = None, part: int = SIZE) -> None:
        """The device is through: `part` bytes went over, then it failed with `error`, or all is whole."""
        body, slot = self.item.landing.body, self.tier.data[self.item.ref.slot]
        if self.writes:
            slot[:part] = body[:part]
        else:
            body[:part] = slot[:part]
        self.tier.held.remove(self)
        if not self.told:
            self.told = True
            self.sink.done(self.index, error or self._verdict())
        self.sink.drained(self.index)

    def _verdict(self) -> CoreError | None:
        slots, ref = self.tier.slots, self.item.ref
        try:
            if checksum("xxh3", self.item.landing.body) != self.item.identity.checksum:
                raise CoreError(Reason.CHECKSUM_MISMATCH, "other bytes")
            if self.writes:
                slots.advance(ref, SlotState.VALIDATED, SlotState.RESERVED)
            else:
                slots.check(ref, SlotState.PUBLISHED)
        except CoreError as error:
            return error
        return None

    def late(self) -> None:
        """The deadline came; the device still works."""
        self.told = True
        self.sink.done(self.index, CoreError(Reason.DEADLINE, "the device did not answer in time"))


class SlowTier(Tier):
    """Storage whose transfers end when the test says so."""

    medium = MediumKind.NVME
    host_memory = False

    def __init__(self, name: str, slots: int, clock: Callable[[], float]) -> None:
        super().__init__(name, LAYOUT, DEFAULT_CAPABILITY[MediumKind.NVME], slots, clock)
        self.data = [bytearray(SIZE) for _ in range(slots)]
        self.held: list[Held] = []
        self.reads: list[bytes] = []
        self.refuse: CoreError | None = None

    @property
    def slot_bytes(self) -> int:
        return SIZE

    def submit_read(self, items: Sequence[TransferItem], deadline: float, sink: TransferSink) -> None:
        self._hold(items, deadline, sink, False)
        self.reads += [item.identity.chunk_digest for item in items]

    def submit_write(self, items: Sequence[TransferItem], deadline: float, sink: TransferSink) -> None:
        self._hold(items, deadline, sink, True)

    def _hold(self, items: Sequence[TransferItem], deadline: float, sink: TransferSink, writes: bool) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.held += [Held(self, item, sink, at, writes, deadline) for at, item in enumerate(items)]

    def of(self, name: str) -> Held:
        return next(held for held in self.held if held.item.identity.chunk_digest == key(name))

    def write(
        self, ref: SlotRef, payload: torch.Tensor, identity: BlockIdentity, deadline: float | None = None
    ) -> int:
        raise AssertionError("blocks are written in batches")

    def validate(self, ref: SlotRef, identity: BlockIdentity, deadline: float | None = None) -> None:
        raise AssertionError("blocks are written in batches")

    def read(
        self, ref: SlotRef, identity: BlockIdentity, buffer: StagingBuffer, deadline: float | None = None
    ) -> None:
        raise AssertionError("blocks are read in batches")


class StoreBench:
    """ram > disk (> far). `rung`: how often the store asked to be pumped."""

    def __init__(
        self,
        memory: int = 4,
        storage: int = 8,
        far: int = 0,
        *,
        segment: int = SIZE,
        persistent: bool = False,
        **options: Any,
    ) -> None:
        self.clock = Clock()
        self.ram = CpuTier(
            "ram", LAYOUT, memory, clock=self.clock, options=ArenaOptions(segment_bytes=segment)
        )
        self.disk = SlowTier("disk", storage, self.clock)
        self.disk.persistent = persistent
        self.far = SlowTier("far", far, self.clock)
        self.rung = 0
        tiers: list[Tier] = [self.ram, self.disk, self.far][: 3 if far else 2]
        options.setdefault("watermarks", NEVER)
        options.setdefault("capacity", 4096)
        self.store = BlockStore(tiers, self.clock, wake=self._ring, **options)

    def _ring(self) -> None:
        self.rung += 1

    def put(
        self, *names: str, namespace: bytes = ALPHA, data: str | None = None, **more: Any
    ) -> list[Stored]:
        """Stores blocks whose bytes are those of their names, or of `data`."""
        more.setdefault("deadline", self.clock.now + 10)
        payloads = [content(data or name) for name in names]
        return self.store.put([key(name) for name in names], payloads, namespace=namespace, **more)

    def reserve(self, *names: str, seconds: float = 10.0, namespace: bytes = ALPHA, **more: Any) -> Any:
        return self.store.reserve(
            [key(name) for name in names], namespace=namespace, deadline=self.clock.now + seconds, **more
        )

    def fetch(self, *names: str, seconds: float = 10.0, namespace: bytes = ALPHA, **more: Any) -> Any:
        return self.store.fetch(
            [key(name) for name in names], namespace=namespace, deadline=self.clock.now + seconds, **more
        )

    def pin(self, *names: str, namespace: bytes = ALPHA) -> Any:
        return self.store.pin(matrix(*names), namespace, self.clock.now + 10)

    def found(self, *names: str, namespace: bytes = ALPHA) -> int:
        return len(self.store.lookup(matrix(*names), namespace))

    def explain(self, name: str) -> str:
        return self.store.explain(key(name)).state

    def settle(self) -> None:
        """Ends all that is on its way."""
        for _ in range(100):
            self.store.pump()
            moving = [*self.disk.held, *self.far.held]
            if not moving:
                break
            for held in moving:
                held.finish()
        else:
            raise AssertionError("the store never comes to rest")
        self.store.pump()

    def on_disk(self, *names: str, **more: Any) -> None:
        """Stores blocks and lets them leave memory."""
        for name in names:
            assert self.put(name, **more)[0].generation > 0
            assert self.ram.slots.used == 1
            self.store.reclaim.make_room(0, self.ram.slots.capacity)
            self.settle()
        assert self.ram.slots.used == 0

    def check(self) -> None:
        """Nothing is left over: every slot, credit and lease belongs to a block that is there."""
        store = self.store
        store.check()
        store.reads.flights.check()
        for tier, held in enumerate(store.parts.tiers):
            assert held.slots.used == store.directory.replicas.counts[tier], held.name

    def rest(self) -> None:
        """At rest nothing is in flight and nobody holds anything."""
        self.settle()
        self.check()
        assert not self.store.moves.open_moves()
        assert not self.store.reads.flights.flights()
        assert self.store.ledger.outstanding() == 0
        assert self.store.reads.flying == 0 == self.store.reads.parked
        # The ledger's books may agree with each other and not with what is there.
        counts = self.store.directory.replicas.counts
        for tier in range(len(self.store.parts.tiers)):
            assert self.store.ledger.resident(resource_of(tier)) == counts[tier]
