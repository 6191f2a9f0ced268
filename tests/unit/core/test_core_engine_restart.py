"""What an engine finds again: shared blocks of a tier that outlives its process, never a session's row."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from kvtier_core.blockstore.outcomes import PutOutcome
from kvtier_core.engine import CacheEngine
from kvtier_core.errors import CoreError, Reason
from kvtier_core.tiers.nvme.crypto import MemoryKeys
from kvtier_crds.manifest import Medium, TierRole
from tests.unit.core.blockpump import (
    LATER,
    NAMESPACE,
    brought,
    delete,
    key,
    payload,
    put,
    stored,
    until,
)
from tests.unit.core.builders import (
    BLOCK,
    CHUNK,
    LAYERS,
    Driver,
    Fault,
    FaultyFiles,
    Rows,
    TierBudget,
    cpu,
    engine,
    gpu,
    keeping,
    nvme,
)

TIERS = [gpu(LAYERS), cpu(4), nvme(32)]
NUMBERS = list(range(10))


def fill(built: CacheEngine) -> set[int]:
    """Stores blocks, of which all but those in memory end on flash; returns which."""
    assert {each.outcome for each in put(built, NUMBERS)} == {PutOutcome.STORED}
    until(built, lambda: not built.blocks.store.moves.open_moves())
    kept = on_flash(built)
    assert kept
    return kept


def on_flash(built: CacheEngine, name: str = "flash") -> set[int]:
    explain = built.blocks.store.explain
    return {
        number
        for number in NUMBERS
        if any(copy.tier == name and copy.counts for copy in explain(key(number)).replicas)
    }


@pytest.mark.parametrize("persistence", ["node", "durable"])
def test_a_restart_keeps_blocks_and_no_rows(tmp_path: Path, persistence: str) -> None:
    with engine(tmp_path, TIERS, capabilities=keeping(persistence)) as built:
        fill(built)
        driver = Driver.open(built, Rows.random(4 * CHUNK))
        driver.forward(3 * CHUNK + 1)
        kept = on_flash(built)
        assert kept == set(NUMBERS)
    with engine(tmp_path, TIERS, capabilities=keeping(persistence)) as built:
        (report,) = built.stats().recovered
        assert report.kept == len(kept)
        assert report.clean
        assert report.dropped.get("VOLATILE", 0) > 0
        assert report.message.startswith(f"tier flash: {len(kept)} blocks of earlier processes are served")
        assert "VOLATILE" in report.message
        assert stored(built, NUMBERS) == kept
        assert built.stats().chunks == 0
        assert built.stats().tiers[2].bytes.blocks == len(kept) * built.blocks.store.parts.tiers[2].slot_bytes
        for number in sorted(kept):
            assert brought(built, number) == [payload(built, number)]
        Driver.open(built, Rows.random(4)).forward(4)
        built.blocks.store.check()


def test_a_tier_of_the_process_is_empty_after_a_restart(tmp_path: Path) -> None:
    with engine(tmp_path, TIERS) as built:
        assert fill(built)
        assert built.stats().recovered == ()
    assert list(tmp_path.iterdir()) == []
    with engine(tmp_path, TIERS) as built:
        assert stored(built, NUMBERS) == set()


def test_what_was_deleted_stays_away(tmp_path: Path) -> None:
    with engine(tmp_path, TIERS, capabilities=keeping()) as built:
        kept = sorted(fill(built))
        delete(built, kept[:2])
    with engine(tmp_path, TIERS, capabilities=keeping()) as built:
        assert stored(built, NUMBERS) == set(kept[2:])
        assert put(built, kept[:1])[0].outcome is PutOutcome.STORED


def test_a_deletion_that_a_crash_cut_short_goes_on(tmp_path: Path) -> None:
    """The order is durable and the disk does not erase: the next process finds nothing, and finishes it."""
    files = FaultyFiles()
    with engine(tmp_path / "a", TIERS, capabilities=keeping(), files=files) as built:
        kept = sorted(fill(built))
        files.faults = [Fault("write", files.calls["write"] + 1, errno.EIO, sticky=True)]
        (order,) = built.blocks.store.delete([key(kept[0])])
        until(built, lambda: order.error is not None)
        copy_files(tmp_path / "a", tmp_path / "b")
    with engine(tmp_path / "b", TIERS, capabilities=keeping()) as built:
        assert built.stats().recovered[0].kept == len(kept)
        assert stored(built, NUMBERS) == set(kept[1:])
        until(built, lambda: not built.blocks.store.deletions.open())
        assert put(built, kept[:1])[0].outcome is PutOutcome.STORED


def test_a_pin_that_outlives_its_engine_is_told_so(tmp_path: Path) -> None:
    with engine(tmp_path, TIERS) as built:
        put(built, [1])
        pin = built.blocks.store.pin([key(1)], NAMESPACE, LATER)
        assert bytes(pin.body(0)) == payload(built, 1)
    with pytest.raises(CoreError) as refused:
        pin.body(0)
    assert refused.value.reason is Reason.STORAGE_UNAVAILABLE
    pin.close()
    with pytest.raises(CoreError) as refused:
        pin.body(0)
    assert refused.value.reason is Reason.LEASE_EXPIRED


def copy_files(source: Path, target: Path) -> None:
    """The files as they are now: what a crash leaves when the device had taken all writes."""
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())


def flash_file(folder: Path) -> Path:
    (found,) = folder.glob("*.blocks")
    return found


def test_a_crash_keeps_what_was_on_disk(tmp_path: Path) -> None:
    """No end was recorded: what was flushed is served all the same."""
    with engine(tmp_path / "a", TIERS, capabilities=keeping()) as built:
        kept = fill(built)
        copy_files(tmp_path / "a", tmp_path / "b")
    with engine(tmp_path / "b", TIERS, capabilities=keeping()) as built:
        assert not built.stats().recovered[0].clean
        assert stored(built, NUMBERS) == kept
        for number in sorted(kept):
            assert brought(built, number) == [payload(built, number)]


def test_two_engines_never_share_a_file(tmp_path: Path) -> None:
    with engine(tmp_path, TIERS, capabilities=keeping()) as built:
        fill(built)
        with pytest.raises(CoreError) as refused, engine(tmp_path, TIERS, capabilities=keeping()):
            raise AssertionError("a second engine opened the same store")
        assert refused.value.reason in (Reason.STORAGE_LOCKED, Reason.STORAGE_UNAVAILABLE)
        assert stored(built, NUMBERS) == set(NUMBERS)


def test_rows_take_slots_of_recovered_blocks_that_may_be_lost(tmp_path: Path) -> None:
    """A smaller cache is opened over what a larger one kept: its sessions are served first."""
    tiers = [cpu(2 * LAYERS), nvme(8)]
    with engine(tmp_path, tiers, capabilities=keeping()) as built:
        for number in range(12):
            built.blocks.store.put(
                [key(number)],
                [payload(built, number)],
                namespace=NAMESPACE,
                deadline=LATER,
                cost=0.5,
                droppable=True,
            )
            until(built, lambda: not built.blocks.store.moves.open_moves())
    with engine(tmp_path, tiers, capabilities=keeping()) as built:
        assert built.stats().recovered[0].kept >= 6
        driver = Driver.open(built, Rows.random(6 * CHUNK))
        driver.forward(5 * CHUNK + 1)
        assert built.stats().tiers[1].bytes.rows > 0
        built.blocks.store.check()


def test_a_block_that_two_tiers_kept_is_given_back_once(tmp_path: Path) -> None:
    """The faster tier's copy is served, and the other's slot is free."""
    slow = TierBudget("slow", Medium.NVME, 32, TierRole.BACKING)
    kept = keeping() | {"slow": keeping()["flash"]}
    folders = {"flash": tmp_path / "flash", "slow": tmp_path / "slow"}
    on_disk: dict[str, set[int]] = {}
    for tier in (nvme(32), slow):
        with engine(tmp_path, [cpu(2), tier], capabilities=kept, folders=folders) as built:
            put(built, NUMBERS)
            until(built, lambda: not built.blocks.store.moves.open_moves())
            on_disk[tier.name] = on_flash(built, tier.name)
    both = on_disk["flash"] | on_disk["slow"]
    with engine(tmp_path, [cpu(2), nvme(32), slow], capabilities=kept, folders=folders) as built:
        assert [each.kept for each in built.stats().recovered] == [len(found) for found in on_disk.values()]
        assert stored(built, NUMBERS) == both
        assert [tier.bytes.blocks // BLOCK for tier in built.stats().tiers] == [
            0,
            len(on_disk["flash"]),
            len(on_disk["slow"] - on_disk["flash"]),
        ]
        for number in sorted(both):
            assert brought(built, number) == [payload(built, number)]
        built.blocks.store.check()


def test_blocks_at_rest_are_encrypted_under_the_given_keys(tmp_path: Path) -> None:
    keys = MemoryKeys(os.urandom)
    with engine(tmp_path, TIERS, capabilities=keeping(), keys=keys) as built:
        kept = fill(built)
        plain = [payload(built, number) for number in kept]
    data = flash_file(tmp_path).read_bytes()
    assert not any(body[:64] in data for body in plain)
    with engine(tmp_path, TIERS, capabilities=keeping(), keys=keys) as built:
        number = min(kept)
        assert brought(built, number) == [payload(built, number)]
    keys.destroy(NAMESPACE)
    with engine(tmp_path, TIERS, capabilities=keeping(), keys=keys) as built:
        assert stored(built, NUMBERS) == set()
        assert built.stats().recovered[0].dropped["KEY_DESTROYED"] == len(kept)


def test_a_folder_that_takes_no_journal_refuses_the_cache_and_leaves_nothing_locked(tmp_path: Path) -> None:
    (tmp_path / "probe").mkdir()
    with engine(tmp_path / "probe", TIERS, capabilities=keeping()):
        name = flash_file(tmp_path / "probe").stem
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / f"{name}.deletions").mkdir()
    with pytest.raises(CoreError) as refused, engine(tmp_path / "a", TIERS, capabilities=keeping()):
        raise AssertionError("a cache opened without its journal")
    assert refused.value.reason is Reason.STORAGE_UNAVAILABLE
    (tmp_path / "a" / f"{name}.deletions").rmdir()
    with engine(tmp_path / "a", TIERS, capabilities=keeping(), files=FaultyFiles()) as built:
        assert stored(built, NUMBERS) == set()
