"""Lines of blocks: found by key, named by an id that no other block will have, begun and ended.

Why it exists: at ten million blocks a directory of objects is the bottleneck. A row or a block is never an
object here. It must not know bytes, tiers' insides or sessions' meaning.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier_core.directory.columns import Column
from kvtier_core.directory.ids import (
    KEY_BYTES,
    NO_LINE,
    NO_NAMESPACE,
    NO_PRODUCER,
    NO_TIER,
    ChunkState,
    ReplicaState,
    block_id,
    block_ids,
    is_block_id,
    line_of_block,
)
from kvtier_core.directory.keyindex import KeyIndex
from kvtier_core.directory.lines import LineColumns, LogicalIds
from kvtier_core.directory.replicas import AuthorityCells, ReplicaTable
from kvtier_core.errors import CoreError, Reason

DEFAULT_CAPACITY = 1 << 22
_MASK = (1 << 64) - 1
# Public columns that are stored under another name.
_STORED = {"tombstone_generation": "tombstone"}
_PUBLIC = (
    "state",
    "tier",
    "epoch",
    "namespace",
    "rows",
    "checksum",
    "producer",
    "cost",
    "last_use",
    "reuse",
    "droppable",
    "write_txn",
    "tombstone_generation",
    "readers",
    "credit",
    "recency",
)
_SEALED = int(ChunkState.SEALED)
_TOMBSTONED = int(ChunkState.TOMBSTONED)


class BlockTable:
    """Lines, each belonging to one block or session chunk from its insertion to `remove`."""

    def __init__(self, lines: int = 256, *, tiers: int = 4, capacity: int = DEFAULT_CAPACITY) -> None:
        capacity = max(lines, capacity)
        self._lines = LineColumns(capacity)
        self.replicas = ReplicaTable(tiers, capacity)
        self._index = KeyIndex(capacity, self._lines.key.raw, KEY_BYTES)
        self._chunk_index = KeyIndex(capacity, self._lines.chunk.raw, 8)
        self._keys: NDArray[np.uint64] = self._lines.key.array.view(np.uint64).reshape(
            capacity, KEY_BYTES // 8
        )
        self._states = self._lines.state.cells
        self._authority = self._lines.tier.cells
        self._epochs = self._lines.epoch.cells
        self._issued = 0
        self.directory_generation = 0
        self.capacity = capacity
        self.tiers = tiers
        columns = self.replicas.tiers
        self.slot = AuthorityCells(self._authority, tuple(item.slot for item in columns))
        self.slot_generation = AuthorityCells(
            self._authority, tuple(item.slot_generation for item in columns)
        )
        self.generation = AuthorityCells(self._authority, tuple(item.generation for item in columns))
        self.logical = LogicalIds(self.logical_of)
        self.state: NDArray[np.int8]
        self.tier: NDArray[np.int8]
        self.epoch: NDArray[np.uint32]
        self.namespace: NDArray[np.int32]
        self.rows: NDArray[np.int32]
        self.checksum: NDArray[np.uint64]
        self.producer: NDArray[np.int32]
        self.cost: NDArray[np.float32]
        self.last_use: NDArray[np.uint32]
        self.reuse: NDArray[np.uint16]
        self.droppable: NDArray[np.uint8]
        self.write_txn: NDArray[np.int64]
        self.tombstone_generation: NDArray[np.int64]
        self.readers: NDArray[np.int32]
        self.credit: NDArray[np.int64]
        self.recency: NDArray[np.int64]
        self._window = 0
        self.kept = 0
        """Blocks that may not be lost, from the first step of their store until they are forgotten."""
        self._show(max(1, lines))

    def __len__(self) -> int:
        return self._lines.live

    def cells(self, name: str) -> memoryview[Any]:
        """A public column as single numbers, over its whole length: for paths that are short."""
        column: Column = getattr(self._lines, _STORED.get(name, name))
        return column.cells

    @property
    def used(self) -> int:
        """Lines [0, used) have been in use; scans end there."""
        return self._lines.used

    def _show(self, lines: int) -> None:
        """Lets the public columns reach over [0, lines). The same memory as before: a view taken earlier
        stays true, it is only shorter."""
        self._window = min(self.capacity, lines)
        for name in _PUBLIC:
            column: NDArray[Any] = getattr(self._lines, _STORED.get(name, name)).array
            setattr(self, name, column[: self._window])

    def issue_generation(self) -> int:
        """A replica generation that no other copy of any block has or will have."""
        self._issued += 1
        return self._issued

    # Lookup.

    def find(self, key: bytes) -> int:
        """The line of a block, NO_LINE when there is none or it is tombstoned. Not yet: whether it may be
        read."""
        line = self._index.find(int.from_bytes(key[:8], "little"), key)
        return NO_LINE if line >= 0 and self._states[line] == _TOMBSTONED else line

    def locate(self, key: bytes) -> int:
        """The line of a block even if it is tombstoned: for deletion and for explaining a miss."""
        return self._index.find(int.from_bytes(key[:8], "little"), key)

    def find_many(self, keys: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Lines of keys [n, 32], as `find`."""
        words = key_words(keys)
        lines = self._index.find_many(words[:, 0], words)
        lines[self._lines.state.array[lines] == _TOMBSTONED] = NO_LINE
        return lines

    def published_prefix(self, keys: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Lines of the leading keys [n, 32] that may be read: sealed, with an authoritative published
        copy."""
        words = key_words(keys)
        lines = self._index.find_many(words[:, 0], words)
        readable = (
            (lines >= 0) & (self._lines.state.array[lines] == _SEALED) & (self._lines.tier.array[lines] >= 0)
        )
        return lines[: len(lines) if readable.all() else int(readable.argmin())]

    def prefix(self, keys: NDArray[np.uint8]) -> int:
        """How many leading keys of [n, 32] are present and published."""
        return len(self.published_prefix(keys))

    def readable(self, line: int) -> bool:
        """Whether a lookup may serve this line: sealed, not tombstoned, with a published authoritative
        copy."""
        return bool(self._states[line] == _SEALED and self._authority[line] >= 0)

    def key_of(self, line: int) -> bytes:
        self._expect(line)
        return self._lines.key.raw[line * KEY_BYTES : (line + 1) * KEY_BYTES]

    def logical_of(self, line: int) -> int:
        """The id of the line's occupant, or of its last one."""
        chunk = self._lines.chunk.cells[line]
        return int(chunk - 1) if chunk else block_id(line, self._lines.born.cells[line])

    def logicals_of(self, lines: NDArray[np.int64]) -> NDArray[np.int64]:
        """`logical_of` for lines [n]."""
        chunks = self._lines.chunk.array[lines]
        return np.where(chunks, chunks - 1, block_ids(lines, self._lines.born.array[lines]))

    def line_of(self, logical: int) -> int | None:
        """Where the block or chunk of that id lives; None when it is gone, whoever has its line now."""
        if is_block_id(logical):
            line = line_of_block(logical)
            alive = line < self._lines.used and self._states[line] and self.logical_of(line) == logical
            return line if alive else None
        line = self._chunk_index.find(mix(logical + 1), (logical + 1).to_bytes(8, "little"))
        return None if line == NO_LINE else line

    # Life of a block.

    def insert_block(
        self,
        key: bytes,
        *,
        namespace: int = NO_NAMESPACE,
        rows: int = 0,
        checksum: int = 0,
        producer: int = NO_PRODUCER,
        cost: float = 0.0,
        tick: int = 0,
    ) -> int:
        """A line for a new block, SEALED and without a copy: nobody finds it readable yet. IDENTITY_MISMATCH
        when the key is there (a tombstoned one too: it must drain first), NO_DESTINATION_CAPACITY,
        BAD_ARGUMENT."""
        if len(key) != KEY_BYTES:
            raise CoreError(Reason.BAD_ARGUMENT, f"a block's key has {KEY_BYTES} bytes, not {len(key)}")
        hashed = int.from_bytes(key[:8], "little")
        there = self._index.find(hashed, key)
        if there != NO_LINE:
            state = ChunkState(self._states[there])
            raise CoreError(
                Reason.IDENTITY_MISMATCH,
                f"block {key.hex()[:16]} is in the directory already, {state.name}",
                {"line": there, "state": state.name},
            )
        columns = self._lines
        line = columns.take()
        try:
            columns.namespace.cells[line] = namespace
            columns.rows.cells[line] = rows
            columns.checksum.cells[line] = checksum
            columns.producer.cells[line] = producer
            columns.cost.cells[line] = cost
            columns.last_use.cells[line] = tick
            self._index.insert(hashed, line)
        except (ValueError, TypeError) as error:
            columns.give_back(line)
            raise CoreError(Reason.BAD_ARGUMENT, "a number of the block does not fit") from error
        except BaseException:
            columns.give_back(line)
            raise
        columns.key.raw[line * KEY_BYTES : (line + 1) * KEY_BYTES] = key
        self._begin(line)
        self._states[line] = _SEALED
        self.kept += 1
        return line

    def _begin(self, line: int) -> None:
        """What every new occupant finds: no authority, and an epoch that no former occupant had."""
        if line >= self._window:
            self._show(max(line + 1, self._window * 2))
        columns = self._lines
        columns.tier.cells[line] = NO_TIER
        epoch = columns.epoch.cells[line] + 1
        columns.epoch.cells[line] = epoch
        columns.born.cells[line] = epoch
        columns.reuse.cells[line] = 0
        self.directory_generation += 1

    def restore_blocks(
        self,
        keys: NDArray[np.uint8],
        *,
        tier: int,
        slots: NDArray[np.int64],
        slot_generations: NDArray[np.int64],
        namespaces: NDArray[np.int32] | int = NO_NAMESPACE,
        rows: NDArray[np.int32] | int = 0,
        checksums: NDArray[np.uint64] | int = 0,
        producers: NDArray[np.int32] | int = NO_PRODUCER,
        costs: NDArray[np.float32] | float = 0.0,
        generations: NDArray[np.int64] | None = None,
        droppable: NDArray[np.uint8] | int = 0,
        tick: int = 0,
    ) -> NDArray[np.int64]:
        """Inserts n blocks at once, keys [n, 32], each with one published authoritative copy in `tier`: what
        recovery found. generations: of the copies, as they were when the copies were written; None issues new
        ones. Returns their lines. All or nothing: IDENTITY_MISMATCH when a key is there or repeats,
        NO_DESTINATION_CAPACITY, BAD_ARGUMENT for a number that does not fit or an array of another length."""
        words = key_words(keys)
        count = len(words)
        if count == 0:
            return np.zeros(0, dtype=np.int64)
        ordered = np.sort(np.ascontiguousarray(keys).view("V32").ravel())
        if (self._index.find_many(words[:, 0], words) >= 0).any() or (ordered[1:] == ordered[:-1]).any():
            raise CoreError(Reason.IDENTITY_MISMATCH, "a restored block is in the directory already")
        columns = self._lines
        if columns.used + count > columns.capacity:
            raise columns.full(count)
        if generations is None:
            generations = np.arange(self._issued + 1, self._issued + 1 + count)
        copies = self.replicas.of(tier)
        given = [
            (column.array, fitting(value, column.array.dtype, count))
            for column, value in (
                (columns.namespace, namespaces),
                (columns.rows, rows),
                (columns.checksum, checksums),
                (columns.producer, producers),
                (columns.cost, costs),
                (columns.last_use, tick),
                (columns.droppable, droppable),
                (copies.slot, slots),
            )
        ]
        lives = [fitting(value, np.dtype(np.int64), count) for value in (slot_generations, generations)]
        if min(int(life.min()) for life in lives) < 0:
            raise CoreError(Reason.BAD_ARGUMENT, "a negative generation")
        lines = np.arange(columns.used, columns.used + count, dtype=np.int64)
        self._index.insert_many(words[:, 0], lines)
        first = columns.take_new(count)
        span = slice(first, first + count)
        if span.stop > self._window:
            self._show(max(span.stop, self._window * 2))
        self._keys[span] = words
        for array, values in given:
            array[span] = values
        for column, number in (
            (columns.tier, tier),
            (columns.epoch, 1),
            (columns.born, 1),
            (columns.state, _SEALED),
        ):
            column.array[span] = number
        copies.slot_generation.fill(first, lives[0])
        copies.generation.fill(first, lives[1])
        self._issued = max(self._issued, int(generations.max()))
        copies.stamp.array[span] = 1
        copies.state.array[span] = ReplicaState.PUBLISHED
        self.replicas.counts[tier] += count
        self.kept += int((columns.droppable.array[span] == 0).sum())
        self.directory_generation += 1
        return lines

    def tombstone(self, line: int) -> int:
        """From here lookups refuse the line and nothing can be published on it. Returns the tombstone's
        generation; a second call returns the same."""
        self._expect(line)
        cells = self._lines.tombstone.cells
        if self._states[line] != _TOMBSTONED:
            self._states[line] = _TOMBSTONED
            cells[line] = self.issue_generation()
            self.directory_generation += 1
        return int(cells[line])

    def tombstone_many(self, lines: NDArray[np.int64]) -> int:
        """`tombstone` for lines [n], each named once. Returns the last of their generations, 0 for no lines.
        MISS when a line holds no block; nothing has changed then."""
        if not len(lines):
            return 0
        self._expect_all(lines)
        column = self._lines.tombstone.array
        fresh = lines[self._lines.state.array[lines] != _TOMBSTONED]
        self._lines.state.array[fresh] = _TOMBSTONED
        column[fresh] = np.arange(self._issued + 1, self._issued + 1 + len(fresh))
        self._issued += len(fresh)
        self.directory_generation += len(fresh)
        return int(column[lines].max())

    def remove(self, line: int) -> None:
        """Forgets the line. A block's must hold no copy (SURVIVAL_VIOLATION), no reader (LEASES_HELD) and no
        open transaction (WRITE_TXN_BUSY); a session's chunk goes as it is, unless a copy is leased
        (LEASES_HELD)."""
        self._expect(line)
        chunk = self._lines.chunk.cells[line]
        if chunk:
            self.replicas.clear_all(line)
            self._chunk_index.remove(mix(chunk), line)
        else:
            self._expect_idle(line)
            held = self.replicas.held_in(line)
            if held:
                raise CoreError(
                    Reason.SURVIVAL_VIOLATION,
                    f"line {line} still has copies in tiers {', '.join(map(str, held))}",
                    {"line": line},
                )
            key = self.key_of(line)
            self._index.remove(int.from_bytes(key[:8], "little"), line)
            self.kept -= not self._lines.droppable.cells[line]
        self._lines.give_back(line)
        self.directory_generation += 1

    def _expect(self, line: int) -> None:
        if line < 0 or line >= self._lines.used or not self._states[line]:
            raise CoreError(Reason.MISS, f"line {line} holds no block")

    def _expect_all(self, lines: NDArray[np.int64]) -> None:
        if int(lines.min()) < 0 or int(lines.max()) >= self._lines.used:
            raise CoreError(Reason.MISS, "a line that was never used holds no block")
        empty = lines[self._lines.state.array[lines] == ChunkState.FREE]
        if len(empty):
            raise CoreError(Reason.MISS, f"line {empty[0]} holds no block")

    def _expect_idle(self, line: int) -> None:
        if self._lines.readers.cells[line]:
            raise CoreError(Reason.LEASES_HELD, f"{self._lines.readers.cells[line]} readers hold line {line}")
        if self._lines.write_txn.cells[line]:
            raise CoreError(
                Reason.WRITE_TXN_BUSY, f"transaction {self._lines.write_txn.cells[line]} holds line {line}"
            )


def mix(number: int) -> int:
    """Spreads a 64-bit number over 64 bits (the finalizer of splitmix64)."""
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


def key_words(keys: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Keys [n, 32] bytes as [n, 4] words; a key's first word is its hash. BAD_ARGUMENT for another shape."""
    if keys.dtype != np.uint8 or keys.ndim != 2 or keys.shape[1] != KEY_BYTES:
        raise CoreError(Reason.BAD_ARGUMENT, f"keys are uint8 [n, 32], not {keys.dtype} {keys.shape}")
    return np.ascontiguousarray(keys).view(np.uint64)


def fitting(value: Any, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    """`value`, one number or [count], as an array that a column of `dtype` takes without loss of range.
    BAD_ARGUMENT."""
    array = np.asarray(value)
    if array.shape not in ((), (count,)):
        raise CoreError(Reason.BAD_ARGUMENT, f"{array.shape} numbers for {count} blocks")
    if dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        if int(array.min()) < bounds.min or int(array.max()) > bounds.max:
            raise CoreError(Reason.BAD_ARGUMENT, f"a number does not fit {dtype.name}")
    return np.broadcast_to(array, (count,))
