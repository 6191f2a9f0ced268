"""The file of a store: opened for one owner, O_DIRECT where the filesystem has it, grown by whole extents.

Why it exists: offsets, alignment, locks and the operating system's errors are one concern. Space is allocated
before a slot is given out, so a write never meets a full disk by our own doing. It must not know headers.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from kvtier_core.errors import CoreError, Reason
from kvtier_core.tiers.block import BlockFormat
from kvtier_core.tiers.fileops import Buffer, FileOps
from kvtier_core.tiers.staging import PAGE, address_of

REFUSED_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)
_LOCKED = (errno.EWOULDBLOCK, errno.EAGAIN)
Fail = Callable[[str, OSError], CoreError]


class BlockFile:
    """base: where slot 0 begins. fail: turns an OSError into the tier's typed refusal and notes it.

    `read`, `write` and `sync` raise OSError, for who isolates a bad block in a run; all else raises
    CoreError.
    """

    def __init__(
        self, path: Path, files: FileOps, form: BlockFormat, capacity: int, base: int, extent: int, fail: Fail
    ) -> None:
        self.path = path
        self.form = form
        self.capacity = capacity
        self.direct = False
        self.allocated = 0
        self._files = files
        self._base = base
        self._extent = max(1, extent)
        self._fail = fail
        self._fd = -1

    def open(self, want_direct: bool, prepare: Callable[[], None]) -> None:
        """Opens and locks the file, then runs `prepare`, which reads and writes its beginning. When that
        shows that O_DIRECT is refused, all is done again without. STORAGE_LOCKED, STORAGE_UNAVAILABLE."""
        direct = getattr(os, "O_DIRECT", 0) if want_direct else 0
        try:
            self._files.make_folder(self.path.parent)
        except OSError as error:
            raise self._fail("open", error) from error
        while True:
            self.direct = direct != 0
            try:
                self._fd = self._files.open(self.path, os.O_RDWR | os.O_CREAT | direct)
            except OSError as error:
                if direct and error.errno in REFUSED_DIRECT:
                    direct = 0
                    continue
                raise self._fail("open", error) from error
            try:
                self._lock()
                prepare()
                return
            except OSError as error:
                self.release()
                if not direct or error.errno not in REFUSED_DIRECT:
                    raise self._fail("lock and prepare", error) from error
                direct = 0
            except CoreError:
                self.release()
                raise

    def _lock(self) -> None:
        try:
            self._files.lock(self._fd)
        except OSError as error:
            if error.errno not in _LOCKED:
                raise
            raise CoreError(
                Reason.STORAGE_LOCKED,
                f"{self.path.name} belongs to another process",
                {"file": self.path.name},
            ) from error

    def offset(self, slot: int) -> int:
        """Where the slot's header begins."""
        return self._base + slot * self.form.stride

    def ensure(self, slot: int) -> None:
        """Allocates the extent of `slot`. STORAGE_UNAVAILABLE: the disk is full, or worse."""
        if slot < self.allocated:
            return
        grown = min(self.capacity, max(slot + 1, self.allocated + self._extent))
        try:
            self._files.allocate(self._fd, self.offset(self.allocated), self.offset(grown) - self.end)
        except OSError as error:
            raise self._fail("growth", error) from error
        self.allocated = grown

    @property
    def end(self) -> int:
        """Where the allocated slots end."""
        return self.offset(self.allocated)

    def size(self) -> int:
        return self._files.size(self._fd)

    def truncate(self, size: int) -> None:
        """OSError, as below."""
        self._files.truncate(self._fd, size)
        self.allocated = max(0, min(self.capacity, (size - self._base) // self.form.stride))

    def read(self, buffers: Sequence[Buffer], offset: int) -> int:
        return self._files.read(self._fd, buffers, offset)

    def write(self, buffers: Sequence[Buffer], offset: int) -> int:
        return self._files.write(self._fd, buffers, offset)

    def sync(self) -> None:
        self._files.sync(self._fd)

    def sync_folder(self) -> None:
        self._files.sync_folder(self.path.parent)

    def release(self, remove: bool = False) -> None:
        """Gives up descriptor and lock. remove: and the file, before another can take the lock."""
        try:
            if remove:
                self._files.remove(self.path)
        finally:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                self._files.close(fd)


class RunScratch:
    """Page-aligned memory of one thread for a run of blocks: headers, tails of unaligned payloads, and whole
    blocks that are encrypted or whose landing is not aligned. Pages are taken when first touched."""

    def __init__(self, form: BlockFormat, blocks: int) -> None:
        # One page more than a block: where an encrypted payload ends, its tag is put for decryption.
        self._step = form.stride + PAGE
        self._stride = form.stride
        self._map = memoryview(mmap.mmap(-1, self._step * blocks))
        self.blocks = blocks

    def __len__(self) -> int:
        return len(self._map)

    def header(self, at: int) -> memoryview:
        start = at * self._step
        return self._map[start : start + PAGE]

    def block(self, at: int) -> memoryview:
        """Header page and body."""
        start = at * self._step
        return self._map[start : start + self._stride]

    def body(self, at: int) -> memoryview:
        """The body and a page behind it."""
        start = at * self._step + PAGE
        return self._map[start : start + self._stride]

    def tail(self, at: int) -> memoryview:
        """The last page of the body."""
        start = at * self._step + self._stride
        return self._map[start - PAGE : start]


def aligned(view: memoryview) -> bool:
    """Whether storage can move these bytes without a copy."""
    return address_of(view) % PAGE == 0
