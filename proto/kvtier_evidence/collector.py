"""The agent's side: gathers one window's units and publishes them in settled cohorts.

Units are grouped by assignment time; a cohort is published when each of its units has ended or `settle` has
passed, so slow units are never overtaken by fast ones. Memory is bounded. Knows requests by id; no engine, no
transport, no wall clock (the clock is monotonic and injected).

Sections 1 and 3 of the evidence specification.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kvtier_evidence import metrics
from kvtier_evidence.assignment import is_candidate
from kvtier_evidence.delta import Delta, DeltaLog
from kvtier_evidence.design import BlockSums
from kvtier_evidence.gates import Pair
from kvtier_evidence.metrics import METRICS, Arm, Kind
from kvtier_evidence.units import CollectedGate, Recent, Unit
from kvtier_evidence.window import MAX_PROBES, SESSION_BLOCKS, WindowCounts, WindowKey

COHORT_SECONDS: Final = 10.0
MAX_OPEN_UNITS: Final = 65_536
MAX_SESSIONS: Final = 65_536


def cohort_seconds(settle: float) -> float:
    """Cohort length that goes with a settle time: 10 s, less (at least 1 s) for a settle under 30 s."""
    return min(COHORT_SECONDS, max(1.0, settle / 3.0))


class Counted(StrEnum):
    """What became of a report."""

    COUNTED = "Counted"
    UNKNOWN_UNIT = "UnknownUnit"
    ALREADY_ASSIGNED = "AlreadyAssigned"
    SETTLED = "Settled"
    TABLE_FULL = "TableFull"
    """Counted as a unit without a value."""
    PROBE_REPEATED = "ProbeRepeated"
    NOT_A_METRIC = "NotAMetric"


@dataclass(frozen=True, slots=True)
class CollectorPlan:
    """What a grant says about the evidence of its window; times in seconds."""

    key: WindowKey
    gates: tuple[CollectedGate, ...]
    fraction: float
    """Share of sessions that get the candidate; 0 in Shadow."""
    settle: float
    warmup: float
    cohort: float = COHORT_SECONDS
    max_open_units: int = MAX_OPEN_UNITS

    def __post_init__(self) -> None:
        if not 0.0 <= self.fraction <= 1.0 or self.settle < 0.0 or self.warmup < 0.0 or self.cohort <= 0.0:
            raise ValueError("a fraction in [0, 1], times of at least 0 and a cohort over 0")


class AttemptProbes:
    """Probe pairs of one attempt: each prompt once, shown in every window of the attempt."""

    def __init__(self) -> None:
        self._pairs: dict[tuple[str, str, str], Pair] = {}

    def add(self, gate: str, probe_set: str, prompt: str, difference: float | None) -> bool:
        """False when the prompt was already scored in this attempt, or the table is full."""
        key = (gate, probe_set, prompt)
        if key in self._pairs or len(self._pairs) >= MAX_PROBES:
            return False
        self._pairs[key] = Pair.of(difference)
        return True

    def pairs(self) -> dict[tuple[str, str, str], Pair]:
        return dict(self._pairs)

    def __len__(self) -> int:
        return len(self._pairs)


class WindowCollector:
    """Collects one window on one agent. Thread-safe; every method takes microseconds but `read`."""

    def __init__(
        self,
        plan: CollectorPlan,
        *,
        epoch: str,
        clock: Callable[[], float],
        probes: AttemptProbes,
    ) -> None:
        self._plan = plan
        self._clock = clock
        self._start = clock()
        self._lock = threading.Lock()
        self._probes = probes
        self._metrics = frozenset(g.metric for g in plan.gates)
        self._error_gates = tuple(g for g in plan.gates if g.metric == metrics.OUTPUT_RELATIVE_ERROR)
        self._one_arm = tuple(g for g in plan.gates if g.kind in (Kind.QUANTILE, Kind.MEAN))
        self._two_arm = tuple(g for g in plan.gates if g.kind is Kind.RATIO and g.pair_threshold is not None)
        self._counts = WindowCounts(probes=probes.pairs())
        self._log = DeltaLog(epoch, self._counts)
        if self._counts.probes:
            self._log.changed()
        self._open: dict[int, dict[str, Unit]] = {}
        self._cohort_of: dict[str, int] = {}
        self._published = 0
        self._assigned = 0
        self._settled_ids: Recent[str, None] = Recent(plan.max_open_units)
        self._sessions: Recent[bytes, None] = Recent(MAX_SESSIONS)
        self._session_blocks: Recent[tuple[str, bytes], tuple[int, float]] = Recent(MAX_SESSIONS)

    @property
    def key(self) -> WindowKey:
        return self._plan.key

    def assign(
        self, unit_id: str, *, tenant: str, session_root_id: str, candidate: bool, compared: bool
    ) -> Counted:
        """A request entered the population (probes never do). A retry is the unit of its first assignment."""
        with self._lock:
            now = self._advance()
            if unit_id in self._cohort_of or unit_id in self._settled_ids:
                return Counted.ALREADY_ASSIGNED
            session = _session_digest(tenant, session_root_id)
            self._count_session(session, tenant, session_root_id, candidate)
            self._assigned += 1
            cohort = int((now - self._start) // self._plan.cohort)
            unit = Unit(unit_id, session, candidate, compared, now, cohort)
            if len(self._cohort_of) >= self._plan.max_open_units:
                # Dropping it would hide exactly the units of an overload.
                self._count_unit(unit)
                self._settled_ids.put(unit_id, None)
                return Counted.TABLE_FULL
            self._open.setdefault(cohort, {})[unit_id] = unit
            self._cohort_of[unit_id] = cohort
            return Counted.COUNTED

    def record_step(self, unit_id: str, step: int, error: float | None) -> Counted:
        """Error of one compared step: max over layers of |o_c - o_e|/|o_e|; None: it has no value."""
        with self._lock:
            unit = self._running(unit_id)
            if isinstance(unit, Counted):
                return unit
            unit.add_step(step, error, self._error_gates)
            return Counted.COUNTED

    def record_stall(self, unit_id: str, seconds: float) -> Counted:
        """Adds exposed transfer stall of a decode step."""
        with self._lock:
            unit = self._running(unit_id)
            if isinstance(unit, Counted):
                return unit
            unit.stall_seconds += seconds
            return Counted.COUNTED

    def progress(self, unit_id: str, *, tokens: int, first_token: float, last_token: float) -> Counted:
        """Latency so far, seconds since assignment: its value if it is still running at settle."""
        with self._lock:
            unit = self._running(unit_id)
            if isinstance(unit, Counted):
                return unit
            unit.tokens, unit.first_token, unit.last_token = tokens, first_token, last_token
            return Counted.COUNTED

    def finish(self, unit_id: str) -> Counted:
        """The request ended, with whatever values it has."""
        with self._lock:
            unit = self._running(unit_id)
            if isinstance(unit, Counted):
                return unit
            unit.ended = True
            return Counted.COUNTED

    def outcome(self, unit_id: str, *, tokens: int, first_token: float, last_token: float) -> Counted:
        """`progress` and `finish` in one: the engine's client reported the end of a request."""
        with self._lock:
            unit = self._running(unit_id)
            if isinstance(unit, Counted):
                return unit
            unit.tokens, unit.first_token, unit.last_token = tokens, first_token, last_token
            unit.ended = True
            return Counted.COUNTED

    def record_event(self, metric: str, count: int = 1) -> Counted:
        """A zero-tolerance event; visible at the next read, without settling."""
        if count < 1 or metric not in METRICS or METRICS[metric].kind is not Kind.ZERO:
            return Counted.NOT_A_METRIC
        with self._lock:
            self._counts.zero_tolerance[metric] = self._counts.zero_tolerance.get(metric, 0) + count
            self._log.changed()
            return Counted.COUNTED

    def record_probe(self, gate: str, probe_set: str, prompt: str, difference: float | None) -> Counted:
        """A pair, score(exact) - score(candidate); the first report of a prompt counts in its attempt."""
        with self._lock:
            if not self._probes.add(gate, probe_set, prompt, difference):
                return Counted.PROBE_REPEATED
            self._counts.probes[gate, probe_set, prompt] = Pair.of(difference)
            self._log.changed()
            return Counted.COUNTED

    def read(self, epoch: str, ack_seq: int) -> Delta:
        """What a reader that acknowledged (`epoch`, `ack_seq`) must add; milliseconds at most."""
        with self._lock:
            self._advance()
            self._share_probes()
            return self._log.read(
                epoch, ack_seq, settled_cohort=self._published, assigned_units=self._assigned
            )

    @property
    def open_units(self) -> int:
        return len(self._cohort_of)

    def _share_probes(self) -> None:
        """Takes pairs that came to another window of the attempt since: a probe may outlast its stage."""
        if len(self._counts.probes) != len(self._probes):
            self._counts.probes.update(self._probes.pairs())
            self._log.changed()

    def _running(self, unit_id: str) -> Unit | Counted:
        now = self._advance()
        cohort = self._cohort_of.get(unit_id)
        if cohort is None:
            return Counted.SETTLED if unit_id in self._settled_ids else Counted.UNKNOWN_UNIT
        unit = self._open[cohort][unit_id]
        # Its value was taken at settle, even when its cohort still waits for others.
        return Counted.SETTLED if unit.ended or self._settled(unit, now) else unit

    def _settled(self, unit: Unit, now: float) -> bool:
        return now >= unit.assigned_at + self._plan.settle

    def _advance(self) -> float:
        """Publishes every cohort that is over and settled, in order."""
        now = self._clock()
        closed = int((now - self._start) // self._plan.cohort)
        while self._published < closed:
            if not self._open:
                self._published = closed
                break
            units = self._open.get(self._published, {})
            if not all(u.ended or self._settled(u, now) for u in units.values()):
                break
            self._publish(units)
            self._open.pop(self._published, None)
            self._published += 1
        return now

    def _publish(self, units: dict[str, Unit]) -> None:
        if not units:
            return
        for unit in units.values():
            self._count_unit(unit)
            del self._cohort_of[unit.unit_id]
            self._settled_ids.put(unit.unit_id, None)
        if not self._warm(self._published):
            self._count_blocks(list(units.values()))

    def _warm(self, cohort: int) -> bool:
        return cohort * self._plan.cohort < self._plan.warmup

    def _count_unit(self, unit: Unit) -> None:
        warm = self._warm(unit.cohort)
        touched = Arm.CANDIDATE if unit.candidate or unit.compared else Arm.BASELINE
        self._count(metrics.REQUESTS, touched, 0.0, warm)
        if unit.compared:
            # How many were looked at: no event in what nobody compared says nothing.
            self._count(metrics.OUTPUT_MISMATCHES, Arm.CANDIDATE, 0.0 if unit.compared_steps else None, warm)
            if self._error_gates:
                into = self._counts.of(metrics.OUTPUT_RELATIVE_ERROR, Arm.CANDIDATE)
                unit.count_error(into, self._error_gates, warm=warm)
        else:
            self._count_latency(unit, warm)
        self._log.changed()

    def _count_latency(self, unit: Unit, warm: bool) -> None:
        gated = self._metrics & {metrics.TPOT_RATIO, metrics.EXPOSED_STALL_FRACTION}
        if not gated:
            return
        tpot, stall = unit.time_per_token, unit.stall_fraction
        self._count(metrics.MEASURED, unit.arm, None if tpot is None else 0.0, warm)
        if unit.leaves_latency:
            return
        if metrics.TPOT_RATIO in gated:
            self._count(metrics.TPOT_RATIO, unit.arm, tpot, warm)
        if metrics.EXPOSED_STALL_FRACTION in gated:
            self._count(metrics.EXPOSED_STALL_FRACTION, unit.arm, stall, warm)

    def _count(self, metric: str, arm: Arm, value: float | None, warm: bool) -> None:
        counts = self._counts.of(metric, arm)
        (counts.warmup if warm else counts.histogram).add(value)

    def _count_blocks(self, units: list[Unit]) -> None:
        for gate in self._one_arm:
            n, x = 0, 0.0
            for unit in units:
                e = unit.exceedance(gate)
                if e is not None:
                    n, x = n + 1, x + e
                    self._grow_session(gate, unit.session, e)
            if n:
                self._counts.blocks.setdefault(gate.name, BlockSums()).add_one_arm(n, x)
        for gate in self._two_arm:
            self._count_pair_block(gate, units)

    def _count_pair_block(self, gate: CollectedGate, units: list[Unit]) -> None:
        threshold = gate.pair_threshold
        if threshold is None:
            return
        n, above = {True: 0, False: 0}, {True: 0, False: 0}
        for unit in units:
            if unit.compared or unit.leaves_latency:
                continue
            n[unit.candidate] += 1
            line = threshold * gate.line if unit.candidate else threshold
            tpot = unit.time_per_token
            slow = tpot is not None and tpot > line
            above[unit.candidate] += slow
            before, after = self._session_grown(gate, unit.session, float(slow))
            of_session = self._counts.blocks.setdefault(gate.name + SESSION_BLOCKS, BlockSums())
            of_session.grow_arm(unit.candidate, before, after)
        if any(n.values()):
            sums = self._counts.blocks.setdefault(gate.name, BlockSums())
            sums.add_two_arm(n[True], above[True], n[False], above[False])

    def _grow_session(self, gate: CollectedGate, session: bytes, exceedance: float) -> None:
        before, after = self._session_grown(gate, session, exceedance)
        self._counts.blocks.setdefault(gate.name + SESSION_BLOCKS, BlockSums()).grow(before, after)

    def _session_grown(
        self, gate: CollectedGate, session: bytes, exceedance: float
    ) -> tuple[tuple[int, float], tuple[int, float]]:
        """Units and exceedances of a session before this unit and after it."""
        before = self._session_blocks.get((gate.name, session)) or (0, 0.0)
        after = (before[0] + 1, before[1] + exceedance)
        self._session_blocks.put((gate.name, session), after)
        return before, after

    def _count_session(self, session: bytes, tenant: str, root: str, candidate: bool) -> None:
        if not 0.0 < self._plan.fraction < 1.0:
            return
        if is_candidate(self._plan.key.rollout_uid, tenant, root, self._plan.fraction) != candidate:
            self._counts.assignment_disagreements += 1
            self._log.changed()
        if session in self._sessions:
            return
        self._sessions.put(session, None)
        self._counts.sessions_total += 1
        self._counts.sessions_candidate += candidate
        self._log.changed()


def _session_digest(tenant: str, root: str) -> bytes:
    return hashlib.blake2b(f"{len(tenant)}:{tenant}{root}".encode(), digest_size=8).digest()
