"""Asynchronous moves, guard by guard and race by race: what happens when a copy fails, is late, or is not
ours."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from kvtier_core.directory import ChunkState, ReplicaState
from kvtier_core.errors import Reason
from kvtier_core.tiers.slots import SlotState
from kvtier_core.transactions.flights import OrphanPolicy
from kvtier_core.transactions.moves import Binding, Move, completion_of
from kvtier_core.transactions.reasons import MoveKind, MoveReason, MoveRefused, TxnState
from tests.unit.core.txnbench import CPU, GPU, NVME, BlockBench, block_key, content


@pytest.fixture
def bench() -> BlockBench:
    return BlockBench()


def refused(reason: MoveReason, call: Callable[[], object]) -> MoveRefused:
    with pytest.raises(MoveRefused) as error:
        call()
    assert error.value.code is reason
    return error.value


# The whole way.


@pytest.mark.parametrize("path", [(CPU, NVME), (CPU, GPU), (NVME, CPU), (NVME, GPU), (GPU, NVME)], ids=str)
@pytest.mark.parametrize("keep", [False, True], ids=["moved", "copied"])
def test_a_block_arrives_whole_and_the_source_stays_until_then(
    bench: BlockBench, path: tuple[int, int], keep: bool
) -> None:
    source, tier = path
    line = bench.put(1, source)
    epoch = int(bench.directory.epoch[line])
    move = bench.fly(line, tier, keep_source=keep)
    assert bench.directory.tier[line] == source and bench.directory.counts(line, source)
    assert not bench.directory.counts(line, tier)
    bench.check()
    bench.held(move).arrive()
    (settled,) = bench.moves.reap()
    assert settled.reason is MoveReason.READY and bench.directory.counts(line, tier)
    assert bench.serve(line, tier) == content(1)
    # Not drained yet: the source is still held, and the move still open.
    assert bench.directory.leases(line, source) == 1 and bench.moves.open_moves()
    bench.check()
    bench.held(move).drain()
    assert bench.moves.reap() == []
    assert bench.directory.counts(line, source) is keep
    takes = not (keep and move.kind is MoveKind.PROMOTE)
    assert bench.directory.tier[line] == (tier if takes else source)
    assert int(bench.directory.epoch[line]) == epoch + takes
    bench.check()
    assert bench.at_rest()


def test_storage_to_device_without_memory_of_its_own_has_no_legal_path() -> None:
    bench = BlockBench(gpu_memory=False)
    line = bench.put(1, NVME)
    move = bench.begin(line, GPU)
    (settled,) = bench.moves.start([move])
    assert settled.reason is MoveReason.NO_LEGAL_PATH
    bench.check()
    assert bench.at_rest()
    # By way of a tier that both reach (A.7).
    bench.fly(line, CPU, keep_source=True)
    bench.settle()
    bench.fly(line, GPU, source_tier=CPU, keep_source=True)
    bench.settle()
    assert bench.serve(line, GPU) == content(1)


def test_vllm_38460_neighbours_go_to_a_tier_in_one_batch(bench: BlockBench) -> None:
    """One submission carries them all, not one for each block."""
    lines = [bench.put(name, CPU) for name in range(3)]
    moves = [bench.begin(line, NVME) for line in lines]
    bench.tiers[NVME].batches.clear()
    assert bench.moves.start(moves) == []
    assert bench.tiers[NVME].batches == [3]
    assert {item.reason for item in bench.settle()} == {MoveReason.READY}


# Guards before a move, in order.


def test_d1_and_p1_guards_in_order(bench: BlockBench) -> None:
    line = bench.put(1, CPU)
    directory = bench.directory
    for name in (2, 3, 4, 5):
        bench.put(name, NVME)
    down = lambda: bench.moves.begin(MoveKind.DEMOTE, line, NVME)  # noqa: E731
    up = lambda: bench.moves.begin(MoveKind.PROMOTE, line, GPU, now=10.0, deadline=11.0)  # noqa: E731
    for name in (6, 7, 8):
        bench.put(name, GPU)
    able = [tier.capability for tier in bench.tiers]
    directory.state[line] = ChunkState.OPEN
    directory.write_txn[line] = 9
    for tier in bench.tiers:
        tier.capability = dataclasses.replace(tier.capability, dma_destination=False)
    bench.facts.untrusted = {GPU, NVME}
    bench.facts.duration = 2.0
    bench.credits.limit = 0
    for begin in (down, up):
        refused(MoveReason.UNCOMMITTED_ROWS, begin)
    directory.state[line] = ChunkState.SEALED
    for begin in (down, up):
        refused(MoveReason.WRITE_TXN_BUSY, begin)
    directory.write_txn[line] = 0
    refused(MoveReason.TIER_INCAPABLE, down)
    refused(MoveReason.NO_LEGAL_PATH, up)
    for tier, capability in zip(bench.tiers, able, strict=True):
        tier.capability = dataclasses.replace(capability, codecs=frozenset({"other"}))
    refused(MoveReason.TIER_INCAPABLE, down)
    refused(MoveReason.NO_LEGAL_PATH, up)
    for tier, capability in zip(bench.tiers, able, strict=True):
        tier.capability = capability
    refused(MoveReason.TIER_INCAPABLE, down)
    refused(MoveReason.NO_LEGAL_PATH, up)
    bench.facts.untrusted = set()
    refused(MoveReason.NO_DESTINATION_CAPACITY, down)
    refused(MoveReason.DEADLINE, up)
    bench.facts.duration = 1.0
    refused(MoveReason.NO_STAGING, up)
    for victim in (2, 6):
        tier = NVME if victim == 2 else GPU
        assert bench.moves.drop(bench.directory.find(block_key(victim)), tier, last=True)
    refused(MoveReason.CREDIT_PRESSURE, up)
    # D2: a demotion asks for its link when it is submitted, and stays reserved without it.
    move = down()
    short = refused(MoveReason.CREDIT_PRESSURE, lambda: bench.moves.submit(move))
    assert short.facts["retry_after_ms"] == "5"
    assert move.state is TxnState.RESERVED
    bench.check()
    bench.credits.limit = 1
    bench.moves.cancel(move)
    assert up().state is TxnState.RESERVED
    bench.check()


def test_p1_wants_a_source_that_counts(bench: BlockBench) -> None:
    empty = bench.insert(1)
    refused(MoveReason.MISS, lambda: bench.moves.begin(MoveKind.PROMOTE, empty, GPU))
    line = bench.spread(2, CPU, NVME)
    bench.directory.expire_replica(line, CPU)
    refused(
        MoveReason.STALE_AUTHORITY_EPOCH,
        lambda: bench.moves.begin(MoveKind.PROMOTE, line, GPU, source_tier=CPU),
    )
    assert bench.moves.begin(MoveKind.PROMOTE, line, GPU).source_tier == NVME
    bench.directory.tombstone(line)
    refused(MoveReason.TOMBSTONED, lambda: bench.moves.begin(MoveKind.PROMOTE, line, GPU))


# Guards when a copy ends.


def _cache(bench: BlockBench, move: Move) -> None:
    bench.moves.cache_generation += 1


def _tenant(bench: BlockBench, move: Move) -> None:
    bench.facts.bindings[move.line] = Binding(namespace=7)


def _position(bench: BlockBench, move: Move) -> None:
    bench.facts.bindings[move.line] = Binding(position_contract=b"other")


def _layout(bench: BlockBench, move: Move) -> None:
    tier = bench.tiers[move.tier]
    tier.capability = dataclasses.replace(tier.capability, layouts=frozenset())


def _epoch(bench: BlockBench, move: Move) -> None:
    bench.directory.epoch[move.line] += 1


def _request(bench: BlockBench, move: Move) -> None:
    bench.facts.requests[5] = 2


def _tombstone(bench: BlockBench, move: Move) -> None:
    bench.directory.tombstone(move.line)


BREAKS = [
    (_tombstone, MoveReason.TOMBSTONED),
    (_cache, MoveReason.STALE_CACHE_GENERATION),
    (_layout, MoveReason.CODEC_OR_LAYOUT_MISMATCH),
    (_position, MoveReason.POSITION_CONTRACT_MISMATCH),
    (_tenant, MoveReason.TENANT_MISMATCH),
    (_request, MoveReason.REQUEST_STALE),
    (_epoch, MoveReason.STALE_AUTHORITY_EPOCH),
]


@pytest.mark.parametrize(("spoil", "reason"), BREAKS, ids=[reason.value for _, reason in BREAKS])
@pytest.mark.parametrize("kind", [MoveKind.PROMOTE, MoveKind.DEMOTE])
def test_a_guard_that_fails_when_the_copy_ends_leaves_the_source_as_it_was(
    bench: BlockBench, kind: MoveKind, spoil: Callable[[BlockBench, Move], None], reason: MoveReason
) -> None:
    bench.facts.requests[5] = 1
    line = bench.put(1, CPU)
    move = bench.fly(line, GPU if kind is MoveKind.PROMOTE else NVME, request=5, request_generation=1)
    spoil(bench, move)
    bench.held(move).arrive()
    (settled,) = bench.moves.reap()
    assert settled.reason is reason and move.state is TxnState.DEAD
    assert settled.event == (f"DEMOTION_FAILED({reason.value})" if kind is MoveKind.DEMOTE else reason.value)
    assert bench.directory.replica(line, move.tier).state is ReplicaState.ABSENT
    assert bench.tiers[move.tier].slots.state(move.destination) is SlotState.QUARANTINED
    bench.held(move).drain()
    assert bench.moves.reap() == []
    assert bench.at_rest()
    assert bench.serve(line, CPU) == content(1)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [item for item in BREAKS if item[0] is not _layout],
    ids=[reason.value for spoil, reason in BREAKS if spoil is not _layout],
)
def test_a_guard_that_fails_between_validation_and_publication_publishes_nothing(
    bench: BlockBench, spoil: Callable[[BlockBench, Move], None], reason: MoveReason
) -> None:
    bench.facts.requests[5] = 1
    line = bench.put(1, CPU)
    move = bench.fly(line, NVME, request=5, request_generation=1)
    item = bench.held(move)
    item.arrive()
    bench.moves.complete(completion_of(move, move.identity.length))
    assert move.state is TxnState.VALIDATED
    spoil(bench, move)
    refused(reason, lambda: bench.moves.publish(move))
    assert bench.directory.replica(line, NVME).state is ReplicaState.ABSENT
    item.drain()
    bench.moves.reap()
    assert bench.at_rest()
    assert bench.serve(line, CPU) == content(1)


def test_the_first_guard_that_fails_gives_the_reason(bench: BlockBench) -> None:
    """Tombstone before cache generation before the copy's own error before what it is bound to."""
    for count, reason in (
        (4, MoveReason.TOMBSTONED),
        (3, MoveReason.STALE_CACHE_GENERATION),
        (2, MoveReason.SHORT_COPY),
        (1, MoveReason.TENANT_MISMATCH),
    ):
        line = bench.put(count, CPU)
        move = bench.fly(line, NVME)
        item = bench.held(move)
        if count >= 4:
            bench.directory.tombstone(line)
        if count >= 3:
            bench.moves.cache_generation += 1
        if count >= 2:
            item.fail(Reason.SHORT_COPY)
        else:
            item.arrive()
        bench.facts.bindings[line] = Binding(namespace=9)
        (settled,) = bench.moves.reap()
        assert settled.reason is reason
        item.drain()
        bench.moves.reap()
        if count < 4:
            assert bench.moves.drop(line, CPU, last=True)
        else:
            bench.moves.discard(line)
            bench.directory.remove(line)
        bench.facts.bindings.clear()


