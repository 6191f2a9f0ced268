"""KVSelector: what its family promises and must see, whether agents run it, and how its indexes stand."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from kvtier_operator.conditions import Condition, false, merge, true, unknown
from kvtier_operator.ports import Deps, Done, JsonObject, Kind, ObjectKey, ReconcileOutcome, Requeue
from kvtier_operator.reconcile.selector_indexes import (
    CacheIndexes,
    StateCache,
    ask,
    holdings,
    index_ready,
    moved,
)
from kvtier_operator.reconcile.status import write_status
from kvtier_operator.selectorfacts import FamilyFacts, facts_of, slower
from kvtier_operator.selectors import refusal

OWNED = ("observedGeneration", "guarantee", "needs", "appendable", "indexes", "conditions")
LOOK_SECONDS = 30.0
QUIET_WRITE_SECONDS = 60.0


def plan(selector: JsonObject, now: datetime, indexes: Sequence[CacheIndexes] = ()) -> JsonObject:
    """The status to have. Pure. indexes: of every cache that holds it as a candidate now."""
    spec = selector["spec"]
    facts = facts_of(spec)
    generation = int(selector["metadata"].get("generation") or 1)
    before = (selector.get("status") or {}).get("conditions") or []
    conditions = _conditions(spec, facts, indexes)
    status: JsonObject = {
        "observedGeneration": generation,
        "conditions": merge(before, conditions, generation=generation, now=now),
    }
    if facts is not None:
        status |= {
            "guarantee": facts.guarantee,
            "needs": list(facts.needs),
            "appendable": facts.appendable,
        }
    if indexes:
        status["indexes"] = [one.to_json() for one in indexes]
    return status


def _conditions(
    spec: JsonObject, facts: FamilyFacts | None, indexes: Sequence[CacheIndexes]
) -> list[Condition]:
    if facts is None:
        return [
            false("Accepted", "UnknownFamily", f"spec.family {spec['family']} is not known to this version")
        ]
    refused = refusal(spec)
    if refused is not None:
        return [
            false("Accepted", refused.reason, refused.message),
            unknown("IndexReady", refused.reason, "no agent builds this index"),
        ]
    told = "; ".join(filter(None, ("a KVRollout may name this selector", slower(spec))))
    return [true("Accepted", "Valid", told), index_ready(indexes)]


def must_write(before: JsonObject, after: JsonObject, quiet_for: float) -> bool:
    """Numbers alone are written once a minute, and only when they moved; all else at once. A message is made
    of the same numbers."""
    if _words(before) != _words(after):
        return True
    return quiet_for >= QUIET_WRITE_SECONDS and moved(before, after)


def _words(status: JsonObject) -> JsonObject:
    """All but the numbers of indexes and what is printed of them."""
    kept = {name: value for name, value in status.items() if name != "indexes"}
    kept["conditions"] = [
        {name: value for name, value in row.items() if name != "message" or row["type"] != "IndexReady"}
        for row in status.get("conditions") or []
    ]
    kept["caches"] = [row["cache"] for row in status.get("indexes") or []]
    return kept


class KVSelectorReconciler:
    kind = Kind.KV_SELECTOR

    def __init__(self, deps: Deps) -> None:
        self._deps = deps
        self._written: dict[str, float] = {}
        # A little less than a look, or every second look would find what the one before has found.
        self._states = StateCache(deps.agents, deps.clock, LOOK_SECONDS * 0.9)

    async def reconcile(self, key: ObjectKey) -> ReconcileOutcome:
        deps = self._deps
        selector = deps.store.get(key)
        if selector is None or "deletionTimestamp" in selector["metadata"]:
            return Done()
        held = holdings(selector, deps.store)
        indexes = [await ask(self._states, deps.fleet.members(*one.pool), one) for one in held]
        self._states.trim()
        wanted = plan(selector, deps.clock.now(), indexes)
        uid, now = selector["metadata"]["uid"], deps.clock.monotonic()
        quiet_for = now - self._written.get(uid, float("-inf"))
        due = must_write(selector.get("status") or {}, wanted, quiet_for)
        if due and await write_status(deps.api, selector, wanted, OWNED):
            self._written[uid] = now
        if not held:
            self._written.pop(uid, None)
            return Done()
        return Requeue(LOOK_SECONDS, "indexes")
