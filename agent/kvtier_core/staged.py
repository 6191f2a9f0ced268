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
    """Runs jobs in order, `len(buffers)` ahead. A buffer is valid until the next call of `next`."""

    def __init__(
        self,
        jobs: Sequence[Job],
        buffers: Sequence[StagingBuffer],
        executor: Executor | None,
        clock: Callable[[], float],
    ) -> None:
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
        begun = [future for future, _ in self._running if not future.cancel()]
        if begun:
            wait(begun, timeout=READ_TIMEOUT_SECONDS)

    def _fill(self) -> None:
        if self._executor is None:
            return
        while self._jobs and self._free:
            job, buffer = self._jobs.popleft(), self._free.popleft()
            self._running.append((self._executor.submit(job, buffer), buffer))

    def next(self) -> StagingBuffer:
        """The next job's buffer, verified. Raises what the read raised; STORAGE_UNAVAILABLE on a hang."""
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
            future, buffer = self._running.popleft()
            self._held = buffer
            future.result(timeout=READ_TIMEOUT_SECONDS)
            return buffer
        except FutureTimeout as error:
            raise CoreError(
                Reason.STORAGE_UNAVAILABLE, f"a staged read did not end within {READ_TIMEOUT_SECONDS} s"
            ) from error
        finally:
            self.stall_seconds += self._clock() - started
