"""The flash tier's I/O pool without threads: the simulator says which job runs next, which hangs, and until
when."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvtier_core.errors import CoreError, Reason
from kvtier_core.tiers.nvme import tier as tier_module
from kvtier_core.tiers.nvme.iopool import Job, PoolState
from kvtier_core.tiers.nvme.pace import Pace


class SimPool:
    """As `IoPool`, but nothing runs by itself."""

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
        assert pace is None, "when a job begins is drawn here"
        self._bound = bound
        self._clock = clock
        self._hung_changed = hung_changed
        self.queue: list[Job] = []
        self.hung: list[Job] = []
        self._running: list[Job] = []
        self._waiting: list[Job] = []
        # By id and with the job, so that no later job can have the same id.
        self._early: dict[int, Job] = {}
        self._expired: dict[int, Job] = {}
        self._closing = False

    @property
    def state(self) -> PoolState:
        late = sum(id(job) in self._expired for job in self.hung)
        busy = bool(self.queue or self.hung or self._running)
        return PoolState(1, late, sum(job.items for job in self.queue), busy)

    @property
    def idle(self) -> bool:
        return not (self.state.busy or self._waiting)

    def submit(self, jobs: Sequence[Job], *, inner: bool = False, first: bool = False) -> None:
        """first: who is next is drawn from all that wait, so nothing of it holds here."""
        if self._closing and not inner:
            raise CoreError(Reason.DRAINING, "the pool is closing")
        if sum(job.items for job in (*self.queue, *jobs)) > self._bound:
            raise CoreError(Reason.QUEUE_FULL, "too many blocks wait")
        self.queue.extend(jobs)

    def settled(self, job: Job) -> None:
        if job in self._waiting:
            self._waiting.remove(job)
            self._expired.pop(id(job), None)
        else:
            self._early[id(job)] = job

    def expire(self) -> None:
        assert self._clock is not None
        now = self._clock()
        never = [job for job in self.queue if job.deadline <= now]
        self.queue = [job for job in self.queue if job.deadline > now]
        begun = (*self.hung, *self._running, *self._waiting)
        late = [job for job in begun if job.deadline <= now and id(job) not in self._expired]
        self._expired.update((id(job), job) for job in late)
        for job in never:
            job.refuse(CoreError(Reason.DEADLINE, "the deadline came before the I/O could begin"))
        for job in late:
            job.expire()
        if late:
            self._hung_changed()

    def hang(self, index: int) -> None:
        """A thread takes the job and does not come back from its system call."""
        self.hung.append(self.queue.pop(index))

    def run(self, index: int) -> None:
        self._serve(self.queue.pop(index))

    def come_back(self, index: int) -> None:
        """The device answers at last."""
        self._serve(self.hung.pop(index))

    def _serve(self, job: Job) -> None:
        self._running.append(job)
        over = job.run()
        self._running.remove(job)
        if over or id(job) in self._early:
            self._early.pop(id(job), None)
            self._expired.pop(id(job), None)
        else:
            self._waiting.append(job)

    def drain(self, seconds: float) -> bool:
        self._closing = True
        while self.queue or self.hung:
            self._serve((self.queue or self.hung).pop(0))
        return not self._waiting


@contextmanager
def simulated_pools() -> Iterator[None]:
    """Flash tiers that are made inside have such a pool."""
    real = tier_module.IoPool
    tier_module.IoPool = SimPool  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        tier_module.IoPool = real  # type: ignore[misc]
