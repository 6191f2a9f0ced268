"""Names of what is wrong with a claim about an answer: what it was over, what it cost, how it was decided.

Why it exists: those who decide online and those who measure offline refuse the same things by the same names.
It must not know either. Names: specification N.9.
"""

from __future__ import annotations

from enum import StrEnum


class OutcomeReason(StrEnum):
    """Names of N.9. These never travel: whoever finds one does not publish the record."""

    REQUEST_STALE = "REQUEST_STALE"
    STALE_CACHE_GENERATION = "STALE_CACHE_GENERATION"
    INDEX_STALE = "INDEX_STALE"
    QUERY_MISMATCH = "QUERY_MISMATCH"
    QUERY_IDENTITY_MISMATCH = "QUERY_IDENTITY_MISMATCH"
    HEAD_MAPPING_MISMATCH = "HEAD_MAPPING_MISMATCH"
    MASK_MISMATCH = "MASK_MISMATCH"
    TENANT_MISMATCH = "TENANT_MISMATCH"
    PAYLOAD_GEOMETRY = "PAYLOAD_GEOMETRY"
    STATE_INVALID = "STATE_INVALID"
    CODEC_OR_LAYOUT_MISMATCH = "CODEC_OR_LAYOUT_MISMATCH"
    COST_UNIT = "COST_UNIT"
    LEDGER_MIXED = "LEDGER_MIXED"
    UNIT_PARTITION = "UNIT_PARTITION"
    CANDIDATE_OUT_OF_RANGE = "CANDIDATE_OUT_OF_RANGE"
    DUPLICATE_POSITION = "DUPLICATE_POSITION"
    NAMESPACE_MISMATCH = "NAMESPACE_MISMATCH"
    SUPPORT_OVERLAP = "SUPPORT_OVERLAP"
    SUPPORT_OUT_OF_RANGE = "SUPPORT_OUT_OF_RANGE"
    METRIC_CONTRACT = "METRIC_CONTRACT"
    EMPTY_SUPPORT = "EMPTY_SUPPORT"
    GATE_INPUT = "GATE_INPUT"
    EXACTNESS_MISSING = "EXACTNESS_MISSING"
    EXACTNESS_CONFLICT = "EXACTNESS_CONFLICT"
    FALLBACK_PHASE = "FALLBACK_PHASE"
    DEADLINE = "DEADLINE"
    RETRY_CONTRACT = "RETRY_CONTRACT"
    ILLEGAL_ACTION = "ILLEGAL_ACTION"


class OutcomeRefused(Exception):
    def __init__(self, reason: OutcomeReason, message: str) -> None:
        super().__init__(f"{reason.value}: {message}")
        self.reason = reason


def refuse_if(failed: bool, reason: OutcomeReason, message: str) -> None:
    if failed:
        raise OutcomeRefused(reason, message)
