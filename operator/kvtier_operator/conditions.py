"""metav1 conditions as values: built fresh by each plan, merged so that only a change moves time. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from kvtier_operator.fleet import format_time
from kvtier_operator.ports import JsonObject

MESSAGE_LIMIT = 1024


class Truth(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


@dataclass(frozen=True)
class Condition:
    """What one condition should say now. `reason` is CamelCase and stable; `message` is for people."""

    type: str
    status: Truth
    reason: str
    message: str = ""


def true(type: str, reason: str, message: str = "") -> Condition:
    return Condition(type, Truth.TRUE, reason, message)


def false(type: str, reason: str, message: str = "") -> Condition:
    return Condition(type, Truth.FALSE, reason, message)


def unknown(type: str, reason: str, message: str = "") -> Condition:
    return Condition(type, Truth.UNKNOWN, reason, message)


def merge(
    before: Sequence[JsonObject], wanted: Iterable[Condition], *, generation: int, now: datetime
) -> list[JsonObject]:
    """The conditions to write, sorted by type. lastTransitionTime moves only with the status; of two wanted
    ones of a type the last counts. Types that are not wanted are dropped: a plan names all it owns."""
    old = {condition["type"]: condition for condition in before}
    merged: dict[str, JsonObject] = {}
    for condition in wanted:
        previous = old.get(condition.type)
        same = previous is not None and previous.get("status") == condition.status.value
        since = previous["lastTransitionTime"] if previous is not None and same else format_time(now)
        merged[condition.type] = {
            "type": condition.type,
            "status": condition.status.value,
            "reason": condition.reason,
            "message": condition.message[:MESSAGE_LIMIT],
            "observedGeneration": generation,
            "lastTransitionTime": since,
        }
    return [merged[type] for type in sorted(merged)]
