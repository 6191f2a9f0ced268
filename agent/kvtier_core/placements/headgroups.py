"""HeadInfer's head-group staging: how many KV heads one slice holds, and what each choice costs.

Why it exists: all history moves, in slices of KV heads through two buffers, so what lies on the device at
once shrinks with the slice while what moves does not (specification E.4, F31, C5.14 to C5.16). Pure: it must
not know tiers or how a slice is attended. Attention stays on the device; this is no CPU attention.

Adaptive grouping: of the groupings that fit, the one with fewest groups, since each group is a launch and a
transfer of its own. Where the cost of a launch is declared, the one with the least predicted time instead:
large groups pay fewer launches, small ones wait less for the first slice. Groups are evened out: ceil(H_kv /
N) heads lie in each, and no larger slice is reserved than N groups need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvtier_core.cost import KvGeometry
from kvtier_core.exact_placements import (
    ComputeSite,
    HeadGroup,
    HeadGroupStaging,
    PlacementReason,
    PlacementRefused,
)
from kvtier_core.pipeline import LayerCost, Timeline, timeline
from kvtier_core.placements.events import NANOSECONDS, Program, Simulated, simulate
from kvtier_core.units import BytesPerSecond

BUFFERS = 2


class GroupingLost(StrEnum):
    """Why a grouping is not the one."""

    STAGING_TOO_SMALL = "STAGING_TOO_SMALL"
    MORE_LAUNCHES = "MORE_LAUNCHES"
    SLOWER = "SLOWER"


@dataclass(frozen=True, slots=True)
class HeadInputs:
    """tokens: rows of each layer that a step attends, all layers alike; cold: of those that lie away.
    staging: bytes for both buffers. link: measured, to the device. launch: seconds that a slice costs besides
    its bytes and its attention, None: not declared. row_seconds: attention over one row of one layer, all
    heads, on the device. group_heads: a declared size; None: adaptive."""

    geometry: KvGeometry
    tokens: int
    cold: int
    staging: int
    link: BytesPerSecond
    launch: float | None
    row_seconds: float
    group_heads: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.cold <= self.tokens or self.staging < 0 or self.row_seconds < 0.0:
            raise PlacementRefused(PlacementReason.COST_MODEL, f"{self.cold} of {self.tokens} rows are away")
        if self.group_heads is not None:
            self.geometry.head_groups(self.group_heads)


@dataclass(frozen=True, slots=True)
class Grouping:
    """heads: of each group but the last; groups: N = ceil(H_kv / heads). slice_bytes: M_stage of the cold
    rows; reserved: 2 * M_stage. service, stall: seconds of one step over all layers, attention alone. lost:
    None for the chosen one."""

    heads: int
    groups: int
    slice_bytes: int
    reserved: int
    service: float
    stall: float
    lost: GroupingLost | None = None


@dataclass(frozen=True, slots=True)
class GroupingPlan:
    chosen: Grouping
    considered: tuple[Grouping, ...]


def groupings(geometry: KvGeometry) -> list[int]:
    """One size for each number of groups, largest first: N groups need just ceil(H_kv / N) heads each."""
    heads = geometry.kv_heads
    return sorted({-(-heads // count) for count in range(1, heads + 1)}, reverse=True)


def members(geometry: KvGeometry, heads: int) -> list[tuple[int, ...]]:
    """The KV heads of each group, in the model's order."""
    geometry.head_groups(heads)
    return [
        tuple(range(first, min(first + heads, geometry.kv_heads)))
        for first in range(0, geometry.kv_heads, heads)
    ]


def slices(given: HeadInputs, heads: int) -> list[LayerCost]:
    """Fetch and attention of each slice of a step, layer after layer. Attention is shared out by heads; a
    slice without cold rows is not fetched."""
    geometry, launch = given.geometry, given.launch or 0.0
    costs: list[LayerCost] = []
    for group in members(geometry, heads):
        size = geometry.head_group(given.cold, len(group))
        fetch = launch + given.link.seconds(size) if size else None
        share = len(group) / geometry.kv_heads
        costs.append(LayerCost(fetch, given.tokens * given.row_seconds * share))
    return costs * geometry.layers


