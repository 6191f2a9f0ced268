"""Batches on flash: neighbours in one call, each block judged by itself, one flush per durable batch."""

from __future__ import annotations

import dataclasses
import errno
from pathlib import Path

import pytest

from kvtier_core.errors import CoreError, Reason
from kvtier_core.layout import ChunkLayout
from kvtier_core.tiers.base import SlotState
from kvtier_core.tiers.nvme import NvmeTier
from kvtier_core.tiers.nvme.batch import runs
from kvtier_core.tiers.transfer import EraseItem, Landing, TransferItem
from tests.unit.core.builders import DISK_ERRORS
from tests.unit.core.nvme_files import Gate, ScriptedFiles, failing
from tests.unit.core.nvme_store import (
    FOREVER,
    SIZE,
    Heard,
    content,
    erase,
    identity,
    load,
    open_store,
    page_aligned,
    store,
    write_item,
)

NAMES = ("a", "b", "c", "d")


@pytest.mark.parametrize(
    ("slots", "limit", "expected"),
    [
        ([], 4, []),
        ([5], 4, [[0]]),
        ([3, 1, 2], 4, [[1, 2, 0]]),
        ([1, 2, 3, 4, 5], 2, [[0, 1], [2, 3], [4]]),
        ([1, 3, 4, 9], 4, [[0], [1, 2], [3]]),
        ([7, 7], 4, [[0], [1]]),
    ],
    ids=["none", "one", "unsorted", "limit", "gaps", "twice the same"],
)
def test_neighbours_are_one_run(slots: list[int], limit: int, expected: list[list[int]]) -> None:
    assert runs(dict(enumerate(slots)), range(len(slots)), limit) == expected


@pytest.mark.parametrize("durable", [True, False], ids=["durable", "volatile"])
def test_a_batch_of_neighbours_is_one_write_one_flush_and_one_read(tmp_path: Path, durable: bool) -> None:
    files = ScriptedFiles()
    tier = open_store(tmp_path, 32, files)
    files.calls.clear()
    items = store(tier, *(f"n{i}" for i in range(32)), durable=durable)
    assert files.calls.get("write") == 1
    assert files.calls.get("sync", 0) == (1 if durable else 0)
    assert load(tier, items) == [content(f"n{i}") for i in range(32)]
    assert files.calls["read"] == 1
    assert (tier.counts.reads, tier.counts.writes) == (1, 1)
    tier.close()


def test_scattered_blocks_take_a_call_each_and_a_run_is_bounded(tmp_path: Path) -> None:
    tier = open_store(tmp_path, 12, run_bytes=3 * 8192)
    items = store(tier, *(f"n{i}" for i in range(12)))
    assert tier.counts.writes == 4
    assert load(tier, [items[i] for i in (0, 2, 4, 5)]) == [content(f"n{i}") for i in (0, 2, 4, 5)]
    assert tier.counts.reads == 3
    tier.close()


@pytest.mark.parametrize("kind", ["xxh3", "crc32c"])
@pytest.mark.parametrize("o_direct", [True, False], ids=["direct", "buffered"])
@pytest.mark.parametrize(
    ("layout", "shift"),
    [
        pytest.param(ChunkLayout(1, 16, 32), 0, id="whole pages"),
        pytest.param(ChunkLayout(1, 16, 32), 64, id="unaligned landing"),
        pytest.param(ChunkLayout(3, 7, 16), 0, id="odd length"),
        pytest.param(ChunkLayout(3, 7, 16), 8, id="odd length unaligned"),
        pytest.param(ChunkLayout(1, 2, 4), 0, id="less than a page"),
    ],
)
def test_bytes_come_back_whatever_length_and_address_they_have(
    tmp_path: Path, layout: ChunkLayout, shift: int, kind: str, o_direct: bool
) -> None:
    size = layout.payload_bytes
    tier = open_store(tmp_path, 4, layout=layout, kind=kind, o_direct=o_direct)
    items, datas = [], []
    for name in NAMES:
        named, data = identity(name, size=size), content(name, 1, size)
        memory = page_aligned(bytes(shift) + data)
        items.append(TransferItem(tier.reserve(1), named, Landing(memory[shift : shift + size])))
        datas.append(data)
    heard = Heard(4)
    tier.submit_write(items, FOREVER, heard)
    assert heard.wait().reasons() == [None] * 4
    targets = [page_aligned(b"\xee" * (shift + size + 32)) for _ in NAMES]
    reads = []
    for item, target in zip(items, targets, strict=True):
        tier.publish(item.ref)
        reads.append(TransferItem(item.ref, item.identity, Landing(target[shift : shift + size])))
    heard = Heard(4)
    tier.submit_read(reads, FOREVER, heard)
    assert heard.wait().reasons() == [None] * 4
    for target, data in zip(targets, datas, strict=True):
        assert bytes(target) == b"\xee" * shift + data + b"\xee" * 32, "a byte outside of the landing changed"
    tier.close()


