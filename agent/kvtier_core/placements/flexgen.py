"""FlexGen's joint placement: which share of K/V lies in which tier, and how many GPU batches make a block.

Why it exists: for throughput, not latency, a large block amortises the weights' way to the device, and what
does not fit there has to lie further down; only both together say what a token costs (specification E.2,
C5.17). Pure: it must not know tiers or sessions. Weights, activations and the device's own work are the
engine's and enter as declared constants; nothing here places them.

The cost of a layer, for a whole block of GPU batches, is the largest of five terms that overlap: CPU to GPU,
GPU to CPU, disk to CPU, CPU to disk, compute. The search is exact over a stated grid: every split of K/V in
steps of 1/`grid` and every block of 1 to `max_batches` batches is priced. Overlap is assumed perfect;
`zigzag` simulates the schedule with two buffers a hop and states the difference.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from kvtier_core.exact_placements import PlacementReason, PlacementRefused
from kvtier_core.units import BytesPerRow, BytesPerSecond

GPU, CPU, DISK = range(3)
TIERS = ("gpu", "cpu", "disk")


class Term(StrEnum):
    """Of a layer's time; the largest is the layer's time."""

    CPU_TO_GPU = "cpuToGpu"
    GPU_TO_CPU = "gpuToCpu"
    DISK_TO_CPU = "diskToCpu"
    CPU_TO_DISK = "cpuToDisk"
    COMPUTE = "compute"


class Bound(StrEnum):
    """Why a point of the grid is not the plan."""

    GPU_BUDGET = "GPU_BUDGET"
    CPU_BUDGET = "CPU_BUDGET"
    DISK_BUDGET = "DISK_BUDGET"
    ENGINE_MEMORY = "ENGINE_MEMORY"
    UNMEASURED = "UNMEASURED"
    SLOWER = "SLOWER"


class AttentionSite(StrEnum):
    """Where rows outside the GPU are attended: moved to the device, or by the host where they lie."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class Split:
    """Parts of one whole on GPU, CPU and disk."""

    gpu: float
    cpu: float
    disk: float

    def __post_init__(self) -> None:
        parts = (self.gpu, self.cpu, self.disk)
        if min(parts) < 0.0 or abs(sum(parts) - 1.0) > 1e-9:
            raise PlacementRefused(PlacementReason.COST_MODEL, f"shares {parts} do not make one whole")


@dataclass(frozen=True, slots=True)
class EngineConstants:
    """Declared, the engine's. weight_bytes: of one layer. activation_bytes: of one token between two layers.
    prefill_seconds: one layer's linear work for a token of a prompt; decode_seconds: for one sequence's new
    token, in a GPU batch. memory: bytes of GPU, CPU and disk that the engine has for weights and
    activations; the cache's budgets are apart."""

    weight_bytes: int
    weights: Split
    activation_bytes: int
    activations: Split
    prefill_seconds: float
    decode_seconds: float
    memory: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Paths:
    """Measured bandwidths; None: nobody measured it, or there is no such path."""

    cpu_to_gpu: BytesPerSecond | None
    gpu_to_cpu: BytesPerSecond | None
    disk_to_cpu: BytesPerSecond | None
    cpu_to_disk: BytesPerSecond | None


@dataclass(frozen=True, slots=True)
class JointInputs:
    """layers: of the model; row: K and V of one token in one layer. budgets: bytes that the cache may take of
    GPU, CPU and disk; 0: no such tier. prompt, output: tokens of a sequence. batch: sequences of one GPU
    batch. device_row, host_row: seconds of attention over one row of one layer, measured. grid: K/V shares
    are multiples of 1/grid."""

    layers: int
    row: BytesPerRow
    budgets: tuple[int, int, int]
    paths: Paths
    engine: EngineConstants
    prompt: int
    output: int
    batch: int
    max_batches: int
    site: AttentionSite
    device_row: float
    host_row: float
    grid: int

    def __post_init__(self) -> None:
        counts = (self.layers, self.prompt, self.output, self.batch, self.max_batches, self.grid)
        if min(counts) < 1 or min(self.device_row, self.host_row) < 0.0:
            raise PlacementRefused(PlacementReason.COST_MODEL, "counts start at one, and times at zero")


@dataclass(frozen=True, slots=True)
class Point:
    """One candidate: K/V shares and GPU batches of a block."""

    kv: Split
    batches: int


