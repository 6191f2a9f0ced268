"""What is true of the fuzzed world at one pass, said for the reference in its own words.

It must not ask the machine what it would do.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtier_operator.rollout.evaluation import all_pass
from kvtier_operator.rollout.inputs import AgentView, Approved, Inputs
from kvtier_operator.rollout.moves import current_step, excluded_now
from kvtier_operator.rollout.spec import Intent, RolloutSpec
from kvtier_operator.rollout.state import CandidateRef, ManifestRef, RolloutState
from kvtier_operator.rollout.vocabulary import CandidateClass, Stage, Verdict
from tests.unit.rollout.machine_reference import Told, Truth

UID = "uid-fuzz"
TTL = 10.0
REFUSALS = {"NO_DESTINATION_CAPACITY": "InfeasibleNode", "NUMERICS_MISMATCH": "ManifestMismatch"}


@dataclass(frozen=True)
class Now:
    """The world beside what the operator was shown. fence: of the cache. resumable: onLeaseExpired says
    so. unreadable: the spec, so that nobody can run `spec`. edits: of the spec since the object was made.
    shown: a status was written once."""

    wall: float
    spec: RolloutSpec
    fence: int
    baseline: ManifestRef
    approved: Approved | None
    candidate: CandidateRef
    intent: Intent | None
    resumable: bool
    unreadable: bool
    edits: int
    shown: bool


def truth(state: RolloutState, inputs: Inputs, now: Now) -> Truth:
    """From the world, by words and not by the machine's own rules."""
    spec, views, look = now.spec, inputs.agents, inputs.look
    window = state.window
    if look is not None and (window is None or look.opening_fence != window.opening_fence):
        look = None
    holders = {view.node for view in views if view.granted_rollout == UID}
    former = {view.node for view in views if view.returned_rollout == UID}
    left_out = excluded_now(state, views, UID)
    refusing = [view for view in views if view.refusal in REFUSALS and view.node not in left_out]
    sure = [view for view in refusing if view.node in holders | former]
    chosen = [view for view in views if view.selected]
    digest = state.candidate.digest if state.candidate else ""
    taken = [view.granted_fence == state.fence and view.candidate_digest == digest for view in chosen]
    all_taken = state.held_by_all or (bool(chosen) and all(taken))
    # One that is not sure to count does where nobody can be left out, and which of several is named is free.
    counting = sure if sure and all_taken and holders else refusing
    silent = {view.node for view in views if not view.reachable}
    patience = TTL * 1.1 * (10 if now.resumable else 1)
    lasted = window is not None and state.holds_candidate
    lasted = lasted and now.wall >= window.opened_at + current_step(state, spec).min_seconds
    lost_now = [view for view in views if not view.reachable and view.node in holders]
    still_lost = bool(lost_now) or bool(silent & {one.node for one in state.lost})

    def ready(some: list[AgentView]) -> bool:
        held = [view.granted_fence == state.fence and view.candidate_digest == digest for view in some]
        return bool(some) and all(held) and all(view.reachable for view in some) and not still_lost

    moved = now.fence != state.fence or any(
        view.highest_fence > state.fence or view.refusal == "FENCE_CONFLICT" for view in views
    )
    # A cordoned one has let go without having been told: it is told, under a number of its own.
    untold = {v.node: v.returned_fence for v in views if v.leaving and v.returned_reason == "LeaseExpired"}
    stray = [
        v
        for v in views
        if v.reachable and not v.selected and state.fence in (v.granted_fence, untold.get(v.node))
    ]
    passing = lasted and not moved and not stray and window is not None
    passing = passing and window.spec_hash == spec.window_hash and all_pass(state, inputs, spec)
    mine = now.approved is not None and now.approved.rollout_uid == UID
    intent, last = now.intent, state.last_intent
    told = None
    if intent is not None and (last is None or intent.seq > last.seq):
        told = Told(str(intent.verb), True, intent.attempt, intent.expected_stage, intent.expected_step)
    elif intent is not None and last is not None:
        repeated = intent.seq == last.seq and last.verb == intent.verb
        if not repeated and f"replay of {intent.seq}:" not in last.message:
            told = Told(str(intent.verb), False, intent.attempt, intent.expected_stage, 0)
    # Of a step: in its window, whatever number was taken in between. An approval goes on under each.
    since = window.opening_fence if window is not None and str(state.phase) != "Completed" else state.fence
    exact = state.candidate is not None and state.candidate.kind is CandidateClass.EXACT
    adopted = exact and now.baseline.digest == digest and state.stage is Stage.FULL
    going = str(state.phase) in ("Progressing", "Paused")
    return Truth(
        deleting=inputs.deleting,
        unreadable=now.unreadable,
        unseen=not now.shown or not now.edits,
        half_adopted=adopted and going,
        holds=state.holds_candidate,
        clearing=state.revoking is not None,
        told=told,
        # What was never read cannot have been edited.
        edited=not now.unreadable and state.candidate_hash not in ("", spec.candidate_hash),
        failed=look is not None and any(one.verdict is Verdict.FAIL for one in look.verdicts),
        drifted=now.candidate.digest != digest or now.baseline != state.baseline,
        refused=frozenset(REFUSALS[view.refusal] for view in counting),
        perhaps=(bool(refusing) and (not sure and all_taken and bool(holders))) or len(refusing) > 1,
        lost=any(
            one.node in silent and now.wall >= max(one.since, inputs.quiet_since) + patience
            for one in state.lost
        ),
        grant_over=not mine or now.wall >= state.grant_expires,
        late=now.wall >= state.started_at + spec.progress_deadline,
        expired=any(
            view.reachable
            and not view.leaving
            and view.granted_fence == 0
            and view.returned_reason == "LeaseExpired"
            and since <= view.returned_fence <= state.fence
            for view in views
        ),
        resumes=window.resumes if window else 0,
        resumable=now.resumable,
        passed=passing and ready(chosen),
        passed_without=passing and ready([view for view in chosen if view not in refusing]),
        blocked=bool(inputs.busy_with)
        or now.candidate.digest == now.baseline.digest
        or not chosen
        or any(view.baseline_digest != now.baseline.digest for view in chosen),
        old_approval=now.approved is not None,
    )
