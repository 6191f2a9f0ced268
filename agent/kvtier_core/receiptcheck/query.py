"""A decode operation, the lookup that names candidates for it, and the gather that makes their rows visible.

Why it exists: a lookup names ids and a gather moves rows; taking one for the other, or either for another
query, index or history, is a wrong answer that looks right. It must not know selectors or attention.
Order of guards: specification A.12.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from kvtier_core.errors import CoreError, Reason
from kvtier_core.identity import SourceBinding, source_row
from kvtier_core.receiptcheck.binding import check_binding
from kvtier_core.receiptcheck.contract import TensorContract, check_heads, check_positions

CANDIDATES_ONLY = "candidate_ids_only"


class FallbackClass(StrEnum):
    """What may happen when the answer cannot be formed in time (A.11). Going on with what came is none."""

    BROADEN_SEARCH = "broaden_search"
    EXACT_PROMOTE = "exact_promote"
    RECOMPUTE = "recompute"
    REJECT = "reject"


@dataclass(frozen=True, slots=True)
class Deadline:
    """Seconds on a named clock: a number alone means another time in another process."""

    seconds: float
    clock: str


@dataclass(frozen=True, slots=True)
class Operation:
    """One query of one head: what it reads, and which generations its manifest names. position: of the query;
    it reads rows below the binding's frontier."""

    binding: SourceBinding
    contract: TensorContract
    query_to_kv: tuple[int, ...]
    layer: int
    query_head: int
    kv_head: int
    position: int
    query_sha256: bytes
    mask_sha256: bytes
    selector_generation: int
    index_generation: int
    deadline: Deadline
    fallback: str


def check_operation(operation: Operation) -> None:
    """HEAD_MAPPING_MISMATCH, DEADLINE_UNANCHORED, FALLBACK_UNKNOWN, in this order."""
    if operation.query_to_kv != operation.contract.query_to_kv:
        raise CoreError(
            Reason.HEAD_MAPPING_MISMATCH,
            f"query heads read {operation.query_to_kv}, the cache says {operation.contract.query_to_kv}",
        )
    check_heads(operation.contract, operation.query_head, operation.kv_head)
    if not operation.deadline.clock:
        raise CoreError(Reason.DEADLINE_UNANCHORED, f"{operation.deadline.seconds} s on no clock")
    if operation.fallback not in set(FallbackClass):
        legal = ", ".join(FallbackClass)
        raise CoreError(Reason.FALLBACK_UNKNOWN, f"fallback {operation.fallback!r} is none of {legal}")


@dataclass(frozen=True, slots=True)
class IndexSnapshot:
    """A published index: its source with the frontier it covers. supplement: rows [a, b) that its contract
    reads exactly beside it; None for none."""

    index_generation: int
    selector_generation: int
    binding: SourceBinding
    supplement: tuple[int, int] | None = None


def check_index(operation: Operation, index: IndexSnapshot) -> None:
    """The version chain of A.10: INDEX_STALE, SELECTOR_STALE, the binding's reasons, UNCOMMITTED_ROWS for an
    index that runs ahead, INDEX_FRONTIER_LAG for one that ends early without a supplement."""
    if index.index_generation != operation.index_generation:
        raise CoreError(
            Reason.INDEX_STALE, f"index {index.index_generation}, not {operation.index_generation}"
        )
    if index.selector_generation != operation.selector_generation:
        raise CoreError(
            Reason.SELECTOR_STALE,
            f"selector {index.selector_generation}, not {operation.selector_generation}",
        )
    covered, frontier = index.binding.committed_frontier, operation.binding.committed_frontier
    check_binding(operation.binding.at(covered), index.binding)
    if covered > frontier:
        raise CoreError(
            Reason.UNCOMMITTED_ROWS, f"the index holds rows up to {covered}, committed is {frontier}"
        )
    first, last = index.supplement or (covered, covered)
    if covered < frontier and not (first <= covered and last >= frontier):
        raise CoreError(Reason.INDEX_FRONTIER_LAG, f"the index ends at {covered}, the rows at {frontier}")


@dataclass(frozen=True, slots=True)
class LookupReceipt:
    """Original positions with scores, and of what they were found. query_head, kv_head: None is not named."""

    query_sha256: bytes
    index_generation: int
    selector_generation: int
    source_cache_generation: int
    source_committed_frontier: int
    layer: int
    query_head: int | None
    kv_head: int | None
    positions: NDArray[np.int64]
    scores: NDArray[np.float32]
    semantics: str = CANDIDATES_ONLY


