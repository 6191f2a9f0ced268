"""Which tier is a chunk's home when a placement policy says so, and not recency.

Why it exists: FlexGen's plan is a share of K/V for each tier, NEO's a side for each whole request, and rows
come one chunk at a time. It must not know slots or what else lies in a tier: whoever places a chunk takes the
home while it has room, and goes by recency otherwise.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Protocol

from kvtier_core.placements.preference import PlacementPreference, TierShare

_GOLDEN = 0.6180339887498949


class Homes(Protocol):
    """Sessions by number, tiers by index. None: by recency."""

    def opened(self, session: int, slots: int) -> int | None:
        """A session begins that takes at most `slots` slots. The tier that its open chunks should lie in."""
        ...

    def home(self, session: int, chunk: int) -> int | None:
        """Of a sealed chunk; the same whenever it is asked."""
        ...

    def closed(self, session: int) -> None:
        """Known or not."""
        ...


class ByRecency:
    """No home: the newest chunks in the fastest tier that has room."""

    def opened(self, session: int, slots: int) -> int | None:
        return None

    def home(self, session: int, chunk: int) -> int | None:
        return None

    def closed(self, session: int) -> None:
        return None


class SharedHomes(ByRecency):
    """Each session's chunks in parts, whatever their age. shares: of one whole, at least one above 0.

    Chunk i stands at the fractional part of (i + 1/2) times the golden ratio: any run of chunks is spread
    over [0, 1) as evenly as can be, so a session's chunks follow the shares without a counter to keep."""

    def __init__(self, shares: Sequence[TierShare]) -> None:
        kept = [share for share in shares if share.share > 0.0]
        if not kept:
            raise ValueError("no tier has a share")
        self._tiers = [share.tier for share in kept]
        self._ends = list(accumulate(share.share for share in kept))

    def home(self, session: int, chunk: int) -> int | None:
        at = ((chunk + 0.5) * _GOLDEN) % 1.0 * self._ends[-1]
        return self._tiers[min(bisect_right(self._ends, at), len(self._tiers) - 1)]


class WholeHomes:
    """Each session whole in the first tier that can still hold all of it, as `wholerequest.place` decides,
    but one at a time. capacities: slots by tier, fastest first, of tiers that can be a side. What was
    promised to open sessions counts as taken, used or not. A session that no tier can hold goes by
    recency."""

    def __init__(self, capacities: Mapping[int, int]) -> None:
        self._left = dict(capacities)
        self._sides: dict[int, tuple[int, int]] = {}

    def opened(self, session: int, slots: int) -> int | None:
        self.closed(session)
        for tier, left in self._left.items():
            if slots <= left:
                self._left[tier] = left - slots
                self._sides[session] = (tier, slots)
                return tier
        return None

    def home(self, session: int, chunk: int) -> int | None:
        side = self._sides.get(session)
        return None if side is None else side[0]

    def closed(self, session: int) -> None:
        side = self._sides.pop(session, None)
        if side is not None:
            self._left[side[0]] += side[1]


class ByLane(ByRecency):
    """The baseline's rule for all sessions but those that were given one of their own."""

    def __init__(self, base: Homes) -> None:
        self.base = base
        self._own: dict[int, Homes] = {}

    def give(self, session: int, homes: Homes) -> None:
        """Before the session is opened."""
        self._own[session] = homes

    def take_back(self, session: int) -> None:
        """From now on the baseline's; chunks that have a home keep it."""
        own = self._own.pop(session, None)
        if own is not None:
            own.closed(session)

    def opened(self, session: int, slots: int) -> int | None:
        return self._own.get(session, self.base).opened(session, slots)

    def home(self, session: int, chunk: int) -> int | None:
        return self._own.get(session, self.base).home(session, chunk)

    def closed(self, session: int) -> None:
        self._own.pop(session, self.base).closed(session)


def homes_of(preference: PlacementPreference, sides: Mapping[int, int]) -> Homes:
    """The rule that a preference asks for. sides: slots of the tiers that open chunks may lie in."""
    if preference.whole:
        return WholeHomes(sides)
    return SharedHomes(preference.shares) if preference.shares else ByRecency()
