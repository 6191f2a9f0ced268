"""A rollout's spec as the machine reads it, with the probe sets that its gates name.

A probe set that cannot be read keeps nobody from ending: while an attempt walks it is judged by what was read
last, by this process or by the one that opened the window, and goes nowhere; an abort, a deletion or a
deadline needs none. It must not decide about a rollout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvtier_crds.quantity import QuantityError, parse_duration
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
        state: RolloutState,
        exact: bool | None,
        max_age: float,
        walks: bool,
    ) -> SpecRead:
        """known: what was read last. seen: probe sets of this run, by ConfigMap. walks: what a probe set
        holds decides. Raises ApiError where it does and nobody knows what the window is judged by."""
        raw, metadata = rollout.get("spec") or {}, rollout["metadata"]
        generation = metadata.get("generation")
        probes: dict[str, ProbeSet] = {}
        unread = ""
        for name in probe_names(raw.get("gates")):
            if name in seen:
                probes[name] = seen[name]
                continue
            where = ObjectKey(Kind.CONFIG_MAP, key.namespace, name)
            try:
                probes[name] = seen[name] = await self._probes.get(where, metadata["uid"], max_age)
            except ApiError as error:
                said = f"cannot be read: {error.status} {error.reason}"
                if known is not None and known.generation == generation:
                    return replace(known, unread=f"ConfigMap {name} {said}")
                # One that the window does not know came with an edit, which opens another window.
                probes[name] = ProbeSet("", 0, problem=said)
                last = _read_last(known, state)
                if last is None and walks:
                    raise
                if last is None:
                    seen[name] = probes[name]
                    continue
                probes[name] = last.get(name, probes[name])
                unread = unread or f"ConfigMap {name} {said}"
        given = generation, tuple(sorted(probes.items())), exact
        if known is not None and known.given == given:
            return replace(known, unread=unread) if known.unread != unread else known
        return SpecRead(generation, given, read_spec(raw, probes, exact), unread)


def _read_last(known: SpecRead | None, state: RolloutState) -> dict[str, ProbeSet] | None:
    """Probe sets by ConfigMap: of the spec before an edit, else of the open window, as its status has them;
    None where neither tells."""
    if known is not None and known.parsed.spec is not None:
        return dict(known.parsed.spec.probes)
    if state.window is None or not state.window.probes:
        return None
    return {name: ProbeSet(digest, size) for name, digest, size in state.window.probes}


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


def kept_for(rollout: JsonObject) -> float | None:
    """Seconds that it is kept once it has ended; None for ever: it does not say, or nobody can read it."""
    seconds = duration_of(rollout, "ttlAfterFinished", -1.0)
    return None if seconds < 0 else seconds


def duration_of(rollout: JsonObject, name: str, default: float, unreadable: float | None = None) -> float:
    """Read by itself, since it counts also when the rest of the spec cannot be run."""
    text = (rollout.get("spec") or {}).get(name)
    try:
        return parse_duration(text, f"spec.{name}") if text else default
    except QuantityError:
        return default if unreadable is None else unreadable
