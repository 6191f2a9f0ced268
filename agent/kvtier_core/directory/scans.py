"""Questions that look at whole columns: what lies in a tier, what belongs to a namespace, what may be
evicted.

Why it exists: at ten million lines such a question takes tens of milliseconds, so each can be asked piece by
piece, and nobody writes a loop over lines. It must not know why a caller asks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvtier_core.directory.ids import ChunkState
from kvtier_core.directory.lines import LineColumns
from kvtier_core.directory.replicas import PUBLISHED, ReplicaTable


def span(lines: LineColumns, first: int, limit: int | None) -> slice:
    """The used lines of [first, first + limit)."""
    end = lines.used if limit is None else min(lines.used, first + limit)
    return slice(first, max(first, end))


def published(
    lines: LineColumns, replicas: ReplicaTable, tier: int, first: int, limit: int | None
) -> NDArray[np.int64]:
    part = span(lines, first, limit)
    return np.flatnonzero(replicas.tiers[tier].state.array[part] == PUBLISHED) + first


def of_namespace(lines: LineColumns, namespace: int, first: int, limit: int | None) -> NDArray[np.int64]:
    part = span(lines, first, limit)
    mine = (lines.namespace.array[part] == namespace) & (lines.state.array[part] != ChunkState.FREE)
    return np.flatnonzero(mine) + first


def evictable(
    lines: LineColumns, replicas: ReplicaTable, tier: int, first: int, limit: int | None
) -> NDArray[np.int64]:
    found = published(lines, replicas, tier, first, limit)
    free: NDArray[np.bool_] = (
        (lines.state.array[found] == ChunkState.SEALED)
        & (replicas.tiers[tier].leases.array[found] == 0)
        & (lines.readers.array[found] == 0)
        & (lines.write_txn.array[found] == 0)
    )
    return found[free]


def sealed_in(lines: LineColumns, tier: int) -> NDArray[np.int64]:
    part = span(lines, 0, None)
    found: NDArray[np.int64] = np.flatnonzero(
        (lines.tier.array[part] == tier)
        & (lines.state.array[part] == ChunkState.SEALED)
        & (lines.chunk.array[part] != 0)
        & (lines.readers.array[part] == 0)
        & (lines.write_txn.array[part] == 0)
    )
    return found[np.argsort(lines.recency.array[found], kind="stable")]
