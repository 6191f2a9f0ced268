"""Fetches: one read per block, the short wake first, and a reason for each prefix that ends early."""

from __future__ import annotations

import gc

import pytest

from kvtier_core.credits import slots
from kvtier_core.errors import CoreError, Reason
from kvtier_core.tiers.slots import SlotState
from kvtier_core.transactions import MoveReason
from kvtier_core.transactions.deletion import DeletionState
from tests.unit.core.storebench import ALPHA, BETA, StoreBench, content, key

PREFIX = ("a", "b", "c", "d")


@pytest.fixture
def bench() -> StoreBench:
    """Four blocks that are on disk alone."""
    made = StoreBench(memory=4, storage=10)
    made.on_disk(*PREFIX)
    return made


def bytes_of(fetch: object) -> list[bytes]:
    return [bytes(fetch.body(index)) for index in range(fetch.ready)]  # type: ignore[attr-defined]


def test_thirty_two_requests_for_one_prefix_read_each_block_once(bench: StoreBench) -> None:
    fetches = [bench.fetch(*PREFIX) for _ in range(32)]
    assert sorted(bench.disk.reads) == sorted(map(key, PREFIX))
    bench.settle()
    for fetch in fetches:
        assert bytes_of(fetch) == [content(name) for name in PREFIX]
        assert (fetch.over, fetch.reason, fetch.tier(0)) == (True, MoveReason.READY, "ram")
        assert fetch.changed.is_set()
        fetch.close()
    bench.rest()


def test_a_short_request_behind_a_long_one_wakes_when_its_own_blocks_are_there(bench: StoreBench) -> None:
    long, short = bench.fetch(*PREFIX), bench.fetch("a")
    bench.disk.of("a").finish()
    bench.store.pump()
    assert short.over and short.ready == 1
    assert not long.over and long.ready == 1
    with pytest.raises(CoreError) as early:
        long.body(1)
    assert early.value.reason is Reason.NOT_VISIBLE
    short.close()
    long.close()
    bench.rest()


def test_blocks_that_arrive_in_any_order_are_ready_in_the_prefixs_order(bench: StoreBench) -> None:
    with bench.fetch(*PREFIX) as fetch:
        for name in reversed(PREFIX):
            assert fetch.ready == 0
            bench.disk.of(name).finish()
            bench.store.pump()
        assert bytes_of(fetch) == [content(name) for name in PREFIX]
    bench.rest()


@pytest.mark.parametrize("who", ["leader", "joiner", "both"])
def test_a_cancelled_request_stops_no_read_that_others_wait_for(bench: StoreBench, who: str) -> None:
    leader, joiner = bench.fetch("a"), bench.fetch("a")
    for scope in {"leader": [leader], "joiner": [joiner], "both": [leader, joiner]}[who]:
        scope.close()
    bench.settle()
    for fetch, name in ((leader, "leader"), (joiner, "joiner")):
        if who in (name, "both"):
            assert fetch.reason is MoveReason.CANCELLED
        else:
            assert bytes_of(fetch) == [content("a")]
        fetch.close()
    assert len(bench.disk.reads) == 1
    with bench.pin("a") as pin:
        assert len(pin) == 1, "what was read stays as a copy"
    bench.rest()


def test_a_request_past_its_deadline_leaves_and_the_block_still_lands(bench: StoreBench) -> None:
    fetch = bench.fetch("a", seconds=5)
    bench.clock.now += 5
    bench.store.pump()
    assert (fetch.over, fetch.ready, fetch.reason) == (True, 0, MoveReason.FETCH_LATE)
    fetch.close()
    bench.settle()
    with bench.pin("a") as pin:
        assert bytes(pin.body(0)) == content("a")
    bench.rest()


@pytest.mark.parametrize("first", ["store", "tier"])
def test_a_read_that_ended_too_late_can_be_asked_for_again(bench: StoreBench, first: str) -> None:
    """A flight whose read is over must not stay behind, or the block could never be fetched again."""
    late = bench.fetch("a", seconds=5)
    held = bench.disk.of("a")
    bench.clock.now += 5
    if first == "store":
        bench.store.pump()
    held.late()
    bench.store.pump()
    assert late.reason is MoveReason.FETCH_LATE
    late.close()
    assert bench.store.reads.flights.flights() == ()
    again = bench.fetch("a")
    held.finish()
    bench.settle()
    assert bytes_of(again) == [content("a")]
    again.close()
    bench.rest()


