"""The few moves every rule of the machine is made of: advance the fence, open a window, return to baseline.

Each returns a Plan whose state is to be written before anything is done about it. It must not decide when a
move is due.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvtier_evidence.design import MIN_BLOCKS
from kvtier_evidence.metrics import METRICS
from kvtier_operator.rollout.holders import gone, with_grants
from kvtier_operator.rollout.inputs import (
    AgentView,
    ApproveCandidate,
    CacheView,
    FenceMove,
    Inputs,
    Notice,
    Plan,
    SpanNote,
)
from kvtier_operator.rollout.spec import RolloutSpec, Step
from kvtier_operator.rollout.state import Holders, Revocation, Rollback, RolloutState, Window
from kvtier_operator.rollout.vocabulary import LEASE_GRACE, Blocker, Cause, Phase, Stage

APPROVAL_SECONDS = 24 * 3600.0
CARRIED = frozenset(name for name, metric in METRICS.items() if metric.carried)
MAX_MISSING = 16
MAX_MEASURED = 24
MIN_TICK, MAX_TICK = 1.0, 10.0
MIN_GRACE = 1.0


def tick_seconds(spec: RolloutSpec) -> float:
    """How often evidence is looked at: a sixth of the lease, between 1 and 10 s."""
    return min(MAX_TICK, max(MIN_TICK, spec.lease_ttl / 6))


def current_step(state: RolloutState, spec: RolloutSpec) -> Step:
    return spec.nearest(state.stage, state.step)


def is_mine(cache: CacheView, inputs: Inputs) -> bool:
    return cache.approved is not None and cache.approved.rollout_uid == inputs.uid


def advance(
    state: RolloutState,
    inputs: Inputs,
    target: RolloutState,
    *,
    notice: Notice | None = None,
    spans: tuple[SpanNote, ...] = (),
    approve: ApproveCandidate | None = None,
    adopt: bool = False,
    clear_approved: bool = False,
    new_window: bool = False,
) -> Plan:
    """One fence number up, `target` written under it. The number passes whatever an agent has seen, so that
    a KVCache status rebuilt after a loss is caught up with."""
    cache = inputs.cache
    if cache is None:
        raise ValueError("a fence needs its KVCache")
    seen = max((agent.highest_fence for agent in inputs.agents), default=0)
    fence = 1 + max(cache.fence, state.fence, seen)
    if new_window and target.window is not None:
        target = replace(target, window=replace(target.window, opening_fence=fence))
    # An approval that was written just before a crash, of a rollout that is not completed after all.
    own_leftover = is_mine(cache, inputs) and target.phase in (Phase.PROGRESSING, Phase.PAUSED)
    return Plan(
        state=replace(target, fence=fence),
        transition=FenceMove(
            expected=cache.fence,
            new=fence,
            approve=approve,
            adopt=adopt,
            clear_approved=clear_approved or own_leftover,
            shares=target.shares if target.shares != state.shares else 0,
        ),
        urgent=True,
        notices=(notice,) if notice else (),
        spans=spans,
    )


def stage_span(state: RolloutState, target_stage: Stage, target_step: int, why: str) -> SpanNote:
    return SpanNote(
        "rollout.stage",
        (
            ("kvtier.stage.from", str(state.stage)),
            ("kvtier.step.from", state.step),
            ("kvtier.stage.to", str(target_stage)),
            ("kvtier.step.to", target_step),
            ("kvtier.transition.reason", why),
        ),
    )


def enter_step(
    state: RolloutState,
    inputs: Inputs,
    spec: RolloutSpec,
    step: Step,
    why: str,
    *,
    spend_share: bool = False,
    resumes: int = 0,
    phase: Phase = Phase.PROGRESSING,
    overridden: bool = False,
) -> Plan:
    """Opens a step with a window of its own. `spend_share` uses the next part of the false-promotion budget:
    for a new attempt, a re-opened step, or a resumed one. Moving on does not (gates.md 5)."""
    shares = max(state.shares, inputs.candidate.prior_shares) + 1 if spend_share else state.shares
    target = replace(
        state,
        phase=phase,
        stage=step.stage,
        step=step.index,
        shares=shares,
        blocker=Blocker.NONE,
        blocker_message="",
        window=_opened(state, inputs, spec, resumes),
        gates=tuple(gate for gate in state.gates if gate.metric in CARRIED),
        schedule=None,
        overridden=overridden,
        lost=(),
        excluded=(),
        excluded_count=0,
        holders=about_to_grant(
            state, inputs, [agent.node for agent in inputs.agents if agent.selected and agent.reachable]
        ),
        pending_since=0.0,
    )
    notice = Notice(False, "StageEntered", f"{step.label}: {why}")
    return advance(
        state,
        inputs,
        target,
        notice=notice,
        spans=(stage_span(state, step.stage, step.index, why),),
        new_window=True,
    )


def about_to_grant(state: RolloutState, inputs: Inputs, nodes: Sequence[str]) -> Holders:
    """The holders to write down before a grant goes to `nodes`."""
    return with_grants(state.holders, inputs.uid, inputs.agents, inputs.holders, nodes)


def gone_holders(state: RolloutState, inputs: Inputs) -> tuple[str, ...]:
    """Who has held the candidate, has left the pool, and may hold it still."""
    missed = gone(state.holders, inputs.uid, inputs.agents, inputs.holders)
    return tuple(dict.fromkeys((*(one.node for one in state.vanished), *missed)))


def _opened(state: RolloutState, inputs: Inputs, spec: RolloutSpec, resumes: int) -> Window:
    """A new window, with what the one that closes now and earlier ones of the attempt have measured for it:
    of the newest look that was taken, since the lease or the spec may have ended before another."""
    before, look = state.window, inputs.last_look
    fresh = Window(0, inputs.now, spec.window_hash, resumes, probes=spec.judged_by)
    if before is None:
        return fresh
    fresh = replace(fresh, pair_thresholds=before.pair_thresholds, effects=before.effects)
    if look is None or look.opening_fence != before.opening_fence:
        return fresh
    thresholds = {**dict(before.pair_thresholds), **dict(look.pair_thresholds)}
    effects = {one.gate: one for one in before.effects}
    for one in look.effects:
        known = effects.get(one.gate)
        # Few blocks must not take the place of enough.
        if known is None or one.blocks >= min(MIN_BLOCKS, known.blocks):
            effects[one.gate] = one
    return replace(
        fresh,
        pair_thresholds=tuple(sorted(thresholds.items()))[:MAX_MEASURED],
        effects=tuple(effects[gate] for gate in sorted(effects))[:MAX_MEASURED],
    )


def refence(state: RolloutState, inputs: Inputs, why: str) -> Plan:
    """Takes a new number for the same stage, step and evidence: something else has used the old one."""
    return advance(state, inputs, state, spans=(stage_span(state, state.stage, state.step, why),))


def needs_refence(state: RolloutState, inputs: Inputs) -> bool:
    cache = inputs.cache
    if cache is None:
        return False
    return cache.fence != state.fence or any(
        agent.highest_fence > state.fence or agent.refusal == "FENCE_CONFLICT" for agent in inputs.agents
    )


def roll_back(state: RolloutState, inputs: Inputs, cause: Cause, message: str, gate: str = "") -> Plan:
    """Leaves the stage for the exact baseline. Agents are told in a later pass, under the new fence."""
    baseline = state.baseline or (inputs.cache.baseline if inputs.cache else None)
    older = state.revoking
    present = [agent.node for agent in inputs.agents]
    listed = (*gone_holders(state, inputs), *(older.nodes if older is not None else ()))
    vanished = [node for node in dict.fromkeys(listed) if node not in present]
    rollback = Rollback(
        cause=cause,
        message=message,
        gate=gate,
        from_stage=state.stage,
        from_step=state.step,
        target_digest=baseline.digest if baseline else "",
        started_at=inputs.now,
        total=len(inputs.agents),
        missing=(*vanished, *present)[:MAX_MISSING],
        lease_ttl=max(older.lease_ttl if older is not None else 0.0, inputs.older_ttl),
    )
    target = replace(
        state,
        phase=Phase.ROLLING_BACK,
        stage=Stage.EXACT_BASELINE,
        step=0,
        rollback=rollback,
        schedule=None,
        grant_expires=0.0,
        revoking=None,
        lost=(),
        holders=Holders(),
        vanished=(),
    )
    notice = Notice(True, "RollingBack", f"{cause} in {state.stage}: {message}")
    span = stage_span(state, Stage.EXACT_BASELINE, 0, str(cause))
    return advance(state, inputs, target, notice=notice, spans=(span,), clear_approved=older is not None)


def lease_wait(ttl: float) -> float:
    """Seconds after which a lease of `ttl` that is not renewed has provably ended: TTL + 10 %, at least the
    second that a short lease's renewal may be on its way."""
    return ttl + max(ttl * (LEASE_GRACE - 1), MIN_GRACE)


