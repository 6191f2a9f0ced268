"""Blocks of the next layer on their way while this one is computed, because a client said that it follows.

Why it exists: a client knows that layer i + 1 of the same step comes next, and storage that starts when it is
asked has lost the time of a layer. Behind the last layer of a token the first of another one comes, or
nothing: what is here for that (an early promise) is lent, and goes to whoever is promised something. A
promise changes no answer and no order: what it brings is used if it is still the copy that is asked for, and
is let go otherwise. It must not know attention. Late, broken or unwanted bytes stay in buffers of their own
until nothing can arrive there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Protocol

from kvtier_core.appends import Rows
from kvtier_core.arrivals import (
    Arrival,
    Block,
    BufferPool,
    Coming,
    Joined,
    Meter,
    by_tier,
    launch,
    launched,
)
from kvtier_core.directory import ChunkState
from kvtier_core.errors import CoreError
from kvtier_core.planner import STREAMED, ChunkRead
from kvtier_core.streaming import READ_TIMEOUT_SECONDS
from kvtier_core.tiers.base import BlockIdentity

AHEAD = 3
"""Layers of a session that are on their way at most, where buffers allow more than the next one."""
EARLY_SECONDS, PROMISED_SECONDS = 2.0, 30.0
"""For how long what is here for a frame that may never come, or is late, outlives other promises."""


class IdentifiedRows(Rows, Protocol):
    """Rows with the identity of each copy. cache_generation: of what holds them."""

    @property
    def cache_generation(self) -> int: ...

    def identity_of(self, line: int, replica_generation: int) -> BlockIdentity:
        """What a sealed line's copy of that generation must be."""


def block_of(store: IdentifiedRows, line: int) -> Block:
    """A line's copy as it is now."""
    directory = store.directory
    tier, ref = store.tiers[int(directory.tier[line])], store.ref(line)
    if ChunkState(int(directory.state[line])) is ChunkState.OPEN:
        return Block(tier, ref, None)
    return Block(tier, ref, store.identity_of(line, int(directory.generation[line])))


@dataclass(frozen=True, slots=True)
class Promise:
    """What is on its way for one layer of one step of a session. meter: of its transfer. until: on the
    engine's clock, when any other promise ends it. early: nobody has said that the frame comes."""

    step: int
    layer: int
    arrivals: tuple[Coming, ...]
    meter: Meter
    until: float
    early: bool

    @property
    def place(self) -> tuple[int, int]:
        return self.step, self.layer

    def leave(self) -> None:
        for arrival in self.arrivals:
            arrival.leave()


