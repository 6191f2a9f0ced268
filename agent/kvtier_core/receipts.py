"""What goes into a step and what comes out: requests, answers and the receipt of how it was computed.

Why it exists: an answer without its provenance cannot be audited. These are data; they must not know how a
step runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from torch import Tensor

from kvtier_core.rowevidence import NO_EVIDENCE, ONLY_QUERIES, Evidence, Need, Surprisal
from kvtier_crds.manifest import Fallback, Selector

SUPPORT_PARTITION = "supportPartition"
"""The plan of rows that are attended where they are."""


class PublishArm(StrEnum):
    EXACT = "exact"
    CANDIDATE = "candidate"


class ExactnessClass(StrEnum):
    """Names equal the protocol's. EXACT_OVER_EDITED_HISTORY: over every row of a view that its owner edited,
    turned to where the edit put them; of an approximate history, which says more, only that is said."""

    EXACT = "EXACT"
    APPROXIMATE = "APPROXIMATE"
    EXACT_OVER_APPROXIMATE_HISTORY = "EXACT_OVER_APPROXIMATE_HISTORY"
    EXACT_OVER_EDITED_HISTORY = "EXACT_OVER_EDITED_HISTORY"


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """What opens a session. `candidate_digest` and `selector`: of the grant it is opened under, else None;
    indexes are built for such sessions only. `session_id` empty: the engine names it. given: what the engine
    will send with its frames. fixed_context: rows [0, n) are a context that does not change, 0: those of the
    first step are; None: the engine says nothing of the kind. audit: the share of sessions of which some
    selections are graded, [0, 1]. lane: whose homes and plans it has; empty: the
    baseline's."""

    tenant: str
    score_scale: float
    max_tokens: int
    selector: Selector | None = None
    candidate_digest: str | None = None
    session_id: str = ""
    given: frozenset[Need] = ONLY_QUERIES
    fixed_context: int | None = None
    audit: float = 0.0
    lane: str = ""


@dataclass(frozen=True, slots=True)
class SessionHandle:
    session_id: str
    generation: int


# What is made for each frame is not frozen: a frozen one of so many fields costs three times as much, and at
# 30 layers a token that is felt. Nobody changes them.
@dataclass(slots=True)
class StepRequest:
    """One frame: a layer of a step. k, v float32 [n, kv_heads, head_dim] (n may be 0); q float32
    [Nq, query_heads, head_dim]; query i attends rows [0, first_query_position + i].
    next_layer_follows: a promise that layer + 1 of this step comes next, with rows to the same frontier.
    promise_later: what it begins may wait until the caller has sent the answer (`CacheEngine.keep_promise`),
    and the engine may then also begin what nobody has promised.
    position_epoch: of the session as the engine knows it; 0: not stated. deadline: seconds on the engine's
    clock; None for none. evidence: of the rows k, v, one entry a row; its last hidden state is the query's
    in a decode step. hidden_layer: whose input the hidden states are; None: not said. surprisal: of rows
    up to this frame's, whatever their layer; those of a prefill come with a later step."""

    session_id: str
    generation: int
    step: int
    layer: int
    first_row_position: int
    k: Tensor
    v: Tensor
    first_query_position: int
    q: Tensor
    committed_frontier: int
    deadline: float | None = None
    position_epoch: int = 0
    next_layer_follows: bool = False
    evidence: Evidence = NO_EVIDENCE
    hidden_layer: int | None = None
    surprisal: Surprisal | None = None
    promise_later: bool = False


@dataclass(frozen=True, slots=True)
class StepMode:
    """publish: whose answer is returned. compare: compute both, exact first. The candidate's selector and
    digest are needed for either; a candidate without a selector computes exactly. may_publish is asked when a
    candidate's answer is ready; when it says no, the exact answer is published and the rows are exact's.
    plan: the name of the only exact plan that may run, for tests; None: the planner's choice. allowed: what
    the candidate's contract lists besides the exact fetch. lane: of an exact candidate whose placement is its
    own."""

    publish: PublishArm = PublishArm.EXACT
    compare: bool = False
    selector: Selector | None = None
    candidate_digest: str | None = None
    may_publish: Callable[[], bool] | None = None
    plan: str | None = None
    allowed: frozenset[Fallback] = frozenset()
    lane: str = ""


