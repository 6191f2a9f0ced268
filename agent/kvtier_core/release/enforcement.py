"""Decides, for one cache on this node, who may be answered by a candidate at this moment.

The state is one lease or none. Everything a session or a step may do with a candidate is asked here, and the
answer is looked up again when the result is published: permission that ended in between is not permission.
This module knows no tensors and no RPC; time comes from an injected CLOCK_BOOTTIME.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Concatenate, ParamSpec, TypeVar

from kvtier_core.errors import CoreError, Reason
from kvtier_core.release.fences import Judgement
from kvtier_core.release.leases import NANOS_PER_MS, GrantTerms, Lease
from kvtier_evidence import assignment

Clock = Callable[[], int]
P = ParamSpec("P")
R = TypeVar("R")

# Of a sampled request, the share of decode steps that is answered twice; the first one always is, so that a
# short request is never without a value (a missing value counts as the worst one).
STEP_SAMPLE_FRACTION = 0.5
# Sessions whose place under the newest grant is remembered.
_MAX_REACHED = 4096


class ServedArm(StrEnum):
    BASELINE = "baseline"
    CANDIDATE = "candidate"


class ReturnReason(StrEnum):
    """Why this agent went back to the baseline without being told to."""

    LEASE_EXPIRED = "LeaseExpired"
    BOOT_RESTART = "BootRestart"


@dataclass(frozen=True)
class LocalReturn:
    reason: ReturnReason
    fence: int
    rollout_uid: str


@dataclass(frozen=True)
class SessionFacts:
    """What assignment looks at. `request_id` names the unit that is sampled."""

    tenant: str
    request_class: str
    session_root_id: str
    request_id: str
    probe: bool = False
    forced_arm: ServedArm | None = None


@dataclass(frozen=True)
class Assignment:
    """What a session is, for good. `epoch` 0: opened without a candidate. facts: what it was judged by, for
    grants that reach less far than the one that it was opened under."""

    arm: ServedArm
    sampled: bool
    probe: bool
    in_radius: bool
    epoch: int
    terms: GrantTerms | None
    facts: SessionFacts | None = None


@dataclass(frozen=True)
class StepPlan:
    """How one step is computed. `fallback` says why a candidate's session is served exactly."""

    publish: ServedArm
    compare: bool
    terms: GrantTerms | None
    fallback: str


