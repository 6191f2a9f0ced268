"""Data keys of a store: its blocks open under them, under the outer key alone never, and after an erasure not
at all."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from kvtier_core.errors import CoreError, Reason
from kvtier_core.tiers.fileops import FileOps, OsFileOps
from kvtier_core.tiers.nvme import NvmeTier, verify_store
from kvtier_core.tiers.nvme.crypto import KEY_BYTES
from kvtier_core.tiers.nvme.datakeys import (
    KEYS_SUFFIX,
    DataKeys,
    EphemeralKeys,
    KeysErased,
    erase_data_keys,
)
from kvtier_core.tiers.nvme.recovery import DropReason
from kvtier_core.tiers.nvme.tier import store_path
from kvtier_core.tiers.nvme.verify import BlockVerdict
from tests.unit.core.nvme_files import KillingFiles, MemoryFiles, ScriptedFiles, failing
from tests.unit.core.nvme_store import NAMESPACE, content, key, load, open_store, recovered_items, store

STORE = Path("/store")


class Mounted:
    """A Secret's keys: `names` by reference, `chosen` for new blocks."""

    def __init__(self, **names: bytes) -> None:
        self.names = names or {"one": bytes(range(KEY_BYTES))}
        self.chosen: str | None = next(iter(self.names))

    def current(self, namespace: bytes) -> str | None:
        return self.chosen

    def key(self, reference: str) -> bytes | None:
        return self.names.get(reference)


def path_of(folder: Path) -> Path:
    return store_path(folder, "cache").with_suffix(KEYS_SUFFIX)


def opened(folder: Path, outer: Mounted, files: FileOps | None = None) -> NvmeTier:
    files = files or OsFileOps()
    return open_store(folder, 8, files, keys=DataKeys(path_of(folder), outer, files), threads=1)


def served(tier: NvmeTier) -> dict[bytes, bytes | str]:
    found = recovered_items(tier)
    return dict(zip(found, load(tier, list(found.values())), strict=True)) if found else {}


def test_blocks_are_written_under_a_key_of_the_stores_own_and_come_back(tmp_path: Path) -> None:
    outer = Mounted()
    tier = opened(tmp_path, outer)
    store(tier, "a", "b")
    tier.close()
    report = verify_store(tier.path, DataKeys(path_of(tmp_path), outer, OsFileOps()))
    assert report.counts == {BlockVerdict.GOOD: 2}
    assert len({block.key_reference for block in report.blocks}) == 1
    assert report.blocks[0].key_reference.startswith("data:")
    assert outer.names["one"] not in path_of(tmp_path).read_bytes()
    again = opened(tmp_path, outer)
    assert served(again) == {key("a"): content("a"), key("b"): content("b")}
    store(again, "c")
    again.close()
    kinds = {block.key_reference for block in verify_store(tier.path).blocks}
    assert len(kinds) == 1, "a restart makes no new key"


def test_the_outer_key_alone_opens_nothing(tmp_path: Path) -> None:
    outer = Mounted()
    tier = opened(tmp_path, outer)
    store(tier, "a")
    tier.close()
    assert verify_store(tier.path, outer).counts == {BlockVerdict.KEY_DESTROYED: 1}


def test_a_wrapped_key_opens_in_its_own_store_only(tmp_path: Path) -> None:
    outer = Mounted()
    tier = opened(tmp_path / "one", outer)
    store(tier, "a")
    tier.close()
    other = store_path(tmp_path, "another").with_suffix(KEYS_SUFFIX)
    other.write_bytes(path_of(tmp_path / "one").read_bytes())
    (reference,) = {block.key_reference for block in verify_store(tier.path).blocks}
    with pytest.raises(CoreError) as refused:
        DataKeys(other, outer, OsFileOps()).key(reference)
    assert refused.value.reason is Reason.STORAGE_UNAVAILABLE


def test_a_rotation_brings_a_new_data_key_and_an_outer_key_that_goes_takes_its_own(tmp_path: Path) -> None:
    outer = Mounted(one=bytes(KEY_BYTES), two=bytes([2]) * KEY_BYTES)
    tier = opened(tmp_path, outer)
    store(tier, "a")
    outer.chosen = "two"
    store(tier, "b")
    tier.close()
    again = opened(tmp_path, outer)
    assert served(again) == {key("a"): content("a"), key("b"): content("b")}
    again.close()
    del outer.names["one"]
    last = opened(tmp_path, outer)
    assert last.recovery.dropped == {DropReason.KEY_DESTROYED: 1}
    assert served(last) == {key("b"): content("b")}
    last.close()