FAILURES = [
    (Reason.SHORT_COPY, MoveReason.SHORT_COPY, MoveReason.SHORT_COPY),
    (Reason.STORAGE_UNAVAILABLE, MoveReason.STORAGE_UNAVAILABLE, MoveReason.STORAGE_UNAVAILABLE),
    (Reason.INTERNAL, MoveReason.TRANSFER_FAILED, MoveReason.TRANSFER_FAILED),
    (Reason.DEADLINE, MoveReason.FETCH_LATE, MoveReason.TRANSFER_TIMEOUT),
]


@pytest.mark.parametrize(("error", "up", "down"), FAILURES, ids=[error.value for error, _, _ in FAILURES])
@pytest.mark.parametrize("kind", [MoveKind.PROMOTE, MoveKind.DEMOTE])
def test_a_copy_that_fails_costs_nothing_but_time(
    bench: BlockBench, kind: MoveKind, error: Reason, up: MoveReason, down: MoveReason
) -> None:
    line = bench.put(1, CPU)
    move = bench.fly(line, GPU if kind is MoveKind.PROMOTE else NVME)
    item = bench.held(move)
    item.fail(error)
    (settled,) = bench.moves.reap()
    assert settled.reason is (up if kind is MoveKind.PROMOTE else down) and not settled.lost
    bench.check()
    assert bench.tiers[move.tier].slots.state(move.destination) is SlotState.QUARANTINED
    # The device did not stop: its bytes land in a slot that is nobody's.
    item.spill()
    item.drain()
    bench.moves.reap()
    bench.check()
    assert bench.at_rest()
    again = bench.fly(line, move.tier)
    bench.settle()
    assert again.state is TxnState.RELEASED


