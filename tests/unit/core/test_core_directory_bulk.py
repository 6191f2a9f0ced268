"""The directory at size: growth in place, bulk restoring, removals, generations of more than 32 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvtier_core.directory import NO_LINE, ChunkState, Directory, logical_id
from kvtier_core.directory.table import mix
from kvtier_core.errors import CoreError, Reason

DISK = 2


def keys_of(count: int, seed: int = 1) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (count, 32), dtype=np.uint8)


def block(directory: Directory, key: bytes, tier: int) -> int:
    line = directory.insert_block(key)
    directory.add_replica(line, tier, 10 + tier, 1, directory.issue_generation())
    directory.publish_replica(line, tier)
    return line


def refusal(action: Callable[[], object]) -> Reason:
    with pytest.raises(CoreError) as refused:
        action()
    return refused.value.reason


def test_growth_moves_nothing_and_old_views_stay_true() -> None:
    directory = Directory(lines=2, capacity=10_000)
    first = block(directory, bytes(keys_of(1, seed=3)[0]), 0)
    view = directory.rows
    for key in keys_of(5000):
        directory.insert_block(bytes(key), rows=7)
    assert len(directory.rows) >= 5001 and np.shares_memory(view, directory.rows)
    directory.rows[first] = 42
    assert int(view[first]) == 42


# As sessions name their chunks: all of a layer, one each of many sessions, all layers of a few.
STRUCTURED: list[Any] = [
    pytest.param(lambda n: logical_id(5, 3, n), id="ULA-26-chunks-of-a-layer"),
    pytest.param(lambda n: logical_id(n, 0, 0), id="ULA-27-first-chunks"),
    pytest.param(lambda n: logical_id(n // 4096 + 1, n % 4096, 0), id="ULA-28-layers"),
]


@pytest.mark.parametrize("named", STRUCTURED)
def test_names_that_differ_in_a_few_bits_spread_over_the_index(named: Callable[[int], int]) -> None:
    hashed = np.array([mix(named(n) + 1) for n in range(8192)], dtype=np.uint64)
    # The upper half chooses a shard, the lower a place in it.
    for half in (hashed >> np.uint64(32), hashed & np.uint64(0xFFFFFFFF)):
        counts = np.bincount((half >> np.uint64(26)).astype(np.int64), minlength=64)
        assert counts.max() / counts.mean() < 1.35
    # Four shards of at most 3,840: not one name is refused for its neighbours.
    directory = Directory(lines=2, capacity=10_000)
    for n in range(10_000):
        directory.insert(named(n), tier=0, slot=n, slot_generation=1, generation=n + 1, state=ChunkState.OPEN)
    assert all(directory.line_of(named(n)) is not None for n in range(0, 10_000, 97))
    directory.check()


def test_restored_blocks_are_as_if_inserted_one_by_one() -> None:
    keys = keys_of(20_000)
    bulk, single = Directory(tiers=3, capacity=40_000), Directory(tiers=3, capacity=40_000)
    for half in (keys[:9000], keys[9000:]):
        lines = bulk.restore_blocks(
            half,
            tier=DISK,
            slots=np.arange(len(half)),
            slot_generations=np.full(len(half), 5),
            namespaces=3,
            rows=256,
            checksums=np.arange(len(half), dtype=np.uint64),
            costs=0.5,
        )
        assert bulk.find_many(half).tolist() == lines.tolist()
    bulk.check()
    for number, key in enumerate(keys[:300]):
        line = single.insert_block(bytes(key), namespace=3, rows=256, checksum=number, cost=0.5)
        single.add_replica(line, DISK, number, 5, single.issue_generation())
        single.publish_replica(line, DISK)
        got = bulk.replica(line, DISK)
        want = single.replica(line, DISK)
        assert (got.state, got.slot, got.slot_generation) == (want.state, want.slot, want.slot_generation)
        for name in ("namespace", "rows", "checksum", "cost", "tier", "state"):
            assert getattr(bulk, name)[line] == getattr(single, name)[line], name
    assert bulk.prefix(keys[:512]) == 512
    assert bulk.lines_of(3).tolist() == list(range(20_000))
    assert bulk.issue_generation() == 20_001


def test_a_restore_is_whole_or_nothing() -> None:
    directory = Directory(lines=1, capacity=100)
    keys = keys_of(40)
    directory.insert_block(bytes(keys[7]))
    zeros = np.zeros(40, dtype=np.int64)
    for bad in (keys, np.vstack((keys[8:], keys[8:9]))):
        count = len(bad)
        assert (
            refusal(
                lambda bad=bad, count=count: directory.restore_blocks(
                    bad, tier=0, slots=zeros[:count], slot_generations=zeros[:count]
                )
            )
            is Reason.IDENTITY_MISMATCH
        )
    many = keys_of(100, seed=5)
    zeros = np.zeros(100, dtype=np.int64)
    assert (
        refusal(lambda: directory.restore_blocks(many, tier=0, slots=zeros, slot_generations=zeros))
        is Reason.NO_DESTINATION_CAPACITY
    )
    assert len(directory) == 1
    directory.check()


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param({"slots": np.full(3, 1 << 31)}, id="slot"),
        pytest.param({"slots": np.zeros(2, np.int64)}, id="too-few-slots"),
        pytest.param({"slot_generations": np.full(3, -1)}, id="slot-generation"),
        pytest.param({"generations": np.full(3, -1)}, id="generation"),
        pytest.param({"rows": 1 << 31}, id="rows"),
        pytest.param({"checksums": np.full(3, -1)}, id="checksum"),
        pytest.param({"tick": -1}, id="tick"),
        pytest.param({"tier": 4}, id="tier"),
    ],
)
def test_a_restore_of_numbers_that_do_not_fit_changes_nothing(bad: dict[str, Any]) -> None:
    directory = Directory(tiers=4)
    facts: dict[str, Any] = {
        "tier": 1,
        "slots": np.zeros(3, np.int64),
        "slot_generations": np.zeros(3, np.int64),
    }
    assert refusal(lambda: directory.restore_blocks(keys_of(3), **{**facts, **bad})) is Reason.BAD_ARGUMENT
    assert len(directory) == directory.used == 0
    directory.check()
    assert directory.restore_blocks(keys_of(3), **facts).tolist() == [0, 1, 2]


BIG = (1 << 62) + 5


def test_generations_of_more_than_32_bits_are_kept_whole() -> None:
    directory = Directory(tiers=2, capacity=9)
    line = directory.insert_block(bytes(32))
    for generation in (BIG, 7, (1 << 63) - 1, 0):
        directory.add_replica(line, 0, 1, generation, generation)
        copy = directory.replica(line, 0)
        assert (copy.slot_generation, copy.generation) == (generation, generation)
        directory.drop_replica(line, 0)
    for bad in (-1, 1 << 63):
        assert refusal(lambda bad=bad: directory.add_replica(line, 0, 1, bad, 1)) is Reason.BAD_ARGUMENT
    numbers = np.array([BIG, 3, 1 << 32])
    lines = directory.restore_blocks(
        keys_of(3), tier=1, slots=numbers % 100, slot_generations=numbers, generations=numbers
    )
    assert [directory.replica(one, 1).generation for one in lines.tolist()] == numbers.tolist()
    assert [directory.slot_generation[one] for one in lines.tolist()] == numbers.tolist()
    assert directory.issue_generation() == BIG + 1


@pytest.mark.parametrize("count", [1, 17, 3000, 30_000])
def test_lookups_agree_at_any_size_after_random_removals(count: int) -> None:
    directory = Directory(capacity=count)
    rng = np.random.default_rng(count)
    keys = keys_of(count)
    lines = [directory.insert_block(bytes(key)) for key in keys]
    gone = rng.random(count) < 0.5
    for line in np.asarray(lines)[gone].tolist():
        directory.remove(line)
    directory.check()
    found = directory.find_many(keys)
    assert ((found == NO_LINE) == gone).all() and (found[~gone] == np.asarray(lines)[~gone]).all()
    for number in rng.integers(0, count, 200).tolist():
        assert directory.find(bytes(keys[number])) == found[number]
    for key in keys[gone]:
        directory.insert_block(bytes(key))
    assert (directory.find_many(keys) >= 0).all()
    directory.check()


def test_uses_are_noted_and_saturate() -> None:
    directory = Directory()
    lines = np.array([directory.insert_block(bytes(key)) for key in keys_of(3)])
    directory.reuse[lines[0]] = 65535
    directory.touch(lines[:2], 9)
    assert directory.reuse[lines].tolist() == [65535, 1, 0]
    assert directory.last_use[lines].tolist() == [9, 9, 0]
