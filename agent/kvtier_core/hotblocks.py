"""Blocks that selections read from storage again and again, kept in memory for the next step.

Why it exists: a selector's choice changes little from token to token, and storage gives a block only as a
whole, since it is verified as a whole. What was verified once is not read again while it is hot. Blocks are
known by their identity, checksum included, so that no other bytes can be taken for them. It must not know
selections.

Which block goes when another comes: bucketed least recently used (selectors_kernels 1.15).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvtier_core.layout import ChunkLayout
from kvtier_core.tiers.slots import BlockIdentity
from kvtier_kernels.ops.bucket_lru import bucket_lru

HOT_BYTES = 64 << 20
"""What the hot blocks of one engine may take."""
MOST_WANTED = 1024
"""Blocks of one selection that are looked up; more are read as if none were hot."""


class HotBlocks:
    """One engine's; its lock is held. Memory is taken when a first block comes."""

    def __init__(
        self,
        layout: ChunkLayout,
        take: Callable[[int], bool],
        give: Callable[[int], None],
        limit: int = HOT_BYTES,
    ) -> None:
        """take: whether so many bytes may be held; give: back what was taken."""
        self._layout = layout
        self._take, self._give = take, give
        self._slots = limit // layout.payload_bytes
        self._payloads: Tensor | None = None
        self._refused = self._slots < 1
        units = self._slots + MOST_WANTED
        self._unit_of: dict[BlockIdentity, int] = {}
        self._names: list[BlockIdentity | None] = [None] * units
        self._free = list(range(units - 1, -1, -1))
        self._ready = [False] * self._slots
        self._slot_tok = torch.full((1, max(1, self._slots)), -1, dtype=torch.int32)
        self._age = torch.zeros(1, max(1, self._slots), dtype=torch.int16)
        self._loc = torch.full((1, units), -1, dtype=torch.int32)
        self._pin = torch.zeros(1, max(1, self._slots), dtype=torch.bool)
        self._epoch = torch.zeros(1, dtype=torch.int32)

    @property
    def held_bytes(self) -> int:
        return 0 if self._payloads is None else self._payloads.numel() * self._payloads.element_size()

    def find(self, wanted: Sequence[BlockIdentity]) -> list[Tensor | None]:
        """The payload [2, Hk, C, d] of each block that is hot, in memory that stays until the next `find`;
        the others have a place now, for `keep`. wanted: each once."""
        if not wanted or len(wanted) > MOST_WANTED or not self._there():
            return [None] * len(wanted)
        units = []
        for identity in wanted:
            unit = self._unit_of.get(identity)
            if unit is None:
                unit = self._free.pop()
                self._unit_of[identity], self._names[unit] = unit, identity
            units.append(unit)
        self._epoch += 1
        want = torch.tensor([units], dtype=torch.int32)
        found = bucket_lru(want, self._slot_tok, self._age, self._loc, self._pin, self._epoch)
        for at in range(int(found.n_miss[0])):
            slot, evicted = int(found.victim[0, at]), int(found.evicted[0, at])
            if slot < 0:
                self._forget(int(found.miss[0, at]))
                continue
            self._ready[slot] = False
            if evicted >= 0:
                self._forget(evicted)
        assert self._payloads is not None
        slots = found.hit_slot[0].tolist()
        return [self._payloads[slot] if slot >= 0 and self._ready[slot] else None for slot in slots]

    def keep(self, identity: BlockIdentity, payload: Tensor) -> None:
        """Copies a verified payload to the place that `find` gave to its block; nothing without one."""
        unit = self._unit_of.get(identity)
        slot = -1 if unit is None else int(self._loc[0, unit])
        if slot >= 0 and self._payloads is not None:
            self._payloads[slot].copy_(payload.view_as(self._payloads[slot]))
            self._ready[slot] = True

    def close(self) -> None:
        if self._payloads is not None:
            self._give(self.held_bytes)
            self._payloads = None
        self._refused = True

    def _there(self) -> bool:
        if self._payloads is None and not self._refused:
            layout = self._layout
            shape = (self._slots, 2, layout.kv_heads, layout.chunk_tokens, layout.head_dim)
            self._refused = not self._take(self._slots * layout.payload_bytes)
            if not self._refused:
                self._payloads = torch.empty(shape, dtype=torch.float32)
        return self._payloads is not None

    def _forget(self, unit: int) -> None:
        identity = self._names[unit]
        assert identity is not None
        del self._unit_of[identity]
        self._names[unit] = None
        self._free.append(unit)
