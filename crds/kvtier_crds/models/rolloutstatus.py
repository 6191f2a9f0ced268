"""The status of a KVRollout: what the operator reports, bounded so that it stays under 8 KiB.

It must not know what a spec may declare: a status also speaks of built-in gates.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import ConfigDict, Field

from kvtier_crds.manifest import Exactness
from kvtier_crds.models.common import (
    ATOMIC_LIST,
    ATOMIC_OBJECT,
    MAX_ATTEMPTS,
    Budget,
    DigestRef,
    Duration,
    Int64,
    Number,
    Sha256,
    Status,
    Struct,
    Timestamp,
    map_list,
)
from kvtier_crds.models.stages import StatusStage

Short = Annotated[str, Field(max_length=64)]
Step = Annotated[int, Field(ge=0, le=64)]


class Phase(StrEnum):
    PENDING = "Pending"
    PROGRESSING = "Progressing"
    PAUSED = "Paused"
    COMPLETED = "Completed"
    ROLLING_BACK = "RollingBack"
    ROLLED_BACK = "RolledBack"
    INVALID = "Invalid"


class Verdict(StrEnum):
    PASS = "Pass"
    FAIL = "Fail"
    INSUFFICIENT = "Insufficient"
    PROVIDER_ERROR = "ProviderError"


class RollbackCause(StrEnum):
    GATE_FAILED = "GateFailed"
    INTENT_ABORT = "IntentAbort"
    AGENT_LOST = "AgentLost"
    LEASE_EXPIRED = "LeaseExpired"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    INPUT_DRIFT = "InputDrift"
    MANIFEST_MISMATCH = "ManifestMismatch"
    INFEASIBLE_NODE = "InfeasibleNode"
    OBJECT_DELETED = "ObjectDeleted"


class IntentResult(StrEnum):
    ACCEPTED = "Accepted"
    REPLAYED = "Replayed"
    WRONG_ATTEMPT = "WrongAttempt"
    WRONG_STAGE = "WrongStage"
    WRONG_STEP = "WrongStep"
    NOT_APPLICABLE = "NotApplicable"


class CandidateStatus(DigestRef):
    candidate_class: Annotated[Exactness, Field(alias="class")]
    budgets: Annotated[
        tuple[Budget, ...], Field(max_length=8, json_schema_extra=map_list("tierClassName"))
    ] = ()
    """On each node, of its own engine beside the baseline's; empty where one engine answers both."""


class GateStatus(Struct):
    name: Short
    metric: Short | None = None
    verdict: Verdict
    reason: Short
    basis: Short | None = None
    """What the verdict rests on: Anytime, ProbeSet, EventCount, Carried."""
    value: Number | None = None
    bound: Number | None = None
    """On the harmful side, printed rounded away from the limit's safe side."""
    limit: Number | None = None
    n: Int64 = 0
    expected_n: Annotated[Int64 | None, Field(alias="expectedN")] = None
    k: Number | None = None
    """The design effect that divided the evidence."""
    fail_only: bool | None = None
    """It can fail, but no Pass of it is waited for."""
    overridden: bool | None = None
    """A person promoted past this verdict."""
    message: Annotated[str, Field(max_length=160)] | None = None
    at: Timestamp | None = None


class Schedule(Struct):
    due_at: Timestamp | None = None
    ran_at: Timestamp | None = None
    late_by: Annotated[str, Field(max_length=36)] | None = None
    step_started_at: Timestamp | None = None
    """When the current step's window was opened."""
    pending_since: Timestamp | None = None
    """Since when it has waited to begin; see the condition Progressing for what."""
    attempt_started_at: Timestamp | None = None
    deadline_at: Timestamp | None = None
    """When spec.progressDeadline ends, of the attempt or of the wait before it."""


