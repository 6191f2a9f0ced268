"""What caches leave on storage when they are removed from a node goes; nothing else is ever touched."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from kvtier_core.sharing import JOURNAL_SUFFIX
from kvtier_core.tiers.fileops import OsFileOps
from kvtier_core.tiers.nvme import sweep_orphans
from kvtier_core.tiers.nvme.datakeys import KEYS_SUFFIX, DataKeys
from kvtier_core.tiers.nvme.tier import store_path
from tests.unit.agent.agent_fakes import Bench


class Folder:
    """The agent's folder on its nvme tier."""

    def __init__(self, root: Path) -> None:
        self.path = root / "nvme" / "uid-a"

    def put(self, uid: str) -> list[str]:
        """A store and its journal."""
        store = store_path(self.path, uid)
        made = [store, store.with_suffix(JOURNAL_SUFFIX)]
        for path in made:
            path.write_bytes(b"rows")
        return [path.name for path in made]

    def names(self) -> list[str]:
        return sorted(path.name for path in self.path.iterdir())


def uid_of(bench: Bench) -> str:
    return bench.command().cache.uid


async def test_a_removed_cache_leaves_no_bytes_and_no_other_loses_any(tmp_path: Path) -> None:
    bench, folder = Bench(tmp_path), Folder(tmp_path)
    await bench.apply()
    ours = folder.put(uid_of(bench))
    other = folder.put("another cache")
    (folder.path / "notes.blocks").write_text("not ours")
    await bench.node.remove_cache(bench.command())
    assert not set(ours) & set(folder.names())
    assert {*other, "notes.blocks", "lock"} <= set(folder.names())
    await bench.close()


async def test_a_start_sweeps_what_an_earlier_one_could_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    bench, folder = Bench(tmp_path), Folder(tmp_path)
    await bench.apply()
    await bench.node.remove_cache(bench.command())
    await bench.close()
    left = folder.put(uid_of(bench))
    unknown = folder.put("of a state that was lost")
    again = Bench(tmp_path)
    await again.node.restore()
    assert not set(left) & set(folder.names())
    assert set(unknown) <= set(folder.names())
    said = " ".join(caplog.messages)
    assert f"removed: {left[0]}, {left[1]}" in said
    assert f"that this agent does not know: {unknown[0]}" in said
    await again.close()


@pytest.mark.parametrize("fault", [False, True], ids=["served", "not-restored"])
async def test_a_start_never_touches_the_store_of_a_cache_that_is_to_be_served(
    tmp_path: Path, fault: bool
) -> None:
    bench, folder = Bench(tmp_path), Folder(tmp_path)
    await bench.apply()
    await bench.close()
    ours = folder.put(uid_of(bench))
    again = Bench(tmp_path)
    if fault:
        for path in (tmp_path / "state" / "manifests").iterdir():
            path.write_bytes(b"damaged")
    await again.node.restore()
    assert bool(again.node.faults) is fault
    assert set(ours) <= set(folder.names())
    await again.close()


async def test_a_damaged_fence_leaves_its_store_alone(tmp_path: Path) -> None:
    bench, folder = Bench(tmp_path), Folder(tmp_path)
    await bench.apply()
    await bench.node.remove_cache(bench.command())
    await bench.close()
    ours = folder.put(uid_of(bench))
    (tmp_path / "state" / "fences" / f"{uid_of(bench)}.fence").write_bytes(b"damaged")
    again = Bench(tmp_path)
    await again.node.restore()
    assert set(ours) <= set(folder.names())
    await again.close()


@pytest.mark.parametrize("suffix", [".blocks", JOURNAL_SUFFIX])
async def test_what_somebody_holds_is_left_and_a_journal_outlives_its_store(
    tmp_path: Path, suffix: str
) -> None:
    bench, folder = Bench(tmp_path), Folder(tmp_path)
    await bench.apply()
    ours = folder.put(uid_of(bench))
    files = OsFileOps()
    held = files.open(store_path(folder.path, uid_of(bench)).with_suffix(suffix), os.O_RDWR)
    files.lock(held)
    await bench.node.remove_cache(bench.command())
    stays = set(ours) if suffix == ".blocks" else {ours[1]}
    assert set(ours) & set(folder.names()) == stays
    files.close(held)
    await bench.close()


class Mounted:
    """A key for everyone, from outside."""

    def current(self, namespace: bytes) -> str | None:
        return "outer"

    def key(self, reference: str) -> bytes | None:
        return bytes(32) if reference == "outer" else None


def keys_of(folder: Folder, uid: str) -> DataKeys:
    return DataKeys(store_path(folder.path, uid).with_suffix(KEYS_SUFFIX), Mounted(), OsFileOps())


def keyed(folder: Folder, uid: str) -> str:
    made = keys_of(folder, uid).current(bytes(32))
    assert made is not None
    return made


async def test_a_removed_caches_data_keys_are_overwritten_and_the_receipt_stays(tmp_path: Path) -> None:
    bench, folder = Bench(tmp_path), Folder(tmp_path)
    await bench.apply()
    folder.put(uid_of(bench))
    ours = keyed(folder, uid_of(bench))
    other = keyed(folder, "another cache")
    command = bench.command()
    _, receipts = await bench.node.remove_cache(command)
    assert [(name, receipt.keys) for name, receipt in receipts] == [("nvme", (ours,))]
    assert keys_of(folder, uid_of(bench)).key(ours) is None
    assert keys_of(folder, "another cache").key(other) is not None
    assert (await bench.node.remove_cache(command))[1] == receipts
    await bench.close()


async def test_a_start_erases_the_keys_that_a_crash_left(tmp_path: Path) -> None:
    bench, folder = Bench(tmp_path), Folder(tmp_path)
    await bench.apply()
    await bench.node.remove_cache(bench.command())
    await bench.close()
    folder.put(uid_of(bench))
    ours = keyed(folder, uid_of(bench))
    again = Bench(tmp_path)
    await again.node.restore()
    assert keys_of(folder, uid_of(bench)).key(ours) is None
    await again.close()


def test_a_journal_is_swept_only_when_asked_and_only_under_our_names(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.path.mkdir(parents=True)
    store, journal = folder.put("gone")
    (folder.path / "backup.deletions").write_text("not ours")
    assert sweep_orphans(folder.path, []).removed == (store,)
    assert sweep_orphans(folder.path, [], beside=(JOURNAL_SUFFIX,)).removed == (journal,)
    assert folder.names() == ["backup.deletions"]


async def test_a_folder_that_cannot_be_swept_fails_no_command(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench, folder = Bench(tmp_path), Folder(tmp_path)
    await bench.apply()
    folder.path.rename(tmp_path / "unmounted")
    await bench.node.remove_cache(bench.command())
    assert "cannot be swept" in " ".join(caplog.messages)
    await bench.close()
