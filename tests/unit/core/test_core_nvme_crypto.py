"""Encryption at rest: bound to the header, erased by its key, with nonces that never come again."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier_core.errors import CoreError, Reason
from kvtier_core.layout import ChunkLayout
from kvtier_core.tiers.block import finish, read_header
from kvtier_core.tiers.nvme import NvmeTier, verify_store
from kvtier_core.tiers.nvme.crypto import MemoryKeys
from kvtier_core.tiers.nvme.recovery import DropReason
from kvtier_core.tiers.nvme.superblock import SUPERBLOCK_BYTES
from kvtier_core.tiers.nvme.verify import BlockVerdict
from kvtier_core.tiers.staging import PAGE, StagingBuffer
from kvtier_core.tiers.transfer import TransferItem
from tests.unit.core.nvme_store import (
    FOREVER,
    NAMESPACE,
    Heard,
    content,
    identity,
    key,
    load,
    open_store,
    recovered_items,
    store,
    write_item,
)

OTHER = hashlib.sha256(b"other tenant").digest()


def keys() -> MemoryKeys:
    return MemoryKeys(os.urandom)


def refused(reason: Reason, call: Callable[[], object]) -> CoreError:
    with pytest.raises(CoreError) as error:
        call()
    assert error.value.reason is reason, error.value
    return error.value


def stored(tier: NvmeTier, item: TransferItem) -> bytes:
    """The slot as it lies in the file."""
    at = SUPERBLOCK_BYTES + item.ref.slot * tier.slot_bytes
    return tier.path.read_bytes()[at : at + tier.slot_bytes]


def overwrite(tier: NvmeTier, slot: int, data: bytes) -> None:
    with tier.path.open("r+b", buffering=0) as file:
        file.seek(SUPERBLOCK_BYTES + slot * tier.slot_bytes)
        file.write(data)
        os.fsync(file.fileno())


@pytest.mark.parametrize(
    "layout",
    [ChunkLayout(1, 16, 32), ChunkLayout(3, 7, 16), ChunkLayout(1, 2, 4)],
    ids=["page", "odd", "small"],
)
@pytest.mark.parametrize("kind", ["xxh3", "crc32c"])
def test_blocks_come_back_and_their_plain_bytes_are_nowhere_in_the_file(
    tmp_path: Path, layout: ChunkLayout, kind: str
) -> None:
    held = keys()
    tier = open_store(tmp_path, keys=held, layout=layout, kind=kind)
    names = ("a", "b", "c")
    items = store(tier, *names)
    size = layout.payload_bytes
    assert load(tier, items) == [content(name, 1, size) for name in names]
    tier.close()
    image = tier.path.read_bytes()
    for item, name in zip(items, names, strict=True):
        data = content(name, 1, size)
        assert data[:16] not in image and data[-16:] not in image
        assert item.identity.checksum.to_bytes(8, "little") not in image, "a checksum confirms a guess"
    again = open_store(tmp_path, keys=held, layout=layout, kind=kind)
    assert load(again, list(recovered_items(again).values())) == [content(name, 1, size) for name in names]
    again.close()


def test_the_inline_calls_encrypt_as_well(tmp_path: Path) -> None:
    tier = open_store(tmp_path, keys=keys())
    buffer = StagingBuffer(tier.layout)
    buffer.body[:] = content("a")
    ref = tier.reserve(1)
    tier.write(ref, buffer.payload, identity("a"))
    tier.validate(ref, identity("a"))
    tier.publish(ref)
    target = StagingBuffer(tier.layout)
    tier.read(ref, identity("a"), target)
    assert bytes(target.body) == content("a")
    tier.close()
    assert content("a")[:32] not in tier.path.read_bytes()


def test_destroying_a_key_makes_its_blocks_unreadable_at_once_and_for_ever(tmp_path: Path) -> None:
    held = keys()
    tier = open_store(tmp_path, keys=held)
    (mine,) = store(tier, "a")
    named = dataclasses.replace(identity("b"), namespace=OTHER)
    theirs = write_item(tier, named, content("b"))
    heard = Heard(1)
    tier.submit_write([theirs], FOREVER, heard)
    heard.wait()
    tier.publish(theirs.ref)
    held.destroy(NAMESPACE)
    tier.forget_keys()
    assert load(tier, [mine, theirs]) == ["KEY_UNAVAILABLE", content("b")]
    new = write_item(tier, identity("c"), content("c"))
    tier.submit_write([new], FOREVER, (heard := Heard(1)))
    assert heard.wait().reasons() == ["KEY_UNAVAILABLE"]
    tier.close()
    again = open_store(tmp_path, keys=held)
    assert again.recovery.dropped == {DropReason.KEY_DESTROYED: 1}
    assert set(recovered_items(again)) == {key("b")}
    again.close()


def test_an_encrypted_store_is_not_opened_without_keys_and_loses_nothing_by_the_attempt(
    tmp_path: Path,
) -> None:
    held = keys()
    tier = open_store(tmp_path, keys=held)
    store(tier, "a")
    tier.close()
    refused(Reason.KEY_UNAVAILABLE, lambda: open_store(tmp_path))

    class Away(MemoryKeys):
        def key(self, reference: str) -> bytes | None:
            raise CoreError(Reason.STORAGE_UNAVAILABLE, "the key service does not answer")

    refused(Reason.STORAGE_UNAVAILABLE, lambda: open_store(tmp_path, keys=Away(os.urandom)))
    again = open_store(tmp_path, keys=held)
    assert load(again, list(recovered_items(again).values())) == [content("a")]
    again.close()


def swap_payloads(first: bytes, second: bytes) -> bytes:
    return first[:PAGE] + second[PAGE:]


def relabel(first: bytes, second: bytes) -> bytes:
    """The second block's ciphertext, nonce and tag under a header that names the first block."""
    _, one = read_header(first)
    _, two = read_header(second)
    assert one is not None and two is not None
    page = bytearray(second)
    for at, size in ((20, 32), (52, 24), (76, 4), (148, 8)):
        page[at : at + size] = first[at : at + size]
    finish(page)
    return bytes(page)


