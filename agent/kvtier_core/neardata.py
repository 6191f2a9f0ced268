"""States that are formed beside storage and come back with a receipt, and their reduction into one answer.

Why it exists: in a support partition rows stay where they are and only (m, l, u) travels. What comes back is
believed field by field, against the query that it is reduced for (specification E.5), before anything of it
is merged. A receipt is the producer's own: what it was set up for, the blocks whose bytes were verified, the
query that it was handed and the numbers that it formed. Nothing in it is asked of who checks it, or no check
could fail. The coordinator's own states, of rows that it attends in place, need no receipt but count towards
the support. It must not know how blocks are read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtier_core.appends import Append, Session
from kvtier_core.cost import KvGeometry
from kvtier_core.directory import place_of
from kvtier_core.errors import CoreError, Reason
from kvtier_core.exact_placements import PlacementRefused
from kvtier_core.folding import Query
from kvtier_core.identity import SourceBinding
from kvtier_core.layout import FLOAT_BYTES, ChunkLayout
from kvtier_core.placements.traffic import AttentionShape, TrafficStatement, check_traffic
from kvtier_core.planner import ChunkRead, Path
from kvtier_core.receiptcheck.contract import grouped_map
from kvtier_core.receiptcheck.states import (
    STATE_SCHEMA,
    Producer,
    StateMerge,
    StateReceipt,
    StateTerms,
    ranges_digest,
    states_checksum,
)
from kvtier_core.tiers.base import BlockIdentity, Tier
from kvtier_crds.manifest import NUMERICS_VERSION
from kvtier_kernels.state import AttentionState

Floats = NDArray[np.float32]
GROUP = 8
"""States of one query in one receipt at most; of a block of queries a receipt has one, since they are
large."""
TOGETHER = 4
"""Blocks that are attended in one call: half a window, so that the other half is on its way meanwhile."""


def near_groups(reads: Sequence[ChunkRead], queries: int) -> list[list[ChunkRead]]:
    """Reads in order, neighbours that are near the same tier together, as many as one receipt has; every
    other read alone."""
    limit = GROUP if queries == 1 else 1
    groups: list[list[ChunkRead]] = []
    for read in reads:
        last = groups[-1] if groups else None
        joins = last is not None and read.path is Path.NEAR and last[-1].path is Path.NEAR
        if last is not None and joins and last[-1].tier == read.tier and len(last) < limit:
            last.append(read)
        else:
            groups.append([read])
    return groups


@dataclass(slots=True)
class Reduction:
    """One frame's states. `take` as receipts come, `own` for what the coordinator attends, `close` before
    anything is published. sent: bytes of the queries and of the new rows; new_rows: how many those are."""

    terms: StateTerms
    layout: ChunkLayout
    _merge: StateMerge
    sent: tuple[int, int]
    new_rows: int
    returned_bytes: int = 0
    receipts: int = 0
    blocks: int = 0
    block_bytes: int = 0

    def own(self, read: ChunkRead, rows: int | None = None) -> None:
        """rows: of the chunk that are seen; None: as the read says. SUPPORT_OVERLAP, SUPPORT_OUT_OF_RANGE."""
        first, last = self._range(read)
        self._merge.own((first, last if rows is None else first + rows))

    def take(self, receipt: StateReceipt, blocks: Sequence[BlockIdentity]) -> None:
        """blocks: that were read for it. What `StateMerge.take` refuses."""
        self._merge.take(receipt)
        self.receipts += 1
        self.returned_bytes += max(1, len(receipt.support)) * self.terms.state_bytes
        self.blocks += len(blocks)
        for block in blocks:
            self.block_bytes += block.length

    def close(self) -> None:
        """What `StateMerge.close` refuses, and TRAFFIC_MISMATCH where what was read, sent and returned is not
        what attention over these rows beside their tier moves (F27 to F29)."""
        self._merge.close(self.returned_bytes)
        query, append = self.sent
        stated = TrafficStatement(
            kv=self.block_bytes,
            append=append,
            moved=self.block_bytes + append,
            near=2 * query + append,
            producers=self.blocks,
            returned=self.returned_bytes,
        )
        terms, tokens = self.terms, self.blocks * self.layout.chunk_tokens
        sizes = len(terms.query_to_kv), terms.kv_heads, terms.value_dim
        if stated == _due(*sizes, tokens, terms.queries, self.new_rows, self.blocks):
            return
        try:
            check_traffic(_shape(*sizes, tokens, terms.queries, self.new_rows), stated)
        except PlacementRefused as refused:
            raise CoreError(Reason.TRAFFIC_MISMATCH, str(refused)) from refused

    def _range(self, read: ChunkRead) -> tuple[int, int]:
        first = read.chunk * self.layout.chunk_tokens
        return first, first + read.rows


def _shape(heads: int, kv_heads: int, width: int, tokens: int, queries: int, new_rows: int) -> AttentionShape:
    geometry = KvGeometry(1, heads, kv_heads, width, FLOAT_BYTES, FLOAT_BYTES)
    return AttentionShape(geometry, 1, tokens, FLOAT_BYTES, queries, new_rows)


@lru_cache(maxsize=256)
def _due(
    heads: int, kv_heads: int, width: int, tokens: int, queries: int, new_rows: int, producers: int
) -> TrafficStatement:
    """What such a frame moves; all layers and many tokens have the same."""
    shape = _shape(heads, kv_heads, width, tokens, queries, new_rows)
    return TrafficStatement(
        shape.kv, shape.append, shape.move, shape.near, producers, shape.returned(producers)
    )


def query_digest(q: Tensor) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(q.numpy()).data).digest()


@dataclass(frozen=True, slots=True)
class Ran:
    """What states were formed of: a block of queries, the first of which stands at first_position, and the
    factor on q.k."""

    query_sha256: bytes
    first_position: int
    scale: float


@dataclass(frozen=True, slots=True)
class NearProducer:
    """Forms states of one layer's blocks, as it was set up: for which history of which request, and by what.
    generation: of what holds the rows."""

    source: SourceBinding
    request_id: str
    position_epoch: int
    generation: int
    kv_heads: int
    chunk_tokens: int

    def receipt(
        self,
        name: str,
        blocks: Sequence[BlockIdentity],
        rows: Sequence[int],
        ran: Ran,
        states: tuple[Floats, Floats, Floats],
        completed: float,
    ) -> StateReceipt:
        """Of m, l [n, Nq, Hq], u [n, Nq, Hq, d] over the first rows of `blocks`, by the tier `name`."""
        m, l, u = states
        support: list[tuple[int, int]] = []
        layer = -1
        for block, count in zip(blocks, rows, strict=True):
            of, chunk = place_of(block.logical)
            # Of one layer, or of none that was asked for.
            layer = of if not support or of == layer else -1
            first = chunk * self.chunk_tokens
            support.append((first, first + min(count, block.rows)))
        heads, source = int(m.shape[2]), self.source
        ranges = tuple(support)
        return StateReceipt(
            tenant_namespace=source.tenant_namespace,
            request_id=self.request_id,
            request_generation=source.request_generation,
            checkpoint_generation=source.checkpoint_generation,
            layer=layer,
            query_heads=(0, heads),
            kv_heads=(0, self.kv_heads),
            query_to_kv=grouped_map(heads, self.kv_heads),
            first_query_position=ran.first_position,
            queries=int(m.shape[1]),
            query_sha256=ran.query_sha256,
            support=ranges,
            support_sha256=ranges_digest(ranges),
            mask_sha256=source.visibility_policy_manifest_sha256,
            position_contract_sha256=source.position_contract_sha256,
            position_epoch=self.position_epoch,
            score_scale=ran.scale,
            state_schema=STATE_SCHEMA,
            m=m,
            l=l,
            u=u,
            producer=name,
            producer_generation=self.generation,
            merge_revision=NUMERICS_VERSION,
            checksum=states_checksum(m, l, u),
            completed=completed,
        )


def producer_of(session: Session, layout: ChunkLayout, generation: int) -> NearProducer:
    """Set up for a session's rows as they are now."""
    return NearProducer(
        source=session.source,
        request_id=session.session_id,
        position_epoch=session.position_epoch,
        generation=generation,
        kv_heads=layout.kv_heads,
        chunk_tokens=layout.chunk_tokens,
    )


