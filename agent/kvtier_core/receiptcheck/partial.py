"""Partial attention states against the query they are merged for (specification E.5).

Why it exists: a merge of states over rows twice, rows missing, another head's or another mask's rows gives an
answer of the right shape. Identity is validated against the query being reduced, never inferred from arrival
or place. It must not know who formed the states.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtier_core.checksums import checksum
from kvtier_core.errors import CoreError, Reason
from kvtier_core.identity import digest
from kvtier_core.receiptcheck.contract import check_heads
from kvtier_core.receiptcheck.query import Operation

STATE_SCHEMA = "fp32-m-l-u-v1"


@dataclass(frozen=True, slots=True)
class PartialReceipt:
    """One producer's state over `support` (sorted original positions): m, l float32, u float32 [value_dim].
    merge_revision: of the algebra; checksum: `state_checksum`. completed: seconds on the operation's clock,
    None while no event orders the state before its use. None is a field that is not there."""

    tenant_namespace: str
    request_id: str
    request_generation: int
    checkpoint_generation: str
    layer: int
    query_head: int | None
    kv_head: int | None
    query_to_kv: tuple[int, ...]
    query_position: int
    query_sha256: bytes
    support: NDArray[np.int64]
    support_sha256: bytes
    mask_sha256: bytes
    position_contract_sha256: bytes
    score_scale: float
    state_schema: str
    m: float | None
    l: float | None
    u: NDArray[np.float32]
    producer: str
    producer_generation: int
    merge_revision: str | None
    checksum: int
    completed: float | None


@dataclass(frozen=True, slots=True)
class MergeTerms:
    """What a merge is for. producers: name and generation of those from whom a state is due. required: sorted
    rows that all supports together must be. answered: the fallback's answer was published already."""

    operation: Operation
    request_id: str
    score_scale: float
    merge_revision: str
    producers: tuple[tuple[str, int], ...]
    required: NDArray[np.int64]
    answered: bool = False


def support_digest(positions: NDArray[np.int64]) -> bytes:
    return digest("support", [("scope", "rows"), ("positions", positions)])


def state_checksum(m: float | None, l: float | None, u: NDArray[np.float32]) -> int:
    """XXH3-64 over m, l and u as float32; a missing scalar is left out."""
    scalars = np.array([value for value in (m, l) if value is not None], dtype=np.float32)
    return checksum("xxh3", scalars.tobytes() + u.tobytes())


def check_partial(terms: MergeTerms, receipt: PartialReceipt) -> None:
    """One receipt: PARTIAL_RECEIPT_INCOMPLETE, STATE_SCHEMA_MISMATCH, CHECKSUM_MISMATCH; TENANT_MISMATCH,
    QUERY_IDENTITY_MISMATCH (another request), REQUEST_STALE, MODEL_MISMATCH; HEAD_AMBIGUOUS,
    QUERY_IDENTITY_MISMATCH, HEAD_MAPPING_MISMATCH; MASK_MISMATCH, POSITION_CONTRACT_MISMATCH,
    SCORE_SCALE_MISMATCH; SUPPORT_DIGEST_MISMATCH; NO_NORMALISATION_MASS, EMPTY_SUPPORT, STATE_INVALID;
    STATE_SHAPE, PARTIAL_RECEIPT_STALE."""
    operation = terms.operation
    binding, contract = operation.binding, operation.contract
    if receipt.merge_revision is None:
        raise CoreError(Reason.PARTIAL_RECEIPT_INCOMPLETE, "a state without the revision of its algebra")
    if receipt.query_head is None or receipt.kv_head is None:
        check_heads(contract, receipt.query_head, receipt.kv_head)
    query = (
        receipt.layer,
        receipt.query_head,
        receipt.kv_head,
        receipt.query_position,
        receipt.query_sha256,
    )
    asked = (
        operation.layer,
        operation.query_head,
        operation.kv_head,
        operation.position,
        operation.query_sha256,
    )
    guards: tuple[tuple[bool, Reason], ...] = (
        (
            receipt.state_schema != STATE_SCHEMA or receipt.u.dtype != np.float32,
            Reason.STATE_SCHEMA_MISMATCH,
        ),
        (
            receipt.checksum != state_checksum(receipt.m, receipt.l, receipt.u),
            Reason.CHECKSUM_MISMATCH,
        ),
        (receipt.tenant_namespace != binding.tenant_namespace, Reason.TENANT_MISMATCH),
        (receipt.request_id != terms.request_id, Reason.QUERY_IDENTITY_MISMATCH),
        (receipt.request_generation != binding.request_generation, Reason.REQUEST_STALE),
        (receipt.checkpoint_generation != binding.checkpoint_generation, Reason.MODEL_MISMATCH),
        (query != asked, Reason.QUERY_IDENTITY_MISMATCH),
        (receipt.query_to_kv != operation.query_to_kv, Reason.HEAD_MAPPING_MISMATCH),
        (receipt.mask_sha256 != operation.mask_sha256, Reason.MASK_MISMATCH),
        (
            receipt.position_contract_sha256 != binding.position_contract_sha256,
            Reason.POSITION_CONTRACT_MISMATCH,
        ),
        (receipt.score_scale != terms.score_scale, Reason.SCORE_SCALE_MISMATCH),
        (receipt.support_sha256 != support_digest(receipt.support), Reason.SUPPORT_DIGEST_MISMATCH),
        (receipt.m is None or receipt.l is None, Reason.NO_NORMALISATION_MASS),
        (len(receipt.support) > 0 and receipt.l == 0.0, Reason.EMPTY_SUPPORT),
        (not _is_state(receipt), Reason.STATE_INVALID),
        (receipt.u.shape != (contract.value_dim,), Reason.STATE_SHAPE),
        (
            receipt.merge_revision != terms.merge_revision
            or (receipt.producer, receipt.producer_generation) not in terms.producers,
            Reason.PARTIAL_RECEIPT_STALE,
        ),
    )
    for failed, reason in guards:
        if failed:
            raise CoreError(reason, f"the state of producer {receipt.producer} is refused")


