"""What storage kept of earlier processes, put back into the directory in one step.

Why it exists: after a restart a block is served again only as what it was: its key, namespace and generation
come from its own header, and a namespace that nobody has asked for yet is known by its digest. It must not
know files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Protocol, runtime_checkable

import numpy as np

from kvtier_core.blockstore.keeping import Keeping
from kvtier_core.blockstore.keptnotes import Copy
from kvtier_core.blockstore.parts import Parts
from kvtier_core.directory import NO_LINE
from kvtier_core.tiers.nvme.recovery import RecoveredBlock

_AT_ONCE = 65536


@runtime_checkable
class Recovers(Protocol):
    """A tier that may hold blocks of an earlier process."""

    def recovered(self) -> Iterator[RecoveredBlock]: ...


def restore(parts: Parts, tier: int, found: Iterator[RecoveredBlock], keeping: Keeping) -> Counter[int]:
    """Inserts every recovered block of a tier with its one copy; returns how many by namespace index. A block
    that another tier has given back already is not needed twice: its slot is free, and what was promised of
    it holds for the other copy. What was promised of one after its header was written holds. Raises
    CoreError: NO_DESTINATION_CAPACITY."""
    owners: Counter[int] = Counter()
    kept: list[Copy] = []
    directory = parts.directory
    while read := list(islice(found, _AT_ONCE)):
        batch = [block for block in read if _is_new(parts, tier, block, keeping)]
        each = [block.identity for block in batch]
        keys = np.frombuffer(b"".join(item.chunk_digest for item in each), dtype=np.uint8)
        namespaces = np.asarray([parts.namespaces.index(item.namespace) for item in each], dtype=np.int32)
        costs = np.asarray([item.cost for item in each], dtype=np.float32)
        noted = [keeping.covers(tier, (block.ref, block.identity.replica_generation)) for block in batch]
        kept += [
            (block.ref, block.identity.replica_generation)
            for block, promised in zip(batch, noted, strict=True)
            if promised
        ]
        directory.restore_blocks(
            keys.reshape(-1, 32),
            tier=tier,
            slots=np.asarray([block.ref.slot for block in batch], dtype=np.int64),
            slot_generations=np.asarray([block.ref.generation for block in batch], dtype=np.int64),
            namespaces=namespaces,
            rows=np.asarray([item.rows for item in each], dtype=np.int32),
            checksums=np.asarray([item.checksum for item in each], dtype=np.uint64),
            costs=costs,
            generations=np.asarray([item.replica_generation for item in each], dtype=np.int64),
            droppable=np.asarray(
                [item.droppable and not promised for item, promised in zip(each, noted, strict=True)],
                dtype=np.uint8,
            ),
        )
        owners.update(namespaces.tolist())
    keeping.settle(tier, kept)
    return owners


def _is_new(parts: Parts, tier: int, block: RecoveredBlock, keeping: Keeping) -> bool:
    line = parts.directory.locate(block.identity.chunk_digest)
    if line == NO_LINE:
        return True
    promised = keeping.covers(tier, (block.ref, block.identity.replica_generation))
    if promised or not block.identity.droppable:
        # The other may be an older copy, from before anybody asked for as much.
        keeping.keep(line)
    parts.tiers[tier].release(block.ref)
    return False
