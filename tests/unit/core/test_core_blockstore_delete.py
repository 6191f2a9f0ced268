"""Deletion against everything that is on its way, what is told of each key, and what a restart finds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier_core.blockstore.driver import Bell, Driver
from kvtier_core.blockstore.outcomes import PutOutcome
from kvtier_core.blockstore.store import BlockStore
from kvtier_core.errors import CoreError, Reason
from kvtier_core.tiers.arena import ArenaOptions
from kvtier_core.tiers.cpu import CpuTier
from kvtier_core.tiers.fileops import OsFileOps
from kvtier_core.transactions import MoveReason
from kvtier_core.transactions.deletion import DeletionState, EntryKind, JournalEntry
from kvtier_core.transactions.erasing import JournalFile
from tests.unit.core.nvme_files import MemoryFiles
from tests.unit.core.nvme_store import open_store
from tests.unit.core.storebench import (
    ALPHA,
    BETA,
    LAYOUT,
    NEVER,
    SIZE,
    Clock,
    StoreBench,
    content,
    key,
    matrix,
)


def promotion(bench: StoreBench) -> Any:
    bench.on_disk("a")
    return bench.fetch("a")


def demotion(bench: StoreBench) -> Any:
    bench.put("a")
    bench.store.reclaim.make_room(0, 4)
    assert bench.disk.held
    return None


def parked(bench: StoreBench) -> Any:
    bench.on_disk("a")
    bench.put("w", "x", "y", "z")
    fetch = bench.fetch("a")
    assert not fetch.over
    return fetch


def pinned(bench: StoreBench) -> Any:
    bench.put("a")
    return bench.pin("a")


@pytest.mark.parametrize("racing", [promotion, demotion, parked, pinned], ids=lambda each: each.__name__)
def test_h3_a_deletion_wins_over_whatever_is_on_its_way(racing: Callable[[StoreBench], Any]) -> None:
    bench = StoreBench(memory=4)
    scope = racing(bench)
    (order,) = bench.store.delete([key("a")])
    assert bench.store.delete([key("a")]) == [order], "a second order joins the first"
    assert bench.found("a") == 0
    with bench.fetch("a") as fetch:
        assert (fetch.over, fetch.reason) == (True, MoveReason.MISS)
    if racing in (promotion, parked):
        assert (scope.over, scope.reason) == (True, MoveReason.TOMBSTONED)
    if racing is pinned:
        bench.settle()
        assert order.state is not DeletionState.DONE, "somebody reads it"
        assert bytes(scope.body(0)) == content("a")
    assert bench.put("a")[0].reason is MoveReason.TOMBSTONED
    if scope is not None:
        scope.close()
    bench.settle()
    bench.settle()
    assert order.state is DeletionState.DONE
    assert bench.found("a") == 0 and bench.explain("a") == "deleted"
    assert bench.put("a")[0].generation > 0
    bench.rest()


def test_a_call_for_many_blocks_is_made_durable_twice() -> None:
    entries: list[EntryKind] = []

    class Counting:
        def append(self, entry: JournalEntry, done: Callable[[CoreError | None], None]) -> None:
            entries.append(entry.kind)
            done(None)

    bench = StoreBench(memory=64, journal=Counting())
    names = [str(number) for number in range(48)]
    bench.put(*names)
    (order,) = bench.store.delete([key(name) for name in names])
    assert [bench.found(name) for name in names] == [0] * 48
    bench.settle()
    assert order.state is DeletionState.DONE
    assert entries == [EntryKind.INTENT, EntryKind.RECEIPT]
    assert {bench.explain(name) for name in names} == {"deleted"}
    bench.rest()


def test_a_late_read_of_a_deleted_block_touches_nobody() -> None:
    bench = StoreBench()
    bench.on_disk("a")
    fetch = bench.fetch("a")
    held = bench.disk.of("a")
    bench.store.delete([key("a")])
    bench.store.pump()
    fetch.close()
    bench.put("b", "c", "d")
    used = bench.ram.slots.used
    assert used == 4, "the slot that bytes may still reach is nobody's"
    held.finish()
    bench.settle()
    with bench.pin("b", "c", "d") as pin:
        assert [bytes(pin.body(index)) for index in range(3)] == [content(name) for name in "bcd"]
    bench.rest()


def test_a_namespace_goes_as_a_whole_and_takes_nothing_meanwhile() -> None:
    bench = StoreBench(memory=8)
    bench.on_disk("a")
    bench.put("b")
    bench.put("other", namespace=BETA)
    scope = bench.reserve("c")
    order = bench.store.delete_namespace(ALPHA)
    with pytest.raises(CoreError):
        bench.put("d")
    assert bench.store.delete_namespace(ALPHA) is order
    scope.close()
    bench.settle()
    bench.settle()
    assert order.state is DeletionState.DONE
    assert [bench.found(name) for name in "abc"] == [0, 0, 0]
    assert bench.found("other", namespace=BETA) == 1
    assert bench.put("d")[0].generation > 0
    bench.rest()


def test_deleting_what_is_not_there_is_done_and_says_so() -> None:
    bench = StoreBench()
    (order,) = bench.store.delete([key("nobody")])
    bench.settle()
    assert order.state is DeletionState.DONE
    bench.rest()


# What is told of each key.


def test_every_state_of_a_block_is_explained() -> None:
    bench = StoreBench(memory=2, storage=2)
    assert bench.explain("a") == "unknown"
    scope = bench.reserve("a")
    assert bench.explain("a") == "storing"
    scope.landing(0)[:] = content("a")
    scope.publish()
    scope.close()
    found = bench.store.explain(key("a"))
    assert (found.state, found.reason) == ("published", MoveReason.READY)
    assert [(copy.tier, copy.state, copy.authority) for copy in found.replicas] == [
        ("ram", "PUBLISHED", True)
    ]
    bench.store.reclaim.make_room(0, 2)
    assert bench.explain("a") == "moving"
    bench.settle()
    (copy,) = bench.store.explain(key("a")).replicas
    assert (copy.tier, copy.counts, copy.readers) == ("disk", True, 0)
    for name in "bcde":
        while bench.put(name, droppable=True)[0].reason is MoveReason.CREDIT_PRESSURE:
            bench.settle()
    lost = [name for name in "bcde" if bench.explain(name) == "evicted"]
    assert lost, "the lowest tier was full and they were droppable"
    assert bench.explain("a") == "published", "it was not droppable"
    pin = bench.pin("e")
    bench.store.delete([key("e")])
    assert bench.explain("e") == "deleted"
    pin.close()
    bench.settle()
    bench.settle()
    assert bench.explain("e") == "deleted"
    bench.rest()


# Restart.


def reopened(
    folder: Path, clock: Clock, memory: int = 8, slots: int = 16, journal: bool = True, **more: Any
) -> tuple[BlockStore, Any, JournalFile | None]:
    ram = CpuTier("ram", LAYOUT, memory, clock=clock, options=ArenaOptions(segment_bytes=SIZE))
    disk = open_store(folder, slots, clock=clock, **more)
    written = JournalFile(folder, "deletions", OsFileOps()) if journal else None
    store = BlockStore([ram, disk], clock, watermarks=NEVER, capacity=4096, journal=written)
    return store, disk, written


def pump_until(store: BlockStore, done: Callable[[], bool]) -> None:
    """Waits for the flash tier's own threads."""
    bell = Bell()
    for _ in range(6000):
        store.pump()
        if done():
            return
        bell.wait(0.01)
    raise AssertionError("it never happened")


