"""Deletion: refused at once, drained, erased everywhere, and true after a crash at any step."""

from __future__ import annotations

import pytest

from kvtier_core.directory import NO_LINE, ChunkState
from kvtier_core.errors import CoreError, Reason
from kvtier_core.tiers.transfer import EraseItem, Landing
from kvtier_core.transactions.deletion import (
    DeletionState,
    EntryKind,
)
from kvtier_core.transactions.erasing import TierEraser
from kvtier_core.transactions.flights import Asker, FlightKey
from kvtier_core.transactions.reasons import MoveKind, MoveReason, MoveRefused, TxnState
from tests.unit.core.txnbench import CPU, GPU, NVME, SIZE, BlockBench, block_key, content
from tests.unit.core.txnoffice import SPACE, Office


@pytest.fixture
def office() -> Office:
    return Office()


def test_a_block_goes_from_every_tier_and_the_receipt_says_so(office: Office) -> None:
    line = office.bench.spread(1, CPU, GPU, NVME)
    slots = [(tier, office.bench.slot(line, tier).slot) for tier in (GPU, CPU, NVME)]
    deletion = office.deletions.delete(block_key(1))
    assert not office.found(1)
    assert office.pump() == [deletion]
    assert deletion.state is DeletionState.DONE
    assert office.kinds() == [EntryKind.INTENT, EntryKind.RECEIPT]
    assert office.paper.entries[1].tiers == ("hbm", "ram", "flash")
    for tier, slot in slots:
        assert bytes(office.bench.tiers[tier].data[slot]) == bytes(SIZE)
    assert office.bench.directory.locate(block_key(1)) == NO_LINE
    office.bench.check()
    assert office.bench.at_rest() and office.bench.credits.slots == [0, 0, 0]
    # The key is free again, under another generation.
    assert office.bench.put(1, CPU, version=1) >= 0


def test_nothing_is_erased_before_the_intent_is_durable(office: Office) -> None:
    line = office.bench.put(1, CPU)
    office.paper.held = []
    deletion = office.deletions.delete(block_key(1))
    assert not office.found(1)
    office.pump()
    assert deletion.state is DeletionState.INTENDING and office.shredder.asked == []
    assert office.bench.serve(line, CPU) == content(1)
    (write,) = office.paper.held
    office.paper.held = None
    write()
    assert office.pump() == [deletion]


def test_the_line_is_kept_until_the_receipt_is_durable(office: Office) -> None:
    line = office.bench.put(1, CPU)
    office.deletions.delete(block_key(1))
    office.paper.held = []
    office.pump()
    assert office.bench.directory.state[line] == ChunkState.TOMBSTONED
    assert office.bench.tiers[CPU].slots.used == 0
    with pytest.raises(CoreError) as refused:
        office.bench.insert(1)
    assert refused.value.reason is Reason.IDENTITY_MISMATCH
    for write in office.paper.held:
        write()
    assert len(office.pump()) == 1
    assert office.bench.directory.locate(block_key(1)) == NO_LINE


def test_h3_deletion_with_leases_waits_for_the_readers(office: Office) -> None:
    line = office.bench.put(1, CPU)
    pin = office.pins.hold([line], CPU)
    deletion = office.deletions.delete(block_key(1))
    assert office.pump() == []
    assert deletion.state is DeletionState.DRAINING
    assert office.bench.serve(line, CPU) == content(1) and office.shredder.asked == []
    pin.close()
    assert office.pump() == [deletion]


def test_h3_deletion_racing_promotion_the_tombstone_wins(office: Office) -> None:
    bench = office.bench
    line = bench.put(1, NVME)
    move = bench.fly(line, CPU, keep_source=True)
    item = bench.held(move)
    deletion = office.deletions.delete(block_key(1))
    assert move.state is TxnState.DEAD and move.reason is MoveReason.TOMBSTONED
    assert office.pump() == [] and office.shredder.asked == []
    # The bytes come all the same, whole and late: nothing is published.
    item.land()
    item.again()
    assert office.pump() == [deletion]
    bench.check()
    assert bench.at_rest() and not office.found(1)


