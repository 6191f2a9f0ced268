"""Runs one reconciler over one queue: a few runs at once, a deadline for each, a span and a measurement.

Lives in the operator's own event loop. It stands still while this process does not lead. This module
must not know any kind.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Protocol

from kvtier_operator.ports import (
    AgentError,
    ApiError,
    Clock,
    Conflict,
    Forbidden,
    NotLeader,
    ObjectKey,
    Reconciler,
    Requeue,
    TelemetryPort,
)
from kvtier_operator.queue import Added, Backoff, QueueState

_log = logging.getLogger(__name__)

MAX_IDLE_SECONDS = 5.0
MAX_ASKED = 16
"""Of one run's questions; with one more the key runs again in any case."""
NOT_LEADER_SECONDS = 0.5


async def _nobody(_key: ObjectKey, _error: Forbidden) -> None:
    return


class Result(StrEnum):
    """How a run ended; the label of its duration."""

    DONE = "done"
    REQUEUE = "requeue"
    CONFLICT = "conflict"
    NOT_LEADER = "notLeader"
    DEADLINE = "deadline"
    ERROR = "error"
    CANCELLED = "cancelled"


class ControllerMetrics(Protocol):
    def queue_depth(self, kind: str, depth: int) -> None: ...

    def queue_wait(self, kind: str, seconds: float) -> None: ...

    def queue_refused(self, kind: str) -> None: ...

    def reconciled(self, kind: str, result: str, seconds: float) -> None: ...


@dataclass(frozen=True)
class Limits:
    """Of one controller. `deadline_seconds` bounds one run; `bound` the keys waiting and running. reserved:
    of the workers, for what somebody has made due, who then waits for no look to end."""

    workers: int = 2
    reserved: int = 0
    deadline_seconds: float = 60.0
    bound: int = 50_000
    backoff: Backoff = field(default_factory=Backoff)