@dataclass(frozen=True, slots=True)
class LayerTerms:
    """Seconds of the five terms of one layer, for the whole block (C5.17)."""

    cpu_to_gpu: float
    gpu_to_cpu: float
    disk_to_cpu: float
    cpu_to_disk: float
    compute: float

    @property
    def named(self) -> Mapping[Term, float]:
        return {
            Term.CPU_TO_GPU: self.cpu_to_gpu,
            Term.GPU_TO_CPU: self.gpu_to_cpu,
            Term.DISK_TO_CPU: self.disk_to_cpu,
            Term.CPU_TO_DISK: self.cpu_to_disk,
            Term.COMPUTE: self.compute,
        }

    @property
    def seconds(self) -> float:
        """The largest of the five: they overlap, they are not added."""
        return max(self.named.values())

    @property
    def bound(self) -> Term:
        return max(self.named.items(), key=lambda item: item[1])[0]


@dataclass(frozen=True, slots=True)
class Priced:
    """A point with its layer times; `refused` None when it fits. rate: generated tokens per second."""

    point: Point
    prefill: LayerTerms | None
    decode: LayerTerms | None
    rate: float
    refused: Bound | None


@dataclass(frozen=True, slots=True)
class JointPlan:
    """best: the point of the highest rate that fits. limit: the constraint that refused the fastest point
    which would have been faster, None when none would; gain: its rate over the best's. counts: of all points,
    by why they are not the plan. corners: everything in one tier, and what became of it."""

    best: Priced
    limit: Bound | None
    gain: float
    points: int
    counts: Mapping[Bound, int]
    corners: tuple[tuple[str, Priced], ...]


def layer_terms(given: JointInputs, point: Point, *, decode: bool) -> LayerTerms | None:
    """The five terms of one layer over the block. None when a path that it needs is not measured.

    Prefill: weights come in, K/V rows of the prompt go out to their homes. Decode, at the mean context
    prompt + output / 2: weights come in, rows that lie away come in where the device attends them, and one
    row a sequence goes out."""
    engine, kv, weights, acts = given.engine, point.kv, given.engine.weights, given.engine.activations
    sequences = given.batch * point.batches
    context = given.prompt + given.output / 2
    new = sequences * (1 if decode else given.prompt)
    read = sequences * context if decode else 0.0
    away, moved = kv.cpu + kv.disk, given.site is AttentionSite.DEVICE
    row, passed = given.row.value, engine.activation_bytes * new
    inward = (weights.cpu + weights.disk) * engine.weight_bytes + (acts.cpu + acts.disk) * passed
    inward += away * row * read if moved else 0.0
    outward = away * row * new + (acts.cpu + acts.disk) * passed
    up = weights.disk * engine.weight_bytes + acts.disk * passed + kv.disk * row * read
    down = kv.disk * row * new + acts.disk * passed
    paths = given.paths
    pairs = (
        (inward, paths.cpu_to_gpu),
        (outward, paths.gpu_to_cpu),
        (up, paths.disk_to_cpu),
        (down, paths.cpu_to_disk),
    )
    times: list[float] = []
    for size, path in pairs:
        if size > 0.0 and path is None:
            return None
        times.append(0.0 if path is None else size / path.value)
    compute = new * (engine.decode_seconds if decode else engine.prefill_seconds)
    on_device = 1.0 if moved else kv.gpu
    compute += read * (on_device * given.device_row + (1.0 - on_device) * given.host_row)
    return LayerTerms(times[0], times[1], times[2], times[3], compute)


