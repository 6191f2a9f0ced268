"""The GPU tier: a paged pool on the torch device, or on the CPU device as a stated simulation.

Why it exists: rows on the compute device are attended in place. It must not know kernels, streams of the
engine or who owns a chunk. Without a CUDA device the same pool lies in host memory and the tier says
`simulated`: its bandwidth is then a memcpy's, and its device kind is part of the manifest.
"""

from __future__ import annotations

import torch

from kvtier_core.errors import CoreError, Reason
from kvtier_core.layout import ChunkLayout
from kvtier_core.tiers.base import DEFAULT_CAPABILITY, MediumKind, PoolTier, TierCapability, device_pool


class GpuTier(PoolTier):
    medium = MediumKind.GPU

    def __init__(
        self,
        name: str,
        layout: ChunkLayout,
        slots: int,
        *,
        device: torch.device,
        capability: TierCapability | None = None,
    ) -> None:
        if device.type not in ("cpu", "cuda"):
            raise CoreError(
                Reason.TIER_INCAPABLE, f"a GPU tier needs a cuda or cpu device, not {device.type}"
            )
        try:
            pool = device_pool(layout, slots, device)
        except (RuntimeError, OSError, OverflowError, torch.OutOfMemoryError) as error:
            raise CoreError(
                Reason.NO_DESTINATION_CAPACITY,
                f"tier {name}: {slots * layout.payload_bytes} bytes cannot be allocated on {device}",
                {"bytes": slots * layout.payload_bytes},
            ) from error
        super().__init__(name, layout, capability or DEFAULT_CAPABILITY[MediumKind.GPU], slots)
        self.pool = pool
        self.device = device
        self.simulated = self.host_memory = device.type == "cpu"
        self.measured.probes["device"] = str(device)
