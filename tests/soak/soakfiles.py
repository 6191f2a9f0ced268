"""Real files whose operations now and then fail, end short, flip a bit, take long or hang."""

from __future__ import annotations

import errno
import mmap
import os
import random
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtier_core.tiers.fileops import Buffer, OsFileOps
from tests.unit.core.nvme_files import first_bytes


@dataclass(frozen=True)
class Rates:
    """Chances per operation on the blocks' file."""

    eio: float = 1e-3
    enospc: float = 1e-3
    short: float = 1e-3
    flip: float = 1e-3
    slow: float = 5e-3
    hang: float = 1e-4
    slow_seconds: float = 0.03
    hang_seconds: float = 4.0


class SoakFiles(OsFileOps):
    """`calm`: no more faults, and what hangs returns."""

    def __init__(self, seed: int, rates: Rates) -> None:
        self._chance = random.Random(seed)
        self._rates = rates
        self._lock = threading.Lock()
        self._calm = threading.Event()
        self._blocks: set[int] = set()
        self.faults: Counter[str] = Counter()
        self._calm.set()

    def begin(self) -> None:
        self._calm.clear()

    def calm(self) -> None:
        self._calm.set()

    def _strikes(self, what: str, rate: float) -> bool:
        if self._calm.is_set():
            return False
        with self._lock:
            strikes = self._chance.random() < rate
            self.faults[what] += strikes
            return strikes

    def _weather(self, fd: int, what: str) -> bool:
        """Whether faults may follow. Raises EIO."""
        if fd not in self._blocks or self._calm.is_set():
            return False
        if self._strikes(f"{what}-slow", self._rates.slow):
            self._calm.wait(self._rates.slow_seconds)
        if self._strikes(f"{what}-hang", self._rates.hang):
            self._calm.wait(self._rates.hang_seconds)
        if self._strikes(f"{what}-eio", self._rates.eio):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return True

    def open(self, path: Path, flags: int) -> int:
        fd = super().open(path, flags)
        if path.suffix == ".blocks":
            self._blocks.add(fd)
        return fd

    def read(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        rough = self._weather(fd, "read")
        done = super().read(fd, buffers, offset)
        if rough and self._strikes("read-short", self._rates.short):
            return done // 2 // 4096 * 4096
        if rough and self._strikes("read-flip", self._rates.flip):
            self._flip(buffers)
        return done

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        rough = self._weather(fd, "write")
        if rough and self._strikes("write-enospc", self._rates.enospc):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if rough and self._strikes("write-short", self._rates.short):
            return super().write(fd, first_bytes(buffers, sum(map(len, buffers)) // 2), offset)
        done = super().write(fd, buffers, offset)
        if rough and self._strikes("write-flip", self._rates.flip):
            self._flip_at_rest(fd, offset, done)
        return done

    def sync(self, fd: int) -> None:
        self._weather(fd, "sync")
        super().sync(fd)

    def _flip(self, buffers: Sequence[Buffer]) -> None:
        with self._lock:
            target = memoryview(self._chance.choice(buffers))
            target[self._chance.randrange(len(target))] ^= 1 << self._chance.randrange(8)

    def _flip_at_rest(self, fd: int, offset: int, size: int) -> None:
        """One bit of one page of what was just written; whole pages, for O_DIRECT."""
        page = memoryview(mmap.mmap(-1, 4096))
        with self._lock:
            at = offset + self._chance.randrange(max(1, size // 4096)) * 4096
            place, bit = self._chance.randrange(4096), 1 << self._chance.randrange(8)
        if super().read(fd, [page], at) == 4096:
            page[place] ^= bit
            super().write(fd, [page], at)