def lease_end(inputs: Inputs, since: float, at_least: float = 0.0) -> float:
    """When every lease that could have been renewed before `since`, or by an operator before this one, has
    provably ended. The TTL is the spec's, or `at_least` where that is longer. What this process has waited it
    has measured: a wall clock that is set meanwhile, or was another's, changes nothing."""
    wait = lease_wait(max(inputs.lease_ttl, at_least))
    waited = inputs.waited.get(since)
    if waited is not None:
        return inputs.now + wait - waited
    return max(since, inputs.quiet_since) + wait


def excluded_now(state: RolloutState, agents: Sequence[AgentView], uid: str) -> frozenset[str]:
    """Who is excluded still: an agent that has restarted may try again. Where more have refused than could be
    named, also every other that answers and never held the candidate of this rollout (`uid`)."""
    boots = {agent.node: agent.boot_id for agent in agents}
    named = frozenset(one.node for one in state.excluded if boots.get(one.node) == one.boot_id)
    if state.excluded_count <= len(state.excluded):
        return named
    restarted = {one.node for one in state.excluded} - named
    late = {
        agent.node
        for agent in agents
        if agent.reachable and uid not in (agent.granted_rollout, agent.returned_rollout)
    }
    return named | (late - restarted)


def begin_revocation(inputs: Inputs, rollout: str, lease_ttl: float, vanished: tuple[str, ...]) -> Revocation:
    """Of what `rollout` was granted under leases of `lease_ttl` seconds; whoever is there, or has vanished a
    moment ago, may hold it."""
    present = tuple(agent.node for agent in inputs.agents)
    names = (*(node for node in vanished if node not in present), *present)
    return Revocation(rollout, inputs.now, lease_ttl, names[:MAX_MISSING], len(names))


def proved(agent: AgentView, fence: int, digest: str) -> bool:
    """The agent has recomputed the baseline's digest under this fence, holds no candidate, and none of its
    steps is still running on one."""
    proof = agent.proof
    return (
        proof is not None
        and proof.valid
        and proof.fence >= fence
        and proof.baseline_digest == digest
        and not proof.candidate_digest
        and proof.in_flight == 0
    )


def revoked(agent: AgentView, fence: int) -> bool:
    """The agent has said under this fence that it holds no candidate, whatever its baseline."""
    proof = agent.proof
    return proof is not None and proof.valid and proof.fence >= fence and not proof.candidate_digest
