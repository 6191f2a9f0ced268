"""TierClass: says whether this version can use a class. The spec is immutable, so this is said once."""

from __future__ import annotations

from datetime import datetime

from kvtier_operator.conditions import Condition, false, merge, true
from kvtier_operator.ports import Deps, Done, JsonObject, Kind, ObjectKey, ReconcileOutcome
from kvtier_operator.reconcile.status import write_status

OWNED = ("observedGeneration", "conditions")
IMPLEMENTED_MEDIA = ("gpu", "cpu", "nvme")


def plan(tier_class: JsonObject, now: datetime) -> JsonObject:
    """The status to have. Pure."""
    generation = int(tier_class["metadata"].get("generation") or 1)
    before = (tier_class.get("status") or {}).get("conditions") or []
    return {
        "observedGeneration": generation,
        "conditions": merge(before, [_accepted(tier_class["spec"])], generation=generation, now=now),
    }


def _accepted(spec: JsonObject) -> Condition:
    medium = spec["medium"]
    if medium not in IMPLEMENTED_MEDIA:
        return false(
            "Accepted",
            "NotImplemented",
            f"spec.medium {medium} is declared but no agent implements it; implemented: "
            f"{', '.join(IMPLEMENTED_MEDIA)}",
        )
    return true("Accepted", "Valid", "agents may offer this class")


class TierClassReconciler:
    kind = Kind.TIER_CLASS

    def __init__(self, deps: Deps) -> None:
        self._deps = deps

    async def reconcile(self, key: ObjectKey) -> ReconcileOutcome:
        tier_class = self._deps.store.get(key)
        if tier_class is not None and "deletionTimestamp" not in tier_class["metadata"]:
            await write_status(self._deps.api, tier_class, plan(tier_class, self._deps.clock.now()), OWNED)
        return Done()
