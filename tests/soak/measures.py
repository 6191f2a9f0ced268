"""What a long run measures, in memory that does not grow with it: histograms, a line through RSS samples."""

from __future__ import annotations

import math
import os
import threading
from collections import Counter
from dataclasses import dataclass

import numpy as np

_PER_DECADE = 40
_LOWEST = 1e-7
_BINS = _PER_DECADE * 10


class Histogram:
    """Seconds on a logarithmic grid, 40 bins a decade from 0.1 us: a quantile is within 6 %. Thread-safe."""

    def __init__(self) -> None:
        self._counts = np.zeros(_BINS, dtype=np.int64)
        self._lock = threading.Lock()

    def add(self, seconds: float) -> None:
        at = int(math.log10(max(seconds, _LOWEST) / _LOWEST) * _PER_DECADE)
        with self._lock:
            self._counts[min(at, _BINS - 1)] += 1

    def __len__(self) -> int:
        return int(self._counts.sum())

    def quantile(self, share: float) -> float:
        """Upper edge of the bin that holds it, in seconds; 0 for none."""
        if not len(self):
            return 0.0
        at = int(np.searchsorted(np.cumsum(self._counts), share * len(self)))
        return float(_LOWEST * 10 ** ((at + 1) / _PER_DECADE))


class Tally:
    """Counts by name. Thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, name: str, count: int = 1) -> None:
        with self._lock:
            self._counts[name] += count

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    def all(self) -> dict[str, int]:
        with self._lock:
            return dict(sorted(self._counts.items()))


@dataclass(frozen=True, slots=True)
class Slope:
    """A least-squares line through the last two thirds of the samples. rise: bytes over that time."""

    bytes_per_minute: float
    rise: float
    last: int
    samples: int


class Memory:
    """Resident bytes of this process over time."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, int]] = []

    def sample(self, now: float) -> int:
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[1])
        self.samples.append((now, pages * os.sysconf("SC_PAGE_SIZE")))
        return self.samples[-1][1]

    def slope(self) -> Slope:
        late = self.samples[len(self.samples) // 3 :]
        if len(late) < 3:
            return Slope(0.0, 0.0, self.samples[-1][1] if self.samples else 0, len(late))
        times, sizes = np.array(late, dtype=np.float64).T
        per_second = float(np.polyfit(times - times[0], sizes, 1)[0])
        return Slope(per_second * 60, per_second * float(times[-1] - times[0]), int(sizes[-1]), len(late))
