"""Typed refusals of the core: one closed set of reasons, spelled as on the wire.

Why it exists: a caller decides by reason, a person reads the message, and neither may need the other. The
names equal those of the protocol's `Reason` enum, so an agent maps them by name. It must not know gRPC.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Reason(StrEnum):
    """Closed: adding one is a reviewed change, since metrics use it as a label."""

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
    CALLER_NOT_OPERATOR = "CALLER_NOT_OPERATOR"
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


MAX_FACTS = 16


class CoreError(Exception):
    """A refusal that changed nothing. `reason` is stable, `message` says what decided, `facts` are few."""

    def __init__(self, reason: Reason, message: str, facts: Mapping[str, object] | None = None) -> None:
        super().__init__(f"{reason.value}: {message}")
        self.reason = reason
        self.message = message
        pairs = list((facts or {}).items())[:MAX_FACTS]
        self.facts: dict[str, str] = {name: str(value) for name, value in pairs}
