"""The Tier contract: reserve, write, validate, publish, read, release, each under a slot generation.

Why it exists: a path is legal because a capability record says so, and a late or repeated call must meet a
generation that has moved on, so that a recycled slot can never answer for its former owner. It must not know
sessions, layers or attention.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtier_core.checksums import checksum
from kvtier_core.errors import CoreError, Reason
from kvtier_core.layout import CODEC_IDENTITY, LAYOUT_ID, ChunkLayout
from kvtier_core.tiers.slots import BlockIdentity as BlockIdentity
from kvtier_core.tiers.slots import SlotRef as SlotRef
from kvtier_core.tiers.slots import SlotState as SlotState
from kvtier_core.tiers.slots import SlotTable as SlotTable
from kvtier_core.tiers.staging import PAGE, StagingBuffer
from kvtier_core.tiers.transfer import EraseItem, Landing, TransferItem, TransferSink, move_bytes

if TYPE_CHECKING:
    from kvtier_core.tiers.nvme.endurance import WriteBudget
    from kvtier_core.tiers.nvme.pace import Pace

P = ParamSpec("P")


class MediumKind(StrEnum):
    """REMOTE is a seam: the contract holds for such a tier, and none is built here."""

    GPU = "gpu"
    CPU = "cpu"
    NVME = "nvme"
    REMOTE = "remote"


@dataclass(frozen=True, slots=True)
class TierCapability:
    """What a tier may be used for (specification A.7). Possibility, not policy.

    kernel_readable: attention may read its memory in place. partial_attention: states may be formed here.
    appendable: single rows can be written, so an open chunk may live here. checksum: verified on each load.
    """

    kernel_readable: bool
    partial_attention: bool
    dma_source: bool
    dma_destination: bool
    appendable: bool
    alignment_bytes: int
    checksum: str
    persistence: str = "process"
    codecs: frozenset[str] = frozenset({CODEC_IDENTITY})
    layouts: frozenset[str] = frozenset({LAYOUT_ID})


DEFAULT_CAPABILITY: dict[MediumKind, TierCapability] = {
    MediumKind.GPU: TierCapability(True, True, True, True, True, 64, "xxh3"),
    MediumKind.CPU: TierCapability(True, True, True, True, True, 64, "xxh3"),
    MediumKind.NVME: TierCapability(False, False, True, True, False, 4096, "xxh3"),
}


@dataclass(frozen=True, slots=True)
class TierMount:
    """One device of this node behind a tier class. `folder` for nvme, `cuda_index` for gpu (None: CPU device,
    then the tier is simulated). `capability` None: the medium's default. For nvme also: `budget`, of bytes
    written, and `pace`, of bytes a second, both shared by all caches on the device; `queue_depth`, I/Os that
    one cache has under way at a time, None: the tier's own choice."""

    class_name: str
    medium: MediumKind
    folder: Path | None = None
    cuda_index: int | None = None
    capability: TierCapability | None = None
    o_direct: bool = True
    budget: WriteBudget | None = None
    pace: Pace | None = None
    queue_depth: int | None = None


@dataclass(slots=True)
class TierMeasurement:
    """Bytes per second as measured at start; 0.0: not measured. seek_bytes: what the device reads in the time
    of one more call, for reads of parts. Probes are small facts by name."""

    read_bytes_per_second: float = 0.0
    write_bytes_per_second: float = 0.0
    seek_bytes: int = 0
    probes: dict[str, str] = field(default_factory=dict)


CONDITION_READY = "Ready"
CONDITION_CLOSED = "Closed"


