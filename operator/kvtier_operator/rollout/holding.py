"""Shadow to Full, and after: while agents hold the candidate, what ends it, what moves it on, what keeps it.

The order of the rules is their rank: proof of harm before everything favourable, every reason to return
before every reason to go on. It must not know how evidence was gathered or a grant is sent.
"""

from __future__ import annotations

from dataclasses import replace

from kvtier_operator.rollout.adopting import adopt
from kvtier_operator.rollout.agentwatch import agents_against, exclude, holds, watch_agents
from kvtier_operator.rollout.calibrating import newly_measured
from kvtier_operator.rollout.evaluation import (
    all_pass,
    describe,
    failed_gate,
    insufficient_gates,
    next_due,
    record_look,
)
from kvtier_operator.rollout.grants import evidence_of, plain
from kvtier_operator.rollout.inputs import (
    AgentView,
    ApproveCandidate,
    ExtendApproval,
    Grant,
    Inputs,
    Notice,
    Plan,
    Revoke,
    Rpc,
    SpanNote,
)
from kvtier_operator.rollout.moves import (
    APPROVAL_SECONDS,
    about_to_grant,
    advance,
    begin_revocation,
    current_step,
    enter_step,
    excluded_now,
    gone_holders,
    is_mine,
    needs_refence,
    refence,
    revoked,
    roll_back,
    stage_span,
    tick_seconds,
)
from kvtier_operator.rollout.returning import new_attempt, short_digest
from kvtier_operator.rollout.spec import RolloutSpec
from kvtier_operator.rollout.state import RolloutState
from kvtier_operator.rollout.vocabulary import (
    MAX_RESUMES,
    Blocker,
    CandidateClass,
    Cause,
    OnInsufficient,
    OnLeaseExpired,
    Phase,
    Stage,
)


def plan_holding(state: RolloutState, inputs: Inputs) -> Plan:
    """One pass over a rollout whose candidate agents may hold. Its KVCache and spec are there."""
    spec, cache = inputs.spec, inputs.cache
    if spec is None or cache is None:
        raise ValueError("holding needs a KVCache and a readable spec")
    if state.phase is Phase.COMPLETED and inputs.superseded_by:
        return _let_go(state, inputs)
    known = frozenset(state.excluded)
    state, inputs = _look_around(state, inputs, spec)
    against = _plan_against(state, inputs, spec)
    if against is not None:
        return against
    notices = tuple(
        Notice(True, "NodeExcluded", f"{one.node} joined late and cannot host the candidate: {one.reason}")
        for one in state.excluded
        if one not in known
    )
    plan = _plan_on(state, inputs, spec)
    return replace(plan, notices=(*notices, *plan.notices))


def _plan_on(state: RolloutState, inputs: Inputs, spec: RolloutSpec) -> Plan:
    if _expired(state, inputs):
        resumed = _resume(state, inputs, spec)
        if resumed is not None:
            return resumed
    if state.window is not None and state.window.spec_hash != spec.window_hash:
        return _reopen(state, inputs, spec)
    if needs_refence(state, inputs):
        return refence(state, inputs, "fence moved by someone else")
    if _to_take_back(state, inputs):
        return refence(state, inputs, "an agent left the blast radius")
    if state.phase is Phase.PROGRESSING and not suspended(inputs) and _ready(state, inputs):
        measured = newly_measured(state, inputs, spec)
        if measured:
            return _calibrated(state, inputs, spec, measured)
        onward = _onward(state, inputs, spec)
        if onward is not None:
            return onward
    return _keep(state, inputs, spec)


def plan_against(state: RolloutState, inputs: Inputs) -> Plan | None:
    """What outranks a promotion by hand: an edited candidate, and every reason to return."""
    spec = inputs.spec
    if spec is None or inputs.cache is None:
        return None
    return _plan_against(*_look_around(state, inputs, spec), spec)


def _look_around(state: RolloutState, inputs: Inputs, spec: RolloutSpec) -> tuple[RolloutState, Inputs]:
    """The state with what agents and evidence say now; excluded agents count as not selected."""
    state = exclude(watch_agents(state, inputs, spec), inputs)
    excluded = excluded_now(state, inputs.agents, inputs.uid)
    agents = tuple(
        replace(one, selected=False) if one.selected and one.node in excluded else one
        for one in inputs.agents
    )
    # Those who let go or are among the vanished are holders no more, whatever was remembered before.
    inputs = replace(inputs, agents=agents, holders=frozenset(state.holders.names))
    chosen = [agent for agent in agents if agent.selected]
    complete = bool(chosen) and all(holds(agent, state) for agent in chosen)
    state = replace(state, held_by_all=state.held_by_all or complete, nodes_total=len(chosen))
    return record_look(state, inputs, spec), inputs


