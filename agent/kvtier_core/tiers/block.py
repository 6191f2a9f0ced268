"""The self-describing block: a header page, then the payload, in one aligned run of bytes.

Why it exists: bytes read from storage must prove by themselves which block they are, of which slot life, and
that they are whole; what a process left behind must be usable by the next one from its headers alone. It must
not know files, threads or sessions.

Header, little-endian, within one sector of the page, then its segment table, the rest of the page zero:
magic 8s | version u32 | checksum kind 8s | key 32s | logical u64 | slot generation u64 | replica generation
u64 | rows u32 | payload length u64 | seal u64 | payload checksum u64 | flags u32 | namespace 32s | authority
epoch u64 | slot u64 | store epoch u64 | commit group u64 | cost f64 | layout 64s | dtype 16s | codec 16s |
key reference 64s | salt 16s | nonce 12s | tag 16s | crc32c of all before u32

seal: XXH3-64 of the plain payload, masked when the block is encrypted. payload checksum: of the bytes as
they lie on the device, by the kind named. tag: of version 2 only; version 3 has one for each segment.

Version 2 has no table: such a block is read as a whole. It is what a plain payload has of which a part costs
as much to read as all of it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntFlag, StrEnum
from functools import cached_property
from typing import NamedTuple

import crc32c

from kvtier_core.checksums import checksum
from kvtier_core.errors import CoreError, Reason
from kvtier_core.layout import CODEC_IDENTITY, LAYOUT_ID, ChunkLayout
from kvtier_core.tiers import segments
from kvtier_core.tiers.segments import Life, SegmentTable
from kvtier_core.tiers.slots import BlockIdentity, SlotRef
from kvtier_core.tiers.staging import PAGE

MAGIC = b"KVTBLK\x00\x03"
VERSION = 3
WITHOUT_TABLE = (b"KVTBLK\x00\x02", 2)
_FIELDS = struct.Struct("<8sI8s32sQQQIQQQI32sQQQQd64s16s16s64s16s12s16s")
_CRC = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CRC.size
_PAYLOAD_CHECKSUM_AT = struct.calcsize("<8sI8s32sQQQIQQ")
_FLAGS_AT = struct.calcsize("<8sI8s32sQQQIQQQ")
_TAG_AT = _FIELDS.size - 16
TABLE_ROOM = PAGE - HEADER_BYTES
KEY_BYTES = 32
NO_NAMESPACE = bytes(KEY_BYTES)
_U64 = (1 << 64) - 1


class BlockFlag(IntFlag):
    """DURABLE: recovered after the process ended. ENCRYPTED: the payload is AES-256-GCM. ERASED: deleted; the
    page holds nothing else. DROPPABLE: the loss of its last copy is only a recomputation."""

    DURABLE = 1
    ENCRYPTED = 2
    ERASED = 4
    DROPPABLE = 8


# As numbers, for what runs once per block.
_DURABLE, _ENCRYPTED, _ERASED, _DROPPABLE = (int(flag) for flag in BlockFlag)


class HeaderState(StrEnum):
    """What a header page is before anyone asks whose block it is."""

    VALID = "VALID"
    EMPTY = "EMPTY"
    TORN = "TORN"
    FOREIGN = "FOREIGN"


class BlockHeader(NamedTuple):
    """A header as it lies on the device; text fields are padded with NUL."""

    magic: bytes
    version: int
    kind: bytes
    key: bytes
    logical: int
    slot_generation: int
    replica_generation: int
    rows: int
    length: int
    seal: int
    payload_checksum: int
    flags: int
    namespace: bytes
    epoch: int
    slot: int
    store_epoch: int
    group: int
    cost: float
    layout: bytes
    dtype: bytes
    codec: bytes
    key_reference: bytes
    salt: bytes
    nonce: bytes
    tag: bytes

    @property
    def durable(self) -> bool:
        return bool(self.flags & _DURABLE)

    @property
    def encrypted(self) -> bool:
        return bool(self.flags & _ENCRYPTED)

    @property
    def erased(self) -> bool:
        return bool(self.flags & _ERASED)

    @property
    def segmented(self) -> bool:
        """A table of segments lies behind it."""
        return self.version == VERSION

    @property
    def life(self) -> Life:
        return Life(self.key, self.slot_generation, self.slot, self.store_epoch, self.payload_checksum)

    @property
    def reference(self) -> str:
        return text(self.key_reference)

    def identity(self, seal: int) -> BlockIdentity:
        """What the block says it is; `seal` is the unmasked one."""
        return BlockIdentity(
            self.key,
            self.logical,
            self.replica_generation,
            self.rows,
            self.length,
            seal,
            b"" if self.namespace == NO_NAMESPACE else self.namespace,
            self.epoch,
            self.durable,
            self.cost,
            bool(self.flags & _DROPPABLE),
        )


@dataclass(frozen=True)
class BlockFormat:
    """What all blocks of one store have in common. kind: the payload checksum's name. page_bytes: what a
    segment should hold at least, and whole_bytes: plain payloads of at most so many have no table; no two
    blocks need agree on them."""

    payload_bytes: int
    kind: str
    layout: str = LAYOUT_ID
    dtype: str = "float32"
    codec: str = CODEC_IDENTITY
    page_bytes: int = PAGE
    whole_bytes: int = 0

    def __post_init__(self) -> None:
        for value, width in self._texts:
            if not 0 < len(value.encode()) <= width:
                raise CoreError(Reason.MANIFEST_INVALID, f"{value!r} does not fit {width} bytes of a header")
        if self.payload_bytes <= 0:
            raise CoreError(Reason.MANIFEST_INVALID, f"a payload of {self.payload_bytes} bytes")

    @property
    def _texts(self) -> tuple[tuple[str, int], ...]:
        return (self.kind, 8), (self.layout, 64), (self.dtype, 16), (self.codec, 16)

    @cached_property
    def described(self) -> tuple[bytes, ...]:
        """Kind, layout, dtype and codec as a header holds them."""
        return tuple(value.encode().ljust(width, b"\0") for value, width in self._texts)

    @property
    def body_bytes(self) -> int:
        """The payload, rounded up to whole pages."""
        return -(-self.payload_bytes // PAGE) * PAGE

    @property
    def stride(self) -> int:
        """Bytes of one slot: header page and body."""
        return PAGE + self.body_bytes

    @cached_property
    def segmented(self) -> bool:
        """Whether a plain block has a table."""
        return self.payload_bytes > self.whole_bytes

    @cached_property
    def segment_bytes(self) -> int:
        """Of a plain block; all of it where it has no table."""
        if not self.segmented:
            return self.body_bytes
        return segments.segment_bytes(
            self.payload_bytes, TABLE_ROOM, segments.CHECKSUM_WIDTH, self.page_bytes
        )

    @cached_property
    def sealed_segment_bytes(self) -> int:
        """Of an encrypted one."""
        least = max(segments.SEALED_BYTES, self.page_bytes)
        return segments.segment_bytes(self.payload_bytes, TABLE_ROOM, segments.TAG_WIDTH, least)

    @classmethod
    def of(cls, layout: ChunkLayout, kind: str, whole_bytes: int = 0) -> BlockFormat:
        page = segments.page_bytes(layout)
        return cls(layout.payload_bytes, kind, page_bytes=page, whole_bytes=whole_bytes)


class HeaderWriter:
    """Packs headers of one store; the fields that never change are encoded once."""

    def __init__(self, form: BlockFormat, store_epoch: int) -> None:
        self._plain = (MAGIC, VERSION) if form.segmented else WITHOUT_TABLE
        self._kind = form.kind.encode()
        self._layout = form.layout.encode()
        self._dtype = form.dtype.encode()
        self._codec = form.codec.encode()
        self._epoch = store_epoch

    def pack(
        self,
        ref: SlotRef,
        identity: BlockIdentity,
        group: int,
        seal: int,
        payload_checksum: int,
        sealed_by: tuple[str, bytes, bytes] | None = None,
    ) -> bytearray:
        """HEADER_BYTES of a header. sealed_by: (key reference, salt, nonce) of an encrypted block, whose
        payload checksum `amend` fills in."""
        reference, salt, nonce = sealed_by or ("", b"", b"")
        flags = (_DURABLE if identity.durable else 0) | (_ENCRYPTED if sealed_by else 0)
        flags |= _DROPPABLE if identity.droppable else 0
        header = bytearray(HEADER_BYTES)
        _FIELDS.pack_into(
            header,
            0,
            *((MAGIC, VERSION) if sealed_by else self._plain),
            self._kind,
            identity.chunk_digest,
            identity.logical & _U64,
            ref.generation,
            identity.replica_generation & _U64,
            identity.rows,
            identity.length,
            seal,
            payload_checksum,
            flags,
            identity.namespace,
            identity.epoch & _U64,
            ref.slot,
            self._epoch,
            group,
            identity.cost,
            self._layout,
            self._dtype,
            self._codec,
            reference.encode(),
            salt,
            nonce,
            b"",
        )
        finish(header)
        return header


def finish(header: bytearray | memoryview) -> None:
    """Writes the header's own checksum."""
    _CRC.pack_into(header, _FIELDS.size, crc32c.crc32c(header[: _FIELDS.size]))


