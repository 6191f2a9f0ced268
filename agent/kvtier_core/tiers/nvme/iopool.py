"""Threads that do blocking I/O: a bounded queue, a deadline for each job, and a way out when the device
hangs.

Why it exists: a system call on a hung device cannot be cancelled. So its caller is told at the deadline, the
thread is written off until the call returns, and another takes its place, up to a bound beyond which the pool
refuses work. It must not know what a job reads or writes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from kvtier_core.errors import CoreError, Reason
from kvtier_core.telling import report_defect, tell_each
from kvtier_core.tiers.nvme.pace import Load, Pace, Way

_TIMER_MAX_WAIT_SECONDS = 1.0
_TIMER_MIN_WAIT_SECONDS = 0.001
_JOIN_SECONDS = 1.0


class Job(Protocol):
    """One or a few system calls. Methods are called without any lock of the pool held."""

    deadline: float
    items: int
    load: Load | None
    """What of the device's pace it takes."""

    def run(self) -> bool:
        """Does the work. False: it is not over yet, and says so later by `IoPool.settled`."""

    def expire(self) -> None:
        """The deadline came while it ran or waited: tell the caller, keep what the device may still touch."""

    def refuse(self, error: CoreError) -> None:
        """It never began, and never will."""


@dataclass(frozen=True, slots=True)
class PoolState:
    """hung: threads whose system call has not returned since the deadline came. busy: a job runs or waits for
    a thread, so bytes may still move."""

    threads: int
    hung: int
    queued_items: int
    busy: bool


