"""File operations that fail, hang, kill or lose power where a test says so."""

from __future__ import annotations

import copy
import errno
import os
import random
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from kvtier_core.tiers.fileops import Buffer, FileOps, OsFileOps

SECTOR = 512
CHANGING = ("write", "sync", "truncate", "allocate")


class ScriptedFiles:
    """Real (or other) files; `script(operation, number)` is asked before each call that changes or reads the
    file and may raise, wait, or return bytes that a read or write is cut to. Numbers count per operation."""

    def __init__(
        self,
        script: Callable[[str, int], int | None] = lambda _operation, _number: None,
        real: FileOps | None = None,
    ) -> None:
        self.script = script
        self.real = real or OsFileOps()
        self.calls: dict[str, int] = {}
        self.spans: list[tuple[str, int, int]] = []
        self._lock = threading.Lock()

    def _ask(self, operation: str) -> int | None:
        with self._lock:
            number = self.calls.get(operation, 0)
            self.calls[operation] = number + 1
        return self.script(operation, number)

    def make_folder(self, path: Path) -> None:
        self.real.make_folder(path)

    def open(self, path: Path, flags: int) -> int:
        self._ask("open")
        return self.real.open(path, flags)

    def lock(self, fd: int) -> None:
        self._ask("lock")
        self.real.lock(fd)

    def truncate(self, fd: int, size: int) -> None:
        self._ask("truncate")
        self.real.truncate(fd, size)

    def allocate(self, fd: int, offset: int, size: int) -> None:
        self._ask("allocate")
        self.real.allocate(fd, offset, size)

    def read(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        cut = self._ask("read")
        self.spans.append(("read", offset, sum(map(len, buffers))))
        done = self.real.read(fd, buffers, offset)
        return done if cut is None else min(done, cut)

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        cut = self._ask("write")
        self.spans.append(("write", offset, sum(map(len, buffers))))
        if cut is None:
            return self.real.write(fd, buffers, offset)
        return self.real.write(fd, first_bytes(buffers, cut), offset)

    def sync(self, fd: int) -> None:
        self._ask("sync")
        self.real.sync(fd)

    def close(self, fd: int) -> None:
        self.real.close(fd)

    def remove(self, path: Path) -> None:
        self.real.remove(path)

    def size(self, fd: int) -> int:
        return self.real.size(fd)

    def sync_folder(self, path: Path) -> None:
        self._ask("sync_folder")
        self.real.sync_folder(path)

    def names(self, path: Path) -> list[str]:
        return self.real.names(path)


def first_bytes(buffers: Sequence[Buffer], size: int) -> list[Buffer]:
    """The buffers' first `size` bytes, whole pages of them, so that O_DIRECT takes them."""
    out: list[Buffer] = []
    left = size // 4096 * 4096
    for buffer in buffers:
        if left > 0:
            out.append(memoryview(buffer)[:left])
            left -= len(buffer)
    return out


def failing(operation: str, at: int, code: int, *, sticky: bool = False) -> Callable[[str, int], None]:
    """An errno at the `at`-th call of an operation, or at all from there on."""

    def script(name: str, number: int) -> None:
        if name == operation and (number == at or (sticky and number > at)):
            raise OSError(code, os.strerror(code))

    return script


class Gate:
    """Holds chosen calls until the test lets them go: a device that hangs."""

    def __init__(self, operation: str, *numbers: int) -> None:
        self.operation = operation
        self.numbers = numbers
        self.entered = threading.Semaphore(0)
        self.opened = threading.Event()

    def __call__(self, operation: str, number: int) -> None:
        if operation == self.operation and (not self.numbers or number in self.numbers):
            self.entered.release()
            if not self.opened.wait(30):
                raise TimeoutError("the test never opened the gate")


class KillingFiles(ScriptedFiles):
    """Kills this process. how "before": at its `at`-th changing call, which is not made; since nothing lies
    between two calls, that is after the one before, too. "half": when half of its `at`-th write is done."""

    def __init__(self, at: int, how: str) -> None:
        super().__init__()
        self._at = at
        self._half = how == "half"
        self._count = 0

    def _ask(self, operation: str) -> int | None:
        counted = ("write",) if self._half else CHANGING
        if operation in counted:
            self._count += 1
            if not self._half and self._count > self._at:
                os.kill(os.getpid(), signal.SIGKILL)
        return super()._ask(operation)

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        if self._half and self._count == self._at:
            part = first_bytes(buffers, sum(map(len, buffers)) // 2)
            if part:
                self.real.write(fd, part, offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().write(fd, buffers, offset)


class _Node:
    """One file: what the medium holds for good, and what was written since the last flush."""

    def __init__(self) -> None:
        self.durable = bytearray()
        self.now = bytearray()
        self.pending: list[tuple[int, bytes]] = []
        self.locked_by: int | None = None


class MemoryFiles:
    """Files in memory that know what a power loss may take: since the last flush, each sector on its own is
    old or new or, when it was written more than once, any of the versions; a size is old or new.

    `watch(operation)` is called before each changing call, without locks of the model."""

    def __init__(self, watch: Callable[[str], None] = lambda _: None, *, lying: bool = False) -> None:
        self.watch = watch
        self.lying = lying
        self.nodes: dict[Path, _Node] = {}
        self._open: dict[int, _Node] = {}
        self._next = 1000
        self._lock = threading.Lock()

    def make_folder(self, path: Path) -> None: ...

    def open(self, path: Path, flags: int) -> int:
        with self._lock:
            self._next += 1
            self._open[self._next] = self.nodes.setdefault(path, _Node())
            return self._next

    def lock(self, fd: int) -> None:
        with self._lock:
            node = self._open[fd]
            if node.locked_by not in (None, fd):
                raise OSError(errno.EWOULDBLOCK, "locked")
            node.locked_by = fd

    def truncate(self, fd: int, size: int) -> None:
        self.watch("truncate")
        with self._lock:
            node = self._open[fd]
            del node.now[size:]
            node.now.extend(bytes(size - len(node.now)))
            # The model has no order between a size and data, so a cut is made durable at once; stores flush
            # before they count on one.
            del node.durable[size:]
            node.pending = [(at, data[: max(0, size - at)]) for at, data in node.pending if at < size]

    def allocate(self, fd: int, offset: int, size: int) -> None:
        self.watch("allocate")
        with self._lock:
            node = self._open[fd]
            node.now.extend(bytes(max(0, offset + size - len(node.now))))

    def read(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        with self._lock:
            node, done = self._open[fd], 0
            for buffer in buffers:
                part = bytes(node.now[offset + done : offset + done + len(buffer)])
                memoryview(buffer)[: len(part)] = part
                done += len(part)
            return done

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        self.watch("write")
        with self._lock:
            node, data = self._open[fd], b"".join(bytes(buffer) for buffer in buffers)
            end = offset + len(data)
            node.now.extend(bytes(max(0, end - len(node.now))))
            node.now[offset:end] = data
            node.pending.append((offset, data))
            return len(data)

    def sync(self, fd: int) -> None:
        self.watch("sync")
        with self._lock:
            node = self._open[fd]
            if not self.lying:
                node.durable = bytearray(node.now)
                node.pending = []

    def close(self, fd: int) -> None:
        with self._lock:
            node = self._open.pop(fd)
            if node.locked_by == fd:
                node.locked_by = None

    def remove(self, path: Path) -> None:
        self.nodes.pop(path, None)

    def size(self, fd: int) -> int:
        with self._lock:
            return len(self._open[fd].now)

    def sync_folder(self, path: Path) -> None: ...

    def names(self, path: Path) -> list[str]:
        return sorted(found.name for found in self.nodes if found.parent == path)

    def after_power_loss(self, chance: random.Random) -> MemoryFiles:
        """What another process may find: this model is left as it is."""
        found = MemoryFiles()
        with self._lock:
            for path, node in self.nodes.items():
                left = found.nodes[path] = _Node()
                size = len(node.now) if chance.random() < 0.5 else len(node.durable)
                left.now = bytearray(node.durable)
                left.now.extend(bytes(max(0, size - len(left.now))))
                versions: dict[int, list[bytes]] = {}
                for at, data in node.pending:
                    for start in range(0, len(data), SECTOR):
                        versions.setdefault(at + start, []).append(data[start : start + SECTOR])
                for at, written in versions.items():
                    kept = chance.randrange(-1, len(written))
                    if kept >= 0 and at < len(left.now):
                        left.now[at : at + SECTOR] = written[kept]
                left.durable = bytearray(left.now)
        return found

    def copied(self) -> MemoryFiles:
        """As the page cache has it after a kill."""
        found = MemoryFiles()
        with self._lock:
            for path, node in self.nodes.items():
                left = found.nodes[path] = _Node()
                left.now = copy.copy(node.now)
                left.durable = copy.copy(node.now)
        return found
