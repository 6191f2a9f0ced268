"""A crash at every operation of the files of a whole block store: what its writers were told is durable is
served byte for byte, and what was deleted is not served."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvtier_core.blockstore.keptnotes import KeptNotes
from kvtier_core.blockstore.outcomes import PutOutcome
from kvtier_core.blockstore.store import BlockStore
from kvtier_core.errors import CoreError
from kvtier_core.tiers.arena import ArenaOptions
from kvtier_core.tiers.cpu import CpuTier
from kvtier_core.tiers.fileops import FileOps, OsFileOps
from kvtier_core.tiers.nvme import NvmeTier
from kvtier_core.transactions import MoveReason
from kvtier_core.transactions.deletion import DeletionState
from kvtier_core.transactions.erasing import JournalFile
from tests.unit.core.nvme_files import KillingFiles, MemoryFiles
from tests.unit.core.nvme_store import LAYOUT, NAMESPACE, SIZE, content, key, open_store

FAR = 1e9
MEMORY, STORAGE = 4, 10
Tell = Callable[[str], None]


class Machine:
    """A store on files, pumped by hand; `tell` hears of promises as a client does."""

    def __init__(self, folder: Path, files: FileOps, tell: Tell = lambda _: None) -> None:
        self.tell = tell
        self._rang = threading.Event()
        ram = CpuTier("ram", LAYOUT, MEMORY, options=ArenaOptions(segment_bytes=SIZE))
        self.disk: NvmeTier = open_store(folder, STORAGE, files, threads=1)
        self.journal = JournalFile(folder, "deletions", files)
        self.notes = KeptNotes(folder, "kept", files)
        self.store = BlockStore(
            [ram, self.disk],
            lambda: 1.0,
            capacity=256,
            wake=self._rang.set,
            journal=self.journal,
            notes={1: self.notes},
        )
        self.generations: dict[str, int] = {}

    def until(self, done: Callable[[], bool]) -> None:
        for _ in range(3000):
            self._rang.clear()
            self.store.pump()
            if done():
                return
            self._rang.wait(0.01)
        raise AssertionError("it never came about")

    def put(self, *names: str, durable: bool = True, droppable: bool = False) -> None:
        for name in names:
            self.tell(f"storing {name}")
            self.until(lambda name=name: self._stored(name, droppable))  # type: ignore[misc]
        if durable:
            scope = self.store.persist([key(name) for name in names], namespace=NAMESPACE, deadline=FAR)
            self.until(lambda: scope.over)
            assert scope.reasons == [MoveReason.READY] * len(names), scope.messages
            for name in names:
                self.tell(f"{'durable' if droppable else 'kept'} {name}")

    def _stored(self, name: str, droppable: bool) -> bool:
        (stored,) = self.store.put(
            [key(name)], [content(name)], namespace=NAMESPACE, deadline=FAR, droppable=droppable
        )
        return stored.outcome in (PutOutcome.STORED, PutOutcome.EXISTED)

    def delete(self, *names: str) -> None:
        for name in names:
            self.tell(f"deleting {name}")
        orders = self.store.delete([key(name) for name in names])
        self.until(lambda: all(order.state is DeletionState.DONE for order in orders))
        for name in names:
            self.tell(f"deleted {name}")

    def served(self, name: str) -> bytes | None:
        with self.store.fetch([key(name)], namespace=NAMESPACE, deadline=FAR) as fetch:
            self.until(lambda: fetch.over)
            return bytes(fetch.body(0)) if fetch.ready else None

    def may_be_lost(self, name: str) -> bool:
        directory = self.store.directory
        return bool(directory.droppable[directory.find(key(name))])

    def close(self) -> None:
        self.disk.close()
        self.journal.close()
        self.notes.close()


def workload(machine: Machine) -> None:
    """Durable stores among others, beyond what memory holds, over evictions and deletions."""
    machine.put("a", "b")
    machine.put("x", "y", durable=False, droppable=True)
    machine.put("c")
    machine.delete("a")
    machine.put("d", "e", "f")
    machine.put("z", "w", durable=False, droppable=True)
    machine.put("a", "g")
    machine.delete("x", "d")
    machine.put("h", droppable=True)
    machine.put("b")
    machine.put("i", droppable=True)
    machine.put("i")
    machine.delete("i", "e")
    machine.put("i", "j", droppable=True)
    machine.put("j")
    machine.close()


def check(machine: Machine, told: Sequence[str]) -> None:
    stored: set[str] = set()
    must: set[str] = set()
    kept: set[str] = set()
    for event in told:
        verb, name = event.split()
        if verb == "storing":
            stored.add(name)
        elif verb == "durable":
            must.add(name)
        elif verb == "kept":
            must.add(name)
            kept.add(name)
        elif verb == "deleting":
            must.discard(name)
            kept.discard(name)
        else:
            stored.discard(name)
    for name in sorted(kept):
        assert not machine.may_be_lost(name), f"{name} was said not to be lost, and may be: {told}"
    # What may be lost makes room for others.
    must -= {"h", "i", "j"} - kept
    for name in sorted(stored | must | set("abcdefghijxyzw")):
        found = machine.served(name)
        if found is None:
            assert name not in must, f"{name} was said to be durable and is lost: {told}"
            continue
        assert name in stored, f"{name} was deleted, or never stored, and is served: {told}"
        assert found == content(name)
    machine.close()


def _played(folder: Path, at: int, how: str) -> tuple[list[str], bool]:
    """What a child told before it was killed at its `at`-th operation; False: it ran to the end."""
    back, out = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(back)
        with os.fdopen(out, "w") as pipe:
            try:
                machine = Machine(
                    folder, KillingFiles(at, how), lambda event: print(event, file=pipe, flush=True)
                )
                workload(machine)
                print("end", file=pipe, flush=True)
            finally:
                os._exit(3)
    os.close(out)
    with os.fdopen(back, "rb") as pipe:
        told = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert killed or told.endswith("end\n"), f"the child failed by itself: {told!r}"
    return told.removesuffix("end\n").splitlines(), killed


@pytest.mark.parametrize("how", ["before", "half"])
def test_sigkill_at_every_change_of_the_files_costs_nothing_that_was_said_to_be_durable(
    tmp_path: Path, how: str
) -> None:
    at, killed = 0, True
    while killed:
        folder = tmp_path / f"{at}"
        told, killed = _played(folder, at, how)
        check(Machine(folder, OsFileOps()), told)
        at += 1
    assert at > (30 if how == "before" else 15), "the workload has shrunk"


def test_power_loss_at_every_change_of_the_files_costs_nothing_that_was_said_to_be_durable() -> None:
    told: list[str] = []
    points: list[tuple[list[str], MemoryFiles]] = []
    chance = random.Random(11)
    files = MemoryFiles()
    files.watch = lambda _: points.append((list(told), files.after_power_loss(chance)))
    workload(Machine(Path("/store"), files, told.append))
    assert len(points) > 30
    for events, left in points:
        check(Machine(Path("/store"), left), events)


def test_a_disk_that_lies_about_flushes_is_noticed_by_these_tests() -> None:
    told: list[str] = []
    points: list[tuple[list[str], MemoryFiles]] = []
    chance = random.Random(11)
    files = MemoryFiles(lying=True)
    files.watch = lambda _: points.append((list(told), files.after_power_loss(chance)))
    workload(Machine(Path("/store"), files, told.append))
    lost = 0
    for events, left in points:
        try:
            check(Machine(Path("/store"), left), events)
        except (AssertionError, CoreError) as error:
            lost += isinstance(error, CoreError) or "is lost" in str(error)
    assert lost > 3