@pytest.mark.parametrize("arrived", [False, True], ids=["queued", "arrived"])
def test_a_queued_write_is_part_of_what_is_deleted(office: Office, arrived: bool) -> None:
    bench = office.bench
    line = bench.insert(1)
    move = bench.moves.begin(MoveKind.STORE, line, NVME)
    bench.moves.start([move], {move.id: Landing(memoryview(bytearray(content(1))))})
    item = bench.held(move)
    if arrived:
        item.arrive()
    deletion = office.deletions.delete(block_key(1))
    assert office.pump() == []
    item.land()
    assert office.pump() == [deletion]
    bench.check()
    assert bench.at_rest() and bench.tiers[NVME].slots.used == 0


def test_a_move_that_was_published_gives_up_its_old_copy_first(office: Office) -> None:
    bench = office.bench
    line = bench.put(1, CPU)
    move = bench.fly(line, NVME)
    item = bench.held(move)
    item.arrive()
    bench.moves.reap()
    deletion = office.deletions.delete(block_key(1))
    assert office.pump() == []
    item.drain()
    assert office.pump() == [deletion]
    bench.check()
    assert bench.at_rest()


def test_waiters_of_a_read_hear_of_the_tombstone(office: Office) -> None:
    line = office.bench.put(1, NVME)
    key = FlightKey(SPACE, block_key(1), "r", (0, 1), 1, int(office.bench.directory.epoch[line]), 1, CPU)
    ticket = office.flights.join(Asker(1, 1, SPACE, 0, 10.0), [key], 0.0)
    office.deletions.delete(block_key(1))
    assert (ticket.over, ticket.ready, ticket.reason) == (True, 0, MoveReason.TOMBSTONED)


def test_a_new_move_of_a_deleted_block_is_refused(office: Office) -> None:
    line = office.bench.put(1, NVME)
    office.deletions.delete(block_key(1))
    with pytest.raises(MoveRefused) as refused:
        office.bench.moves.begin(MoveKind.PROMOTE, line, CPU)
    assert refused.value.code is MoveReason.TOMBSTONED


def test_a_second_order_joins_the_first(office: Office) -> None:
    line = office.bench.put(1, CPU)
    pin = office.pins.hold([line], CPU)
    first = office.deletions.delete(block_key(1))
    assert office.deletions.delete(block_key(1)) is first
    office.pump()
    assert office.deletions.delete(block_key(1)) is first
    pin.close()
    office.pump()
    assert office.kinds() == [EntryKind.INTENT, EntryKind.RECEIPT]


def test_a_block_that_was_evicted_is_erased_where_it_may_lie(office: Office) -> None:
    office.bench.put(1, NVME)
    office.bench.moves.drop(office.bench.directory.find(block_key(1)), NVME, last=True)
    deletion = office.deletions.delete(block_key(1))
    assert office.pump() == [deletion]
    assert (NVME, EraseItem(None, block_key(1))) in office.shredder.asked


@pytest.mark.parametrize("fault", ["refused", "error", "journal-intent", "journal-receipt"])
def test_a_step_that_fails_is_tried_again_and_nothing_is_served_meanwhile(office: Office, fault: str) -> None:
    office.bench.spread(1, CPU, NVME)
    if fault == "refused":
        office.shredder.failures = 1
    if fault == "error":
        office.shredder.held = []
    if fault == "journal-intent":
        office.paper.failures = 1
    deletion = office.deletions.delete(block_key(1))
    if fault == "journal-receipt":
        office.paper.failures = 1
    assert office.pump() == []
    if fault == "error":
        office.shredder.run(good=False)
        assert office.pump() == []
        office.shredder.held = None
    assert deletion.error is not None and not office.found(1)
    assert office.pump() == []
    office.now += 1.0
    assert office.pump() == [deletion] and deletion.error is None
    office.bench.check()


