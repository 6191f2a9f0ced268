"""A window of evidence: its key, and the counts that two windows of one key add up to.

Everything is a count, a sum of exact binary fractions or a widening interval, so merging is commutative and
associative to the bit. Knows nothing of how counts are gathered, sent or judged.

Sections 1 and 3 of the evidence specification.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any, Final, cast

from kvtier_evidence.design import BlockSums
from kvtier_evidence.gates import ONE, Pair
from kvtier_evidence.grid import NO_UNITS, Histogram

MAX_METRICS: Final = 64
MAX_PROBES: Final = 8192


@dataclass(frozen=True, slots=True)
class WindowKey:
    """Any change of a field is another window; nothing is pooled across keys."""

    rollout_uid: str
    attempt: int
    stage: str
    step: int
    candidate_digest: str
    baseline_digest: str
    gates_digest: str
    opening_fence: int

    def digest(self) -> str:
        """SHA-256 over the canonical encoding."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()

    @property
    def label(self) -> str:
        """Short name among the windows of one attempt."""
        return f"{self.stage}/{self.step}/{self.opening_fence}"


NO_COUNTS: Final = cast(dict[Any, Any], MappingProxyType({}))
"""Stands in counts that were merged where nothing was counted, so that this takes no memory: of each agent of
each window that is most of it. It equals an empty dict and refuses to be changed."""


@dataclass(slots=True)
class MetricCounts:
    """One metric of one arm. Warm-up units count for Fail and are shown, never for Pass."""

    histogram: Histogram = field(default_factory=Histogram)
    above_up: dict[str, int] = field(default_factory=dict)
    """By gate: sum over units of the fraction above its limit, 32.32 fixed point, rounded up."""
    above_down: dict[str, int] = field(default_factory=dict)
    warmup: Histogram = field(default_factory=Histogram)
    warmup_above_down: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def none() -> MetricCounts:
        """To be merged into, and changed by nothing else: what is empty is shared."""
        return MetricCounts(Histogram(), NO_COUNTS, NO_COUNTS, NO_UNITS, NO_COUNTS)

    def merge(self, other: MetricCounts) -> None:
        self.histogram.merge(other.histogram)
        if other.warmup != NO_UNITS:
            self.warmup = self.warmup.copy() if self.warmup is NO_UNITS else self.warmup
            self.warmup.merge(other.warmup)
        self.above_up = _sum(self.above_up, other.above_up)
        self.above_down = _sum(self.above_down, other.above_down)
        self.warmup_above_down = _sum(self.warmup_above_down, other.warmup_above_down)

    def since(self, earlier: MetricCounts) -> MetricCounts:
        return MetricCounts(
            self.histogram.since(earlier.histogram),
            _since(self.above_up, earlier.above_up),
            _since(self.above_down, earlier.above_down),
            self.warmup.since(earlier.warmup),
            _since(self.warmup_above_down, earlier.warmup_above_down),
        )

    def copy(self) -> MetricCounts:
        return MetricCounts(
            self.histogram.copy(),
            dict(self.above_up),
            dict(self.above_down),
            self.warmup.copy(),
            dict(self.warmup_above_down),
        )

    def with_warmup(self) -> MetricCounts:
        """The view of the Fail side: warm-up units included. Not to be changed: it may share its parts."""
        if not self.warmup.n and not self.warmup_above_down:
            return MetricCounts(self.histogram, {}, self.above_down)
        out = MetricCounts(self.histogram.copy(), {}, dict(self.above_down))
        out.histogram.merge(self.warmup)
        _add(out.above_down, self.warmup_above_down)
        return out

    def consistent(self) -> bool:
        """Histograms add up and no sum of fractions passes the units that have one."""
        up, warm = self.histogram.measured * ONE, self.warmup.measured * ONE
        return (
            self.histogram.consistent()
            and self.warmup.consistent()
            and all(0 <= v <= up for v in self.above_up.values())
            and all(0 <= v <= self.above_up.get(g, 0) for g, v in self.above_down.items())
            and all(0 <= v <= warm for v in self.warmup_above_down.values())
        )


