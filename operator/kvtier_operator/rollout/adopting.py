"""An exact candidate that passed becomes the baseline of its KVCache, and nothing is left to revoke.

One compare-and-swap moves fence and baseline together, so there is a moment at which the KVCache has adopted
the candidate and the rollout does not say so yet. Whoever comes next finishes it first: no intent, edit or
deletion can undo what every agent may be running by then. It must not know gates or stages.
"""

from __future__ import annotations

from dataclasses import replace

from kvtier_operator.rollout.inputs import Inputs, Notice, Plan, SpanNote
from kvtier_operator.rollout.moves import advance
from kvtier_operator.rollout.returning import short_digest
from kvtier_operator.rollout.state import Holders, RolloutState
from kvtier_operator.rollout.vocabulary import CandidateClass, Phase, Stage


def adopt(state: RolloutState, inputs: Inputs, why: str) -> Plan:
    """The move itself. Agents are given the new baseline by the KVCache's own reconcile, under this fence."""
    return advance(
        state, inputs, _completed(state, inputs), notice=_notice(state, why), spans=_spans(why), adopt=True
    )


def half_adopted(state: RolloutState, inputs: Inputs) -> bool:
    """Whether the KVCache has this rollout's candidate for its baseline and the rollout does not know."""
    candidate, cache = state.candidate, inputs.cache
    if candidate is None or candidate.kind is not CandidateClass.EXACT or cache is None:
        return False
    under_way = state.stage is Stage.FULL and state.phase in (Phase.PROGRESSING, Phase.PAUSED)
    return under_way and cache.baseline is not None and cache.baseline.digest == candidate.digest


def finish_adoption(state: RolloutState, inputs: Inputs) -> Plan:
    """The other half: the status, under the fence that the KVCache has."""
    if inputs.cache is None:
        raise ValueError("an adoption has its KVCache")
    why = "adopted before a restart"
    target = replace(_completed(state, inputs), fence=inputs.cache.fence)
    return Plan(target, urgent=True, notices=(_notice(state, why),), spans=_spans(why), requeue_after=0.01)


def _completed(state: RolloutState, inputs: Inputs) -> RolloutState:
    return replace(
        state,
        phase=Phase.COMPLETED,
        finished_at=inputs.now,
        grant_expires=0.0,
        schedule=None,
        lost=(),
        holders=Holders(),
        vanished=(),
    )


def _notice(state: RolloutState, why: str) -> Notice:
    digest = short_digest(state.candidate.digest) if state.candidate else ""
    return Notice(False, "Completed", f"candidate {digest} is the baseline now: {why}")


def _spans(why: str) -> tuple[SpanNote, ...]:
    return (SpanNote("rollout.completed", (("kvtier.transition.reason", why),)),)
