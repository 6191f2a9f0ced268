"""Parts of stored blocks: the same bytes as the whole, only the segments that are needed, and the same
refusals as a read of the whole."""

from __future__ import annotations

import dataclasses
import errno
import random
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_core.checksums import checksum
from kvtier_core.errors import CoreError, Reason
from kvtier_core.layout import ChunkLayout
from kvtier_core.measure import LEAST_SEEK, MOST_SEEK, measure
from kvtier_core.tiers.block import (
    HEADER_BYTES,
    WITHOUT_TABLE,
    BlockFormat,
    HeaderWriter,
    associated_data,
    finish,
    read_header,
    table_of,
)
from kvtier_core.tiers.fileops import Buffer
from kvtier_core.tiers.nvme import NvmeTier
from kvtier_core.tiers.nvme.crypto import BlockCipher, MemoryKeys
from kvtier_core.tiers.nvme.pages import KnownPages
from kvtier_core.tiers.nvme.rangedjobs import parts_of
from kvtier_core.tiers.nvme.superblock import SUPERBLOCK_BYTES
from kvtier_core.tiers.slots import SlotRef
from kvtier_core.tiers.staging import PAGE
from kvtier_core.tiers.transfer import EraseItem, Landing, Ranges, TransferItem
from tests.unit.core.builders import FakeClock
from tests.unit.core.nvme_files import Gate, MemoryFiles, ScriptedFiles, failing
from tests.unit.core.nvme_store import (
    FOREVER,
    Heard,
    content,
    erase,
    load,
    open_store,
    page_aligned,
    recovered_items,
    says,
    store,
)

FOLDER = Path("/store")
WIDE = ChunkLayout(2, 64, 64)
"""8 segments of 4 KiB to a head's K or V, 16 rows each; 64 KiB in all."""
UNEVEN = ChunkLayout(1, 16, 80)
"""10,240 bytes: the last of its two segments is no whole page."""
SIZE = WIDE.payload_bytes
FILLER = 0xEE
STORES: dict[str, dict[str, Any]] = {
    "xxh3": {"layout": WIDE},
    "crc32c": {"layout": WIDE, "kind": "crc32c"},
    "uneven": {"layout": UNEVEN},
    "encrypted": {"layout": WIDE, "sealed": True},
    "encrypted-uneven": {"layout": UNEVEN, "sealed": True},
}


class Opened:
    """A store in memory, of which single segments are worth a call of their own."""

    def __init__(self, layout: ChunkLayout, kind: str = "xxh3", sealed: bool = False, seek: int = 0) -> None:
        self.layout = layout
        self.files = MemoryFiles()
        self.keys = MemoryKeys(random.Random(5).randbytes) if sealed else None
        self._options: dict[str, Any] = {
            "layout": layout,
            "kind": kind,
            "keys": self.keys,
            "seek_bytes": seek,
        }
        self.tier = self._open()

    def _open(self) -> NvmeTier:
        return open_store(FOLDER, 4, self.files, **self._options)

    def again(self) -> None:
        """As the next process finds it: nothing of its pages is known."""
        self.tier.close()
        self.tier = self._open()

    @property
    def bytes(self) -> bytearray:
        found: bytearray = self.files.nodes[self.tier.path].now
        return found

    def at(self, item: TransferItem) -> int:
        return SUPERBLOCK_BYTES + item.ref.slot * BlockFormat.of(self.layout, "xxh3").stride


def ranged(item: TransferItem, spans: list[tuple[int, int]], size: int) -> TransferItem:
    landing = page_aligned(bytes([FILLER]) * size)
    return dataclasses.replace(item, landing=Landing(landing), ranges=Ranges(tuple(spans), size))


def read(tier: NvmeTier, items: list[TransferItem], deadline: float = FOREVER) -> list[str | None]:
    heard = Heard(len(items))
    tier.submit_read(items, deadline, heard)
    return heard.wait().reasons()


