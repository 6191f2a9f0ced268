"""One cache on this node: its engine, its enforcement and its sessions, tied together.

Everything here runs on the event loop except what is handed to the engine's thread. It knows no wire message.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from kvtier_agent.blockhost import BlockHost
from kvtier_agent.cachesession import (
    EXACT_MODE,
    CacheName,
    FrameAnswer,
    FrameWork,
    PreparedFrame,
    Session,
)
from kvtier_agent.engine_port import (
    EngineRunner,
    ExactnessClass,
    FrameInput,
    FrameMode,
    FrameResult,
    SessionTerms,
    TierReport,
)
from kvtier_agent.evidence_port import EvidencePort, FrameEvidence, Outcome, Progress
from kvtier_agent.rowevidence import GIVES_NOTHING, EngineGives
from kvtier_agent.weightstore import WeightStore
from kvtier_core.admission import UNDECLARED, AdmissionTerms
from kvtier_core.errors import CoreError, Reason
from kvtier_core.nodeplan import NodePlan
from kvtier_core.release.enforcement import (
    Assignment,
    CacheEnforcement,
    ServedArm,
    SessionFacts,
    StepPlan,
)
from kvtier_core.selectors.gates import illegal
from kvtier_core.selectors.lifecycle.works import IndexState
from kvtier_crds.beside import needs_own_engine
from kvtier_crds.manifest import RuntimeManifest, model_fingerprint
from kvtier_evidence.metrics import (
    ALLOCATION_FAILURES,
    ILLEGAL_FALLBACKS,
    ISOLATION_FAILURES,
    OUTPUT_MISMATCHES,
    REPLAY_FAILURES,
)
from kvtier_evidence.window import WindowKey

_MAX_CLOSED = 4096
PROBE_WAIT_SECONDS = 30.0
"""How long a probe's step waits for its indexes."""
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