class Rollback(Struct):
    cause: RollbackCause
    message: Annotated[str, Field(max_length=512)] | None = None
    gate: Short | None = None
    from_stage: StatusStage | None = None
    from_step: Step | None = None
    target_digest: Sha256 | None = None
    agents_restored: Annotated[int, Field(ge=0)] = 0
    agents_total: Annotated[int, Field(ge=0)] = 0
    missing: Annotated[
        tuple[Annotated[str, Field(max_length=253)], ...], Field(max_length=16, json_schema_extra=ATOMIC_LIST)
    ] = ()
    """Agents that have not yet proved the digest; the first 16."""
    lease_ttl: Annotated[Duration | None, Field(alias="leaseTTL")] = None
    """Of a lease that may be out and is not of this spec; absent: there is none."""
    in_flight: Annotated[int, Field(ge=0)] | None = None
    """Requests still running on the candidate when the agents answered."""
    started_at: Timestamp | None = None
    revoked_at: Timestamp | None = None
    """When no agent could hold the candidate any more: proved, or every lease has ended."""
    verified_at: Timestamp | None = None


class LastIntent(Struct):
    seq: Int64
    verb: Short | None = None
    result: IntentResult
    message: Annotated[str, Field(max_length=256)] | None = None
    at: Timestamp | None = None


class EvidenceCell(Struct):
    """Evidence of harm of one gate in one window; it counts on in the pooled test."""

    gate: Short
    window: Short
    """Stage, step and opening fence."""
    weight: Number
    log_e: Annotated[Number, Field(alias="logE")]


class EvidenceFail(Struct):
    gate: Short
    window: Short
    reason: Short


class ProbePass(Struct):
    """A probe set's Pass: tied to the candidate, not to traffic."""

    gate: Short
    candidate_digest: Sha256
    probe_set_digest: Annotated[str, Field(max_length=71)] = ""
    limit: Number
    value: Number | None = None
    bound: Number | None = None
    n: Int64 = 0


class EvidenceCarry(Struct):
    """What the attempt's evidence takes from window to window."""

    cells: Annotated[tuple[EvidenceCell, ...], Field(max_length=64, json_schema_extra=ATOMIC_LIST)] = ()
    failed: EvidenceFail | None = None
    mismatched: Annotated[tuple[Short, ...], Field(max_length=16, json_schema_extra=ATOMIC_LIST)] = ()
    """Windows whose arms did not fit the assignment."""
    probe_passes: Annotated[
        tuple[ProbePass, ...], Field(max_length=8, json_schema_extra=map_list("gate"))
    ] = ()


class Unreachable(Struct):
    """An agent that held the candidate and does not answer."""

    node: Annotated[str, Field(max_length=253)]
    since: Timestamp


class Holders(Struct):
    """Who may hold the candidate: written before a grant is sent, kept until proof that it let go."""

    nodes: Annotated[
        tuple[Annotated[str, Field(max_length=253)], ...], Field(max_length=16, json_schema_extra=ATOMIC_LIST)
    ] = ()
    """The first 16, fewer where the status has no room."""
    count: Annotated[int, Field(ge=0)] = 0
    """Of all."""


class Excluded(Struct):
    """An agent that joined when the others had the candidate, and cannot host it: it stays exact."""

    node: Annotated[str, Field(max_length=253)]
    reason: Short
    boot_id: Annotated[Annotated[str, Field(max_length=64)] | None, Field(alias="bootID")] = None
    """The life of the agent that refused; a restarted one may try again, and any at the next step."""


class Revoking(Struct):
    """A candidate that must be gone before this attempt may start."""

    rollout: Annotated[str, Field(max_length=253)]
    started_at: Timestamp
    lease_ttl: Annotated[Duration | None, Field(alias="leaseTTL")] = None
    """Of the leases it was granted under; none of them outlives startedAt by more than this and 10 %."""
    nodes: Annotated[
        tuple[Annotated[str, Field(max_length=253)], ...], Field(max_length=16, json_schema_extra=ATOMIC_LIST)
    ] = ()
    """Agents that have not let go of it; the first 16."""
    agents: Annotated[int, Field(ge=0)] | None = None
    """Agents of the pool as it began."""


class PairThreshold(Struct):
    """The baseline's quantile of a ratio gate in an earlier window, in the metric's unit."""

    gate: Short
    value: Number