def _plan_against(state: RolloutState, inputs: Inputs, spec: RolloutSpec) -> Plan | None:
    if spec.candidate_hash != state.candidate_hash:
        return _edited_candidate(state, inputs)
    harm = _reason_to_return(state, inputs, spec)
    return None if harm is None else roll_back(state, inputs, *harm)


def _let_go(state: RolloutState, inputs: Inputs) -> Plan:
    """Completed, and someone else now decides about this cache: no renewal, no grant, no fence."""
    target = replace(
        state,
        grant_expires=0.0,
        blocker=Blocker.APPROVAL_ENDED,
        blocker_message=f"the approval ended when {inputs.superseded_by} began",
    )
    notice = Notice(False, "ApprovalEnded", target.blocker_message)
    return Plan(target, urgent=True, notices=(notice,))


def _edited_candidate(state: RolloutState, inputs: Inputs) -> Plan:
    target = replace(
        new_attempt(state, inputs),
        revoking=begin_revocation(inputs, inputs.name, inputs.lease_ttl, gone_holders(state, inputs)),
        blocker=Blocker.REVOKING_APPROVED,
        blocker_message="revoking the candidate of the attempt before",
    )
    notice = Notice(False, "CandidateEdited", f"attempt {target.attempt} begins at Shadow")
    span = stage_span(state, Stage.OFF, 0, "spec.candidate edited")
    return advance(state, inputs, target, notice=notice, spans=(span,))


def _reason_to_return(
    state: RolloutState, inputs: Inputs, spec: RolloutSpec
) -> tuple[Cause, str] | tuple[Cause, str, str] | None:
    cache, candidate = inputs.cache, state.candidate
    if inputs.superseded_by and state.phase is not Phase.COMPLETED:
        return Cause.INPUT_DRIFT, f"{inputs.superseded_by} was first and has taken the cache"
    if cache is None or candidate is None or state.baseline is None:
        return Cause.INPUT_DRIFT, "the manifests of this attempt are not recorded"
    failed = failed_gate(state, inputs)
    if failed is not None:
        return Cause.GATE_FAILED, describe(failed), failed.name
    if inputs.candidate.ref is None:
        return Cause.INPUT_DRIFT, inputs.candidate.message
    if inputs.candidate.ref.digest != candidate.digest:
        now, then = short_digest(inputs.candidate.ref.digest), short_digest(candidate.digest)
        return Cause.INPUT_DRIFT, f"the candidate's inputs compile to {now} now, not to {then}"
    if cache.baseline is None or cache.baseline.digest != state.baseline.digest:
        return Cause.INPUT_DRIFT, "the baseline of the KVCache has changed"
    return agents_against(state, inputs, spec) or _deadlines(state, inputs, spec)


def _deadlines(state: RolloutState, inputs: Inputs, spec: RolloutSpec) -> tuple[Cause, str] | None:
    if state.phase is Phase.COMPLETED:
        if inputs.cache is not None and not is_mine(inputs.cache, inputs):
            return Cause.INPUT_DRIFT, "the KVCache does not hold this approval any more"
        if inputs.now_for(state.grant_expires) >= state.grant_expires:
            return Cause.LEASE_EXPIRED, "the long grant of the approved candidate was not renewed in time"
        return None
    if inputs.now_for(state.started_at) >= state.started_at + spec.progress_deadline:
        return (
            Cause.DEADLINE_EXCEEDED,
            f"not completed {int(spec.progress_deadline)} s after the attempt began",
        )
    step = current_step(state, spec)
    if spec.on_insufficient is OnInsufficient.ROLL_BACK and state.window and state.phase is Phase.PROGRESSING:
        opened = state.window.opened_at
        short = insufficient_gates(state, inputs, spec)
        if inputs.now_for(opened) >= opened + step.min_seconds + spec.settle and short:
            return (
                Cause.DEADLINE_EXCEEDED,
                f"{step.label} ended with too little evidence: {', '.join(short[:4])}",
            )
    return None


def _expired(state: RolloutState, inputs: Inputs) -> list[str]:
    """Agents that returned to the baseline by themselves in the open window, under whichever of its numbers;
    of an approval that goes on, since the newest was granted. One whose node is cordoned or drains was to let
    go: nobody renews it, and that it could not be told before its lease ended is no outage."""
    first = state.fence
    if state.window is not None and state.phase is not Phase.COMPLETED:
        first = min(first, state.window.opening_fence)
    return [
        agent.node
        for agent in inputs.agents
        if agent.reachable
        and not agent.leaving
        and agent.granted_fence == 0
        and agent.returned_reason == "LeaseExpired"
        and first <= agent.returned_fence <= state.fence
    ]


