"""Turns an HTTP answer of the API server into one of the typed errors of `ports`. Pure."""

from __future__ import annotations

import json

from kvtier_operator.ports import AlreadyExists, ApiError, Conflict, Forbidden, Invalid, JsonObject, NotFound


def error_for(status: int, body: bytes, *, creating: bool, retry_after: str | None = None) -> ApiError:
    """A failed `test` of a JSON patch and an object that breaks its schema are both 422; only the latter
    names an object and causes in its details."""
    answer = _parse(body)
    reason = str(answer.get("reason") or "Unknown")
    message = str(answer.get("message") or body[:500].decode("utf-8", "replace"))
    details = answer.get("details") or {}
    if status == 404:
        return NotFound(status, reason, message)
    if status in (401, 403):
        return Forbidden(status, reason, message)
    if status == 409:
        return AlreadyExists(status, reason, message) if creating else Conflict(status, reason, message)
    if status == 422:
        named = bool(details.get("kind")) or bool(details.get("causes"))
        return Invalid(status, reason, message) if named else Conflict(status, reason, message)
    return ApiError(status, reason, message, _seconds(retry_after, details))


def _parse(body: bytes) -> JsonObject:
    try:
        answer = json.loads(body)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _seconds(retry_after: str | None, details: JsonObject) -> float:
    try:
        return float(retry_after or details.get("retryAfterSeconds") or 0)
    except ValueError:
        return 0.0
