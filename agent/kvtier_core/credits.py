"""Capacity as credits: nothing is placed that was not reserved, and what was reserved comes back once.

Why it exists: budgets are per node and tier; a copy needs room at its destination before its source is
given up, and an open chunk must never find its tier full. It must not know chunks, sessions or bytes: its
unit is one slot of a tier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvtier_core.errors import CoreError, Reason


@dataclass(frozen=True, slots=True)
class Pressure:
    """Why a reservation was refused: the tier that had too little, and the numbers."""

    tier: int
    wanted: int
    available: int
    capacity: int


class CreditLedger:
    """Slots of each tier, granted all or nothing. Conservation: free + granted == capacity, per tier."""

    def __init__(self, capacities: Sequence[int]) -> None:
        if any(capacity < 0 for capacity in capacities):
            raise ValueError("a capacity is never negative")
        self._capacity = list(capacities)
        self._free = list(capacities)
        self._grants: dict[int, dict[int, int]] = {}
        self._next = 1

    def capacity(self, tier: int) -> int:
        return self._capacity[tier]

    def available(self, tier: int) -> int:
        return self._free[tier]

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
            if count > self._free[tier]:
                return Pressure(tier, count, self._free[tier], self._capacity[tier])
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
        grant = self._next
        self._next += 1
        parts = {tier: count for tier, count in want.items() if count}
        for tier, count in parts.items():
            self._free[tier] -= count
        self._grants[grant] = parts
        return grant

    def release(self, grant: int) -> None:
        """Gives a grant back. A grant is released once: a second release is a defect and raises KeyError."""
        for tier, count in self._grants.pop(grant).items():
            self._free[tier] += count

    def check(self) -> None:
        """Conservation; raises AssertionError. For tests and the engine's own stop."""
        for tier, capacity in enumerate(self._capacity):
            held = self.granted(tier)
            if self._free[tier] < 0 or self._free[tier] + held != capacity:
                raise AssertionError(f"tier {tier}: free {self._free[tier]} + held {held} != {capacity}")
