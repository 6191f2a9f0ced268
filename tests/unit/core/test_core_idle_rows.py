"""Rows of a session that nobody uses make way: to the slowest tier that has room, and with the same answers
afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvtier_core.edits.requests import ForkRequest
from kvtier_core.engine import CacheEngine
from kvtier_core.errors import CoreError, Reason
from tests.unit.core.builders import CHUNK, LAYERS, Driver, Rows, cpu, engine, nvme

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

        def refuse(line: int, lower: int) -> None:
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
