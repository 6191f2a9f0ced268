"""Evidence that nobody measured: windows full of harmless requests, spoiled where somebody says so.

The counts are made up; the window's key, its settled cohorts and the protocol of deltas are production code.
It must not know who reads.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtier_agent.evidence_port import Outcome, ProbeResult, Progress, WindowTerms
from kvtier_agent.evidence_windows import EvidenceWindows
from kvtier_core.errors import CoreError, Reason
from kvtier_evidence import metrics
from kvtier_evidence.collector import cohort_seconds
from kvtier_evidence.delta import Delta, DeltaLog
from kvtier_evidence.gates import ONE, Pair
from kvtier_evidence.window import WindowCounts, WindowKey

UNITS = 900
"""Requests of each arm in a window, all there from its first cohort on."""
OUTPUT_GATE = "output"
"""The gate that spoiled windows are over the limit of."""


@dataclass
class Harm:
    """What goes wrong in windows; shared with whoever decides it, read at each ReadEvidence."""

    bad_output: bool = False
    stage: str = ""
    """Where the output is bad; empty: everywhere."""
    rollouts: frozenset[str] = frozenset()
    """Whose windows are bad, by uid; empty: everyone's."""
    silent: bool = False
    prompts: tuple[str, ...] = ("a", "b")

    def here(self, key: WindowKey) -> bool:
        mine = not self.rollouts or key.rollout_uid in self.rollouts
        return self.bad_output and mine and self.stage in ("", key.stage)


@dataclass
class MadeUpWindow:
    """One window of one agent. `read` spoils it first where `harm` says so."""

    counts: WindowCounts
    log: DeltaLog
    opened_at: float
    cohort: float
    harmful: bool = False

    def read(self, epoch: str, ack_seq: int, *, spoiled: bool, clock: Callable[[], float]) -> Delta:
        if spoiled and not self.harmful:
            self.harmful = True
            _spoil(self.counts)
            self.log.changed()
        settled = int((clock() - self.opened_at) / self.cohort)
        return self.log.read(epoch, ack_seq, settled_cohort=settled, assigned_units=2 * UNITS)


def made_up_window(
    epoch: str, counts: WindowCounts, *, settle_seconds: float, clock: Callable[[], float]
) -> MadeUpWindow:
    """A window over these counts, which opens now."""
    log = DeltaLog(epoch, counts)
    log.changed()
    return MadeUpWindow(counts, log, clock(), cohort_seconds(settle_seconds))


def made_up_counts(
    stage: str, probes: Sequence[tuple[str, str]], *, probe_digest: str, prompts: Sequence[str]
) -> WindowCounts:
    """Two arms of equal size and law: what a harmless candidate at half of the traffic looks like. probes:
    name and metric of each gate."""
    counts = WindowCounts()
    shadow = stage == "Shadow"
    for arm in (metrics.Arm.CANDIDATE, metrics.Arm.BASELINE):
        counts.of(metrics.REQUESTS, arm).histogram.add(1.0, UNITS)
        if not shadow:
            counts.of(metrics.MEASURED, arm).histogram.add(1.0, UNITS)
            counts.of(metrics.EXPOSED_STALL_FRACTION, arm).histogram.add(0.0, UNITS)
            for step in range(9):
                counts.of(metrics.TPOT_RATIO, arm).histogram.add(0.010 + 0.001 * step, UNITS // 9)
    counts.of(metrics.OUTPUT_RELATIVE_ERROR, metrics.Arm.CANDIDATE).histogram.add(0.001, UNITS)
    counts.of(metrics.OUTPUT_MISMATCHES, metrics.Arm.CANDIDATE).histogram.add(0.0, UNITS)
    if not shadow:
        counts.sessions_candidate, counts.sessions_total = UNITS, 2 * UNITS
    for name, metric in probes:
        if metric == metrics.TASK_SCORE_DROP:
            for prompt in prompts:
                counts.probes[name, probe_digest, prompt] = Pair.of(0.0)
    return counts


def _spoil(counts: WindowCounts) -> None:
    """From now on every further compared request is far over the limit of the gate called output."""
    into = counts.of(metrics.OUTPUT_RELATIVE_ERROR, metrics.Arm.CANDIDATE)
    into.histogram.add(9.0, UNITS)
    for sums in (into.above_up, into.above_down):
        sums[OUTPUT_GATE] = sums.get(OUTPUT_GATE, 0) + UNITS * ONE


@dataclass
class Readings:
    """When windows were read, on the monotonic clock that all processes of a machine share.

    by_window: rollout uid and window's label to the moments of its reads. first_harm: when an answer left
    that was the first of its rollout to hold harm, by rollout uid."""

    by_window: dict[tuple[str, str], array[float]] = field(default_factory=dict)
    first_harm: dict[str, float] = field(default_factory=dict)

    def note(self, key: WindowKey, harmful: bool, now: float) -> None:
        moments = self.by_window.setdefault((key.rollout_uid, key.label), array("d"))
        moments.append(now)
        if harmful:
            self.first_harm.setdefault(key.rollout_uid, now)


class MadeUpEvidence:
    """Implements EvidencePort for one cache of one agent; `harm` is asked at each read."""

    def __init__(
        self, epoch: str, harm: Harm, probe_digest: str, readings: Readings | None, kept_windows: int = 2
    ) -> None:
        self._epoch = epoch
        self._harm = harm
        self._probe_digest = probe_digest
        self._readings = readings
        self._kept = kept_windows
        self._checker = EvidenceWindows(epoch)
        self._windows: dict[WindowKey, MadeUpWindow] = {}

    def check(self, terms: WindowTerms) -> None:
        self._checker.check(terms)

    def open(self, terms: WindowTerms) -> None:
        self.check(terms)
        if terms.key in self._windows:
            return
        gates = [(gate.name, gate.metric) for gate in terms.gates]
        counts = made_up_counts(
            terms.key.stage, gates, probe_digest=self._probe_digest, prompts=self._harm.prompts
        )
        self._windows[terms.key] = made_up_window(
            self._epoch, counts, settle_seconds=terms.settle_ms / 1000, clock=time.monotonic
        )
        while len(self._windows) > self._kept:
            del self._windows[next(iter(self._windows))]

    def read(self, key: WindowKey, epoch: str, ack_seq: int) -> Delta:
        window = self._windows.get(key)
        if window is None or self._harm.silent:
            raise CoreError(Reason.WINDOW_UNKNOWN, f"no window {key.label}")
        delta = window.read(epoch, ack_seq, spoiled=self._harm.here(key), clock=time.monotonic)
        if self._readings is not None:
            self._readings.note(key, window.harmful, time.monotonic())
        return delta

    # What no session tells, since there is none.

    def assigned(
        self, key: WindowKey, unit: str, *, tenant: str, session_root_id: str, candidate: bool, compared: bool
    ) -> None:
        """Nothing."""

    def outcome(self, key: WindowKey, unit: str, outcome: Outcome) -> str:
        return ""

    def ended(self, key: WindowKey, unit: str) -> None:
        """Nothing."""

    def probe(self, key: WindowKey, result: ProbeResult) -> str:
        return ""

    def step_error(self, key: WindowKey, unit: str, step: int, error: float) -> None:
        """Nothing."""

    def progress(self, key: WindowKey, unit: str, progress: Progress) -> None:
        """Nothing."""

    def stall(self, key: WindowKey, unit: str, seconds: float) -> None:
        """Nothing."""

    def zero_tolerance(self, key: WindowKey, counter: str) -> None:
        """Nothing."""
