"""Opening a store that another process left: epochs, locks, drops with their reasons, proofs, speed."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import random
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier_core.errors import CoreError, Reason
from kvtier_core.layout import ChunkLayout
from kvtier_core.tiers.base import BlockIdentity
from kvtier_core.tiers.block import HEADER_BYTES, finish
from kvtier_core.tiers.fileops import OsFileOps
from kvtier_core.tiers.nvme.recovery import DropReason, SuperblockState
from kvtier_core.tiers.nvme.superblock import SUPERBLOCK_BYTES
from kvtier_core.tiers.staging import PAGE, StagingBuffer
from kvtier_core.tiers.transfer import EraseItem, TransferItem
from tests.unit.core.nvme_files import MemoryFiles, ScriptedFiles, failing
from tests.unit.core.nvme_store import (
    FOREVER,
    LAYOUT,
    NAMESPACE,
    Heard,
    content,
    erase,
    identity,
    key,
    load,
    open_store,
    recovered_items,
    store,
    write_item,
)

FOLDER = Path("/store")


def refused(reason: Reason, call: Callable[[], object]) -> CoreError:
    with pytest.raises(CoreError) as error:
        call()
    assert error.value.reason is reason, error.value
    return error.value


def patch(files: MemoryFiles, at: int, data: bytes) -> None:
    """Overwrites bytes of the only file behind the store's back."""
    (node,) = files.nodes.values()
    for image in (node.now, node.durable):
        image[at : at + len(data)] = data


def flip(files: MemoryFiles, at: int, bit: int = 0) -> None:
    (node,) = files.nodes.values()
    patch(files, at, bytes([node.now[at] ^ (1 << bit)]))


def filled(*names: str, slots: int = 8, **options: object) -> tuple[MemoryFiles, list[TransferItem]]:
    files = MemoryFiles()
    tier = open_store(FOLDER, slots, files, **options)  # type: ignore[arg-type]
    items = store(tier, *names)
    tier.close()
    return files, items


def test_blocks_come_back_with_all_that_their_identity_says(tmp_path: Path) -> None:
    tier = open_store(tmp_path)
    assert tier.recovery.superblock is SuperblockState.NEW
    items = store(tier, "a", "b", "c")
    tier.close()
    again = open_store(tmp_path)
    report = again.recovery
    assert (report.superblock, report.kept, report.clean, report.epoch) == (
        SuperblockState.INTACT,
        3,
        True,
        2,
    )
    found = recovered_items(again)
    for item in items:
        kept = found[item.identity.chunk_digest]
        assert kept.identity == item.identity
        assert kept.ref == item.ref
        assert again.slots.owner(kept.ref) == item.identity.logical
    assert load(again, list(found.values())) == [content(name) for name in "abc"]
    assert again.used_bytes == 3 * again.slot_bytes
    again.close()


def test_a_recovered_block_is_read_under_the_new_process_own_logical_id(tmp_path: Path) -> None:
    """Logical ids do not outlive a process; the key does."""
    tier = open_store(tmp_path)
    (old,) = store(tier, "a")
    renamed = dataclasses.replace(old, identity=dataclasses.replace(old.identity, logical=99))
    assert load(tier, [renamed]) == ["IDENTITY_MISMATCH"]
    tier.close()
    again = open_store(tmp_path)
    assert load(again, [renamed]) == [content("a")]
    other = dataclasses.replace(old.identity, chunk_digest=key("b"))
    assert load(again, [dataclasses.replace(old, identity=other)]) == ["IDENTITY_MISMATCH"]
    again.close()


def test_generations_of_an_earlier_process_never_come_again(tmp_path: Path) -> None:
    tier = open_store(tmp_path, 2)
    (old,) = store(tier, "a")
    free = tier.reserve(1)
    tier.close()
    again = open_store(tmp_path, 2)
    (kept,) = recovered_items(again).values()
    assert again.reserve(1).generation > free.generation
    again.release(kept.ref)
    assert again.reserve(1).generation > old.ref.generation + 1
    again.close()


def test_an_inline_write_is_durable_as_well(tmp_path: Path) -> None:
    tier = open_store(tmp_path)
    buffer = StagingBuffer(LAYOUT)
    buffer.body[:] = content("a")
    ref = tier.reserve(1)
    assert tier.write(ref, buffer.payload, identity("a")) == LAYOUT.payload_bytes
    assert tier.commit.flushes == 1
    tier.validate(ref, identity("a"))
    tier.publish(ref)
    tier.close()
    again = open_store(tmp_path)
    assert load(again, list(recovered_items(again).values())) == [content("a")]
    again.close()


