"""Which chunk lives where: arrays keyed by a 64-bit logical id, one line per chunk.

Why it exists: at a million rows a directory of objects is the bottleneck, and a published location must
change in one step that readers either see or do not. A row is never an object here. It must not know bytes,
tiers' insides or sessions' meaning.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from kvtier_core.errors import CoreError, Reason

NO_TIER = -1
NO_PRODUCER = -1
_SESSION_BITS, _LAYER_BITS, _CHUNK_BITS = 27, 12, 24


class ChunkState(IntEnum):
    """FREE: the line is unused. OPEN: still takes rows. SEALED: full, may move. TOMBSTONED: being freed."""

    FREE = 0
    OPEN = 1
    SEALED = 2
    TOMBSTONED = 3


def logical_id(session: int, layer: int, chunk: int) -> int:
    """The 64-bit name of a chunk: session number, layer, chunk index. BAD_ARGUMENT when one does not fit."""
    if not (
        0 <= session < 1 << _SESSION_BITS and 0 <= layer < 1 << _LAYER_BITS and 0 <= chunk < 1 << _CHUNK_BITS
    ):
        raise CoreError(
            Reason.BAD_ARGUMENT, f"no logical id for session {session} layer {layer} chunk {chunk}"
        )
    return (session << (_LAYER_BITS + _CHUNK_BITS)) | (layer << _CHUNK_BITS) | chunk


def recency_key(epoch: int, chunk: int) -> int:
    """Orders sealed chunks: by the step that sealed them, and within a step by position, in all layers."""
    return (epoch << _CHUNK_BITS) | chunk


class Directory:
    """Columns by line. A line belongs to one logical chunk from `insert` to `remove`.

    generation: of the published replica, issued once in the directory's life. slot_generation: the tier's
    allocation generation of the authoritative copy. epoch: authority epoch. readers: read leases held.
    write_txn: id of the one open transaction, 0 for none. credit: grant of the ledger that pays the slot.
    """

    def __init__(self, lines: int = 256) -> None:
        self._lines: dict[int, int] = {}
        self._free: list[int] = []
        self._size = 0
        self._issued = 0
        self.directory_generation = 0
        self.logical: NDArray[np.int64]
        self.tier: NDArray[np.int8]
        self.slot: NDArray[np.int64]
        self.slot_generation: NDArray[np.int64]
        self.generation: NDArray[np.int64]
        self.epoch: NDArray[np.int64]
        self.state: NDArray[np.int8]
        self.rows: NDArray[np.int32]
        self.checksum: NDArray[np.uint64]
        self.producer: NDArray[np.int32]
        self.readers: NDArray[np.int32]
        self.write_txn: NDArray[np.int64]
        self.credit: NDArray[np.int64]
        self.recency: NDArray[np.int64]
        for name, kind in _COLUMNS:
            setattr(self, name, np.zeros(0, dtype=kind))
        self._grow(lines)

    def __len__(self) -> int:
        return len(self._lines)

    def _grow(self, lines: int) -> None:
        for name, kind in _COLUMNS:
            column = np.zeros(lines, dtype=kind)
            column[: self._size] = getattr(self, name)
            setattr(self, name, column)
        self._free.extend(range(lines - 1, self._size - 1, -1))
        self._size = lines

    def line_of(self, logical: int) -> int | None:
        return self._lines.get(logical)

    def issue_generation(self) -> int:
        """A replica generation that no other replica of any chunk has or will have."""
        self._issued += 1
        return self._issued

    def insert(
        self, logical: int, *, tier: int, slot: int, slot_generation: int, generation: int, state: ChunkState
    ) -> int:
        """Publishes a new chunk at its first place and returns its line. IDENTITY_MISMATCH if it exists."""
        if logical in self._lines:
            raise CoreError(Reason.IDENTITY_MISMATCH, f"chunk {logical:#x} is already in the directory")
        if not self._free:
            self._grow(self._size * 2)
        line = self._free.pop()
        self._lines[logical] = line
        self.logical[line] = logical
        self.tier[line] = tier
        self.slot[line] = slot
        self.slot_generation[line] = slot_generation
        self.generation[line] = generation
        self.epoch[line] += 1
        self.state[line] = state
        self.rows[line] = 0
        self.checksum[line] = 0
        self.producer[line] = NO_PRODUCER
        self.readers[line] = 0
        self.write_txn[line] = 0
        self.credit[line] = 0
        self.recency[line] = 0
        self.directory_generation += 1
        return line

    def publish(self, line: int, *, tier: int, slot: int, slot_generation: int, generation: int) -> None:
        """Moves authority of the line to another copy of that replica generation: one step, a new epoch."""
        self.tier[line] = tier
        self.slot[line] = slot
        self.slot_generation[line] = slot_generation
        self.generation[line] = generation
        self.epoch[line] += 1
        self.directory_generation += 1

    def remove(self, line: int) -> None:
        """Forgets the line and makes its generation one that no caller can hold."""
        del self._lines[int(self.logical[line])]
        self.state[line] = ChunkState.FREE
        self.tier[line] = NO_TIER
        self.generation[line] = self.issue_generation()
        self._free.append(line)
        self.directory_generation += 1

    def sealed_in(self, tier: int) -> NDArray[np.int64]:
        """Lines of sealed chunks in a tier that no transaction holds, least recent first."""
        found = np.flatnonzero(
            (self.tier == tier) & (self.state == ChunkState.SEALED) & (self.write_txn == 0)
        )
        return found[np.argsort(self.recency[found], kind="stable")]


_COLUMNS: tuple[tuple[str, type[np.generic]], ...] = (
    ("logical", np.int64),
    ("tier", np.int8),
    ("slot", np.int64),
    ("slot_generation", np.int64),
    ("generation", np.int64),
    ("epoch", np.int64),
    ("state", np.int8),
    ("rows", np.int32),
    ("checksum", np.uint64),
    ("producer", np.int32),
    ("readers", np.int32),
    ("write_txn", np.int64),
    ("credit", np.int64),
    ("recency", np.int64),
)
