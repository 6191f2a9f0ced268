"""NEO's whole-request placement: each request's cache lies on one side, CPU attention runs beside GPU work.

Why it exists: a request whose rows stay in host memory needs no transfer, and costs nothing where its
attention hides behind another sub-batch's work (specification E.4, F32, C5.10 to C5.13). Pure: it must not
know tiers, sessions or clocks, and not whose turn it is: requests come in the scheduler's order, and none is
overtaken by one of its own side.

An iteration has two sub-batches. Sub-batch 0 holds the requests on the GPU and some of those on the CPU,
sub-batch 1 only such on the CPU. A layer takes max(T_l0, T_ca1) + max(T_l1 + T_ga0, T_ca0): maxima, not
sums. CPU requests join as long as CPU attention hides: T_ca1 <= T_l0 and T_ca0 <= T_l1 + T_ga0. The same
iteration without any of them is priced too, and the one that gives more tokens a second runs. All from a
measured profile; without one there is no choice to make, and that is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from kvtier_core.exact_placements import (
    ComputeSite,
    OverlapProfile,
    PlacementReason,
    PlacementRefused,
    RequestOnCpu,
)
from kvtier_core.placements.events import Program, Simulated, simulate


class Side(StrEnum):
    """Where a request's whole cache lies after its prefill."""

    GPU = "gpu"
    CPU = "cpu"


class Iteration(StrEnum):
    GPU_ONLY = "gpuOnly"
    HETEROGENEOUS = "heterogeneous"


class IterationLost(StrEnum):
    """Why the other kind of iteration was not taken."""

    FEWER_TOKENS_A_SECOND = "FEWER_TOKENS_A_SECOND"
    NOTHING_ON_CPU = "NOTHING_ON_CPU"
    NOTHING_ON_GPU = "NOTHING_ON_GPU"
    NOTHING_HIDES = "NOTHING_HIDES"


@dataclass(frozen=True, slots=True)
class Curve:
    """Measured seconds of one layer over an amount of work, ascending; between two points a straight line.
    From nothing to the first point too: no work takes no time."""

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        amounts = [amount for amount, _ in self.points]
        if not amounts or amounts[0] < 1 or any(a >= b for a, b in pairwise(amounts)):
            raise PlacementRefused(PlacementReason.COST_MODEL, "a profile's points ascend from one")
        if min(seconds for _, seconds in self.points) < 0.0:
            raise PlacementRefused(PlacementReason.COST_MODEL, "times are never negative")

    def seconds(self, amount: int) -> float:
        """COST_MODEL beyond the last point: nobody measured that."""
        if amount <= 0:
            return 0.0
        before = (0, 0.0)
        for point in self.points:
            if amount <= point[0]:
                part = (amount - before[0]) / (point[0] - before[0])
                return before[1] + part * (point[1] - before[1])
            before = point
        raise PlacementRefused(
            PlacementReason.COST_MODEL, f"the profile ends at {self.points[-1][0]}, {amount} was not measured"
        )


@dataclass(frozen=True, slots=True)
class Profile:
    """Measured offline, for one layer. linear: over new tokens of a sub-batch; gpu, cpu: attention over the
    sum of its requests' rows, on either side. None: not measured."""

    linear: Curve | None
    gpu: Curve | None
    cpu: Curve | None

    def complete(self) -> tuple[Curve, Curve, Curve]:
        """COST_MODEL naming what is missing."""
        named = {"linear": self.linear, "gpuAttention": self.gpu, "cpuAttention": self.cpu}
        missing = [name for name, curve in named.items() if curve is None]
        if self.linear is None or self.gpu is None or self.cpu is None:
            raise PlacementRefused(PlacementReason.COST_MODEL, f"no profile of {', '.join(missing)}")
        return self.linear, self.gpu, self.cpu


@dataclass(frozen=True, slots=True)
class Request:
    """name: for receipts. side: of its whole cache. tokens: new ones in this iteration. rows: attended by
    them, one layer."""

    name: str
    side: Side
    tokens: int
    rows: int

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.rows < 0:
            raise PlacementRefused(PlacementReason.COST_MODEL, f"request {self.name} has no work")


@dataclass(frozen=True, slots=True)
class IterationPlan:
    """kind: what runs. first, second: requests of sub-batches 0 and 1; waiting: CPU requests left for a later
    iteration. terms: the five times of a layer; seconds: of the iteration, `layers` layers; rate: tokens per
    second. other, lost: the rate of the other kind, and why it was not taken."""

    kind: Iteration
    first: tuple[Request, ...]
    second: tuple[Request, ...]
    waiting: tuple[Request, ...]
    terms: OverlapProfile
    layers: int
    rate: float
    other: float
    lost: IterationLost

    @property
    def seconds(self) -> float:
        return self.layers * self.terms.layer_seconds()

    def contract(self) -> RequestOnCpu:
        """What is claimed of its CPU requests, to be held against E.4's rules: feasible only in balance."""
        return RequestOnCpu(
            frozenset({ComputeSite.CPU_FOR_THE_REQUEST}),
            self.terms,
            self.layers,
            self.seconds,
            self.terms.balanced(),
        )


def place(requests: Sequence[tuple[str, int]], free_bytes: int) -> dict[str, Side]:
    """Sides of new requests, (name, bytes of the whole cache at its longest) in the scheduler's order: on the
    GPU while the whole cache fits there, else on the CPU. Never a part of one."""
    sides: dict[str, Side] = {}
    left = free_bytes
    for name, size in requests:
        fits = size <= left
        sides[name] = Side.GPU if fits else Side.CPU
        left -= size if fits else 0
    return sides


