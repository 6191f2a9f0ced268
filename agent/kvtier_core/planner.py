"""From live tiers and a layer's chunks to the plan that a step runs, and why.

Why it exists: `planning` decides from facts; here the facts are gathered, and what they led to is kept for as
long as chunks lie where they lay, since a frame must pay next to nothing for its plan. A path is legal
because a tier's capability record permits it, not because it would work. It must not know tensors' contents
or how a path is run. Specification A.7, E.7.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from kvtier_core.admission import UNAVAILABLE, Fallback
from kvtier_core.appends import NO_LINE, Append, Rows
from kvtier_core.directory import ChunkState
from kvtier_core.errors import CoreError, Reason
from kvtier_core.placements.preference import RECENCY, PlacementPreference, PlanKind
from kvtier_core.planning.candidates import Candidate, Lost, Route, candidates
from kvtier_core.planning.choice import Decision, decide
from kvtier_core.planning.facts import FRAME as FRAME_TIER
from kvtier_core.planning.facts import (
    Credits,
    DeclaredCost,
    Rates,
    StepFacts,
    Terms,
    TierFacts,
)
from kvtier_core.tiers.base import PoolTier, Tier
from kvtier_core.units import BytesPerSecond

MAX_KEPT = 512
"""Placements whose plans are kept; beyond it all are forgotten, which costs time and nothing else."""


class Path(StrEnum):
    """PARTIAL: a state is formed where the rows are. NEAR: beside storage, through a bounded buffer, and
    returned as a state with its receipt. STAGED: verified into a staging buffer, then attended. SLICED: some
    KV heads at a time. FRAME: the rows came with this request and are attended from it. HOT: as STAGED, by an
    earlier selection, and still in memory."""

    PARTIAL = "partial"
    NEAR = "near"
    STAGED = "staged"
    SLICED = "sliced"
    FRAME = "frame"
    HOT = "hot"


_PATHS = {
    Route.IN_PLACE: Path.PARTIAL,
    Route.NEAR: Path.NEAR,
    Route.MOVED: Path.STAGED,
    Route.SLICED: Path.SLICED,
}
STREAMED = (Path.NEAR, Path.STAGED)


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """One chunk of a plan: rows [0, rows) of it are visible. `line` is NO_LINE for FRAME."""

    chunk: int
    rows: int
    line: int
    tier: int
    path: Path


@dataclass(frozen=True, slots=True)
class Plan:
    """Chunks ascending. `labels` name each path once, as receipts do; `why` says what made it legal. kind:
    the exact contract it is of; group_heads: KV heads of a slice, 0 for whole blocks. lost: each other plan
    with its reason. seconds: that it is predicted to take, None where nothing is priced. buffers: that its
    stream may hold at once; 0: as many as any."""

    reads: tuple[ChunkRead, ...]
    labels: tuple[str, ...]
    why: tuple[str, ...]
    simulated: bool
    kind: PlanKind = PlanKind.SUPPORT_PARTITION
    group_heads: int = 0
    lost: Mapping[str, str] = field(default_factory=dict)
    seconds: float | None = None
    buffers: int = 0


def window_of(plan: Plan, most: int) -> int:
    """Buffers of its stream: `most`, or what the plan was priced with."""
    return min(most, plan.buffers or most)


def check_cover(plan: Plan, chunk_tokens: int) -> None:
    """That an exact plan reads chunks [0, n) once each and all but the last one whole: SUPPORT_OVERLAP,
    SUPPORT_GAP. Whoever made the plan, what is merged is every row once."""
    for at, read in enumerate(plan.reads):
        if read.chunk < at:
            raise CoreError(Reason.SUPPORT_OVERLAP, f"chunk {read.chunk} is read twice")
        if read.chunk > at or (read.rows != chunk_tokens and read is not plan.reads[-1]):
            raise CoreError(Reason.SUPPORT_GAP, f"rows of chunk {at} are not read")


def tier_facts(tier: Tier) -> TierFacts:
    """What a plan may know of a live tier."""
    able = tier.capability
    measured = tier.measured.read_bytes_per_second
    return TierFacts(
        name=tier.name,
        medium=tier.medium.value,
        in_place=able.kernel_readable and able.partial_attention and tier.host_memory,
        source=able.dma_source,
        by_head=isinstance(tier, PoolTier) and tier.host_memory,
        read=BytesPerSecond(measured) if measured > 0.0 else None,
    )


def legal_path(tier: Tier) -> tuple[Path, str]:
    """The path of a chunk that lies in `tier`, each tier's rows where they are. NO_LEGAL_PATH when its record
    permits none."""
    able = tier.capability
    if able.kernel_readable and able.partial_attention and tier.host_memory:
        return Path.PARTIAL, "kernelReadable and partialAttention"
    if able.dma_source:
        if not able.kernel_readable:
            return Path.NEAR if not isinstance(tier, PoolTier) else Path.STAGED, (
                "not kernelReadable, but dmaSource"
            )
        missing = "not partialAttention" if tier.host_memory else "states are formed by the host here"
        return Path.STAGED, f"{missing}, but dmaSource"
    raise CoreError(
        Reason.NO_LEGAL_PATH,
        f"tier {tier.name} permits neither partial attention nor reads",
        {"tier": tier.name},
    )


def plan_rows(store: Rows, append: Append, visible: int, chunks: Sequence[int] | None = None) -> Plan:
    """Rows [0, visible) of the append's layer, each tier's where they are, or only those of `chunks`
    (ascending).

    Rows of the append that lie in no chunk yet are read from the frame. NO_LEGAL_PATH.
    """
    size = store.layout.chunk_tokens
    state = append.session.layers[append.layer]
    wanted = range(-(-visible // size)) if chunks is None else chunks
    reads: list[ChunkRead] = []
    labels: dict[str, str] = {}
    simulated = False
    for chunk in wanted:
        rows = min(size, visible - chunk * size)
        line = state.lines[chunk] if chunk < len(state.lines) else NO_LINE
        if line == NO_LINE:
            reads.append(ChunkRead(chunk, rows, NO_LINE, FRAME_TIER, Path.FRAME))
            labels.setdefault("frame:partial", "rows of this request")
            continue
        _check_published(store, append, chunk, line)
        tier_index = int(store.directory.tier[line])
        tier = store.tiers[tier_index]
        path, why = legal_path(tier)
        reads.append(ChunkRead(chunk, rows, line, tier_index, path))
        labels.setdefault(f"{tier.medium.value}:{path.value}", why)
        simulated = simulated or tier.simulated
    return Plan(
        reads=tuple(reads),
        labels=tuple(labels),
        why=tuple(f"{label}: {why}" for label, why in labels.items()),
        simulated=simulated,
    )


def _check_published(store: Rows, append: Append, chunk: int, line: int) -> None:
    if int(store.directory.state[line]) not in (ChunkState.OPEN, ChunkState.SEALED):
        raise CoreError(Reason.NOT_VISIBLE, f"chunk {chunk} of layer {append.layer} is not published")


BY_TIME = DeclaredCost()


@dataclass(frozen=True, slots=True)
class PlanTerms:
    """The cache's side of a decision. fallbacks, approximation_allowed: its contract's. preference: its
    placement policy's. recompute, retry: declared seconds of computing the rows again and of a later try;
    UNAVAILABLE: nobody declares them."""

    cost: DeclaredCost = BY_TIME
    preference: PlacementPreference = RECENCY
    fallbacks: frozenset[Fallback] = frozenset()
    approximation_allowed: bool = False
    recompute: float = UNAVAILABLE
    retry: float = UNAVAILABLE


class StepPlanner:
    """Plans of one engine's frames. Its lock is held. rates and the tiers' bandwidths are read once: they are
    measured when the engine starts."""

    def __init__(
        self,
        store: Rows,
        *,
        query_heads: int,
        credits: Credits,
        rates: Rates,
        terms: PlanTerms,
    ) -> None:
        self._store = store
        self._query_heads = query_heads
        self._held = self._credits = credits
        self._rates = rates
        self.terms = terms
        self._tiers = tuple(tier_facts(tier) for tier in store.tiers)
        self._labels = {
            (index, path): f"{tier.medium}:{path.value}"
            for index, tier in enumerate(self._tiers)
            for path in Path
        }
        self._kept: dict[tuple[bytes, int], tuple[tuple[Candidate, ...], Decision]] = {}
        self.prices = rates.row_seconds is not None
        """Whether plans have predicted times at all."""
        self.decided = 0

    def beside(self) -> StepPlanner:
        """Another one over the same rows and tiers, which may prefer otherwise."""
        return StepPlanner(
            self._store,
            query_heads=self._query_heads,
            credits=self._held,
            rates=self._rates,
            terms=self.terms,
        )

    def prefer(self, preference: PlacementPreference) -> None:
        """From the next decision on; what was decided is forgotten."""
        self.terms = replace(self.terms, preference=preference)
        most = self._held.staging_bytes
        if preference.staging_bytes is not None:
            # Slices of heads adapt to what they may take, so they must know it before they are priced.
            most = min(most, preference.staging_bytes)
        self._credits = replace(self._held, staging_bytes=most)
        self._kept.clear()

    def plan(
        self,
        append: Append,
        visible: int,
        *,
        queries: int,
        slack: float | None = None,
        forced: PlanKind | None = None,
        failed: frozenset[PlanKind] = frozenset(),
    ) -> Plan:
        """All rows [0, visible) by the plan of least declared cost that ends within `slack` seconds. DEADLINE
        when a legal one would but for the time, NO_LEGAL_PATH otherwise; the facts name the contract's
        fallback and why each plan lost."""
        lines, where = self._where(append, visible)
        plans, usual = self._priced(where, visible, queries)
        decision = usual
        chosen = usual.chosen
        in_time = slack is None or (chosen is not None and slack > 0.0 and (chosen.seconds or 0.0) <= slack)
        if forced is not None or failed or chosen is None or not in_time:
            terms = replace(self._usual_terms(), slack=slack)
            decision = decide(plans, terms, self.terms.preference, forced=forced, failed=failed)
            chosen = decision.chosen
        if chosen is None:
            raise self._refusal(decision)
        return self._plan(chosen, decision, lines, where, visible)

    def inspect(self, append: Append, visible: int, queries: int = 1) -> Decision:
        """What is decided for these rows when there is no deadline: every plan with its price, or why it
        lost."""
        _, where = self._where(append, visible)
        return self._priced(where, visible, queries)[1]

    def _where(self, append: Append, visible: int) -> tuple[list[int], tuple[int, ...]]:
        store = self._store
        state = append.session.layers[append.layer]
        count = -(-visible // store.layout.chunk_tokens)
        lines = state.lines[:count]
        states, tiers = store.directory.cells("state"), store.directory.cells("tier")
        where = []
        for chunk, line in enumerate(lines):
            if line == NO_LINE or states[line] not in (ChunkState.OPEN, ChunkState.SEALED):
                raise CoreError(Reason.NOT_VISIBLE, f"chunk {chunk} of layer {append.layer} is not published")
            where.append(tiers[line])
        missing = count - len(lines)
        return lines + [NO_LINE] * missing, (*where, *((FRAME_TIER,) * missing))

    def _usual_terms(self) -> Terms:
        return Terms(
            approximation_allowed=self.terms.approximation_allowed,
            fallbacks=self.terms.fallbacks,
            recompute=self.terms.recompute,
            retry=self.terms.retry,
        )

    def _priced(
        self, where: tuple[int, ...], visible: int, queries: int
    ) -> tuple[tuple[Candidate, ...], Decision]:
        """Priced for a full last chunk, so that a token more changes no plan."""
        layout = self._store.layout
        key = (bytes(tier + 1 for tier in where), queries)
        found = self._kept.get(key)
        if found is None:
            facts = StepFacts(
                where=where,
                last_rows=layout.chunk_tokens,
                chunk_tokens=layout.chunk_tokens,
                payload_bytes=layout.payload_bytes,
                query_heads=self._query_heads,
                kv_heads=layout.kv_heads,
                head_dim=layout.head_dim,
                queries=queries,
            )
            plans = candidates(
                facts,
                self._tiers,
                self._credits,
                self._rates,
                self.terms.cost,
                self.terms.preference.group_heads,
            )
            if len(self._kept) == MAX_KEPT:
                self._kept.clear()
            self.decided += 1
            found = self._kept[key] = (plans, decide(plans, self._usual_terms(), self.terms.preference))
        return found

    def _refusal(self, decision: Decision) -> CoreError:
        assert decision.fallback is not None
        late = any(plan.lost is Lost.DEADLINE for plan in decision.considered)
        reason = Reason.DEADLINE if late else Reason.NO_LEGAL_PATH
        facts: dict[str, object] = {"fallback": decision.fallback.value, **decision.why()}
        what = "no exact plan ends in time" if late else "no exact plan is legal"
        return CoreError(reason, f"{what}: {decision.fallback.value}", facts)

    def _plan(
        self,
        chosen: Candidate,
        decision: Decision,
        lines: Sequence[int],
        where: Sequence[int],
        visible: int,
    ) -> Plan:
        assert isinstance(chosen.kind, PlanKind)
        size = self._store.layout.chunk_tokens
        paths = {tier: _PATHS[route] for tier, route in chosen.routes}
        paths[FRAME_TIER] = Path.FRAME
        reads: list[ChunkRead] = []
        labels: dict[str, None] = {}
        simulated = False
        for chunk, (line, tier) in enumerate(zip(lines, where, strict=True)):
            path = paths[tier]
            reads.append(ChunkRead(chunk, min(size, visible - chunk * size), line, tier, path))
            if tier == FRAME_TIER:
                labels["frame:partial"] = None
                continue
            labels[self._labels[tier, path]] = None
            simulated = simulated or self._store.tiers[tier].simulated
        return Plan(
            reads=tuple(reads),
            labels=tuple(labels),
            why=(),
            simulated=simulated,
            kind=chosen.kind,
            group_heads=chosen.group_heads,
            lost=decision.why(),
            seconds=chosen.seconds,
            buffers=chosen.buffers,
        )