def _rewrite(files: MemoryFiles, offset: int, **fields: object) -> None:
    """A header that is intact and says something else."""
    (node,) = files.nodes.values()
    header = bytearray(node.now[offset : offset + HEADER_BYTES])
    for name, value in fields.items():
        at, form = _WHERE[name]
        struct.pack_into(form, header, at, value)
    finish(header)
    patch(files, offset, bytes(header))


_WHERE = {
    "version": (8, "<I"),
    "kind": (12, "8s"),
    "length": (80, "<Q"),
    "flags": (104, "<I"),
    "slot": (148, "<Q"),
    "store_epoch": (156, "<Q"),
    "group": (164, "<Q"),
    "layout": (180, "64s"),
}


DAMAGE: dict[str, tuple[Callable[[MemoryFiles, int], None], DropReason]] = {
    "a flipped bit in the header": (lambda files, at: flip(files, at + 40), DropReason.TORN_HEADER),
    "another version": (lambda files, at: _rewrite(files, at, version=7), DropReason.FOREIGN_VERSION),
    "another layout": (lambda files, at: _rewrite(files, at, layout=b"other/1"), DropReason.LAYOUT_CHANGED),
    "another length": (lambda files, at: _rewrite(files, at, length=8), DropReason.LAYOUT_CHANGED),
    "a block of another slot": (lambda files, at: _rewrite(files, at, slot=5), DropReason.MISPLACED),
    "not durable": (lambda files, at: _rewrite(files, at, flags=0), DropReason.VOLATILE),
    "erased": (lambda files, at: _rewrite(files, at, flags=4), DropReason.ERASED),
    "an unproven payload that is torn": (
        lambda files, at: (_rewrite(files, at, group=10**6), flip(files, at + PAGE + 9))[0],
        DropReason.TORN_PAYLOAD,
    ),
}


@pytest.mark.parametrize(("damage", "reason"), DAMAGE.values(), ids=DAMAGE.keys())
def test_each_drop_has_its_reason_and_the_slot_is_used_again(
    damage: Callable[[MemoryFiles, int], None], reason: DropReason
) -> None:
    files, items = filled("a", "b", "c")
    at = SUPERBLOCK_BYTES + items[1].ref.slot * (PAGE + PAGE)
    damage(files, at)
    tier = open_store(FOLDER, 8, files)
    assert tier.recovery.dropped == {reason: 1}
    assert [(drop.slot, drop.reason) for drop in tier.recovery.examples] == [(1, reason)]
    assert tier.recovery.kept == 2
    assert set(recovered_items(tier)) == {key("a"), key("c")}
    (new,) = store(tier, "d")
    assert new.ref.slot == 1
    tier.close()
    again = open_store(FOLDER, 8, files)
    assert set(recovered_items(again)) == {key("a"), key("c"), key("d")}
    again.close()


def test_an_unproven_payload_that_is_whole_is_kept() -> None:
    files, _ = filled("a", "b")
    _rewrite(files, SUPERBLOCK_BYTES, group=10**6)
    tier = open_store(FOLDER, 8, files)
    assert (tier.recovery.kept, tier.recovery.proven) == (2, 1)
    tier.close()


def test_only_payloads_whose_flush_is_not_on_record_are_read() -> None:
    """After a kill: the groups since the last record. After an orderly end: none."""
    files = MemoryFiles()
    tier = open_store(FOLDER, 64, files)
    for i in range(40):
        store(tier, f"n{i}")
    left = files.copied()
    tier.close()
    assert open_store(FOLDER, 64, files).recovery.proven == 0
    killed = open_store(FOLDER, 64, left).recovery
    assert killed.kept == 40
    assert 0 < killed.proven <= 17
    assert not killed.clean


def test_a_torn_block_that_was_dropped_stays_dropped_when_the_frontier_passes_it() -> None:
    files, _ = filled("a", "b")
    _rewrite(files, SUPERBLOCK_BYTES, group=3)
    flip(files, SUPERBLOCK_BYTES + PAGE + 1)
    tier = open_store(FOLDER, 64, files)
    assert tier.recovery.dropped == {DropReason.TORN_PAYLOAD: 1}
    pinned = tier.reserve(1)
    assert pinned.slot == 0, "so that nothing is written over it"
    for i in range(20):
        store(tier, f"n{i}")
    tier.close()
    again = open_store(FOLDER, 64, files)
    assert (again.recovery.kept, again.recovery.proven) == (21, 0)
    assert again.recovery.dropped == {DropReason.ERASED: 1}
    again.close()


