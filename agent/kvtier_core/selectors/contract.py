"""What every selector family states, is given and answers.

Why it exists: families differ in their unit, evidence, build, guarantee and rule for grouped queries. Those
differences are data here, never hidden behind one formula. A selection names rows and the evidence for them,
never K/V and never slots. Rows that every query reads (sink, recent, what no index covers) are the caller's
and count as nobody's success. It must not know tiers, requests' content or any one family.

Namespaces: a unit (page, cluster, event) is not a row; `Selection.positions` holds rows, `units` holds units.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NotRequired, Protocol, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvtier_core.errors import CoreError, Reason
from kvtier_core.rowevidence import NO_EVIDENCE as NO_EVIDENCE
from kvtier_core.rowevidence import Evidence as Evidence
from kvtier_core.rowevidence import LayerWeights as LayerWeights
from kvtier_core.rowevidence import Need as Need
from kvtier_kernels.state import AttentionState

Rows = NDArray[np.int64]


class Unit(StrEnum):
    """What a family chooses."""

    ROW = "row"
    PAGE = "page"
    CLUSTER = "cluster"
    UNIT = "unit"
    EVENT = "event"


class Scope(StrEnum):
    """Who shares one list of rows."""

    QUERY_HEAD = "queryHead"
    KV_HEAD = "kvHead"
    LAYER = "layer"


class Guarantee(StrEnum):
    """What is promised of the rows that are left out."""

    EXACT = "exact"
    UPPER_BOUND = "upperBound"
    ESTIMATE = "estimate"
    SAMPLED = "sampled"
    HEURISTIC = "heuristic"


class EditCost(StrEnum):
    """What a change of indexed rows costs: the units that hold them, all of it, or it is illegal."""

    UNIT = "unit"
    REBUILD = "rebuild"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class FamilyFacts:
    """What a family is, whatever its parameters. variant: "" for the published algorithm. fixed_size: a query
    of a given budget reads as many units whatever it asks (threshold methods do not). key_frame: what is
    indexed: "rope" (as attended), "preRope" or "centred". estimates: receipts state the mass left out.
    incremental: an index is the same however its rows were cut into a build and appends; False: it learns
    from the rows that it is built over."""

    family: str
    unit: Unit
    scope: Scope
    needs: frozenset[Need]
    guarantee: Guarantee
    appendable: bool
    edit: EditCost
    variant: str = ""
    order_sensitive: bool = False
    randomised: bool = False
    fixed_size: bool = True
    key_frame: str = "rope"
    estimates: bool = False
    incremental: bool = False


@dataclass(frozen=True, slots=True)
class Shape:
    """One layer's geometry. scale: on q.k, as in the attention that follows."""

    query_heads: int
    kv_heads: int
    head_dim: int
    scale: float

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.query_heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class Source:
    """What an index was made of and for. digest: of the source binding. position_epoch grows with each edit
    of positions. layer: that the index serves."""

    digest: bytes
    layer: int
    position_epoch: int = 0


@dataclass(frozen=True, slots=True)
class Query:
    """One decode query. q: float32 [1, Hq, d], unscaled, as attended. rows: it sees rows [0, rows). hidden:
    float32 [1, d_model], the input of the previous layer, for families that rehearse. seed: of this draw, for
    families that sample per query. tail: keys float32 [t, Hk, d] of the rows [rows - t, rows) that no index
    covers yet, for families that weigh what is always read; None: not given. position: at which q is rotated;
    None: rows - 1. hidden_layer: whose input `hidden` is; None: not said. outside: rows behind the index that
    may be read without it, where that is more than the family's own limit."""

    q: Tensor
    rows: int
    source: Source
    hidden: Tensor | None = None
    seed: int = 0
    tail: Tensor | None = None
    position: int | None = None
    hidden_layer: int | None = None
    outside: int = 0


class CapPolicy(StrEnum):
    """What happens to a selection over the budget."""

    TRUNCATE = "truncate"
    ERROR = "error"
    DENSE = "dense"


@dataclass(frozen=True, slots=True)
class Budget:
    """What one query may read beyond the persistent rows; exactly one of tokens, bytes, units. Bytes are of K
    and V of all KV heads, float32."""

    tokens: int | None = None
    bytes: int | None = None
    units: int | None = None
    cap_policy: CapPolicy = CapPolicy.TRUNCATE

    def rows(self, shape: Shape) -> int | None:
        """The rows of one KV head that it pays for; None when it counts units."""
        if self.tokens is not None:
            return self.tokens
        if self.bytes is not None:
            return self.bytes // (2 * shape.kv_heads * shape.head_dim * 4)
        return None