class Controller:
    """Create, `wake` from any thread once `run` has started, cancel `run` to stop."""

    def __init__(
        self,
        reconciler: Reconciler,
        *,
        limits: Limits,
        clock: Clock,
        randomness: Callable[[], float],
        telemetry: TelemetryPort,
        metrics: ControllerMetrics,
        on_overflow: Callable[[], None],
        on_forbidden: Callable[[ObjectKey, Forbidden], Awaitable[None]] = _nobody,
    ) -> None:
        """on_forbidden: a run failed for want of a right; bounded by whoever gives it."""
        self._reconciler = reconciler
        self._limits = limits
        self._clock = clock
        self._telemetry = telemetry
        self._metrics = metrics
        self._on_overflow = on_overflow
        self._on_forbidden = on_forbidden
        self._kind = reconciler.kind.value
        self._state = QueueState(bound=limits.bound, backoff=limits.backoff, randomness=randomness)
        self._changed = asyncio.Event()
        self._leading = asyncio.Event()
        self._in_flight: set[asyncio.Task[Result]] = set()
        self._looks: set[asyncio.Task[Result]] = set()
        self._unbegun: dict[ObjectKey, asyncio.Task[Result]] = {}
        self._asked: dict[ObjectKey, list[tuple[float, Callable[[], bool]]]] = {}

    @property
    def idle(self) -> bool:
        """True when nothing runs and nothing is due now."""
        due = self._state.next_due()
        return not self._state.running and (due is None or due > self._clock.monotonic())

    def add(self, key: ObjectKey, after_seconds: float = 0.0, own: Callable[[], bool] | None = None) -> None:
        """In the loop's thread only. own: whether what has changed was written by this key's own run, which
        has looked at it. A run that is under way may hear only later that its write was done, so it is asked
        at the end of that run."""
        if own is not None:
            if own():
                return
            asked = self._asked.setdefault(key, []) if self._state.runs(key) else None
            if asked is not None and len(asked) < MAX_ASKED:
                asked.append((self._clock.monotonic(), own))
                return
        if self._state.add(key, self._clock.monotonic(), after_seconds) is Added.REFUSED:
            self._metrics.queue_refused(self._kind)
            self._on_overflow()
            return
        self._metrics.queue_depth(self._kind, len(self._state))
        self._changed.set()

    def lead(self) -> None:
        self._leading.set()
        self._changed.set()

    def stand_by(self) -> None:
        """Stops taking keys and cancels what runs: this process may not write any more."""
        self._leading.clear()
        for task in self._in_flight:
            task.cancel()

    async def rest(self, seconds: float) -> None:
        """`stand_by`, but what runs has so long to end: what it has just written, nobody else tells of."""
        self._leading.clear()
        if self._in_flight:
            await asyncio.wait(set(self._in_flight), timeout=seconds)
        self.stand_by()

    async def run(self) -> None:
        """Until cancelled. A run that raises (a defect) ends all of them, so that it is seen. One loop hands
        out the keys: of many workers that wait, each change would wake all."""
        async with asyncio.TaskGroup() as group:
            while True:
                await self._leading.wait()
                full = len(self._in_flight) >= self._limits.workers
                told_only = len(self._looks) >= self._limits.workers - self._limits.reserved
                taken = None if full else self._state.take(self._clock.monotonic(), told_only=told_only)
                if taken is None:
                    await self._wait_for_work(full=full, told_only=told_only)
                    continue
                self._metrics.queue_depth(self._kind, len(self._state))
                self._metrics.queue_wait(self._kind, taken.waited_seconds)
                task = self._unbegun[taken.key] = group.create_task(self._run_once(taken.key))
                self._in_flight.add(task)
                if not taken.told:
                    self._looks.add(task)
                task.add_done_callback(partial(self._ended, taken.key))

    def _ended(self, key: ObjectKey, task: asyncio.Task[Result]) -> None:
        """Only now is there room for another."""
        self._in_flight.discard(task)
        self._looks.discard(task)
        if self._unbegun.get(key) is task:
            # Cancelled before it could note anything. Its key may be out again already, for another run.
            del self._unbegun[key]
            self._asked.pop(key, None)
            self._state.succeeded(key, self._clock.monotonic(), 0.0)
        self._changed.set()

    def _answer(self, key: ObjectKey, now: float) -> None:
        """At the end of a run: it runs again for the first change that was not its own."""
        for at, own in self._asked.pop(key, []):
            if not own():
                self._state.add(key, now, at - now)
                return

    async def _wait_for_work(self, *, full: bool, told_only: bool) -> None:
        due = self._state.next_due(told_only=told_only)
        self._changed.clear()
        idle = MAX_IDLE_SECONDS
        if due is not None and not full:
            idle = min(idle, max(0.0, due - self._clock.monotonic()))
        # Not wait_for: in Python 3.11 it may swallow a cancellation that comes with the event.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(idle):
                await self._changed.wait()

    async def _run_once(self, key: ObjectKey) -> Result:
        self._unbegun.pop(key, None)
        started = self._clock.monotonic()
        result = Result.CANCELLED
        requeue: float | None = None
        asked = 0.0
        try:
            result, requeue, asked = await self._traced(key)
        finally:
            now = self._clock.monotonic()
            self._metrics.reconciled(self._kind, result.value, now - started)
            self._answer(key, now)
            if result in (Result.DONE, Result.REQUEUE):
                self._state.succeeded(key, now, requeue)
            elif result is Result.CANCELLED:
                self._state.succeeded(key, now, 0.0)
            elif result is Result.NOT_LEADER:
                # The gate closes before the election says so; until then, at once would be a hot loop.
                self._state.succeeded(key, now, NOT_LEADER_SECONDS)
            else:
                self._state.failed(key, now, asked)
            self._metrics.queue_depth(self._kind, len(self._state))
        return result

    async def _traced(self, key: ObjectKey) -> tuple[Result, float | None, float]:
        """What became of it, when it wants to run again, and for how long it was asked to wait."""
        attributes = {
            "kvtier.resource.kind": self._kind,
            "kvtier.resource.namespace": key.namespace,
            "kvtier.resource.name": key.name,
        }
        result = Result.CANCELLED
        requeue: float | None = None
        asked = 0.0
        try:
            with self._telemetry.span(f"reconcile {self._kind}", attributes) as span:
                try:
                    async with asyncio.timeout(self._limits.deadline_seconds):
                        outcome = await self._reconciler.reconcile(key)
                    result = Result.DONE
                    if isinstance(outcome, Requeue):
                        result, requeue = Result.REQUEUE, outcome.after_seconds
                except Exception as error:
                    result = _classify(error)
                    if isinstance(error, ApiError | AgentError):
                        asked = error.retry_after_seconds
                    raise
                finally:
                    span.set_attribute("kvtier.reconcile.result", result.value)
        except (NotLeader, Conflict) as error:
            _log.debug("reconcile again", extra={"object": str(key), "error": str(error)})
        except TimeoutError:
            _log.warning("reconcile passed its deadline", extra={"object": str(key)})
        except Forbidden as error:
            _log.error("a right is missing", extra={"object": str(key), "error": str(error)})
            await self._on_forbidden(key, error)
        except Exception:
            _log.exception("reconcile failed", extra={"object": str(key)})
        return result, requeue, asked


def _classify(error: Exception) -> Result:
    match error:
        case NotLeader():
            return Result.NOT_LEADER
        case Conflict():
            return Result.CONFLICT
        case TimeoutError():
            return Result.DEADLINE
        case _:
            return Result.ERROR
