"""What the operator keeps in memory of a rollout goes with it, however it goes."""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import Any

import pytest

from kvtier_operator.ports import Done, Requeue
from kvtier_operator.rollout.vocabulary import Verdict
from tests.unit.rollout.rollout_world import World


def remembered(world: World) -> set[str]:
    operator = world.operator
    return set(operator._kept) | set(operator._uids.values())


def values(root: Any) -> list[Any]:
    """All dataclasses of ours that hang on it, itself included; of each object one."""
    found: dict[int, Any] = {}
    left = [root]
    while left:
        one = left.pop()
        if isinstance(one, (tuple, list)):
            left += one
        elif dataclasses.is_dataclass(one) and not isinstance(one, (type, Enum)) and id(one) not in found:
            found[id(one)] = one
            left += [getattr(one, field.name) for field in dataclasses.fields(one)]
    return list(found.values())


async def test_of_a_rollout_in_which_nothing_moves_little_is_kept() -> None:
    """A thousand of them are, each with some hundred values: none holds a dict of its own, and what was read
    and what would be written are one object where they say the same."""
    world = World(stages=[{"name": "Shadow", "minDuration": "1h"}, {"name": "Full", "soak": "1h"}])
    await world.until("Progressing", "Shadow")
    await world.run(60)
    kept = world.operator._kept["uid-quest"]
    assert kept.state is not None and kept.moved is not None and kept.last_look is not None
    read, wanted, moves = kept.moved
    assert read is wanted and not moves
    assert read.gates is kept.state[1].state.gates
    assert read.conditions is kept.state[1].state.conditions
    held = values([kept.state[1], read, kept.last_look])
    assert len(held) > 20
    assert [one for one in held if hasattr(one, "__dict__")] == []


async def test_the_windows_of_an_attempt_that_is_over_are_forgotten() -> None:
    """Nobody reads them any more, while the rollout stays until somebody deletes it."""
    world = World()
    forgotten: list[str] = []
    world.feed.forget = forgotten.append  # type: ignore[method-assign, assignment]
    await world.until("Progressing", "Canary")
    assert forgotten == []
    world.feed.gates["output"] = Verdict.FAIL
    await world.until("RolledBack")
    assert set(forgotten) == {"uid-quest"}


@pytest.mark.parametrize("kept", ["24h", "0s"], ids=["for-a-day", "for-ever"])
async def test_one_that_has_returned_asks_nobody_anything(kept: str) -> None:
    """Thousands that are over may stay: one that is to go is looked at once an hour, others never."""
    world = World(ttlAfterFinished=kept)
    await world.until("Progressing", "Canary")
    world.feed.gates["output"] = Verdict.FAIL
    await world.until("RolledBack")
    await world.run(30)
    asked: list[str] = world.deps.agents.wanted  # type: ignore[attr-defined]
    asked.clear()
    looks, writes = world.feed.looks, world.api.writes
    outcome = await world.pass_()
    await world.run(300, tick=60.0)
    assert (asked, world.feed.looks, world.api.writes) == ([], looks, writes)
    if kept == "24h":
        assert isinstance(outcome, Requeue) and outcome.after_seconds > 3000.0
    else:
        assert outcome == Done()


async def test_a_rollout_that_is_deleted_is_forgotten() -> None:
    world = World()
    await world.until("Progressing", "Canary")
    assert remembered(world) == {"uid-quest"}
    world.api.ask_to_delete(world.rollout)
    await world.run(10)
    assert world.rollout not in world.api.objects
    await world.pass_()
    assert remembered(world) == set()


@pytest.mark.parametrize("again", [False, True], ids=["gone", "another-of-its-name"])
async def test_a_rollout_that_goes_without_our_finalizer_is_forgotten(again: bool) -> None:
    """Somebody took the finalizer away by hand."""
    world = World()
    await world.until("Progressing", "Canary")
    forgotten: list[str] = []
    world.feed.forget = forgotten.append  # type: ignore[method-assign, assignment]
    obj = world.api.objects.pop(world.rollout)
    if again:
        obj["metadata"] |= {"uid": "uid-other", "finalizers": []}
        del obj["status"]
        world.api.put(obj)
    await world.pass_()
    assert remembered(world) == ({"uid-other"} if again else set())
    assert forgotten == ["uid-quest"]


async def test_of_nodes_that_have_left_its_pool_nothing_is_kept() -> None:
    """An approval lasts for months; nodes of a pool that scales with its traffic do not."""
    world = World(nodes=4)
    await world.until("Completed")
    memory = world.operator._kept["uid-quest"].memory
    for name in ("node-2", "node-3"):
        world.sims.pop(name)
    # As long as a lease of theirs may last.
    await world.run(30)
    assert set(memory.boots) == {"node-0", "node-1"}
    assert (memory.held, set(memory.proofs)) == ({"node-0", "node-1"}, set())
