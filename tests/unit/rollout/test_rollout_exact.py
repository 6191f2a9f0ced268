"""Exact candidates: what they are compiled from, the gate that is theirs, how one becomes the baseline."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier_operator.budgets import budgets_of_others
from kvtier_operator.ports import Kind, ObjectKey
from kvtier_operator.revisions import read_revision
from kvtier_operator.rollout.vocabulary import Verdict
from tests.unit.rollout.rollout_world import World, copied, examples, held

SLICES = {"policy": "headGroups", "headGroups": {"stagingBytes": "8Mi"}}
OTHER = {"policy": "headGroups", "headGroups": {"stagingBytes": "16Mi"}}
FROM_SPEC = {"fromCacheSpec": True}
OVERRIDE = {"overrides": {"placement": SLICES}}


SMALLER = [
    {"tierClassName": "gpu-sim", "budget": "32Mi", "role": "resident"},
    {"tierClassName": "cpu-dram", "budget": "128Mi", "role": "backing"},
]
TIERS = {"overrides": {"tiers": SMALLER}}
MIB = 1 << 20


def hopper() -> dict[str, Any]:
    """A tier class of another device."""
    found = next(obj for obj in examples() if obj["metadata"]["name"] == "gpu-sim")
    obj: dict[str, Any] = copied(found)
    obj["metadata"]["name"] = "hopper"
    obj["spec"]["deviceKind"] = "cuda-sm90"
    return obj


def edit_cache(world: World, **spec: Any) -> None:
    obj = copied(world.api.objects[world.cache_key])
    obj["spec"] |= spec
    world.api.put(obj)


def edited(candidate: dict[str, Any] | None = None, **rollout: Any) -> World:
    """A cache whose spec asks for another placement, and a rollout that brings it without declaring gates."""
    world = World(candidate=candidate or FROM_SPEC, **{"gates": [], **rollout})
    edit_cache(world, placement=SLICES)
    return world


@pytest.mark.parametrize("candidate", [FROM_SPEC, OVERRIDE], ids=["from-cache-spec", "overrides"])
async def test_a_passing_exact_candidate_becomes_the_baseline(candidate: dict[str, Any]) -> None:
    world = World(candidate=candidate, gates=[])
    if candidate is FROM_SPEC:
        edit_cache(world, placement=SLICES)
    await world.until("Completed", "Full")
    new = world.status["candidate"]["digest"]
    assert world.status["candidate"]["class"] == "exact"
    assert world.status["baseline"]["digest"] == world.baseline != new
    assert world.cache_status["baseline"]["digest"] == new
    assert world.cache_status["fence"] == world.status["fence"]
    assert "approved" not in world.cache_status
    assert "grantExpires" not in world.status
    revision = ObjectKey(Kind.CONTROLLER_REVISION, "serving", world.cache_status["baseline"]["revision"])
    assert read_revision(world.api.objects[revision]).digest == new
    assert [text for reason, text in world.api.events if reason == "Completed"]
    world.converge()
    await world.run(60)
    assert world.where == ("Completed", "Full", 0)
    assert held(world) == []
    assert {sim.baseline for sim in world.sims.values()} == {new}


async def test_baseline_and_fence_move_in_one_compare_and_swap() -> None:
    world = edited()
    before: list[tuple[int, str]] = []
    original = world.api.compare_and_swap

    async def watched(key: ObjectKey, ops: Any, *, subresource: str = "status") -> Any:
        answer = await original(key, ops, subresource=subresource)
        if key == world.cache_key:
            before.append((world.cache_status["fence"], world.cache_status["baseline"]["digest"]))
        return answer

    world.api.compare_and_swap = watched  # type: ignore[method-assign]
    await world.until("Completed")
    fences = [fence for fence, _ in before]
    assert fences == sorted(set(fences))
    assert [digest for _, digest in before] == [world.baseline] * (len(before) - 1) + [
        world.status["candidate"]["digest"]
    ]


@pytest.mark.parametrize("verdict", [Verdict.INSUFFICIENT, Verdict.PROVIDER_ERROR])
async def test_output_equality_is_waited_for_though_nobody_declared_it(verdict: Verdict) -> None:
    world = edited()
    world.feed.gates["outputMismatches"] = verdict
    await world.run(120)
    assert world.where == ("Progressing", "Shadow", 0)
    assert {row["name"] for row in world.status["gates"]} >= {"outputMismatches", "illegalFallbacks"}


async def test_one_answer_that_differs_returns_the_exact_candidate() -> None:
    world = edited()
    await world.until("Progressing", "Ramp")
    world.feed.gates["outputMismatches"] = Verdict.FAIL
    await world.until("RolledBack")
    assert world.status["rollback"]["gate"] == "outputMismatches"
    assert world.cache_status["baseline"]["digest"] == world.baseline
    assert held(world) == []


async def test_an_approximate_candidate_has_no_gate_on_equal_outputs() -> None:
    world = World()
    await world.until("Progressing", "Canary")
    assert "outputMismatches" not in {row["name"] for row in world.status["gates"]}


async def test_a_spec_that_changes_again_under_the_rollout_is_drift() -> None:
    world = edited()
    await world.until("Progressing", "Canary")
    edit_cache(world, placement=OTHER)
    await world.until("RolledBack", limit=10)
    assert world.status["rollback"]["cause"] == "InputDrift"


async def test_an_override_does_not_depend_on_what_the_spec_says_meanwhile() -> None:
    world = World(candidate=OVERRIDE, gates=[])
    await world.until("Progressing", "Canary")
    digest = world.status["candidate"]["digest"]
    edit_cache(world, placement=OTHER)
    await world.until("Completed")
    assert world.cache_status["baseline"]["digest"] == digest


async def test_a_lost_manifest_of_the_baseline_names_itself() -> None:
    world = edited()
    reference = world.cache_status["baseline"]["revision"]
    del world.api.objects[ObjectKey(Kind.CONTROLLER_REVISION, "serving", reference)]
    await world.run(3)
    assert world.condition("Progressing")["reason"] == "BaselineMissing"
    assert "manifest" in world.condition("Progressing")["message"]


@pytest.mark.parametrize(
    ("candidate", "edit", "reason", "names"),
    [
        pytest.param(
            {"overrides": {"tiers": [{"tierClassName": "hopper", "budget": "1Gi", "role": "resident"}]}},
            {},
            "NeedsNewCache",
            "deviceKind",
            id="another-device",
        ),
        pytest.param(
            {"overrides": {"tiers": [{"tierClassName": "nobody", "budget": "1Gi", "role": "resident"}]}},
            {},
            "ReferenceMissing",
            "nobody",
            id="tier-class-missing",
        ),
        pytest.param(
            {"overrides": {"placement": {"policy": "recency"}}}, {}, "NoChange", "baseline", id="no-change"
        ),
    ],
)
async def test_what_cannot_stand_beside_the_baseline_is_refused_before_any_agent_hears_of_it(
    candidate: dict[str, Any], edit: dict[str, Any], reason: str, names: str
) -> None:
    world = World(candidate=candidate, gates=[])
    world.api.put(hopper())
    if edit:
        edit_cache(world, **edit)
    await world.run(5)
    found = world.condition("Feasible")
    assert (found["status"], found["reason"]) == ("False", reason)
    assert names in found["message"]
    assert world.cache_status["fence"] == 1
    assert all(sim.grants == [] for sim in world.sims.values())


@pytest.mark.parametrize(
    ("candidate", "edit"),
    [
        pytest.param(TIERS, {}, id="tiers-of-an-override"),
        pytest.param(FROM_SPEC, {"tiers": SMALLER}, id="tiers-of-the-spec"),
        pytest.param(FROM_SPEC, {"chunkTokens": 128}, id="chunk-tokens"),
        pytest.param({"overrides": {"tiers": SMALLER, "placement": SLICES}}, {}, id="with-a-placement"),
        pytest.param({"overrides": {"admission": {"queue": 9}}}, {}, id="admission"),
        pytest.param(
            {"overrides": {"placement": SLICES, "admission": {"queue": 9}}}, {}, id="admission-and-placement"
        ),
    ],
)
async def test_a_candidate_for_an_engine_of_its_own_is_released_like_any_exact_one(
    candidate: dict[str, Any], edit: dict[str, Any]
) -> None:
    world = World(candidate=candidate, gates=[])
    if edit:
        edit_cache(world, **edit)
    await world.until("Progressing", "Canary")
    await world.run(12)
    assert {row["name"] for row in world.status["gates"]} >= {"outputMismatches", "allocationFailures"}
    await world.until("Completed")
    assert world.cache_status["baseline"]["digest"] == world.status["candidate"]["digest"] != world.baseline


class TestRoom:
    """An engine beside the baseline's takes budgets of its own from what each node has left."""

    @staticmethod
    def world(capacity: int, **rollout: Any) -> World:
        """Each node has so many MiB of cpu-dram, 64 of them in reserve; the baseline has 128."""
        world = World(candidate=TIERS, gates=[], **rollout)
        world.api.put(next(obj for obj in examples() if obj["kind"] == "AgentPool"))
        tiers = [
            {"class": "gpu-sim", "deviceKind": "simulated", "capacity": 4096 * MIB},
            {"class": "cpu-dram", "capacity": capacity * MIB},
        ]
        for name in world.sims:
            world.node_status[name] = {"tiers": tiers}
        return world

    async def test_names_the_nodes_with_their_numbers_and_no_agent_hears_of_it(self) -> None:
        world = self.world(300)
        await world.run(5)
        found = world.condition("Feasible")
        assert (found["status"], found["reason"]) == ("False", "NoRoomBeside")
        assert world.where[0] == "Pending"
        for name in list(world.sims)[:1]:
            assert f"{name}: tier cpu-dram has {236 * MIB} bytes" in found["message"]
        assert f"needs {128 * MIB} and others hold {128 * MIB}" in found["message"]
        assert all(sim.grants == [] for sim in world.sims.values())

    async def test_room_that_comes_lets_it_begin_and_room_that_goes_is_no_drift(self) -> None:
        world = self.world(300)
        await world.run(5)
        for status in world.node_status.values():
            status["tiers"][1]["capacity"] = 1024 * MIB
        await world.until("Progressing", "Canary")
        for status in world.node_status.values():
            status["tiers"][1]["capacity"] = 300 * MIB
        await world.until("Completed")
        assert {"tierClassName": "cpu-dram", "bytes": 128 * MIB} in world.status["candidate"]["budgets"]

    async def test_what_was_adopted_counts_when_its_rollout_has_been_removed(self) -> None:
        world = self.world(1024)
        wanted = [
            {**tier, "budget": "160Mi"} if tier["tierClassName"] == "cpu-dram" else tier for tier in SMALLER
        ]
        world.edit(candidate={"overrides": {"tiers": wanted}})
        await world.until("Completed")
        other = copied(world.api.objects[world.cache_key])
        other["metadata"] = {"name": "younger", "namespace": "serving", "uid": "uid-younger"}
        del other["status"]
        adopted = world.api.objects[world.cache_key]
        taken = budgets_of_others(other, [adopted, other], [], younger=True)
        assert taken["cpu-dram"] == 160 * MIB

    async def test_a_candidate_in_the_same_engine_takes_over_its_budgets(self) -> None:
        world = self.world(1024)
        baseline = world.api.objects[world.cache_key]["status"]["baseline"]
        baseline["budgets"] = [{"tierClassName": "cpu-dram", "bytes": 300 * MIB}]
        world.edit(candidate=OVERRIDE)
        await world.until("Completed")
        assert world.cache_status["baseline"]["digest"] == world.status["candidate"]["digest"]
        assert world.cache_status["baseline"]["budgets"] == baseline["budgets"]

    async def test_younger_caches_of_the_pool_hold_theirs(self) -> None:
        world = self.world(256 + 64)
        other = copied(world.api.objects[world.cache_key])
        other["metadata"] = {
            "name": "younger",
            "namespace": "serving",
            "creationTimestamp": "2099-01-01T00:00:00Z",
        }
        other["spec"]["tiers"] = [{"tierClassName": "cpu-dram", "budget": "96Mi", "role": "backing"}]
        del other["status"]
        world.api.put(other)
        await world.run(5)
        assert f"others hold {224 * MIB}" in world.condition("Feasible")["message"]