def put_down(store: BlockStore, *names: str, **more: Any) -> None:
    more.setdefault("namespace", ALPHA)
    stored = store.put([key(name) for name in names], [content(name) for name in names], deadline=1e9, **more)
    assert all(each.generation for each in stored)
    store.reclaim.make_room(0, store.parts.tiers[0].slots.capacity)
    pump_until(store, lambda: store.parts.tiers[0].slots.used == 0)


def test_a_restart_serves_what_was_down_and_forgets_what_was_not(tmp_path: Path) -> None:
    clock = Clock()
    store, disk, journal = reopened(tmp_path, clock)
    put_down(store, "a", "b")
    put_down(store, "other", namespace=BETA)
    store.put([key("hot")], [content("hot")], namespace=ALPHA, deadline=1e9)
    disk.close()
    journal.close()
    store, disk, journal = reopened(tmp_path, clock)
    assert len(store.lookup(matrix("a", "b"), ALPHA)) == 2
    assert store.lookup(matrix("a"), BETA) == [] and len(store.lookup(matrix("other"), BETA)) == 1
    assert store.explain(key("hot")).state == "unknown"
    with store.fetch([key("a"), key("b")], namespace=ALPHA, deadline=1e9) as fetch:
        pump_until(store, lambda: fetch.over)
        assert [bytes(fetch.body(index)) for index in range(2)] == [content("a"), content("b")]
    store.check()
    disk.close()
    journal.close()


