"""Builds indexes beside the steps that will ask them: one job at a time, for a share of one processor.

Why it exists: a build takes as long as many steps, and a node serves while it builds. Here is decided what
is built next, when, and within which memory; a job itself runs outside of the lock, on whichever thread calls
`run_next`. Clock and threads come from outside, so that a test, a simulation and an agent run the same. It
must not know sessions of an engine, tiers or what a family computes.

Order: appends, which are short and keep indexes fresh, before builds, but no more than a few in a row; each
kind first come, first served. Other work of little weight comes when nothing is due. A job that fails leaves
what was published and is tried again from the rows that it had; one that its family refuses, or that fails
too often, ends its session's indexes for good: the session is answered exactly, and says why."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from typing import Protocol

from torch import Tensor

from kvtier_core.errors import CoreError, Reason
from kvtier_core.rowevidence import LayerWeights
from kvtier_core.selectors.contract import Index
from kvtier_core.selectors.lifecycle.grades import AuditBook
from kvtier_core.selectors.lifecycle.life import Block, Job, Kind, LayerLife, Published
from kvtier_core.selectors.lifecycle.memory import IndexMemory, buffers
from kvtier_core.selectors.lifecycle.names import Name as Name
from kvtier_core.selectors.lifecycle.told import Counted, SessionLives
from kvtier_core.selectors.lifecycle.told import IndexState as IndexState

APPENDS_IN_A_ROW = 16
MOST_WAITING = 8192
ATTEMPTS = 3


class Point(StrEnum):
    """Moments of a job at which it may end for whatever reason."""

    TAKEN = "taken"
    BUILT = "built"
    MEASURED = "measured"
    CHECKED = "checked"
    PUBLISHED = "published"


class Runner(Protocol):
    """Who calls `run_next`."""

    def wake(self, works: IndexWorks) -> None:
        """There is work, or was. Called without the works' lock; must not fail."""


class AtOnce:
    """Runs whatever is due in the caller's thread, without regard to any share: for tests and for programs
    that have no thread to spare. A step then waits for the builds that it causes."""

    def wake(self, works: IndexWorks) -> None:
        while works.run_next(unpaced=True) == 0.0:
            pass


