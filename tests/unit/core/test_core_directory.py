"""What the directory promises, case by case: survival, epochs, bounds, growth, and how a broken one looks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from kvtier_core.directory import (
    NO_LINE,
    NO_TIER,
    ChunkState,
    Directory,
    ReplicaState,
    block_id,
    is_block_id,
    logical_id,
)
from kvtier_core.directory.ids import line_of_block
from kvtier_core.directory.lines import LAST_EPOCH
from kvtier_core.errors import CoreError, Reason

GPU, HOST, DISK = 0, 1, 2


def keys_of(count: int, seed: int = 1) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (count, 32), dtype=np.uint8)


def block(directory: Directory, key: bytes, *tiers: int) -> int:
    """A block with published copies in `tiers`, the first of them its authority."""
    line = directory.insert_block(key)
    for tier in tiers:
        directory.add_replica(line, tier, 10 + tier, 1, directory.issue_generation())
        directory.publish_replica(line, tier)
    return line


def refusal(action: Callable[[], object]) -> Reason:
    with pytest.raises(CoreError) as refused:
        action()
    return refused.value.reason


# Survival and authority (A.9; C2.10; N.2 27 and 28; N.4 23).


def test_c2_10_only_valid_copies_of_the_current_epoch_survive() -> None:
    directory = Directory(tiers=3)
    line = block(directory, bytes(32), GPU, HOST, DISK)
    directory.expire_replica(line, DISK)
    directory.move_authority(line, HOST)
    current = int(directory.epoch[line])
    assert [directory.replica(line, tier).stamp for tier in (GPU, HOST, DISK)] == [current, current, 0]
    # The index entry, a proxy of the block, is there as well and counts for nothing.
    assert directory.find(bytes(32)) == line
    assert directory.survivors(line) == 2
    assert directory.survivors_of(np.array([line, line])).tolist() == [2, 2]
    assert directory.survivors_of(np.array([line]), GPU).tolist() == [1]


def test_a_stale_host_copy_does_not_let_the_gpu_copy_go() -> None:
    directory = Directory(tiers=3)
    line = block(directory, bytes(32), GPU, HOST)
    directory.expire_replica(line, HOST)
    assert refusal(lambda: directory.drop_replica(line, GPU)) is Reason.SURVIVAL_VIOLATION
    assert refusal(lambda: directory.move_authority(line, HOST)) is Reason.STALE_AUTHORITY_EPOCH
    assert refusal(lambda: directory.lease(line, HOST)) is Reason.STALE_AUTHORITY_EPOCH
    assert directory.readable(line) and int(directory.tier[line]) == GPU


def test_a_copy_that_missed_an_authority_change_never_counts_again() -> None:
    directory = Directory(tiers=3)
    line = block(directory, bytes(32), GPU, HOST, DISK)
    directory.expire_replica(line, DISK)
    for tier in (HOST, GPU, HOST, GPU):
        directory.move_authority(line, tier)
        assert not directory.counts(line, DISK)
    assert directory.survivors(line) == 2


@pytest.mark.parametrize(
    ("copies", "dropped", "r_min", "last", "reason"),
    [
        pytest.param((GPU,), GPU, 1, False, Reason.SURVIVAL_VIOLATION, id="the-only-one"),
        pytest.param((GPU,), GPU, 1, True, None, id="the-only-one-of-a-droppable-block"),
        pytest.param((GPU, HOST), GPU, 1, False, Reason.SURVIVAL_VIOLATION, id="the-authority"),
        pytest.param((GPU, HOST), GPU, 1, True, Reason.SURVIVAL_VIOLATION, id="the-authority-of-a-droppable"),
        pytest.param((GPU, HOST), HOST, 1, False, None, id="a-second-copy"),
        pytest.param((GPU, HOST), HOST, 2, False, Reason.SURVIVAL_VIOLATION, id="r-min-two-of-two"),
        pytest.param((GPU, HOST, DISK), HOST, 2, False, None, id="r-min-two-of-three"),
        pytest.param(
            (GPU, HOST), HOST, 2, True, Reason.SURVIVAL_VIOLATION, id="last-is-not-for-second-copies"
        ),
    ],
)
def test_what_may_be_dropped(
    copies: tuple[int, ...], dropped: int, r_min: int, last: bool, reason: Reason | None
) -> None:
    directory = Directory(tiers=3)
    line = block(directory, bytes(32), *copies)
    if reason is None:
        directory.drop_replica(line, dropped, r_min=r_min, last=last)
        assert directory.replica(line, dropped).state is ReplicaState.ABSENT
        assert directory.readable(line) is (len(copies) > 1)
    else:
        assert refusal(lambda: directory.drop_replica(line, dropped, r_min=r_min, last=last)) is reason
        assert directory.survivors(line) == len(copies)
    directory.check()


def test_a_bad_authority_hands_over_to_the_fastest_good_copy_in_a_new_epoch() -> None:
    directory = Directory(tiers=3)
    line = block(directory, bytes(32), GPU, HOST, DISK)
    epoch = int(directory.epoch[line])
    assert directory.invalidate_replica(line, GPU) == 2
    assert (int(directory.tier[line]), int(directory.epoch[line])) == (HOST, epoch + 1)
    assert directory.invalidate_replica(line, DISK) == 1
    assert directory.invalidate_replica(line, HOST) == 0
    assert int(directory.tier[line]) == NO_TIER and not directory.readable(line)
    assert refusal(lambda: directory.lease(line, HOST)) is Reason.NOT_VISIBLE
    directory.check()


# Nothing visible before it is published, nothing after it is deleted.


def test_a_block_is_readable_from_its_first_publication_until_its_tombstone() -> None:
    directory = Directory(tiers=3)
    keys = keys_of(3)
    lines = [block(directory, bytes(key), HOST) for key in keys]
    assert directory.prefix(keys) == 3
    fresh = np.vstack((keys, keys_of(1, seed=9)))
    line = directory.insert_block(bytes(fresh[3]))
    assert directory.prefix(fresh) == 3 and not directory.readable(line)
    directory.add_replica(line, DISK, 1, 0, directory.issue_generation())
    assert directory.prefix(fresh) == 3 and refusal(lambda: directory.lease(line, DISK)) is Reason.NOT_VISIBLE
    directory.publish_replica(line, DISK)
    assert directory.prefix(fresh) == 4
    assert directory.published_prefix(fresh).tolist() == [*lines, line]
    directory.tombstone(lines[1])
    assert directory.prefix(fresh) == 1
    assert directory.find(bytes(keys[1])) == NO_LINE and directory.locate(bytes(keys[1])) == lines[1]


def test_a_tombstone_wins_over_a_copy_on_its_way() -> None:
    directory = Directory(tiers=3)
    line = block(directory, bytes(32), HOST)
    directory.add_replica(line, GPU, 1, 0, directory.issue_generation())
    generation = directory.tombstone(line)
    for late in (
        lambda: directory.publish_replica(line, GPU),
        lambda: directory.move_authority(line, HOST),
        lambda: directory.add_replica(line, DISK, 1, 0, 99),
        lambda: directory.lease(line, HOST),
        lambda: directory.claim(line, 4),
    ):
        assert refusal(late) is Reason.NOT_VISIBLE
    assert int(directory.tombstone_generation[line]) == generation
    assert refusal(lambda: directory.insert_block(bytes(32))) is Reason.IDENTITY_MISMATCH
    assert refusal(lambda: directory.remove(line)) is Reason.SURVIVAL_VIOLATION
    directory.drop_replica(line, HOST)
    directory.drop_replica(line, GPU)
    directory.remove(line)
    assert directory.find(bytes(32)) == NO_LINE
    directory.check()


def test_many_tombstones_are_those_of_each_line() -> None:
    one, many = Directory(tiers=3), Directory(tiers=3)
    keys = [bytes(key) for key in keys_of(40)]
    chunk = logical_id(3, 0, 0)
    for directory in (one, many):
        for number, key in enumerate(keys):
            block(directory, key, *((HOST,), (DISK,), (HOST, DISK), ())[number % 4])
        directory.insert(chunk, tier=HOST, slot=1, slot_generation=0, generation=1, state=ChunkState.SEALED)
        directory.keep_resident(HOST)
        assert directory.tombstone(4) > 0
    lines = np.array([0, 1, 2, 3, 4, 9, 22, 40], dtype=np.int64)
    assert many.logicals_of(lines).tolist() == [int(many.logical[line]) for line in lines.tolist()]
    last = max(one.tombstone(line) for line in lines.tolist())
    assert many.tombstone_many(lines) == many.tombstone_many(lines) == last
    assert many.state[:41].tolist() == one.state[:41].tolist()
    assert many.tombstone_generation[:41].tolist() == one.tombstone_generation[:41].tolist()
    assert many.resident == one.resident and len(many.resident) == 16
    assert many.issue_generation() == one.issue_generation()
    assert many.directory_generation == one.directory_generation
    assert [many.find(key) for key in keys] == [one.find(key) for key in keys]
    many.check()


@pytest.mark.parametrize("bad", [-1, 3, 1000, 2], ids=["negative", "unused", "far", "free"])
def test_many_tombstones_are_all_or_none(bad: int) -> None:
    directory = Directory(tiers=3)
    for key in keys_of(2):
        block(directory, bytes(key), HOST)
    directory.remove(directory.insert_block(bytes(32)))
    assert refusal(lambda: directory.tombstone_many(np.array([0, bad, 1]))) is Reason.MISS
    assert directory.state[:2].tolist() == [ChunkState.SEALED] * 2
    assert directory.tombstone_many(np.zeros(0, dtype=np.int64)) == 0


def test_a_reader_keeps_a_deleted_copy_until_it_ends() -> None:
    directory = Directory(tiers=3)
    line = block(directory, bytes(32), HOST)
    directory.lease(line, HOST)
    directory.tombstone(line)
    assert refusal(lambda: directory.drop_replica(line, HOST)) is Reason.LEASES_HELD
    directory.unlease(line, HOST)
    assert refusal(lambda: directory.unlease(line, HOST)) is Reason.GENERATION_NOT_OWNED
    directory.drop_replica(line, HOST)
    directory.remove(line)


def test_a_removed_blocks_id_never_names_its_successor() -> None:
    directory = Directory(tiers=1, capacity=1, lines=1)
    seen = set()
    for _ in range(50):
        line = block(directory, bytes(32), 0)
        seen.add(int(directory.logical[line]))
        directory.move_authority(line, 0)
        directory.drop_replica(line, 0, last=True)
        directory.remove(line)
    assert len(seen) == 50 and all(directory.line_of(one) is None for one in seen)
    assert {line_of_block(one) for one in seen} == {0}


def test_a_reused_line_starts_clean() -> None:
    directory = Directory(lines=1, tiers=1, capacity=1)
    line = directory.insert(
        logical_id(3, 0, 0), tier=0, slot=1, slot_generation=0, generation=1, state=ChunkState.SEALED
    )
    columns = ("readers", "credit", "recency", "write_txn", "reuse", "last_use", "cost", "rows", "checksum")
    for name in columns:
        getattr(directory, name)[line] = 9
    directory.producer[line] = directory.namespace[line] = 9
    directory.tombstone(line)
    directory.remove(line)
    assert directory.insert_block(bytes(32)) == line
    assert {name: float(getattr(directory, name)[line]) for name in columns} == dict.fromkeys(columns, 0.0)
    assert int(directory.tombstone_generation[line]) == 0
    assert (int(directory.producer[line]), int(directory.namespace[line])) == (-1, -1)
    assert int(directory.tier[line]) == NO_TIER and is_block_id(int(directory.logical[line]))
    assert directory.line_of(logical_id(3, 0, 0)) is None


def test_a_line_that_is_read_as_a_whole_is_not_evicted() -> None:
    directory = Directory(tiers=1)
    lines = [block(directory, bytes(key), 0) for key in keys_of(3)]
    directory.readers[np.array(lines[:2])] += 1
    assert directory.evictable(0).tolist() == lines[2:]
    assert refusal(lambda: directory.drop_replica(lines[0], 0, last=True)) is Reason.LEASES_HELD
    directory.readers[np.array(lines[:2])] -= 1
    assert directory.evictable(0).tolist() == lines


def test_a_line_whose_epochs_run_out_is_not_used_again() -> None:
    directory = Directory(tiers=1, capacity=2, lines=1)
    line = block(directory, bytes(32), 0)
    directory.drop_replica(line, 0, last=True)
    directory.epoch[line] = LAST_EPOCH
    directory.remove(line)
    assert directory.insert_block(bytes(32)) != line
    assert refusal(lambda: directory.insert_block(bytes([1]) * 32)) is Reason.NO_DESTINATION_CAPACITY


def test_ids_of_blocks_and_chunks_are_apart() -> None:
    assert is_block_id(block_id(0, 0)) and not is_block_id(logical_id((1 << 27) - 1, 4095, (1 << 23) - 1))
    assert block_id((1 << 30) - 1, (1 << 32) - 1) < 1 << 63
    assert line_of_block(block_id(12345, 678)) == 12345
    directory = Directory()
    chunk = directory.insert(
        logical_id(0, 0, 0), tier=0, slot=1, slot_generation=0, generation=1, state=ChunkState.OPEN
    )
    line = block(directory, bytes(32), 0)
    assert directory.line_of(logical_id(0, 0, 0)) == chunk != line
    assert directory.line_of(int(directory.logical[line])) == line
    assert directory.line_of(block_id(chunk, int(directory.epoch[chunk]))) is None


# Bounds.


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        pytest.param(lambda d: d.insert_block(b"short"), Reason.BAD_ARGUMENT, id="a-short-key"),
        pytest.param(lambda d: d.insert_block(bytes(32), rows=1 << 40), Reason.BAD_ARGUMENT, id="rows"),
        pytest.param(lambda d: d.insert_block(bytes(32), checksum=-1), Reason.BAD_ARGUMENT, id="checksum"),
        pytest.param(lambda d: d.find_many(np.zeros((2, 31), np.uint8)), Reason.BAD_ARGUMENT, id="key-shape"),
        pytest.param(lambda d: d.find_many(np.zeros((2, 32), np.int8)), Reason.BAD_ARGUMENT, id="key-type"),
        pytest.param(lambda d: d.replica(0, 0), Reason.MISS, id="no-such-line"),
        pytest.param(lambda d: d.lease(NO_LINE, 0), Reason.MISS, id="no-line"),
        pytest.param(lambda d: d.remove(7), Reason.MISS, id="remove-nothing"),
        pytest.param(lambda d: d.unlease(0, NO_TIER), Reason.BAD_ARGUMENT, id="no-tier"),
        pytest.param(lambda d: d.unlease(0, 4), Reason.BAD_ARGUMENT, id="one-tier-too-many"),
    ],
)
def test_bad_arguments_change_nothing(action: Callable[[Directory], object], reason: Reason) -> None:
    directory = Directory(tiers=4)
    assert refusal(lambda: action(directory)) is reason
    assert len(directory) == 0
    directory.check()
    assert directory.insert_block(bytes(32)) == 0


def test_a_slot_that_does_not_fit_is_refused() -> None:
    directory = Directory()
    line = directory.insert_block(bytes(32))
    assert refusal(lambda: directory.add_replica(line, 0, 1 << 31, 0, 1)) is Reason.BAD_ARGUMENT
    assert directory.replica(line, 0).state is ReplicaState.ABSENT


def test_more_readers_than_can_be_counted_are_refused() -> None:
    directory = Directory()
    line = block(directory, bytes(32), 0)
    directory.replicas.tiers[0].leases.cells[line] = 65535
    assert refusal(lambda: directory.lease(line, 0)) is Reason.QUEUE_FULL
    assert directory.leases(line, 0) == 65535


def test_a_full_directory_refuses_and_goes_on_after_a_removal() -> None:
    directory = Directory(lines=1, capacity=500)
    keys = keys_of(501)
    for key in keys[:500]:
        directory.insert_block(bytes(key))
    assert refusal(lambda: directory.insert_block(bytes(keys[500]))) is Reason.NO_DESTINATION_CAPACITY
    directory.remove(directory.find(bytes(keys[123])))
    directory.insert_block(bytes(keys[500]))
    assert directory.find_many(keys).tolist().count(NO_LINE) == 1
    directory.check()


def test_keys_made_to_collide_are_refused_when_their_shard_is_full() -> None:
    directory = Directory(capacity=6000)

    def crafted(number: int) -> bytes:
        """The same shard for all: the hash's upper half is zero."""
        return (number * 1_000_003).to_bytes(4, "little") + bytes(28)

    for number in range(3840):
        directory.insert_block(crafted(number))
    extra = crafted(3840)
    assert refusal(lambda: directory.insert_block(extra)) is Reason.NO_DESTINATION_CAPACITY
    assert (
        refusal(
            lambda: directory.restore_blocks(
                np.frombuffer(extra, np.uint8).reshape(1, 32),
                tier=0,
                slots=np.zeros(1, np.int64),
                slot_generations=np.zeros(1, np.int64),
            )
        )
        is Reason.NO_DESTINATION_CAPACITY
    )
    assert len(directory) == 3840 and directory.find(extra) == NO_LINE
    assert all(directory.find(crafted(number)) == number for number in range(3840))
    assert directory.insert_block(bytes([255]) * 32) >= 0
    directory.check()


