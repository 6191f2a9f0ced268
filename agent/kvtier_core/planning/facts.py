"""What a plan is made of: tiers as recorded and measured, where a layer's chunks lie, what may be spent.

Why it exists: a decision that can be redone from its inputs can be tested and explained. It must not decide.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtier_core.admission import UNAVAILABLE, Fallback
from kvtier_core.units import BytesPerSecond, FlopPerSecond

FRAME = -1
"""The tier of rows that came with the request and lie in none yet."""


@dataclass(frozen=True, slots=True)
class TierFacts:
    """One tier's record (A.7) and measurement. in_place: the node's processor may attend its memory where it
    is (kernelReadable, partialAttention, host memory). source: whole blocks may be read out of it
    (dmaSource). by_head: one KV head's rows lie apart in memory and can be copied alone; storage verifies
    whole blocks only. read: of whole, verified blocks; None: nobody measured it."""

    name: str
    medium: str
    in_place: bool
    source: bool
    by_head: bool
    read: BytesPerSecond | None = None

    @property
    def storage(self) -> bool:
        """Whether states of its rows are formed beside it as they are read."""
        return self.medium in ("nvme", "remote")


@dataclass(frozen=True, slots=True)
class StepFacts:
    """One layer of one step. where: index of the tier of each visible chunk, ascending; FRAME for rows of the
    request. last_rows: visible rows of the last chunk; all others are full. queries: of the frame."""

    where: tuple[int, ...]
    last_rows: int
    chunk_tokens: int
    payload_bytes: int
    query_heads: int
    kv_heads: int
    head_dim: int
    queries: int = 1

    @property
    def rows(self) -> int:
        return (len(self.where) - 1) * self.chunk_tokens + self.last_rows

    def rows_of(self, chunk: int) -> int:
        return self.last_rows if chunk == len(self.where) - 1 else self.chunk_tokens


@dataclass(frozen=True, slots=True)
class Credits:
    """What one step may hold at once. staging_bytes: buffers for blocks on their way. buffers: how many of
    them a stream of whole blocks uses."""

    staging_bytes: int
    buffers: int = 2


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured. row_seconds: exact attention of one query over one row of one layer, all heads. flops: fp32
    matrix products. setup: seconds of one transfer besides its bytes. None: not measured."""

    row_seconds: float | None
    flops: FlopPerSecond | None = None
    setup: float = 0.0

    def compute(self, facts: StepFacts, rows: int) -> float:
        """Seconds of the frame's queries over `rows` rows: bound by reading them once, or by 4 * Nq * rows *
        Hq * d operations. Call only when `row_seconds` is measured."""
        assert self.row_seconds is not None
        read = self.row_seconds * rows
        if self.flops is None:
            return read * facts.queries
        return max(read, 4.0 * facts.queries * rows * facts.query_heads * facts.head_dim / self.flops.value)


@dataclass(frozen=True, slots=True)
class DeclaredCost:
    """What a plan is charged: per second of predicted service, per byte moved, per byte of staging held."""

    second: float = 1.0
    moved_byte: float = 0.0
    staged_byte: float = 0.0


@dataclass(frozen=True, slots=True)
class Terms:
    """The request's own: slack: seconds to its deadline, None for none. exact: its answer must be.
    approximation_allowed: its contract's. fallbacks: those its contract lists; an exact fetch and a reject
    need no listing. recompute, retry, selector: seconds of that path; UNAVAILABLE where there is none."""

    slack: float | None = None
    exact: bool = True
    approximation_allowed: bool = False
    fallbacks: frozenset[Fallback] = field(default_factory=frozenset)
    recompute: float = UNAVAILABLE
    retry: float = UNAVAILABLE
    selector: float = UNAVAILABLE
