"""Turns a failed RPC into one of the two typed errors of `ports`. Pure.

An agent that refuses says why in the trailing metadata; everything else means that it was not reached, or
that what answered does not speak our protocol.
"""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf.message import DecodeError

from kvtier.v1 import common_pb2 as common
from kvtier_operator.ports import AgentError, AgentUnreachable

ERROR_KEY = "kvtier-error-bin"
UNKNOWN_REASON = "REASON_UNKNOWN"
_REASONS = frozenset(common.Reason.keys())


def error_for(
    node: str, code: str, details: str, trailing: Iterable[tuple[str, str | bytes]]
) -> AgentError | AgentUnreachable:
    """`code` is the gRPC status name, `trailing` the trailing metadata."""
    for key, value in trailing:
        if key == ERROR_KEY and isinstance(value, bytes):
            detail = common.ErrorDetail()
            try:
                detail.ParseFromString(value)
            except DecodeError:
                return AgentUnreachable(node, code, f"unreadable error detail: {details}")
            return agent_error(node, detail)
    return AgentUnreachable(node, code, details[:300])


def agent_error(node: str, detail: common.ErrorDetail) -> AgentError:
    """An unknown reason number (a newer agent) becomes its digits: typed, and never taken for another."""
    try:
        reason = common.Reason.Name(detail.reason)
    except ValueError:
        reason = f"REASON_{int(detail.reason)}"
    return AgentError(node, reason, detail.message, detail.retry_after_ms / 1000.0, dict(detail.facts))


def reason_label(reason: str) -> str:
    """Of a metric, whose labels are of a fixed set: every number that is not known here has one."""
    return reason if reason in _REASONS else UNKNOWN_REASON
