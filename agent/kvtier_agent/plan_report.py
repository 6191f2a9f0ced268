"""The plan of a cache on this node, from what its engine measured, and how it goes on the wire.

It decides nothing about rows and reads no clock after the engine was built. Arithmetic is the core's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvtier.v1 import control_pb2
from kvtier_core.computeprobe import ComputeFigures, measure_compute
from kvtier_core.engine import STAGING_BUFFERS
from kvtier_core.layout import ChunkLayout
from kvtier_core.nodeplan import NodePlan, TierFigures
from kvtier_core.placements.policy import policy_of
from kvtier_core.placements.preference import PlacementPreference
from kvtier_core.policyplan import policy_plan, preference_of
from kvtier_core.receipts import TierStats
from kvtier_core.tiers.base import slot_stride, slots_for
from kvtier_core.tiers.staging import block_bytes
from kvtier_core.units import BytesPerSecond
from kvtier_crds.manifest import Medium, Placement, RuntimeManifest, TierRole


class PlanReporter:
    """One engine's. `compute` is measured once, when the engine is built; tiers' figures come with each
    question, and the plan is made anew when one of them is another."""

    def __init__(self, manifest: RuntimeManifest, compute: ComputeFigures) -> None:
        self._manifest = manifest
        self._geometry = geometry = manifest.model.geometry
        self._layout = ChunkLayout(geometry.kv_heads, manifest.chunk_tokens, geometry.head_dim)
        self._roles = {tier.tier_class_name: tier.role for tier in manifest.tiers}
        self._policy = policy_of(manifest.placement)
        self._compute = compute
        self._known: tuple[Sequence[TierFigures], NodePlan | None] | None = None

    def placed(self, placement: Placement) -> PlanReporter:
        """For the same manifest placed otherwise, by the same figures of the processor."""
        return PlanReporter(self._manifest.model_copy(update={"placement": placement}), self._compute)

    def of(self, tiers: Sequence[TierStats]) -> NodePlan | None:
        """The plan of the manifest's policy over the engine's tiers, in the manifest's order. None: nothing
        can be said, see `node_plan`."""
        figures = [tier_figures(tier, self._roles[tier.class_name], self._layout) for tier in tiers]
        if self._known is None or self._known[0] != figures:
            geometry = self._geometry
            plan = policy_plan(
                self._policy,
                geometry.layers,
                geometry.query_heads,
                self._layout,
                figures,
                self._compute,
                STAGING_BUFFERS,
            )
            self._known = (figures, plan)
        return self._known[1]

    def preference(self, tiers: Sequence[TierStats]) -> PlacementPreference:
        """What the manifest's policy asks of steps and of chunks' homes on this node."""
        plan = self.of(tiers)
        return preference_of(self._policy) if plan is None else plan.preference


def reporter_of(manifest: RuntimeManifest, clock: Callable[[], float] = time.perf_counter) -> PlanReporter:
    """Measures this node's processor with the manifest's layout, in about 20 ms of the calling thread."""
    geometry = manifest.model.geometry
    layout = ChunkLayout(geometry.kv_heads, manifest.chunk_tokens, geometry.head_dim)
    return PlanReporter(manifest, measure_compute(layout, geometry.query_heads, clock))


def tier_figures(stats: TierStats, role: TierRole, layout: ChunkLayout) -> TierFigures:
    """A gpu tier is read in place only where it is simulated: the host forms all states in this version."""
    storage = stats.medium == Medium.NVME
    in_place = stats.medium == Medium.CPU or (stats.medium == Medium.GPU and stats.simulated)
    read, write = stats.read_bytes_per_second, stats.write_bytes_per_second
    return TierFigures(
        name=stats.class_name,
        in_place=in_place,
        slots=slots_for(stats.capacity_bytes, block_bytes(layout) if storage else slot_stride(layout)),
        rows=role is not TierRole.STAGING,
        read=BytesPerSecond(read) if read > 0.0 else None,
        medium=stats.medium,
        write=BytesPerSecond(write) if write > 0.0 else None,
    )


def plan_message(plan: NodePlan) -> control_pb2.PlanState:
    return control_pb2.PlanState(
        predicted_stall_seconds=plan.stall,
        schedule=plan.schedule or "",
        kappa_crit=plan.kappa,
        link_bytes_per_second=0.0 if plan.link is None else plan.link.value,
        compute_flop_per_second=0.0 if plan.compute is None else plan.compute.value,
        bytes_per_token=plan.bytes_per_token,
        inputs=dict(plan.inputs),
        policy=plan.policy,
        considered=[
            control_pb2.PlanAlternative(name=item.name, lost=item.lost, seconds=item.seconds)
            for item in plan.considered
        ],
    )
