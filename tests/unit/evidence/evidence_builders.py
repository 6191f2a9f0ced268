"""Small builders for windows of evidence; no production logic is repeated here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from enum import StrEnum
from statistics import NormalDist

from kvtier_evidence import metrics
from kvtier_evidence.gates import ONE, Pair
from kvtier_evidence.gatespec import GateDeclaration, GateSpec
from kvtier_evidence.grid import Histogram
from kvtier_evidence.judge import Judgement, Terms
from kvtier_evidence.metrics import METRICS, Scope
from kvtier_evidence.reader import WindowEvidence
from kvtier_evidence.verdicts import Reason, Verdict
from kvtier_evidence.window import WindowCounts, WindowKey

ROLLOUT = "0b9c6f1e-rollout"


class Decision(StrEnum):
    """What a rollout would do on a judgement if evidence were all that it looks at."""

    PROMOTE = "Promote"
    FAIL = "Fail"
    HOLD = "Hold"
    HOLD_UNREADABLE = "HoldUnreadable"


def decision_of(judgement: Judgement) -> Decision:
    if judgement.failed is not None:
        return Decision.FAIL
    if all(one.verdict is Verdict.PASS for one in judgement.results if one.required):
        return Decision.PROMOTE
    if any(one.verdict is Verdict.PROVIDER_ERROR for one in judgement.results):
        return Decision.HOLD_UNREADABLE
    return Decision.HOLD


class Clock:
    """A monotonic clock that moves when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def key(stage: str = "Canary", step: int = 0, fence: int = 3, candidate: str = "sha256:c") -> WindowKey:
    return WindowKey(ROLLOUT, 1, stage, step, candidate, "sha256:b", "sha256:g", fence)


def gate(
    name: str,
    metric: str,
    limit: str,
    quantile: str | None = None,
    *,
    min_samples: int = 100,
    k: str | None = "1",
    scope: Scope = Scope.POPULATION,
    size: int = 0,
    required: bool = True,
) -> GateSpec:
    return GateSpec(
        name,
        METRICS[metric],
        Decimal(limit),
        Decimal(quantile) if quantile else None,
        scope,
        min_samples,
        Decimal(k) if k else None,
        required,
        "sha256:probes" if size else "",
        size,
    )


OUTPUT = gate("output", metrics.OUTPUT_RELATIVE_ERROR, "0.05", "99")
TAIL = gate("tail", metrics.TPOT_RATIO, "1.25", "99")
STALL = gate("stall", metrics.EXPOSED_STALL_FRACTION, "0.02")
QUALITY = gate("quality", metrics.TASK_SCORE_DROP, "0.01")
GOLDEN = gate("golden", metrics.TASK_SCORE_DROP, "0.05", scope=Scope.PROBE_SET, size=20)
ILLEGAL = gate(metrics.ILLEGAL_FALLBACKS, metrics.ILLEGAL_FALLBACKS, "0")

DECLARED = (
    GateDeclaration("output", metrics.OUTPUT_RELATIVE_ERROR, Decimal("0.05"), Decimal(99)),
    GateDeclaration("quality", metrics.TASK_SCORE_DROP, Decimal("0.01")),
)


def terms(fraction: float = 0.5, share: int = 1, planned_cells: int = 30) -> Terms:
    return Terms(fraction=fraction, share=share, planned_cells=planned_cells)


def lognormal(n: int, median: float, sigma: float = 0.35) -> Histogram:
    h, normal = Histogram(), NormalDist()
    for i in range(n):
        h.add(median * math.exp(sigma * normal.inv_cdf((i + 0.5) / n)))
    return h


@dataclass
class Counts:
    """Builds the counts of one agent."""

    counts: WindowCounts = field(default_factory=WindowCounts)

    def output(self, n: int, above: int, missing: int = 0, name: str = "output") -> Counts:
        c = self.counts.of(metrics.OUTPUT_RELATIVE_ERROR, "candidate")
        c.histogram.add(0.01, n - above)
        c.histogram.add(0.2, above)
        c.histogram.add(None, missing)
        for sums in (c.above_up, c.above_down):
            sums[name] = sums.get(name, 0) + above * ONE
        return self

    def warm_output(self, n: int, above: int, name: str = "output") -> Counts:
        c = self.counts.of(metrics.OUTPUT_RELATIVE_ERROR, "candidate")
        c.warmup.add(0.01, n - above)
        c.warmup.add(0.2, above)
        c.warmup_above_down[name] = c.warmup_above_down.get(name, 0) + above * ONE
        return self

    def tpot(self, candidate: Histogram, baseline: Histogram) -> Counts:
        self.counts.of(metrics.TPOT_RATIO, "candidate").histogram.merge(candidate)
        self.counts.of(metrics.TPOT_RATIO, "baseline").histogram.merge(baseline)
        for arm, h in (("candidate", candidate), ("baseline", baseline)):
            measured = self.counts.of(metrics.MEASURED, arm).histogram
            measured.add(0.0, h.measured)
            measured.add(None, h.missing)
        return self

    def stall(self, parts: Sequence[tuple[float | None, int]]) -> Counts:
        for x, n in parts:
            self.counts.of(metrics.EXPOSED_STALL_FRACTION, "candidate").histogram.add(x, n)
        return self

    def requests(self, n: int) -> Counts:
        self.counts.of(metrics.REQUESTS, "candidate").histogram.add(0.0, n)
        return self

    def sessions(self, candidate: int, total: int) -> Counts:
        self.counts.sessions_candidate += candidate
        self.counts.sessions_total += total
        return self

    def event(self, metric: str = metrics.ILLEGAL_FALLBACKS, count: int = 1) -> Counts:
        self.counts.zero_tolerance[metric] = self.counts.zero_tolerance.get(metric, 0) + count
        return self

    def probes(
        self, differences: Sequence[float | None], name: str = "quality", probe_set: str = ""
    ) -> Counts:
        at = len(self.counts.probes)
        for i, d in enumerate(differences):
            self.counts.probes[name, probe_set, f"sha256:{at + i:05d}"] = Pair.of(d)
        return self


def evidence(
    *agents: Counts,
    window: WindowKey | None = None,
    error: Reason | None = None,
    complete: bool = True,
) -> WindowEvidence:
    merged = WindowCounts()
    for a in agents:
        merged.merge(a.counts)
    each = {f"node-{i}": a.counts for i, a in enumerate(agents)}
    return WindowEvidence(window or key(), merged, each, complete, error, ("node-0",) if error else ())
