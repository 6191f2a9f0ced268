"""Pages of storage that selections read again: the same bits, fewer reads, nobody else's bytes, a bounded
memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_core.edits.requests import EditRequest, Truncate
from kvtier_core.hotunits import MOST_BLOCKS, MOST_WANTED, HotUnits, UnitGrid
from kvtier_core.layout import ChunkLayout
from kvtier_core.receipts import ExactnessClass, PublishArm, StepMode
from kvtier_core.selectors.lifecycle.memory import IndexMemory
from kvtier_core.selectors.lifecycle.works import IndexWorks
from kvtier_core.stepselect import selected_bytes
from kvtier_core.tiers.slots import BlockIdentity
from tests.unit.core.builders import (
    CANDIDATE,
    CHUNK,
    HEAD_DIM,
    KV_HEADS,
    LAYERS,
    PAGE,
    Driver,
    Rows,
    cpu,
    engine,
    nvme,
    quest,
)

LAYOUT = ChunkLayout(2, 64, 64)
GRID = UnitGrid(LAYOUT)
SLOTS = 12
FLASH = [cpu(LAYERS), nvme(64)]
QUEST = quest(tokens=4 * PAGE, sink=2, recent=5)
MODE = StepMode(PublishArm.CANDIDATE, False, QUEST, CANDIDATE)
TOKENS = 5 * CHUNK + 3
ROW_BYTES = 2 * KV_HEADS * HEAD_DIM * 4


def identity(number: int) -> BlockIdentity:
    return BlockIdentity(number.to_bytes(32, "big"), number, 1, 64, LAYOUT.payload_bytes, number)


def payload(number: int) -> torch.Tensor:
    return torch.randn(LAYOUT.shape, generator=torch.Generator().manual_seed(number))


def units(*names: int) -> np.ndarray:
    return np.array(names, dtype=np.int64)


def unit_memory(slots: int = SLOTS) -> HotUnits:
    return HotUnits(GRID, lambda count: True, lambda count: None, slots * GRID.unit_bytes)


WANTED = st.dictionaries(st.integers(0, 5), st.sets(st.integers(0, 7), min_size=1), max_size=4)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(WANTED, st.sets(st.integers(0, 5))), max_size=25))
def test_a_hot_unit_is_that_unit_and_no_other(steps: list[tuple[dict[int, set[int]], set[int]]]) -> None:
    """Blocks of which a part is not hot are read and kept, but for those that fail on their way."""
    hot = unit_memory()
    kept: set[tuple[int, int]] = set()
    for blocks, failing in steps:
        wanted = [(identity(number), units(*sorted(mine))) for number, mine in blocks.items()]
        for number, (named, mine), slots in zip(blocks, wanted, hot.find(wanted), strict=True):
            there = slots >= 0
            assert {(number, int(unit)) for unit in mine[there]} <= kept, "only what was kept can be found"
            landing = torch.full(LAYOUT.shape, torch.nan)
            hot.put(landing, mine[there], slots[there])
            expected = torch.full(LAYOUT.shape, torch.nan)
            GRID.view(expected)[:, mine[there]] = GRID.view(payload(number))[:, mine[there]]
            assert torch.equal(landing.nan_to_num(), expected.nan_to_num())
            if number not in failing:
                hot.keep(named, mine[~there], payload(number))
                kept |= {(number, int(unit)) for unit in mine}
        found = hot.find(wanted)
        if sum(map(len, blocks.values())) <= SLOTS:
            for number, slots in zip(blocks, found, strict=True):
                assert number in failing or (slots >= 0).all(), "what was just kept is there"
    assert hot.held_bytes <= SLOTS * (GRID.unit_bytes + 8) + (SLOTS + MOST_BLOCKS) * (8 + 4 * 8) + 4


def test_the_units_that_were_used_longest_ago_go_first() -> None:
    hot = unit_memory(3)
    for number in range(3):
        hot.find([(identity(number), units(0))])
        hot.keep(identity(number), units(0), payload(number))
    hot.find([(identity(0), units(0))])
    hot.find([(identity(9), units(5))])
    hot.keep(identity(9), units(5), payload(9))
    found = hot.find([(identity(0), units(0)), (identity(2), units(0)), (identity(9), units(5))])
    assert all(int(slots[0]) >= 0 for slots in found)
    assert hot.find([(identity(1), units(0))])[0].tolist() == [-1]


def test_blocks_come_and_go_for_ever() -> None:
    """Far more blocks than there are names for."""
    hot = unit_memory(2)
    for turn in range(6):
        first = turn * MOST_BLOCKS // 2
        wanted = [(identity(first + number), units(number % 8)) for number in range(MOST_BLOCKS // 2)]
        hot.find(wanted)
        hot.keep(*wanted[0], payload(0))
        assert hot.find(wanted[:1])[0][0] >= 0


def test_memory_is_asked_for_once_and_given_back() -> None:
    taken: list[int] = []
    one = [(identity(1), units(0))]
    hot = HotUnits(GRID, lambda count: taken.append(count) or False, taken.append, 1 << 20)  # type: ignore[func-returns-value]
    assert hot.find(one)[0].tolist() == [-1]
    assert hot.find(one)[0].tolist() == [-1]
    hot.keep(identity(1), units(0), payload(1))
    hot.close()
    assert len(taken) == 1
    assert hot.held_bytes == 0
    held: list[int] = []
    full = HotUnits(
        GRID, lambda count: held.append(count) or True, lambda count: held.append(-count), 1 << 20
    )  # type: ignore[func-returns-value]
    many = [(identity(number), units(*range(8))) for number in range(MOST_WANTED // 8 + 1)]
    assert {int(slot) for slots in full.find(many) for slot in slots} == {-1}
    full.find(one)
    full.close()
    assert len(held) == 2
    assert sum(held) == 0


def test_what_finds_units_is_asked_for_as_well() -> None:
    taken: list[int] = []
    hot = HotUnits(
        UnitGrid(ChunkLayout(8, 1024, 16)), lambda count: taken.append(count) or True, taken.append
    )  # type: ignore[func-returns-value]
    hot.find([(identity(1), units(0))])
    parts = vars(hot).values()
    arrays = sum(part.nbytes for part in parts if isinstance(part, np.ndarray | torch.Tensor))
    assert taken == [arrays] == [hot.held_bytes]
    hot.close()
    assert taken == [arrays, arrays]


LAYOUTS = {
    "smollm2": (ChunkLayout(3, 256, 64), 16, 48),
    "wide": (ChunkLayout(8, 256, 128), 16, 128),
    "narrow": (ChunkLayout(1, 256, 32), 32, 8),
    "tiny": (ChunkLayout(2, 64, 16), 64, 2),
    "odd": (ChunkLayout(1, 48, 16), 16, 3),
}


@pytest.mark.parametrize(("layout", "rows", "count"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_unit_is_a_page_of_one_head(layout: ChunkLayout, rows: int, count: int) -> None:
    grid = UnitGrid(layout)
    assert (grid.rows, grid.per_block) == (rows, count)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sets(st.integers(0, 3 * 64 - 1)), min_size=2, max_size=2))
def test_the_spans_of_units_are_the_rows_bytes_and_pages(lists: list[set[int]]) -> None:
    """Marks in a payload what the spans name, and compares with rows and pages by hand."""
    rows = [np.array(sorted(one), dtype=np.int64) for one in lists]
    found = GRID.of_rows(rows)
    assert set(found) == {row // 64 for one in lists for row in one}
    for chunk, mine in found.items():
        spans = GRID.spans(mine)
        marks = np.zeros(LAYOUT.payload_bytes, dtype=np.bool_)
        for low, high in spans:
            assert not marks[low:high].any()
            marks[low:high] = True
        assert all(one[1] < two[0] for one, two in pairwise(spans)), "apart"
        named = marks.reshape(2, 2, 64, 256)
        wanted = np.zeros((2, 64), dtype=np.bool_)
        for head, one in enumerate(lists):
            for row in one:
                if row // 64 == chunk:
                    first = row % 64 // 16 * 16
                    wanted[head, first : first + 16] = True
        assert (named == wanted[None, :, :, None]).all()


def steps(folder: Path, memory: int, count: int = 6) -> tuple[torch.Tensor, list[int], list[int], IndexWorks]:
    """Answers of `count` steps, with bytes of storage and of memory that they read."""
    works = IndexWorks(lambda: 0.0, memory=IndexMemory(memory))
    with engine(folder, FLASH, indexes=works) as built:
        driver = Driver.open(built, Rows.random(TOKENS + count), QUEST)
        driver.forward(TOKENS)
        outs, storage, hot = [], [], []
        for _ in range(count):
            outs.append(driver.forward(1, MODE))
            receipts = [answer.receipt for answer in driver.answers[-LAYERS:]]
            assert {receipt.exactness for receipt in receipts} == {ExactnessClass.APPROXIMATE}
            storage.append(sum(receipt.bytes_by_tier.get(FLASH[1].name, 0) for receipt in receipts))
            hot.append(sum(receipt.selection.hot_bytes for receipt in receipts if receipt.selection))
    return torch.cat(outs, dim=1), storage, hot, works


def test_what_a_selection_read_from_storage_is_not_read_again(tmp_path: Path) -> None:
    cold_out, cold, nothing, _ = steps(tmp_path / "cold", 1 << 20)
    out, storage, hot, works = steps(tmp_path / "hot", 1 << 40)
    assert torch.equal(out, cold_out), "the same bits, wherever they were"
    assert set(nothing) == {0}
    assert hot[0] == 0
    # A gap is read where a call would cost more, so what is read alone may be less than the parts of it.
    assert all(a + b <= c for a, b, c in zip(storage, hot, cold, strict=True))
    assert sum(storage[1:]) < sum(cold[1:]) / 2
    assert works.memory.used == 0


def test_rows_in_memory_count_as_those_that_were_attended(tmp_path: Path) -> None:
    with engine(tmp_path, [cpu(64)]) as built:
        driver = Driver.open(built, Rows.random(TOKENS + 1), QUEST)
        driver.forward(TOKENS)
        driver.forward(1, MODE)
        for answer in driver.answers[-LAYERS:]:
            [read] = answer.receipt.bytes_by_tier.values()
            # Both KV heads read as many rows, within a page.
            assert 0 < read <= answer.receipt.rows_attended * ROW_BYTES
            assert read >= (answer.receipt.rows_attended - 2 * PAGE) * ROW_BYTES
            assert answer.receipt.selection is not None
            own = read - answer.receipt.selection.selected_bytes
            assert own == 0, "rows are read alone where they are read by row"


def test_what_whole_blocks_cost_beyond_the_rows_of_a_selection_is_told(tmp_path: Path) -> None:
    with engine(tmp_path, FLASH) as built:
        driver = Driver.open(built, Rows.random(TOKENS + 1), QUEST)
        driver.forward(TOKENS)
        driver.forward(1, MODE)
        for answer in driver.answers[-LAYERS:]:
            told = answer.receipt.selection
            assert told is not None
            most = answer.receipt.rows_attended * ROW_BYTES
            assert most - 2 * PAGE * ROW_BYTES <= told.selected_bytes <= most
            assert sum(answer.receipt.bytes_by_tier.values()) + told.hot_bytes > told.selected_bytes


@pytest.mark.parametrize(
    ("lists", "rows"),
    [([[1, 2], [2, 3, 4]], 5), ([[1, 2], [2, 3], [0], [0]], 4), ([[], []], 0)],
    ids=["a-kv-head", "a-query-head", "none"],
)
def test_a_row_counts_once_a_kv_head(lists: list[list[int]], rows: int) -> None:
    positions = [np.array(one, dtype=np.int64) for one in lists]
    one_head = 2 * LAYOUT.head_dim * 4
    assert selected_bytes(positions, replace(LAYOUT, kv_heads=2)) == rows * one_head


@pytest.mark.parametrize("seed", range(3))
def test_a_history_that_changed_is_never_answered_from_what_was_hot(tmp_path: Path, seed: int) -> None:
    first, second = Rows.random(TOKENS + 8), Rows.random(TOKENS + 8, seed=seed + 7)
    at = 2 * CHUNK
    mixed = joined(first, second, at)
    with engine(tmp_path / "edited", FLASH) as built:
        driver = Driver.open(built, first, QUEST)
        driver.forward(TOKENS)
        for _ in range(3):
            driver.forward(1, MODE)
        handle = driver.handle
        built.edit_session(EditRequest(handle.session_id, handle.generation, Truncate(at)))
        driver.rows, driver.position = mixed, at
        driver.forward(TOKENS - at)
        out = torch.cat([driver.forward(1, MODE) for _ in range(4)], dim=1)
    with engine(tmp_path / "plain", FLASH) as built:
        plain = Driver.open(built, mixed, QUEST)
        plain.forward(at)
        plain.forward(TOKENS - at)
        wanted = torch.cat([plain.forward(1, MODE) for _ in range(4)], dim=1)
    assert torch.equal(out, wanted)


def joined(first: Rows, second: Rows, at: int) -> Rows:
    """Rows [0, at) of one sequence and the others of another."""
    pairs = ((first.k, second.k), (first.v, second.v), (first.q, second.q))
    return Rows(*(torch.cat([one[:, :at], other[:, at:]], dim=1) for one, other in pairs))
