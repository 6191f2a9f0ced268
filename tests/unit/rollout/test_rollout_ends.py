"""States in which somebody would wait without end, or be told of an end that has not come: what is deleted,
cannot be read, or was removed by hand, in every stage."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtier_operator.ports import ApiError, JsonObject, Kind, ObjectKey
from kvtier_operator.rollout.vocabulary import Verdict
from tests.unit.rollout.rollout_world import World, copied, held

STAGES = [("Progressing", stage) for stage in ("Shadow", "Canary", "Ramp", "Full")] + [("Completed", "Full")]
LADDER = [
    {"name": "Shadow", "minDuration": "3s"},
    {"name": "Canary", "trafficFraction": "5%", "minDuration": "3s"},
    {"name": "Ramp", "steps": ["10%"], "stepDuration": "3s"},
    {"name": "Full", "soak": "3s", "holdback": "2%"},
]
GOLDEN = ObjectKey(Kind.CONFIG_MAP, "serving", "golden")
in_every_stage = pytest.mark.parametrize(("phase", "stage"), STAGES, ids=lambda value: value)


# --- deleted -----------------------------------------------------------------------------------------------


@in_every_stage
@pytest.mark.parametrize("silent", [False, True], ids=["all-answer", "one-is-silent"])
async def test_a_rollout_that_is_deleted_revokes_first_and_then_goes(
    phase: str, stage: str, silent: bool
) -> None:
    world = World(stages=LADDER)
    await world.until(phase, stage)
    world.sims["node-1"].cut_off = silent
    world.api.ask_to_delete(world.rollout)
    begun = world.clock.seconds
    while world.rollout in world.api.objects and world.clock.seconds < begun + 60:
        await world.run(1)
    assert held(world) == [], "nobody holds it once the object is gone"
    assert world.clock.seconds - begun <= (14 if silent else 3)
    assert "approved" not in world.cache_status


@in_every_stage
async def test_a_cache_that_is_deleted_ends_its_rollout(phase: str, stage: str) -> None:
    world = World(stages=LADDER)
    await world.until(phase, stage)
    world.api.objects[world.cache_key]["metadata"]["finalizers"] = ["kvtier.dev/cache"]
    world.api.ask_to_delete(world.cache_key)
    await world.run(3)
    assert world.where[:2] == ("RollingBack", "ExactBaseline"), "while agents may hold it"
    await world.run(12)
    assert world.says("RolledBack") and held(world) == []
    assert world.status["rollback"]["cause"] == "ObjectDeleted"


@pytest.mark.parametrize("left", [0, 1], ids=["all-agents-are-gone", "one-agent-answers-still"])
async def test_a_return_on_a_pool_that_is_deleted_ends(left: int) -> None:
    """Its KVNodes stay as long as their Nodes do, and nobody starts their agents again."""
    world = World()
    await world.until("Progressing", "Canary")
    del world.api.objects[ObjectKey(Kind.AGENT_POOL, "serving", "default")]
    for name in sorted(world.sims)[left:]:
        world.sims[name].alive = False
    world.intent("Abort", 1)
    begun = world.clock.seconds
    await world.until("RolledBack", limit=60)
    assert world.clock.seconds - begun >= 10, "a lease is waited for"
    assert world.condition("CandidateRevoked")["status"] == "True"
    said = world.condition("BaselineRestored")
    assert (said["status"], said["reason"]) == (("True", "Proved") if left else ("False", "NothingProved"))
    world.intent("Retry", 2, stage="ExactBaseline")
    await world.run(3)
    assert world.where[:2] == (("Progressing", "Shadow") if left else ("Pending", "Off"))


async def test_a_return_waits_for_a_dead_agent_while_its_pool_is_there() -> None:
    world = World()
    await world.until("Progressing", "Canary")
    world.sims["node-1"].alive = False
    world.intent("Abort", 1)
    await world.run(120)
    assert world.says("RollingBack")


@pytest.mark.parametrize("refused", [False, True], ids=["it-is-there", "the-server-refuses"])
async def test_a_pool_that_only_the_read_cache_misses_leaves_no_agent_out(
    monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    """Or all that live would be called all, and a proof claimed that one of them owes."""
    world = World()
    await world.until("Progressing", "Canary")
    pool = ObjectKey(Kind.AGENT_POOL, "serving", "default")
    seen, get, asked = world.deps.store.get, world.api.get, 0

    async def told(key: ObjectKey, *, known: JsonObject | None = None) -> JsonObject:
        nonlocal asked
        asked += key == pool
        if refused and key == pool:
            raise ApiError(403, "Forbidden", "agentpools is forbidden")
        return await get(key, known=known)

    monkeypatch.setattr(world.deps.store, "get", lambda key: None if key == pool else seen(key))
    monkeypatch.setattr(world.api, "get", told)
    world.sims["node-1"].alive = False
    world.intent("Abort", 1)
    await world.run(60)
    assert world.says("RollingBack") and world.status["rollback"]["missing"] == ["node-1"]
    assert world.condition("BaselineRestored")["status"] == "False"
    refused = False
    del world.api.objects[pool]
    asked = 0
    await world.until("RolledBack", limit=10)
    assert asked == 1, "nobody asks again of what is gone"


# --- probe sets that cannot be read ------------------------------------------------------------------------


def shut(world: World, kind: Kind = Kind.CONFIG_MAP) -> Callable[[], None]:
    """The API server refuses objects of a kind, until what is returned is called."""
    get = world.api.get

    async def refused(key: ObjectKey, *, known: JsonObject | None = None) -> JsonObject:
        if key.kind is kind:
            raise ApiError(403, "Forbidden", f"{kind} is forbidden")
        return await get(key, known=known)

    world.api.get = refused  # type: ignore[method-assign]

    def open_again() -> None:
        world.api.get = get  # type: ignore[method-assign]

    return open_again


async def test_a_probe_set_that_cannot_be_read_holds_the_step_and_hides_no_harm() -> None:
    world = World()
    await world.until("Progressing", "Canary")
    window = world.status["window"]
    open_again = shut(world)
    await world.run(60)
    assert world.where[:2] == ("Progressing", "Canary") and world.status["window"] == window
    said = world.condition("Degraded")
    assert (said["status"], said["reason"]) == ("True", "ProbePlanUnreadable")
    assert said["message"] == "ConfigMap golden cannot be read: 403 Forbidden"
    open_again()
    await world.until("Progressing", "Ramp", limit=10)
    shut(world)
    world.feed.gates["output"] = Verdict.FAIL
    await world.until("RolledBack", limit=10)


@pytest.mark.parametrize("how", ["abort", "deletion", "deadline"])
@pytest.mark.parametrize("restarted", [False, True], ids=["the-same-operator", "the-next-operator"])
async def test_a_probe_set_that_cannot_be_read_keeps_nobody_from_ending(how: str, restarted: bool) -> None:
    world = World(progressDeadline="10m")
    await world.until("Progressing", "Canary")
    shut(world)
    if restarted:
        world.restart()
        await world.pass_()
    if how == "abort":
        world.intent("Abort", 1)
    elif how == "deletion":
        world.api.ask_to_delete(world.rollout)
    else:
        world.clock.seconds += 600
    await world.run(20)
    assert held(world) == []
    if how == "deletion":
        assert world.rollout not in world.api.objects
    else:
        cause = {"abort": "IntentAbort", "deadline": "DeadlineExceeded"}[how]
        assert (world.where[0], world.status["rollback"]["cause"]) == ("RolledBack", cause)


async def test_an_approval_ends_with_its_grant_though_its_probe_set_cannot_be_read() -> None:
    world = World(stages=LADDER)
    await world.until("Completed")
    shut(world)
    world.restart()
    await world.pass_()
    world.clock.seconds += 25 * 3600
    await world.run(20)
    assert world.says("RolledBack") and "approved" not in world.cache_status


@in_every_stage
async def test_the_next_operator_finds_harm_though_it_never_read_the_probe_set(
    phase: str, stage: str
) -> None:
    """It is judged by what the window was opened with, as the status says: nothing passes, harm returns."""
    world = World(stages=LADDER)
    await world.until(phase, stage)
    window, share = world.status["window"], world.status["digestBudget"]
    shut(world)
    world.restart()
    await world.run(30)
    assert world.where[:2] == (phase, stage)
    assert (world.status["window"], world.status["digestBudget"]) == (window, share)
    assert world.condition("Degraded")["reason"] == "ProbePlanUnreadable"
    world.feed.gates["output"] = Verdict.FAIL
    await world.until("RolledBack", limit=10)
    assert world.status["rollback"]["cause"] == "GateFailed"


async def test_the_next_operator_goes_on_in_the_same_window_when_it_can_read_the_probe_set() -> None:
    world = World()
    await world.until("Progressing", "Canary")
    window = world.status["window"]
    open_again = shut(world)
    world.restart()
    await world.run(10)
    open_again()
    await world.run(5)
    assert world.says("Progressing", "Canary") and world.status["window"] == window
    assert world.condition("Degraded")["status"] == "False"
    await world.until("Progressing", "Ramp", limit=30)


@pytest.mark.parametrize("restarted", [False, True], ids=["the-same-operator", "the-next-operator"])
@pytest.mark.parametrize("probes", ["golden", "silver"], ids=["the-same-set", "another-set"])
async def test_an_edit_while_the_probe_set_cannot_be_read_hides_no_harm(probes: str, restarted: bool) -> None:
    world = World()
    await world.until("Progressing", "Canary")
    shut(world)
    if restarted:
        world.restart()
    gates = copied(world.api.objects[world.rollout]["spec"]["gates"])
    for gate in gates:
        gate |= {"probeRef": {"name": probes}} if "probeRef" in gate else {"minSamples": 77}
    world.edit(gates=gates)
    await world.run(60)
    assert world.says("Progressing", "Canary"), "nothing passes"
    assert world.status["digestBudget"]["attemptsUsed"] == 2, "the edit opened the step again, once"
    world.feed.gates["output"] = Verdict.FAIL
    await world.until("RolledBack", limit=10)


async def test_nobody_guesses_what_a_window_is_judged_by() -> None:
    """A status of an earlier version has no word of it."""
    world = World()
    await world.until("Progressing", "Canary")
    window = world.status["window"]
    del window["probeSets"]
    open_again = shut(world)
    world.restart()
    with pytest.raises(ApiError):
        await world.pass_()
    open_again()
    before = world.api.writes
    await world.run(5)
    assert world.status["window"] == window and world.api.writes == before, "it is not written for that"
    await world.until("Progressing", "Ramp", limit=30)
    assert [row["configMap"] for row in world.status["window"]["probeSets"]] == ["golden"]


@pytest.mark.parametrize("verb", ["Promote", "Skip"])
async def test_a_promotion_while_the_probe_set_cannot_be_read_is_a_persons_word(verb: str) -> None:
    world = World(stages=[{"name": "Shadow", "minDuration": "9h"}, {"name": "Full", "soak": "1h"}])
    await world.until("Progressing", "Shadow")
    await world.run(5)
    shut(world)
    world.intent(verb, 1)
    await world.until("Progressing", "Full", limit=10)
    assert world.status["overridden"]


async def test_a_rollout_begins_when_its_probe_set_can_be_read() -> None:
    world = World()
    open_again = shut(world)
    await world.run(3)
    assert world.where[:2] == ("Pending", "Off")
    said = world.condition("Feasible")
    assert (said["reason"], said["message"]) == (
        "ProbePlanInvalid",
        "ConfigMap golden: cannot be read: 403 Forbidden",
    )
    open_again()
    await world.until("Progressing", "Shadow", limit=30)


# --- a baseline whose manifest cannot be read --------------------------------------------------------------


def exact_world(**spec: object) -> World:
    placement = {"policy": "headGroups", "headGroups": {"stagingBytes": "8Mi"}}
    return World(candidate={"overrides": {"placement": placement}}, gates=[], **spec)


@pytest.mark.parametrize("how", ["harm", "abort", "deletion", "deadline"])
async def test_the_next_operator_ends_an_exact_candidate_though_it_cannot_read_the_baseline(how: str) -> None:
    world = exact_world(progressDeadline="10m")
    await world.until("Progressing", "Canary")
    window, name = world.status["window"], world.status["baseline"]["revision"]
    shut(world, Kind.CONTROLLER_REVISION)
    world.restart()
    await world.run(60)
    assert world.says("Progressing", "Canary") and world.status["window"] == window, "and nothing passes"
    said = world.condition("Degraded")
    assert (said["status"], said["reason"]) == ("True", "BaselineUnreadable")
    assert said["message"] == f"ControllerRevision {name} cannot be read: 403 Forbidden"
    if how == "harm":
        world.feed.gates["outputMismatches"] = Verdict.FAIL
    elif how == "abort":
        world.intent("Abort", 1)
    elif how == "deletion":
        world.api.ask_to_delete(world.rollout)
    else:
        world.clock.seconds += 600
    await world.run(20)
    assert held(world) == []
    assert world.rollout not in world.api.objects if how == "deletion" else world.says("RolledBack")


async def test_nothing_is_granted_while_the_baseline_cannot_be_read() -> None:
    """There is no manifest to send; an agent would say that it is another."""
    world = exact_world()
    await world.until("Progressing", "Canary")
    open_again = shut(world, Kind.CONTROLLER_REVISION)
    world.restart()
    await world.run(2)
    grants = [len(sim.grants) for sim in world.sims.values()]
    world.sims["node-1"].boot()
    await world.run(15)
    assert [len(sim.grants) for sim in world.sims.values()] == grants
    assert held(world) == ["node-0"] and world.says("Progressing", "Canary")
    open_again()
    await world.run(5)
    assert held(world) == ["node-0", "node-1"]


async def test_an_exact_candidate_begins_when_its_baseline_can_be_read() -> None:
    world = exact_world()
    open_again = shut(world, Kind.CONTROLLER_REVISION)
    await world.run(3)
    assert world.where[:2] == ("Pending", "Off")
    assert "cannot be read: 403 Forbidden" in world.condition("Progressing")["message"]
    open_again()
    await world.until("Progressing", "Shadow", limit=30)


# --- leases that ended -------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["Resume", "RollBack"])
async def test_a_lease_that_ended_under_an_earlier_number_of_the_window_has_ended(policy: str) -> None:
    """Who took another number meanwhile, here a pause, neither hides it nor grants it again for nothing."""
    world = World(onLeaseExpired=policy)
    await world.until("Progressing", "Canary")
    await world.run(2)
    window = world.status["window"]["openingFence"]
    world.sims["node-1"].cut_off = True
    await world.run(9)
    world.intent("Pause", 1)
    await world.run(1)
    assert world.status["fence"] > window and world.says("Paused")
    world.clock.seconds += 0.5
    world.sims["node-1"].cut_off = False
    await world.run(2)
    if policy == "RollBack":
        assert world.status["rollback"]["cause"] == "LeaseExpired"
    else:
        assert world.says("Paused", "Canary")
        assert world.status["resumes"] == 1 and world.status["window"]["openingFence"] > window
        await world.run(30)
        assert world.status["resumes"] == 1, "once"


# --- what is approved --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edit", "wider"),
    [
        pytest.param({"tenants": ["beta", "gamma"]}, True, id="another-tenant"),
        pytest.param({}, True, id="everybody"),
        pytest.param({"tenants": ["beta"], "requestClasses": ["chat"]}, False, id="fewer"),
        pytest.param({"tenants": ["beta"], "maxNodes": 9}, False, id="nodes-say-nothing-of-requests"),
    ],
)
async def test_a_cache_says_what_of_a_candidate_is_approved_now(edit: JsonObject, wider: bool) -> None:
    world = World(stages=LADDER, blastRadius={"tenants": ["beta"]})
    await world.until("Completed")
    world.edit(blastRadius=edit, stages=[*LADDER[:3], {"name": "Full", "soak": "3s", "holdback": "4%"}])
    await world.run(5)
    approved = world.cache_status["approved"]
    assert (approved.get("blastRadius", {}), approved["holdback"]) == (edit, "0.04")
    assert world.says("Completed") and len(held(world)) == 2
    assert bool(world.status.get("overridden")) is wider
    assert ("RadiusWidened" in [reason for reason, _ in world.api.events]) is wider
    before = world.api.writes
    await world.run(60)
    assert world.api.writes == before


@pytest.mark.parametrize("after", [False, True], ids=["before-it", "right-after-it"])
@pytest.mark.parametrize("point", [1, 2, 3, 4, 5, 6])
async def test_a_wider_approval_is_recorded_wherever_the_operator_ends(point: int, after: bool) -> None:
    world = World(stages=LADDER, blastRadius={"tenants": ["beta"]})
    await world.until("Completed")
    await world.run(3)
    world.edit(blastRadius={})
    world.faults.count, world.faults.kill_at, world.faults.after = 0, point, after
    await world.run(10)
    assert world.faults.count >= point, "the point was reached"
    assert world.status["overridden"] and "blastRadius" not in world.cache_status["approved"]
    assert world.says("Completed") and len(held(world)) == 2
