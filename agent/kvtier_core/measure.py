"""What a tier really does, measured once when it is built.

Why it exists: a declared bandwidth is a promise and plans need numbers. It must not know what is stored: it
writes and reads one spare slot. A simulated tier's numbers are a memcpy's, and its `simulated` says so.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvtier_core.errors import CoreError
from kvtier_core.tiers.base import BlockIdentity, Tier, seal_checksum
from kvtier_core.tiers.nvme import NvmeTier
from kvtier_core.tiers.staging import StagingBuffer

PROBE_BYTES = 8 << 20
MAX_ROUNDS = 64


def measure(tier: Tier, clock: Callable[[], float]) -> None:
    """Fills `tier.measured`: bytes per second of whole, verified payloads over about PROBE_BYTES. A tier that
    cannot be written keeps its condition and 0.0; it raises nothing."""
    if not tier.slots.capacity:
        return
    payload = torch.ones(tier.layout.shape, dtype=torch.float32)
    size = tier.layout.payload_bytes
    rounds = max(1, min(MAX_ROUNDS, PROBE_BYTES // size))
    identity = BlockIdentity(bytes(32), 0, 0, 0, size, seal_checksum(payload))
    buffer = StagingBuffer(tier.layout)
    written = read = 0.0
    try:
        for _ in range(rounds):
            ref = tier.reserve(0)
            try:
                started = clock()
                tier.write(ref, payload, identity)
                written += clock() - started
                tier.validate(ref, identity)
                tier.publish(ref)
                started = clock()
                tier.read(ref, identity, buffer)
                read += clock() - started
            finally:
                tier.release(ref)
        if isinstance(tier, NvmeTier):
            started = clock()
            tier.sync()
            tier.measured.probes["fsync_seconds"] = f"{clock() - started:.6f}"
    except CoreError as error:
        tier.measured.probes["error"] = error.reason.value
        return
    moved = float(rounds * size)
    tier.measured.write_bytes_per_second = moved / written if written > 0 else 0.0
    tier.measured.read_bytes_per_second = moved / read if read > 0 else 0.0
