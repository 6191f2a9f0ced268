"""Reads a store from outside: what lies in it, whether each block is what it says, and which files are
nobody's.

Why it exists: an operator must be able to ask a disk what it holds without starting an agent, and to prove
that its bytes are whole. Nothing is changed in a store that is verified. It must not know tiers.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from kvtier_core.checksums import checksum
from kvtier_core.errors import CoreError, Reason
from kvtier_core.tiers.block import HEADER_BYTES, BlockFormat, BlockHeader, check_table
from kvtier_core.tiers.fileops import FileOps, OsFileOps
from kvtier_core.tiers.nvme import superblock
from kvtier_core.tiers.nvme.crypto import TAG_BYTES, BlockCipher, KeyProvider
from kvtier_core.tiers.nvme.recovery import DropReason, classify
from kvtier_core.tiers.nvme.superblock import SUPERBLOCK_BYTES, Superblock
from kvtier_core.tiers.segments import checksums
from kvtier_core.tiers.slots import SlotRef
from kvtier_core.tiers.staging import PAGE

MAX_FINDINGS = 1000
SUFFIX = ".blocks"
# The stem of `store_path`.
_OURS = re.compile(r"[0-9a-f]{32}")


def store_path(folder: Path, file_key: str) -> Path:
    """The key may hold any character of a Kubernetes name; a digest is always a file name."""
    return folder / f"{hashlib.sha256(file_key.encode()).hexdigest()[:32]}{SUFFIX}"


class BlockVerdict(StrEnum):
    """GOOD: header, checksum and, with its key, decryption and seal agree. SEALED: encrypted and whole, and
    no key was given. VOLATILE, ERASED: nothing that is served. The others are never served."""

    GOOD = "GOOD"
    SEALED = "SEALED"
    VOLATILE = "VOLATILE"
    ERASED = "ERASED"
    DAMAGED_HEADER = "DAMAGED_HEADER"
    DAMAGED_PAYLOAD = "DAMAGED_PAYLOAD"
    KEY_DESTROYED = "KEY_DESTROYED"
    NOT_DECRYPTED = "NOT_DECRYPTED"
    OTHER_LAYOUT = "OTHER_LAYOUT"
    MISPLACED = "MISPLACED"
    UNREADABLE = "UNREADABLE"


DAMAGED = (
    BlockVerdict.DAMAGED_HEADER,
    BlockVerdict.DAMAGED_PAYLOAD,
    BlockVerdict.NOT_DECRYPTED,
    BlockVerdict.MISPLACED,
    BlockVerdict.UNREADABLE,
)

_OF_DROP = {
    DropReason.VOLATILE: BlockVerdict.VOLATILE,
    DropReason.ERASED: BlockVerdict.ERASED,
    DropReason.TORN_HEADER: BlockVerdict.DAMAGED_HEADER,
    DropReason.FOREIGN_VERSION: BlockVerdict.OTHER_LAYOUT,
    DropReason.LAYOUT_CHANGED: BlockVerdict.OTHER_LAYOUT,
    DropReason.MISPLACED: BlockVerdict.MISPLACED,
    DropReason.UNREADABLE: BlockVerdict.UNREADABLE,
}


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """One slot that is not empty. key, namespace, generations: zero where the header is not intact."""

    slot: int
    verdict: BlockVerdict
    key: bytes = b""
    namespace: bytes = b""
    slot_generation: int = 0
    replica_generation: int = 0
    epoch: int = 0
    cost: float = 0.0
    key_reference: str = ""


@dataclass(frozen=True, slots=True)
class StoreReport:
    """superblock: None when both copies are damaged or the file has none; nothing more is known then.
    counts: slots by verdict. blocks: the first MAX_FINDINGS that are not empty. damaged: the first
    MAX_FINDINGS that are, wherever they lie."""

    path: Path
    size_bytes: int
    superblock: Superblock | None
    empty: int = 0
    counts: dict[BlockVerdict, int] = field(default_factory=dict)
    blocks: tuple[StoredBlock, ...] = ()
    damaged: tuple[StoredBlock, ...] = ()

    @property
    def whole(self) -> bool:
        """Nothing in it is damaged."""
        return self.superblock is not None and not any(self.counts.get(verdict) for verdict in DAMAGED)


def verify_store(path: Path, keys: KeyProvider | None = None, files: FileOps | None = None) -> StoreReport:
    """Reads all of a store that no process has open. STORAGE_LOCKED, STORAGE_UNAVAILABLE."""
    use = files or OsFileOps()
    with _opened(path, use) as (fd, size):

        def read(buffer: memoryview, offset: int) -> int:
            return use.read(fd, [buffer], offset)

        pages = memoryview(mmap.mmap(-1, SUPERBLOCK_BYTES))
        done = read(pages, 0)
        found = superblock.newest([pages[at : at + PAGE] for at in range(0, done - done % PAGE, PAGE)])
        if found is None:
            return StoreReport(path, size, None)
        form = BlockFormat(found.payload_bytes, found.kind, found.layout)
        cipher = BlockCipher(keys, os.urandom) if keys is not None else None
        counts: Counter[BlockVerdict] = Counter()
        blocks: list[StoredBlock] = []
        damaged: list[StoredBlock] = []
        empty = 0
        for one in _blocks(read, form, max(0, size - SUPERBLOCK_BYTES) // form.stride, cipher):
            if one is None:
                empty += 1
                continue
            counts[one.verdict] += 1
            if len(blocks) < MAX_FINDINGS:
                blocks.append(one)
            if one.verdict in DAMAGED and len(damaged) < MAX_FINDINGS:
                damaged.append(one)
        return StoreReport(path, size, found, empty, dict(counts), tuple(blocks), tuple(damaged))


@contextmanager
def _opened(path: Path, files: FileOps) -> Iterator[tuple[int, int]]:
    try:
        fd = files.open(path, os.O_RDONLY)
    except OSError as error:
        raise CoreError(Reason.STORAGE_UNAVAILABLE, f"{path.name}: {error.strerror}") from error
    try:
        try:
            files.lock(fd)
        except OSError as error:
            raise CoreError(Reason.STORAGE_LOCKED, f"{path.name} is in use") from error
        yield fd, files.size(fd)
    finally:
        files.close(fd)


def _blocks(
    read: Callable[[memoryview, int], int], form: BlockFormat, slots: int, cipher: BlockCipher | None
) -> Iterator[StoredBlock | None]:
    """One per slot; None for an empty one."""
    # A page more, where decryption wants the tag behind the payload.
    block = memoryview(mmap.mmap(-1, form.stride + PAGE))
    plain = memoryview(mmap.mmap(-1, form.body_bytes))[: form.payload_bytes]
    for slot in range(slots):
        try:
            done = read(block[: form.stride], SUPERBLOCK_BYTES + slot * form.stride)
        except OSError:
            done = 0
        page = memoryview(bytes(block[:HEADER_BYTES])) if done == form.stride else None
        header, reason = classify(slot, page, form)
        if header is None and reason is None:
            yield None
            continue
        verdict = _OF_DROP[reason] if reason is not None else BlockVerdict.GOOD
        if header is None:
            yield StoredBlock(slot, verdict)
            continue
        if reason in (None, DropReason.VOLATILE):
            verdict = _payload(header, block, plain, form, cipher, verdict)
        yield StoredBlock(
            slot,
            verdict,
            header.key,
            header.namespace,
            header.slot_generation,
            header.replica_generation,
            header.epoch,
            header.cost,
            header.reference,
        )


def _payload(
    header: BlockHeader,
    block: memoryview,
    plain: memoryview,
    form: BlockFormat,
    cipher: BlockCipher | None,
    verdict: BlockVerdict,
) -> BlockVerdict:
    body = block[PAGE : PAGE + form.payload_bytes]
    try:
        table = check_table(block, header, SlotRef(header.slot, header.slot_generation))
    except CoreError:
        return BlockVerdict.DAMAGED_HEADER
    if checksum(form.kind, body) != header.payload_checksum:
        return BlockVerdict.DAMAGED_PAYLOAD
    if not header.encrypted:
        if table is not None and table.entries != checksums(form.kind, body, table.segment):
            return BlockVerdict.DAMAGED_HEADER
        return verdict if checksum("xxh3", body) == header.seal else BlockVerdict.DAMAGED_PAYLOAD
    if cipher is None:
        return BlockVerdict.SEALED
    page, stored = block[:PAGE], block[PAGE : PAGE + form.payload_bytes + TAG_BYTES]
    try:
        if table is None:
            cipher.decrypt(header, page, stored, plain)
        else:
            cipher.decrypt_segments(header, page, table, 0, stored, plain)
        return verdict if checksum("xxh3", plain) == cipher.seal_of(header) else BlockVerdict.NOT_DECRYPTED
    except CoreError as error:
        verdicts = {
            Reason.KEY_UNAVAILABLE: BlockVerdict.KEY_DESTROYED,
            Reason.CHECKSUM_MISMATCH: BlockVerdict.NOT_DECRYPTED,
        }
        if error.reason not in verdicts:
            raise
        return verdicts[error.reason]


@dataclass(frozen=True, slots=True)
class SweepReport:
    """Files of blocks in a folder that no cache claims: removed, or locked by a process that still runs."""

    removed: tuple[str, ...] = ()
    locked: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()


def sweep_orphans(
    folder: Path, claimed: Collection[Path], files: FileOps | None = None, beside: Sequence[str] = ()
) -> SweepReport:
    """Removes stores that belong to no cache of this node any more, and what lies beside them. claimed: paths
    of stores that stay. beside: suffixes of files that a store has beside it, removed after it and never
    while it is there. Files whose names are not ours are not looked at. OSError when the folder cannot be
    read."""
    use = files or OsFileOps()
    removed: list[str] = []
    locked: list[str] = []
    failed: list[str] = []
    kept = {path.stem for path in claimed}

    def remove(name: str) -> None:
        try:
            with _opened(folder / name, use):
                use.remove(folder / name)
                removed.append(name)
        except CoreError as error:
            (locked if error.reason is Reason.STORAGE_LOCKED else failed).append(name)
        except OSError:
            failed.append(name)

    names = [Path(name) for name in use.names(folder) if _OURS.fullmatch(Path(name).stem)]
    orphans = [name for name in names if name.stem not in kept]
    for name in orphans:
        if name.suffix == SUFFIX:
            remove(name.name)
    there = {Path(name).stem for name in (*locked, *failed)}
    for name in orphans:
        if name.suffix in beside and name.stem not in there:
            remove(name.name)
    if removed:
        use.sync_folder(folder)
    return SweepReport(tuple(removed), tuple(locked), tuple(failed))
