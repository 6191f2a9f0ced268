"""A rollout as a whole: forward on evidence, back on harm, and what a person may say on the way."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from kvtier_crds.models.rolloutstatus import KVRolloutStatus
from kvtier_operator.ports import JsonObject, Kind, ObjectKey
from kvtier_operator.rollout.inputs import Look
from kvtier_operator.rollout.state import DesignEffect
from kvtier_operator.rollout.vocabulary import Verdict
from tests.unit.rollout.rollout_world import World, held


async def test_passing_candidate_is_approved_beside_the_baseline() -> None:
    world = World()
    await world.until("Completed", "Full")
    stages = [stage for _, stage, _ in world.sims["node-0"].grants]
    assert list(dict.fromkeys(stages)) == ["Shadow", "Canary", "Ramp", "Full"]
    approved = world.cache_status["approved"]
    assert approved["digest"] == world.status["candidate"]["digest"]
    assert world.cache_status["baseline"]["digest"] == world.baseline
    await world.run(60)
    assert held(world) == ["node-0", "node-1"]
    assert world.where == ("Completed", "Full", 0)


async def test_each_step_lasts_and_moves_one_fraction() -> None:
    world = World()
    seen: list[tuple[str, int]] = []
    start = world.clock.seconds
    for _ in range(150):
        await world.pass_()
        if not seen or seen[-1] != world.where[1:]:
            seen.append(world.where[1:])
        world.renew()
        world.clock.seconds += 1
    assert seen == [("Shadow", 0), ("Canary", 0), ("Ramp", 0), ("Ramp", 1), ("Full", 0)]
    assert world.where[0] == "Completed"
    assert world.clock.seconds - start >= 100


async def test_a_rollout_walks_by_what_its_own_runs_ask_for() -> None:
    world = World()
    for stage in ("Shadow", "Canary", "Ramp", "Full"):
        await world.comes_by_itself(partial(world.says, "Progressing", stage))
    await world.comes_by_itself(partial(world.says, "Completed", "Full"))
    assert held(world) == ["node-0", "node-1"]


@pytest.mark.parametrize("stage", ["Shadow", "Canary", "Ramp", "Full"])
@pytest.mark.parametrize("why", ["harm", "abort", "deletion", "lost agents"])
async def test_a_return_needs_nobody_to_wake_it(why: str, stage: str) -> None:
    world = World()
    await world.comes_by_itself(partial(world.says, "Progressing", stage))
    if why == "harm":
        world.feed.default = Verdict.FAIL
    elif why == "abort":
        world.intent("Abort", 1)
    elif why == "deletion":
        world.api.ask_to_delete(world.rollout)
    else:
        for sim in world.sims.values():
            sim.boot()
    if why == "deletion":
        await world.comes_by_itself(lambda: world.rollout not in world.api.objects)
    elif why == "lost agents":
        await world.comes_by_itself(lambda: held(world) == ["node-0", "node-1"])
        await world.comes_by_itself(partial(world.says, "Completed"))
        return
    else:
        await world.comes_by_itself(partial(world.says, "RolledBack"))
    assert held(world) == []


async def test_thresholds_of_a_closed_window_go_with_the_next_ones_grants() -> None:
    world = World()
    await world.until("Progressing", "Shadow")
    world.feed.thresholds = {"tail": "0.031"}
    await world.until("Progressing", "Canary")
    world.feed.thresholds = {"tail": "0.04", "tail-median": "0.02"}
    await world.run(3)
    world.restart()
    await world.until("Progressing", "Ramp")
    world.feed.thresholds = {"tail-median": "0.01"}
    await world.until("Progressing", "Full")
    await world.run(3)
    told: dict[str, dict[str, str]] = dict(world.sims["node-0"].thresholds)
    assert told == {
        "Shadow": {},
        "Canary": {"tail": "0.031"},
        "Ramp": {"tail": "0.04", "tail-median": "0.01"},
        "Full": {"tail": "0.04", "tail-median": "0.01"},
    }


async def test_a_repeated_grant_after_a_crash_says_the_same_thresholds() -> None:
    """Otherwise the agent would see another command under the same fence."""
    world = World()
    await world.until("Progressing", "Shadow")
    world.feed.thresholds = {"tail": "0.031"}
    await world.until("Progressing", "Canary")
    world.feed.thresholds = {"tail": "0.9"}
    world.restart()
    fence = world.cache_status["fence"]
    for sim in world.sims.values():
        sim.boot()
    await world.run(3)
    assert world.cache_status["fence"] == fence
    canary = [told for stage, told in world.sims["node-0"].thresholds if stage == "Canary"]
    assert len(canary) > 1
    assert all(told == {"tail": "0.031"} for told in canary)


def measured(gate: str, k: str, blocks: int = 300) -> DesignEffect:
    return DesignEffect(gate, k, blocks, "20")


def judged_by(world: World) -> dict[str, str]:
    """Gate and design effect of the open window, as the status holds them."""
    return {row["gate"]: row["k"] for row in world.status["window"].get("designEffects") or []}


async def test_design_effects_of_a_closed_window_outlive_the_operator() -> None:
    world = World()
    await world.until("Progressing", "Shadow")
    world.feed.effects = (measured("output", "1.5"),)
    await world.run(3)
    assert judged_by(world) == {}, "never those of the window itself"
    await world.until("Progressing", "Canary")
    world.feed.effects = (measured("output", "1.1", blocks=20), measured("tail", "2.5"))
    world.restart()
    await world.run(3)
    assert judged_by(world) == {"output": "1.5"}
    await world.until("Progressing", "Ramp")
    assert judged_by(world) == {"output": "1.5", "tail": "2.5"}, "few blocks do not replace enough"


async def test_design_effects_are_kept_when_a_step_is_opened_again() -> None:
    """An edit or an ended lease closes a window without another look at it."""
    world = World()
    world.feed.default = Verdict.INSUFFICIENT
    await world.until("Progressing", "Shadow")
    world.feed.effects = (measured("output", "1.5"),)
    await world.run(15)
    gates = [dict(gate) for gate in world.api.objects[world.rollout]["spec"]["gates"]]
    gates[0]["max"] = "0.07"
    world.edit(gates=gates)
    await world.pass_()
    assert judged_by(world) == {"output": "1.5"}


async def test_another_candidate_begins_without_design_effects() -> None:
    world = World()
    await world.until("Progressing", "Shadow")
    world.feed.effects = (measured("output", "1.5"),)
    await world.until("Progressing", "Canary")
    world.edit(candidate={"selectorRef": {"name": "quest-32"}})
    await world.until("Progressing", "Shadow", limit=30)
    assert judged_by(world) == {}


async def test_a_new_attempt_begins_without_thresholds() -> None:
    world = World()
    world.feed.thresholds = {"tail": "0.031"}
    await world.until("Progressing", "Canary")
    world.sims["node-0"].thresholds.clear()
    world.edit(candidate={"selectorRef": {"name": "quest-32"}})
    await world.until("Progressing", "Canary")
    assert world.sims["node-0"].thresholds[0] == ("Shadow", {})


@pytest.mark.parametrize(
    ("stage", "step"),
    [("Shadow", 0), ("Canary", 0), ("Ramp", 0), ("Ramp", 1), ("Full", 0)],
    ids=lambda value: str(value),
)
async def test_failed_gate_returns_to_the_proved_baseline(stage: str, step: int) -> None:
    world = World()
    await world.until("Progressing", stage, step)
    world.feed.gates["output"] = Verdict.FAIL
    await world.until("RolledBack")
    rollback = world.status["rollback"]
    assert rollback["cause"] == "GateFailed"
    assert rollback["gate"] == "output"
    assert (rollback["fromStage"], rollback["fromStep"]) == (stage, step)
    assert (rollback["agentsRestored"], rollback["agentsTotal"]) == (2, 2)
    assert world.condition("BaselineRestored")["status"] == "True"
    assert world.condition("CandidateRevoked")["status"] == "True"
    assert held(world) == []


async def test_no_gate_is_left_out_of_a_promotion() -> None:
    """Every required gate, built-in ones included, can hold the step alone."""
    for gate in ("output", "quality", "illegalFallbacks", "isolationFailures", "replayFailures"):
        world = World()
        world.feed.gates[gate] = Verdict.INSUFFICIENT
        await world.run(120)
        assert world.where == ("Progressing", "Shadow", 0), gate


async def test_a_gate_that_a_look_does_not_name_holds_the_step() -> None:
    """One whose metric has not begun yet has not passed."""
    world = World()
    whole = world.feed.look

    async def without_quality(*args: Any) -> Look:
        look = await whole(*args)
        return replace(look, verdicts=tuple(one for one in look.verdicts if one.name != "quality"))

    world.feed.look = without_quality  # type: ignore[method-assign]
    await world.run(60)
    assert world.where == ("Progressing", "Shadow", 0)
    world.feed.look = whole  # type: ignore[method-assign]
    await world.until("Progressing", "Canary", limit=60)


@pytest.mark.parametrize("verdict", [Verdict.PASS, Verdict.FAIL], ids=str)
async def test_a_look_at_another_window_decides_nothing(verdict: Verdict) -> None:
    """It was taken of the step, attempt or candidate before."""
    world = World()
    whole = world.feed.look

    async def of_the_one_before(*args: Any) -> Look:
        look = await whole(*args)
        return replace(look, opening_fence=look.opening_fence - 1)

    world.feed.look = of_the_one_before  # type: ignore[method-assign]
    world.feed.default = verdict
    await world.run(60)
    assert world.where == ("Progressing", "Shadow", 0)
    assert "rollback" not in world.status
    assert held(world) == ["node-0", "node-1"]


async def test_a_gate_that_can_only_fail_holds_the_step_while_it_cannot_be_read() -> None:
    world = World()
    await world.until("Progressing", "Canary")
    world.feed.gates["tail-median"] = Verdict.PROVIDER_ERROR
    await world.run(90)
    assert world.where == ("Progressing", "Canary", 0)
    world.feed.gates["tail-median"] = Verdict.INSUFFICIENT
    await world.until("Progressing", "Ramp")


async def test_unreadable_evidence_holds_and_says_so() -> None:
    world = World()
    world.feed.gates["output"] = Verdict.PROVIDER_ERROR
    await world.run(120)
    assert world.where == ("Progressing", "Shadow", 0)
    assert world.condition("Degraded")["reason"] == "ProviderError"
    assert world.status["verdict"] == "ProviderError"


async def test_deadline_returns_what_never_completes() -> None:
    world = World(progressDeadline="3m")
    world.feed.default = Verdict.INSUFFICIENT
    await world.until("RolledBack")
    assert world.status["rollback"]["cause"] == "DeadlineExceeded"


async def test_insufficient_rolls_back_when_so_declared() -> None:
    world = World(onInsufficient="RollBack")
    world.feed.gates["output"] = Verdict.INSUFFICIENT
    await world.until("RolledBack", limit=60)
    assert world.status["rollback"]["cause"] == "DeadlineExceeded"
    assert "output" in world.status["rollback"]["message"]


async def test_selector_that_changes_under_the_rollout_is_drift() -> None:
    world = World()
    await world.until("Progressing", "Canary")
    selector = copy.deepcopy(world.object(Kind.KV_SELECTOR, "quest-64"))
    selector["spec"]["budget"]["tokens"] = 48
    world.api.put(selector)
    await world.until("RolledBack")
    assert world.status["rollback"]["cause"] == "InputDrift"


async def test_approved_candidate_is_revoked_by_drift() -> None:
    world = World()
    await world.until("Completed")
    del world.api.objects[ObjectKey(Kind.KV_SELECTOR, "serving", "quest-64")]
    await world.until("RolledBack")
    assert world.status["rollback"]["cause"] == "InputDrift"
    assert "approved" not in world.cache_status
    assert held(world) == []


async def test_approved_candidate_is_revoked_by_the_audit() -> None:
    world = World()
    await world.until("Completed")
    world.feed.gates["output"] = Verdict.FAIL
    await world.until("RolledBack")
    assert world.status["rollback"]["cause"] == "GateFailed"
    assert "approved" not in world.cache_status


async def test_long_grant_is_extended_before_it_ends() -> None:
    world = World()
    await world.until("Completed")
    first = world.cache_status["approved"]["grantExpires"]
    fence = world.cache_status["fence"]
    for _ in range(10):
        world.clock.seconds += 3600
        await world.pass_()
    assert world.cache_status["approved"]["grantExpires"] > first
    assert world.status["grantExpires"] == world.cache_status["approved"]["grantExpires"]
    assert world.where[0] == "Completed"
    assert world.cache_status["fence"] >= fence


@pytest.mark.parametrize(
    ("candidate", "reason"),
    [
        pytest.param({"fromCacheSpec": True}, "NoChange", id="spec-is-served-already"),
        pytest.param({"selectorRef": {"name": "nobody"}}, "ReferenceMissing", id="missing-selector"),
    ],
)
async def test_what_cannot_run_says_why(candidate: dict[str, object], reason: str) -> None:
    world = World(candidate=candidate)
    await world.run(5)
    condition = world.condition("Feasible")
    assert (condition["status"], condition["reason"]) == ("False", reason)
    assert world.cache_status["fence"] == 1
    assert all(sim.grants == [] for sim in world.sims.values())


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        pytest.param({"gate": {"minConfidence": "0.9"}}, "spec.gate", id="gate"),
        pytest.param({"calibration": {"configMapRef": {"name": "t"}}}, "spec.calibration", id="calibration"),
        pytest.param({"budget": {"tokens": 64, "capPolicy": "dense"}}, "legal: truncate", id="cap-policy"),
        pytest.param(
            {"family": "fromTheFuture", "quest": None},
            "implemented: certifiedScan, clusterKv, emLlm, ",
            id="family",
        ),
    ],
)
async def test_selector_that_is_not_accepted_is_not_feasible(edit: dict[str, object], says: str) -> None:
    world = World()
    world.api.objects[ObjectKey(Kind.KV_SELECTOR, "serving", "quest-64")]["spec"] |= edit
    await world.run(5)
    condition = world.condition("Feasible")
    assert (condition["status"], condition["reason"]) == ("False", "NotImplemented")
    assert condition["message"].startswith("KVSelector quest-64 is not accepted: ")
    assert says in condition["message"]
    assert world.where[0] == "Invalid"
    assert all(sim.grants == [] for sim in world.sims.values())


async def test_missing_selector_that_appears_lets_it_go_on() -> None:
    world = World()
    key = ObjectKey(Kind.KV_SELECTOR, "serving", "quest-64")
    kept = world.api.objects.pop(key)
    await world.run(3)
    assert world.where[0] == "Pending"
    world.api.objects[key] = kept
    await world.until("Progressing", "Shadow")


@pytest.mark.parametrize("waits_for", ["ReferenceMissing", "CacheBusy", "NoNodes"])
async def test_rollout_that_cannot_begin_ends_at_its_deadline(waits_for: str) -> None:
    world = World(progressDeadline="1h")
    key = world.rollout
    if waits_for == "ReferenceMissing":
        del world.api.objects[ObjectKey(Kind.KV_SELECTOR, "serving", "quest-64")]
    elif waits_for == "NoNodes":
        world.sims.clear()
    else:
        world.feed.default = Verdict.INSUFFICIENT
        world.edit(progressDeadline="9h")
        await world.until("Progressing", "Shadow")
        key = world.add_rollout("zebra", progressDeadline="1h")
    await world.pass_(key)
    since = world.status_of(key)["schedule"]["pendingSince"]
    await world.run(3500, tick=100, keys=[key])
    assert world.status_of(key)["phase"] == "Pending"
    assert world.status_of(key)["schedule"]["pendingSince"] == since
    await world.run(200, tick=100, keys=[key])
    assert world.status_of(key)["phase"] == "RolledBack"
    assert world.status_of(key)["rollback"]["cause"] == "DeadlineExceeded"
    progressing = world.condition("Progressing", key)
    assert (progressing["status"], progressing["reason"]) == ("False", "DeadlineExceeded")
    assert f"waits for {waits_for}" in progressing["message"]
    assert [text for reason, text in world.api.events if reason == "PendingTooLong"] == [
        progressing["message"]
    ]


async def test_rollout_that_waited_too_long_may_be_tried_again() -> None:
    world = World(progressDeadline="1h")
    kept = dict(world.sims)
    world.sims.clear()
    await world.run(3700, tick=100)
    assert world.where[0] == "RolledBack"
    world.sims.update(kept)
    world.intent("Retry", 1, stage="ExactBaseline")
    await world.until("Progressing", "Shadow", limit=30)
    assert "pendingSince" not in world.status["schedule"]


async def test_cache_with_other_edits_needs_its_own_candidate() -> None:
    world = World()
    world.api.objects[world.cache_key]["spec"]["chunkTokens"] = 128
    await world.run(3)
    assert world.condition("Feasible")["reason"] == "NotImplemented"
    assert "fromCacheSpec" in world.condition("Feasible")["message"]


async def test_second_rollout_waits_and_names_the_first() -> None:
    world = World()
    second = world.add_rollout("zebra", candidate={"selectorRef": {"name": "quest-32"}})
    await world.run(10, keys=[world.rollout, second])
    assert world.status_of(second)["phase"] == "Pending"
    busy = world.condition("Progressing", second)
    assert busy["reason"] == "CacheBusy"
    assert "quest" in busy["message"]
    world.feed.gates["output"] = Verdict.FAIL
    await world.until("RolledBack")
    world.feed.gates.clear()
    await world.run(10, keys=[world.rollout, second])
    assert world.status_of(second)["stage"] == "Shadow"


async def test_new_rollout_revokes_the_approved_one_first() -> None:
    world = World()
    await world.until("Completed")
    old = world.status["candidate"]["digest"]
    second = world.add_rollout("zebra", candidate={"selectorRef": {"name": "quest-32"}})
    await world.pass_(second)
    assert world.status_of(second)["stage"] in ("Off", "Shadow")
    await world.run(5, keys=[second, world.rollout])
    assert world.status_of(second)["stage"] == "Shadow"
    assert "approved" not in world.cache_status
    assert world.condition("Progressing")["reason"] == "ApprovalEnded"
    assert {sim.candidate[1] for sim in world.sims.values() if sim.candidate} != {old}
    assert world.where[0] == "Completed"


async def test_edited_candidate_begins_a_new_attempt_at_shadow() -> None:
    world = World()
    await world.until("Progressing", "Canary")
    old = world.status["candidate"]["digest"]
    world.edit(candidate={"selectorRef": {"name": "quest-32"}})
    await world.until("Progressing", "Shadow", limit=30)
    assert world.status["attempt"] == 2
    assert world.status["candidate"]["digest"] != old


async def test_nobody_is_granted_the_edited_candidate_while_somebody_may_hold_the_first() -> None:
    world = World()
    await world.until("Progressing", "Canary")
    await world.run(2)
    first = world.status["candidate"]["digest"]
    world.sims["node-1"].alive = False  # to the cluster; what it holds ends with its lease
    world.edit(candidate={"selectorRef": {"name": "quest-32"}})
    await world.run(5)
    assert world.sims["node-1"].candidate is not None, "its lease goes on"
    assert world.where[:2] == ("Pending", "Off")
    assert {digest for sim in world.sims.values() for _, _, digest in sim.grants} == {first}
    await world.until("Progressing", "Shadow", limit=30)
    assert world.sims["node-1"].candidate is None
    await world.run(2)
    assert {digest for _, _, digest in world.sims["node-0"].grants} > {first}


async def test_edited_candidate_arms_a_rolled_back_rollout_again() -> None:
    world = World()
    world.feed.gates["output"] = Verdict.FAIL
    await world.until("RolledBack")
    world.feed.gates.clear()
    world.edit(candidate={"selectorRef": {"name": "quest-32"}})
    await world.until("Progressing", "Shadow", limit=30)
    assert world.status["attempt"] == 2


async def test_a_candidate_that_is_edited_during_a_return_begins_when_that_is_proved() -> None:
    """And not later: who could hold it is asked then, since a return asks nobody but by revoking."""
    world = World()
    await world.until("Progressing", "Canary")
    world.feed.gates["output"] = Verdict.FAIL
    world.sims["node-1"].in_flight = 1
    await world.run(5)
    assert world.where[0] == "RollingBack"
    world.feed.gates.clear()
    world.edit(candidate={"selectorRef": {"name": "quest-32"}})
    await world.run(3)
    assert world.where[0] == "RollingBack"
    world.sims["node-1"].in_flight = 0
    await world.until("Progressing", "Shadow", limit=4)
    assert world.status["attempt"] == 2
    assert "NoNodes" not in {reason for reason, _ in world.api.events}


async def test_edited_gates_open_the_step_again_and_spend_a_share() -> None:
    world = World()
    await world.until("Progressing", "Canary")
    before = world.status
    gates = [dict(gate) for gate in world.api.objects[world.rollout]["spec"]["gates"]]
    gates[0]["max"] = "0.07"
    world.edit(gates=gates)
    await world.pass_()
    after = world.status
    assert (after["stage"], after["attempt"]) == ("Canary", 1)
    assert after["window"]["openingFence"] > before["window"]["openingFence"]
    assert after["digestBudget"]["attemptsUsed"] == before["digestBudget"]["attemptsUsed"] + 1


@pytest.mark.parametrize(
    ("radius", "whose"),
    [
        ({"tenants": list("abcdef")}, "tenants a, b, c, d and 2 more"),
        ({"tenants": ["a"], "requestClasses": ["chat"], "maxNodes": 2}, "tenants a; request classes chat"),
        ({"maxNodes": 2}, "all requests"),
    ],
    ids=["many", "some", "all"],
)
async def test_a_step_that_an_edit_opens_again_says_whose_requests_it_serves(
    radius: JsonObject, whose: str
) -> None:
    world = World(blastRadius={"tenants": ["b"]})
    await world.until("Progressing", "Full")
    world.edit(blastRadius=radius)
    await world.run(2)
    said = [message for reason, message in world.api.events if reason == "StageEntered"]
    assert said[-1] == f"Full: spec edited; the open step starts again for {whose}"
    assert "overridden" not in world.status, "it is compared before it is promoted"


async def test_share_is_kept_by_digest_when_the_rollout_is_made_again() -> None:
    world = World()
    await world.until("Progressing", "Shadow")
    world.api.ask_to_delete(world.rollout)
    await world.run(5)
    assert world.rollout not in world.api.objects
    again = world.add_rollout("again")
    await world.run(3, keys=[again])
    assert world.status_of(again)["digestBudget"]["attemptsUsed"] == 2


async def test_attempts_without_end_are_walked_and_written() -> None:
    """Two writers that do not agree on a field make thousands of edits in a day."""
    world = World()
    await world.until("Progressing", "Shadow")
    digest = world.status["candidate"]["digest"]
    world.api.objects[world.cache_key]["status"]["digestBudget"] = [{"digest": digest, "attempts": 4999}]
    rollout = world.api.objects[world.rollout]
    rollout["status"]["attempt"] = 4999
    world.api.put(rollout)
    world.edit(candidate={"selectorRef": {"name": "quest-32"}})
    await world.until("Progressing", "Shadow", limit=30)
    world.edit(candidate={"selectorRef": {"name": "quest-64"}})
    await world.until("Progressing", "Shadow", limit=30)
    assert (world.status["attempt"], world.status["digestBudget"]["attemptsUsed"]) == (5001, 5000)
    KVRolloutStatus.model_validate(world.status)
    world.feed.gates["output"] = Verdict.FAIL
    await world.until("RolledBack", limit=30)


async def test_finished_rollout_goes_after_its_time() -> None:
    world = World(ttlAfterFinished="1h")
    world.feed.gates["output"] = Verdict.FAIL
    await world.until("RolledBack")
    world.clock.seconds += 3599 - 60
    await world.pass_()
    assert world.rollout in world.api.objects
    world.clock.seconds += 120
    await world.pass_()
    await world.pass_() if world.rollout in world.api.objects else None
    assert world.rollout not in world.api.objects


async def test_finished_rollout_that_is_kept_for_no_time_is_seen_to_have_ended_and_goes() -> None:
    """As a Job is. What a watch sees last says how it ended."""
    world = World(ttlAfterFinished="0s")
    seen: list[str] = []
    swap = world.api.compare_and_swap

    async def watched(key: ObjectKey, *args: Any, **kwargs: Any) -> JsonObject:
        obj = await swap(key, *args, **kwargs)
        if key == world.rollout:
            seen.append((obj.get("status") or {}).get("phase", ""))
        return obj

    world.api.compare_and_swap = watched  # type: ignore[method-assign]
    world.feed.gates["output"] = Verdict.FAIL
    await world.run(60)
    assert world.rollout not in world.api.objects
    assert seen[-1] == "RolledBack"
    assert [reason for reason, _ in world.api.events].count("BaselineRestored") == 1


@pytest.mark.parametrize("kept", [None, "", "for a while", {"hours": 1}])
async def test_finished_rollout_stays_where_it_does_not_say_for_how_long(kept: Any) -> None:
    world = World(ttlAfterFinished=kept)
    world.feed.gates["output"] = Verdict.FAIL
    await world.until("RolledBack")
    world.clock.seconds += 1000 * 24 * 3600.0
    await world.pass_()
    assert world.says("RolledBack")


async def test_an_approval_goes_on_whatever_a_finished_rollout_is_kept_for() -> None:
    world = World(ttlAfterFinished="0s")
    await world.until("Completed")
    await world.run(30)
    assert world.says("Completed") and len(held(world)) == 2


async def test_status_stays_under_8_kib() -> None:
    import json

    world = World(nodes=30)
    for sim in world.sims.values():
        sim.lie_about_baseline = "sha256:" + "0" * 64
    await world.until("Progressing", "Full")
    world.feed.gates["output"] = Verdict.FAIL
    await world.run(5)
    assert len(json.dumps(world.status)) < 8192


async def test_trace_is_of_the_attempt_and_tells_stages_and_gates() -> None:
    world = World()
    await world.until("Progressing", "Canary")
    assert world.status["traceparent"].startswith("00-")
    assert world.status["traceID"] == world.status["traceparent"][3:35]
    names = [name for name, _ in world.spans.ended]
    assert names.count("rollout.stage") == 2
    gates = [attributes for name, attributes in world.spans.ended if name == "rollout.gate"]
    assert {row["kvtier.gate"] for row in gates} >= {"output", "quality"}
    assert world.spans.roots == [("uid-quest", 1)]
