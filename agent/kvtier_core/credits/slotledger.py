"""Slots of tiers for the session engine: grants by number, over the cache's one ledger.

Why it exists: sessions and shared blocks live in the same tiers, so their slots must add up in one place,
while a session names a grant by a number in a column. It must not know chunks, sessions or bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvtier_core.credits.ledger import Ledger
from kvtier_core.credits.resources import Limit, Release, slots
from kvtier_core.errors import CoreError, Reason


@dataclass(frozen=True, slots=True)
class Pressure:
    """Why a reservation was refused: the tier that had too little, and the numbers."""

    tier: int
    wanted: int
    available: int
    capacity: int


class CreditLedger:
    """Slots of each tier, granted all or nothing to no tenant in particular.

    capacities: slots by tier, for a ledger of its own; with `ledger` given, that one's slots are granted
    instead and only the number of tiers is taken from `capacities`."""

    def __init__(self, capacities: Sequence[int], ledger: Ledger | None = None) -> None:
        if any(capacity < 0 for capacity in capacities):
            raise ValueError("a capacity is never negative")
        self.ledger = ledger or Ledger({slots(tier): Limit(total) for tier, total in enumerate(capacities)})
        self._grants: dict[int, dict[int, int]] = {}

    def capacity(self, tier: int) -> int:
        return self.ledger.total(slots(tier))

    def available(self, tier: int) -> int:
        return self.ledger.available(slots(tier))

    def granted(self, tier: int) -> int:
        return sum(parts.get(tier, 0) for parts in self._grants.values())

    def outstanding(self) -> int:
        """How many grants have not been released."""
        return len(self._grants)

    def pressure(self, want: Mapping[int, int]) -> Pressure | None:
        """The first tier that cannot give what is wanted; None when all can."""
        for tier, count in want.items():
            if count < 0:
                raise ValueError("a reservation is never negative")
            free = self.ledger.available(slots(tier))
            if count > free:
                return Pressure(tier, count, free, self.capacity(tier))
        return None

    def acquire(self, want: Mapping[int, int]) -> int:
        """Takes all of `want` (tier -> slots) or nothing and returns a grant id. CREDIT_PRESSURE."""
        short = self.pressure(want)
        if short is not None:
            raise CoreError(
                Reason.CREDIT_PRESSURE,
                f"{short.wanted} slots wanted, tier {short.tier}: {short.available} of {short.capacity} free",
                {"tier": short.tier, "available": short.available, "wanted": short.wanted},
            )
        parts = {tier: count for tier, count in want.items() if count}
        grant = self.ledger.acquire({slots(tier): count for tier, count in parts.items()}).id
        self._grants[grant] = parts
        return grant

    def release(self, grant: int) -> None:
        """Gives a grant back. A grant is released once: a second release is a defect and raises KeyError."""
        del self._grants[grant]
        if self.ledger.release(grant) is not Release.RELEASED:
            raise KeyError(grant)

    def check(self) -> None:
        """Conservation; raises AssertionError. For tests and the engine's own stop."""
        self.ledger.check()
