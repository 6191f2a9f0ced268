"""Workers over a queue: serial per key, bounded in time, standing still without the Lease."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from prometheus_client import CollectorRegistry

from kvtier_operator.app import Operator, Options
from kvtier_operator.clock import SystemClock
from kvtier_operator.controller import MAX_ASKED, NOT_LEADER_SECONDS, Controller, Limits
from kvtier_operator.lastreads import Seen
from kvtier_operator.metrics import Metrics
from kvtier_operator.ports import (
    AgentTls,
    ApiError,
    Conflict,
    Done,
    Forbidden,
    Kind,
    NotLeader,
    ObjectKey,
    ReconcileOutcome,
    Requeue,
)
from kvtier_operator.queue import Backoff
from kvtier_operator.telemetry import build_telemetry

QUICK = Backoff(base_seconds=0.001, limit_seconds=0.01)


def key(name: str) -> ObjectKey:
    return ObjectKey(Kind.KV_CACHE, "serving", name)


class Scripted:
    """Runs what the test says for each call; `ran` lists the keys in order of their end."""

    kind = Kind.KV_CACHE

    def __init__(self) -> None:
        self.script: list[Callable[[], ReconcileOutcome]] = []
        self.ran: list[str] = []
        self.times: list[tuple[float, float]] = []
        self.now: set[str] = set()
        self.gate = asyncio.Event()
        self.gate.set()
        self.woken = asyncio.Event()
        self.entered = asyncio.Event()

    async def reconcile(self, one: ObjectKey) -> ReconcileOutcome:
        assert one.name not in self.now, "two runs of one key at once"
        self.now.add(one.name)
        began = time.monotonic()
        self.entered.set()
        try:
            await self.gate.wait()
            step = self.script.pop(0) if self.script else Done
            return step()
        finally:
            self.now.remove(one.name)
            self.ran.append(one.name)
            self.times.append((began, time.monotonic()))
            self.woken.set()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.ran) < count:
                self.woken.clear()
                await self.woken.wait()


class Bench:
    def __init__(self, limits: Limits) -> None:
        self.reconciler = Scripted()
        self.spans = InMemorySpanExporter()
        self.metrics = Metrics(CollectorRegistry())
        self.overflows: list[bool] = []
        self.forbidden: list[tuple[ObjectKey, Forbidden]] = []
        self.controller = Controller(
            self.reconciler,
            limits=limits,
            clock=SystemClock(),
            randomness=lambda: 0.5,
            telemetry=build_telemetry(
                otlp_endpoint="",
                instance="t",
                version="t",
                processors=(SimpleSpanProcessor(self.spans),),
            ),
            metrics=self.metrics,
            on_overflow=lambda: self.overflows.append(True),
            on_forbidden=self._forbidden,
        )

    async def _forbidden(self, one: ObjectKey, error: Forbidden) -> None:
        self.forbidden.append((one, error))

    def results(self) -> list[str]:
        return [
            str((span.attributes or {})["kvtier.reconcile.result"])
            for span in self.spans.get_finished_spans()
        ]


@contextlib.asynccontextmanager
async def running(**limits: object) -> AsyncIterator[Bench]:
    bench = Bench(Limits(**({"backoff": QUICK} | limits)))  # type: ignore[arg-type]
    task = asyncio.create_task(bench.controller.run())
    bench.controller.lead()
    try:
        yield bench
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def refuse(error: Exception) -> Callable[[], ReconcileOutcome]:
    def step() -> ReconcileOutcome:
        raise error

    return step


@pytest.mark.parametrize(
    "step, results, bad_span",
    [
        pytest.param(Done, ["done"], False, id="done"),
        pytest.param(lambda: Requeue(0.0), ["requeue", "done"], False, id="requeue"),
        pytest.param(refuse(Conflict(422, "Invalid", "test")), ["conflict", "done"], False, id="conflict"),
        pytest.param(refuse(NotLeader("x")), ["notLeader", "done"], False, id="not-leader"),
        pytest.param(refuse(ValueError("x")), ["error", "done"], True, id="error"),
    ],
)
async def test_each_outcome_is_named_retried_and_traced(
    step: Callable[[], ReconcileOutcome], results: list[str], bad_span: bool
) -> None:
    async with running(workers=1) as bench:
        bench.reconciler.script = [step]
        bench.controller.add(key("a"))
        await bench.reconciler.until(len(results))
    assert bench.results() == results
    first = bench.spans.get_finished_spans()[0]
    assert (first.status.status_code is StatusCode.ERROR) == bad_span
    assert bool(first.events) == bad_span  # a normal retry records no exception


async def test_a_server_that_asks_for_time_gets_it_whatever_else_arrives() -> None:
    async with running(backoff=Backoff(0.001, 5.0)) as bench:
        bench.reconciler.script = [refuse(ApiError(429, "TooManyRequests", "busy", 0.3))]
        bench.controller.add(key("a"))
        await bench.reconciler.until(1)
        bench.controller.add(key("a"))
        await bench.reconciler.until(2)
    (_, ended), (again, _) = bench.reconciler.times
    assert again - ended > 0.299


async def test_a_closed_gate_is_not_run_against_in_a_hot_loop() -> None:
    async with running(workers=1) as bench:
        bench.reconciler.script = [refuse(NotLeader("x"))]
        started = time.monotonic()
        bench.controller.add(key("a"))
        await bench.reconciler.until(2)
    assert time.monotonic() - started >= NOT_LEADER_SECONDS


async def test_a_run_that_hangs_is_ended_by_its_deadline_and_tried_again() -> None:
    async with running(workers=1, deadline_seconds=0.05) as bench:
        bench.reconciler.gate.clear()
        bench.controller.add(key("a"))
        await bench.reconciler.until(1)
        bench.reconciler.gate.set()
        await bench.reconciler.until(2)
    assert bench.results()[0] == "deadline"


async def test_a_key_added_while_it_runs_runs_once_more_and_not_beside_itself() -> None:
    async with running(workers=3) as bench:
        bench.reconciler.gate.clear()
        bench.controller.add(key("a"))
        async with asyncio.timeout(60):
            await bench.reconciler.entered.wait()
        for _ in range(5):
            bench.controller.add(key("a"))
        bench.reconciler.gate.set()
        await bench.reconciler.until(2)
        bench.controller.add(key("sentinel"))
        await bench.reconciler.until(3)
    assert bench.reconciler.ran == ["a", "a", "sentinel"]


@pytest.mark.parametrize(
    "writers, runs",
    [
        pytest.param(["a"], 1, id="its-own"),
        pytest.param(["a"] * 3, 1, id="its-own-writes"),
        pytest.param(["a", "somebody"], 2, id="and-somebody-elses"),
        pytest.param(["a"] * (MAX_ASKED + 1), 2, id="more-than-are-asked-about"),
    ],
)
async def test_a_watch_that_is_faster_than_the_answer_does_not_have_a_run_look_at_its_own_write(
    writers: list[str], runs: int
) -> None:
    async with running(workers=1) as bench:
        answered: list[bool] = []
        bench.reconciler.gate.clear()
        bench.controller.add(key("a"))
        async with asyncio.timeout(60):
            await bench.reconciler.entered.wait()

        def own(writer: str) -> bool:
            return bool(answered) and writer == "a"

        for writer in writers:
            bench.controller.add(key("a"), own=partial(own, writer))
        # Only then does the run hear that it has written.
        answered.append(True)
        bench.reconciler.gate.set()
        await bench.reconciler.until(runs)
        bench.controller.add(key("a"), own=lambda: True)
        bench.controller.add(key("sentinel"))
        await bench.reconciler.until(runs + 1)
    assert bench.reconciler.ran == [*["a"] * runs, "sentinel"]


def test_of_a_version_its_own_run_is_asked_whether_it_wrote_it_and_others_hear_of_it() -> None:
    """As the operator passes on what a watch has told."""
    rollout, written = key("go"), {"metadata": {"uid": "u", "resourceVersion": "7"}}
    telemetry = build_telemetry(otlp_endpoint="", instance="t", version="t")
    operator = Operator(Options(None, "kvtier-system", "t", AgentTls(Path(), Path(), Path())), telemetry)
    told: list[tuple[ObjectKey, bool]] = []

    class Noted:
        def add(self, one: ObjectKey, _after: float, own: Callable[[], bool] | None) -> None:
            told.append((one, own is not None and own()))

    operator._controllers[Kind.KV_CACHE] = Noted()  # type: ignore[assignment]
    operator._reads.wrote(rollout, written, rollout)
    operator._add_all({rollout, key("other")}, Seen.of(rollout, written))
    operator._add_all({rollout}, None)
    assert told == [(rollout, True), (key("other"), False), (rollout, False)]


async def test_without_the_lease_nothing_runs_and_what_ran_is_cancelled_and_kept() -> None:
    async with running(workers=1) as bench:
        bench.reconciler.gate.clear()
        bench.controller.add(key("a"))
        async with asyncio.timeout(60):
            await bench.reconciler.entered.wait()
        bench.controller.stand_by()
        await bench.reconciler.until(1)  # ended by cancellation
        bench.reconciler.gate.set()
        bench.controller.add(key("b"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert bench.reconciler.ran == ["a"]
        bench.controller.lead()
        await bench.reconciler.until(3)
    assert sorted(bench.reconciler.ran) == ["a", "a", "b"]


async def test_at_the_end_what_runs_may_tell_of_what_it_has_written() -> None:
    async with running(workers=1) as bench:
        bench.reconciler.gate.clear()
        bench.controller.add(key("a"))
        bench.controller.add(key("b"))
        async with asyncio.timeout(60):
            await bench.reconciler.entered.wait()
        resting = asyncio.create_task(bench.controller.rest(3600.0))
        await asyncio.sleep(0)
        bench.reconciler.gate.set()
        async with asyncio.timeout(60):
            await resting
        assert bench.reconciler.ran == ["a"], "and nothing else begins"
        assert bench.results() == ["done"]


async def test_at_the_end_what_hangs_is_not_waited_for() -> None:
    async with running(workers=1) as bench:
        bench.reconciler.gate.clear()
        bench.controller.add(key("a"))
        async with asyncio.timeout(60):
            await bench.reconciler.entered.wait()
            await bench.controller.rest(0.01)
            await bench.reconciler.until(1)
    assert bench.results() == ["cancelled"]


async def test_a_missing_right_is_told_of_the_object_that_wants_it() -> None:
    async with running(workers=1) as bench:
        words = 'daemonsets.apps is forbidden: User "x" cannot patch resource "daemonsets"'
        bench.reconciler.script = [refuse(Forbidden(403, "Forbidden", words)), Done]
        bench.controller.add(key("a"))
        await bench.reconciler.until(2)
    assert [(one.name, error.message) for one, error in bench.forbidden] == [("a", words)]


def test_ten_thousand_objects_of_a_kind_find_room() -> None:
    """One that did not would have everything listed and looked at anew, every few seconds."""
    bench = Bench(Limits())
    for index in range(12_000):
        bench.controller.add(key(f"cache-{index}"))
    assert bench.overflows == []


async def test_a_full_queue_asks_for_a_relist() -> None:
    async with running(workers=1, bound=1) as bench:
        bench.controller.stand_by()
        bench.controller.add(key("a"))
        bench.controller.add(key("b"))
    assert bench.overflows == [True]


async def turn_until(reached: Callable[[], bool]) -> None:
    """Turn by turn of the loop, so that the next line acts right after that."""
    for _ in range(1_000_000):
        if reached():
            return
        await asyncio.sleep(0)
    raise AssertionError("never")


async def test_a_run_that_is_cancelled_before_it_begins_is_not_lost() -> None:
    """The Lease is lost between handing a key out and its first step."""
    async with running(workers=1) as bench:
        bench.controller.add(key("a"))
        await turn_until(lambda: bool(bench.controller._in_flight))
        bench.controller.stand_by()
        assert not bench.reconciler.entered.is_set()
        await turn_until(lambda: not bench.controller._in_flight)
        bench.controller.lead()
        await bench.reconciler.until(1)
    assert bench.reconciler.ran == ["a"]


@pytest.mark.parametrize("workers", [1, 3])
async def test_so_many_run_at_once_and_the_rest_as_soon_as_there_is_room(workers: int) -> None:
    async with running(workers=workers) as bench:
        bench.reconciler.gate.clear()
        for number in range(7):
            bench.controller.add(key(f"k{number}"))
        await turn_until(lambda: len(bench.reconciler.now) >= workers)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(bench.reconciler.now) == workers
        bench.reconciler.gate.set()
        await bench.reconciler.until(7)
    assert sorted(bench.reconciler.ran) == [f"k{number}" for number in range(7)]


async def test_looks_that_hang_leave_room_for_what_somebody_waits_for() -> None:
    """Three of four workers may look; the fourth waits for events, and a look takes no place of theirs."""
    async with running(workers=4, reserved=1) as bench:
        bench.reconciler.gate.clear()
        for number in range(5):
            bench.controller.add(key(f"look{number}"), 0.001)
        await turn_until(lambda: len(bench.reconciler.now) == 3)
        looks = set(bench.reconciler.now)
        bench.controller.add(key("event"))
        await turn_until(lambda: len(bench.reconciler.now) == 4)
        assert bench.reconciler.now == {*looks, "event"}
        bench.reconciler.gate.set()
        await bench.reconciler.until(6)
    assert sorted(bench.reconciler.ran) == ["event", *(f"look{number}" for number in range(5))]


async def test_a_defect_ends_all_runs_and_is_seen() -> None:
    bench = Bench(Limits(workers=2, backoff=QUICK))

    def broken(*_: object) -> None:
        raise RuntimeError("a defect")

    bench.metrics.reconciled = broken  # type: ignore[method-assign]
    bench.controller.lead()
    bench.controller.add(key("a"))
    async with asyncio.timeout(60):
        with pytest.raises(ExceptionGroup) as caught:
            await bench.controller.run()
    assert caught.group_contains(RuntimeError, match="a defect")


async def test_a_key_that_is_out_again_before_its_last_run_was_cleared_away_is_not_taken_for_that_one() -> (
    None
):
    async with running(workers=2) as bench:

        def again() -> ReconcileOutcome:
            bench.controller.add(key("a"))
            bench.controller.add(key("b"))
            bench.reconciler.gate.clear()
            return Done()

        bench.reconciler.script = [again]
        bench.controller.add(key("a"))
        await bench.reconciler.until(1)
        await turn_until(lambda: bench.reconciler.now == {"a", "b"})
        bench.controller.stand_by()
        await bench.reconciler.until(3)
        bench.reconciler.gate.set()
        bench.controller.lead()
        await bench.reconciler.until(5)
    assert sorted(bench.reconciler.ran) == ["a", "a", "a", "b", "b"]
