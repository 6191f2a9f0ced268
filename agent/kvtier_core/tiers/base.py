"""The Tier contract: reserve, write, validate, publish, read, release, each under a slot generation.

Why it exists: a path is legal because a capability record says so, and a late or repeated call must meet a
generation that has moved on, so that a recycled slot can never answer for its former owner. It must not know
sessions, layers or attention.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtier_core.checksums import checksum
from kvtier_core.errors import CoreError, Reason
from kvtier_core.layout import CODEC_IDENTITY, LAYOUT_ID, ChunkLayout
from kvtier_core.tiers.staging import StagingBuffer


class MediumKind(StrEnum):
    GPU = "gpu"
    CPU = "cpu"
    NVME = "nvme"


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
    then the tier is simulated). `capability` None: the medium's default."""

    class_name: str
    medium: MediumKind
    folder: Path | None = None
    cuda_index: int | None = None
    capability: TierCapability | None = None
    o_direct: bool = True


@dataclass(frozen=True, slots=True)
class SlotRef:
    """A slot at one of its lives. Every call on a slot carries both numbers."""

    slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class BlockIdentity:
    """What a copy must be to be believed: checked against the bytes, not against the request.

    checksum: XXH3-64 of the payload at sealing, whatever a tier adds of its own."""

    chunk_digest: bytes
    logical: int
    replica_generation: int
    rows: int
    length: int
    checksum: int


class SlotState(IntEnum):
    FREE = 0
    RESERVED = 1
    WRITTEN = 2
    VALIDATED = 3
    PUBLISHED = 4
    QUARANTINED = 5


class SlotTable:
    """Generations and owners of a tier's slots. A released slot is a different slot from then on."""

    def __init__(self, slots: int) -> None:
        self.capacity = slots
        self._generation = np.zeros(slots, dtype=np.int64)
        self._owner = np.zeros(slots, dtype=np.int64)
        self._state = np.zeros(slots, dtype=np.int8)
        self._free = list(range(slots - 1, -1, -1))

    @property
    def used(self) -> int:
        return self.capacity - len(self._free)

    def reserve(self, owner: int) -> SlotRef:
        if not self._free:
            raise CoreError(
                Reason.NO_DESTINATION_CAPACITY,
                f"all {self.capacity} slots are taken",
                {"capacity_slots": self.capacity},
            )
        slot = self._free.pop()
        self._owner[slot] = owner
        self._state[slot] = SlotState.RESERVED
        return SlotRef(slot, int(self._generation[slot]))

    def check(self, ref: SlotRef, *legal: SlotState) -> None:
        """RECYCLED_DESTINATION when the slot lives another life; NOT_VISIBLE when it is in no legal state."""
        if not 0 <= ref.slot < self.capacity or int(self._generation[ref.slot]) != ref.generation:
            raise CoreError(
                Reason.RECYCLED_DESTINATION,
                f"slot {ref.slot} is no longer of generation {ref.generation}",
                {"slot": ref.slot, "generation": ref.generation},
            )
        state = SlotState(int(self._state[ref.slot]))
        if legal and state not in legal:
            raise CoreError(
                Reason.NOT_VISIBLE,
                f"slot {ref.slot} is {state.name}, not {' or '.join(item.name for item in legal)}",
                {"slot": ref.slot, "state": state.name},
            )

    def generation(self, slot: int) -> int:
        return int(self._generation[slot])

    def owner(self, ref: SlotRef) -> int:
        self.check(ref)
        return int(self._owner[ref.slot])

    def state(self, ref: SlotRef) -> SlotState:
        self.check(ref)
        return SlotState(int(self._state[ref.slot]))

    def set_state(self, ref: SlotRef, state: SlotState) -> None:
        self._state[ref.slot] = state

    def release(self, ref: SlotRef) -> None:
        """Ends the slot's life: its generation moves on before anyone else can have it."""
        self.check(ref)
        if SlotState(int(self._state[ref.slot])) is SlotState.FREE:
            raise CoreError(Reason.RECYCLED_DESTINATION, f"slot {ref.slot} is free already")
        self._generation[ref.slot] += 1
        self._state[ref.slot] = SlotState.FREE
        self._owner[ref.slot] = 0
        self._free.append(ref.slot)


@dataclass(slots=True)
class TierMeasurement:
    """Bytes per second as measured at start; 0.0: not measured. Probes are small facts by name."""

    read_bytes_per_second: float = 0.0
    write_bytes_per_second: float = 0.0
    probes: dict[str, str] = field(default_factory=dict)


CONDITION_READY = "Ready"


