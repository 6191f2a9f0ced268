"""Which exact schedule brings cold rows to attention: six alternatives, priced alike, one chosen with its
reason.

Why it exists: bulk restore, preload, two slots, head groups, blocks on demand and partial attention all
give the same answer (specification E.8); which one waits least depends on measured rates and on how much
staging there is. Pure: it must not know tiers or clocks. A rate that nobody measured prices nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvtier_core.cost import fixed_staging
from kvtier_core.errors import CoreError, Reason
from kvtier_core.pipeline import LayerCost, Timeline, timeline
from kvtier_core.units import BytesPerSecond, require_bandwidth


class Schedule(StrEnum):
    """In the order in which ties are broken: the executable control first."""

    LAYERWISE_TWO_SLOT = "layerwiseTwoSlot"
    LAYER_PRELOAD = "layerPreload"
    BULK_RESTORE = "bulkRestore"
    HEAD_STAGING = "headStaging"
    ON_DEMAND_BLOCKS = "onDemandBlocks"
    PARTITION_COMPUTE = "partitionCompute"


class Rejected(StrEnum):
    """Why an alternative was not chosen."""

    SLOWER = "SLOWER"
    STAGING_TOO_SMALL = "STAGING_TOO_SMALL"
    TIER_INCAPABLE = "TIER_INCAPABLE"
    UNMEASURED = "UNMEASURED"
    DEADLINE = "DEADLINE"


class Chosen(StrEnum):
    """Why the chosen one was."""

    LEAST_SERVICE = "LEAST_SERVICE"
    LEAST_STAGING_AT_EQUAL_SERVICE = "LEAST_STAGING_AT_EQUAL_SERVICE"
    ONLY_LEGAL = "ONLY_LEGAL"


@dataclass(frozen=True, slots=True)
class LayerWork:
    """One layer of a step. cold_bytes: covering blocks of rows that are not on the compute device (F5);
    blocks: how many those are; compute: seconds of attention and the rest of the layer on the device,
    measured. near: seconds in which the tier that owns the cold rows forms their partial states, None where
    it cannot or nobody measured it; sent_bytes: query and new rows, which go there (F28); state_bytes: what
    comes back (F29)."""

    cold_bytes: int
    blocks: int
    compute: float
    near: float | None = None
    state_bytes: int = 0
    sent_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Machine:
    """What schedules run on. link: measured bandwidth of the path, None: not measured. setup: seconds of
    each transfer besides its bytes. staging_bytes: what may be reserved. kv_heads: of the model;
    head_group: heads of one staged group, None where slices by head are not to be had."""

    link: BytesPerSecond | None
    setup: float
    staging_bytes: int
    kv_heads: int
    head_group: int | None = None
    slots: int = 2


@dataclass(frozen=True, slots=True)
class Prediction:
    """An alternative with its price: seconds of service and of uncovered stall, bytes of staging at its
    peak. rejected: None for the chosen one. Times are 0 where nothing could be predicted."""

    schedule: Schedule
    service: float
    stall: float
    staging_bytes: int
    rejected: Rejected | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    chosen: Prediction
    reason: Chosen
    considered: tuple[Prediction, ...]


def choose(layers: Sequence[LayerWork], machine: Machine, deadline: float | None = None) -> Choice:
    """The exact schedule with the least predicted service that fits the staging and ends within `deadline`
    seconds. Ties go to the one with less staging, then to the order of `Schedule`. NO_LEGAL_PATH with each
    alternative's reason when none is left: an exact path never falls through to an approximate one."""
    priced = [_price(schedule, layers, machine) for schedule in Schedule]
    legal: list[Prediction] = []
    for item in priced:
        if item.rejected is None and deadline is not None and item.service > deadline:
            continue
        if item.rejected is None:
            legal.append(item)
    if not legal:
        facts = {item.schedule.value: (item.rejected or Rejected.DEADLINE).value for item in priced}
        raise CoreError(Reason.NO_LEGAL_PATH, "no exact schedule is legal and in time", facts)
    order = list(Schedule)
    best = min(legal, key=lambda item: (item.service, item.staging_bytes, order.index(item.schedule)))
    considered = tuple(
        item
        if item is best or item.rejected is not None
        else _reject(item, Rejected.SLOWER if item in legal else Rejected.DEADLINE)
        for item in priced
    )
    equal = [item for item in legal if item.service == best.service]
    reason = Chosen.LEAST_STAGING_AT_EQUAL_SERVICE if len(equal) > 1 else Chosen.LEAST_SERVICE
    return Choice(best, Chosen.ONLY_LEGAL if len(legal) == 1 else reason, considered)


def _reject(item: Prediction, why: Rejected) -> Prediction:
    return Prediction(item.schedule, item.service, item.stall, item.staging_bytes, why)


def _price(schedule: Schedule, layers: Sequence[LayerWork], machine: Machine) -> Prediction:
    if machine.link is None:
        return Prediction(schedule, 0.0, 0.0, 0, Rejected.UNMEASURED)
    require_bandwidth(machine.link)
    return _PRICES[schedule](layers, machine, machine.link)


