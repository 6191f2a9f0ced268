"""An open store: how one block is encoded into buffers and believed when it comes back.

Why it exists: the inline calls, the I/O threads, recovery and the offline verifier must encode and verify
alike. It must not know threads, queues or deadlines.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvtier_core.checksums import Running
from kvtier_core.errors import CoreError, Reason
from kvtier_core.tiers import segments
from kvtier_core.tiers.block import (
    HEADER_BYTES,
    BlockFormat,
    BlockHeader,
    HeaderWriter,
    amend,
    check_header,
    check_payload,
    check_seal,
    check_table,
)
from kvtier_core.tiers.nvme.crypto import TAG_BYTES, BlockCipher
from kvtier_core.tiers.nvme.file import BlockFile, RunScratch, aligned
from kvtier_core.tiers.nvme.pages import KnownPages
from kvtier_core.tiers.nvme.slots import NvmeSlots
from kvtier_core.tiers.segments import Life, SegmentTable, Sums
from kvtier_core.tiers.slots import BlockIdentity
from kvtier_core.tiers.staging import PAGE
from kvtier_core.tiers.transfer import TransferItem

MAX_RUN_BLOCKS = 256
_SEAL = "xxh3"
_BLANK = bytes(PAGE - HEADER_BYTES)


@dataclass(frozen=True, slots=True)
class Pieces:
    """The buffers of one stored block. page: its header page. bounced: the payload is in the scratch, not in
    the landing. tail: the last page, where the payload ends within one."""

    buffers: list[memoryview]
    page: memoryview
    bounced: bool
    tail: memoryview | None


class SlotGuard:
    """Keeps an erasure and a write of one slot apart: they come from different callers and threads."""

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._busy: set[int] = set()

    @contextmanager
    def holding(self, slots: Sequence[int]) -> Iterator[None]:
        """Waits for the slots; the other side is inside a system call, whose caller has a deadline."""
        wanted = set(slots)
        with self._free:
            while self._busy & wanted:
                self._free.wait()
            self._busy |= wanted
        try:
            yield
        finally:
            with self._free:
                self._busy -= wanted
                self._free.notify_all()


class Store:
    """One opening of a file of blocks. epoch: of this opening, 0 for a store that dies with its process."""

    def __init__(
        self,
        form: BlockFormat,
        file: BlockFile,
        slots: NvmeSlots,
        epoch: int,
        run_bytes: int,
        cipher: BlockCipher | None,
    ) -> None:
        self.form = form
        self.file = file
        self.slots = slots
        self.epoch = epoch
        self.cipher = cipher
        self.guard = SlotGuard()
        self.pages = KnownPages()
        self.run_blocks = max(1, min(MAX_RUN_BLOCKS, run_bytes // form.stride))
        self._headers = HeaderWriter(form, epoch)
        self._local = threading.local()
        self._whole = form.payload_bytes // PAGE * PAGE

    @property
    def segment_bytes(self) -> int:
        """Of the blocks that this opening writes."""
        return self.form.segment_bytes if self.cipher is None else self.form.sealed_segment_bytes

    def scratch(self) -> RunScratch:
        """This thread's own, so that a hung call can only write where nobody else looks."""
        found: RunScratch | None = getattr(self._local, "scratch", None)
        if found is None:
            found = self._local.scratch = RunScratch(self.form, self.run_blocks)
        return found

    def probe(self) -> RunScratch:
        """This thread's two blocks for reading back: one to read into, one to land in."""
        found: RunScratch | None = getattr(self._local, "probe", None)
        if found is None:
            found = self._local.probe = RunScratch(self.form, 2)
        return found

    def check_source(self, item: TransferItem) -> Sums | None:
        """What `encode` is given; None: it finds them itself. SHORT_COPY, CHECKSUM_MISMATCH: a damaged source
        is never given a valid header."""
        identity = item.identity
        if len(item.landing.body) != self.form.payload_bytes or identity.length != self.form.payload_bytes:
            raise CoreError(
                Reason.SHORT_COPY,
                f"{len(item.landing.body)} bytes are no payload of {self.form.payload_bytes}",
                {"slot": item.ref.slot},
            )
        if self.cipher is not None:
            return None
        segment = self.form.segment_bytes if self.form.segmented else 0
        found = segments.sums(self.form.kind, item.landing.body, segment)
        _check_seal(found.seal, identity)
        return found

    def encode(
        self, item: TransferItem, found: Sums | None, scratch: RunScratch, at: int, group: int
    ) -> Pieces:
        """One stored block, the payload in place where it can be. found: what `check_source` did.
        KEY_UNAVAILABLE; CHECKSUM_MISMATCH where it left that to be found."""
        identity, body = item.identity, item.landing.body
        if found is None:
            assert self.cipher is not None
            return self._encrypt(item, scratch, at, group, self.cipher)
        header = self._headers.pack(item.ref, identity, group, identity.checksum, found.whole)
        pieces = self.pieces(item, scratch, at)
        if pieces.bounced:
            block = pieces.buffers[0]
            block[PAGE : PAGE + len(body)] = body
            block[PAGE + len(body) :] = bytes(self.form.stride - PAGE - len(body))
        elif pieces.tail is not None:
            rest = len(body) - self._whole
            pieces.tail[:rest] = body[self._whole :]
            pieces.tail[rest:] = bytes(PAGE - rest)
        if self.form.segmented:
            shape = self.form.segment_bytes, segments.CHECKSUM_WIDTH
            self._write_page(pieces.page, header, shape, found.entries, item, found.whole)
        else:
            pieces.page[:HEADER_BYTES] = header
            pieces.page[HEADER_BYTES:] = _BLANK
        return pieces

    def _encrypt(
        self, item: TransferItem, scratch: RunScratch, at: int, group: int, cipher: BlockCipher
    ) -> Pieces:
        identity, plain = item.identity, item.landing.body
        sealed_by = cipher.begin(identity.namespace)
        masked = cipher.mask(sealed_by, identity.namespace, identity.checksum)
        header = self._headers.pack(item.ref, identity, group, masked, 0, sealed_by)
        target = scratch.body(at)
        segment = self.form.sealed_segment_bytes
        room = target[: len(plain) + TAG_BYTES]
        seal, own = Running(_SEAL), Running(self.form.kind)
        tags = cipher.encrypt(sealed_by, identity.namespace, header, plain, room, segment, seal, own)
        _check_seal(seal.value, identity)
        target[len(plain) :] = bytes(len(target) - len(plain))
        amend(header, own.value)
        block = scratch.block(at)
        self._write_page(block[:PAGE], header, (segment, segments.TAG_WIDTH), tags, item, own.value)
        return Pieces([block], block[:PAGE], True, None)

    def _write_page(
        self,
        page: memoryview,
        header: bytearray,
        shape: tuple[int, int],
        entries: bytes,
        item: TransferItem,
        payload_checksum: int,
    ) -> None:
        """shape: bytes of a segment and of an entry."""
        ref = item.ref
        life = Life(item.identity.chunk_digest, ref.generation, ref.slot, self.epoch, payload_checksum)
        known = header + segments.encode(*shape, entries, life)
        page[: len(known)] = known
        page[len(known) :] = _BLANK[len(known) - HEADER_BYTES :]
        self.pages.remember(ref, bytes(known))

    def pieces(self, item: TransferItem, scratch: RunScratch, at: int) -> Pieces:
        """Buffers of one stored block, `form.stride` bytes in all: the landing's own where storage can move
        them, this thread's otherwise. SHORT_COPY when the landing is no payload."""
        body, page = item.landing.body, item.landing.header
        if len(body) != self.form.payload_bytes:
            raise CoreError(
                Reason.SHORT_COPY,
                f"a landing of {len(body)} bytes is no payload of {self.form.payload_bytes}",
            )
        if page is None:
            page = scratch.header(at)
            bounced = self.file.direct and not aligned(body)
        else:
            bounced = self.file.direct and not (aligned(body) and aligned(page))
        if bounced or self.cipher is not None:
            block = scratch.block(at)
            return Pieces([block], block[:PAGE], True, None)
        if self._whole == len(body):
            return Pieces([page, body], page, False, None)
        tail = scratch.tail(at)
        return Pieces([page, body[: self._whole], tail] if self._whole else [page, tail], page, False, tail)

    def believe(self, item: TransferItem, pieces: Pieces, scratch: RunScratch, at: int) -> None:
        """Verifies a block that was read into `pieces` and leaves its payload in the landing.
        CHECKSUM_MISMATCH, IDENTITY_MISMATCH, RECYCLED_DESTINATION, NOT_VISIBLE, CODEC_OR_LAYOUT_MISMATCH,
        SHORT_COPY, KEY_UNAVAILABLE; the landing's bytes are nobody's then."""
        header, table = self.named(pieces.page, item)
        body = item.landing.body
        if self.cipher is not None:
            stored = scratch.body(at)
            if table is None:
                self.cipher.decrypt(header, pieces.page, stored, body)
            else:
                self.cipher.decrypt_segments(header, pieces.page, table, 0, stored, body)
            return
        if pieces.bounced:
            stored = pieces.buffers[0][PAGE : PAGE + len(body)]
            check_payload(self.form.kind, header, stored, item.ref)
            body[:] = stored
            return
        if pieces.tail is not None:
            body[self._whole :] = pieces.tail[: len(body) - self._whole]
        check_payload(self.form.kind, header, body, item.ref)

    def named(self, page: memoryview, item: TransferItem) -> tuple[BlockHeader, SegmentTable | None]:
        """Believes a header page, seal included, and says what its payload must be. Raises as `believe`
        does."""
        header = check_header(page, self.form, item.ref, item.identity, self.epoch)
        if self.cipher is None:
            if header.encrypted:
                raise CoreError(
                    Reason.KEY_UNAVAILABLE, f"slot {header.slot} is encrypted and no keys are given"
                )
            check_seal(header.seal, item.ref, item.identity)
            return header, check_table(page, header, item.ref)
        if not header.encrypted:
            # Whoever can write to the device could otherwise pass off plain bytes for ours.
            raise CoreError(
                Reason.IDENTITY_MISMATCH, f"slot {header.slot} is not encrypted as this store's blocks are"
            )
        check_seal(self.cipher.seal_of(header), item.ref, item.identity)
        return header, check_table(page, header, item.ref)


def _check_seal(found: int, identity: BlockIdentity) -> None:
    if found != identity.checksum:
        raise CoreError(Reason.CHECKSUM_MISMATCH, f"block {identity.logical:#x} changed since it was sealed")