def check_lookup(operation: Operation, receipt: LookupReceipt) -> None:
    """CANDIDATE_USED_AS_PAYLOAD, heads, QUERY_MISMATCH, INDEX_STALE, SELECTOR_STALE, STALE_CACHE_GENERATION,
    INDEX_FRONTIER_LAG, CANDIDATE_OUT_OF_RANGE, DUPLICATE_POSITION."""
    if receipt.semantics != CANDIDATES_ONLY:
        raise CoreError(Reason.CANDIDATE_USED_AS_PAYLOAD, f"a lookup says {receipt.semantics!r}")
    _check_query(operation, receipt.layer, receipt.query_head, receipt.kv_head, receipt.query_sha256)
    if receipt.index_generation != operation.index_generation:
        raise CoreError(
            Reason.INDEX_STALE, f"index {receipt.index_generation}, not {operation.index_generation}"
        )
    if receipt.selector_generation != operation.selector_generation:
        raise CoreError(Reason.SELECTOR_STALE, f"selector {receipt.selector_generation}")
    _check_cache(operation, receipt.source_cache_generation)
    if receipt.source_committed_frontier < operation.binding.committed_frontier:
        raise CoreError(
            Reason.INDEX_FRONTIER_LAG, f"candidates of rows below {receipt.source_committed_frontier} only"
        )
    check_positions(receipt.positions, operation.binding.committed_frontier)


def _check_query(
    operation: Operation, layer: int, query_head: int | None, kv_head: int | None, query: bytes
) -> None:
    check_heads(operation.contract, query_head, kv_head)
    asked = (operation.query_sha256, operation.layer, operation.query_head, operation.kv_head)
    if (query, layer, query_head, kv_head) != asked:
        raise CoreError(Reason.QUERY_MISMATCH, "the receipt is of another query")


def _check_cache(operation: Operation, generation: int) -> None:
    if generation != operation.binding.cache_generation:
        raise CoreError(
            Reason.STALE_CACHE_GENERATION,
            f"rows of cache generation {generation}, not {operation.binding.cache_generation}",
        )


@dataclass(frozen=True, slots=True)
class RowReplica:
    """The copy that one row was taken from."""

    generation: int
    authority_epoch: int
    tenant_namespace: str
    codec: str
    layout: str


@dataclass(frozen=True, slots=True)
class GatherReceipt:
    """Full rows in packed order. row_digests: semantic names of the rows that were packed; replicas: where
    each came from. visibility_event: None while the destination is not ordered after the copy."""

    query_sha256: bytes
    index_generation: int
    source_cache_generation: int
    layer: int
    query_head: int | None
    kv_head: int | None
    positions: NDArray[np.int64]
    row_digests: Sequence[bytes]
    replicas: Sequence[RowReplica]
    destination_slot: int
    destination_allocation_generation: int
    visibility_event: int | None


@dataclass(frozen=True, slots=True)
class LivePlaces:
    """What is true now: the authority epoch of the rows, and the generation of the destination slot."""

    authority_epoch: int
    destination_allocation_generation: int


def check_gather(operation: Operation, receipt: GatherReceipt, live: LivePlaces) -> None:
    """A.12 in its order: QUERY_MISMATCH, INDEX_STALE, STALE_CACHE_GENERATION, CANDIDATE_OUT_OF_RANGE,
    DUPLICATE_POSITION; per row STALE_AUTHORITY_EPOCH, TENANT_MISMATCH, CODEC_OR_LAYOUT_MISMATCH,
    ROW_DIGEST_MISMATCH; RECYCLED_DESTINATION, NOT_VISIBLE."""
    _check_query(operation, receipt.layer, receipt.query_head, receipt.kv_head, receipt.query_sha256)
    if receipt.index_generation != operation.index_generation:
        raise CoreError(
            Reason.INDEX_STALE, f"index {receipt.index_generation}, not {operation.index_generation}"
        )
    _check_cache(operation, receipt.source_cache_generation)
    check_positions(receipt.positions, operation.binding.committed_frontier)
    if not len(receipt.positions) == len(receipt.row_digests) == len(receipt.replicas):
        raise CoreError(Reason.ROW_DIGEST_MISMATCH, "positions, rows and copies differ in number")
    for position, row, replica in zip(receipt.positions, receipt.row_digests, receipt.replicas, strict=True):
        _check_row(operation, int(position), row, replica, live)
    if receipt.destination_allocation_generation != live.destination_allocation_generation:
        raise CoreError(Reason.RECYCLED_DESTINATION, f"slot {receipt.destination_slot} is another's by now")
    if receipt.visibility_event is None:
        raise CoreError(Reason.NOT_VISIBLE, "no event orders the rows before their use")


def _check_row(
    operation: Operation, position: int, row: bytes, replica: RowReplica, live: LivePlaces
) -> None:
    if replica.authority_epoch != live.authority_epoch:
        raise CoreError(Reason.STALE_AUTHORITY_EPOCH, f"row {position} is of epoch {replica.authority_epoch}")
    if replica.tenant_namespace != operation.binding.tenant_namespace:
        raise CoreError(Reason.TENANT_MISMATCH, f"row {position} is another tenant's")
    if (replica.codec, replica.layout) != (operation.contract.codec, operation.contract.layout):
        raise CoreError(
            Reason.CODEC_OR_LAYOUT_MISMATCH, f"row {position} lies in {replica.codec}, {replica.layout}"
        )
    if row != source_row(operation.binding, operation.layer, operation.kv_head, position):
        raise CoreError(Reason.ROW_DIGEST_MISMATCH, f"what was packed for row {position} is another row")