# B.3: cancellation, late and repeated completions.


@pytest.mark.parametrize("when", ["reserved", "copying", "arrived", "failed"])
def test_cancel_at_every_state_gives_back_once(bench: BlockBench, when: str) -> None:
    line = bench.put(1, CPU)
    before = list(bench.credits.slots)
    move = bench.begin(line, NVME) if when == "reserved" else bench.fly(line, NVME)
    item = None if when == "reserved" else bench.held(move)
    if item is not None and when == "arrived":
        item.arrive()
    if item is not None and when == "failed":
        item.fail()
    bench.moves.cancel(move)
    bench.moves.cancel(move)
    assert move.state is TxnState.DEAD
    bench.check()
    if item is not None:
        assert bench.tiers[NVME].slots.state(move.destination) is SlotState.QUARANTINED
        assert bench.directory.leases(line, CPU) == 1
        assert bench.moves.reap() == []
        item.land()
        item.again()
    for _ in range(2):
        assert bench.moves.reap() == []
    bench.check()
    assert bench.at_rest() and bench.credits.slots == before
    assert bench.moves.counts[("demote", "CANCELLED")] == 1


def test_a_published_move_is_not_cancelled(bench: BlockBench) -> None:
    line = bench.put(1, CPU)
    move = bench.fly(line, NVME)
    bench.held(move).arrive()
    bench.moves.reap()
    refused(MoveReason.GENERATION_NOT_OWNED, lambda: bench.moves.cancel(move))