def amend(header: bytearray, payload_checksum: int) -> None:
    """Fills in what is known only after the payload was encrypted."""
    struct.pack_into("<Q", header, _PAYLOAD_CHECKSUM_AT, payload_checksum)
    finish(header)


def associated_data(header: bytes | bytearray | memoryview) -> bytes:
    """What encryption binds to the payload: every field but the ciphertext's checksum, and DROPPABLE, a
    promise that others may grow. Of version 2 every field but checksum and tag."""
    fields = bytearray(header[: _FIELDS.size])
    fields[_PAYLOAD_CHECKSUM_AT : _PAYLOAD_CHECKSUM_AT + 8] = bytes(8)
    if fields[:8] == WITHOUT_TABLE[0]:
        return bytes(fields[:_TAG_AT])
    fields[_FLAGS_AT] &= ~_DROPPABLE & 0xFF
    return bytes(fields)


def table_of(page: memoryview | bytes, header: BlockHeader) -> SegmentTable | None:
    """The segment table in a header page that was read as `header`; None: it has none, or not its own."""
    if not header.segmented:
        return None
    return segments.decode(page[HEADER_BYTES:PAGE], header.life, header.length)


def check_table(page: memoryview | bytes, header: BlockHeader, ref: SlotRef) -> SegmentTable | None:
    """As `table_of`; CHECKSUM_MISMATCH where the table is not the one that was written."""
    found = table_of(page, header)
    wanted = segments.TAG_WIDTH if header.encrypted else segments.CHECKSUM_WIDTH
    if header.segmented and (found is None or found.width != wanted):
        raise CoreError(
            Reason.CHECKSUM_MISMATCH,
            f"the segment table of slot {ref.slot} changed",
            {"logical": f"{header.logical:#x}", "slot": ref.slot},
        )
    return found


