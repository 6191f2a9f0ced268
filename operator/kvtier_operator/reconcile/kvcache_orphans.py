"""An approval whose KVRollout is gone: nobody renews it, audits it or revokes it any more.

It is left behind where a finalizer was removed by hand. While it stands its number belongs to a rollout, so
what agents are told of the cache waits for it. It may end when no lease of it can run: the longest legal TTL
after this process, as the leader, first missed its rollout. It must not look at a clock that can be set.
"""

from __future__ import annotations

from kvtier_operator.ports import (
    Deps,
    EventType,
    JsonObject,
    Kind,
    NotFound,
    ObjectKey,
    PatchOp,
    add_op,
    expect_op,
    remove_op,
)
from kvtier_operator.rollout.moves import lease_wait
from kvtier_operator.rollout.spec import MAX_LEASE_TTL

ORPHAN_SECONDS = lease_wait(MAX_LEASE_TTL)


def owns(rollout: JsonObject, approved: JsonObject) -> bool:
    """Whether the approval is this rollout's. An early one says only its name."""
    metadata, owner = rollout["metadata"], str(approved.get("evidence") or "").partition("/")[0]
    return metadata["name"] == approved.get("rollout") and owner in ("", metadata["uid"])


class OrphanedApprovals:
    """One per reconciler. Remembers since when each cache's rollout is missed; losing that costs time."""

    def __init__(self, deps: Deps) -> None:
        self._deps = deps
        self._missed: dict[str, tuple[str, float]] = {}

    def forget(self, uid: str) -> None:
        self._missed.pop(uid, None)

    async def end(self, key: ObjectKey, cache: JsonObject) -> bool:
        """Whether an approval was withdrawn now, under a number of its own. Raises Conflict."""
        uid, status = str(cache["metadata"]["uid"]), cache.get("status") or {}
        approved = status.get("approved")
        if not approved or await self._owned(key, approved):
            self._missed.pop(uid, None)
            return False
        now, evidence = self._deps.clock.monotonic(), str(approved.get("evidence") or "")
        known = self._missed.get(uid)
        if known is None or known[0] != evidence:
            known = self._missed[uid] = evidence, now
        # What another leader has seen or renewed meanwhile, this process does not know.
        led = self._deps.leader.leading_since()
        if led is None or now - max(known[1], led) < ORPHAN_SECONDS:
            return False
        fence = status.get("fence")
        ops: list[PatchOp] = [
            expect_op("/metadata/uid", uid),
            expect_op("/status/fence", fence),
            expect_op("/status/approved", approved),
            remove_op("/status/approved"),
            add_op("/status/fence", int(fence or 0) + 1),
        ]
        await self._deps.api.compare_and_swap(key, ops)
        self._missed.pop(uid, None)
        name = approved.get("rollout", "")
        said = f"KVRollout {name}, whose candidate was approved, is gone, and every lease of it has ended"
        await self._deps.api.event(cache, EventType.WARNING, "ApprovalEnded", said)
        return True

    async def _owned(self, key: ObjectKey, approved: JsonObject) -> bool:
        """By a rollout that is there. Whether one is gone the server says, not the read cache."""
        where = ObjectKey(Kind.KV_ROLLOUT, key.namespace, str(approved.get("rollout") or ""))
        seen = self._deps.store.get(where)
        if seen is None or not owns(seen, approved):
            try:
                seen = await self._deps.api.get(where)
            except NotFound:
                return False
        return owns(seen, approved)
