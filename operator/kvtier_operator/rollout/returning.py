"""ExactBaseline: revoke on every agent until each has proved the baseline, and what may follow after that.

Level-triggered: the agents still to be asked are those without a proof under the current fence, so an
operator that starts in the middle goes on by asking again. It must not know why the rollout returned.
"""

from __future__ import annotations

from dataclasses import replace

from kvtier_operator.rollout.inputs import Inputs, Notice, Plan, Revoke, SpanNote
from kvtier_operator.rollout.moves import (
    MAX_MISSING,
    is_mine,
    lease_end,
    needs_refence,
    proved,
    refence,
    revoked,
)
from kvtier_operator.rollout.state import Rollback, RolloutState
from kvtier_operator.rollout.unproved import how_it_ends
from kvtier_operator.rollout.vocabulary import Cause, Phase, Stage

RETRY_SECONDS = 2.0
IN_FLIGHT_SECONDS = 0.5
MAX_SAID = 400


def plan_return(state: RolloutState, inputs: Inputs) -> Plan:
    """RollingBack, with its KVCache still there."""
    if needs_refence(state, inputs):
        return refence(state, inputs, "fence moved during the return")
    if state.rollback is None:
        raise ValueError("a rollout in ExactBaseline has a rollback record")
    rollback = state.rollback
    baseline = inputs.cache.baseline if inputs.cache else None
    # What the KVCache says is what agents are given; a digest that it has left behind nobody can prove.
    digest = baseline.digest if baseline else rollback.target_digest
    unproved = [agent.node for agent in inputs.agents if not proved(agent, state.fence, digest)]
    end = lease_end(inputs, rollback.started_at, rollback.lease_ttl)
    ended = inputs.now >= end
    # Whose Node is deleted leaves the count, but not before its lease has ended: it may still be running.
    present = {agent.node for agent in inputs.agents}
    gone_holders = dict.fromkeys((*rollback.missing, *sorted(inputs.holders)))
    vanished = [] if ended else [node for node in gone_holders if node not in present]
    # Where not all can be named, one that has vanished is missed by their number.
    unlisted = not ended and rollback.total > MAX_MISSING and len(present) + len(vanished) < rollback.total
    missing = vanished + unproved
    told = (
        bool(present)
        and not vanished
        and not unlisted
        and all(revoked(agent, state.fence) for agent in inputs.agents)
    )
    gone = ended or told
    updated = replace(
        rollback,
        target_digest=digest,
        restored=len(inputs.agents) - len(unproved),
        total=rollback.total if unlisted else len(inputs.agents),
        missing=tuple(missing)[:MAX_MISSING],
        in_flight=sum(agent.proof.in_flight for agent in inputs.agents if agent.proof),
        revoked_at=rollback.revoked_at or (inputs.now if gone else 0.0),
    )
    target = replace(state, rollback=updated)
    notices: tuple[Notice, ...] = ()
    spans: tuple[SpanNote, ...] = ()
    approved = inputs.cache is not None and is_mine(inputs.cache, inputs)
    if gone and not missing and not approved:
        # Where every agent has left the pool nobody has proved anything.
        proof = inputs.now if inputs.agents else 0.0
        target = replace(
            target,
            phase=Phase.ROLLED_BACK,
            rollback=replace(updated, verified_at=proof),
            finished_at=inputs.now,
        )
        if proof:
            notices, spans = _restored(updated, digest, inputs.now)
        else:
            said = "all leases have ended, and no agent is left that could prove the baseline"
            notices = (Notice(True, "CandidateRevoked", said),)
    elif missing and gone and not rollback.revoked_at:
        how = "all leases have ended" if ended else "every agent has let go of it"
        left = how_it_ends(updated, inputs.agents, MAX_SAID)
        notices = (Notice(ended, "CandidateRevoked", f"{how}; {left}"),)
    release = inputs.deleting and bool(target.rollback and target.rollback.revoked_at)
    if release and missing:
        notices += (
            Notice(True, "ReleasedUnproved", f"deleted with leases ended but without proof of {missing[:4]}"),
        )
    waiting = bool(missing or not gone) and not release
    return Plan(
        state=target,
        rpcs=() if release else tuple(Revoke(node, rollback.cause) for node in unproved),
        withdraw=approved,
        notices=notices,
        spans=spans,
        release=release and not approved,
        requeue_after=_wait(inputs, unproved, end) if waiting else 0.0,
    )


