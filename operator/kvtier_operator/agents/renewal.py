"""Keeps candidate leases alive: one batched Renew per agent at a third of the TTL, from written state only.

It runs beside the reconciles, so a slow one never lets a lease end. Before each renewal both objects are read
from the server: once KVCache and KVRollout disagree on the fence, nothing is renewed. It must not grant,
revoke or write anything.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvtier.v1 import common_pb2 as common
from kvtier.v1 import control_pb2 as control
from kvtier_crds.quantity import QuantityError, parse_duration
from kvtier_operator.agents.heldleases import BothRead, LeaseReads
from kvtier_operator.fleet import in_service
from kvtier_operator.ports import (
    AgentError,
    AgentTarget,
    AgentUnreachable,
    Deps,
    JsonObject,
    Kind,
    NotLeader,
    ObjectKey,
)
from kvtier_operator.rollout.grants import cache_ref, fence_of
from kvtier_operator.rollout.spec import DEFAULT_LEASE_TTL
from kvtier_operator.rollout.state import RolloutState
from kvtier_operator.rollout.status import StatusUnreadable, from_status

_log = logging.getLogger(__name__)

MAX_ITEMS = 512
IDLE_SECONDS = 1.0
MIN_DEADLINE = 0.5
# Of an agent that tells no clock a renewal counts from its arrival; what it may be late by stays within the
# 10 % that expiry allows for.
LATE_SHARE = 0.05
PERIOD_SHARE = 1 / 3
RETRY_SHARE = 1 / 8
JITTER_SHARE = 0.15
# Of a lease, what it may be renewed too early, to go with others of its namespace.
TOGETHER_SHARE = 1 / 6
# What falls due within so much of the shortest lease is renewed together: one call per agent, not one each.
BATCH_SHARE, MIN_BATCH, MAX_BATCH = 0.02, 0.05, 0.5


@dataclass(frozen=True)
class HeldLease:
    """One rollout's candidate as both objects say it may be held."""

    key: ObjectKey
    ttl: float
    item: control.RenewItem
    targets: tuple[AgentTarget, ...]
    read_at: float

    @property
    def deadline(self) -> float:
        return _late_by(self.ttl)


@dataclass(frozen=True)
class _Glance:
    """What one version of a rollout says: whether it may hold a candidate, which one, under which fence, and
    for how long a grant lasts."""

    version: str
    holds: bool
    ttl: float
    fence: common.Fence = field(default_factory=common.Fence)
    digest: str = ""


