"""Five placements of attention over offloaded rows, each a contract of its own (specification E.1, E.4, E.6).

Why it exists: they differ in what moves, where is computed, whether the answer is exact and what merges it;
taking one for another gives wrong answers or claims that nobody kept. What a full move or a partition attends
is held against its rows where states are merged (`receiptcheck.states`, `planner.check_cover`). Pure: it must
not know tiers, schedules or kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvtier_core.cost import KvGeometry


class Moves(StrEnum):
    ALL_HISTORY = "allHistory"
    ALL_HISTORY_IN_SLICES = "allHistoryInSlices"
    NOTHING_OF_THE_REQUEST = "nothingOfTheRequest"
    PER_TIER = "perTier"
    NOTHING = "nothing"


class ComputeSite(StrEnum):
    GPU = "gpu"
    CPU_FOR_THE_REQUEST = "cpuForTheRequest"
    SEVERAL_TIERS = "severalTiers"
    STORAGE = "computationalStorage"


class Merge(StrEnum):
    NONE = "none"
    HEADS = "concatenationByHead"
    STATES = "normalisationStates"


class PlacementReason(StrEnum):
    """Names of specification N.5 and O."""

    GROUP_COUNT = "GROUP_COUNT"
    GROUP_COVERAGE = "GROUP_COVERAGE"
    HEAD_ORDER = "HEAD_ORDER"
    SLOT_REUSE = "SLOT_REUSE"
    PAPER_CLASSIFICATION = "PAPER_CLASSIFICATION"
    COST_MODEL = "COST_MODEL"
    TIME_MODEL = "TIME_MODEL"
    TRAFFIC_MISMATCH = "TRAFFIC_MISMATCH"
    PLACEMENT_IS_NOT_EXACTNESS = "PLACEMENT_IS_NOT_EXACTNESS"
    UNDECLARED_APPROXIMATION = "UNDECLARED_APPROXIMATION"


class PlacementRefused(Exception):
    """A plan that breaks its placement's contract. Plans are made inside the agent; the wire never sees
    this."""

    def __init__(self, reason: PlacementReason, message: str) -> None:
        super().__init__(f"{reason.value}: {message}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class PlacementContract:
    """One row of E.1."""

    moves: Moves
    site: ComputeSite
    exact: bool
    merge: Merge


FULL_MOVE = PlacementContract(Moves.ALL_HISTORY, ComputeSite.GPU, True, Merge.NONE)
HEAD_GROUPS = PlacementContract(Moves.ALL_HISTORY_IN_SLICES, ComputeSite.GPU, True, Merge.HEADS)
REQUEST_ON_CPU = PlacementContract(
    Moves.NOTHING_OF_THE_REQUEST, ComputeSite.CPU_FOR_THE_REQUEST, True, Merge.NONE
)
SUPPORT_PARTITION = PlacementContract(Moves.PER_TIER, ComputeSite.SEVERAL_TIERS, True, Merge.STATES)
IN_STORAGE = PlacementContract(Moves.NOTHING, ComputeSite.STORAGE, False, Merge.NONE)


@dataclass(frozen=True, slots=True)
class HeadGroup:
    """KV heads of one slice with the times of its buffer: filled, then attended until `consumed`."""

    heads: tuple[int, ...]
    buffer: int
    filled_at: float
    consumed_at: float


@dataclass(frozen=True, slots=True)
class HeadGroupStaging:
    """HeadInfer: slices by KV head through two buffers, attention on the GPU over the full support of each
    head. output_order: heads as they are concatenated."""

    geometry: KvGeometry
    group_heads: int
    groups: tuple[HeadGroup, ...]
    output_order: tuple[int, ...]
    site: ComputeSite = ComputeSite.GPU
    contract: PlacementContract = HEAD_GROUPS

    def check(self) -> None:
        """PAPER_CLASSIFICATION, GROUP_COUNT, GROUP_COVERAGE, HEAD_ORDER, SLOT_REUSE, in this order."""
        if self.site is not ComputeSite.GPU:
            raise PlacementRefused(
                PlacementReason.PAPER_CLASSIFICATION, "head groups are staged, and attended on the GPU"
            )
        expected = self.geometry.head_groups(self.group_heads)
        if len(self.groups) != expected:
            raise PlacementRefused(
                PlacementReason.GROUP_COUNT, f"{self.geometry.kv_heads} KV heads make {expected} groups"
            )
        heads = sorted(head for group in self.groups for head in group.heads)
        if heads != list(range(self.geometry.kv_heads)):
            raise PlacementRefused(
                PlacementReason.GROUP_COVERAGE, "the groups are not each KV head just once"
            )
        if list(self.output_order) != list(range(self.geometry.kv_heads)):
            raise PlacementRefused(PlacementReason.HEAD_ORDER, "outputs are concatenated in model order")
        free_at: dict[int, float] = {}
        for group in self.groups:
            if group.filled_at < free_at.get(group.buffer, 0.0):
                raise PlacementRefused(
                    PlacementReason.SLOT_REUSE, f"buffer {group.buffer} was filled while it was read"
                )
            free_at[group.buffer] = group.consumed_at


@dataclass(frozen=True, slots=True)
class OverlapProfile:
    """NEO, measured offline, seconds of one layer: linear work and CPU attention of both sub-batches, GPU
    attention."""

    linear_0: float
    linear_1: float
    cpu_0: float
    cpu_1: float
    gpu_0: float

    def layer_seconds(self) -> float:
        """F32: maxima, not sums."""
        return max(self.linear_0, self.cpu_1) + max(self.linear_1 + self.gpu_0, self.cpu_0)

    def balanced(self) -> bool:
        """F32: T_ca1 <= T_l0 and T_ca0 <= T_l1 + T_ga0."""
        return self.cpu_1 <= self.linear_0 and self.cpu_0 <= self.linear_1 + self.gpu_0


@dataclass(frozen=True, slots=True)
class RequestOnCpu:
    """NEO: a request's whole cache is on one side after prefill. sides: where its layers' rows lie.
    decides_fairness: whether placement claims to choose whose turn it is, which is the scheduler's."""

    sides: frozenset[ComputeSite]
    profile: OverlapProfile | None
    layers: int
    stated_seconds: float
    stated_feasible: bool
    decides_fairness: bool = False
    contract: PlacementContract = REQUEST_ON_CPU

    def check(self) -> None:
        """PAPER_CLASSIFICATION (split request, or fairness), COST_MODEL (no profile), TIME_MODEL."""
        if self.sides != {ComputeSite.CPU_FOR_THE_REQUEST}:
            raise PlacementRefused(
                PlacementReason.PAPER_CLASSIFICATION, "a request's cache lies on one side, whole"
            )
        if self.decides_fairness:
            raise PlacementRefused(
                PlacementReason.PAPER_CLASSIFICATION, "placement does not decide whose turn it is"
            )
        if self.profile is None:
            raise PlacementRefused(PlacementReason.COST_MODEL, "the choice needs a measured profile")
        seconds = self.layers * self.profile.layer_seconds()
        if abs(seconds - self.stated_seconds) > 1e-9 * max(1.0, seconds):
            raise PlacementRefused(PlacementReason.TIME_MODEL, f"overlapped stages take {seconds} s")
        if self.stated_feasible and not self.profile.balanced():
            raise PlacementRefused(PlacementReason.TIME_MODEL, "CPU attention outlasts the work beside it")


@dataclass(frozen=True, slots=True)
class InStorage:
    """InstInfer: storage chooses channels and positions, so its answer is approximate wherever it is
    computed."""

    stated_exact: bool
    approximation_allowed: bool
    contract: PlacementContract = IN_STORAGE

    def check(self) -> None:
        """PLACEMENT_IS_NOT_EXACTNESS, UNDECLARED_APPROXIMATION."""
        if self.stated_exact:
            raise PlacementRefused(
                PlacementReason.PLACEMENT_IS_NOT_EXACTNESS, "near the data is no promise of exactness"
            )
        if not self.approximation_allowed:
            raise PlacementRefused(
                PlacementReason.UNDECLARED_APPROXIMATION, "an exact request never falls to a selector"
            )