def test_a_slot_is_not_another_blocks_while_a_hung_erasure_may_still_run(office: Office) -> None:
    """The first erasure hangs past its deadline, the second succeeds; the slot waits for both."""
    office.bench.put(1, NVME)
    office.shredder.held = []
    office.shredder.keep_undrained = True
    deletion = office.deletions.delete(block_key(1))
    office.pump()
    office.shredder.run(good=False)
    office.pump()
    office.now += 1.0
    office.pump()
    office.shredder.run(good=True)
    assert office.pump() == []
    assert deletion.state is DeletionState.ERASING and office.bench.tiers[NVME].slots.used == 1
    office.shredder.held = None
    for drained in office.shredder.undrained:
        drained()
    assert office.pump() == [deletion]
    assert office.bench.tiers[NVME].slots.used == 0


def test_a_namespace_goes_as_a_whole_and_takes_no_new_blocks(office: Office) -> None:
    bench = office.bench
    mine = [bench.put(name, tier, namespace=3) for name, tier in ((1, CPU), (2, NVME), (3, GPU))]
    other = bench.put(4, CPU, namespace=4)
    pin = office.pins.hold([mine[0]], CPU)
    deletion = office.deletions.delete_namespace(SPACE, 3)
    assert office.deletions.delete_namespace(SPACE, 3) is deletion
    assert office.deletions.refuses(SPACE) and not office.deletions.refuses(b"o" * 32)
    assert office.pump() == []
    # What nobody reads is erased already.
    assert set(deletion.lines) == {mine[0]}
    assert [office.found(name) for name in (1, 2, 3, 4)] == [False, False, False, True]
    pin.close()
    assert office.pump() == [deletion]
    assert (NVME, EraseItem(None, None, SPACE)) in office.shredder.asked
    assert bench.serve(other, CPU) == content(4)
    assert not office.deletions.refuses(SPACE)
    bench.check()


def test_a_large_namespace_goes_in_steps_under_one_receipt(office: Office) -> None:
    bench = office.bench
    for name, tier in enumerate((CPU, CPU, NVME, NVME, GPU)):
        bench.put(name, tier, namespace=3)
    office.deletions._batch = 2
    office.shredder.held = []
    deletion = office.deletions.delete_namespace(SPACE, 3)
    office.pump()
    asked = [len({item.key for _, item in office.shredder.asked})]
    for _ in range(3):
        office.shredder.run()
        assert office.pump() == []
        asked.append(len({item.key for _, item in office.shredder.asked if item.key}))
    assert asked == [2, 4, 5, 5]
    # The lines are forgotten in steps, too.
    lines = [len(bench.directory)]
    while not (done := office.pump()):
        lines.append(len(bench.directory))
    assert lines == [1] and done == [deletion]
    # What evictions left behind goes with the last step, once.
    assert [tier for tier, item in office.shredder.asked if item.namespace] == [GPU, CPU, NVME]
    assert office.kinds() == [EntryKind.INTENT, EntryKind.RECEIPT]
    bench.check()
    assert bench.at_rest() and len(bench.directory) == 0


def test_one_pump_goes_few_steps_also_where_tiers_erase_at_once(office: Office) -> None:
    """The lock is held for a pump; a namespace can have a million blocks."""
    bench = office.bench
    for name in range(6):
        bench.put(name, CPU if name % 2 else NVME, namespace=3)
    office.deletions._batch = 2
    deletion = office.deletions.delete_namespace(SPACE, 3)
    left = [len(deletion.lines)]
    while deletion.lines:
        office.pump()
        left.append(len(deletion.lines))
        assert office.deletions.delete(block_key(5)) is deletion
    assert left == [6, 2, 0]
    while deletion.state is not DeletionState.DONE:
        office.pump()
    assert len(bench.directory) == 0 and office.kinds() == [EntryKind.INTENT, EntryKind.RECEIPT]


def test_a_second_order_for_a_key_joins_the_first_until_it_is_done(office: Office) -> None:
    office.bench.put(1, CPU)
    for name in (1, 2):
        first = office.deletions.delete(block_key(name))
        assert office.deletions.delete(block_key(name)) is first
        assert block_key(name) in office.deletions.keys
        assert office.pump() == [first]
        assert block_key(name) not in office.deletions.keys
        again = office.deletions.delete(block_key(name))
        assert again is not first and office.pump() == [again]


