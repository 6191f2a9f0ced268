"""Which requests may transfer now: a pure function of the requests, what is free, and a policy.

Why it exists: queueing more copies than there are credits creates no bandwidth, so admission decides before
anything starts, and says of each request that waits why it does. It must not reserve: the ledger does, all or
nothing.

Formulas: specification C.1 "Credits", F18; policies G.4; fallbacks B.8. Seconds and bytes throughout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from kvtier_core.errors import CoreError, Reason
from kvtier_crds.manifest import Admission as Bounds

UNAVAILABLE = math.inf


class AdmissionPolicy(StrEnum):
    FIFO = "fifo"
    EARLIEST_DEADLINE = "earliestDeadline"
    EXACT_DEADLINE_COALESCING = "exactDeadlineCoalescing"


class Idle(StrEnum):
    """What becomes of an idle session's rows until it ends. DROP: it ends at once."""

    KEEP = "keep"
    DEMOTE = "demote"
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class IdleTerms:
    """Of sessions without frames: their rows, and after how many seconds they end."""

    idle: Idle
    ttl_seconds: float

    def __post_init__(self) -> None:
        if not 0 < self.ttl_seconds < math.inf:
            raise CoreError(Reason.BAD_ARGUMENT, f"sessions.ttl {self.ttl_seconds} must be positive")


