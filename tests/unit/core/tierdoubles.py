"""A tier whose reads end when, how and as often as a test says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtier_core.errors import CoreError, Reason
from kvtier_core.layout import ChunkLayout
from kvtier_core.tiers.base import DEFAULT_CAPABILITY, MediumKind, Tier, seal_checksum
from kvtier_core.tiers.slots import BlockIdentity, SlotRef
from kvtier_core.tiers.staging import StagingBuffer
from kvtier_core.tiers.transfer import TransferItem, TransferSink, move_bytes

LAYOUT = ChunkLayout(kv_heads=1, chunk_tokens=16, head_dim=16)


class ItemSink:
    """One item's side of a batch. over: whether its end was reported."""

    def __init__(self, sink: TransferSink, index: int) -> None:
        self._sink = sink
        self._index = index
        self.over = False

    def done(self, index: int, error: CoreError | None) -> None:
        self.over = True
        self._sink.done(self._index, error)

    def drained(self, index: int) -> None:
        self._sink.drained(self._index)


@dataclass
class Read:
    """One read that has begun. `end` moves its bytes and reports."""

    item: TransferItem
    deadline: float
    sink: ItemSink
    source: Tensor

    def land(self) -> None:
        move_bytes(self.item.landing.body, memoryview(self.source.numpy().reshape(-1).view("u1")))

    def end(self, error: CoreError | None = None) -> None:
        if error is None:
            self.land()
        self.sink.done(0, error)
        self.sink.drained(0)


class ScriptedTier(Tier):
    """Storage of `slots` payloads. Reads wait for `Read.end` unless `answer` is set, which is called with
    each as it begins. depth: QUEUE_FULL beyond so many."""

    medium = MediumKind.NVME

    def __init__(self, slots: int = 8, depth: int = 1 << 20, layout: ChunkLayout = LAYOUT) -> None:
        super().__init__("flash", layout, DEFAULT_CAPABILITY[MediumKind.NVME], slots)
        generator = torch.Generator().manual_seed(1)
        self.payloads = [torch.randn(layout.shape, generator=generator) for _ in range(slots)]
        self.reads: list[Read] = []
        self.depth = depth
        self.answer: Callable[[Read], None] | None = None
        self.begun = threading.Event()
        self.most = 0
        self._open = 0

    @property
    def slot_bytes(self) -> int:
        return self.layout.payload_bytes

    def identity(self, slot: int) -> BlockIdentity:
        payload = self.payloads[slot]
        size = self.layout.payload_bytes
        return BlockIdentity(bytes(32), slot, 1, self.layout.chunk_tokens, size, seal_checksum(payload))

    def submit_read(self, items: Sequence[TransferItem], deadline: float, sink: TransferSink) -> None:
        waiting = sum(not read.sink.over for read in self.reads)
        if waiting + len(items) > self.depth:
            raise CoreError(Reason.QUEUE_FULL, "the queue of this double is full")
        for index, item in enumerate(items):
            read = Read(item, deadline, ItemSink(sink, index), self.payloads[item.ref.slot])
            self.reads.append(read)
            self.begun.set()
            if self.answer is not None:
                self.answer(read)

    def write(
        self, ref: SlotRef, payload: Tensor, identity: BlockIdentity, deadline: float | None = None
    ) -> int:
        self.payloads[ref.slot] = payload.clone()
        return self.layout.payload_bytes

    def validate(self, ref: SlotRef, identity: BlockIdentity, deadline: float | None = None) -> None:
        if seal_checksum(self.payloads[ref.slot]) != identity.checksum:
            raise CoreError(Reason.CHECKSUM_MISMATCH, "what was written is not there")

    def read(
        self, ref: SlotRef, identity: BlockIdentity, buffer: StagingBuffer, deadline: float | None = None
    ) -> None:
        buffer.payload.copy_(self.payloads[ref.slot])