def test_of_two_blocks_of_one_key_the_later_is_kept_and_a_deletion_reaches_both() -> None:
    files = MemoryFiles()
    tier = open_store(FOLDER, 8, files)
    store(tier, "a")
    (new,) = store(tier, "a", generation=2)
    tier.close()
    again = open_store(FOLDER, 8, files)
    assert again.recovery.dropped == {DropReason.SUPERSEDED: 1}
    (kept,) = recovered_items(again).values()
    assert kept.ref == new.ref
    assert erase(again, EraseItem(kept.ref, key("a"))) == [None]
    again.close()
    last = open_store(FOLDER, 8, files)
    assert last.recovery.kept == 0
    assert last.recovery.dropped == {DropReason.ERASED: 2}
    last.close()


def test_a_namespace_is_erased_with_what_evictions_left() -> None:
    files = MemoryFiles()
    tier = open_store(FOLDER, 8, files)
    items = store(tier, "a", "b", "c")
    tier.release(items[1].ref)
    live = [EraseItem(items[0].ref), EraseItem(items[2].ref)]
    assert erase(tier, *live, EraseItem(namespace=NAMESPACE)) == [None] * 3
    tier.close()
    again = open_store(FOLDER, 8, files)
    assert (again.recovery.kept, again.recovery.dropped) == (0, {DropReason.ERASED: 3})
    again.close()


@pytest.mark.parametrize("by", ["key", "namespace"])
@pytest.mark.parametrize("failures", [1, 2])
def test_what_lies_below_a_block_whose_write_failed_is_erased_too(by: str, failures: int) -> None:
    """An evicted block's slot was to be written again and was not: its header is still the old one."""
    memory = MemoryFiles()
    files = ScriptedFiles(real=memory)
    tier = open_store(FOLDER, 1, files)
    (old,) = store(tier, "a")
    tier.release(old.ref)
    elsewhere = hashlib.sha256(b"another tenant").digest()
    for attempt in range(failures):
        other = write_item(tier, identity(f"b{attempt}", namespace=elsewhere), content(f"b{attempt}"))
        files.script = failing("write", files.calls["write"], errno.EIO, sticky=True)
        heard = Heard(1)
        tier.submit_write([other], FOREVER, heard)
        assert heard.wait().reasons() == ["STORAGE_UNAVAILABLE"]
        files.script = lambda _operation, _number: None
        tier.release(other.ref)
    assert erase(tier, EraseItem(key=key("a")) if by == "key" else EraseItem(namespace=NAMESPACE)) == [None]
    again = open_store(FOLDER, 1, memory.copied())
    assert not recovered_items(again)
    again.close()
    tier.close()


def test_what_lay_below_a_block_that_was_written_is_not_erased_with_it() -> None:
    files = MemoryFiles()
    tier = open_store(FOLDER, 1, files)
    (old,) = store(tier, "a")
    tier.release(old.ref)
    store(tier, "b")
    assert erase(tier, EraseItem(key=key("a"))) == [None]
    again = open_store(FOLDER, 1, files.copied())
    assert set(recovered_items(again)) == {key("b")}
    again.close()
    tier.close()


def test_a_store_of_another_layout_is_begun_anew() -> None:
    files, _ = filled("a", "b")
    tier = open_store(FOLDER, 8, files, layout=ChunkLayout(2, 16, 32))
    assert tier.recovery.kept == 0
    assert tier.recovery.dropped[DropReason.LAYOUT_CHANGED] > 0
    assert tier.recovery.epoch == 2
    store(tier, "c")
    tier.close()
    again = open_store(FOLDER, 8, files, layout=ChunkLayout(2, 16, 32))
    assert set(recovered_items(again)) == {key("c")}
    again.close()


def test_a_smaller_budget_drops_what_lies_beyond_and_gives_the_space_back() -> None:
    files, _ = filled("a", "b", "c", "d")
    tier = open_store(FOLDER, 2, files)
    assert (tier.recovery.kept, tier.recovery.dropped) == (2, {DropReason.BEYOND_BUDGET: 2})
    (node,) = files.nodes.values()
    assert len(node.now) == SUPERBLOCK_BYTES + 2 * tier.slot_bytes
    tier.close()
    again = open_store(FOLDER, 8, files)
    assert set(recovered_items(again)) == {key("a"), key("b")}
    again.close()


