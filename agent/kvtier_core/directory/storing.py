"""The short way of a block's first copy, and the map of what lies in memory: both are on every request's
path.

Why it exists: a put and a pinned read are a few microseconds of metadata, so the columns they touch are
written in one pass here, under the same rules as the single steps of the directory. It must not know slots,
bytes or who stores.

`resident` maps key to line for blocks whose copy in one memory tier may be read. It costs a dictionary entry
for each such block, about 160 bytes outside of the directory's columns, which that tier's slots bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier_core.directory.compiled import Word
from kvtier_core.directory.ids import KEY_BYTES, NO_TIER, ChunkState, ReplicaState
from kvtier_core.directory.keyindex import SHARD_STRIDE
from kvtier_core.directory.replicas import PUBLISHED
from kvtier_core.directory.table import DEFAULT_CAPACITY, BlockTable
from kvtier_core.errors import CoreError, Reason

_SEALED = int(ChunkState.SEALED)
_RESERVED = int(ReplicaState.RESERVED)


class StoreFacts(NamedTuple):
    """What all blocks of one store have in common. rows: of each block; cost: seconds to recompute one;
    txn: who claims the lines."""

    namespace: int
    rows: int
    producer: int
    cost: float
    droppable: bool
    tick: int
    txn: int


class StoringTable(BlockTable):
    """Lines with their first copies."""

    def __init__(self, lines: int = 256, *, tiers: int = 4, capacity: int = DEFAULT_CAPACITY) -> None:
        super().__init__(lines, tiers=tiers, capacity=capacity)
        of = self._lines
        # What each store writes, looked up once.
        self._stored = (
            of.namespace.cells,
            of.rows.cells,
            of.producer.cells,
            of.cost.cells,
            of.last_use.cells,
        )
        self._sealed = (of.checksum.cells, of.write_txn.cells, of.droppable.cells)
        self.resident_tier = NO_TIER
        self.resident: dict[bytes, int] = {}

    def keep_resident(self, tier: int) -> None:
        """Maps from now on what may be read in `tier`. Once, before or after blocks are there."""
        self.resident_tier = tier
        self.resident.clear()
        columns = self.replicas.tiers[tier]
        span = slice(0, self.used)
        found = (self._lines.state.array[span] == _SEALED) & (self._lines.chunk.array[span] == 0)
        found &= (columns.state.array[span] == PUBLISHED) & (
            columns.stamp.array[span] == self._lines.epoch.array[span]
        )
        for line in np.flatnonzero(found).tolist():
            self.resident[self.key_of(line)] = line

    def begin_store(self, key: bytes, facts: StoreFacts, tier: int, slot: int, slot_generation: int) -> int:
        """A line for a key that is not there: SEALED, claimed, its one copy RESERVED and seen by nobody.
        NO_DESTINATION_CAPACITY, BAD_ARGUMENT; nothing has changed then."""
        columns = self._lines
        line = columns.take()
        namespaces, rows, producers, costs, uses = self._stored
        try:
            namespaces[line], rows[line], producers[line], costs[line], droppable, uses[line], txn = facts
            self._index.insert(int.from_bytes(key[:8], "little"), line)
        except ValueError as error:
            columns.give_back(line)
            raise CoreError(Reason.BAD_ARGUMENT, "a number of the block does not fit") from error
        except BaseException:
            columns.give_back(line)
            raise
        columns.key.raw[line * KEY_BYTES : (line + 1) * KEY_BYTES] = key
        self._begin(line)
        checksums, txns, droppables = self._sealed
        checksums[line] = 0
        txns[line] = txn
        if droppable:
            droppables[line] = 1
        else:
            self.kept += 1
        self._states[line] = _SEALED
        self._issued += 1
        copy = self.replicas.tiers[tier]
        copy.slot.cells[line] = slot
        copy.slot_generation.cells[line] = slot_generation
        copy.generation.cells[line] = self._issued
        copy.stamp.cells[line] = 0
        copy.state.cells[line] = _RESERVED
        self.replicas.counts[tier] += 1
        return line

    def publish_store(self, line: int, tier: int, txn: int, checksum: int) -> int:
        """Makes the first copy readable, the authority, and ends the claim: one step. Returns the replica
        generation. GENERATION_NOT_OWNED when the line is another's or claimed by another, NOT_VISIBLE when it
        is tombstoned or the copy is not RESERVED; nothing has changed then."""
        checksums, txns, _ = self._sealed
        copy = self.replicas.tiers[tier]
        states = copy.state.cells
        if txns[line] != txn:
            raise CoreError(
                Reason.GENERATION_NOT_OWNED, f"line {line} is not stored by {txn}", {"line": line}
            )
        if self._states[line] != _SEALED or states[line] != _RESERVED:
            raise CoreError(Reason.NOT_VISIBLE, f"line {line} may not be published", {"line": line})
        epoch = self._epochs[line] + 1
        checksums[line] = checksum
        states[line] = PUBLISHED
        copy.stamp.cells[line] = epoch
        self._epochs[line] = epoch
        self._authority[line] = tier
        txns[line] = 0
        self.directory_generation += 1
        if tier == self.resident_tier:
            self.resident[self._lines.key.raw[line * KEY_BYTES : (line + 1) * KEY_BYTES]] = line
        return int(copy.generation.cells[line])

    def keep(self, line: int) -> None:
        """The block may not be lost any more, whoever stored it first. MISS when the line holds none."""
        self._expect(line)
        droppables = self._sealed[2]
        if droppables[line]:
            droppables[line] = 0
            self.kept += 1

    def abort_store(self, line: int, tier: int, txn: int) -> bool:
        """Forgets a first copy that is not published, and its line with it unless that is being deleted.
        False when the line is not `txn`'s: nothing has changed then."""
        columns = self._lines
        if columns.write_txn.cells[line] != txn or not self._states[line]:
            return False
        self.replicas.clear(line, tier)
        columns.write_txn.cells[line] = 0
        if self._states[line] == _SEALED:
            self.remove(line)
        return True

    # Many at a time, by machine code: see `compiled`.

    def addresses(self, tier: int) -> dict[Word, int]:
        """The words of a table that never change, for stores into `tier`."""
        lines, copies = self._lines, self.replicas.of(tier)
        columns = {
            Word.KEY: lines.key,
            Word.STATE: lines.state,
            Word.TIER: lines.tier,
            Word.EPOCH: lines.epoch,
            Word.BORN: lines.born,
            Word.NAMESPACE: lines.namespace,
            Word.ROWS: lines.rows,
            Word.CHECKSUM: lines.checksum,
            Word.PRODUCER: lines.producer,
            Word.COST: lines.cost,
            Word.LAST_USE: lines.last_use,
            Word.REUSE: lines.reuse,
            Word.DROPPABLE: lines.droppable,
            Word.WRITE_TXN: lines.write_txn,
            Word.COPY_STATE: copies.state,
            Word.COPY_SLOT: copies.slot,
            Word.COPY_STAMP: copies.stamp,
        }
        slot_generations, generations = copies.slot_generation.addresses(), copies.generation.addresses()
        entries, sizes, counts, shards = self._index.addresses()
        return {
            **{word: column.array.ctypes.data for word, column in columns.items()},
            Word.COPY_SLOT_GENERATION: slot_generations[0],
            Word.COPY_SLOT_GENERATION_HIGH: slot_generations[1],
            Word.COPY_GENERATION: generations[0],
            Word.COPY_GENERATION_HIGH: generations[1],
            Word.ENTRIES: entries,
            Word.SIZES: sizes,
            Word.COUNTS: counts,
            Word.SHARDS: shards,
            Word.STRIDE: SHARD_STRIDE,
            Word.TIER_INDEX: tier,
        }

    def ends(self) -> tuple[int, int, int, int]:
        """(FREE, USED, WINDOW, ISSUED) as a table takes them."""
        return self._lines.free, self._lines.used, self._window, self._issued

    def begun(self, count: int, tier: int, droppable: bool, free: int, used: int) -> None:
        """Takes over what machine code left of `ends` when it began `count` stores."""
        lines = self._lines
        lines.free, lines.used = free, used
        lines.live += count
        self._issued += count
        self.directory_generation += count
        self.replicas.counts[tier] += count
        if not droppable:
            self.kept += count

    def published(self, keys: Sequence[bytes], lines: Sequence[int], tier: int) -> None:
        """Takes over that machine code published these blocks' first copies."""
        self.directory_generation += len(lines)
        if tier == self.resident_tier:
            self.resident.update(zip(keys, lines, strict=True))

    def _is_resident(self, line: int, tier: int) -> None:
        """A block's copy in `tier` became readable."""
        if tier == self.resident_tier and not self._lines.chunk.cells[line]:
            self.resident[self.key_of(line)] = line

    def _not_resident(self, line: int, tier: int) -> None:
        """Its copy in `tier` is no longer readable, or the block is not."""
        if tier == self.resident_tier != NO_TIER and not self._lines.chunk.cells[line]:
            self.resident.pop(self.key_of(line), None)

    def _none_resident(self, lines: NDArray[np.int64]) -> None:
        """None of the blocks of lines [n] is readable any more."""
        if self.resident_tier == NO_TIER:
            return
        copies = self.replicas.tiers[self.resident_tier].state.array[lines]
        there = lines[(copies == PUBLISHED) & (self._lines.chunk.array[lines] == 0)]
        keys, forget = self._keys[there].tobytes(), self.resident.pop
        for at in range(0, len(keys), KEY_BYTES):
            forget(keys[at : at + KEY_BYTES], None)
