"""KVNode: watches over an agent's liveness, and cleans up caches that were deleted while it was away.

The object is the agent's own: nothing is written to it here. A change of liveness becomes an Event and wakes
whoever depends on it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from kvtier.v1 import common_pb2 as common
from kvtier.v1 import control_pb2 as control
from kvtier_operator.fleet import StoreFleet, lease_end, lease_key, pool_of
from kvtier_operator.ports import (
    AgentError,
    AgentUnreachable,
    Deps,
    Done,
    EventType,
    JsonObject,
    Kind,
    NodeView,
    NotFound,
    ObjectKey,
    ReconcileOutcome,
    Requeue,
)
from kvtier_operator.watch.triggers import affected

_log = logging.getLogger(__name__)

ORPHAN_RETRY_SECONDS = 15.0
ORPHANS_SECONDS = 600.0
"""So late hears an agent of a deletion that could not be reached then, though its Lease went on."""
CLOCK_SLACK_SECONDS = 0.5


class Liveness(StrEnum):
    """What is known of an agent; NEVER: it has not been alive since this operator looks."""

    NEVER = "Never"
    LIVE = "Live"
    LOST = "Lost"


@dataclass(frozen=True)
class Plan:
    """What to do about one node. `look_again_seconds` None: nothing ends by itself."""

    liveness: Liveness
    changed: bool
    rebooted: bool
    look_again_seconds: float | None


def plan(
    view: NodeView,
    lease: JsonObject | None,
    now: datetime,
    before: Liveness,
    boot_before: str,
) -> Plan:
    """Pure. A live agent is looked at again when its Lease would end."""
    end = lease_end(lease)
    if view.live and end is not None:
        remaining = (end - now).total_seconds() + CLOCK_SLACK_SECONDS
        return Plan(
            Liveness.LIVE,
            before is not Liveness.LIVE,
            boot_before != view.target.boot_id,
            max(CLOCK_SLACK_SECONDS, remaining),
        )
    if end is None and before is Liveness.NEVER:
        return Plan(Liveness.NEVER, False, False, None)
    return Plan(Liveness.LOST, before is not Liveness.LOST, False, None)


def orphans(state: control.GetStateResponse, exists: dict[str, bool]) -> list[control.CacheState]:
    """Caches an agent holds though their object is gone. `exists` by uid."""
    return [cache for cache in state.caches if not exists.get(cache.cache.uid, True)]


class KVNodeReconciler:
    kind = Kind.KV_NODE

    def __init__(self, deps: Deps) -> None:
        self._deps = deps
        self._liveness: dict[str, Liveness] = {}
        self._boots: dict[str, str] = {}
        self._asked: dict[str, float] = {}

    async def reconcile(self, key: ObjectKey) -> ReconcileOutcome:
        deps = self._deps
        node = deps.store.get(key)
        if node is None:
            self._liveness.pop(key.name, None)
            self._boots.pop(key.name, None)
            self._asked.pop(key.name, None)
            # All that are left, not only this one's: a deletion that was missed is made up for.
            deps.agents.retain({node["metadata"]["name"] for node in deps.store.list_all(Kind.KV_NODE)})
            return Done()
        namespace, _ = pool_of(node)
        view = StoreFleet(deps.store, deps.clock).view(node)
        lease = deps.store.get(lease_key(namespace, key.name))
        decided = plan(
            view,
            lease,
            deps.clock.now(),
            self._liveness.get(key.name, Liveness.NEVER),
            self._boots.get(key.name, ""),
        )
        if decided.changed:
            await self._announce(node, view, decided.liveness)
            self._liveness[key.name] = decided.liveness
            for other in affected(key, node, node, deps.store) - {key}:
                deps.wake(other)
        if decided.liveness is Liveness.LOST:
            # A cache may be deleted while it is away, also where it comes back in the same life.
            self._asked.pop(key.name, None)
        now = deps.clock.monotonic()
        asked = self._asked.get(key.name)
        due = decided.rebooted or asked is None or now - asked >= ORPHANS_SECONDS
        if decided.liveness is Liveness.LIVE and due:
            if not await self._remove_orphans(view):
                soon = min(ORPHAN_RETRY_SECONDS, decided.look_again_seconds or ORPHAN_RETRY_SECONDS)
                return Requeue(soon, "agent not asked for orphans yet")
            self._boots[key.name], self._asked[key.name] = view.target.boot_id, now
        if decided.look_again_seconds is None:
            return Done()
        return Requeue(decided.look_again_seconds, "until the Lease would end")

    async def _announce(self, node: JsonObject, view: NodeView, liveness: Liveness) -> None:
        if liveness is Liveness.LOST:
            since = view.lease_renewed.isoformat(timespec="seconds") if view.lease_renewed else "never"
            await self._deps.api.event(
                node, EventType.WARNING, "AgentLost", f"the agent's Lease has ended; last renewed {since}"
            )
        elif liveness is Liveness.LIVE:
            await self._deps.api.event(
                node, EventType.NORMAL, "AgentLive", f"boot {view.target.boot_id} at {view.target.address}"
            )

    async def _remove_orphans(self, view: NodeView) -> bool:
        """Tells the agent to forget caches whose object is gone. False: it could not be asked."""
        try:
            state = await self._deps.agents.get_state(view.target)
            exists = {cache.cache.uid: await self._exists(cache.cache) for cache in state.caches}
            for orphan in orphans(state, exists):
                await self._deps.agents.remove_cache(
                    view.target,
                    control.RemoveCacheRequest(
                        cache=orphan.cache,
                        fence=common.Fence(value=orphan.highest_fence + 1, stage="Off"),
                        boot_id=state.boot_id,
                    ),
                )
                _log.info("removed an orphan", extra={"node": view.target.name, "cache": orphan.cache.uid})
        except (AgentError, AgentUnreachable) as error:
            _log.info("orphans not removed yet", extra={"node": view.target.name, "error": str(error)})
            return False
        return True

    async def _exists(self, cache: common.CacheRef) -> bool:
        """That it is gone only the server can say, not the read cache: removing is not undone."""
        key = ObjectKey(Kind.KV_CACHE, cache.namespace, cache.name)
        seen = self._deps.store.get(key)
        if seen is not None and seen["metadata"]["uid"] == cache.uid:
            return True
        try:
            found = await self._deps.api.get(key)
        except NotFound:
            return False
        return bool(found["metadata"]["uid"] == cache.uid)
