"""How a tier on flash is to be run: sizes, bounds and where its keys come from.

Why it exists: all of it is injected, and most has a choice that fits any device. It must not know the tier.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from kvtier_core.tiers.nvme.crypto import KeyProvider
from kvtier_core.tiers.nvme.endurance import WriteBudget
from kvtier_core.tiers.nvme.pace import Pace


@dataclass(frozen=True)
class NvmeOptions:
    """threads: I/Os at a time. queue_items: blocks that may wait. spare_threads: may replace hung ones.
    run_bytes: the most that one system call moves. read_back: blocks written by `submit_write` are read again
    before they count. budget: of bytes written. pace: of bytes a second. keys: encrypt at rest under them.
    random: bytes from a CSPRNG. seek_bytes: of `TierMeasurement`, until it is measured. whole_bytes: plain
    payloads of at most so many are never read in part.
    """

    threads: int = 4
    queue_items: int = 4096
    spare_threads: int = 4
    run_bytes: int = 8 << 20
    read_back: bool = False
    budget: WriteBudget | None = None
    pace: Pace | None = None
    keys: KeyProvider | None = None
    random: Callable[[int], bytes] = os.urandom
    seek_bytes: int = 32 << 10
    whole_bytes: int = 32 << 10
