"""The agent's durable state on its node: which baseline each cache runs, and the fences.

Layout: `lock`, `fences/<cache uid>.fence`, `manifests/<digest hex>.manifest`. A manifest is durable before
the fence record that names it, so the record is the one commit point of an apply. Knows no RPC.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from kvtier_agent.config import ConfigError
from kvtier_core.errors import CoreError, Reason
from kvtier_core.release.durable import (
    DamagedFile,
    OsSyscalls,
    Syscalls,
    read_file,
    replace_file,
    sync_directory,
)
from kvtier_core.release.fences import FileFenceStore


class DirectoryLock:
    """An exclusive lock on a directory, held until the process ends or `release` is called."""

    def __init__(self, directory: Path) -> None:
        """Raises OSError; BlockingIOError when another process holds it."""
        self._fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class StateDir:
    """Opened and locked for the life of the process."""

    def __init__(self, path: Path, calls: Syscalls | None = None) -> None:
        """Raises ConfigError naming --state-dir when it cannot be made, written or locked."""
        self._calls: Syscalls = OsSyscalls() if calls is None else calls
        self._manifests = path / "manifests"
        fences = path / "fences"
        try:
            for directory in (path, self._manifests, fences):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = DirectoryLock(path)
            sync_directory(path, self._calls)
        except BlockingIOError as error:
            raise ConfigError(f"--state-dir {path}: another agent holds its lock") from error
        except OSError as error:
            raise ConfigError(f"--state-dir {path}: {error.strerror}") from error
        self.fences = FileFenceStore(fences, self._calls)

    def save_manifest(self, digest: str, encoded: bytes) -> None:
        """Durable when it returns; raises STORAGE_UNAVAILABLE."""
        name = _file_name(digest)
        try:
            replace_file(self._manifests, name, encoded, self._calls)
        except OSError as error:
            message = f"the manifest {digest} could not be stored: {error.strerror or error}"
            raise CoreError(Reason.STORAGE_UNAVAILABLE, message, {}) from error

    def load_manifest(self, digest: str) -> bytes:
        """Raises STORAGE_UNAVAILABLE when it is absent or damaged."""
        try:
            return read_file(self._manifests / _file_name(digest))
        except (OSError, DamagedFile) as error:
            message = f"the manifest {digest} cannot be read: {error}"
            raise CoreError(Reason.STORAGE_UNAVAILABLE, message, {}) from error

    def drop_unused_manifests(self, used: frozenset[str]) -> None:
        """Deletes manifests that no fence record names; what cannot be deleted stays."""
        keep = {_file_name(digest) for digest in used}
        for path in self._manifests.glob("*.manifest"):
            if path.name not in keep:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        self._lock.release()


def _file_name(digest: str) -> str:
    return f"{digest.removeprefix('sha256:')}.manifest"
