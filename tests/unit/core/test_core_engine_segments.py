"""Host memory passes between namespaces by segments: rows and blocks of tenants, each in their own.

A slot that is free in another's segment is nobody else's, so room is made where it helps and nowhere else.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from kvtier_core.blockstore.outcomes import PutOutcome
from kvtier_core.engine import CacheEngine
from tests.unit.core.blockpump import (
    LATER,
    NAMESPACE,
    by_tier,
    fetched,
    key,
    key_rows,
    payload,
    put,
    stored,
)
from tests.unit.core.builders import CHUNK, LAYERS, SLOT, Driver, Rows, cpu, engine, gpu, nvme

TOKENS, DECODE = 3 * CHUNK + 7, 9
OTHER = hashlib.sha256(b"team-b/1").digest()


def test_a_namespace_never_sees_memory_of_another(tmp_path: Path) -> None:
    """Rows, too, lie in segments of their own."""
    with engine(tmp_path, [cpu(3 * LAYERS)]) as built:
        Driver.open(built, Rows.random(4)).forward(4)
        put(built, [0])
        built.blocks.store.put([key(1)], [payload(built, 1)], namespace=OTHER, deadline=LATER)
        arena = built.blocks.store.parts.tiers[0].slots.arena  # type: ignore[attr-defined]
        owners = [segment.segment for name in (b"", NAMESPACE, OTHER) for segment in arena.segments_of(name)]
        assert len(owners) == len(set(owners)) == LAYERS + 2


@pytest.fixture
def segments_of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a large tier: memory passes between namespaces by several slots at a time."""
    monkeypatch.setattr("kvtier_core.assembly.segment_bytes", lambda size: 3 * SLOT)


@pytest.mark.usefixtures("segments_of_three")
def test_rows_get_memory_from_a_segment_of_blocks(tmp_path: Path) -> None:
    """Slots are free, but each of two namespaces has a segment: the emptier one is given up."""
    tiers = [gpu(LAYERS), cpu(6), nvme(32)]
    with engine(tmp_path / "a", tiers) as built:
        want = Driver.open(built, Rows.random(TOKENS + DECODE)).forward(TOKENS + DECODE)
    with engine(tmp_path / "b", tiers) as built:
        put(built, range(2))
        put(built, [2], namespace=OTHER)
        driver = Driver.open(built, Rows.random(TOKENS + DECODE))
        driver.forward(CHUNK + 1)
        assert by_tier(built.stats()) == {"hbm": (LAYERS, 0), "ram": (2, 2), "flash": (0, 1)}
        out = driver.forward(TOKENS + DECODE - CHUNK - 1)
        assert torch.equal(out, want[:, CHUNK + 1 :])
        assert stored(built, range(2)) == {0, 1}
        assert stored(built, [2], namespace=OTHER) == {2}


@pytest.mark.usefixtures("segments_of_three")
def test_a_held_block_keeps_its_segment_and_rows_go_below(tmp_path: Path) -> None:
    with engine(tmp_path, [gpu(LAYERS), cpu(3), nvme(32)]) as built:
        put(built, range(2))
        with built.blocks.store.pin(key_rows([1]), NAMESPACE, LATER):
            Driver.open(built, Rows.random(2 * CHUNK)).forward(CHUNK + 1)
            assert by_tier(built.stats())["flash"][0] == LAYERS
            assert stored(built, range(2)) == {0, 1}


@pytest.mark.usefixtures("segments_of_three")
def test_a_namespace_makes_room_in_its_own_memory(tmp_path: Path) -> None:
    """All memory is two namespaces' segments. What one stores next costs one of its own, wherever else a slot
    is free."""
    with engine(tmp_path, [cpu(6), nvme(32)]) as built:
        put(built, range(10, 13), namespace=OTHER)
        put(built, range(3))
        for number in range(3, 6):
            assert put(built, [number])[0].outcome is PutOutcome.STORED
        assert stored(built, range(6)) == set(range(6))
        assert stored(built, range(10, 13), namespace=OTHER) == {10, 11, 12}
        assert fetched(built, range(3)) == [payload(built, number) for number in range(3)]


def in_memory(built: CacheEngine, numbers: range) -> set[int]:
    explain = built.blocks.store.explain
    return {number for number in numbers if any(copy.tier == "ram" for copy in explain(key(number)).replicas)}


@pytest.mark.usefixtures("segments_of_three")
def test_a_namespace_gives_up_no_more_than_it_needs(tmp_path: Path) -> None:
    """A slot is free in another's segment, which is none of ours: one of our own goes, none of theirs."""
    with engine(tmp_path, [cpu(6), nvme(32)]) as built:
        put(built, range(10, 12), namespace=OTHER)
        put(built, range(3))
        assert put(built, [3])[0].outcome is PutOutcome.STORED
        assert in_memory(built, range(10, 12)) == {10, 11}
        assert in_memory(built, range(4)) == {1, 2, 3}


@pytest.mark.usefixtures("segments_of_three")
def test_a_segment_with_a_held_block_is_left_as_it_is(tmp_path: Path) -> None:
    """Emptying the other costs more, but it can be emptied."""
    with engine(tmp_path, [gpu(LAYERS), cpu(6), nvme(32)]) as built:
        put(built, range(10, 12), namespace=OTHER)
        put(built, range(2))
        put(built, [2])
        with built.blocks.store.pin(key_rows([11]), OTHER, LATER):
            Driver.open(built, Rows.random(2 * CHUNK)).forward(CHUNK + 1)
            assert by_tier(built.stats())["ram"] == (LAYERS, 2)
            assert in_memory(built, range(10, 12)) == {10, 11}
            assert in_memory(built, range(3)) == set()


@pytest.mark.usefixtures("segments_of_three")
def test_a_fetch_gets_memory_from_a_segment_of_another_namespace(tmp_path: Path) -> None:
    with engine(tmp_path, [cpu(3), nvme(32)]) as built:
        put(built, range(3))
        put(built, range(10, 13), namespace=OTHER)
        assert by_tier(built.stats())["ram"][1] <= 3
        assert fetched(built, range(3)) == [payload(built, number) for number in range(3)]
        assert len(fetched(built, range(10, 13), namespace=OTHER)) == 3