def test_a_block_is_readable_only_when_the_caller_publishes_it(tmp_path: Path) -> None:
    tier = open_store(tmp_path)
    item = write_item(tier, identity("a"), content("a"))
    assert load(tier, [item]) == ["NOT_VISIBLE"]
    heard = Heard(1)
    tier.submit_write([item], FOREVER, heard)
    heard.wait()
    assert tier.slots.state(item.ref) is SlotState.VALIDATED
    assert load(tier, [item]) == ["NOT_VISIBLE"]
    tier.publish(item.ref)
    assert load(tier, [item]) == [content("a")]
    tier.close()


def test_one_bad_source_does_not_keep_its_batch(tmp_path: Path) -> None:
    tier = open_store(tmp_path)
    items = [write_item(tier, identity(name), content(name)) for name in NAMES]
    items[1].landing.body[7] ^= 1
    items[2] = dataclasses.replace(items[2], landing=Landing(page_aligned(bytes(SIZE))[:100]))
    heard = Heard(4)
    tier.submit_write(items, FOREVER, heard)
    assert heard.wait().reasons() == [None, "CHECKSUM_MISMATCH", "SHORT_COPY", None]
    for item in (items[1], items[2]):
        assert tier.slots.state(item.ref) is SlotState.RESERVED
    tier.close()


@pytest.mark.parametrize("code", DISK_ERRORS.values(), ids=DISK_ERRORS.keys())
@pytest.mark.parametrize("operation", ["write", "read"])
def test_an_error_in_a_run_is_kept_to_its_block(tmp_path: Path, operation: str, code: int) -> None:
    """The run fails, then the third of its blocks does; its neighbours are moved, one by one."""
    files = ScriptedFiles()
    tier = open_store(tmp_path, files=files)
    if operation == "read":
        items = store(tier, *NAMES)
    files.calls.clear()
    run, third = failing(operation, 0, code), failing(operation, 3, code)
    files.script = lambda name, number: run(name, number) or third(name, number)
    if operation == "write":
        items = [write_item(tier, identity(name), content(name)) for name in NAMES]
        heard = Heard(4)
        tier.submit_write(items, FOREVER, heard)
        outcome: list[str | None] = heard.wait().reasons()
        assert outcome == [None, None, "STORAGE_UNAVAILABLE", None]
    else:
        loaded = load(tier, items)
        assert loaded == [content("a"), content("b"), "STORAGE_UNAVAILABLE", content("d")]
    assert tier.condition == "Ready", "what came after it worked"
    files.script = failing(operation, 5, code)
    tier_condition(tier, operation, code)
    tier.close()


def tier_condition(tier: NvmeTier, operation: str, code: int) -> None:
    """The condition says what is wrong until the same kind of I/O works again."""
    (kept,) = store(tier, "e") if operation == "read" else [write_item(tier, identity("e"), content("e"))]
    for expected in (f"{errno.errorcode[code]}", "Ready"):
        if operation == "read":
            load(tier, [kept])
        else:
            heard = Heard(1)
            tier.submit_write([kept], FOREVER, heard)
            heard.wait()
        assert expected in tier.condition