def _let_go_untold(agent: AgentView, state: RolloutState, inputs: Inputs) -> int:
    """The fence of this rollout's lease that ended on a cordoned agent before it could be told to let go; 0
    where none did. It is told all the same, so that it says nothing of that when it is in service again."""
    mine = agent.leaving and agent.returned_rollout == inputs.uid and agent.returned_reason == "LeaseExpired"
    return agent.returned_fence if mine and agent.reachable and agent.granted_fence == 0 else 0


def _resume(state: RolloutState, inputs: Inputs, spec: RolloutSpec) -> Plan | None:
    """The same step again in a new window, or the baseline; None while nobody may be granted it again."""
    who = ", ".join(_expired(state, inputs)[:4])
    if state.phase is Phase.COMPLETED:
        if suspended(inputs):
            return None
        return refence(state, inputs, f"lease ended on {who}; the approval goes on")
    resumes = state.window.resumes if state.window else 0
    message = f"the lease ended on {who}"
    if spec.on_lease_expired is OnLeaseExpired.ROLL_BACK:
        return roll_back(state, inputs, Cause.LEASE_EXPIRED, message)
    if resumes >= MAX_RESUMES:
        return roll_back(
            state, inputs, Cause.LEASE_EXPIRED, f"{message}, after {resumes} resumptions of this step"
        )
    if suspended(inputs):
        return None
    plan = enter_step(
        state,
        inputs,
        spec,
        current_step(state, spec),
        f"LeaseExpired on {who}; resumed with fresh evidence",
        spend_share=True,
        resumes=resumes + 1,
        phase=state.phase,
        overridden=state.overridden,
    )
    notice = Notice(True, "LeaseExpired", f"{message}; resumption {resumes + 1} of {MAX_RESUMES}")
    return replace(plan, notices=(notice, *plan.notices))


def _reopen(state: RolloutState, inputs: Inputs, spec: RolloutSpec) -> Plan:
    """Stages, gates, radius or lease were edited: finished stages stay, the open one starts again, for all of
    the radius as it is now. After Completed the audit does, under the new numbers. No stage has compared for
    whom a wider radius brings it then: that is a person's word."""
    if state.phase is Phase.COMPLETED and state.window is not None:
        window = replace(
            state.window, spec_hash=spec.window_hash, opened_at=inputs.now, probes=spec.judged_by
        )
        approved = inputs.cache.approved if inputs.cache is not None else None
        wider = approved is not None and spec.blast_radius.reaches_beyond(approved.radius)
        target = replace(state, window=window, overridden=state.overridden or wider)
        said = "approved by hand for a wider blast radius, in which no stage has compared it"
        return advance(
            state,
            inputs,
            target,
            notice=Notice(True, "RadiusWidened", said) if wider else None,
            new_window=True,
        )
    step = current_step(state, spec)
    return enter_step(
        state,
        inputs,
        spec,
        step,
        f"spec edited; the open step starts again for {spec.blast_radius.told()}",
        spend_share=True,
        phase=state.phase,
    )


def _calibrated(state: RolloutState, inputs: Inputs, spec: RolloutSpec, measured: tuple[str, ...]) -> Plan:
    """The same step, judged from now on by what it measured. Nothing is spent: it could not have passed."""
    return enter_step(
        state,
        inputs,
        spec,
        current_step(state, spec),
        f"measured what {', '.join(measured[:4])} are judged by; counting begins",
        resumes=state.window.resumes if state.window else 0,
        overridden=state.overridden,
    )


def _to_take_back(state: RolloutState, inputs: Inputs) -> list[str]:
    return [
        agent.node
        for agent in inputs.agents
        if agent.reachable
        and not agent.selected
        and state.fence in (agent.granted_fence, _let_go_untold(agent, state, inputs))
    ]


def _held_before(agent: AgentView, state: RolloutState, inputs: Inputs) -> bool:
    """Whether it holds the candidate now, under an earlier fence."""
    digest = state.candidate.digest if state.candidate is not None else ""
    return agent.granted_rollout == inputs.uid and agent.candidate_digest == digest


def suspended(inputs: Inputs) -> bool:
    """Whether no node may be changed for the better: the step holds, a return does not wait."""
    return inputs.cache is not None and inputs.cache.suspended