@dataclass(frozen=True, slots=True)
class SelectionFacts:
    """The evidence for one layer's selection (specification A.12, D.0), of the list with most where lists
    differ. NaN: the family says nothing of it.

    index_epoch, index_covered: the index that was read, and its rows [0, index_covered); unindexed: rows
    behind them, all read. asked_tokens, asked_bytes, asked_units: the budget, 0 for the two that it does not
    count. got_units, got_rows: chosen by score; uncapped: before the cap, dropped_by_cap: what it took.
    scanned_units: scored; index_bytes: read for it (analytic). threshold: worst score chosen, runner_up: best
    not chosen; ties: units at the cut that lost by id. omitted_mass: estimated, of the query head with most.
    certified_mass: a sound lower bound on the share of the attention that was read, of the head with least.
    widened: doublings of the budget. max_omitted_mass, min_confidence: its gate. failed: the gate failed, so
    that an exact answer was published in its place, or a declared degradation. hot_bytes: of pages of
    storage that were in memory from an earlier selection, and are in no tier's bytes. selected_bytes: of K
    and V of the rows that the selection names, those that every query reads included, each once a KV head:
    what `bytes_by_tier` and hot_bytes have beyond it is of the pages that these rows lie in, and of what was
    cheaper to read along."""

    family: str
    variant: str
    guarantee: str
    selector_digest: str
    index_digest: str
    index_epoch: int
    index_covered: int
    unindexed: int
    asked_tokens: int
    asked_bytes: int
    asked_units: int
    got_units: int
    got_rows: int
    uncapped: int
    dropped_by_cap: int
    scanned_units: int
    index_bytes: int
    threshold: float
    runner_up: float
    ties: int
    seed: int
    omitted_mass: float
    confidence: float
    certified_mass: float
    widened: int
    max_omitted_mass: float
    min_confidence: float
    failed: bool
    hot_bytes: int = 0
    selected_bytes: int = 0