def test_a_block_that_may_not_be_lost_is_none_that_may_after_a_restart(tmp_path: Path) -> None:
    clock = Clock()
    store, disk, journal = reopened(tmp_path, clock, slots=3)
    put_down(store, "kept", cost=1.0)
    put_down(store, "spare", cost=1.0, droppable=True)
    put_down(store, "other", cost=2.0, droppable=True)
    disk.close()
    journal.close()
    store, disk, journal = reopened(tmp_path, clock, slots=3)
    assert store.directory.kept == 1
    store.put([key("new")], [content("new")], namespace=ALPHA, deadline=1e9)
    store.reclaim.make_room(0, 8)
    pump_until(store, lambda: store.parts.tiers[0].slots.used == 0)
    assert len(store.lookup(matrix("kept"), ALPHA)) == 1
    assert store.explain(key("spare")).state == "evicted"
    disk.close()
    journal.close()


@pytest.mark.parametrize("whole", [False, True], ids=["one-block", "namespace"])
def test_h3_a_deletion_that_a_crash_cut_off_goes_on_and_is_never_served(tmp_path: Path, whole: bool) -> None:
    clock = Clock()
    store, disk, journal = reopened(tmp_path, clock)
    put_down(store, "a", "b")
    put_down(store, "other", namespace=BETA)
    if whole:
        store.delete_namespace(ALPHA)
    else:
        store.delete([key("a")])
    assert [entry.kind for entry in JournalFileReader(tmp_path).entries()] == [EntryKind.INTENT]
    # The process ends before a tier has erased anything.
    disk.close()
    journal.close()
    store, disk, journal = reopened(tmp_path, clock)
    assert store.lookup(matrix("a"), ALPHA) == []
    assert len(store.lookup(matrix("b"), ALPHA)) == (0 if whole else 1)
    pump_until(store, lambda: not store.deletions.open())
    assert store.explain(key("a")).state in ("deleted", "unknown")
    assert len(store.lookup(matrix("other"), BETA)) == 1
    store.check()
    disk.close()
    journal.close()
    store, disk, journal = reopened(tmp_path, clock)
    assert not store.deletions.open(), "the receipt is durable"
    assert store.lookup(matrix("a"), ALPHA) == []
    disk.close()
    journal.close()


class JournalFileReader:
    """The entries of a journal that another has open."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def entries(self) -> tuple[Any, ...]:
        copy = self._folder / "copy"
        copy.mkdir(exist_ok=True)
        (copy / "deletions").write_bytes((self._folder / "deletions").read_bytes())
        journal = JournalFile(copy, "deletions", OsFileOps())
        try:
            return journal.entries
        finally:
            journal.close()


def test_a_flip_on_flash_is_refused_by_the_real_tier_and_the_block_is_lost(tmp_path: Path) -> None:
    clock = Clock()
    files = MemoryFiles()
    ram = CpuTier("ram", LAYOUT, 4, clock=clock)
    disk = open_store(tmp_path, 8, files, clock=clock)
    store = BlockStore([ram, disk], clock, watermarks=NEVER, capacity=4096)
    put_down(store, "a", "b")
    (node,) = files.nodes.values()
    at = bytes(node.now).index(content("a"))
    node.now[at + 99] ^= 1
    with store.fetch([key("b"), key("a")], namespace=ALPHA, deadline=1e9) as fetch:
        pump_until(store, lambda: fetch.over)
        assert (fetch.ready, fetch.reason) == (1, MoveReason.CHECKSUM_MISMATCH)
        assert bytes(fetch.body(0)) == content("b")
    pump_until(store, lambda: store.directory.locate(key("a")) < 0)
    assert store.explain(key("a")).state == "lost"
    store.check()
    disk.close()


# With the thread.


def test_the_driver_puts_fetches_and_deletes(tmp_path: Path) -> None:
    import time

    bell = Bell()
    ram = CpuTier("ram", LAYOUT, 2, clock=time.monotonic, options=ArenaOptions(segment_bytes=SIZE))
    disk = open_store(tmp_path, 32, clock=time.monotonic)
    store = BlockStore([ram, disk], time.monotonic, wake=bell.ring, capacity=4096)
    driver = Driver(store, bell, time.monotonic)
    driver.start()
    until = time.monotonic() + 120
    names = [f"n{number}" for number in range(12)]
    stored = driver.put(
        [key(name) for name in names], [content(name) for name in names], namespace=ALPHA, deadline=until
    )
    assert all(each.generation for each in stored), stored
    for name in names:
        with store.fetch([key(name)], namespace=ALPHA, deadline=until) as fetch:
            assert driver.wait_for(fetch, 1, until) == 1
            assert bytes(fetch.body(0)) == content(name)
    assert driver.wait_deleted(store.delete([key(name) for name in names[:3]]), until)
    assert [len(store.lookup(matrix(name), ALPHA)) for name in names[:4]] == [0, 0, 0, 1]
    driver.close()
    with pytest.raises(CoreError) as ended:
        driver.wait_until(lambda: False, until)
    assert ended.value.reason is Reason.DRAINING
    store.check()
    disk.close()


def late(bench: StoreBench, driver: Driver) -> None:
    bench.clock.now += 5


def forbidden(bench: StoreBench, driver: Driver) -> None:
    bench.pin("a")
    bench.store.delete_namespace(ALPHA)


def closed(bench: StoreBench, driver: Driver) -> None:
    driver._stopping = True


@pytest.mark.parametrize("what", [late, forbidden, closed], ids=lambda each: each.__name__)
def test_a_put_that_ends_half_way_says_what_became_of_each_block(
    what: Callable[[StoreBench, Driver], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends between two rounds, after every look at the clock that comes before the second."""
    bench = StoreBench(memory=2)
    driver = Driver(bench.store, Bell(), bench.clock)
    put, rounds = bench.store.put, 0

    def ending(*arguments: Any, **options: Any) -> Any:
        nonlocal rounds
        rounds += 1
        if rounds == 2:
            what(bench, driver)
        return put(*arguments, **options)

    monkeypatch.setattr(bench.store, "put", ending)
    names = ("a", "b", "c")
    stored = driver.put(
        [key(name) for name in names],
        [content(name) for name in names],
        namespace=ALPHA,
        deadline=bench.clock.now + 5,
    )
    assert rounds == 2
    assert [each.generation > 0 for each in stored] == [True, True, False]
    assert stored[2].outcome is PutOutcome.REFUSED
    assert stored[2].reason in (MoveReason.NO_DESTINATION_CAPACITY, MoveReason.CREDIT_PRESSURE)
    bench.settle()


