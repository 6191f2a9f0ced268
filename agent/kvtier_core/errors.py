"""One typed refusal for the whole core, so that a caller decides by reason and never by text.

The names equal those of the wire's `Reason`, which this package must not import. Nothing is raised for a cause
that has no name here.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Reason(StrEnum):
    """Closed set; names and values equal the wire's."""

    FENCE_STALE = "FENCE_STALE"
    FENCE_CONFLICT = "FENCE_CONFLICT"
    BOOT_ID_MISMATCH = "BOOT_ID_MISMATCH"
    GENERATION_STALE = "GENERATION_STALE"
    LEASE_EXPIRED = "LEASE_EXPIRED"
    WINDOW_UNKNOWN = "WINDOW_UNKNOWN"
    CACHE_UNKNOWN = "CACHE_UNKNOWN"
    MODEL_MISMATCH = "MODEL_MISMATCH"
    GEOMETRY_MISMATCH = "GEOMETRY_MISMATCH"
    TENANT_MISMATCH = "TENANT_MISMATCH"
    POSITION_CONTRACT_MISMATCH = "POSITION_CONTRACT_MISMATCH"
    SESSION_UNKNOWN = "SESSION_UNKNOWN"
    MANIFEST_MISMATCH = "MANIFEST_MISMATCH"
    MANIFEST_INVALID = "MANIFEST_INVALID"
    NUMERICS_MISMATCH = "NUMERICS_MISMATCH"
    FRAME_INVALID = "FRAME_INVALID"
    FRONTIER_MISMATCH = "FRONTIER_MISMATCH"
    STEP_ORDER = "STEP_ORDER"
    UNSUPPORTED = "UNSUPPORTED"
    BAD_ARGUMENT = "BAD_ARGUMENT"
    NO_DESTINATION_CAPACITY = "NO_DESTINATION_CAPACITY"
    CREDIT_PRESSURE = "CREDIT_PRESSURE"
    QUEUE_FULL = "QUEUE_FULL"
    DEADLINE = "DEADLINE"
    DRAINING = "DRAINING"
    NO_LEGAL_PATH = "NO_LEGAL_PATH"
    STORAGE_UNAVAILABLE = "STORAGE_UNAVAILABLE"
    TIER_INCAPABLE = "TIER_INCAPABLE"
    CHECKSUM_MISMATCH = "CHECKSUM_MISMATCH"
    RECYCLED_DESTINATION = "RECYCLED_DESTINATION"
    IDENTITY_MISMATCH = "IDENTITY_MISMATCH"
    SHORT_COPY = "SHORT_COPY"
    STALE_CACHE_GENERATION = "STALE_CACHE_GENERATION"
    NOT_VISIBLE = "NOT_VISIBLE"
    SUPPORT_GAP = "SUPPORT_GAP"
    NO_CANDIDATE = "NO_CANDIDATE"
    CANDIDATE_REFUSED = "CANDIDATE_REFUSED"
    FENCE_NOT_DURABLE = "FENCE_NOT_DURABLE"
    INTERNAL = "INTERNAL"


class CoreError(Exception):
    """A refusal that left everything as it was. `facts` holds the numbers that decided."""

    def __init__(self, reason: Reason, message: str, facts: Mapping[str, str] | None = None) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message
        self.facts: dict[str, str] = dict(facts or {})
