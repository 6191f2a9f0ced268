"""What users of other disk tiers reported (cases 27 to 35 of the study), and what happens here instead."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from kvtier_core.errors import CoreError, Reason
from kvtier_core.layout import ChunkLayout
from kvtier_core.tiers.block import BlockFormat
from kvtier_core.tiers.fileops import OsFileOps
from kvtier_core.tiers.nvme import sweep_orphans, verify_store
from kvtier_core.tiers.nvme.recovery import DropReason
from kvtier_core.tiers.nvme.superblock import SUPERBLOCK_BYTES
from kvtier_core.tiers.nvme.tier import store_path
from kvtier_core.tiers.nvme.verify import BlockVerdict
from kvtier_core.tiers.staging import PAGE
from kvtier_core.tiers.transfer import Landing, TransferItem
from tests.unit.core.builders import FakeClock
from tests.unit.core.nvme_files import ScriptedFiles, failing
from tests.unit.core.nvme_store import (
    FOREVER,
    LAYOUT,
    SIZE,
    Heard,
    content,
    identity,
    key,
    load,
    open_store,
    page_aligned,
    recovered_items,
    store,
    write_item,
)


def refused(reason: Reason, call: object) -> CoreError:
    with pytest.raises(CoreError) as error:
        call()  # type: ignore[operator]
    assert error.value.reason is reason, error.value
    return error.value


def test_case_27_the_file_never_outgrows_its_budget(tmp_path: Path) -> None:
    """A quota of 4 blocks, 5 stored: the fifth is refused before a byte moves."""
    tier = open_store(tmp_path, 4)
    store(tier, "a", "b", "c", "d")
    refused(Reason.NO_DESTINATION_CAPACITY, lambda: tier.reserve(1))
    assert tier.path.stat().st_size == SUPERBLOCK_BYTES + 4 * tier.slot_bytes
    assert sorted(path.name for path in tmp_path.iterdir()) == [tier.path.name]
    tier.close()


def test_case_27_a_full_disk_is_met_by_a_reservation_and_never_by_a_write(tmp_path: Path) -> None:
    files = ScriptedFiles()
    tier = open_store(tmp_path, 8, files)
    files.script = failing("allocate", 0, errno.ENOSPC)
    error = refused(Reason.STORAGE_UNAVAILABLE, lambda: tier.reserve(1))
    assert error.facts["errno"] == "ENOSPC"
    assert "ENOSPC" in tier.condition
    assert tier.slots.used == 0
    store(tier, "a")
    assert tier.condition == "Ready"
    assert "allocate" in files.calls and files.calls["allocate"] == 2
    tier.close()


def test_case_28_the_right_length_with_wrong_bytes_is_a_refusal(tmp_path: Path) -> None:
    tier = open_store(tmp_path)
    items = store(tier, "a", "b")
    with tier.path.open("r+b", buffering=0) as file:
        file.seek(SUPERBLOCK_BYTES + items[0].ref.slot * tier.slot_bytes + PAGE + 100)
        file.write(bytes([content("a")[100] ^ 1]))
        os.fsync(file.fileno())
    assert load(tier, items) == ["CHECKSUM_MISMATCH", content("b")]
    tier.close()


def test_case_28_a_read_from_a_pipe_that_nobody_writes_blocks_no_one_for_ever(tmp_path: Path) -> None:
    """A FIFO in place of the file: the system call really hangs, the caller does not."""
    clock, files = FakeClock(), ScriptedFiles()
    tier = open_store(tmp_path, files=files, clock=clock, threads=1, spare_threads=1)
    items = store(tier, "a", "b")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    pipe = os.open(fifo, os.O_RDWR)
    entered = threading.Event()
    real = files.read

    def read(fd: int, buffers: object, offset: int) -> int:
        if not entered.is_set():
            entered.set()
            return len(os.read(pipe, 1))
        return real(fd, buffers, offset)  # type: ignore[arg-type]

    files.read = read  # type: ignore[method-assign, assignment]
    landing = Landing(page_aligned(bytes(SIZE)))
    heard = Heard(1)
    tier.submit_read([TransferItem(items[0].ref, items[0].identity, landing)], clock.now + 1, heard)
    assert entered.wait(120)
    clock.now += 2
    tier.expire()
    assert heard.wait_done().reasons() == ["DEADLINE"]
    assert load(tier, items[1:]) == [content("b")]
    os.write(pipe, b"x")
    heard.wait()
    os.close(pipe)
    tier.close()


def test_case_30_what_a_crash_left_half_written_is_found_and_its_slot_is_used_again(tmp_path: Path) -> None:
    """A payload without its header, and a header without its payload."""
    tier = open_store(tmp_path, 3)
    items = store(tier, "a", "b", "c")
    stride = tier.slot_bytes
    tier.close()
    with tier.path.open("r+b") as file:
        file.seek(SUPERBLOCK_BYTES + items[0].ref.slot * stride)
        file.write(os.urandom(PAGE))
        for copy in (0, 1):
            # No flush is on record: every payload is looked at.
            file.seek(copy * PAGE)
            file.write(bytes(PAGE))
        file.seek(SUPERBLOCK_BYTES + items[1].ref.slot * stride + PAGE)
        file.write(bytes(PAGE))
    again = open_store(tmp_path, 3)
    assert again.recovery.dropped == {DropReason.TORN_HEADER: 1, DropReason.TORN_PAYLOAD: 1}
    assert set(recovered_items(again)) == {key("c")}
    store(again, "d", "e")
    refused(Reason.NO_DESTINATION_CAPACITY, lambda: again.reserve(1))
    again.close()


def test_case_30_files_of_caches_that_are_gone_are_swept(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    claimed = store_path(tmp_path, "cache")
    gone = store_path(tmp_path, "a cache that was deleted")
    gone.write_bytes(claimed.read_bytes())
    running = store_path(tmp_path, "a cache of a process that still runs")
    running.write_bytes(b"")
    (tmp_path / "notes.txt").write_text("not ours")
    files = OsFileOps()
    held = files.open(running, os.O_RDWR)
    files.lock(held)
    report = sweep_orphans(tmp_path, {claimed})
    files.close(held)
    assert (report.removed, report.locked, report.failed) == ((gone.name,), (running.name,), ())
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [claimed.name, running.name, "notes.txt"]
    )


def test_case_32_after_a_restart_the_index_is_rebuilt_from_the_blocks_alone(tmp_path: Path) -> None:
    tier = open_store(tmp_path)
    store(tier, "a", "b")
    tier.close()
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    tier.path.rename(store_path(moved, "cache"))
    again = open_store(moved)
    found = recovered_items(again)
    assert dict(zip(found, load(again, list(found.values())), strict=True)) == {
        key("a"): content("a"),
        key("b"): content("b"),
    }
    again.close()


@pytest.mark.parametrize("loss", ["file removed", "file emptied", "garbage"])
def test_case_33_a_lost_block_is_a_miss_and_the_store_goes_on(tmp_path: Path, loss: str) -> None:
    tier = open_store(tmp_path)
    (item,) = store(tier, "a")
    if loss == "file emptied":
        os.truncate(tier.path, 0)
    elif loss == "garbage":
        tier.path.write_bytes(os.urandom(tier.path.stat().st_size))
    else:
        tier.path.unlink()
    outcome = load(tier, [item])
    assert (
        outcome == [content("a")]
        if loss == "file removed"
        else outcome[0] in ("SHORT_COPY", "CHECKSUM_MISMATCH")
    )
    tier.close()
    again = open_store(tmp_path)
    assert again.recovery.kept == 0
    (new,) = store(again, "b")
    assert load(again, [new]) == [content("b")]
    again.close()


@pytest.mark.parametrize("where", ["open", "write", "read"])
def test_case_34_a_device_without_direct_io_is_probed_and_used_without(tmp_path: Path, where: str) -> None:
    open_store(tmp_path).close()

    class NoDirect(ScriptedFiles):
        direct = False

        def open(self, path: Path, flags: int) -> int:
            self.direct = bool(flags & os.O_DIRECT)
            if self.direct and where == "open":
                raise OSError(errno.EINVAL, "no")
            return super().open(path, flags)

        def _ask(self, operation: str) -> int | None:
            if self.direct and operation == where:
                raise OSError(errno.EINVAL, "no")
            return super()._ask(operation)

    tier = open_store(tmp_path, files=NoDirect())
    assert tier.measured.probes["o_direct"] == "false"
    (item,) = store(tier, "a")
    assert load(tier, [item]) == [content("a")]
    tier.close()


def test_case_35_a_slot_is_never_smaller_than_what_it_holds(tmp_path: Path) -> None:
    """Sizes are derived, not configured; a block of another size is refused before it is written."""
    for layout in (LAYOUT, ChunkLayout(3, 7, 16), ChunkLayout(1, 2, 4)):
        form = BlockFormat.of(layout, "xxh3")
        assert form.stride >= PAGE + layout.payload_bytes
        assert form.stride % PAGE == 0
    tier = open_store(tmp_path)
    data = content("a", 1, 2 * SIZE)
    item = TransferItem(tier.reserve(1), identity("a", size=2 * SIZE), Landing(page_aligned(data)))
    heard = Heard(1)
    tier.submit_write([item], FOREVER, heard)
    assert heard.wait().reasons() == ["SHORT_COPY"]
    refused(Reason.MANIFEST_INVALID, lambda: BlockFormat(SIZE, "a checksum with a long name"))
    refused(Reason.MANIFEST_INVALID, lambda: BlockFormat(0, "xxh3"))
    tier.close()


def test_case_31_and_3_what_is_read_is_bit_for_bit_what_was_stored(tmp_path: Path) -> None:
    tier = open_store(tmp_path, 64)
    names = [f"n{i}" for i in range(64)]
    items = store(tier, *names)
    assert load(tier, items[::-1]) == [content(name) for name in reversed(names)]
    tier.close()
    report = verify_store(tier.path)
    assert report.whole
    assert report.counts == {BlockVerdict.GOOD: 64}
    assert [block.key for block in report.blocks] == [key(name) for name in names]


def test_a_block_is_not_found_before_its_write_has_ended(tmp_path: Path) -> None:
    """Case 5: a key that is read while its write is in progress."""
    tier = open_store(tmp_path)
    item = write_item(tier, identity("a"), content("a"))
    assert load(tier, [item]) == ["NOT_VISIBLE"]
    tier.close()
