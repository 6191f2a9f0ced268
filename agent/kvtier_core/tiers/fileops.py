"""The file operations the storage tier needs, as a seam where tests inject faults.

Why it exists: a short write, a full disk or a flipped bit must be produced at will. It must not know blocks.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

Buffer = memoryview | bytearray


class FileOps(Protocol):
    """Errors are OSError, as the operating system gives them."""

    def make_folder(self, path: Path) -> None: ...
    def open(self, path: Path, flags: int) -> int: ...
    def lock(self, fd: int) -> None: ...
    def truncate(self, fd: int, size: int) -> None: ...
    def allocate(self, fd: int, offset: int, size: int) -> None: ...
    def read(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int: ...
    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int: ...
    def sync(self, fd: int) -> None: ...
    def close(self, fd: int) -> None: ...
    def remove(self, path: Path) -> None: ...
    def size(self, fd: int) -> int: ...
    def sync_folder(self, path: Path) -> None: ...
    def names(self, path: Path) -> list[str]: ...


class OsFileOps:
    """The real thing. `lock` is exclusive and does not wait."""

    def make_folder(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def open(self, path: Path, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def lock(self, fd: int) -> None:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def allocate(self, fd: int, offset: int, size: int) -> None:
        try:
            os.posix_fallocate(fd, offset, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
            os.ftruncate(fd, offset + size)

    def read(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def remove(self, path: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def sync_folder(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def names(self, path: Path) -> list[str]:
        return sorted(entry.name for entry in path.iterdir() if entry.is_file())
