"""What a person may ask for, and what is refused: late, repeated, replayed, or meant for another place."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from kvtier_crds.models.rolloutstatus import KVRolloutStatus
from kvtier_operator.ports import Kind
from kvtier_operator.rollout.intents import judge_intent
from kvtier_operator.rollout.spec import Intent
from kvtier_operator.rollout.state import LastIntent, RolloutState
from kvtier_operator.rollout.vocabulary import IntentResult, Phase, Stage, Verb, Verdict
from tests.unit.rollout.rollout_world import World, held

CANARY = RolloutState(phase=Phase.PROGRESSING, stage=Stage.CANARY, attempt=2)
SEEN = LastIntent(4, "Pause", IntentResult.ACCEPTED, "", 0.0)


@pytest.mark.parametrize(
    ("state", "intent", "expected"),
    [
        pytest.param(CANARY, Intent(1, Verb.PAUSE, 2, "Canary", 0), "Accepted", id="fits"),
        pytest.param(CANARY, Intent(1, Verb.PAUSE, 1, "Canary", 0), "WrongAttempt", id="attempt-before"),
        pytest.param(CANARY, Intent(1, Verb.PROMOTE, 2, "Shadow", 0), "WrongStage", id="late-promote"),
        pytest.param(CANARY, Intent(1, Verb.PROMOTE, 2, "Canary", 1), "WrongStep", id="wrong-step"),
        pytest.param(CANARY, Intent(1, Verb.RESUME, 2, "Canary", 0), "NotApplicable", id="resume-unpaused"),
        pytest.param(CANARY, Intent(1, Verb.RETRY, 2, "Canary", 0), "NotApplicable", id="retry-running"),
        pytest.param(CANARY, Intent(1, Verb.ABORT, 2, "Shadow", 3), "Accepted", id="abort-anywhere"),
        pytest.param(CANARY, Intent(1, Verb.ABORT, 1, "", 0), "WrongAttempt", id="abort-of-old-attempt"),
        pytest.param(CANARY, Intent(1, "Rewind", 2, "Canary", 0), "NotApplicable", id="no-verb"),
    ],
)
def test_judgement(state: RolloutState, intent: Intent, expected: str) -> None:
    assert judge_intent(state, intent)[0] == expected


APPROVED = RolloutState(phase=Phase.COMPLETED, stage=Stage.FULL, grant_expires=9.0)
RETURNED = RolloutState(phase=Phase.ROLLED_BACK, stage=Stage.EXACT_BASELINE)


@pytest.mark.parametrize(
    ("state", "verbs"),
    [
        pytest.param(RolloutState(), {"Abort"}, id="pending"),
        pytest.param(RolloutState(phase=Phase.INVALID), {"Abort"}, id="invalid"),
        pytest.param(CANARY, {"Pause", "Promote", "Skip", "Abort"}, id="progressing"),
        pytest.param(
            replace(CANARY, phase=Phase.PAUSED), {"Resume", "Promote", "Skip", "Abort"}, id="paused"
        ),
        pytest.param(APPROVED, {"Abort"}, id="approved"),
        pytest.param(replace(APPROVED, grant_expires=0.0), set(), id="adopted"),
        pytest.param(replace(RETURNED, phase=Phase.ROLLING_BACK), set(), id="returning"),
        pytest.param(RETURNED, {"Retry"}, id="returned"),
    ],
)
def test_what_may_be_asked_in_which_phase(state: RolloutState, verbs: set[str]) -> None:
    asked = {verb: Intent(1, verb, state.attempt, str(state.stage), state.step) for verb in Verb}
    judged = {verb: judge_intent(state, intent)[0] for verb, intent in asked.items()}
    assert {str(verb) for verb, result in judged.items() if result is IntentResult.ACCEPTED} == verbs
    assert set(judged.values()) <= {IntentResult.ACCEPTED, IntentResult.NOT_APPLICABLE}


@pytest.mark.parametrize(
    ("facts", "verbs"),
    [
        pytest.param({"suspended": True}, {"Pause", "Abort"}, id="the-cache-is-suspended"),
        pytest.param({"spec_error": "no stage"}, {"Abort"}, id="the-spec-cannot-be-run"),
        pytest.param({"created_with": True}, set(), id="it-was-created-with-it"),
    ],
)
def test_what_may_be_asked_of_a_running_one_while(facts: dict[str, Any], verbs: set[str]) -> None:
    asked = [Intent(1, verb, 2, "Canary", 0) for verb in Verb]
    done = [one for one in asked if judge_intent(CANARY, one, **facts)[0] is IntentResult.ACCEPTED]
    assert {str(one.verb) for one in done} == verbs


@pytest.mark.parametrize(
    ("stage", "step", "expected"),
    [
        pytest.param("", 0, "Accepted", id="no-stage-named"),
        pytest.param("ExactBaseline", 3, "Accepted", id="the-step-that-it-returned-from"),
        pytest.param("Canary", 0, "WrongStage", id="the-stage-that-it-returned-from"),
    ],
)
def test_a_retry_names_the_baseline_and_no_step(stage: str, step: int, expected: str) -> None:
    assert judge_intent(RETURNED, Intent(1, Verb.RETRY, 1, stage, step))[0] == expected


@pytest.mark.parametrize("seq", [4, 3, 1], ids=["same", "older", "oldest"])
def test_replay_is_refused_whatever_it_asks(seq: int) -> None:
    state = RolloutState(phase=Phase.PROGRESSING, stage=Stage.CANARY, last_intent=SEEN)
    for verb in Verb:
        assert judge_intent(state, Intent(seq, verb, 1, "Canary", 0))[0] is IntentResult.REPLAYED


@pytest.mark.parametrize("verb", list(Verb))
def test_what_an_object_was_created_with_was_meant_for_another(verb: Verb) -> None:
    for phase in Phase:
        state = RolloutState(phase=phase, stage=Stage.OFF)
        result, message = judge_intent(state, Intent(4, verb, 1, "Off", 0), created_with=True)
        assert result is IntentResult.NOT_APPLICABLE
        assert message.startswith("spec.intent.attempt 1 is of another object") and "above 4" in message


async def test_an_old_file_with_an_abort_in_it_does_not_end_the_rollout_that_is_made_again() -> None:
    """Its attempt 1 is that of the object before, and seq is each object's own."""
    world = World()
    await world.until("Progressing", "Canary")
    world.intent("Abort", 4)
    await world.until("RolledBack")
    world.api.ask_to_delete(world.rollout)
    await world.run(5)
    again = world.add_rollout("again", intent={"seq": 4, "verb": "Abort", "attempt": 1})
    await world.run(30, keys=[again])
    status = world.status_of(again)
    assert status["phase"] == "Progressing"
    answer = status["lastIntent"]
    assert (answer["seq"], answer["result"]) == (4, "NotApplicable")
    assert "spec.intent.attempt" in answer["message"]
    told = [text for reason, text in world.api.events if reason == "IntentRefused"]
    assert len(told) == 1
    world.edit(again, intent={"seq": 5, "verb": "Abort", "attempt": 1})
    await world.run(30, keys=[again])
    assert world.status_of(again)["phase"] == "RolledBack"


