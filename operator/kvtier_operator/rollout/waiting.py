"""Off: what must be true before an agent hears of a candidate, and how an older one is revoked first.

A blocker is a sentence with a reason; some only an edit can lift (phase Invalid), the others lift by
themselves (phase Pending). It must not know the stages after Shadow.
"""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime

from kvtier_operator.rollout.beats import AFTER_BEAT_SECONDS, next_beat
from kvtier_operator.rollout.conditions import MAX_MESSAGE
from kvtier_operator.rollout.foresight import too_few_prompts
from kvtier_operator.rollout.gateset import missing_for_approximate
from kvtier_operator.rollout.inputs import Inputs, Notice, Plan, Revoke
from kvtier_operator.rollout.moves import (
    MAX_MISSING,
    advance,
    begin_revocation,
    enter_step,
    lease_end,
    needs_refence,
    refence,
    revoked,
    stage_span,
)
from kvtier_operator.rollout.probesets import probe_fault
from kvtier_operator.rollout.returning import RETRY_SECONDS, end_unbegun, new_attempt
from kvtier_operator.rollout.state import Revocation, RolloutState
from kvtier_operator.rollout.vocabulary import INVALIDATING, Blocker, CandidateClass, Cause, Phase, Stage

WAIT_SECONDS = 10.0
MAX_NAMES = 4


def find_blocker(state: RolloutState, inputs: Inputs) -> tuple[Blocker, str]:
    """The first thing that stands in the way, in the order in which a person would have to remove them."""
    spec, cache, candidate = inputs.spec, inputs.cache, inputs.candidate
    if spec is None:
        return inputs.spec_blocker, inputs.spec_error
    if spec.unwaited:
        return Blocker.SPEC_INVALID, spec.unwaited
    if cache is None or cache.deleting:
        return Blocker.CACHE_MISSING, f"KVCache {spec.cache_name} does not exist or is being deleted"
    if cache.suspended:
        return Blocker.CACHE_SUSPENDED, f"KVCache {spec.cache_name} is suspended: no node is changed"
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
    unusable, why = probe_fault(spec.probes)
    if unusable is not Blocker.NONE:
        return unusable, why
    if inputs.unread_probes:
        return Blocker.PROBE_PLAN_INVALID, inputs.unread_probes
    few = too_few_prompts(spec, max(state.shares, candidate.prior_shares) + 1)
    if few:
        return Blocker.PROBE_SET_SMALL, f"{few}; scope ProbeSet judges a finite set by itself"
    wanted = [agent for agent in inputs.agents if agent.selected]
    if not wanted:
        return Blocker.NO_NODES, f"no live agent in the blast radius of {len(inputs.agents)} agents"
    behind = [agent.node for agent in wanted if agent.baseline_digest != cache.baseline.digest]
    if behind:
        return Blocker.NO_NODES, f"not on the baseline yet: {', '.join(behind[:4])}"
    if candidate.no_room:
        return Blocker.NO_ROOM, candidate.no_room
    return Blocker.NONE, ""