# A broken directory is noticed.


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        pytest.param(lambda d, n: d.tier.__setitem__(n, 1), "stale authority", id="authority-elsewhere"),
        pytest.param(lambda d, n: d.tier.__setitem__(n, -1), "no authority", id="authority-lost"),
        pytest.param(lambda d, n: d.state.__setitem__(n, 0), "in use", id="state-lost"),
        pytest.param(lambda d, n: d.epoch.__setitem__(n, 0), "before their birth", id="epoch-back"),
        pytest.param(
            lambda d, n: d.replicas.tiers[1].leases.cells.__setitem__(n, 1),
            "readers of no copy",
            id="readers",
        ),
        pytest.param(
            lambda d, n: d.replicas.tiers[0].stamp.cells.__setitem__(n, 99), "future epoch", id="stamp"
        ),
        pytest.param(lambda d, n: d.replicas.counts.__setitem__(0, 5), "not 5", id="count"),
        pytest.param(
            lambda d, n: d._index.remove(int.from_bytes(bytes(8), "little"), n), "key index", id="index"
        ),
    ],
)
def test_a_broken_directory_is_noticed(harm: Callable[[Directory, int], object], words: str) -> None:
    directory = Directory(tiers=2)
    line = block(directory, bytes(32), 0)
    directory.check()
    harm(directory, line)
    with pytest.raises(AssertionError, match=words):
        directory.check()