def test_a_put_that_cannot_begin_raises_why() -> None:
    bench = StoreBench(memory=2)
    driver = Driver(bench.store, Bell(), bench.clock)
    with pytest.raises(CoreError) as refused:
        driver.put([key("a")], [content("a")], namespace=ALPHA, deadline=bench.clock.now)
    assert refused.value.reason is Reason.DEADLINE


def test_the_journal_of_deletions_does_not_grow_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier_core.blockstore.store.JOURNAL_BYTES", 4096)
    clock = Clock()
    store, disk, journal = reopened(tmp_path, clock)
    assert journal is not None
    for number in range(40):
        store.delete([key(str(number))])
        pump_until(store, lambda: not store.deletions.open())
        assert journal.size < 4096 + 2048
    disk.close()
    journal.close()
    store, disk, journal = reopened(tmp_path, clock)
    assert journal is not None
    assert journal.size == 0, "nothing is open, so nothing need be remembered"
    disk.close()
    journal.close()


def test_reads_that_deletions_end_leave_the_window() -> None:
    """Each would otherwise take a place in it for ever, and in the end nothing would be read any more."""
    bench = StoreBench(memory=4, storage=8)
    for turn in range(200):
        name = f"gone{turn}"
        bench.on_disk(name)
        with bench.fetch(name):
            assert bench.store.reads.flying == 1
            bench.store.delete([key(name)])
            bench.settle()
    assert bench.store.reads.flying == 0 and bench.store.reads.parked == 0
    bench.on_disk("x")
    with bench.fetch("x") as fetch:
        bench.settle()
        assert bytes(fetch.body(0)) == content("x")
    bench.rest()


def test_a_parked_read_of_a_deleted_block_is_let_go() -> None:
    bench = StoreBench(memory=4, storage=8)
    fetch = parked(bench)
    assert bench.store.reads.parked == 1
    bench.store.delete([key("a")])
    bench.store.pump()
    assert fetch.reason is MoveReason.TOMBSTONED and bench.store.reads.parked == 0
    fetch.close()
    bench.rest()


def test_no_deletion_begins_between_its_question_and_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A namespace's deletion takes the lines that are there: a block stored after that would outlive it."""
    bench = StoreBench()
    lock, refuses = bench.store.parts.lock, bench.store.deletions.refuses
    had: list[bool] = []

    def other() -> None:
        had.append(lock.acquire(blocking=False))
        if had[-1]:
            lock.release()

    def asked(namespace: bytes) -> bool:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(60)
        return refuses(namespace)

    monkeypatch.setattr(bench.store.deletions, "refuses", asked)
    bench.put("a")
    assert had == [False]
    assert bench.found("a") == 1
