"""The CPU tier: host memory in sealed segments, one arena a namespace, every slot on whole pages.

Why it exists: rows in host memory are attended where they lie, storage reads straight into them, and a
client may map them instead of asking for a copy. It must not know devices or files. Memory is committed as
segments are first used.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable

import torch
from torch import Tensor

from kvtier_core.errors import CoreError, Reason
from kvtier_core.layout import FLOAT_BYTES, ChunkLayout
from kvtier_core.tiers.arena import Arena, ArenaOptions, ArenaSlots, SharedSegment, SharedSlot
from kvtier_core.tiers.base import (
    DEFAULT_CAPABILITY,
    MediumKind,
    PoolTier,
    SlotRef,
    SlotState,
    TierCapability,
    slot_stride,
)
from kvtier_core.tiers.hostmemory import HostMemory, LinuxHostMemory
from kvtier_core.tiers.transfer import EraseItem

MAP_NORESERVE = 0x4000


class CpuTier(PoolTier):
    medium = MediumKind.CPU

    def __init__(
        self,
        name: str,
        layout: ChunkLayout,
        slots: int,
        *,
        capability: TierCapability | None = None,
        clock: Callable[[], float] | None = None,
        host: HostMemory | None = None,
        options: ArenaOptions | None = None,
    ) -> None:
        """NO_DESTINATION_CAPACITY when the address space for `slots` slots cannot be had."""
        size = max(1, slots * slot_stride(layout))
        try:
            # Segments are mapped as they are claimed; a budget that can never be is refused now.
            mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | MAP_NORESERVE).close()
        except (OSError, OverflowError, ValueError) as error:
            raise CoreError(
                Reason.NO_DESTINATION_CAPACITY,
                f"tier {name}: {size} bytes of host memory cannot be mapped: {error}",
                {"bytes": size},
            ) from error
        super().__init__(name, layout, capability or DEFAULT_CAPABILITY[MediumKind.CPU], slots, clock)
        self._views: dict[int, tuple[Tensor, memoryview]] = {}
        self.arena = Arena(
            name,
            slots,
            slot_stride(layout),
            host or LinuxHostMemory(),
            options or ArenaOptions(),
            self._mapped,
        )
        # On the path of every put and read; properties of the layout are computed anew each time.
        self._segment_slots = self.arena.segment_slots
        self._slot_stride, self._payload_bytes = slot_stride(layout), layout.payload_bytes
        self.slots = ArenaSlots(self.arena)
        self.measured.probes = self.arena.probes

    def _mapped(self, segment: int) -> None:
        """Views of a segment's new memory; views of its former memory keep that alive, out of anyone's
        reach."""
        memory = self.arena.memory(segment)
        size = len(memory) // self.stride
        floats = self.stride // FLOAT_BYTES
        # A frame may run in inference mode, whose tensors nobody could write afterwards.
        with torch.inference_mode(mode=False):
            flat = torch.frombuffer(memory, dtype=torch.float32, count=size * floats).view(size, floats)
            payloads = flat[:, : self.layout.floats].view(size, *self.layout.shape)
        self._views[segment] = (payloads, memoryview(memory))
        self.measured.probes["arena_aligned"] = str(payloads.data_ptr() % 4096 == 0).lower()

    def payload(self, slot: int) -> Tensor:
        segment, index = divmod(slot, self.arena.segment_slots)
        try:
            return self._views[segment][0][index]
        except KeyError:
            raise self._unmapped(slot) from None

    def body(self, slot: int) -> memoryview:
        segment, index = divmod(slot, self._segment_slots)
        first = index * self._slot_stride
        try:
            return self._views[segment][1][first : first + self._payload_bytes]
        except KeyError:
            raise self._unmapped(slot) from None

    def _unmapped(self, slot: int) -> CoreError:
        return CoreError(
            Reason.STORAGE_UNAVAILABLE,
            f"tier {self.name} is closed or has not mapped slot {slot}",
            {"tier": self.name, "slot": slot},
        )

    def share(self, ref: SlotRef) -> SharedSlot:
        """Where a client that mapped the segment finds a published slot's payload, without a copy. Its bytes
        stay while the caller holds a pin; afterwards `slot_generation` has moved on. NOT_VISIBLE,
        RECYCLED_DESTINATION."""
        self.slots.check(ref, SlotState.PUBLISHED)
        segment, index = divmod(ref.slot, self.arena.segment_slots)
        return SharedSlot(
            self.arena.shared(segment), index * self.stride, self.layout.payload_bytes, ref.generation
        )

    def shared_segments(self, namespace: bytes) -> tuple[SharedSegment, ...]:
        """The arena of `namespace`: what a client maps once, before it asks for slots."""
        return self.arena.segments_of(namespace)

    def _erase_item(self, item: EraseItem) -> None:
        """Zeroes the copy, which clients may have mapped; for a namespace also its free slots, where
        evicted blocks still lie. A single block that was evicted before lies in a free slot of its own
        namespace until that slot is used again: no other namespace ever has that memory."""
        super()._erase_item(item)
        if item.ref is not None:
            self.payload(item.ref.slot).zero_()
        if item.namespace is not None:
            for slot in self.arena.free_slots(item.namespace):
                self.payload(slot).zero_()

    def close(self) -> None:
        super().close()
        self._views.clear()
        self.arena.close()
