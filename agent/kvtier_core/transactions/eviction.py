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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

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


@dataclass(slots=True)
class _Attempt:
    """One attempt at one tier. relieved: the tier below was asked for room already."""

    tier: int
    now: float
    started: list[Move] = field(default_factory=list)
    relieved: bool = False


class Evictor:
    """Eviction over all tiers of one cache. `below[tier]`: the tier that it demotes to; absent: none.
    `reap` takes what has ended (pins, moves) and routes it, so that nothing finished stands in the way of
    what comes. droppable(lines) [n] bool: whose last copy may be lost. evictable(lines) [n] bool: whose
    copies are this evictor's; by default blocks of a namespace, since a session's chunks are moved by their
    placement. lasting: tiers that outlive the process; what may not be lost keeps its copy there, whoever
    else has one. on_gone(key, tier, lost): told of each dropped copy; lost: it was the last. free(tier):
    slots that blocks may take now; by default those that nobody has."""

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
        on_gone: Callable[[bytes, int, bool], None] | None = None,
        free: Callable[[int], int] | None = None,
        lasting: Sequence[int] = (),
        seconds: float = 30.0,
        at_once: int = 512,
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
        self._on_gone = on_gone
        self._free = free or self._unused
        self._lasting = frozenset(lasting)
        self._seconds = seconds
        self._at_once = at_once
        self._relieving: set[int] = set()
        self.counts: Counter[tuple[int, str]] = Counter()
        """(tier, dropped | lost | demoted | refused): copies and refusals since start."""

    def stored(self, line: int, tier: int) -> None:
        """To be told of each published copy."""
        self._policies[tier].stored(line)

    def make_room(self, tier: int, count: int, now: float) -> Room:
        """Frees `count` slots of a tier, or starts what will. Raises MoveRefused when it cannot:
        WOULD_EVICT_PINNED when copies that somebody holds stand in the way, else NO_DESTINATION_CAPACITY; the
        facts have the numbers. Each copy is looked at once a call, so a refusal comes in bounded time."""
        self._reap()
        room = self._try(tier, count, now)
        if room.reason is not MoveReason.READY:
            self.counts[(tier, "refused")] += 1
            name = self._tiers[tier].name
            raise MoveRefused(
                room.reason,
                f"{room.free} of {count} slots are free in tier {name}, {room.held} copies are held",
                {"free": room.free, "wanted": count, "leaving": room.leaving, "held": room.held},
            )
        return room

    def candidates(self, tier: int) -> Lines:
        """Lines with a copy in the tier that nobody holds or moves, ascending."""
        return self._mine(self._directory.evictable(tier))

    def leaving(self, tier: int) -> Lines:
        """Lines whose copy is on its way out of the tier, so that its slot comes free."""
        return np.asarray([move.line for move in self._moves_out_of(tier)], dtype=np.int64)

    def vacate(self, tier: int, lines: Lines, now: float) -> Room:
        """Drops or begins to move down just these candidates, as far as that goes. Never raises for what
        stands in the way."""
        attempt = _Attempt(tier, now)
        self._take(attempt, lines, len(lines))
        self._refused(self._moves.start(attempt.started))
        return Room(tier, 0, self._free(tier), self._leaving(tier), MoveReason.READY)

    def relieve(self, tier: int, now: float) -> Room:
        """Brings a tier that is above its high watermark down to the low one, as far as that goes: at most
        `at_once` copies are on their way out at a time, so a call again goes on. Never raises for what stands
        in the way."""
        self._reap()
        capacity, free = self._tiers[tier].slots.capacity, self._free(tier)
        above = self._tiers[tier].slots.used > math.floor(self._watermarks.high * capacity)
        wanted = capacity - math.floor(self._watermarks.low * capacity)
        if free >= wanted or not (above or tier in self._relieving):
            self._relieving.discard(tier)
            return Room(tier, 0, free, 0, MoveReason.READY)
        self._relieving.add(tier)
        leaving = self._leaving(tier)
        if leaving > self._at_once // 2:
            # To choose a few more, all of the tier would be looked at.
            return Room(tier, wanted, free, leaving, MoveReason.READY)
        room = self._try(tier, min(wanted, free + self._at_once), now)
        if room.reason is not MoveReason.READY:
            self._relieving.discard(tier)
        return room

    def _unused(self, tier: int) -> int:
        slots = self._tiers[tier].slots
        return slots.capacity - slots.used

    def _leaving(self, tier: int) -> int:
        return sum(1 for _ in self._moves_out_of(tier))

    def _moves_out_of(self, tier: int) -> Iterator[Move]:
        """Not those whose source a reader keeps: when it goes is the reader's affair, and who waited for that
        while others could make way might wait for ever. Those that write through, too: what they keep has a
        copy below once they end, and is dropped by the next who asks for room."""
        directory = self._directory
        for move in self._moves.open_moves():
            leaves = move.releases_source or move.kind is MoveKind.DEMOTE
            if move.source_tier == tier and leaves and move.state is not TxnState.DEAD:
                held = directory.leases(move.line, tier) + int(directory.readers[move.line])
                if held <= move.leased:
                    yield move

    def _try(self, tier: int, count: int, now: float) -> Room:
        missing = count - self._free(tier) - self._leaving(tier)
        if missing > 0:
            candidates = self.candidates(tier)
            if tier not in self._below:
                candidates = candidates[self._may_end(tier, candidates)]
            attempt = _Attempt(tier, now)
            for batch in self._victims(tier, candidates, missing):
                missing -= self._take(attempt, batch, missing)
                if missing <= 0:
                    break
            self._refused(self._moves.start(attempt.started))
        free, leaving = self._free(tier), self._leaving(tier)
        if free + leaving >= count:
            return Room(tier, count, free, leaving, MoveReason.READY)
        held = self._held(tier)
        reason = MoveReason.WOULD_EVICT_PINNED if held else MoveReason.NO_DESTINATION_CAPACITY
        return Room(tier, count, free, leaving, reason, held)

    def _mine(self, lines: Lines) -> Lines:
        mask = self._directory.namespace[lines] != NO_NAMESPACE
        return lines[mask if self._evictable is None else self._evictable(lines)]

    def _may_end(self, tier: int, lines: Lines) -> NDArray[np.bool_]:
        """Whose copies in the tier may be dropped, going nowhere [n]."""
        may = self._spare(tier, lines)
        return may if self._droppable is None else may | self._droppable(lines)

    def _spare(self, tier: int, lines: Lines) -> NDArray[np.bool_]:
        """Of whose copies in the tier enough others survive [n]."""
        spare: NDArray[np.bool_] = self._directory.survivors_of(lines, tier) >= max(1, self._moves.survival)
        if tier not in self._lasting:
            return spare
        if self._droppable is None:
            return np.zeros(len(lines), dtype=np.bool_)
        return spare & self._droppable(lines)

    def _victims(self, tier: int, candidates: Lines, missing: int) -> Iterator[Lines]:
        """The candidates in the policy's order: first as many as are likely to do, then the rest. Of the rest
        only what may go, since a full tier of blocks that must stay can have millions of them."""
        likely = 2 * missing + 16
        first = self._policies[tier].order(candidates, likely)
        yield first
        if len(candidates) > likely:
            rest = np.setdiff1d(candidates, first, assume_unique=True)
            lower = self._below.get(tier)
            if lower is not None and self._free(lower) <= 0:
                rest = rest[self._may_end(tier, rest)]
            yield self._policies[tier].order(rest, len(rest))

    def _take(self, attempt: _Attempt, lines: Lines, missing: int) -> int:
        """Drops or begins to demote lines in order; returns how many slots, at most `missing`, are free or on
        their way to be."""
        others = self._spare(attempt.tier, lines)
        left = list(zip(lines.tolist(), others.tolist(), strict=True))
        left.reverse()
        done = 0
        while left and done < missing:
            last: list[int] = []
            while left and done + len(last) < missing:
                line, spare = left.pop()
                if spare:
                    done += self._drop(attempt.tier, line, last=False)
                else:
                    last.append(line)
            done += self._take_last(attempt, last)
        return done

    def _take_last(self, attempt: _Attempt, lines: list[int]) -> int:
        """Last copies: down where there is room, lost where that is allowed."""
        if not lines:
            return 0
        lower = self._below.get(attempt.tier)
        if lower is not None and not attempt.relieved and self._free(lower) < len(lines):
            # Once an attempt: what comes free there only later is for a later call.
            attempt.relieved = True
            self._try(lower, len(lines), attempt.now)
        may_go = [False] * len(lines)
        if self._droppable is not None:
            may_go = self._droppable(np.asarray(lines, dtype=np.int64)).tolist()
        done = 0
        for line, droppable in zip(lines, may_go, strict=True):
            if lower is not None and self._demote(attempt, lower, line):
                done += 1
            elif droppable:
                done += self._drop(attempt.tier, line, last=True)
        return done

    def _drop(self, tier: int, line: int, last: bool) -> int:
        key = self._directory.key_of(line)
        self._policies[tier].evicted(line)
        try:
            lost = self._moves.drop(line, tier, last=last)
        except MoveRefused:
            return 0
        if self._on_gone is not None:
            self._on_gone(key, tier, lost)
        self.counts[(tier, "lost" if last else "dropped")] += 1
        return 1

    def _demote(self, attempt: _Attempt, lower: int, line: int) -> bool:
        tier, now = attempt.tier, attempt.now
        if self._free(lower) <= 0:
            return False
        try:
            move = self._moves.begin(
                MoveKind.DEMOTE, line, lower, source_tier=tier, now=now, deadline=now + self._seconds
            )
        except MoveRefused:
            return False
        self._policies[tier].evicted(line)
        attempt.started.append(move)
        self.counts[(tier, "demoted")] += 1
        return True

    def _held(self, tier: int) -> int:
        """Copies in the tier that somebody reads."""
        lines = self._mine(self._directory.lines_in(tier))
        leases = self._directory.replicas.tiers[tier].leases.array[lines]
        return int(((leases > 0) | (self._directory.readers[lines] > 0)).sum())