@dataclass(slots=True)
class StepReceipt:
    """bytes_by_tier: payload bytes attended, by the tier where they lay; of a selection those that were read
    there (rows that sessions share are in the receipt of each, though one call reads them once; of those that
    lie on storage shared_bytes_by_tier says how many were read for another frame).
    stall_seconds: time spent waiting for staged reads.
    rows_attended: of the KV head that attended most. selected_rows: by the selector beyond the persistent
    rows, same head. estimated_omitted_mass: of the query head with most; NaN without an estimator. fallback:
    why an answer asked of the candidate was computed exactly, a Reason name; empty for none. frontier: the
    position behind the last row. position_epoch: of the session when it answered. plan_kind: the exact
    contract of the plan; failed_plans: those that were run before it, each with why it ended. hidden_seconds:
    reads that computation covered, stall_seconds those that it waited for; peak_buffer_bytes: held at once
    for blocks on their way; promised_bytes: of blocks that were on their way before the frame came.
    selection: what a selector answered for this frame; None: none was asked, or it refused."""

    exactness: ExactnessClass
    arm: PublishArm
    manifest_digest: str
    support_digest: str
    frontier: int
    rows_attended: int
    selected_rows: int
    bytes_by_tier: Mapping[str, int]
    plan: tuple[str, ...]
    simulated: bool
    stall_seconds: float
    producer_digest: str
    estimated_omitted_mass: float
    fallback: str
    snapshot_generation: int
    position_epoch: int = 1
    plan_kind: str = SUPPORT_PARTITION
    hidden_seconds: float = 0.0
    peak_buffer_bytes: int = 0
    promised_bytes: int = 0
    failed_plans: tuple[tuple[str, str], ...] = ()
    selection: SelectionFacts | None = None
    shared_bytes_by_tier: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Frobenius norms over the layer's output [Nq, Hq, d], accumulated in float32: of candidate - exact, and
    of exact. Both answers used the snapshot `snapshot_generation` at `frontier`. complete: the candidate read
    every row here, so it differs by nothing."""

    diff_norm: float
    exact_norm: float
    frontier: int
    snapshot_generation: int
    exact_support_digest: str
    candidate_support_digest: str
    complete: bool


@dataclass(slots=True)
class StepAnswer:
    """out: float32 [Nq, query_heads, head_dim]. repeated: the frame had been accepted before."""

    out: Tensor
    receipt: StepReceipt
    comparison: Comparison | None = None
    repeated: bool = False


@dataclass(frozen=True, slots=True)
class TierBytes:
    """Who has a tier's slots, in bytes of whole slots; rows + blocks + quarantined + free are all of them.
    rows: sessions' rows, and slots promised to their open chunks. blocks: shared blocks, those being written
    included. quarantined: bytes may still arrive there, so nobody has them. held: of `blocks`, copies that
    somebody reads, so that they cannot leave."""

    rows: int = 0
    blocks: int = 0
    quarantined: int = 0
    free: int = 0
    held: int = 0

    def __add__(self, other: TierBytes) -> TierBytes:
        return TierBytes(
            self.rows + other.rows,
            self.blocks + other.blocks,
            self.quarantined + other.quarantined,
            self.free + other.free,
            self.held + other.held,
        )


@dataclass(frozen=True, slots=True)
class TierStats:
    """condition: `Ready`, or a Reason name with a message. Bandwidths are measured; 0.0: not measured.
    pinned_bytes: page-locked or staging memory of the tier, which is not in `bytes`."""

    class_name: str
    medium: str
    simulated: bool
    capacity_bytes: int
    used_bytes: int
    pinned_bytes: int
    read_bytes_per_second: float
    write_bytes_per_second: float
    probes: Mapping[str, str]
    condition: str
    bytes: TierBytes = TierBytes()


@dataclass(frozen=True, slots=True)
class HostBytes:
    """Host memory of one cache, in parts that are never merged (specification F17). payloads: slots in use of
    tiers in host memory. buffers: staging and I/O buffers. write_back: bytes on their way down, their source
    slots included in `payloads`. metadata: directory lines in use."""

    payloads: int = 0
    buffers: int = 0
    write_back: int = 0
    metadata: int = 0


@dataclass(frozen=True, slots=True)
class RecoveryStats:
    """What a persistent tier found when it was opened. dropped: slots with something in them that is not
    served, by reason. proven: payloads that were read again, since their flush was not on record. message:
    the same for a person."""

    class_name: str
    kept: int
    dropped: Mapping[str, int]
    proven: int
    seconds: float
    clean: bool
    message: str


@dataclass(frozen=True, slots=True)
class BlockStats:
    """Shared blocks since start. stored: blocks that a lookup may find now. hits: blocks served from memory;
    fetched: from storage. moves: by (kind, reason) of the end. evictions: copies by (tier, dropped | lost |
    demoted | refused). saved_bytes: backend reads that single-flight spared. deleting: orders that are not
    done. failure: why the store's thread ended, empty while it runs or was not asked for."""

    stored: int = 0
    hits: int = 0
    fetched: int = 0
    moves: Mapping[tuple[str, str], int] = field(default_factory=dict)
    evictions: Mapping[tuple[str, str], int] = field(default_factory=dict)
    saved_bytes: int = 0
    deleting: int = 0
    failure: str = ""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """chunks, open_chunks: of sessions. moved_bytes: by (source tier, destination tier), rows and blocks.
    blocks: None when no tier can hold any."""

    tiers: tuple[TierStats, ...]
    sessions: int
    chunks: int
    open_chunks: int
    moved_bytes: Mapping[tuple[str, str], int]
    host: HostBytes = HostBytes()
    blocks: BlockStats | None = None
    recovered: tuple[RecoveryStats, ...] = ()


@dataclass(frozen=True, slots=True)
class ChunkInfo:
    """A published chunk as the Blocks service lists it. `bytes` is what `read_chunk` returns."""

    session_id: str
    session_generation: int
    layer: int
    chunk: int
    generation: int
    tier_class: str
    rows: int
    bytes: int
    checksum: str
    producer_digest: str
    sealed: bool