class DesignEffect(Struct):
    """How much less than independent requests a gate's were, measured in an earlier window of the attempt."""

    gate: Short
    k: Number
    blocks: Annotated[int, Field(ge=0)]
    """Blocks that it was measured on; under 200 nothing passes on it."""
    mean_block: Number
    """Requests in a block."""


class WindowProbeSet(Struct):
    """What a probeRef's ConfigMap held when it was read for the window."""

    config_map: Annotated[str, Field(max_length=253)]
    digest: Annotated[str, Field(max_length=71)] = ""
    """Absent: there was no plan that could be read."""
    size: Int64 = 0
    """Prompts."""


class Window(Struct):
    """The evidence window that is open."""

    opening_fence: Int64
    design_effects: Annotated[
        tuple[DesignEffect, ...], Field(max_length=24, json_schema_extra=map_list("gate"))
    ] = ()
    """Fixed as it opened; a restarted operator judges by the same."""
    pair_thresholds: Annotated[
        tuple[PairThreshold, ...], Field(max_length=24, json_schema_extra=map_list("gate"))
    ] = ()
    probe_sets: Annotated[
        tuple[WindowProbeSet, ...], Field(max_length=16, json_schema_extra=map_list("configMap"))
    ] = ()
    """What the gates are judged by while a ConfigMap cannot be read; absent where the status has no room."""


class DigestBudgetStatus(Struct):
    """How much of the candidate digest's false-promotion budget is spent."""

    attempts_used: Annotated[int, Field(ge=0, le=MAX_ATTEMPTS)] = 0


class KVRolloutStatus(Status):
    """Conditions: Feasible, Progressing, Servable, CandidateRevoked, BaselineRestored, Degraded."""

    model_config = ConfigDict(json_schema_extra=ATOMIC_OBJECT)

    phase: Phase | None = None
    stage: StatusStage | None = None
    step: Step | None = None
    attempt: Annotated[int, Field(ge=0, le=MAX_ATTEMPTS)] | None = None
    resumes: Annotated[int, Field(ge=0, le=3)] | None = None
    """How often this step was granted again after an expired lease; at most 3."""
    fence: Int64 | None = None
    verdict: Verdict | None = None
    """The worst of the current step's gates."""
    nodes: Annotated[int, Field(ge=0)] | None = None
    """Agents that hold the candidate."""
    nodes_total: Annotated[int, Field(ge=0)] | None = None
    """Agents in the blast radius."""
    unreachable: Annotated[
        tuple[Unreachable, ...], Field(max_length=64, json_schema_extra=map_list("node"))
    ] = ()
    holders: Holders | None = None
    vanished: Annotated[tuple[Unreachable, ...], Field(max_length=8, json_schema_extra=map_list("node"))] = ()
    """Agents that held the candidate and whose KVNode is gone, while their lease may last; those that holders
    does not name are one entry with their number."""
    excluded: Annotated[tuple[Excluded, ...], Field(max_length=8, json_schema_extra=map_list("node"))] = ()
    excluded_count: Annotated[int, Field(ge=0)] | None = None
    """With those that could not be named; while there are such, no other agent that joins late is asked until
    the next step."""
    held_by_all: bool | None = None
    """Every agent of the blast radius has held this attempt's candidate at once."""
    overridden: bool | None = None
    """A person promoted some step of this attempt without a Pass."""
    baseline: DigestRef | None = None
    candidate: CandidateStatus | None = None
    digest_budget: DigestBudgetStatus | None = None
    window: Window | None = None
    gates: Annotated[tuple[GateStatus, ...], Field(max_length=32, json_schema_extra=map_list("name"))] = ()
    schedule: Schedule | None = None
    carry: EvidenceCarry | None = None
    revoking: Revoking | None = None
    grant_expires: Timestamp | None = None
    """Of the approved candidate; absent when this rollout holds no approval."""
    finished_at: Timestamp | None = None
    rollback: Rollback | None = None
    last_intent: LastIntent | None = None
    spec_digest: Annotated[str, Field(max_length=71)] | None = None
    """Of the candidate, stages and gates this attempt follows."""
    traceparent: Annotated[str, Field(max_length=64)] | None = None
    trace_id: Annotated[Annotated[str, Field(max_length=32)] | None, Field(alias="traceID")] = None
