"""What a process finds in a store that another left behind: what it keeps, what it drops, and why.

Why it exists: after a crash every acknowledged block is served and nothing else, and one can say what became
of the rest. Headers alone are read; a payload is read only where its flush is not on record. It must not know
directories: it hands out identities, slots and generations.
"""

from __future__ import annotations

import mmap
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum

from kvtier_core.checksums import checksum
from kvtier_core.errors import CoreError, Reason
from kvtier_core.tiers.block import (
    HEADER_BYTES,
    BlockFormat,
    BlockHeader,
    HeaderState,
    known_header,
    page_state,
    table_of,
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


@dataclass(frozen=True, slots=True)
class Scanned:
    """One slot. header: of what lies there, None where none is intact. reason: why it is not served. page:
    the header's bytes. proven: its payload was read and is whole."""

    slot: int
    header: BlockHeader | None
    reason: DropReason | None
    page: bytes = b""
    proven: bool = False


class Scanner:
    """Reads the headers of slots, and the payloads whose commit group is above `trusted`."""

    def __init__(self, read: ReadAt, form: BlockFormat, base: int, trusted: int) -> None:
        self._read = read
        self._form = form
        self._base = base
        self._trusted = trusted
        self._local = threading.local()
        self._dense = form.stride <= DENSE_STRIDE
        self._step = max(1, CHUNK_BYTES // form.stride) if self._dense else SPARSE_SLOTS

    def scan(self, slots: int, threads: int) -> Iterator[Scanned]:
        """In order of slots. Only a bounded window of them is in memory at once."""
        window = 4 * max(1, threads)
        parts: deque[Future[list[Scanned]]] = deque()
        with ThreadPoolExecutor(max(1, threads), thread_name_prefix="kvtier-recovery") as pool:
            for first in range(0, slots, self._step):
                parts.append(pool.submit(self._part, first, slots))
                if len(parts) > window:
                    yield from parts.popleft().result()
            while parts:
                yield from parts.popleft().result()

    def _part(self, first: int, slots: int) -> list[Scanned]:
        count = min(self._step, slots - first)
        if self._dense:
            buffer = self._buffer(self._step * self._form.stride)[: count * self._form.stride]
            if self._fill(buffer, first):
                blocks = (buffer[at * self._form.stride :][: self._form.stride] for at in range(count))
                return [self._judge(first + at, block, True) for at, block in enumerate(blocks)]
        block = self._buffer(self._form.stride)
        return [self._one(slot, block) for slot in range(first, first + count)]

    def _one(self, slot: int, block: memoryview) -> Scanned:
        if not self._fill(block[:PAGE], slot):
            return Scanned(slot, None, DropReason.UNREADABLE)
        return self._judge(slot, block, False)

    def _judge(self, slot: int, block: memoryview, whole: bool) -> Scanned:
        page = bytes(block[:HEADER_BYTES])
        header, reason = classify(slot, page, self._form)
        if header is None or reason is not None or header.group <= self._trusted:
            return Scanned(slot, header, reason, page)
        if not whole and not self._fill(block[: self._form.stride], slot):
            # Not known to be torn: it must not be overwritten for an error that may pass.
            return Scanned(slot, header, DropReason.UNREADABLE, page)
        body = block[PAGE : PAGE + self._form.payload_bytes]
        torn = checksum(self._form.kind, body) != header.payload_checksum
        torn = torn or (header.segmented and table_of(block, header) is None)
        return Scanned(slot, header, DropReason.TORN_PAYLOAD if torn else None, page, True)

    def _fill(self, buffer: memoryview, slot: int) -> bool:
        try:
            return self._read([buffer], self._base + slot * self._form.stride) == len(buffer)
        except OSError:
            return False

    def _buffer(self, size: int) -> memoryview:
        """This thread's own."""
        found: memoryview | None = getattr(self._local, "buffer", None)
        if found is None or len(found) < size:
            found = self._local.buffer = memoryview(mmap.mmap(-1, size))
        return found


def classify(
    slot: int, page: bytes | memoryview | None, form: BlockFormat
) -> tuple[BlockHeader | None, DropReason | None]:
    """(header, None) for a durable block in its place, (None, None) for an empty slot, else the reason."""
    if page is None:
        return None, DropReason.UNREADABLE
    state, header = page_state(page)
    if header is None:
        reasons = {HeaderState.TORN: DropReason.TORN_HEADER, HeaderState.FOREIGN: DropReason.FOREIGN_VERSION}
        return None, reasons.get(state)
    if header.erased:
        return header, DropReason.ERASED
    if header.slot != slot:
        return header, DropReason.MISPLACED
    described = (header.kind, header.layout, header.dtype, header.codec)
    if described != form.described or header.length != form.payload_bytes:
        return header, DropReason.LAYOUT_CHANGED
    return header, None if header.durable else DropReason.VOLATILE


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

    def keep(self, slot: int, header: BlockHeader, page: bytes) -> None:
        """Of two blocks of one key the one written later stays; the other is a remnant."""
        order = (header.store_epoch, header.group, header.slot_generation)
        before = self._order.get(header.key)
        if before is None or order > before:
            loser = self.kept.get(header.key)
            self.kept[header.key] = page
            self._order[header.key] = order
            if loser is None:
                return
            header = known_header(loser)
            slot = header.slot
        self.drop(slot, DropReason.SUPERSEDED, header.key)
        self.remnants.append((slot, header.key, header.namespace))

    def headers(self) -> Iterator[BlockHeader]:
        return map(known_header, self.kept.values())
