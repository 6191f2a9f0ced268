"""KVRollout: reads objects and agents, asks the machine, and does what it says in its order.

One pass moves at most one fence: number by compare-and-swap, then status, then all is looked at again as it
was written; an RPC goes out only after both were read once more and agree. Nothing here decides; nothing in
the machine waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable
from dataclasses import fields, replace
from operator import attrgetter

from kvtier_operator.ports import (
    ROLLOUT_FINALIZER,
    Conflict,
    Deps,
    Done,
    EventType,
    JsonObject,
    Kind,
    NotLeader,
    ObjectKey,
    ReconcileOutcome,
    Requeue,
)
from kvtier_operator.revisions import Role
from kvtier_operator.rollout import effects
from kvtier_operator.rollout.evaluation import current_look, next_due, summary_verdict
from kvtier_operator.rollout.feed import EvidenceFeed, LookSource
from kvtier_operator.rollout.gather import Facts, Gatherer, Kept, Run
from kvtier_operator.rollout.inputs import GateVerdict, Notice, Plan, Rpc
from kvtier_operator.rollout.machine import next_plan
from kvtier_operator.rollout.messenger import Messenger, Sent
from kvtier_operator.rollout.moves import tick_seconds
from kvtier_operator.rollout.pairs import Pair, Pairs
from kvtier_operator.rollout.probing import LOOK_SECONDS, ProbeJobs
from kvtier_operator.rollout.readings import reference
from kvtier_operator.rollout.state import Condition, GateStatus, RolloutState
from kvtier_operator.rollout.status import StatusUnreadable, as_written
from kvtier_operator.rollout.vocabulary import Phase, Stage
from kvtier_operator.telemetry import trace_context

MAX_PASSES = 10
QUIET_WRITE_SECONDS = 10.0
AUDIT_WRITE_SECONDS = 600.0
VERDICT_SECONDS = 60.0
"""For so long an approved candidate's verdict has to be another before its status says so: a look that one
slow answer has left incomplete tells nothing."""
AGAIN_SECONDS = 0.05


class KVRolloutReconciler:
    """See `ports.Reconciler`."""

    kind = Kind.KV_ROLLOUT

    def __init__(self, deps: Deps, feed: LookSource | None = None) -> None:
        self._deps = deps
        self._feed = feed or EvidenceFeed(deps.agents, deps.clock, deps.external)
        self._gatherer = Gatherer(deps, self._feed)
        self._pairs = Pairs(deps)
        self._messenger = Messenger(deps)
        self._probes = ProbeJobs(deps)
        self._kept: dict[str, Kept] = {}
        self._uids: dict[ObjectKey, str] = {}
        self._untold: dict[ObjectKey, list[tuple[JsonObject, Notice]]] = {}

    async def reconcile(self, key: ObjectKey) -> ReconcileOutcome:
        # What a run that was cut off, as by its deadline, had no time to tell.
        run = Run(notices=self._untold.pop(key, []))
        try:
            outcome = await self._passes(key, run)
        except asyncio.CancelledError:
            with contextlib.suppress(NotLeader):
                self._deps.leader.check()
                self._untold[key] = run.notices
            raise
        except Exception:
            with contextlib.suppress(NotLeader):
                await self._tell(run)
            raise
        await self._tell(run)
        return outcome

    async def _passes(self, key: ObjectKey, run: Run) -> ReconcileOutcome:
        for _ in range(MAX_PASSES):
            outcome = await self._pass(key, run)
            if outcome is not None:
                return outcome
        return Requeue(AGAIN_SECONDS, "more to do")

    async def _tell(self, run: Run) -> None:
        """Events, after what they tell of and after the agents were told: a revocation waits for none."""
        while run.notices:
            rollout, notice = run.notices.pop(0)
            kind = EventType.WARNING if notice.warning else EventType.NORMAL
            await self._deps.api.event(rollout, kind, notice.reason, notice.message)

    async def _pass(self, key: ObjectKey, run: Run) -> ReconcileOutcome | None:
        """None: something was written or learned, look again."""
        pair = None if run.live else self._pairs.vouched(key)
        if pair is not None:
            run.vouched = pair.versions
        else:
            run.live = True
            pair, run.known = run.known, None
            pair = pair or await self._pairs.live(key)
            if pair is not None and run.vouched not in (None, pair.versions):
                run.pool, run.look = None, None
            run.vouched = None
        if pair is None:
            self._meet(key, "")
            return Done()
        rollout = pair.rollout
        uid = rollout["metadata"]["uid"]
        self._meet(key, uid)
        kept = self._kept.setdefault(uid, Kept(written_at=self._deps.clock.monotonic()))
        try:
            facts = await self._gatherer.gather(pair, kept, run)
        except StatusUnreadable as error:
            await self._tell_unreadable(rollout, kept, error)
            raise
        self._note_unreadable(facts, kept, run)
        plan = next_plan(facts.state, facts.inputs)
        if run.aged and plan.transition is not None and not _returns(facts.state, plan):
            # Nothing goes on by what agents told others a while ago: they may have let go since.
            run.anew, run.pool = True, None
            run.known = pair if run.live else None
            run.live = True
            return None
        if not run.live and not self._quiet(facts, plan, kept, run):
            # Decided once more on what the server says; what agents have answered counts while it agrees.
            run.live = True
            if not _returns(facts.state, plan):
                return None
        if not plan.release and ROLLOUT_FINALIZER not in (rollout["metadata"].get("finalizers") or []):
            if facts.inputs.deleting:
                return Done()
            await effects.add_finalizer(self._deps.api, facts.subject)
            return None
        if plan.transition is not None:
            try:
                await self._transit(facts, plan, kept, run)
            except Conflict:
                if run.vouched is None:
                    raise
                # The read cache was behind after all.
            run.vouched = None
            run.pool, run.look = None, None
            run.changed.clear()
            return None
        return await self._settle(facts, plan, kept, run)

    def _quiet(self, facts: Facts, plan: Plan, kept: Kept, run: Run) -> bool:
        """Whether nothing is written or said to an agent by this plan."""
        acts = plan.transition is not None or plan.extend is not None or plan.withdraw
        acts = acts or plan.release or plan.delete
        finalizers = facts.subject.rollout["metadata"].get("finalizers") or []
        if acts or ROLLOUT_FINALIZER not in finalizers or self._due_to_write(facts, plan, kept):
            return False
        return all(_mark(rpc, plan.state) in run.tried for rpc in plan.rpcs)

    async def _settle(self, facts: Facts, plan: Plan, kept: Kept, run: Run) -> ReconcileOutcome | None:
        if plan.extend is not None and facts.spec is not None:
            await effects.extend_approval(
                self._deps.api, facts.subject, facts.state, facts.spec, plan.extend.grant_expires
            )
        wrote = await self._write_if_due(facts, plan, kept, run)
        if plan.extend is not None or plan.withdraw:
            run.known = None
        if plan.withdraw:
            await effects.withdraw_approval(self._deps.api, facts.subject, plan.state)
            return None
        if plan.release or plan.delete:
            await self._tell(run)
        if plan.release:
            await effects.drop_finalizer(self._deps.api, facts.subject)
            self._forget(facts.subject.uid)
            return Done()
        if plan.delete:
            await self._deps.api.delete(facts.subject.key, uid=facts.subject.uid)
            return Done()
        fresh = [rpc for rpc in plan.rpcs if _mark(rpc, plan.state) not in run.tried]
        if fresh:
            if wrote or not await self._agree(facts.subject, plan.state, run):
                run.look = None
                return None
            await self._send(facts, plan.state, fresh, kept, run)
            await self._tell(run)
            return None
        if wrote and plan.urgent:
            # What follows from what it says now: the watch does not wake it for its own write.
            return None
        await self._probes.tend(facts.subject, facts.spec, plan.state, facts.pool.views, kept.probing)
        self._gatherer.expect(facts, plan.state)
        after = plan.requeue_after
        if kept.probing.jobs:
            # They are looked at only so often, and nobody else ends those of a rollout that is over.
            after = min(after, LOOK_SECONDS) if after > 0 else LOOK_SECONDS
        if after <= 0:
            return Done()
        # Counted from the look, or each beat would be late by what the one before has taken.
        taken = self._deps.clock.now().timestamp() - facts.inputs.now
        return Requeue(max(AGAIN_SECONDS, after - max(0.0, taken)), str(plan.state.stage))

    async def _tell_unreadable(self, rollout: JsonObject, kept: Kept, error: StatusUnreadable) -> None:
        """Once for each version of the object; the queue's backoff keeps the attempts apart."""
        version = str(rollout["metadata"].get("resourceVersion"))
        if kept.unreadable == version:
            return
        await self._deps.api.event(
            rollout,
            EventType.WARNING,
            "StatusUnreadable",
            f"nothing is granted, renewed or revoked for it until its status is mended: {error}"[:1000],
        )
        kept.unreadable = version

    def _note_unreadable(self, facts: Facts, kept: Kept, run: Run) -> None:
        """Of one that is deleted, told once and after what is done about it: it is let go all the same."""
        rollout, state = facts.subject.rollout, facts.state
        version = str(rollout["metadata"].get("resourceVersion"))
        if not facts.unreadable or kept.unreadable == version:
            return
        kept.unreadable = version
        done = f"no agent can hold its candidate in phase {state.phase}"
        if state.holds_candidate or state.revoking is not None:
            done = "its candidate is revoked on every agent before it goes"
        said = f"deleted with a status that cannot be read; {done}: {facts.unreadable}"
        run.notices.append((rollout, Notice(True, "StatusUnreadable", said[:1000])))

    # --- writing -----------------------------------------------------------------------------------------

    async def _transit(self, facts: Facts, plan: Plan, kept: Kept, run: Run) -> None:
        """Fence, then status. A crash in between burns a number and nothing else."""
        if plan.transition is None:
            raise ValueError("not a transition")
        api, subject, cache = self._deps.api, facts.subject, facts.subject.cache
        entering = facts.state.stage is Stage.OFF and plan.state.stage is Stage.SHADOW
        approving, adopting = plan.transition.approve is not None, plan.transition.adopt
        if cache is not None and plan.state.candidate is not None and facts.compiled.data:
            digest = plan.state.candidate.digest
            if entering or adopting:
                # Once more before it is adopted: a baseline whose manifest is gone can be given to nobody.
                await effects.keep_revision(api, cache, facts.compiled.data, digest, Role.CANDIDATE)
            elif approving:
                await effects.keep_revision(api, cache, facts.compiled.data, digest, Role.APPROVED)
        state = self._traced(plan.state, subject, entering=entering)
        asked = self._deps.clock.monotonic()
        moved = await effects.move_fence(api, subject, plan.transition, state, facts.spec)
        self._deps.reads.note(subject.cache_key, moved, asked)
        self._deps.reads.wrote(subject.cache_key, moved, subject.key)
        try:
            await self._write(facts, replace(plan, state=state), kept, run)
        except BaseException:
            # Half a step, of which no watch wakes it, and no lease is renewed before the other half.
            self._deps.wake(subject.key)
            raise
        if run.known is not None:
            run.known = replace(run.known, cache=moved)
        if state.rollback is not None and state.phase is Phase.ROLLING_BACK is not facts.state.phase:
            self._deps.rolled_back(str(state.rollback.cause))

    def _due_to_write(self, facts: Facts, plan: Plan, kept: Kept) -> bool:
        if plan.urgent:
            return True
        if self._deps.clock.monotonic() - kept.written_at < self._quiet_seconds(facts, plan, kept):
            return False
        read, wanted = _without_looks(facts.state), _without_looks(plan.state)
        same, known = wanted == read, kept.moved
        if known is not None and _says(known[0], read) and _says(known[1], read if same else wanted):
            moves = known[2]
        else:
            deadline = facts.spec.progress_deadline if facts.spec else 0.0
            moves = _without_looks(as_written(plan.state, deadline)) != read
        # It is kept for each rollout: the states themselves, whose parts others hold too, and one of them
        # where they say the same, as mostly.
        kept.moved = facts.state, facts.state if same else plan.state, moves
        return moves

    def _quiet_seconds(self, facts: Facts, plan: Plan, kept: Kept) -> float:
        """How long after the last write one waits that tells of no more than moved numbers. Those of an
        approved candidate move all day; that its verdict is another is told once it has stayed so."""
        state, spec, at = facts.state, facts.spec, facts.inputs.now
        if plan.state.phase is not Phase.COMPLETED:
            return QUIET_WRITE_SECONDS
        if current_look(state, facts.inputs) is None:
            if spec is not None and at >= next_due(state, spec, at):
                # One was due and there is none: nobody knows what it has been meanwhile.
                kept.other_verdict = None
            return AUDIT_WRITE_SECONDS
        if summary_verdict(plan.state.gates) == summary_verdict(state.gates):
            kept.other_verdict = None
            return AUDIT_WRITE_SECONDS
        now = self._deps.clock.monotonic()
        kept.other_verdict = now if kept.other_verdict is None else kept.other_verdict
        return QUIET_WRITE_SECONDS if now - kept.other_verdict >= VERDICT_SECONDS else math.inf

    async def _write_if_due(self, facts: Facts, plan: Plan, kept: Kept, run: Run) -> bool:
        self._note_look(facts, plan.state, kept)
        if not self._due_to_write(facts, plan, kept):
            return False
        await self._write(facts, plan, kept, run)
        return True

    async def _write(self, facts: Facts, plan: Plan, kept: Kept, run: Run) -> None:
        deadline = facts.spec.progress_deadline if facts.spec else 0.0
        state = self._traced(plan.state, facts.subject, entering=False)
        subject, asked = facts.subject, self._deps.clock.monotonic()
        written = await effects.write_status(self._deps.api, subject, state, deadline)
        self._deps.reads.note(subject.key, written, asked)
        self._deps.reads.wrote(subject.key, written, subject.key)
        run.known = Pair(subject.key, written, subject.cache_key, subject.cache)
        self._note_look(facts, state, kept)
        kept.written_at = self._deps.clock.monotonic()
        kept.memory.written = frozenset(state.holders.names)
        self._tell_trace(facts, plan, state)
        run.notices += [(facts.subject.rollout, notice) for notice in plan.notices]

    def _note_look(self, facts: Facts, state: RolloutState, kept: Kept) -> None:
        """Remembers the schedule, and tells once of each look how late it was: most are not written. What the
        status says was due is of a look long ago, so this process' own first is measured against nothing."""
        before, now = kept.schedule, state.schedule
        if before is not None and now is not None and now != before and facts.spec is not None:
            self._deps.looked(now.late_by / tick_seconds(facts.spec))
        kept.schedule = now

    def _traced(self, state: RolloutState, subject: effects.Subject, *, entering: bool) -> RolloutState:
        """With the traceparent of its attempt; the root span is emitted as the attempt begins."""
        if not state.started_at:
            return state
        if entering:
            names = {"kvtier.rollout": subject.key.name, "k8s.namespace.name": subject.key.namespace}
            self._deps.telemetry.attempt_root(subject.uid, state.attempt, names)
        return replace(state, traceparent=trace_context(subject.uid, state.attempt).traceparent)

    def _tell_trace(self, facts: Facts, plan: Plan, state: RolloutState) -> None:
        """Short spans, after the write they tell of: transitions, and gates whose verdict has changed."""
        if not state.started_at:
            return
        uid, telemetry = facts.subject.uid, self._deps.telemetry
        for span in plan.spans:
            with telemetry.span(span.name, dict(span.attributes), uid=uid, attempt=state.attempt):
                pass
        before = {gate.name: (gate.verdict, gate.reason) for gate in facts.state.gates}
        # A step that is left takes its gates with it; what they said at its last look is told all the same.
        look = current_look(facts.state, facts.inputs)
        judged: dict[str, GateStatus | GateVerdict] = {gate.name: gate for gate in state.gates}
        judged |= {gate.name: gate for gate in look.verdicts} if look is not None else {}
        for gate in judged.values():
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

    async def _agree(self, subject: effects.Subject, state: RolloutState, run: Run) -> bool:
        """Read once more, since asking agents took time: both objects still carry this fence, and none was
        deleted meanwhile: an uninstall counts the end of leases from there. The next pass looks at what was
        read."""
        run.known = await self._pairs.again(
            subject.key, subject.cache_key, rollout=subject.rollout, cache=subject.cache
        )
        if run.known is None or run.known.cache is None:
            return False
        rollout, cache = run.known.rollout, run.known.cache
        written = (rollout.get("status") or {}).get("fence"), (cache.get("status") or {}).get("fence")
        same = rollout["metadata"]["uid"] == subject.uid
        same = same and _leaving(rollout, cache) == _leaving(subject.rollout, subject.cache)
        return same and written == (state.fence, state.fence)

    async def _send(self, facts: Facts, state: RolloutState, rpcs: list[Rpc], kept: Kept, run: Run) -> None:
        cache = facts.subject.cache
        if cache is None:
            return
        order = Sent(
            cache=reference(cache),
            rollout=facts.subject.rollout,
            state=state,
            spec=facts.spec,
            manifest=facts.compiled.data,
            notices=run.notices,
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

    def _meet(self, key: ObjectKey, uid: str) -> None:
        """Forgets another object that had this name: it may have gone without our finalizer being asked."""
        before = self._uids.pop(key, "")
        if uid:
            self._uids[key] = uid
        if before and before != uid:
            self._forget(before)

    def _forget(self, uid: str) -> None:
        self._kept.pop(uid, None)
        self._feed.forget(uid)


def _leaving(*objects: JsonObject | None) -> list[bool]:
    return [obj is not None and "deletionTimestamp" in obj["metadata"] for obj in objects]


def _without_looks(state: RolloutState) -> tuple[object, ...]:
    """All but the times of looks, and texts: a forecast moves with every second that passes, and each of a
    thousand rollouts that see no request would be written all the time. A text goes with the next number.
    Values only, since this is compared at every look."""
    gates = [_GATE(gate) for gate in state.gates]
    conditions = [_CONDITION(one) for one in state.conditions]
    return gates, conditions, _STATE(state)


def _says(state: RolloutState, values: tuple[object, ...]) -> bool:
    """Whether these are the values of `_without_looks`."""
    return _without_looks(state) == values


def _all_but(kind: type, *names: str) -> Callable[[object], tuple[object, ...]]:
    """All fields of a dataclass but these."""
    return attrgetter(*(field.name for field in fields(kind) if field.name not in names))


_GATE = _all_but(GateStatus, "at")
_CONDITION = _all_but(Condition, "message")
_STATE = _all_but(RolloutState, "gates", "conditions", "schedule")


def _returns(state: RolloutState, plan: Plan) -> bool:
    """Whether this is the return to the baseline, which waits for no second look: both of its writes are
    refused unless fence and status are those that it was decided on."""
    return plan.transition is not None and plan.state.phase is Phase.ROLLING_BACK is not state.phase


def _mark(rpc: Rpc, state: RolloutState) -> tuple[str, int, str]:
    return rpc.node, state.fence, type(rpc).__name__
