"""KVCache on the nodes: asks each agent what it runs, applies the baseline where it must, and takes a proof.

Never advances a fence by itself: it says that one is needed, and the reconcile decides. Knows no status.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvtier.v1 import common_pb2 as common
from kvtier.v1 import control_pb2 as control
from kvtier_operator.agents.recent import state_of
from kvtier_operator.ports import AgentError, AgentTarget, AgentUnreachable, Deps, JsonObject, NodeView
from kvtier_operator.proofs import ProofVerdict, check_proof
from kvtier_operator.reconcile.kvcache_plan import NodeFinding, Standing
from kvtier_operator.reconcile.kvcache_predicted import node_plan
from kvtier_operator.reconcile.second_asks import SecondAsks

PROOF_SECONDS = 300.0
REBOOTED = "BOOT_ID_MISMATCH"
TOO_LATE = "DEADLINE_EXCEEDED"
RECENT_SECONDS = 2.0
"""How old an answer may be that somebody else got, of an agent that was told nothing of this cache since."""
BEAT_SECONDS = 45.0
"""A look that comes so long after the last one comes by itself; one that comes sooner has a reason, which may
be younger than any answer."""
FENCE_REASONS = ("FENCE_STALE", "FENCE_CONFLICT")


@dataclass(frozen=True)
class Baseline:
    """What should run. `fence` is the number of KVCache status."""

    cache: common.CacheRef
    digest: str
    data: bytes
    fence: int
    key_secret: str = ""
    admission: control.CacheAdmission = field(default_factory=control.CacheAdmission)


@dataclass(frozen=True)
class NodeResult:
    """`highest_fence` is what the agent holds; `fence_refused`: it wants a higher one than we sent."""

    finding: NodeFinding
    highest_fence: int = 0
    fence_refused: bool = False


@dataclass(frozen=True)
class _Proved:
    boot_id: str
    digest: str
    at: float


class CacheNodes:
    """Remembers which node proved what, so that a quiet reconcile costs one GetState a node."""

    def __init__(self, deps: Deps) -> None:
        self._deps = deps
        # By cache, then by node.
        self._proved: dict[str, dict[str, _Proved]] = {}
        self._looked: dict[str, float] = {}
        self._seconds = SecondAsks(deps)

    def __len__(self) -> int:
        """Proofs and silent agents that are remembered."""
        return len(self._seconds) + sum(len(nodes) for nodes in self._proved.values())

    def forget(self, uid: str) -> None:
        self._looked.pop(uid, None)
        self._proved.pop(uid, None)

    async def converge(
        self,
        views: Sequence[NodeView],
        baseline: Baseline | None,
        *,
        uid: str,
        rollout: bool,
        again: bool = False,
    ) -> list[NodeResult]:
        """One result for each node, all at once. With `baseline` None nodes are only looked at. `rollout`:
        one is unfinished, so a candidate may be held and the current fence is not ours to use up. again: the
        caller was here a moment ago, and what those said whom it told nothing will do."""
        now = self._deps.clock.monotonic()
        recent = again or now - self._looked.get(uid, now) >= BEAT_SECONDS
        self._looked[uid] = now
        proved = self._proved.get(uid, {})
        for left in proved.keys() - {view.target.name for view in views}:
            del proved[left]
        return list(
            await asyncio.gather(
                *(self._node(view, baseline, uid, rollout=rollout, recent=recent) for view in views)
            )
        )

    async def highest_fence(self, views: Sequence[NodeView], uid: str) -> int:
        """Over the nodes that answer; 0 when none knows the cache."""
        results = await self.converge(views, None, uid=uid, rollout=False)
        return max((result.highest_fence for result in results), default=0)

    async def _node(
        self,
        view: NodeView,
        baseline: Baseline | None,
        uid: str,
        *,
        rollout: bool,
        recent: bool,
    ) -> NodeResult:
        """recent: what it told somebody else a moment ago will do."""
        name = view.target.name
        if not view.live:
            self._unprove(uid, name)
            self._seconds.heard(name)
            return NodeResult(NodeFinding(name, Standing.LOST))
        try:
            state = await self._state(view.target, uid, recent=recent)
        except (AgentError, AgentUnreachable) as error:
            return NodeResult(NodeFinding(name, Standing.UNREACHABLE, _short(error)))
        held = _held(state, uid)
        highest = held.highest_fence if held is not None else 0
        if state.draining:
            return NodeResult(NodeFinding(name, Standing.DRAINING), highest)
        if baseline is None:
            return NodeResult(NodeFinding(name, Standing.APPLYING, "no baseline yet"), highest)
        target = replace(view.target, boot_id=state.boot_id)
        if not rollout and _lacks_number(held, baseline):
            # It would refuse it, as each of them, before the number is taken.
            self._unprove(uid, name)
            detail = f"FENCE_CONFLICT: {baseline.fence} has brought other words"
            return NodeResult(NodeFinding(name, Standing.REFUSED, detail), highest, fence_refused=True)
        try:
            finding = await self._prove(target, held, baseline, rollout=rollout)
        except AgentError as error:
            if error.reason == REBOOTED and recent:
                # What it said was of the life before.
                return await self._node(view, baseline, uid, rollout=rollout, recent=False)
            self._unprove(uid, name)
            return NodeResult(
                NodeFinding(name, Standing.REFUSED, _short(error)),
                max(highest, int(error.facts.get("highest_fence", 0))),
                error.reason in FENCE_REASONS,
            )
        except AgentUnreachable as error:
            return NodeResult(NodeFinding(name, Standing.UNREACHABLE, _short(error)), highest)
        faults = tuple(
            f"{tier.tier_class}: {tier.condition}" for tier in state.tiers if tier.condition != "Ready"
        )
        return NodeResult(replace(finding, tier_faults=faults), highest)

    async def _state(self, target: AgentTarget, uid: str, *, recent: bool) -> control.GetStateResponse:
        """What the agent says of itself. One that has proved itself and does not answer in time is asked once
        more before anybody is told that it cannot be reached: a machine that stood still for some seconds is
        no outage. The next time only if it has answered in between, whomever; and once for all caches."""
        since = self._deps.clock.monotonic()
        try:
            state = await self._ask(target, uid, recent=recent)
        except AgentUnreachable as error:
            if error.code != TOO_LATE or target.name not in self._proved.get(uid, {}):
                raise
            state = await self._seconds.ask(target, since, error)
        self._seconds.heard(target.name)
        return state

    async def _ask(self, target: AgentTarget, uid: str, *, recent: bool) -> control.GetStateResponse:
        if recent:
            # Rollouts of the pool, and its other caches, look as often.
            return await state_of(self._deps.agents, target, uid, RECENT_SECONDS, for_all=True)
        return await self._deps.agents.get_state(target, uid)

    async def _prove(
        self, target: AgentTarget, held: control.CacheState | None, baseline: Baseline, *, rollout: bool
    ) -> NodeFinding:
        uid = baseline.cache.uid
        now = self._deps.clock.monotonic()
        known = self._proved.get(uid, {}).get(target.name)
        applied = held is not None and held.baseline_digest == baseline.digest
        if applied and held is not None and held.HasField("admission") and not rollout:
            # The number that brought the digest says no other words: the agent wants a higher one for them.
            applied = held.admission == baseline.admission
        fresh = (
            applied
            and known is not None
            and (known.boot_id, known.digest) == (target.boot_id, baseline.digest)
            and now - known.at < PROOF_SECONDS
            and not _differs(held, baseline)
        )
        if fresh:
            return _found(target, Standing.PROVED, held)
        if not applied:
            await self._apply(target, held, baseline, rollout=rollout)
            if held is None or held.baseline_digest != baseline.digest:
                # An engine measures when it is built. Where only what it is told has changed, all else is as
                # it was, and its highest number is the one just sent.
                held = _held(await self._deps.agents.get_state(target, uid), uid)
        nonce = self._deps.nonce()
        highest = held.highest_fence if held is not None else 0
        answer = await self._deps.agents.prove(
            target,
            control.ProveRequest(
                cache=baseline.cache,
                # A read: any fence from the agent's highest on will do, and it must not be below.
                fence=common.Fence(value=max(baseline.fence, highest), stage="Off"),
                boot_id=target.boot_id,
                nonce=nonce,
            ),
        )
        verdict = check_proof(
            answer.proof,
            nonce=nonce,
            boot_id=target.boot_id,
            baseline=baseline.digest,
            candidate_allowed=True,
        )
        if verdict is not ProofVerdict.HOLDS:
            self._unprove(uid, target.name)
            detail = f"{verdict.value}: runs {answer.proof.baseline_digest[:19]}"
            return _found(target, Standing.UNPROVED, held, detail)
        self._proved.setdefault(uid, {})[target.name] = _Proved(target.boot_id, baseline.digest, now)
        return _found(target, Standing.PROVED, held)

    def _unprove(self, uid: str, node: str) -> None:
        self._proved.get(uid, {}).pop(node, None)

    async def _apply(
        self, target: AgentTarget, held: control.CacheState | None, baseline: Baseline, *, rollout: bool
    ) -> None:
        fence = baseline.fence
        highest = held.highest_fence if held is not None else 0
        if rollout and highest < fence - 1:
            # The current number belongs to the rollout's grant on this node; the one before is burned.
            fence -= 1
        await self._deps.agents.apply_baseline(
            target,
            control.ApplyBaselineRequest(
                cache=baseline.cache,
                fence=common.Fence(value=fence, stage="Off"),
                boot_id=target.boot_id,
                manifest=baseline.data,
                digest=baseline.digest,
                key_secret=baseline.key_secret,
                admission=baseline.admission,
            ),
        )

    async def remove(
        self, views: Sequence[NodeView], cache: common.CacheRef, fence: int, *, receipts: bool = False
    ) -> tuple[dict[str, str], dict[str, int]]:
        """Makes nodes forget the cache. Returns what is left, a reason by node name, and how many data keys
        were erased, by node name. receipts: asks nodes that no longer know the cache, too, since the answer
        of an earlier call may have been lost."""
        erased: dict[str, int] = {}
        results = await asyncio.gather(
            *(self._remove(view, cache, fence, erased if receipts else None) for view in views)
        )
        left = {view.target.name: reason for view, reason in zip(views, results, strict=True) if reason}
        return left, erased

    async def _remove(
        self, view: NodeView, cache: common.CacheRef, fence: int, erased: dict[str, int] | None
    ) -> str:
        """Asks a node without a Lease too: when a namespace is deleted, Leases go before caches do."""
        try:
            state = await self._deps.agents.get_state(view.target, cache.uid)
            if erased is None and not any(held.cache.uid == cache.uid for held in state.caches):
                return ""
            answer = await self._deps.agents.remove_cache(
                view.target,
                control.RemoveCacheRequest(
                    cache=cache, fence=common.Fence(value=fence, stage="Off"), boot_id=state.boot_id
                ),
            )
            if erased is not None:
                erased[view.target.name] = sum(max(1, len(one.keys)) for one in answer.key_erasures)
        except AgentError as error:
            return "" if error.reason == "CACHE_UNKNOWN" else _short(error)
        except AgentUnreachable as error:
            return _short(error) if view.live else "its Lease has ended"
        return ""


def _lacks_number(held: control.CacheState | None, baseline: Baseline) -> bool:
    """Whether all that is to be told are other words beside the same digest, and an agent takes those under a
    higher number alone."""
    if held is None or held.baseline_digest != baseline.digest or not held.HasField("admission"):
        return False
    return held.admission != baseline.admission and held.highest_fence >= baseline.fence


def _differs(held: control.CacheState | None, baseline: Baseline) -> bool:
    """Whether the agent recomputed another digest of what runs, or cannot say; one of an earlier version says
    none."""
    return held is not None and held.HasField("running_digest") and held.running_digest != baseline.digest


def _held(state: control.GetStateResponse, uid: str) -> control.CacheState | None:
    return next((cache for cache in state.caches if cache.cache.uid == uid), None)


def _found(
    target: AgentTarget, standing: Standing, held: control.CacheState | None, detail: str = ""
) -> NodeFinding:
    used = dict(held.used_by_tier) if held is not None else {}
    pinned = dict(held.pinned_by_tier) if held is not None else {}
    return NodeFinding(target.name, standing, detail, used, pinned, plan=node_plan(held))


def cache_ref(cache: JsonObject) -> common.CacheRef:
    metadata = cache["metadata"]
    return common.CacheRef(namespace=metadata["namespace"], name=metadata["name"], uid=metadata["uid"])


def _short(error: AgentError | AgentUnreachable) -> str:
    """Stable from one try to the next, so that a status does not change with every address or number of a
    connection attempt."""
    if isinstance(error, AgentError):
        return f"{error.reason}: {error.message[:160]}"
    return error.code
