"""Replaces small files so that a crash leaves the old or the new content, never a mixture.

Fences and manifests must survive SIGKILL and power loss before they are acknowledged. The system calls are
injected so that a test can stop a process at each of them. This module knows nothing of what the bytes mean.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Protocol


class Syscalls(Protocol):
    """The calls one replacement makes, in the order in which it makes them."""

    def open(self, path: str, flags: int, mode: int) -> int: ...

    def write(self, fd: int, data: bytes) -> int: ...

    def fsync(self, fd: int) -> None: ...

    def close(self, fd: int) -> None: ...

    def rename(self, source: str, target: str) -> None: ...


class OsSyscalls:
    """The real calls."""

    def open(self, path: str, flags: int, mode: int) -> int:
        return os.open(path, flags, mode)

    def write(self, fd: int, data: bytes) -> int:
        return os.write(fd, data)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)


class DamagedFile(Exception):
    """A file whose checksum does not fit its content: storage failed after it had been synced."""


def replace_file(directory: Path, name: str, payload: bytes, calls: Syscalls) -> None:
    """Durably replaces ``directory/name`` by a checksummed payload; raises OSError when any call fails.

    When it returns, the content survives a crash. When it raises, the old or the new content is there.
    """
    framed = _frame(payload)
    temporary = str(directory / f".{name}.tmp")
    fd = calls.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        written = 0
        while written < len(framed):
            count = calls.write(fd, framed[written:])
            if count <= 0:
                raise OSError(f"short write to {temporary}")
            written += count
        calls.fsync(fd)
    finally:
        calls.close(fd)
    calls.rename(temporary, str(directory / name))
    sync_directory(directory, calls)


def sync_directory(directory: Path, calls: Syscalls) -> None:
    """Makes renames and new entries in the directory durable."""
    fd = calls.open(str(directory), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, 0)
    try:
        calls.fsync(fd)
    finally:
        calls.close(fd)


def read_file(path: Path) -> bytes:
    """The payload of a file written by `replace_file`; raises DamagedFile or OSError."""
    framed = path.read_bytes()
    digest, _, payload = framed.partition(b"\n")
    if digest != hashlib.sha256(payload).hexdigest().encode():
        raise DamagedFile(str(path))
    return payload


def _frame(payload: bytes) -> bytes:
    return hashlib.sha256(payload).hexdigest().encode() + b"\n" + payload