def _ready(state: RolloutState, inputs: Inputs) -> bool:
    """Every agent of the radius holds the candidate under this fence and can say that it runs it, none that
    held it is silent, and what it is judged by can be read."""
    chosen = [agent for agent in inputs.agents if agent.selected]
    if not chosen or state.lost or inputs.unread:
        return False
    return all(agent.reachable and holds(agent, state) and agent.running_candidate != "" for agent in chosen)


def _onward(state: RolloutState, inputs: Inputs, spec: RolloutSpec) -> Plan | None:
    """The next rung, when the step has lasted and every gate passes at this one look."""
    step = current_step(state, spec)
    if state.window is None or spec.unwaited:
        return None
    opened = state.window.opened_at
    if inputs.now_for(opened) < opened + step.min_seconds:
        return None
    if not all_pass(state, inputs, spec):
        return None
    return promote(state, inputs, spec, "every gate passes")


def promote(
    state: RolloutState, inputs: Inputs, spec: RolloutSpec, why: str, overridden: bool = False
) -> Plan:
    """To the next rung, or from the last one to Completed: an exact candidate becomes the baseline, an
    approximate one is approved beside it."""
    step = current_step(state, spec)
    following = spec.after(step)
    if overridden:
        gates = tuple(replace(gate, overridden=gate.open) for gate in state.gates)
        state = replace(state, gates=gates)
    overridden = overridden or state.overridden
    if following is not None:
        return enter_step(state, inputs, spec, following, why, overridden=overridden)
    if state.candidate is not None and state.candidate.kind is CandidateClass.EXACT:
        return adopt(replace(state, overridden=overridden), inputs, why)
    expires = inputs.now + APPROVAL_SECONDS
    target = replace(
        state,
        phase=Phase.COMPLETED,
        finished_at=inputs.now,
        grant_expires=expires,
        overridden=overridden,
    )
    digest = short_digest(state.candidate.digest) if state.candidate else ""
    return advance(
        state,
        inputs,
        target,
        notice=Notice(False, "Completed", f"candidate {digest} is approved: {why}"),
        spans=(SpanNote("rollout.completed", (("kvtier.transition.reason", why),)),),
        approve=ApproveCandidate(expires),
    )


def _keep(state: RolloutState, inputs: Inputs, spec: RolloutSpec) -> Plan:
    """Nothing to decide: see that each agent holds what it should, and come back at the next tick."""
    to_grant = [
        agent.node
        for agent in inputs.agents
        if agent.selected and agent.reachable and not holds(agent, state)
        # Without it there is no manifest to send.
        if not inputs.unread_baseline
        # Who holds it keeps it under a later number, too, or a pause would end all leases of the suspended.
        if not suspended(inputs) or _held_before(agent, state, inputs)
    ]
    state = replace(state, holders=about_to_grant(state, inputs, to_grant))
    rpcs: list[Rpc] = [Grant(node) for node in to_grant]
    rpcs += [
        Revoke(agent.node, None)
        for agent in inputs.agents
        if agent.reachable
        and not agent.selected
        and (agent.granted_rollout == inputs.uid or _let_go_untold(agent, state, inputs))
        and 0 < max(agent.granted_fence, _let_go_untold(agent, state, inputs)) < state.fence
        and not revoked(agent, state.fence)
    ]
    extend = None
    if state.phase is Phase.COMPLETED:
        left = state.grant_expires - inputs.now_for(state.grant_expires)
        if left < APPROVAL_SECONDS * 2 / 3:
            extend = ExtendApproval(inputs.now + APPROVAL_SECONDS)
            state = replace(state, grant_expires=extend.grant_expires)
        elif _says_otherwise(state, inputs, spec):
            extend = ExtendApproval(state.grant_expires)
    due = next_due(state, spec, inputs.now) if state.schedule else inputs.now + tick_seconds(spec)
    return Plan(
        state,
        rpcs=tuple(rpcs),
        extend=extend,
        urgent=extend is not None,
        requeue_after=max(0.05, due - inputs.now),
    )


def _says_otherwise(state: RolloutState, inputs: Inputs, spec: RolloutSpec) -> bool:
    """Whether the KVCache says of this approval what the spec has said before it was edited."""
    approved = inputs.cache.approved if inputs.cache is not None else None
    if approved is None or not approved.evidence:
        return False
    told = approved.radius, approved.holdback, approved.evidence
    return told != (spec.blast_radius, plain(spec.holdback), evidence_of(inputs.uid, state, spec))