EDITS = {
    "a-stage": {"progressDeadline": "2h"},
    "its-gates-away": {"gates": []},
    "its-intent": {"intent": {"seq": 5, "verb": "Abort", "attempt": 1}},
}


@pytest.mark.parametrize("edit", EDITS)
async def test_an_abort_it_was_created_with_is_refused_though_the_spec_was_edited_before_anybody_looked(
    edit: str,
) -> None:
    """At its second generation nothing tells what was there at the first."""
    world = World()
    again = world.add_rollout("again", intent={"seq": 4, "verb": "Abort", "attempt": 1})
    world.edit(again, **EDITS[edit])
    del world.api.objects[world.rollout]
    await world.run(3, keys=[again])
    status = world.status_of(again)
    assert world.api.objects[again]["metadata"]["generation"] == 2
    assert status["phase"] == ("Invalid" if edit == "its-gates-away" else "Progressing")
    seq = 5 if edit == "its-intent" else 4
    assert (status["lastIntent"]["seq"], status["lastIntent"]["result"]) == (seq, "NotApplicable")
    assert len([text for reason, text in world.api.events if reason == "IntentRefused"]) == 1
    world.edit(again, intent={"seq": seq + 1, "verb": "Abort", "attempt": 1})
    await world.run(30, keys=[again])
    assert world.status_of(again)["phase"] == "RolledBack"
    assert world.status_of(again)["rollback"]["cause"] == "IntentAbort"


