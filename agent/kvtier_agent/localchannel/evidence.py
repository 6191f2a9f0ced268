"""What frames on a channel's thread tell a cache's evidence, which lives on the event loop.

Why it exists: the thread must not wait for the loop, and a loop that stands still must not make the agent's
memory grow. What cannot be kept one by one is kept as a sum, or as a missing value, which gates take for the
worst: nothing that speaks against a candidate is lost. It knows no frame and no socket.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from kvtier_agent.evidence_port import FrameEvidence, Progress
from kvtier_evidence.window import WindowKey

MAX_WAITING = 1024
"""Calls of one channel that wait for the loop one by one."""
Post = Callable[[Callable[[], None]], None]
_Call = Callable[[], None]
_Unit = tuple[WindowKey, str]
log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Beyond:
    """What came while no more could wait: one value for each unit or counter, which open sessions bound.
    missing: the last step of a unit whose error is not known."""

    missing: dict[_Unit, int] = field(default_factory=dict)
    stalls: dict[_Unit, float] = field(default_factory=dict)
    progress: dict[_Unit, Progress] = field(default_factory=dict)
    counters: Counter[tuple[WindowKey, str]] = field(default_factory=Counter)


class LoopEvidence:
    """Tells a cache's evidence of frames from another thread, in order: on the event loop, where it lives."""

    def __init__(
        self, evidence: FrameEvidence, post: Post, lost: Callable[[int], None] = lambda count: None
    ) -> None:
        """post: calls a function on the event loop, soon and without waiting; never raises. lost: told on the
        loop how many step errors have become a missing value."""
        self._evidence = evidence
        self._post = post
        self._lost = lost
        self._lock = threading.Lock()
        self._waiting: list[_Call] = []
        self._beyond: _Beyond | None = None
        self._errors = 0

    def step_error(self, key: WindowKey, unit: str, step: int, error: float) -> None:
        with self._lock:
            beyond = self._full(partial(self._evidence.step_error, key, unit, step, error))
            if beyond is not None:
                beyond.missing[key, unit] = step
                self._errors += 1

    def progress(self, key: WindowKey, unit: str, progress: Progress) -> None:
        with self._lock:
            beyond = self._full(partial(self._evidence.progress, key, unit, progress))
            if beyond is not None:
                beyond.progress[key, unit] = progress

    def stall(self, key: WindowKey, unit: str, seconds: float) -> None:
        with self._lock:
            beyond = self._full(partial(self._evidence.stall, key, unit, seconds))
            if beyond is not None:
                beyond.stalls[key, unit] = beyond.stalls.get((key, unit), 0.0) + seconds

    def zero_tolerance(self, key: WindowKey, counter: str) -> None:
        with self._lock:
            beyond = self._full(partial(self._evidence.zero_tolerance, key, counter))
            if beyond is not None:
                beyond.counters[key, counter] += 1

    def _full(self, call: _Call) -> _Beyond | None:
        """Lets the call wait, or gives what is beyond all that may."""
        if not self._waiting:
            self._post(self._tell)
        if len(self._waiting) < MAX_WAITING:
            self._waiting.append(call)
            return None
        if self._beyond is None:
            self._beyond = _Beyond()
        return self._beyond

    def _tell(self) -> None:
        """On the loop."""
        with self._lock:
            calls, self._waiting = self._waiting, []
            beyond, self._beyond = self._beyond, None
            errors, self._errors = self._errors, 0
        if beyond is not None:
            self._lost(errors)
            log.warning("the event loop was late: %d step errors are missing values", errors)
        for call in chain(calls, _calls(self._evidence, beyond or _Beyond())):
            try:
                call()
            except Exception:
                # A defect of one must not cost what waits behind it.
                log.exception("evidence of a frame failed")


def _calls(evidence: FrameEvidence, beyond: _Beyond) -> Iterator[_Call]:
    for (key, unit), step in beyond.missing.items():
        yield partial(evidence.step_error, key, unit, step, math.nan)
    for (key, unit), seconds in beyond.stalls.items():
        yield partial(evidence.stall, key, unit, seconds)
    for (key, unit), progress in beyond.progress.items():
        yield partial(evidence.progress, key, unit, progress)
    for (key, counter), count in beyond.counters.items():
        for _ in range(count):
            yield partial(evidence.zero_tolerance, key, counter)
