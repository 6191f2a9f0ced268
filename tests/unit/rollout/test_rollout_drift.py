"""Drift: whatever a candidate was compiled from, and whatever an agent runs, is found at the next look, in
every stage and after Completed; and the holdback, which a drift of the traffic would show in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvtier_operator.metrics import Metrics
from kvtier_operator.ports import Kind, ObjectKey
from kvtier_operator.reconcile.kvrollout import KVRolloutReconciler
from kvtier_operator.rollout.vocabulary import Verdict
from tests.unit.rollout.rollout_world import World, copied, held

TICK = 10.0 / 6
"""Seconds between two looks at a lease of 10 s; a watch tells sooner, and is not counted on here."""
STAGES = [("Progressing", stage) for stage in ("Shadow", "Canary", "Ramp", "Full")] + [("Completed", "Full")]
QUICK = [
    {"name": "Shadow", "minDuration": "1s"},
    {"name": "Canary", "trafficFraction": "5%", "minDuration": "1s"},
    {"name": "Ramp", "steps": ["10%"], "stepDuration": "1s"},
    {"name": "Full", "soak": "1s", "holdback": "2%"},
]


def selector_edited(world: World) -> None:
    selector = copied(world.object(Kind.KV_SELECTOR, "quest-64"))
    selector["spec"]["budget"]["tokens"] = 48
    world.api.put(selector)


def selector_deleted(world: World) -> None:
    del world.api.objects[ObjectKey(Kind.KV_SELECTOR, "serving", "quest-64")]


def tier_class_deleted(world: World) -> None:
    name = world.api.objects[world.cache_key]["spec"]["tiers"][0]["tierClassName"]
    del world.api.objects[ObjectKey(Kind.TIER_CLASS, "", name)]


def tier_class_made_anew(world: World) -> None:
    """It is immutable; one that was deleted and made again need not be the same."""
    spec = world.api.objects[world.cache_key]["spec"]["tiers"][0]
    made = copied(world.api.objects[ObjectKey(Kind.TIER_CLASS, "", spec["tierClassName"])])
    made["spec"]["capabilities"]["checksum"] = "blake3"
    world.api.put(made)


def cache_edited(world: World) -> None:
    cache = copied(world.api.objects[world.cache_key])
    cache["spec"]["chunkTokens"] = 128
    world.api.put(cache)


def baseline_replaced(world: World) -> None:
    world.cache_status["baseline"] = {"digest": "sha256:" + "5" * 64, "revision": "chat-5"}


INPUTS = [
    selector_edited,
    selector_deleted,
    tier_class_deleted,
    tier_class_made_anew,
    cache_edited,
    baseline_replaced,
]


@pytest.mark.parametrize(("phase", "stage"), [STAGES[1], STAGES[-1]], ids=lambda value: value)
@pytest.mark.parametrize("drift", INPUTS, ids=lambda drift: drift.__name__)
async def test_a_drift_of_any_input_is_found_within_one_interval(
    drift: Callable[[World], None], phase: str, stage: str
) -> None:
    world = World(stages=QUICK)
    await world.until(phase, stage)
    await world.run(2)
    drift(world)
    await world.run(TICK)
    assert world.status["rollback"]["cause"] == "InputDrift"
    assert held(world) == []
    assert "approved" not in world.cache_status


@pytest.mark.parametrize(("phase", "stage"), STAGES, ids=lambda value: value)
async def test_a_drift_is_found_in_every_stage(phase: str, stage: str) -> None:
    await test_a_drift_of_any_input_is_found_within_one_interval(cache_edited, phase, stage)


@pytest.mark.parametrize(("phase", "stage"), [STAGES[0], STAGES[-1]], ids=lambda value: value)
async def test_an_agent_that_runs_another_candidate_is_found_within_one_interval(
    phase: str, stage: str
) -> None:
    world = World(stages=QUICK)
    await world.until(phase, stage)
    await world.run(2)
    original = world.sims["node-1"].state

    def state() -> object:
        answer = original()
        if answer.caches[0].candidate.digest:
            answer.caches[0].candidate.digest = "sha256:" + "6" * 64
            answer.caches[0].candidate.running_digest = ""  # nothing recomputed says so as well
        return answer

    world.sims["node-1"].state = state  # type: ignore[assignment, method-assign]
    await world.run(TICK)
    assert world.status["rollback"]["cause"] == "ManifestMismatch"
    assert "node-1" in world.status["rollback"]["message"]
    assert held(world) == []


@pytest.mark.parametrize("which", ["runs_candidate", "runs_baseline"])
@pytest.mark.parametrize(("phase", "stage"), STAGES, ids=lambda value: value)
async def test_an_agent_that_recomputes_another_digest_is_found_within_one_interval(
    phase: str, stage: str, which: str
) -> None:
    """It repeats what it was told all the same."""
    world = World(stages=QUICK)
    await world.until(phase, stage)
    await world.run(2)
    setattr(world.sims["node-1"], which, "sha256:" + "6" * 64)
    await world.run(TICK)
    assert world.status["rollback"]["cause"] == "ManifestMismatch"
    assert "node-1 runs" in world.status["rollback"]["message"]
    assert "666666" in world.status["rollback"]["message"]
    assert held(world) == []


@pytest.mark.parametrize(
    ("runs", "verdict", "reason"),
    [
        ("as granted", "Pass", "DigestsRecomputed"),
        (None, "Pass", "DigestsRepeated"),
        ("", "Insufficient", "CoverageIncomplete"),
    ],
    ids=["recomputed", "earlier-version", "cannot-say"],
)
async def test_only_what_was_recomputed_is_called_so(runs: str | None, verdict: str, reason: str) -> None:
    world = World(stages=[{**QUICK[0], "minDuration": "60s"}, *QUICK[1:]])
    world.sims["node-1"].runs_candidate = runs
    await world.until("Progressing", "Shadow")
    await world.run(15)
    [found] = [gate for gate in world.status["gates"] if gate["name"] == "manifestIdentity"]
    assert (found["verdict"], found["reason"]) == (verdict, reason)
    assert world.status["phase"] == "Progressing"


async def test_no_step_goes_on_while_an_agent_cannot_say_what_it_runs() -> None:
    world = World(stages=QUICK)
    world.sims["node-1"].runs_candidate = ""
    await world.until("Progressing", "Shadow")
    await world.run(30)
    assert (world.status["phase"], world.status["stage"]) == ("Progressing", "Shadow")
    world.sims["node-1"].runs_candidate = "as granted"
    await world.until("Completed")


async def test_an_agent_that_has_drifted_from_the_baseline_is_not_called_restored() -> None:
    world = World(stages=QUICK)
    await world.until("Progressing", "Canary")
    world.sims["node-1"].lie_about_baseline = "sha256:" + "7" * 64
    selector_edited(world)
    await world.run(30)
    assert world.condition("CandidateRevoked")["status"] == "True"
    assert world.condition("BaselineRestored")["status"] == "False"
    world.sims["node-1"].lie_about_baseline = ""
    await world.until("RolledBack")
    assert world.condition("BaselineRestored")["status"] == "True"


@pytest.mark.parametrize("holdback", ["2%", "30%"])
async def test_full_leaves_the_holdback_on_the_baseline_also_after_completed(holdback: str) -> None:
    world = World(stages=[*QUICK[:3], {"name": "Full", "soak": "1s", "holdback": holdback}])
    share = Decimal(holdback.removesuffix("%")) / 100
    for phase in ("Progressing", "Completed"):
        await world.until(phase, "Full")
        await world.pass_()
        lease = world.sims["node-0"].core.lease()
        assert lease is not None
        assert lease.terms.traffic_fraction == 1 - share
    assert Decimal(world.cache_status["approved"]["holdback"]) == share


async def test_what_the_holdback_shows_after_completed_revokes_the_approval() -> None:
    """The audit goes on: its latency gates compare with the sessions that were held back."""
    world = World(stages=QUICK)
    await world.until("Completed")
    await world.run(5)
    world.feed.gates["tail"] = Verdict.FAIL
    await world.run(TICK)
    assert world.status["rollback"]["cause"] == "GateFailed"
    assert world.status["rollback"]["gate"] == "tail"
    assert held(world) == []


async def test_each_return_is_counted_once_by_its_cause() -> None:
    world = World(stages=QUICK)
    counted: list[str] = []
    world.deps = replace(world.deps, rolled_back=counted.append)
    world.operator = KVRolloutReconciler(world.deps, feed=world.feed)
    await world.until("Progressing", "Canary")
    assert counted == []
    world.sims["node-1"].cut_off = True
    world.feed.gates["output"] = Verdict.FAIL
    await world.until("RollingBack")
    # Another number for the same return is no other return.
    cache = copied(world.api.objects[world.cache_key])
    cache["status"]["fence"] += 5
    world.api.put(cache)
    await world.run(5)
    assert (world.where[0], world.status["fence"]) == ("RollingBack", cache["status"]["fence"] + 1)
    world.sims["node-1"].cut_off = False
    await world.until("RolledBack")
    await world.run(5)
    assert counted == ["GateFailed"]
    world.feed.gates.clear()
    world.intent("Retry", 1, stage="ExactBaseline")
    await world.until("Completed")
    selector_deleted(world)
    await world.until("RolledBack")
    assert counted == ["GateFailed", "InputDrift"]
    metrics = Metrics(CollectorRegistry())
    for cause in counted:
        metrics.rolled_back(cause)
    shown = generate_latest(metrics.registry).decode()
    assert 'kvtier_operator_rollbacks_total{cause="InputDrift"} 1.0' in shown


@pytest.mark.parametrize("stage", ["Shadow", "Canary"])
async def test_a_baseline_of_the_same_digest_before_full_is_no_adoption(stage: str) -> None:
    """In Full it is one that was half done; earlier nobody of this rollout can have done it."""
    placement = {"policy": "headGroups", "headGroups": {"stagingBytes": "16Mi"}}
    world = World(candidate={"overrides": {"placement": placement}}, gates=[], stages=QUICK)
    await world.until("Progressing", stage)
    candidate = world.status["candidate"]
    world.cache_status["baseline"] = {"digest": candidate["digest"], "revision": candidate["revision"]}
    await world.run(TICK)
    assert world.status["phase"] != "Completed"
    assert world.status["rollback"]["cause"] == "InputDrift"
