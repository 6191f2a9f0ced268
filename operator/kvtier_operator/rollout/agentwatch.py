"""The agents of a rollout that holds a candidate: who holds it, is silent, has vanished, or is left out.

It must not know evidence, nor what follows but a reason to return.
"""

from __future__ import annotations

from dataclasses import replace

from kvtier_operator.rollout.holders import gone, holders_of, without
from kvtier_operator.rollout.inputs import AgentView, Inputs
from kvtier_operator.rollout.moves import excluded_now, lease_end, revoked
from kvtier_operator.rollout.returning import short_digest
from kvtier_operator.rollout.spec import RolloutSpec
from kvtier_operator.rollout.state import ExcludedAgent, LostAgent, RolloutState
from kvtier_operator.rollout.vocabulary import LEASE_GRACE, Cause, OnLeaseExpired, Phase

MISMATCH = frozenset({"MANIFEST_MISMATCH", "MANIFEST_INVALID", "NUMERICS_MISMATCH", "MODEL_MISMATCH"})
INFEASIBLE = frozenset(
    {"NO_DESTINATION_CAPACITY", "TIER_INCAPABLE", "CANDIDATE_REFUSED", "NO_LEGAL_PATH", "UNSUPPORTED"}
    # Bounds of transfers that are below what its engine takes for good.
    | {"STAGING_TOO_SMALL", "ADMISSION_PINNED"}
)
REFUSED = MISMATCH | INFEASIBLE
"""Refusals of a grant that say something about the node; the agent holds then what it held before."""
LOST_LEASES = 10
MAX_LOST = 8
MAX_EXCLUDED = 8


def watch_agents(state: RolloutState, inputs: Inputs, spec: RolloutSpec) -> RolloutState:
    """Counts holders, under whichever fence, and notes since when one of them does not answer."""
    digest = state.candidate.digest if state.candidate else ""
    granted = [agent for agent in inputs.agents if agent.granted_fence and agent.candidate_digest == digest]
    since = {lost.node: lost.since for lost in state.lost}
    silent = [
        agent.node
        for agent in inputs.agents
        if not agent.reachable and (agent.node in since or agent.granted_rollout == inputs.uid)
    ]
    lost = tuple(LostAgent(node, since.get(node, inputs.now)) for node in silent)[:MAX_LOST]
    state = replace(state, lost=lost, nodes_granted=len(granted))
    return _watch_holders(state, inputs)


def _watch_holders(state: RolloutState, inputs: Inputs) -> RolloutState:
    """Holders that have left the pool without a word are kept apart while a return would have to wait for
    their lease; the others hold until they have proved that they do not."""
    present = {agent.node for agent in inputs.agents}
    missed = gone(state.holders, inputs.uid, inputs.agents, inputs.holders)
    # A number is always news: who was counted in it before is counted as a holder no more.
    numbers = set(missed) - {*state.holders.names, *inputs.holders}
    kept = [one for one in state.vanished if one.node not in present | numbers]
    known = {one.node for one in kept}
    fresh = [LostAgent(node, inputs.now) for node in missed if node not in known]
    fresh.sort(key=lambda one: one.node not in numbers)
    # A number first: a name that finds no room stays among the holders, a number cannot.
    rows = (*fresh[: len(numbers)], *kept, *fresh[len(numbers) :])
    lasting = [one for one in rows if inputs.now < lease_end(inputs, one.since)]
    vanished = tuple(lasting[:MAX_LOST])
    crowded_out = {one.node for one in lasting[MAX_LOST:]}
    granted = {agent.node for agent in inputs.agents if agent.granted_rollout == inputs.uid}
    let_go = {agent.node for agent in inputs.agents if revoked(agent, state.fence)} - granted
    recorded = {*state.holders.names, *inputs.holders, *granted, *crowded_out} - let_go
    recorded -= {one.node for one in vanished}
    return replace(state, vanished=vanished, holders=holders_of(recorded, inputs.agents))


def exclude(state: RolloutState, inputs: Inputs) -> RolloutState:
    """Agents that refuse, never held this rollout's candidate, and came when the others had all taken it:
    they stay exact. A refusal of one that was there from the start, or held it, is a reason to return. One
    that comes when no more can be named is left out with them; later ones are not even asked."""
    known = excluded_now(state, inputs.agents, inputs.uid)
    present = {agent.node for agent in inputs.agents}
    holders = {agent.node for agent in inputs.agents if agent.granted_rollout == inputs.uid}
    former = {agent.node for agent in inputs.agents if agent.returned_rollout == inputs.uid}
    fresh = [
        ExcludedAgent(agent.node, agent.refusal, agent.boot_id)
        for agent in inputs.agents
        if agent.refusal in REFUSED and agent.node not in holders | former | known
    ]
    if not state.held_by_all or not holders:
        fresh = []
    again = {one.node for one in fresh}
    # One that has restarted keeps its row until it has answered, and with it its right to be asked.
    kept = [one for one in state.excluded if one.node in present - holders - again]
    rows = (*kept, *fresh)
    unnamed = state.excluded_count - len(state.excluded)
    return replace(
        state,
        excluded=rows[:MAX_EXCLUDED],
        excluded_count=len(rows) + max(0, unnamed),
        holders=without(state.holders, again),
    )


def agents_against(state: RolloutState, inputs: Inputs, spec: RolloutSpec) -> tuple[Cause, str] | None:
    excluded = excluded_now(state, inputs.agents, inputs.uid)
    for agent in inputs.agents:
        if agent.node in excluded:
            continue
        if agent.refusal in MISMATCH:
            return Cause.MANIFEST_MISMATCH, f"{agent.node}: {agent.refusal}: {agent.refusal_message}"
        if agent.refusal in INFEASIBLE:
            return Cause.INFEASIBLE_NODE, f"{agent.node}: {agent.refusal}: {agent.refusal_message}"
        if agent.reachable and agent.granted_fence == state.fence:
            other = _runs_otherwise(agent, state)
            if other:
                return Cause.MANIFEST_MISMATCH, f"{agent.node} runs {other}"
    if state.phase is Phase.COMPLETED:
        return None  # a node that dies takes its own lease with it, not what the others were approved for
    patience = spec.lease_ttl * LEASE_GRACE
    if spec.on_lease_expired is OnLeaseExpired.RESUME:
        patience *= LOST_LEASES
    for lost in state.lost:
        silent = inputs.now_for(lost.since) - lost.since
        if min(silent, inputs.now - inputs.quiet_since) >= patience:
            return Cause.AGENT_LOST, f"{lost.node} has not answered for {int(silent)} s"
    return None


def _runs_otherwise(agent: AgentView, state: RolloutState) -> str:
    """What a holder runs that it should not: another candidate than this, or beside it another baseline than
    was applied. Empty: nothing, or it cannot say, which is no evidence."""
    if not holds(agent, state):
        return short_digest(agent.candidate_digest)
    if agent.running_baseline and agent.running_baseline != agent.baseline_digest:
        return f"the baseline {short_digest(agent.running_baseline)}"
    if agent.running_candidate and agent.running_candidate != agent.candidate_digest:
        return short_digest(agent.running_candidate)
    return ""


def holds(agent: AgentView, state: RolloutState) -> bool:
    return (
        agent.granted_fence == state.fence
        and state.candidate is not None
        and agent.candidate_digest == state.candidate.digest
    )