def refused(given: JointInputs, point: Point) -> Bound | None:
    """The first memory constraint that the point breaks; engine memory first, then budgets from fast to slow.

    A budget holds its share of all layers' rows at their longest, and two staging slots for one GPU batch's
    rows of one layer from below. Engine memory holds its weights, two slots for those that come from below,
    and the block's activations."""
    engine, kv = given.engine, point.kv
    tokens = given.batch * (given.prompt + given.output)
    slice_bytes = given.row.value * tokens
    whole = slice_bytes * point.batches * given.layers
    acts = engine.activation_bytes * given.batch * point.batches * given.prompt
    weights = (engine.weights.gpu, engine.weights.cpu, engine.weights.disk)
    acted = (engine.activations.gpu, engine.activations.cpu, engine.activations.disk)
    for tier in (GPU, CPU, DISK):
        below = sum(weights[tier + 1 :])
        need = weights[tier] * engine.weight_bytes * given.layers + acted[tier] * acts
        need += 2 * below * engine.weight_bytes
        if math.ceil(need) > engine.memory[tier]:
            return Bound.ENGINE_MEMORY
    shares = (kv.gpu, kv.cpu, kv.disk)
    for tier, bound in ((GPU, Bound.GPU_BUDGET), (CPU, Bound.CPU_BUDGET), (DISK, Bound.DISK_BUDGET)):
        staged = sum(shares[tier + 1 :])
        if tier == GPU and given.site is AttentionSite.HOST:
            staged = 0.0
        if math.ceil(shares[tier] * whole + 2 * staged * slice_bytes) > given.budgets[tier]:
            return bound
    return None


def price(given: JointInputs, point: Point) -> Priced:
    """Rate = tokens of the block / (L * (T_pre + (output - 1) * T_gen))."""
    prefill = layer_terms(given, point, decode=False)
    decode = layer_terms(given, point, decode=True)
    if prefill is None or decode is None:
        return Priced(point, prefill, decode, 0.0, Bound.UNMEASURED)
    seconds = block_seconds(given, prefill, decode)
    tokens = given.batch * point.batches * given.output
    rate = tokens / seconds if seconds > 0.0 else math.inf
    return Priced(point, prefill, decode, rate, refused(given, point))


def block_seconds(given: JointInputs, prefill: LayerTerms, decode: LayerTerms) -> float:
    return given.layers * (prefill.seconds + (given.output - 1) * decode.seconds)


def grid_points(given: JointInputs) -> Iterator[Point]:
    """Every point of the stated grid, once. Tiers without a budget have no share."""
    steps = given.grid
    for batches in range(1, given.max_batches + 1):
        for gpu in range(steps, -1, -1):
            for cpu in range(steps - gpu, -1, -1):
                disk = steps - gpu - cpu
                if any(part and not size for part, size in zip((gpu, cpu, disk), given.budgets, strict=True)):
                    continue
                yield Point(Split(gpu / steps, cpu / steps, disk / steps), batches)


def search(given: JointInputs) -> JointPlan:
    """The best point of the grid. Equal rates go to more rows in the faster tier, then to the smaller block.
    COST_MODEL when no point fits, with the counts of why."""
    best: Priced | None = None
    faster: Priced | None = None
    counts: Counter[Bound] = Counter()
    points = 0
    for point in grid_points(given):
        points += 1
        item = price(given, point)
        if item.refused is None:
            if best is None or _order(item) > _order(best):
                best = item
            counts[Bound.SLOWER] += 1
        else:
            counts[item.refused] += 1
            if item.refused is not Bound.UNMEASURED and (faster is None or item.rate > faster.rate):
                faster = item
    if best is None:
        listed = ", ".join(f"{bound.value} {count}" for bound, count in sorted(counts.items()))
        raise PlacementRefused(PlacementReason.COST_MODEL, f"no point of {points} fits: {listed}")
    counts[Bound.SLOWER] -= 1
    limited = faster is not None and faster.rate > best.rate * (1.0 + 1e-9)
    return JointPlan(
        best=best,
        limit=faster.refused if limited and faster is not None else None,
        gain=faster.rate / best.rate if limited and faster is not None else 1.0,
        points=points,
        counts=dict(counts),
        corners=tuple(_corners(given, best)),
    )


def _order(item: Priced) -> tuple[float, float, float, int]:
    # Equal to twelve digits: the rest is rounding, and would decide by chance.
    return (float(f"{item.rate:.12g}"), item.point.kv.gpu, item.point.kv.cpu, -item.point.batches)


def _corners(given: JointInputs, best: Priced) -> Iterator[tuple[str, Priced]]:
    """Everything in one tier, in blocks of the best's size."""
    for tier, name in enumerate(TIERS):
        if not given.budgets[tier]:
            continue
        parts = [float(index == tier) for index in range(3)]
        item = price(given, Point(Split(*parts), best.point.batches))
        if item.point != best.point:
            why = item.refused or Bound.SLOWER
            yield f"allOn{name.capitalize()}", Priced(item.point, item.prefill, item.decode, item.rate, why)