def plan_off(state: RolloutState, inputs: Inputs) -> Plan:
    """Pending or Invalid: waits, clears the way, or enters Shadow."""
    spec, cache = inputs.spec, inputs.cache
    if state.revoking is not None and cache is not None and spec is not None:
        return _clear_the_way(state, inputs, state.revoking)
    if spec is not None and state.candidate_hash not in ("", spec.candidate_hash):
        state = replace(new_attempt(state, inputs), attempt=state.attempt)
    blocker, message = find_blocker(state, inputs)
    if blocker is not Blocker.NONE or spec is None or cache is None:
        invalid = blocker in INVALIDATING
        since = 0.0 if invalid else state.pending_since or inputs.now
        waited = inputs.now_for(since) - since
        left = spec.progress_deadline - waited if spec is not None else WAIT_SECONDS
        if not invalid and left <= 0:
            return _waited_too_long(state, inputs, blocker, message)
        phase = Phase.INVALID if invalid else Phase.PENDING
        target = replace(
            state,
            phase=phase,
            blocker=blocker,
            blocker_message=message[:MAX_MESSAGE],
            candidate=inputs.candidate.ref,
            baseline=cache.baseline if cache else None,
            candidate_hash=spec.candidate_hash if spec else state.candidate_hash,
            pending_since=since,
            nodes_total=sum(agent.selected for agent in inputs.agents),
        )
        changed = (target.phase, target.blocker) != (state.phase, state.blocker)
        notices = (Notice(phase is Phase.INVALID, str(blocker), message),) if changed else ()
        return Plan(
            target,
            notices=notices,
            requeue_after=0.0 if invalid else min(_until_beat(inputs), left),
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
        revoking = begin_revocation(inputs, name, inputs.approved_ttl, inputs.approved_vanished)
        target = replace(
            ready,
            phase=Phase.PENDING,
            revoking=revoking,
            blocker=Blocker.REVOKING_APPROVED,
            blocker_message=_waits_for(revoking, inputs),
        )
        notice = Notice(False, "RevokingApproved", f"{name}: its approval ends before this rollout starts")
        return advance(ready, inputs, target, notice=notice)
    return enter_step(ready, inputs, spec, spec.ladder[0], "agents are on the baseline", spend_share=True)


def _until_beat(inputs: Inputs) -> float:
    """Behind the looks of its pool's beat, by the answers of agents that those got."""
    share = inputs.cache.beat if inputs.cache is not None else 0.0
    return next_beat(share, WAIT_SECONDS, inputs.now) + AFTER_BEAT_SECONDS - inputs.now


def _waited_too_long(state: RolloutState, inputs: Inputs, blocker: Blocker, message: str) -> Plan:
    """The progress deadline counts for a rollout that cannot begin, too."""
    hours = (inputs.now_for(state.pending_since) - state.pending_since) / 3600
    said = f"not begun after {hours:.1f} h; waits for {blocker}: {message}"
    notice = Notice(True, "PendingTooLong", said)
    return replace(end_unbegun(state, inputs, Cause.DEADLINE_EXCEEDED, said), notices=(notice,))


def _clear_the_way(state: RolloutState, inputs: Inputs, revoking: Revocation) -> Plan:
    """Revokes the older candidate everywhere; goes on when each agent has let go or its lease has ended."""
    if needs_refence(state, inputs):
        return refence(state, inputs, "fence moved while revoking")
    end = lease_end(inputs, revoking.since, revoking.lease_ttl)
    held = [agent.node for agent in inputs.agents if not revoked(agent, state.fence)]
    present = {agent.node for agent in inputs.agents}
    # Whose KVNode is gone may be running all the same, and cannot be asked: its lease has to end.
    vanished = [node for node in revoking.nodes if node not in present]
    unlisted = revoking.agents > MAX_MISSING and len(present) < revoking.agents
    if (held or vanished or unlisted) and inputs.now < end:
        left = replace(revoking, nodes=(*vanished, *held)[:MAX_MISSING])
        return Plan(
            replace(state, revoking=left, blocker_message=_waits_for(left, inputs)),
            rpcs=tuple(Revoke(node, None) for node in held),
            requeue_after=min(RETRY_SECONDS, max(0.1, end - inputs.now)),
        )
    target = replace(state, revoking=None, blocker=Blocker.NONE, blocker_message="")
    span = stage_span(state, Stage.OFF, 0, f"candidate of {revoking.rollout} revoked")
    notice = None
    if held or vanished or unlisted:
        who = ", ".join((*vanished, *held)[:4]) or "agents that are gone"
        message = f"the leases of {revoking.rollout} have ended; not heard of: {who}"
        notice = Notice(True, "RevokedByLeaseEnd", message)
    return advance(state, inputs, target, spans=(span,), notice=notice, clear_approved=True)


def _waits_for(revoking: Revocation, inputs: Inputs) -> str:
    """Whose candidate, who may hold it still, and until when at the latest."""
    whose = "the attempt before" if revoking.rollout == inputs.name else revoking.rollout
    end = math.ceil(lease_end(inputs, revoking.since, revoking.lease_ttl))
    until = datetime.fromtimestamp(end, UTC).strftime("%H:%M:%SZ")
    rest = max(0, len(revoking.nodes) - MAX_NAMES)
    names = ", ".join(revoking.nodes[:MAX_NAMES]) + (f" and {rest} more" if rest else "")
    return f"revoking the candidate of {whose}, until {until} at the latest; waits for {names}"[:MAX_MESSAGE]
