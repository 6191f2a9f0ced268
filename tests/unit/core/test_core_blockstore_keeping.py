"""The stronger promise about a block: noted beside its copies, told only then, believed after a restart."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier_core.blockstore.keptnotes import ENTRY_BYTES, KeptNotes
from kvtier_core.blockstore.outcomes import PutOutcome, Stored
from kvtier_core.blockstore.store import BlockStore
from kvtier_core.errors import CoreError, Reason
from kvtier_core.tiers.arena import ArenaOptions
from kvtier_core.tiers.cpu import CpuTier
from kvtier_core.tiers.fileops import OsFileOps
from kvtier_core.tiers.nvme import NvmeTier
from kvtier_core.tiers.slots import SlotRef
from kvtier_core.transactions import MoveKind, MoveReason
from tests.unit.core.nvme_files import ScriptedFiles, failing
from tests.unit.core.nvme_store import LAYOUT, NAMESPACE, SIZE, content, key, open_store

FAR = 1e9


class Rig:
    """A store of memory and storage, pumped by hand, whose notes are written when `errands` are run."""

    def __init__(self, folder: Path, *, waits: bool = False) -> None:
        self.files = ScriptedFiles()
        self.errands: list[Callable[[], None]] = []
        self.disk: NvmeTier = open_store(folder, 12, OsFileOps(), threads=1)
        run = self.errands.append if waits else None
        self.notes = KeptNotes(folder, "kept", self.files, run)
        ram = CpuTier("ram", LAYOUT, 6, options=ArenaOptions(segment_bytes=SIZE))
        self._rang = threading.Event()
        self.store = BlockStore(
            [ram, self.disk], lambda: 1.0, capacity=256, wake=self._rang.set, notes={1: self.notes}
        )

    def put(self, name: str, *, droppable: bool) -> Stored:
        (stored,) = self.store.put(
            [key(name)], [content(name)], namespace=NAMESPACE, deadline=FAR, droppable=droppable
        )
        return stored

    def on_disk(self, name: str) -> None:
        """A droppable block with a copy in storage."""
        assert self.put(name, droppable=True).outcome is PutOutcome.STORED
        scope = self.store.persist([key(name)], namespace=NAMESPACE, deadline=FAR)
        for _ in range(6000):
            self.store.pump()
            if scope.over and not self.store.directory.write_txn[self.line(name)]:
                break
            self._rang.wait(0.01)
        assert scope.reasons == [MoveReason.READY]

    def line(self, name: str) -> int:
        return self.store.directory.find(key(name))

    def droppable(self, name: str) -> bool:
        return bool(self.store.directory.droppable[self.line(name)])

    def close(self) -> None:
        self.disk.close()
        self.notes.close()


def test_the_promise_is_told_when_it_is_written_down_and_not_before(tmp_path: Path) -> None:
    rig = Rig(tmp_path, waits=True)
    rig.on_disk("a")
    early = rig.put("a", droppable=False)
    assert (early.outcome, early.reason) == (PutOutcome.REFUSED, MoveReason.CREDIT_PRESSURE), "ask again"
    assert not rig.droppable("a"), "in this process it holds at once"
    assert rig.put("a", droppable=False).reason is MoveReason.CREDIT_PRESSURE
    assert rig.put("a", droppable=True).outcome is PutOutcome.EXISTED, "who asks for less is told at once"
    (write,) = rig.errands
    write()
    assert rig.put("a", droppable=False).outcome is PutOutcome.EXISTED
    assert rig.files.calls["sync"] == 1
    rig.close()
    again = Rig(tmp_path)
    assert not again.droppable("a")
    again.close()


def test_a_block_that_is_in_memory_only_needs_no_note(tmp_path: Path) -> None:
    rig = Rig(tmp_path, waits=True)
    rig.put("a", droppable=True)
    assert rig.put("a", droppable=False).outcome is PutOutcome.EXISTED
    assert not rig.errands
    rig.close()


@pytest.mark.parametrize("operation", ["open", "write", "sync", "sync_folder"])
def test_a_promise_that_cannot_be_written_down_is_refused_and_may_be_asked_for_again(
    tmp_path: Path, operation: str
) -> None:
    rig = Rig(tmp_path)
    rig.on_disk("a")
    rig.files.calls.clear()
    rig.files.script = failing(operation, 0, errno.EIO, sticky=True)
    for _ in range(3):
        refused = rig.put("a", droppable=False)
        assert (refused.outcome, refused.reason) == (PutOutcome.REFUSED, MoveReason.STORAGE_UNAVAILABLE)
    rig.files.script = lambda _operation, _number: None
    # What was tried when the last refusal was told failed as well.
    assert rig.put("a", droppable=False).outcome is PutOutcome.REFUSED
    assert rig.put("a", droppable=False).outcome is PutOutcome.EXISTED
    rig.close()
    again = Rig(tmp_path)
    assert not again.droppable("a")
    again.close()


def test_a_note_of_a_copy_that_is_gone_says_nothing_of_its_slots_next_block(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.on_disk("a")
    rig.put("a", droppable=False)
    slot = rig.store.directory.replica(rig.line("a"), 1).slot
    rig.store.moves.drop(rig.line("a"), 0)
    rig.store.moves.drop(rig.line("a"), 1, last=True)
    rig.on_disk("b")
    assert rig.store.directory.replica(rig.line("b"), 1).slot == slot
    rig.close()
    again = Rig(tmp_path)
    assert again.droppable("b")
    assert not any((tmp_path / "kept").read_bytes()), "and it is forgotten"
    again.close()


@pytest.mark.parametrize("at", [0, 9, 20, 28, 33], ids=["magic", "slot", "generation", "copy", "checksum"])
def test_a_damaged_note_counts(tmp_path: Path, at: int) -> None:
    rig = Rig(tmp_path)
    rig.on_disk("a")
    rig.on_disk("b")
    rig.put("a", droppable=False)
    slot = rig.store.directory.replica(rig.line("a"), 1).slot
    rig.close()
    data = bytearray((tmp_path / "kept").read_bytes())
    whole = bytes(data)
    data[slot * ENTRY_BYTES + at] ^= 0x10
    (tmp_path / "kept").write_bytes(bytes(data))
    again = Rig(tmp_path)
    assert not again.droppable("a") and again.droppable("b")
    assert (tmp_path / "kept").read_bytes() == whole, "it is whole again"
    again.close()


def test_notes_that_cannot_be_read_open_no_store(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.on_disk("a")
    rig.put("a", droppable=False)
    rig.close()
    with pytest.raises(CoreError) as refused:
        KeptNotes(tmp_path, "kept", ScriptedFiles(failing("read", 0, errno.EIO)))
    assert refused.value.reason is Reason.STORAGE_UNAVAILABLE
    read = KeptNotes(tmp_path, "kept", OsFileOps())
    assert not read.covers((SlotRef(0, 99), 1)), "another life of the slot"
    read.close()


class Pair:
    """Memory over two stores on flash, each with notes."""

    def __init__(self, folder: Path) -> None:
        self.disks = [open_store(folder / name, 12, OsFileOps(), threads=1) for name in ("near", "far")]
        self.notes = {at: KeptNotes(folder, f"kept-{at}", OsFileOps()) for at in (1, 2)}
        ram = CpuTier("ram", LAYOUT, 6, options=ArenaOptions(segment_bytes=SIZE))
        self.store = BlockStore([ram, *self.disks], lambda: 1.0, capacity=256, notes=self.notes)

    def put(self, name: str, *, droppable: bool) -> Stored:
        (stored,) = self.store.put(
            [key(name)], [content(name)], namespace=NAMESPACE, deadline=FAR, droppable=droppable
        )
        return stored

    def droppable(self, name: str) -> bool:
        return bool(self.store.directory.droppable[self.store.directory.find(key(name))])

    def close(self) -> None:
        for disk in self.disks:
            disk.close()
        for notes in self.notes.values():
            notes.close()


@pytest.mark.parametrize("noted", [True, False], ids=["noted", "in its header"])
def test_a_promise_holds_though_an_older_copy_is_found_first(tmp_path: Path, noted: bool) -> None:
    rig = Pair(tmp_path)
    rig.put("a", droppable=True)
    line = rig.store.directory.find(key("a"))
    rig.store.moves.run(MoveKind.DEMOTE, line, 1)
    if noted:
        rig.store.moves.run(MoveKind.DEMOTE, line, 2)
        assert rig.put("a", droppable=False).outcome is not PutOutcome.STORED
        assert rig.put("a", droppable=False).outcome is PutOutcome.EXISTED
    else:
        # What lies in the near store then is of an earlier life of the block.
        rig.store.moves.drop(line, 1, last=True)
        rig.put("a", droppable=False)
        rig.store.moves.run(MoveKind.DEMOTE, rig.store.directory.find(key("a")), 2)
    rig.close()
    for _ in range(2):
        again = Pair(tmp_path)
        assert not again.droppable("a")
        again.close()


def test_a_defect_while_a_promise_is_written_down_is_told_and_seen(tmp_path: Path) -> None:
    def broken(operation: str, _number: int) -> None:
        if operation == "sync":
            raise ZeroDivisionError("a defect")

    rig = Rig(tmp_path, waits=True)
    rig.on_disk("a")
    rig.put("a", droppable=False)
    rig.files.script = broken
    with pytest.raises(ZeroDivisionError):
        rig.errands.pop()()
    rig.files.script = lambda _operation, _number: None
    refused = rig.put("a", droppable=False)
    assert (refused.outcome, refused.reason) == (PutOutcome.REFUSED, MoveReason.STORAGE_UNAVAILABLE)
    rig.errands.pop()()
    assert rig.put("a", droppable=False).outcome is PutOutcome.EXISTED
    rig.close()
