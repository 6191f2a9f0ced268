"""What the block store says of itself, as messages: found copies, explanations, totals, what lies where.

Why it exists: an operator must see why a key hits or misses and where bytes are, without a debugger. Read
only. It must not know calls or callers; every function runs in a thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from kvtier.v1 import blocks_pb2
from kvtier_agent.blockhost import BlockHost
from kvtier_agent.blockstoring import format_checksum
from kvtier_core.blockstore.outcomes import Explanation, Found
from kvtier_core.blockstore.store import BlockStore
from kvtier_core.tiers.base import Tier
from kvtier_core.transactions import MoveReason, MoveRefused

MAX_FACTS = 16
# Lines of the directory that one page looks at, and those of one hold of the lock.
SEARCH_LINES = 1 << 20
LINES_AT_ONCE = 1 << 14


def found_message(store: BlockStore, key: bytes, found: Found) -> blocks_pb2.FoundBlock:
    return blocks_pb2.FoundBlock(
        key=key,
        generation=found.generation,
        tier_class=store.parts.tiers[found.tier].name,
        bytes=store.parts.block_bytes,
        checksum=format_checksum(found.checksum),
    )


def explanation_message(said: Explanation) -> blocks_pb2.ExplainBlockResponse:
    hit = said.reason is MoveReason.READY
    return blocks_pb2.ExplainBlockResponse(
        key=said.key,
        state=said.state,
        replicas=[
            blocks_pb2.BlockReplica(
                tier_class=copy.tier,
                generation=copy.generation,
                slot_generation=copy.slot_generation,
                readers=copy.readers,
                authority=copy.authority,
                published=copy.counts,
                slot=copy.slot,
            )
            for copy in said.replicas
        ],
        reason=None if hit else MoveRefused(said.reason, "").reason.name,
        message=said.message,
        facts=dict(list(said.facts.items())[:MAX_FACTS]),
    )


def copies_of(store: BlockStore, lines: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many copies of `lines` [n] each tier has [tiers]. The store's lock is held."""
    columns = store.directory.replicas.tiers[: len(store.parts.tiers)]
    return np.asarray([np.count_nonzero(tier.state.array[lines]) for tier in columns], dtype=np.int64)


def tier_deletions(store: BlockStore, copies: NDArray[np.int64]) -> list[blocks_pb2.TierDeletion]:
    """copies: of what is deleted, by tier. durable: once it is done, no restart brings any back."""
    return [
        blocks_pb2.TierDeletion(
            tier_class=tier.name, blocks=count, bytes=count * store.parts.block_bytes, durable=True
        )
        for tier, count in zip(store.parts.tiers, copies.tolist(), strict=True)
        if count or tier.persistent
    ]


def inspection(
    host: BlockHost, namespace: bytes | None, after: int, limit: int
) -> blocks_pb2.InspectBlocksResponse:
    """Totals, and the blocks of a namespace from line `after`: a page of them, or fewer after a long search.
    Numbers are read one after the other, while the store goes on."""
    store = host.store
    answer = blocks_pb2.InspectBlocksResponse(
        cache_generation=store.moves.cache_generation,
        block_bytes=store.parts.block_bytes,
        counters=counters(host),
        tiers=[_totals(store, index, tier) for index, tier in enumerate(store.parts.tiers)],
    )
    owner = None if namespace is None else store.parts.namespaces.known(namespace)
    if owner is not None:
        _page(store, owner, after, limit, answer)
    return answer


def _page(
    store: BlockStore, owner: int, after: int, limit: int, answer: blocks_pb2.InspectBlocksResponse
) -> None:
    directory = store.directory
    for first in range(after, min(directory.used, after + SEARCH_LINES), LINES_AT_ONCE):
        with store.parts.lock:
            lines = directory.lines_of(owner, first=first, limit=LINES_AT_ONCE).tolist()
            room = limit - len(answer.blocks)
            keys = [directory.key_of(line) for line in lines[:room]]
            answer.blocks.extend(explanation_message(store.explain(key)) for key in keys)
        if len(lines) > room:
            answer.next = lines[room]
            return
    if after + SEARCH_LINES < directory.used:
        answer.next = after + SEARCH_LINES


def _totals(store: BlockStore, index: int, tier: Tier) -> blocks_pb2.BlockTierTotals:
    leases = store.directory.replicas.tiers[index].leases.array[: store.directory.used]
    return blocks_pb2.BlockTierTotals(
        tier_class=tier.name,
        medium=tier.medium.value,
        capacity_blocks=tier.slots.capacity,
        used_blocks=tier.slots.used,
        published_blocks=store.directory.replicas.counts[index],
        read_blocks=int(np.count_nonzero(leases)),
        persistent=tier.persistent,
        condition=tier.condition,
    )


def counters(host: BlockHost) -> Mapping[str, int]:
    """Events since the start, each a name that never means anything else."""
    store = host.store
    flights = store.reads.flights.counts
    return {
        "memory_reads": store.reads.hits,
        "backend_reads": store.reads.fetched,
        "backend_reads_retried": store.reads.retried,
        "reads_started": flights["started"],
        "reads_joined": flights["joined"],
        "reads_separate": flights["separate"],
        "waits_late": flights["late"],
        "leaders_replaced": flights["handed_over"],
        "fetch_scopes_leaked": store.reads.leaked,
        "stores_expired": store.writes.expired,
        "blocks_being_stored": store.writes.open_blocks,
        "pins_by_id": len(host.pins),
        "blocks_pinned_by_id": host.pins.blocks,
        "deletions_open": len(store.deletions.open()),
        "credits_released_twice": store.ledger.double_releases,
        **_evictions(store),
    }


def _evictions(store: BlockStore) -> dict[str, int]:
    total: dict[str, int] = {}
    for (_, what), count in _items(store):
        total[f"evictions_{what}"] = total.get(f"evictions_{what}", 0) + count
    return total


def _items(store: BlockStore) -> Iterable[tuple[tuple[int, str], int]]:
    return list(store.reclaim.evictor.counts.items())
