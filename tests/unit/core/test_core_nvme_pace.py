"""The pace of a device: what is beyond it waits in the queue, each way for itself, and ends with DEADLINE
where its deadline comes first."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_core.errors import CoreError, Reason
from kvtier_core.tiers.nvme.iopool import IoPool
from kvtier_core.tiers.nvme.pace import BURST_SECONDS, LAPSE_SECONDS, Load, Pace, Way
from kvtier_core.tiers.staging import PAGE, StagingBuffer
from kvtier_core.tiers.transfer import Landing, TransferItem
from tests.unit.core.builders import FakeClock
from tests.unit.core.nvme_store import (
    FOREVER,
    LAYOUT,
    SIZE,
    Heard,
    content,
    load,
    open_store,
    page_aligned,
    store,
)

PATIENCE = 60.0
RATE = 1000
BURST = int(RATE * BURST_SECONDS)


class Moving:
    """A job that notes that it ran, or how it was refused."""

    items = 1

    def __init__(self, load: Load | None, deadline: float = float("inf")) -> None:
        self.load, self.deadline = load, deadline
        self.over = threading.Event()
        self.ran = False
        self.refused: CoreError | None = None

    def run(self) -> bool:
        self.ran = True
        self.over.set()
        return True

    def expire(self) -> None:
        raise AssertionError("it never hung")

    def refuse(self, error: CoreError) -> None:
        self.refused = error
        self.over.set()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def pool(clock: FakeClock) -> Iterator[IoPool]:
    pool = IoPool("disk", 2, 64, 0, clock, pace=Pace(RATE, RATE, clock))
    yield pool
    pool.drain(PATIENCE)


def read(size: int = BURST, deadline: float = float("inf")) -> Moving:
    return Moving(Load(Way.READ, size), deadline)


def finished(*jobs: Moving) -> bool:
    return all(job.over.wait(PATIENCE) for job in jobs)


def test_jobs_beyond_the_pace_wait_until_they_are_due(pool: IoPool, clock: FakeClock) -> None:
    first, second, third = read(), read(), read()
    pool.submit([first, second, third])
    for now, later in ((first, second), (second, third)):
        assert finished(now)
        assert not later.ran
        clock.now += BURST_SECONDS * 1.01
        pool.expire()
    assert finished(third)


def test_the_other_way_and_what_moves_nothing_pass(pool: IoPool) -> None:
    late, write, flush = read(), Moving(Load(Way.WRITE, BURST)), Moving(None)
    pool.submit([read(), late, write, flush])
    assert finished(write, flush)
    assert not late.ran


def test_who_waits_for_the_pace_hears_deadline_in_time(pool: IoPool, clock: FakeClock) -> None:
    late = read(deadline=clock.now + BURST_SECONDS / 2)
    pool.submit([read(), late])
    clock.now += BURST_SECONDS / 2
    pool.expire()
    assert finished(late)
    assert not late.ran
    assert late.refused is not None and late.refused.reason is Reason.DEADLINE


def test_a_pool_that_closes_minds_no_pace(clock: FakeClock) -> None:
    pool = IoPool("disk", 1, 64, 0, clock, pace=Pace(RATE, None, clock))
    jobs = [read() for _ in range(4)]
    pool.submit(jobs)
    assert pool.drain(PATIENCE)
    assert finished(*jobs) and all(job.ran for job in jobs)


def test_a_way_without_a_bound_is_not_paced(clock: FakeClock) -> None:
    pace = Pace(None, RATE, clock)
    assert [pace.take(Load(Way.READ, 1 << 40)) for _ in range(3)] == [0.0] * 3
    assert pace.take(Load(Way.WRITE, BURST)) == 0.0 < pace.take(Load(Way.WRITE, 1))


@pytest.mark.parametrize("rates", [(0, None), (None, -1)], ids=str)
def test_a_pace_is_positive(rates: tuple[int | None, int | None], clock: FakeClock) -> None:
    with pytest.raises(ValueError, match="a pace of"):
        Pace(*rates, clock)


def test_small_jobs_of_one_pool_keep_no_large_one_of_another_waiting(clock: FakeClock) -> None:
    pace, small, large = Pace(RATE, None, clock), Load(Way.READ, 1), Load(Way.READ, BURST // 2)
    moved = {"small": 0, "large": 0}
    for _ in range(200):
        clock.now += BURST_SECONDS / 20
        while pace.take(small, "small") == 0.0:
            moved["small"] += small.size
        if pace.take(large, "large") == 0.0:
            moved["large"] += large.size
    # Of ten bursts. They take turns: a large job, and what of small ones comes between two.
    assert moved["large"] >= 5 * BURST
    assert moved["small"] > 0
    assert sum(moved.values()) <= 11 * BURST


def test_a_turn_that_nobody_comes_for_lapses(clock: FakeClock) -> None:
    pace = Pace(RATE, None, clock)
    assert pace.take(Load(Way.READ, BURST), "first") == 0.0
    assert pace.take(Load(Way.READ, BURST), "gone") > 0.0
    assert pace.take(Load(Way.READ, 1), "second") > 0.0
    clock.now += BURST_SECONDS
    assert 0.0 < pace.take(Load(Way.READ, 1), "second") <= BURST_SECONDS
    clock.now += LAPSE_SECONDS * 1.01
    assert pace.take(Load(Way.READ, 1), "second") == 0.0


@given(st.lists(st.tuples(st.integers(1, 5 * BURST), st.floats(0, 2 * BURST_SECONDS)), max_size=60))
def test_over_any_time_no_more_moves_than_rate_and_burst_allow(asked: list[tuple[int, float]]) -> None:
    clock = FakeClock()
    pace, began, moved, largest = Pace(RATE, None, clock), clock.now, 0, 0
    for size, wait in asked:
        if pace.take(Load(Way.READ, size)) == 0.0:
            moved, largest = moved + size, max(largest, size)
        # What is larger than the burst begins on a full bucket, and leaves a debt.
        assert moved <= RATE * (clock.now - began) + max(BURST, largest) + 1e-6
        clock.now += wait


def test_a_tier_reads_and_writes_at_its_pace(tmp_path: Path, clock: FakeClock) -> None:
    """Reading a second block waits for the clock; its bytes are whole all the same; inline calls count."""
    with_header = SIZE + PAGE
    pace = Pace(int(with_header / BURST_SECONDS), int(100 * with_header / BURST_SECONDS), clock)
    tier = open_store(tmp_path, clock=clock, pace=pace)
    first, second = store(tier, "a", "b")
    assert load(tier, [first]) == [content("a")]
    heard, landing = Heard(1), page_aligned(bytes(SIZE))
    tier.submit_read([TransferItem(second.ref, second.identity, Landing(landing))], FOREVER, heard)
    assert heard.errors == {}, "the bucket is empty, and the clock stands still"
    clock.now += BURST_SECONDS * 1.01
    tier.expire()
    assert heard.wait().reasons() == [None]
    assert bytes(landing) == content("b")
    tier.read(first.ref, first.identity, StagingBuffer(LAYOUT))
    assert pace.take(Load(Way.READ, with_header)) > BURST_SECONDS, "the inline read left a debt"
    assert pace.take(Load(Way.WRITE, with_header)) == 0.0
    tier.close()