def test_b3_01_a_completion_of_a_former_life_of_the_slot_touches_nothing(bench: BlockBench) -> None:
    """R1 is cancelled and drained, its slot becomes R2's; R1's completion comes again, matched in slot
    only."""
    bench = BlockBench((3, 3, 1))
    one, two = bench.put(1, CPU), bench.put(2, CPU)
    first = bench.fly(one, NVME)
    late = bench.held(first)
    bench.moves.cancel(first)
    refused(MoveReason.NO_DESTINATION_CAPACITY, lambda: bench.begin(two, NVME))
    late.land()
    bench.moves.reap()
    second = bench.fly(two, NVME)
    assert second.destination.slot == first.destination.slot
    assert completion_of(second, 0).slot == completion_of(first, 0).slot
    assert completion_of(second, 0) != completion_of(first, 0)
    late.again()
    late.sink.drained(late.index)
    assert bench.moves.reap() == []
    assert second.state is TxnState.COPYING
    assert bench.moves.ignored == {"cancelled": 1, "unknown": 2}
    bench.check()
    (settled,) = bench.settle()
    assert (settled.move, settled.reason) == (second, MoveReason.READY)
    assert bench.serve(two, NVME) == content(2)


@pytest.mark.parametrize("field", ["slot", "slot_generation", "owner", "transfer_generation"])
def test_mooncake_3030_a_completion_matches_the_whole_tuple_or_nothing(bench: BlockBench, field: str) -> None:
    """A completion that names this transaction but another copy is refused, and the transaction goes on."""
    line = bench.put(1, CPU)
    move = bench.fly(line, NVME)
    true = completion_of(move, move.identity.length)
    forged = dataclasses.replace(true, **{field: getattr(true, field) + 1})
    reason = {
        "slot": MoveReason.RECYCLED_DESTINATION,
        "slot_generation": MoveReason.RECYCLED_DESTINATION,
        "owner": MoveReason.IDENTITY_MISMATCH,
        "transfer_generation": MoveReason.TRANSFER_STALE,
    }[field]
    refused(reason, lambda: bench.moves.complete(forged))
    assert move.state is TxnState.COPYING
    (settled,) = bench.settle()
    assert settled.reason is MoveReason.READY


