"""The format on flash: golden headers, each guard of a header in its order, and superblocks."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_core.errors import CoreError, Reason
from kvtier_core.tiers.base import BlockIdentity, SlotRef
from kvtier_core.tiers.block import (
    HEADER_BYTES,
    BlockFormat,
    HeaderState,
    HeaderWriter,
    check_header,
    erased_page,
    page_state,
)
from kvtier_core.tiers.nvme import superblock
from kvtier_core.tiers.nvme.superblock import Superblock
from kvtier_core.tiers.segments import Life, SegmentTable
from kvtier_core.tiers.staging import PAGE

FORM = BlockFormat(4096, "xxh3")
REF = SlotRef(5, (2 << 32) + 1)
NAMED = BlockIdentity(bytes(range(32)), 77, 4, 16, 4096, 0x1122334455667788, bytes([9]) * 32, 3, True, 0.5)
SEALED = ("vault:tenants/a#3", bytes(range(16)), bytes(range(12)))


def page(
    form: BlockFormat = FORM, ref: SlotRef = REF, named: BlockIdentity = NAMED, epoch: int = 2
) -> bytearray:
    header = HeaderWriter(form, epoch).pack(ref, named, 12, named.checksum, named.checksum)
    return header + bytes(PAGE - len(header))


def check(data: bytearray, named: BlockIdentity = NAMED, ref: SlotRef = REF, epoch: int = 2) -> None:
    check_header(memoryview(data), FORM, ref, named, epoch)


def test_headers_are_what_they_were() -> None:
    """A change of these digests is a new version of the format; blocks of version 2 are still read."""
    plain = HeaderWriter(FORM, 2).pack(REF, NAMED, 12, NAMED.checksum, NAMED.checksum)
    sealed = HeaderWriter(FORM, 2).pack(REF, NAMED, 12, 99, 0, SEALED)
    assert HEADER_BYTES == 388
    assert hashlib.sha256(plain).hexdigest() == GOLDEN["plain"]
    assert hashlib.sha256(sealed).hexdigest() == GOLDEN["sealed"]
    assert hashlib.sha256(erased_page(REF, 2)).hexdigest() == GOLDEN["erased"]
    table = SegmentTable(PAGE, 8, bytes(range(16))).encode(Life(NAMED.chunk_digest, REF.generation, 5, 2, 7))
    assert hashlib.sha256(table).hexdigest() == GOLDEN["table"]
    block = Superblock(7, 9, 11, 8192, 4096, 100, "kv-head-major-f32/1", "xxh3", True)
    assert hashlib.sha256(superblock.encode(block)).hexdigest() == GOLDEN["superblock"]


GOLDEN = {
    "plain": "b1f7614d6988dc9f80f86d1668a84d1086b2d6167e68677a853680d4714d35ae",
    "sealed": "ef996879bc6b74be89bd2607e3ea814fa39dc3234e4bf5b85c8a5a14f93d3fdd",
    "erased": "a6de9e72965d2307a855877873f604da857c53764c3609aa997bcfeb876514da",
    "table": "7dc9512aaf18242e8ba7414e964fb4331d96a11202cddc898182869e9626cb08",
    "superblock": "7af5488715d2df58b3cebed828ec092d28bb11aa4dd3917070b9f2a39d26e47e",
}


def test_a_header_says_what_was_written() -> None:
    state, header = page_state(bytes(page()))
    assert state is HeaderState.VALID and header is not None
    assert header.identity(NAMED.checksum) == NAMED
    assert (header.slot, header.slot_generation, header.store_epoch, header.group) == (
        5,
        REF.generation,
        2,
        12,
    )
    assert not header.encrypted
    check(page())


CHANGED: dict[str, tuple[dict[str, Any], Reason]] = {
    "generation": ({"ref": SlotRef(5, 1)}, Reason.RECYCLED_DESTINATION),
    "place": ({"ref": SlotRef(6, REF.generation)}, Reason.IDENTITY_MISMATCH),
    "key": ({"chunk_digest": bytes(32)}, Reason.IDENTITY_MISMATCH),
    "namespace": ({"namespace": bytes([8]) * 32}, Reason.IDENTITY_MISMATCH),
    "no namespace": ({"namespace": b""}, Reason.IDENTITY_MISMATCH),
    "replica": ({"replica_generation": 5}, Reason.IDENTITY_MISMATCH),
    "rows": ({"rows": 15}, Reason.IDENTITY_MISMATCH),
    "logical": ({"logical": 78}, Reason.IDENTITY_MISMATCH),
    "length": ({"length": 4095}, Reason.SHORT_COPY),
}


@pytest.mark.parametrize(("change", "reason"), CHANGED.values(), ids=CHANGED.keys())
def test_each_difference_from_what_was_asked_has_its_reason(change: dict[str, Any], reason: Reason) -> None:
    ref = change.get("ref", REF)
    change = {name: value for name, value in change.items() if name != "ref"}
    with pytest.raises(CoreError) as refused:
        check(page(), dataclasses.replace(NAMED, **change), ref)
    assert refused.value.reason is reason


OTHERS = {
    "checksum": BlockFormat(4096, "crc32c"),
    "layout": BlockFormat(4096, "xxh3", "other/1"),
    "dtype": BlockFormat(4096, "xxh3", dtype="bfloat16"),
    "codec": BlockFormat(4096, "xxh3", codec="zstd"),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS.keys())
def test_bytes_laid_out_otherwise_are_refused(other: BlockFormat) -> None:
    with pytest.raises(CoreError) as refused:
        check(page(other))
    assert refused.value.reason is Reason.CODEC_OR_LAYOUT_MISMATCH


@pytest.mark.parametrize("field", ["epoch", "cost", "durable"])
def test_what_may_change_without_the_bytes_is_not_compared(field: str) -> None:
    """Authority moves and costs are estimated anew while a block lies where it is."""
    check(page(), dataclasses.replace(NAMED, **{field: {"epoch": 9, "cost": 2.0, "durable": False}[field]}))


def test_an_erased_or_empty_page_is_no_block() -> None:
    assert page_state(bytes(PAGE)) == (HeaderState.EMPTY, None)
    with pytest.raises(CoreError) as refused:
        check(erased_page(REF, 2))
    assert refused.value.reason is Reason.NOT_VISIBLE


@given(at=st.integers(0, HEADER_BYTES - 1), bit=st.integers(0, 7))
def test_no_flipped_bit_of_a_header_is_believed(at: int, bit: int) -> None:
    data = page()
    data[at] ^= 1 << bit
    assert page_state(bytes(data))[0] is HeaderState.TORN


@given(
    first=st.integers(0, 2**40),
    damage=st.lists(st.tuples(st.sampled_from([0, 1]), st.integers(0, 160)), max_size=1),
)
def test_one_intact_superblock_is_enough(first: int, damage: list[tuple[int, int]]) -> None:
    older = Superblock(3, first, 5, 8192, 4096, 10, "l", "xxh3")
    newer = dataclasses.replace(older, epoch=4, serial=first + 1)
    pages = [bytearray(PAGE), bytearray(PAGE)]
    for block in (older, newer):
        pages[block.offset // PAGE][:] = superblock.encode(block)
    assert superblock.newest(pages) == newer
    for copy, at in damage:
        pages[copy][at] ^= 1
        # Bytes behind the fields and their checksum mean nothing.
        lost = copy == newer.offset // PAGE and superblock.decode(pages[copy]) is None
        expected = older if lost else newer
        assert superblock.newest(pages) == expected