def test_what_was_written_under_an_outer_key_before_stays_readable(tmp_path: Path) -> None:
    outer = Mounted()
    tier = open_store(tmp_path, 8, keys=outer)
    store(tier, "old")
    tier.close()
    again = opened(tmp_path, outer)
    assert served(again) == {key("old"): content("old")}
    again.close()


def test_after_an_erasure_nothing_opens_though_blocks_and_outer_key_are_there(tmp_path: Path) -> None:
    outer = Mounted()
    tier = opened(tmp_path, outer)
    store(tier, "a", "b")
    tier.close()
    wrapped = path_of(tmp_path).read_bytes()
    image = tier.path.read_bytes()
    (reference,) = {block.key_reference for block in verify_store(tier.path).blocks}
    receipt = erase_data_keys(path_of(tmp_path), OsFileOps())
    assert receipt == KeysErased(path_of(tmp_path).name, (reference,))
    assert tier.path.read_bytes() == image, "not a block was touched"
    left = path_of(tmp_path).read_bytes()
    assert not any(wrapped[at : at + 16] in left for at in range(60, len(wrapped) - 16, 16))
    keys = DataKeys(path_of(tmp_path), outer, OsFileOps())
    assert (keys.key(reference), keys.current(NAMESPACE)) == (None, None)
    assert verify_store(tier.path, keys).counts == {BlockVerdict.KEY_DESTROYED: 2}
    again = opened(tmp_path, outer)
    assert (again.recovery.kept, again.recovery.dropped) == (0, {DropReason.KEY_DESTROYED: 2})
    assert served(again) == {}
    again.close()
    assert erase_data_keys(path_of(tmp_path), OsFileOps()) == receipt, "the receipt is the same for ever"


def test_where_there_never_were_keys_there_is_no_receipt(tmp_path: Path) -> None:
    assert erase_data_keys(path_of(tmp_path), OsFileOps()) is None
    assert erase_data_keys(path_of(tmp_path / "none"), OsFileOps()) is None


@pytest.mark.parametrize("operation", ["write", "sync"])
def test_an_erasure_that_fails_says_so_and_is_repeated(operation: str) -> None:
    memory, outer = MemoryFiles(), Mounted()
    tier = opened(STORE, outer, memory)
    store(tier, "a")
    tier.close()
    files = ScriptedFiles(failing(operation, 0, 5), memory)
    with pytest.raises(CoreError) as refused:
        erase_data_keys(path_of(STORE), files)
    assert refused.value.reason is Reason.STORAGE_UNAVAILABLE
    receipt = erase_data_keys(path_of(STORE), files)
    assert receipt is not None and len(receipt.keys) == 1
    assert opened(STORE, outer, memory.copied()).recovery.kept == 0


def test_a_torn_last_key_is_written_over_and_a_damaged_one_is_not_given_up(tmp_path: Path) -> None:
    outer = Mounted(one=bytes(KEY_BYTES), two=bytes([2]) * KEY_BYTES)
    keys = DataKeys(path_of(tmp_path), outer, OsFileOps())
    first = keys.current(NAMESPACE)
    assert first is not None
    size = path_of(tmp_path).stat().st_size
    outer.chosen = "two"
    keys.current(NAMESPACE)
    whole = path_of(tmp_path).read_bytes()
    path_of(tmp_path).write_bytes(whole[: size + 30])
    again = DataKeys(path_of(tmp_path), outer, OsFileOps())
    assert again.key(first) == keys.key(first)
    second = again.current(NAMESPACE)
    assert second is not None and second != first
    assert DataKeys(path_of(tmp_path), outer, OsFileOps()).key(second) == again.key(second)
    damaged = bytearray(whole)
    damaged[60] ^= 1
    path_of(tmp_path).write_bytes(damaged)
    with pytest.raises(CoreError) as refused:
        DataKeys(path_of(tmp_path), outer, OsFileOps()).key(first)
    assert refused.value.reason is Reason.STORAGE_UNAVAILABLE


@pytest.mark.parametrize("operation", ["write", "sync", "sync_folder"])
def test_a_key_is_used_only_when_its_files_name_is_durable_too(tmp_path: Path, operation: str) -> None:
    files = ScriptedFiles(failing(operation, 0, 28))
    keys = DataKeys(path_of(tmp_path), Mounted(), files)
    with pytest.raises(CoreError) as refused:
        keys.current(NAMESPACE)
    assert refused.value.reason is Reason.STORAGE_UNAVAILABLE
    before = files.calls.get("sync_folder", 0)
    assert keys.current(NAMESPACE) is not None
    assert files.calls["sync_folder"] == before + 1


