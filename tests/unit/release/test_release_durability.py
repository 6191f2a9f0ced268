"""A process killed at each system call of the fence store leaves the old or the new record, never another."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier_core.release.durable import OsSyscalls, read_file, replace_file
from kvtier_core.release.fences import CommandKind, FenceBook, FenceRecord, FileFenceStore

UID = "cache-uid"

# Stops itself with SIGKILL just before or just after the n-th call; says on stdout what it acknowledged.
CHILD = """
import os, signal, sys
from pathlib import Path
from kvtier_core.release.durable import OsSyscalls
from kvtier_core.release.fences import CommandKind, FenceBook, FenceRecord, FileFenceStore

folder, stop_at, after = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "after"

class Killer(OsSyscalls):
    count = 0

def guard(name):
    original = getattr(OsSyscalls, name)
    def call(self, *args):
        me = Killer.count
        Killer.count += 1
        if me == stop_at and not after:
            if name == "write":
                os.write(args[0], args[1][: len(args[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(self, *args)
        if me == stop_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    return call

for name in ("open", "write", "fsync", "close", "rename"):
    setattr(Killer, name, guard(name))

book = FenceBook(FileFenceStore(folder, Killer()))
book.commit(FenceRecord("cache-uid", "serving", "chat", 8, CommandKind.GRANT, "new" * 400, "sha256:11"))
os.write(1, b"acknowledged")
"""


def old_record() -> FenceRecord:
    return FenceRecord(UID, "serving", "chat", 7, CommandKind.APPLY, "old", "sha256:00")


def run_child(folder: Path, stop_at: int, when: str) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-c", CHILD, str(folder), str(stop_at), when],
        capture_output=True,
        timeout=500,
        env=environment,
        check=False,
    )


def count_calls(folder: Path) -> int:
    class Counter(OsSyscalls):
        calls = 0

        def _one(self) -> None:
            Counter.calls += 1

        def open(self, path: str, flags: int, mode: int) -> int:
            self._one()
            return super().open(path, flags, mode)

        def write(self, fd: int, data: bytes) -> int:
            self._one()
            return super().write(fd, data)

        def fsync(self, fd: int) -> None:
            self._one()
            super().fsync(fd)

        def close(self, fd: int) -> None:
            self._one()
            super().close(fd)

        def rename(self, source: str, target: str) -> None:
            self._one()
            super().rename(source, target)

    FenceBook(FileFenceStore(folder, Counter())).commit(old_record())
    return Counter.calls


# open, write, fsync, close, rename, open directory, fsync directory, close directory.
CALLS = 8


def test_the_number_of_calls_is_what_the_kill_test_covers(tmp_path: Path) -> None:
    assert count_calls(tmp_path) == CALLS


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("stop_at", range(CALLS))
def test_sigkill_at_every_call(tmp_path: Path, stop_at: int, when: str) -> None:
    FenceBook(FileFenceStore(tmp_path)).commit(old_record())
    child = run_child(tmp_path, stop_at, when)
    assert child.returncode == -signal.SIGKILL, child.stderr.decode()
    reopened = FenceBook(FileFenceStore(tmp_path)).records()[UID]
    acknowledged = child.stdout == b"acknowledged"
    renamed = stop_at > 4 or (stop_at == 4 and when == "after")
    assert reopened.value == (8 if renamed else 7)
    assert reopened.content == ("new" * 400 if renamed else "old")
    assert not (acknowledged and reopened.value == 7)


def test_unkilled_child_acknowledges_the_new_record(tmp_path: Path) -> None:
    child = run_child(tmp_path, 1000, "before")
    assert child.stdout == b"acknowledged", child.stderr.decode()
    assert FenceBook(FileFenceStore(tmp_path)).highest(UID) == 8


def test_a_leftover_temporary_file_is_not_read(tmp_path: Path) -> None:
    FenceBook(FileFenceStore(tmp_path)).commit(old_record())
    (tmp_path / f".{UID}.fence.tmp").write_bytes(b"half a rec")
    assert FenceBook(FileFenceStore(tmp_path)).highest(UID) == 7


def test_short_writes_are_continued(tmp_path: Path) -> None:
    class OneByte(OsSyscalls):
        def write(self, fd: int, data: bytes) -> int:
            return super().write(fd, data[:1])

    replace_file(tmp_path, "x", b"payload", OneByte())
    assert read_file(tmp_path / "x") == b"payload"


def test_data_is_synced_before_the_rename_and_the_directory_after(tmp_path: Path) -> None:
    order: list[str] = []

    class Recorder(OsSyscalls):
        def fsync(self, fd: int) -> None:
            order.append("fsync-dir" if os.path.isdir(f"/proc/self/fd/{fd}") else "fsync-file")
            super().fsync(fd)

        def rename(self, source: str, target: str) -> None:
            order.append("rename")
            super().rename(source, target)

    replace_file(tmp_path, "x", b"payload", Recorder())
    assert order == ["fsync-file", "rename", "fsync-dir"]
