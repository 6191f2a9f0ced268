"""Everything outside a rollout's own status that the machine may look at, and what it may ask for.

Inputs are facts with a time; actions are wishes that the reconciler fulfils in order. The order of a pass is
always: fence, then status, then (in a later pass, when both agree) RPCs. It must not know how facts are
gathered or wishes fulfilled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtier_evidence.carry import Carry
from kvtier_operator.rollout.spec import DEFAULT_LEASE_TTL, BlastRadius, Intent, RolloutSpec
from kvtier_operator.rollout.state import CandidateRef, DesignEffect, ManifestRef, RolloutState
from kvtier_operator.rollout.vocabulary import Blocker, Cause, Verdict


@dataclass(frozen=True, slots=True)
class Approved:
    """`status.approved` of the KVCache, as far as release control needs it."""

    rollout: str
    rollout_uid: str
    digest: str
    grant_expires: float
    radius: BlastRadius = field(default_factory=BlastRadius)
    holdback: str = ""
    evidence: str = ""


@dataclass(frozen=True, slots=True)
class CacheView:
    """beat: where in an interval the looks of its pool lie, from 0 to 1; see `beats`."""

    uid: str
    fence: int
    baseline: ManifestRef | None
    approved: Approved | None
    deleting: bool = False
    suspended: bool = False
    beat: float = 0.0


@dataclass(frozen=True, slots=True)
class CandidateView:
    """What the inputs compile to now. Either `ref` or a blocker with the sentence a person needs.

    prior_shares: parts of this digest's false-promotion budget that other rollouts have used. no_room: why an
    engine of its own does not fit beside the baseline's, with numbers per node; looked at before the start.
    """

    ref: CandidateRef | None = None
    blocker: Blocker = Blocker.NONE
    message: str = ""
    prior_shares: int = 0
    no_room: str = ""


@dataclass(frozen=True, slots=True)
class ProofView:
    """An agent's answer over our nonce, checked: `valid` says that the nonce digest was right."""

    fence: int
    baseline_digest: str
    candidate_digest: str
    in_flight: int
    valid: bool


@dataclass(frozen=True, slots=True)
class AgentView:
    """One agent of the cache's pool as last heard of in this pass.

    selected: may hold the candidate (blast radius, not cordoned or draining). leaving: its node is cordoned
    or drains, so that nobody renews what it holds. reachable: answered in this pass. granted_fence,
    granted_rollout: of the candidate it holds (when unreachable: last said to hold), 0 for none.
    returned_*: of the candidate that it gave up by itself last. refusal: reason of a refused grant or
    revocation in this pass. running_*: what it recomputed of what runs; None: an agent of an earlier
    version, empty: it cannot say. said: what came of the last revocation where no proof did.
    """

    node: str
    reachable: bool
    selected: bool = True
    leaving: bool = False
    boot_id: str = ""
    highest_fence: int = 0
    baseline_digest: str = ""
    candidate_digest: str = ""
    running_baseline: str | None = None
    running_candidate: str | None = None
    granted_fence: int = 0
    granted_rollout: str = ""
    returned_reason: str = ""
    returned_fence: int = 0
    returned_rollout: str = ""
    proof: ProofView | None = None
    refusal: str = ""
    refusal_message: str = ""
    said: str = ""


@dataclass(frozen=True, slots=True)
class GateVerdict:
    """One gate at one look, as the judge printed it."""

    name: str
    verdict: Verdict
    reason: str
    required: bool = True
    metric: str = ""
    value: str = ""
    bound: str = ""
    limit: str = ""
    n: int = 0
    expected_n: int = 0
    k: str = ""
    basis: str = ""
    detail: str = ""
    """Why its source could not be read, for people."""


