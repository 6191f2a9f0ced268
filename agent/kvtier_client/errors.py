"""One exception for every refusal that reaches an engine, with the wire's closed set of reasons.

It exists so that an engine decides by reason and a person reads the message. It must not know a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpc

from kvtier.v1 import common_pb2
from kvtier_core.errors import Reason

ERROR_METADATA_KEY = "kvtier-error-bin"

# Statuses that gRPC itself gives, without a detail of ours.
_BY_STATUS = {
    grpc.StatusCode.DEADLINE_EXCEEDED: Reason.DEADLINE,
    grpc.StatusCode.UNIMPLEMENTED: Reason.UNSUPPORTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Reason.FRAME_INVALID,
}


class KvtierError(Exception):
    """A typed refusal. `status` is the gRPC status name, empty when the refusal is the client's own; `typed`:
    the agent said why, so that the reason is its own and not read from the status."""

    def __init__(
        self,
        reason: Reason,
        message: str,
        facts: Mapping[str, str] | None = None,
        *,
        retry_after_ms: int = 0,
        status: str = "",
        typed: bool = False,
    ) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message
        self.facts: dict[str, str] = dict(facts or {})
        self.retry_after_ms = retry_after_ms
        self.status = status
        self.typed = typed


def from_detail(detail: common_pb2.ErrorDetail, status: str = "") -> KvtierError:
    """A refusal as the agent typed it; a reason this version does not know reads INTERNAL."""
    facts = dict(detail.facts)
    try:
        reason = Reason(common_pb2.Reason.Name(detail.reason))
    except ValueError:
        reason = Reason.INTERNAL
        facts["unknown_reason"] = str(detail.reason)
    return KvtierError(
        reason, detail.message, facts, retry_after_ms=detail.retry_after_ms, status=status, typed=True
    )


def from_rpc(error: grpc.RpcError) -> KvtierError:
    """A failed call: by its detail if there is one, else by its status. UNAVAILABLE reads DRAINING,
    since both mean: not this agent, not now."""
    code = error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNKNOWN
    text = (error.details() if isinstance(error, grpc.Call) else None) or str(error)
    trailing: Any = error.trailing_metadata() if isinstance(error, grpc.Call) else None
    for key, value in trailing or ():
        if key == ERROR_METADATA_KEY and isinstance(value, bytes):
            detail = common_pb2.ErrorDetail()
            detail.ParseFromString(value)
            return from_detail(detail, code.name)
    reason = Reason.DRAINING if code is grpc.StatusCode.UNAVAILABLE else _BY_STATUS.get(code, Reason.INTERNAL)
    return KvtierError(reason, text, status=code.name)
