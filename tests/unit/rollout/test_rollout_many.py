"""A return to the baseline with more agents than a status can name: none that vanishes is forgotten."""

from __future__ import annotations

import pytest

from kvtier_operator.rollout.moves import MAX_MISSING
from tests.unit.rollout.rollout_world import World, held

AT_ONCE = 5
A_LEASE = 12
"""10 s, 10 % and the second that a renewal may be on its way."""


async def in_canary(nodes: int) -> World:
    world = World(nodes=nodes)
    await world.until("Progressing", "Canary")
    await world.pass_()
    assert len(held(world)) == nodes
    assert "vanished" not in world.status
    return world


@pytest.mark.parametrize("restarted", [False, True], ids=["same-operator", "next-operator"])
async def test_a_holder_beyond_those_that_are_named_is_waited_for(restarted: bool) -> None:
    world = await in_canary(MAX_MISSING + 4)
    for sim in world.sims.values():
        sim.cut_off = True
    world.intent("Abort", 1)
    await world.pass_()
    assert world.status["phase"] == "RollingBack"
    last = sorted(world.sims)[-1]
    assert last not in world.status["rollback"]["missing"]
    gone = world.sims.pop(last)
    if restarted:
        world.restart()
    for sim in world.sims.values():
        sim.cut_off = False
    await world.run(AT_ONCE)
    assert gone.candidate is not None
    assert world.condition("CandidateRevoked")["status"] == "False"
    await world.run(A_LEASE)
    assert gone.candidate is None
    assert world.status["phase"] == "RolledBack"
    assert world.status["rollback"]["agentsTotal"] == MAX_MISSING + 3


async def test_more_vanish_while_no_operator_runs_than_have_room() -> None:
    world = await in_canary(MAX_MISSING + 4)
    names = sorted(world.sims)
    gone = [world.sims.pop(name) for name in (*names[:10], names[-1])]
    world.restart()
    await world.run(2)
    assert len(world.status["vanished"]) == 8
    assert world.status["vanished"][0]["node"] == "1 not named"
    assert world.status["holders"]["nodes"][:3] == names[7:10]
    world.restart()
    world.intent("Abort", 1)
    await world.run(AT_ONCE)
    assert {*names[:10], "1 not named"} <= set(world.status["rollback"]["missing"])
    await world.run(A_LEASE)
    assert not any(sim.candidate for sim in gone)
    assert world.status["phase"] == "RolledBack"


async def test_one_that_vanished_is_not_crowded_out_by_those_that_are_asked() -> None:
    world = await in_canary(MAX_MISSING + 4)
    for sim in world.sims.values():
        sim.cut_off = True
    world.intent("Abort", 1)
    await world.pass_()
    first = world.status["rollback"]["missing"][0]
    del world.sims[first]
    await world.run(AT_ONCE)
    assert world.status["rollback"]["missing"][0] == first


@pytest.mark.parametrize("passes", [0, 2], ids=["abort-at-once", "abort-a-little-later"])
async def test_a_holder_beyond_those_that_are_named_vanishes_while_no_operator_runs(passes: int) -> None:
    """Its name is nowhere, its number is: every other holder is known from its own answer."""
    world = await in_canary(MAX_MISSING + 4)
    last = sorted(world.sims)[-1]
    assert last not in world.status["holders"]["nodes"]
    assert world.status["holders"]["count"] == MAX_MISSING + 4
    gone = world.sims.pop(last)
    world.restart()
    for _ in range(passes):
        await world.pass_()
    world.intent("Abort", 1)
    await world.run(AT_ONCE)
    assert gone.candidate is not None
    assert world.condition("CandidateRevoked")["status"] == "False"
    assert "1 not named" in world.condition("CandidateRevoked")["message"]
    await world.run(A_LEASE)
    assert gone.candidate is None
    assert world.status["phase"] == "RolledBack"
