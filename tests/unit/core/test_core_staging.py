"""Memory of blocks on their way: one region of whole pages, huge ones where the kernel has them."""

from __future__ import annotations

import errno
import re
import time
from pathlib import Path

import pytest
import torch

from kvtier_core.arrivals import BufferPool
from kvtier_core.layout import ChunkLayout
from kvtier_core.measure import measure
from kvtier_core.tiers import hostmemory
from kvtier_core.tiers.fileops import OsFileOps
from kvtier_core.tiers.hostmemory import HUGE_PAGE
from kvtier_core.tiers.nvme.tier import NvmeTier
from kvtier_core.tiers.staging import PAGE, StagingBuffer, StagingRoom, address_of, block_bytes

# 397,312 bytes a block, as SmolLM2's.
LAYOUT = ChunkLayout(kv_heads=3, head_dim=64, chunk_tokens=256)
THP = Path("/sys/kernel/mm/transparent_hugepage")


def flags_at(address: int) -> set[str]:
    """VmFlags of this process's map in which an address lies."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        span = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if span:
            inside = int(span[1], 16) <= address < int(span[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    raise AssertionError(f"nothing is mapped at {address:#x}")


def test_buffers_of_a_room_lie_side_by_side_from_a_huge_page_on() -> None:
    room = StagingRoom(LAYOUT, 6)
    buffers = [room.buffer(at) for at in range(6)]
    first = address_of(buffers[0].block)
    assert first % HUGE_PAGE == 0
    assert [address_of(buffer.block) - first for buffer in buffers] == [
        at * block_bytes(LAYOUT) for at in range(6)
    ]
    assert all(len(buffer) == block_bytes(LAYOUT) for buffer in buffers)
    assert address_of(buffers[5].body) % PAGE == 0


def test_a_payload_is_its_own_buffers_bytes() -> None:
    room = StagingRoom(LAYOUT, 3)
    one, other = room.buffer(1), room.buffer(2)
    other.payload.fill_(2.0)
    one.payload.fill_(1.0)
    assert torch.equal(other.payload, torch.full(LAYOUT.shape, 2.0))
    assert torch.equal(torch.frombuffer(one.body, dtype=torch.float32), torch.ones(LAYOUT.floats))
    assert bytes(other.header) == bytes(PAGE)


@pytest.mark.parametrize("at", [-1, 3], ids=["before", "behind"])
def test_a_room_has_no_buffer_outside_it(at: int) -> None:
    with pytest.raises(ValueError, match=f"buffer {at} of 3"):
        StagingRoom(LAYOUT, 3).buffer(at)


def test_whole_huge_pages_are_asked_for_and_none_beyond_the_buffers() -> None:
    """A page more would hold bytes that no bound counts."""
    count = 6
    room = StagingRoom(LAYOUT, count)
    first = address_of(room.buffer(0).block)
    huge = {"hg"} if THP.exists() else set()
    assert flags_at(first) & {"hg", "dc"} == huge | {"dc"}
    # The last ones end in ordinary pages: six blocks are one huge page and a part of one.
    assert flags_at(first + count * block_bytes(LAYOUT) - 1) & {"hg", "dc"} == {"dc"}


def test_a_room_smaller_than_a_huge_page_has_none() -> None:
    room = StagingRoom(LAYOUT, 2)
    assert room.huge_pages == "none (too small)"
    assert "hg" not in flags_at(address_of(room.buffer(0).block))


@pytest.mark.parametrize(
    ("setting", "word"),
    [
        ("[always] madvise never", "transparent"),
        ("always [madvise] never", "transparent"),
        ("always madvise [never]", "none (never)"),
        (None, "transparent (setting unknown)"),
    ],
)
def test_a_room_says_what_the_kernels_setting_makes_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str | None, word: str
) -> None:
    kind = tmp_path / "enabled"
    if setting is not None:
        kind.write_text(setting + "\n")
    monkeypatch.setattr(hostmemory, "_PRIVATE_HUGE", kind)
    taken: list[tuple[int, int]] = []

    class Taking:
        def madvise(self, advice: int, start: int, size: int) -> None:
            taken.append((start, size))

    assert hostmemory.advise_private(Taking(), 4096, 8192) == word  # type: ignore[arg-type]
    assert taken == [(4096, 8192)]


def test_a_kernel_without_huge_pages_is_named_and_the_memory_is_there() -> None:
    class Refusing:
        def madvise(self, advice: int, start: int, size: int) -> None:
            raise OSError(errno.EINVAL, "no huge pages here")

    assert hostmemory.advise_private(Refusing(), 0, HUGE_PAGE) == "none (EINVAL)"  # type: ignore[arg-type]


def test_a_storage_tier_that_was_measured_says_which_pages_it_read_into(tmp_path: Path) -> None:
    options = {"folder": tmp_path, "file_key": "probe", "files": OsFileOps(), "clock": time.monotonic}
    tier = NvmeTier("flash", LAYOUT, 4, **options)  # type: ignore[arg-type]
    try:
        measure(tier, time.monotonic)
        assert tier.measured.probes["huge_pages"] == StagingRoom(LAYOUT, 6).huge_pages
        assert tier.measured.read_bytes_per_second > 0.0
    finally:
        tier.close()


def test_a_pool_gives_buffers_of_one_room() -> None:
    pool = BufferPool(LAYOUT, 3)
    taken = [pool.take() for _ in range(3)]
    assert pool.take() is None
    places = [address_of(buffer.block) for buffer in taken if isinstance(buffer, StagingBuffer)]
    assert [place - places[0] for place in places] == [0, block_bytes(LAYOUT), 2 * block_bytes(LAYOUT)]
    assert pool.bytes == 3 * block_bytes(LAYOUT)