def test_no_more_keys_are_made_than_an_opening_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {str(number): bytes([number]) * KEY_BYTES for number in range(8)}
    outer = Mounted(**names)
    monkeypatch.setattr("kvtier_core.tiers.nvme.datakeys._MOST_BYTES", 900)
    keys = DataKeys(path_of(tmp_path), outer, OsFileOps())
    made: list[str] = []
    for outer.chosen in ("0", "1", "2"):
        made.append(str(keys.current(NAMESPACE)))
    outer.chosen = "3"
    with pytest.raises(CoreError) as refused:
        keys.current(NAMESPACE)
    assert refused.value.reason is Reason.STORAGE_UNAVAILABLE
    assert all(DataKeys(path_of(tmp_path), outer, OsFileOps()).key(name) for name in made)
    receipt = erase_data_keys(path_of(tmp_path), OsFileOps())
    assert receipt is not None and receipt.keys == tuple(made)


def test_no_key_is_made_where_the_outer_one_is_gone(tmp_path: Path) -> None:
    outer = Mounted()
    outer.chosen = None
    assert DataKeys(path_of(tmp_path), outer, OsFileOps()).current(NAMESPACE) is None
    assert not path_of(tmp_path).exists()


def test_a_store_that_ends_with_its_process_leaves_nothing_that_any_key_opens(tmp_path: Path) -> None:
    outer = Mounted()
    keys = EphemeralKeys(outer)
    tier = open_store(tmp_path, 8, persistence="process", keys=keys)
    items = store(tier, "a", durable=False)
    assert load(tier, items) == [content("a")]
    image = tier.path.read_bytes()
    assert content("a")[:32] not in image and b"data:" in image
    reference = keys.current(NAMESPACE)
    assert reference is not None and outer.key(reference) is None
    assert EphemeralKeys(outer).key(reference) is None
    outer.names.clear()
    tier.forget_keys()
    assert load(tier, items) == ["KEY_UNAVAILABLE"]
    tier.close()


# Crashes.


def test_a_crash_at_any_point_of_the_first_write_loses_no_acknowledged_block() -> None:
    files, outer = MemoryFiles(), Mounted()
    acknowledged: list[int] = []
    points: list[MemoryFiles] = []

    def run(files: MemoryFiles) -> None:
        tier = opened(STORE, outer, files)
        store(tier, "a")
        acknowledged.append(len(points))
        tier.close()

    chance = random.Random(3)

    def watch(_: str) -> None:
        points.append(files.after_power_loss(chance))

    files.watch = watch
    run(files)
    points.append(files.after_power_loss(chance))
    assert len(points) > 10 and acknowledged
    for at, left in enumerate(points):
        tier = opened(STORE, outer, left)
        found = served(tier)
        assert found in ({}, {key("a"): content("a")})
        assert found or at < acknowledged[0], "an acknowledged block is lost"
        tier.close()


def test_a_crash_at_any_point_of_an_erasure_leaves_one_that_is_whole_when_repeated() -> None:
    files, outer = MemoryFiles(), Mounted()
    tier = opened(STORE, outer, files)
    store(tier, "a")
    tier.close()
    points: list[MemoryFiles] = []
    chance = random.Random(3)
    files.watch = lambda _: points.extend((files.copied(), files.after_power_loss(chance)))
    erase_data_keys(path_of(STORE), files)
    files.watch = lambda _: None
    assert len(points) >= 4
    for left in points:
        assert served(opened(STORE, outer, left.copied())) in ({}, {key("a"): content("a")})
        assert erase_data_keys(path_of(STORE), left) is not None
        assert served(opened(STORE, outer, left)) == {}
    # What was acknowledged holds whatever the power does next.
    for seed in range(5):
        assert served(opened(STORE, outer, files.after_power_loss(random.Random(seed)))) == {}


def test_sigkill_at_every_change_of_an_erasure(tmp_path: Path) -> None:
    outer = Mounted()
    for how in ("before", "half"):
        at, killed = 0, True
        while killed:
            folder = tmp_path / how / str(at)
            tier = opened(folder, outer)
            store(tier, "a")
            tier.close()
            child = os.fork()
            if child == 0:
                try:
                    erase_data_keys(path_of(folder), KillingFiles(at, how))
                finally:
                    os._exit(0)
            _, status = os.waitpid(child, 0)
            killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
            again = opened(folder, outer)
            found = served(again)
            again.close()
            assert found in ({}, {key("a"): content("a")})
            assert killed or found == {}
            assert erase_data_keys(path_of(folder), OsFileOps()) is not None
            last = opened(folder, outer)
            assert served(last) == {}
            last.close()
            at += 1
        assert at > 1
