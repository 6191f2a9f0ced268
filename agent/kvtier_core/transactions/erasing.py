"""How deletions are made real: erasing in tiers, and a journal on disk that survives a crash at any point.

Why it exists: a receipt that says "gone" must be true after a power loss, and a deletion that was half done
must go on. It must not know blocks, directories or what a deletion waits for.

A journal entry is length, SHA-256 and JSON; a torn last entry is cut off when the file is opened. Only one
process may have it open.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

from kvtier_core.errors import CoreError, Reason
from kvtier_core.tiers.base import Tier
from kvtier_core.tiers.fileops import FileOps
from kvtier_core.tiers.transfer import EraseItem, TransferSink
from kvtier_core.transactions.deletion import EntryKind, JournalEntry

_HEAD = struct.Struct(">4sI32s")
_MAGIC = b"KVDJ"


class TierEraser:
    """Erases in the tiers themselves, each by its own threads."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._tiers = tiers

    def erase(self, tier: int, items: Sequence[EraseItem], deadline: float, sink: TransferSink) -> None:
        self._tiers[tier].submit_erase(items, deadline, sink)


class JournalFile:
    """The journal of one cache on one node. `run` carries the writing and syncing out, by default at once;
    give it a thread's queue so that nobody who holds a lock waits for a disk. Entries are written in the
    order of `append`.

    Raises CoreError: STORAGE_UNAVAILABLE, CHECKSUM_MISMATCH."""

    def __init__(
        self,
        folder: Path,
        name: str,
        files: FileOps,
        run: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        self._files = files
        self._run = run or (lambda work: work())
        self._path = folder / name
        try:
            files.make_folder(folder)
            self._fd = files.open(self._path, os.O_RDWR | os.O_CREAT)
            files.lock(self._fd)
            self._entries, self._end = self._load()
            files.truncate(self._fd, self._end)
            files.sync(self._fd)
            files.sync_folder(folder)
        except OSError as error:
            raise _unavailable(error) from error
        except CoreError:
            files.close(self._fd)
            raise

    @property
    def entries(self) -> tuple[JournalEntry, ...]:
        """What was durable when the file was opened."""
        return tuple(self._entries)

    def append(self, entry: JournalEntry, done: Callable[[CoreError | None], None]) -> None:
        payload = json.dumps(
            {
                "kind": entry.kind.value,
                "number": entry.number,
                "keys": [key.hex() for key in entry.keys],
                "namespace": entry.namespace.hex(),
                "generation": entry.generation,
                "tiers": list(entry.tiers),
            }
        ).encode()
        framed = _HEAD.pack(_MAGIC, len(payload), hashlib.sha256(payload).digest()) + payload
        self._run(lambda: self._write(bytearray(framed), done))

    def _write(self, framed: bytearray, done: Callable[[CoreError | None], None]) -> None:
        try:
            written = self._files.write(self._fd, [framed], self._end)
            if written != len(framed):
                raise OSError(f"{written} of {len(framed)} bytes of the journal were written")
            self._files.sync(self._fd)
        except Exception as error:
            # The next entry overwrites what may be there of this one.
            done(_unavailable(error))
            if not isinstance(error, OSError):
                raise
            return
        self._end += len(framed)
        done(None)

    def _load(self) -> tuple[list[JournalEntry], int]:
        """Entries up to the first that is not whole, and where that begins. A whole one after it means that
        an intent was damaged, not torn: CHECKSUM_MISMATCH, since going on could serve what was to be
        deleted."""
        data = self._read(0, self._files.size(self._fd))
        found: list[JournalEntry] = []
        at = 0
        while (payload := _payload(data, at)) is not None:
            found.append(_entry(json.loads(payload)))
            at += _HEAD.size + len(payload)
        later = data.find(_MAGIC, at)
        while later >= 0:
            if _payload(data, later) is not None:
                raise CoreError(
                    Reason.CHECKSUM_MISMATCH,
                    f"the journal {self._path.name} is damaged between bytes {at} and {later}",
                    {"first": at, "next": later},
                )
            later = data.find(_MAGIC, later + 1)
        return found, at

    def _read(self, offset: int, length: int) -> bytes:
        buffer = bytearray(length)
        if self._files.read(self._fd, [buffer], offset) != length:
            raise OSError(f"the journal ends before byte {offset + length}")
        return bytes(buffer)

    def compact(self) -> None:
        """Forgets everything, when nothing is open any more and the receipts were handed out. Call it between
        deletions; a crash leaves the old or no entries."""
        try:
            self._files.truncate(self._fd, 0)
            # Before the flush, which may fail: an entry behind a hole would be taken for damage.
            self._end = 0
            self._files.sync(self._fd)
        except OSError as error:
            raise _unavailable(error) from error

    def trim(self, limit: int) -> None:
        """As `compact`, in its turn among the entries, when the file is larger than `limit` bytes. A file
        that cannot be cut stays as it is."""
        if self._end > limit:
            self._run(self._trim)

    def _trim(self) -> None:
        with contextlib.suppress(CoreError):
            self.compact()

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._end

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._files.close(fd)


def _payload(data: bytes, at: int) -> bytes | None:
    """The payload of the entry at `at`, None when there is no whole one."""
    if at + _HEAD.size > len(data):
        return None
    magic, length, digest = _HEAD.unpack_from(data, at)
    payload = data[at + _HEAD.size : at + _HEAD.size + length]
    whole = magic == _MAGIC and len(payload) == length and hashlib.sha256(payload).digest() == digest
    return payload if whole else None


def _entry(fields: dict[str, object]) -> JournalEntry:
    keys, tiers = fields["keys"], fields["tiers"]
    assert isinstance(keys, list) and isinstance(tiers, list)
    return JournalEntry(
        kind=EntryKind(str(fields["kind"])),
        number=int(str(fields["number"])),
        keys=tuple(bytes.fromhex(key) for key in keys),
        namespace=bytes.fromhex(str(fields["namespace"])),
        generation=int(str(fields["generation"])),
        tiers=tuple(str(tier) for tier in tiers),
    )


def _unavailable(error: Exception) -> CoreError:
    return CoreError(Reason.STORAGE_UNAVAILABLE, f"the journal of deletions: {error}")
