"""Where chunks go when a tier is full: the least recent sealed chunk moves down.

Why it exists: contexts outgrow the fast tiers, and room must be made before rows are accepted. It must not
know attention, sessions' meaning or bytes. Budgets are per node: all sessions of a cache share a tier.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtier_core.credits import CreditLedger
from kvtier_core.directory import Directory
from kvtier_core.errors import CoreError, Reason
from kvtier_core.tiers.base import Tier
from kvtier_core.transactions import MoveKind, Transactions
from kvtier_crds.manifest import TierRole


class Placement:
    """Tiers by index, fastest first. A tier of role `staging` is nobody's home."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        roles: Sequence[TierRole],
        ledger: CreditLedger,
        directory: Directory,
        transactions: Transactions,
    ) -> None:
        self._tiers = tiers
        self._ledger = ledger
        self._directory = directory
        self._transactions = transactions
        self._homes = [index for index, role in enumerate(roles) if role is not TierRole.STAGING]
        able = [index for index in self._homes if tiers[index].capability.appendable]
        resident = [index for index in able if roles[index] is TierRole.RESIDENT]
        self.open_homes: list[int] = resident or able

    def reserve_open(self, layers: int) -> tuple[list[int], int]:
        """One open slot per layer, all or nothing, fastest tier first, making room where sealed chunks can go
        down. Returns (tier of each layer, grant). NO_DESTINATION_CAPACITY with the numbers."""
        order: list[int] = []
        want: dict[int, int] = {}
        for tier in self.open_homes:
            room = self._room_for_open(tier, layers - len(order))
            if room:
                want[tier] = room
                order += [tier] * room
        if len(order) < layers:
            raise self.exhausted(f"{layers} open chunks wanted, one a layer; {len(order)} fit")
        for tier, count in want.items():
            self.make_room(tier, count)
        return order, self._ledger.acquire(want)

    def _room_for_open(self, tier: int, wanted: int) -> int:
        """Slots of `tier` that are free, or can be by moving sealed chunks to free slots further down."""
        below = sum(self._ledger.available(lower) for lower in self._homes if lower > tier)
        movable = min(len(self._directory.sealed_in(tier)), below)
        return min(wanted, self._ledger.available(tier) + movable)

    def home_for_sealed(self, tier: int, recency: int) -> tuple[int, int]:
        """A credit for one more sealed chunk in `tier`, or below it when all that lie there are more recent
        or cannot move down. Returns (tier, grant). NO_DESTINATION_CAPACITY, STORAGE_UNAVAILABLE."""
        for home in [item for item in self._homes if item >= tier]:
            if self._ledger.pressure({home: 1}) is None or self._try_room(home, recency):
                return home, self._ledger.acquire({home: 1})
        raise self.exhausted("no tier takes one more sealed chunk")

    def make_room(self, tier: int, count: int = 1) -> None:
        """Demotes the least recent chunks of `tier` until `count` slots are free there."""
        while self._ledger.available(tier) < count:
            if not self._try_room(tier):
                raise self.exhausted(f"tier {self._tiers[tier].name} cannot free {count} slots")

    def _try_room(self, tier: int, recency: int | None = None) -> bool:
        """Moves the least recent chunk of `tier` down if it is at most as recent as `recency`."""
        lines = self._directory.sealed_in(tier)
        lines = lines[self._directory.readers[lines] == 0]
        if not len(lines) or (recency is not None and self._directory.recency[lines[0]] > recency):
            return False
        moved = int(self._directory.recency[lines[0]])
        for lower in [item for item in self._homes if item > tier]:
            if self._ledger.pressure({lower: 1}) is None or self._try_room(lower, moved):
                self._transactions.run(MoveKind.DEMOTE, int(lines[0]), lower)
                return True
        return False

    def exhausted(self, message: str) -> CoreError:
        """NO_DESTINATION_CAPACITY with free and total slots of each tier."""
        facts = {
            tier.name: f"{self._ledger.available(index)} of {self._ledger.capacity(index)} slots free"
            for index, tier in enumerate(self._tiers)
        }
        listed = ", ".join(f"{name}: {what}" for name, what in facts.items())
        return CoreError(Reason.NO_DESTINATION_CAPACITY, f"{message} ({listed})", facts)
