"""The write budget: how many bytes a day may wear the flash.

Why it exists: a cache writes as fast as it is let, and flash is worn out by bytes. A block is charged when
its slot is reserved, before anything is promised, so that a refusal is the refusal of a demotion. It must not
know devices or blocks; the clock is injected.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from decimal import Decimal

DAY_SECONDS = 86_400.0


def bytes_per_day(device_bytes: int, drive_writes_per_day: Decimal, target_fraction: Decimal) -> int:
    """What a cache may write a day: the device's rated writes (DWPD x capacity) times its share of them."""
    return int(device_bytes * drive_writes_per_day * target_fraction)


def daily_budget(rate: int, clock: Callable[[], float]) -> WriteBudget:
    """`rate` bytes a day, of which a whole day's may be saved up: traffic has its hours, flash has years."""
    return WriteBudget(rate, rate, clock)


class WriteBudget:
    """A token bucket. rate: bytes a day; burst: the most that is saved up, bytes; clock: seconds, monotonic.
    Full at the start. Thread-safe. written_bytes: charged and not given back; refused: how often a write was
    put off."""

    def __init__(self, rate: int, burst: int, clock: Callable[[], float]) -> None:
        if rate <= 0 or burst <= 0:
            raise ValueError(f"a budget needs a positive rate and burst, not {rate} and {burst}")
        self._rate = rate / DAY_SECONDS
        self._burst = float(burst)
        self._level = float(burst)
        self._clock = clock
        self._at = clock()
        self._lock = threading.Lock()
        self._refused_at: float | None = None
        self.written_bytes = 0
        self.refused = 0

    def take(self, size: int) -> float:
        """Seconds until `size` bytes may be written; 0.0: they may, and are charged now.

        A block larger than the burst is let through when the bucket is full, and leaves a debt."""
        with self._lock:
            self._refill()
            missing = min(float(size), self._burst) - self._level
            if missing > 0:
                self.refused += 1
                self._refused_at = self._clock()
                return missing / self._rate
            self._spend(size)
            return 0.0

    def charge(self, size: int) -> None:
        """Charges bytes that are written in any case (erasures); the level may fall below zero."""
        with self._lock:
            self._refill()
            self._spend(size)

    def refund(self, size: int) -> None:
        """Gives back what was charged and not written."""
        with self._lock:
            self._refill()
            self._level = min(self._burst, self._level + size)
            self.written_bytes -= size

    def refused_within(self, seconds: float) -> bool:
        """Whether a write was put off in the last so many seconds."""
        with self._lock:
            return self._refused_at is not None and self._clock() - self._refused_at <= seconds

    @property
    def available_bytes(self) -> int:
        with self._lock:
            self._refill()
            return int(self._level)

    def _refill(self) -> None:
        now = self._clock()
        if now > self._at:
            self._level = min(self._burst, self._level + (now - self._at) * self._rate)
            self._at = now

    def _spend(self, size: int) -> None:
        self._level -= size
        self.written_bytes += size
