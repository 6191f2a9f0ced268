"""Where one session of a cache with two engines is, and how it moves from one to the other.

Why it exists: a session has one name and one generation for its client, and another generation in each engine
that holds rows of it. It must not know frames, modes or leases.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol, cast

from kvtier_agent.engine_port import EnginePort, FrameInput
from kvtier_core.carrying import Carriage
from kvtier_core.errors import CoreError, Reason

log = logging.getLogger(__name__)


class Carries(Protocol):
    """An engine whose sessions can be carried."""

    @property
    def carriage(self) -> Carriage: ...


@dataclass(eq=False, slots=True)
class Slot:
    """One engine. digest: of the manifest that it was built for; place: names its folders. retired: it was
    the baseline's until another was adopted, so its answers are exact ones of that. ending: it was a
    candidate's, and is used for nothing new."""

    engine: EnginePort
    digest: str = ""
    place: str = ""
    retired: bool = False
    ending: bool = False
    _chunk_tokens: int = 0

    @property
    def carriage(self) -> Carriage:
        """UNSUPPORTED for an engine whose sessions stay."""
        found = getattr(self.engine, "carriage", None)
        if found is None:
            raise CoreError(Reason.UNSUPPORTED, "sessions of this engine cannot be carried")
        return cast(Carries, self.engine).carriage

    @property
    def chunk_tokens(self) -> int:
        """By which its answers are merged. An engine never changes it."""
        if not self._chunk_tokens:
            self._chunk_tokens = self.engine.live_manifest().chunk_tokens
        return self._chunk_tokens


@dataclass(eq=False, slots=True)
class Seat:
    """One session. generation: its client's. home, at: the engine that answers it and its generation there.
    mirror, mirrored_at: the candidate's engine, which gets every frame too. between: engines that are taking
    it in or letting it go. refusal: why the candidate's engine does not hold it although it should; told:
    whether that was counted."""

    session_id: str
    generation: int
    home: Slot
    at: int
    mirror: Slot | None = None
    mirrored_at: int = 0
    between: tuple[Slot, ...] = ()
    refusal: CoreError | None = None
    told: bool = False
    closed: bool = False
    lock: threading.RLock = field(default_factory=threading.RLock)

    def check(self, generation: int) -> None:
        """GENERATION_STALE, SESSION_UNKNOWN."""
        if self.closed:
            raise CoreError(Reason.SESSION_UNKNOWN, f"no session {self.session_id} here")
        if generation != self.generation:
            raise CoreError(
                Reason.GENERATION_STALE,
                f"session {self.session_id} is of generation {self.generation}, not {generation}",
                {"generation": self.generation},
            )

    def frame(self, frame: FrameInput, at: int) -> FrameInput:
        """As the engine knows it whose generation is `at`."""
        return frame if at == frame.generation else replace(frame, generation=at)

    def within(self, slot: Slot) -> bool:
        """Whether the engine is still needed for it; also asked without the lock."""
        return self.home is slot or self.mirror is slot or slot in self.between

    @contextmanager
    def moving(self, *slots: Slot) -> Iterator[None]:
        """Until its end these engines count as its own: one that looks empty may be closed by another
        thread."""
        self.between = slots
        try:
            yield
        finally:
            self.between = ()


def carry(seat: Seat, target: Slot, deadline: float | None = None) -> None:
    """Moves a session whole; the seat's lock is held. deadline: seconds on the engines' clock. What reading
    and room refuse; it is where it was then."""
    source, at = seat.home, seat.at
    with seat.moving(source, target):
        state = source.carriage.state(seat.session_id, at)
        rows = source.carriage.rows(seat.session_id, at, deadline)
        handle = target.carriage.receive(state, rows, deadline)
        seat.home, seat.at = target, handle.generation
        source.engine.close_session(seat.session_id, at)
    log.info("session %s was carried, %d rows", seat.session_id, max(state.frontiers, default=0))


def follow(seat: Seat, mirror: Slot, first: int, *, mirrors: bool) -> None:
    """Notes whose answer of a frame is published, the mirror's or the home's: rows from `first` on are of it
    and not the exact run of the other where that merges other chunks. The seat's lock is held."""
    if seat.home.chunk_tokens == mirror.chunk_tokens:
        return
    (mine, at), other = ((seat.home, seat.at), mirror) if mirrors else ((mirror, seat.mirrored_at), seat.home)
    mine.carriage.helped(seat.session_id, at, other.engine.live_manifest().digest(), first)


def unseat(seat: Seat) -> None:
    """Ends what the mirror holds; the seat's lock is held."""
    mirror, at = seat.mirror, seat.mirrored_at
    if mirror is not None:
        with seat.moving(mirror):
            seat.mirror = None
            mirror.engine.close_session(seat.session_id, at)
