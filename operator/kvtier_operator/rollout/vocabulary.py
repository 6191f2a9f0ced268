"""The closed sets of words that release control speaks: stages, phases, verbs, causes, verdicts, conditions.

They are the values of KVRollout fields, so a member may be added but never renamed. This module must not
know how a rollout moves between them.
"""

from __future__ import annotations

from enum import StrEnum


class Stage(StrEnum):
    OFF = "Off"
    SHADOW = "Shadow"
    CANARY = "Canary"
    RAMP = "Ramp"
    FULL = "Full"
    EXACT_BASELINE = "ExactBaseline"


STAGE_ORDER: tuple[Stage, ...] = (Stage.SHADOW, Stage.CANARY, Stage.RAMP, Stage.FULL)
"""Stages in which agents hold the candidate, in the order they are passed."""


class Phase(StrEnum):
    PENDING = "Pending"
    PROGRESSING = "Progressing"
    PAUSED = "Paused"
    COMPLETED = "Completed"
    ROLLING_BACK = "RollingBack"
    ROLLED_BACK = "RolledBack"
    INVALID = "Invalid"


FINISHED: frozenset[Phase] = frozenset({Phase.COMPLETED, Phase.ROLLED_BACK, Phase.INVALID})
"""Phases that leave the cache free for another rollout."""


class Verb(StrEnum):
    PAUSE = "Pause"
    RESUME = "Resume"
    PROMOTE = "Promote"
    SKIP = "Skip"
    ABORT = "Abort"
    RETRY = "Retry"


class IntentResult(StrEnum):
    """What became of an intent; written to `status.lastIntent.result`."""

    ACCEPTED = "Accepted"
    REPLAYED = "Replayed"
    WRONG_ATTEMPT = "WrongAttempt"
    WRONG_STAGE = "WrongStage"
    WRONG_STEP = "WrongStep"
    NOT_APPLICABLE = "NotApplicable"


class Cause(StrEnum):
    """Why a rollout returned to its baseline."""

    GATE_FAILED = "GateFailed"
    INTENT_ABORT = "IntentAbort"
    AGENT_LOST = "AgentLost"
    LEASE_EXPIRED = "LeaseExpired"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    INPUT_DRIFT = "InputDrift"
    MANIFEST_MISMATCH = "ManifestMismatch"
    INFEASIBLE_NODE = "InfeasibleNode"
    OBJECT_DELETED = "ObjectDeleted"


class Verdict(StrEnum):
    PASS = "Pass"
    FAIL = "Fail"
    INSUFFICIENT = "Insufficient"
    PROVIDER_ERROR = "ProviderError"


class CandidateClass(StrEnum):
    EXACT = "exact"
    APPROXIMATE = "approximate"


class OnLeaseExpired(StrEnum):
    RESUME = "Resume"
    ROLL_BACK = "RollBack"


class OnInsufficient(StrEnum):
    HOLD = "Hold"
    ROLL_BACK = "RollBack"


class ConditionType(StrEnum):
    FEASIBLE = "Feasible"
    PROGRESSING = "Progressing"
    SERVABLE = "Servable"
    CANDIDATE_REVOKED = "CandidateRevoked"
    BASELINE_RESTORED = "BaselineRestored"
    DEGRADED = "Degraded"


class Blocker(StrEnum):
    """Why a rollout cannot start; the reason of `Feasible` or `Progressing`."""

    NONE = ""
    NOT_IMPLEMENTED = "NotImplemented"
    REFERENCE_MISSING = "ReferenceMissing"
    SPEC_INVALID = "SpecInvalid"
    RELEASE_ORDER = "ReleaseOrder"
    GATE_MISSING = "GateMissing"
    PROBE_SET_SMALL = "ProbeSetTooSmall"
    PROBE_PLAN_INVALID = "ProbePlanInvalid"
    NO_CHANGE = "NoChange"
    NEEDS_NEW_CACHE = "NeedsNewCache"
    NO_ROOM = "NoRoomBeside"
    CONTRACT_FORBIDS = "ContractForbids"
    CACHE_MISSING = "CacheMissing"
    CACHE_BUSY = "CacheBusy"
    CACHE_SUSPENDED = "CacheSuspended"
    BASELINE_MISSING = "BaselineMissing"
    NO_NODES = "NoNodes"
    REVOKING_APPROVED = "RevokingApproved"
    APPROVAL_ENDED = "ApprovalEnded"


INVALIDATING: frozenset[Blocker] = frozenset(
    {
        Blocker.NOT_IMPLEMENTED,
        Blocker.SPEC_INVALID,
        Blocker.RELEASE_ORDER,
        Blocker.GATE_MISSING,
        Blocker.NO_CHANGE,
        Blocker.NEEDS_NEW_CACHE,
        Blocker.CONTRACT_FORBIDS,
    }
)
"""Blockers that only an edit can lift; the others lift by themselves."""

MAX_RESUMES = 3
LEASE_GRACE = 1.1
"""A lease has provably ended TTL x 1.1 after the last moment it could have been renewed."""
STATUS_LIMIT_BYTES = 8192
