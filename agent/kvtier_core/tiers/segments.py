"""The segment table of a stored block: a checksum or a tag for every few KiB of its payload.

Why it exists: a selection wants some rows of a block, and bytes that nobody can verify alone must be read
with all the others. The table lies behind the header in the same page, and is bound to the life of the slot
that the header names. It must not know files, threads or which rows are wanted.

Little-endian, behind the header: segment u32 | width u32 | count u32 | crc32c u32 | count entries. Segment
`i` is bytes [i * segment, (i + 1) * segment) of the payload as it lies on the device; the last may be
shorter. width 8: its checksum, 64 bits by the header's kind. width 16: its tag of AES-256-GCM, in an
encrypted block. crc32c: of the header's key, slot generation, slot, store epoch and payload checksum, then of
all else here, so that a table is not taken for that of another write.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import crc32c
import xxhash

from kvtier_core.checksums import Running, checksum
from kvtier_core.errors import CoreError, Reason
from kvtier_core.layout import FLOAT_BYTES, ChunkLayout
from kvtier_core.tiers.segmenthash import BLOCK, segment_hash
from kvtier_core.tiers.staging import PAGE

CHECKSUM_WIDTH = 8
TAG_WIDTH = 16
PAGE_ROWS = 16
SEALED_BYTES = 16 << 10
"""The least that has a tag of its own: below, calls cost more than the cipher."""
_FIELDS = struct.Struct("<IIII")
_SHAPE = struct.Struct("<III")
_BOUND = struct.Struct("<32sQQQQ")


class Life(NamedTuple):
    """What a table is bound to: these fields of its header."""

    key: bytes
    slot_generation: int
    slot: int
    store_epoch: int
    payload_checksum: int


@dataclass(frozen=True, slots=True)
class SegmentTable:
    """segment: bytes of each but the last. entries: of `width` bytes each, one after the other."""

    segment: int
    width: int
    entries: bytes

    def __len__(self) -> int:
        return len(self.entries) // self.width

    def entry(self, at: int) -> bytes:
        return self.entries[at * self.width : (at + 1) * self.width]

    def encode(self, life: Life) -> bytes:
        return encode(self.segment, self.width, self.entries, life)

    def check(self, kind: str, first: int, stored: memoryview, slot: int) -> None:
        """CHECKSUM_MISMATCH unless `stored` is segments from `first` on, all but the last whole."""
        found = checksums(kind, stored, self.segment)
        wanted = self.entries[first * self.width :][: len(found)]
        if found != wanted:
            at = next(i for i in range(0, len(found), 8) if found[i : i + 8] != wanted[i : i + 8])
            raise CoreError(
                Reason.CHECKSUM_MISMATCH,
                f"segment {first + at // 8} of the payload of slot {slot} changed",
                {"slot": slot, "segment": first + at // 8},
            )


def encode(segment: int, width: int, entries: bytes, life: Life) -> bytes:
    """A table as it lies behind a header."""
    fields = _SHAPE.pack(segment, width, len(entries) // width)
    crc = crc32c.crc32c(entries, crc32c.crc32c(fields, _bound(life)))
    return b"".join((fields, crc.to_bytes(4, "little"), entries))


def _bound(life: Life) -> int:
    return int(crc32c.crc32c(_BOUND.pack(*life)))


def decode(tail: memoryview | bytes, life: Life, payload_bytes: int) -> SegmentTable | None:
    """The table in the bytes behind a header; None: not the one that was written with that header."""
    if len(tail) < _FIELDS.size:
        return None
    segment, width, count, crc = _FIELDS.unpack_from(tail)
    if width not in (CHECKSUM_WIDTH, TAG_WIDTH) or not segment or segment % PAGE:
        return None
    end = _FIELDS.size + count * width
    if count != -(-payload_bytes // segment) or end > len(tail):
        return None
    entries = bytes(tail[_FIELDS.size : end])
    if crc32c.crc32c(entries, crc32c.crc32c(bytes(tail[: _FIELDS.size - 4]), _bound(life))) != crc:
        return None
    return SegmentTable(segment, width, entries)


def table_bytes(table: SegmentTable) -> int:
    return _FIELDS.size + len(table.entries)


def segment_bytes(payload_bytes: int, room: int, width: int, least: int) -> int:
    """The smallest power of two of whole pages, `least` at least, of which a table of the payload fits into
    `room` bytes."""
    size = PAGE
    while size < least or _FIELDS.size + -(-payload_bytes // size) * width > room:
        size *= 2
    return size


def page_bytes(layout: ChunkLayout) -> int:
    """PAGE_ROWS rows of K of one head."""
    return PAGE_ROWS * layout.head_dim * FLOAT_BYTES


_HASHES: dict[str, Callable[[memoryview], int]] = {
    "xxh3": xxhash.xxh3_64_intdigest,
    "crc32c": crc32c.crc32c,
}
_SEAL = "xxh3"
_HOT_BYTES = 128 << 10
"""What is hashed again before it has left the caches."""


def checksums(kind: str, data: memoryview, segment: int) -> bytes:
    """8 bytes for each segment of `data`. MANIFEST_INVALID for a kind that is none."""
    of = _HASHES.get(kind)
    if of is None:
        checksum(kind, b"")
        raise CoreError(Reason.MANIFEST_INVALID, f"{kind!r} checks nothing")
    if kind == _SEAL and len(data) > segment and (found := _together(data, segment)) is not None:
        return found.entries
    sums = [of(data[at : at + segment]) for at in range(0, len(data), segment)]
    return struct.pack(f"<{len(sums)}Q", *sums)


class Sums(NamedTuple):
    """Of a payload. seal: XXH3-64. whole: its checksum by a kind. entries: its segments', 8 bytes each."""

    seal: int
    whole: int
    entries: bytes


def sums(kind: str, data: memoryview, segment: int) -> Sums:
    """All of them, and memory is read once. segment: bytes of each but the last; 0: none are wanted.
    MANIFEST_INVALID as `checksums`."""
    if not segment:
        seal = checksum(_SEAL, data)
        return Sums(seal, seal if kind == _SEAL else checksum(kind, data), b"")
    if kind == _SEAL and (found := _together(data, segment)) is not None:
        return found
    step = max(segment, _HOT_BYTES // segment * segment)
    sealed, own, entries = Running(_SEAL), Running(kind), []
    for at in range(0, len(data), step):
        part = data[at : at + step]
        sealed.add(part)
        if kind != _SEAL:
            own.add(part)
        entries.append(checksums(kind, part, segment))
    return Sums(sealed.value, (sealed if kind == _SEAL else own).value, b"".join(entries))


def _together(data: memoryview, segment: int) -> Sums | None:
    """By machine code, where there is any for these lengths."""
    if segment % BLOCK or len(data) % BLOCK or not len(data):
        return None
    code = segment_hash()
    if code is None:
        return None
    seal, entries = code.sums(data, segment)
    return Sums(seal, seal, entries)