def test_who_has_more_time_is_not_failed_by_anothers_deadline(bench: StoreBench) -> None:
    """The tier was given the first request's deadline; one that joined later is more patient."""
    hasty, patient = bench.fetch("a", seconds=5), bench.fetch("a", seconds=60)
    held = bench.disk.of("a")
    bench.clock.now += 5
    held.late()
    bench.store.pump()
    assert hasty.reason is MoveReason.FETCH_LATE
    assert not patient.over
    held.finish()
    bench.settle()
    assert bytes_of(patient) == [content("a")]
    hasty.close()
    patient.close()
    bench.rest()


@pytest.mark.parametrize(
    ("reason", "part"),
    [
        (Reason.STORAGE_UNAVAILABLE, 100),
        (Reason.SHORT_COPY, 4000),
        (Reason.TRANSFER_FAILED, 0),
    ],
    ids=["breaks-halfway", "short", "dropped"],
)
def test_vllm_191_a_read_that_fails_tells_every_waiter_and_leaves_nothing(
    bench: StoreBench, reason: Reason, part: int
) -> None:
    fetches = [bench.fetch("a", "b") for _ in range(3)]
    bench.disk.of("b").finish()
    bench.disk.of("a").finish(CoreError(reason, "as the test says"), part)
    bench.store.pump()
    for fetch in fetches:
        assert (fetch.over, fetch.ready) == (True, 0)
        assert fetch.reason.value == reason.value
        fetch.close()
    again = bench.fetch("a", "b")
    bench.settle()
    assert bytes_of(again) == [content("a"), content("b")]
    again.close()
    bench.rest()


def test_a_flipped_byte_is_never_served_and_the_block_is_lost_for_good(bench: StoreBench) -> None:
    fetches = [bench.fetch("a", "b") for _ in range(3)]
    slot = bench.disk.of("a").item.ref.slot
    bench.disk.data[slot][17] ^= 4
    bench.settle()
    for fetch in fetches:
        assert (fetch.ready, fetch.reason) == (0, MoveReason.CHECKSUM_MISMATCH)
        fetch.close()
    assert bench.found("a") == 0
    assert bench.explain("a") == "lost"
    with bench.fetch("a") as miss:
        assert (miss.over, miss.reason) == (True, MoveReason.MISS)
    assert bench.put("a")[0].generation > 0, "it can be computed and stored again"
    bench.rest()


def test_another_copy_is_read_when_one_is_found_bad() -> None:
    bench = StoreBench(memory=2, storage=4, far=4)
    bench.on_disk("a")
    directory, moves = bench.store.directory, bench.store.moves
    line = directory.find(key("a"))
    # A second copy, as a demotion leaves one that must keep its source.
    ref = bench.far.reserve(int(directory.logical[line]))
    bench.far.data[ref.slot][:] = content("a")
    bench.far.slots.set_state(ref, SlotState.PUBLISHED)
    directory.add_replica(line, 2, ref.slot, ref.generation, directory.issue_generation())
    directory.publish_replica(line, 2)
    bench.store.ledger.rebuild({(0, slots(1)): 1, (0, slots(2)): 1})
    assert directory.survivors(line) == 2 and not moves.open_moves()
    waiting = [bench.fetch("a") for _ in range(3)]
    bench.disk.data[bench.disk.of("a").item.ref.slot][0] ^= 1
    bench.settle()
    bench.settle()
    for fetch in waiting:
        assert bytes_of(fetch) == [content("a")]
        fetch.close()
    assert (bench.disk.reads, bench.far.reads) == ([key("a")], [key("a")])
    bench.rest()


def test_a_fetch_without_a_home_slot_waits_for_what_leaves(bench: StoreBench) -> None:
    bench.put("w", "x", "y", "z")
    fetch = bench.fetch("a")
    assert not fetch.over and bench.disk.reads == []
    bench.settle()
    bench.settle()
    assert bytes_of(fetch) == [content("a")]
    fetch.close()
    bench.rest()


def test_a_parked_fetch_goes_on_by_itself_when_a_pin_ends(bench: StoreBench) -> None:
    """vllm#191: nobody else's request must be needed to wake it."""
    bench.put("w", "x", "y", "z")
    pins = [bench.pin(name) for name in "wxyz"]
    with bench.store.parts.lock:
        pins[0].close()
    fetch = bench.fetch("a")
    assert not fetch.over, "one block leaves"
    bench.settle()
    bench.settle()
    assert fetch.ready == 1
    fetch.close()
    for pin in pins:
        pin.close()
    bench.rest()