def erased_page(ref: SlotRef, store_epoch: int) -> bytearray:
    """A header page that says: what lay here is deleted."""
    page = bytearray(PAGE)
    empty = (b"",) * 7
    _FIELDS.pack_into(
        page, 0, MAGIC, VERSION, b"", b"", 0, ref.generation, 0, 0, 0, 0, 0, BlockFlag.ERASED, b"", 0,
        ref.slot, store_epoch, 0, 0.0, *empty,
    )  # fmt: skip
    finish(page)
    return page


def read_header(page: memoryview | bytes) -> tuple[HeaderState, BlockHeader | None]:
    """Decodes a header page. EMPTY: never written. TORN: not the bytes that were written. FOREIGN: intact, of
    another version."""
    fields = bytes(page[: _FIELDS.size])
    (stored,) = _CRC.unpack_from(page, _FIELDS.size)
    if crc32c.crc32c(fields) != stored:
        return HeaderState.TORN, None
    header = BlockHeader._make(_FIELDS.unpack(fields))
    if (header.magic, header.version) not in ((MAGIC, VERSION), WITHOUT_TABLE):
        return HeaderState.FOREIGN, None
    return HeaderState.VALID, header


def known_header(page: bytes) -> BlockHeader:
    """As `read_header`, of bytes that were VALID there and have stayed in memory since."""
    return BlockHeader._make(_FIELDS.unpack_from(page))


