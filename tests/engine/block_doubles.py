"""Storage that tests hold back, fail or damage, under a real block store."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from kvtier_core.tiers.base import Tier
from kvtier_core.tiers.fileops import Buffer, OsFileOps
from kvtier_core.tiers.transfer import TransferItem, TransferSink


class Gate:
    """Reads of a tier wait here until they are let through, one by one."""

    def __init__(self, tier: Tier) -> None:
        self._submit = tier.submit_read
        self._waiting: list[tuple[TransferItem, int, float, TransferSink]] = []
        self._lock = threading.Lock()
        self.open = True
        tier.submit_read = self._hold  # type: ignore[method-assign]

    def _hold(self, items: Sequence[TransferItem], deadline: float, sink: TransferSink) -> None:
        with self._lock:
            if not self.open:
                self._waiting += [(item, index, deadline, sink) for index, item in enumerate(items)]
                return
        self._submit(items, deadline, sink)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def holds(self, key: bytes) -> bool:
        """Whether the read of that block waits here."""
        with self._lock:
            return any(item.identity.chunk_digest == key for item, *_ in self._waiting)

    def let_block(self, key: bytes) -> None:
        """Lets the read of one block go on."""
        with self._lock:
            self._waiting.sort(key=lambda waiting: waiting[0].identity.chunk_digest != key)
        self.let(1)

    def release(self) -> None:
        """Lets all go on, those that come later too."""
        with self._lock:
            self.open = True
        self.let(len(self._waiting))

    def let(self, count: int) -> None:
        """Lets so many of the oldest go on."""
        with self._lock:
            going, self._waiting = self._waiting[:count], self._waiting[count:]
        for item, index, deadline, sink in going:
            self._submit([item], deadline, _At(sink, index))


class _At:
    """A sink of one item that was number `index` of its batch."""

    def __init__(self, sink: TransferSink, index: int) -> None:
        self._sink = sink
        self._index = index

    def done(self, index: int, error: Exception | None) -> None:
        self._sink.done(self._index, error)  # type: ignore[arg-type]

    def drained(self, index: int) -> None:
        self._sink.drained(self._index)


class FullDisk(OsFileOps):
    """Writes fail with ENOSPC while `full`."""

    def __init__(self) -> None:
        self.full = False

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(fd, buffers, offset)


def flip(path: Path, payload: bytes) -> None:
    """Changes one bit of where that payload lies in a store."""
    data = path.read_bytes()
    at = data.index(payload) + len(payload) // 2
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(bytes([data[at] ^ 1]))
