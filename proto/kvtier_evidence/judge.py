"""The one function that turns a look at a window into verdicts.

Pure: the same gates, counts, terms and carried state give the same judgement, on any replica and after any
restart. Knows no cluster, no clock and no transport; the release machine acts on what it answers.

Sections 4 to 6 and 9 of the evidence specification.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal

from kvtier_evidence import metrics
from kvtier_evidence.bounds import bound_text, value_text
from kvtier_evidence.budgets import SPLIT_ALPHA, Cell, alpha_promote, cause, fail_total
from kvtier_evidence.carry import Carry, FailCause, ProbePass
from kvtier_evidence.design import Estimate
from kvtier_evidence.evalues import NEG
from kvtier_evidence.external import ExternalReading
from kvtier_evidence.gates import zero_rate_bound
from kvtier_evidence.gatespec import ExternalTerms, GateSpec
from kvtier_evidence.measure import Measured, Setting, measure, measure_external, measure_probe_set
from kvtier_evidence.metrics import Arm, Kind, Scope
from kvtier_evidence.reader import WindowEvidence
from kvtier_evidence.split import SplitCheck, check_split
from kvtier_evidence.verdicts import (
    Basis,
    Outcome,
    Reason,
    Statistics,
    Verdict,
    point_outcome,
    statistical_outcome,
    zero_outcome,
)


@dataclass(frozen=True, slots=True)
class Terms:
    """What one look is judged by, besides gates and counts."""

    fraction: float
    """Share of sessions that get the candidate in this window: 0 in Shadow, 1 - holdback in Full."""
    share: int
    """Which part of the false-promotion budget this window works with: 1, 2, ... by candidate digest."""
    planned_cells: int
    """Cells of the whole plan (`gatespec.planned_cells`): each has an equal part of the rollback budget."""
    false_promotion: float = 0.05
    false_rollback: float = 0.01
    estimates: Mapping[str, Estimate] = field(default_factory=dict)
    """Design effects by gate, measured before this window opened."""
    references: Mapping[str, float] = field(default_factory=dict)
    """By absolute guard what its limit is a multiple of (`measure.references`), fixed before it opened."""


@dataclass(frozen=True, slots=True)
class GateResult:
    """One gate at one look, as the status shows it."""

    name: str
    verdict: Verdict
    reason: Reason
    value: float | None
    bound: float | None
    """Upper bound of the value; for a Fail the lower one."""
    limit: Decimal
    n: int
    expected_n: int | None
    k: float | None
    basis: Basis
    required: bool

    @property
    def value_text(self) -> str:
        return value_text(self.value)

    @property
    def bound_text(self) -> str:
        return bound_text(self.bound, upper=self.verdict is not Verdict.FAIL)

    @property
    def limit_text(self) -> str:
        return f"{self.limit.normalize():f}"

    @property
    def k_text(self) -> str:
        return value_text(self.k)


@dataclass(frozen=True, slots=True)
class Judgement:
    """All gates at one look, the gate that carries a Fail, and what the next look must be given."""

    results: tuple[GateResult, ...]
    failed: FailCause | None
    carry: Carry


def judge(
    gates: Sequence[GateSpec], evidence: WindowEvidence, terms: Terms, carry: Carry, *, display: bool = True
) -> Judgement:
    """Judges one look; `gates` are those resolved for the window's stage. ValueError on bad terms.

    Without `display` no bound and no forecast is computed; verdicts are the same.
    """
    if (
        terms.planned_cells < 1
        or not 0.0 < terms.false_rollback < 1.0
        or not 0.0 < terms.false_promotion < 1.0
    ):
        raise ValueError("terms need a planned cell and error budgets inside (0, 1)")
    return _Look(gates, evidence, terms, carry, display).judgement()


class _Look:
    """The pieces of one judgement, each computed once."""

    def __init__(
        self,
        gates: Sequence[GateSpec],
        evidence: WindowEvidence,
        terms: Terms,
        carry: Carry,
        display: bool,
    ) -> None:
        self._gates = gates
        self._display = display
        self._evidence = evidence
        self._terms = terms
        self._window = evidence.key.label
        self._alpha_pass = alpha_promote(terms.false_promotion, terms.share)
        self._split = self._check_split(carry)
        self._measured = {
            g.name: measure(
                g,
                evidence.merged,
                evidence.agents,
                Setting(
                    self._alpha_pass,
                    terms.fraction,
                    terms.estimates.get(g.name),
                    terms.references.get(g.name),
                ),
            )
            for g in gates
            if g.budgeted and g.external is None
        }
        self._measured |= self._external_counts()
        self._mismatch = self._split.log_e >= -math.log(SPLIT_ALPHA)
        self._carry = replace(
            carry.with_cells(self._open_cells(), self._window),
            mismatched=carry.mismatched | ({self._window} if self._mismatch else set()),
        )
        self._total = fail_total(self._carry.cells)
        self._failing = self._failing_gate()

    def judgement(self) -> Judgement:
        results = tuple(self._result(g) for g in self._gates)
        carry = self._remember(results)
        return Judgement((*results, *self._split_result()), carry.failed, carry)

    def _external_counts(self) -> dict[str, Measured]:
        out = {}
        for g in self._gates:
            if g.external is not None and g.external.form.counts:
                reading = self._evidence.external.get(g.name) or ExternalReading(
                    g.external.form, Basis.ANYTIME
                )
                at = Setting(self._alpha_pass, self._terms.fraction, self._terms.estimates.get(g.name))
                out[g.name] = measure_external(g, reading, at)
        return out

    def _check_split(self, carry: Carry) -> SplitCheck:
        found = check_split(self._evidence.agents, self._terms.fraction)
        # Once a window's arms did not fit they never do again.
        return replace(found, log_e=math.inf) if self._window in carry.mismatched else found

    def _open_cells(self) -> list[Cell]:
        weight = 1.0 / self._terms.planned_cells
        cells = []
        for gate in self._gates:
            if gate.budgeted:
                m = self._measured[gate.name]
                void = (gate.metric.two_arm and self._mismatch) or m.blocked is Reason.NO_DATA
                cells.append(Cell(gate.name, self._window, weight, NEG if void else m.evidence.log_fail))
        return cells

    def _failing_gate(self) -> str | None:
        """The gate that carries a Fail of the pooled evidence, here or in an earlier window."""
        if self._total < -math.log(self._terms.false_rollback):
            return None
        names = {g.name for g in self._gates}
        here = [c for c in self._carry.cells if c.gate in names]
        found = cause(here) or cause(self._carry.cells)
        return found.gate if found else None

    def _result(self, gate: GateSpec) -> GateResult:
        sticky = self._carry.failed
        if gate.metric.kind is Kind.ZERO:
            result = self._zero(gate)
        elif gate.metric.kind is Kind.PAIRED:
            result = self._task(gate)
        elif gate.external is not None:
            result = self._external(gate, gate.external)
        else:
            result = self._statistical(gate)
        if sticky is not None and sticky.gate == gate.name and result.verdict is not Verdict.FAIL:
            return replace(result, verdict=Verdict.FAIL, reason=sticky.reason)
        return result

    def _statistical(self, gate: GateSpec) -> GateResult:
        m = self._measured[gate.name]
        outcome = statistical_outcome(
            Statistics(
                log_pass=m.evidence.log_pass,
                alpha_pass=self._alpha_pass,
                n=m.n / (m.k or 1.0),
                min_samples=gate.min_samples,
                log_fail_total=self._total if self._failing == gate.name else NEG,
                alpha_fail=self._terms.false_rollback,
                two_arm=gate.metric.two_arm,
                error=self._evidence.error,
                split_log_e=self._split.log_e,
                complete=self._evidence.complete,
                k_known=m.k is not None,
                blocked=m.blocked,
            )
        )
        return self._shown(gate, m, outcome)

    def _shown(self, gate: GateSpec, m: Measured, outcome: Outcome) -> GateResult:
        bound, expected = None, None
        if self._display:
            failed = outcome.verdict is Verdict.FAIL
            weighted = self._terms.false_rollback / self._terms.planned_cells
            bound = m.lower(weighted) if failed else m.upper(self._alpha_pass)
            forecast = m.expected()
            if forecast is not None and math.isfinite(forecast):
                expected = math.ceil(max(gate.min_samples * (m.k or 1.0), forecast))
        return GateResult(
            gate.name,
            outcome.verdict,
            outcome.reason,
            m.value,
            bound,
            gate.limit,
            m.n,
            expected,
            m.k,
            Basis.ANYTIME,
            gate.required,
        )

    def _external(self, gate: GateSpec, terms: ExternalTerms) -> GateResult:
        reading = self._evidence.external.get(gate.name)
        error = Reason.QUERY_FAILED if reading is None else reading.error
        if terms.form.counts:
            m = self._measured[gate.name]
            outcome = statistical_outcome(
                Statistics(
                    log_pass=m.evidence.log_pass,
                    alpha_pass=self._alpha_pass,
                    n=m.n / (m.k or 1.0),
                    min_samples=gate.min_samples,
                    log_fail_total=self._total if self._failing == gate.name else NEG,
                    alpha_fail=self._terms.false_rollback,
                    two_arm=False,
                    error=error,
                    complete=reading is not None and reading.complete,
                    k_known=m.k is not None,
                    blocked=m.blocked,
                )
            )
            return replace(self._shown(gate, m, outcome), basis=reading.basis if reading else Basis.ANYTIME)
        value = reading.value if reading is not None else None
        count = reading.count if reading is not None else None
        outcome = point_outcome(
            value,
            float(gate.limit),
            breaches=reading.breaches if reading is not None else 0,
            fails_at=terms.consecutive if terms.can_fail else None,
            passes_from=gate.min_samples if terms.point else None,
            count=count,
            error=error,
        )
        basis = Basis.POINT if terms.point else Basis.GUARD_ONLY
        floor = gate.min_samples if terms.point else None
        return GateResult(
            gate.name,
            outcome.verdict,
            outcome.reason,
            value,
            None,
            gate.limit,
            count or 0,
            floor,
            None,
            basis,
            gate.required,
        )

    def _zero(self, gate: GateSpec) -> GateResult:
        events = self._evidence.merged.zero_tolerance.get(gate.metric.name, 0)
        # An event of these can happen in any request of the candidate, a mismatch only where both were asked.
        population = gate.metric.name if gate.metric.exact_only else metrics.REQUESTS
        n = self._evidence.merged.get(population, Arm.CANDIDATE).histogram.measured
        outcome = zero_outcome(
            events,
            n,
            gate.min_samples,
            error=self._evidence.error,
            mismatch=self._mismatch,
            complete=self._evidence.complete,
        )
        return GateResult(
            gate.name,
            outcome.verdict,
            outcome.reason,
            float(events),
            zero_rate_bound(n, self._alpha_pass) if events == 0 else float(events),
            gate.limit,
            n,
            gate.min_samples,
            None,
            Basis.EVENT_COUNT,
            gate.required,
        )

    def _task(self, gate: GateSpec) -> GateResult:
        result = self._probe_set(gate) if gate.scope is Scope.PROBE_SET else self._statistical(gate)
        earlier = self._carry.probe_passes.get(gate.name)
        if (
            result.verdict is not Verdict.INSUFFICIENT
            or earlier is None
            or not earlier.fits(gate, self._evidence.key)
        ):
            return result
        return replace(
            result,
            verdict=Verdict.PASS,
            reason=Reason.BOUND_INSIDE_LIMIT,
            value=earlier.value,
            bound=earlier.bound,
            n=earlier.n,
            basis=Basis.CARRIED,
        )

    def _probe_set(self, gate: GateSpec) -> GateResult:
        found = measure_probe_set(gate, self._evidence.merged)
        if found is None:
            reason = self._evidence.error or Reason.NO_DATA
        elif found.outside:
            reason = Reason.BOUND_OUTSIDE_LIMIT
        elif self._evidence.error is not None:
            reason = self._evidence.error
        elif found.scored < found.size:
            reason = Reason.BELOW_MIN_SAMPLES
        else:
            reason = Reason.BOUND_INSIDE_LIMIT if found.inside else Reason.BOUND_STRADDLES_LIMIT
        outcome = Outcome(reason)
        failed = outcome.verdict is Verdict.FAIL
        return GateResult(
            gate.name,
            outcome.verdict,
            outcome.reason,
            found.high if found and found.low == found.high else None,
            None if found is None else found.low if failed else found.high,
            gate.limit,
            found.scored if found else 0,
            gate.probe_set_size or None,
            None,
            Basis.PROBE_SET,
            gate.required,
        )

    def _split_result(self) -> tuple[GateResult, ...]:
        """The split check as a row of its own: it never blocks by itself, it voids the others."""
        f = self._terms.fraction
        if not 0.0 < f < 1.0:
            return ()
        reason = Reason.BELOW_MIN_SAMPLES
        floor = metrics.DEFAULT_MIN_SAMPLES
        if self._mismatch:
            reason = Reason.SAMPLE_RATIO_MISMATCH
        elif self._evidence.error is not None:
            reason = self._evidence.error
        elif not self._evidence.complete:
            reason = Reason.COVERAGE_INCOMPLETE
        elif self._split.sessions >= floor:
            reason = Reason.BOUND_INSIDE_LIMIT
        return (
            GateResult(
                metrics.SESSION_SPLIT,
                Outcome(reason).verdict,
                reason,
                self._split.share,
                None,
                Decimal(repr(f)),
                self._split.sessions,
                floor,
                None,
                Basis.ANYTIME,
                required=False,
            ),
        )

    def _remember(self, results: Sequence[GateResult]) -> Carry:
        carry = self._carry
        passes = dict(carry.probe_passes)
        kinds = {g.name: g for g in self._gates}
        for r in results:
            gate = kinds[r.name]
            if gate.metric.carried and r.verdict is Verdict.PASS and r.basis is not Basis.CARRIED:
                passes[r.name] = ProbePass.of(gate, self._evidence.key, r.value, r.bound, r.n)
        if carry.failed is None:
            bad = next((r for r in results if r.verdict is Verdict.FAIL), None)
            if bad is not None:
                failed = FailCause(bad.name, self._window, bad.reason)
                carry = replace(carry, failed=failed)
            elif self._failing is not None and self._failing not in kinds:
                failed = FailCause(self._failing, self._window, Reason.BOUND_OUTSIDE_LIMIT)
                carry = replace(carry, failed=failed)
        return replace(carry, probe_passes=passes)
