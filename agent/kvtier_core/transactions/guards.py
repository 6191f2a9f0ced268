"""The guards before a move: what must hold of block, copies and tiers in D1 and P1, in order.

Why it exists: the first guard that fails gives the one reason, so order is part of the contract and stands in
one place. It must not change anything.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtier_core.directory import NO_TIER, ChunkState, Directory, ReplicaState
from kvtier_core.layout import CODEC_IDENTITY, LAYOUT_ID
from kvtier_core.tiers.base import Tier
from kvtier_core.transactions.reasons import MoveKind, MoveReason, MoveRefused
from kvtier_core.transactions.surroundings import LiveState


def full_reason(kind: MoveKind) -> MoveReason:
    """How a full destination is called."""
    return MoveReason.NO_STAGING if kind is MoveKind.PROMOTE else MoveReason.NO_DESTINATION_CAPACITY


def stores_layout(tier: Tier) -> bool:
    """Whether the tier holds payloads as they are: identity codec, this layout."""
    return CODEC_IDENTITY in tier.capability.codecs and LAYOUT_ID in tier.capability.layouts


class Guards:
    """Questions to directory and capability records. Raises MoveRefused."""

    def __init__(self, directory: Directory, tiers: Sequence[Tier], live: LiveState) -> None:
        self._directory = directory
        self._tiers = tiers
        self._live = live

    def admit(self, kind: MoveKind, line: int, tier: int, asked: int | None) -> int:
        """The tier whose copy is read, NO_TIER for a store. UNCOMMITTED_ROWS, TOMBSTONED, MISS,
        STALE_AUTHORITY_EPOCH, WRITE_TXN_BUSY, and TIER_INCAPABLE or NO_LEGAL_PATH."""
        self.committed(line)
        source = NO_TIER if kind is MoveKind.STORE else self._source(kind, line, tier, asked)
        busy = int(self._directory.write_txn[line])
        if busy:
            raise MoveRefused(MoveReason.WRITE_TXN_BUSY, f"transaction {busy} moves it already")
        if self._directory.replica(line, tier).state is not ReplicaState.ABSENT:
            raise MoveRefused(MoveReason.WRITE_TXN_BUSY, f"tier {tier} has a copy of line {line}")
        self._able(kind, source, tier, line)
        return source

    def committed(self, line: int) -> None:
        """UNCOMMITTED_ROWS, TOMBSTONED, MISS."""
        state = ChunkState(int(self._directory.state[line]))
        if state is ChunkState.OPEN:
            raise MoveRefused(MoveReason.UNCOMMITTED_ROWS, "an open chunk stays until it is sealed")
        if state is ChunkState.TOMBSTONED:
            raise MoveRefused(MoveReason.TOMBSTONED, f"line {line} is being deleted")
        if state is not ChunkState.SEALED:
            raise MoveRefused(MoveReason.MISS, f"line {line} holds nothing")

    def _source(self, kind: MoveKind, line: int, tier: int, asked: int | None) -> int:
        directory = self._directory
        source = asked
        if source is None:
            source = int(directory.tier[line])
            if kind is MoveKind.PROMOTE:
                counting = [
                    found
                    for found in range(len(self._tiers))
                    if found != tier and directory.counts(line, found)
                ]
                readable = [found for found in counting if self._tiers[found].capability.dma_source]
                source = next(iter(readable or counting), source)
        state = ReplicaState.ABSENT if source == NO_TIER else directory.replica(line, source).state
        if state is not ReplicaState.PUBLISHED:
            raise MoveRefused(MoveReason.MISS, f"line {line} has no copy to read in tier {source}")
        if not directory.counts(line, source):
            raise MoveRefused(
                MoveReason.STALE_AUTHORITY_EPOCH, f"the copy in tier {source} is of a former epoch"
            )
        return source

    def _able(self, kind: MoveKind, source: int, tier: int, line: int) -> None:
        code = MoveReason.NO_LEGAL_PATH if kind is MoveKind.PROMOTE else MoveReason.TIER_INCAPABLE
        if source != NO_TIER:
            origin = self._tiers[source]
            if not (origin.capability.dma_source and stores_layout(origin)):
                raise MoveRefused(code, f"tier {origin.name} may not be the source in layout {LAYOUT_ID}")
        target = self._tiers[tier]
        if not (target.capability.dma_destination and stores_layout(target)):
            raise MoveRefused(code, f"tier {target.name} may not be the destination in {LAYOUT_ID}")
        if not self._live.trusted(line, tier):
            raise MoveRefused(code, f"tier {target.name} may not hold line {line}")