@pytest.mark.parametrize("operation", ["write", "read"])
def test_a_call_that_ends_short_keeps_what_is_whole(tmp_path: Path, operation: str) -> None:
    files = ScriptedFiles()
    tier = open_store(tmp_path, files=files)
    cut = 2 * 8192 + 4096

    def script(name: str, number: int) -> int | None:
        return cut if name == operation and number == 0 else None

    if operation == "read":
        items = store(tier, *NAMES)
        files.calls.clear()
        files.script = script
        assert load(tier, items) == [content("a"), content("b"), "SHORT_COPY", "SHORT_COPY"]
        assert tier.condition.startswith("SHORT_COPY")
        assert load(tier, items) == [content(name) for name in NAMES]
    else:
        files.calls.clear()
        files.script = script
        items = [write_item(tier, identity(name), content(name)) for name in NAMES]
        heard = Heard(4)
        tier.submit_write(items, FOREVER, heard)
        assert heard.wait().reasons() == [None, None, "SHORT_COPY", "SHORT_COPY"]
        assert tier.condition.startswith("SHORT_COPY")
        for item in items[:2]:
            tier.publish(item.ref)
        assert load(tier, items[:2]) == [content("a"), content("b")]
        store(tier, "e")
    assert tier.condition == "Ready"
    tier.close()


def test_a_failed_flush_acknowledges_nothing(tmp_path: Path) -> None:
    files = ScriptedFiles()
    tier = open_store(tmp_path, files=files)
    files.calls.clear()
    files.script = failing("sync", 0, errno.EIO)
    items = [write_item(tier, identity(name), content(name)) for name in NAMES]
    heard = Heard(4)
    tier.submit_write(items, FOREVER, heard)
    assert heard.wait().reasons() == ["STORAGE_UNAVAILABLE"] * 4
    assert "EIO" in tier.condition
    with pytest.raises(CoreError) as refused:
        tier.publish(items[0].ref)
    assert refused.value.reason is Reason.NOT_VISIBLE
    frontier = tier.commit.frontier
    store(tier, "e")
    assert tier.commit.frontier == frontier, "payloads from the failed flush on stay unproven"
    tier.close()


def test_writers_of_other_batches_share_a_flush(tmp_path: Path) -> None:
    """While one batch is held in its write, others that end do not flush: the last to end does, for all."""
    gate = Gate("write", 0)
    files = ScriptedFiles()
    tier = open_store(tmp_path, files=files, threads=3)
    files.calls.clear()
    files.script = gate
    first, second = Heard(1), Heard(1)
    tier.submit_write([write_item(tier, identity("a"), content("a"))], FOREVER, first)
    assert gate.entered.acquire(timeout=60)
    tier.submit_write([write_item(tier, identity("b"), content("b"))], FOREVER, second)
    gate.opened.set()
    assert first.wait().reasons() == second.wait().reasons() == [None]
    assert tier.commit.flushes == 1
    tier.close()


def test_a_durable_block_is_refused_by_a_file_that_is_cleared(tmp_path: Path) -> None:
    tier = open_store(tmp_path, persistence="process")
    item = write_item(tier, identity("a"), content("a"))
    with pytest.raises(CoreError) as refused:
        tier.submit_write([item], FOREVER, Heard(1))
    assert refused.value.reason is Reason.TIER_INCAPABLE
    tier.close()


def test_a_full_queue_refuses_before_anything_starts(tmp_path: Path) -> None:
    gate = Gate("write")
    files = ScriptedFiles()
    tier = open_store(tmp_path, files=files, threads=1, queue_items=2)
    files.script = gate
    heard, waiting, never = Heard(1), Heard(2), Heard(3)
    items = [write_item(tier, identity(f"n{i}"), content(f"n{i}")) for i in range(6)]
    tier.submit_write(items[:1], FOREVER, heard)
    assert gate.entered.acquire(timeout=60)
    tier.submit_write(items[1:3], FOREVER, waiting)
    with pytest.raises(CoreError) as refused:
        tier.submit_write(items[3:], FOREVER, never)
    assert refused.value.reason is Reason.QUEUE_FULL
    assert int(refused.value.facts["retry_after_ms"]) > 0
    gate.opened.set()
    assert heard.wait().reasons() + waiting.wait().reasons() == [None] * 3
    assert not never.errors
    tier.submit_write(items[3:5], FOREVER, (again := Heard(2)))
    assert again.wait().reasons() == [None] * 2
    tier.close()