def choose_iteration(requests: Sequence[Request], profile: Profile | None, layers: int) -> IterationPlan:
    """One iteration over `requests`, in the scheduler's order: with as many of the CPU requests as give the
    most tokens a second, or none. COST_MODEL without a complete profile, beyond what it covers, or without
    any request."""
    if profile is None:
        raise PlacementRefused(PlacementReason.COST_MODEL, "the choice needs a measured profile")
    profile.complete()
    if not requests or layers < 1:
        raise PlacementRefused(PlacementReason.COST_MODEL, "an iteration has a request and a layer")
    on_gpu = tuple(request for request in requests if request.side is Side.GPU)
    on_cpu = tuple(request for request in requests if request.side is Side.CPU)
    alone = _terms(on_gpu, (), profile)
    alone_rate = _rate(on_gpu, alone, layers)
    best: _Split | None = None
    for split in _splits(on_gpu, on_cpu, profile, layers):
        if best is None or split.rate >= best.rate:
            best = split
    if best is not None and best.rate > alone_rate:
        return IterationPlan(
            kind=Iteration.HETEROGENEOUS,
            first=best.first,
            second=best.second,
            waiting=best.waiting,
            terms=best.terms,
            layers=layers,
            rate=best.rate,
            other=alone_rate,
            lost=IterationLost.FEWER_TOKENS_A_SECOND if on_gpu else IterationLost.NOTHING_ON_GPU,
        )
    lost = IterationLost.NOTHING_HIDES if best is None else IterationLost.FEWER_TOKENS_A_SECOND
    return IterationPlan(
        kind=Iteration.GPU_ONLY,
        first=on_gpu,
        second=(),
        waiting=on_cpu,
        terms=alone,
        layers=layers,
        rate=alone_rate,
        other=0.0 if best is None else best.rate,
        lost=lost if on_cpu else IterationLost.NOTHING_ON_CPU,
    )


@dataclass(frozen=True, slots=True)
class _Split:
    first: tuple[Request, ...]
    second: tuple[Request, ...]
    waiting: tuple[Request, ...]
    terms: OverlapProfile
    rate: float


def _splits(
    on_gpu: tuple[Request, ...], on_cpu: tuple[Request, ...], profile: Profile, layers: int
) -> Iterator[_Split]:
    """With the first CPU request, the first two, and so on until one fits neither sub-batch. Each joins the
    one where it leaves the layer shorter among those that stay balanced. Without any request on the GPU
    nothing hides: then balance is no condition for the first of them."""
    first: list[Request] = list(on_gpu)
    second: list[Request] = []
    for count, request in enumerate(on_cpu, start=1):
        options = [([*first, request], second), (first, [*second, request])]
        fits = [item for item in options if _hides(item[0], item[1], profile)]
        if not fits and not first:
            fits = options[:1]
        if not fits:
            return
        first, second = min(fits, key=lambda item: _terms(item[0], item[1], profile).layer_seconds())
        terms = _terms(first, second, profile)
        rate = _rate((*first, *second), terms, layers)
        yield _Split(tuple(first), tuple(second), on_cpu[count:], terms, rate)


def _hides(first: Sequence[Request], second: Sequence[Request], profile: Profile) -> bool:
    """Balanced, and within what was measured."""
    try:
        return _terms(first, second, profile).balanced()
    except PlacementRefused:
        return False


def _terms(first: Sequence[Request], second: Sequence[Request], profile: Profile) -> OverlapProfile:
    linear, gpu, cpu = profile.complete()
    return OverlapProfile(
        linear_0=linear.seconds(sum(request.tokens for request in first)),
        linear_1=linear.seconds(sum(request.tokens for request in second)),
        cpu_0=cpu.seconds(sum(request.rows for request in first if request.side is Side.CPU)),
        cpu_1=cpu.seconds(sum(request.rows for request in second)),
        gpu_0=gpu.seconds(sum(request.rows for request in first if request.side is Side.GPU)),
    )


def _rate(requests: Sequence[Request], terms: OverlapProfile, layers: int) -> float:
    seconds = layers * terms.layer_seconds()
    return sum(request.tokens for request in requests) / seconds if seconds > 0.0 else 0.0


@dataclass(frozen=True, slots=True)
class OverlapRun:
    """simulated: one iteration on two streams. closed: seconds of F32. error: seconds by which the simulation
    may be longer: sub-batch 1's first linear work has nothing beside it. Balanced terms are never shorter
    than F32 either, for then the GPU always works; others may be, since F32 waits at each half of a layer."""

    simulated: Simulated
    closed: float
    error: float


def run_iteration(terms: OverlapProfile, layers: int) -> OverlapRun:
    """Simulates the true dependencies, without F32's barriers between halves of a layer: attention of a
    sub-batch after its linear work, the next layer's linear work after its attention."""
    program = Program()
    linear_1: int | None = program.add("linear 1 of 0", "gpu", terms.linear_1)
    attended: tuple[int | None, ...] = ()
    for layer in range(layers):
        linear_0 = program.add(f"linear 0 of {layer}", "gpu", terms.linear_0, attended)
        cpu_1 = program.add(f"cpu attention 1 of {layer}", "cpu", terms.cpu_1, (linear_1,))
        cpu_0 = program.add(f"cpu attention 0 of {layer}", "cpu", terms.cpu_0, (linear_0,))
        gpu_0 = program.add(f"gpu attention 0 of {layer}", "gpu", terms.gpu_0, (linear_0,))
        if layer + 1 < layers:
            linear_1 = program.add(f"linear 1 of {layer + 1}", "gpu", terms.linear_1, (cpu_1,))
        attended = (cpu_0, gpu_0)
    return OverlapRun(simulate(program), layers * terms.layer_seconds(), terms.linear_1)
