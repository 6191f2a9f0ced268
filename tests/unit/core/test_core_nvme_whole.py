"""Blocks without a segment table: what is written of small ones, and what is charged where a part was asked
for and the whole is read."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvtier_core.layout import ChunkLayout
from kvtier_core.tiers.block import HEADER_BYTES, read_header
from kvtier_core.tiers.nvme import verify_store
from kvtier_core.tiers.nvme.crypto import MemoryKeys
from kvtier_core.tiers.nvme.pace import Load, Pace, Way
from kvtier_core.tiers.nvme.superblock import SUPERBLOCK_BYTES
from kvtier_core.tiers.nvme.verify import BlockVerdict
from kvtier_core.tiers.staging import PAGE
from tests.unit.core.builders import FakeClock
from tests.unit.core.nvme_store import FOREVER, Heard, content, load, open_store, recovered_items, store
from tests.unit.core.test_core_nvme_ranges import SIZE, WIDE, ranged, read


@pytest.mark.parametrize("kind", ["xxh3", "crc32c"])
def test_a_block_that_is_too_small_for_parts_has_no_table_and_is_read_as_a_whole(
    tmp_path: Path, kind: str
) -> None:
    """What the version before wrote; one byte more, and it has a table."""
    for whole, moved in ((SIZE, SIZE), (SIZE - 1, PAGE)):
        tier = open_store(tmp_path, layout=WIDE, kind=kind, seek_bytes=0, whole_bytes=whole)
        (item,) = store(tier, "a")
        part = ranged(item, [(5, 9)], SIZE)
        assert read(tier, [part]) == [None]
        assert bytes(part.landing.body[5:9]) == content("a", size=SIZE)[5:9]
        assert part.ranges is not None and part.ranges.read_bytes == moved
        assert read(tier, [ranged(item, [(9, 5)], SIZE)]) == ["BAD_ARGUMENT"]
        tier.close()
        report = verify_store(tier.path)
        assert report.whole and report.counts == {BlockVerdict.GOOD: 1}
        page = tier.path.read_bytes()[SUPERBLOCK_BYTES:][:PAGE]
        _, header = read_header(page)
        assert header is not None
        assert header.segmented is (whole < SIZE)
        assert any(page[HEADER_BYTES:]) is (whole < SIZE)
        tier.path.unlink()


def test_an_encrypted_block_has_a_table_however_small_it_is(tmp_path: Path) -> None:
    keys = MemoryKeys(random.Random(5).randbytes)
    tier = open_store(tmp_path, layout=WIDE, keys=keys, seek_bytes=0, whole_bytes=SIZE)
    (item,) = store(tier, "a")
    part = ranged(item, [(5, 9)], SIZE)
    assert read(tier, [part]) == [None]
    assert part.ranges is not None and part.ranges.read_bytes == SIZE // 4
    tier.close()


class Charged(Pace):
    """Notes what is charged of reads."""

    def __init__(self) -> None:
        super().__init__(None, None, FakeClock())
        self.read = 0

    def take(self, load: Load, who: object = None) -> float:
        self.charge(load)
        return super().take(load, who)

    def charge(self, load: Load) -> None:
        self.read += load.size if load.way is Way.READ else 0


def test_a_part_that_is_read_as_a_whole_is_charged_as_one(tmp_path: Path) -> None:
    tier = open_store(tmp_path, layout=WIDE, whole_bytes=SIZE)
    store(tier, "a", "b")
    tier.close()
    for spans, moved in (([(0, 9)], 2), ([], 2), ([(0, 9), (SIZE - 9, SIZE)], 2)):
        pace = Charged()
        tier = open_store(tmp_path, layout=WIDE, seek_bytes=0, pace=pace, threads=1)
        items = list(recovered_items(tier).values())
        assert read(tier, [ranged(item, spans, SIZE) for item in items]) == [None, None]
        assert pace.read == moved * tier.slot_bytes
        tier.close()


def test_a_part_that_is_read_as_one_is_charged_as_one(tmp_path: Path) -> None:
    pace = Charged()
    tier = open_store(tmp_path, layout=WIDE, seek_bytes=0, pace=pace, threads=1)
    (item,) = store(tier, "a")
    assert read(tier, [ranged(item, [(0, 9)], SIZE)]) == [None]
    assert pace.read == PAGE
    tier.close()


def test_a_batch_of_nothing_is_nothing(tmp_path: Path) -> None:
    tier = open_store(tmp_path, layout=WIDE)
    heard = Heard(0)
    for submit in (tier.submit_read, tier.submit_write, tier.submit_erase):
        submit([], FOREVER, heard)
    assert tier.counts.reads == tier.counts.writes == 0
    tier.close()


@pytest.mark.parametrize("kind", ["xxh3", "crc32c"])
def test_an_encrypted_block_that_is_hashed_in_parts_is_whole(tmp_path: Path, kind: str) -> None:
    layout = ChunkLayout(2, 256, 80)
    size = layout.payload_bytes
    keys = MemoryKeys(random.Random(5).randbytes)
    tier = open_store(tmp_path, layout=layout, keys=keys, kind=kind, seek_bytes=0)
    (item,) = store(tier, "a")
    assert load(tier, [item]) == [content("a", size=size)]
    last = ranged(item, [(size - 9, size)], size)
    assert read(tier, [last]) == [None]
    assert bytes(last.landing.body[-9:]) == content("a", size=size)[-9:]
    tier.close()
    report = verify_store(tier.path, keys)
    assert report.whole and report.counts == {BlockVerdict.GOOD: 1}
