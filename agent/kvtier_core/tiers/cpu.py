"""The CPU tier: one preallocated arena in host memory, aligned to a page.

Why it exists: rows in host memory are attended where they lie, and one arena cannot fragment. It must not
know devices or files. Memory is reserved as address space at start and committed as slots are first used.
"""

from __future__ import annotations

import mmap

import torch

from kvtier_core.errors import CoreError, Reason
from kvtier_core.layout import ChunkLayout
from kvtier_core.tiers.base import DEFAULT_CAPABILITY, MediumKind, PoolTier, TierCapability


class CpuTier(PoolTier):
    medium = MediumKind.CPU

    def __init__(
        self, name: str, layout: ChunkLayout, slots: int, *, capability: TierCapability | None = None
    ) -> None:
        size = max(1, slots * layout.payload_bytes)
        try:
            # An anonymous map is page-aligned, which 64-byte kernels and O_DIRECT both need.
            self._arena: mmap.mmap | None = mmap.mmap(-1, size)
        except (OSError, OverflowError) as error:
            raise CoreError(
                Reason.NO_DESTINATION_CAPACITY,
                f"tier {name}: {size} bytes of host memory cannot be mapped: {error}",
                {"bytes": size},
            ) from error
        if slots:
            floats = torch.frombuffer(self._arena, dtype=torch.float32, count=slots * layout.floats)
            pool = floats.view(slots, *layout.shape)
        else:
            pool = torch.empty((0, *layout.shape), dtype=torch.float32)
        super().__init__(name, layout, capability or DEFAULT_CAPABILITY[MediumKind.CPU], slots, pool)
        self.measured.probes["arena_aligned"] = str(pool.data_ptr() % 64 == 0).lower()

    def close(self) -> None:
        super().close()
        # The map goes with its last tensor; closing it earlier would leave views of freed memory.
        self.pool = torch.empty((0, *self.layout.shape), dtype=torch.float32)
        self._arena = None
