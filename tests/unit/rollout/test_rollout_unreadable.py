"""Objects that another version or a hand has written: a deletion ends, and the candidate is revoked first."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier_operator.rollout.salvage import read_status
from kvtier_operator.rollout.spec import MAX_LEASE_TTL
from tests.unit.rollout.rollout_world import World, held

UNKNOWN_PHASE = {"phase": "Hovering"}


async def canary(**spec: Any) -> World:
    world = World(**spec)
    await world.until("Progressing", "Canary")
    await world.pass_()
    assert len(held(world)) == 2
    return world


def break_status(world: World, parts: dict[str, Any]) -> None:
    world.status.update(parts)
    world.api.objects[world.rollout]["metadata"]["resourceVersion"] = "900"


def told(world: World, reason: str) -> list[str]:
    return [message for one, message in world.api.events if one == reason]


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param(UNKNOWN_PHASE, id="phase"),
        pytest.param({"stage": "Orbit"}, id="stage"),
        pytest.param({"phase": "Completed", "stage": "Orbit", "grantExpires": "later"}, id="approved"),
        pytest.param({"carry": {"cells": [{"gate": "output"}]}}, id="carry"),
        pytest.param({"candidate": {"class": "quantum"}, "baseline": {}}, id="manifests"),
        pytest.param({"revoking": {"since": "yesterday"}}, id="revoking"),
        pytest.param({"rollback": {"cause": "Whim", "leaseTTL": "a while"}}, id="rollback"),
        pytest.param({"fence": "high", "attempt": [], "step": {}}, id="numbers"),
        pytest.param({"holders": "all", "vanished": "some", **UNKNOWN_PHASE}, id="nodes"),
        pytest.param({"schedule": "now and then"}, id="schedule"),
    ],
)
async def test_deleted_with_a_status_that_cannot_be_read_its_candidate_is_revoked_and_it_goes(
    parts: dict[str, Any],
) -> None:
    """Sooner than by the end of its leases: agents are asked."""
    world = await canary()
    before = world.cache_status["fence"]
    break_status(world, parts)
    world.api.ask_to_delete(world.rollout)
    await world.run(3)
    assert held(world) == []
    assert world.rollout not in world.api.objects
    assert all(sim.book.highest(sim.cache_uid) > before for sim in world.sims.values())
    (said,) = told(world, "StatusUnreadable")
    assert "revoked on every agent before it goes" in said
    stage = "Shadow" if "stage" in parts else "Canary"
    assert told(world, "RollingBack") == [f"ObjectDeleted in {stage}: the KVRollout is being deleted"]


@pytest.mark.parametrize(
    ("parts", "waits"),
    [
        pytest.param(UNKNOWN_PHASE, 11.0, id="its-own-lease"),
        pytest.param({"rollback": {"leaseTTL": "100000ms"}, **UNKNOWN_PHASE}, 110.0, id="a-longer-one"),
        pytest.param({"rollback": {"leaseTTL": "ages"}, **UNKNOWN_PHASE}, 3960.0, id="nobody-knows"),
    ],
)
async def test_an_agent_that_does_not_answer_is_waited_for_as_long_as_its_lease_may_last(
    parts: dict[str, Any], waits: float
) -> None:
    world = await canary()
    world.sims["node-0"].cut_off = True
    break_status(world, parts)
    world.api.ask_to_delete(world.rollout)
    await world.run(waits - 2, tick=2.0 if waits < 1000 else 60.0)
    assert world.rollout in world.api.objects
    assert world.status["phase"] == "RollingBack"
    await world.run(62 if waits > 1000 else 6)
    assert world.rollout not in world.api.objects
    assert told(world, "ReleasedUnproved")


def test_of_what_is_no_status_at_all_the_longest_lease_counts() -> None:
    metadata = {"deletionTimestamp": "2027-01-15T08:00:00Z"}
    told = read_status({"metadata": metadata, "status": "?"})
    assert (told.state.holds_candidate, told.lease_ttl) == (True, MAX_LEASE_TTL)


@pytest.mark.parametrize("restart", [False, True], ids=["same-operator", "next-operator"])
async def test_a_return_that_cannot_be_read_any_more_is_begun_again_and_ends(restart: bool) -> None:
    world = await canary()
    world.sims["node-0"].cut_off = True
    world.intent("Abort", 1)
    await world.run(3)
    break_status(world, {"conditions": [{"type": "Degraded"}]})
    if restart:
        world.restart()
    world.api.ask_to_delete(world.rollout)
    world.sims["node-0"].cut_off = False
    await world.run(3)
    assert held(world) == []
    assert world.rollout not in world.api.objects


async def test_one_whose_phase_says_that_nobody_holds_it_goes_without_a_word_to_agents() -> None:
    """Its fence would disturb the rollout that has the cache by now."""
    world = await canary()
    world.intent("Abort", 1)
    await world.until("RolledBack")
    fence = world.cache_status["fence"]
    break_status(world, {"conditions": [{"type": "Degraded"}]})
    world.api.ask_to_delete(world.rollout)
    await world.run(2)
    assert world.rollout not in world.api.objects
    assert world.cache_status["fence"] == fence
    (said,) = told(world, "StatusUnreadable")
    assert "no agent can hold its candidate in phase RolledBack" in said


async def test_while_it_is_not_deleted_nothing_is_decided_on_it() -> None:
    world = await canary()
    fence = world.cache_status["fence"]
    break_status(world, UNKNOWN_PHASE)
    for _ in range(3):
        with pytest.raises(ValueError, match="Hovering"):
            await world.operator.reconcile(world.rollout)
    assert world.cache_status["fence"] == fence
    assert world.status["phase"] == "Hovering"


def remove_status(world: World, left: dict[str, Any]) -> None:
    """By hand, while no operator runs."""
    obj = world.api.objects[world.rollout]
    obj.pop("status")
    if left:
        obj["status"] = left
    obj["metadata"]["resourceVersion"] = "900"
    world.restart()


LEFT = [
    pytest.param({}, id="nothing"),
    pytest.param({"conditions": [], "fence": 3}, id="no-phase"),
]


@pytest.mark.parametrize("left", LEFT)
async def test_deleted_after_its_status_was_removed_its_candidate_is_revoked_first(
    left: dict[str, Any],
) -> None:
    world = await canary()
    before = world.cache_status["fence"]
    world.sims["node-0"].cut_off = True
    remove_status(world, left)
    world.api.ask_to_delete(world.rollout)
    await world.run(8)
    assert world.rollout in world.api.objects, "node-0 may hold it as long as its lease lasts"
    assert held(world) == ["node-0"] or not held(world)
    assert world.sims["node-1"].book.highest(world.sims["node-1"].cache_uid) > before
    await world.run(6)
    assert world.rollout not in world.api.objects
    assert "revoked on every agent before it goes" in told(world, "StatusUnreadable")[0]


async def test_another_rollout_does_not_begin_while_one_that_lost_its_status_is_revoked() -> None:
    world = await canary()
    world.sims["node-0"].cut_off = True
    second = world.add_rollout("second")
    await world.pass_(second)
    remove_status(world, {})
    world.api.ask_to_delete(world.rollout)
    await world.pass_(second)
    assert world.status_of(second)["stage"] == "Off"
    progressing = world.condition("Progressing", second)
    assert (progressing["reason"], "quest" in progressing["message"]) == ("CacheBusy", True)


async def test_one_that_no_operator_has_had_in_hand_goes_without_a_word_to_agents() -> None:
    world = World()
    fence = world.cache_status["fence"]
    world.api.ask_to_delete(world.rollout)
    await world.pass_()
    assert world.rollout not in world.api.objects
    assert world.cache_status["fence"] == fence


NAMES = [
    pytest.param("chat", id="text"),
    pytest.param(["chat"], id="list"),
    pytest.param({"names": ["chat"]}, id="names"),
    pytest.param({"name": {"of": "chat"}}, id="object"),
    pytest.param(None, id="none"),
]


@pytest.mark.parametrize("reference", NAMES)
@pytest.mark.parametrize("deleted", [False, True], ids=["there", "deleted"])
async def test_where_nobody_can_read_which_cache_it_is_of_its_leases_are_waited_for(
    reference: Any, deleted: bool
) -> None:
    """No agent can be asked, and nobody makes them forget it: its cache is there."""
    world = await canary()
    world.edit(cacheRef=reference)
    if deleted:
        world.api.ask_to_delete(world.rollout)
    await world.run(8)
    assert world.status["phase"] == "RollingBack"
    assert world.status["rollback"]["cause"] == "InputDrift"
    await world.run(6)
    assert held(world) == []
    if deleted:
        assert world.rollout not in world.api.objects
    else:
        assert world.status["phase"] == "RolledBack"
        assert world.condition("CandidateRevoked")["status"] == "True"
        assert world.condition("BaselineRestored")["reason"] == "NothingProved"


SPECS = [
    pytest.param({"candidate": "quest"}, id="candidate"),
    pytest.param({"candidate": {"selectorRef": "quest"}}, id="selector"),
    pytest.param({"candidate": {"overrides": ["tiers"]}}, id="overrides"),
    pytest.param({"candidate": {"overrides": {"tiers": [{"class": "gpu"}]}}}, id="tiers"),
    pytest.param({"gates": {"output": "0.5"}}, id="gates"),
    pytest.param({"gates": ["output"]}, id="gate"),
    pytest.param({"gates": [{"name": "quality", "probeRef": "golden"}]}, id="probes"),
    pytest.param({"stages": "all"}, id="stages"),
    pytest.param({"leaseTTL": {"seconds": 10}}, id="lease"),
]


@pytest.mark.parametrize("spec", SPECS)
async def test_deleted_with_a_spec_that_cannot_be_read_its_candidate_is_revoked_and_it_goes(
    spec: dict[str, Any],
) -> None:
    world = await canary()
    world.edit(**spec)
    world.api.ask_to_delete(world.rollout)
    await world.run(3)
    assert held(world) == []
    assert world.rollout not in world.api.objects


@pytest.mark.parametrize("spec", SPECS)
async def test_a_spec_that_becomes_unreadable_ends_its_candidate_and_is_said(spec: dict[str, Any]) -> None:
    """A candidate in a form that nobody knows is an edited one: another attempt, which cannot begin."""
    world = await canary()
    world.edit(**spec)
    await world.run(5)
    assert held(world) == []
    assert world.status["phase"] in ("RolledBack", "Invalid")
    assert "spec" in world.condition("Progressing")["message"]
