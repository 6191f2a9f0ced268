"""What a rollout remembers: the status of a KVRollout as frozen values.

Only what is in here survives the operator, so the machine may base a decision on this, on other objects and
on what agents answer, never on memory. Times are seconds since the epoch (UTC). It must not know any rule.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtier_evidence.carry import Carry
from kvtier_operator.rollout.vocabulary import (
    Blocker,
    CandidateClass,
    Cause,
    IntentResult,
    Phase,
    Stage,
    Verdict,
)


@dataclass(frozen=True, slots=True)
class ManifestRef:
    digest: str
    revision: str


@dataclass(frozen=True, slots=True)
class CandidateRef:
    """budgets: (tier class, bytes on each node) of an engine of its own; empty where it has none."""

    digest: str
    revision: str
    kind: CandidateClass
    budgets: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class DesignEffect:
    """Of one gate, measured in a window that is closed; numbers as printed."""

    gate: str
    k: str
    blocks: int
    mean_block: str


@dataclass(frozen=True, slots=True)
class Window:
    """The evidence window that is open. `opening_fence` is part of its key; a re-fencing that keeps the
    evidence keeps it. pair_thresholds: (gate, value as printed), fixed as it opened, from windows closed
    before: it is part of what agents are told, and a repeat must tell them the same. effects: measured in
    windows closed before and fixed as it opened, so that they cannot follow the data they are used on.
    probes: (ConfigMap, digest, prompts) of the sets that are part of its key, for whoever cannot read them;
    empty in a status of an earlier version, or of one that has no room."""

    opening_fence: int
    opened_at: float
    spec_hash: str
    resumes: int = 0
    pair_thresholds: tuple[tuple[str, str], ...] = ()
    effects: tuple[DesignEffect, ...] = ()
    probes: tuple[tuple[str, str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class GateStatus:
    """One row of `status.gates`; numbers as the judge printed them, empty when there are none."""

    name: str
    verdict: Verdict
    reason: str
    metric: str = ""
    value: str = ""
    bound: str = ""
    limit: str = ""
    n: int = 0
    expected_n: int = 0
    k: str = ""
    basis: str = ""
    at: float = 0.0
    fail_only: bool = False
    overridden: bool = False

    @property
    def open(self) -> bool:
        """Whether a Pass of it is still waited for, or it speaks against going on."""
        waiting = self.verdict is Verdict.INSUFFICIENT and self.fail_only
        return self.verdict is not Verdict.PASS and not waiting


@dataclass(frozen=True, slots=True)
class Schedule:
    """The tick of evidence. A missed one runs once: `due_at` moves to the pool's next beat after `ran_at`."""

    due_at: float
    ran_at: float
    late_by: float


@dataclass(frozen=True, slots=True)
class LostAgent:
    node: str
    since: float


@dataclass(frozen=True, slots=True)
class Holders:
    """Agents that a grant was written down for; count: of all, also where the status could not name them."""

    names: tuple[str, ...] = ()
    count: int = 0


@dataclass(frozen=True, slots=True)
class ExcludedAgent:
    """An agent that joined in mid-attempt and cannot host the candidate, in the life of `boot_id`."""

    node: str
    reason: str
    boot_id: str


@dataclass(frozen=True, slots=True)
class Rollback:
    """lease_ttl: seconds, of a longer lease than the spec's that agents may hold still; 0 for none."""

    cause: Cause
    message: str
    from_stage: Stage
    from_step: int
    target_digest: str
    started_at: float
    gate: str = ""
    lease_ttl: float = 0.0
    restored: int = 0
    total: int = 0
    missing: tuple[str, ...] = ()
    in_flight: int = 0
    revoked_at: float = 0.0
    verified_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Revocation:
    """A candidate that must be gone before this attempt may start: an approved rollout's, or that of this
    one's own former attempt.

    lease_ttl: seconds, of the leases it was granted under, which need not be this rollout's. nodes: agents
    that have not let go of it, the first 16, those that have left the pool meanwhile included. agents: how
    many there were as it began.
    """

    rollout: str
    since: float
    lease_ttl: float
    nodes: tuple[str, ...] = ()
    agents: int = 0


@dataclass(frozen=True, slots=True)
class LastIntent:
    seq: int
    verb: str
    result: IntentResult
    message: str
    at: float


@dataclass(frozen=True, slots=True)
class Condition:
    type: str
    status: str
    reason: str
    message: str
    observed_generation: int
    last_transition: float


@dataclass(frozen=True, slots=True)
class RolloutState:
    """carry: what the attempt's evidence takes from window to window. candidate_hash: of spec.candidate, so
    that an edit can be told from a drift of what it refers to. shares: how many parts of the digest's
    false-promotion budget are used, the open window's included.
    holders: who may hold the candidate. vanished: such ones whose KVNode is gone, while their lease may
    last. excluded: who stays exact since it joined late and refused; excluded_count: with those that could
    not be named. held_by_all: every agent of the radius
    has held this attempt's candidate at once.
    grant_expires: set while an approved candidate goes on after Completed."""

    phase: Phase = Phase.PENDING
    stage: Stage = Stage.OFF
    step: int = 0
    attempt: int = 1
    fence: int = 0
    observed_generation: int = 0
    blocker: Blocker = Blocker.NONE
    blocker_message: str = ""
    baseline: ManifestRef | None = None
    candidate: CandidateRef | None = None
    candidate_hash: str = ""
    window: Window | None = None
    gates: tuple[GateStatus, ...] = ()
    carry: Carry = field(default_factory=Carry)
    schedule: Schedule | None = None
    lost: tuple[LostAgent, ...] = ()
    holders: Holders = field(default_factory=Holders)
    vanished: tuple[LostAgent, ...] = ()
    excluded: tuple[ExcludedAgent, ...] = ()
    excluded_count: int = 0
    held_by_all: bool = False
    nodes_granted: int = 0
    nodes_total: int = 0
    rollback: Rollback | None = None
    last_intent: LastIntent | None = None
    overridden: bool = False
    shares: int = 0
    revoking: Revocation | None = None
    pending_since: float = 0.0
    started_at: float = 0.0
    finished_at: float = 0.0
    grant_expires: float = 0.0
    traceparent: str = ""
    conditions: tuple[Condition, ...] = ()

    @property
    def holds_candidate(self) -> bool:
        """Whether agents may hold, and renewals may keep up, this rollout's candidate."""
        if self.stage in (Stage.OFF, Stage.EXACT_BASELINE):
            return False
        return self.phase in (Phase.PROGRESSING, Phase.PAUSED) or self.grant_expires > 0
