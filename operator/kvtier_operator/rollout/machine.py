"""The release machine: `next_plan(state, inputs)`, a pure function.

    Off > Shadow > Canary > Ramp(step i) > Full > Completed; from every stage > ExactBaseline

Each plan either moves (a fence number and the state to write under it) or keeps (RPCs that make agents agree
with what is written). A plan never holds both, so nothing is sent before it is written, and a crash between
any two effects leaves objects from which the same function goes on. It must not do I/O or read a clock.
"""

from __future__ import annotations

from dataclasses import replace

from kvtier_evidence.carry import Carry
from kvtier_operator.rollout.adopting import finish_adoption, half_adopted
from kvtier_operator.rollout.conditions import EVIDENCE_SLOW, held_by_spec, slow_evidence, with_conditions
from kvtier_operator.rollout.evaluation import all_pass, record_look
from kvtier_operator.rollout.holding import plan_against, plan_holding, promote
from kvtier_operator.rollout.inputs import Inputs, Notice, Plan
from kvtier_operator.rollout.intents import answered, judge_intent, pending_intent
from kvtier_operator.rollout.moves import advance, roll_back
from kvtier_operator.rollout.returning import end_unbegun, new_attempt, plan_return, plan_without_cache
from kvtier_operator.rollout.spec import Intent
from kvtier_operator.rollout.state import Holders, Rollback, RolloutState
from kvtier_operator.rollout.status import SHOWN_NODES, as_written
from kvtier_operator.rollout.vocabulary import (
    FINISHED,
    Blocker,
    Cause,
    IntentResult,
    Phase,
    Stage,
    Verb,
    Verdict,
)
from kvtier_operator.rollout.waiting import plan_off


def next_plan(state: RolloutState, inputs: Inputs) -> Plan:
    """What to write and do now. Called again with what it wrote and the same facts, it changes nothing."""
    plan = _plan(state, inputs)
    settled = replace(plan.state, observed_generation=inputs.generation)
    settled = with_conditions(settled, inputs)
    for reason, found in ((EVIDENCE_SLOW, slow_evidence), (str(Blocker.SPEC_INVALID), held_by_spec)):
        message = found(settled)
        if message and not found(state):
            plan = replace(plan, notices=(*plan.notices, Notice(True, reason, message)))
    urgent = plan.urgent or _worth_writing(state, settled, inputs)
    return replace(plan, state=settled, urgent=urgent)


def _plan(state: RolloutState, inputs: Inputs) -> Plan:
    active = state.holds_candidate or state.revoking is not None
    leaving = inputs.cache is None or inputs.cache.deleting
    if leaving and (active or state.phase is Phase.ROLLING_BACK):
        return _cache_gone(state, inputs)
    if half_adopted(state, inputs):
        return finish_adoption(state, inputs)
    if inputs.spec is None and active:
        return roll_back(state, inputs, Cause.INPUT_DRIFT, f"the spec cannot be run: {inputs.spec_error}")
    if inputs.deleting and active:
        return roll_back(state, inputs, Cause.OBJECT_DELETED, "the KVRollout is being deleted")
    if inputs.deleting and state.phase is not Phase.ROLLING_BACK:
        return Plan(state, release=True)
    intent = pending_intent(state, inputs)
    if intent is not None:
        if intent.verb in (Verb.PROMOTE, Verb.SKIP) and state.holds_candidate:
            # Its answer can wait for a pass; harm, drift and an edited candidate cannot.
            against = plan_against(state, inputs)
            if against is not None:
                return against
        if inputs.spec is not None:
            state = record_look(state, inputs, inputs.spec)
        return _on_intent(state, inputs, intent)
    if state.phase is Phase.ROLLING_BACK:
        return plan_return(state, inputs)
    if state.holds_candidate:
        return plan_holding(state, inputs)
    return _at_rest(state, inputs)


def _at_rest(state: RolloutState, inputs: Inputs) -> Plan:
    """Off, or finished with nothing held. An edited candidate arms a finished rollout again."""
    if state.phase in FINISHED and state.phase is not Phase.INVALID:
        if inputs.spec is not None and not state.candidate_hash:
            # It ended before its spec could be read: what is read first now is no edit.
            state = replace(state, candidate_hash=inputs.spec.candidate_hash)
        if inputs.spec is not None and inputs.spec.candidate_hash != state.candidate_hash:
            target = new_attempt(state, inputs)
            notice = Notice(False, "CandidateEdited", f"attempt {target.attempt} begins at Shadow")
            return Plan(target, urgent=True, notices=(notice,), requeue_after=0.01)
        if inputs.ttl is None or not state.finished_at:
            return Plan(state)
        # How it ended is written before this is asked, so that also 0 s leaves it for a watch to see.
        left = state.finished_at + inputs.ttl - inputs.now_for(state.finished_at)
        return Plan(state, delete=True) if left <= 0 else Plan(state, requeue_after=min(left, 3600.0))
    return plan_off(state, inputs)


