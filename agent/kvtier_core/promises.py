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
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol

from kvtier_core.appends import Rows
from kvtier_core.directory import ChunkState
from kvtier_core.errors import CoreError
from kvtier_core.planner import STREAMED, ChunkRead
from kvtier_core.streaming import (
    READ_TIMEOUT_SECONDS,
    Arrival,
    Block,
    BufferPool,
    Meter,
    by_tier,
    launch,
)
from kvtier_core.tiers.base import BlockIdentity

EARLY_SECONDS = 2.0
"""For how long what is here for a token that may never come outlives other promises."""


class IdentifiedRows(Rows, Protocol):
    """Rows with the identity of each copy."""

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
    engine's clock, for a step that nobody has promised; None for one that somebody has."""

    step: int
    layer: int
    arrivals: tuple[Arrival, ...]
    meter: Meter
    until: float | None = None

    def leave(self) -> None:
        for arrival in self.arrivals:
            arrival.leave()


class Promises:
    """At most one promise a session. The engine's lock is held. `reserve`: buffers that promises leave to
    frames."""

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
        self._open: dict[str, Promise] = {}

    def begin(self, session_id: str, step: int, layer: int, reads: Sequence[ChunkRead]) -> int:
        """As `begin_blocks`, of what `reads` would stream."""
        known = self._begun(session_id, step, layer)
        if known is not None:
            # Said again with each block of a prefill.
            return len(known.arrivals)
        blocks = [block_of(self._store, read.line) for read in reads if read.path in STREAMED]
        return self.begin_blocks(
            session_id, step, layer, [block for block in blocks if block.identity is not None]
        )

    def begin_blocks(
        self, session_id: str, step: int, layer: int, blocks: Sequence[Block], early: bool = False
    ) -> int:
        """Starts to read sealed chunks of a layer, as many as there are buffers; returns how many have begun.
        Said again it begins what had no buffer before. A tier that refuses ends it: the frame will meet the
        refusal, if it is still one. early: nobody has said that the frame comes. What is here for it goes as
        soon as a promise of another session wants its buffers, and after EARLY_SECONDS with any promise."""
        now = self._clock()
        self._let_go_of_late(now)
        known = self._begun(session_id, step, layer)
        if known is None:
            self.forget(session_id)
            known = Promise(step, layer, (), Meter(self._clock), now + EARLY_SECONDS if early else None)
        arrivals: list[Arrival] = []
        deadline = now + READ_TIMEOUT_SECONDS
        for block in blocks[len(known.arrivals) :]:
            while self._buffers.available <= self._reserve and not early and self._let_go_of_one(session_id):
                pass
            if self._buffers.available <= self._reserve:
                break
            buffer = self._buffers.take()
            if buffer is None:
                break
            arrivals.append(Arrival(block, buffer, self._buffers, known.meter))
        arrivals = self._launched(arrivals, deadline)
        if arrivals:
            known = Promise(step, layer, (*known.arrivals, *arrivals), known.meter, known.until)
            self._open[session_id] = known
        return len(known.arrivals)

    def _let_go_of_late(self, now: float) -> None:
        late = [name for name, one in self._open.items() if one.until is not None and one.until <= now]
        for name in late:
            self.forget(name)

    def _let_go_of_one(self, but: str) -> bool:
        """Of an early promise, the oldest, of another session. Its buffers are free when nothing can arrive
        there any more."""
        early = [name for name, one in self._open.items() if one.until is not None and name != but]
        if early:
            self.forget(early[0])
        return bool(early)

    def _begun(self, session_id: str, step: int, layer: int) -> Promise | None:
        """That promise, when it was given before."""
        known = self._open.get(session_id)
        return known if known is not None and (known.step, known.layer) == (step, layer) else None

    def _launched(self, arrivals: Sequence[Arrival], deadline: float) -> list[Arrival]:
        """The leading ones whose reads began: where a tier refuses, those behind are left too."""
        begun: list[Arrival] = []
        for group in by_tier(arrivals):
            count = 0
            with contextlib.suppress(CoreError):
                count, _ = launch(group, deadline, self._executor)
            begun += group[:count]
            if count < len(group):
                break
        for arrival in arrivals[len(begun) :]:
            self._buffers.give(arrival.buffer)
        return begun

    def take(self, session_id: str, step: int, layer: int) -> Promise | None:
        """The promise for this layer, if that is what was promised. One for the next layer waits, since a
        layer may come in several frames; any other is let go."""
        found = self._open.get(session_id)
        if found is None or (found.step, found.layer) == (step, layer + 1):
            return None
        del self._open[session_id]
        if (found.step, found.layer) == (step, layer):
            return found
        found.leave()
        return None

    def forget(self, session_id: str) -> None:
        found = self._open.pop(session_id, None)
        if found is not None:
            found.leave()

    def close(self) -> None:
        for session_id in list(self._open):
            self.forget(session_id)
