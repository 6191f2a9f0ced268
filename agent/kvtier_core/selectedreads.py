"""What a selection takes of the blocks of one plan: which pages are hot, which are read, what that cost.

Why it exists: storage gives a part of a block, memory has another from an earlier step, and attention wants
rows of one payload. Bytes of other rows in that payload are nobody's: no list names them. It must not know
how rows were chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvtier_core.arrivals import Block
from kvtier_core.hotunits import HotUnits, UnitGrid, Units
from kvtier_core.planner import STREAMED, ChunkRead, Path, Plan
from kvtier_core.promises import IdentifiedRows, block_of
from kvtier_core.tiers.slots import BlockIdentity
from kvtier_core.tiers.staging import StagingBuffer
from kvtier_core.tiers.transfer import Ranges


@dataclass(frozen=True, slots=True)
class _Part:
    """Of one sealed block. hot, slots: units that are in memory, and where; missing: those to be read."""

    identity: BlockIdentity
    hot: Units
    slots: Units
    missing: Units
    ranges: Ranges


class SelectedReads:
    """One plan over selected rows. rows: one ascending list a KV head. assembly: where the payload of a block
    that is hot as a whole is put together, one at a time."""

    def __init__(
        self,
        store: IdentifiedRows,
        grid: UnitGrid,
        hot: HotUnits | None,
        plan: Plan,
        rows: Sequence[NDArray[np.int64]],
        assembly: StagingBuffer,
    ) -> None:
        self._store = store
        self._grid = grid
        self._hot = hot
        self._assembly = assembly
        self._parts: dict[int, _Part] = {}
        self._of_block(plan, rows)
        reads = tuple(replace(read, path=Path.HOT) if self._is_hot(read) else read for read in plan.reads)
        self.plan = replace(plan, reads=reads)

    def _of_block(self, plan: Plan, rows: Sequence[NDArray[np.int64]]) -> None:
        units = self._grid.of_rows(rows)
        blocks: dict[int, BlockIdentity] = {}
        for read in plan.reads:
            identity = block_of(self._store, read.line).identity if read.path in STREAMED else None
            if identity is not None and read.chunk in units:
                blocks[read.chunk] = identity
        wanted = [(identity, units[chunk]) for chunk, identity in blocks.items()]
        if self._hot is None:
            found = [np.full(len(one), -1, dtype=np.int64) for _, one in wanted]
        else:
            found = self._hot.find(wanted)
        size = self._grid.layout.payload_bytes
        for (chunk, identity), slots in zip(blocks.items(), found, strict=True):
            mine, there = units[chunk], slots >= 0
            missing = mine[~there]
            ranges = Ranges(self._grid.spans(missing), size)
            self._parts[chunk] = _Part(identity, mine[there], slots[there], missing, ranges)

    def _is_hot(self, read: ChunkRead) -> bool:
        part = self._parts.get(read.chunk)
        return part is not None and not len(part.missing)

    @property
    def hot_bytes(self) -> int:
        return sum(len(part.hot) for part in self._parts.values()) * self._grid.unit_bytes

    def block(self, read: ChunkRead) -> Block:
        """What is to be brought of it."""
        block, part = block_of(self._store, read.line), self._parts.get(read.chunk)
        return block if part is None else replace(block, ranges=part.ranges)

    def read_bytes(self, read: ChunkRead) -> int:
        """Of a block that was brought."""
        part = self._parts.get(read.chunk)
        return self._grid.layout.payload_bytes if part is None else part.ranges.read_bytes

    def hot(self, read: ChunkRead) -> Tensor:
        """The payload of a block that need not be read; until the next call."""
        self._complete(self._parts[read.chunk], self._assembly.payload)
        return self._assembly.payload

    def arrived(self, read: ChunkRead, payload: Tensor) -> None:
        """Adds to what was brought and verified what was hot, and keeps it for the next selection."""
        part = self._parts.get(read.chunk)
        if part is None:
            return
        if self._hot is not None:
            self._hot.keep(part.identity, part.missing, payload)
        self._complete(part, payload)

    def _complete(self, part: _Part, payload: Tensor) -> None:
        if self._hot is not None and len(part.hot):
            self._hot.put(payload, part.hot, part.slots)
