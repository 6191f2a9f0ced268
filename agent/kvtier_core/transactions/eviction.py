"""Makes room in a tier: what may go, where it goes, and a typed refusal when nothing may.

Why it exists: a tier that is full must lose what costs least, never the last copy of a block that may not
be lost, and never a copy that somebody holds; and when all is held it must say so at once, for a loop that
waits for room which only it could make is a livelock. It must not know requests.

Decision: a block may lose its last copy only when it was declared droppable (its loss is a recomputation),
and even then only when no tier below takes it. Everything else is demoted, and when the lowest tier is full
of blocks that may not be lost, stores are refused: NO_DESTINATION_CAPACITY."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtier_core.directory import NO_NAMESPACE, Directory
from kvtier_core.tiers.base import Tier
from kvtier_core.transactions.moves import Move
from kvtier_core.transactions.policies import EvictionPolicy
from kvtier_core.transactions.reasons import MoveKind, MoveReason, MoveRefused, TxnState
from kvtier_core.transactions.transfers import Settled, Transactions

Lines = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Above `high` (share of a tier's slots) eviction starts, and it ends at `low`."""

    high: float = 0.95
    low: float = 0.85

    def __post_init__(self) -> None:
        if not 0.0 <= self.low <= self.high <= 1.0:
            raise ValueError(f"watermarks {self.low} and {self.high}")


@dataclass(frozen=True, slots=True)
class Room:
    """What an attempt to make room came to. free: slots that are free now. leaving: slots whose copies go
    down and that come free as those copies end. reason: READY when the two are enough; otherwise what
    stands in the way."""

    tier: int
    wanted: int
    free: int
    leaving: int
    reason: MoveReason
    held: int = 0

    @property
    def now(self) -> bool:
        """Whether the room is there already."""
        return self.free >= self.wanted