class LeaseRenewer:
    """Create it once per operator; `run` until cancelled."""

    def __init__(self, deps: Deps) -> None:
        self._deps = deps
        self._due: dict[str, float] = {}
        self._glances: dict[str, _Glance] = {}
        self._reads = LeaseReads(deps)

    async def run(self) -> None:
        while True:
            await self._deps.clock.sleep(await self.tick())

    async def tick(self) -> float:
        """Renews what is due; returns the seconds until the next look. Never raises for an agent or the API
        server: the next tick is the retry."""
        try:
            self._deps.leader.check()
        except NotLeader:
            self._due.clear()
            return IDLE_SECONDS
        now = self._deps.clock.monotonic()
        seen = self._deps.store.list_all(Kind.KV_ROLLOUT)
        # Read once a version: of a thousand rollouts hardly one has changed since the last tick.
        self._glances = {obj["metadata"]["uid"]: self._glance(obj) for obj in seen}
        rollouts = [obj for obj in seen if self._glances[obj["metadata"]["uid"]].holds]
        uids = {obj["metadata"]["uid"] for obj in rollouts}
        self._due = {uid: due for uid, due in self._due.items() if uid in uids}
        ready = self._ready(rollouts, now)
        if ready:
            await asyncio.gather(*(self._renew_group(group) for group in self._reads.groups(ready)))
        shortest = min((self._glances[uid].ttl for uid in self._due), default=DEFAULT_LEASE_TTL)
        together = min(MAX_BATCH, max(MIN_BATCH, shortest * BATCH_SHARE))
        waits = [due - self._deps.clock.monotonic() for due in self._due.values()]
        return min([IDLE_SECONDS, *(max(together, wait) for wait in waits)])

    def _ready(self, rollouts: list[JsonObject], now: float) -> list[JsonObject]:
        """What is due, and of the same namespace what would be due soon: an agent is then told of all of its
        leases by one call, and the server is asked for all by two lists. The new times are drawn once for a
        namespace, so that those stay together."""
        spaces = {
            obj["metadata"]["namespace"]
            for obj in rollouts
            if self._due.get(obj["metadata"]["uid"], 0.0) <= now
        }
        chance = {space: self._deps.randomness() for space in sorted(spaces)}
        ready = []
        for obj in rollouts:
            uid, space = obj["metadata"]["uid"], obj["metadata"]["namespace"]
            ttl = self._glances[uid].ttl
            if space in spaces and self._due.get(uid, 0.0) <= now + ttl * TOGETHER_SHARE:
                self._schedule(uid, now, ttl, chance=chance[space])
                ready.append(obj)
        return ready

    async def _renew_group(self, ready: list[JsonObject]) -> None:
        within = min(_late_by(self._glances[obj["metadata"]["uid"]].ttl) for obj in ready)
        both = await self._reads.read(ready, within)
        leases = [self._lease(obj, one) for obj, one in zip(ready, both, strict=True)]
        await self._renew([lease for lease in leases if lease is not None])

    def _lease(self, seen: JsonObject, both: BothRead | None) -> HeldLease | None:
        """The lease, if the server says now that both fences agree."""
        metadata = seen["metadata"]
        key = ObjectKey(Kind.KV_ROLLOUT, metadata["namespace"], metadata["name"])
        ttl = _ttl(seen)
        if both is None:
            self._schedule(metadata["uid"], self._deps.clock.monotonic(), ttl, share=RETRY_SHARE)
            return None
        rollout, cache = both.rollout, both.cache
        glance = self._glance(rollout)
        agreed = (cache.get("status") or {}).get("fence") == glance.fence.value
        deleting = "deletionTimestamp" in rollout["metadata"] or "deletionTimestamp" in cache["metadata"]
        same = rollout["metadata"]["uid"] == metadata["uid"]
        if not (same and agreed and glance.holds and glance.digest) or deleting:
            return None
        item = control.RenewItem(
            cache=cache_ref(key.namespace, cache["metadata"]["name"], cache["metadata"]["uid"]),
            fence=glance.fence,
            digest=glance.digest,
            ttl_ms=round(glance.ttl * 1000),
        )
        members = self._deps.fleet.members(key.namespace, cache["spec"]["poolRef"]["name"])
        targets = tuple(member.target for member in members if in_service(member))
        return HeldLease(key, ttl, item, targets, both.at)

    async def _renew(self, leases: Iterable[HeldLease]) -> None:
        by_node: dict[str, tuple[AgentTarget, list[HeldLease]]] = {}
        for lease in leases:
            for target in lease.targets:
                by_node.setdefault(target.name, (target, []))[1].append(lease)
        await asyncio.gather(*(self._renew_node(target, batch) for target, batch in by_node.values()))

    async def _renew_node(self, target: AgentTarget, batch: list[HeldLease]) -> None:
        for first in range(0, len(batch), MAX_ITEMS):
            await self._renew_some(target, batch[first : first + MAX_ITEMS])

    async def _renew_some(self, target: AgentTarget, batch: list[HeldLease]) -> None:
        now = self._deps.clock.monotonic()
        fresh = [lease for lease in batch if now - lease.read_at <= lease.deadline]
        # What was read too long ago is read again, and not first when its lease has nearly ended.
        self._soon(lease for lease in batch if now - lease.read_at > lease.deadline)
        if not fresh:
            return
        request = control.RenewRequest(boot_id=target.boot_id, items=[lease.item for lease in fresh])
        try:
            answer = await self._deps.agents.renew(
                target, request, deadline_seconds=min(lease.deadline for lease in fresh)
            )
        except NotLeader:
            return
        except AgentUnreachable:
            self._soon(fresh)
            return
        except AgentError as error:
            # It restarted, or refuses: what that means for the rollout is the reconcile's to say.
            _log.info("renewal refused", extra={"node": target.name, "reason": error.reason})
            self._wake(fresh)
            return
        refused = [
            lease
            for lease, result in zip(fresh, answer.results, strict=False)
            if not result.renewed and result.error.reason == common.LEASE_EXPIRED
        ]
        self._wake(refused)

    def _glance(self, seen: JsonObject) -> _Glance:
        """Of the read cache it may be behind: the server is asked before anything is renewed."""
        metadata = seen["metadata"]
        version = str(metadata.get("resourceVersion"))
        known = self._glances.get(metadata["uid"])
        if known is not None and known.version == version:
            return known
        state = self._state(seen)
        if state is None or state.candidate is None:
            return _Glance(version, False, _ttl(seen))
        fence = fence_of(state, metadata["uid"])
        return _Glance(version, state.holds_candidate, _ttl(seen), fence, state.candidate.digest)

    def _state(self, rollout: JsonObject) -> RolloutState | None:
        """None when the status cannot be read: its leases end, the others do not. The reconcile, which is
        woken, tells people."""
        metadata = rollout["metadata"]
        try:
            return from_status(rollout.get("status") or {})
        except StatusUnreadable as error:
            key = ObjectKey(Kind.KV_ROLLOUT, metadata["namespace"], metadata["name"])
            _log.warning("leases not renewed", extra={"rollout": str(key), "error": str(error)})
            self._deps.wake(key)
            return None

    def _schedule(
        self, uid: str, now: float, ttl: float, *, share: float = PERIOD_SHARE, chance: float | None = None
    ) -> None:
        jitter = 1.0 - JITTER_SHARE * (self._deps.randomness() if chance is None else chance)
        self._due[uid] = now + ttl * share * jitter

    def _soon(self, leases: Iterable[HeldLease]) -> None:
        """Not renewed, but not refused either: tried again well before the lease ends."""
        now = self._deps.clock.monotonic()
        for lease in leases:
            uid = lease.item.fence.rollout_uid
            self._due[uid] = min(self._due.get(uid, now), now + lease.ttl * RETRY_SHARE)

    def _wake(self, leases: Iterable[HeldLease]) -> None:
        for lease in leases:
            self._deps.wake(lease.key)


def _late_by(ttl: float) -> float:
    """Seconds after which what was read renews nothing any more."""
    return max(MIN_DEADLINE, ttl * LATE_SHARE)


def _ttl(rollout: JsonObject) -> float:
    text = (rollout.get("spec") or {}).get("leaseTTL")
    try:
        return parse_duration(text, "spec.leaseTTL") if text else DEFAULT_LEASE_TTL
    except QuantityError:
        return DEFAULT_LEASE_TTL
