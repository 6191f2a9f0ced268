"""How fast a device may be read and written: a token bucket each, over all caches of a tier on a node.

Why it exists: a drive, or a share of one, is others' as well, and its class says how much of it is ours. Jobs
wait in the queue of their pool until their bytes are due; whoever waits for them has a deadline, and hears
DEADLINE where the pace does not let them. It must not know jobs or queues; the clock is injected.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from kvtier_core.tiers.nvme.endurance import DAY_SECONDS, WriteBudget

BURST_SECONDS = 0.1
"""What may be saved up: enough for a few system calls, too little to be felt as a burst."""


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
        self._buckets = {way: _bucket(rate, clock) for way, rate in rates.items() if rate is not None}

    def take(self, load: Load) -> float:
        """Seconds until it may begin; 0.0: it may, and its bytes are charged now. What is larger than the
        burst begins when the bucket is full, and those after it wait for longer."""
        bucket = self._buckets.get(load.way)
        return 0.0 if bucket is None else bucket.take(load.size)

    def charge(self, load: Load) -> None:
        """For bytes that move in any case."""
        bucket = self._buckets.get(load.way)
        if bucket is not None:
            bucket.charge(load.size)


def _bucket(rate: int, clock: Callable[[], float]) -> WriteBudget:
    if rate <= 0:
        raise ValueError(f"a pace of {rate} bytes a second")
    return WriteBudget(int(rate * DAY_SECONDS), max(1, int(rate * BURST_SECONDS)), clock)