@dataclass(slots=True)
class WindowCounts:
    """All counts of one window: of one agent, or merged."""

    metrics: dict[tuple[str, str], MetricCounts] = field(default_factory=dict)
    """By (metric, arm)."""
    zero_tolerance: dict[str, int] = field(default_factory=dict)
    sessions_candidate: int = 0
    sessions_total: int = 0
    assignment_disagreements: int = 0
    probes: dict[tuple[str, str, str], Pair] = field(default_factory=dict)
    """By (gate, probe set digest, prompt digest): each prompt once."""
    blocks: dict[str, BlockSums] = field(default_factory=dict)
    """By gate: cohorts; by gate + SESSION_BLOCKS: sessions."""

    def of(self, metric: str, arm: str) -> MetricCounts:
        """The counts of one metric and arm, made when absent."""
        return self.metrics.setdefault((metric, arm), MetricCounts())

    @staticmethod
    def none() -> WindowCounts:
        """To be merged into, and changed by nothing else: what is empty is shared."""
        return WindowCounts({}, NO_COUNTS, probes=NO_COUNTS, blocks=NO_COUNTS)

    def get(self, metric: str, arm: str) -> MetricCounts:
        """The counts of one metric and arm; empty ones, not kept, when absent."""
        return self.metrics.get((metric, arm)) or MetricCounts()

    def merge(self, other: WindowCounts) -> None:
        for key, counts in other.metrics.items():
            mine = self.metrics.get(key)
            if mine is None:
                mine = self.metrics[key] = MetricCounts.none()
            mine.merge(counts)
        self.zero_tolerance = _sum(self.zero_tolerance, other.zero_tolerance)
        self.sessions_candidate += other.sessions_candidate
        self.sessions_total += other.sessions_total
        self.assignment_disagreements += other.assignment_disagreements
        if other.probes and self.probes is NO_COUNTS:
            self.probes = {}
        for probe, pair in other.probes.items():
            seen = self.probes.get(probe)
            self.probes[probe] = pair if seen is None else seen.widen(pair)
        if other.blocks and self.blocks is NO_COUNTS:
            self.blocks = {}
        for gate, sums in other.blocks.items():
            self.blocks.setdefault(gate, BlockSums()).merge(sums)

    def since(self, earlier: WindowCounts) -> WindowCounts:
        """Increments from `earlier`. Raises ValueError when anything decreased."""
        for now, before in (
            (self.metrics, earlier.metrics),
            (self.probes, earlier.probes),
            (self.blocks, earlier.blocks),
        ):
            if not before.keys() <= now.keys():
                raise ValueError("a cumulative count decreased to nothing")
        empty = MetricCounts()
        changed = {
            key: counts.since(earlier.metrics.get(key, empty))
            for key, counts in self.metrics.items()
            if counts != earlier.metrics.get(key)
        }
        out = WindowCounts(
            metrics=changed,
            zero_tolerance=_since(self.zero_tolerance, earlier.zero_tolerance),
            sessions_candidate=self.sessions_candidate - earlier.sessions_candidate,
            sessions_total=self.sessions_total - earlier.sessions_total,
            assignment_disagreements=self.assignment_disagreements - earlier.assignment_disagreements,
            probes={p: v for p, v in self.probes.items() if p not in earlier.probes},
            blocks={
                gate: sums.since(earlier.blocks.get(gate, BlockSums()))
                for gate, sums in self.blocks.items()
                if sums != earlier.blocks.get(gate)
            },
        )
        if min(out.sessions_candidate, out.sessions_total, out.assignment_disagreements) < 0:
            raise ValueError("a cumulative count decreased")
        return out

    def copy(self) -> WindowCounts:
        return WindowCounts(
            {key: counts.copy() for key, counts in self.metrics.items()},
            dict(self.zero_tolerance),
            self.sessions_candidate,
            self.sessions_total,
            self.assignment_disagreements,
            dict(self.probes),
            {gate: sums.copy() for gate, sums in self.blocks.items()},
        )

    def total(self) -> int:
        """Every count of one agent's life added up, for the check after a merge. Probes are not counts."""
        return (
            sum(c.histogram.n + c.warmup.n for c in self.metrics.values())
            + sum(self.zero_tolerance.values())
            + self.sessions_total
            + self.assignment_disagreements
            + sum(b.blocks for b in self.blocks.values())
        )

    def consistent(self) -> bool:
        """Whether a received increment can be what it says; checked before it is merged."""
        return (
            len(self.metrics) <= MAX_METRICS
            and len(self.probes) <= MAX_PROBES
            and all(c.consistent() for c in self.metrics.values())
            and all(v >= 0 for v in self.zero_tolerance.values())
            and 0 <= self.sessions_candidate <= self.sessions_total
            and self.assignment_disagreements >= 0
            and all(-1.0 <= p.lo <= p.hi <= 1.0 for p in self.probes.values())
            and all(b.blocks >= 0 for b in self.blocks.values())
        )


SESSION_BLOCKS: Final = "/session"
"""Suffix of a gate's name under which its session blocks are kept."""


def _sum(mine: dict[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """`mine`, to which `other` was added; another dict where nothing had been counted yet."""
    if not other:
        return mine
    if mine is NO_COUNTS:
        return dict(other)
    _add(mine, other)
    return mine


def _add(into: dict[str, int], other: Mapping[str, int]) -> None:
    for key, v in other.items():
        into[key] = into.get(key, 0) + v


def _since(now: Mapping[str, int], earlier: Mapping[str, int]) -> dict[str, int]:
    out = {key: v - earlier.get(key, 0) for key, v in now.items() if v != earlier.get(key)}
    if min(out.values(), default=0) < 0 or not earlier.keys() <= now.keys():
        raise ValueError("a cumulative count decreased")
    return out
