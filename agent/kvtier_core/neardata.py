"""States that are formed beside storage and come back with a receipt, and their reduction into one answer.

Why it exists: in a support partition rows stay where they are and only (m, l, u) travels. What comes back is
believed field by field, against the query that it is reduced for (specification E.5), before anything of it
is merged. The coordinator's own states, of rows that it attends in place, need no receipt but count towards
the support. It must not know how blocks are read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvtier_core.appends import Append
from kvtier_core.folding import Query
from kvtier_core.layout import ChunkLayout
from kvtier_core.planner import ChunkRead, Path
from kvtier_core.receiptcheck.contract import grouped_map
from kvtier_core.receiptcheck.partial import STATE_SCHEMA
from kvtier_core.receiptcheck.states import (
    Producer,
    Ranges,
    StateMerge,
    StateReceipt,
    StateTerms,
    ranges_digest,
    states_checksum,
)
from kvtier_core.tiers.base import Tier
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
    """One frame's states. `near` as receipts come, `own` for what the coordinator attends, `close` before
    anything is published."""

    terms: StateTerms
    layout: ChunkLayout
    tiers: Sequence[Tier]
    clock: Callable[[], float]
    _merge: StateMerge
    returned_bytes: int = 0
    receipts: int = 0

    def own(self, read: ChunkRead, rows: int | None = None) -> None:
        """rows: of the chunk that are seen; None: as the read says. SUPPORT_OVERLAP, SUPPORT_OUT_OF_RANGE."""
        first, last = self._range(read)
        self._merge.own((first, last if rows is None else first + rows))

    def near(self, reads: Sequence[ChunkRead], states: Sequence[AttentionState]) -> None:
        """States of `reads`, one each, as their tier's producer returns them."""
        self.take(self.receipt(reads, states))

    def take(self, receipt: StateReceipt) -> None:
        """What `StateMerge.take` refuses."""
        self._merge.take(receipt)
        self.receipts += 1
        self.returned_bytes += max(1, len(receipt.support)) * self.terms.state_bytes

    def close(self) -> None:
        """What `StateMerge.close` refuses."""
        self._merge.close(self.returned_bytes)

    def receipt(self, reads: Sequence[ChunkRead], states: Sequence[AttentionState]) -> StateReceipt:
        """The producer's side."""
        return self.receipt_of(
            reads,
            torch.stack([state.m for state in states]).numpy(),
            torch.stack([state.l for state in states]).numpy(),
            torch.stack([state.u for state in states]).numpy(),
        )

    def receipt_of(self, reads: Sequence[ChunkRead], m: Floats, l: Floats, u: Floats) -> StateReceipt:
        """As `receipt`, of states m, l [n, Nq, Hq], u [n, Nq, Hq, d]."""
        terms, binding = self.terms, self.terms.binding
        support: Ranges = tuple(self._range(read) for read in reads)
        producer = terms.producers[[one.name for one in terms.producers].index(self.name(reads[0]))]
        return StateReceipt(
            tenant_namespace=binding.tenant_namespace,
            request_id=terms.request_id,
            request_generation=binding.request_generation,
            checkpoint_generation=binding.checkpoint_generation,
            layer=terms.layer,
            query_heads=(0, len(terms.query_to_kv)),
            kv_heads=(0, terms.kv_heads),
            query_to_kv=terms.query_to_kv,
            first_query_position=terms.first_query_position,
            queries=terms.queries,
            query_sha256=terms.query_sha256,
            support=support,
            support_sha256=ranges_digest(support),
            mask_sha256=terms.mask_sha256,
            position_contract_sha256=binding.position_contract_sha256,
            position_epoch=terms.position_epoch,
            score_scale=terms.score_scale,
            state_schema=STATE_SCHEMA,
            m=m,
            l=l,
            u=u,
            producer=producer.name,
            producer_generation=producer.generation,
            merge_revision=terms.merge_revision,
            checksum=states_checksum(m, l, u),
            completed=self.clock(),
        )

    def name(self, read: ChunkRead) -> str:
        return self.tiers[read.tier].name

    def _range(self, read: ChunkRead) -> tuple[int, int]:
        first = read.chunk * self.layout.chunk_tokens
        return first, first + read.rows


def reduction_of(
    groups: Sequence[Sequence[ChunkRead]],
    append: Append,
    query: Query,
    layout: ChunkLayout,
    tiers: Sequence[Tier],
    clock: Callable[[], float],
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
        query_sha256=hashlib.sha256(np.ascontiguousarray(query.q.numpy()).data).digest(),
        mask_sha256=source.visibility_policy_manifest_sha256,
        position_epoch=append.session.position_epoch,
        score_scale=query.frame.scale,
        merge_revision=NUMERICS_VERSION,
        producers=tuple(Producer(name, source.cache_generation, count) for name, count in due.items()),
        visible=visible,
        deadline=query.deadline,
    )
    return Reduction(terms, layout, tiers, clock, StateMerge(terms))