def test_a_copy_that_a_reader_keeps_is_not_waited_for_when_another_can_make_way(bench: StoreBench) -> None:
    bench.put("w", "x", "y", "z")
    pins = [bench.pin(name) for name in "xy"]
    with bench.fetch("a") as fetch:
        assert not fetch.over, "the least recent block leaves"
        pins.append(bench.pin("w"))
        for _ in range(3):
            bench.settle()
        assert fetch.ready == 1
    for pin in pins:
        pin.close()
    bench.rest()


def test_sglang_32455_all_pinned_is_a_refusal_at_once_and_no_livelock(bench: StoreBench) -> None:
    bench.put("w", "x", "y", "z")
    with bench.pin("w", "x", "y", "z") as pin:
        assert len(pin) == 4
        with bench.fetch("a") as fetch:
            assert (fetch.over, fetch.reason) == (True, MoveReason.NO_STAGING)
        assert bench.put("v")[0].reason is MoveReason.WOULD_EVICT_PINNED
    assert bench.put("v")[0].reason is MoveReason.CREDIT_PRESSURE
    bench.settle()
    assert bench.put("v")[0].generation > 0
    bench.rest()


def test_a_prefix_longer_than_memory_ends_where_memory_ends(bench: StoreBench) -> None:
    bench.on_disk("e", "f")
    with bench.fetch(*PREFIX, "e", "f") as fetch:
        bench.settle()
        assert (fetch.ready, fetch.reason) == (4, MoveReason.NO_STAGING)
        assert bytes_of(fetch) == [content(name) for name in PREFIX]
    bench.rest()


def test_another_tenants_block_is_neither_found_nor_read(bench: StoreBench) -> None:
    assert bench.found("a", namespace=BETA) == 0
    with bench.fetch("a", namespace=BETA) as fetch:
        assert (fetch.over, fetch.ready, fetch.reason) == (True, 0, MoveReason.TENANT_MISMATCH)
    assert bench.disk.reads == []
    bench.put("m")
    with bench.pin("m", namespace=BETA) as pin:
        assert len(pin) == 0
    with bench.fetch("m", namespace=BETA) as fetch:
        assert fetch.reason is MoveReason.TENANT_MISMATCH
    bench.rest()


def test_a_miss_ends_the_prefix_and_what_comes_before_it_is_served(bench: StoreBench) -> None:
    with bench.fetch("a", "nobody", "b") as fetch:
        bench.settle()
        assert (fetch.ready, fetch.reason) == (1, MoveReason.MISS)
    assert key("b") not in bench.disk.reads
    bench.rest()


def test_vllm_39702_what_a_fetch_found_stays_until_it_is_left() -> None:
    bench = StoreBench(memory=2)
    bench.put("a")
    with bench.fetch("a") as fetch:
        body = fetch.body(0)
        for name in "bcdefg":
            bench.put(name)
            bench.settle()
        assert bytes(body) == content("a")
    bench.rest()


@pytest.mark.parametrize("ready", [False, True], ids=["waiting", "ready"])
def test_lmcache_2951_a_fetch_that_is_dropped_is_found_given_back_and_counted(
    bench: StoreBench, ready: bool
) -> None:
    fetch = bench.fetch("a")
    if ready:
        bench.settle()
    del fetch
    gc.collect()
    bench.settle()
    assert bench.store.reads.leaked == 1
    bench.store.reclaim.make_room(0, 4)
    bench.settle()
    assert bench.ram.slots.used == 0
    bench.rest()


def test_vllm_49118_leaving_a_request_that_never_ran_has_no_effect_on_others(bench: StoreBench) -> None:
    queued = bench.fetch("a")
    queued.close()
    queued.close()
    other = bench.fetch("a")
    bench.settle()
    assert bytes_of(other) == [content("a")]
    with pytest.raises(CoreError):
        queued.body(0)
    other.close()
    bench.rest()


def test_vllm_46014_a_request_that_comes_again_while_its_store_is_in_flight(bench: StoreBench) -> None:
    with bench.reserve("n") as scope:
        with bench.fetch("n") as early:
            assert (early.over, early.reason) == (True, MoveReason.MISS)
        scope.landing(0)[:] = content("n")
        scope.publish()
        with bench.fetch("n") as second:
            assert bytes_of(second) == [content("n")]
    bench.rest()


