"""Commands as acknowledged facts: is this intent new, and does it mean the place where the rollout is now?

An intent is used up by its `seq`, accepted or refused; the status echoes which. It must not know what an
accepted intent does.
"""

from __future__ import annotations

from dataclasses import replace

from kvtier_operator.rollout.inputs import Inputs
from kvtier_operator.rollout.spec import Intent
from kvtier_operator.rollout.state import LastIntent, RolloutState
from kvtier_operator.rollout.vocabulary import IntentResult, Phase, Stage, Verb

_ALLOWED: dict[Verb, frozenset[Phase]] = {
    Verb.PAUSE: frozenset({Phase.PROGRESSING}),
    Verb.RESUME: frozenset({Phase.PAUSED}),
    Verb.PROMOTE: frozenset({Phase.PROGRESSING, Phase.PAUSED}),
    Verb.SKIP: frozenset({Phase.PROGRESSING, Phase.PAUSED}),
    Verb.ABORT: frozenset({Phase.PENDING, Phase.INVALID, Phase.PROGRESSING, Phase.PAUSED, Phase.COMPLETED}),
    Verb.RETRY: frozenset({Phase.ROLLED_BACK}),
}


def pending_intent(state: RolloutState, inputs: Inputs) -> Intent | None:
    """The intent that has not been answered yet. One that was replaced by an older file (a smaller seq than
    the last answered) is pending too: it must be refused aloud, once."""
    intent = inputs.intent
    if intent is None:
        return None
    last = state.last_intent
    if last is None or intent.seq > last.seq:
        return intent
    repeated = intent.seq == last.seq and last.verb == intent.verb
    # With its colon: the replay of 12 is no answer to one of 1.
    return None if repeated or last.message.startswith(f"replay of {intent.seq}:") else intent


def judge_intent(
    state: RolloutState,
    intent: Intent,
    *,
    suspended: bool = False,
    created_with: bool = False,
    spec_error: str = "",
) -> tuple[IntentResult, str]:
    """Whether it may be done now, and the sentence for the status. suspended: the cache is. created_with: no
    attempt of the object had been shown as it was written. spec_error: why the spec cannot be run."""
    last = state.last_intent
    if last is not None and intent.seq <= last.seq:
        return IntentResult.REPLAYED, f"replay of {intent.seq}: seq must grow past {last.seq}"
    if not isinstance(intent.verb, Verb):
        legal = ", ".join(Verb)
        return IntentResult.NOT_APPLICABLE, f"{intent.verb!r} is no verb of this version; legal are {legal}"
    if created_with:
        return IntentResult.NOT_APPLICABLE, (
            f"spec.intent.attempt {intent.attempt} is of another object: it was in this one before a status "
            f"showed an attempt; write it again with a seq above {intent.seq}"
        )
    if intent.attempt != state.attempt:
        return IntentResult.WRONG_ATTEMPT, f"meant for attempt {intent.attempt}, this is {state.attempt}"
    if state.phase not in _ALLOWED[intent.verb] or (
        intent.verb is Verb.ABORT and state.phase is Phase.COMPLETED and not state.holds_candidate
    ):
        return IntentResult.NOT_APPLICABLE, f"{intent.verb} does nothing in phase {state.phase}"
    if intent.verb is Verb.ABORT:
        return IntentResult.ACCEPTED, ""
    if spec_error:
        return IntentResult.NOT_APPLICABLE, f"the spec cannot be run: {spec_error}"
    if suspended and intent.verb in (Verb.PROMOTE, Verb.SKIP):
        return IntentResult.NOT_APPLICABLE, "the KVCache is suspended: no node is changed"
    expected = intent.expected_stage or str(state.stage)
    if expected != state.stage:
        return IntentResult.WRONG_STAGE, f"meant for {expected}, the rollout is in {state.stage}"
    if state.stage is not Stage.EXACT_BASELINE and intent.expected_step != state.step:
        return IntentResult.WRONG_STEP, f"meant for step {intent.expected_step}, this is {state.step}"
    return IntentResult.ACCEPTED, ""


def answered(
    state: RolloutState, intent: Intent, result: IntentResult, message: str, now: float
) -> RolloutState:
    """The state with the answer in it. A replay keeps the highest seq seen, or it could be replayed again."""
    seq = max(intent.seq, state.last_intent.seq if state.last_intent else 0)
    return replace(state, last_intent=LastIntent(seq, str(intent.verb), result, message[:200], now))