async def test_once_a_status_has_shown_the_attempt_an_abort_is_obeyed_before_it_begins() -> None:
    world = World(candidate={"selectorRef": {"name": "not-there-yet"}})
    await world.run(3)
    assert world.where == ("Pending", "Off", 0)
    world.intent("Abort", 1)
    await world.run(3)
    assert world.status["lastIntent"]["result"] == "Accepted"
    assert world.where == ("RolledBack", "ExactBaseline", 0)


BROKEN = [
    {"name": "Canary", "trafficFraction": "5%"},
    {"name": "Shadow"},
]


@pytest.mark.parametrize("verb", [verb for verb in Verb if verb is not Verb.ABORT])
async def test_a_command_in_a_spec_that_cannot_be_run_is_refused_once(verb: Verb) -> None:
    world = World(stages=BROKEN)
    await world.run(3)
    assert world.where[0] == "Invalid"
    world.intent(verb, 1)
    await world.run(30)
    assert world.where[0] == "Invalid"
    assert world.condition("Feasible")["reason"] == "ReleaseOrder"
    answer = world.status["lastIntent"]
    assert (answer["seq"], answer["result"]) == (1, "NotApplicable")
    assert len([text for reason, text in world.api.events if reason == "IntentRefused"]) == 1


async def test_an_abort_in_a_spec_that_cannot_be_run_ends_it_and_a_mended_spec_does_not_begin_by_itself() -> (
    None
):
    world = World(stages=BROKEN)
    good = World().api.objects[World().rollout]["spec"]["stages"]
    await world.run(3)
    world.intent("Abort", 1)
    await world.run(3)
    assert (world.status["lastIntent"]["result"], world.where[0]) == ("Accepted", "RolledBack")
    world.edit(stages=good)
    await world.run(30)
    assert (world.where[0], world.status["attempt"]) == ("RolledBack", 1)
    writes = world.api.writes
    await world.run(30)
    assert world.api.writes == writes
    world.edit(candidate={"selectorRef": {"name": "quest-32"}})
    await world.until("Progressing", "Shadow", limit=30)
    assert world.status["attempt"] == 2


async def test_a_retry_that_comes_with_a_spec_that_cannot_be_run_says_why() -> None:
    world = World()
    world.feed.gates["output"] = Verdict.FAIL
    await world.until("RolledBack")
    retry = {"seq": 1, "verb": "Retry", "attempt": 1, "expectedStage": "ExactBaseline", "expectedStep": 0}
    world.edit(intent=retry, stages=BROKEN)
    await world.run(10)
    answer = world.status["lastIntent"]
    assert (answer["seq"], answer["result"]) == (1, "NotApplicable")
    assert answer["message"].startswith("the spec cannot be run: spec.stages")
    assert world.where[0] == "RolledBack"


@pytest.mark.parametrize("verb", ["Abort", "Pause"])
async def test_a_command_in_the_edit_that_breaks_a_running_spec_is_answered(verb: str) -> None:
    """The edit itself takes the candidate back; there is nothing left that the command could do."""
    world = World()
    await world.until("Progressing", "Canary")
    intent = {"seq": 1, "verb": verb, "attempt": 1, "expectedStage": "Canary", "expectedStep": 0}
    world.edit(intent=intent, stages=BROKEN)
    await world.until("RolledBack", limit=30)
    assert world.status["rollback"]["cause"] == "InputDrift"
    answer = world.status["lastIntent"]
    assert (answer["seq"], answer["result"]) == (1, "NotApplicable")
    assert held(world) == []


async def test_a_verb_that_nobody_knows_is_refused_once_and_the_rollout_goes_on() -> None:
    """What a schema of a later version let through."""
    world = World()
    await world.until("Progressing", "Canary")
    world.edit(intent={"seq": 3, "verb": "Rewind", "attempt": 1})
    await world.run(3)
    assert world.where[:2] == ("Progressing", "Canary")
    assert len(held(world)) == 2
    answer = world.status["lastIntent"]
    assert (answer["seq"], answer["verb"], answer["result"]) == (3, "Rewind", "NotApplicable")
    legal = ", ".join(("Pause", "Resume", "Promote", "Skip", "Abort", "Retry"))
    assert answer["message"] == f"'Rewind' is no verb of this version; legal are {legal}"
    world.restart()
    await world.until("Completed")
    assert len([text for reason, text in world.api.events if reason == "IntentRefused"]) == 1
    world.intent("Abort", 4)
    await world.until("RolledBack")
    assert world.status["lastIntent"]["result"] == "Accepted"


