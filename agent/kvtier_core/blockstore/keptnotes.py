"""Notes beside a store: copies whose blocks may not be lost, though their headers say that they may.

Why it exists: a header is written once, with the block, and part of what encryption binds. A later writer may
ask for more than the first, and is told so only when a restart will know it. It must not know blocks' keys,
or who asks.

One entry of 64 bytes a slot, at the slot's place, so the file has an end and nothing is ever gathered in it:
magic 8s | slot u64 | slot generation u64 | replica generation u64 | crc32c of all before u32 | zeros. Both
generations name one copy for good, so what a slot held before is no concern. A damaged entry counts for
whatever is in its slot: rather a block stays too long. The file is there from the first note on, and whoever
has the store's lock has it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import crc32c

from kvtier_core.errors import CoreError, Reason
from kvtier_core.tiers.fileops import FileOps
from kvtier_core.tiers.slots import SlotRef

KEPT_SUFFIX = ".kept"
ENTRY_BYTES = 64
_MAGIC = b"KVTKEEP\x01"
_FIELDS = struct.Struct("<8sQQQ")
_CRC = struct.Struct("<I")

Copy = tuple[SlotRef, int]
"""A copy's slot and its replica generation."""


class KeptNotes:
    """Of one store. `run` carries writing and syncing out, by default at once; give it a thread's queue so
    that nobody who holds a lock waits for a disk. Raises STORAGE_UNAVAILABLE when it cannot be read."""

    def __init__(
        self,
        folder: Path,
        name: str,
        files: FileOps,
        run: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        self._folder, self._path = folder, folder / name
        self._files = files
        self._run = run or (lambda work: work())
        self._fd = -1
        self._found: dict[int, tuple[int, int] | None] = {}
        try:
            files.make_folder(folder)
            if name in files.names(folder):
                self._fd = files.open(self._path, os.O_RDWR | os.O_CREAT)
                self._found = self._load()
        except OSError as error:
            raise _unavailable(error) from error

    def _load(self) -> dict[int, tuple[int, int] | None]:
        data = bytearray(self._files.size(self._fd))
        if self._files.read(self._fd, [data], 0) != len(data):
            raise OSError("they were read short")
        found: dict[int, tuple[int, int] | None] = {}
        for slot in range(-(-len(data) // ENTRY_BYTES)):
            entry = bytes(data[slot * ENTRY_BYTES : (slot + 1) * ENTRY_BYTES])
            if any(entry):
                found[slot] = _decoded(entry, slot)
        return found

    def covers(self, copy: Copy) -> bool:
        """Whether an earlier process noted this copy."""
        ref, generation = copy
        if ref.slot not in self._found:
            return False
        noted = self._found[ref.slot]
        return noted is None or noted == (ref.generation, generation)

    def settle(self, kept: Sequence[Copy]) -> None:
        """Forgets what was noted of copies that are gone, before a new one can be taken for them, and writes
        damaged entries of `kept` anew. A file that cannot be written stays as it is."""
        there = {copy[0].slot: copy for copy in kept}
        stale = {slot: bytes(ENTRY_BYTES) for slot in self._found if slot not in there}
        mended = {
            slot: _encoded(there[slot]) for slot, noted in self._found.items() if slot in there and not noted
        }
        self._found = {}
        if stale or mended:
            self._run(lambda: self._write({**stale, **mended}, lambda error: None))

    def note(self, copies: Sequence[Copy], done: Callable[[CoreError | None], None]) -> None:
        """`done(None)` once a restart will know them; with STORAGE_UNAVAILABLE when it may not."""
        entries = {copy[0].slot: _encoded(copy) for copy in copies}
        self._run(lambda: self._write(entries, done))

    def _write(self, entries: dict[int, bytes], done: Callable[[CoreError | None], None]) -> None:
        try:
            if self._fd < 0:
                self._fd = self._created()
            for slot, entry in entries.items():
                if self._files.write(self._fd, [bytearray(entry)], slot * ENTRY_BYTES) != ENTRY_BYTES:
                    raise OSError("an entry was written short")
            self._files.sync(self._fd)
        except Exception as error:
            done(_unavailable(error))
            if not isinstance(error, OSError):
                raise
            return
        done(None)

    def _created(self) -> int:
        fd = self._files.open(self._path, os.O_RDWR | os.O_CREAT)
        try:
            # Entries in a file that nobody finds would be promises to nobody.
            self._files.sync_folder(self._folder)
        except OSError:
            self._files.close(fd)
            raise
        return fd

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._files.close(fd)


def _encoded(copy: Copy) -> bytes:
    ref, generation = copy
    fields = _FIELDS.pack(_MAGIC, ref.slot, ref.generation, generation)
    return (fields + _CRC.pack(crc32c.crc32c(fields))).ljust(ENTRY_BYTES, b"\0")


def _decoded(entry: bytes, slot: int) -> tuple[int, int] | None:
    """Both generations; None for a damaged entry."""
    fields = entry[: _FIELDS.size]
    whole = entry[: _FIELDS.size + _CRC.size] == fields + _CRC.pack(crc32c.crc32c(fields))
    if len(fields) < _FIELDS.size or not whole:
        return None
    magic, at, generation, replica = _FIELDS.unpack(fields)
    return (generation, replica) if magic == _MAGIC and at == slot else None


def _unavailable(error: Exception) -> CoreError:
    return CoreError(Reason.STORAGE_UNAVAILABLE, f"notes of blocks that may not be lost: {error}")
