"""Staged reads of one step: the next block is on its way while the current one is attended.

Why it exists: storage and arithmetic should overlap, and what they do not hide is the stall that receipts
state. It must not know attention. Reads run on an injected executor, or inline without one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, wait
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Self

from kvtier_core.errors import CoreError, Reason
from kvtier_core.tiers.staging import StagingBuffer

READ_TIMEOUT_SECONDS = 30.0
Job = Callable[[StagingBuffer], None]


class StagedReads:
    """Runs jobs in order, `len(buffers)` ahead. A buffer is valid until the next call of `next`. No wait goes
    past `deadline`, seconds on `clock`: a read that does is abandoned, and its buffer with it, since the read
    may still write there. `abandoned` is complete after the exit; whoever owns the buffers replaces those."""

    def __init__(
        self,
        jobs: Sequence[Job],
        buffers: Sequence[StagingBuffer],
        executor: Executor | None,
        clock: Callable[[], float],
        deadline: float | None = None,
    ) -> None:
        self._deadline = deadline
        self.abandoned: list[StagingBuffer] = []
        self._jobs = deque(jobs)
        self._executor = executor
        self._clock = clock
        self._free = deque(buffers)
        self._running: deque[tuple[Future[None], StagingBuffer]] = deque()
        self._held: StagingBuffer | None = None
        self.stall_seconds = 0.0
        self._fill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Waits for reads in flight: their buffers belong to the engine. What has not begun never will."""
        begun = [(future, buffer) for future, buffer in self._running if not future.cancel()]
        if begun:
            wait([future for future, _ in begun], timeout=self._patience())
        self.abandoned += [buffer for future, buffer in begun if not future.done()]

    def _patience(self) -> float:
        """Seconds that a wait may take from now."""
        if self._deadline is None:
            return READ_TIMEOUT_SECONDS
        return max(0.0, min(READ_TIMEOUT_SECONDS, self._deadline - self._clock()))

    def _fill(self) -> None:
        if self._executor is None:
            return
        while self._jobs and self._free:
            job, buffer = self._jobs.popleft(), self._free.popleft()
            self._running.append((self._executor.submit(job, buffer), buffer))

    def next(self) -> StagingBuffer:
        """The next job's buffer, verified. Raises what the read raised, DEADLINE when that has come, and
        STORAGE_UNAVAILABLE on a hang before it."""
        if self._held is not None:
            self._free.append(self._held)
            self._held = None
        started = self._clock()
        try:
            if self._executor is None:
                buffer = self._free.popleft()
                self._held = buffer
                self._jobs.popleft()(buffer)
                return buffer
            self._fill()
            future, buffer = self._running[0]
            future.result(timeout=self._patience())
            self._running.popleft()
            self._held = buffer
            return buffer
        except FutureTimeout as error:
            if self._deadline is not None and self._clock() >= self._deadline:
                raise CoreError(Reason.DEADLINE, "the deadline passed during a staged read") from error
            raise CoreError(
                Reason.STORAGE_UNAVAILABLE, f"a staged read did not end within {READ_TIMEOUT_SECONDS} s"
            ) from error
        finally:
            self.stall_seconds += self._clock() - started
