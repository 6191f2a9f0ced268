"""KVRollout: reads objects and agents, asks the machine, and does what it says in its order.

One pass moves at most one fence: number by compare-and-swap, then status, then everything is read again; an
RPC goes out only in a pass that found both agreeing. Nothing here decides; nothing in the machine waits.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field, replace
from typing import Any

from kvtier_crds.quantity import QuantityError, parse_duration
from kvtier_operator.ports import (
    ROLLOUT_FINALIZER,
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
from kvtier_operator.revisions import Role
from kvtier_operator.rollout import effects
from kvtier_operator.rollout.candidate import Compiled, compile_candidate, probe_set, spent_shares
from kvtier_operator.rollout.feed import EvidenceFeed, LookSource, Reading
from kvtier_operator.rollout.gateset import ProbeSet, probe_names
from kvtier_operator.rollout.grants import cache_ref, fence_of, window_key
from kvtier_operator.rollout.inputs import (
    AgentView,
    Approved,
    CacheView,
    CandidateView,
    Inputs,
    Look,
    Plan,
    Rpc,
)
from kvtier_operator.rollout.machine import next_plan
from kvtier_operator.rollout.messenger import Messenger, Sent
from kvtier_operator.rollout.moves import is_mine
from kvtier_operator.rollout.observe import Memory, Observer, Pool, unasked
from kvtier_operator.rollout.rivals import busy_with, superseded_by
from kvtier_operator.rollout.spec import RolloutSpec, parse_spec
from kvtier_operator.rollout.state import ManifestRef, RolloutState, Schedule
from kvtier_operator.rollout.status import from_status, parse_stamp
from kvtier_operator.rollout.vocabulary import Phase, Stage
from kvtier_operator.telemetry import trace_context

_log = logging.getLogger(__name__)

MAX_PASSES = 10
QUIET_WRITE_SECONDS = 10.0
AUDIT_WRITE_SECONDS = 600.0
AGAIN_SECONDS = 0.05


@dataclass
class _Run:
    """What one call of `reconcile` has learned between its passes."""

    pool: Pool | None = None
    look: Look | None = None
    changed: dict[str, AgentView] = field(default_factory=dict)
    tried: set[tuple[str, int, str]] = field(default_factory=set)


@dataclass
class _Kept:
    """Per rollout, between calls: caches only."""

    memory: Memory = field(default_factory=Memory)
    schedule: Schedule | None = None
    compiled: tuple[object, Compiled] | None = None
    parsed: tuple[object, tuple[RolloutSpec | None, str]] | None = None
    written_at: float = 0.0


@dataclass(frozen=True)
class _Facts:
    subject: effects.Subject
    state: RolloutState
    spec: RolloutSpec | None
    compiled: Compiled
    pool: Pool
    inputs: Inputs


class KVRolloutReconciler:
    """See `ports.Reconciler`."""

    kind = Kind.KV_ROLLOUT

    def __init__(self, deps: Deps, feed: LookSource | None = None) -> None:
        self._deps = deps
        self._observer = Observer(deps.agents)
        self._feed = feed or EvidenceFeed(deps.agents, deps.clock)
        self._messenger = Messenger(deps)
        self._kept: dict[str, _Kept] = {}

    async def reconcile(self, key: ObjectKey) -> ReconcileOutcome:
        run = _Run()
        for _ in range(MAX_PASSES):
            outcome = await self._pass(key, run)
            if outcome is not None:
                return outcome
        return Requeue(AGAIN_SECONDS, "more to do")

    async def _pass(self, key: ObjectKey, run: _Run) -> ReconcileOutcome | None:
        """None: something was written or learned, look again."""
        try:
            rollout = await self._deps.api.get(key)
        except NotFound:
            return Done()
        uid = rollout["metadata"]["uid"]
        kept = self._kept.setdefault(uid, _Kept(written_at=self._deps.clock.monotonic()))
        facts = await self._gather(key, rollout, kept, run)
        plan = next_plan(facts.state, facts.inputs)
        if not plan.release and ROLLOUT_FINALIZER not in (rollout["metadata"].get("finalizers") or []):
            if facts.inputs.deleting:
                return Done()
            await effects.add_finalizer(self._deps.api, facts.subject)
            return None
        if plan.transition is not None:
            await self._transit(facts, plan, kept)
            run.pool, run.look = None, None
            run.changed.clear()
            return None
        return await self._settle(facts, plan, kept, run)

    async def _settle(self, facts: _Facts, plan: Plan, kept: _Kept, run: _Run) -> ReconcileOutcome | None:
        if plan.extend is not None:
            await effects.extend_approval(
                self._deps.api, facts.subject, facts.state, plan.extend.grant_expires
            )
        wrote = await self._write_if_due(facts, plan, kept)
        if plan.withdraw:
            await effects.withdraw_approval(self._deps.api, facts.subject, plan.state)
            return None
        if plan.release:
            await effects.drop_finalizer(self._deps.api, facts.subject)
            self._forget(facts.subject.uid)
            return Done()
        if plan.delete:
            await self._deps.api.delete(facts.subject.key, uid=facts.subject.uid)
            return Done()
        fresh = [rpc for rpc in plan.rpcs if _mark(rpc, plan.state) not in run.tried]
        if fresh:
            if wrote or not await self._agree(facts.subject, plan.state):
                run.look = None
                return None
            await self._send(facts, plan.state, fresh, kept, run)
            return None
        if plan.requeue_after <= 0:
            return Done()
        return Requeue(plan.requeue_after, str(plan.state.stage))

    # --- reading -----------------------------------------------------------------------------------------

    async def _gather(self, key: ObjectKey, rollout: JsonObject, kept: _Kept, run: _Run) -> _Facts:
        api = self._deps.api
        state = from_status(rollout.get("status") or {})
        if kept.schedule is not None and state.schedule is not None:
            state = replace(state, schedule=kept.schedule)
        spec, spec_error = await self._spec(key, rollout, kept)
        name = str(((rollout.get("spec") or {}).get("cacheRef") or {}).get("name", ""))
        cache_key = ObjectKey(Kind.KV_CACHE, key.namespace, name)
        try:
            cache: JsonObject | None = await api.get(cache_key)
        except NotFound:
            cache = None
        subject = effects.Subject(key, rollout, cache_key, cache)
        members = self._members(cache)
        compiled = self._compile(key, cache, spec, kept)
        pool = await self._pool(members, cache, subject.uid, state, spec, kept, run)
        now = self._deps.clock.now().timestamp()
        if run.look is None:
            run.look = await self._look(subject, state, spec, pool, now)
        inputs = Inputs(
            now=now,
            uid=subject.uid,
            name=key.name,
            generation=int(rollout["metadata"].get("generation") or 0),
            spec=spec,
            spec_error=spec_error,
            deleting="deletionTimestamp" in rollout["metadata"],
            cache=_cache_view(cache),
            busy_with="",
            superseded_by="",
            candidate=compiled.view,
            agents=pool.views,
            look=run.look,
            quiet_since=self._quiet_since(now),
            ttl=_ttl(rollout),
        )
        inputs = await self._with_rivals(inputs, state, rollout)
        return _Facts(subject, state, spec, compiled, pool, inputs)

    async def _spec(self, key: ObjectKey, rollout: JsonObject, kept: _Kept) -> tuple[RolloutSpec | None, str]:
        raw = rollout.get("spec") or {}
        probes: dict[str, ProbeSet] = {}
        for name in probe_names(raw.get("gates") or []):
            try:
                found = await self._deps.api.get(ObjectKey(Kind.CONFIG_MAP, key.namespace, name))
            except NotFound:
                found = None
            probes[name] = probe_set(found)
        version = rollout["metadata"].get("generation"), tuple(sorted(probes.items()))
        if kept.parsed is None or kept.parsed[0] != version:
            kept.parsed = version, _parsed(raw, probes)
        return kept.parsed[1]

    def _members(self, cache: JsonObject | None) -> list[NodeView]:
        if cache is None:
            return []
        return self._deps.fleet.members(cache["metadata"]["namespace"], cache["spec"]["poolRef"]["name"])

    def _compile(
        self, key: ObjectKey, cache: JsonObject | None, spec: RolloutSpec | None, kept: _Kept
    ) -> Compiled:
        if cache is None or spec is None:
            return Compiled(CandidateView())
        store = self._deps.store
        selector = store.get(ObjectKey(Kind.KV_SELECTOR, key.namespace, spec.selector_name))
        names = [tier["tierClassName"] for tier in cache["spec"]["tiers"]]
        classes = {name: store.get(ObjectKey(Kind.TIER_CLASS, "", name)) for name in names}
        present = {name: obj for name, obj in classes.items() if obj is not None}
        view = _cache_view(cache)
        baseline = view.baseline if view else None
        # Compiling is milliseconds of validation; its inputs are these versions and nothing else.
        sources = [cache, *([selector] if selector else []), *present.values()]
        versions = (
            baseline,
            *((obj["metadata"]["uid"], obj["metadata"].get("generation")) for obj in sources),
        )
        if kept.compiled is None or kept.compiled[0] != versions:
            fresh = compile_candidate(cache, baseline, selector, spec.selector_name, present)
            kept.compiled = versions, fresh
        compiled = kept.compiled[1]
        digest = compiled.view.ref.digest if compiled.view.ref else ""
        return replace(compiled, view=replace(compiled.view, prior_shares=spent_shares(cache, digest)))

    async def _pool(
        self,
        members: list[NodeView],
        cache: JsonObject | None,
        uid: str,
        state: RolloutState,
        spec: RolloutSpec | None,
        kept: _Kept,
        run: _Run,
    ) -> Pool:
        if cache is None:
            return Pool((), {})
        if run.pool is None:
            if state.phase is Phase.ROLLING_BACK or state.supersedes:
                run.pool = unasked(members, kept.memory)
            else:
                run.pool = await self._observer.observe(
                    members,
                    cache_uid=cache["metadata"]["uid"],
                    rollout_uid=uid,
                    state=state,
                    max_nodes=spec.blast_radius.max_nodes if spec else 0,
                    memory=kept.memory,
                )
        views = tuple(run.changed.get(view.node, view) for view in run.pool.views)
        return Pool(views, run.pool.targets)

    async def _look(
        self,
        subject: effects.Subject,
        state: RolloutState,
        spec: RolloutSpec | None,
        pool: Pool,
        now: float,
    ) -> Look | None:
        """The evidence, when its tick is due and the two fences agree."""
        cache = subject.cache
        if cache is None or spec is None or state.window is None or not state.holds_candidate:
            return None
        if (cache.get("status") or {}).get("fence") != state.fence:
            return None
        if state.window.spec_hash != spec.window_hash or (state.schedule and now < state.schedule.due_at):
            return None
        lost = {agent.node for agent in state.lost}
        nodes = tuple(pool.targets[view.node] for view in pool.views if view.selected or view.node in lost)
        reading = Reading(
            cache=_ref(cache),
            fence=fence_of(state, subject.uid),
            key=window_key(state, spec, subject.uid),
            nodes=nodes,
        )
        return await self._feed.look(reading, state, spec, now)

    def _quiet_since(self, now: float) -> float:
        """Wall time at which this process became leader."""
        since = self._deps.leader.leading_since()
        return now if since is None else now - max(0.0, self._deps.clock.monotonic() - since)

    async def _with_rivals(self, inputs: Inputs, state: RolloutState, rollout: JsonObject) -> Inputs:
        """Before a start, and when something happened to an approval, the server itself is asked; else the
        watch cache will do."""
        namespace = rollout["metadata"]["namespace"]
        starting = state.stage is Stage.OFF and inputs.candidate.ref is not None
        if state.phase is Phase.COMPLETED and inputs.cache is not None:
            starting = inputs.cache.fence != state.fence or not is_mine(inputs.cache, inputs)
        others = (
            await self._deps.api.list_all(Kind.KV_ROLLOUT, namespace)
            if starting
            else self._deps.store.list_all(Kind.KV_ROLLOUT, namespace)
        )
        return replace(
            inputs,
            busy_with=busy_with(rollout, others),
            superseded_by=superseded_by(rollout, others, completed=state.phase is Phase.COMPLETED),
        )

    # --- writing -----------------------------------------------------------------------------------------

    async def _transit(self, facts: _Facts, plan: Plan, kept: _Kept) -> None:
        """Fence, then status. A crash in between burns a number and nothing else."""
        if plan.transition is None:
            raise ValueError("not a transition")
        api, subject, cache = self._deps.api, facts.subject, facts.subject.cache
        entering = facts.state.stage is Stage.OFF and plan.state.stage is Stage.SHADOW
        approving = plan.transition.approve is not None
        if cache is not None and plan.state.candidate is not None and facts.compiled.data:
            digest = plan.state.candidate.digest
            if entering:
                await effects.keep_revision(api, cache, facts.compiled.data, digest, Role.CANDIDATE)
            elif approving:
                await effects.keep_revision(api, cache, facts.compiled.data, digest, Role.APPROVED)
        state = self._traced(plan.state, subject, entering=entering)
        await effects.move_fence(api, subject, plan.transition, state, facts.spec)
        await self._write(facts, replace(plan, state=state), kept)

    async def _write_if_due(self, facts: _Facts, plan: Plan, kept: _Kept) -> bool:
        kept.schedule = plan.state.schedule
        if not plan.urgent:
            waited = self._deps.clock.monotonic() - kept.written_at
            numbers_moved = _numbers(plan.state) != _numbers(facts.state)
            quiet = AUDIT_WRITE_SECONDS if plan.state.phase is Phase.COMPLETED else QUIET_WRITE_SECONDS
            if not numbers_moved or waited < quiet:
                return False
        await self._write(facts, plan, kept)
        return True

    async def _write(self, facts: _Facts, plan: Plan, kept: _Kept) -> None:
        deadline = facts.spec.progress_deadline if facts.spec else 0.0
        state = self._traced(plan.state, facts.subject, entering=False)
        await effects.write_status(self._deps.api, facts.subject, state, deadline)
        kept.schedule, kept.written_at = state.schedule, self._deps.clock.monotonic()
        self._tell_trace(facts, plan, state)
        for notice in plan.notices:
            kind = EventType.WARNING if notice.warning else EventType.NORMAL
            await self._deps.api.event(facts.subject.rollout, kind, notice.reason, notice.message)

    def _traced(self, state: RolloutState, subject: effects.Subject, *, entering: bool) -> RolloutState:
        """With the traceparent of its attempt; the root span is emitted as the attempt begins."""
        if not state.started_at:
            return state
        if entering:
            names = {"kvtier.rollout": subject.key.name, "k8s.namespace.name": subject.key.namespace}
            self._deps.telemetry.attempt_root(subject.uid, state.attempt, names)
        return replace(state, traceparent=trace_context(subject.uid, state.attempt).traceparent)

    def _tell_trace(self, facts: _Facts, plan: Plan, state: RolloutState) -> None:
        """Short spans, after the write they tell of: transitions, and gates whose verdict has changed."""
        if not state.started_at:
            return
        uid, telemetry = facts.subject.uid, self._deps.telemetry
        for span in plan.spans:
            with telemetry.span(span.name, dict(span.attributes), uid=uid, attempt=state.attempt):
                pass
        before = {gate.name: (gate.verdict, gate.reason) for gate in facts.state.gates}
        for gate in state.gates:
            if before.get(gate.name) == (gate.verdict, gate.reason):
                continue
            attributes: dict[str, str | int | float | bool] = {
                "kvtier.gate": gate.name,
                "kvtier.gate.metric": gate.metric,
                "kvtier.gate.verdict": str(gate.verdict),
                "kvtier.gate.reason": gate.reason,
                "kvtier.gate.value": gate.value,
                "kvtier.gate.bound": gate.bound,
                "kvtier.gate.limit": gate.limit,
                "kvtier.gate.n": gate.n,
                "kvtier.stage": str(facts.state.stage),
            }
            with telemetry.span("rollout.gate", attributes, uid=uid, attempt=state.attempt):
                pass

    # --- agents ------------------------------------------------------------------------------------------

    async def _agree(self, subject: effects.Subject, state: RolloutState) -> bool:
        """Read once more, since asking agents took time: both objects still carry this fence."""
        try:
            rollout, cache = await asyncio.gather(
                self._deps.api.get(subject.key), self._deps.api.get(subject.cache_key)
            )
        except NotFound:
            return False
        written = (rollout.get("status") or {}).get("fence"), (cache.get("status") or {}).get("fence")
        same = rollout["metadata"]["uid"] == subject.uid
        return same and written == (state.fence, state.fence)

    async def _send(
        self, facts: _Facts, state: RolloutState, rpcs: list[Rpc], kept: _Kept, run: _Run
    ) -> None:
        cache = facts.subject.cache
        if cache is None:
            return
        order = Sent(
            cache=_ref(cache),
            rollout=facts.subject.rollout,
            state=state,
            spec=facts.spec,
            manifest=facts.compiled.data,
        )
        views = {view.node: view for view in facts.pool.views}
        run.tried.update(_mark(rpc, state) for rpc in rpcs)
        targets = facts.pool.targets
        answers = await asyncio.gather(
            *(
                self._messenger.send(order, rpc, targets[rpc.node], views[rpc.node], kept.memory)
                for rpc in rpcs
            )
        )
        run.changed.update({view.node: view for view in answers})

    def _forget(self, uid: str) -> None:
        self._kept.pop(uid, None)
        self._feed.forget(uid)


def _parsed(raw: JsonObject, probes: dict[str, ProbeSet]) -> tuple[RolloutSpec | None, str]:
    try:
        return parse_spec(raw, probes), ""
    except ValueError as error:
        return None, str(error)


def _numbers(state: RolloutState) -> object:
    """What telemetry has too, without the time of the look."""
    return tuple(replace(gate, at=0.0) for gate in state.gates), state.carry


def _mark(rpc: Rpc, state: RolloutState) -> tuple[str, int, str]:
    return rpc.node, state.fence, type(rpc).__name__


def _ref(cache: JsonObject) -> Any:
    metadata = cache["metadata"]
    return cache_ref(metadata["namespace"], metadata["name"], metadata["uid"])


def _cache_view(cache: JsonObject | None) -> CacheView | None:
    if cache is None:
        return None
    status = cache.get("status") or {}
    baseline, approved = status.get("baseline"), status.get("approved")
    return CacheView(
        uid=cache["metadata"]["uid"],
        fence=int(status.get("fence") or 0),
        baseline=ManifestRef(baseline["digest"], baseline.get("revision", "")) if baseline else None,
        approved=Approved(
            rollout=approved.get("rollout", ""),
            rollout_uid=str(approved.get("evidence") or "").partition("/")[0],
            digest=approved["digest"],
            grant_expires=parse_stamp(approved.get("grantExpires")),
        )
        if approved
        else None,
        deleting="deletionTimestamp" in cache["metadata"],
    )


def _ttl(rollout: JsonObject) -> float:
    text = (rollout.get("spec") or {}).get("ttlAfterFinished")
    try:
        return parse_duration(text, "spec.ttlAfterFinished") if text else 0.0
    except QuantityError:
        return 0.0
