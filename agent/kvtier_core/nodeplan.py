"""The plan of one cache on one node: which rows lie away when its tiers are full, and what a token waits.

Why it exists: a spec states budgets, a node has bandwidths, and only both together say how long a token waits
for rows. Pure: it must not know live tiers, sessions, clocks or the status that it ends in.

The plan is of the longest session: one that fills every tier that rows may lie in. Rows lie away when they
are in tiers that attention reads through copies; where there is none, when they are outside the first tier.
The compute tier keeps as many rows as leave room for two staging slots of a layer, where rows are copied. A
session is planned no longer than such slots can carry: beyond that nothing is legal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvtier_core.cacheplan import CachePlan, PlanInputs, plan_cache
from kvtier_core.computeprobe import ComputeFigures
from kvtier_core.cost import KvGeometry
from kvtier_core.layout import FLOAT_BYTES, ChunkLayout
from kvtier_core.placements.preference import RECENCY, PlacementPreference
from kvtier_core.units import BytesPerSecond, FlopPerSecond

TEXT = 63


@dataclass(frozen=True, slots=True)
class TierFigures:
    """in_place: attention reads its memory without a copy. slots: whole chunks of one layer that its budget
    pays. rows: whether rows may stay (a tier of role staging is nobody's home). read: measured, of whole,
    verified chunks into host memory, what it takes to begin one included; write: the other way; None: not
    measured. medium: gpu, cpu, nvme or remote."""

    name: str
    in_place: bool
    slots: int
    rows: bool
    read: BytesPerSecond | None
    medium: str = "cpu"
    write: BytesPerSecond | None = None


@dataclass(frozen=True, slots=True)
class Alternative:
    """What was weighed beside the plan. lost: why it is not the plan. seconds: of a token, as predicted;
    None: it could not be priced."""

    name: str
    lost: str
    seconds: float | None


@dataclass(frozen=True, slots=True)
class NodePlan:
    """stall: seconds per token, None when no schedule is legal. schedule: of rows that lie away, None when
    none is legal or no row does. kappa: None when an operand is unknown here; link, compute and
    bytes_per_token are the others. inputs: the numbers it was made of, for people, each with its unit in its
    name. policy: whose plan it is; considered: what it was chosen from; preference: what it asks of steps."""

    stall: float | None
    schedule: str | None
    kappa: float | None
    link: BytesPerSecond | None
    compute: FlopPerSecond | None
    bytes_per_token: int
    inputs: Mapping[str, str]
    policy: str = RECENCY.policy
    considered: tuple[Alternative, ...] = ()
    preference: PlacementPreference = RECENCY


@dataclass(frozen=True, slots=True)
class _Split:
    """Chunks of each layer. kept: read in place besides those of the compute tier. away: in the away tiers.
    staging: slots of the compute tier that keep no row."""

    resident: int
    kept: int
    away: int
    staging: int


def node_plan(
    layers: int,
    query_heads: int,
    layout: ChunkLayout,
    tiers: Sequence[TierFigures],
    compute: ComputeFigures,
    buffers: int = 0,
) -> NodePlan | None:
    """The plan over `tiers`, fastest first. buffers: chunks of staging that no tier pays. None when no
    tier can keep a row or attention was not measured: then there is nothing to say. kappa_crit stays None:
    a cache's geometry says neither the model's width nor what its other layers compute, so F_pf is somebody
    else's to state."""
    homes = [tier for tier in tiers if tier.rows]
    if compute.row_seconds is None or not sum(tier.slots // layers for tier in homes):
        return None
    placed = [tier for tier in homes if tier.in_place] or homes[:1]
    away = [tier for tier in homes if not any(tier is each for each in placed)]
    near = None
    if not away:
        placed, away, near = placed[:1], placed[1:], compute.row_seconds
    extra = buffers + sum(tier.slots for tier in tiers if tier.in_place and not tier.rows)
    split = _split(layers, placed, away, extra, copied=near is None)
    link = _link(layers, away, split.away) if away else placed[0].read
    tokens = layout.chunk_tokens
    given = PlanInputs(
        geometry=KvGeometry(layers, query_heads, layout.kv_heads, layout.head_dim, FLOAT_BYTES, FLOAT_BYTES),
        context=(split.resident + split.kept + split.away) * tokens,
        resident=(split.resident + split.kept) * tokens,
        block_tokens=tokens,
        link=link,
        # Whole chunks were measured, and what it takes to begin one is in their bandwidth.
        setup=0.0,
        row_seconds=compute.row_seconds,
        staging=split.staging * layout.payload_bytes,
        near_seconds=near,
        compute=compute.flops,
    )
    plan = plan_cache(given)
    stated = dict(plan.inputs)
    stated["awayTiers"] = ",".join(tier.name for tier in away)[:TEXT] or "none"
    stated["prefillFlopPerToken"] = "not stated; geometry alone does not give it"
    if plan.refused:
        stated["reason"] = ",".join(sorted(set(plan.refused.values())))[:TEXT]
    elif not split.away:
        stated["reason"] = "NOTHING_AWAY"
    return NodePlan(
        stall=plan.stall,
        schedule=plan.schedule if split.away else None,
        kappa=plan.kappa,
        link=link,
        compute=compute.flops,
        bytes_per_token=given.geometry.token.value,
        inputs=stated,
        considered=_considered(plan) if split.away else (),
    )


def _considered(plan: CachePlan) -> tuple[Alternative, ...]:
    """The other schedules. One that could not be priced has no seconds."""
    if plan.choice is None:
        return tuple(Alternative(name, lost, None) for name, lost in plan.refused.items())
    return tuple(
        Alternative(item.schedule.value, item.rejected.value, item.service or None)
        for item in plan.choice.considered
        if item.rejected is not None
    )


def _split(
    layers: int, placed: Sequence[TierFigures], away: Sequence[TierFigures], extra: int, *, copied: bool
) -> _Split:
    """Where the rows of the longest session lie. r chunks of each layer in the compute tier and c away leave
    room for two slots of a layer iff r * layers + 2 * c <= slots. c is the cheaper of the two, above two
    layers; below, one slot is planned: a layer is then copied when it is reached."""
    slots, most = placed[0].slots + extra, placed[0].slots // layers
    kept = sum(tier.slots // layers for tier in placed[1:])
    below = sum(tier.slots // layers for tier in away)
    if not copied:
        return _Split(most, kept, below, slots - most * layers)
    each = 2 if layers > 2 else 1
    cold = min(below, slots // each)
    resident = min(most, (slots - each * cold) // layers)
    if resident + cold <= most:
        resident, cold = most, 0
    return _Split(resident, kept, cold, slots - resident * layers)


def _link(layers: int, away: Sequence[TierFigures], chunks: int) -> BytesPerSecond | None:
    """Bandwidth of one copy engine that reads `chunks` chunks of each layer, the fastest tiers full first.
    None when one of them was not measured."""
    seconds, left = 0.0, chunks
    for tier in away:
        part = min(left, tier.slots // layers)
        if part and tier.read is None:
            return None
        if part and tier.read is not None:
            seconds += part / tier.read.value
            left -= part
    return BytesPerSecond(chunks / seconds) if seconds > 0.0 else away[0].read
