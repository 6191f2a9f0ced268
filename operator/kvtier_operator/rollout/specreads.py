"""A rollout's spec as the machine reads it, with the probe sets that its gates name.

A probe set that cannot be read keeps nobody from ending: while an attempt walks it is judged by what was read
last and goes nowhere; an abort, a deletion or a deadline needs none. It must not decide about a rollout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvtier_operator.ports import ApiError, Deps, JsonObject, Kind, ObjectKey
from kvtier_operator.rollout.gateset import ProbeSet, probe_names
from kvtier_operator.rollout.probereads import ProbeReads
from kvtier_operator.rollout.spec import Parsed, SpecError, parse_intent, read_spec
from kvtier_operator.rollout.state import RolloutState
from kvtier_operator.rollout.vocabulary import Verb


@dataclass(frozen=True)
class SpecRead:
    """given: what it was read from. unread: which probe set could not be read this time, and why."""

    generation: object
    given: object
    parsed: Parsed
    unread: str = ""


class SpecReads:
    """One per reconciler."""

    def __init__(self, deps: Deps) -> None:
        self._probes = ProbeReads(deps.api, deps.clock)

    async def read(
        self,
        key: ObjectKey,
        rollout: JsonObject,
        known: SpecRead | None,
        seen: dict[str, ProbeSet],
        *,
        exact: bool | None,
        max_age: float,
        walks: bool,
    ) -> SpecRead:
        """known: what was read last. seen: probe sets of this run, by ConfigMap. walks: what a probe set
        holds decides. Raises ApiError where nothing was ever read and it does."""
        raw, metadata = rollout.get("spec") or {}, rollout["metadata"]
        generation = metadata.get("generation")
        probes: dict[str, ProbeSet] = {}
        for name in probe_names(raw.get("gates")):
            if name not in seen:
                where = ObjectKey(Kind.CONFIG_MAP, key.namespace, name)
                try:
                    seen[name] = await self._probes.get(where, metadata["uid"], max_age)
                except ApiError as error:
                    said = f"cannot be read: {error.status} {error.reason}"
                    if known is not None and known.generation == generation:
                        return replace(known, unread=f"ConfigMap {name} {said}")
                    if walks:
                        raise
                    seen[name] = ProbeSet("", 0, problem=said)
            probes[name] = seen[name]
        given = generation, tuple(sorted(probes.items())), exact
        if known is not None and known.given == given:
            return replace(known, unread="") if known.unread else known
        return SpecRead(generation, given, read_spec(raw, probes, exact))


def asks_to_end(rollout: JsonObject, state: RolloutState) -> bool:
    """Whether a person has said that it ends: by a deletion, or an abort that is not answered yet."""
    if "deletionTimestamp" in rollout["metadata"]:
        return True
    try:
        intent = parse_intent(rollout.get("spec") or {})
    except SpecError:
        return False
    answered = state.last_intent.seq if state.last_intent is not None else 0
    return intent is not None and intent.verb is Verb.ABORT and intent.seq > answered
