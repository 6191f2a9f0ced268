"""A flipped bit anywhere in the file: never wrong bytes, while the store is open and after it is opened
again."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_core.tiers.block import HEADER_BYTES
from kvtier_core.tiers.nvme import NvmeTier, verify_store
from kvtier_core.tiers.nvme.crypto import MemoryKeys
from kvtier_core.tiers.nvme.superblock import SUPERBLOCK_BYTES
from kvtier_core.tiers.staging import PAGE
from kvtier_core.tiers.transfer import TransferItem
from tests.unit.core.nvme_files import MemoryFiles
from tests.unit.core.nvme_store import SIZE, content, key, load, open_store, recovered_items, store
from tests.unit.core.test_core_nvme_recovery import FOLDER

NAMES = ("a", "b", "c")
USED = SUPERBLOCK_BYTES + 3 * 2 * PAGE
MISSES = {"CHECKSUM_MISMATCH", "IDENTITY_MISMATCH"}


class Image:
    """A closed store of three blocks, to be damaged again and again."""

    def __init__(self, encrypted: bool, kind: str, whole: int = 0) -> None:
        self.keys = MemoryKeys(random.Random(3).randbytes) if encrypted else None
        self.kind = kind
        self.whole = whole
        # Behind the table of one segment.
        self.padding = HEADER_BYTES + (0 if whole else 16 + (16 if encrypted else 8))
        files = MemoryFiles()
        tier = self.open(files)
        self.items = store(tier, *NAMES)
        tier.close()
        self.path = tier.path
        self.bytes = bytes(files.nodes[tier.path].now)

    def open(self, files: MemoryFiles) -> NvmeTier:
        return open_store(FOLDER, 4, files, keys=self.keys, kind=self.kind, whole_bytes=self.whole)

    def files(self, at: int, bit: int) -> MemoryFiles:
        files = MemoryFiles()
        fd = files.open(self.path, 0)
        damaged = bytearray(self.bytes)
        damaged[at] ^= 1 << bit
        files.write(fd, [damaged], 0)
        files.sync(fd)
        files.close(fd)
        return files


IMAGES = {
    "plain": Image(False, "xxh3"),
    "crc32c": Image(False, "crc32c"),
    "no table": Image(False, "xxh3", SIZE),
    "encrypted": Image(True, "xxh3"),
}


def check(tier: NvmeTier, items: list[TransferItem]) -> int:
    """Right bytes or a typed miss; returns the misses."""
    misses = 0
    for item, data in zip(items, load(tier, items), strict=True):
        name = next(name for name in NAMES if key(name) == item.identity.chunk_digest)
        if isinstance(data, str):
            assert data in MISSES
            misses += 1
        else:
            assert data == content(name), f"wrong bytes were served as {name}"
    return misses


@pytest.mark.parametrize("image", IMAGES.values(), ids=IMAGES.keys())
@settings(max_examples=120, deadline=None)
@given(at=st.integers(0, USED - 1), bit=st.integers(0, 7))
def test_after_a_restart_a_flipped_bit_costs_at_most_the_block_it_is_in(
    image: Image, at: int, bit: int
) -> None:
    files = image.files(at, bit)
    report = verify_store(image.path, image.keys, files)
    tier = image.open(files)
    found = recovered_items(tier)
    lost = len(NAMES) - len(found) + check(tier, list(found.values()))
    tier.close()
    assert lost <= 1
    in_superblock = at < SUPERBLOCK_BYTES
    in_header_padding = not in_superblock and (at - SUPERBLOCK_BYTES) % (2 * PAGE) in range(
        image.padding, PAGE
    )
    assert lost == (0 if in_superblock or in_header_padding else 1), "a flip went unnoticed"
    assert report.whole is (lost == 0), "the offline verifier sees the same"


@pytest.mark.parametrize("image", IMAGES.values(), ids=IMAGES.keys())
@settings(max_examples=40, deadline=None)
@given(at=st.integers(SUPERBLOCK_BYTES, USED - 1), bit=st.integers(0, 7))
def test_a_bit_that_flips_under_an_open_store_is_a_miss(image: Image, at: int, bit: int) -> None:
    files = image.files(0, 0)
    tier = image.open(files)
    items = list(recovered_items(tier).values())
    assert check(tier, items) == 0
    (node,) = files.nodes.values()
    node.now[at] ^= 1 << bit
    assert check(tier, items) <= 1
    node.now[at] ^= 1 << bit
    assert check(tier, items) == 0
    tier.close()
