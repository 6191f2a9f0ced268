"""What becomes of a put: stored, there already, on its way, or refused with the reason; and of its writer."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import numpy as np
import pytest

from kvtier_core.blockstore.outcomes import PutOutcome
from kvtier_core.credits import Ledger, Limit, slots
from kvtier_core.credits.resources import QUEUE
from kvtier_core.errors import CoreError, Reason
from kvtier_core.transactions import MoveReason
from kvtier_core.transactions.eviction import Watermarks
from tests.unit.core.storebench import ALPHA, BETA, SIZE, StoreBench, content, key


def quota_bench() -> StoreBench:
    limits = {slots(0): Limit(4), slots(1): Limit(8), QUEUE: Limit(64)}
    return StoreBench(ledger=Ledger(limits, default_quota={slots(0): 1}))


def all_pinned(bench: StoreBench) -> object:
    bench.put("b", "c", "d", "e")
    return bench.pin("b", "c", "d", "e")


def full_of_kept(bench: StoreBench) -> object:
    for name in "bcdefghi":
        while bench.put(name)[0].reason is MoveReason.CREDIT_PRESSURE:
            bench.settle()
    return None


def leaving(bench: StoreBench) -> object:
    bench.put("b", "c", "d", "e")
    return bench.put("f")


def deleting(bench: StoreBench) -> object:
    bench.put("a")
    pin = bench.pin("a")
    bench.store.delete([key("a")])
    return pin


def namespace_deleting(bench: StoreBench) -> object:
    bench.put("z")
    pin = bench.pin("z")
    bench.store.delete_namespace(ALPHA)
    return pin


@pytest.mark.parametrize(
    ("before", "outcome", "reason"),
    [
        pytest.param(lambda bench: None, PutOutcome.STORED, MoveReason.READY, id="new"),
        pytest.param(lambda bench: bench.put("a"), PutOutcome.EXISTED, MoveReason.READY, id="equal-bytes"),
        pytest.param(
            lambda bench: bench.put("a", data="other"),
            PutOutcome.REFUSED,
            MoveReason.IDENTITY_MISMATCH,
            id="same-key-other-bytes",
        ),
        pytest.param(
            lambda bench: bench.reserve("a"),
            PutOutcome.IN_FLIGHT,
            MoveReason.WRITE_TXN_BUSY,
            id="another-writer",
        ),
        pytest.param(
            lambda bench: bench.put("a", namespace=BETA),
            PutOutcome.REFUSED,
            MoveReason.TENANT_MISMATCH,
            id="another-tenants",
        ),
        pytest.param(deleting, PutOutcome.REFUSED, MoveReason.TOMBSTONED, id="being-deleted"),
        pytest.param(all_pinned, PutOutcome.REFUSED, MoveReason.WOULD_EVICT_PINNED, id="all-pinned"),
        pytest.param(leaving, PutOutcome.REFUSED, MoveReason.CREDIT_PRESSURE, id="others-leave"),
        pytest.param(full_of_kept, PutOutcome.REFUSED, MoveReason.KEPT_CAPACITY, id="full-of-kept-blocks"),
    ],
)
def test_what_becomes_of_a_put(
    before: Callable[[StoreBench], object], outcome: PutOutcome, reason: MoveReason
) -> None:
    small = before is full_of_kept
    bench = StoreBench(memory=4, storage=4 if small else 8)
    kept = before(bench)
    (stored,) = bench.put("a")
    assert (stored.outcome, stored.reason) == (outcome, reason)
    assert (stored.generation > 0) == (outcome in (PutOutcome.STORED, PutOutcome.EXISTED))
    del kept
    gc.collect()
    bench.settle()
    bench.check()


def test_a_tenants_quota_is_its_own_reason_and_no_one_elses() -> None:
    bench = quota_bench()
    first, second = bench.put("a", "b")
    assert (first.outcome, second.reason) == (PutOutcome.STORED, MoveReason.QUOTA_EXCEEDED)
    assert bench.put("c", namespace=BETA)[0].outcome is PutOutcome.STORED
    bench.check()


def test_what_refuses_the_whole_call_holds_nothing() -> None:
    bench = StoreBench()
    with pytest.raises(CoreError) as late:
        bench.put("a", deadline=bench.clock.now)
    assert late.value.reason is Reason.DEADLINE
    kept = namespace_deleting(bench)
    with pytest.raises(CoreError) as gone:
        bench.put("a")
    assert gone.value.facts["move"] == MoveReason.TOMBSTONED.value
    assert bench.put("a", namespace=BETA)[0].outcome is PutOutcome.STORED
    del kept
    bench.check()


def test_lmcache_207_nothing_of_a_block_is_seen_before_it_is_published() -> None:
    bench = StoreBench()
    with bench.reserve("a", "b") as scope:
        scope.landing(0)[:] = content("a")
        scope.landing(1)[:10] = b"half of it"
        assert bench.found("a", "b") == 0
        with bench.pin("a", "b") as pin:
            assert len(pin) == 0
        with bench.fetch("a") as fetch:
            assert fetch.ready == 0
        assert bench.explain("a") == "storing"
    assert bench.found("a") == 0 and bench.explain("a") == "unknown"
    bench.rest()


def test_a_stated_checksum_that_differs_publishes_nothing_of_that_block() -> None:
    bench = StoreBench()
    with bench.reserve("a", "b") as scope:
        scope.landing(0)[:] = content("a")
        scope.landing(1)[:] = content("b")
        good = bench.store.put([key("x")], [content("a")], namespace=BETA, deadline=200.0)
        assert good[0].outcome is PutOutcome.STORED
        seal = int(bench.store.directory.checksum[bench.store.directory.find(key("x"))])
        first, second = scope.publish([seal, seal])
    assert first.outcome is PutOutcome.STORED
    assert (second.outcome, second.reason) == (PutOutcome.REFUSED, MoveReason.CHECKSUM_MISMATCH)
    assert bench.found("a", "b") == 1
    bench.rest()


def test_a_key_named_twice_is_stored_once() -> None:
    bench = StoreBench()
    first, second = bench.put("a", "a")
    assert first.outcome is PutOutcome.STORED and second.outcome is PutOutcome.IN_FLIGHT
    bench.rest()


# The writer that stalls or goes.


def test_a_late_writers_slot_is_nobodys_until_the_writer_returns() -> None:
    bench = StoreBench(memory=1)
    scope = bench.reserve("a", seconds=5)
    late = scope.landing(0)
    bench.clock.now += 5
    bench.store.pump()
    assert scope.outcome(0).reason is MoveReason.TRANSFER_TIMEOUT
    assert bench.ram.slots.used == 1, "the writer may still be writing there"
    assert bench.put("b")[0].outcome is PutOutcome.REFUSED
    late[:] = content("late")
    assert scope.publish()[0].reason is MoveReason.TRANSFER_TIMEOUT
    assert bench.found("a") == 0
    scope.close()
    scope.close()
    assert bench.put("b")[0].outcome is PutOutcome.STORED
    with bench.pin("b") as pin:
        assert bytes(pin.body(0)) == content("b")
    bench.rest()


@pytest.mark.parametrize("expired", [False, True], ids=["in-time", "after-its-deadline"])
def test_a_writer_that_is_gone_leaves_nothing_behind(expired: bool) -> None:
    bench = StoreBench(memory=1)
    scope = bench.reserve("a", seconds=5)
    if expired:
        bench.clock.now += 5
        bench.store.pump()
    del scope
    gc.collect()
    bench.clock.now += 5
    bench.store.pump()
    gc.collect()
    bench.store.pump()
    assert bench.ram.slots.used == 0
    assert bench.put("b")[0].outcome is PutOutcome.STORED
    bench.rest()


@pytest.mark.parametrize("how", ["publish", "close", "expire", "drop"])
def test_a_deletion_that_meets_an_open_store_wins_and_touches_no_other_block(how: str) -> None:
    bench = StoreBench()
    scope = bench.reserve("a", seconds=5)
    scope.landing(0)[:] = content("a")
    (order,) = bench.store.delete([key("a")])
    bench.store.pump()
    if how == "publish":
        assert scope.publish()[0].reason is MoveReason.TOMBSTONED
    if how == "expire":
        bench.clock.now += 5
        bench.store.pump()
        # The line of a forgotten block would be the next one's.
        assert bench.put("b")[0].outcome is PutOutcome.STORED
        bench.store.pump()
    if how == "drop":
        del scope
        gc.collect()
    else:
        scope.close()
    bench.settle()
    bench.settle()
    assert order.state.value == "DONE"
    assert bench.explain("a") == "deleted"
    assert bench.found("b") == (how == "expire")
    assert bench.put("a")[0].outcome is PutOutcome.STORED
    bench.rest()


def test_a_store_that_is_deleted_while_it_is_filled_is_refused_and_does_not_raise() -> None:
    bench = StoreBench()
    with bench.reserve("a", "b") as scope:
        bench.store.delete([key("a")])
        for index in range(2):
            landing = scope.landing(index)
            if landing is not None:
                landing[:] = content("ab"[index])
        first, second = scope.publish()
    assert (first.outcome, first.reason) == (PutOutcome.REFUSED, MoveReason.TOMBSTONED)
    assert second.outcome is PutOutcome.STORED
    bench.rest()


def test_a_refused_publication_leaks_no_slot() -> None:
    """Every credit for transfers is taken when the block is to be published."""
    bench = StoreBench(max_flights=1)
    bench.on_disk("x")
    fetch = bench.fetch("x")
    (stored,) = bench.put("a")
    used = bench.ram.slots.used
    assert used == (2 if stored.outcome is PutOutcome.STORED else 1)
    fetch.close()
    bench.rest()


def test_mooncake_3030_a_stale_writer_neither_ends_nor_publishes_the_newer_store() -> None:
    bench = StoreBench()
    stale = bench.reserve("a", seconds=5)
    stale.landing(0)[:] = content("stale")
    bench.clock.now += 5
    bench.store.pump()
    newer = bench.reserve("a")
    newer.landing(0)[:] = content("a")
    assert stale.publish()[0].outcome is PutOutcome.REFUSED
    stale.close()
    assert newer.publish()[0].outcome is PutOutcome.STORED
    newer.close()
    with bench.pin("a") as pin:
        assert bytes(pin.body(0)) == content("a")
    bench.rest()


def test_lmcache_4385_two_sessions_never_meet_each_others_bytes_in_a_reused_buffer() -> None:
    bench = StoreBench(memory=1)
    names = [f"turn-{number}" for number in range(6)]
    for name in names:
        assert bench.put(name)[0].outcome is PutOutcome.STORED
        bench.store.reclaim.make_room(0, 1)
        bench.settle()
    for name in names:
        with bench.fetch(name) as fetch:
            bench.settle()
            assert bytes(fetch.body(0)) == content(name)
        bench.store.reclaim.make_room(0, 1)
        bench.settle()
    bench.rest()


def test_a_key_that_is_being_deleted_takes_nothing_though_no_block_was_there() -> None:
    """The erasure by key of what an eviction left behind must not meet a newer block's bytes."""
    bench = StoreBench()
    (order,) = bench.store.delete([key("a")])
    assert bench.put("a")[0].reason is MoveReason.TOMBSTONED
    bench.settle()
    bench.settle()
    assert order.state.value == "DONE"
    assert bench.put("a")[0].outcome is PutOutcome.STORED
    bench.rest()


