"""Names and states of the directory's lines: 64-bit logical ids that are never issued twice.

Why it exists: a late completion carries the id of what it was for, so an id may not name a successor. A
session's chunk is named by session, layer and index; a shared block by its line and the line's incarnation.
It must not know the arrays.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from kvtier_core.errors import CoreError, Reason

NO_TIER = -1
NO_LINE = -1
NO_PRODUCER = -1
NO_NAMESPACE = -1
KEY_BYTES = 32

_SESSION_BITS, _LAYER_BITS, _CHUNK_BITS = 27, 12, 23
LINE_BITS = 30
INCARNATION_BITS = 32
_BLOCK = 1 << (LINE_BITS + INCARNATION_BITS)


class ChunkState(IntEnum):
    """FREE: the line is unused. OPEN: still takes rows. SEALED: full, may move. TOMBSTONED: being freed."""

    FREE = 0
    OPEN = 1
    SEALED = 2
    TOMBSTONED = 3


class ReplicaState(IntEnum):
    """ABSENT: no copy in that tier. RESERVED: being written, nobody may read it. PUBLISHED: readable, and
    counts while it carries the current authority epoch. INVALID: found bad; it never counts and waits to be
    dropped."""

    ABSENT = 0
    RESERVED = 1
    PUBLISHED = 2
    INVALID = 3


def logical_id(session: int, layer: int, chunk: int) -> int:
    """The 64-bit name of a session's chunk, in [0, 2**62). BAD_ARGUMENT when a part does not fit."""
    if not (
        0 <= session < 1 << _SESSION_BITS and 0 <= layer < 1 << _LAYER_BITS and 0 <= chunk < 1 << _CHUNK_BITS
    ):
        raise CoreError(
            Reason.BAD_ARGUMENT, f"no logical id for session {session} layer {layer} chunk {chunk}"
        )
    return (session << (_LAYER_BITS + _CHUNK_BITS)) | (layer << _CHUNK_BITS) | chunk


def place_of(logical: int) -> tuple[int, int]:
    """Layer and chunk of what `logical_id` names."""
    return logical >> _CHUNK_BITS & (1 << _LAYER_BITS) - 1, logical & (1 << _CHUNK_BITS) - 1


def block_id(line: int, incarnation: int) -> int:
    """The 64-bit name of a shared block, in [2**62, 2**63): its line, and which of the line's lives it is."""
    return _BLOCK | (incarnation << LINE_BITS) | line


def block_ids(lines: NDArray[np.int64], incarnations: NDArray[np.uint32]) -> NDArray[np.int64]:
    """`block_id` for lines [n] in their incarnations [n]."""
    return _BLOCK | (incarnations.astype(np.int64) << LINE_BITS) | lines


def is_block_id(logical: int) -> bool:
    return logical >= _BLOCK


def line_of_block(logical: int) -> int:
    """The line that a block id names, whether or not the block still lives there."""
    return logical & ((1 << LINE_BITS) - 1)


def recency_key(epoch: int, chunk: int) -> int:
    """Orders sealed chunks: by the step that sealed them, and within a step by position, in all layers."""
    return (epoch << _CHUNK_BITS) | chunk