def _locked(
    method: Callable[Concatenate[CacheEnforcement, P], R],
) -> Callable[Concatenate[CacheEnforcement, P], R]:
    def call(self: CacheEnforcement, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock:
            return method(self, *args, **kwargs)

    return functools.update_wrapper(call, method)


class CacheEnforcement:
    """One cache's lease, assignment and publication rule. Thread-safe (engine threads ask)."""

    def __init__(self, clock: Clock, returned: LocalReturn | None = None) -> None:
        self._clock = clock
        self._lease: Lease | None = None
        self._last_granted = 0
        self._epoch = 0
        self._returned = returned
        self._revoke_reason = "Revoked"
        self._in_flight = 0
        self._judged: GrantTerms | None = None
        self._reached: dict[tuple[str, str, str, ServedArm], bool] = {}
        self._lock = threading.RLock()

    @property
    def returned(self) -> LocalReturn | None:
        """The last return to the baseline this agent did alone; looking at it settles an expired lease."""
        with self._lock:
            self.lease()
            return self._returned

    @property
    def in_flight(self) -> int:
        """Steps of a candidate that run now."""
        return self._in_flight

    @_locked
    def lease(self) -> Lease | None:
        """The lease that is valid now. An expired one ends here, with reason LeaseExpired."""
        held = self._lease
        if held is not None and not held.valid(self._clock()):
            fence = held.terms.fence
            self._returned = LocalReturn(ReturnReason.LEASE_EXPIRED, fence.value, fence.rollout_uid)
            self._lease = held = None
        return held

    @_locked
    def grant(self, terms: GrantTerms, judgement: Judgement, received_ns: int) -> Lease:
        """Begins or continues permission; `received_ns` is when the command arrived.

        A repeat extends nothing, and cannot revive a lease that ended in this life of the agent: the operator
        may already count on that end. Raises LEASE_EXPIRED or BAD_ARGUMENT.
        """
        terms.check()
        held = self.lease()
        if judgement is Judgement.REPEAT and self._last_granted == terms.fence.value:
            if held is None:
                message = (
                    f"the lease under fence {terms.fence.value} has ended; a new grant needs a new fence"
                )
                raise CoreError(Reason.LEASE_EXPIRED, message, {})
            return held
        if received_ns + terms.ttl_ms * NANOS_PER_MS <= self._clock():
            raise CoreError(Reason.LEASE_EXPIRED, "the lease ended before the grant was durable", {})
        if held is None or _permission(held.terms) != _permission(terms):
            self._epoch += 1
        self._lease = Lease(terms, received_ns + terms.ttl_ms * NANOS_PER_MS, self._epoch)
        self._last_granted = terms.fence.value
        self._returned = None
        return self._lease

    @_locked
    def renew(self, fence: int, digest: str, ttl_ms: int, received_ns: int) -> Lease:
        """Extends the lease held under exactly this fence; raises LEASE_EXPIRED or FENCE_CONFLICT."""
        held = self.lease()
        if held is None:
            raise CoreError(Reason.LEASE_EXPIRED, f"no lease is held under fence {fence}", {})
        if (held.terms.fence.value, held.terms.candidate_digest) != (fence, digest):
            message = (
                f"the lease is held under fence {held.terms.fence.value} for {held.terms.candidate_digest}"
            )
            raise CoreError(Reason.FENCE_CONFLICT, message, {})
        if not 0 < ttl_ms <= held.terms.ttl_ms:
            message = f"ttl_ms {ttl_ms} must be in [1, {held.terms.ttl_ms}], the grant's own"
            raise CoreError(Reason.BAD_ARGUMENT, message, {})
        self._lease = held.extended(received_ns, ttl_ms)
        return self._lease

    @_locked
    def revoke(self, reason: str) -> None:
        """Ends permission now; sessions of the candidate are exact from their next publication on."""
        self._lease = None
        self._returned = None
        self._revoke_reason = reason or "Revoked"

    @_locked
    def assign(self, facts: SessionFacts) -> Assignment:
        """The arm of a new session, for good; raises NO_CANDIDATE or BAD_ARGUMENT for a forced arm."""
        if facts.forced_arm is not None and not facts.probe:
            raise CoreError(Reason.BAD_ARGUMENT, "forced_arm is allowed only with probe", {})
        held = self.lease()
        if facts.probe:
            arm = facts.forced_arm or ServedArm.BASELINE
            if arm is ServedArm.CANDIDATE and held is None:
                raise CoreError(Reason.NO_CANDIDATE, "forced_arm CANDIDATE without a candidate lease", {})
            return Assignment(arm, False, True, False, *_origin(held), facts)
        if held is None or not held.terms.blast_radius.covers(facts.tenant, facts.request_class):
            return Assignment(ServedArm.BASELINE, False, False, False, *_origin(held), facts)
        terms = held.terms
        arm = ServedArm.CANDIDATE if _below_fraction(terms, facts) else ServedArm.BASELINE
        compared = assignment.sampled(terms.fence.rollout_uid, facts.request_id, float(terms.sample_fraction))
        return Assignment(arm, compared, False, True, held.epoch, terms, facts)

    @_locked
    def plan_step(self, session: Assignment, request_id: str, step: int, first_decode: bool) -> StepPlan:
        """How to compute a step of the session now; `step` is the engine's forward-pass number."""
        held = self._lease_of(session)
        if held is None or session.terms is None:
            lost = session.arm is ServedArm.CANDIDATE
            return StepPlan(ServedArm.BASELINE, False, None, self._why_exact(session) if lost else "")
        compare = session.sampled and (
            first_decode
            or assignment.step_sampled(
                session.terms.fence.rollout_uid, request_id, step, STEP_SAMPLE_FRACTION
            )
        )
        return StepPlan(session.arm, compare, held.terms, "")

    @_locked
    def may_publish(self, session: Assignment) -> bool:
        """Whether a candidate's answer may leave now. Asked after it was computed, for each answer."""
        return session.arm is ServedArm.CANDIDATE and self._lease_of(session) is not None

    @_locked
    def why_exact(self, session: Assignment) -> str:
        """Reason code a receipt carries when a candidate's session is answered exactly."""
        return self._why_exact(session)

    @contextmanager
    def candidate_step(self) -> Iterator[None]:
        """Counts a step that computes a candidate's answer, from admission to publication."""
        with self._lock:
            self._in_flight += 1
        try:
            yield
        finally:
            with self._lock:
                self._in_flight -= 1

    def _lease_of(self, session: Assignment) -> Lease | None:
        held = self.lease()
        if held is None or session.epoch != held.epoch:
            return None
        return held if self._reaches(held.terms, session) else None

    def _reaches(self, terms: GrantTerms, session: Assignment) -> bool:
        """Whether a grant of the same permission still means the session: an edit may have narrowed the blast
        radius or the fraction. What it does not mean now it may mean again."""
        facts = session.facts
        if terms is session.terms or facts is None or session.probe:
            return True
        if terms is not self._judged:
            self._judged, self._reached = terms, {}
        known = (facts.tenant, facts.request_class, facts.session_root_id, session.arm)
        found = self._reached.get(known)
        if found is None:
            found = terms.blast_radius.covers(facts.tenant, facts.request_class) and (
                session.arm is ServedArm.BASELINE or _below_fraction(terms, facts)
            )
            if len(self._reached) >= _MAX_REACHED:
                self._reached.clear()
            self._reached[known] = found
        return found

    def _why_exact(self, session: Assignment) -> str:
        held = self.lease()
        if self._returned is not None:
            return self._returned.reason.value
        if held is not None:
            return "OutOfRadius" if held.epoch == session.epoch else "CandidateReplaced"
        return self._revoke_reason


def _below_fraction(terms: GrantTerms, facts: SessionFacts) -> bool:
    """Whether the candidate serves a session of the blast radius."""
    fraction = float(terms.traffic_fraction)
    return assignment.is_candidate(terms.fence.rollout_uid, facts.tenant, facts.session_root_id, fraction)


def _permission(terms: GrantTerms) -> tuple[str, int, str]:
    """What one permission is: another attempt begins in Shadow, where no earlier session may go on."""
    return terms.fence.rollout_uid, terms.fence.attempt, terms.candidate_digest


def _origin(held: Lease | None) -> tuple[int, GrantTerms | None]:
    return (0, None) if held is None else (held.epoch, held.terms)
