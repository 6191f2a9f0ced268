"""How long a thread may look for a message before it sleeps: as long as that lately paid, and within bounds.

Why it exists: to sleep and to be woken takes as long as a small attention, and a core that looks for nothing
is wasted. It reads no clock and knows no socket: it is told what became of each wait, and says how long the
next one may look.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

_MILLISECOND = 1_000_000


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of one thread's looking, nanoseconds.

    most: of one wait. first: of the first wait after a short one. taken: a look that comes so much later than
    the one before it says that somebody else had the core. wasted_of: looking in vain takes at most one part
    in so many of any time, beyond `burst`. rest, longest_rest: without looking, after the core was taken
    once, and again and again.
    """

    most: int
    first: int = 50_000
    taken: int = 100_000
    wasted_of: int = 10
    burst: int = 2 * _MILLISECOND
    rest: int = 10 * _MILLISECOND
    longest_rest: int = 1_000 * _MILLISECOND

    def __post_init__(self) -> None:
        for one in fields(self):
            if getattr(self, one.name) <= 0:
                raise ValueError(f"{one.name}: {getattr(self, one.name)} is not positive")
        for less, more in (("first", "most"), ("most", "burst"), ("rest", "longest_rest")):
            if getattr(self, less) > getattr(self, more):
                raise ValueError(f"{less}: {getattr(self, less)} is above {more}, {getattr(self, more)}")


class Patience:
    """One thread's. What became of a wait is told before the next one begins: by `came`, `missed` or `taken`;
    nothing where no message came."""

    __slots__ = ("_credit", "_filled", "_given", "_rest", "_until", "bounds", "limit", "seen", "wasted")

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        # What the next wait may look, where nothing else speaks against it.
        self.limit = 0
        # Since it was made: nanoseconds of looking that saw a message, and of looking in vain.
        self.seen = self.wasted = 0
        self._credit, self._filled, self._given = bounds.burst, 0, 0
        self._rest = self._until = 0

    def look(self, now: int) -> int:
        """Nanoseconds that a wait which begins now may look before it sleeps; 0: it sleeps at once. now: of a
        clock that never goes back."""
        if self._given:
            # Nothing was told of the last one: no message came.
            self._lose(self._given)
        limit = self.limit
        if not limit or now < self._until:
            return 0
        bounds = self.bounds
        # Compared, not min and max: a wait is begun and ended for each message.
        credit = self._credit + (now - self._filled) // bounds.wasted_of
        self._credit = credit = credit if credit < bounds.burst else bounds.burst
        self._filled = now
        if limit > credit:
            return 0
        self._given = limit
        return limit

    def came(self, looked: int) -> None:
        """The message was seen after so long a look."""
        self.seen += looked
        self._given = 0
        bounds = self.bounds
        # Twice what was needed, so that one that takes a little longer is seen as well.
        wanted = 2 * looked
        if wanted < bounds.first:
            wanted = bounds.first
        elif wanted > bounds.most:
            wanted = bounds.most
        less = self.limit - self.limit // 16
        self.limit = wanted if wanted > less else less

    def missed(self, waited: int) -> None:
        """The message came after the look that was allowed, and so long after the wait's beginning."""
        self._lose(self._given)
        bounds = self.bounds
        if waited <= bounds.most:
            # A little longer, or any look at all, and it would have been seen.
            self.limit = min(bounds.most, max(bounds.first, 2 * self.limit, waited + waited // 4))
        else:
            halved = self.limit // 2
            self.limit = halved if halved >= bounds.first // 4 else 0

    def taken(self, looked: int, now: int) -> None:
        """Somebody else had the core in a look that ends now, whether or not the message was seen."""
        self._lose(min(looked, self._given))
        bounds = self.bounds
        recently = now - self._until < 8 * self._rest
        self._rest = min(bounds.longest_rest, 2 * self._rest) if recently else bounds.rest
        self._until = now + self._rest

    def _lose(self, looked: int) -> None:
        self.wasted += looked
        self._credit -= looked
        self._given = 0
