"""Storage blocks that selections read again: the same bits, fewer reads, nobody else's bytes, a bounded
memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_core.edits.requests import EditRequest, Truncate
from kvtier_core.hotblocks import MOST_WANTED, HotBlocks
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

LAYOUT = ChunkLayout(1, 4, 2)
SLOTS = 3
FLASH = [cpu(LAYERS), nvme(64)]
QUEST = quest(tokens=4 * PAGE, sink=2, recent=5)
MODE = StepMode(PublishArm.CANDIDATE, False, QUEST, CANDIDATE)
TOKENS = 5 * CHUNK + 3
ROW_BYTES = 2 * KV_HEADS * HEAD_DIM * 4


def identity(number: int) -> BlockIdentity:
    return BlockIdentity(number.to_bytes(32, "big"), number, 1, 4, LAYOUT.payload_bytes, number)


def payload(number: int) -> torch.Tensor:
    return torch.full(LAYOUT.shape, float(number))


def blocks(slots: int = SLOTS) -> HotBlocks:
    return HotBlocks(LAYOUT, lambda count: True, lambda count: None, slots * LAYOUT.payload_bytes)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 7), max_size=5, unique=True), st.sets(st.integers(0, 4))),
        max_size=30,
    )
)
def test_a_hot_block_is_the_block_itself_and_no_other(steps: list[tuple[list[int], set[int]]]) -> None:
    """Some of the blocks that are not hot are read and kept, others fail on their way."""
    hot = blocks()
    kept: set[int] = set()
    for wanted, failing in steps:
        found = hot.find([identity(number) for number in wanted])
        for at, (number, mine) in enumerate(zip(wanted, found, strict=True)):
            if mine is not None:
                assert number in kept, "only what was kept can be found"
                assert torch.equal(mine, payload(number))
            elif at not in failing:
                hot.keep(identity(number), payload(number))
                kept.add(number)
            else:
                kept.discard(number)
        again = hot.find([identity(number) for number in wanted])
        read = [at for at in range(len(wanted)) if found[at] is not None or at not in failing]
        if len(wanted) <= SLOTS:
            assert all(again[at] is not None for at in read), "what was just kept is there"
    assert hot.held_bytes <= SLOTS * LAYOUT.payload_bytes


def test_the_blocks_that_were_used_longest_ago_go_first() -> None:
    hot = blocks()
    for number in range(SLOTS):
        hot.find([identity(number)])
        hot.keep(identity(number), payload(number))
    hot.find([identity(0)])
    hot.find([identity(9)])
    hot.keep(identity(9), payload(9))
    found = hot.find([identity(number) for number in (0, 2, 9)])
    assert all(one is not None for one in found)
    assert hot.find([identity(1)]) == [None]


def test_memory_is_asked_for_once_and_given_back() -> None:
    taken: list[int] = []
    hot = HotBlocks(LAYOUT, lambda count: taken.append(count) or False, taken.append, 1 << 10)  # type: ignore[func-returns-value]
    assert hot.find([identity(1)]) == [None]
    assert hot.find([identity(1)]) == [None]
    hot.keep(identity(1), payload(1))
    hot.close()
    assert len(taken) == 1
    assert hot.held_bytes == 0
    full = blocks()
    assert full.find([identity(number) for number in range(MOST_WANTED + 1)]) == [None] * (MOST_WANTED + 1)


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
    assert [a + b for a, b in zip(storage, hot, strict=True)] == cold
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
