"""One unit of evidence while it runs, and what it is worth once settled.

A unit is a request: its steps, layers and heads are one draw, never many. Knows what was observed of it;
no clock, no window.

Section 1 of the evidence specification.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Generic, TypeVar

from kvtier_evidence import metrics
from kvtier_evidence.assignment import step_rank
from kvtier_evidence.gates import to_fixed
from kvtier_evidence.metrics import METRICS, Arm, Kind
from kvtier_evidence.window import MetricCounts

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class CollectedGate:
    """What a collector must know of a gate: where its limit lies."""

    name: str
    metric: str
    limit: Decimal
    quantile: Decimal | None = None
    pair_threshold: float | None = None
    """Two-arm gates: the baseline's earlier quantile, for the design effect; None: not known yet."""

    @property
    def kind(self) -> Kind:
        return METRICS[self.metric].kind

    @property
    def line(self) -> float:
        """The limit as the float nearest to it, so that a value of 0.05 is not above a limit of "0.05"."""
        return float(self.limit)


@dataclass(slots=True)
class Unit:
    """A request from its assignment on. The arm never changes (intention to treat)."""

    unit_id: str
    session: bytes
    candidate: bool
    compared: bool
    assigned_at: float
    cohort: int
    ended: bool = False
    compared_steps: int = 0
    failed_steps: int = 0
    """Compared steps whose error has no value."""
    above_steps: dict[str, int] = field(default_factory=dict)
    error: float | None = None
    error_rank: float = math.inf
    stall_seconds: float = 0.0
    tokens: int = 0
    first_token: float = 0.0
    last_token: float = 0.0

    @property
    def arm(self) -> Arm:
        return Arm.CANDIDATE if self.candidate else Arm.BASELINE

    def add_step(self, step: int, error: float | None, gates: Sequence[CollectedGate]) -> None:
        """One compared step; None or a value that is none counts as above for Pass, as under for Fail."""
        self.compared_steps += 1
        if error is None or not math.isfinite(error) or error < 0.0:
            self.failed_steps += 1
            return
        for gate in gates:
            if gate.kind is Kind.QUANTILE and error > gate.line:
                self.above_steps[gate.name] = self.above_steps.get(gate.name, 0) + 1
        rank = step_rank(self.unit_id, step)
        if rank < self.error_rank:
            self.error, self.error_rank = error, rank

    @property
    def time_per_token(self) -> float | None:
        """Seconds per output token after the first; None with fewer than two."""
        if self.tokens < 2:
            return None
        return (self.last_token - self.first_token) / (self.tokens - 1)

    @property
    def stall_fraction(self) -> float | None:
        """Exposed stall over decode wall time, in [0, 1]; None with fewer than two tokens."""
        if self.tokens < 2:
            return None
        wall = self.last_token - self.first_token
        if not math.isfinite(self.stall_seconds) or not math.isfinite(wall) or wall < 0.0:
            return None
        if self.stall_seconds <= 0.0:
            return 0.0
        return min(1.0, self.stall_seconds / wall) if wall > 0.0 else 1.0

    @property
    def leaves_latency(self) -> bool:
        """It ended by itself with one token: it has no time per token, in either arm."""
        return self.ended and self.tokens == 1

    def count_error(self, into: MetricCounts, gates: Sequence[CollectedGate], *, warm: bool) -> None:
        """Adds the output error of a compared unit."""
        h = into.warmup if warm else into.histogram
        measured = self.compared_steps - self.failed_steps
        h.add(self.error if measured else None)
        if not measured:
            return
        for gate in gates:
            above = self.above_steps.get(gate.name, 0)
            up = to_fixed(above + self.failed_steps, self.compared_steps)[0]
            down = to_fixed(above, self.compared_steps)[1]
            if warm:
                into.warmup_above_down[gate.name] = into.warmup_above_down.get(gate.name, 0) + down
            else:
                into.above_up[gate.name] = into.above_up.get(gate.name, 0) + up
                into.above_down[gate.name] = into.above_down.get(gate.name, 0) + down

    def exceedance(self, gate: CollectedGate) -> float | None:
        """Share of this unit above a one-arm gate's limit; None: not of the gate's population."""
        if gate.metric == metrics.OUTPUT_RELATIVE_ERROR:
            if not self.compared:
                return None
            return self.above_steps.get(gate.name, 0) / max(1, self.compared_steps)
        if gate.metric == metrics.EXPOSED_STALL_FRACTION and self.candidate and not self.compared:
            value = self.stall_fraction
            return None if self.leaves_latency else float(value is not None and value > gate.line)
        return None


class Recent(Generic[K, V]):
    """A bounded map that forgets what was used longest ago."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._items: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K) -> V | None:
        if key in self._items:
            self._items.move_to_end(key)
        return self._items.get(key)

    def put(self, key: K, value: V) -> None:
        self._items[key] = value
        self._items.move_to_end(key)
        if len(self._items) > self._capacity:
            self._items.popitem(last=False)

    def __contains__(self, key: K) -> bool:
        return key in self._items

    def __len__(self) -> int:
        return len(self._items)