def _restored(rollback: Rollback, digest: str, now: float) -> tuple[tuple[Notice, ...], tuple[SpanNote, ...]]:
    said = f"{rollback.restored} of {rollback.total} agents proved {short_digest(digest)}"
    span = SpanNote(
        "rollout.baseline-restored",
        (
            ("kvtier.agents.restored", rollback.restored),
            ("kvtier.rollback.cause", str(rollback.cause)),
            ("kvtier.rollback.seconds", round(now - rollback.started_at, 3)),
        ),
    )
    return (Notice(False, "BaselineRestored", said),), (span,)


def _wait(inputs: Inputs, missing: list[str], end: float) -> float:
    """Soon for an agent that answers but still runs steps of the candidate; else a little, or the moment the
    leases end. One that refuses will not say otherwise so soon."""
    busy = any(agent.node in missing and agent.reachable and not agent.said for agent in inputs.agents)
    if busy:
        return IN_FLIGHT_SECONDS
    left = end - inputs.now
    return min(RETRY_SECONDS, left) if left > 0 else RETRY_SECONDS


def plan_without_cache(state: RolloutState, inputs: Inputs) -> Plan:
    """RollingBack while the KVCache is deleted: its own reconcile makes every agent forget it, under fences
    that are not ours any more. What is left for us is to wait until it is gone, or the leases are. One that
    is not there only since nobody can read which it is makes no agent forget."""
    rollback = state.rollback
    if rollback is None:
        raise ValueError("a rollout in ExactBaseline has a rollback record")
    left = lease_end(inputs, rollback.started_at, rollback.lease_ttl) - inputs.now
    if (inputs.cache is not None or not inputs.cache_named) and left > 0:
        return Plan(state, requeue_after=min(RETRY_SECONDS, left))
    target = replace(
        state,
        phase=Phase.ROLLED_BACK,
        finished_at=inputs.now,
        rollback=replace(rollback, missing=(), total=0, restored=0, revoked_at=inputs.now),
    )
    said = "the KVCache was deleted; its agents forget it with its sessions"
    if not inputs.cache_named:
        said = "no agent could be asked, since nobody can read which KVCache it is of; all leases have ended"
    notice = Notice(True, "CacheGone", said)
    return Plan(target, urgent=True, notices=(notice,), release=inputs.deleting)


def end_unbegun(state: RolloutState, inputs: Inputs, cause: Cause, message: str) -> Plan:
    """Nothing was granted, and another rollout may be at work: no fence, no RPC, only the record."""
    rollback = Rollback(
        cause=cause,
        message=message,
        from_stage=state.stage,
        from_step=0,
        target_digest=state.baseline.digest if state.baseline else "",
        started_at=inputs.now,
        revoked_at=inputs.now,
    )
    target = replace(
        state,
        phase=Phase.ROLLED_BACK,
        stage=Stage.EXACT_BASELINE,
        rollback=rollback,
        finished_at=inputs.now,
        candidate_hash=inputs.spec.candidate_hash if inputs.spec else state.candidate_hash,
    )
    return Plan(target, urgent=True)


def new_attempt(state: RolloutState, inputs: Inputs) -> RolloutState:
    """A clean start for attempt + 1; keeps what must not be farmed (shares) or replayed (intents)."""
    return RolloutState(
        attempt=state.attempt + 1,
        fence=state.fence,
        shares=state.shares,
        last_intent=state.last_intent,
        candidate_hash=inputs.spec.candidate_hash if inputs.spec else "",
        conditions=state.conditions,
    )


def short_digest(digest: str) -> str:
    return digest.removeprefix("sha256:")[:12]
