"""Pages of blocks that selections read from storage again and again, kept in memory for the next step.

Why it exists: a selector's choice changes little from token to token. What was read and verified once is not
read again while it is hot. A unit is a page of one KV head, its K and its V: what one list of a selection
takes of a block. Blocks are known by their identity, checksum included, so that no other bytes can be taken
for them. It must not know selections.

Which unit goes when another comes: bucketed least recently used (selectors_kernels 1.15).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtier_core.layout import FLOAT_BYTES, ChunkLayout
from kvtier_core.tiers.segments import PAGE_ROWS
from kvtier_core.tiers.slots import BlockIdentity
from kvtier_core.tiers.staging import PAGE
from kvtier_kernels.ops.bucket_lru import bucket_lru

HOT_BYTES = 64 << 20
"""What the hot units of one engine may take; what finds them comes on top."""
MOST_WANTED = 4096
"""Units of one selection that are looked up; more are read as if none were hot."""
MOST_BLOCKS = 1024
"""Blocks that they may be of."""
_SLOT_BYTES = 4 + 2 + 1 + 1
"""Of a slot: the unit in it, its age, whether it is pinned, whether it is ready."""
Units = NDArray[np.int64]


class UnitGrid:
    """How a block of one layout is cut into units: `rows` of one KV head each, a page of storage or somewhat
    more. Unit head * pages + page of a block."""

    def __init__(self, layout: ChunkLayout) -> None:
        rows = PAGE_ROWS
        while rows * layout.head_dim * FLOAT_BYTES < PAGE:
            rows *= 2
        self.layout = layout
        self.rows = math.gcd(layout.chunk_tokens, rows)
        self.pages = layout.chunk_tokens // self.rows
        self.per_block = layout.kv_heads * self.pages
        self.unit_bytes = layout.payload_bytes // self.per_block

    def of_rows(self, lists: Sequence[NDArray[np.int64]]) -> dict[int, Units]:
        """The units that hold rows of the lists, one a KV head, by chunk; ascending."""
        pages = [np.unique(rows // self.rows) for rows in lists]
        chunks = np.concatenate([page // self.pages for page in pages])
        units = np.concatenate([head * self.pages + page % self.pages for head, page in enumerate(pages)])
        order = np.argsort(chunks, kind="stable")
        found, starts = np.unique(chunks[order], return_index=True)
        parts = np.split(units[order], starts[1:]) if len(found) else []
        return dict(zip(found.tolist(), parts, strict=True))

    def spans(self, units: Units) -> tuple[tuple[int, int], ...]:
        """Bytes [first, last) of a payload in which the units lie, ascending and apart."""
        if not len(units):
            return ()
        cuts = np.flatnonzero(np.diff(units) != 1) + 1
        first, last = units[np.r_[0, cuts]], units[np.r_[cuts - 1, len(units) - 1]] + 1
        half = self.unit_bytes // 2
        keys = [(int(low) * half, int(high) * half) for low, high in zip(first, last, strict=True)]
        values = self.layout.payload_bytes // 2
        found = [*keys, *((low + values, high + values) for low, high in keys)]
        middle = len(keys)
        if found[middle - 1][1] == found[middle][0]:
            found[middle - 1 : middle + 1] = [(found[middle - 1][0], found[middle][1])]
        return tuple(found)

    def view(self, payload: Tensor) -> NDArray[np.float32]:
        """[2, units, floats of a half] over a payload [2, Hk, C, d] in place."""
        found: NDArray[np.float32] = payload.numpy().reshape(2, self.per_block, -1)
        return found


class HotUnits:
    """One engine's; its lock is held. Memory is taken when a first unit comes."""

    def __init__(
        self,
        grid: UnitGrid,
        take: Callable[[int], bool],
        give: Callable[[int], None],
        limit: int = HOT_BYTES,
    ) -> None:
        """take: whether so many bytes may be held, all in all; give: back what was taken."""
        self.grid = grid
        self._take, self._give = take, give
        self._slots = limit // grid.unit_bytes
        self._memory: NDArray[np.float32] | None = None
        self._refused = self._slots < 1
        self._number_of: dict[BlockIdentity, int] = {}

    def _allocate(self) -> None:
        blocks, slots = self._slots + MOST_BLOCKS, self._slots
        self._names: list[BlockIdentity | None] = [None] * blocks
        self._free = list(range(blocks - 1, -1, -1))
        self._held = np.zeros(blocks, dtype=np.int64)
        self._ready = np.zeros(slots, dtype=np.bool_)
        # What outlives the frame that asks first must not have its mode.
        with torch.inference_mode(mode=False):
            self._slot_tok = torch.full((1, slots), -1, dtype=torch.int32)
            self._age = torch.zeros(1, slots, dtype=torch.int16)
            self._loc = torch.full((1, blocks * self.grid.per_block), -1, dtype=torch.int32)
            self._pin = torch.zeros(1, slots, dtype=torch.bool)
            self._epoch = torch.zeros(1, dtype=torch.int32)
        self._memory = np.empty((slots, 2, self.grid.unit_bytes // (2 * FLOAT_BYTES)), dtype=np.float32)

    def _bytes(self) -> int:
        """Of all that `_allocate` makes."""
        blocks = self._slots + MOST_BLOCKS
        return self._slots * (self.grid.unit_bytes + _SLOT_BYTES) + blocks * (8 + 4 * self.grid.per_block) + 4

    @property
    def held_bytes(self) -> int:
        return 0 if self._memory is None else self._bytes()

    def find(self, wanted: Sequence[tuple[BlockIdentity, Units]]) -> list[Units]:
        """For each unit the slot in which it is hot, -1 where it is not; slots stay until the next `find`.
        Those that are not hot have a place now, for `keep`. Each block and each of its units once."""
        sizes = [len(units) for _, units in wanted]
        total = sum(sizes)
        if not total or total > MOST_WANTED or len(wanted) > MOST_BLOCKS or not self._there():
            return [np.full(size, -1, dtype=np.int64) for size in sizes]
        numbers = np.array([self._number(identity) for identity, _ in wanted], dtype=np.int64)
        names = np.repeat(numbers * self.grid.per_block, sizes) + np.concatenate([one for _, one in wanted])
        self._epoch += 1
        found = bucket_lru(
            torch.from_numpy(names.astype(np.int32))[None],
            self._slot_tok,
            self._age,
            self._loc,
            self._pin,
            self._epoch,
        )
        missing = int(found.n_miss[0])
        victims, fresh, gone = (
            one[0, :missing].numpy().astype(np.int64) for one in (found.victim, found.miss, found.evicted)
        )
        placed = victims >= 0
        self._ready[victims[placed]] = False
        gone = gone[placed & (gone >= 0)] // self.grid.per_block
        np.add.at(self._held, fresh[placed] // self.grid.per_block, 1)
        np.subtract.at(self._held, gone, 1)
        for number in np.unique(np.concatenate([gone, numbers])).tolist():
            if not self._held[number]:
                self._forget(number)
        slots = found.hit_slot[0].numpy().astype(np.int64)
        slots = np.where((slots >= 0) & self._ready[slots], slots, -1)
        return np.split(slots, np.cumsum(sizes)[:-1])

    def put(self, payload: Tensor, units: Units, slots: Units) -> None:
        """Copies hot units to where they lie in a payload [2, Hk, C, d]."""
        assert self._memory is not None
        self.grid.view(payload)[:, units] = self._memory[slots].swapaxes(0, 1)

    def keep(self, identity: BlockIdentity, units: Units, payload: Tensor) -> None:
        """Copies verified units of a payload to the places that `find` gave them; nothing without one."""
        number = self._number_of.get(identity)
        if number is None or self._memory is None:
            return
        slots = self._loc[0].numpy()[number * self.grid.per_block + units]
        mine = slots >= 0
        self._memory[slots[mine]] = self.grid.view(payload)[:, units[mine]].swapaxes(0, 1)
        self._ready[slots[mine]] = True

    def close(self) -> None:
        if self._memory is not None:
            self._give(self.held_bytes)
            self._memory = None
        self._number_of.clear()
        self._refused = True

    def _there(self) -> bool:
        if self._memory is None and not self._refused:
            self._refused = not self._take(self._bytes())
            if not self._refused:
                self._allocate()
        return self._memory is not None

    def _number(self, identity: BlockIdentity) -> int:
        number = self._number_of.get(identity)
        if number is None:
            number = self._free.pop()
            self._number_of[identity], self._names[number] = number, identity
        return number

    def _forget(self, number: int) -> None:
        identity = self._names[number]
        assert identity is not None
        del self._number_of[identity]
        self._names[number] = None
        self._free.append(number)