@dataclass(frozen=True, slots=True)
class Look:
    """All gates judged on one state of one window. A look at another window than the open one is ignored.
    `failed` names the gate of a Fail, `carry` is what the next look must be given, `pair_thresholds` (gate,
    value as printed) where the next one counts blocks above, `effects` the design effects that it measured
    for the next, `requests_per_second` is of the blast radius so far, 0 while nobody can tell,
    `unread` the agents whose evidence could not be read."""

    opening_fence: int
    at: float
    verdicts: tuple[GateVerdict, ...]
    carry: Carry
    failed: str = ""
    pair_thresholds: tuple[tuple[str, str], ...] = ()
    requests_per_second: float = 0.0
    effects: tuple[DesignEffect, ...] = ()
    unread: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Inputs:
    """busy_with: the unfinished rollout of the cache that comes before this one. superseded_by: an
    unfinished rollout that has begun, of the same cache, and whose turn it is. holders: agents that this
    process has seen or made hold the candidate, or written down as such. approved_vanished: such ones of
    the approved rollout that are gone, with a lease that may last. last_look: the newest one, which may
    be of an earlier pass or window. ttl: seconds that a finished rollout is kept, None for ever.
    lease_ttl: seconds, also of a spec that cannot be run. older_ttl: of a longer lease that agents may
    hold, by a status that could be read in part only. approved_ttl: of the rollout whose candidate the
    cache holds approved. rate: requests a second in the blast radius, 0 when not known. quiet_since: when
    this process became leader; it knows nothing of renewals sent before that. waited: how long this
    process has waited for leases since a time that was written down, in seconds that nobody can set.
    nows: see `now_for`. probe_trouble: reason and sentence of a probe Job that makes no evidence.
    unread_probes: a probe set that could not be read, so that the spec is what it was when it could.
    unread_baseline: why the manifest could not be read on which the candidate stands, so that it is taken
    to be what it was. intent: also of a spec that cannot be run. spec_blocker: what kind of error
    `spec_error` is. cache_named: whether it can be read which cache it is of; where not, `cache` is None
    though it may be there."""

    now: float
    uid: str
    name: str
    generation: int
    spec: RolloutSpec | None
    spec_error: str
    deleting: bool
    cache: CacheView | None
    busy_with: str
    superseded_by: str
    candidate: CandidateView
    agents: tuple[AgentView, ...]
    holders: frozenset[str] = frozenset()
    approved_vanished: tuple[str, ...] = ()
    look: Look | None = None
    last_look: Look | None = None
    quiet_since: float = 0.0
    waited: Mapping[float, float] = field(default_factory=dict)
    nows: Mapping[float, float] = field(default_factory=dict)
    ttl: float | None = None
    lease_ttl: float = DEFAULT_LEASE_TTL
    older_ttl: float = 0.0
    approved_ttl: float = DEFAULT_LEASE_TTL
    rate: float = 0.0
    probe_trouble: tuple[str, str] | None = None
    intent: Intent | None = None
    spec_blocker: Blocker = Blocker.SPEC_INVALID
    unread_probes: str = ""
    unread_baseline: str = ""
    cache_named: bool = True

    @property
    def unread(self) -> str:
        """What could not be read, so that nothing passes."""
        return self.unread_baseline or self.unread_probes

    def now_for(self, written: float) -> float:
        """What time it is, to hold beside one that was written down: `now`, but for what the wall clock was
        set by since this process first read that one."""
        return self.nows.get(written, self.now)


@dataclass(frozen=True, slots=True)
class ApproveCandidate:
    """Write `status.approved` of the cache in the same compare-and-swap as the fence."""

    grant_expires: float


@dataclass(frozen=True, slots=True)
class FenceMove:
    """One compare-and-swap on the KVCache: fence `expected` to `new`, and with it what is approved, and how
    many parts of the candidate digest's false-promotion budget are used (0: unchanged). adopt: the candidate
    becomes the baseline, in the place of the one that the state names."""

    expected: int
    new: int
    approve: ApproveCandidate | None = None
    adopt: bool = False
    clear_approved: bool = False
    shares: int = 0


@dataclass(frozen=True, slots=True)
class Grant:
    node: str


@dataclass(frozen=True, slots=True)
class Revoke:
    node: str
    cause: Cause | None


@dataclass(frozen=True, slots=True)
class ExtendApproval:
    """Moves `grantExpires` of the approved candidate, and says what of it is approved now; no fence, since no
    permission changes."""

    grant_expires: float


Rpc = Grant | Revoke


@dataclass(frozen=True, slots=True)
class Notice:
    """An Event for people."""

    warning: bool
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class SpanNote:
    """A short span of the attempt's trace; emitted after the write it tells of."""

    name: str
    attributes: tuple[tuple[str, str | int | float | bool], ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """state: what status must say. `transition` set: write fence, then state, and look again before any RPC.

    urgent: the change is more than moved numbers. withdraw: the cache's approval of this rollout ends, under
    the fence that is written. release: the finalizer may go. delete: it was kept long
    enough. requeue_after: seconds, 0 for not at all.
    """

    state: RolloutState
    transition: FenceMove | None = None
    urgent: bool = False
    rpcs: tuple[Rpc, ...] = ()
    extend: ExtendApproval | None = None
    withdraw: bool = False
    notices: tuple[Notice, ...] = ()
    spans: tuple[SpanNote, ...] = ()
    release: bool = False
    delete: bool = False
    requeue_after: float = field(default=0.0)