@dataclass(frozen=True, slots=True)
class IndexFacts:
    """What names an index. Rows [0, covered) are in it. epoch grows with every publication of it; digest:
    SHA-256 over all of this and `parts`, the digests or counters of its arrays, so that no part of another
    epoch goes unseen."""

    selector_digest: str
    source: Source
    epoch: int
    covered: int
    seed: int = 0
    parts: tuple[tuple[str, str], ...] = ()

    @property
    def digest(self) -> str:
        body = repr(
            (
                self.selector_digest,
                self.source.digest,
                self.source.layer,
                self.source.position_epoch,
                self.epoch,
                self.covered,
                self.seed,
                self.parts,
            )
        )
        return "sha256:" + hashlib.sha256(body.encode()).hexdigest()


class Told(TypedDict):
    """Of a receipt, what a family says of this one selection: see `SelectionReceipt`."""

    got_units: tuple[int, ...]
    got_rows: tuple[int, ...]
    uncapped: tuple[int, ...]
    dropped_by_cap: tuple[int, ...]
    scanned_units: int
    index_bytes: int
    threshold: tuple[float, ...]
    runner_up: tuple[float, ...]
    ties: tuple[int, ...]
    unindexed: int
    seed: NotRequired[int]
    omitted_mass: NotRequired[tuple[float, ...] | None]
    confidence: NotRequired[float | None]
    certified_mass: NotRequired[tuple[float, ...] | None]
    detail: NotRequired[Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class SelectionReceipt:
    """The evidence for a selection (specification A.12, D.0). One entry a list of `Selection.positions` in
    every tuple.

    asked: the budget. got_units, got_rows: beyond the persistent rows. uncapped: units before the cap.
    dropped_by_cap: units that the cap took. scanned_units: that were scored. index_bytes: read of the index
    (analytic, not timed). threshold: worst score chosen; runner_up: best not chosen (-inf: none). ties: units
    at the cut that lost by id. unindexed: rows [covered, rows), all read. omitted_mass: estimated mass left
    out, one a query head, None without an estimator; never the dense one. certified_mass: sound lower bound
    on the mass kept, one a query head; None where the family has no sound bound. confidence: of the estimate.
    detail: what only this family states, as text."""

    family: str
    variant: str
    selector_digest: str
    index_digest: str
    index_epoch: int
    source: Source
    guarantee: Guarantee
    scope: Scope
    asked: Budget
    got_units: tuple[int, ...]
    got_rows: tuple[int, ...]
    uncapped: tuple[int, ...]
    dropped_by_cap: tuple[int, ...]
    scanned_units: int
    index_bytes: int
    threshold: tuple[float, ...]
    runner_up: tuple[float, ...]
    ties: tuple[int, ...]
    unindexed: int
    seed: int | None = None
    omitted_mass: tuple[float, ...] | None = None
    confidence: float | None = None
    certified_mass: tuple[float, ...] | None = None
    detail: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, family: Family, index: IndexFacts, query: Query, asked: Budget, **told: Unpack[Told]
    ) -> SelectionReceipt:
        """What every family states alike comes from itself, its index and the query; told: the rest."""
        facts = family.facts
        return cls(
            facts.family,
            facts.variant,
            family.digest,
            index.digest,
            index.epoch,
            query.source,
            facts.guarantee,
            facts.scope,
            asked,
            **told,
        )


class Remainder(Protocol):
    """What stands for rows that nobody read."""

    def complete(self, exact: AttentionState) -> AttentionState:
        """The answer's state from that of the rows read, m, l [1, Hq], u [1, Hq, d]. Marked estimated."""


@dataclass(frozen=True, slots=True)
class Selection:
    """positions: rows to read, ascending and without repeats, persistent ones included: one array a query
    head, a KV head, or one for all, as `scope` says. units: what was chosen by score, ascending, likewise.
    log_weight: added to the logit of each row of `positions` (importance correction), None for none.
    remainder: completes the state of the rows read; None: that state is the answer. left_out: float64 [Hq],
    an upper bound of ln of the sum of e^logit over the rows that are not read, where the family has a sound
    one."""

    scope: Scope
    positions: tuple[Rows, ...]
    units: tuple[Rows, ...]
    receipt: SelectionReceipt
    log_weight: tuple[NDArray[np.float32], ...] | None = None
    remainder: Remainder | None = None
    left_out: NDArray[np.float64] | None = None

    def certified(self, read: AttentionState) -> tuple[float, ...] | None:
        """A sound lower bound on the share of the attention that was read, one a query head, from the state
        m, l [1, Hq] of the rows read: l e^m / (l e^m + the bound of the others). None without a bound."""
        if self.left_out is None:
            return None
        # The state's own sum is rounded in float32, a few parts in 2^23 for each level of its tree.
        kept = (read.m[0].double() + read.l[0].double().log()).numpy() - 2.0**-16
        with np.errstate(over="ignore"):
            return tuple(float(share) for share in 1.0 / (1.0 + np.exp(self.left_out - kept)))

    def rows_of_kv_head(self, head: int, shape: Shape) -> Rows:
        """The rows that some query head of KV head `head` reads, ascending: what must be fetched."""
        if self.scope is Scope.LAYER:
            return self.positions[0]
        if self.scope is Scope.KV_HEAD:
            return self.positions[head]
        group = self.positions[head * shape.group : (head + 1) * shape.group]
        return np.unique(np.concatenate(group))

    def units_of_kv_head(self, head: int, shape: Shape) -> Rows:
        """The units that were chosen for some query head of KV head `head`, ascending."""
        if self.scope is Scope.LAYER:
            return self.units[0]
        if self.scope is Scope.KV_HEAD:
            return self.units[head]
        return np.unique(np.concatenate(self.units[head * shape.group : (head + 1) * shape.group]))


