"""A crash at every operation of the file: what was acknowledged is served byte for byte, nothing else is."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_core.tiers.nvme import NvmeTier
from kvtier_core.tiers.transfer import EraseItem, TransferItem
from tests.forking import Tell, forked
from tests.unit.core.nvme_files import KillingFiles, MemoryFiles
from tests.unit.core.nvme_store import (
    FOREVER,
    NAMESPACE,
    SIZE,
    Heard,
    Promise,
    content,
    identity,
    key,
    open_store,
    write_item,
)

SLOTS = 8


class Workload:
    """Stores, overwrites, evictions and deletions on one store; tells each event before and after it."""

    def __init__(self, tier: NvmeTier, tell: Tell) -> None:
        self.tier = tier
        self.tell = tell
        self.live: dict[str, TransferItem] = {}
        self.generations: dict[str, int] = {}

    def store(self, *names: str, durable: bool = True) -> None:
        names = tuple(dict.fromkeys(names))
        while self.tier.slots.capacity - self.tier.slots.used < len(names):
            self.evict(next(iter(self.live)))
        items = []
        for name in names:
            generation = self.generations[name] = self.generations.get(name, 0) + 1
            named = identity(name, generation, durable=durable)
            items.append(write_item(self.tier, named, content(name, generation)))
            if durable:
                self.tell(f"storing {name} {generation}")
        told = [f"stored {name} {self.generations[name]}" for name in names]
        heard = Heard(len(items), lambda at, error: self.tell(told[at]) if durable and not error else None)
        self.tier.submit_write(items, FOREVER, heard)
        assert heard.wait().reasons() == [None] * len(items)
        for name, item in zip(names, items, strict=True):
            self.tier.publish(item.ref)
            if (old := self.live.pop(name, None)) is not None:
                self.tier.release(old.ref)
            self.live[name] = item

    def evict(self, name: str) -> None:
        item = self.live.pop(name, None)
        if item is not None:
            self.tell(f"evicting {name} {item.identity.replica_generation}")
            self.tier.release(item.ref)

    def delete(self, name: str) -> None:
        item = self.live.pop(name, None)
        self.tell(f"deleting {name} 0")
        self._erase(EraseItem(item.ref if item else None, key(name)))
        self.tell(f"deleted {name} 0")
        if item:
            self.tier.release(item.ref)

    def delete_all(self) -> None:
        """A whole namespace: the live ones by slot, what evictions left by the namespace."""
        names = list(self.generations)
        for name in names:
            self.tell(f"deleting {name} 0")
        refs = [item.ref for item in self.live.values()]
        self._erase(*(EraseItem(ref) for ref in refs), EraseItem(namespace=NAMESPACE))
        for name in names:
            self.tell(f"deleted {name} 0")
        for ref in refs:
            self.tier.release(ref)
        self.live.clear()

    def _erase(self, *items: EraseItem) -> None:
        heard = Heard(len(items))
        self.tier.submit_erase(items, FOREVER, heard)
        assert heard.wait().reasons() == [None] * len(items)


def fixed(tier: NvmeTier, tell: Tell) -> None:
    """Each kind of event, on clean and on dirty slots."""
    work = Workload(tier, tell)
    work.store("a", "b", "c")
    work.store("v", durable=False)
    work.evict("b")
    work.store("d")
    work.store("c")
    work.delete("a")
    work.evict("d")
    work.delete("d")
    work.store("e", "f", "g", "h")
    work.store("a", "d")
    work.delete("c")
    tier.close()


TABLES = {"table": 0, "no table": SIZE}
"""Payloads of at most so many bytes have none."""


def _killed(folder: Path, at: int, how: str, whole: int) -> tuple[list[str], bool]:
    """Events that a child told before it was killed at its `at`-th operation; False: it ran to the end."""

    def child(tell: Tell) -> None:
        fixed(open_store(folder, SLOTS, KillingFiles(at, how), threads=1, whole_bytes=whole), tell)

    return forked(child)


@pytest.mark.parametrize("whole", TABLES.values(), ids=TABLES.keys())
@pytest.mark.parametrize("how", ["before", "half"])
def test_sigkill_at_every_change_of_the_file_loses_nothing_and_resurrects_nothing(
    tmp_path: Path, how: str, whole: int
) -> None:
    at, killed = 0, True
    while killed:
        folder = tmp_path / f"{at}"
        events, killed = _killed(folder, at, how, whole)
        again = open_store(folder, SLOTS)
        Promise.of(events).check(again)
        again.close()
        at += 1
    # One more than there are operations; `half` is only of writes.
    assert at > (25 if how == "before" else 13), "the workload has shrunk: does it still meet all of them?"


def crash_points(
    run: Callable[[NvmeTier, Tell], None], *, lying: bool = False, whole: int = 0
) -> list[tuple[list[str], MemoryFiles]]:
    """(events so far, the files as they are) before each changing operation of a run."""
    events: list[str] = []
    points: list[tuple[list[str], MemoryFiles]] = []
    chance = random.Random(7)
    files = MemoryFiles(lying=lying)

    def watch(_: str) -> None:
        points.append((list(events), files.copied()))
        points.append((list(events), files.after_power_loss(chance)))

    files.watch = watch
    run(open_store(Path("/store"), SLOTS, files, threads=1, whole_bytes=whole), events.append)
    points.append((list(events), files.after_power_loss(chance)))
    return points


@pytest.mark.parametrize("whole", TABLES.values(), ids=TABLES.keys())
def test_power_loss_at_every_change_of_the_file_loses_nothing_acknowledged(whole: int) -> None:
    points = crash_points(fixed, whole=whole)
    assert len(points) > 50
    for events, files in points:
        tier = open_store(Path("/store"), SLOTS, files)
        Promise.of(events).check(tier)
        tier.close()


def test_a_disk_that_lies_about_flushes_is_noticed_by_these_tests() -> None:
    """The control: without durable flushes something acknowledged is lost."""
    lost = 0
    for events, files in crash_points(fixed, lying=True):
        tier = open_store(Path("/store"), SLOTS, files)
        try:
            Promise.of(events).check(tier)
        except AssertionError as error:
            lost += "is lost" in str(error)
        tier.close()
    assert lost > 5


STEP = st.one_of(
    st.tuples(st.just("store"), st.lists(st.sampled_from("abcdefghij"), min_size=1, max_size=4)),
    st.tuples(st.just("volatile"), st.lists(st.sampled_from("xyz"), min_size=1, max_size=2)),
    st.tuples(st.just("evict"), st.lists(st.sampled_from("abcdefghijxyz"), min_size=1, max_size=2)),
    st.tuples(st.just("delete"), st.lists(st.sampled_from("abcdefghij"), min_size=1, max_size=2)),
    st.tuples(st.just("delete_all"), st.just(["a"])),
)


@settings(max_examples=25, deadline=None)
@given(steps=st.lists(STEP, min_size=3, max_size=12), seed=st.integers(0, 2**32 - 1))
def test_any_sequence_survives_power_losses_one_after_another(
    steps: list[tuple[str, list[str]]], seed: int
) -> None:
    """Each loss falls at a random operation, recovery included; what follows starts from what was left, with
    blocks of the other form among its own."""
    chance = random.Random(seed)
    events: list[str] = []
    files = MemoryFiles()
    for _ in range(3):
        points: list[tuple[int, MemoryFiles]] = []

        def watch(_: str, files: MemoryFiles = files, points: list[tuple[int, MemoryFiles]] = points) -> None:
            points.append((len(events), files.after_power_loss(chance)))

        files.watch = watch
        tier = open_store(Path("/store"), SLOTS, files, threads=1, whole_bytes=chance.choice((0, SIZE)))
        work = adopted(tier, events, Promise.of(events).check(tier))
        for step in steps:
            run_step(work, *step)
        tier.close()
        kept, files = chance.choice(points)
        del events[kept:]
    last = open_store(Path("/store"), SLOTS, files, threads=1)
    Promise.of(events).check(last)
    last.close()


def adopted(tier: NvmeTier, events: list[str], kept: dict[bytes, TransferItem]) -> Workload:
    """A workload that goes on with what recovery kept."""
    work = Workload(tier, events.append)
    for event in events:
        _, name, number = event.split()
        work.generations[name] = max(work.generations.get(name, 0), int(number))
    names = {key(name): name for name in work.generations}
    work.live = {names[digest]: item for digest, item in kept.items()}
    return work


def run_step(work: Workload, verb: str, names: list[str]) -> None:
    if verb == "delete_all":
        work.delete_all()
    elif verb in ("store", "volatile"):
        work.store(*names, durable=verb == "store")
    else:
        for name in names:
            work.evict(name) if verb == "evict" else work.delete(name)
