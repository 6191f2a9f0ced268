"""Files in memory whose operations fail, come back short, flip bits, or take so long that others go on."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from kvtier_core.tiers.fileops import Buffer
from tests.unit.core.nvme_files import MemoryFiles, first_bytes


class FaultyFiles:
    """calm: no faults now (opening, draining). meanwhile: what others do while one operation takes its time,
    only while `in_job` says that a thread of the pool is at it. damaged(offset, size): told of flips."""

    def __init__(
        self,
        real: MemoryFiles,
        chance: random.Random,
        rate: float,
        meanwhile: Callable[[], None],
        damaged: Callable[[int, int], None],
    ) -> None:
        self.real = real
        self.calm = True
        self.in_job = False
        self._chance = chance
        self._rate = rate
        self._meanwhile = meanwhile
        self._damaged = damaged
        self._blocks: set[int] = set()
        self.faults: dict[str, int] = {}

    def _strikes(self, what: str) -> bool:
        if self.calm or self._chance.random() >= self._rate:
            return False
        self.faults[what] = self.faults.get(what, 0) + 1
        return True

    def _wait(self) -> None:
        if self.in_job and not self.calm and self._chance.random() < 0.2:
            self._meanwhile()

    def _fail(self, code: int) -> OSError:
        return OSError(code, os.strerror(code))

    def make_folder(self, path: Path) -> None:
        self.real.make_folder(path)

    def open(self, path: Path, flags: int) -> int:
        fd = self.real.open(path, flags)
        if path.suffix == ".blocks":
            self._blocks.add(fd)
        return fd

    def lock(self, fd: int) -> None:
        self.real.lock(fd)

    def truncate(self, fd: int, size: int) -> None:
        self.real.truncate(fd, size)

    def allocate(self, fd: int, offset: int, size: int) -> None:
        if self._strikes("allocate-enospc"):
            raise self._fail(errno.ENOSPC)
        self.real.allocate(fd, offset, size)

    def read(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        self._wait()
        if self._strikes("read-eio"):
            raise self._fail(errno.EIO)
        done = self.real.read(fd, buffers, offset)
        if self._strikes("read-short"):
            return done // 2
        if fd in self._blocks and done and self._strikes("read-flip"):
            buffer = memoryview(self._chance.choice(buffers))
            buffer[self._chance.randrange(len(buffer))] ^= 1 << self._chance.randrange(8)
            self._damaged(offset, done)
        return done

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        self._wait()
        if self._strikes("write-eio"):
            raise self._fail(errno.EIO)
        if self._strikes("write-enospc"):
            raise self._fail(errno.ENOSPC)
        if self._strikes("write-short"):
            return self.real.write(fd, first_bytes(buffers, sum(map(len, buffers)) // 2), offset)
        return self.real.write(fd, buffers, offset)

    def sync(self, fd: int) -> None:
        self._wait()
        if self._strikes("sync-eio"):
            raise self._fail(errno.EIO)
        self.real.sync(fd)

    def close(self, fd: int) -> None:
        self.real.close(fd)

    def remove(self, path: Path) -> None:
        self.real.remove(path)

    def size(self, fd: int) -> int:
        return self.real.size(fd)

    def sync_folder(self, path: Path) -> None:
        self.real.sync_folder(path)

    def names(self, path: Path) -> list[str]:
        return self.real.names(path)

    def flip_at_rest(self, offset: int, size: int) -> None:
        """One bit of what lies on the device."""
        at, bit = offset + self._chance.randrange(size), 1 << self._chance.randrange(8)
        for path, node in self.real.nodes.items():
            if path.suffix == ".blocks" and at < len(node.now):
                node.now[at] ^= bit
                if at < len(node.durable):
                    node.durable[at] ^= bit
                self._damaged(offset, size)
                self.faults["rest-flip"] = self.faults.get("rest-flip", 0) + 1