def test_h3_two_completions_of_one_job_count_once(bench: BlockBench) -> None:
    line = bench.put(1, CPU)
    move = bench.fly(line, NVME)
    item = bench.held(move)
    item.arrive()
    item.again()
    assert len(bench.moves.reap()) == 1
    item.drain()
    item.sink.drained(item.index)
    item.again()
    bench.moves.reap()
    assert bench.moves.ignored == {"repeated": 3}
    item.again()
    bench.moves.reap()
    assert bench.moves.ignored == {"repeated": 3, "unknown": 1}
    bench.check()
    assert bench.at_rest()


def test_a_reset_makes_older_completions_nobodys(bench: BlockBench) -> None:
    line = bench.put(1, CPU)
    move = bench.fly(line, NVME)
    old = bench.held(move)
    assert [item.move for item in bench.moves.reset()] == [move]
    again = bench.fly(line, NVME)
    assert again.transfer_generation > move.transfer_generation
    old.land()
    assert bench.moves.reap() == []
    (settled,) = bench.settle()
    assert settled.move is again and settled.reason is MoveReason.READY
    bench.check()
    assert bench.at_rest()


# D4 and survival.


def test_the_old_copy_waits_for_its_readers_and_is_released_by_reap(bench: BlockBench) -> None:
    line = bench.put(1, CPU)
    bench.directory.lease(line, CPU)
    move = bench.fly(line, NVME)
    (settled,) = bench.settle()
    assert settled.reason is MoveReason.READY and move.state is TxnState.PUBLISHED
    refused(MoveReason.LEASES_HELD, lambda: bench.moves.release(move))
    bench.check()
    bench.directory.unlease(line, CPU)
    bench.moves.reap()
    assert move.state is TxnState.RELEASED
    assert bench.directory.replica(line, CPU).state is ReplicaState.ABSENT
    assert bench.at_rest()


def test_r_min_2_keeps_the_source_of_a_demotion(bench: BlockBench) -> None:
    bench = BlockBench(survival=2)
    line = bench.put(1, CPU)
    bench.fly(line, NVME)
    bench.settle()
    assert bench.directory.survivors(line) == 2
    for tier in (CPU, NVME):
        refused(MoveReason.SURVIVAL_VIOLATION, lambda tier=tier: bench.moves.drop(line, tier))
    bench.fly(line, GPU, keep_source=True)
    bench.settle()
    assert not bench.moves.drop(line, CPU)
    assert bench.directory.survivors(line) == 2
    bench.check()