def test_what_making_room_took_is_not_said_to_exist() -> None:
    """A droppable block that was there when the call began may be what had to go for its other blocks."""
    bench = StoreBench(memory=2, storage=1)
    bench.put("down")
    bench.store.reclaim.make_room(0, 2)
    bench.settle()
    bench.put("a", droppable=True)
    bench.put("b", droppable=True)
    stored = bench.put("a", "c", "d", droppable=True)
    for name, each in zip(("a", "c", "d"), stored, strict=True):
        assert bench.found(name) == (each.outcome in (PutOutcome.STORED, PutOutcome.EXISTED)), (name, each)
    bench.rest()


def test_demotions_that_fail_are_not_tried_again_at_once() -> None:
    """Each failure is a report, each report a turn of the driver: without a pause that is a busy loop."""
    bench = StoreBench(memory=4, watermarks=Watermarks(0.5, 0.25))
    bench.put("a", "b", "c", "d")
    tries = 0
    for _ in range(50):
        bench.store.pump()
        tries += bool(bench.disk.held)
        for held in list(bench.disk.held):
            held.finish(CoreError(Reason.STORAGE_UNAVAILABLE, "no space is left"))
    assert tries == 1
    bench.clock.now += 60
    bench.settle()
    assert bench.ram.slots.used <= 2, "it goes on when the device is well again"
    assert bench.found("a", "b", "c", "d") == 4
    bench.rest()


