"""KVSelector: what its family promises, what it must see, and whether this version implements it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from kvtier_operator.conditions import Condition, false, merge, true, unknown
from kvtier_operator.ports import Deps, Done, JsonObject, Kind, ObjectKey, ReconcileOutcome
from kvtier_operator.reconcile.status import write_status
from kvtier_operator.selectors import refusal

OWNED = ("observedGeneration", "guarantee", "needs", "appendable", "conditions")


@dataclass(frozen=True)
class FamilyFacts:
    """What one family of selectors is. `guarantee` speaks of the attention mass that it leaves out; `needs`
    is what it must see; `appendable`: its index follows new rows without being rebuilt.

    Source: the families of the retrieval specification, section D.0 and the paragraphs of each.
    """

    guarantee: str
    needs: tuple[str, ...]
    appendable: bool


FAMILIES: dict[str, FamilyFacts] = {
    "sparq": FamilyFacts("heuristic", ("query",), True),
    "quest": FamilyFacts("upperBound", ("query",), True),
    "infinigen": FamilyFacts("heuristic", ("prefillQueries", "previousHiddenState", "weights"), True),
    "pqcache": FamilyFacts("heuristic", ("query",), True),
    "retrievalAttention": FamilyFacts("heuristic", ("query", "prefillQueries"), False),
    "squeezedAttention": FamilyFacts("heuristic", ("query",), False),
    "magicPig": FamilyFacts("sampled", ("query",), True),
    "infLlm": FamilyFacts("heuristic", ("query", "prefillQueries"), True),
    "emLlm": FamilyFacts("heuristic", ("query", "prefillQueries", "surprisal"), True),
    "clusterKv": FamilyFacts("heuristic", ("query",), True),
    "certifiedScan": FamilyFacts("upperBound", ("query",), True),
}


def plan(selector: JsonObject, now: datetime) -> JsonObject:
    """The status to have. Pure."""
    spec = selector["spec"]
    facts = FAMILIES.get(spec["family"])
    generation = int(selector["metadata"].get("generation") or 1)
    before = (selector.get("status") or {}).get("conditions") or []
    status: JsonObject = {
        "observedGeneration": generation,
        "conditions": merge(before, _conditions(spec, facts), generation=generation, now=now),
    }
    if facts is not None:
        status |= {
            "guarantee": facts.guarantee,
            "needs": list(facts.needs),
            "appendable": facts.appendable,
        }
    return status


def _conditions(spec: JsonObject, facts: FamilyFacts | None) -> list[Condition]:
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
    return [
        true("Accepted", "Valid", "a KVRollout may name this selector"),
        true("IndexReady", "BuiltPerSession", "indexes are built as rows are written under a grant"),
    ]


class KVSelectorReconciler:
    kind = Kind.KV_SELECTOR

    def __init__(self, deps: Deps) -> None:
        self._deps = deps

    async def reconcile(self, key: ObjectKey) -> ReconcileOutcome:
        selector = self._deps.store.get(key)
        if selector is not None and "deletionTimestamp" not in selector["metadata"]:
            await write_status(self._deps.api, selector, plan(selector, self._deps.clock.now()), OWNED)
        return Done()