class TestSpecWithASelector:
    """`fromCacheSpec` of a cache that names a selector: the exact part first, then the selector."""

    async def test_needs_the_gates_of_an_approximate_candidate(self) -> None:
        world = World(candidate=FROM_SPEC, gates=[])
        edit_cache(world, selectorRef={"name": "quest-64"})
        await world.run(5)
        assert world.where[0] == "Invalid"
        assert world.condition("Feasible")["reason"] == "GateMissing"

    async def test_is_approved_beside_the_baseline(self) -> None:
        world = World(candidate=FROM_SPEC)
        edit_cache(world, selectorRef={"name": "quest-64"})
        await world.until("Completed")
        assert world.status["candidate"]["class"] == "approximate"
        assert world.cache_status["approved"]["digest"] == world.status["candidate"]["digest"]
        assert world.cache_status["baseline"]["digest"] == world.baseline

    async def test_brings_the_exact_part_first(self) -> None:
        world = World(candidate=FROM_SPEC)
        edit_cache(world, selectorRef={"name": "quest-64"}, placement=SLICES)
        await world.until("Completed")
        assert world.status["candidate"]["class"] == "exact"
        world.converge()
        second = world.add_rollout("selector-next", candidate=FROM_SPEC)
        await world.run(200, keys=[second, world.rollout])
        assert world.status_of(second)["candidate"]["class"] == "approximate"
        assert world.status_of(second)["phase"] == "Completed"
        assert world.cache_status["baseline"]["digest"] == world.status["candidate"]["digest"]


