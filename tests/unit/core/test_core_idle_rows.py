"""Rows of a session that nobody uses make way: to the slowest tier that has room, and with the same answers
afterwards."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvtier_core.edits.requests import ForkRequest
from kvtier_core.engine import CacheEngine
from kvtier_core.errors import CoreError, Reason
from kvtier_core.placement import MOVE_SECONDS
from kvtier_core.tiers.base import SlotState
from kvtier_core.tiers.nvme import NvmeTier
from tests.unit.core.builders import CHUNK, LAYERS, Driver, FakeClock, Rows, cpu, engine, nvme
from tests.unit.core.nvme_files import Gate, ScriptedFiles

CHUNKS = 3
ROWS = Rows.random(CHUNKS * CHUNK + 12, seed=8)


def filled(built: CacheEngine) -> Driver:
    driver = Driver.open(built, ROWS)
    driver.forward(CHUNKS * CHUNK)
    driver.forward(4)
    return driver


def moved_down(built: CacheEngine, driver: Driver, most: int = 64) -> int:
    return built.demote_session(driver.handle.session_id, driver.handle.generation, most)


def slots_used(built: CacheEngine) -> list[int]:
    return [tier.slots.used for tier in built.blocks.store.parts.tiers]


def test_rows_move_to_the_slowest_tier_and_answer_the_same_bits(tmp_path: Path) -> None:
    tiers = [cpu(24), nvme(32)]
    with engine(tmp_path / "a", tiers) as built:
        want = filled(built).forward(4)
    with engine(tmp_path / "b", tiers) as built:
        driver = filled(built)
        assert slots_used(built) == [(CHUNKS + 1) * LAYERS, 0]
        assert moved_down(built, driver, 4) == 4
        assert moved_down(built, driver) == CHUNKS * LAYERS - 4
        assert slots_used(built) == [LAYERS, CHUNKS * LAYERS], "open chunks stay"
        assert moved_down(built, driver) == 0
        assert torch.equal(driver.forward(4), want)
        driver.close()
        assert slots_used(built) == [0, 0]


def test_a_device_that_refuses_is_asked_no_more_often_than_rows_were_to_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(tmp_path, [cpu(24), nvme(32)]) as built:
        driver = filled(built)
        asked = []

        def refuse(line: int, lower: int, deadline: float | None) -> None:
            asked.append(line)
            raise CoreError(Reason.STORAGE_UNAVAILABLE, "the device is gone")

        with monkeypatch.context() as patched:
            patched.setattr(built._store.placement, "_demote", refuse)
            assert moved_down(built, driver, 2) == 0
        assert len(asked) == 2 < CHUNKS * LAYERS
        assert moved_down(built, driver, 2) == 2
        driver.close()


def test_no_more_moves_than_there_is_room_for(tmp_path: Path) -> None:
    with engine(tmp_path, [cpu(24), nvme(4)]) as built:
        first, second = filled(built), filled(built)
        used = slots_used(built)
        assert moved_down(built, first) == 4 - used[1]
        assert moved_down(built, second) == 0, "nobody else's rows are moved for it"
        first.close()
        second.close()


def test_rows_that_a_fork_shares_stay_with_it(tmp_path: Path) -> None:
    with engine(tmp_path, [cpu(24), nvme(32)]) as built:
        driver = filled(built)
        handle = built.fork_session(ForkRequest(driver.handle.session_id, driver.handle.generation))
        assert moved_down(built, driver) == 0
        built.close_session(handle.session_id, handle.generation)
        assert moved_down(built, driver) == CHUNKS * LAYERS
        driver.close()


def test_only_a_session_that_is_there_is_moved(tmp_path: Path) -> None:
    with engine(tmp_path, [cpu(24), nvme(32)]) as built:
        driver = filled(built)
        with pytest.raises(CoreError) as stale:
            built.demote_session(driver.handle.session_id, driver.handle.generation + 1, 4)
        assert stale.value.reason is Reason.GENERATION_STALE
        driver.close()
        with pytest.raises(CoreError) as gone:
            moved_down(built, driver)
        assert gone.value.reason is Reason.SESSION_UNKNOWN


def test_a_move_that_hangs_ends_at_its_deadline_and_its_slot_is_nobodys_until_the_bytes_have_come(
    tmp_path: Path,
) -> None:
    clock, files = FakeClock(), ScriptedFiles()
    with engine(tmp_path, [cpu(24), nvme(32)], files=files, clock=clock) as built:
        driver = filled(built)
        placement = built._store.placement
        disk = placement._tiers[1]
        assert isinstance(disk, NvmeTier)
        used = slots_used(built)
        files.calls.clear()
        gate = files.script = Gate("write", 0)
        moved: list[int] = []
        mover = threading.Thread(target=lambda: moved.append(moved_down(built, driver)))
        mover.start()
        assert gate.entered.acquire(timeout=60)
        clock.now += MOVE_SECONDS + 1
        disk.expire()
        mover.join(60)
        assert moved == [0], "one that is late is the last"
        assert built._store.transactions.counts["demote", "TRANSFER_TIMEOUT"] == 0, "it is not over yet"
        assert disk.slots.count(SlotState.QUARANTINED) == 1
        assert slots_used(built) == [used[0], used[1] + 1], "the rows are where they were"
        gate.opened.set()
        settled(lambda: not disk.hung_threads)
        assert moved_down(built, driver) == CHUNKS * LAYERS
        assert built._store.transactions.counts["demote", "TRANSFER_TIMEOUT"] == 1
        assert disk.slots.count(SlotState.QUARANTINED) == 0
        driver.close()


@pytest.mark.parametrize("operation", ["write", "read"])
def test_rows_that_cannot_move_in_time_are_refused_by_that_name(tmp_path: Path, operation: str) -> None:
    """A frame whose rows need the room hears TRANSFER_TIMEOUT, not silence; later it is served."""
    clock, files = FakeClock(), ScriptedFiles()
    with engine(tmp_path, [cpu(CHUNKS * LAYERS), nvme(32)], files=files, clock=clock) as built:
        driver = Driver.open(built, ROWS)
        driver.forward(2 * CHUNK)
        disk = built._store.placement._tiers[1]
        assert isinstance(disk, NvmeTier)
        files.calls.clear()
        gate = files.script = Gate(operation)
        refused: list[CoreError] = []

        def make_room() -> None:
            try:
                built._store.placement.make_room(0, 3)
            except CoreError as error:
                refused.append(error)

        mover = threading.Thread(target=make_room)
        mover.start()
        assert gate.entered.acquire(timeout=60)
        clock.now += MOVE_SECONDS + 1
        disk.expire()
        mover.join(60)
        (error,) = refused
        assert error.reason is Reason.TRANSFER_TIMEOUT
        gate.opened.set()
        settled(lambda: not disk.hung_threads)
        built._store.placement.make_room(0, 3)
        assert torch.isfinite(driver.forward(4)).all()
        driver.close()


def settled(done: Callable[[], bool]) -> None:
    """Waits for what a thread of the tier does next."""
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end, "it never came about"
        threading.Event().wait(0.002)
