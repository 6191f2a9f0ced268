"""The journal of deletions on disk: what was said to be durable is read back, and damage is never silent."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvtier_core.errors import CoreError, Reason
from kvtier_core.tiers.fileops import Buffer, OsFileOps
from kvtier_core.transactions.deletion import (
    EntryKind,
    JournalEntry,
)
from kvtier_core.transactions.erasing import JournalFile
from tests.unit.core.builders import Unsynced
from tests.unit.core.txnbench import block_key

SPACE = b"n" * 32


def entry(number: int, kind: EntryKind = EntryKind.INTENT) -> JournalEntry:
    return JournalEntry(kind, number, (block_key(number),), SPACE if number % 2 else b"", 7, ("hbm", "flash"))


class FullDisk(OsFileOps):
    """Fails once at the operation named; a short write is half of it."""

    fails = ""

    def _strike(self, operation: str) -> bool:
        struck, self.fails = self.fails == operation, "" if self.fails == operation else self.fails
        return struck

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        if self._strike("write"):
            raise OSError(errno.ENOSPC, "full")
        if self._strike("short"):
            return super().write(fd, [buffers[0][: len(buffers[0]) // 2]], offset)
        return super().write(fd, buffers, offset)

    def sync(self, fd: int) -> None:
        if self._strike("sync"):
            raise OSError(errno.EIO, "lost")
        super().sync(fd)

    def truncate(self, fd: int, size: int) -> None:
        if self._strike("truncate"):
            raise OSError(errno.EIO, "not cut")
        super().truncate(fd, size)


class Answers:
    def __init__(self) -> None:
        self.errors: list[CoreError | None] = []

    def __call__(self, error: CoreError | None) -> None:
        self.errors.append(error)


def test_the_journal_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    journal = JournalFile(tmp_path, "deletions", OsFileOps())
    answers = Answers()
    written = [entry(1), entry(2), entry(1, EntryKind.RECEIPT)]
    for item in written:
        journal.append(item, answers)
    journal.close()
    journal.close()
    assert answers.errors == [None] * 3
    again = JournalFile(tmp_path, "deletions", OsFileOps())
    assert list(again.entries) == written and again.size > 0
    with pytest.raises(CoreError) as locked:
        JournalFile(tmp_path, "deletions", OsFileOps())
    assert locked.value.reason is Reason.STORAGE_UNAVAILABLE
    again.compact()
    again.append(entry(9), answers)
    again.close()
    assert JournalFile(tmp_path, "deletions", OsFileOps()).entries == (entry(9),)


def test_a_torn_entry_is_cut_off_wherever_it_tore(tmp_path: Path) -> None:
    journal = JournalFile(tmp_path, "deletions", Unsynced())
    journal.append(entry(1), Answers())
    whole = journal.size
    journal.append(entry(2), Answers())
    journal.close()
    data = (tmp_path / "deletions").read_bytes()
    for cut in range(whole, len(data)):
        (tmp_path / "deletions").write_bytes(data[:cut])
        journal = JournalFile(tmp_path, "deletions", Unsynced())
        assert journal.entries == (entry(1),) and journal.size == whole
        journal.append(entry(3), Answers())
        journal.close()
        journal = JournalFile(tmp_path, "deletions", Unsynced())
        assert journal.entries == (entry(1), entry(3))
        journal.close()


@pytest.mark.parametrize("number", [0, 1], ids=["first", "last"])
def test_a_flipped_bit_never_forgets_an_intent_silently(tmp_path: Path, number: int) -> None:
    """In the last entry it may be a torn write; in an earlier one the journal is damaged, and says so."""
    journal = JournalFile(tmp_path, "deletions", OsFileOps())
    ends = [0]
    for item in (1, 2):
        journal.append(entry(item), Answers())
        ends.append(journal.size)
    journal.close()
    data = (tmp_path / "deletions").read_bytes()
    for position in range(ends[number], ends[number + 1], 5):
        flipped = bytearray(data)
        flipped[position] ^= 1
        (tmp_path / "deletions").write_bytes(flipped)
        if number == 1:
            journal = JournalFile(tmp_path, "deletions", OsFileOps())
            assert journal.entries == (entry(1),)
            journal.close()
            continue
        for _ in range(2):
            with pytest.raises(CoreError) as damaged:
                JournalFile(tmp_path, "deletions", OsFileOps())
            assert damaged.value.reason is Reason.CHECKSUM_MISMATCH


@pytest.mark.parametrize("operation", ["write", "short", "sync"])
def test_an_entry_that_could_not_be_written_is_said_so_and_overwritten(
    tmp_path: Path, operation: str
) -> None:
    files = FullDisk()
    journal = JournalFile(tmp_path, "deletions", files)
    answers = Answers()
    files.fails = operation
    journal.append(entry(1), answers)
    journal.append(entry(2), answers)
    journal.close()
    assert answers.errors[0] is not None and answers.errors[0].reason is Reason.STORAGE_UNAVAILABLE
    assert answers.errors[1] is None
    assert JournalFile(tmp_path, "deletions", OsFileOps()).entries == (entry(2),)


@pytest.mark.parametrize(
    ("operation", "kept"),
    [("", ()), ("truncate", (1,)), ("sync", ())],
    ids=["works", "is-not-cut", "is-not-flushed"],
)
def test_a_cut_that_fails_or_is_the_last_thing_done_leaves_a_journal_that_opens(
    tmp_path: Path, operation: str, kept: tuple[int, ...]
) -> None:
    """A process that ends between the cut and the next entry, and one that goes on behind it."""
    files = FullDisk()
    journal = JournalFile(tmp_path, "deletions", files)
    whole = [entry(1, kind) for kind in (EntryKind.INTENT, EntryKind.RECEIPT)]
    for item in whole:
        journal.append(item, Answers())
    journal.trim(journal.size)
    assert journal.size > 0, "it is not larger than the limit"
    files.fails = operation
    journal.trim(journal.size - 1)
    old = [item for item in whole if item.number in kept]
    copy = tmp_path / "ended"
    copy.mkdir()
    (copy / "deletions").write_bytes((tmp_path / "deletions").read_bytes())
    assert list(JournalFile(copy, "deletions", OsFileOps()).entries) == old
    answers = Answers()
    journal.append(entry(2), answers)
    journal.close()
    assert answers.errors == [None]
    assert list(JournalFile(tmp_path, "deletions", OsFileOps()).entries) == [*old, entry(2)]


def test_a_cut_takes_its_turn_among_the_entries(tmp_path: Path) -> None:
    queue: list[Callable[[], None]] = []
    journal = JournalFile(tmp_path, "deletions", OsFileOps(), run=queue.append)
    journal.append(entry(1), Answers())
    queue.pop()()
    journal.trim(0)
    journal.append(entry(2), Answers())
    for work in queue:
        work()
    journal.close()
    assert JournalFile(tmp_path, "deletions", OsFileOps()).entries == (entry(2),)


def test_the_journals_work_can_be_given_to_a_thread(tmp_path: Path) -> None:
    queue: list[Callable[[], None]] = []
    journal = JournalFile(tmp_path, "deletions", OsFileOps(), run=queue.append)
    answers = Answers()
    journal.append(entry(1), answers)
    assert answers.errors == [] and len(queue) == 1
    queue.pop()()
    assert answers.errors == [None]


def test_a_defect_while_an_entry_is_written_is_told_and_seen(tmp_path: Path) -> None:
    class Broken(FullDisk):
        def sync(self, fd: int) -> None:
            if self._strike("defect"):
                raise ZeroDivisionError("a defect")
            super().sync(fd)

    disk, answers = Broken(), Answers()
    journal = JournalFile(tmp_path, "deletions", disk)
    disk.fails = "defect"
    with pytest.raises(ZeroDivisionError):
        journal.append(entry(1), answers)
    (told,) = answers.errors
    assert told is not None and told.reason is Reason.STORAGE_UNAVAILABLE
    journal.append(entry(2), answers)
    journal.close()
    again = JournalFile(tmp_path, "deletions", OsFileOps())
    assert list(again.entries) == [entry(2)]
    again.close()
