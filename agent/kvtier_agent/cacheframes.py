"""Frames of one cache's sessions: how each is computed now, its answer, and what is told of it.

Why it exists: whatever brought a frame, it is planned, computed and counted in one way; and a frame that
fails, by a refusal or by a defect, costs no other frame of its message anything. It knows no wire message and
opens no session.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import ParamSpec, TypeVar

from kvtier_agent.cachesession import EXACT_MODE, FrameAnswer, FrameWork, PreparedFrame, Session
from kvtier_agent.engine_port import EngineRunner, ExactnessClass, FrameInput, FrameMode, FrameResult
from kvtier_agent.evidence_port import FrameEvidence, Progress
from kvtier_core.errors import CoreError, Reason
from kvtier_core.release.enforcement import Assignment, CacheEnforcement, ServedArm, StepPlan
from kvtier_core.selectors.gates import illegal
from kvtier_evidence.metrics import (
    ALLOCATION_FAILURES,
    ILLEGAL_FALLBACKS,
    ISOLATION_FAILURES,
    OUTPUT_MISMATCHES,
    REPLAY_FAILURES,
)
from kvtier_evidence.window import WindowKey

PROBE_WAIT_SECONDS = 30.0
"""How long a probe's step waits for its indexes."""
DEFECT = "internal failure; see the agent's log"
_EXACT_PLAN = StepPlan(ServedArm.BASELINE, False, None, "")
_BASELINE, _CANDIDATE = ServedArm.BASELINE, ServedArm.CANDIDATE

# Zero-tolerance counters by the refusal that moves them, for sessions that a candidate serves.
_COUNTER_OF = {
    Reason.NO_DESTINATION_CAPACITY: ALLOCATION_FAILURES,
    Reason.IDENTITY_MISMATCH: ISOLATION_FAILURES,
    Reason.RECYCLED_DESTINATION: ISOLATION_FAILURES,
    Reason.STALE_CACHE_GENERATION: REPLAY_FAILURES,
    Reason.SUPPORT_GAP: REPLAY_FAILURES,
}
P = ParamSpec("P")
T = TypeVar("T")
log = logging.getLogger(__name__)