def page_state(page: memoryview | bytes) -> tuple[HeaderState, BlockHeader | None]:
    """As `read_header`, and tells a page that was never written from a damaged one."""
    state, header = read_header(page)
    if state is HeaderState.TORN and not any(bytes(page[:HEADER_BYTES])):
        return HeaderState.EMPTY, None
    return state, header


def text(field: bytes) -> str:
    """A padded text field. Damaged bytes cannot come here: the header's checksum is checked first."""
    return field.rstrip(b"\0").decode()


def check_header(
    page: memoryview, form: BlockFormat, ref: SlotRef, identity: BlockIdentity, store_epoch: int
) -> BlockHeader:
    """Compares a header with what was asked for, all but seal and payload.

    Guards in order: header intact, CHECKSUM_MISMATCH; erased, NOT_VISIBLE; slot life, RECYCLED_DESTINATION;
    block, rows, replica generation, namespace and place, IDENTITY_MISMATCH; layout, dtype, codec and checksum
    kind, CODEC_OR_LAYOUT_MISMATCH; length, SHORT_COPY.

    A logical id lives as long as its process: it is compared only for blocks of this store epoch.
    """
    state, header = read_header(page)
    if header is None:
        raise _refused(
            Reason.CHECKSUM_MISMATCH, ref, identity, f"its header is {state.value.lower()}, not its own"
        )
    if header.erased:
        raise _refused(Reason.NOT_VISIBLE, ref, identity, "it was erased")
    if header.slot_generation != ref.generation:
        raise _refused(
            Reason.RECYCLED_DESTINATION,
            ref,
            identity,
            f"it holds generation {header.slot_generation}, not {ref.generation}",
        )
    stored = (header.key, header.replica_generation, header.rows, header.namespace, header.slot)
    wanted = (
        identity.chunk_digest,
        identity.replica_generation & _U64,
        identity.rows,
        identity.namespace or NO_NAMESPACE,
        ref.slot,
    )
    own = header.store_epoch == store_epoch
    if stored != wanted or (own and header.logical != identity.logical & _U64):
        raise _refused(
            Reason.IDENTITY_MISMATCH, ref, identity, f"it holds another block ({header.logical:#x})"
        )
    if (header.kind, header.layout, header.dtype, header.codec) != form.described:
        raise _refused(Reason.CODEC_OR_LAYOUT_MISMATCH, ref, identity, "it is laid out in another way")
    if header.length != identity.length or header.length != form.payload_bytes:
        raise _refused(
            Reason.SHORT_COPY, ref, identity, f"it holds {header.length} bytes, not {identity.length}"
        )
    return header


def check_seal(seal: int, ref: SlotRef, identity: BlockIdentity) -> None:
    """IDENTITY_MISMATCH when an intact block was sealed over other bytes."""
    if seal != identity.checksum:
        raise _refused(Reason.IDENTITY_MISMATCH, ref, identity, "it was sealed over other bytes")


def check_payload(kind: str, header: BlockHeader, body: memoryview, ref: SlotRef) -> None:
    """CHECKSUM_MISMATCH when the bytes are not those that the header describes."""
    if checksum(kind, body) != header.payload_checksum:
        raise CoreError(
            Reason.CHECKSUM_MISMATCH,
            f"the payload of slot {ref.slot} changed",
            {"logical": f"{header.logical:#x}", "slot": ref.slot},
        )


def _refused(reason: Reason, ref: SlotRef, identity: BlockIdentity, what: str) -> CoreError:
    return CoreError(
        reason,
        f"slot {ref.slot} is not block {identity.logical:#x}: {what}",
        {"logical": f"{identity.logical:#x}", "slot": ref.slot},
    )
