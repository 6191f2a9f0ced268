"""A short request behind a long one: its reads begin at once and go before what waits in storage's queue, and
a long request gains nothing by that."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kvtier_core.admission import AdmissionPolicy
from kvtier_core.blockstore.reads import Fetch
from kvtier_core.tiers.nvme.iopool import IoPool
from tests.unit.core.storebench import ALPHA, StoreBench, key

PATIENCE = 60.0
LONG = [f"long{index:02}" for index in range(40)]
SHORT = [f"short{index}" for index in range(6)]
OTHERS = [f"other{index}" for index in range(6)]
WINDOW, LANE = 8, 8


@pytest.fixture
def bench() -> StoreBench:
    bench = StoreBench(memory=64, storage=128)
    bench.on_disk(*LONG, *SHORT, *OTHERS)
    bench.store.reads._window = WINDOW
    assert bench.store.reads._lane == LANE
    return bench


def fetch(bench: StoreBench, names: list[str], priority: int = 0, deadline: float = 1000.0) -> Fetch:
    return bench.store.fetch(
        [key(name) for name in names], namespace=ALPHA, deadline=bench.clock() + deadline, priority=priority
    )


def reading(bench: StoreBench, names: list[str]) -> int:
    wanted = {key(name) for name in names}
    return sum(held.item.identity.chunk_digest in wanted for held in bench.disk.held)


@pytest.mark.parametrize("priority", [0, 1], ids=["by its place in the prefix", "by its priority"])
def test_a_short_request_reads_at_once_behind_a_long_one(bench: StoreBench, priority: int) -> None:
    with fetch(bench, LONG):
        # The long request has read its beginning: what it reads now is far from it.
        for _ in range(2):
            for held in list(bench.disk.held):
                held.finish()
            bench.store.pump()
        assert reading(bench, LONG) == WINDOW
        with fetch(bench, SHORT, priority):
            assert reading(bench, SHORT) == len(SHORT)
            assert [held.item.ahead for held in bench.disk.held] == [False] * WINDOW + [True] * len(SHORT)
    bench.rest()


def test_a_long_request_keeps_to_its_window(bench: StoreBench) -> None:
    with fetch(bench, LONG):
        assert reading(bench, LONG) == WINDOW
        bench.disk.held[0].finish()
        bench.store.pump()
        assert reading(bench, LONG) == WINDOW
        assert not any(held.item.ahead for held in bench.disk.held)
    bench.rest()


def test_the_lane_is_no_second_window(bench: StoreBench) -> None:
    with fetch(bench, LONG, deadline=500), fetch(bench, SHORT, 1), fetch(bench, OTHERS, 1):
        assert reading(bench, SHORT) + reading(bench, OTHERS) == LANE
        assert bench.store.reads.flying == WINDOW + LANE
        with fetch(bench, LONG[20:26], 2):
            assert bench.store.reads.flying == WINDOW + LANE
    bench.rest()


def test_under_deadlines_the_urgent_one_goes_ahead(bench: StoreBench) -> None:
    bench.store.reads.by(AdmissionPolicy.EARLIEST_DEADLINE)
    with fetch(bench, LONG, deadline=500), fetch(bench, SHORT, deadline=900):
        assert reading(bench, SHORT) == 0
        with fetch(bench, OTHERS, deadline=100):
            assert reading(bench, OTHERS) == len(OTHERS)
    bench.rest()


def test_a_request_that_has_to_make_room_first_keeps_to_its_window() -> None:
    bench = StoreBench(memory=16, storage=128)
    bench.on_disk(*LONG)
    bench.store.reads._window = WINDOW
    # Memory is full of copies that may go.
    with fetch(bench, LONG[:16]):
        bench.settle()
    assert bench.ram.slots.used == 16
    with fetch(bench, LONG[16:32]):
        assert reading(bench, LONG) == WINDOW
        assert bench.store.reads.parked == 16 - WINDOW
    bench.rest()


class Recorded:
    """A job that notes when it runs; `gate`, if any, is what it waits for."""

    deadline = float("inf")
    items = 1

    def __init__(self, name: str, order: list[str], gate: threading.Event | None = None) -> None:
        self.name, self.order, self.gate = name, order, gate
        self.began, self.ended = threading.Event(), threading.Event()

    def run(self) -> bool:
        self.began.set()
        if self.gate is not None:
            assert self.gate.wait(PATIENCE)
        self.order.append(self.name)
        self.ended.set()
        return True

    def expire(self) -> None:
        raise AssertionError("nothing is late")

    def refuse(self, error: Exception) -> None:
        raise AssertionError(error)


@pytest.fixture
def pool() -> Iterator[IoPool]:
    pool = IoPool("disk", 1, 64, 0, None)
    yield pool
    assert pool.drain(PATIENCE)


def test_jobs_that_are_first_run_before_those_that_wait(pool: IoPool) -> None:
    order: list[str] = []
    gate = threading.Event()
    running = Recorded("running", order, gate)
    pool.submit([running])
    assert running.began.wait(PATIENCE)
    last = Recorded("later", order)
    pool.submit([Recorded("waiting", order), last])
    pool.submit([Recorded("first", order), Recorded("second", order)], first=True)
    gate.set()
    assert last.ended.wait(PATIENCE)
    assert order == ["running", "first", "second", "waiting", "later"]
