"""Making room in the store's tiers, and what became of blocks that are no longer here.

Why it exists: whoever needs a slot asks here, and background relief keeps tiers under their watermarks, both
by the one evictor. A person who asks why a key missed gets the last word on it. It must not know who needs
the room.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvtier_core.blockstore.outcomes import Explanation
from kvtier_core.blockstore.parts import Parts
from kvtier_core.tiers.arena import ArenaSlots
from kvtier_core.transactions import MoveReason, MoveRefused, Transactions
from kvtier_core.transactions.eviction import Evictor, Room, Watermarks
from kvtier_core.transactions.policies import Adaptive, EvictionPolicy, GreedyDual, LeastRecent
from kvtier_core.transactions.transfers import Settled

MAX_OBITUARIES = 4096
MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.05, 2.0
Lines = NDArray[np.int64]
POLICIES = ("greedyDual", "lru", "arc")


@dataclass(frozen=True, slots=True)
class _Pause:
    """Of relief in a tier whose demotions fail, or where nothing may go. until: absolute seconds."""

    until: float
    seconds: float


_NO_PAUSE = _Pause(-math.inf, 0.0)
# Ends of demotions that say nothing of the tier below.
_NO_FAULT = (MoveReason.CANCELLED, MoveReason.TOMBSTONED, MoveReason.LEASES_HELD)


@dataclass(frozen=True, slots=True)
class Obituary:
    state: str
    reason: MoveReason
    message: str


class Reclaim:
    """Room in every tier of one store. Called with the lock held; never waits."""

    def __init__(
        self,
        parts: Parts,
        moves: Transactions,
        reap: Callable[[], None],
        free: Callable[[int], int],
        *,
        policy: str = "greedyDual",
        watermarks: Watermarks | None = None,
    ) -> None:
        self._parts = parts
        self._reap = reap
        self.policies = [_policy(policy, parts, tier) for tier in range(len(parts.tiers))]
        homes = sorted((*parts.memory, *parts.storage))
        self._gone: OrderedDict[bytes, Obituary] = OrderedDict()
        self.evictor = Evictor(
            parts.directory,
            moves,
            parts.tiers,
            self.policies,
            below=dict(pairwise(homes)),
            reap=reap,
            refused=self._refused,
            droppable=self._droppable,
            watermarks=watermarks,
            on_gone=self._on_gone,
            free=free,
            lasting=parts.storage if parts.durable else (),
        )
        self._pauses: dict[int, _Pause] = {}
        self.failed: dict[str, int] = {}
        """Demotions that failed, by reason."""

    def _droppable(self, lines: NDArray[np.int64]) -> NDArray[np.bool_]:
        may_go: NDArray[np.bool_] = self._parts.directory.droppable[lines] == 1
        return may_go

    def make_room(self, tier: int, count: int) -> Room:
        """Frees `count` slots now or starts what will; see `Evictor.make_room`. Never raises."""
        try:
            return self.evictor.make_room(tier, count, self._parts.clock())
        except MoveRefused as refused:
            facts = refused.facts
            free = int(facts.get("free", "0"))
            return Room(tier, count, free, int(facts.get("leaving", "0")), refused.code)

    def make_memory(self, tier: int, namespace: bytes) -> Room:
        """Memory for one copy of `namespace` (a digest; b"" for rows of sessions) where a slot is free but
        all memory is other namespaces' segments, see `Arena`: a copy of its own goes, else all copies of the
        segment of another that is emptied soonest. What is leaving already is waited for. Never raises."""
        table = self._parts.tiers[tier].slots
        if not isinstance(table, ArenaSlots) or table.arena.free_in(namespace):
            return Room(tier, 1, 1, 0, MoveReason.READY)
        leaving = self.evictor.leaving(tier)
        lines = self.evictor.candidates(tier)
        owner = self._parts.namespaces.known(namespace)
        namespaces = self._parts.directory.namespace
        own = lines[namespaces[lines] == owner] if owner is not None else lines[:0]
        if owner is not None and (namespaces[leaving] == owner).any():
            chosen = lines[:0]
        elif len(own):
            chosen = self.policies[tier].order(own, 1)
        else:
            return self._take_over(tier, namespace, lines, leaving)
        count = len(leaving)
        if len(chosen):
            count = self.evictor.vacate(tier, chosen, self._parts.clock()).leaving
        return Room(tier, 1, table.arena.free_in(namespace), count, MoveReason.READY)

    def _take_over(self, tier: int, namespace: bytes, lines: Lines, leaving: Lines) -> Room:
        """Empties one segment of others for `namespace`, one at a time in a tier. Its owner may not fill it
        again as fast as it empties; when what is left there cannot go, it stays its owner's."""
        table = self._parts.tiers[tier].slots
        assert isinstance(table, ArenaSlots)
        arena, nothing = table.arena, Room(tier, 1, 0, 0, MoveReason.NO_DESTINATION_CAPACITY)
        segment = arena.retiring
        if segment is None:
            segment, chosen = self._segment(tier, lines, leaving, arena.held_by_others(namespace))
            if segment is None:
                return nothing
            arena.retire(segment, namespace)
        else:
            chosen = lines[self._segments_of(tier, lines) == segment]
        if len(chosen):
            self.evictor.vacate(tier, chosen, self._parts.clock())
        if arena.free_in(namespace):
            return Room(tier, 1, arena.free_in(namespace), 0, MoveReason.READY)
        going = int((self._segments_of(tier, self.evictor.leaving(tier)) == segment).sum())
        if not going:
            arena.keep()
            return nothing
        return Room(tier, 1, 0, going, MoveReason.READY)

    def _segments_of(self, tier: int, lines: Lines) -> Lines:
        table = self._parts.tiers[tier].slots
        assert isinstance(table, ArenaSlots)
        slots: Lines = self._parts.directory.replicas.tiers[tier].slot.array[lines].astype(np.int64)
        return slots // table.arena.segment_slots

    def _segment(
        self, tier: int, lines: Lines, leaving: Lines, held: dict[int, int]
    ) -> tuple[int | None, Lines]:
        """The segment, among those `held` by others, that needs the fewest lines to go, and these; None when
        somebody holds a copy in each."""
        table = self._parts.tiers[tier].slots
        assert isinstance(table, ArenaSlots)
        slot_of, size = self._parts.directory.replicas.tiers[tier].slot.array, table.arena.segment_slots
        where = slot_of[lines] // size
        may_go, going = Counter(where.tolist()), Counter((slot_of[leaving] // size).tolist())
        fit = ((may_go[at], at) for at, used in held.items() if may_go[at] + going[at] == used)
        best = min(fit, default=None)
        return (None, lines[:0]) if best is None else (best[1], lines[where == best[1]])

    def make_room_for(self, tier: int, count: int, namespace: bytes) -> Room:
        """As `make_room`, for copies of `namespace`: where it can have no memory, slots that come free in
        segments of others are of no use to it."""
        table = self._parts.tiers[tier].slots
        if isinstance(table, ArenaSlots) and not table.arena.free_in(namespace):
            others = table.arena.held_by_others(namespace)
            if others and self._parts.namespaces.known(namespace) is not None:
                self._reap()
                room = self.make_memory(tier, namespace)
                if room.leaving:
                    return room
        return self.make_room(tier, count)

    def relieve(self) -> None:
        """Keeps every tier under its watermark. Where that is not to be had (all is held, or must stay) it is
        tried again later and later, for each attempt looks at the whole tier."""
        now = self._parts.clock()
        for tier in range(len(self._parts.tiers)):
            if now < self._pauses.get(tier, _NO_PAUSE).until:
                continue
            if self.evictor.relieve(tier, now).reason is not MoveReason.READY:
                self._wait_longer(tier, now)

    def on_settled(self, settled: Settled) -> None:
        """A demotion ended. While they fail, relief waits longer and longer: each failure is reported, and
        would otherwise cause the next at once."""
        tier = settled.move.source_tier
        if settled.reason is MoveReason.READY:
            self._pauses.pop(tier, None)
            return
        self.failed[settled.reason.value] = self.failed.get(settled.reason.value, 0) + 1
        if settled.reason not in _NO_FAULT:
            self._wait_longer(tier, self._parts.clock())

    def _wait_longer(self, tier: int, now: float) -> None:
        before = self._pauses.get(tier, _NO_PAUSE)
        if now >= before.until:
            seconds = min(MAX_PAUSE_SECONDS, max(MIN_PAUSE_SECONDS, 2 * before.seconds))
            self._pauses[tier] = _Pause(now + seconds, seconds)

    def _refused(self, settled: Sequence[Settled]) -> None:
        for each in settled:
            self.on_settled(each)

    # What became of keys that are no longer here.

    def _on_gone(self, key: bytes, tier: int, lost: bool) -> None:
        if lost:
            name = self._parts.tiers[tier].name
            self.note(key, "evicted", MoveReason.MISS, f"its last copy made room in tier {name}")

    def note(self, key: bytes, state: str, reason: MoveReason, message: str) -> None:
        """Remembers the last word on a key, of the last MAX_OBITUARIES keys."""
        self._gone[key] = Obituary(state, reason, message)
        self._gone.move_to_end(key)
        while len(self._gone) > MAX_OBITUARIES:
            self._gone.popitem(last=False)

    def obituary(self, key: bytes) -> Explanation:
        found = self._gone.get(key)
        if found is None:
            return Explanation(
                key, "unknown", MoveReason.MISS, "it was not stored here, or too long ago to tell"
            )
        return Explanation(key, found.state, found.reason, found.message)


def _policy(name: str, parts: Parts, tier: int) -> EvictionPolicy:
    directory = parts.directory
    if name == "greedyDual":
        return GreedyDual(directory, tick=lambda: parts.tick)
    if name == "lru":
        return LeastRecent(directory)
    if name == "arc":
        return Adaptive(directory, parts.tiers[tier].slots.capacity)
    raise ValueError(f"eviction policy {name!r}; legal: {', '.join(POLICIES)}")