def stacked(states: Sequence[AttentionState]) -> tuple[Floats, Floats, Floats]:
    """States of one block of queries, as one receipt holds them."""
    return (
        torch.stack([state.m for state in states]).numpy(),
        torch.stack([state.l for state in states]).numpy(),
        torch.stack([state.u for state in states]).numpy(),
    )


def reduction_of(
    groups: Sequence[Sequence[ChunkRead]],
    append: Append,
    query: Query,
    layout: ChunkLayout,
    tiers: Sequence[Tier],
    visible: int,
) -> Reduction:
    """The reduction that the groups' near reads are due to."""
    source = append.session.source
    due: dict[str, int] = {}
    for group in groups:
        if group[0].path is Path.NEAR:
            name = tiers[group[0].tier].name
            due[name] = due.get(name, 0) + 1
    queries, heads, width = query.q.shape
    terms = StateTerms(
        binding=source,
        request_id=append.session.session_id,
        layer=append.layer,
        query_to_kv=grouped_map(heads, layout.kv_heads),
        kv_heads=layout.kv_heads,
        value_dim=width,
        first_query_position=query.first_position,
        queries=queries,
        query_sha256=query_digest(query.q),
        mask_sha256=source.visibility_policy_manifest_sha256,
        position_epoch=append.session.position_epoch,
        score_scale=query.frame.scale,
        merge_revision=NUMERICS_VERSION,
        producers=tuple(Producer(name, source.cache_generation, count) for name, count in due.items()),
        visible=visible,
        deadline=query.deadline,
    )
    rows = append.k
    sent = query.q.nbytes, rows.nbytes + append.v.nbytes
    return Reduction(terms, layout, StateMerge(terms), sent, int(rows.shape[0]))
