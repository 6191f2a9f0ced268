"""Rows that several decode frames of a call begin with are read once, whoever's lines they are, and only
where they are the very same ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtier_core import resident, sharedreads
from kvtier_core.edits.requests import Truncate
from kvtier_core.engine import CacheEngine
from kvtier_core.receipts import StepAnswer
from kvtier_core.sharedreads import PAYS_FROM_BYTES, Place, Sequenced, pays, readings_of
from kvtier_core.tiers.base import SlotRef
from kvtier_kernels.ops.chunk_attention.decode import Reading
from kvtier_kernels.ops.chunk_attention.kept import KeptBatch
from kvtier_kernels.ops.chunk_attention.runs import ChunkRun, chunk_runs
from tests.unit.core.builders import CHUNK, LAYERS, Driver, cpu, engine, nvme
from tests.unit.core.editing import edit
from tests.unit.core.test_core_prefixes import CHUNKS, PREFIX, ROWS, computed, publish, start
from tests.unit.core.test_core_ragged import poison, same

Read = tuple[int, int]
"""Chunks of a reading, and its queries."""
MEMORIES = cast(Any, ("one", "another"))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Counter[Read]]:
    """What each batch that is made up reads."""
    found: list[Counter[Read]] = []

    class Watched(KeptBatch):
        def __init__(
            self, compiled: Any, room: Any, readings: Sequence[Reading], scales: Any, states: int
        ) -> None:
            found.append(Counter((reading.run.count, len(reading.queries)) for reading in readings))
            super().__init__(compiled, room, readings, scales, states)

    monkeypatch.setattr(resident, "KeptBatch", Watched)
    return found


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chunks of these tests are small."""
    monkeypatch.setattr(sharedreads, "PAYS_FROM_BYTES", 1)


@pytest.fixture
def wanted(tmp_path: Path) -> torch.Tensor:
    """What a session of its own answers at every position, [layers, PREFIX + 20, Hq, d]."""
    with engine(tmp_path / "own", [cpu(24)]) as built:
        return Driver.open(built, ROWS).forward(PREFIX + 20)


def a_token(built: CacheEngine, drivers: Sequence[Driver], wanted: torch.Tensor) -> None:
    for layer in range(LAYERS):
        frames = [one.request(layer, one.position, one.position + 1) for one in drivers]
        for driver, answer in zip(drivers, built.step_many(frames), strict=True):
            assert isinstance(answer, StepAnswer)
            assert same(answer.out, wanted[layer, driver.position : driver.position + 1])
            read = (driver.position + 1) * built.layout.row_bytes
            assert sum(answer.receipt.bytes_by_tier.values()) == read
    for driver in drivers:
        driver.position += 1
        driver.step += 1


def started(built: CacheEngine, chunks: int = CHUNKS) -> Driver:
    """A session over the blocks of so many chunks, one token behind the prefix; the rest it computed."""
    driver = Driver.open(built, ROWS)
    assert start(built, driver, chunks) == chunks * CHUNK
    driver.forward(PREFIX + 1 - driver.position, committed_frontier=driver.position)
    return driver


@pytest.mark.usefixtures("always")
def test_sessions_that_started_from_the_same_blocks_read_them_once(
    tmp_path: Path, seen: list[Counter[Read]], wanted: torch.Tensor
) -> None:
    with engine(tmp_path / "b", [cpu(64), nvme(64)]) as built:
        first = computed(built)
        publish(built, first)
        second, third, fourth, short = started(built), started(built), started(built), started(built, 2)
        lines = [built._sessions[one.handle.session_id].layers[0].lines for one in (second, third)]
        assert not set(lines[0]) & set(lines[1])
        a_token(built, [first, second, third, short, fourth], wanted)
        a_token(built, [first, second, third, short, fourth], wanted)
        # The first one's rows are the same, in slots of its own. Each reads its open chunk alone.
        assert seen == [Counter({(3, 1): 1, (2, 4): 1, (1, 3): 1, (1, 1): 1 + 5})] * LAYERS

        edit(second, Truncate(PREFIX - 9))  # goes on in a copy of the last chunk, first on the general way
        third.close()
        poison(built)
        seen.clear()
        a_token(built, [second, fourth, short], wanted)
        a_token(built, [second, fourth, short], wanted)
        # The last chunk of two is the same no more, and what is made up once is kept for the next token.
        all_three = Counter({(2, 3): 1, (1, 1): 2 + 3})
        assert seen == [Counter({(2, 2): 1, (1, 1): 2 + 2}), *[all_three] * LAYERS]
        for driver in (first, second, fourth, short):
            driver.close()


SLOTS = 6
POOL = torch.zeros(len(MEMORIES), SLOTS, 3, 2, 2, 16, 16)  # three lives of a slot lie apart, to be told apart


def place(memory: int, slot: int, life: int) -> Place:
    return Place(MEMORIES[memory], SlotRef(slot, life))


def keys_at(memory: int, slot: int, life: int) -> torch.Tensor:
    return POOL[memory, slot, life, 0]


def runs_at(where: Sequence[tuple[int, int, int]]) -> tuple[ChunkRun, ...]:
    return tuple(chunk_runs([keys_at(*at) for at in where], [POOL[at][1] for at in where], 3))


def told(readings: Sequence[Reading], query: int) -> list[int]:
    """Addresses of the keys that a query reads, in its order."""
    return [key.data_ptr() for each in readings if query in each.queries for key in each.run.keys]


chunks = st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(0, 1))


@given(st.lists(st.lists(chunks, max_size=7), min_size=1, max_size=6))
def test_each_query_reads_its_own_chunks_in_order_and_a_common_beginning_is_one_reading(
    each: list[list[tuple[int, int, int]]],
) -> None:
    """Chunks differ by memory, slot or life of the slot, one of them at a time too."""
    opened = [POOL[0, SLOTS - 1, 0], *POOL[1].flatten(0, 1)[-5:]]
    frames = [
        Sequenced([place(*at) for at in where], runs_at(where), chunk_runs([own[0]], [own[1]])[0], 5)
        for where, own in zip(each, opened, strict=False)
    ]
    readings = readings_of(frames, 16, PAYS_FROM_BYTES)
    for query, where in enumerate(each):
        assert told(readings, query) == [keys_at(*at).data_ptr() for at in where] + [
            opened[query][0].data_ptr()
        ]
    beginnings = {tuple(where[: end + 1]) for where in each for end in range(len(where))}
    assert sum(reading.run.count for reading in readings) == len(beginnings) + len(each)
    for reading in readings:
        alone = any(reading.run is frame.open_run for frame in frames)
        assert reading.visible == (5 if alone else 16)


@pytest.mark.parametrize(
    ("queries", "chunks", "shared"), [(2, 2, False), (2, 3, True), (3, 1, False), (4, 1, True), (1, 9, False)]
)
def test_what_several_begin_with_is_read_once_where_that_is_cheaper(
    queries: int, chunks: int, shared: bool
) -> None:
    """SmolLM2's chunks, 3/8 of a mebibyte each."""
    where = [(0, 0, 0)] * chunks
    own = chunk_runs([POOL[1, 5, 0, 0]], [POOL[1, 5, 0, 1]])[0]
    frames = [Sequenced([place(*at) for at in where], runs_at(where), own, 5) for _ in range(queries)]
    readings = readings_of(frames, 16, 3 << 17)
    assert pays(queries, chunks, 3 << 17) is shared
    read = sum(reading.run.count for reading in readings)
    assert read == (chunks if shared else queries * chunks) + queries
    for query in range(queries):
        assert len(told(readings, query)) == chunks + 1
