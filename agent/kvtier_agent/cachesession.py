"""One engine session of a cache on this node, and its frames on their way to an answer.

Plain records: what was decided for a session, and what a frame carries between the wire and the engine. They
know no wire message and no engine.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtier_agent.engine_port import FrameInput, FrameMode, FrameResult, SessionHandle
from kvtier_agent.evidence_port import Progress
from kvtier_core.errors import CoreError, Reason
from kvtier_core.release.enforcement import Assignment, ServedArm, StepPlan
from kvtier_evidence.window import WindowKey

if TYPE_CHECKING:
    from kvtier_agent.cachehost import CacheHost

NO_PROGRESS = Progress(0, 0.0, 0.0)
EXACT_MODE = FrameMode(False, False, None, lambda: False)


@dataclass(frozen=True)
class CacheName:
    """How operators and engines name a cache; uid may be empty where only the name is known."""

    namespace: str
    name: str
    uid: str


@dataclass
class Session:
    """One engine session and what was decided for it. Times are CLOCK_BOOTTIME nanoseconds, sums seconds.
    `step_first_query`: position of the first query of `step`, the last one answered in part or whole. lacks:
    why no candidate may answer it although its grant covers it; fallback: what receipts say of that, where
    the candidate would have answered. demoted_ns: the last use after which nothing of it was left to move
    down, demoting: some is on its way. ended: why the agent ended it by itself."""

    handle: SessionHandle
    host: CacheHost
    tenant: str
    request_id: str
    assignment: Assignment
    window: WindowKey | None
    traceparent: str
    opened_ns: int
    last_used_ns: int
    first_step: int | None = None
    step: int | None = None
    step_first_query: int = 0
    first_decode_step: int | None = None
    progress: Progress = NO_PROGRESS
    last_answered_step: int | None = None
    stalled_upto: tuple[int, int] = (-1, -1)
    streaming: bool = False
    stream_ended: asyncio.Event = field(default_factory=asyncio.Event)
    frames_running: int = 0
    step_errors: dict[int, float] = field(default_factory=dict)
    last_compared_step: int | None = None
    outcome_reported: bool = False
    lacks: CoreError | None = None
    fallback: str = ""
    demoted_ns: int = -1
    demoting: bool = False
    ended: str = ""
    _counting: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def begin_frame(self) -> None:
        """A frame or an edit runs from now on. From any thread, as its end: one comes on a channel's thread,
        another on the event loop."""
        with self._counting:
            self.frames_running += 1

    def end_frame(self) -> None:
        with self._counting:
            self.frames_running -= 1

    def end_when_idle(self, before_ns: int, why: str) -> bool:
        """Whether it is ended: it was last used before then, and nothing of it runs. What comes from here on
        is refused; what had begun before keeps it. before_ns: CLOCK_BOOTTIME."""
        with self._counting:
            if self.frames_running or self.last_used_ns >= before_ns:
                return False
            self.ended = why
            return True

    def check_open(self) -> None:
        """SESSION_UNKNOWN, with the reason, once it was ended. Asked between `begin_frame` and `end_frame`,
        in which nobody ends it."""
        if self.ended:
            raise CoreError(Reason.SESSION_UNKNOWN, self.ended, {"ended": "idle"})

    def begin_again(self) -> None:
        """After an edit steps may have any number, so that none seen before says anything of them, but that
        there were some. What was measured stays."""
        self.step = self.last_answered_step = self.last_compared_step = None
        self.first_step = None if self.first_step is None else -1
        self.first_decode_step = None if self.first_decode_step is None else -1
        self.step_first_query = 0
        self.stalled_upto = (-1, -1)
        self.step_errors.clear()

    @property
    def counted(self) -> bool:
        """Whether it is a unit of the window's evidence: assigned inside the blast radius, not a probe."""
        return self.window is not None and self.assignment.in_radius


# As in engine_port: made for each frame, and changed by nobody.
@dataclass(slots=True)
class FrameAnswer:
    """`compared_error`: the step error when this frame completed a compared step; NaN is a missing value."""

    result: FrameResult
    arm: ServedArm
    fallback: str
    compared_error: float | None


@dataclass(slots=True)
class FrameWork:
    """A frame of a session, checked, with its number of queries."""

    session: Session
    frame: FrameInput
    queries: int


@dataclass(slots=True)
class PreparedFrame:
    """How a frame is computed. first_query: of its step; decode: whether it is a step's only query."""

    session: Session
    frame: FrameInput
    plan: StepPlan
    mode: FrameMode
    first_query: int
    decode: bool
    first_decode: bool

    @property
    def candidates(self) -> bool:
        """Whether a candidate's answer is computed."""
        return self.mode is not EXACT_MODE and (self.mode.publish_candidate or self.mode.compare)

    @property
    def waits(self) -> bool:
        """Whether the session's indexes must have caught up before: a probe scores the candidate's
        answers."""
        return self.decode and self.candidates and self.session.assignment.probe

    def exact(self) -> FrameMode:
        return FrameMode(False, False, None, self.mode.may_publish)


def check_owner(session: Session, generation: int, tenant: str) -> None:
    """Raises TENANT_MISMATCH before anything about the session is told, then GENERATION_STALE."""
    if session.tenant != tenant:
        raise CoreError(Reason.TENANT_MISMATCH, "the session belongs to another tenant")
    if session.handle.generation != generation:
        message = f"generation {generation} is not {session.handle.generation}"
        raise CoreError(Reason.GENERATION_STALE, message)