async def test_the_next_rollout_waits_for_agents_to_run_the_new_baseline() -> None:
    world = edited()
    await world.until("Completed")
    edit_cache(world, placement=OTHER)
    second = world.add_rollout("other", candidate=FROM_SPEC, gates=[])
    await world.run(5, keys=[second])
    assert world.condition("Feasible", second)["reason"] == "NoNodes"
    assert "not on the baseline yet" in world.condition("Feasible", second)["message"]
    world.converge()
    await world.run(15, keys=[second])
    assert world.status_of(second)["stage"] == "Shadow"
    assert world.status_of(second)["baseline"]["digest"] == world.status["candidate"]["digest"]


async def test_an_approval_ends_before_an_exact_rollout_begins() -> None:
    world = World()
    await world.until("Completed")
    assert "approved" in world.cache_status
    exact = world.add_rollout("slices", candidate=OVERRIDE, gates=[])
    await world.run(150, keys=[exact, world.rollout])
    assert world.status_of(exact)["phase"] == "Completed"
    assert "approved" not in world.cache_status
    assert world.condition("Progressing")["reason"] == "ApprovalEnded"


class TestHalfAdopted:
    """The operator died after the KVCache was swapped and before the rollout was written."""

    @pytest.fixture
    async def world(self) -> World:
        world = edited()
        await world.until("Progressing", "Full")
        original = world.api.compare_and_swap

        async def dies(key: ObjectKey, ops: Any, *, subresource: str = "status") -> Any:
            new = next((op.value for op in ops if op.path == "/status/baseline"), None)
            if new is not None:
                # Nothing of this process is written from here on.
                world.faults.kill_at, world.faults.after = world.faults.count + 1, True
            return await original(key, ops, subresource=subresource)

        world.api.compare_and_swap = dies  # type: ignore[method-assign]
        for _ in range(60):
            await world.pass_once()
            if world.cache_status["baseline"]["digest"] != world.baseline:
                break
            world.renew()
            world.clock.seconds += 1
        world.api.compare_and_swap = original  # type: ignore[method-assign]
        world.faults.kill_at = 0
        assert world.where == ("Progressing", "Full", 0)
        assert world.cache_status["fence"] > world.status["fence"]
        return world

    async def test_is_finished_by_the_next_operator(self, world: World) -> None:
        await world.pass_()
        assert world.where[0] == "Completed"
        assert world.status["fence"] == world.cache_status["fence"]

    async def test_is_finished_before_an_abort_is_answered(self, world: World) -> None:
        world.intent("Abort", 1)
        await world.run(3)
        assert world.where[0] == "Completed"
        assert world.status["lastIntent"]["result"] == "NotApplicable"

    async def test_is_finished_before_a_deletion(self, world: World) -> None:
        world.api.ask_to_delete(world.rollout)
        await world.run(3)
        assert world.rollout not in world.api.objects
        assert world.cache_status["baseline"]["digest"] != world.baseline

    async def test_is_finished_though_a_gate_fails_now(self, world: World) -> None:
        world.feed.gates["outputMismatches"] = Verdict.FAIL
        await world.run(3)
        assert world.where[0] == "Completed"

    async def test_is_finished_though_the_spec_was_edited(self, world: World) -> None:
        edit_cache(world, placement=OTHER)
        await world.run(3)
        assert world.where[0] == "Completed"
