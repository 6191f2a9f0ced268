"""The nodes of a rollout's pool, as a return to the baseline has to count them.

It must not ask an agent, nor decide what a missing proof means.
"""

from __future__ import annotations

from kvtier_operator.ports import ApiError, Deps, JsonObject, Kind, NodeView, NotFound, ObjectKey
from kvtier_operator.rollout.state import RolloutState
from kvtier_operator.rollout.vocabulary import Phase

GONE_SECONDS = 30.0
"""For so long the server's word that a pool is gone does for all rollouts of it, while the read cache has
none."""


class Members:
    """One per reconciler."""

    def __init__(self, deps: Deps) -> None:
        self._deps = deps
        self._gone: dict[ObjectKey, float] = {}

    async def of(self, cache: JsonObject | None, state: RolloutState) -> list[NodeView]:
        """In a return, of a pool that is deleted only those that live: nobody starts the others again, so
        they have left it as if their Nodes were deleted, and their proof would be waited for without end."""
        if cache is None:
            return []
        namespace, pool = cache["metadata"]["namespace"], cache["spec"]["poolRef"]["name"]
        members = self._deps.fleet.members(namespace, pool)
        live = [member for member in members if member.live]
        if state.phase is not Phase.ROLLING_BACK or len(live) == len(members):
            return members
        return live if await self._is_gone(ObjectKey(Kind.AGENT_POOL, namespace, pool)) else members

    async def _is_gone(self, pool: ObjectKey) -> bool:
        """By the server itself: where only the read cache has none, a proof that an agent owes would be left
        out, and the others' be called all. One that cannot be asked for is there."""
        if self._deps.store.get(pool) is not None:
            self._gone.pop(pool, None)
            return False
        now = self._deps.clock.monotonic()
        self._gone = {key: at for key, at in self._gone.items() if now - at <= GONE_SECONDS}
        if pool in self._gone:
            return True
        try:
            await self._deps.api.get(pool)
        except NotFound:
            self._gone[pool] = now
            return True
        except ApiError:
            return False
        return False
