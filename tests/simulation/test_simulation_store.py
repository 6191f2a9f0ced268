"""A slice of the simulation in every run of the tests; `make soak ARGS=--simulation` tries many seeds."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.simulation.world import SimulationFailed, World, simulate

SEEDS, MOST_SEEDS, STEPS = 10, 60, 250
# What the slice is about must have happened in it; rare things may need more seeds.
EXPECTED = (
    "io",
    "hang",
    "return",
    "crash",
    "deleted",
    "explain-moving",
    "fetch-FETCH_LATE",
    "put-STORED-READY",
    "through-READY",
)


def test_a_slice_of_the_simulation_keeps_every_promise() -> None:
    seen: Counter[str] = Counter()
    for seed in range(MOST_SEEDS):
        if seed >= SEEDS and all(seen[name] for name in EXPECTED):
            break
        seen.update(simulate(seed, STEPS).seen)
    assert not [name for name in EXPECTED if not seen[name]], sorted(seen)


def test_a_seed_repeats_itself_step_by_step() -> None:
    first, second = simulate(3, 120), simulate(3, 120)
    assert first.trace == second.trace and first.seen == second.seen
    assert first.trace != simulate(4, 120).trace


def test_a_world_leaves_no_descriptor() -> None:
    """Or the thousandth of a process finds no memory: a block that should be read is refused instead."""
    simulate(3, 60)
    before = os.listdir("/proc/self/fd")
    simulate(3, 60)
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("harm", ["other-bytes", "lost", "a-lease-too-many"])
def test_a_broken_promise_is_noticed_and_says_how_to_repeat_it(
    harm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = World.finish

    def harmed(world: World) -> None:
        there = [block for block in world.blocks if world.found(block)]
        assert there, "the seed stores something"
        if harm == "other-bytes":
            there[0].version += 1
        elif harm == "lost":
            gone = next(block for block in world.blocks if not world.found(block))
            gone.live, gone.safe, gone.droppable, gone.deleting = True, True, False, False
        else:
            line = world.store.directory.find(there[0].key)
            tier = int(world.store.directory.tier[line])
            world.store.directory.lease(line, tier)
        finish(world)

    monkeypatch.setattr(World, "finish", harmed)
    with pytest.raises(SimulationFailed, match=r"python -m tests.simulation --seed 5 --steps 60"):
        simulate(5, 60)