def span_lists(size: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    """Ascending, apart, of any length."""
    cuts = st.lists(st.integers(0, size), min_size=2, max_size=12, unique=True).map(sorted)
    return cuts.map(lambda found: list(zip(found[::2], found[1::2], strict=False)))


@pytest.mark.parametrize("seek", [0, 16 << 10], ids=["every-gap", "gaps-bridged"])
@pytest.mark.parametrize("kind", STORES)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_a_part_is_what_the_whole_has_there(kind: str, seek: int, data: st.DataObject) -> None:
    opened = Opened(**STORES[kind], seek=seek)
    size = opened.layout.payload_bytes
    items = store(opened.tier, "a", "b", "c")
    if data.draw(st.booleans(), label="another process"):
        opened.again()
        found = recovered_items(opened.tier)
        items = [found[item.identity.chunk_digest] for item in items]
    wanted = [ranged(item, data.draw(span_lists(size)), size) for item in items]
    assert read(opened.tier, wanted) == [None] * 3
    for name, item in zip("abc", wanted, strict=True):
        assert item.ranges is not None
        whole = content(name, size=size)
        for low, high in item.ranges.spans:
            assert bytes(item.landing.body[low:high]) == whole[low:high]
        least = sum(high - low for low, high in item.ranges.spans)
        assert least <= item.ranges.read_bytes <= opened.tier.slot_bytes
    opened.tier.close()


def test_only_the_segments_that_are_wanted_are_read(tmp_path: Path) -> None:
    tier = open_store(tmp_path, layout=WIDE, seek_bytes=0)
    (item,) = store(tier, "a")
    before, calls = tier.counts.read_bytes, tier.counts.reads
    one = ranged(item, [(5, 9), (100, 4096), (3 * PAGE, 3 * PAGE + 1)], SIZE)
    assert read(tier, [one]) == [None]
    assert one.ranges is not None and one.ranges.read_bytes == 2 * PAGE
    assert (tier.counts.read_bytes - before, tier.counts.reads - calls) == (2 * PAGE, 2)
    untouched = bytes(one.landing.body[PAGE : 3 * PAGE]) + bytes(one.landing.body[4 * PAGE :])
    assert untouched == bytes([FILLER]) * len(untouched)
    tier.close()


def test_a_process_that_finds_a_block_reads_its_header_once() -> None:
    opened = Opened(WIDE)
    store(opened.tier, "a")
    opened.again()
    (item,) = recovered_items(opened.tier).values()
    for extra in (PAGE, 0):
        one = ranged(item, [(0, 10)], SIZE)
        assert read(opened.tier, [one]) == [None]
        assert one.ranges is not None and one.ranges.read_bytes == PAGE + extra
    opened.tier.close()


SECONDS = [(at, at + 1) for at in range(0, 65536, 8192)]
PARTS = {
    "one": ([(0, 1)], 0, [(0, 1)]),
    "neighbours": ([(0, 4096), (4096, 8192)], 0, [(0, 2)]),
    "same segment twice": ([(0, 1), (4000, 4001)], 0, [(0, 1)]),
    "a gap": ([(0, 1), (8192, 8193)], 0, [(0, 1), (2, 3)]),
    "a gap that is worth it": ([(0, 1), (8192, 8193)], 4096, [(0, 3)]),
    "over the edge": ([(4095, 4097)], 0, [(0, 2)]),
    "nothing": ([], 0, []),
    "all": ([(0, 65536)], 0, None),
    "every second": (SECONDS, 4095, [(at, at + 1) for at in range(0, 16, 2)]),
    "every second, and calls are dear": (SECONDS, 4096, None),
    "a gap that is not worth it": ([(0, 8193), (40000, 40001)], 8192, [(0, 3), (9, 10)]),
    "calls that cost as much as the rest": ([(0, 8193), (40000, 40001)], 24576, None),
}


@pytest.mark.parametrize(("spans", "seek", "parts"), PARTS.values(), ids=PARTS.keys())
def test_which_segments_are_read(
    spans: list[tuple[int, int]], seek: int, parts: list[tuple[int, int]] | None
) -> None:
    assert parts_of(spans, 4096, 65536, seek) == parts


@pytest.mark.parametrize("spans", [[(5, 5)], [(9, 4)], [(0, SIZE + 1)], [(10, 20), (15, 30)], [(-1, 4)]])
def test_spans_that_are_no_part_are_refused(spans: list[tuple[int, int]]) -> None:
    opened = Opened(WIDE)
    (item,) = store(opened.tier, "a")
    assert read(opened.tier, [ranged(item, spans, SIZE)]) == ["BAD_ARGUMENT"]
    opened.tier.close()


@pytest.mark.parametrize("known", [True, False], ids=["page-known", "page-read"])
@pytest.mark.parametrize("kind", ["xxh3", "crc32c", "encrypted"])
def test_a_bit_that_flips_in_any_segment_is_a_miss_of_that_segment_alone(kind: str, known: bool) -> None:
    opened = Opened(**STORES[kind])
    items = store(opened.tier, "a", "b")
    segment = SIZE // 4 if kind == "encrypted" else PAGE
    if not known:
        opened.again()
        items = list(recovered_items(opened.tier).values())
    name = next(name for name in "ab" if content(name, size=SIZE) == load(opened.tier, items)[1])
    for at in range(0, SIZE, segment):
        place = opened.at(items[1]) + PAGE + at + (at // 7) % segment
        opened.bytes[place] ^= 1 << (at // segment) % 8
        mine = ranged(items[1], [(at + 1, at + 2)], SIZE)
        others = ranged(items[1], [((at + segment) % SIZE, (at + segment) % SIZE + 9)], SIZE)
        assert read(opened.tier, [mine, others]) == ["CHECKSUM_MISMATCH", None]
        low, high = others.ranges.spans[0] if others.ranges else (0, 0)
        assert bytes(others.landing.body[low:high]) == content(name, size=SIZE)[low:high]
        assert load(opened.tier, [items[1]]) == ["CHECKSUM_MISMATCH"], "as the whole is"
        opened.bytes[place] ^= 1 << (at // segment) % 8
    opened.tier.close()


@settings(max_examples=40, deadline=None)
@given(at=st.integers(0, HEADER_BYTES + 16 + 8 * 16 - 1), bit=st.integers(0, 7), sealed=st.booleans())
def test_a_flip_in_a_page_that_has_to_be_read_is_never_believed(at: int, bit: int, sealed: bool) -> None:
    opened = Opened(WIDE, sealed=sealed)
    store(opened.tier, "a")
    opened.again()
    (item,) = recovered_items(opened.tier).values()
    end = HEADER_BYTES + 16 + (4 * 16 if sealed else 16 * 8)
    at = min(at, end - 1)
    opened.bytes[opened.at(item) + at] ^= 1 << bit
    assert read(opened.tier, [ranged(item, [(0, 9)], SIZE)]) == load(opened.tier, [item])
    assert load(opened.tier, [item]) == ["CHECKSUM_MISMATCH"]
    opened.tier.close()


def another_life(opened: Opened, item: TransferItem) -> TransferItem:
    opened.tier.release(item.ref)
    store(opened.tier, "z")
    return item


def erased(opened: Opened, item: TransferItem) -> TransferItem:
    assert erase(opened.tier, EraseItem(item.ref)) == [None]
    return item


def other_key(opened: Opened, item: TransferItem) -> TransferItem:
    return dataclasses.replace(item, identity=dataclasses.replace(item.identity, chunk_digest=bytes(32)))


def other_seal(opened: Opened, item: TransferItem) -> TransferItem:
    return dataclasses.replace(item, identity=dataclasses.replace(item.identity, checksum=1))


def other_rows(opened: Opened, item: TransferItem) -> TransferItem:
    return dataclasses.replace(item, identity=dataclasses.replace(item.identity, rows=15))


def unpublished(opened: Opened, item: TransferItem) -> TransferItem:
    opened.tier.quarantine(item.ref)
    return item


def swapped(opened: Opened, item: TransferItem) -> TransferItem:
    """The bytes of the second block under the page of the first."""
    first, size = opened.at(item) + PAGE, opened.tier.slot_bytes
    opened.bytes[first : first + size - PAGE] = opened.bytes[first + size : first + 2 * size - PAGE]
    return item


CHANGES = (another_life, erased, other_key, other_seal, other_rows, unpublished, swapped)
STALE = {one.__name__: one for one in CHANGES}


@pytest.mark.parametrize("sealed", [False, True], ids=["plain", "encrypted"])
@pytest.mark.parametrize("change", STALE.values(), ids=STALE.keys())
def test_what_a_read_of_the_whole_refuses_a_part_refuses_with_the_same_reason(
    change: Any, sealed: bool
) -> None:
    opened = Opened(WIDE, sealed=sealed)
    item = change(opened, store(opened.tier, "a", "b")[0])
    (part,) = read(opened.tier, [ranged(item, [(0, 9)], SIZE)])
    (whole,) = load(opened.tier, [item])
    assert part == whole
    assert part is not None
    opened.tier.close()


def test_a_key_that_is_destroyed_opens_no_segment() -> None:
    opened = Opened(WIDE, sealed=True)
    (item,) = store(opened.tier, "a")
    assert read(opened.tier, [ranged(item, [(0, 9)], SIZE)]) == [None]
    assert opened.keys is not None
    opened.keys.destroy(item.identity.namespace)
    opened.tier.forget_keys()
    assert read(opened.tier, [ranged(item, [(0, 9)], SIZE)]) == ["KEY_UNAVAILABLE"]
    opened.tier.close()


def test_no_segment_opens_in_anothers_place() -> None:
    """Ciphertext and tag of segment 1 at the place of segment 0, with checksums mended."""
    opened = Opened(WIDE, sealed=True)
    (item,) = store(opened.tier, "a")
    start, segment = opened.at(item), SIZE // 4
    block = opened.bytes
    body = start + PAGE
    block[body : body + segment] = block[body + segment : body + 2 * segment]
    page = bytes(block[start : start + PAGE])
    _, header = read_header(page)
    assert header is not None
    table = table_of(page, header)
    assert table is not None
    moved = dataclasses.replace(table, entries=table.entry(1) * 2 + table.entries[32:])
    own = checksum("xxh3", bytes(block[body : body + SIZE]))
    known = bytearray(page[:HEADER_BYTES])
    struct.pack_into("<Q", known, 96, own)
    finish(known)
    encoded = moved.encode(header._replace(payload_checksum=own).life)
    block[start : start + HEADER_BYTES + len(encoded)] = bytes(known) + encoded
    opened.again()
    (found,) = recovered_items(opened.tier).values()
    assert read(opened.tier, [ranged(found, [(0, 9)], SIZE)]) == ["CHECKSUM_MISMATCH"]
    assert read(opened.tier, [ranged(found, [(segment, segment + 9)], SIZE)]) == [None]
    opened.tier.close()


def as_version_2(opened: Opened, item: TransferItem) -> None:
    """Writes the block anew as an earlier process would have."""
    start, size = opened.at(item), opened.layout.payload_bytes
    plain = content("a", size=size)
    named = item.identity
    header = HeaderWriter(BlockFormat.of(opened.layout, "xxh3"), opened.tier.recovery.epoch)
    if opened.keys is None:
        data = header.pack(item.ref, named, 1, named.checksum, named.checksum)
        body = plain
    else:
        cipher = BlockCipher(opened.keys, random.Random(9).randbytes)
        by = cipher.begin(named.namespace)
        data = header.pack(item.ref, named, 1, cipher.mask(by, named.namespace, named.checksum), 0, by)
        body = b""
    data[:8], data[8:12] = WITHOUT_TABLE[0], struct.pack("<I", WITHOUT_TABLE[1])
    if opened.keys is not None:
        sealed = cipher._key(by[0], by[1], named.namespace).cipher.encrypt(
            by[2], plain, associated_data(data)
        )
        body, data[368:384] = sealed[:-16], sealed[-16:]
        struct.pack_into("<Q", data, 96, checksum("xxh3", body))
    finish(data)
    page = bytes(data) + bytes(PAGE - len(data))
    opened.bytes[start : start + PAGE + size] = page + body


@pytest.mark.parametrize("sealed", [False, True], ids=["plain", "encrypted"])
def test_a_block_of_the_version_before_is_recovered_and_read_as_a_whole(sealed: bool) -> None:
    opened = Opened(WIDE, sealed=sealed)
    (item,) = store(opened.tier, "a")
    as_version_2(opened, item)
    opened.again()
    (found,) = recovered_items(opened.tier).values()
    assert load(opened.tier, [found]) == [content("a", size=SIZE)]
    part = ranged(found, [(0, 9)], SIZE)
    assert read(opened.tier, [part]) == [None]
    assert bytes(part.landing.body) == content("a", size=SIZE)
    assert part.ranges is not None and part.ranges.read_bytes == SIZE
    opened.bytes[opened.at(found) + PAGE + SIZE - 1] ^= 1
    assert read(opened.tier, [ranged(found, [(0, 9)], SIZE)]) == ["CHECKSUM_MISMATCH"]
    opened.tier.close()


@pytest.mark.parametrize(("head_dim", "kv_heads", "plain", "sealed"), [
    (64, 3, 4 << 10, 16 << 10), (128, 8, 8 << 10, 16 << 10), (16, 1, 4 << 10, 16 << 10),
    (256, 16, 32 << 10, 64 << 10),
])  # fmt: skip
def test_a_segment_is_a_page_of_rows_where_the_table_has_room(
    head_dim: int, kv_heads: int, plain: int, sealed: int
) -> None:
    form = BlockFormat.of(ChunkLayout(kv_heads, 256, head_dim), "xxh3")
    assert (form.segment_bytes, form.sealed_segment_bytes) == (plain, sealed)


def test_known_pages_are_of_one_life_and_bounded() -> None:
    pages = KnownPages(1000)
    for slot in range(4):
        pages.remember(SlotRef(slot, 7), bytes([slot]) * 200)
    assert pages.held_bytes <= 1000
    assert [pages.find(SlotRef(slot, 7)) is None for slot in range(4)] == [True, False, False, False]
    assert pages.find(SlotRef(1, 8)) is None
    pages.forget(1)
    assert pages.find(SlotRef(1, 7)) is None
    with pytest.raises(CoreError) as refused:
        parts_of([(0, 99)], 4096, 98, 0)
    assert refused.value.reason is Reason.BAD_ARGUMENT


TWO_CALLS = [(0, 9), (5 * PAGE, 5 * PAGE + 9)]


@pytest.mark.parametrize("call", [0, 1], ids=["first", "second"])
def test_a_part_that_hangs_ends_at_the_deadline_and_keeps_its_landing_until_it_returns(
    tmp_path: Path, call: int
) -> None:
    clock, files = FakeClock(), ScriptedFiles()
    tier = open_store(
        tmp_path, files=files, clock=clock, threads=1, spare_threads=1, layout=WIDE, seek_bytes=0
    )
    items = store(tier, "a", "b")
    files.calls.clear()
    gate = files.script = Gate("read", call)
    heard = Heard(2)
    tier.submit_read([ranged(item, TWO_CALLS, SIZE) for item in items], clock.now + 5, heard)
    assert gate.entered.acquire(timeout=60)
    clock.now += 5.1
    tier.expire()
    tier.expire()
    assert heard.wait_done().reasons() == ["DEADLINE", "DEADLINE"]
    assert heard.drained_count == 0, "the device may still write into the landings"
    calls = files.calls["read"]
    assert load(tier, items) == [content("a", size=SIZE), content("b", size=SIZE)], "a spare thread took over"
    gate.opened.set()
    heard.wait()
    assert files.calls["read"] - calls <= 3, "of what nobody waits for no new block is begun"
    says(tier, "Ready")
    tier.close()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [(512, "SHORT_COPY"), (errno.EIO, "STORAGE_UNAVAILABLE")],
    ids=["short", "EIO"],
)
@pytest.mark.parametrize("call", [0, 1], ids=["first", "second"])
def test_a_part_that_comes_short_or_fails_is_refused_alone(
    tmp_path: Path, fault: int, reason: str, call: int
) -> None:
    files = ScriptedFiles()
    tier = open_store(tmp_path, files=files, threads=1, layout=WIDE, seek_bytes=0)
    items = store(tier, "a", "b")
    files.calls.clear()
    failed = failing("read", call, fault)

    def short(name: str, number: int) -> int | None:
        return fault if name == "read" and number == call else None

    files.script = short if reason == "SHORT_COPY" else failed
    assert read(tier, [ranged(item, TWO_CALLS, SIZE) for item in items]) == [reason, None]
    assert tier.condition == "Ready", "the block behind it was read"
    tier.close()


class Device(ScriptedFiles):
    """Each read takes `call` seconds, and a second a GB."""

    def __init__(self, clock: FakeClock, call: float) -> None:
        super().__init__()
        self._clock, self._call = clock, call

    def read(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        done = super().read(fd, buffers, offset)
        self._clock.now += self._call + done / 1e9
        return done


@pytest.mark.parametrize(
    ("call", "expected"),
    [(20e-6, 20_000), (50e-6, 50_000), (0.0, LEAST_SEEK), (1e-3, MOST_SEEK)],
    ids=["20us", "50us", "free", "dear"],
)
def test_what_a_call_costs_is_measured(tmp_path: Path, call: float, expected: int) -> None:
    clock = FakeClock()
    layout = ChunkLayout(8, 256, 64)
    tier = open_store(tmp_path, slots=1, layout=layout, files=Device(clock, call), clock=clock, threads=1)
    measure(tier, clock)
    assert tier.measured.seek_bytes == pytest.approx(expected, rel=0.1)
    assert tier.measured.probes["seek_bytes"] == str(tier.measured.seek_bytes)
    assert tier.slots.used == 0
    tier.close()


def test_a_block_of_few_segments_measures_no_call(tmp_path: Path) -> None:
    tier = open_store(tmp_path, slots=1, layout=UNEVEN, seek_bytes=77)
    measure(tier, time.monotonic)
    assert tier.measured.seek_bytes == 77
    tier.close()
