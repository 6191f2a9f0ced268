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
    Reason.NO_DESTINATION_CAPACITY: 1000,
    Reason.FENCE_NOT_DURABLE: 1000,
    Reason.STORAGE_UNAVAILABLE: 1000,
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
    ),
    grpc.StatusCode.ABORTED: (Reason.FENCE_CONFLICT,),
    grpc.StatusCode.NOT_FOUND: (Reason.CACHE_UNKNOWN, Reason.SESSION_UNKNOWN, Reason.WINDOW_UNKNOWN),
    grpc.StatusCode.PERMISSION_DENIED: (Reason.TENANT_MISMATCH, Reason.CALLER_NOT_OPERATOR),
    grpc.StatusCode.INVALID_ARGUMENT: (
        Reason.MANIFEST_INVALID,
        Reason.FRAME_INVALID,
        Reason.FRONTIER_MISMATCH,
        Reason.STEP_ORDER,
        Reason.BAD_ARGUMENT,
    ),
    grpc.StatusCode.UNIMPLEMENTED: (Reason.UNSUPPORTED,),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (
        Reason.NO_DESTINATION_CAPACITY,
        Reason.CREDIT_PRESSURE,
        Reason.QUEUE_FULL,
    ),
    grpc.StatusCode.DEADLINE_EXCEEDED: (Reason.DEADLINE,),
    grpc.StatusCode.UNAVAILABLE: (
        Reason.DRAINING,
        Reason.STORAGE_UNAVAILABLE,
        Reason.FENCE_NOT_DURABLE,
    ),
    grpc.StatusCode.DATA_LOSS: (
        Reason.CHECKSUM_MISMATCH,
        Reason.RECYCLED_DESTINATION,
        Reason.IDENTITY_MISMATCH,
        Reason.SHORT_COPY,
        Reason.STALE_CACHE_GENERATION,
        Reason.NOT_VISIBLE,
        Reason.SUPPORT_GAP,
    ),
    grpc.StatusCode.INTERNAL: (Reason.INTERNAL,),
}
STATUS_OF = {reason: status for status, reasons in _STATUS.items() for reason in reasons}


def to_detail(error: CoreError) -> common_pb2.ErrorDetail:
    """The wire's form of a refusal; facts and message are cut to their bounds."""
    return common_pb2.ErrorDetail(
        reason=error.reason.name,
        message=error.message[:_MAX_MESSAGE],
        retry_after_ms=_RETRY_AFTER_MS.get(error.reason, 0),
        facts={key: str(value)[:256] for key, value in list(error.facts.items())[:_MAX_FACTS]},
    )


def status_of(error: CoreError) -> grpc.StatusCode:
    return STATUS_OF.get(error.reason, grpc.StatusCode.INTERNAL)