@pytest.mark.parametrize("copy", [0, 1], ids=["first copy", "second copy"])
def test_one_lost_superblock_changes_nothing(copy: int) -> None:
    files, _ = filled("a", "b")
    flip(files, copy * PAGE + 20)
    tier = open_store(FOLDER, 8, files)
    assert tier.recovery.superblock is SuperblockState.INTACT
    assert set(recovered_items(tier)) == {key("a"), key("b")}
    tier.close()


def test_with_both_superblocks_lost_every_payload_is_read_and_the_epoch_still_grows() -> None:
    files, items = filled("a", "b", "c")
    for copy in (0, 1):
        flip(files, copy * PAGE + 20)
    flip(files, SUPERBLOCK_BYTES + items[1].ref.slot * 2 * PAGE + PAGE)
    tier = open_store(FOLDER, 8, files)
    report = tier.recovery
    assert (report.superblock, report.kept, report.proven) == (SuperblockState.REBUILT, 2, 3)
    assert report.dropped == {DropReason.TORN_PAYLOAD: 1}
    assert report.epoch > 1
    tier.close()


def test_a_header_that_cannot_be_read_is_one_drop() -> None:
    files, _ = filled("a", "b", "c")
    scripted = ScriptedFiles(real=files)
    base = SUPERBLOCK_BYTES

    def read(fd: int, buffers: object, offset: int) -> int:
        size = sum(map(len, buffers))  # type: ignore[call-overload]
        if offset <= base + 2 * PAGE < offset + size:
            raise OSError(errno.EIO, "unreadable")
        return files.read(fd, buffers, offset)  # type: ignore[arg-type]

    scripted.read = read  # type: ignore[method-assign, assignment]
    tier = open_store(FOLDER, 8, scripted)
    assert (tier.recovery.kept, tier.recovery.dropped) == (2, {DropReason.UNREADABLE: 1})
    tier.close()


def test_a_second_opener_is_refused_and_a_takeover_is_noticed(tmp_path: Path) -> None:
    """Where locks do not work (some network filesystems) the epoch still fences the first opener."""
    first = open_store(tmp_path)
    error = refused(Reason.STORAGE_LOCKED, lambda: open_store(tmp_path))
    assert "belongs to another process" in error.message

    class Unlocked(OsFileOps):
        def lock(self, fd: int) -> None: ...

    second = open_store(tmp_path, files=Unlocked())
    assert second.recovery.epoch == first.recovery.epoch + 1
    reasons: set[str] = set()
    for i in range(40):
        try:
            tier_items = store(first, f"n{i}")
        except AssertionError:
            reasons.add(first.condition.split(":")[0])
            break
        first.release(tier_items[0].ref)
    assert reasons == {"STORAGE_LOCKED"}
    second.close()
    first.close()


@pytest.mark.parametrize("operation", ["read", "write", "sync"])
def test_a_disk_that_fails_while_it_is_opened_is_a_typed_refusal(tmp_path: Path, operation: str) -> None:
    files = ScriptedFiles(failing(operation, 0, errno.EIO))
    open_store(tmp_path).close()
    error = refused(Reason.STORAGE_UNAVAILABLE, lambda: open_store(tmp_path, files=files, o_direct=False))
    assert "EIO" in error.message
    open_store(tmp_path).close()


def test_ten_thousand_blocks_are_found_in_a_second(tmp_path: Path) -> None:
    """The goal is 1 s per 10,000, of which the bench gives the figure. Half of them here, at 10 times the
    goal and in this process's own time, so that a busy machine does not fail it."""
    count = 5000
    tier = open_store(tmp_path, count)
    items = []
    names = [f"n{i}" for i in range(count)]
    for at in range(0, count, 1000):
        items += store(tier, *names[at : at + 1000])
    tier.close()
    files = ScriptedFiles()
    started = time.process_time()
    again = open_store(tmp_path, count, files, clock=time.monotonic)
    assert time.process_time() - started < 5
    assert again.recovery.kept == count
    assert files.calls["read"] < 50, "headers of small blocks are read in long runs"
    seen = random.Random(1).sample(list(again.recovered()), 20)
    assert all(isinstance(block.identity, BlockIdentity) for block in seen)
    again.close()
