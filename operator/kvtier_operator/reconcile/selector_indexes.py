"""IndexReady of a KVSelector: what agents say of the indexes that its sessions have, cache by cache.

Why it exists: an approximate candidate whose index is not built yet is answered exactly, which costs time and
nobody would see. Numbers move with every session, so they are written when what they say has changed, and
else at most once a minute. Pure but for `ask`. It must not know how an index is built.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.v1 import control_pb2 as control
from kvtier_operator.conditions import Condition, false, true, unknown
from kvtier_operator.ports import (
    AgentError,
    Agents,
    AgentTarget,
    AgentUnreachable,
    Clock,
    JsonObject,
    Kind,
    NodeView,
    ObjectKey,
    Store,
)
from kvtier_operator.rollout.candidate import selector_named
from kvtier_operator.store import cache_of

HELD_STAGES = ("Shadow", "Canary", "Ramp", "Full")
MAX_CACHES = 16
MAX_NAMES = 4
RELATIVE_CHANGE = 0.05
_COUNTS = ("ready", "building", "refused")
_MOVING = ("agents", "hiddenSeconds", "exposedSeconds", "bytes")


@dataclass(frozen=True)
class Holding:
    """A rollout that holds a candidate with this selector: whose cache, and what agents know it by."""

    cache: str
    cache_uid: str
    pool: tuple[str, str]
    digest: str


@dataclass
class CacheIndexes:
    """One cache's, over its agents. silent: who did not answer. refusals: sessions by reason."""

    cache: str
    agents: int = 0
    ready: int = 0
    building: int = 0
    refused: int = 0
    hidden_seconds: float = 0.0
    exposed_seconds: float = 0.0
    bytes: int = 0
    silent: list[str] = field(default_factory=list)
    refusals: dict[str, int] = field(default_factory=dict)

    def add(self, state: control.GetStateResponse, holding: Holding) -> None:
        """What one agent says, where it holds that candidate."""
        held = next((one for one in state.caches if one.cache.uid == holding.cache_uid), None)
        if held is None or held.candidate.digest != holding.digest:
            return
        self.agents += 1
        for one in held.indexes:
            if not one.of_candidate:
                continue
            self.ready += one.ready
            self.building += one.building
            self.refused += one.refused
            self.hidden_seconds += one.hidden_seconds
            self.exposed_seconds += one.exposed_seconds
            self.bytes += one.index_bytes + one.waiting_bytes
            for reason, count in one.refusals.items():
                self.refusals[reason] = self.refusals.get(reason, 0) + count

    def to_json(self) -> JsonObject:
        return {
            "cache": self.cache,
            "agents": self.agents,
            "ready": self.ready,
            "building": self.building,
            "refused": self.refused,
            "hiddenSeconds": f"{self.hidden_seconds:.2f}",
            "exposedSeconds": f"{self.exposed_seconds:.2f}",
            "bytes": self.bytes,
        }


def holdings(selector: JsonObject, store: Store) -> list[Holding]:
    """Of all unfinished and approved rollouts of the namespace that hold a candidate with this selector."""
    namespace, name = selector["metadata"]["namespace"], selector["metadata"]["name"]
    found = {}
    for rollout in store.list_all(Kind.KV_ROLLOUT, namespace):
        status = rollout.get("status") or {}
        digest = (status.get("candidate") or {}).get("digest")
        if status.get("stage") not in HELD_STAGES or not digest:
            continue
        cache = store.get(ObjectKey(Kind.KV_CACHE, namespace, cache_of(rollout)))
        if cache is None or selector_named(rollout["spec"].get("candidate"), cache) != name:
            continue
        pool = namespace, cache["spec"]["poolRef"]["name"]
        found[cache["metadata"]["name"]] = Holding(
            cache["metadata"]["name"], cache["metadata"]["uid"], pool, digest
        )
    return [found[name] for name in sorted(found)][:MAX_CACHES]


