"""One cache on this node: its engine, its enforcement and its sessions, tied together.

Everything here runs on the event loop except what is handed to the engine's thread. It knows no wire message.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from kvtier_agent.blockhost import BlockHost
from kvtier_agent.cacheframes import CacheFrames, count_refusal
from kvtier_agent.cachesession import CacheName, Session
from kvtier_agent.engine_port import EngineRunner, SessionTerms, TierReport
from kvtier_agent.evidence_port import EvidencePort, Outcome
from kvtier_agent.rowevidence import GIVES_NOTHING, EngineGives
from kvtier_agent.weightstore import WeightStore
from kvtier_core.admission import UNDECLARED, AdmissionTerms, brought
from kvtier_core.errors import CoreError
from kvtier_core.nodeplan import NodePlan
from kvtier_core.release.enforcement import (
    Assignment,
    CacheEnforcement,
    ServedArm,
    SessionFacts,
)
from kvtier_core.selectors.lifecycle.works import IndexState
from kvtier_crds.beside import needs_rebuilding
from kvtier_crds.manifest import RuntimeManifest, model_fingerprint
from kvtier_evidence.window import WindowKey

_MAX_CLOSED = 4096


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
        # To which the terms were told; a new store has none yet.
        self._admitted = blocks
        # Of a candidate's engine: what its own sessions share.
        self.blocks_beside: BlockHost | None = None
        # Of a replaced baseline until its engine has ended: sessions that stay there start from them.
        self.blocks_former: BlockHost | None = None
        self._changes = self._changing = 0
        # How often blocks were deleted: what is copied meanwhile may be of them.
        self.deletions = 0
        self.key_secret = key_secret
        self.admission = UNDECLARED
        self.sessions: dict[str, Session] = {}
        self.weights = WeightStore(self.sessions.__contains__)
        self._closed: OrderedDict[str, Session] = OrderedDict()
        self._clock = clock
        self.frames = CacheFrames(runner, enforcement, evidence, clock, manifest.model.geometry.layers)

    @property
    def all_blocks(self) -> list[BlockHost]:
        """Wherever a block of this cache may lie; the cache's own first."""
        every = (self.blocks, self.blocks_beside, self.blocks_former)
        return [each for each in every if each is not None]

    def admit(self, terms: AdmissionTerms) -> None:
        """What transfers of its blocks may take from now on, where the manifest has no bounds of its own; for
        a thread. See `BlockStore.admit`."""
        terms = brought(self.manifest.admission, terms)
        blocks = self.blocks
        if blocks is not None and (terms != self.admission or blocks is not self._admitted):
            blocks.store.admit(terms)
            self._admitted = blocks
        self.admission = terms

    def may_become(self, manifest: RuntimeManifest, key_secret: str) -> bool:
        """Whether another baseline can run here without a new engine."""
        return (
            manifest != self.manifest
            and key_secret == self.key_secret
            and not needs_rebuilding(self.manifest, manifest)
        )

    def become(self, manifest: RuntimeManifest) -> None:
        """The engine runs it now."""
        if manifest.admission != self.manifest.admission:
            # The engine has set its own, whatever was declared beside the former.
            self.admission = UNDECLARED
        self.manifest, self.baseline_digest = manifest, manifest.digest()
        self._changes += 1

    @contextmanager
    def changing(self) -> Iterator[None]:
        """While an engine takes over another baseline: what it runs then is neither the one nor the other."""
        self._changing += 1
        try:
            yield
        finally:
            self._changing -= 1

    @property
    def standing(self) -> int | None:
        """A number that is another one after each change of what should run; None while it changes."""
        return None if self._changing else self._changes

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
        compared = candidate is not None and assignment.sampled
        terms = SessionTerms(facts.tenant, score_scale, max_tokens, candidate, gives, serves, compared)
        try:
            handle = await self.runner.call(lambda: self.runner.engine.open_session(terms))
        except CoreError as error:
            count_refusal(window, assignment, error, self.evidence)
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

    def end_idle(self, idle_ns: int, why: str) -> list[Session]:
        """Those of them that nobody uses in this moment, for their caller to close."""
        before = self._clock() - idle_ns
        return [one for one in list(self.sessions.values()) if one.end_when_idle(before, why)]

    def _lacks(self, assignment: Assignment, gives: EngineGives) -> CoreError | None:
        """Why the grant's candidate could not answer the session, of one that the grant covers."""
        terms = assignment.terms
        covered = assignment.in_radius or (assignment.probe and assignment.arm is ServedArm.CANDIDATE)
        if terms is None or terms.selector is None or not covered:
            return None
        return self.runner.engine.lacks(terms, gives)

    def _may_need_candidate(self, assignment: Assignment) -> bool:
        return assignment.epoch > 0 and (assignment.arm is ServedArm.CANDIDATE or assignment.sampled)


def manifest_set_digest(baselines: Mapping[str, str]) -> str:
    """Names what an agent runs: SHA-256 of sorted lines of cache uid, space, baseline digest."""
    lines = "".join(f"{uid} {digest}\n" for uid, digest in sorted(baselines.items()))
    return f"sha256:{hashlib.sha256(lines.encode()).hexdigest()}"