async def test_a_verb_of_any_length_can_be_answered() -> None:
    world = World()
    await world.until("Progressing", "Canary")
    world.edit(intent={"seq": 1, "verb": "x" * 5000, "attempt": 1})
    await world.run(3)
    answer = KVRolloutStatus.model_validate(world.status).last_intent
    assert answer is not None and answer.seq == 1
    assert len([text for reason, text in world.api.events if reason == "IntentRefused"]) == 1


async def test_an_intent_without_a_number_cannot_be_answered_and_is_named() -> None:
    world = World()
    await world.run(1)
    world.edit(intent={"seq": "first", "verb": "Pause", "attempt": 1})
    await world.until("RolledBack", limit=30)
    assert world.status["rollback"]["cause"] == "InputDrift"
    assert "spec.intent" in world.status["rollback"]["message"]


async def test_each_replay_is_refused_aloud_once() -> None:
    world = World()
    await world.until("Progressing", "Canary")
    for seq in (20, 12, 1):
        # What the server would refuse: an object that was put back from an older copy.
        world.intent("Pause", seq, step=3)
        await world.run(3)
    told = [text for reason, text in world.api.events if reason == "IntentRefused"]
    assert [text.partition(":")[0] for text in told] == ["Pause seq 20", "Pause seq 12", "Pause seq 1"]
    assert world.status["lastIntent"]["seq"] == 20


async def test_pause_holds_a_passing_step_and_resume_lets_it_go() -> None:
    world = World()
    await world.until("Progressing", "Canary")
    fence = world.status["fence"]
    window = world.status["window"]["openingFence"]
    world.intent("Pause", 1)
    await world.pass_()
    assert world.where == ("Paused", "Canary", 0)
    assert world.status["fence"] > fence
    assert world.status["window"]["openingFence"] == window
    await world.run(120)
    assert world.where == ("Paused", "Canary", 0)
    assert len(held(world)) == 2
    world.intent("Resume", 2)
    await world.until("Progressing", "Ramp")


async def test_paused_candidate_still_fails() -> None:
    world = World()
    await world.until("Progressing", "Canary")
    world.intent("Pause", 1)
    await world.pass_()
    world.feed.gates["output"] = Verdict.FAIL
    await world.until("RolledBack")
    assert world.status["rollback"]["cause"] == "GateFailed"


@pytest.mark.parametrize("verb", ["Promote", "Skip"])
async def test_promotion_by_hand_is_one_step_and_recorded(verb: str) -> None:
    world = World()
    world.feed.default = Verdict.INSUFFICIENT
    await world.run(5)
    world.intent(verb, 1)
    await world.run(3)
    assert world.where == ("Progressing", "Canary", 0)
    assert world.status["overridden"] is True
    assert world.status["lastIntent"]["result"] == "Accepted"
    await world.run(120)
    assert world.where == ("Progressing", "Canary", 0)
    assert "overridden" in world.status


@pytest.mark.parametrize("verb", ["Promote", "Skip"])
async def test_proof_of_harm_outranks_a_promotion_by_hand(verb: str) -> None:
    world = World()
    await world.until("Progressing", "Canary")
    granted = [len(sim.grants) for sim in world.sims.values()]
    world.feed.gates["output"] = Verdict.FAIL
    world.clock.seconds += 15
    world.intent(verb, 1)
    await world.until("RolledBack", limit=30)
    assert world.status["rollback"]["cause"] == "GateFailed"
    assert world.status["rollback"]["fromStage"] == "Canary"
    assert world.status["lastIntent"]["result"] == "NotApplicable"
    assert [len(sim.grants) for sim in world.sims.values()] == granted


async def test_drift_outranks_a_promotion_by_hand() -> None:
    """What is approved by hand is what was watched, not what its inputs have become meanwhile."""
    world = World()
    await world.until("Progressing", "Full")
    selector = copy.deepcopy(world.object(Kind.KV_SELECTOR, "quest-64"))
    selector["spec"]["budget"]["tokens"] = 48
    world.api.put(selector)
    world.intent("Promote", 1)
    await world.until("RolledBack", limit=30)
    assert world.status["rollback"]["cause"] == "InputDrift"
    assert "Completed" not in {reason for reason, _ in world.api.events}


