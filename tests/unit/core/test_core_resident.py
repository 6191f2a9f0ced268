"""The short way of a decode frame: answers, receipts and refusals of the general way, never of stale rows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvtier_core.directory import ChunkState, Directory
from kvtier_core.engine import CacheEngine
from kvtier_core.errors import CoreError, Reason
from kvtier_core.placementstamp import PlacementStamp
from kvtier_core.receipts import StepAnswer, StepReceipt
from tests.unit.core.builders import (
    CHUNK,
    HEAD_DIM,
    KV_HEADS,
    LAYERS,
    Driver,
    FakeClock,
    Rows,
    TierBudget,
    cpu,
    engine,
    gpu,
    nvme,
    quest,
)

TOKENS, DECODE = 3 * CHUNK + 5, CHUNK + 9


def general_only(built: CacheEngine) -> None:
    """Nothing takes the short way any more."""
    built._resident.prepare = lambda *_: None  # type: ignore[method-assign]


def counted(built: CacheEngine) -> list[bool]:
    """Whether each frame from now on took the short way."""
    taken: list[bool] = []
    prepare = built._resident.prepare

    def counting(*given: object) -> object:
        frame = prepare(*given)  # type: ignore[arg-type]
        taken.append(frame is not None)
        return frame

    built._resident.prepare = counting  # type: ignore[method-assign, assignment]
    return taken


def facts(receipt: StepReceipt) -> dict[str, object]:
    found = dataclasses.asdict(receipt)
    assert math.isnan(found.pop("estimated_omitted_mass"))
    return found


TIERS = {
    "one tier": [cpu(64)],
    "two in memory": [gpu(5), cpu(64)],
    "open chunks in two": [gpu(1), cpu(64)],
    "three": [gpu(5), cpu(4), nvme(64)],
    "all but open chunks on storage": [cpu(LAYERS), nvme(64)],
}


@pytest.mark.parametrize("tiers", TIERS.values(), ids=TIERS.keys())
def test_answers_and_receipts_are_those_of_the_general_way(tmp_path: Path, tiers: list[TierBudget]) -> None:
    played: list[tuple[Tensor, list[StepAnswer], list[bool]]] = []
    for name in ("short", "general"):
        with engine(tmp_path / name, tiers) as built:
            if name == "general":
                general_only(built)
            taken = counted(built)
            driver = Driver.open(built, Rows.random(TOKENS + DECODE))
            played.append((driver.play(TOKENS, DECODE), driver.answers, taken))
    (out, answers, taken), (want, wanted, _) = played
    assert torch.equal(out, want)
    for got, expected in zip(answers, wanted, strict=True):
        assert facts(got.receipt) == facts(expected.receipt)
        assert (got.repeated, got.comparison) == (expected.repeated, expected.comparison)
    # All but the row that fills a chunk and the one that begins the next.
    assert sum(taken) == (DECODE - 2) * LAYERS


def test_a_session_with_an_index_takes_the_general_way(tmp_path: Path) -> None:
    with engine(tmp_path, [cpu(64)]) as built:
        taken = counted(built)
        Driver.open(built, Rows.random(40), selector=quest(24)).play(30, 5)
        assert not any(taken)


WRONG: dict[str, tuple[dict[str, object], Reason]] = {
    "a gap": ({"first_row_position": 71, "first_query_position": 71}, Reason.FRONTIER_MISMATCH),
    "a query beyond": ({"first_query_position": 71}, Reason.FRONTIER_MISMATCH),
    "a negative position": ({"first_row_position": -1}, Reason.FRAME_INVALID),
    "a layer that is none": ({"layer": LAYERS}, Reason.FRAME_INVALID),
    "a layer too far": ({"layer": 1}, Reason.STEP_ORDER),
    "a step too far": ({"step": 3}, Reason.STEP_ORDER),
    "more committed than there is": ({"committed_frontier": 72}, Reason.FRONTIER_MISMATCH),
    "less committed than before": ({"committed_frontier": 69}, Reason.FRONTIER_MISMATCH),
    "half precision": ({"k": torch.zeros(1, KV_HEADS, HEAD_DIM).half()}, Reason.FRAME_INVALID),
    "another head": ({"v": torch.zeros(1, KV_HEADS + 1, HEAD_DIM)}, Reason.FRAME_INVALID),
    "queries of too few heads": ({"q": torch.zeros(1, KV_HEADS, HEAD_DIM)}, Reason.FRAME_INVALID),
    "another position epoch": ({"position_epoch": 7}, Reason.POSITION_CONTRACT_MISMATCH),
    "another generation": ({"generation": 9}, Reason.GENERATION_STALE),
    "another session": ({"session_id": "nobody"}, Reason.SESSION_UNKNOWN),
}


@pytest.mark.parametrize("mistake", WRONG.keys())
def test_a_wrong_frame_is_refused_as_ever_and_changes_nothing(tmp_path: Path, mistake: str) -> None:
    changes, reason = WRONG[mistake]
    rows = Rows.random(80)
    with engine(tmp_path, [cpu(64)]) as built:
        driver = Driver.open(built, rows)
        driver.forward(69)
        driver.forward(1, committed_frontier=70)
        with pytest.raises(CoreError) as refused:
            built.step(dataclasses.replace(driver.request(0, 70, 71), **changes))  # type: ignore[arg-type]
        assert refused.value.reason is reason
        out = driver.forward(1)
    with engine(tmp_path, [cpu(64)]) as built:
        driver = Driver.open(built, rows)
        driver.forward(69)
        driver.forward(1, committed_frontier=70)
        assert torch.equal(driver.forward(1), out)


def test_more_rows_than_a_session_may_have_are_refused(tmp_path: Path) -> None:
    with engine(tmp_path, [cpu(64)]) as built:
        driver = Driver.open(built, Rows.random(20))
        driver.play(10, 10)
        driver.rows = Rows.random(30)
        with pytest.raises(CoreError) as refused:
            driver.forward(1)
        assert refused.value.reason is Reason.FRAME_INVALID


def late_decode(driver: Driver, clock: FakeClock) -> None:
    """A decode frame of values that would spoil a product, refused after its row was written."""
    poison = torch.full((1, KV_HEADS, HEAD_DIM), torch.nan)
    at = driver.position
    request = driver.request(0, at, at + 1, k=poison, v=poison, deadline=clock.now)
    with pytest.raises(CoreError) as refused:
        driver.engine.step(request)
    assert refused.value.reason is Reason.DEADLINE
    assert refused.value.facts["attempted"] == "requestOnCpu:DEADLINE"
    assert refused.value.facts["fallback"] == "REJECT_NO_LEGAL_PATH"


def late_block(driver: Driver, clock: FakeClock) -> None:
    """The same with several rows, on the general way."""
    poison = torch.full((5, KV_HEADS, HEAD_DIM), torch.inf)
    at = driver.position
    request = driver.request(0, at, at + 5, k=poison, v=poison, deadline=clock.now)
    with pytest.raises(CoreError) as refused:
        driver.engine.step(request)
    assert refused.value.reason is Reason.DEADLINE


@pytest.mark.parametrize("late", [late_decode, late_block])
def test_rows_of_a_refused_frame_reach_no_later_answer(
    tmp_path: Path, late: Callable[[Driver, FakeClock], None]
) -> None:
    clock = FakeClock(tick=1.0)
    rows = Rows.random(CHUNK + 40)
    with engine(tmp_path / "a", [cpu(64)], clock=clock) as built:
        driver = Driver.open(built, rows)
        driver.play(CHUNK + 10, 3)
        before = built.stats()
        late(driver, clock)
        assert built.stats() == before
        out = [driver.forward(1) for _ in range(4)]
        late(driver, clock)
        out += [driver.forward(1) for _ in range(4)]
    with engine(tmp_path / "b", [cpu(64)]) as built:
        driver = Driver.open(built, rows)
        driver.play(CHUNK + 10, 3)
        for got in out:
            assert torch.equal(got, driver.forward(1))


def directory_with(lines: int) -> tuple[Directory, list[int]]:
    directory = Directory(tiers=2)
    return directory, [
        directory.insert(
            chunk, tier=0, slot=chunk, slot_generation=0, generation=chunk + 1, state=ChunkState.SEALED
        )
        for chunk in range(lines)
    ]


def test_a_stamp_holds_while_others_move() -> None:
    directory, lines = directory_with(4)
    stamp = PlacementStamp(directory, lines[:2])
    directory.publish(lines[3], tier=1, slot=0, slot_generation=0, generation=9)
    directory.remove(lines[2])
    assert stamp.holds(lines[:2])
    assert not stamp.holds(lines[:1])
    assert not stamp.holds(lines[1::-1])


MOVES: dict[str, Callable[[Directory, int], object]] = {
    "down": lambda directory, line: directory.publish(line, tier=1, slot=0, slot_generation=0, generation=9),
    "within its tier": lambda directory, line: directory.publish(
        line, tier=0, slot=7, slot_generation=0, generation=9
    ),
    "tombstoned": lambda directory, line: directory.tombstone(line),
    "removed": lambda directory, line: directory.remove(line),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES.keys())
def test_a_stamp_ends_with_the_first_move(move: Callable[[Directory, int], object]) -> None:
    directory, lines = directory_with(2)
    stamp = PlacementStamp(directory, lines)
    move(directory, lines[1])
    assert not stamp.holds(lines)
    assert not stamp.holds(lines)


def test_a_line_that_is_used_again_is_not_what_it_was() -> None:
    directory, lines = directory_with(1)
    stamp = PlacementStamp(directory, lines)
    directory.remove(lines[0])
    again = directory.insert(0, tier=0, slot=0, slot_generation=1, generation=5, state=ChunkState.SEALED)
    assert again == lines[0]
    assert not stamp.holds(lines)


def test_an_idle_session_keeps_no_views_of_what_another_moved_away(tmp_path: Path) -> None:
    with engine(tmp_path, [cpu(4 * LAYERS), nvme(64)]) as built:
        idle, busy = (Driver.open(built, Rows.random(6 * CHUNK, seed)) for seed in (0, 1))
        idle.play(CHUNK + 2, CHUNK)
        kept = built._contexts[idle.handle.session_id]
        idle.forward(1)
        assert all(layer is not None and layer.resident for layer in kept.resident)
        busy.play(3 * CHUNK, CHUNK)
        tiers = {built._store.directory.tier[line] for state in kept.session.layers for line in state.lines}
        assert len(tiers) > 1, "nothing was moved"
        assert kept.resident == [None] * LAYERS
