"""A tier across a network, as the contract allows one: slow, failing halfway, hanging when told to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from kvtier_core.checksums import checksum
from kvtier_core.errors import CoreError, Reason
from kvtier_core.layout import ChunkLayout
from kvtier_core.tiers.base import (
    BlockIdentity,
    MediumKind,
    SlotRef,
    SlotState,
    Tier,
    TierCapability,
    tensor_bytes,
)
from kvtier_core.tiers.staging import StagingBuffer
from kvtier_core.tiers.transfer import TransferItem, TransferSink

READ_SECONDS = 0.050
REMOTE = TierCapability(False, False, True, True, False, 1, "xxh3", persistence="shared")


class VirtualTime:
    """A clock with things that happen at a time of it."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0

    def clock(self) -> float:
        return self.now

    def at(self, when: float, what: Callable[[], None]) -> None:
        self._due.append((when, self._order, what))
        self._order += 1

    def next_due(self) -> float | None:
        return min(self._due)[0] if self._due else None

    def advance(self, seconds: float) -> None:
        until = self.now + seconds
        while self._due and min(self._due)[0] <= until:
            due = min(self._due, key=lambda item: item[:2])
            self._due.remove(due)
            self.now = max(self.now, due[0])
            due[2]()
        self.now = until


@dataclass
class Weather:
    """What the network does next. fail_after: bytes of a read that arrive before it breaks. hang: seconds a
    transfer takes longer than it should."""

    fail_after: int | None = None
    hang: float = 0.0
    reads: list[int] = field(default_factory=list)


class RemoteTier(Tier):
    medium = MediumKind.REMOTE
    host_memory = False

    def __init__(self, layout: ChunkLayout, slots: int, time: VirtualTime, queue_depth: int = 64) -> None:
        super().__init__("far", layout, REMOTE, slots, time.clock)
        self.time = time
        self.weather = Weather()
        self._depth = queue_depth
        self._in_flight = 0
        self._stored: dict[int, bytearray] = {}

    @property
    def slot_bytes(self) -> int:
        return self.layout.payload_bytes

    def write(
        self, ref: SlotRef, payload: Tensor, identity: BlockIdentity, deadline: float | None = None
    ) -> int:
        self.slots.check(ref, SlotState.RESERVED)
        self.check_deadline(deadline)
        self._stored[ref.slot] = bytearray(tensor_bytes(payload))
        self.slots.advance(ref, SlotState.WRITTEN, SlotState.RESERVED)
        return self.layout.payload_bytes

    def validate(self, ref: SlotRef, identity: BlockIdentity, deadline: float | None = None) -> None:
        self.slots.check(ref, SlotState.WRITTEN)
        self.check_deadline(deadline)
        self._verify(memoryview(self._stored[ref.slot]), identity)
        self.slots.advance(ref, SlotState.VALIDATED, SlotState.WRITTEN)

    def read(
        self, ref: SlotRef, identity: BlockIdentity, buffer: StagingBuffer, deadline: float | None = None
    ) -> None:
        self.slots.check(ref, SlotState.PUBLISHED)
        self.check_deadline(deadline)
        buffer.body[:] = self._stored[ref.slot]
        self._verify(buffer.body, identity)

    def submit_read(self, items: Sequence[TransferItem], deadline: float, sink: TransferSink) -> None:
        self._start(items, deadline, sink, self._arrive)

    def submit_write(self, items: Sequence[TransferItem], deadline: float, sink: TransferSink) -> None:
        self._start(items, deadline, sink, self._depart)

    def _start(
        self,
        items: Sequence[TransferItem],
        deadline: float,
        sink: TransferSink,
        move: Callable[[TransferItem], None],
    ) -> None:
        if self._in_flight + len(items) > self._depth:
            raise CoreError(Reason.QUEUE_FULL, "too much is on its way", {"limit": self._depth})
        for index, item in enumerate(items):
            self._in_flight += 1
            ends = self.time.now + READ_SECONDS * (index + 1) + self.weather.hang
            told = [False]

            def late(index: int = index, told: list[bool] = told) -> None:
                if not told[0]:
                    told[0] = True
                    sink.done(index, CoreError(Reason.DEADLINE, "the network did not answer in time"))

            def end(index: int = index, item: TransferItem = item, told: list[bool] = told) -> None:
                error: CoreError | None = None
                try:
                    move(item)
                except CoreError as raised:
                    error = raised
                self._in_flight -= 1
                if not told[0]:
                    told[0] = True
                    sink.done(index, error)
                sink.drained(index)

            self.time.at(max(self.time.now, deadline), late)
            self.time.at(ends, end)

    def _arrive(self, item: TransferItem) -> None:
        self.slots.check(item.ref, SlotState.PUBLISHED)
        self.weather.reads.append(item.ref.slot)
        source = self._stored[item.ref.slot]
        broken, self.weather.fail_after = self.weather.fail_after, None
        if broken is not None:
            item.landing.body[:broken] = source[:broken]
            raise CoreError(Reason.STORAGE_UNAVAILABLE, f"the connection broke after {broken} bytes")
        item.landing.body[:] = source
        self._verify(item.landing.body, item.identity)

    def _depart(self, item: TransferItem) -> None:
        self.slots.check(item.ref, SlotState.RESERVED)
        self._verify(item.landing.body, item.identity)
        self._stored[item.ref.slot] = bytearray(item.landing.body)
        self.slots.advance(item.ref, SlotState.VALIDATED, SlotState.RESERVED)

    def _verify(self, body: memoryview, identity: BlockIdentity) -> None:
        if len(body) != identity.length:
            raise CoreError(Reason.SHORT_COPY, f"{len(body)} bytes, not {identity.length}")
        if checksum("xxh3", body) != identity.checksum:
            raise CoreError(Reason.CHECKSUM_MISMATCH, "other bytes arrived")