class IndexWorks:
    """The indexes of one process. Thread-safe; one thread at a time runs jobs, but for those that `give_up`
    has given up."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        runner: Runner | None = None,
        share: float = 1.0,
        spent: Callable[[], float] | None = None,
        memory: IndexMemory | None = None,
        most_waiting: int = MOST_WAITING,
        at: Callable[[Point], None] | None = None,
    ) -> None:
        """clock: monotonic seconds. share: of one processor, in (0, 1]. spent: processor seconds of the
        calling thread; None: the clock's. most_waiting: layers in the queues. at: told of each point of a
        job; may raise, for tests of what then remains. ValueError for a share that is none."""
        if not 0.0 < share <= 1.0:
            raise ValueError(f"a share of {share} is not in (0, 1]")
        self._clock = clock
        self._spent = spent or clock
        self._runner = runner or AtOnce()
        self._rest = (1.0 - share) / share
        self.memory = memory or IndexMemory()
        self._most_waiting = most_waiting
        self._at = at or (lambda point: None)
        self._lock = threading.Lock()
        self._ran = threading.Condition(self._lock)
        self._queues: dict[Kind, deque[LayerLife]] = {kind: deque() for kind in Kind}
        self._queued: set[int] = set()
        self._sessions: dict[int, SessionLives] = {}
        self._of: dict[int, SessionLives] = {}
        self._counted: dict[Name, Counted] = {}
        self._not_before = float("-inf")
        self._in_a_row = 0
        self._passed_over = False
        self._others: deque[Callable[[], None]] = deque()
        self._under_way: dict[int, tuple[Job | None, float]] = {}
        self.audits = AuditBook()

    # Sessions.

    def open(self, name: Name, lives: list[LayerLife], *, spare: bool = False) -> SessionLives:
        """Takes the layers of a session under its care. spare: it gives way, and takes memory only as long as
        half of it is free."""
        session = SessionLives(name, lives, spare)
        with self._lock:
            self._sessions[id(session)] = session
            self._counted.setdefault(name, Counted())
            for life in lives:
                self._of[id(life)] = session
        return session

    def fork(self, session: SessionLives, digest: bytes) -> SessionLives:
        """A session of the same rows under another source, with the indexes that are published and the rows
        that wait now. What both hold is counted for each; where that is too much the child is refused as any
        other."""
        with self._lock:
            made = self._taken_over(session, [life.forked(digest) for life in session.lives])
        self._runner.wake(self)
        return made

    def truncate(self, session: SessionLives, digest: bytes, rows: int) -> SessionLives | None:
        """As `fork`, of the first `rows` rows; None where a layer's index cannot follow."""
        with self._lock:
            lives = [life.truncated(digest, rows) for life in session.lives]
            if any(life is None for life in lives):
                return None
            made = self._taken_over(session, [life for life in lives if life is not None])
        self._runner.wake(self)
        return made

    def _taken_over(self, session: SessionLives, lives: list[LayerLife]) -> SessionLives:
        made = SessionLives(session.name, lives)
        self._sessions[id(made)] = made
        for life in lives:
            self._of[id(life)] = made
        if not all(life.ended or self._fits(made, life) for life in lives):
            self._refuse(made, self._over("an index"))
        for life in lives:
            self._note(life)
        return made

    def close(self, session: SessionLives) -> None:
        """Nothing of it is built or read from now on, but what a query reads now. Idempotent."""
        with self._lock:
            if self._sessions.pop(id(session), None) is None:
                return
            for life in session.lives:
                life.close()
                self._settle(session, life)
                if not life.retired:
                    del self._of[id(life)]

    def forget(self, cache: str) -> None:
        """Drops the counts of a cache that has ended, but those of sessions that are open."""
        with self._lock:
            there = {session.name for session in self._sessions.values()}
            gone = [name for name in self._counted if name.cache == cache and name not in there]
            for name in gone:
                del self._counted[name]
        self.audits.forget(cache)

    def reserve(self, count: int) -> bool:
        """Whether `count` bytes may be held for something that selections can do without; they are taken
        then, as long as half of the memory is free."""
        with self._lock:
            return self.memory.used + count <= self.memory.limit // 2 and self.memory.take(count)

    def take(self, count: int) -> bool:
        """Whether `count` bytes may be held of rows that wait for what an index needs; they are taken
        then."""
        with self._lock:
            return self.memory.take(count)

    def give_back(self, count: int) -> None:
        """What was reserved or taken."""
        with self._lock:
            self.memory.give(count)

    # What happens to a layer.

    def arrive(self, life: LayerLife, block: Block) -> None:
        """Rows that came. SUPPORT_GAP; QUOTA_EXCEEDED ends the session's indexes and is not raised here."""
        with self._lock:
            life.arrive(block)
            session = self._of.get(id(life))
            if session is not None and not life.ended and not self._fits(session, life):
                self._refuse(session, self._over("rows that wait for an index"))
            self._note(life)
        self._runner.wake(self)

    def give_weights(self, life: LayerLife, weights: LayerWeights) -> None:
        with self._lock:
            life.weights = weights
            self._note(life)
        self._runner.wake(self)

    def over(self, session: SessionLives) -> None:
        """Ends a session's indexes: rows that would wait for what they need have no room."""
        with self._lock:
            if id(session) in self._sessions:
                self._refuse(session, self._over("rows that wait for their evidence"))

    def end_rows(self, life: LayerLife) -> None:
        """All rows of a step are here."""
        with self._lock:
            life.end_rows()
            self._note(life)
        self._runner.wake(self)

    def decode(self, lives: list[LayerLife]) -> None:
        """A decode step asks of a session."""
        with self._lock:
            for life in lives:
                life.decode()
                session = self._of.get(id(life))
                if session is not None:
                    self._settle(session, life)
                self._note(life)
        self._runner.wake(self)

    @contextmanager
    def lease(self, life: LayerLife, most: int | None = None) -> Iterator[tuple[Published, Tensor | None]]:
        """The published index, and the keys of rows behind it where they are at hand and no more than `most`;
        both of one moment. It stays until the end, whatever is published meanwhile. DEPENDENCY_UNPUBLISHED,
        or why there is none for good."""
        held, keys = self.take_lease(life, most)
        try:
            yield held, keys
        finally:
            self.end_lease(life, held)

    def take_lease(self, life: LayerLife, most: int | None = None) -> tuple[Published, Tensor | None]:
        """As `lease`, for who ends it elsewhere."""
        with self._lock:
            return life.lease(), life.uncovered(most)

    def end_lease(self, life: LayerLife, held: Published) -> None:
        with self._lock:
            life.release(held)
            session = self._of.get(id(life))
            if session is not None:
                self._settle(session, life)
                if life.closed and not life.retired:
                    del self._of[id(life)]

    def missed(self, life: LayerLife) -> None:
        """A query asked for more than is published and was answered exactly."""
        with self._lock:
            if life.wanted_at is None and not life.ended:
                life.wanted_at = self._clock()
            self._note(life)
        self._runner.wake(self)

    def caught_up(self, lives: Sequence[LayerLife], seconds: float) -> bool:
        """Waits, at most for `seconds`, until nothing more is due of a session; whether it is so."""
        until = self._clock() + seconds
        with self._lock:
            while any(life.running is not None or life.due() is not None for life in lives):
                left = until - self._clock()
                if left <= 0.0:
                    return False
                self._ran.wait(left)
        return True

    def offer(self, work: Callable[[], None]) -> None:
        """Something else to run when nothing is due, within the same share. Who offers bounds how much
        waits."""
        with self._lock:
            self._others.append(work)
        self._runner.wake(self)

    # Running.

    def run_next(self, *, unpaced: bool = False) -> float | None:
        """Runs the next job to its end if its time has come. Returns seconds until there may be more to do,
        0.0 for at once; None: nothing is due. Whatever ends a job, it leaves a state in which the next one
        goes on; what is no Exception is raised further. unpaced: in a step's own time, whatever the share."""
        began = self._clock()
        with self._lock:
            if not unpaced and began < self._not_before:
                return self._not_before - began
            life = self._next()
            if life is None and not self._others:
                return None
            job = None if life is None else life.start()
            other = self._others.popleft() if job is None else None
            self._under_way[threading.get_ident()] = (job, began)
        spent = self._spent()
        try:
            if job is not None:
                self._run(job, began, exposed=unpaced)
            elif other is not None:
                other()
        finally:
            used = max(0.0, self._spent() - spent)
            with self._lock:
                self._under_way.pop(threading.get_ident(), None)
                self._not_before = self._clock() + used * self._rest
                self._ran.notify_all()
        return 0.0 if unpaced else max(0.0, self._not_before - self._clock())

    def give_up(self, thread: int, seconds: float) -> bool:
        """Whether the job of that thread (its ident) has run for more than `seconds`: then the indexes of its
        session end for good, with DEADLINE, and what it still makes is nobody's. The call itself cannot be
        ended; another thread may run the others."""
        with self._lock:
            job, began = self._under_way.get(thread, (None, self._clock()))
            if self._clock() - began <= seconds:
                return False
            del self._under_way[thread]
            session = None if job is None else self._of.get(id(job.life))
            if session is not None and job is not None and job.life.running is job:
                said = f"an index was not built in {seconds:g} s"
                self._refuse(session, CoreError(Reason.DEADLINE, said))
            self._ran.notify_all()
            return True

    def _run(self, job: Job, began: float, *, exposed: bool) -> None:
        try:
            self._at(Point.TAKEN)
            index = job.run()
            self._at(Point.BUILT)
            made = Published(index, buffers(index))
            self._at(Point.MEASURED)
            with self._lock:
                self._publish(job, made, began, exposed=exposed)
        except BaseException as error:
            with self._lock:
                self._failed(job, error)
            if not isinstance(error, Exception):
                raise

    def _next(self) -> LayerLife | None:
        """The layer whose turn it is; one whose job was done or dropped meanwhile loses its turn."""
        while True:
            appends, builds = self._queues[Kind.APPEND], self._queues[Kind.BUILD]
            first = appends if appends and (self._in_a_row < APPENDS_IN_A_ROW or not builds) else builds
            if not first:
                if not self._passed_over:
                    return None
                self._passed_over = False
                for session in self._sessions.values():
                    for one in session.lives:
                        self._note(one)
                continue
            life = first.popleft()
            self._queued.discard(id(life))
            if life.due() is not None:
                self._in_a_row = self._in_a_row + 1 if first is appends else 0
                return life

    def _note(self, life: LayerLife) -> None:
        """Puts the layer in the queue of what is due of it; what finds no place is looked for again once
        there is."""
        kind = life.due()
        if kind is None or id(life) in self._queued:
            return
        if len(self._queued) >= self._most_waiting:
            self._passed_over = True
            return
        self._queued.add(id(life))
        self._queues[kind].append(life)

    def _publish(self, job: Job, made: Published, began: float, *, exposed: bool) -> None:
        life = job.life
        session = self._of.get(id(life))
        if life.running is not job or session is None:
            # The session ended, or was refused, while this was built.
            return
        index: Index = life.checked(job, made.index)
        made = Published(index, made.buffers)
        self._at(Point.CHECKED)
        now = self._clock()
        life.publish(job, made)
        self._count(session.name, job, began, now, exposed)
        if not self._fits(session, life):
            self._refuse(session, self._over("an index"))
        self._note(life)
        self._at(Point.PUBLISHED)

    def _count(self, name: Name, job: Job, began: float, now: float, exposed: bool) -> None:
        counted, life = self._counted[name], job.life
        if job.kind is Kind.BUILD:
            counted.builds += 1
        else:
            counted.appends += 1
        asked = now if life.wanted_at is None else life.wanted_at
        if exposed:
            asked = min(asked, began)
        counted.exposed_seconds += now - asked
        counted.hidden_seconds += max(0.0, min(now, asked) - began)
        life.wanted_at = None

    def _failed(self, job: Job, error: BaseException) -> None:
        """Again, or never: what a family refuses it would refuse again."""
        life = job.life
        session = self._of.get(id(life))
        life.failed(job)
        if session is None or life.ended:
            return
        counted = self._counted[session.name]
        counted.failures += 1
        if isinstance(error, CoreError):
            self._refuse(session, error)
        elif life.failures >= ATTEMPTS:
            said = f"an index was not built in {ATTEMPTS} attempts: {type(error).__name__}: {error}"
            self._refuse(session, CoreError(Reason.INTERNAL, said))
        self._note(life)

    # Memory.

    def _fits(self, session: SessionLives, life: LayerLife) -> bool:
        """Takes what the layer holds now; False when that is more than there is."""
        want, has = _held(life), session.taken.get(id(life), 0)
        if want > has:
            half = self.memory.limit // 2
            if session.spare and self.memory.used + want - has > half:
                return False
            if not self.memory.take(want - has):
                return False
        if want < has:
            self.memory.give(has - want)
        session.taken[id(life)] = want
        return True

    def _settle(self, session: SessionLives, life: LayerLife) -> None:
        """Gives back what the layer let go."""
        want, has = _held(life), session.taken.get(id(life), 0)
        if want < has:
            self.memory.give(has - want)
            session.taken[id(life)] = want

    def _over(self, what: str) -> CoreError:
        return CoreError(
            Reason.QUOTA_EXCEEDED,
            f"{what} of this session are beyond the {self.memory.limit} bytes for indexes",
            {"limit": self.memory.limit, "used": self.memory.used},
        )

    def _refuse(self, session: SessionLives, error: CoreError) -> None:
        counted = self._counted[session.name]
        counted.refusals[error.reason.value] = counted.refusals.get(error.reason.value, 0) + 1
        for life in session.lives:
            life.refuse(error)
            self._settle(session, life)

    # What is told.

    def states(self, cache: str | None = None) -> list[IndexState]:
        """Of each selector that has sessions or had some, of one cache or of all, by name. Steps wait for one
        session of it at a time, never for the whole: what it says is of no single moment."""
        with self._lock:
            found = {
                name: IndexState(name, 0, 0, 0, 0, 0, replace(counted, refusals=dict(counted.refusals)))
                for name, counted in self._counted.items()
                if cache is None or name.cache == cache
            }
            sessions = [one for one in self._sessions.values() if one.name in found]
        for session in sessions:
            with self._lock:
                if id(session) in self._sessions:
                    found[session.name] = session.added(found[session.name])
        return sorted(
            found.values(), key=lambda one: (one.name.cache, one.name.family, one.name.selector_digest)
        )


def _held(life: LayerLife) -> int:
    return sum(life.held.values()) + life.waiting_bytes