class Tier(ABC):
    """One tier of one engine. host_memory: its views can be read by the CPU. persistent: what it holds is
    found again by the next process.

    The caller's metadata lock is held around every call but `read`, which may run on a reader thread
    against slots that hold a read lease. `submit_read` and `submit_write` are called under no lock or under
    it, as the caller likes: they return before slow I/O ends. `clock` gives the seconds that deadlines are
    stated in; without one no deadline is ever found late."""

    name: str
    medium: MediumKind
    simulated: bool = False
    host_memory: bool = True
    persistent: bool = False

    def __init__(
        self,
        name: str,
        layout: ChunkLayout,
        capability: TierCapability,
        slots: int,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.name = name
        self.layout = layout
        self.capability = capability
        self.slots = SlotTable(slots)
        self.measured = TierMeasurement()
        self.condition = CONDITION_READY
        self.pinned_bytes = 0
        self.clock = clock

    @property
    @abstractmethod
    def slot_bytes(self) -> int:
        """What one slot costs of the budget: payload, header and alignment."""

    @property
    def used_bytes(self) -> int:
        return self.slots.used * self.slot_bytes

    def reserve(self, owner: int, namespace: bytes = b"") -> SlotRef:
        """A slot that nobody can read yet, with memory that no other namespace ever sees.
        NO_DESTINATION_CAPACITY, STORAGE_UNAVAILABLE."""
        return self.slots.reserve(owner, namespace)

    def poll(self) -> int:
        """Reports batches that the device has ended, or whose deadline came, to their sinks; returns how many
        items are still in flight. Tiers that report from threads of their own have nothing to do here."""
        return 0

    @abstractmethod
    def write(
        self, ref: SlotRef, payload: Tensor, identity: BlockIdentity, deadline: float | None = None
    ) -> int:
        """Writes a whole payload [2, Hk, C, d] into a reserved slot; returns the bytes that arrived. DEADLINE
        when it could not begin, or storage did not end, in time; None: no deadline."""

    @abstractmethod
    def validate(self, ref: SlotRef, identity: BlockIdentity, deadline: float | None = None) -> None:
        """Reads back what lies in the slot and compares it with `identity`: SHORT_COPY, CHECKSUM_MISMATCH,
        IDENTITY_MISMATCH, DEADLINE. Nothing is published before this passed."""

    def publish(self, ref: SlotRef) -> None:
        """Makes a validated slot readable."""
        self.slots.advance(ref, SlotState.PUBLISHED, SlotState.VALIDATED)

    def quarantine(self, ref: SlotRef) -> None:
        """Takes a slot out of use while bytes may still arrive in it; `release` ends that."""
        self.slots.advance(ref, SlotState.QUARANTINED)

    def arriving(self, ref: SlotRef) -> bool:
        """Whether bytes of a `write` that ended with DEADLINE may still arrive in the slot."""
        return False

    def release(self, ref: SlotRef) -> None:
        """Ends this life of the slot. RECYCLED_DESTINATION when it is another's by now."""
        self.slots.release(ref)

    def close(self) -> None:
        """Gives back memory, descriptors and locks. The tier answers nothing afterwards."""
        self.condition = CONDITION_CLOSED

    def check_deadline(self, deadline: float | None) -> None:
        """DEADLINE when `deadline` (absolute seconds of `clock`) has come."""
        if deadline is not None and self.clock is not None and self.clock() >= deadline:
            raise CoreError(Reason.DEADLINE, f"tier {self.name} was asked too late", {"tier": self.name})

    # Batches of blocks, reported item by item. Storage overrides both with its own threads and queue.

    def submit_read(self, items: Sequence[TransferItem], deadline: float, sink: TransferSink) -> None:
        """Starts reading published blocks into their landings, each verified there before `done(index,
        None)`.

        QUEUE_FULL is raised before anything starts, and the sink hears nothing then. Every other error,
        DEADLINE included, is an item's: what `read` raises, told through the sink. This default runs
        inline, in order."""
        for index, item in enumerate(items):
            settle(sink, index, self._read_item, item, deadline)

    def submit_write(self, items: Sequence[TransferItem], deadline: float, sink: TransferSink) -> None:
        """Starts writing landings into reserved slots. `done(index, None)`: all bytes arrived and the slot is
        VALIDATED as `write` and `validate` would leave it, so that the caller has only to publish it.

        QUEUE_FULL is raised before anything starts. Every other error is an item's, told through the sink;
        after one, the slot is in no state to publish. This default runs inline, in order."""
        for index, item in enumerate(items):
            settle(sink, index, self._write_item, item, deadline)

    def submit_erase(self, items: Sequence[EraseItem], deadline: float, sink: TransferSink) -> None:
        """A deletion's part in this tier. `done(index, None)`: no byte of it can come back, not even after a
        crash; the slots are the caller's to release then. RECYCLED_DESTINATION. This default runs inline."""
        for index, item in enumerate(items):
            settle(sink, index, self._erase_item, item)

    def _erase_item(self, item: EraseItem) -> None:
        """Nothing but the check where what a slot held can be read by nobody once it is released."""
        if item.ref is not None:
            self.slots.check(item.ref)

    def landing(self, ref: SlotRef) -> Landing:
        """Where the slot's payload lies: `body` is exactly `layout.payload_bytes`, its address a multiple of
        4096, in place; a storage tier reads into it or writes from it. TIER_INCAPABLE without host memory;
        RECYCLED_DESTINATION for a slot of another life; NOT_VISIBLE for a free or quarantined one.

        Who fills a reserved slot through its landing says so with `filled`, then validates and publishes
        it."""
        raise CoreError(Reason.TIER_INCAPABLE, f"tier {self.name} has no memory to land in")

    def filled(self, ref: SlotRef) -> None:
        """States that all bytes of a reserved slot arrived through its landing: the slot counts as written.
        TIER_INCAPABLE, RECYCLED_DESTINATION, NOT_VISIBLE."""
        raise CoreError(Reason.TIER_INCAPABLE, f"tier {self.name} has no memory to land in")

    def _read_item(self, item: TransferItem, deadline: float) -> None:
        buffer = StagingBuffer(self.layout)
        self.read(item.ref, item.identity, buffer, deadline)
        move_bytes(item.landing.body, buffer.body)

    def _write_item(self, item: TransferItem, deadline: float) -> None:
        body = item.landing.body
        if len(body) != self.layout.payload_bytes:
            raise CoreError(
                Reason.SHORT_COPY, f"{len(body)} bytes are no payload of {self.layout.payload_bytes}"
            )
        payload = torch.frombuffer(body, dtype=torch.float32).view(self.layout.shape)
        done = self.write(item.ref, payload, item.identity, deadline)
        if done != item.identity.length:
            raise CoreError(
                Reason.SHORT_COPY,
                f"tier {self.name}: {done} of {item.identity.length} bytes arrived in slot {item.ref.slot}",
                {"tier": self.name, "slot": item.ref.slot},
            )
        self.validate(item.ref, item.identity, deadline)

    # Tiers that attention reads in place.

    def append(self, ref: SlotRef, first_row: int, k: Tensor, v: Tensor) -> None:
        """Writes rows `k`, `v` [n, Hk, d] of an open chunk. TIER_INCAPABLE unless `appendable`."""
        raise CoreError(Reason.TIER_INCAPABLE, f"tier {self.name} does not take single rows")

    def view(self, ref: SlotRef) -> Tensor:
        """The payload [2, Hk, C, d] in place. TIER_INCAPABLE unless `kernel_readable`."""
        raise CoreError(Reason.TIER_INCAPABLE, f"tier {self.name} cannot be read in place")

    # Tiers that are read through staging buffers.

    @abstractmethod
    def read(
        self, ref: SlotRef, identity: BlockIdentity, buffer: StagingBuffer, deadline: float | None = None
    ) -> None:
        """Brings a published payload into `buffer.payload` and verifies it there: CHECKSUM_MISMATCH,
        IDENTITY_MISMATCH, SHORT_COPY, RECYCLED_DESTINATION, STORAGE_UNAVAILABLE, DEADLINE. After an error the
        buffer's bytes are nobody's."""


def settle(
    sink: TransferSink, index: int, work: Callable[P, None], *args: P.args, **kwargs: P.kwargs
) -> None:
    """Runs one item inline and reports it: done with what it raised as CoreError, then drained."""
    error: CoreError | None = None
    try:
        work(*args, **kwargs)
    except CoreError as raised:
        error = raised
    sink.done(index, error)
    sink.drained(index)


class PoolTier(Tier):
    """Slots in memory that kernels read in place: the common part of GPU and CPU tiers. A subclass says
    where a slot's payload lies; it sets `pool` when that is one tensor [slots, 2, Hk, C, d]."""

    pool: Tensor

    @property
    def stride(self) -> int:
        """Bytes from one slot to the next."""
        return slot_stride(self.layout)

    @property
    def slot_bytes(self) -> int:
        return self.stride

    def payload(self, slot: int) -> Tensor:
        """The payload [2, Hk, C, d] at `slot` in place, whatever its state."""
        return self.pool[slot]

    def body(self, slot: int) -> memoryview:
        """The payload's bytes: in place in host memory, else a copy of them."""
        return tensor_bytes(self.payload(slot))

    def append(self, ref: SlotRef, first_row: int, k: Tensor, v: Tensor) -> None:
        if not self.capability.appendable:
            super().append(ref, first_row, k, v)
        self.slots.check(ref, SlotState.PUBLISHED)
        if first_row < 0 or first_row + k.shape[0] > self.layout.chunk_tokens:
            raise CoreError(Reason.FRAME_INVALID, f"rows {first_row}+{k.shape[0]} leave the chunk")
        self.layout.write_rows(self.payload(ref.slot), first_row, k, v)

    def view(self, ref: SlotRef) -> Tensor:
        if not self.capability.kernel_readable:
            return super().view(ref)
        self.slots.check(ref, SlotState.PUBLISHED)
        return self.payload(ref.slot)

    def landing(self, ref: SlotRef) -> Landing:
        if not self.host_memory:
            return super().landing(ref)
        self.slots.check(ref, SlotState.RESERVED, SlotState.WRITTEN, SlotState.VALIDATED, SlotState.PUBLISHED)
        return Landing(self.body(ref.slot))

    def filled(self, ref: SlotRef) -> None:
        if not self.host_memory:
            super().filled(ref)
        self.slots.advance(ref, SlotState.WRITTEN, SlotState.RESERVED)

    def write(
        self, ref: SlotRef, payload: Tensor, identity: BlockIdentity, deadline: float | None = None
    ) -> int:
        """One copy into the slot. The whole payload is overwritten, so that nothing of a former owner
        stays."""
        self.slots.check(ref, SlotState.RESERVED)
        self.check_deadline(deadline)
        self.payload(ref.slot).copy_(payload)
        self.slots.advance(ref, SlotState.WRITTEN, SlotState.RESERVED)
        return self.layout.payload_bytes

    def _read_item(self, item: TransferItem, deadline: float) -> None:
        """One memmove into the landing, verified there."""
        if not self.host_memory:
            super()._read_item(item, deadline)
            return
        self.slots.check(item.ref, SlotState.PUBLISHED)
        self.check_deadline(deadline)
        move_bytes(item.landing.body, self.body(item.ref.slot))
        self.verify(item.landing.body, item.identity)

    def _write_item(self, item: TransferItem, deadline: float) -> None:
        """One memmove into the slot, verified there."""
        if not self.host_memory:
            super()._write_item(item, deadline)
            return
        self.slots.check(item.ref, SlotState.RESERVED)
        self.check_deadline(deadline)
        body = self.body(item.ref.slot)
        move_bytes(body, item.landing.body)
        self.verify(body, item.identity)
        self.slots.advance(item.ref, SlotState.VALIDATED, SlotState.RESERVED)

    def validate(self, ref: SlotRef, identity: BlockIdentity, deadline: float | None = None) -> None:
        self.slots.check(ref, SlotState.WRITTEN)
        self.check_deadline(deadline)
        self.verify(self.body(ref.slot), identity)
        self.slots.advance(ref, SlotState.VALIDATED, SlotState.WRITTEN)

    def read(
        self, ref: SlotRef, identity: BlockIdentity, buffer: StagingBuffer, deadline: float | None = None
    ) -> None:
        self.slots.check(ref, SlotState.PUBLISHED)
        self.check_deadline(deadline)
        buffer.payload.copy_(self.payload(ref.slot))
        self.verify(buffer.body, identity)

    def adopt(self, ref: SlotRef) -> None:
        """Publishes a slot for an open chunk: rows appear in it under the directory's row count, and since it
        is filled in place there is no copy to validate. Zeroed first: a former owner's rows must neither leak
        nor meet a kernel as NaN in padding."""
        self.slots.check(ref, SlotState.RESERVED)
        self.payload(ref.slot).zero_()
        self.slots.advance(ref, SlotState.PUBLISHED, SlotState.RESERVED)

    def verify(self, body: memoryview, identity: BlockIdentity) -> None:
        """Compares bytes with `identity`: SHORT_COPY, CHECKSUM_MISMATCH."""
        if identity.length != self.layout.payload_bytes or len(body) != identity.length:
            raise CoreError(Reason.SHORT_COPY, f"{len(body)} bytes arrived, {identity.length} expected")
        if self.capability.checksum == "none":
            return
        if checksum("xxh3", body) != identity.checksum:
            raise CoreError(
                Reason.CHECKSUM_MISMATCH, f"chunk {identity.logical:#x} in tier {self.name} changed its bytes"
            )


def slot_stride(layout: ChunkLayout) -> int:
    """A payload's bytes rounded up to whole pages: what a slot of a memory tier takes of its budget."""
    return -(-layout.payload_bytes // PAGE) * PAGE


def seal_checksum(payload: Tensor) -> int:
    """XXH3-64 of a contiguous payload on any device: computed once, when a chunk is sealed."""
    return checksum("xxh3", tensor_bytes(payload))


def tensor_bytes(payload: Tensor) -> memoryview:
    """The bytes of a contiguous float32 tensor, without a copy when it is in CPU memory."""
    host = payload.detach()
    if host.device.type != "cpu":
        host = host.to("cpu")
    flat: NDArray[np.uint8] = host.contiguous().view(torch.uint8).numpy().reshape(-1)
    return flat.data


def slots_for(budget_bytes: int, slot_bytes: int) -> int:
    """How many whole slots a budget pays."""
    return budget_bytes // slot_bytes