@pytest.mark.parametrize("segments", [1, 2, 4], ids=["one-segment", "two", "four"])
def test_a_tenant_gets_memory_though_anothers_blocks_are_in_every_segment(segments: int) -> None:
    """Memory passes between namespaces by whole segments, so free slots alone help nobody."""
    bench = StoreBench(memory=8, storage=64, segment=8 // segments * SIZE)
    for number in range(8):
        assert bench.put(f"first-{number}")[0].outcome is PutOutcome.STORED
    for number in range(12):
        for _ in range(10):
            (stored,) = bench.put(f"second-{number}", namespace=BETA)
            if stored.outcome is PutOutcome.STORED:
                break
            assert stored.reason is MoveReason.CREDIT_PRESSURE, stored
            bench.settle()
        assert stored.outcome is PutOutcome.STORED, number
        with bench.fetch(f"first-{number % 8}") as fetch:
            for _ in range(4):
                bench.settle()
            assert bytes(fetch.body(0)) == content(f"first-{number % 8}")
    assert bench.found("second-0", namespace=BETA) == 1
    bench.rest()


def test_a_segment_that_is_to_change_hands_is_not_filled_again_by_its_owner() -> None:
    bench = StoreBench(memory=4, storage=64, segment=2 * SIZE)
    bench.put("a", "b", "c", "d")
    assert bench.put("x", namespace=BETA)[0].reason is MoveReason.CREDIT_PRESSURE
    bench.settle()
    refused = bench.put("x", namespace=BETA)[0]
    for number in range(6):
        if refused.outcome is PutOutcome.STORED:
            break
        bench.put(f"more-{number}")
        bench.settle()
        (refused,) = bench.put("x", namespace=BETA)
    assert refused.outcome is PutOutcome.STORED
    bench.rest()


def test_relief_that_cannot_come_is_tried_later_and_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attempt looks at a whole tier under the lock, and there is a pump for each thing that happens."""
    bench = StoreBench(memory=4, storage=8, watermarks=Watermarks(0.5, 0.25))
    full_of_kept(bench)
    asked: list[int] = []
    candidates = bench.store.reclaim.evictor.candidates

    def counting(tier: int) -> object:
        asked.append(tier)
        return candidates(tier)

    monkeypatch.setattr(bench.store.reclaim.evictor, "candidates", counting)
    bench.clock.now += 10
    for _ in range(50):
        bench.store.pump()
    first = asked.count(1)
    assert 1 <= first <= 2
    for _ in range(50):
        bench.clock.now += 0.1
        bench.store.pump()
    assert first < asked.count(1) <= 12
    # Who needs room asks for it, and waits for no pause.
    bench.store.delete([key("b"), key("i")])
    bench.settle()
    assert bench.put("after")[0].outcome is PutOutcome.STORED
    bench.rest()


def test_of_a_tier_full_of_what_must_stay_nothing_is_looked_at_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = StoreBench(memory=4, storage=46)
    # Rows of sessions wait for these.
    bench.store.ledger.claim(slots(1), 6)
    names = [f"kept{number}" for number in range(44)]
    for name in names:
        while bench.put(name)[0].reason is MoveReason.CREDIT_PRESSURE:
            bench.settle()
    bench.settle()
    assert bench.disk.slots.used == 40
    ordered: list[int] = []
    policy = bench.store.reclaim.policies[1]
    order = policy.order

    def counting(lines: np.ndarray, limit: int) -> np.ndarray:
        ordered.append(len(lines))
        return order(lines, limit)

    monkeypatch.setattr(policy, "order", counting)
    (refused,) = bench.put("more")
    assert refused.reason is MoveReason.NO_DESTINATION_CAPACITY
    assert sum(ordered) == 0
    assert bench.found(*names) == 44
    bench.rest()


def test_relief_moves_few_at_a_time_and_ends_at_the_low_mark() -> None:
    """A tier of half a million slots must not reserve, submit and queue a tenth of them in one hold of the
    lock, more than its device takes at a time."""
    bench = StoreBench(memory=20, storage=40, watermarks=Watermarks(0.9, 0.5))
    bench.store.reclaim.evictor._at_once = 4
    for number in range(19):
        assert bench.put(f"block{number}")[0].outcome is PutOutcome.STORED
    most = 0
    for _ in range(40):
        bench.store.pump()
        most = max(most, len(bench.disk.held))
        for held in bench.disk.held[:1]:
            held.finish()
    assert most == 4
    assert bench.ram.slots.used == 10
    bench.rest()


def test_a_reader_that_goes_wakes_who_waits_for_its_copy_to_leave() -> None:
    bench = StoreBench(memory=1)
    bench.put("a")
    assert bench.put("b")[0].reason is MoveReason.CREDIT_PRESSURE
    pin = bench.pin("a")
    bench.disk.of("a").finish()
    bench.store.pump()
    assert bench.ram.slots.used == 1 == bench.disk.slots.used
    rung = bench.rung
    pin.close()
    assert bench.rung == rung + 1
    bench.store.pump()
    assert bench.put("b")[0].outcome is PutOutcome.STORED
    bench.rest()


def test_a_scope_that_two_threads_leave_is_left_once() -> None:
    """One of them has read what to give back when the other is done."""
    bench = StoreBench()
    bench.put("a")
    other, pin = bench.pin("a"), bench.pin("a")
    lock = bench.store.parts.lock
    threads = [threading.Thread(target=pin.close) for _ in range(2)]
    with lock:
        for thread in threads:
            thread.start()
        pin.close()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert bench.store.pins.held == 1
    other.close()
    bench.rest()


@pytest.mark.parametrize("droppable", [False, True], ids=["may not be lost", "may be lost"])
def test_who_may_not_lose_a_block_that_is_there_does_not(droppable: bool) -> None:
    """A store that finds the block strengthens what was promised of it, and never weakens it."""
    bench = StoreBench(memory=1, storage=0)
    bench.store.writes._kept_limit = 1
    bench.put("a", droppable=True)
    assert bench.put("a", droppable=droppable)[0].outcome is PutOutcome.EXISTED
    assert bench.put("a", droppable=True)[0].outcome is PutOutcome.EXISTED
    assert bench.store.directory.kept == (not droppable)
    # Only what may be lost makes room.
    bench.put("b", droppable=True)
    assert (bench.found("a"), bench.found("b")) == ((0, 1) if droppable else (1, 0))
    bench.rest()


def test_a_stronger_promise_that_cannot_be_kept_is_refused() -> None:
    bench = StoreBench()
    bench.store.writes._kept_limit = 1
    bench.put("a", droppable=True)
    bench.put("b")
    (stored,) = bench.put("a")
    assert (stored.outcome, stored.reason) == (PutOutcome.REFUSED, MoveReason.KEPT_CAPACITY)
    assert bench.put("a", droppable=True)[0].outcome is PutOutcome.EXISTED
    assert bench.store.directory.kept == 1
    bench.rest()
