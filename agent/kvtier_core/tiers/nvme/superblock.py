"""The superblock: what a store is, who opened it last, and how far its writes are known to be durable.

Why it exists: an epoch that only grows fences an earlier opener, and the durable frontier tells recovery
which payloads it may believe unread. Two copies are written in turn, so one is intact whatever tears. It must
not know blocks or files.

Two pages at the start of the file. Fields: magic 8s | version u32 | epoch u64 | copy number u64 | frontier
u64 | stride u64 | payload length u64 | capacity u64 | clean u8 | layout 64s | kind 8s | crc32c u32
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import crc32c

from kvtier_core.tiers.block import BlockFormat, text
from kvtier_core.tiers.staging import PAGE

MAGIC = b"KVTSUP\x00\x01"
VERSION = 1
COPIES = 2
SUPERBLOCK_BYTES = COPIES * PAGE
_FIELDS = struct.Struct("<8sIQQQQQQB64s8s")
_CRC = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Superblock:
    """epoch: grows with every opening. serial: of this copy; the higher one counts. frontier: commit groups
    up to here are durable. clean: closed in order."""

    epoch: int
    serial: int
    frontier: int
    stride: int
    payload_bytes: int
    capacity: int
    layout: str
    kind: str
    clean: bool = False

    def fits(self, form: BlockFormat) -> bool:
        """Whether blocks of `form` lie in this store where they are looked for."""
        mine = (self.stride, self.payload_bytes, self.layout, self.kind)
        return mine == (form.stride, form.payload_bytes, form.layout, form.kind)

    @property
    def offset(self) -> int:
        """Where this copy lies."""
        return (self.serial % COPIES) * PAGE


def encode(block: Superblock) -> bytes:
    """One page."""
    fields = _FIELDS.pack(
        MAGIC,
        VERSION,
        block.epoch,
        block.serial,
        block.frontier,
        block.stride,
        block.payload_bytes,
        block.capacity,
        int(block.clean),
        block.layout.encode(),
        block.kind.encode(),
    )
    return (fields + _CRC.pack(crc32c.crc32c(fields))).ljust(PAGE, b"\0")


def decode(page: bytes | memoryview) -> Superblock | None:
    """None: not an intact superblock of this version."""
    if len(page) < PAGE:
        return None
    fields = bytes(page[: _FIELDS.size])
    (stored,) = _CRC.unpack_from(page, _FIELDS.size)
    if crc32c.crc32c(fields) != stored:
        return None
    magic, version, epoch, serial, frontier, stride, payload, capacity, clean, layout, kind = _FIELDS.unpack(
        fields
    )
    if magic != MAGIC or version != VERSION:
        return None
    return Superblock(
        epoch, serial, frontier, stride, payload, capacity, text(layout), text(kind), bool(clean)
    )


def newest(pages: Sequence[bytes | memoryview]) -> Superblock | None:
    """The intact copy with the highest serial."""
    found = [block for page in pages if (block := decode(page)) is not None]
    return max(found, key=lambda block: block.serial, default=None)
