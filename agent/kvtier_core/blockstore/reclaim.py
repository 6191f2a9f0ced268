"""Making room: copies that others survive are dropped, last copies move down a tier first.

Why it exists: a full tier must neither refuse what could fit nor lose what exists only there; and nobody may
wait for room that pins will never give. It must not know who needs the room.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvtier_core.blockstore.outcomes import Explanation
from kvtier_core.blockstore.parts import Parts
from kvtier_core.credits import Ledger, slots
from kvtier_core.errors import CoreError
from kvtier_core.transactions import Move, MoveKind, MoveReason, MoveRefused, Transactions
from kvtier_core.transactions.transfers import Settled

MAX_OBITUARIES = 4096


class Reclaim:
    """Room in every tier of one store. Called with the lock held; never waits.

    max_demotions: blocks on their way down at a time."""

    def __init__(
        self,
        parts: Parts,
        moves: Transactions,
        ledger: Ledger,
        *,
        max_demotions: int = 64,
        droppable: bool = True,
    ) -> None:
        self._parts = parts
        self._moves = moves
        self._ledger = ledger
        self._max_demotions = max_demotions
        self._droppable = droppable
        self._demoting: dict[int, Move] = {}
        self._gone: OrderedDict[bytes, tuple[str, MoveReason, str]] = OrderedDict()
        self.evicted: dict[str, int] = {}
        self.demoted: dict[str, int] = {}
        self.failed: dict[str, int] = {}

    @property
    def demoting(self) -> int:
        return len(self._demoting)

    def make_room(self, tier: int, count: int) -> int:
        """Frees up to `count` slots of `tier` now, by dropping copies that others survive; what must move
        first is started. Returns how many slots came free."""
        freed = self._drop_spare(tier, count)
        if freed < count and self._last_home(tier):
            freed += self._drop_last(tier, count - freed)
        if freed < count:
            self._demote(tier, count - freed)
        return freed

    def run(self) -> None:
        """Keeps every tier under its watermark."""
        for tier in range(len(self._parts.tiers)):
            excess = self._ledger.excess(slots(tier))
            if excess > 0:
                leaving = sum(move.source_tier == tier for move in self._demoting.values())
                if excess > leaving:
                    self.make_room(tier, excess - leaving)

    def on_settled(self, settled: Settled) -> None:
        move = self._demoting.pop(settled.move.id, None)
        if move is None:
            return
        name = self._parts.tiers[move.source_tier].name
        table = self.demoted if settled.reason is MoveReason.READY else self.failed
        table[name] = table.get(name, 0) + 1

    def _last_home(self, tier: int) -> bool:
        return not any(lower > tier for lower in self._parts.storage)

    def _candidates(self, tier: int, count: int) -> NDArray[np.int64]:
        """Copies in `tier` that nobody reads or moves, least worth keeping first."""
        directory = self._parts.directory
        lines = directory.evictable(tier)
        lines = lines[directory.namespace[lines] >= 0]
        return lines[np.argsort(directory.last_use[lines], kind="stable")]

    def _drop_spare(self, tier: int, count: int) -> int:
        lines = self._candidates(tier, count)
        if not len(lines):
            return 0
        spare = lines[self._parts.directory.survivors_of(lines, tier) >= self._moves.survival]
        return self._drop(tier, spare[:count].tolist(), last=False)

    def _drop_last(self, tier: int, count: int) -> int:
        if not self._droppable:
            return 0
        return self._drop(tier, self._candidates(tier, count)[:count].tolist(), last=True)

    def _drop(self, tier: int, lines: Sequence[int], *, last: bool) -> int:
        done = 0
        name = self._parts.tiers[tier].name
        for line in lines:
            key = self._parts.directory.key_of(line)
            try:
                gone = self._moves.drop(line, tier, last=last)
            except CoreError:
                continue
            done += 1
            if gone:
                self.note(key, "evicted", MoveReason.MISS, f"its last copy made room in tier {name}")
        self.evicted[name] = self.evicted.get(name, 0) + done
        return done

    def _demote(self, tier: int, count: int) -> int:
        lower = [index for index in self._parts.storage if index > tier]
        if not lower:
            return 0
        target = lower[0]
        room = min(count, self._max_demotions - len(self._demoting))
        moves: list[Move] = []
        for line in self._candidates(tier, room)[:room].tolist():
            try:
                moves.append(self._begin(line, target))
            except MoveRefused:
                break
        for move in moves:
            self._demoting[move.id] = move
        for settled in self._moves.start(moves):
            self.on_settled(settled)
        return len(moves)

    def _begin(self, line: int, target: int) -> Move:
        try:
            return self._moves.begin(MoveKind.DEMOTE, line, target, now=self._parts.clock())
        except MoveRefused as full:
            if full.code is not MoveReason.NO_DESTINATION_CAPACITY or not self.make_room(target, 1):
                raise
            return self._moves.begin(MoveKind.DEMOTE, line, target, now=self._parts.clock())

    # What became of keys that are no longer here.

    def note(self, key: bytes, state: str, reason: MoveReason, message: str) -> None:
        self._gone[key] = (state, reason, message)
        self._gone.move_to_end(key)
        while len(self._gone) > MAX_OBITUARIES:
            self._gone.popitem(last=False)

    def obituary(self, key: bytes) -> Explanation:
        state, reason, message = self._gone.get(
            key, ("unknown", MoveReason.MISS, "it was not stored here, or too long ago to tell")
        )
        return Explanation(key, state, reason, message)
