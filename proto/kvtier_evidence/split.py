"""Whether the population fits the assignment: if not, no comparison of two arms means anything.

Knows sessions and measured units by arm; no latency, no verdict of a gate.

Section 4.7 of the evidence specification.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from kvtier_evidence import metrics
from kvtier_evidence.gates import mean_log_e, split_log_e
from kvtier_evidence.metrics import Arm
from kvtier_evidence.window import WindowCounts


@dataclass(frozen=True, slots=True)
class SplitCheck:
    """log e-value against "the arms are split as declared", sessions seen, their candidate share."""

    log_e: float
    sessions: int
    share: float | None


def check_split(agents: Mapping[str, WindowCounts], fraction: float) -> SplitCheck:
    """The larger of two e-values, each averaged over agents: sessions assigned, and units measured.

    An agent whose recomputed hashes disagree with an assignment is a mismatch at once. Without two arms
    (`fraction` 0 or 1) nothing is split.
    """
    sessions = sum(c.sessions_total for c in agents.values())
    if not 0.0 < fraction < 1.0:
        return SplitCheck(-math.inf, sessions, None)
    candidates = sum(c.sessions_candidate for c in agents.values())
    share = candidates / sessions if sessions else None
    if any(c.assignment_disagreements for c in agents.values()):
        return SplitCheck(math.inf, sessions, share)
    assigned = [split_log_e(c.sessions_candidate, c.sessions_total, fraction) for c in agents.values()]
    measured = [_measured_log_e(c) for c in agents.values()]
    return SplitCheck(max(mean_log_e(assigned), mean_log_e(measured)), sessions, share)


def _measured_log_e(counts: WindowCounts) -> float:
    """Units with a value against the units assigned, of one agent.

    Given the assigned units, which of them are measured is a draw without replacement when loss does not
    depend on the arm; the e-value is convex in the count, so it is valid there (Hoeffding 1963, theorem 4).
    """
    c = counts.get(metrics.MEASURED, Arm.CANDIDATE).with_warmup().histogram
    b = counts.get(metrics.MEASURED, Arm.BASELINE).with_warmup().histogram
    if c.n == 0 or b.n == 0:
        return 0.0
    return split_log_e(c.measured, c.measured + b.measured, c.n / (c.n + b.n))