def test_reading_back_finds_a_write_that_never_arrived(tmp_path: Path) -> None:
    files = ScriptedFiles()
    tier = open_store(tmp_path, files=files, read_back=True)
    files.calls.clear()
    real = files.real.write
    files.real.write = lambda fd, buffers, offset: (  # type: ignore[method-assign]
        sum(map(len, buffers)) if files.calls["write"] == 1 else real(fd, buffers, offset)
    )
    item = write_item(tier, identity("a"), content("a"))
    heard = Heard(1)
    tier.submit_write([item], FOREVER, heard)
    assert heard.wait().reasons() == ["CHECKSUM_MISMATCH"]
    tier.submit_write([item], FOREVER, (again := Heard(1)))
    assert again.wait().reasons() == [None]
    tier.close()


def test_a_cancelled_write_that_has_not_begun_writes_nothing(tmp_path: Path) -> None:
    gate = Gate("write", 0)
    files = ScriptedFiles()
    tier = open_store(tmp_path, files=files, threads=1)
    files.calls.clear()
    files.script = gate
    first, second = Heard(1), Heard(1)
    items = [write_item(tier, identity(name), content(name)) for name in ("a", "b")]
    tier.submit_write(items[:1], FOREVER, first)
    assert gate.entered.acquire(timeout=60)
    tier.submit_write(items[1:], FOREVER, second)
    tier.quarantine(items[1].ref)
    gate.opened.set()
    assert first.wait().reasons() == [None]
    assert second.wait().reasons() == ["NOT_VISIBLE"]
    assert files.calls["write"] == 1
    tier.release(items[1].ref)
    tier.close()


def test_an_erased_block_is_refused_by_slot_and_an_erasure_of_another_life_as_well(tmp_path: Path) -> None:
    tier = open_store(tmp_path)
    (item,) = store(tier, "a")
    assert erase(tier, EraseItem(item.ref)) == [None]
    assert load(tier, [item]) == ["NOT_VISIBLE"]
    tier.release(item.ref)
    assert erase(tier, EraseItem(item.ref)) == ["RECYCLED_DESTINATION"]
    (again,) = store(tier, "b")
    assert again.ref.slot == item.ref.slot
    assert erase(tier, EraseItem(item.ref, item.identity.chunk_digest)) == ["RECYCLED_DESTINATION"]
    assert load(tier, [again]) == [content("b")]
    tier.close()


def test_an_erasure_by_key_leaves_a_block_alone_that_was_written_over_the_remnant(tmp_path: Path) -> None:
    tier = open_store(tmp_path, 1)
    (old,) = store(tier, "a")
    tier.release(old.ref)
    (new,) = store(tier, "b")
    assert erase(tier, EraseItem(key=old.identity.chunk_digest)) == [None]
    assert tier.counts.erasures == 0
    assert load(tier, [new]) == [content("b")]
    tier.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("durable", [True, False], ids=["durable", "volatile"])
def test_a_caller_whose_sink_fails_costs_nobody_else_anything(tmp_path: Path, durable: bool) -> None:
    tier = open_store(tmp_path, threads=1)

    def fail(index: int, error: CoreError | None) -> None:
        raise RuntimeError("a defect of the caller's")

    for _ in range(3):
        item = write_item(tier, identity("a", durable=durable), content("a"))
        tier.submit_write([item], FOREVER, Heard(1, fail))
        (other,) = store(tier, "b", durable=durable)
        assert load(tier, [other]) == [content("b")]
        tier.release(other.ref)
        tier.release(item.ref)
    tier.close()
