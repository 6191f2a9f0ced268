"""Every plan of a step, legal or not, each with its price or with why it has none.

Why it exists: "why was this plan not taken" must have an answer for each of them, also for those that no tier
permits. It must not choose. Times come from the recurrence of C.1 over chunks: one copy engine, as
many slots as there are buffers, the processor of the node as the only computing stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from kvtier_core.pipeline import LayerCost
from kvtier_core.placements.preference import PlanKind
from kvtier_core.planning.facts import FRAME, Credits, DeclaredCost, Rates, StepFacts, TierFacts


class Approximate(StrEnum):
    """Plans that leave rows out. They are considered so that it is on record why an exact request had
    none."""

    SELECTED_SUPPORT = "selectedSupport"


PlanName = PlanKind | Approximate


class Lost(StrEnum):
    """Why a plan was not taken. Stable."""

    TIER_INCAPABLE = "TIER_INCAPABLE"
    REQUEST_SPLIT = "REQUEST_SPLIT"
    STAGING_TOO_SMALL = "STAGING_TOO_SMALL"
    PLACEMENT_POLICY = "PLACEMENT_POLICY"
    UNDECLARED_APPROXIMATION = "UNDECLARED_APPROXIMATION"
    NOT_ASKED_FOR = "NOT_ASKED_FOR"
    UNMEASURED = "UNMEASURED"
    DEADLINE = "DEADLINE"
    NOT_PREFERRED = "NOT_PREFERRED"
    COST = "COST"
    FAILED = "FAILED"


class Route(StrEnum):
    """How a chunk's rows come to attention. IN_PLACE: where they are. NEAR: through a bounded buffer beside
    their tier, which returns states. MOVED: into the compute tier's staging. SLICED: the same by KV heads."""

    IN_PLACE = "inPlace"
    NEAR = "near"
    MOVED = "moved"
    SLICED = "sliced"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan. routes: by tier index, of tiers with rows (FRAME included). group_heads: KV heads of a slice, 0
    for whole blocks. seconds, exposed, hidden: predicted service, transfer that it waits for and that it does
    not; cost: declared; all None when something was not measured. moved: bytes that leave their tier.
    staging: bytes of buffers at the peak. lost: why it is no candidate at all; None while it is one.
    buffers: that a stream of its whole blocks may hold at once."""

    kind: PlanName
    routes: tuple[tuple[int, Route], ...] = ()
    group_heads: int = 0
    seconds: float | None = None
    exposed: float | None = None
    hidden: float | None = None
    cost: float | None = None
    moved: int = 0
    staging: int = 0
    lost: Lost | None = None
    buffers: int = 0

    def route(self, tier: int) -> Route:
        return dict(self.routes)[tier]


ORDER: tuple[PlanKind, ...] = (
    PlanKind.REQUEST_ON_CPU,
    PlanKind.SUPPORT_PARTITION,
    PlanKind.ALL_ROWS_MOVED,
    PlanKind.HEAD_GROUPS,
)
"""In which ties are broken."""


def candidates(
    facts: StepFacts,
    tiers: Sequence[TierFacts],
    credits: Credits,
    rates: Rates,
    cost: DeclaredCost,
    group_heads: int | None = None,
) -> tuple[Candidate, ...]:
    """The four exact plans in ORDER. group_heads: KV heads of a slice; None: the fewest slices that fit."""
    return (
        _priced(_on_cpu(facts, tiers), facts, tiers, credits, rates, cost),
        _priced(_partition(facts, tiers), facts, tiers, credits, rates, cost),
        _priced(_moved(facts, tiers), facts, tiers, credits, rates, cost),
        _priced(_head_groups(facts, tiers, credits, group_heads), facts, tiers, credits, rates, cost),
    )


def compute_tier(tiers: Sequence[TierFacts]) -> int | None:
    """Where moved rows are attended: the first tier whose memory is attended in place."""
    return next((index for index, tier in enumerate(tiers) if tier.in_place), None)


def _present(facts: StepFacts) -> list[int]:
    return sorted(set(facts.where))


def _refused(kind: PlanKind, why: Lost) -> Candidate:
    return Candidate(kind, lost=why)


def _on_cpu(facts: StepFacts, tiers: Sequence[TierFacts]) -> Candidate:
    """NEO: the request's rows lie on the CPU's side, all of them, and stay there."""
    kind = PlanKind.REQUEST_ON_CPU
    present = [tier for tier in _present(facts) if tier != FRAME]
    if any(tiers[tier].medium != "cpu" for tier in present):
        return _refused(kind, Lost.REQUEST_SPLIT)
    if any(not tiers[tier].in_place for tier in present):
        return _refused(kind, Lost.TIER_INCAPABLE)
    return Candidate(kind, tuple((tier, Route.IN_PLACE) for tier in _present(facts)))


def _partition(facts: StepFacts, tiers: Sequence[TierFacts]) -> Candidate:
    """Each tier's rows where they are: in place, or streamed past the processor beside storage. Rows in
    memory that may not be attended there come to the compute tier."""
    routes: list[tuple[int, Route]] = []
    for tier in _present(facts):
        if tier == FRAME or tiers[tier].in_place:
            routes.append((tier, Route.IN_PLACE))
        elif tiers[tier].source:
            routes.append((tier, Route.NEAR if tiers[tier].storage else Route.MOVED))
        else:
            return _refused(PlanKind.SUPPORT_PARTITION, Lost.TIER_INCAPABLE)
    return Candidate(PlanKind.SUPPORT_PARTITION, tuple(routes))


def _moved(facts: StepFacts, tiers: Sequence[TierFacts]) -> Candidate:
    """All rows come to the compute tier, block by block through its staging."""
    target = compute_tier(tiers)
    routes: list[tuple[int, Route]] = []
    for tier in _present(facts):
        if tier in (FRAME, target):
            routes.append((tier, Route.IN_PLACE))
        elif tiers[tier].source:
            routes.append((tier, Route.MOVED))
        else:
            return _refused(PlanKind.ALL_ROWS_MOVED, Lost.TIER_INCAPABLE)
    return Candidate(PlanKind.ALL_ROWS_MOVED, tuple(routes))


def _head_groups(
    facts: StepFacts, tiers: Sequence[TierFacts], credits: Credits, wanted: int | None
) -> Candidate:
    """HeadInfer: the history that is not in the compute tier comes in slices of KV heads, two at a time."""
    kind = PlanKind.HEAD_GROUPS
    target = compute_tier(tiers)
    routes: list[tuple[int, Route]] = []
    away = 0
    for tier in _present(facts):
        if tier in (FRAME, target):
            routes.append((tier, Route.IN_PLACE))
            continue
        if not (tiers[tier].source and tiers[tier].by_head):
            return _refused(kind, Lost.TIER_INCAPABLE)
        routes.append((tier, Route.SLICED))
        away += sum(1 for at in facts.where if at == tier)
    heads = facts.kv_heads if wanted is None else min(wanted, facts.kv_heads)
    # Two buffers of one slice each; a slice is all blocks' rows of its heads (F31).
    one_head = away * facts.payload_bytes // facts.kv_heads
    if wanted is None and one_head:
        heads = max(1, min(facts.kv_heads, credits.staging_bytes // (2 * one_head)))
    return Candidate(kind, tuple(routes), group_heads=heads, staging=2 * heads * one_head)


def _priced(
    plan: Candidate,
    facts: StepFacts,
    tiers: Sequence[TierFacts],
    credits: Credits,
    rates: Rates,
    cost: DeclaredCost,
) -> Candidate:
    """The plan with its bytes, its buffers and, when all it needs was measured, its times."""
    if plan.lost is not None:
        return plan
    routes = dict(plan.routes)
    away = [chunk for chunk, tier in enumerate(facts.where) if routes[tier] is not Route.IN_PLACE]
    moved = len(away) * facts.payload_bytes
    # A stream does with fewer buffers than it may have, down to one.
    buffers = max(1, min(credits.buffers, credits.staging_bytes // facts.payload_bytes))
    staging = plan.staging or min(buffers, len(away)) * facts.payload_bytes
    lost = Lost.STAGING_TOO_SMALL if staging > credits.staging_bytes else None
    bare = replace(plan, moved=moved, staging=staging, lost=lost, buffers=buffers)
    unmeasured = any(tiers[facts.where[chunk]].read is None for chunk in away)
    if rates.row_seconds is None or unmeasured:
        return bare
    costs = _slices(plan, facts, tiers, rates) if plan.group_heads else _blocks(routes, facts, tiers, rates)
    service, stall, fetch = streamed(costs, 2 if plan.group_heads else buffers)
    charged = cost.second * service + cost.moved_byte * moved + cost.staged_byte * staging
    hidden = max(0.0, fetch - stall)
    return replace(bare, seconds=service, exposed=stall, hidden=hidden, cost=charged)


def streamed(costs: Sequence[LayerCost], slots: int) -> tuple[float, float, float]:
    """(service, stall, fetch) of pieces in order, seconds: the recurrence of C.1, but that only what is
    fetched takes one of the `slots` buffers: s^F = max(engine free, end of the piece that had the buffer
    before)."""
    free = before = stall = fetch = 0.0
    ends: list[float] = []
    for cost in costs:
        ready = 0.0
        if cost.fetch is not None:
            ready = free = max(free, ends[-slots] if len(ends) >= slots else 0.0) + cost.fetch
            fetch += cost.fetch
        begin = max(before, ready)
        stall += begin - before
        before = begin + cost.compute
        if cost.fetch is not None:
            ends.append(before)
    return before, stall, fetch


def _fetch(tier: TierFacts, size: int, rates: Rates) -> float:
    assert tier.read is not None
    return rates.setup + tier.read.seconds(size)


def _blocks(
    routes: dict[int, Route], facts: StepFacts, tiers: Sequence[TierFacts], rates: Rates
) -> list[LayerCost]:
    """Chunks ascending: fetched whole, or there already."""
    return [
        LayerCost(
            None if routes[tier] is Route.IN_PLACE else _fetch(tiers[tier], facts.payload_bytes, rates),
            rates.compute(facts, facts.rows_of(chunk)),
        )
        for chunk, tier in enumerate(facts.where)
    ]


def _slices(plan: Candidate, facts: StepFacts, tiers: Sequence[TierFacts], rates: Rates) -> list[LayerCost]:
    """Groups of KV heads ascending: each group's rows of all blocks are one transfer."""
    routes = dict(plan.routes)
    compute = rates.compute(facts, facts.rows)
    found: list[LayerCost] = []
    for low in range(0, facts.kv_heads, plan.group_heads):
        share = min(plan.group_heads, facts.kv_heads - low) / facts.kv_heads
        fetch = sum(
            _fetch(tiers[tier], round(facts.payload_bytes * share), rates)
            for tier in facts.where
            if routes[tier] is Route.SLICED
        )
        found.append(LayerCost(fetch or None, compute * share))
    return found