def plan_groups(given: HeadInputs) -> GroupingPlan:
    """The grouping by the adaptive rule, or the declared one. COST_MODEL when it does not fit the staging,
    with what one KV head needs."""
    sizes = [given.group_heads] if given.group_heads is not None else groupings(given.geometry)
    priced = [_price(given, heads) for heads in sizes]
    fits = [item for item in priced if item.lost is None]
    if not fits:
        least = min(item.reserved for item in priced)
        raise PlacementRefused(
            PlacementReason.COST_MODEL, f"STAGING_TOO_SMALL: {given.staging} bytes, {least} are needed"
        )
    if given.launch is None:
        best, lost = fits[0], GroupingLost.MORE_LAUNCHES
    else:
        best, lost = min(fits, key=lambda item: (item.service, item.groups)), GroupingLost.SLOWER
    named = tuple(
        item
        if item is best or item.lost is not None
        else Grouping(
            item.heads, item.groups, item.slice_bytes, item.reserved, item.service, item.stall, lost
        )
        for item in priced
    )
    return GroupingPlan(best, named)


def _price(given: HeadInputs, heads: int) -> Grouping:
    geometry = given.geometry
    size = geometry.head_group(given.cold, heads)
    times = timeline(slices(given, heads), BUFFERS)
    short = GroupingLost.STAGING_TOO_SMALL if BUFFERS * size > given.staging else None
    groups = geometry.head_groups(heads)
    return Grouping(heads, groups, size, BUFFERS * size, times.service, times.stall, short)


def longest_context(geometry: KvGeometry, heads: int, staging: int) -> int:
    """Cold rows up to which groups of `heads` fit both buffers: the context at which adaptive grouping goes
    on to smaller groups."""
    return staging // (BUFFERS * geometry.head_group(1, heads))


@dataclass(frozen=True, slots=True)
class HeadRun:
    """simulated: fetches, attention and the way back of new rows on three streams. predicted: the recurrence
    of `pipeline` for the same slices. plans: of each layer, what was run, for its contract's checks."""

    simulated: Simulated
    predicted: Timeline
    plans: tuple[HeadGroupStaging, ...]


def run_step(given: HeadInputs, heads: int, append: BytesPerSecond | None = None) -> HeadRun:
    """Simulates one step: a slice is fetched once the link is free and its buffer's last slice was attended,
    attended once it is there, and its new rows go back beside the next slice (`append`: that path's
    bandwidth, None: not simulated). Outputs are concatenated in the model's order."""
    program = Program()
    costs, groups = slices(given, heads), members(given.geometry, heads)
    fetches: list[int | None] = []
    attended: list[int] = []
    for index, cost in enumerate(costs):
        free = attended[index - BUFFERS] if index >= BUFFERS else None
        fetch = None
        if cost.fetch is not None:
            fetch = program.add(f"fetch {index}", "cpuToGpu", cost.fetch, (free,))
        fetches.append(fetch)
        attended.append(program.add(f"attend {index}", "gpu", cost.compute, (fetch,)))
        if append is not None:
            new = given.geometry.head_group(1, len(groups[index % len(groups)]))
            program.add(f"append {index}", "gpuToCpu", append.seconds(new), (attended[-1],))
    done = simulate(program)
    plans = _plans(given, heads, done, groups, fetches, attended)
    return HeadRun(done, timeline(costs, BUFFERS), plans)


def _plans(
    given: HeadInputs,
    heads: int,
    done: Simulated,
    groups: Sequence[tuple[int, ...]],
    fetches: Sequence[int | None],
    attended: Sequence[int],
) -> tuple[HeadGroupStaging, ...]:
    plans: list[HeadGroupStaging] = []
    count = len(groups)
    for layer in range(given.geometry.layers):
        parts: list[HeadGroup] = []
        for place, group in enumerate(groups):
            index = layer * count + place
            fetch, spans = fetches[index], done.spans
            filled = spans[attended[index] if fetch is None else fetch].begin / NANOSECONDS
            parts.append(HeadGroup(group, index % BUFFERS, filled, spans[attended[index]].end / NANOSECONDS))
        order = tuple(head for group in groups for head in group)
        plans.append(HeadGroupStaging(given.geometry, heads, tuple(parts), order, ComputeSite.GPU))
    return tuple(plans)
