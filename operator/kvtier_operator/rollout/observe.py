"""What the agents of a cache's pool say now, as AgentViews: one GetState each, all at once.

Choosing the agents of the blast radius is here too: holders stay chosen, the rest by a hash of rollout and
node, so that a number of nodes means the same nodes on every pass. It must not send anything that changes an
agent.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace

from kvtier.v1 import control_pb2 as control
from kvtier_operator.agents.recent import state_and_age
from kvtier_operator.fleet import in_service
from kvtier_operator.ports import AgentError, Agents, AgentTarget, AgentUnreachable, NodeView
from kvtier_operator.rollout.holders import gone, nodes_of
from kvtier_operator.rollout.inputs import AgentView, ProofView
from kvtier_operator.rollout.moves import excluded_now
from kvtier_operator.rollout.state import RolloutState

DEAD_SECONDS = 1.0
RECENT_SECONDS = 0.5
"""How old an answer may be that another rollout got from the same agent: half of the shortest interval."""
RECENT_SHARE = 0.4
"""Of the interval, at a look at the evidence: what happened in between is seen by the next one at the latest.
Who is woken in between has a reason, and asks anew; so does whoever would go on to another step."""


@dataclass
class Memory:
    """What one rollout's agents were last seen to be. A cache: losing it costs calls, never correctness.

    proofs: by node, the last one that was checked. held: nodes that were granted this rollout's candidate.
    written: all holders that this process has written down last, also those that the status had no room for.
    boots: the boot ids they answered with. said: see `AgentView`.
    """

    proofs: dict[str, ProofView] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)
    written: frozenset[str] = frozenset()
    boots: dict[str, str] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Pool:
    """The agents asked, and how to reach each under the boot id it last gave. age: seconds for which the
    oldest answer had been asked for, by somebody else."""

    views: tuple[AgentView, ...]
    targets: dict[str, AgentTarget]
    age: float = 0.0


class Observer:
    def __init__(self, agents: Agents) -> None:
        self._agents = agents

    async def observe(
        self,
        members: Sequence[NodeView],
        *,
        cache_uid: str,
        rollout_uid: str,
        state: RolloutState,
        max_nodes: int,
        memory: Memory,
        max_age: float = RECENT_SECONDS,
        on_a_beat: bool = False,
        ended: Container[str] = (),
    ) -> Pool:
        """Asks every member. One that does not answer is a view, not an error. max_age: seconds that what it
        told another rollout may be old. on_a_beat: other rollouts of its pool ask at the same moment. ended:
        silent ones whose lease cannot last any more."""
        answers = await asyncio.gather(
            *(self._ask(member, cache_uid, max_age, on_a_beat) for member in members)
        )
        views = [
            _view(member, answer, cache_uid, rollout_uid, state, memory)
            for member, (answer, _) in zip(members, answers, strict=True)
        ]
        left_out = excluded_now(state, views, rollout_uid)
        missed = gone(state.holders, rollout_uid, views, memory.written | memory.held)
        away = sum(nodes_of(name) for name in {*missed, *(one.node for one in state.vanished)})
        chosen = choose(members, views, rollout_uid, max_nodes, left_out, ended=ended, away=away)
        targets = {}
        for member, view in zip(members, views, strict=True):
            if view.boot_id:
                memory.boots[view.node] = view.boot_id
            targets[view.node] = _under(member.target, view.boot_id)
        for known in (memory.boots, memory.proofs):
            # Of nodes that have left; an approval may last for months, nodes of a pool that scales do not.
            for node in known.keys() - targets.keys():
                del known[node]
        return Pool(
            tuple(view if view.node in chosen else replace(view, selected=False) for view in views),
            targets,
            max((age for _, age in answers), default=0.0),
        )

    async def _ask(
        self, member: NodeView, cache_uid: str, max_age: float, for_all: bool
    ) -> tuple[control.GetStateResponse | None, float]:
        seconds = None if member.live else DEAD_SECONDS
        agents, target = self._agents, member.target
        try:
            return await state_and_age(agents, target, cache_uid, max_age, seconds, for_all=for_all)
        except (AgentError, AgentUnreachable):
            return None, 0.0


def unasked(members: Sequence[NodeView], memory: Memory) -> Pool:
    """The members without asking: in a return to the baseline the revocation itself is the question."""
    views = tuple(
        AgentView(
            node=member.target.name,
            reachable=member.live,
            selected=False,
            boot_id=memory.boots.get(member.target.name, member.target.boot_id),
            proof=memory.proofs.get(member.target.name),
            said=memory.said.get(member.target.name, ""),
        )
        for member in members
    )
    targets = {
        member.target.name: _under(member.target, memory.boots.get(member.target.name, ""))
        for member in members
    }
    return Pool(views, targets)


def _under(target: AgentTarget, boot_id: str) -> AgentTarget:
    """How to reach it in that life, where one is known."""
    return target if boot_id in ("", target.boot_id) else replace(target, boot_id=boot_id)


def choose(
    members: Sequence[NodeView],
    views: Sequence[AgentView],
    rollout_uid: str,
    max_nodes: int,
    excluded: Container[str] = (),
    *,
    ended: Container[str] = (),
    away: int = 0,
) -> frozenset[str]:
    """Names of the agents that may hold the candidate. Cordoned, draining, dead and excluded ones may not. Of
    `max_nodes`, those of them that still hold it keep their places, unless their lease has `ended`, and
    `away` more that have left the pool with one."""
    able: list[AgentView] = []
    unable: list[AgentView] = []
    for member, view in zip(members, views, strict=True):
        may = in_service(member) and view.node not in excluded
        (able if may else unable).append(view)

    def rank(view: AgentView) -> tuple[bool, str]:
        mark = hashlib.sha256(f"{rollout_uid}|{view.node}".encode()).hexdigest()
        return view.granted_rollout != rollout_uid, mark

    ordered = sorted(able, key=rank)
    if max_nodes:
        taken = [view for view in unable if view.granted_rollout == rollout_uid and view.node not in ended]
        ordered = ordered[: max(0, max_nodes - len(taken) - away)]
    return frozenset(view.node for view in ordered)


def _view(
    member: NodeView,
    answer: control.GetStateResponse | None,
    cache_uid: str,
    rollout_uid: str,
    state: RolloutState,
    memory: Memory,
) -> AgentView:
    name, leaving = member.target.name, member.cordoned or member.draining
    proof = memory.proofs.get(name)
    if answer is None:
        holder = rollout_uid if name in memory.held or _declared(member, cache_uid, state) else ""
        boot_id = member.target.boot_id
        return AgentView(name, False, boot_id=boot_id, granted_rollout=holder, proof=proof, leaving=leaving)
    held = next((cache for cache in answer.caches if cache.cache.uid == cache_uid), None)
    if held is None:
        return AgentView(name, True, boot_id=answer.boot_id, proof=proof, leaving=leaving)
    candidate, digest, granted, owner = held.candidate, "", 0, ""
    if candidate.digest:
        digest, granted, owner = candidate.digest, candidate.fence.value, candidate.fence.rollout_uid
        if owner == rollout_uid:
            memory.held.add(name)
    return AgentView(
        name,
        True,
        leaving=leaving,
        boot_id=answer.boot_id,
        highest_fence=held.highest_fence,
        baseline_digest=held.baseline_digest,
        running_baseline=held.running_digest if held.HasField("running_digest") else None,
        candidate_digest=digest,
        running_candidate=candidate.running_digest if candidate.HasField("running_digest") else None,
        granted_fence=granted,
        granted_rollout=owner,
        returned_reason=held.returned_reason,
        returned_fence=held.returned_fence,
        returned_rollout=held.returned_rollout_uid,
        proof=proof,
    )


def _declared(member: NodeView, cache_uid: str, state: RolloutState) -> bool:
    """Whether the silent agent's KVNode still says that it holds this candidate."""
    rows = (member.raw.get("status") or {}).get("candidates") or []
    digest = state.candidate.digest if state.candidate else ""
    return any(row.get("cacheUID") == cache_uid and row.get("digest") == digest for row in rows)
