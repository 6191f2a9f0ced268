"""Copies found bad, and first copies: what is never read again, and what is visible when."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtier_core.directory import NO_TIER, ReplicaState
from kvtier_core.errors import CoreError, Reason
from kvtier_core.tiers.transfer import Landing
from kvtier_core.transactions.reasons import MoveKind, MoveReason, MoveRefused
from tests.unit.core.txnbench import CPU, GPU, NVME, BlockBench, block_key, content


@pytest.fixture
def bench() -> BlockBench:
    return BlockBench()


def refused(reason: MoveReason, call: Callable[[], object]) -> MoveRefused:
    with pytest.raises(MoveRefused) as error:
        call()
    assert error.value.code is reason
    return error.value


# Copies found bad.


def test_a_flipped_source_is_refused_and_never_read_again(bench: BlockBench) -> None:
    line = bench.spread(1, NVME, CPU)
    bench.spoil(line, NVME)
    bench.fly(line, GPU, source_tier=NVME, keep_source=True)
    (settled,) = bench.settle()
    assert (settled.reason, settled.lost) == (MoveReason.CHECKSUM_MISMATCH, False)
    # The other copy takes over, and the bad one's slot is free again.
    assert bench.directory.tier[line] == CPU
    assert bench.directory.replica(line, NVME).state is ReplicaState.ABSENT
    bench.fly(line, GPU, keep_source=True)
    (again,) = bench.settle()
    assert again.reason is MoveReason.READY and again.move.source_tier == CPU
    bench.check()
    assert bench.at_rest()


def test_lmcache_1313_a_block_whose_only_copy_is_bad_is_a_miss(bench: BlockBench) -> None:
    line = bench.put(1, NVME)
    bench.spoil(line, NVME)
    bench.fly(line, CPU)
    (settled,) = bench.settle()
    assert (settled.reason, settled.lost) == (MoveReason.CHECKSUM_MISMATCH, True)
    assert bench.directory.find(block_key(1)) == -1
    bench.check()
    assert bench.at_rest()
    assert bench.put(1, CPU) >= 0


def test_a_flip_in_memory_is_found_when_it_is_written_down(bench: BlockBench) -> None:
    line = bench.spread(1, CPU, GPU)
    bench.spoil(line, CPU)
    bench.fly(line, NVME, source_tier=CPU)
    (settled,) = bench.settle()
    assert settled.reason is MoveReason.CHECKSUM_MISMATCH
    assert bench.directory.replica(line, CPU).state is ReplicaState.ABSENT
    assert bench.directory.tier[line] == GPU
    bench.check()


def test_a_bad_copy_that_is_being_read_waits_for_its_readers(bench: BlockBench) -> None:
    line = bench.spread(1, CPU, NVME)
    bench.directory.lease(line, CPU)
    assert bench.moves.condemn(line, CPU) == 1
    bench.moves.reap()
    assert bench.moves.condemned() == ((line, CPU),)
    refused(MoveReason.MISS, lambda: bench.moves.begin(MoveKind.PROMOTE, line, GPU, source_tier=CPU))
    bench.directory.unlease(line, CPU)
    bench.moves.reap()
    assert bench.moves.condemned() == ()
    assert bench.directory.replica(line, CPU).state is ReplicaState.ABSENT
    bench.check()


# Stores.


def test_lmcache_207_a_key_that_is_read_while_its_write_runs_is_not_there(bench: BlockBench) -> None:
    """A store is visible when it is published and not before."""
    line = bench.insert(1)
    move = bench.moves.begin(MoveKind.STORE, line, NVME)
    payload = Landing(memoryview(bytearray(content(1))))
    assert bench.moves.start([move], {move.id: payload}) == []
    assert not bench.directory.readable(line)
    bench.held(move).arrive()
    assert not bench.directory.readable(line)
    bench.moves.reap()
    assert bench.directory.readable(line) and bench.directory.tier[line] == NVME
    bench.held(move).drain()
    bench.moves.reap()
    bench.check()
    assert bench.at_rest()


def test_a_store_without_its_bytes_starts_nothing(bench: BlockBench) -> None:
    line = bench.insert(1)
    (settled,) = bench.moves.start([bench.moves.begin(MoveKind.STORE, line, NVME)])
    assert settled.reason is MoveReason.MISS
    assert bench.directory.tier[line] == NO_TIER and bench.at_rest()


def test_lmcache_l1_aba_a_stale_writer_does_not_publish_another_writers_buffer(bench: BlockBench) -> None:
    """Writer 1 reserves and is discarded; writer 2 reserves the same key; writer 1 says that it is done."""
    line = bench.insert(1)
    first = bench.moves.begin(MoveKind.STORE, line, CPU)
    bench.moves.cancel(first)
    second = bench.moves.begin(MoveKind.STORE, line, CPU)
    assert first.destination.slot == second.destination.slot
    refused(MoveReason.CANCELLED, lambda: bench.moves.seal(first, int(bench.directory.checksum[line])))
    assert not bench.directory.readable(line)
    bench.tiers[CPU].landing(second.destination).body[:] = content(1)
    bench.moves.seal(second, int(bench.directory.checksum[line]))
    assert bench.serve(line, CPU) == content(1)
    bench.check()


def test_a_store_of_a_deleted_block_is_refused_at_publication(bench: BlockBench) -> None:
    line = bench.insert(1)
    move = bench.moves.begin(MoveKind.STORE, line, CPU)
    bench.directory.tombstone(line)
    refused(MoveReason.TOMBSTONED, lambda: bench.moves.seal(move, 1))
    bench.check()
    assert bench.at_rest()


def test_an_error_of_the_tier_at_publication_is_typed_and_gives_all_back(bench: BlockBench) -> None:
    line = bench.put(1, CPU)
    move = bench.fly(line, NVME)
    bench.held(move).arrive()

    def broken(ref: object) -> None:
        raise CoreError(Reason.NOT_VISIBLE, "the stream has not come so far")

    bench.tiers[NVME].publish = broken  # type: ignore[method-assign]
    (settled,) = bench.moves.reap()
    assert settled.reason is MoveReason.NOT_VISIBLE
    bench.held(move).drain()
    bench.moves.reap()
    bench.check()
    assert bench.at_rest()