class Tier(ABC):
    """One tier of one engine. host_memory: its views can be read by the CPU.

    Single-threaded: the engine's lock is held around every call but `read`, which may run on a reader thread
    against slots that hold a read lease."""

    name: str
    medium: MediumKind
    simulated: bool = False
    host_memory: bool = True

    def __init__(self, name: str, layout: ChunkLayout, capability: TierCapability, slots: int) -> None:
        self.name = name
        self.layout = layout
        self.capability = capability
        self.slots = SlotTable(slots)
        self.measured = TierMeasurement()
        self.condition = CONDITION_READY
        self.pinned_bytes = 0

    @property
    @abstractmethod
    def slot_bytes(self) -> int:
        """What one slot costs of the budget: payload, header and alignment."""

    @property
    def used_bytes(self) -> int:
        return self.slots.used * self.slot_bytes

    def reserve(self, owner: int) -> SlotRef:
        """A slot that nobody can read yet. NO_DESTINATION_CAPACITY, STORAGE_UNAVAILABLE."""
        return self.slots.reserve(owner)

    @abstractmethod
    def write(self, ref: SlotRef, payload: Tensor, identity: BlockIdentity) -> int:
        """Writes a whole payload [2, Hk, C, d] into a reserved slot; returns the bytes that arrived."""

    @abstractmethod
    def validate(self, ref: SlotRef, identity: BlockIdentity) -> None:
        """Reads back what lies in the slot and compares it with `identity`: SHORT_COPY, CHECKSUM_MISMATCH,
        IDENTITY_MISMATCH. Nothing is published before this passed."""

    def publish(self, ref: SlotRef) -> None:
        """Makes a validated slot readable."""
        self.slots.check(ref, SlotState.VALIDATED)
        self.slots.set_state(ref, SlotState.PUBLISHED)

    def quarantine(self, ref: SlotRef) -> None:
        """Takes a slot out of use while bytes may still arrive in it; `release` ends that."""
        self.slots.check(ref)
        self.slots.set_state(ref, SlotState.QUARANTINED)

    def release(self, ref: SlotRef) -> None:
        """Ends this life of the slot. RECYCLED_DESTINATION when it is another's by now."""
        self.slots.release(ref)

    def close(self) -> None:
        """Gives back memory, descriptors and locks. The tier answers nothing afterwards."""
        self.condition = "Closed"

    # Tiers that attention reads in place.

    def append(self, ref: SlotRef, first_row: int, k: Tensor, v: Tensor) -> None:
        """Writes rows `k`, `v` [n, Hk, d] of an open chunk. TIER_INCAPABLE unless `appendable`."""
        raise CoreError(Reason.TIER_INCAPABLE, f"tier {self.name} does not take single rows")

    def view(self, ref: SlotRef) -> Tensor:
        """The payload [2, Hk, C, d] in place. TIER_INCAPABLE unless `kernel_readable`."""
        raise CoreError(Reason.TIER_INCAPABLE, f"tier {self.name} cannot be read in place")

    # Tiers that are read through staging buffers.

    @abstractmethod
    def read(self, ref: SlotRef, identity: BlockIdentity, buffer: StagingBuffer) -> None:
        """Brings a published payload into `buffer.payload` and verifies it there: CHECKSUM_MISMATCH,
        IDENTITY_MISMATCH, SHORT_COPY, RECYCLED_DESTINATION, STORAGE_UNAVAILABLE. After an error the buffer's
        bytes are nobody's."""


class PoolTier(Tier):
    """Slots as one tensor [slots, 2, Hk, C, d]: the common part of GPU and CPU tiers."""

    def __init__(
        self, name: str, layout: ChunkLayout, capability: TierCapability, slots: int, pool: Tensor
    ) -> None:
        super().__init__(name, layout, capability, slots)
        self.pool = pool

    @property
    def slot_bytes(self) -> int:
        return self.layout.payload_bytes

    def reserve(self, owner: int) -> SlotRef:
        ref = super().reserve(owner)
        # A former owner's rows must neither leak nor meet a kernel as NaN in padding.
        self.pool[ref.slot].zero_()
        return ref

    def append(self, ref: SlotRef, first_row: int, k: Tensor, v: Tensor) -> None:
        if not self.capability.appendable:
            super().append(ref, first_row, k, v)
        self.slots.check(ref, SlotState.PUBLISHED)
        if first_row < 0 or first_row + k.shape[0] > self.layout.chunk_tokens:
            raise CoreError(Reason.FRAME_INVALID, f"rows {first_row}+{k.shape[0]} leave the chunk")
        self.layout.write_rows(self.pool[ref.slot], first_row, k, v)

    def view(self, ref: SlotRef) -> Tensor:
        if not self.capability.kernel_readable:
            return super().view(ref)
        self.slots.check(ref, SlotState.PUBLISHED)
        return self.pool[ref.slot]

    def write(self, ref: SlotRef, payload: Tensor, identity: BlockIdentity) -> int:
        self.slots.check(ref, SlotState.RESERVED)
        self.pool[ref.slot].copy_(payload)
        self.slots.set_state(ref, SlotState.WRITTEN)
        return self.layout.payload_bytes

    def validate(self, ref: SlotRef, identity: BlockIdentity) -> None:
        self.slots.check(ref, SlotState.WRITTEN)
        self._verify(self.pool[ref.slot], identity)
        self.slots.set_state(ref, SlotState.VALIDATED)

    def read(self, ref: SlotRef, identity: BlockIdentity, buffer: StagingBuffer) -> None:
        self.slots.check(ref, SlotState.PUBLISHED)
        buffer.payload.copy_(self.pool[ref.slot])
        self._verify(buffer.payload, identity)

    def adopt(self, ref: SlotRef) -> None:
        """Publishes a slot for an open chunk: rows appear in it under the directory's row count, and since it
        is filled in place there is no copy to validate."""
        self.slots.check(ref, SlotState.RESERVED)
        self.slots.set_state(ref, SlotState.PUBLISHED)

    def _verify(self, payload: Tensor, identity: BlockIdentity) -> None:
        if identity.length != self.layout.payload_bytes:
            raise CoreError(
                Reason.SHORT_COPY, f"{self.layout.payload_bytes} bytes arrived, {identity.length} expected"
            )
        if self.capability.checksum == "none":
            return
        if seal_checksum(payload) != identity.checksum:
            raise CoreError(
                Reason.CHECKSUM_MISMATCH, f"chunk {identity.logical:#x} in tier {self.name} changed its bytes"
            )


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