def _cache_gone(state: RolloutState, inputs: Inputs) -> Plan:
    if state.phase is Phase.ROLLING_BACK:
        return plan_without_cache(state, inputs)
    cause, message = Cause.OBJECT_DELETED, "the KVCache is deleted"
    if not inputs.cache_named:
        cause, message = Cause.INPUT_DRIFT, f"the spec cannot be run: {inputs.spec_error}"
    rollback = Rollback(
        cause=cause,
        message=message,
        from_stage=state.stage,
        from_step=state.step,
        target_digest=state.baseline.digest if state.baseline else "",
        started_at=inputs.now,
        lease_ttl=max(state.revoking.lease_ttl if state.revoking is not None else 0.0, inputs.older_ttl),
    )
    target = replace(
        state,
        phase=Phase.ROLLING_BACK,
        stage=Stage.EXACT_BASELINE,
        step=0,
        rollback=rollback,
        revoking=None,
        grant_expires=0.0,
        holders=Holders(),
    )
    notice = Notice(True, "RollingBack", f"{cause} in {state.stage}: {message}")
    return Plan(target, urgent=True, notices=(notice,), requeue_after=0.01)


def _on_intent(state: RolloutState, inputs: Inputs, intent: Intent) -> Plan:
    held = inputs.cache is not None and inputs.cache.suspended
    # The spec is as it was created while its generation is the first; before the first status nobody can have
    # meant an attempt, and what was created with the object cannot be told from what came later.
    created_with = inputs.generation == 1 or not state.observed_generation
    error = inputs.spec_error
    if inputs.spec is not None and intent.verb in (Verb.PROMOTE, Verb.SKIP, Verb.RETRY):
        error = inputs.spec.unwaited
    result, message = judge_intent(state, intent, suspended=held, created_with=created_with, spec_error=error)
    if result is not IntentResult.ACCEPTED:
        notice = Notice(True, "IntentRefused", f"{intent.verb} seq {intent.seq}: {message}")
        refused = answered(state, intent, result, message, inputs.now)
        return Plan(refused, urgent=True, notices=(notice,), requeue_after=0.01)
    noted = answered(state, intent, result, f"{intent.verb} in {state.stage}", inputs.now)
    notice = Notice(False, "IntentAccepted", f"{intent.verb} seq {intent.seq} in {state.stage}")
    plan = _obey(noted, inputs, intent)
    return replace(plan, notices=(notice, *plan.notices))


def _obey(state: RolloutState, inputs: Inputs, intent: Intent) -> Plan:
    if intent.verb is Verb.ABORT:
        if state.holds_candidate or state.revoking is not None:
            return roll_back(state, inputs, Cause.INTENT_ABORT, f"intent seq {intent.seq}")
        message = f"intent seq {intent.seq}, before any agent knew the candidate"
        return end_unbegun(state, inputs, Cause.INTENT_ABORT, message)
    if intent.verb is Verb.RETRY:
        target = replace(new_attempt(state, inputs), last_intent=state.last_intent)
        return Plan(target, urgent=True, requeue_after=0.01)
    if intent.verb is Verb.PAUSE:
        return advance(state, inputs, replace(state, phase=Phase.PAUSED))
    if intent.verb is Verb.RESUME:
        return advance(state, inputs, replace(state, phase=Phase.PROGRESSING))
    if inputs.spec is None:
        raise ValueError("an intent was read from a spec")
    # What it was judged by and cannot be read now passes no more.
    overridden = bool(inputs.unread) or not all_pass(state, inputs, inputs.spec)
    why = f"{intent.verb} by intent seq {intent.seq}" + (" without a Pass" if overridden else "")
    return promote(state, inputs, inputs.spec, why, overridden)


def _worth_writing(old: RolloutState, new: RolloutState, inputs: Inputs) -> bool:
    """Whether the change is more than numbers and texts that move with time, or that a full status has no
    room for: compared is what would be read back."""
    before = _settled(old)
    if before == _settled(new):
        return False
    written = as_written(new, inputs.spec.progress_deadline if inputs.spec else 0.0)
    return before != _settled(written)


def _settled(state: RolloutState) -> tuple[object, ...]:
    """All of it that is compared. Of gates only what speaks against the step: one that passes, or has too
    little evidence yet, waits for the next step's write, or for that of moved numbers."""
    gates = [
        (one.name, one.metric, one.verdict, one.reason, one.fail_only)
        for one in state.gates
        if one.verdict not in (Verdict.INSUFFICIENT, Verdict.PASS)
    ]
    conditions = [
        (one.type, one.status, one.reason, one.observed_generation, one.last_transition)
        for one in state.conditions
    ]
    rollback = state.rollback
    if rollback is not None:
        rollback = replace(rollback, message="", missing=rollback.missing[:SHOWN_NODES])
    rest = replace(
        state,
        gates=(),
        carry=_NOTHING,
        schedule=None,
        conditions=(),
        rollback=rollback,
        lost=state.lost[:SHOWN_NODES],
    )
    return rest, gates, conditions


_NOTHING = Carry()
