"""Off: what must be true before an agent hears of a candidate, and how an older one is revoked first.

A blocker is a sentence with a reason; some only an edit can lift (phase Invalid), the others lift by
themselves (phase Pending). It must not know the stages after Shadow.
"""

from __future__ import annotations

from dataclasses import replace

from kvtier_operator.rollout.conditions import MAX_MESSAGE
from kvtier_operator.rollout.gateset import missing_for_approximate
from kvtier_operator.rollout.inputs import Inputs, Notice, Plan, Revoke
from kvtier_operator.rollout.moves import (
    advance,
    enter_step,
    lease_end,
    needs_refence,
    refence,
    revoked,
    stage_span,
)
from kvtier_operator.rollout.returning import RETRY_SECONDS, new_attempt
from kvtier_operator.rollout.state import RolloutState
from kvtier_operator.rollout.vocabulary import INVALIDATING, Blocker, CandidateClass, Phase, Stage

WAIT_SECONDS = 10.0


def find_blocker(state: RolloutState, inputs: Inputs) -> tuple[Blocker, str]:
    """The first thing that stands in the way, in the order in which a person would have to remove them."""
    spec, cache, candidate = inputs.spec, inputs.cache, inputs.candidate
    if spec is None:
        return Blocker.SPEC_INVALID, inputs.spec_error
    if cache is None or cache.deleting:
        return Blocker.CACHE_MISSING, f"KVCache {spec.cache_name} does not exist or is being deleted"
    if spec.unsupported:
        return (
            Blocker.NOT_IMPLEMENTED,
            f"{spec.unsupported} is not implemented yet; use candidate.selectorRef",
        )
    if inputs.busy_with:
        return Blocker.CACHE_BUSY, f"KVCache {spec.cache_name} has an unfinished rollout: {inputs.busy_with}"
    if cache.baseline is None:
        return Blocker.BASELINE_MISSING, f"KVCache {spec.cache_name} has no baseline yet"
    if candidate.ref is None:
        return candidate.blocker, candidate.message
    if candidate.ref.digest == cache.baseline.digest:
        return Blocker.NO_CHANGE, "the candidate is the baseline"
    if candidate.ref.kind is CandidateClass.APPROXIMATE:
        metric = missing_for_approximate(spec.gates)
        if metric:
            return Blocker.GATE_MISSING, f"an approximate candidate needs a gate on {metric}"
    wanted = [agent for agent in inputs.agents if agent.selected]
    if not wanted:
        return Blocker.NO_NODES, f"no live agent in the blast radius of {len(inputs.agents)} agents"
    behind = [agent.node for agent in wanted if agent.baseline_digest != cache.baseline.digest]
    if behind:
        return Blocker.NO_NODES, f"not on the baseline yet: {', '.join(behind[:4])}"
    return Blocker.NONE, ""


def plan_off(state: RolloutState, inputs: Inputs) -> Plan:
    """Pending or Invalid: waits, clears the way, or enters Shadow."""
    spec, cache = inputs.spec, inputs.cache
    if state.supersedes and cache is not None and spec is not None:
        return _clear_the_way(state, inputs)
    if spec is not None and state.candidate_hash not in ("", spec.candidate_hash):
        state = replace(new_attempt(state, inputs), attempt=state.attempt)
    blocker, message = find_blocker(state, inputs)
    if blocker is not Blocker.NONE or spec is None or cache is None:
        phase = Phase.INVALID if blocker in INVALIDATING else Phase.PENDING
        target = replace(
            state,
            phase=phase,
            blocker=blocker,
            blocker_message=message[:MAX_MESSAGE],
            candidate=inputs.candidate.ref,
            baseline=cache.baseline if cache else None,
            candidate_hash=spec.candidate_hash if spec else state.candidate_hash,
            nodes_total=sum(agent.selected for agent in inputs.agents),
        )
        changed = (target.phase, target.blocker) != (state.phase, state.blocker)
        notices = (Notice(phase is Phase.INVALID, str(blocker), message),) if changed else ()
        return Plan(
            target,
            urgent=target != state,
            notices=notices,
            requeue_after=0.0 if phase is Phase.INVALID else WAIT_SECONDS,
        )
    ready = replace(
        state,
        candidate=inputs.candidate.ref,
        baseline=cache.baseline,
        candidate_hash=spec.candidate_hash,
        started_at=state.started_at or inputs.now,
        nodes_total=sum(agent.selected for agent in inputs.agents),
    )
    if cache.approved is not None:
        name = cache.approved.rollout
        target = replace(
            ready,
            phase=Phase.PENDING,
            supersedes=name,
            revoking_since=inputs.now,
            blocker=Blocker.REVOKING_APPROVED,
            blocker_message=f"revoking what {name} had approved",
        )
        notice = Notice(False, "RevokingApproved", f"{name}: its approval ends before this rollout starts")
        return advance(ready, inputs, target, notice=notice)
    return enter_step(ready, inputs, spec, spec.ladder[0], "agents are on the baseline", spend_share=True)


def _clear_the_way(state: RolloutState, inputs: Inputs) -> Plan:
    """Revokes the older candidate everywhere; goes on when each agent has let go or its lease has ended."""
    if needs_refence(state, inputs):
        return refence(state, inputs, "fence moved while revoking")
    held = [agent.node for agent in inputs.agents if not revoked(agent, state.fence)]
    end = lease_end(inputs, state.revoking_since)
    if held and inputs.now < end:
        return Plan(
            state,
            rpcs=tuple(Revoke(node, None) for node in held),
            requeue_after=min(RETRY_SECONDS, max(0.1, end - inputs.now)),
        )
    target = replace(state, supersedes="", revoking_since=0.0, blocker=Blocker.NONE, blocker_message="")
    span = stage_span(state, Stage.OFF, 0, f"candidate of {state.supersedes} revoked")
    return advance(state, inputs, target, spans=(span,), clear_approved=True)
