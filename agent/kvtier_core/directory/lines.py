"""The columns of lines: what a block is, who answers for it, when it was last used; free lines in a chain.

Why it exists: ten million blocks in 1.5 GiB is 161 bytes each, so every column is counted here and nowhere
else. It must not know lookups, transitions or tiers' copies.

Committed per block: 73 bytes here (81 once it was moved), its key's 32 included, besides the index and the
copies. Columns of the session engine (chunk ids, readers, credits, recency) cost memory only on lines that it
uses.
"""

from __future__ import annotations

from collections.abc import Callable

from kvtier_core.directory.columns import Column
from kvtier_core.directory.ids import KEY_BYTES, LINE_BITS, ChunkState
from kvtier_core.errors import CoreError, Reason

# A line whose epoch comes near its column's end is not used again, so no epoch and no block id ever repeats.
LAST_EPOCH = 0xF0000000


class LineColumns:
    """capacity: lines there can be. used: lines [0, used) have been used; whole-column work ends there.
    free: the first free line plus one."""

    def __init__(self, capacity: int) -> None:
        if not 0 < capacity < 1 << LINE_BITS:
            raise ValueError(f"a directory of {capacity} lines")
        self.capacity = capacity
        self.used = 0
        self.live = 0
        self.key = Column(capacity * KEY_BYTES, "uint8")
        self.state = Column(capacity, "int8")
        self.tier = Column(capacity, "int8")
        self.epoch = Column(capacity, "uint32")
        self.born = Column(capacity, "uint32")
        self.namespace = Column(capacity, "int32")
        self.rows = Column(capacity, "int32")
        self.checksum = Column(capacity, "uint64")
        self.producer = Column(capacity, "int32")
        self.cost = Column(capacity, "float32")
        self.last_use = Column(capacity, "uint32")
        self.reuse = Column(capacity, "uint16")
        self.droppable = Column(capacity, "uint8")
        self.write_txn = Column(capacity, "int64")
        self.tombstone = Column(capacity, "int64")
        self.chunk = Column(capacity, "int64")
        self.readers = Column(capacity, "int32")
        self.credit = Column(capacity, "int64")
        self.recency = Column(capacity, "int64")
        # While a line is free, `checksum` holds the next free line plus one.
        self.free = 0

    def take(self) -> int:
        """An unused line, its state still FREE. NO_DESTINATION_CAPACITY when all are in use."""
        line = self.free - 1
        if line >= 0:
            self.free = self.checksum.cells[line]
        elif self.used < self.capacity:
            line = self.used
            self.used += 1
        else:
            raise self.full(1)
        self.live += 1
        return line

    def take_new(self, count: int) -> int:
        """The first of `count` neighbouring lines that were never used. NO_DESTINATION_CAPACITY."""
        if self.used + count > self.capacity:
            raise self.full(count)
        first = self.used
        self.used += count
        self.live += count
        return first

    def give_back(self, line: int) -> None:
        """Ends a line's use: the columns that are rarely written are cleared only where they were."""
        self.state.cells[line] = ChunkState.FREE
        self.tier.cells[line] = -1
        for column in (
            self.write_txn,
            self.tombstone,
            self.droppable,
            self.chunk,
            self.readers,
            self.credit,
            self.recency,
        ):
            if column.cells[line]:
                column.cells[line] = 0
        self.live -= 1
        if self.epoch.cells[line] < LAST_EPOCH:
            self.checksum.cells[line] = self.free
            self.free = line + 1

    def full(self, wanted: int) -> CoreError:
        return CoreError(
            Reason.NO_DESTINATION_CAPACITY,
            f"the directory has {self.capacity} lines, {self.live} in use; {wanted} more wanted",
            {"capacity": self.capacity, "used": self.live},
        )


class LogicalIds:
    """The 64-bit id of each line's occupant, computed: nothing but a session's chunk stores one."""

    __slots__ = ("_of",)

    def __init__(self, of: Callable[[int], int]) -> None:
        self._of = of

    def __getitem__(self, line: int) -> int:
        return self._of(line)