def plain(first: bytes, second: bytes) -> bytes:
    """Bytes of an attacker's choice in a header that does not say `encrypted`."""
    page = bytearray(first)
    page[104] &= ~2 & 0xFF
    page[PAGE:] = bytes(len(page) - PAGE)
    finish(page)
    return bytes(page)


@pytest.mark.parametrize(
    ("attack", "reason"),
    [(swap_payloads, "CHECKSUM_MISMATCH"), (relabel, "IDENTITY_MISMATCH"), (plain, "IDENTITY_MISMATCH")],
    ids=["payloads swapped", "relabelled", "plain bytes"],
)
def test_what_was_moved_or_made_up_does_not_open(
    tmp_path: Path, attack: Callable[[bytes, bytes], bytes], reason: str
) -> None:
    tier = open_store(tmp_path, keys=keys())
    items = store(tier, "a", "b")
    first, second = (stored(tier, item) for item in items)
    overwrite(tier, items[0].ref.slot, attack(first, second))
    assert load(tier, items) == [reason, content("b")]
    tier.close()


@pytest.mark.parametrize("part", ["payload", "tag", "nonce", "salt", "key", "cost"])
def test_a_bit_changed_by_someone_who_mends_the_checksums_is_found(tmp_path: Path, part: str) -> None:
    """Checksums are against accidents; here they are all right, and the tag is not."""
    tier = open_store(tmp_path, keys=keys())
    (item,) = store(tier, "a")
    block = bytearray(stored(tier, item))
    at = {"payload": PAGE + 5, "key": 20, "cost": 172, "salt": 340, "nonce": 356, "tag": 368}[part]
    block[at] ^= 1
    if part == "payload":
        import struct

        from kvtier_core.checksums import checksum

        struct.pack_into("<Q", block, 96, checksum("xxh3", memoryview(block)[PAGE : PAGE + 4096]))
    finish(block)
    overwrite(tier, item.ref.slot, bytes(block))
    wanted = item.identity
    if part == "key":
        wanted = dataclasses.replace(wanted, chunk_digest=bytes(block[20:52]))
    (outcome,) = load(tier, [dataclasses.replace(item, identity=wanted)])
    assert outcome in ("CHECKSUM_MISMATCH", "IDENTITY_MISMATCH")
    tier.close()


def test_no_nonce_comes_twice_under_a_key(tmp_path: Path) -> None:
    """Not for a slot that is written again, not after a restart, not from a disk restored to an earlier
    state."""
    held, seen = keys(), set()
    image = b""
    for round_ in range(3):
        tier = open_store(tmp_path, keys=held)
        for name in ("a", "b", "c", "d"):
            (item,) = store(tier, f"{name}{round_}")
            _, header = read_header(stored(tier, item))
            assert header is not None
            used = (header.salt, header.nonce)
            assert used not in seen
            seen.add(used)
            tier.release(item.ref)
        tier.close()
        image = image or tier.path.read_bytes()
        tier.path.write_bytes(image)
    assert len(seen) == 12


def test_the_verifier_tells_whole_damaged_sealed_and_destroyed_apart(tmp_path: Path) -> None:
    held = keys()
    tier = open_store(tmp_path, keys=held)
    items = store(tier, "a", "b")
    refused(Reason.STORAGE_LOCKED, lambda: verify_store(tier.path, held))
    tier.close()
    assert verify_store(tier.path, held).counts == {BlockVerdict.GOOD: 2}
    assert verify_store(tier.path).counts == {BlockVerdict.SEALED: 2}
    block = bytearray(stored(tier, items[0]))
    block[368] ^= 1
    finish(block)
    overwrite(tier, items[0].ref.slot, bytes(block))
    report = verify_store(tier.path, held)
    assert report.counts == {BlockVerdict.NOT_DECRYPTED: 1, BlockVerdict.GOOD: 1}
    assert not report.whole
    held.destroy(NAMESPACE)
    assert verify_store(tier.path, held).counts == {BlockVerdict.KEY_DESTROYED: 2}
