"""How fast a device may be read and written: a token bucket each, over all caches of a tier on a node.

Why it exists: a drive, or a share of one, is others' as well, and its class says how much of it is ours. Jobs
wait in the queue of their pool until their bytes are due; whoever waits for them has a deadline, and hears
DEADLINE where the pace does not let them. It must not know jobs or queues; the clock is injected.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from kvtier_core.tiers.nvme.endurance import DAY_SECONDS, WriteBudget

BURST_SECONDS = 0.1
"""What may be saved up: enough for a few system calls, too little to be felt as a burst."""
ASK_AGAIN_SECONDS = 0.001
LAPSE_SECONDS = 0.1
"""How long after its time a turn waits for who had it: its job may have ended otherwise."""


class Way(StrEnum):
    READ = "read"
    WRITE = "write"


@dataclass(frozen=True, slots=True)
class Load:
    """What a job moves: `size` bytes one way."""

    way: Way
    size: int


class Pace:
    """read, write: bytes a second; None: no bound. clock: seconds, monotonic. Thread-safe."""

    def __init__(self, read: int | None, write: int | None, clock: Callable[[], float]) -> None:
        rates = {Way.READ: read, Way.WRITE: write}
        self._turns = {way: _Turns(rate, clock) for way, rate in rates.items() if rate is not None}

    def take(self, load: Load, who: object = None) -> float:
        """Seconds until it may begin; 0.0: it may, and its bytes are charged now. What is larger than the
        burst begins when the bucket is full, and those after it wait for longer. who: which of several asks,
        each for one job at a time; who had to wait comes before who asks later, however little that is."""
        turns = self._turns.get(load.way)
        return 0.0 if turns is None else turns.take(load.size, id(who))

    def charge(self, load: Load) -> None:
        """For bytes that move in any case."""
        turns = self._turns.get(load.way)
        if turns is not None:
            turns.bucket.charge(load.size)


class _Turns:
    """One bucket, and who waits for it, in order, with when each is to ask again."""

    def __init__(self, rate: int, clock: Callable[[], float]) -> None:
        if rate <= 0:
            raise ValueError(f"a pace of {rate} bytes a second")
        self.bucket = WriteBudget(int(rate * DAY_SECONDS), max(1, int(rate * BURST_SECONDS)), clock)
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: dict[int, float] = {}

    def take(self, size: int, who: int) -> float:
        with self._lock:
            now = self._clock()
            for other in [each for each, due in self._waiting.items() if due + LAPSE_SECONDS < now]:
                del self._waiting[other]
            first = next(iter(self._waiting), who)
            if first == who:
                seconds = self.bucket.take(size)
            else:
                seconds = max(ASK_AGAIN_SECONDS, self._waiting[first] - now)
            if seconds:
                self._waiting[who] = now + seconds
            else:
                self._waiting.pop(who, None)
            return seconds