class StateCache:
    """What agents have said, while it is fresh: an agent is asked once for all selectors and caches."""

    def __init__(self, agents: Agents, clock: Clock, fresh_seconds: float) -> None:
        self._agents = agents
        self._clock = clock
        self._fresh = fresh_seconds
        self._known: dict[str, tuple[float, control.GetStateResponse | None]] = {}

    async def of(self, target: AgentTarget) -> control.GetStateResponse | None:
        """None: it does not answer."""
        now = self._clock.monotonic()
        at, known = self._known.get(target.name, (float("-inf"), None))
        if now - at < self._fresh:
            return known
        try:
            answer = await self._agents.get_state(target)
        except (AgentError, AgentUnreachable):
            answer = None
        self._known[target.name] = now, answer
        return answer

    def trim(self) -> None:
        """Forgets what is not fresh."""
        oldest = self._clock.monotonic() - self._fresh
        self._known = {name: row for name, row in self._known.items() if row[0] > oldest}


async def ask(states: StateCache, members: Sequence[NodeView], holding: Holding) -> CacheIndexes:
    """Of all live agents, at once."""
    live = [member for member in members if member.live]
    answers = await asyncio.gather(*(states.of(member.target) for member in live))
    found = CacheIndexes(holding.cache)
    found.silent += [member.target.name for member in members if not member.live]
    for member, answer in zip(live, answers, strict=True):
        if answer is None:
            found.silent.append(member.target.name)
        else:
            found.add(answer, holding)
    return found


def index_ready(found: Sequence[CacheIndexes]) -> Condition:
    """True: some session has its index and none is without one for good; False: sessions are, and wait."""
    if not any(one.agents for one in found):
        silent = sorted({name for one in found for name in one.silent})
        if silent:
            return unknown("IndexReady", "AgentsSilent", f"no answer from {_names(silent)}")
        return unknown("IndexReady", "NotHeld", "no agent holds a candidate with this selector")
    ready, building, refused = (sum(getattr(one, name) for one in found) for name in _COUNTS)
    sentence = "; ".join(_sentence(one) for one in found)
    if not ready + building + refused:
        return unknown("IndexReady", "NoSessions", f"no session is open; {sentence}")
    if refused and not ready + building:
        return false("IndexReady", "Refused", sentence)
    if building and not ready:
        return false("IndexReady", "Building", sentence)
    return true("IndexReady", "Partly" if building or refused else "Ready", sentence)


def _sentence(one: CacheIndexes) -> str:
    parts = [
        f"KVCache {one.cache} on {one.agents} agents: {one.ready} sessions ready, {one.building} building, "
        f"{one.refused} exact for good"
    ]
    if one.refusals:
        rows = sorted(one.refusals.items(), key=lambda row: (-row[1], row[0]))
        parts.append("refused by " + ", ".join(f"{reason} {count}" for reason, count in rows[:MAX_NAMES]))
    parts.append(
        f"builds took {one.hidden_seconds:.2f} s hidden and {one.exposed_seconds:.2f} s exposed, "
        f"{one.bytes / 2**20:.1f} MiB"
    )
    if one.silent:
        parts.append(f"no answer from {_names(sorted(one.silent))}")
    return ", ".join(parts)


def _names(names: Sequence[str]) -> str:
    more = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def moved(before: JsonObject, after: JsonObject) -> bool:
    """Whether the rows say something else: other caches, or a number by more than 5 %."""
    old = {row["cache"]: row for row in before.get("indexes") or []}
    new = {row["cache"]: row for row in after.get("indexes") or []}
    return set(old) != set(new) or any(
        _differs(float(old[name].get(field_name) or 0), float(row[field_name]))
        for name, row in new.items()
        for field_name in (*_COUNTS, *_MOVING)
    )


def _differs(old: float, new: float) -> bool:
    return abs(new - old) > RELATIVE_CHANGE * max(abs(old), abs(new))
