"""What users of other release controllers complained of, and what happens here. The table of all such cases
is in docs/release.md; here are those that no other test shows by itself."""

from __future__ import annotations

import pytest

from kvtier_operator.rollout.vocabulary import Verdict
from tests.unit.rollout.rollout_world import World, copied, held

QUICK = [
    {"name": "Shadow", "minDuration": "1s"},
    {"name": "Canary", "trafficFraction": "5%", "minDuration": "1s"},
    {"name": "Full", "soak": "1s", "holdback": "2%"},
]


async def test_no_traffic_holds_the_step_and_neither_fails_nor_passes() -> None:
    world = World(stages=QUICK, progressDeadline="90s")
    world.feed.default = Verdict.INSUFFICIENT
    await world.until("Progressing", "Shadow")
    await world.run(60)
    assert world.where == ("Progressing", "Shadow", 0)
    assert held(world) == ["node-0", "node-1"]
    assert "rollback" not in world.status
    await world.until("RolledBack", limit=900)
    assert world.status["rollback"]["cause"] == "DeadlineExceeded"


async def test_what_has_returned_does_not_try_again_by_itself() -> None:
    world = World(stages=QUICK)
    await world.until("Progressing", "Canary")
    world.feed.default = Verdict.FAIL
    await world.until("RolledBack")
    world.feed.default = Verdict.PASS
    fence = world.cache_status["fence"]
    for _ in range(2):
        await world.run(15)
        world.restart()
    assert world.where == ("RolledBack", "ExactBaseline", 0)
    assert (world.status["attempt"], world.cache_status["fence"]) == (1, fence)
    assert held(world) == []


async def test_applying_the_same_file_again_repeats_no_command_and_moves_nothing() -> None:
    world = World(stages=QUICK)
    await world.until("Progressing", "Shadow")
    world.feed.default = Verdict.INSUFFICIENT
    world.intent("Promote", 1)
    await world.until("Progressing", "Canary")
    await world.run(3)
    fence = world.status["fence"]
    world.api.put(copied(world.api.objects[world.rollout]))
    await world.run(8)
    assert world.where == ("Progressing", "Canary", 0)
    assert world.status["fence"] == fence
    last = world.status["lastIntent"]
    assert (last["seq"], last["result"]) == (1, "Accepted")


async def test_an_abort_needs_no_edit_of_what_is_released() -> None:
    """Applying what was there before is no way back elsewhere; a command is, whatever the spec says."""
    world = World(stages=QUICK)
    await world.until("Completed")
    before = copied(world.api.objects[world.rollout]["spec"])
    world.intent("Abort", 1)
    await world.until("RolledBack")
    after = copied(world.api.objects[world.rollout]["spec"])
    assert {**after, "intent": None} == {**before, "intent": None}
    assert held(world) == []


@pytest.mark.parametrize("phase", ["Completed", "RolledBack"])
async def test_an_end_is_never_that_of_a_newer_spec(phase: str) -> None:
    """Who waits for it compares generations; and the first pass that saw the edit says it no longer."""
    world = World(stages=QUICK)
    if phase == "RolledBack":
        world.feed.default = Verdict.FAIL
    await world.until(phase)
    # Of the other candidate nothing is known yet, or its attempt could end in the pass in which it begins.
    world.feed.default = Verdict.INSUFFICIENT
    world.edit(candidate={"selectorRef": {"name": "quest-32"}})
    rollout = world.api.objects[world.rollout]
    assert world.status["observedGeneration"] < rollout["metadata"]["generation"]
    await world.pass_()
    rollout = world.api.objects[world.rollout]
    assert world.status["observedGeneration"] == rollout["metadata"]["generation"]
    assert world.status["phase"] not in ("Completed", "RolledBack")
    assert world.status["attempt"] == 2


async def test_servable_stays_true_from_start_to_end_and_through_a_return() -> None:
    world = World(stages=QUICK)
    seen = set()
    for seq, (verb, verdict, end) in enumerate(
        [
            ("", Verdict.PASS, "Completed"),
            ("Abort", Verdict.PASS, "RolledBack"),
            ("Retry", Verdict.PASS, "Completed"),
            ("", Verdict.FAIL, "RolledBack"),
        ]
    ):
        world.feed.default = verdict
        if verb:
            world.intent(verb, seq)
        for _ in range(300):
            await world.pass_()
            rows = {row["type"]: row["status"] for row in world.status.get("conditions") or []}
            seen.add(rows.get("Servable"))
            if world.status.get("phase") == end:
                break
            world.renew()
            world.clock.seconds += 1.0
        assert world.status["phase"] == end
    assert seen == {"True"}


async def test_promoting_to_the_end_by_hand_can_still_be_aborted() -> None:
    world = World(stages=QUICK)
    world.feed.default = Verdict.INSUFFICIENT
    await world.until("Progressing", "Shadow")
    for seq, stage in ((1, "Canary"), (2, "Full")):
        world.intent("Promote", seq)
        await world.until("Progressing", stage)
    world.intent("Abort", 3)
    await world.until("RolledBack")
    assert world.status["lastIntent"]["result"] == "Accepted"
    assert world.status["rollback"]["cause"] == "IntentAbort"
    assert held(world) == []