def test_the_last_copy_is_dropped_only_when_it_may_be_lost(bench: BlockBench) -> None:
    line = bench.put(1, CPU)
    refused(MoveReason.SURVIVAL_VIOLATION, lambda: bench.moves.drop(line, CPU))
    assert bench.moves.drop(line, CPU, last=True)
    assert bench.directory.find(block_key(1)) < 0
    bench.check()


def test_dropping_the_authority_hands_it_to_the_slowest_copy(bench: BlockBench) -> None:
    line = bench.spread(1, NVME, CPU, GPU)
    assert bench.directory.tier[line] == NVME
    bench.moves.drop(line, NVME)
    assert bench.directory.tier[line] == CPU
    assert bench.directory.survivors(line) == 2
    bench.check()


@pytest.mark.parametrize("held", ["lease", "txn"])
def test_a_held_copy_is_not_dropped(bench: BlockBench, held: str) -> None:
    line = bench.spread(1, CPU, NVME)
    if held == "lease":
        bench.directory.lease(line, CPU)
        refused(MoveReason.WOULD_EVICT_PINNED, lambda: bench.moves.drop(line, CPU))
    else:
        bench.fly(line, GPU, keep_source=True)
        refused(MoveReason.WRITE_TXN_BUSY, lambda: bench.moves.drop(line, CPU))
    bench.check()


# P7, D6: deadlines.


@pytest.mark.parametrize("policy", list(OrphanPolicy))
def test_p7_a_late_fetch_lands_as_a_replica_or_not_at_all(policy: OrphanPolicy) -> None:
    bench = BlockBench(late=policy)
    line = bench.put(1, NVME)
    move = bench.fly(line, CPU, deadline=5.0, keep_source=True)
    assert bench.moves.expire(4.9) == []
    (late,) = bench.moves.expire(5.0)
    assert (late.reason, late.late) == (MoveReason.FETCH_LATE, True)
    assert bench.moves.expire(6.0) == []
    item = bench.held(move)
    item.land()
    settled = bench.moves.reap()
    if policy is OrphanPolicy.KEEP:
        assert [(found.reason, found.late) for found in settled] == [(MoveReason.READY, True)]
        assert bench.serve(line, CPU) == content(1)
    else:
        assert settled == [] and bench.directory.replica(line, CPU).state is ReplicaState.ABSENT
    bench.check()
    assert bench.at_rest()


def test_d6_a_demotion_past_its_deadline_dies_and_its_slot_waits(bench: BlockBench) -> None:
    line = bench.put(1, CPU)
    move = bench.fly(line, NVME, deadline=5.0)
    (settled,) = bench.moves.expire(5.0)
    assert settled.event == "DEMOTION_FAILED(TRANSFER_TIMEOUT)"
    assert bench.tiers[NVME].slots.state(move.destination) is SlotState.QUARANTINED
    bench.held(move).spill()
    bench.check()
    bench.held(move).land()
    bench.moves.reap()
    assert bench.at_rest()


# Starting.


def test_a_full_queue_refuses_before_anything_starts(bench: BlockBench) -> None:
    lines = [bench.put(name, CPU) for name in (1, 2)]
    bench.tiers[NVME].queue = 1
    moves = [bench.begin(line, NVME) for line in lines]
    settled = bench.moves.start(moves)
    assert [item.reason for item in settled] == [MoveReason.QUEUE_FULL] * 2
    bench.check()
    assert bench.at_rest()
    assert bench.moves.start([bench.begin(lines[0], NVME)]) == []


def test_credits_come_back_when_the_bytes_are_drained(bench: BlockBench) -> None:
    bench.credits.limit = 1
    one, two = bench.put(1, CPU), bench.put(2, CPU)
    first, second = bench.begin(one, NVME), bench.begin(two, NVME)
    (settled,) = bench.moves.start([first, second])
    assert (settled.move, settled.reason) == (second, MoveReason.CREDIT_PRESSURE)
    item = bench.held(first)
    item.arrive()
    bench.moves.reap()
    assert len(bench.credits.links) == 1
    item.drain()
    bench.moves.reap()
    assert bench.credits.links == {}