@dataclass(frozen=True, slots=True)
class AdmissionTerms:
    """What a cache declares of its transfers on a node; None: no limit of its own. pinned: page-locked bytes.
    staging: bytes of reads in flight and of the engine's own buffers. link: bytes in flight in each direction
    between memory and storage. queue: requests that may wait for reads. policy: who goes first.
    sessions: when idle ones end; None: as the agent's own arguments say."""

    pinned: int | None = None
    staging: int | None = None
    link: int | None = None
    queue: int | None = None
    policy: AdmissionPolicy | None = None
    sessions: IdleTerms | None = None

    def __post_init__(self) -> None:
        for name in ("pinned", "staging", "link", "queue"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise CoreError(Reason.BAD_ARGUMENT, f"admission.{name} {value} must be positive")


UNDECLARED = AdmissionTerms()


def brought(admission: Bounds | None, terms: AdmissionTerms = UNDECLARED) -> AdmissionTerms:
    """The terms, with the bounds of a manifest in their place where it has some; sessions are as in terms."""
    if admission is None:
        return terms
    return replace(
        terms,
        pinned=admission.pinned_bytes,
        staging=admission.staging_bytes,
        link=admission.link_bytes,
        queue=admission.queue,
        policy=AdmissionPolicy(admission.policy.value),
    )


class AdmissionReason(StrEnum):
    """Why a request may not transfer. DEADLINE: it would not end in time, whatever is free."""

    DEADLINE = "DEADLINE"
    QUEUE_FULL = "QUEUE_FULL"
    CREDIT_PRESSURE = "CREDIT_PRESSURE"


@dataclass(frozen=True, slots=True)
class Budget:
    """One resource: free = total - taken. BAD_ARGUMENT when more is taken than there is, or a number is
    negative."""

    total: int
    taken: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.taken <= self.total:
            raise CoreError(Reason.BAD_ARGUMENT, f"{self.taken} of {self.total} are taken")

    @property
    def free(self) -> int:
        return self.total - self.taken


@dataclass(frozen=True, slots=True)
class FreeCredits:
    """P, S, C in bytes and Q in requests."""

    pinned: Budget
    staging: Budget
    link: Budget
    queue: Budget


@dataclass(frozen=True, slots=True)
class LinkModel:
    """The measured path: T = queue + setup + bytes / bandwidth (+ numa when source and worker differ)."""

    queue_seconds: float
    setup_seconds: float
    bytes_per_second: float
    numa_seconds: float

    def seconds(self, size: int, *, numa_remote: bool) -> float:
        """BAD_ARGUMENT without a positive bandwidth."""
        if not self.bytes_per_second > 0.0:
            raise CoreError(Reason.BAD_ARGUMENT, f"a bandwidth of {self.bytes_per_second} bytes per second")
        wire = self.queue_seconds + self.setup_seconds + size / self.bytes_per_second
        return wire + (self.numa_seconds if numa_remote else 0.0)


@dataclass(frozen=True, slots=True)
class TransferRequest:
    """What one request wants fetched. unit: the B.4 key of the immutable bytes, so equal units may be one
    read. deadline and estimate: seconds from now. exact: its answer must be."""

    id: str
    unit: bytes
    backend_bytes: int
    staging_bytes: int
    deadline: float
    estimate: float
    exact: bool


@dataclass(frozen=True, slots=True)
class Admission:
    """admitted: in policy order. backend_bytes: of unique units where the policy coalesces; staging_bytes: of
    every request. refused: the rest, each with its reason."""

    admitted: tuple[str, ...]
    backend_bytes: int
    staging_bytes: int
    refused: tuple[tuple[str, AdmissionReason], ...]


def admit(policy: AdmissionPolicy, requests: Sequence[TransferRequest], free: FreeCredits) -> Admission:
    """Requests in order of arrival. What does not fit is passed over, and later ones may still fit.
    BAD_ARGUMENT for a negative size or an id that is there twice."""
    if len({one.id for one in requests}) != len(requests):
        raise CoreError(Reason.BAD_ARGUMENT, "a request is there twice")
    if any(one.backend_bytes < 0 or one.staging_bytes < 0 for one in requests):
        raise CoreError(Reason.BAD_ARGUMENT, "a transfer of negative bytes")
    coalesce = policy is AdmissionPolicy.EXACT_DEADLINE_COALESCING
    admitted: list[str] = []
    refused: list[tuple[str, AdmissionReason]] = []
    units: set[bytes] = set()
    backend = staging = 0
    for one in ordered(policy, requests):
        added = 0 if coalesce and one.unit in units else one.backend_bytes
        if one.estimate > one.deadline:
            refused.append((one.id, AdmissionReason.DEADLINE))
        elif len(admitted) + 1 > free.queue.free:
            refused.append((one.id, AdmissionReason.QUEUE_FULL))
        elif backend + added > min(free.pinned.free, free.link.free) or (
            staging + one.staging_bytes > free.staging.free
        ):
            refused.append((one.id, AdmissionReason.CREDIT_PRESSURE))
        else:
            admitted.append(one.id)
            units.add(one.unit)
            backend += added
            staging += one.staging_bytes
    return Admission(tuple(admitted), backend, staging, tuple(refused))


def ordered(policy: AdmissionPolicy, requests: Sequence[TransferRequest]) -> list[TransferRequest]:
    """G.4: by arrival; by deadline; exact ones first, then by deadline. Ties keep the order of arrival."""
    if policy is AdmissionPolicy.FIFO:
        return list(requests)
    if policy is AdmissionPolicy.EARLIEST_DEADLINE:
        return sorted(requests, key=lambda one: one.deadline)
    return sorted(requests, key=lambda one: (not one.exact, one.deadline))


class Fallback(StrEnum):
    """B.8, in order. The first and the sixth are not exact; an exact request never comes to them."""

    ACCEPT_APPROXIMATE = "ACCEPT_APPROXIMATE"
    WIDEN_SEARCH = "WIDEN_SEARCH"
    FULL_EXACT_FETCH = "FULL_EXACT_FETCH"
    RECOMPUTE_EXACT = "RECOMPUTE_EXACT"
    POSTPONE_FOR_EXACT_RETRY = "POSTPONE_FOR_EXACT_RETRY"
    ACCEPT_DECLARED_DEGRADED = "ACCEPT_DECLARED_DEGRADED"
    REJECT_NO_LEGAL_PATH = "REJECT_NO_LEGAL_PATH"


@dataclass(frozen=True, slots=True)
class FallbackChoice:
    """What is known before anything is published. Times in seconds, UNAVAILABLE where there is no such path
    (also for lack of credit). uncertain: the estimate of omitted mass or its confidence fails its gate; True
    without one. retry: the window in which a retry would end; UNAVAILABLE when it cannot be retried."""

    slack: float
    fetch: float = UNAVAILABLE
    recompute: float = UNAVAILABLE
    retry: float = UNAVAILABLE
    exact: bool = True
    approximation_allowed: bool = False
    uncertain: bool = True
    widened: bool = True
    can_widen: bool = False


def choose_fallback(one: FallbackChoice) -> Fallback:
    """The first of the seven actions whose condition holds (B.8)."""
    approximate = one.approximation_allowed and not one.exact
    if approximate and not one.uncertain:
        return Fallback.ACCEPT_APPROXIMATE
    if not one.widened and one.uncertain and one.can_widen and not one.exact:
        return Fallback.WIDEN_SEARCH
    for seconds, action in (
        (one.fetch, Fallback.FULL_EXACT_FETCH),
        (one.recompute, Fallback.RECOMPUTE_EXACT),
        (one.retry, Fallback.POSTPONE_FOR_EXACT_RETRY),
    ):
        # Without a deadline the slack has no end, and what is not there is still not there.
        if seconds <= one.slack and seconds < UNAVAILABLE:
            return action
    return Fallback.ACCEPT_DECLARED_DEGRADED if approximate else Fallback.REJECT_NO_LEGAL_PATH


@dataclass(frozen=True, slots=True)
class OffloadDemand:
    """What exact offload of a request needs, or what is free for it: bytes, bytes per second, transfers."""

    gpu_bytes: int
    host_bytes: int
    pinned_bytes: int
    h2d_bytes_per_second: float
    d2h_bytes_per_second: float
    jobs: int


def refuse_offload(need: OffloadDemand, have: OffloadDemand, *, support_recoverable: bool) -> None:
    """F18: every row recoverable and every demand within what is free, else CoreError: SUPPORT_GAP,
    NO_DESTINATION_CAPACITY (gpu, host), ADMISSION_PINNED, CREDIT_PRESSURE (links), QUEUE_FULL (jobs)."""
    if not support_recoverable:
        raise CoreError(Reason.SUPPORT_GAP, "not every row of the full support is recoverable")
    for name, reason in _OFFLOAD:
        wanted, free = getattr(need, name), getattr(have, name)
        if wanted > free:
            raise CoreError(reason, f"{name}: {wanted} wanted, {free} free", {"resource": name})


_OFFLOAD = (
    ("gpu_bytes", Reason.NO_DESTINATION_CAPACITY),
    ("host_bytes", Reason.NO_DESTINATION_CAPACITY),
    ("pinned_bytes", Reason.ADMISSION_PINNED),
    ("h2d_bytes_per_second", Reason.CREDIT_PRESSURE),
    ("d2h_bytes_per_second", Reason.CREDIT_PRESSURE),
    ("jobs", Reason.QUEUE_FULL),
)
