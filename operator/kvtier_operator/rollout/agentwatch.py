"""The agents of a rollout that holds a candidate: who holds it, is silent, has vanished, or is left out.

It must not know evidence, nor what follows but a reason to return.
"""

from __future__ import annotations

from dataclasses import replace

from kvtier_operator.rollout.inputs import AgentView, Inputs
from kvtier_operator.rollout.moves import excluded_now, lease_end
from kvtier_operator.rollout.returning import short_digest
from kvtier_operator.rollout.spec import RolloutSpec
from kvtier_operator.rollout.state import ExcludedAgent, LostAgent, RolloutState
from kvtier_operator.rollout.vocabulary import LEASE_GRACE, Cause, OnLeaseExpired, Phase

MISMATCH = frozenset({"MANIFEST_MISMATCH", "MANIFEST_INVALID", "NUMERICS_MISMATCH", "MODEL_MISMATCH"})
INFEASIBLE = frozenset(
    {"NO_DESTINATION_CAPACITY", "TIER_INCAPABLE", "CANDIDATE_REFUSED", "NO_LEGAL_PATH", "UNSUPPORTED"}
)
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
    return replace(state, lost=lost, vanished=_vanished(state, inputs), nodes_granted=len(granted))


def _vanished(state: RolloutState, inputs: Inputs) -> tuple[LostAgent, ...]:
    """Holders that have left the pool without a word, while a return would have to wait for their lease."""
    present = {agent.node for agent in inputs.agents}
    kept = [one for one in state.vanished if one.node not in present]
    known = {one.node for one in kept}
    fresh = [LostAgent(node, inputs.now) for node in sorted(inputs.holders - present - known)]
    return tuple(one for one in (*kept, *fresh) if inputs.now < lease_end(inputs, one.since))[:MAX_LOST]


def exclude(state: RolloutState, inputs: Inputs) -> RolloutState:
    """Agents that refuse, never held this rollout's candidate, and came when the others had all taken it:
    they stay exact. A refusal of one that was there from the start, or held it, is a reason to return."""
    known = excluded_now(state, inputs.agents)
    kept = tuple(one for one in state.excluded if one.node in known)
    holders = {agent.node for agent in inputs.agents if agent.granted_rollout == inputs.uid}
    former = {agent.node for agent in inputs.agents if agent.returned_rollout == inputs.uid}
    fresh = [
        ExcludedAgent(agent.node, agent.refusal, agent.boot_id)
        for agent in inputs.agents
        if agent.refusal in MISMATCH | INFEASIBLE and agent.node not in holders | former | known
    ]
    if not state.held_by_all or not holders:
        fresh = []
    return replace(state, excluded=(*kept, *fresh)[:MAX_EXCLUDED])


def agents_against(state: RolloutState, inputs: Inputs, spec: RolloutSpec) -> tuple[Cause, str] | None:
    excluded = excluded_now(state, inputs.agents)
    for agent in inputs.agents:
        if agent.node in excluded:
            continue
        if agent.refusal in MISMATCH:
            return Cause.MANIFEST_MISMATCH, f"{agent.node}: {agent.refusal}: {agent.refusal_message}"
        if agent.refusal in INFEASIBLE:
            return Cause.INFEASIBLE_NODE, f"{agent.node}: {agent.refusal}: {agent.refusal_message}"
        if agent.reachable and agent.granted_fence == state.fence and not holds(agent, state):
            return Cause.MANIFEST_MISMATCH, f"{agent.node} runs {short_digest(agent.candidate_digest)}"
    if state.phase is Phase.COMPLETED:
        return None  # a node that dies takes its own lease with it, not what the others were approved for
    patience = spec.lease_ttl * LEASE_GRACE
    if spec.on_lease_expired is OnLeaseExpired.RESUME:
        patience *= LOST_LEASES
    for lost in state.lost:
        if inputs.now >= max(lost.since, inputs.quiet_since) + patience:
            return Cause.AGENT_LOST, f"{lost.node} has not answered for {int(inputs.now - lost.since)} s"
    return None


def holds(agent: AgentView, state: RolloutState) -> bool:
    return (
        agent.granted_fence == state.fence
        and state.candidate is not None
        and agent.candidate_digest == state.candidate.digest
    )
