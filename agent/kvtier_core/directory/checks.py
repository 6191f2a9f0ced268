"""What must hold in a directory at any time, over all its lines.

Why it exists: a state machine's test needs more than the answers it asked for, and an offline inspection
needs to say what is wrong. It must not repair anything.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvtier_core.directory.ids import KEY_BYTES, ChunkState, ReplicaState
from kvtier_core.directory.keyindex import KeyIndex
from kvtier_core.directory.lines import LineColumns
from kvtier_core.directory.replicas import PUBLISHED, ReplicaTable


def check(lines: LineColumns, replicas: ReplicaTable, keys: KeyIndex, chunks: KeyIndex) -> None:
    """Raises AssertionError with the lines that break a rule."""
    used = slice(0, lines.used)
    state, tier, epoch = lines.state.array[used], lines.tier.array[used], lines.epoch.array[used]
    free = state == ChunkState.FREE
    in_use = int((~free).sum())
    _expect(in_use == lines.live, f"{in_use} lines are in use, {lines.live} are counted")
    blocks = np.flatnonzero(~free & (lines.chunk.array[used] == 0))
    sessions = np.flatnonzero(~free & (lines.chunk.array[used] != 0))
    _expect_indexed(keys, blocks, "key")
    _expect_indexed(chunks, sessions, "chunk")
    _none(np.flatnonzero(lines.born.array[used] > epoch), "an epoch before their birth")
    stamped = np.zeros(lines.used, dtype=bool)
    for number, columns in enumerate(replicas.tiers):
        copy, stamp = columns.state.array[used], columns.stamp.array[used]
        held = int((copy != ReplicaState.ABSENT).sum())
        _expect(
            held == replicas.counts[number],
            f"tier {number}: {held} copies, not {replicas.counts[number]}",
        )
        _none(np.flatnonzero(free & (copy != ReplicaState.ABSENT)), f"copies in tier {number} though free")
        _none(
            np.flatnonzero((copy == ReplicaState.ABSENT) & (columns.leases.array[used] != 0)),
            f"readers of no copy in tier {number}",
        )
        _none(
            np.flatnonzero((stamp != 0) & (copy != PUBLISHED)), f"unpublished copies with a stamp in {number}"
        )
        _none(np.flatnonzero(stamp > epoch), f"copies of a future epoch in tier {number}")
        current = (copy == PUBLISHED) & (stamp == epoch)
        _none(
            np.flatnonzero(~free & (tier == number) & ~current),
            f"a stale authority in tier {number}",
        )
        stamped |= current
    _none(
        np.flatnonzero(~free & stamped & (tier < 0) & (state != ChunkState.TOMBSTONED)),
        "copies, no authority",
    )


def check_resident(
    lines: LineColumns, replicas: ReplicaTable, resident: Mapping[bytes, int], tier: int
) -> None:
    """Raises AssertionError unless the map names exactly the blocks that may be read in the tier."""
    used = slice(0, lines.used)
    copy = replicas.tiers[tier]
    readable = (lines.state.array[used] == ChunkState.SEALED) & (lines.chunk.array[used] == 0)
    readable &= (copy.state.array[used] == PUBLISHED) & (copy.stamp.array[used] == lines.epoch.array[used])
    wanted = np.flatnonzero(readable)
    named = np.sort(np.fromiter(resident.values(), dtype=np.int64, count=len(resident)))
    _expect(np.array_equal(named, wanted), f"the map names {len(named)} blocks in memory, not {len(wanted)}")
    for key, line in resident.items():
        _expect(
            lines.key.raw[line * KEY_BYTES : (line + 1) * KEY_BYTES] == key, f"line {line} has another key"
        )


def _expect_indexed(index: KeyIndex, lines: np.ndarray[tuple[int], np.dtype[np.int64]], what: str) -> None:
    found: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = [part for _, part, _ in index.entries()]
    indexed = np.sort(np.concatenate(found)) if found else np.zeros(0, dtype=np.int64)
    _expect(len(index) == len(indexed), f"the {what} index has {len(indexed)} entries, not {len(index)}")
    _expect(np.array_equal(indexed, lines), f"the {what} index names {len(indexed)} lines, not {len(lines)}")


def _none(lines: np.ndarray[tuple[int], np.dtype[np.int64]], what: str) -> None:
    _expect(len(lines) == 0, f"lines {lines[:8].tolist()} have {what}")


def _expect(held: bool, message: str) -> None:
    if not held:
        raise AssertionError(message)
