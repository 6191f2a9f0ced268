"""A placement policy on one node: its own arithmetic over what was declared and what was measured there.

Why it exists: a policy knows shares, groups or sub-batches, a node knows tiers and bandwidths, and the status
of a cache wants one plan with its numbers and with why nothing else was taken. Pure: it must not know live
tiers, sessions, clocks or the status. A policy that finds no plan is told as such, with its reason; the cache
is served all the same, by recency and the least cost of each step.

All seconds are of one token. Numbers of FlexGen and NEO rest on declared constants of the engine and are
predictions, which no part of this agent has measured as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier_core.computeprobe import ComputeFigures
from kvtier_core.cost import KvGeometry
from kvtier_core.exact_placements import PlacementRefused
from kvtier_core.layout import FLOAT_BYTES, ChunkLayout
from kvtier_core.nodeplan import TEXT, Alternative, NodePlan, TierFigures, node_plan
from kvtier_core.placements import flexgen, headgroups, wholerequest
from kvtier_core.placements.policy import FlexGen, HeadGroups, Policy, Recency, WholeRequest
from kvtier_core.placements.preference import PlacementPreference, PlanKind, TierShare
from kvtier_core.units import BytesPerSecond

MEDIA = ("gpu", "cpu", "nvme")
MAX_REQUESTS = 64
MAX_CONSIDERED = 12
ZIGZAG_BLOCK, HEAD_STAGING = "zigzagBlock", "headStaging"


@dataclass(frozen=True, slots=True)
class Node:
    """What all policies go by. row_seconds: attention over one row of one layer."""

    layers: int
    layout: ChunkLayout
    geometry: KvGeometry
    tiers: tuple[TierFigures, ...]
    compute: ComputeFigures
    row_seconds: float

    def chunks(self, medium: str) -> int:
        """Slots of tiers of the medium where rows may stay."""
        return sum(tier.slots for tier in self.tiers if tier.medium == medium and tier.rows)

    def slowest(self, medium: str, *, write: bool = False) -> BytesPerSecond | None:
        """None when a tier of the medium was not measured, or there is none."""
        found = [
            tier.write if write else tier.read for tier in self.tiers if tier.medium == medium and tier.rows
        ]
        known = [rate for rate in found if rate is not None]
        return min(known, key=lambda rate: rate.value) if known and len(known) == len(found) else None


def policy_plan(
    policy: Policy,
    layers: int,
    query_heads: int,
    layout: ChunkLayout,
    tiers: Sequence[TierFigures],
    compute: ComputeFigures,
    buffers: int = 0,
) -> NodePlan | None:
    """The plan of `policy` over `tiers`, fastest first; None as `node_plan` says nothing."""
    if isinstance(policy, Recency):
        return node_plan(layers, query_heads, layout, tiers, compute, buffers)
    if compute.row_seconds is None:
        return None
    geometry = KvGeometry(layers, query_heads, layout.kv_heads, layout.head_dim, FLOAT_BYTES, FLOAT_BYTES)
    node = Node(layers, layout, geometry, tuple(tiers), compute, compute.row_seconds)
    try:
        if isinstance(policy, FlexGen):
            return _flex_gen(policy, node)
        if isinstance(policy, HeadGroups):
            return _head_groups(policy, node)
        return _whole_request(policy, node)
    except PlacementRefused as refused:
        return _made(
            node, policy.name, {"reason": refused.reason.value, "detail": str(refused)}, preference_of(policy)
        )


def preference_of(policy: Policy, shares: tuple[TierShare, ...] = ()) -> PlacementPreference:
    """What the policy asks of each step. Only a whole request forbids anything: its rows are never attended
    in parts on several tiers."""
    if isinstance(policy, FlexGen):
        here = policy.site is flexgen.AttentionSite.HOST
        prefer = PlanKind.SUPPORT_PARTITION if here else PlanKind.ALL_ROWS_MOVED
        return PlacementPreference(policy.name, prefer=prefer, shares=shares)
    if isinstance(policy, HeadGroups):
        return PlacementPreference(
            policy.name,
            prefer=PlanKind.HEAD_GROUPS,
            group_heads=policy.group_heads,
            staging_bytes=policy.staging,
        )
    if isinstance(policy, WholeRequest):
        allowed = frozenset({PlanKind.REQUEST_ON_CPU, PlanKind.ALL_ROWS_MOVED})
        return PlacementPreference(policy.name, allowed, PlanKind.REQUEST_ON_CPU, whole=True)
    return PlacementPreference(policy.name)


def _made(
    node: Node,
    name: str,
    inputs: dict[str, str],
    preference: PlacementPreference,
    *,
    stall: float | None = None,
    schedule: str | None = None,
    link: BytesPerSecond | None = None,
    considered: Sequence[Alternative] = (),
) -> NodePlan:
    return NodePlan(
        stall=stall,
        schedule=schedule,
        kappa=None,
        link=link,
        compute=node.compute.flops,
        bytes_per_token=node.geometry.token.value,
        inputs={key[:TEXT]: value[:TEXT] for key, value in inputs.items()},
        policy=name,
        considered=tuple(considered)[:MAX_CONSIDERED],
        preference=preference,
    )


def _flex_gen(policy: FlexGen, node: Node) -> NodePlan:
    gpu, cpu, disk = (node.chunks(medium) * node.layout.payload_bytes for medium in MEDIA)
    paths = flexgen.Paths(
        cpu_to_gpu=node.slowest("gpu", write=True),
        gpu_to_cpu=node.slowest("gpu"),
        disk_to_cpu=node.slowest("nvme"),
        cpu_to_disk=node.slowest("nvme", write=True),
    )
    given = flexgen.JointInputs(
        layers=node.layers,
        row=node.geometry.row,
        budgets=(gpu, cpu, disk),
        paths=paths,
        engine=policy.engine,
        prompt=policy.prompt,
        output=policy.output,
        batch=policy.batch,
        max_batches=policy.max_batches,
        site=policy.site,
        # The host forms all states in this version.
        device_row=node.row_seconds,
        host_row=node.row_seconds,
        grid=policy.grid,
    )
    plan = flexgen.search(given)
    best = plan.best
    assert best.prefill is not None and best.decode is not None
    kv = best.point.kv
    inputs = {
        "contextTokens": str(policy.prompt + policy.output),
        "kvShares": f"gpu {kv.gpu:.3g}, cpu {kv.cpu:.3g}, disk {kv.disk:.3g}",
        "blockBatches": str(best.point.batches),
        "tokensPerSecond": f"{best.rate:.5g}",
        "decodeBoundBy": f"{best.decode.bound.value} {best.decode.seconds:.4g} s a layer",
        "prefillBoundBy": f"{best.prefill.bound.value} {best.prefill.seconds:.4g} s a layer",
        "limitedBy": "nothing on the grid" if plan.limit is None else f"{plan.limit.value}, x{plan.gain:.4g}",
        "gridPoints": str(plan.points),
        "lostPoints": ", ".join(
            f"{why.value} {count}" for why, count in sorted(plan.counts.items()) if count
        ),
    }
    corners = [
        Alternative(name, "" if item.refused is None else item.refused.value, _token(item.rate))
        for name, item in plan.corners
    ]
    stall = node.layers * (best.decode.seconds - best.decode.compute)
    return _made(
        node,
        policy.name,
        inputs,
        preference_of(policy, _shares(node, kv)),
        stall=stall,
        schedule=ZIGZAG_BLOCK,
        link=paths.cpu_to_gpu,
        considered=corners,
    )


def _token(rate: float) -> float | None:
    return 1.0 / rate if rate > 0.0 else None


def _shares(node: Node, kv: flexgen.Split) -> tuple[TierShare, ...]:
    """Of each medium to its tiers, by their slots."""
    found: list[TierShare] = []
    for medium, share in zip(MEDIA, (kv.gpu, kv.cpu, kv.disk), strict=True):
        whole = node.chunks(medium)
        for index, tier in enumerate(node.tiers):
            if share and tier.medium == medium and tier.rows:
                found.append(TierShare(index, share * tier.slots / whole))
    return tuple(found)


def _head_groups(policy: HeadGroups, node: Node) -> NodePlan:
    """Of the longest session whose history one KV head at a time still fits the staging. Rows of the first
    tier stay; those in host memory below come in slices. Storage verifies whole blocks, so it gives none."""
    tokens = node.layout.chunk_tokens
    homes = [tier for tier in node.tiers if tier.rows]
    placed = [tier for tier in homes if tier.in_place]
    storage = [Alternative(tier.name, "TIER_INCAPABLE", None) for tier in homes if not tier.in_place]
    resident = placed[0].slots // node.layers if placed else 0
    below = placed[1:]
    most = sum(tier.slots // node.layers for tier in below)
    heads = policy.group_heads or 1
    fits = headgroups.longest_context(node.geometry, heads, policy.staging) // tokens
    cold = min(most, fits)
    rates = [tier.read for tier in below if tier.read is not None]
    inputs = {
        "contextTokens": str((resident + cold) * tokens),
        "coldTokens": str(cold * tokens),
        "stagingBytes": str(policy.staging),
        "attentionSecondsPerRow": f"{node.row_seconds:.6g}",
        "launchSeconds": "not declared" if policy.launch is None else f"{policy.launch:.6g}",
    }
    preference = preference_of(policy)
    if not cold or len(rates) < len(below):
        why = "UNMEASURED" if cold else "STAGING_TOO_SMALL" if most else "NOTHING_AWAY"
        stall = 0.0 if why == "NOTHING_AWAY" else None
        return _made(node, policy.name, inputs | {"reason": why}, preference, stall=stall, considered=storage)
    link = min(rates, key=lambda rate: rate.value)
    given = headgroups.HeadInputs(
        geometry=node.geometry,
        tokens=(resident + cold) * tokens,
        cold=cold * tokens,
        staging=policy.staging,
        link=link,
        launch=policy.launch,
        row_seconds=node.row_seconds,
        group_heads=policy.group_heads,
    )
    plan = headgroups.plan_groups(given)
    best = plan.chosen
    inputs |= {
        "linkBytesPerSecond": f"{link.value:.6g}",
        "groups": f"{best.groups} of up to {best.heads} KV heads",
        "reservedBytes": f"{best.reserved}, twice {best.slice_bytes}",
        "serviceSeconds": f"{best.service:.6g}",
        "wholeUpToTokens": str(
            headgroups.longest_context(node.geometry, node.geometry.kv_heads, policy.staging)
        ),
    }
    others = [
        Alternative(f"{item.groups} groups of {item.heads}", item.lost.value, item.service)
        for item in plan.considered
        if item.lost is not None
    ]
    return _made(
        node,
        policy.name,
        inputs,
        preference,
        stall=best.stall,
        schedule=HEAD_STAGING,
        link=link,
        considered=[*others, *storage],
    )


def _whole_request(policy: WholeRequest, node: Node) -> NodePlan:
    """One iteration of as many requests of `context` rows as each side holds, at most MAX_REQUESTS."""
    each = -(-policy.context // node.layout.chunk_tokens) * node.layers
    counts = [min(MAX_REQUESTS, node.chunks(medium) // each) for medium in ("gpu", "cpu")]
    rows = policy.context
    measured = policy.cpu or wholerequest.Curve(
        ((MAX_REQUESTS * rows, MAX_REQUESTS * rows * node.row_seconds),)
    )
    profile = wholerequest.Profile(policy.linear, policy.gpu, measured)
    sides = (wholerequest.Side.GPU, wholerequest.Side.CPU)
    requests = [
        wholerequest.Request(f"{side.value}-{index}", side, 1, rows)
        for side, count in zip(sides, counts, strict=True)
        for index in range(count)
    ]
    plan = wholerequest.choose_iteration(requests, profile, node.layers)
    plan.contract().check()
    terms = plan.terms
    other = (
        wholerequest.Iteration.GPU_ONLY
        if plan.kind is wholerequest.Iteration.HETEROGENEOUS
        else wholerequest.Iteration.HETEROGENEOUS
    )
    inputs = {
        "contextTokens": str(policy.context),
        "requests": f"{counts[0]} on gpu, {counts[1]} on cpu",
        "subBatches": f"{len(plan.first)} and {len(plan.second)}, {len(plan.waiting)} wait",
        "tokensPerSecond": f"{plan.rate:.5g}",
        "iterationSeconds": f"{plan.seconds:.6g}",
        "linearSeconds": f"{terms.linear_0:.4g} and {terms.linear_1:.4g} a layer",
        "cpuAttentionSeconds": f"{terms.cpu_0:.4g} and {terms.cpu_1:.4g} a layer",
        "gpuAttentionSeconds": f"{terms.gpu_0:.4g} a layer",
        "balanced": "yes" if terms.balanced() else "no",
        "cpuProfile": "measured by the agent" if policy.cpu is None else "declared",
    }
    busy = node.layers * (terms.linear_0 + terms.linear_1 + terms.gpu_0)
    return _made(
        node,
        policy.name,
        inputs,
        preference_of(policy),
        stall=max(0.0, plan.seconds - busy),
        schedule=plan.kind.value,
        considered=[Alternative(other.value, plan.lost.value, _token(plan.other))],
    )
