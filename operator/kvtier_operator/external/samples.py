"""What a source answers: samples of processes that count, or one value. And why it could not.

Neither knows HTTP nor books; a provider makes these, the reading of a gate takes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from kvtier_evidence.grid import Histogram
from kvtier_evidence.verdicts import Reason


class SourceError(Exception):
    """The source could not be read, or not be trusted. `reason` is QueryFailed or ResetUnknown."""

    def __init__(self, message: str, reason: Reason = Reason.QUERY_FAILED) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class CounterSample:
    """All series of one process at one scrape. start: seconds when they began to count, None: not told. Keys
    are part number and labels, of a classic histogram with the edge in front."""

    target: str
    start: float | None
    at: float
    counters: Mapping[tuple[int, str], int]


@dataclass(frozen=True)
class HistogramSample:
    target: str
    start: float | None
    at: float
    histogram: Histogram


@dataclass(frozen=True)
class PointSample:
    at: float
    value: float


class Provider(Protocol):
    """One source. Times are seconds of the Unix epoch, of the source's clock. Raises SourceError."""

    async def counters(self, selectors: tuple[str, ...], since: float, until: float) -> list[CounterSample]:
        """Raw samples of since < t <= until, in the order of time; selector by its place."""
        ...

    async def histograms(self, selector: str, since: float, until: float) -> list[HistogramSample]: ...

    async def point(self, expression: str, at: float) -> PointSample | None:
        """The one value; None when there is none."""
        ...