async def test_an_edited_candidate_is_not_promoted_in_the_place_of_the_watched_one() -> None:
    world = World()
    await world.until("Progressing", "Full")
    world.edit(candidate={"selectorRef": {"name": "quest-32"}})
    world.intent("Promote", 1)
    await world.until("Progressing", "Shadow", limit=60)
    assert world.status["attempt"] == 2
    assert world.status["lastIntent"]["result"] == "WrongAttempt"
    assert "approved" not in world.cache_status


async def test_promotion_by_hand_of_a_passing_step_overrides_nothing() -> None:
    world = World(stages=[{"name": "Shadow", "minDuration": "1h"}, {"name": "Full", "soak": "1h"}])
    await world.run(5)
    world.clock.seconds += 5
    world.intent("Promote", 1)
    await world.run(3)
    assert world.where[1] == "Full"
    assert "overridden" not in world.status


async def test_each_intent_is_obeyed_once() -> None:
    world = World()
    world.feed.default = Verdict.INSUFFICIENT
    await world.run(3)
    world.intent("Promote", 1)
    await world.run(10)
    assert world.where[1] == "Canary"
    assert (world.status["lastIntent"]["seq"], world.status["lastIntent"]["result"]) == (1, "Accepted")
    world.edit(intent={"seq": 1, "verb": "Skip", "attempt": 1, "expectedStage": "Canary", "expectedStep": 0})
    await world.run(5)
    assert world.where[1] == "Canary"
    assert world.status["lastIntent"]["result"] == "Replayed"
    writes = world.api.writes
    await world.run(30)
    assert world.api.writes == writes
    # Nor is one lost that comes after an answer.
    world.intent("Skip", 2)
    await world.run(5)
    assert world.where[1] == "Ramp"
    assert (world.status["lastIntent"]["seq"], world.status["lastIntent"]["result"]) == (2, "Accepted")


async def test_abort_needs_no_running_evidence() -> None:
    world = World()
    await world.until("Progressing", "Ramp")
    world.feed.default = Verdict.PROVIDER_ERROR
    await world.run(5)
    assert world.condition("Degraded")["reason"] == "ProviderError"
    world.intent("Abort", 9)
    await world.until("RolledBack", limit=30)
    assert world.status["rollback"]["cause"] == "IntentAbort"
    assert held(world) == []


async def test_abort_of_a_waiting_rollout_touches_no_one() -> None:
    world = World()
    second = world.add_rollout("zebra", candidate={"selectorRef": {"name": "quest-32"}})
    await world.run(5, keys=[world.rollout, second])
    world.edit(second, intent={"seq": 1, "verb": "Abort", "attempt": 1})
    fence = world.cache_status["fence"]
    await world.run(5, keys=[second, world.rollout])
    assert world.status_of(second)["phase"] == "RolledBack"
    assert world.condition("BaselineRestored", second)["status"] == "False"
    assert world.cache_status["fence"] == fence
    assert len(held(world)) == 2


async def test_abort_revokes_an_approved_candidate() -> None:
    world = World()
    await world.until("Completed")
    world.intent("Abort", 1)
    await world.until("RolledBack", limit=30)
    assert "approved" not in world.cache_status
    assert held(world) == []


@pytest.mark.parametrize("cause", ["GateFailed", "IntentAbort"])
async def test_retry_is_a_new_attempt_with_the_next_share(cause: str) -> None:
    world = World()
    if cause == "IntentAbort":
        await world.until("Progressing", "Canary")
        world.intent("Abort", 1)
    else:
        world.feed.gates["output"] = Verdict.FAIL
    await world.until("RolledBack")
    assert world.status["rollback"]["cause"] == cause
    first = world.status["traceparent"]
    world.feed.gates.clear()
    world.intent("Retry", 2, stage="ExactBaseline")
    await world.until("Progressing", "Shadow", limit=30)
    assert world.status["attempt"] == 2
    assert world.status["digestBudget"]["attemptsUsed"] == 2
    assert world.status["traceparent"] != first
    assert "rollback" not in world.status
    assert world.condition("BaselineRestored")["status"] == "False"
    await world.until("Completed")