class CacheHost:
    """Owned by the node; calls of one session arrive in order, calls of different sessions interleave."""

    def __init__(
        self,
        name: CacheName,
        manifest: RuntimeManifest,
        runner: EngineRunner,
        enforcement: CacheEnforcement,
        evidence: EvidencePort,
        clock: Callable[[], int],
        blocks: BlockHost | None = None,
        key_secret: str = "",
    ) -> None:
        """blocks: shared ones, where the cache has host memory for them. key_secret: names its keys."""
        self.name = name
        self.manifest = manifest
        self.fingerprint = model_fingerprint(manifest.model)
        self.baseline_digest = manifest.digest()
        self.runner = runner
        self.enforcement = enforcement
        self.evidence = evidence
        self.window: WindowKey | None = None
        self.rollout_traceparent = ""
        self.usage: Sequence[TierReport] = ()
        self.plan: NodePlan | None = None
        self.indexes: Sequence[IndexState] = ()
        self.blocks = blocks
        self.key_secret = key_secret
        self.admission = UNDECLARED
        self.sessions: dict[str, Session] = {}
        self.weights = WeightStore(self.sessions.__contains__)
        self._closed: OrderedDict[str, Session] = OrderedDict()
        self._clock = clock

    def admit(self, terms: AdmissionTerms) -> None:
        """What transfers of its blocks may take from now on; for a thread. See `BlockStore.admit`."""
        if terms != self.admission and self.blocks is not None:
            self.blocks.store.admit(terms)
        self.admission = terms

    def may_become(self, manifest: RuntimeManifest, key_secret: str) -> bool:
        """Whether another baseline can run here without a new engine."""
        return (
            manifest != self.manifest
            and key_secret == self.key_secret
            and not needs_own_engine(self.manifest, manifest)
        )

    def become(self, manifest: RuntimeManifest) -> None:
        """The engine runs it now."""
        self.manifest, self.baseline_digest = manifest, manifest.digest()

    async def open_session(
        self,
        facts: SessionFacts,
        score_scale: float,
        max_tokens: int,
        traceparent: str,
        gives: EngineGives = GIVES_NOTHING,
    ) -> Session:
        """Assigns the arm and reserves; identity was checked by the caller. A session whose engine does not
        give what the candidate's selector needs is exact and no unit of evidence, whichever its arm would
        have been, so that the arms stay alike. UNSUPPORTED tells a probe of the candidate what is missing."""
        assignment = self.enforcement.assign(facts)
        lacks = self._lacks(assignment, gives)
        fallback = ""
        if lacks is not None:
            if assignment.arm is ServedArm.CANDIDATE:
                if assignment.probe:
                    raise lacks
                fallback = lacks.reason.value
            assignment = replace(
                assignment, arm=ServedArm.BASELINE, sampled=False, in_radius=False, epoch=0, terms=None
            )
        window = self.window if assignment.terms is not None else None
        candidate = assignment.terms if self._may_need_candidate(assignment) else None
        serves = assignment.arm is ServedArm.CANDIDATE
        terms = SessionTerms(facts.tenant, score_scale, max_tokens, candidate, gives, serves)
        try:
            handle = await self.runner.call(lambda: self.runner.engine.open_session(terms))
        except CoreError as error:
            self._count_refusal(window, assignment, error, self.evidence)
            raise
        now = self._clock()
        session = Session(
            handle, self, facts.tenant, facts.request_id, assignment, window, traceparent, now, now
        )
        session.lacks, session.fallback = lacks, fallback
        self.sessions[handle.session_id] = session
        if window is not None and session.counted:
            self.evidence.assigned(
                window,
                handle.session_id,
                tenant=facts.tenant,
                session_root_id=facts.session_root_id,
                candidate=assignment.arm is ServedArm.CANDIDATE,
                compared=assignment.sampled,
            )
        return session

    async def attend(self, session: Session, frame: FrameInput, queries: int) -> FrameAnswer:
        """Computes one frame of the session's stream; raises CoreError with the session unchanged."""
        session.frames_running += 1
        try:
            return await self._attend(self._prepare(session, frame, queries))
        finally:
            session.frames_running -= 1

    async def attend_many(self, frames: Sequence[FrameWork]) -> list[FrameAnswer | CoreError]:
        """As `attend`, for frames of different sessions of this cache; one that fails harms no other."""
        for work in frames:
            work.session.frames_running += 1
        try:
            prepared = [self._prepare(work.session, work.frame, work.queries) for work in frames]
            plain = [one for one in prepared if not one.candidates]
            computed: Sequence[FrameResult | CoreError] = ()
            if plain:
                try:
                    together = [(one.frame, one.mode) for one in plain]
                    computed = await self.runner.call(lambda: self.runner.engine.step_many(together))
                except CoreError as error:
                    computed = [error] * len(plain)
            settled = {
                id(one): self._settled(one, result, self.evidence)
                for one, result in zip(plain, computed, strict=True)
            }
            answers = []
            for one in prepared:
                answer = settled.get(id(one))
                if answer is None:
                    try:
                        answer = await self._attend(one)
                    except CoreError as error:
                        answer = error
                answers.append(answer)
            return answers
        finally:
            for work in frames:
                work.session.frames_running -= 1

    def attend_now(
        self, frames: Sequence[FrameWork], evidence: FrameEvidence
    ) -> list[FrameAnswer | CoreError]:
        """As `attend_many`, computed in the caller's thread, which must not be the event loop's. evidence:
        what is seen of the frames goes there, from this thread."""
        if len(frames) == 1:
            return [self.attend_one_now(frames[0], evidence)]
        for work in frames:
            work.session.frames_running += 1
        try:
            prepared = [self._prepare(work.session, work.frame, work.queries) for work in frames]
            engine = self.runner.engine
            plain = [one for one in prepared if not one.candidates]
            computed: list[FrameResult | CoreError] = []
            if plain:
                together = [(one.frame, one.mode) for one in plain]
                try:
                    computed = list(self.runner.here(engine.step_many, together))
                except CoreError as error:
                    computed = [error] * len(plain)
            settled = {
                id(one): self._settled(one, result, evidence)
                for one, result in zip(plain, computed, strict=True)
            }
            return [settled.get(id(one)) or self._attend_now(one, evidence) for one in prepared]
        finally:
            for work in frames:
                work.session.frames_running -= 1

    def attend_one_now(self, work: FrameWork, evidence: FrameEvidence) -> FrameAnswer | CoreError:
        """As `attend_now`, of one frame."""
        work.session.frames_running += 1
        try:
            one = self._prepare(work.session, work.frame, work.queries)
            if one.candidates:
                return self._attend_now(one, evidence)
            return self._settled(one, self._computed(one), evidence)
        finally:
            work.session.frames_running -= 1

    def _prepare(self, session: Session, frame: FrameInput, queries: int) -> PreparedFrame:
        """How the frame is computed now."""
        first_query = frame.first_query_position if frame.step != session.step else session.step_first_query
        decode = queries == 1 and _decodes(session, frame, first_query)
        assignment = session.assignment
        if assignment.epoch == 0:
            # Opened without a candidate: none will ever serve it.
            return PreparedFrame(session, frame, _EXACT_PLAN, EXACT_MODE, first_query, decode, False)
        first_decode = decode and session.first_decode_step in (None, frame.step)
        plan = self.enforcement.plan_step(assignment, session.request_id, frame.step, first_decode)
        mode = FrameMode(
            publish_candidate=plan.publish is ServedArm.CANDIDATE,
            compare=plan.compare and decode,
            candidate=plan.terms,
            may_publish=lambda: self.enforcement.may_publish(assignment),
        )
        return PreparedFrame(session, frame, plan, mode, first_query, decode, first_decode)

    async def _attend(self, one: PreparedFrame) -> FrameAnswer:
        engine, frame, session = self.runner.engine, one.frame, one.session
        try:
            if one.waits:
                await asyncio.to_thread(self._catch_up, one)
            if one.candidates:
                running = ExitStack()
                running.enter_context(self.enforcement.candidate_step())
                # A caller that gives up does not stop the engine: the step is over when the engine says so.
                result = await self.runner.call(lambda: engine.step(frame, one.mode), over=running.close)
            else:
                result = await self.runner.call(lambda: engine.step(frame, one.mode))
            if result.from_candidate and not self.enforcement.may_publish(session.assignment):
                # Permission ended after the engine asked for it. The rows are in, so this is a repeat.
                repeated = await self.runner.call(lambda: engine.step(frame, one.exact()), bounded=False)
                result = replace(repeated, comparison=result.comparison)
        except CoreError as error:
            self._count_refusal(session.window, session.assignment, error, self.evidence)
            raise
        return self._settle(one, result, self.evidence)

    def _attend_now(self, one: PreparedFrame, evidence: FrameEvidence) -> FrameAnswer | CoreError:
        if one.waits:
            self._catch_up(one)
        with self.enforcement.candidate_step():
            result = self._computed(one)
            published = isinstance(result, FrameResult) and result.from_candidate
            if published and not self.enforcement.may_publish(one.session.assignment):
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
        self.runner.engine.indexes_caught_up(handle.session_id, handle.generation, PROBE_WAIT_SECONDS)

    def _computed(self, one: PreparedFrame) -> FrameResult | CoreError:
        try:
            return self.runner.here(self.runner.engine.step, one.frame, one.mode)
        except CoreError as error:
            return error

    def _settled(
        self, one: PreparedFrame, result: FrameResult | CoreError, evidence: FrameEvidence
    ) -> FrameAnswer | CoreError:
        if isinstance(result, CoreError):
            self._count_refusal(one.session.window, one.session.assignment, result, evidence)
            return result
        return self._settle(one, result, evidence)

    def _settle(self, one: PreparedFrame, result: FrameResult, evidence: FrameEvidence) -> FrameAnswer:
        """What the session has done by this answer, and what is told of it."""
        session, frame = one.session, one.frame
        if session.first_step is None:
            session.first_step = frame.step
        session.step, session.step_first_query = frame.step, one.first_query
        if one.first_decode:
            session.first_decode_step = frame.step
        session.last_used_ns = self._clock()
        self._progress(session, frame, result.receipt.stall_seconds if one.decode else 0.0, evidence)
        if one.mode is EXACT_MODE and session.window is None:
            return FrameAnswer(result, _BASELINE, session.fallback, None)
        served = _CANDIDATE if result.from_candidate else _BASELINE
        fallback = one.plan.fallback
        if one.mode.publish_candidate and not result.from_candidate and not fallback:
            lost = not self.enforcement.may_publish(session.assignment)
            fallback = self.enforcement.why_exact() if lost else result.receipt.fallback
        self._check_fallback(session, result, evidence)
        return FrameAnswer(result, served, fallback, self._compared(session, frame, result, evidence))

    def used(self, session: Session) -> int:
        """Notes a use that was no frame; returns now, CLOCK_BOOTTIME nanoseconds."""
        session.last_used_ns = self._clock()
        return session.last_used_ns

    async def close_session(self, session: Session) -> int:
        """Ends the session; its outcome may still be reported for a while. Returns rows released."""
        handle = session.handle
        self.sessions.pop(handle.session_id, None)
        self._closed[handle.session_id] = session
        while len(self._closed) > _MAX_CLOSED:
            self._closed.popitem(last=False)
        engine = self.runner.engine
        return await self.runner.call(
            lambda: engine.close_session(handle.session_id, handle.generation), bounded=False
        )

    def session_for_outcome(self, session_id: str) -> Session | None:
        return self.sessions.get(session_id) or self._closed.get(session_id)

    def report_outcome(self, session: Session, outcome: Outcome) -> str:
        """Counts what the engine's process saw; returns why it was not counted, or an empty text."""
        if session.outcome_reported:
            return "an outcome was already reported for this session"
        if session.lacks is not None:
            return f"the session is exact: {session.lacks.message}"
        if session.window is None:
            return "no candidate was granted when the session was opened"
        if session.assignment.probe:
            if outcome.probe is None:
                return "a probe session reports a probe pair"
            session.outcome_reported = True
            return self.evidence.probe(session.window, outcome.probe)
        if outcome.probe is not None:
            return "only probe sessions report probe pairs"
        if not session.counted:
            return "the session is outside the blast radius"
        session.outcome_reported = True
        return self.evidence.outcome(session.window, session.handle.session_id, outcome)

    def abandon(self, session: Session) -> None:
        """Nobody will report an outcome: its unit ends with the values it has."""
        if session.window is not None and session.counted and not session.outcome_reported:
            session.outcome_reported = True
            self.evidence.ended(session.window, session.handle.session_id)

    def idle_sessions(self, idle_ns: int) -> list[Session]:
        """Sessions that had no frame for that long and have none running. A stream that is open and silent
        is no use of them: an engine may hang with its streams open."""
        now = self._clock()
        return [s for s in self.sessions.values() if not s.frames_running and now - s.last_used_ns > idle_ns]

    def _lacks(self, assignment: Assignment, gives: EngineGives) -> CoreError | None:
        """Why the grant's candidate could not answer the session, of one that the grant covers."""
        terms = assignment.terms
        covered = assignment.in_radius or (assignment.probe and assignment.arm is ServedArm.CANDIDATE)
        if terms is None or terms.selector is None or not covered:
            return None
        return self.runner.engine.lacks(terms, gives)

    def _may_need_candidate(self, assignment: Assignment) -> bool:
        return assignment.epoch > 0 and (assignment.arm is ServedArm.CANDIDATE or assignment.sampled)

    def _progress(
        self, session: Session, frame: FrameInput, stall_seconds: float, evidence: FrameEvidence
    ) -> None:
        """Each forward pass that was answered in its last layer made one token, as seen from here."""
        if frame.layer == self.manifest.model.geometry.layers - 1:
            now = (session.last_used_ns - session.opened_ns) / 1e9
            seen = session.progress
            tokens = seen.tokens + (frame.step != session.last_answered_step)
            # The blocks of a prefill are one pass: the first token comes with the last of them.
            session.progress = Progress(tokens, now if tokens == 1 else seen.first_token_seconds, now)
            session.last_answered_step = frame.step
        window = session.window
        if window is None or not session.counted or session.assignment.sampled:
            return
        unit = session.handle.session_id
        if stall_seconds > 0 and (frame.step, frame.layer) > session.stalled_upto:
            # A frame that a client sends again stalls nobody a second time.
            session.stalled_upto = (frame.step, frame.layer)
            evidence.stall(window, unit, stall_seconds)
        if session.progress.tokens > 1 and frame.layer == self.manifest.model.geometry.layers - 1:
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
        if frame.layer != self.manifest.model.geometry.layers - 1 or frame.step not in session.step_errors:
            return None
        total = session.step_errors.pop(frame.step)
        session.last_compared_step = frame.step
        if session.window is not None and session.counted:
            evidence.step_error(session.window, session.handle.session_id, frame.step, total)
            terms = session.assignment.terms
            if terms is not None and terms.selector is None and total != 0:
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

    @staticmethod
    def _count_refusal(
        window: WindowKey | None, assignment: Assignment, error: CoreError, evidence: FrameEvidence
    ) -> None:
        counter = _COUNTER_OF.get(error.reason)
        if window is not None and counter is not None and assignment.arm is ServedArm.CANDIDATE:
            evidence.zero_tolerance(window, counter)


def _decodes(session: Session, frame: FrameInput, first_query: int) -> bool:
    """Whether a frame with one query is a step's only one: a prefill's last block may have one query too,
    and prefills, the first and later ones, are neither compared nor approximate."""
    later = session.first_step is not None and frame.step > session.first_step
    return later and frame.first_query_position == first_query


def manifest_set_digest_input(baselines: Mapping[str, str]) -> bytes:
    """Bytes whose SHA-256 names what an agent runs: sorted lines of cache uid, space, baseline digest."""
    return "".join(f"{uid} {digest}\n" for uid, digest in sorted(baselines.items())).encode()