class Evictor:
    """Eviction over all tiers of one cache. `below[tier]`: the tier that it demotes to; absent: none.
    `reap` takes what has ended (pins, moves) and routes it, so that nothing finished stands in the way of
    what comes. droppable(lines) [n] bool: whose last copy may be lost. evictable(lines) [n] bool: whose
    copies are this evictor's; by default blocks of a namespace, since a session's chunks are moved by their
    placement."""

    def __init__(
        self,
        directory: Directory,
        moves: Transactions,
        tiers: Sequence[Tier],
        policies: Sequence[EvictionPolicy],
        *,
        below: Mapping[int, int],
        reap: Callable[[], None],
        refused: Callable[[Sequence[Settled]], None],
        droppable: Callable[[Lines], NDArray[np.bool_]] | None = None,
        evictable: Callable[[Lines], NDArray[np.bool_]] | None = None,
        watermarks: Watermarks | None = None,
        seconds: float = 30.0,
    ) -> None:
        self._directory = directory
        self._moves = moves
        self._tiers = tiers
        self._policies = policies
        if any(lower <= tier for tier, lower in below.items()):
            raise ValueError(f"copies go down, to a slower tier: {dict(below)}")
        self._below = dict(below)
        self._reap = reap
        self._refused = refused
        self._droppable = droppable
        self._evictable = evictable
        self._watermarks = watermarks or Watermarks()
        self._seconds = seconds
        self.counts: Counter[tuple[int, str]] = Counter()
        """(tier, dropped | lost | demoted | refused): copies and refusals since start."""

    def stored(self, line: int, tier: int) -> None:
        """To be told of each published copy."""
        self._policies[tier].stored(line)

    def make_room(self, tier: int, count: int, now: float) -> Room:
        """Frees `count` slots of a tier, or starts what will. Raises MoveRefused when it cannot:
        WOULD_EVICT_PINNED when copies that somebody holds stand in the way, else NO_DESTINATION_CAPACITY;
        `held` and `last` copies are in the facts. Each copy is looked at once a call, so a refusal comes in
        bounded time."""
        self._reap()
        room = self._try(tier, count, now)
        if room.reason is not MoveReason.READY:
            self.counts[(tier, "refused")] += 1
            raise MoveRefused(
                room.reason,
                f"{room.free} of {count} slots are free in tier {self._tiers[tier].name}, {room.held} are held",
                {"free": room.free, "wanted": count, "leaving": room.leaving, "held": room.held},
            )
        return room

    def relieve(self, tier: int, now: float) -> Room:
        """Brings a tier that is above its high watermark down to the low one, as far as that goes. Never
        raises for what stands in the way."""
        self._reap()
        capacity = self._tiers[tier].slots.capacity
        if self._tiers[tier].slots.used <= math.floor(self._watermarks.high * capacity):
            return Room(tier, 0, self._free(tier), 0, MoveReason.READY)
        return self._try(tier, capacity - math.floor(self._watermarks.low * capacity), now)

    def _free(self, tier: int) -> int:
        slots = self._tiers[tier].slots
        return slots.capacity - slots.used

    def _leaving(self, tier: int) -> int:
        return sum(
            move.source_tier == tier
            and move.releases_source
            and move.state in (TxnState.RESERVED, TxnState.COPYING, TxnState.VALIDATED, TxnState.PUBLISHED)
            for move in self._moves.open_moves()
        )

    def _try(self, tier: int, count: int, now: float) -> Room:
        missing = count - self._free(tier) - self._leaving(tier)
        started: list[Move] = []
        if missing > 0:
            lower = self._below.get(tier)
            if lower is not None and self._free(lower) < missing:
                # Once a call: what comes free there later is for a later call.
                self._try(lower, missing, now)
            candidates = self._mine(self._directory.evictable(tier))
            done = 0
            for batch in self._victims(tier, candidates, missing):
                done += self._take(tier, batch, missing - done, started, now)
                if done >= missing:
                    break
            self._refused(self._moves.start(started))
        free, leaving = self._free(tier), self._leaving(tier)
        if free + leaving >= count:
            return Room(tier, count, free, leaving, MoveReason.READY)
        held = self._held(tier)
        reason = MoveReason.WOULD_EVICT_PINNED if held else MoveReason.NO_DESTINATION_CAPACITY
        return Room(tier, count, free, leaving, reason, held)

    def _mine(self, lines: Lines) -> Lines:
        mask = self._directory.namespace[lines] != NO_NAMESPACE
        return lines[mask if self._evictable is None else self._evictable(lines)]

    def _victims(self, tier: int, candidates: Lines, missing: int) -> list[Lines]:
        """The candidates in the policy's order: first as many as are likely to do, then the rest."""
        likely = 2 * missing + 16
        first = self._policies[tier].order(candidates, likely)
        if len(candidates) <= likely:
            return [first]
        rest = np.setdiff1d(candidates, first, assume_unique=True)
        return [first, self._policies[tier].order(rest, len(rest))]

    def _take(self, tier: int, lines: Lines, missing: int, started: list[Move], now: float) -> int:
        """Drops or begins to demote lines in order until `missing` slots are on their way to be free."""
        others = self._directory.survivors_of(lines, tier) >= max(1, self._moves.survival)
        may_go = self._droppable(lines) if self._droppable is not None else np.zeros(len(lines), dtype=bool)
        done = 0
        for line, spare, droppable in zip(lines.tolist(), others.tolist(), may_go.tolist(), strict=True):
            if done >= missing:
                break
            if spare:
                done += self._drop(tier, line, last=False)
            elif self._demote(tier, line, started, now):
                done += 1
            elif droppable:
                done += self._drop(tier, line, last=True)
        return done

    def _drop(self, tier: int, line: int, last: bool) -> int:
        self._policies[tier].evicted(line)
        try:
            self._moves.drop(line, tier, last=last)
        except MoveRefused:
            return 0
        self.counts[(tier, "lost" if last else "dropped")] += 1
        return 1

    def _demote(self, tier: int, line: int, started: list[Move], now: float) -> bool:
        lower = self._below.get(tier)
        if lower is None:
            return False
        if self._free(lower) == 0:
            return False
        try:
            move = self._moves.begin(
                MoveKind.DEMOTE, line, lower, source_tier=tier, now=now, deadline=now + self._seconds
            )
        except MoveRefused:
            return False
        self._policies[tier].evicted(line)
        started.append(move)
        self.counts[(tier, "demoted")] += 1
        return True

    def _held(self, tier: int) -> int:
        """Copies in the tier that somebody reads."""
        lines = self._mine(self._directory.lines_in(tier))
        leases = self._directory.replicas.tiers[tier].leases.array[lines]
        return int(((leases > 0) | (self._directory.readers[lines] > 0)).sum())
