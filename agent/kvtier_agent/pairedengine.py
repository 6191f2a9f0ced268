"""One cache's engine and, at times, a second one beside it: a candidate's with other tiers, or the baseline's
former one whose sessions have not all moved yet.

Why it exists: everybody else deals with one engine of a cache. Here each session has a seat that says in
which engine its rows are; a frame is answered there, or brings the session home first. It must not know
leases: whether a candidate may answer a frame, the frame's mode says.

A session that is compared is in both engines, frame by frame, exact first; the others are in one. Rows are
carried, never computed again (`kvtier_core.carrying`). Each seat has a lock that is held for a whole frame,
so that nobody moves a session while it is stepped; the engines have their own, never held together.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Protocol, runtime_checkable

from kvtier_agent.engine_port import (
    BlockFacts,
    DemotesSessions,
    EnginePort,
    FrameInput,
    FrameMode,
    FrameResult,
    FrameRoom,
    MakesRooms,
    SessionHandle,
    SessionTerms,
    TierReport,
)
from kvtier_agent.pairedframes import FALLS_BACK, PairedFrames, plain
from kvtier_agent.rowevidence import EngineGives
from kvtier_agent.seats import Seat, Slot, carry, unseat
from kvtier_agent.sessionprefixes import SessionPrefixes
from kvtier_agent.tiersums import summed
from kvtier_agent.weightstore import GivenWeights
from kvtier_core.edits.requests import EditAnswer, EditRequest, ForkRequest
from kvtier_core.errors import CoreError, Reason
from kvtier_core.nodeplan import NodePlan
from kvtier_core.prefixes import Prefixes
from kvtier_core.release.leases import GrantTerms
from kvtier_core.selectors.lifecycle.works import IndexState
from kvtier_crds.manifest import RuntimeManifest

log = logging.getLogger(__name__)
OPENING_SECONDS = 5.0


@runtime_checkable
class _HasPrefixes(Protocol):
    @property
    def prefixes(self) -> Prefixes: ...


class PairedEngine:
    """Implements EnginePort. `running` is the baseline's, `beside` the other one."""

    def __init__(self, engine: EnginePort, place: str = "") -> None:
        self.running = Slot(engine, place=place)
        self.beside: Slot | None = None
        self._seats: dict[str, Seat] = {}
        # Of the seats, and of what the second engine is.
        self._table = threading.Lock()
        self._closed = False
        # Held while a session is opened: the engine that it is opened in must not end meanwhile.
        self._opening = threading.Lock()
        self.prefixes = SessionPrefixes(self)
        self._frames = PairedFrames(self)

    # The second engine.

    def attach(self, engine: EnginePort, digest: str, place: str) -> None:
        """Sessions of the candidate of that digest are opened in it from now on. CACHE_UNKNOWN once the cache
        is being removed: the engine is its caller's then."""
        with self._table:
            if self._closed:
                raise CoreError(Reason.CACHE_UNKNOWN, "the cache was removed")
            if self.beside is not None:
                raise ValueError("a second engine is there")
            self.beside = Slot(engine, digest, place)

    def swap(self) -> None:
        """The candidate's engine is the baseline's now. Sessions of the other one move with their next frame,
        or by `settle`."""
        with self._table:
            if self.beside is None:
                raise ValueError("no second engine is there")
            retired, self.running = self.running, self.beside
            retired.retired, self.beside = True, retired

    def detach(self, seconds: float = OPENING_SECONDS) -> Slot | None:
        """The second engine, for its caller to close; None while a session is in it, or is being opened for
        longer than that. For a thread."""
        if not self._opening.acquire(timeout=seconds):
            return None
        try:
            beside = self.beside
            if beside is None or self.seated_in(beside):
                return None
            with self._table:
                if self.beside is not beside:
                    # It was closed with the baseline's meanwhile.
                    return None
                self.beside = None
            return beside
        finally:
            self._opening.release()

    def settle(self, until: float | None = None) -> int:
        """Brings sessions out of the second engine; how many are left in it, since they cannot be carried,
        find no room, are stepped or were not read by then, seconds on time.monotonic. For a thread."""
        beside = self.beside
        if beside is None:
            return 0
        for seat in self._all():
            # A step holds it, and may hang where no deadline reaches.
            if not seat.lock.acquire(timeout=-1 if until is None else max(0.0, until - time.monotonic())):
                continue
            try:
                if not seat.closed and seat.within(beside):
                    self.bring_home(seat, until)
            except CoreError as error:
                log.debug("session %s stays where it is: %s", seat.session_id, error.message)
            finally:
                seat.lock.release()
        return self.seated_in(beside)

    def beside_alone(self, session_id: str) -> bool:
        """Whether the candidate's engine alone has the session, whose rows are bit by bit what the baseline's
        would be."""
        seat, beside = self._seats.get(session_id), self.beside
        if seat is None or beside is None or beside.retired or beside.ending:
            return False
        return seat.home is beside and seat.mirror is None and self.same_chunks(beside)

    def seated_in(self, slot: Slot) -> int:
        return sum(seat.within(slot) for seat in self._all())

    def _all(self) -> list[Seat]:
        with self._table:
            return list(self._seats.values())

    # Sessions.

    def open_session(self, terms: SessionTerms) -> SessionHandle:
        """A session of a candidate with an engine of its own is opened there, and in the baseline's when it
        is compared; where it finds no room there it is the baseline's, and its first frame says so."""
        candidate = terms.candidate
        if candidate is None or not candidate.own:
            with self._opening:
                # Else the engine may be replaced, found empty and ended before the session has a seat.
                return self._open(terms, self.running)
        plain = replace(terms, candidate=None, serves=False)
        with self._opening:
            beside = self.beside
            if beside is None or beside.ending or beside.digest != candidate.candidate_digest:
                gone = CoreError(Reason.NO_CANDIDATE, "the candidate's engine is not there")
                return self._open(plain, self.running, gone, told=True)
            if terms.compared:
                handle = self._open(plain, self.running)
                seat = self._seats[handle.session_id]
                self._mirror(seat, beside, plain)
                answers = beside if terms.serves and seat.mirror is beside else self.running
                return self._merged_by(handle, answers)
            try:
                return self._merged_by(self._open(plain, beside), beside)
            except CoreError as error:
                if error.reason not in FALLS_BACK:
                    raise
                return self._open(plain, self.running, error)

    def _open(
        self, terms: SessionTerms, home: Slot, refusal: CoreError | None = None, *, told: bool = False
    ) -> SessionHandle:
        handle = home.engine.open_session(terms)
        self._seat(handle, home, refusal, told)
        return handle

    def _merged_by(self, handle: SessionHandle, slot: Slot) -> SessionHandle:
        """As its client is told of it."""
        return handle if self.same_chunks(slot) else replace(handle, chunk_tokens=slot.chunk_tokens)

    def _seat(self, handle: SessionHandle, home: Slot, refusal: CoreError | None, told: bool) -> None:
        name, at = handle.session_id, handle.generation
        with self._table:
            self._seats[name] = Seat(name, at, home, at, refusal=refusal, told=told)

    def _mirror(self, seat: Seat, beside: Slot, terms: SessionTerms) -> None:
        try:
            opened = beside.engine.open_session(replace(terms, session_id=seat.session_id))
        except CoreError as error:
            seat.refusal = error
            return
        seat.mirror, seat.mirrored_at = beside, opened.generation

    def demote_session(self, session_id: str, generation: int, most: int) -> int:
        """Where its rows count; those beside them serve comparisons, and end with these."""
        with self.seated(session_id, generation) as seat:
            engine = seat.home.engine
            if not isinstance(engine, DemotesSessions):
                return 0
            return engine.demote_session(session_id, seat.at, most)

    def close_session(self, session_id: str, generation: int) -> int:
        with self.seated(session_id, generation) as seat:
            seat.closed = True
            try:
                unseat(seat)
                return seat.home.engine.close_session(session_id, seat.at)
            finally:
                # Not before: an engine that nobody is seated in may be closed.
                with self._table:
                    self._seats.pop(session_id, None)

    @contextmanager
    def seated(self, session_id: str, generation: int) -> Iterator[Seat]:
        """The session's seat, which nobody moves meanwhile. SESSION_UNKNOWN, GENERATION_STALE."""
        seat = self._seat_of(session_id)
        with seat.lock:
            seat.check(generation)
            yield seat

    def _seat_of(self, session_id: str) -> Seat:
        seat = self._seats.get(session_id)
        if seat is None:
            raise CoreError(Reason.SESSION_UNKNOWN, f"no session {session_id} here")
        return seat

    def bring_home(self, seat: Seat, deadline: float | None = None) -> None:
        """Into the baseline's engine, whatever it is now; the seat's lock is held. What `carry` refuses."""
        running = self.running
        if seat.mirror is running:
            # It was adopted meanwhile, and has every row already.
            former, at = seat.home, seat.at
            with seat.moving(former):
                seat.home, seat.at, seat.mirror = running, seat.mirrored_at, None
                former.engine.close_session(seat.session_id, at)
            return
        unseat(seat)
        if seat.home is not running:
            carry(seat, running, deadline)

    def edit_session(self, request: EditRequest) -> EditAnswer:
        """An edited session is the baseline's: a candidate's engine keeps no history but its own."""
        with self.seated(request.session_id, request.generation) as seat:
            self._leave(seat, request.deadline)
            return seat.home.engine.edit_session(replace(request, generation=seat.at))

    def fork_session(self, request: ForkRequest) -> SessionHandle:
        with self.seated(request.session_id, request.generation) as seat:
            self._leave(seat, request.deadline)
            handle = seat.home.engine.fork_session(replace(request, generation=seat.at))
            self._seat(handle, seat.home, seat.refusal, told=True)
            return handle

    def _leave(self, seat: Seat, deadline: float | None) -> None:
        """Brings it home for good, where it can be carried; one of a former baseline may stay there."""
        mirrored = seat.mirror is not None
        if mirrored or (seat.home is not self.running and not seat.home.retired):
            message = "a session that was edited or forked is the baseline's"
            seat.refusal, seat.told = CoreError(Reason.UNSUPPORTED, message), True
        self.settled(seat, deadline)

    def settled(self, seat: Seat, deadline: float | None = None) -> None:
        """Home, or in the engine of a former baseline from which it cannot go: that is exact, too."""
        try:
            self.bring_home(seat, deadline)
        except CoreError:
            if not seat.home.retired:
                raise

    # Frames.

    def room(self) -> FrameRoom | None:
        engine = self.running.engine
        return engine.room() if isinstance(engine, MakesRooms) else None

    def step(self, frame: FrameInput, mode: FrameMode) -> FrameResult:
        seat = self._seat_of(frame.session_id)
        with seat.lock:
            seat.check(frame.generation)
            if plain(seat, self.running, mode):
                return seat.home.engine.step(seat.frame(frame, seat.at), mode)
            return self._frames.step(seat, frame, mode)

    def step_many(self, frames: Sequence[tuple[FrameInput, FrameMode]]) -> Sequence[FrameResult | CoreError]:
        with ExitStack() as held:
            seats = self._hold(held, [frame.session_id for frame, _ in frames])
            results: list[FrameResult | CoreError | None] = [None] * len(frames)
            together = []
            running = self.running
            for index, (frame, mode) in enumerate(frames):
                seat = seats.get(frame.session_id)
                try:
                    if seat is None:
                        raise CoreError(Reason.SESSION_UNKNOWN, f"no session {frame.session_id} here")
                    seat.check(frame.generation)
                    if plain(seat, running, mode):
                        together.append((index, (seat.frame(frame, seat.at), mode)))
                    else:
                        results[index] = self._frames.step(seat, frame, mode)
                except CoreError as error:
                    results[index] = error
            if together:
                answers = running.engine.step_many([one for _, one in together])
                for (index, _), answer in zip(together, answers, strict=True):
                    results[index] = answer
            return [one for one in results if one is not None]

    def _hold(self, held: ExitStack, names: Sequence[str]) -> dict[str, Seat]:
        """Locks seats, in one order whoever asks."""
        seats = {}
        for name in sorted(set(names)):
            seat = self._seats.get(name)
            if seat is not None:
                held.enter_context(seat.lock)
                seats[name] = seat
        return seats

    # What sessions have where they are.

    def bind_weights(self, session_id: str, generation: int, layer: int, weights: GivenWeights) -> None:
        """Waits for no step, so it takes no seat; a session that asks for weights does not move."""
        seat = self._seats.get(session_id)
        home, at = (self.running, generation) if seat is None else (seat.home, seat.at)
        home.engine.bind_weights(session_id, at, layer, weights)

    def indexes_caught_up(self, session_id: str, generation: int, seconds: float) -> bool:
        seat = self._seats.get(session_id)
        home, at = (self.running, generation) if seat is None else (seat.home, seat.at)
        return home.engine.indexes_caught_up(session_id, at, seconds)

    def blocks(self, session_id: str, generation: int) -> Sequence[BlockFacts]:
        with self.seated(session_id, generation) as seat:
            return seat.home.engine.blocks(session_id, seat.at)

    def read_block(
        self, session_id: str, generation: int, layer: int, chunk: int, block_generation: int
    ) -> tuple[BlockFacts, bytes]:
        with self.seated(session_id, generation) as seat:
            return seat.home.engine.read_block(session_id, seat.at, layer, chunk, block_generation)

    def prefixes_of(self, slot: Slot) -> Prefixes:
        """UNSUPPORTED for an engine without."""
        if not isinstance(slot.engine, _HasPrefixes):
            raise CoreError(Reason.UNSUPPORTED, "sessions of this engine do not start from blocks")
        return slot.engine.prefixes

    def same_chunks(self, slot: Slot) -> bool:
        """Whether rows of that engine are bit by bit what the baseline's makes."""
        return self.running.chunk_tokens == slot.chunk_tokens

    # What is the running engine's alone.

    def check_candidate(self, terms: GrantTerms) -> None:
        self.running.engine.check_candidate(terms)

    def lacks(self, terms: GrantTerms, gives: EngineGives) -> CoreError | None:
        return self.running.engine.lacks(terms, gives)

    def adopt(self, manifest: RuntimeManifest) -> None:
        self.running.engine.adopt(manifest)

    def live_manifest(self) -> RuntimeManifest:
        return self.running.engine.live_manifest()

    def plan(self) -> NodePlan | None:
        return self.running.engine.plan()

    def indexes(self) -> Sequence[IndexState]:
        return self.running.engine.indexes()

    def selector_digest(self, terms: GrantTerms) -> str:
        return self.running.engine.selector_digest(terms)

    def tiers(self) -> Sequence[TierReport]:
        """What both use."""
        beside = self.beside
        reports = list(self.running.engine.tiers())
        return reports if beside is None else summed(reports, beside.engine.tiers())

    def close(self) -> None:
        with self._table:
            self._closed = True
            beside, self.beside = self.beside, None
        try:
            if beside is not None:
                beside.engine.close()
        finally:
            self.running.engine.close()