def _costs(layers: Sequence[LayerWork], machine: Machine, link: BytesPerSecond) -> list[LayerCost]:
    """One transfer a cold layer: its setup and its bytes over the link."""
    return [
        LayerCost(
            None if not layer.cold_bytes else machine.setup + link.seconds(layer.cold_bytes), layer.compute
        )
        for layer in layers
    ]


def _finish(schedule: Schedule, times: Timeline, staging: int, machine: Machine) -> Prediction:
    short = Rejected.STAGING_TOO_SMALL if staging > machine.staging_bytes else None
    return Prediction(schedule, times.service, times.stall, staging, short)


def _two_slots(layers: Sequence[LayerWork], machine: Machine, link: BytesPerSecond) -> Prediction:
    slot = fixed_staging([layer.cold_bytes for layer in layers]) // 2
    times = timeline(_costs(layers, machine, link), machine.slots)
    return _finish(Schedule.LAYERWISE_TWO_SLOT, times, machine.slots * slot, machine)


def _preload(layers: Sequence[LayerWork], machine: Machine, link: BytesPerSecond) -> Prediction:
    """The engine runs ahead as far as it can: every layer has staging of its own."""
    times = timeline(_costs(layers, machine, link), max(1, len(layers)))
    return _finish(Schedule.LAYER_PRELOAD, times, sum(layer.cold_bytes for layer in layers), machine)


def _bulk(layers: Sequence[LayerWork], machine: Machine, link: BytesPerSecond) -> Prediction:
    """One transfer of everything, then computation: one setup, nothing hidden."""
    total = sum(layer.cold_bytes for layer in layers)
    fetch = machine.setup + link.seconds(total) if total else 0.0
    service = fetch + sum(layer.compute for layer in layers)
    short = Rejected.STAGING_TOO_SMALL if total > machine.staging_bytes else None
    return Prediction(Schedule.BULK_RESTORE, service, fetch, total, short)


def _heads(layers: Sequence[LayerWork], machine: Machine, link: BytesPerSecond) -> Prediction:
    """Each layer in slices of g KV heads through two buffers (HeadInfer): each slice has its own setup."""
    if machine.head_group is None:
        return Prediction(Schedule.HEAD_STAGING, 0.0, 0.0, 0, Rejected.TIER_INCAPABLE)
    groups = -(-machine.kv_heads // machine.head_group)
    slices: list[LayerCost] = []
    largest = 0
    for layer in layers:
        part = -(-layer.cold_bytes * machine.head_group // machine.kv_heads)
        largest = max(largest, part)
        left = layer.cold_bytes
        for _ in range(groups):
            size = min(part, left)
            left -= size
            fetch = machine.setup + link.seconds(size) if size else None
            slices.append(LayerCost(fetch, layer.compute / groups))
    return _finish(Schedule.HEAD_STAGING, timeline(slices), 2 * largest, machine)


def _on_demand(layers: Sequence[LayerWork], machine: Machine, link: BytesPerSecond) -> Prediction:
    """Blocks are fetched when their layer is reached: one slot, a setup for each block, no look-ahead."""
    costs = [
        LayerCost(
            None if not layer.cold_bytes else machine.setup * layer.blocks + link.seconds(layer.cold_bytes),
            layer.compute,
        )
        for layer in layers
    ]
    largest = max((layer.cold_bytes for layer in layers), default=0)
    return _finish(Schedule.ON_DEMAND_BLOCKS, timeline(costs, slots=1), largest, machine)


def near_transfer(layer: LayerWork, setup: float, link: BytesPerSecond) -> float:
    """Seconds to the tier that owns a layer's cold rows and back: two transfers, each with its setup."""
    return 2 * setup + link.seconds(layer.sent_bytes) + link.seconds(layer.state_bytes)


def _partition(layers: Sequence[LayerWork], machine: Machine, link: BytesPerSecond) -> Prediction:
    """Rows stay; their tier forms states while the device attends its own rows, then states are merged."""
    service = stall = 0.0
    staging = 0
    for layer in layers:
        if not layer.cold_bytes:
            service += layer.compute
            continue
        if layer.near is None:
            return Prediction(Schedule.PARTITION_COMPUTE, 0.0, 0.0, 0, Rejected.TIER_INCAPABLE)
        away = layer.near + near_transfer(layer, machine.setup, link)
        waits = max(0.0, away - layer.compute)
        service += layer.compute + waits
        stall += waits
        staging = max(staging, layer.state_bytes)
    short = Rejected.STAGING_TOO_SMALL if staging > machine.staging_bytes else None
    return Prediction(Schedule.PARTITION_COMPUTE, service, stall, staging, short)


_PRICES: dict[Schedule, Callable[[Sequence[LayerWork], Machine, BytesPerSecond], Prediction]] = {
    Schedule.LAYERWISE_TWO_SLOT: _two_slots,
    Schedule.LAYER_PRELOAD: _preload,
    Schedule.BULK_RESTORE: _bulk,
    Schedule.HEAD_STAGING: _heads,
    Schedule.ON_DEMAND_BLOCKS: _on_demand,
    Schedule.PARTITION_COMPUTE: _partition,
}
