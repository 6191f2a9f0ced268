"""Byte ledgers of one engine: who has which slots, what moved where, what was spared.

Why it exists: one number for "used" cannot say whether a tier is full of rows or of cache, and ledgers that
are merged cannot be checked against each other (specification F.3, F17). It must not change anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from kvtier_core.assembly import LiveTier
from kvtier_core.credits import Ledger, slots
from kvtier_core.directory import NO_NAMESPACE, ChunkState
from kvtier_core.receipts import BlockStats, EngineStats, HostBytes, RecoveryStats, TierBytes, TierStats
from kvtier_core.sessions import RowStore
from kvtier_core.sharing import SharedBlocks
from kvtier_core.tiers.nvme import NvmeTier
from kvtier_core.tiers.slots import SlotState
from kvtier_core.transactions import MoveKind, TxnState

# Committed memory of a line with its key and its index entries; see the directory's tests.
LINE_BYTES = 161
IN_FLIGHT = (TxnState.RESERVED, TxnState.COPYING, TxnState.VALIDATED)


class Statistics:
    """Reads under the metadata lock, which no frame holds for long."""

    def __init__(
        self,
        live: Sequence[LiveTier],
        rows: RowStore,
        ledger: Ledger,
        shared: SharedBlocks | None,
        staging_bytes: int,
        recovered: tuple[RecoveryStats, ...],
    ) -> None:
        self._live = live
        self._rows = rows
        self._ledger = ledger
        self._shared = shared
        self._staging_bytes = staging_bytes
        self._recovered = recovered

    def read(self, sessions: int) -> EngineStats:
        with self._rows.lock:
            moved = Counter(self._rows.transactions.moved_bytes)
            if self._shared is not None:
                moved.update(self._shared.store.moves.moved_bytes)
            return EngineStats(
                tiers=tuple(self._tier(index, live) for index, live in enumerate(self._live)),
                sessions=sessions,
                chunks=self._rows.chunks,
                open_chunks=int((self._rows.directory.state == ChunkState.OPEN).sum()),
                moved_bytes=dict(moved),
                host=self._host(),
                blocks=self._blocks(),
                recovered=self._recovered,
            )

    def _tier(self, index: int, live: LiveTier) -> TierStats:
        tier = live.tier
        return TierStats(
            class_name=tier.name,
            medium=tier.medium.value,
            simulated=tier.simulated,
            capacity_bytes=live.budget_bytes,
            used_bytes=tier.used_bytes,
            pinned_bytes=tier.pinned_bytes + (0 if tier.capability.kernel_readable else self._staging_bytes),
            read_bytes_per_second=tier.measured.read_bytes_per_second,
            write_bytes_per_second=tier.measured.write_bytes_per_second,
            probes=dict(tier.measured.probes),
            condition=tier.condition,
            bytes=self._bytes(index, live),
        )

    def _bytes(self, index: int, live: LiveTier) -> TierBytes:
        """Split by who pays, so that nothing is counted twice or not at all."""
        resource, size = slots(index), live.tier.slot_bytes
        rows = self._rows.ledger.granted(index)
        free = self._ledger.available(resource)
        quarantined = live.tier.slots.count(SlotState.QUARANTINED)
        blocks = live.tier.slots.capacity - rows - free - quarantined
        return TierBytes(
            rows=rows * size,
            blocks=blocks * size,
            quarantined=quarantined * size,
            free=free * size,
            held=self._held(index) * size,
        )

    def _held(self, index: int) -> int:
        directory = self._rows.directory
        leases = directory.replicas.tiers[index].leases.array[: directory.used]
        return int(np.count_nonzero((leases > 0) & (directory.namespace[: directory.used] != NO_NAMESPACE)))

    def _host(self) -> HostBytes:
        buffers = sum(live.tier.pinned_bytes for live in self._live if isinstance(live.tier, NvmeTier))
        moving = () if self._shared is None else self._shared.store.moves.open_moves()
        return HostBytes(
            payloads=sum(live.tier.used_bytes for live in self._live if _in_host_memory(live)),
            buffers=buffers + self._staging_bytes,
            write_back=sum(
                move.identity.length
                for move in moving
                if move.kind is MoveKind.DEMOTE and move.state in IN_FLIGHT
            ),
            metadata=len(self._rows.directory) * LINE_BYTES,
        )

    def _blocks(self) -> BlockStats | None:
        if self._shared is None:
            return None
        store = self._shared.store
        names = [live.tier.name for live in self._live]
        evictions = store.reclaim.evictor.counts
        failure = self._shared.driver.failure
        return BlockStats(
            stored=len(self._rows.directory) - self._rows.chunks,
            hits=store.reads.hits + store.pins.counts["blocks"],
            fetched=store.reads.fetched,
            moves=dict(store.moves.counts),
            evictions={(names[tier], what): count for (tier, what), count in sorted(evictions.items())},
            saved_bytes=store.reads.flights.counts["joined"] * store.parts.block_bytes,
            deleting=len(store.deletions.open()),
            failure="" if failure is None else f"{type(failure).__name__}: {failure}",
        )


def _in_host_memory(live: LiveTier) -> bool:
    return live.tier.host_memory and live.tier.capability.kernel_readable
