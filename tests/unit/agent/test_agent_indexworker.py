"""The thread in which indexes are built: it runs what the works say, rests, survives, ends, and is told of in
metrics."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvtier_agent.indexworker import SPARE_THREADS, IndexCollector, IndexWorker, make_works
from kvtier_core.errors import Reason
from kvtier_core.selectors.lifecycle.life import LayerLife
from kvtier_core.selectors.lifecycle.works import IndexWorks, Name, Point
from tests.unit.selectors.lifecycle_doubles import BLOCK, RowFamily, RowList, block_of, life_of

WAIT_SECONDS = 30.0
NAME = Name("cache", "rows", "digest")
GROWS = RowFamily(incremental=True)


@contextmanager
def working() -> Iterator[IndexWorks]:
    worker = IndexWorker()
    yield make_works(worker, 1.0, 1 << 30)
    assert worker.close(WAIT_SECONDS) == []


def begun(works: IndexWorks, rows: int = 2 * BLOCK) -> LayerLife:
    life = life_of(GROWS)
    works.open(NAME, [life])
    works.arrive(life, block_of(0, rows))
    return life


def test_indexes_are_built_in_another_thread() -> None:
    threads: list[str] = []
    with working() as works:
        works._at = lambda point: threads.append(threading.current_thread().name)
        lives = [begun(works) for _ in range(5)]
        assert all(works.caught_up([life], WAIT_SECONDS) for life in lives)
        assert {life.covered for life in lives} == {2 * BLOCK}
        works.arrive(lives[0], block_of(2 * BLOCK, BLOCK))
        assert works.caught_up([lives[0]], WAIT_SECONDS)
        assert lives[0].published is not None
        index = lives[0].published.index
        assert isinstance(index, RowList)
        assert index.rows.entries.tolist() == list(range(3 * BLOCK))
        assert works.states()[0].counted.exposed_seconds == 0.0
    assert set(threads) == {"index-worker"}


def test_rows_that_come_while_queries_read_are_seen_whole_or_not_at_all() -> None:
    with working() as works:
        life = begun(works, BLOCK)
        for first in range(BLOCK, 200 * BLOCK, BLOCK):
            works.arrive(life, block_of(first, BLOCK))
            if life.published is None:
                continue
            with works.lease(life) as (held, behind):
                index = held.index
                assert isinstance(index, RowList)
                assert index.rows.entries.tolist() == list(range(held.covered))
                rest = [] if behind is None else behind[:, 0, 0].tolist()
                assert rest == list(range(held.covered, first + BLOCK))
        assert works.caught_up([life], WAIT_SECONDS)
        assert life.covered == 200 * BLOCK


class Stuck:
    """Holds the jobs of chosen lives when they begin."""

    def __init__(self) -> None:
        self.now = 0.0
        self.entered = threading.Semaphore(0)
        self.let_go = threading.Event()
        self.left = 0

    def __call__(self, point: Point) -> None:
        if point is Point.TAKEN and self.left:
            self.left -= 1
            self.entered.release()
            assert self.let_go.wait(WAIT_SECONDS)


def stuck_works(count: int) -> tuple[Stuck, IndexWorker, IndexWorks]:
    stuck, worker = Stuck(), IndexWorker(job_seconds=60.0, look_seconds=0.01)
    stuck.left = count
    return stuck, worker, IndexWorks(lambda: stuck.now, runner=worker, at=stuck)


def wait(works: IndexWorks, condition: Callable[[], bool]) -> None:
    with works._lock:
        assert works._ran.wait_for(condition, WAIT_SECONDS)


def test_a_build_that_does_not_end_is_given_up_and_the_others_go_on() -> None:
    stuck, worker, works = stuck_works(1)
    first = begun(works)
    assert stuck.entered.acquire(timeout=WAIT_SECONDS)
    second = begun(works)
    assert (first.published, second.published) == (None, None)
    stuck.now = 60.1
    wait(works, lambda: second.published is not None)
    assert second.covered == 2 * BLOCK
    assert first.refused is not None
    assert first.refused.reason is Reason.DEADLINE
    assert works.states()[0].counted.refusals == {"DEADLINE": 1}
    stuck.let_go.set()
    assert worker.close(WAIT_SECONDS) == []
    assert first.published is None, "what came after all is nobody's"


def test_jobs_that_never_return_take_a_bounded_number_of_threads() -> None:
    stuck, worker, works = stuck_works(SPARE_THREADS + 1)
    for _ in range(SPARE_THREADS + 1):
        life = begun(works)
        assert stuck.entered.acquire(timeout=WAIT_SECONDS)
        stuck.now += 60.1
        wait(works, lambda life=life: life.refused is not None)  # type: ignore[misc]
    last = begun(works)
    assert last.published is None, "no thread is left"
    stuck.let_go.set()
    wait(works, lambda: last.published is not None)
    assert worker.close(WAIT_SECONDS) == []


class Dying(IndexWorks):
    """Fails outside of any job, once."""

    failed = threading.Event()

    def run_next(self, *, unpaced: bool = False) -> float | None:
        if not self.failed.is_set():
            self.failed.set()
            raise RuntimeError("a defect")
        return super().run_next(unpaced=unpaced)


def test_a_defect_ends_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier_agent.indexworker.IDLE_SECONDS", 0.01)
    worker = IndexWorker()
    works = Dying(lambda: 0.0, runner=worker)
    life = begun(works)
    assert works.caught_up([life], WAIT_SECONDS)
    assert works.failed.is_set()
    assert worker.close(WAIT_SECONDS) == []


def test_an_end_does_not_wait_for_a_rest() -> None:
    worker = IndexWorker()
    rested = threading.Event()

    class Resting(IndexWorks):
        def run_next(self, *, unpaced: bool = False) -> float | None:
            rested.set()
            return 3600.0

    works = Resting(lambda: 0.0, runner=worker)
    begun(works)
    assert rested.wait(WAIT_SECONDS)
    assert worker.close(WAIT_SECONDS) == []
    worker.wake(works)
    assert worker.close(0.0) == [], "nothing begins after the end"


def test_a_job_that_hangs_is_named() -> None:
    worker = IndexWorker()
    begins, ends = threading.Event(), threading.Event()

    def hang(point: Point) -> None:
        begins.set()
        ends.wait(WAIT_SECONDS)

    works = IndexWorks(lambda: 0.0, runner=worker, at=hang)
    begun(works)
    assert begins.wait(WAIT_SECONDS)
    assert worker.close(0.01) == ["index-worker"]
    ends.set()
    assert worker.close(WAIT_SECONDS) == []


def test_metrics_say_what_is_built_held_refused_and_graded() -> None:
    works = IndexWorks(lambda: 0.0)
    registry = CollectorRegistry()
    IndexCollector(registry, works)
    assert b"kvtier_agent_index_sessions{" not in generate_latest(registry)
    begun(works)
    works.memory.limit = works.memory.used
    begun(works, 40 * BLOCK)
    works.audits.graded(NAME, 0.93)
    works.audits.graded(Name("another", "rows", "digest"), 0.999)
    works.audits.failed(NAME, Reason.INDEX_FRONTIER_LAG.value)
    text = generate_latest(registry).decode()
    for line in (
        'kvtier_agent_index_sessions{family="rows",state="ready"} 1.0',
        'kvtier_agent_index_sessions{family="rows",state="refused"} 1.0',
        'kvtier_agent_index_jobs_total{family="rows",kind="build"} 1.0',
        'kvtier_agent_index_refusals_total{family="rows",reason="QUOTA_EXCEEDED"} 1.0',
        f'kvtier_agent_index_bytes{{family="rows",kind="index"}} {float(works.memory.used)}',
        'kvtier_agent_audit_certified_share_bucket{family="rows",le="0.9"} 0.0',
        'kvtier_agent_audit_certified_share_bucket{family="rows",le="0.95"} 1.0',
        'kvtier_agent_audit_certified_share_bucket{family="rows",le="0.999"} 2.0',
        'kvtier_agent_audit_certified_share_count{family="rows"} 2.0',
        'kvtier_agent_audit_failures_total{family="rows",reason="INDEX_FRONTIER_LAG"} 1.0',
    ):
        assert line in text, line
