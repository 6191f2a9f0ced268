"""The closed vocabulary of moves: kinds, states, and one reason for each guard of B.1 to B.6.

Why it exists: guards, metrics and tests decide by these names, so they are the specification's and each guard
has its own. It must not know directories, tiers or credits.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from kvtier_core.errors import CoreError, Reason


class MoveKind(StrEnum):
    """STORE: a block's first copy, from bytes that no tier holds. DEMOTE, PROMOTE: from one tier to another;
    they differ in guards and in who is the authority afterwards."""

    STORE = "store"
    DEMOTE = "demote"
    PROMOTE = "promote"


class TxnState(StrEnum):
    RESERVED = "RESERVED"
    COPYING = "COPYING"
    VALIDATED = "VALIDATED"
    PUBLISHED = "PUBLISHED"
    RELEASED = "RELEASED"
    DEAD = "DEAD"


class MoveReason(StrEnum):
    """Why something did not happen; READY when it did. Names are the specification's."""

    READY = "READY"
    MISS = "MISS"
    TOMBSTONED = "TOMBSTONED"
    UNCOMMITTED_ROWS = "UNCOMMITTED_ROWS"
    WRITE_TXN_BUSY = "WRITE_TXN_BUSY"
    TIER_INCAPABLE = "TIER_INCAPABLE"
    NO_LEGAL_PATH = "NO_LEGAL_PATH"
    DEADLINE = "DEADLINE"
    NO_STAGING = "NO_STAGING"
    NO_DESTINATION_CAPACITY = "NO_DESTINATION_CAPACITY"
    KEPT_CAPACITY = "KEPT_CAPACITY"
    WRITE_BUDGET = "WRITE_BUDGET"
    CREDIT_PRESSURE = "CREDIT_PRESSURE"
    QUOTA_EXCEEDED = "QUOTA_EXCEEDED"
    QUEUE_FULL = "QUEUE_FULL"
    STORAGE_UNAVAILABLE = "STORAGE_UNAVAILABLE"
    CANCELLED = "CANCELLED"
    STALE_CACHE_GENERATION = "STALE_CACHE_GENERATION"
    RECYCLED_DESTINATION = "RECYCLED_DESTINATION"
    IDENTITY_MISMATCH = "IDENTITY_MISMATCH"
    SHORT_COPY = "SHORT_COPY"
    TRANSFER_STALE = "TRANSFER_STALE"
    TRANSFER_FAILED = "TRANSFER_FAILED"
    TRANSFER_TIMEOUT = "TRANSFER_TIMEOUT"
    FETCH_LATE = "FETCH_LATE"
    CODEC_OR_LAYOUT_MISMATCH = "CODEC_OR_LAYOUT_MISMATCH"
    CHECKSUM_MISMATCH = "CHECKSUM_MISMATCH"
    POSITION_CONTRACT_MISMATCH = "POSITION_CONTRACT_MISMATCH"
    TENANT_MISMATCH = "TENANT_MISMATCH"
    REQUEST_STALE = "REQUEST_STALE"
    NOT_VISIBLE = "NOT_VISIBLE"
    STALE_AUTHORITY_EPOCH = "STALE_AUTHORITY_EPOCH"
    LEASES_HELD = "LEASES_HELD"
    LEASE_EXPIRED = "LEASE_EXPIRED"
    SURVIVAL_VIOLATION = "SURVIVAL_VIOLATION"
    WOULD_EVICT_PINNED = "WOULD_EVICT_PINNED"
    GENERATION_NOT_OWNED = "GENERATION_NOT_OWNED"
    VALIDATION_FAILED = "VALIDATION_FAILED"
    DEPENDENCY_UNPUBLISHED = "DEPENDENCY_UNPUBLISHED"
    COALESCE_KEY_MISMATCH = "COALESCE_KEY_MISMATCH"
    LOOKUP_IN_FLIGHT = "LOOKUP_IN_FLIGHT"
    NO_TOMBSTONE = "NO_TOMBSTONE"
    NO_DELETE_RECEIPT = "NO_DELETE_RECEIPT"


# Reasons that the wire spells otherwise; every other name is the wire's own.
_WIRE: dict[MoveReason, Reason] = {
    MoveReason.TOMBSTONED: Reason.NOT_VISIBLE,
    MoveReason.VALIDATION_FAILED: Reason.IDENTITY_MISMATCH,
    MoveReason.DEPENDENCY_UNPUBLISHED: Reason.NOT_VISIBLE,
    MoveReason.LOOKUP_IN_FLIGHT: Reason.LEASES_HELD,
}


class MoveRefused(CoreError):
    """A guard failed. `code` is the specification's reason, `reason` the wire's."""

    def __init__(self, code: MoveReason, message: str, facts: Mapping[str, object] | None = None) -> None:
        reason = _WIRE.get(code) or Reason(code.value)
        super().__init__(reason, message, {"move": code.value, **(facts or {})})
        self.code = code


def refusal(error: CoreError, otherwise: MoveReason = MoveReason.TRANSFER_FAILED) -> MoveRefused:
    """A tier's or ledger's error as a refused move: the same name where the vocabulary has it."""
    if isinstance(error, MoveRefused):
        return error
    known = MoveReason.__members__.get(error.reason.name, otherwise)
    return MoveRefused(known, error.message, error.facts)
