"""Who keeps a return to the baseline from ending, why, and how a person ends it.

Every agent of the pool is asked, also one that never was offered the candidate: restored means that all serve
the baseline, and a pool in which one cannot is not restored. It must not decide when a return ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtier_operator.rollout.inputs import AgentView
from kvtier_operator.rollout.state import Rollback

MAX_NAMES = 4
SHORT = 12
WAY_OUT = "ends by a proof of each, or for one by the deletion of its Node, or of this KVRollout"


def who_is_missing(rollback: Rollback, agents: Sequence[AgentView]) -> str:
    """By name, each with what it said last in place of a proof."""
    views = {agent.node: agent for agent in agents}
    names = [_with_why(node, views.get(node), rollback) for node in rollback.missing[:MAX_NAMES]]
    rest = max(len(rollback.missing), rollback.total - rollback.restored) - len(names)
    return ", ".join(names) + (f" and {rest} more" if rest > 0 else "")


def how_it_ends(rollback: Rollback, agents: Sequence[AgentView], room: int) -> str:
    """With no lease left, so that nothing but people can end it. The way out is told whole."""
    return f"missing {who_is_missing(rollback, agents)}"[: room - len(WAY_OUT) - 2] + f"; {WAY_OUT}"


def _with_why(node: str, agent: AgentView | None, rollback: Rollback) -> str:
    if agent is None:
        return f"{node} (gone)"
    if agent.said:
        return f"{node} ({agent.said})"
    proof = agent.proof
    if proof is None or not proof.valid or proof.baseline_digest == rollback.target_digest:
        return node
    return f"{node} (runs {proof.baseline_digest.removeprefix('sha256:')[:SHORT]})"