class Promises:
    """Those of a session are of layers that follow each other, the nearest first. The engine's lock is held.
    `reserve`: buffers that promises leave to frames."""

    def __init__(
        self,
        store: IdentifiedRows,
        buffers: BufferPool,
        clock: Callable[[], float],
        executor: Executor | None,
        reserve: int,
    ) -> None:
        self._store = store
        self._buffers = buffers
        self._clock = clock
        self._executor = executor
        self._reserve = reserve
        self._open: dict[str, list[Promise]] = {}
        # Until when a session counts as one that wants buffers: it has no promise while a frame runs.
        self._wanting: dict[str, float] = {}

    def begin(self, session_id: str, step: int, layer: int, reads: Sequence[ChunkRead]) -> int:
        """As `begin_blocks`, of what `reads` would stream."""
        known = self._begun(session_id, step, layer)
        if known is not None and not known.early:
            # Said again with each block of a prefill.
            return len(known.arrivals)
        blocks = [block_of(self._store, read.line) for read in reads if read.path in STREAMED]
        return self.begin_blocks(
            session_id, step, layer, [block for block in blocks if block.identity is not None]
        )

    def begin_blocks(
        self, session_id: str, step: int, layer: int, blocks: Sequence[Block], early: bool = False
    ) -> int:
        """Starts to read sealed chunks of the layer that comes next, as many as there are buffers; returns
        how many have begun. Said again it begins what had no buffer before. A tier that refuses ends it: the
        frame will meet the refusal, if it is still one. early: nobody has said that the frame comes. What is
        here for it goes when a promise wants its buffers. Every promise ends with another, after its time."""
        now, place = self._clock(), (step, layer)
        self._let_go_of_late(now)
        if blocks:
            self._wanting[session_id] = now + EARLY_SECONDS
        self._keep(session_id, lambda one: place <= one.place <= (step + 1, layer))
        known = self._begun(session_id, step, layer)
        if known is None:
            known = Promise(step, layer, (), Meter(self._clock), now + EARLY_SECONDS, True)
        holds = self._on_their_way(session_id, known, blocks)
        if not early:
            known = replace(known, until=now + PROMISED_SECONDS, early=False)
            lacking = holds.count(None) + self._reserve - self._buffers.available
            while lacking > 0 and (found := self._let_go_of_one(session_id, place)):
                lacking -= found
        return self._started(session_id, known, blocks, holds, now)

    def further(self, session_id: str, step: int, layer: int, blocks: Sequence[Block]) -> bool:
        """As `begin_blocks`, early, of a layer behind those that are on their way; whether it is now. All of
        it or nothing, and nothing beside another session with a promise now or lately, which would have it
        ended at once, with its reads on their way."""
        if self._begun(session_id, step, layer) is not None:
            return True
        mine = self._open.get(session_id, ())
        alone = self._open.keys() | self._wanting.keys() <= {session_id}
        if not alone or len(mine) >= AHEAD or self._buffers.available - self._reserve < len(blocks):
            return False
        now = self._clock()
        known = Promise(step, layer, (), Meter(self._clock), now + EARLY_SECONDS, True)
        return self._started(session_id, known, blocks, [None] * len(blocks), now) == len(blocks)

    def _on_their_way(self, session_id: str, known: Promise, blocks: Sequence[Block]) -> list[Joined | None]:
        """Of the blocks that this promise has not begun: a hold on the read of each that is on its way for a
        promise of another session."""
        others = [
            promise.arrivals
            for name, found in self._open.items()
            for promise in found
            if promise.layer == known.layer and name != session_id
        ]
        holds: list[Joined | None] = []
        for number in range(len(known.arrivals), len(blocks)):
            same = (one[number] for one in others if number < len(one) and one[number].is_of(blocks[number]))
            coming = next(same, None)
            holds.append(None if coming is None else coming.join())
        return holds

    def _started(
        self,
        session_id: str,
        known: Promise,
        blocks: Sequence[Block],
        holds: Sequence[Joined | None],
        now: float,
    ) -> int:
        """Begins the blocks of which there is no hold, up to the first that cannot be begun."""
        coming: list[Coming] = []
        try:
            for hold, block in zip(holds, blocks[len(known.arrivals) :], strict=True):
                if hold is not None:
                    coming.append(hold)
                    continue
                buffer = self._buffers.take() if self._buffers.available > self._reserve else None
                if buffer is None:
                    break
                coming.append(Arrival(block, buffer, self._buffers, known.meter))
            fresh = [one for one in coming if isinstance(one, Arrival)]
            begun = self._launched(fresh, now + READ_TIMEOUT_SECONDS)
            arrivals = coming[: launched(coming)] if len(begun) < len(fresh) else coming
        except BaseException:
            _leave(holds)
            raise
        _leave(holds[len(arrivals) :])
        if arrivals or known.arrivals:
            known = replace(known, arrivals=(*known.arrivals, *arrivals))
            others = [one for one in self._open.get(session_id, ()) if one.place != known.place]
            self._open[session_id] = sorted([*others, known], key=lambda one: one.place)
        return len(known.arrivals)

    def _begun(self, session_id: str, step: int, layer: int) -> Promise | None:
        """That promise, when it was given before."""
        for one in self._open.get(session_id, ()):
            if one.place == (step, layer):
                return one
        return None

    def _keep(self, session_id: str, wanted: Callable[[Promise], bool]) -> None:
        """Lets go of the others of a session."""
        found = self._open.pop(session_id, ())
        kept = [one for one in found if wanted(one)]
        if kept:
            self._open[session_id] = kept
        for one in found:
            if one not in kept:
                one.leave()

    def _let_go_of_late(self, now: float) -> None:
        for name in list(self._open):
            self._keep(name, lambda one: now < one.until)
        for name in [name for name, until in self._wanting.items() if until <= now]:
            del self._wanting[name]

    def _let_go_of_one(self, session_id: str, place: tuple[int, int]) -> int:
        """Of the furthest early promise of a session, or of this one behind `place`; how many buffers that
        has. They are free when nothing can arrive there any more."""
        for name, found in self._open.items():
            last = found[-1]
            if last.early and (name != session_id or last.place > place):
                break
        else:
            return 0
        self._keep(name, lambda one: one is not last)
        return len(last.arrivals)

    def _launched(self, arrivals: Sequence[Arrival], deadline: float) -> list[Arrival]:
        """The leading ones whose reads began: where a tier refuses, those behind are left too."""
        begun: list[Arrival] = []
        try:
            for group in by_tier(arrivals):
                with contextlib.suppress(CoreError):
                    launch(group, deadline, self._executor)
                count = launched(group)
                begun += group[:count]
                if count < len(group):
                    break
        except BaseException:
            # Nobody has these, so nobody would let go of them.
            for arrival in arrivals[: launched(arrivals)]:
                arrival.leave()
            raise
        finally:
            for arrival in arrivals[launched(arrivals) :]:
                self._buffers.give(arrival.buffer)
        return begun

    @contextlib.contextmanager
    def taken(self, session_id: str, step: int, layer: int) -> Iterator[Promise | None]:
        """As `take`, for as long as it is used: what was not is let go of, whatever happens meanwhile."""
        promise = self.take(session_id, step, layer)
        try:
            yield promise
        finally:
            if promise is not None:
                promise.leave()

    def take(self, session_id: str, step: int, layer: int) -> Promise | None:
        """The promise for this layer, if there is one. Those for what follows wait, since a layer may come in
        several frames; any other is let go."""
        taken, kept = None, []
        for one in self._open.pop(session_id, ()):
            if one.place == (step, layer):
                taken = one
            elif (step, layer) < one.place <= (step + 1, layer):
                kept.append(one)
            else:
                one.leave()
        if kept:
            self._open[session_id] = kept
        return taken

    def forget(self, session_id: str) -> None:
        self._wanting.pop(session_id, None)
        self._keep(session_id, lambda one: False)

    def close(self) -> None:
        for session_id in list(self._open):
            self.forget(session_id)


def _leave(holds: Sequence[Joined | None]) -> None:
    for one in holds:
        if one is not None:
            one.leave()
