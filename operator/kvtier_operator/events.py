"""Which changes of conditions a person must know about. The choice is pure; posting is one call each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier_operator.ports import EventType, JsonObject, KubeApi

GOOD_WHEN_FALSE = ("Degraded", "Progressing")
EXPECTED_REASONS = ("NoBaseline", "NoLiveNodes", "Suspended", "AllWell")


@dataclass(frozen=True)
class Change:
    type: EventType
    reason: str
    message: str


def changes(before: Sequence[JsonObject], after: Sequence[JsonObject], types: Sequence[str]) -> list[Change]:
    """One for each condition of `types` whose status or reason has changed. The first state of an object is
    no news unless it is bad."""
    old = {condition["type"]: (condition["status"], condition["reason"]) for condition in before}
    found = []
    for condition in after:
        name, state = condition["type"], (condition["status"], condition["reason"])
        if name not in types or old.get(name) == state:
            continue
        good = condition["status"] == ("False" if name in GOOD_WHEN_FALSE else "True")
        expected = condition["reason"] in EXPECTED_REASONS or condition["status"] == "Unknown"
        if name not in old and (good or expected):
            continue
        kind = EventType.NORMAL if good or expected else EventType.WARNING
        reason = (
            condition["reason"] if not good else f"{name}{'' if name not in GOOD_WHEN_FALSE else 'Ended'}"
        )
        found.append(Change(kind, reason, f"{name}={condition['status']}: {condition['message']}"))
    return found


async def post_changes(
    api: KubeApi, obj: JsonObject, after: Sequence[JsonObject], types: Sequence[str]
) -> None:
    """Posts what `changes` says of an object whose status has just been written."""
    before = (obj.get("status") or {}).get("conditions") or []
    for change in changes(before, after, types):
        await api.event(obj, change.type, change.reason, change.message)