class Index(Protocol):
    """One layer's index of one session, immutable: `append` and `edit` return another."""

    @property
    def facts(self) -> IndexFacts: ...


@dataclass(frozen=True, slots=True)
class Edit:
    """A change of rows that an index may cover: rows [first, covered) are gone or have moved. truncated: they
    are gone and nothing else changed. epoch: position epoch after it."""

    first: int
    epoch: int
    truncated: bool


@dataclass(frozen=True, slots=True)
class NeedsRebuild:
    """The index cannot follow an edit; `why` says what depends on all rows."""

    why: str


class Family(Protocol):
    """A family with its parameters, budget and seed. Pure: the same calls give the same selections."""

    @property
    def facts(self) -> FamilyFacts: ...

    @property
    def digest(self) -> str:
        """Names family, variant, parameters, budget, persistent rows and seed."""

    @property
    def shape(self) -> Shape: ...

    @property
    def dense_layers(self) -> frozenset[int]: ...

    def omits(self, rows: int) -> bool:
        """Whether a query over `rows` rows would leave some unread; the same for all layers. A threshold
        family answers whether it could."""

    def build(self, source: Source, k: Tensor, v: Tensor, evidence: Evidence) -> Index:
        """Over rows k, v float32 [n, Hk, d] at [0, n); n may be 0. Refuses evidence that lacks a need
        (UNSUPPORTED names it)."""

    def append(self, index: Index, k: Tensor, v: Tensor, evidence: Evidence) -> Index:
        """Rows [covered, covered + n) added. CONTEXT_HASH_MISMATCH for a family of fixed contexts."""

    def edit(self, index: Index, edit: Edit) -> Index | NeedsRebuild: ...

    def select(self, index: Index, query: Query) -> Selection:
        """Rows for one query. SUPPORT_GAP, UNSUPPORTED, SELECTOR_STALE, INDEX_STALE, INDEX_FRONTIER_LAG and
        the family's own."""


def check_index(index: Index, family: Family, query: Query, *, tail: int) -> int:
    """Whether `index` may answer `query`; returns how many rows it does not cover, at most `tail` or what the
    query allows.

    SELECTOR_STALE: built for other parameters. LAYER_DISTANCE: of another layer. IDENTITY_MISMATCH: of
    another source. POSITION_CONTRACT_MISMATCH: of another position epoch. INDEX_STALE: it covers rows that
    are gone. INDEX_FRONTIER_LAG: it ends too early."""
    facts = index.facts
    if facts.selector_digest != family.digest:
        raise CoreError(
            Reason.SELECTOR_STALE,
            "the index was built for another selector",
            {"index": facts.selector_digest, "asked": family.digest},
        )
    if facts.source.digest != query.source.digest:
        raise CoreError(Reason.IDENTITY_MISMATCH, "the index belongs to another source of rows")
    if facts.source.layer != query.source.layer:
        raise CoreError(
            Reason.LAYER_DISTANCE, f"the index is of layer {facts.source.layer}, not {query.source.layer}"
        )
    if facts.source.position_epoch != query.source.position_epoch:
        raise CoreError(
            Reason.POSITION_CONTRACT_MISMATCH,
            f"the index is of position epoch {facts.source.position_epoch}, the query of "
            f"{query.source.position_epoch}",
        )
    if facts.covered > query.rows:
        raise CoreError(Reason.INDEX_STALE, f"the index covers {facts.covered} rows, there are {query.rows}")
    lag = query.rows - facts.covered
    tail = max(tail, query.outside)
    if lag > tail:
        raise CoreError(
            Reason.INDEX_FRONTIER_LAG,
            f"the index ends at row {facts.covered} of {query.rows}; at most {tail} may be outside",
            {"covered": facts.covered, "rows": query.rows, "tail": tail},
        )
    return lag


def check_needs(family: Family, evidence: Evidence, needs: frozenset[Need] | None = None) -> None:
    """UNSUPPORTED names what the engine does not give and the family needs. needs: of rows, where they are
    fewer than the family's."""
    missing = sorted((family.facts.needs if needs is None else needs) - evidence.has())
    if missing:
        raise CoreError(
            Reason.UNSUPPORTED,
            f"{family.facts.family} needs {', '.join(missing)}, which this engine does not give",
            {"missing": ",".join(missing)},
        )