def test_a_bad_copy_of_a_deleted_block_does_not_end_its_line_early(office: Office) -> None:
    bench = office.bench
    line = bench.spread(1, CPU, NVME)
    pin = office.pins.hold([line], NVME)
    bench.moves.condemn(line, CPU)
    office.deletions.delete(block_key(1))
    office.pump()
    assert bench.directory.state[line] == ChunkState.TOMBSTONED
    pin.close()
    assert len(office.pump()) == 1
    bench.check()


# Crashes: what is durable is the journal and the storage tier; memory is gone.


def restart(office: Office) -> Office:
    """A new process over the same storage and journal: recovery found what the device still holds."""
    old = office.bench
    bench = BlockBench()
    bench.tiers[NVME].data = [bytearray(data) for data in old.tiers[NVME].data]
    office.paper.held = None
    after = Office(bench, office.paper)
    for line in old.lines():
        if not old.directory.replica(line, NVME).state:
            continue
        slot = old.slot(line, NVME).slot
        if bytes(old.tiers[NVME].data[slot]) == bytes(SIZE):
            continue
        name = old.names[int(old.directory.logical[line])]
        new = bench.insert(name)
        move = bench.moves.begin(MoveKind.STORE, new, NVME)
        bench.moves.start([move], {move.id: Landing(memoryview(bytearray(content(name))))})
        bench.settle()
    after.deletions.resume(after.paper.entries, lambda namespace: 0)
    return after


STEPS = ["ordered", "intended", "asked", "half-erased", "erased", "receipted"]


@pytest.mark.parametrize("step", STEPS)
def test_h3_crash_at_any_step_resumes_and_is_never_served(step: str) -> None:
    office = Office()
    office.bench.spread(1, CPU, NVME)
    office.bench.put(2, NVME)
    durable = step != "ordered"
    office.paper.held = None if durable else []
    office.shredder.held = []
    office.deletions.delete(block_key(1))
    if durable:
        office.pump()
    if step == "intended":
        office.shredder.held = []
    if step == "half-erased":
        # The intent is durable and one of two tiers has erased.
        for work in office.shredder.held[:1]:
            work(True)
    if step in ("erased", "receipted"):
        office.paper.held = [] if step == "erased" else None
        office.shredder.run()
        office.pump()
    after = restart(office)
    if step == "ordered":
        # The order was not durable and nobody was told that it was: the block is as it was.
        assert after.found(1) and not after.deletions.open()
        return
    assert not after.found(1)
    done = after.pump()
    assert len(done) == (0 if step == "receipted" else 1)
    assert after.bench.directory.locate(block_key(1)) == NO_LINE
    kinds = after.kinds()
    assert kinds.count(EntryKind.INTENT) == kinds.count(EntryKind.RECEIPT) == 1
    assert after.found(2)
    after.bench.check()
    # Its number is not given again.
    assert after.deletions.delete(block_key(2)).number > 1


def test_a_resumed_namespace_finds_its_blocks() -> None:
    office = Office()
    office.bench.put(1, NVME)
    office.shredder.held = []
    office.deletions.delete_namespace(SPACE, 0)
    office.pump()
    after = restart(office)
    assert not after.found(1) and after.deletions.refuses(SPACE)
    assert len(after.pump()) == 1


def test_the_tiers_themselves_erase() -> None:
    """A slot of another life is refused, so that a repeated erasure cannot touch its next owner."""
    bench = BlockBench()
    line = bench.put(1, CPU)
    told: list[tuple[int, Reason | None]] = []

    class Sink:
        def done(self, index: int, error: CoreError | None) -> None:
            told.append((index, error.reason if error else None))

        def drained(self, index: int) -> None:
            return None

    eraser = TierEraser(bench.tiers)
    ref = bench.slot(line, CPU)
    eraser.erase(CPU, [EraseItem(ref, block_key(1)), EraseItem(None, block_key(2))], 1.0, Sink())
    bench.moves.drop(line, CPU, last=True)
    eraser.erase(CPU, [EraseItem(ref, block_key(1))], 1.0, Sink())
    assert told == [(0, None), (1, None), (0, Reason.RECYCLED_DESTINATION)]
