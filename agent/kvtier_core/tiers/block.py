"""The self-describing block: a header page, then the payload, in one aligned run of bytes.

Why it exists: bytes read from storage must prove by themselves which chunk they are, of which generation,
and that they are whole. It must not know files, slots or sessions.

Header (little-endian, one page of 4096 bytes, the rest zero):
magic 8s | version u32 | checksum kind 8s | chunk digest 32s | logical u64 | slot generation u64 |
replica generation u64 | rows u32 | payload length u64 | seal checksum u64 | payload checksum u64 |
crc32c of all before u32
"""

from __future__ import annotations

import struct

import crc32c

from kvtier_core.checksums import checksum
from kvtier_core.errors import CoreError, Reason
from kvtier_core.tiers.base import BlockIdentity, SlotRef
from kvtier_core.tiers.staging import StagingBuffer

MAGIC = b"KVTBLK\x00\x01"
VERSION = 1
_FIELDS = struct.Struct("<8sI8s32sQQQIQQQ")
_CRC = struct.Struct("<I")


def encode_header(buffer: StagingBuffer, kind: str, ref: SlotRef, identity: BlockIdentity) -> None:
    """Writes the header of the payload in `buffer`, as `identity` at slot life `ref`.

    CHECKSUM_MISMATCH when the payload is not what was sealed: a damaged source is never given a valid header.
    """
    sealed = checksum("xxh3", buffer.body)
    if sealed != identity.checksum:
        raise CoreError(Reason.CHECKSUM_MISMATCH, f"chunk {identity.logical:#x} changed since it was sealed")
    fields = _FIELDS.pack(
        MAGIC,
        VERSION,
        kind.encode(),
        identity.chunk_digest,
        identity.logical,
        ref.generation,
        identity.replica_generation,
        identity.rows,
        identity.length,
        sealed,
        sealed if kind == "xxh3" else checksum(kind, buffer.body),
    )
    target = buffer.header
    target[:] = bytes(len(target))
    target[: len(fields)] = fields
    _CRC.pack_into(target, len(fields), crc32c.crc32c(fields))


def verify_block(buffer: StagingBuffer, kind: str, ref: SlotRef, identity: BlockIdentity) -> None:
    """Compares a block that was read with what was asked for.

    Guards in order: header intact, CHECKSUM_MISMATCH; slot life, RECYCLED_DESTINATION; chunk, rows, seal and
    replica generation, IDENTITY_MISMATCH; length, SHORT_COPY; payload, CHECKSUM_MISMATCH.
    """
    fields = bytes(buffer.header[: _FIELDS.size])
    (stored_crc,) = _CRC.unpack_from(buffer.header, _FIELDS.size)
    facts = {"logical": f"{identity.logical:#x}", "slot": ref.slot}
    if crc32c.crc32c(fields) != stored_crc:
        raise CoreError(
            Reason.CHECKSUM_MISMATCH, f"the header of slot {ref.slot} does not match its checksum", facts
        )
    unpacked = _FIELDS.unpack(fields)
    magic, version, name, digest, logical, slot_gen, replica_gen, rows, length, sealed, payload_sum = unpacked
    if magic != MAGIC or version != VERSION or name.rstrip(b"\0").decode() != kind:
        raise CoreError(Reason.CHECKSUM_MISMATCH, f"slot {ref.slot} holds no block of this version", facts)
    if slot_gen != ref.generation:
        raise CoreError(
            Reason.RECYCLED_DESTINATION,
            f"slot {ref.slot} holds generation {slot_gen}, not {ref.generation}",
            facts,
        )
    stored = (digest, logical, replica_gen, rows, sealed)
    wanted = (identity.chunk_digest, identity.logical, identity.replica_generation, identity.rows)
    if stored != (*wanted, identity.checksum):
        raise CoreError(
            Reason.IDENTITY_MISMATCH, f"slot {ref.slot} holds another chunk ({logical:#x})", facts
        )
    if length != identity.length or length != len(buffer.body):
        raise CoreError(
            Reason.SHORT_COPY, f"slot {ref.slot} holds {length} bytes, not {identity.length}", facts
        )
    if checksum(kind, buffer.body) != payload_sum:
        raise CoreError(Reason.CHECKSUM_MISMATCH, f"the payload of slot {ref.slot} changed", facts)