def test_a_block_that_is_being_written_down_is_served_from_memory(bench: StoreBench) -> None:
    bench.put("n")
    bench.store.reclaim.make_room(0, 4)
    assert bench.explain("n") == "moving"
    with bench.fetch("n") as fetch:
        assert bytes_of(fetch) == [content("n")]
        bench.settle()
        assert bytes(fetch.body(0)) == content("n"), "a reader keeps the copy in memory"
    bench.settle()
    assert bench.ram.slots.used == 0
    bench.rest()


def test_vllm_54914_eviction_with_a_cache_far_below_the_working_set() -> None:
    bench = StoreBench(memory=2, storage=64)
    names = [f"n{number}" for number in range(40)]
    for name in names:
        while bench.put(name)[0].reason is MoveReason.CREDIT_PRESSURE:
            bench.settle()
    for number in (*range(40), *range(39, -1, -3)):
        with bench.fetch(names[number]) as fetch:
            bench.settle()
            bench.settle()
            assert bytes_of(fetch) == [content(names[number])]
    bench.rest()


def test_a_full_queue_of_the_device_is_told_and_costs_nothing(bench: StoreBench) -> None:
    bench.disk.refuse = CoreError(Reason.QUEUE_FULL, "too much waits")
    with bench.fetch("a", "b") as fetch:
        assert (fetch.over, fetch.reason) == (True, MoveReason.QUEUE_FULL)
    bench.disk.refuse = None
    with bench.fetch("a", "b") as fetch:
        bench.settle()
        assert fetch.ready == 2
    bench.rest()


def test_a_namespace_that_never_stored_finds_nothing(bench: StoreBench) -> None:
    assert bench.found("a", namespace=b"\0" * 32) == 0
    assert bench.found("a", namespace=ALPHA) == 1


def test_what_was_ready_stays_readable_past_the_deadline_until_the_scope_is_left(bench: StoreBench) -> None:
    fetch = bench.fetch("a", "b", seconds=5)
    bench.disk.of("a").finish()
    bench.store.pump()
    body = fetch.body(0)
    bench.clock.now += 5
    bench.store.pump()
    assert (fetch.over, fetch.ready, fetch.reason) == (True, 1, MoveReason.FETCH_LATE)
    for name in "uvwxyz":
        bench.put(name)
        bench.settle()
    assert bytes(body) == bytes(fetch.body(0)) == content("a")
    fetch.close()
    bench.rest()


@pytest.mark.parametrize("what", ["fetch", "deletion"])
def test_the_end_of_a_pin_wakes_who_waits_for_it(bench: StoreBench, what: str) -> None:
    bench.put("w", "x", "y", "z")
    pins = [bench.pin(name) for name in "wxyz"]
    if what == "fetch":
        pins[0].close()
        fetch = bench.fetch("a")
        assert not fetch.over
    else:
        bench.store.delete([key("w")])
        bench.store.pump()
    before = bench.rung
    pins[1].close()
    assert bench.rung == before + 1
    for pin in pins:
        pin.close()
    for _ in range(3):
        bench.settle()
    before = bench.rung
    with bench.pin("z"):
        pass
    assert bench.rung == before, "nobody waits"


def test_sglang_9397_nothing_planned_yet_is_not_done(bench: StoreBench) -> None:
    """Done is a state that is reached, not a count of open transfers that happens to be zero."""
    with bench.fetch() as nothing:
        assert (nothing.over, nothing.ready, nothing.reason) == (True, 0, MoveReason.READY)
    pins = [bench.pin(name) for name in "wxyz" if bench.put(name)]
    pins.pop().close()
    fetch = bench.fetch("a", "b")
    assert bench.disk.reads == [], "no read is planned, for there is no slot"
    assert not fetch.over and not fetch.changed.is_set()
    fetch.close()
    for pin in pins:
        pin.close()
    for _ in range(3):
        bench.settle()
    (order,) = bench.store.delete([key("a")])
    assert order.state is not DeletionState.DONE, "no tier was asked yet"
    bench.settle()
    bench.settle()
    assert order.state is DeletionState.DONE
    bench.rest()


def test_lmcache_1313_a_block_that_the_device_lost_is_a_miss_and_kills_nothing(bench: StoreBench) -> None:
    other = bench.fetch("b")
    lost = bench.fetch("a")
    bench.disk.of("a").finish(CoreError(Reason.IDENTITY_MISMATCH, "an empty header"), part=0)
    bench.settle()
    assert (lost.ready, lost.reason) == (0, MoveReason.IDENTITY_MISMATCH)
    assert bytes_of(other) == [content("b")]
    with bench.fetch("a") as again:
        assert again.reason is MoveReason.MISS
    lost.close()
    other.close()
    bench.rest()