def _is_state(receipt: PartialReceipt) -> bool:
    """An empty support is declared as (-inf, 0, 0); any other has a finite m and a positive l. u may hold
    what V held."""
    if receipt.m is None or receipt.l is None:
        return False
    if not len(receipt.support):
        return receipt.m == -math.inf and receipt.l == 0.0 and not receipt.u.any()
    return math.isfinite(receipt.m) and math.isfinite(receipt.l) and receipt.l > 0.0


def check_merge(terms: MergeTerms, receipts: Sequence[PartialReceipt], returned_bytes: int) -> None:
    """All receipts of one merge: each by `check_partial`, then DUPLICATE_RECEIPT, SUPPORT_OVERLAP,
    SUPPORT_OUT_OF_RANGE, SUPPORT_GAP, EMPTY_SUPPORT, RECEIPT_COUNT, TRAFFIC_MISMATCH (P states of
    (2 + value_dim) float32, F29), NOT_VISIBLE, LATE_RECEIPT.

    A duplicate is looked for before an overlap, which it always is too.
    """
    for receipt in receipts:
        check_partial(terms, receipt)
    if len({receipt.producer for receipt in receipts}) != len(receipts):
        raise CoreError(Reason.DUPLICATE_RECEIPT, "a producer's state came twice")
    rows = np.concatenate([receipt.support for receipt in receipts] or [np.zeros(0, np.int64)])
    union = np.unique(rows)
    if len(union) != len(rows):
        raise CoreError(Reason.SUPPORT_OVERLAP, f"{len(rows) - len(union)} rows are in two supports")
    foreign = np.setdiff1d(union, terms.required, assume_unique=True)
    if len(foreign):
        raise CoreError(Reason.SUPPORT_OUT_OF_RANGE, f"row {int(foreign[0])} is not of the support")
    if len(union) != len(terms.required):
        missing = len(np.setdiff1d(terms.required, union))
        raise CoreError(
            Reason.SUPPORT_GAP, f"{missing} required rows are in no support", {"missing": missing}
        )
    if not len(union):
        raise CoreError(Reason.EMPTY_SUPPORT, "no rows at all: there is no answer")
    if len(receipts) != len(terms.producers):
        raise CoreError(Reason.RECEIPT_COUNT, f"{len(receipts)} states of {len(terms.producers)} producers")
    state_bytes = (2 + terms.operation.contract.value_dim) * 4
    if returned_bytes != len(receipts) * state_bytes:
        raise CoreError(
            Reason.TRAFFIC_MISMATCH, f"{len(receipts)} states of {state_bytes} bytes, not {returned_bytes}"
        )
    ends = [(one.producer, one.completed) for one in receipts]
    if any(end is None for _, end in ends):
        raise CoreError(Reason.NOT_VISIBLE, "no event orders a state before its use")
    late = [name for name, end in ends if end is not None and end > terms.operation.deadline.seconds]
    if late or terms.answered:
        raise CoreError(Reason.LATE_RECEIPT, f"after the deadline or the answer: {', '.join(late) or 'all'}")
