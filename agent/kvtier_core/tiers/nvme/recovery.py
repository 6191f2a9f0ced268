"""What a process finds in a store that another left behind: what it keeps, what it drops, and why.

Why it exists: after a crash every acknowledged block is served and nothing else, and one can say what became
of the rest. Headers alone are read; a payload is read only where its flush is not on record. It must not know
directories: it hands out identities, slots and generations.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum

from kvtier_core.checksums import checksum
from kvtier_core.errors import CoreError, Reason
from kvtier_core.tiers.block import (
    HEADER_BYTES,
    BlockFlag,
    BlockFormat,
    BlockHeader,
    HeaderState,
    page_state,
)
from kvtier_core.tiers.fileops import Buffer
from kvtier_core.tiers.nvme.crypto import BlockCipher, KeyProvider
from kvtier_core.tiers.slots import BlockIdentity, SlotRef
from kvtier_core.tiers.staging import PAGE

# Up to this distance between headers, reading all that lies between is cheaper than a call for each.
DENSE_STRIDE = 64 << 10
CHUNK_BYTES = 4 << 20
SPARSE_SLOTS = 64
MAX_EXAMPLES = 64

ReadAt = Callable[[Sequence[Buffer], int], int]


class DropReason(StrEnum):
    """Why a slot with something in it is not served."""

    VOLATILE = "VOLATILE"
    ERASED = "ERASED"
    TORN_HEADER = "TORN_HEADER"
    TORN_PAYLOAD = "TORN_PAYLOAD"
    FOREIGN_VERSION = "FOREIGN_VERSION"
    LAYOUT_CHANGED = "LAYOUT_CHANGED"
    MISPLACED = "MISPLACED"
    SUPERSEDED = "SUPERSEDED"
    UNREADABLE = "UNREADABLE"
    KEY_DESTROYED = "KEY_DESTROYED"
    NOT_ENCRYPTED = "NOT_ENCRYPTED"
    BEYOND_BUDGET = "BEYOND_BUDGET"


class SuperblockState(StrEnum):
    """NEW: there was no store. REBUILT: both copies were lost; every payload was read."""

    NEW = "NEW"
    INTACT = "INTACT"
    REBUILT = "REBUILT"


@dataclass(frozen=True, slots=True)
class Dropped:
    """One dropped slot; key: of the block that lay there, empty where that is not known."""

    slot: int
    reason: DropReason
    key: bytes = b""


@dataclass(frozen=True, slots=True)
class RecoveredBlock:
    """A block of an earlier process. `identity.logical` was that process's; key, slot and generation are
    good."""

    identity: BlockIdentity
    slot: int
    generation: int

    @property
    def ref(self) -> SlotRef:
        return SlotRef(self.slot, self.generation)


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """epoch: of this opening. empty: slots never written. proven: payloads that were read because their flush
    was not on record. examples: the first MAX_EXAMPLES drops."""

    superblock: SuperblockState = SuperblockState.NEW
    epoch: int = 0
    clean: bool = True
    kept: int = 0
    empty: int = 0
    proven: int = 0
    dropped: dict[DropReason, int] = field(default_factory=dict)
    examples: tuple[Dropped, ...] = ()
    seconds: float = 0.0


def scan(
    read: ReadAt, form: BlockFormat, base: int, slots: int, threads: int
) -> Iterator[tuple[int, memoryview | None]]:
    """(slot, first HEADER_BYTES of its header page) in order; None where it cannot be read."""
    dense = form.stride <= DENSE_STRIDE
    step = max(1, CHUNK_BYTES // form.stride) if dense else SPARSE_SLOTS

    def fetch(first: int) -> list[memoryview | None]:
        count = min(step, slots - first)
        if dense:
            buffer = memoryview(mmap.mmap(-1, count * form.stride))
            try:
                done = read([buffer], base + first * form.stride)
            except OSError:
                done = 0
            if done == len(buffer):
                starts = range(0, len(buffer), form.stride)
                return [memoryview(bytes(buffer[at : at + HEADER_BYTES])) for at in starts]
        page = memoryview(mmap.mmap(-1, PAGE))
        return [_page(read, page, base + slot * form.stride) for slot in range(first, first + count)]

    with ThreadPoolExecutor(max(1, threads), thread_name_prefix="kvtier-recovery") as pool:
        slot = 0
        # A bounded window: the headers of a large store need not be in memory at once.
        starts = list(range(0, slots, step))
        for at in range(0, len(starts), 4 * max(1, threads)):
            for pages in pool.map(fetch, starts[at : at + 4 * max(1, threads)]):
                for found in pages:
                    yield slot, found
                    slot += 1


def _page(read: ReadAt, page: memoryview, offset: int) -> memoryview | None:
    try:
        done = read([page], offset)
    except OSError:
        return None
    return memoryview(bytes(page[:HEADER_BYTES])) if done == PAGE else None


def classify(
    slot: int, page: memoryview | None, form: BlockFormat
) -> tuple[BlockHeader | None, DropReason | None]:
    """(header, None) for a durable block in its place, (None, None) for an empty slot, else the reason."""
    if page is None:
        return None, DropReason.UNREADABLE
    state, header = page_state(page)
    if header is None:
        reasons = {HeaderState.TORN: DropReason.TORN_HEADER, HeaderState.FOREIGN: DropReason.FOREIGN_VERSION}
        return None, reasons.get(state)
    if header.flags & BlockFlag.ERASED:
        return header, DropReason.ERASED
    if header.slot != slot:
        return header, DropReason.MISPLACED
    described = (header.kind, header.layout, header.dtype, header.codec)
    if described != form.described or header.length != form.payload_bytes:
        return header, DropReason.LAYOUT_CHANGED
    return header, None if header.durable else DropReason.VOLATILE


def payload_is_whole(read: ReadAt, form: BlockFormat, offset: int, header: BlockHeader) -> bool:
    """Reads a payload and compares it with its header; needs no key. offset: of the header page."""
    block = memoryview(mmap.mmap(-1, form.stride))
    try:
        if read([block], offset) != form.stride:
            return False
    except OSError:
        return False
    body = block[PAGE : PAGE + form.payload_bytes]
    return checksum(form.kind, body) == header.payload_checksum


class KeyCheck:
    """Whether blocks can still be opened; asks for each reference once."""

    def __init__(self, keys: KeyProvider | None, cipher: BlockCipher | None) -> None:
        self._keys = keys
        self._cipher = cipher
        self._alive: dict[str, bool] = {}

    def reason(self, header: BlockHeader) -> DropReason | None:
        """KEY_UNAVAILABLE is raised when no keys are given at all: that is a mistake, not an erasure."""
        if not header.encrypted:
            return None if self._keys is None else DropReason.NOT_ENCRYPTED
        if self._keys is None:
            raise CoreError(Reason.KEY_UNAVAILABLE, "the store is encrypted and no keys are given")
        reference = header.reference
        if reference not in self._alive:
            self._alive[reference] = self._keys.key(reference) is not None
        return None if self._alive[reference] else DropReason.KEY_DESTROYED

    def seal(self, header: BlockHeader) -> int:
        return self._cipher.seal_of(header) if header.encrypted and self._cipher else header.seal


class Findings:
    """Collects what a scan finds, compactly: kept headers as bytes, drops as counts."""

    def __init__(self) -> None:
        self.kept: dict[bytes, bytes] = {}
        self.dropped: Counter[DropReason] = Counter()
        self.examples: list[Dropped] = []
        self.remnants: list[tuple[int, bytes, bytes]] = []
        self.torn: list[SlotRef] = []
        self.empty = 0
        self.proven = 0
        self.highest_group = 0
        self.highest_epoch = 0
        self._order: dict[bytes, tuple[int, int, int]] = {}

    def saw(self, header: BlockHeader) -> None:
        self.highest_group = max(self.highest_group, header.group)
        self.highest_epoch = max(self.highest_epoch, header.store_epoch)

    def drop(self, slot: int, reason: DropReason, key: bytes = b"") -> None:
        self.dropped[reason] += 1
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(Dropped(slot, reason, key))

    def keep(self, slot: int, header: BlockHeader, page: memoryview) -> None:
        """Of two blocks of one key the one written later stays; the other is a remnant."""
        order = (header.store_epoch, header.group, header.slot_generation)
        before = self._order.get(header.key)
        if before is None or order > before:
            loser = self.kept.get(header.key)
            self.kept[header.key] = bytes(page[:HEADER_BYTES])
            self._order[header.key] = order
            if loser is None:
                return
            _, old = page_state(loser)
            assert old is not None
            slot, header = old.slot, old
        self.drop(slot, DropReason.SUPERSEDED, header.key)
        self.remnants.append((slot, header.key, header.namespace))

    def headers(self) -> Iterator[BlockHeader]:
        for page in self.kept.values():
            _, header = page_state(page)
            assert header is not None
            yield header
