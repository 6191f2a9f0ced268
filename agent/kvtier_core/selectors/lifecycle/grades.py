"""What audits of selections found, counted by selector.

Why it exists: a grading comes long after its answer and from another thread; what is told of it is a
histogram. It must not know how a share is certified."""

from __future__ import annotations

import bisect
import threading
from dataclasses import dataclass, field

from kvtier_core.selectors.lifecycle.names import Name

BOUNDS = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1.0)
"""Upper ends of the histogram of certified shares."""
AUDITS_AT_ONCE = 64
"""Gradings that wait, at most; those beyond are counted as failures."""


@dataclass(slots=True)
class Grades:
    """Of one selector of one cache, since start. counts: gradings by the least certified share of any query
    head, up to each of BOUNDS; total: of those shares. failures: gradings that came to
    nothing, by reason."""

    counts: list[int] = field(default_factory=lambda: [0] * len(BOUNDS))
    total: float = 0.0
    failures: dict[str, int] = field(default_factory=dict)

    @property
    def graded(self) -> int:
        return sum(self.counts)


class AuditBook:
    """What audits of one process found. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._grades: dict[Name, Grades] = {}
        self._pending = 0

    def begin(self) -> bool:
        """Whether one more may wait to be graded."""
        with self._lock:
            if self._pending >= AUDITS_AT_ONCE:
                return False
            self._pending += 1
            return True

    def end(self) -> None:
        with self._lock:
            self._pending -= 1

    def graded(self, name: Name, share: float) -> None:
        with self._lock:
            grades = self._grades.setdefault(name, Grades())
            grades.counts[min(bisect.bisect_left(BOUNDS, share), len(BOUNDS) - 1)] += 1
            grades.total += share

    def failed(self, name: Name, reason: str) -> None:
        with self._lock:
            failures = self._grades.setdefault(name, Grades()).failures
            failures[reason] = failures.get(reason, 0) + 1

    def read(self) -> dict[Name, Grades]:
        with self._lock:
            return {
                name: Grades(list(one.counts), one.total, dict(one.failures))
                for name, one in self._grades.items()
            }

    def forget(self, cache: str) -> None:
        with self._lock:
            self._grades = {name: one for name, one in self._grades.items() if name.cache != cache}
