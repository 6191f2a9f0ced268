"""Items of batches whose copy a device has been given, until their event passes.

Why it exists: a device reports by events that somebody has to look at, and a deadline comes whether or not
the device is done. So an item is told twice: over for the caller, and drained. It must not know copies or
slots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvtier_core.errors import CoreError, Reason
from kvtier_core.tiers.streams import Event
from kvtier_core.tiers.transfer import TransferSink


@dataclass(slots=True)
class Flight:
    """`finish` runs on the host once `event` has passed; what it raises is the item's error."""

    index: int
    sink: TransferSink
    deadline: float
    event: Event
    finish: Callable[[], None]
    told: bool = False


class Flights:
    """At most `limit` items at a time. The caller's metadata lock is held around each call."""

    def __init__(self, limit: int, clock: Callable[[], float] | None) -> None:
        self._limit = limit
        self._clock = clock
        self._items: deque[Flight] = deque()

    def __len__(self) -> int:
        return len(self._items)

    def admit(self, count: int) -> None:
        """QUEUE_FULL unless `count` more items fit."""
        if len(self._items) + count > self._limit:
            raise CoreError(
                Reason.QUEUE_FULL,
                f"{count} transfers wanted, {len(self._items)} of {self._limit} in flight",
                {"in_flight": len(self._items), "limit": self._limit, "wanted": count},
            )

    def add(self, flight: Flight) -> None:
        self._items.append(flight)

    def poll(self) -> int:
        """Tells sinks of items that ended, and of those whose deadline came; returns how many remain."""
        now = self._clock() if self._clock is not None else None
        for _ in range(len(self._items)):
            flight = self._items.popleft()
            if flight.event.ready():
                self._end(flight, late=now is not None and now > flight.deadline)
                continue
            if now is not None and now >= flight.deadline and not flight.told:
                self._tell(flight, _late())
            self._items.append(flight)
        return len(self._items)

    def abandon(self, error: CoreError) -> None:
        """Tells every sink that its item is over; `poll` still reports when it is drained."""
        for flight in self._items:
            self._tell(flight, error)

    @staticmethod
    def _tell(flight: Flight, error: CoreError | None) -> None:
        if not flight.told:
            flight.told = True
            flight.sink.done(flight.index, error)

    def _end(self, flight: Flight, *, late: bool) -> None:
        error: CoreError | None = None
        if not flight.told:
            try:
                if late:
                    raise _late()
                flight.finish()
            except CoreError as raised:
                error = raised
        self._tell(flight, error)
        flight.sink.drained(flight.index)


def _late() -> CoreError:
    return CoreError(Reason.DEADLINE, "the copy did not end in time")
