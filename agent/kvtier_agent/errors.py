"""Turns typed refusals of the core into gRPC statuses with an ErrorDetail, one table for all services.

The reason names of the core and of the wire are equal; a test holds them together. No policy here.
"""

from __future__ import annotations

import grpc

from kvtier.v1 import common_pb2
from kvtier_core.errors import CoreError, Reason

ERROR_METADATA_KEY = "kvtier-error-bin"
_MAX_FACTS = 16
_MAX_MESSAGE = 1024

_RETRY_AFTER_MS = {
    Reason.QUEUE_FULL: 50,
    Reason.CREDIT_PRESSURE: 50,
    Reason.WRITE_TXN_BUSY: 20,
    Reason.LEASES_HELD: 50,
    Reason.NO_STAGING: 50,
    Reason.WOULD_EVICT_PINNED: 200,
    Reason.ADMISSION_PINNED: 200,
    Reason.QUOTA_EXCEEDED: 1000,
    Reason.NO_DESTINATION_CAPACITY: 1000,
    Reason.FENCE_NOT_DURABLE: 1000,
    Reason.STORAGE_UNAVAILABLE: 1000,
    Reason.WRITE_BUDGET: 60_000,
}

_STATUS = {
    grpc.StatusCode.FAILED_PRECONDITION: (
        Reason.FENCE_STALE,
        Reason.BOOT_ID_MISMATCH,
        Reason.GENERATION_STALE,
        Reason.LEASE_EXPIRED,
        Reason.MODEL_MISMATCH,
        Reason.GEOMETRY_MISMATCH,
        Reason.POSITION_CONTRACT_MISMATCH,
        Reason.MANIFEST_MISMATCH,
        Reason.NUMERICS_MISMATCH,
        Reason.NO_CANDIDATE,
        Reason.CANDIDATE_REFUSED,
        Reason.TIER_INCAPABLE,
        Reason.NO_LEGAL_PATH,
        Reason.ABI_MISMATCH,
        Reason.ADAPTER_MISMATCH,
        Reason.ROPE_MISMATCH,
        Reason.VISIBILITY_POLICY_MISMATCH,
        Reason.CODEC_OR_LAYOUT_MISMATCH,
        Reason.CODEC_NOT_LOSSLESS,
        Reason.HEAD_MAPPING_MISMATCH,
        Reason.SHIFTED_POSITIONS,
        Reason.NAMESPACE_STALE,
        Reason.REQUEST_STALE,
        Reason.PUBLICATION_STALE,
        Reason.INDEX_STALE,
        Reason.INDEX_FRONTIER_LAG,
        Reason.SELECTOR_STALE,
        Reason.UNCOMMITTED_ROWS,
        Reason.GENERATION_NOT_OWNED,
        Reason.SURVIVAL_VIOLATION,
        Reason.COALESCE_KEY_MISMATCH,
        Reason.NO_TOMBSTONE,
        Reason.NO_DELETE_RECEIPT,
        Reason.SNAPSHOT_PARTIAL,
        Reason.PARTIAL_SUPPORT,
        Reason.RECOVERY_INPUTS_NOT_DURABLE,
        Reason.COST_MODEL,
        Reason.SCHEDULE_VIOLATION,
        Reason.PEAK_INCOMPLETE,
        Reason.STAGING_TOO_SMALL,
        Reason.KEY_UNAVAILABLE,
    ),
    grpc.StatusCode.ABORTED: (
        Reason.FENCE_CONFLICT,
        Reason.WRITE_TXN_BUSY,
        Reason.LEASES_HELD,
    ),
    grpc.StatusCode.NOT_FOUND: (
        Reason.CACHE_UNKNOWN,
        Reason.SESSION_UNKNOWN,
        Reason.WINDOW_UNKNOWN,
        Reason.MISS,
    ),
    grpc.StatusCode.PERMISSION_DENIED: (Reason.TENANT_MISMATCH, Reason.CALLER_NOT_OPERATOR),
    grpc.StatusCode.INVALID_ARGUMENT: (
        Reason.MANIFEST_INVALID,
        Reason.FRAME_INVALID,
        Reason.FRONTIER_MISMATCH,
        Reason.STEP_ORDER,
        Reason.BAD_ARGUMENT,
        Reason.IDENTITY_INCOMPLETE,
        Reason.PAYLOAD_GEOMETRY,
        Reason.BLOCK_COVERAGE,
        Reason.HEAD_AMBIGUOUS,
        Reason.DEADLINE_UNANCHORED,
        Reason.FALLBACK_UNKNOWN,
        Reason.UNIT_MISMATCH,
    ),
    grpc.StatusCode.UNIMPLEMENTED: (Reason.UNSUPPORTED,),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (
        Reason.NO_DESTINATION_CAPACITY,
        Reason.CREDIT_PRESSURE,
        Reason.QUEUE_FULL,
        Reason.NO_STAGING,
        Reason.QUOTA_EXCEEDED,
        Reason.WOULD_EVICT_PINNED,
        Reason.ADMISSION_PINNED,
        Reason.WRITE_BUDGET,
    ),
    grpc.StatusCode.DEADLINE_EXCEEDED: (
        Reason.DEADLINE,
        Reason.TRANSFER_TIMEOUT,
        Reason.FETCH_LATE,
    ),
    grpc.StatusCode.UNAVAILABLE: (
        Reason.DRAINING,
        Reason.STORAGE_UNAVAILABLE,
        Reason.FENCE_NOT_DURABLE,
        Reason.TRANSFER_FAILED,
        Reason.STORAGE_LOCKED,
    ),
    grpc.StatusCode.DATA_LOSS: (
        Reason.CHECKSUM_MISMATCH,
        Reason.RECYCLED_DESTINATION,
        Reason.IDENTITY_MISMATCH,
        Reason.SHORT_COPY,
        Reason.STALE_CACHE_GENERATION,
        Reason.NOT_VISIBLE,
        Reason.SUPPORT_GAP,
        Reason.ROW_DIGEST_MISMATCH,
        Reason.STALE_AUTHORITY_EPOCH,
        Reason.TRANSFER_STALE,
        Reason.PARTIAL_RECEIPT_STALE,
        Reason.LATE_RECEIPT,
        Reason.QUERY_MISMATCH,
        Reason.CANDIDATE_OUT_OF_RANGE,
        Reason.DUPLICATE_POSITION,
        Reason.CANDIDATE_USED_AS_PAYLOAD,
        Reason.PARTIAL_RECEIPT_INCOMPLETE,
        Reason.STATE_SCHEMA_MISMATCH,
        Reason.QUERY_IDENTITY_MISMATCH,
        Reason.MASK_MISMATCH,
        Reason.SCORE_SCALE_MISMATCH,
        Reason.SUPPORT_DIGEST_MISMATCH,
        Reason.SUPPORT_OVERLAP,
        Reason.EMPTY_SUPPORT,
        Reason.NO_NORMALISATION_MASS,
        Reason.STATE_SHAPE,
        Reason.DUPLICATE_RECEIPT,
        Reason.RECEIPT_COUNT,
        Reason.UNDECLARED_APPROXIMATION,
        Reason.STATE_INVALID,
        Reason.SUPPORT_OUT_OF_RANGE,
        Reason.TRAFFIC_MISMATCH,
        Reason.ITERATION_TRAFFIC,
        Reason.LEDGER_MIXED,
        Reason.SLOT_REUSE,
        Reason.LATENCY_LEDGER,
        Reason.READ_AMPLIFICATION,
    ),
    grpc.StatusCode.CANCELLED: (Reason.CANCELLED,),
    grpc.StatusCode.INTERNAL: (Reason.INTERNAL,),
}
STATUS_OF = {reason: status for status, reasons in _STATUS.items() for reason in reasons}


def to_detail(error: CoreError) -> common_pb2.ErrorDetail:
    """The wire's form of a refusal; facts and message are cut to their bounds. A hint that the refusal itself
    measured (the fact `retry_after_ms`) goes before the table's."""
    hint = error.facts.get("retry_after_ms", "")
    return common_pb2.ErrorDetail(
        reason=error.reason.name,
        message=error.message[:_MAX_MESSAGE],
        retry_after_ms=int(hint) if hint.isdigit() else _RETRY_AFTER_MS.get(error.reason, 0),
        facts={key: str(value)[:256] for key, value in list(error.facts.items())[:_MAX_FACTS]},
    )


def status_of(error: CoreError) -> grpc.StatusCode:
    return STATUS_OF.get(error.reason, grpc.StatusCode.INTERNAL)
