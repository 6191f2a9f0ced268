"""Pins: scopes that keep copies where they are, taken in the lookup that found them, and never leaked.

Why it exists: between a hit and its use an eviction may strike, and a pin that someone forgot holds a pool
for ever. So a lookup pins in the same step, a pin is a scope, and one that is dropped without being closed
is found, given back and counted. It must not know what is read, nor why.

The caller holds the metadata lock. `Pin.close` may also be called without it, as the end of a scope or from
the garbage collector: then the leases come back at the next step that holds the lock (`reap`)."""

from __future__ import annotations

import math
import weakref
from collections import Counter, deque
from collections.abc import Sequence
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from kvtier_core.directory import Directory
from kvtier_core.errors import CoreError
from kvtier_core.transactions.reasons import MoveReason, MoveRefused, refusal

Lines = NDArray[np.int64]


class _Held:
    """The leases of one pin; no reference to the pin itself, or it could never be collected."""

    __slots__ = ("deadline", "leaked", "lines", "number", "tiers")

    def __init__(self, number: int, lines: list[int], tiers: list[int], deadline: float) -> None:
        self.number = number
        self.lines = lines
        self.tiers = tiers
        self.deadline = deadline
        self.leaked = False


class Pin:
    """Copies that stay until the scope ends: `lines[i]` in tier `tiers[i]`. Made by `Pins` only.

    deadline: absolute seconds after which nobody may rely on it any more; it is never broken by force, since
    somebody may still be reading, but it shows as overdue."""

    __slots__ = ("__weakref__", "_finalizer", "_held", "_pins")

    def __init__(self, pins: Pins, held: _Held) -> None:
        self._pins = pins
        self._held = held
        self._finalizer = weakref.finalize(self, pins._dropped, held)
        # At exit there is nobody left to give anything back to.
        self._finalizer.atexit = False

    def __len__(self) -> int:
        return len(self._held.lines)

    @property
    def lines(self) -> tuple[int, ...]:
        return tuple(self._held.lines)

    @property
    def tiers(self) -> tuple[int, ...]:
        return tuple(self._held.tiers)

    @property
    def deadline(self) -> float:
        return self._held.deadline

    @property
    def open(self) -> bool:
        return self._finalizer.alive

    def check(self, now: float) -> None:
        """LEASE_EXPIRED when it is closed or its deadline has come: before an answer is published from it."""
        if not self.open or now >= self._held.deadline:
            raise MoveRefused(MoveReason.LEASE_EXPIRED, "the pin no longer holds")

    def close(self) -> None:
        """Ends the pin; a second time nothing happens."""
        if self._finalizer.detach() is not None:
            self._pins._closed(self._held)

    def __enter__(self) -> Pin:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Pins:
    """All pins of one cache on one node."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._open: dict[int, _Held] = {}
        self._returned: deque[_Held] = deque()
        self._next = 1
        self.counts: Counter[str] = Counter()
        """taken, leaked: pins since start."""

    def hold(
        self, lines: Sequence[int] | Lines, tiers: int | Sequence[int], deadline: float = math.inf
    ) -> Pin:
        """Pins the copy of each line in its tier (one tier for all, or one for each): all or none. A line
        named twice is held twice. NOT_VISIBLE, STALE_AUTHORITY_EPOCH, MISS, QUEUE_FULL for the first that
        cannot be."""
        wanted = [int(line) for line in lines]
        where = [tiers] * len(wanted) if isinstance(tiers, int) else [int(tier) for tier in tiers]
        self.reap()
        lease = self._directory.lease
        taken = 0
        try:
            for line, tier in zip(wanted, where, strict=True):
                lease(line, tier)
                taken += 1
        except CoreError as error:
            for line, tier in zip(wanted[:taken], where[:taken], strict=True):
                self._directory.unlease(line, tier)
            raise refusal(error, MoveReason.NOT_VISIBLE) from error
        held = _Held(self._next, wanted, where, deadline)
        self._next += 1
        self._open[held.number] = held
        self.counts["taken"] += 1
        return Pin(self, held)

    def lookup(self, keys: NDArray[np.uint8], *, tier: int | None = None, deadline: float = math.inf) -> Pin:
        """Finds and pins in one step the leading keys [n, 32] that can be read: in `tier`, or each in the
        fastest tier that has it. `len(pin)` is how many; their order is the keys'."""
        lines = self._directory.published_prefix(keys).tolist()
        tiers: list[int] = []
        for line in lines:
            found = self._best(line) if tier is None else tier
            if found is None or not self._directory.counts(line, found):
                break
            tiers.append(found)
        return self.hold(lines[: len(tiers)], tiers, deadline)

    def _best(self, line: int) -> int | None:
        counts = self._directory.counts
        return next((tier for tier in range(self._directory.tiers) if counts(line, tier)), None)

    # Giving back.

    def reap(self) -> int:
        """Gives back the leases of pins that ended. Returns how many pins that were. Call it upstream of
        whatever needs room: what a collector found may be what stands in the way."""
        count = 0
        while self._returned:
            held = self._returned.popleft()
            for line, tier in zip(held.lines, held.tiers, strict=True):
                self._directory.unlease(line, tier)
            self._open.pop(held.number, None)
            self.counts["leaked"] += held.leaked
            count += 1
        return count

    def _closed(self, held: _Held) -> None:
        self._returned.append(held)

    def _dropped(self, held: _Held) -> None:
        # From the collector, at any point of any thread: nothing here may take a lock or touch the directory.
        held.leaked = True
        self._returned.append(held)

    # Looking.

    @property
    def open(self) -> int:
        """Pins whose leases are held, those that ended but were not reaped included."""
        return len(self._open)

    def overdue(self, now: float) -> int:
        """Pins past their deadline that somebody still holds."""
        return sum(held.deadline <= now for held in self._open.values())
