"""What the operator keeps in memory of a rollout goes with it, however it goes."""

from __future__ import annotations

import pytest

from tests.unit.rollout.rollout_world import World


def remembered(world: World) -> set[str]:
    operator = world.operator
    return set(operator._kept) | set(operator._uids.values())


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