class IoPool:
    """`threads` calls at a time. bound: items that may wait. spare: threads that may replace hung ones.
    clock: of the deadlines; None: no job is ever late. Threads start with the first job."""

    def __init__(
        self,
        name: str,
        threads: int,
        bound: int,
        spare: int,
        clock: Callable[[], float] | None,
        hung_changed: Callable[[], None] = lambda: None,
        pace: Pace | None = None,
    ) -> None:
        """hung_changed: also called whenever a job ends while the pool closes. pace: at which jobs begin;
        one that is not due lets those of the other way pass."""
        if threads < 1 or bound < 1 or spare < 0:
            raise CoreError(
                Reason.BAD_ARGUMENT, f"a pool of {threads} threads, {bound} items, {spare} spare threads"
            )
        self._name = name
        self._target = threads
        self._bound = bound
        self._spare = spare
        self._clock = clock
        self._hung_changed = hung_changed
        self._pace = pace
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._idle = threading.Condition(self._lock)
        self._timer_wake = threading.Condition(self._lock)
        self._queue: deque[Job] = deque()
        self._queued_items = 0
        self._running: dict[threading.Thread, Job] = {}
        self._hung: set[threading.Thread] = set()
        self._waiting: set[Job] = set()
        self._settled: set[Job] = set()
        self._expired: set[Job] = set()
        self._threads: set[threading.Thread] = set()
        self._sleeping = 0
        self._timer: threading.Thread | None = None
        self._timer_at = float("inf")
        self._started = 0
        self._closing = False

    @property
    def state(self) -> PoolState:
        with self._lock:
            # What is queued while all threads have ended never begins.
            busy = bool(self._running or (self._queue and self._threads))
            return PoolState(len(self._threads), len(self._hung), self._queued_items, busy)

    def submit(self, jobs: Sequence[Job], *, inner: bool = False, first: bool = False) -> None:
        """Queues all of them or none: DRAINING, QUEUE_FULL, STORAGE_UNAVAILABLE (no thread is left). inner:
        a job that others wait for; it is taken while the pool closes, too. first: before all that wait."""
        count = sum(job.items for job in jobs)
        with self._lock:
            if self._closing and not inner:
                raise CoreError(Reason.DRAINING, f"{self._name} is closing")
            if self._queued_items + count > self._bound:
                raise CoreError(
                    Reason.QUEUE_FULL,
                    f"{self._name}: {self._queued_items} blocks wait, {count} more are over {self._bound}",
                    {"queued": self._queued_items, "bound": self._bound, "retry_after_ms": 5},
                )
            if len(self._hung) > self._spare + self._target - 1:
                raise CoreError(
                    Reason.STORAGE_UNAVAILABLE,
                    f"{self._name}: all {len(self._threads)} threads hang in the device",
                    {"hung": len(self._hung)},
                )
            if first:
                self._queue.extendleft(reversed(jobs))
            else:
                self._queue.extend(jobs)
            self._queued_items += count
            self._grow(len(jobs))
            self._work.notify(len(jobs))
            self._wake_timer(min(job.deadline for job in jobs))

    def settled(self, job: Job) -> None:
        """A job that said it was not over is over."""
        with self._lock:
            if job in self._waiting:
                self._waiting.discard(job)
                self._expired.discard(job)
                self._idle.notify_all()
            else:
                # It is over before the thread that ran it has come back to say that it is not.
                self._settled.add(job)

    def expire(self) -> None:
        """Ends the waiting of all callers whose deadline has come. A thread of the pool calls it in time; a
        test with a clock of its own calls it when it has moved the clock."""
        if self._clock is None:
            return
        now = self._clock()
        with self._lock:
            never = [job for job in self._queue if job.deadline <= now]
            if never:
                self._queue = deque(job for job in self._queue if job.deadline > now)
                self._queued_items -= sum(job.items for job in never)
            begun = (*self._running.values(), *self._waiting)
            late = [job for job in begun if job.deadline <= now and job not in self._expired]
            self._expired.update(late)
            self._hung.update(thread for thread, job in self._running.items() if job in self._expired)
            self._grow(len(self._queue))
            if self._pace is not None:
                # Whoever calls this may have moved the clock.
                self._work.notify_all()
        tell_each(
            [
                *(partial(job.refuse, _late(self._name)) for job in never),
                *(job.expire for job in late),
                *([self._hung_changed] if late else ()),
            ]
        )

    def drain(self, seconds: float) -> bool:
        """Takes no more work and waits (real time) until all is over. Then, or when the time is up, what has
        not begun is refused and what runs is expired. False: a thread still hangs."""
        with self._lock:
            self._closing = True
            self._idle.wait_for(lambda: not (self._queue or self._running or self._waiting), seconds)
            never, self._queue, self._queued_items = list(self._queue), deque(), 0
            late = [job for job in (*self._running.values(), *self._waiting) if job not in self._expired]
            self._expired.update(late)
            self._hung.update(self._running)
            over = not (self._running or self._waiting)
            self._work.notify_all()
            self._timer_wake.notify_all()
            threads = [*(self._threads - self._hung), *([self._timer] if self._timer else [])]
        closed = CoreError(Reason.DRAINING, f"{self._name} closed before this began")
        try:
            tell_each([*(partial(job.refuse, closed) for job in never), *(job.expire for job in late)])
        except Exception:
            # Whoever closes gives up what others must have.
            report_defect()
        for thread in threads:
            thread.join(_JOIN_SECONDS)
        return over

    def _grow(self, jobs: int) -> None:
        """Starts threads for waiting jobs, up to the target plus what hangs and may be replaced."""
        limit = self._target + min(len(self._hung), self._spare)
        while len(self._threads) < limit and self._sleeping + self._started < jobs and not self._closing:
            thread = threading.Thread(target=self._serve, name=f"{self._name}-io", daemon=True)
            self._threads.add(thread)
            self._started += 1
            thread.start()

    def _serve(self) -> None:
        me = threading.current_thread()
        with self._lock:
            self._started -= 1
        try:
            while (job := self._next(me)) is not None:
                over = True
                try:
                    if self._clock is not None and self._clock() >= job.deadline:
                        job.refuse(_late(self._name))
                    else:
                        over = job.run()
                finally:
                    self._ran(me, job, over)
        finally:
            # Also after a defect in what a job tells its caller: another thread takes this one's place.
            with self._lock:
                self._threads.discard(me)
                self._grow(len(self._queue))

    def _next(self, me: threading.Thread) -> Job | None:
        with self._lock:
            while True:
                surplus = len(self._threads) - len(self._hung) > self._target
                if surplus or (self._closing and not self._queue):
                    self._threads.discard(me)
                    return None
                job, seconds = self._due()
                if job is not None:
                    self._queued_items -= job.items
                    self._running[me] = job
                    return job
                self._sleeping += 1
                self._work.wait(seconds)
                self._sleeping -= 1

    def _due(self) -> tuple[Job | None, float | None]:
        """Takes the first job whose bytes are due out of the queue; or for how long to wait, None for until
        one comes. A pool that closes minds no pace."""
        if self._pace is None or self._closing:
            return (self._queue.popleft(), None) if self._queue else (None, None)
        late: dict[Way, float] = {}
        for at, job in enumerate(self._queue):
            seconds = late.get(job.load.way, 0.0) if job.load is not None else 0.0
            if job.load is not None and not seconds:
                seconds = self._pace.take(job.load, self)
            if not seconds:
                del self._queue[at]
                return job, None
            assert job.load is not None
            late[job.load.way] = seconds
            if len(late) == len(Way):
                break
        # The clock may be another than the system's: it is looked at again before long.
        return None, min(_TIMER_MAX_WAIT_SECONDS, *late.values()) if late else None

    def _ran(self, me: threading.Thread, job: Job, over: bool) -> None:
        with self._lock:
            del self._running[me]
            returned = me in self._hung or self._closing
            self._hung.discard(me)
            if over or job in self._settled:
                self._expired.discard(job)
                self._settled.discard(job)
            else:
                self._waiting.add(job)
            self._idle.notify_all()
        if returned:
            self._hung_changed()

    def _wake_timer(self, deadline: float) -> None:
        if self._clock is None or deadline == float("inf"):
            return
        if self._timer is None:
            self._timer = threading.Thread(target=self._watch, name=f"{self._name}-timer", daemon=True)
            self._timer.start()
        elif deadline < self._timer_at:
            self._timer_wake.notify()

    def _watch(self) -> None:
        assert self._clock is not None
        while True:
            with self._lock:
                known = (*self._queue, *self._running.values(), *self._waiting)
                dues = [job.deadline for job in known if job not in self._expired]
                if self._closing and not dues:
                    return
                self._timer_at = min(dues, default=float("inf"))
                wait = self._timer_at - self._clock()
                if wait > 0:
                    if dues:
                        wait = min(max(wait, _TIMER_MIN_WAIT_SECONDS), _TIMER_MAX_WAIT_SECONDS)
                    self._timer_wake.wait(wait if dues else None)
                    continue
            try:
                self.expire()
            except Exception:
                # Nobody else would keep the deadlines of those that come.
                report_defect()


def _late(name: str) -> CoreError:
    return CoreError(Reason.DEADLINE, f"{name}: the deadline came before the I/O could begin")