class CacheFrames:
    """Calls of one session arrive in order, calls of different sessions interleave."""

    def __init__(
        self,
        runner: EngineRunner,
        enforcement: CacheEnforcement,
        evidence: FrameEvidence,
        clock: Callable[[], int],
        layers: int,
    ) -> None:
        """evidence: of frames that are computed on the event loop's behalf. clock: CLOCK_BOOTTIME, ns."""
        self._runner = runner
        self._enforcement = enforcement
        self._evidence = evidence
        self._clock = clock
        self._last_layer = layers - 1

    async def attend(self, session: Session, frame: FrameInput, queries: int) -> FrameAnswer:
        """Computes one frame of the session's stream; raises CoreError with the session unchanged."""
        session.begin_frame()
        try:
            return await self._attend(self._prepare(session, frame, queries))
        finally:
            session.end_frame()

    async def attend_many(self, frames: Sequence[FrameWork]) -> list[FrameAnswer | CoreError]:
        """As `attend`, for frames of different sessions of this cache; one that fails harms no other."""
        with _running(frames):
            batch = _Batch([self._prepared(work) for work in frames])
            if batch.plain:
                try:
                    results = await self._runner.call(lambda: self._together(batch.plain))
                except CoreError as error:
                    results = [error] * len(batch.plain)
                self._settle_all(batch, results, self._evidence)
            for index, one in batch.others():
                batch.answers[index] = await self._attend_guarded(one)
            return batch.all_answers()

    async def _attend_guarded(self, one: PreparedFrame) -> FrameAnswer | CoreError:
        try:
            return await self._attend(one)
        except CoreError as error:
            return error
        except Exception:
            log.exception("a frame failed")
            return CoreError(Reason.INTERNAL, DEFECT)

    def attend_now(
        self, frames: Sequence[FrameWork], evidence: FrameEvidence
    ) -> list[FrameAnswer | CoreError]:
        """As `attend_many`, computed in the caller's thread, which must not be the event loop's. evidence:
        what is seen of the frames goes there, from this thread."""
        if len(frames) == 1:
            return [self._guarded(self.attend_one_now, frames[0], evidence)]
        with _running(frames):
            batch = _Batch([self._prepared(work) for work in frames])
            if batch.plain:
                results: Sequence[FrameResult | CoreError]
                try:
                    results = self._runner.here(self._together, batch.plain)
                except CoreError as error:
                    results = [error] * len(batch.plain)
                self._settle_all(batch, results, evidence)
            for index, one in batch.others():
                batch.answers[index] = self._guarded(self._attend_now, one, evidence)
            return batch.all_answers()

    def attend_one_now(self, work: FrameWork, evidence: FrameEvidence) -> FrameAnswer | CoreError:
        """As `attend_now`, of one frame; a defect is raised."""
        session = work.session
        session.begin_frame()
        try:
            if session.assignment.epoch == 0 and session.window is None:
                return self._plainly(session, work.frame)
            one = self._prepare(session, work.frame, work.queries)
            if one.candidates:
                return self._attend_now(one, evidence)
            return self._settled(one, self._computed(one), evidence)
        finally:
            session.end_frame()

    def _plainly(self, session: Session, frame: FrameInput) -> FrameAnswer | CoreError:
        """A frame of a session that was opened without a candidate and is no unit of evidence: nothing is
        planned, compared or told. A token asks for one in each layer. SESSION_UNKNOWN, as `_prepare`."""
        session.check_open()
        first_query = _first_query(session, frame)
        try:
            result = self._runner.here(self._runner.engine.step, frame, EXACT_MODE)
        except CoreError as error:
            return error
        self._advance(session, frame, first_query)
        return FrameAnswer(result, _BASELINE, session.fallback, None)

    def _settle_all(
        self, batch: _Batch, results: Sequence[FrameResult | CoreError], evidence: FrameEvidence
    ) -> None:
        """Of the frames that were computed together."""
        for index, one, result in zip(batch.places, batch.plain, results, strict=True):
            batch.answers[index] = self._guarded(self._settled, one, result, evidence)

    def _prepared(self, work: FrameWork) -> PreparedFrame | CoreError:
        return self._guarded(self._prepare, work.session, work.frame, work.queries)

    def _together(self, plain: Sequence[PreparedFrame]) -> Sequence[FrameResult | CoreError]:
        """The engine's results of exact frames, in one call. A defect there says not whose it is, so each
        frame is asked again alone: rows that were taken are a repeat, which is answered again."""
        engine = self._runner.engine
        try:
            return engine.step_many([(one.frame, one.mode) for one in plain])
        except CoreError as error:
            return [error] * len(plain)
        except Exception:
            log.exception("frames failed together")
        return [self._guarded(engine.step, one.frame, one.mode) for one in plain]

    @staticmethod
    def _guarded(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | CoreError:
        """What the function gives or refuses; a defect is this frame's INTERNAL."""
        try:
            return function(*args, **kwargs)
        except CoreError as error:
            return error
        except Exception:
            log.exception("a frame failed")
            return CoreError(Reason.INTERNAL, DEFECT)

    def _prepare(self, session: Session, frame: FrameInput, queries: int) -> PreparedFrame:
        """How the frame is computed now. SESSION_UNKNOWN where the session was ended as it came."""
        session.check_open()
        first_query = _first_query(session, frame)
        decode = queries == 1 and _decodes(session, frame, first_query)
        assignment = session.assignment
        if assignment.epoch == 0:
            # Opened without a candidate: none will ever serve it.
            return PreparedFrame(session, frame, _EXACT_PLAN, EXACT_MODE, first_query, decode, False)
        first_decode = decode and session.first_decode_step in (None, frame.step)
        plan = self._enforcement.plan_step(assignment, session.request_id, frame.step, first_decode)
        mode = FrameMode(
            publish_candidate=plan.publish is ServedArm.CANDIDATE,
            compare=plan.compare and decode,
            candidate=plan.terms,
            may_publish=lambda: self._enforcement.may_publish(assignment),
        )
        return PreparedFrame(session, frame, plan, mode, first_query, decode, first_decode)

    async def _attend(self, one: PreparedFrame) -> FrameAnswer:
        engine, frame, session = self._runner.engine, one.frame, one.session
        try:
            if one.waits:
                await asyncio.to_thread(self._catch_up, one)
            if one.candidates:
                running = ExitStack()
                running.enter_context(self._enforcement.candidate_step())
                # A caller that gives up does not stop the engine: the step is over when the engine says so.
                result = await self._runner.call(lambda: engine.step(frame, one.mode), over=running.close)
            else:
                result = await self._runner.call(lambda: engine.step(frame, one.mode))
            if result.from_candidate and not self._enforcement.may_publish(session.assignment):
                # Permission ended after the engine asked for it. The rows are in, so this is a repeat.
                repeated = await self._runner.call(lambda: engine.step(frame, one.exact()), bounded=False)
                result = replace(repeated, comparison=result.comparison)
        except CoreError as error:
            count_refusal(session.window, session.assignment, error, self._evidence)
            raise
        return self._settle(one, result, self._evidence)

    def _attend_now(self, one: PreparedFrame, evidence: FrameEvidence) -> FrameAnswer | CoreError:
        if one.waits:
            self._catch_up(one)
        with self._enforcement.candidate_step():
            result = self._computed(one)
            published = isinstance(result, FrameResult) and result.from_candidate
            if published and not self._enforcement.may_publish(one.session.assignment):
                # Permission ended after the engine asked for it. The rows are in, so this is a repeat.
                repeated = self._computed(replace(one, mode=one.exact()))
                if isinstance(repeated, FrameResult) and isinstance(result, FrameResult):
                    repeated = replace(repeated, comparison=result.comparison)
                result = repeated
        return self._settled(one, result, evidence)

    def _catch_up(self, one: PreparedFrame) -> None:
        """A probe is of the candidate: what it scores must be the candidate's answer, not the exact one that
        is served while an index is built."""
        handle = one.session.handle
        self._runner.engine.indexes_caught_up(handle.session_id, handle.generation, PROBE_WAIT_SECONDS)

    def _computed(self, one: PreparedFrame) -> FrameResult | CoreError:
        try:
            return self._runner.here(self._runner.engine.step, one.frame, one.mode)
        except CoreError as error:
            return error

    def _settled(
        self, one: PreparedFrame, result: FrameResult | CoreError, evidence: FrameEvidence
    ) -> FrameAnswer | CoreError:
        if isinstance(result, CoreError):
            count_refusal(one.session.window, one.session.assignment, result, evidence)
            return result
        return self._settle(one, result, evidence)

    def _settle(self, one: PreparedFrame, result: FrameResult, evidence: FrameEvidence) -> FrameAnswer:
        """What the session has done by this answer, and what is told of it."""
        session, frame = one.session, one.frame
        self._advance(session, frame, one.first_query)
        if one.first_decode:
            session.first_decode_step = frame.step
        self._tell(session, frame, result.receipt.stall_seconds if one.decode else 0.0, evidence)
        if one.mode is EXACT_MODE and session.window is None:
            return FrameAnswer(result, _BASELINE, session.fallback, None)
        served = _CANDIDATE if result.from_candidate else _BASELINE
        fallback = one.plan.fallback
        if one.mode.publish_candidate and not result.from_candidate and not fallback:
            lost = not self._enforcement.may_publish(session.assignment)
            fallback = self._enforcement.why_exact(session.assignment) if lost else result.receipt.fallback
        self._check_fallback(session, result, evidence)
        if result.refused is not None:
            # By the candidate's own engine: also of a session that it was to answer for comparison only.
            _count(session.window, result.refused, evidence)
        return FrameAnswer(result, served, fallback, self._compared(session, frame, result, evidence))

    def _advance(self, session: Session, frame: FrameInput, first_query: int) -> None:
        """Notes how far an answered frame brought its session. Each forward pass that was answered in its
        last layer made one token, as seen from here."""
        if session.first_step is None:
            session.first_step = frame.step
        session.step, session.step_first_query = frame.step, first_query
        session.last_used_ns = self._clock()
        if frame.layer == self._last_layer:
            now = (session.last_used_ns - session.opened_ns) / 1e9
            seen = session.progress
            tokens = seen.tokens + (frame.step != session.last_answered_step)
            # The blocks of a prefill are one pass: the first token comes with the last of them.
            session.progress = Progress(tokens, now if tokens == 1 else seen.first_token_seconds, now)
            session.last_answered_step = frame.step

    def _tell(
        self, session: Session, frame: FrameInput, stall_seconds: float, evidence: FrameEvidence
    ) -> None:
        """What an answer says of its session, of one that is a unit of evidence."""
        window = session.window
        if window is None or not session.counted or session.assignment.sampled:
            return
        unit = session.handle.session_id
        if stall_seconds > 0 and (frame.step, frame.layer) > session.stalled_upto:
            # A frame that a client sends again stalls nobody a second time.
            session.stalled_upto = (frame.step, frame.layer)
            evidence.stall(window, unit, stall_seconds)
        if session.progress.tokens > 1 and frame.layer == self._last_layer:
            evidence.progress(window, unit, session.progress)

    def _compared(
        self, session: Session, frame: FrameInput, result: FrameResult, evidence: FrameEvidence
    ) -> float | None:
        """Largest error over the layers of a step, when its last layer was compared (gates.md, section 1)."""
        comparison = result.comparison
        if comparison is None or frame.step == session.last_compared_step:
            # A step that a client sends again is no second look at it.
            return None
        if comparison.exact_norm > 0:
            error = comparison.diff_norm / comparison.exact_norm
        else:
            error = 0.0 if comparison.diff_norm == 0 else math.nan
        if frame.layer == 0:
            session.step_errors = {frame.step: error}
        elif frame.step in session.step_errors:
            before = session.step_errors[frame.step]
            session.step_errors[frame.step] = (
                math.nan if math.isnan(error) or math.isnan(before) else max(before, error)
            )
        if frame.layer != self._last_layer or frame.step not in session.step_errors:
            return None
        total = session.step_errors.pop(frame.step)
        session.last_compared_step = frame.step
        if session.window is not None and session.counted:
            evidence.step_error(session.window, session.handle.session_id, frame.step, total)
            terms = session.assignment.terms
            if terms is not None and terms.selector is None and not total <= terms.tolerance:
                evidence.zero_tolerance(session.window, OUTPUT_MISMATCHES)
        return total

    def _check_fallback(self, session: Session, result: FrameResult, evidence: FrameEvidence) -> None:
        """An approximate answer in a session that no candidate may serve is counted, and one by a way that
        the candidate's contract does not list. The exact fetch every contract allows."""
        window, terms = session.window, session.assignment.terms
        if terms is None or window is None:
            return
        receipt = result.receipt
        approximate = receipt.exactness is ExactnessClass.APPROXIMATE
        unserved = approximate and session.assignment.arm is not ServedArm.CANDIDATE
        if unserved or illegal(receipt.selection, terms.fallbacks, approximate=approximate):
            evidence.zero_tolerance(window, ILLEGAL_FALLBACKS)


class _Batch:
    """Frames of one message: those that no candidate answers are computed together, the others one by one."""

    def __init__(self, prepared: Sequence[PreparedFrame | CoreError]) -> None:
        self._prepared = prepared
        self.answers: list[FrameAnswer | CoreError | None] = [
            one if isinstance(one, CoreError) else None for one in prepared
        ]
        together = [
            (index, one)
            for index, one in enumerate(prepared)
            if isinstance(one, PreparedFrame) and not one.candidates
        ]
        self.places = [index for index, _ in together]
        self.plain = [one for _, one in together]

    def others(self) -> list[tuple[int, PreparedFrame]]:
        """Those that have no answer yet, with their places."""
        return [
            (index, one)
            for index, one in enumerate(self._prepared)
            if isinstance(one, PreparedFrame) and self.answers[index] is None
        ]

    def all_answers(self) -> list[FrameAnswer | CoreError]:
        return [answer for answer in self.answers if answer is not None]


@contextmanager
def _running(frames: Sequence[FrameWork]) -> Iterator[None]:
    """Their sessions are in use meanwhile."""
    for work in frames:
        work.session.begin_frame()
    try:
        yield
    finally:
        for work in frames:
            work.session.end_frame()


def count_refusal(
    window: WindowKey | None, assignment: Assignment, error: CoreError, evidence: FrameEvidence
) -> None:
    """Of a session's frame, or of its opening."""
    if assignment.arm is ServedArm.CANDIDATE:
        _count(window, error, evidence)


def _count(window: WindowKey | None, error: CoreError, evidence: FrameEvidence) -> None:
    counter = _COUNTER_OF.get(error.reason)
    if window is not None and counter is not None:
        evidence.zero_tolerance(window, counter)


def _first_query(session: Session, frame: FrameInput) -> int:
    """The position of the first query of the frame's step."""
    return frame.first_query_position if frame.step != session.step else session.step_first_query


def _decodes(session: Session, frame: FrameInput, first_query: int) -> bool:
    """Whether a frame with one query is a step's only one: a prefill's last block may have one query too,
    and prefills, the first and later ones, are neither compared nor approximate."""
    later = session.first_step is not None and frame.step > session.first_step
    return later and frame.first_query_position == first_query
