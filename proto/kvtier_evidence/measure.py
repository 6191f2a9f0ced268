"""What one gate measures at one look, by kind: e-values, units, the displayed value and its bounds.

Binds the formulas to a window's counts. Knows gates and counts; budgets and verdicts are the judge's.

Sections 4 and 6.1 of the evidence specification.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from kvtier_evidence import bounds, forecast
from kvtier_evidence.design import (
    BlockSums,
    Estimate,
    design_effect,
    design_effect_pair,
    one_arm,
    used_effect,
)
from kvtier_evidence.external import ExternalReading, Form
from kvtier_evidence.gates import (
    NO_EFFECT,
    ONE,
    Effect,
    Evidence,
    Pair,
    ProbeSetOutcome,
    RatioEvidence,
    mean_evidence,
    mean_harm,
    paired_cells,
    paired_evidence,
    pool_and_agents,
    probe_set_outcome,
    quantile_evidence,
    quantile_harm,
)
from kvtier_evidence.gatespec import GateSpec
from kvtier_evidence.grid import index
from kvtier_evidence.limits import share_above
from kvtier_evidence.metrics import ABSOLUTE_SUFFIX, TPOT_RATIO, Arm, Kind
from kvtier_evidence.verdicts import Reason
from kvtier_evidence.window import SESSION_BLOCKS, MetricCounts, WindowCounts

_ENOUGH_FOR_A_LAW = 20
REFERENCE_ALPHA = 0.01
"""With at most this probability the baseline's quantile lies over what is remembered as its bound."""
Alphas = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Measured:
    """One gate at one look. `upper` and `lower` are bounds on the value at a given alpha."""

    evidence: Evidence
    n: int
    """Units with a value, warm-up left out; of the candidate's arm where there are two."""
    k: float | None
    """Design effect of the Pass side; None: not known."""
    value: float | None
    upper: Alphas
    lower: Alphas
    expected: Callable[[], float | None]
    """Forecast of the units until Pass; None: no forecast."""
    blocked: Reason | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """What a measurement takes from outside the counts."""

    alpha_pass: float
    fraction: float
    estimate: Estimate | None
    """Design effect measured before this window opened."""
    reference: float | None = None
    """What the candidate's quantile is held against in Full, seconds; None: no earlier window said."""


def measure(
    gate: GateSpec, merged: WindowCounts, agents: Mapping[str, WindowCounts], at: Setting
) -> Measured:
    """Measures a quantile, ratio, mean or paired (scope Population) gate."""
    match gate.metric.kind:
        case Kind.QUANTILE:
            return _quantile(gate, merged, agents, at)
        case Kind.RATIO:
            return _ratio(gate, merged, at)
        case Kind.REFERENCE:
            return _reference(gate, merged, at)
        case Kind.MEAN:
            return _mean(gate, merged, agents, at)
        case Kind.PAIRED:
            return _paired(gate, merged, at)
        case _:
            raise ValueError(f"gate {gate.name} of kind {gate.metric.kind.value} is not a statistical one")


def measure_external(gate: GateSpec, reading: ExternalReading, at: Setting) -> Measured:
    """A counting source by 4.1: units over the limit, by the unfavourable buckets for Pass and by the others
    for Fail."""
    counter_pair = reading.form is Form.COUNTER_PAIR
    share = float(gate.limit) if counter_pair else share_above(_percent(gate))
    n, up, down = (reading.above.n, reading.above.up, reading.above.down) if reading.above else (0, 0, 0)
    k, effect = _effect_of(gate, reading.blocks, n, at)
    found = quantile_evidence(share, n, up * ONE, down * ONE, 0, effect)

    def upper(alpha: float) -> float:
        if counter_pair:
            return bounds.proportion_upper(n, up, alpha, effect)
        return float(gate.limit) if found.log_pass >= -math.log(alpha) else math.inf

    def lower(alpha: float) -> float:
        if counter_pair:
            return bounds.proportion_lower(n, down, alpha, effect)
        return float(gate.limit) if found.log_fail >= -math.log(alpha) else 0.0

    return Measured(
        found,
        n,
        k,
        (down / n if n else None) if counter_pair else reading.value,
        upper,
        lower,
        lambda: forecast.units_for_share(share, up, n, at.alpha_pass, k or effect.k_pass),
        None if n else Reason.NO_DATA,
    )


def probe_pairs(gate: GateSpec, counts: WindowCounts) -> list[Pair]:
    """Pairs of the gate's probe set, in a fixed order; of any set when none is named."""
    wanted = gate.probe_set_digest
    return [
        pair
        for (name, probe_set, _), pair in sorted(counts.probes.items())
        if name == gate.name and wanted in ("", probe_set)
    ]


def measure_probe_set(gate: GateSpec, merged: WindowCounts) -> ProbeSetOutcome | None:
    """Scope ProbeSet; None when the set's size is not known, or more prompts came than it has."""
    pairs = probe_pairs(gate, merged)
    if gate.probe_set_size < 1 or len(pairs) > gate.probe_set_size:
        return None
    return probe_set_outcome(pairs, gate.probe_set_size, Fraction(gate.limit))


def estimates(
    gates: Sequence[GateSpec],
    closed: WindowCounts,
    fraction: float,
    external: Mapping[str, ExternalReading] | None = None,
) -> dict[str, Estimate]:
    """Design effects of a closed window, for the next one of the same kind; by gate, where blocks were kept.

    Of cohorts and sessions the larger one stands.
    """
    out = {}
    for gate in gates:
        sums = closed.blocks.get(gate.name)
        if external is not None and gate.name in external:
            sums = external[gate.name].blocks
        if sums is None or not sums.blocks:
            continue
        sessions = closed.blocks.get(gate.name + SESSION_BLOCKS, sums)
        k_hat = _k_hat(gate, sums, sessions, fraction)
        out[gate.name] = Estimate(k_hat, sums.blocks, max(sums.mean_block, sessions.mean_block))
        if gate.absolute is not None:
            out[gate.name + ABSOLUTE_SUFFIX] = _of_one_arm(sums, sessions, candidate=True)
    return out


def _of_one_arm(sums: BlockSums, sessions: BlockSums, *, candidate: bool) -> Estimate:
    """Of a ratio gate's blocks, of which each arm alone has more in common than their difference."""
    mine, grouped = one_arm(sums, candidate=candidate), one_arm(sessions, candidate=candidate)
    k_hat = max(design_effect(mine), design_effect(grouped))
    return Estimate(k_hat, mine.blocks, max(mine.mean_block, grouped.mean_block))


def pair_thresholds(gates: Sequence[GateSpec], closed: WindowCounts) -> dict[str, float]:
    """The baseline's quantile of each ratio gate in a closed window: where the next one counts its blocks."""
    out = {}
    for gate in gates:
        if gate.metric.kind is Kind.RATIO:
            h = closed.get(gate.metric.name, Arm.BASELINE).histogram
            value = h.quantile(1.0 - share_above(_percent(gate)))
            if value:
                out[gate.name] = value
    return out


def references(gates: Sequence[GateSpec], closed: WindowCounts) -> dict[str, float]:
    """What an absolute limit in Full is a multiple of: the upper bound of the baseline's quantile in a window
    before it. By the guard's name; none where too little was measured for a bound."""
    out = {}
    for gate in gates:
        if gate.absolute is None:
            continue
        h = closed.get(gate.metric.name, Arm.BASELINE).histogram
        effect = NO_EFFECT
        if gate.design_effect is not None:
            effect = Effect(float(gate.design_effect), float(gate.design_effect))
        else:
            sums = closed.blocks.get(gate.name, BlockSums())
            sessions = closed.blocks.get(gate.name + SESSION_BLOCKS, sums)
            known = used_effect(_of_one_arm(sums, sessions, candidate=False))
            # Without blocks nobody knows what the units are worth.
            k = known.k_fail if sums.blocks else max(1.0, float(h.n))
            effect = Effect(k, k)
        bound = bounds.quantile_upper(h, share_above(_percent(gate)), REFERENCE_ALPHA, effect)
        if 0.0 < bound < math.inf:
            out[gate.name + ABSOLUTE_SUFFIX] = bound
    return out


def _effect(gate: GateSpec, merged: WindowCounts, n: int, at: Setting) -> tuple[float | None, Effect]:
    """k for Pass (None: not known) and the effect to compute with."""
    sessions = merged.blocks.get(gate.name + SESSION_BLOCKS)
    return _effect_of(gate, merged.blocks.get(gate.name), n, at, sessions)


def _k_hat(gate: GateSpec, cohorts: BlockSums, sessions: BlockSums, fraction: float) -> float:
    """The larger design effect of the two kinds of blocks."""
    if gate.metric.two_arm:
        return max(design_effect_pair(cohorts, fraction), design_effect_pair(sessions, fraction))
    return max(design_effect(cohorts), design_effect(sessions))


def _effect_of(
    gate: GateSpec, sums: BlockSums | None, n: int, at: Setting, sessions: BlockSums | None = None
) -> tuple[float | None, Effect]:
    if gate.design_effect is not None:
        k = float(gate.design_effect)
        return k, Effect(k, k)
    if at.estimate is not None:
        used, here = used_effect(at.estimate), 1.0
        if sums is not None:
            # The open window may only make k larger: an earlier one may not have met what is shared now.
            here = _k_hat(gate, sums, sums if sessions is None else sessions, at.fraction)
        k_fail = max(used.k_fail, here)
        known = None if used.k_pass is None else max(used.k_pass, here)
        return known, Effect(known or k_fail, k_fail)
    # No block was counted: all units may be one.
    whole = max(1.0, sums.mean_block if sums is not None and sums.blocks else float(n))
    return None, Effect(whole, whole)


def _quantile(
    gate: GateSpec, merged: WindowCounts, agents: Mapping[str, WindowCounts], at: Setting
) -> Measured:
    share = share_above(_percent(gate))
    counts = merged.get(gate.metric.name, Arm.CANDIDATE)
    both = counts.with_warmup()
    h = counts.histogram
    k, effect = _effect(gate, merged, both.histogram.n, at)
    up = counts.above_up.get(gate.name, 0)

    below = counts.above_down.get(gate.name, 0)
    log_pass = quantile_evidence(share, h.n, up, below, h.missing, effect).log_pass

    def harm(c: MetricCounts) -> float:
        return quantile_harm(share, c.histogram.n, c.above_down.get(gate.name, 0), effect)

    per_agent = {
        name: harm(c.get(gate.metric.name, Arm.CANDIDATE).with_warmup()) for name, c in agents.items()
    }
    log_fail = pool_and_agents(harm(both), per_agent)
    limit = float(gate.limit)

    def upper(alpha: float) -> float:
        # The exact count at the limit is sharper than the grid beside it.
        grid = bounds.quantile_upper(h, share, alpha, effect)
        return min(grid, limit) if log_pass >= -math.log(alpha) else max(grid, limit)

    return Measured(
        Evidence(log_pass, log_fail),
        h.measured,
        k,
        h.quantile(1.0 - share),
        upper,
        lambda alpha: bounds.quantile_lower(both.histogram, share, alpha, effect),
        lambda: forecast.units_for_share(share, up / ONE + h.missing, h.n, at.alpha_pass, k or effect.k_pass),
    )


def _ratio(gate: GateSpec, merged: WindowCounts, at: Setting) -> Measured:
    share, ratio = share_above(_percent(gate)), float(gate.limit)
    c = merged.get(gate.metric.name, Arm.CANDIDATE)
    b = merged.get(gate.metric.name, Arm.BASELINE)
    k, effect = _effect(gate, merged, c.histogram.n + b.histogram.n, at)
    clean = RatioEvidence(c.histogram, b.histogram, share, effect)
    warm = clean
    if c.warmup.n or b.warmup.n:
        warm = RatioEvidence(c.with_warmup().histogram, b.with_warmup().histogram, share, effect)
    qc, qb = c.histogram.quantile(1.0 - share), b.histogram.quantile(1.0 - share)
    blocked = None
    if at.fraction >= 1.0 or (b.histogram.measured == 0 and c.histogram.measured >= gate.min_samples):
        blocked = Reason.NO_CONCURRENT_BASELINE
    elif qb == 0.0:
        blocked = Reason.NO_DATA
    return Measured(
        Evidence(clean.log_pass(ratio), warm.log_fail(ratio)),
        c.histogram.measured,
        k,
        qc / qb if qc is not None and qb else None,
        clean.upper,
        warm.lower,
        lambda: forecast.units_for_ratio(b.histogram, share, ratio, at.fraction, k or effect.k_pass),
        blocked,
    )


def _reference(gate: GateSpec, merged: WindowCounts, at: Setting) -> Measured:
    """4.1 for the candidate alone against a multiple of what an earlier window said of the baseline. Counted
    on the grid, outward: the limit is not known when agents are told what to count."""
    share, reference = share_above(_percent(gate)), at.reference or math.nan
    counts = merged.get(TPOT_RATIO, Arm.CANDIDATE)
    h, both = counts.histogram, counts.with_warmup().histogram
    base = gate.name.removesuffix(ABSOLUTE_SUFFIX)
    sums, sessions = (merged.blocks.get(name) for name in (base, base + SESSION_BLOCKS))
    k, effect = _effect_of(
        gate,
        None if sums is None else one_arm(sums, candidate=True),
        both.n,
        at,
        None if sessions is None else one_arm(sessions, candidate=True),
    )
    found, value = Evidence(0.0, 0.0), h.quantile(1.0 - share)
    if at.reference is not None:
        line = float(gate.limit) * reference
        # Units of the line's own bin lie on either side of it.
        certain = both.exceed((index(line) >> both.shift) + 1, worst=False)
        possible = h.exceed(index(line) >> h.shift, worst=False)
        found = quantile_evidence(share, h.n, possible * ONE, 0, h.missing, effect)
        found = Evidence(found.log_pass, quantile_harm(share, both.n, certain * ONE, effect))
    return Measured(
        found,
        h.measured,
        k,
        value / reference if value is not None and at.reference is not None else None,
        lambda alpha: bounds.quantile_upper(h, share, alpha, effect) / reference,
        lambda alpha: bounds.quantile_lower(both, share, alpha, effect) / reference,
        lambda: None,
        Reason.NO_DATA if at.reference is None else None,
    )


def _mean(gate: GateSpec, merged: WindowCounts, agents: Mapping[str, WindowCounts], at: Setting) -> Measured:
    limit = float(gate.limit)
    counts = merged.get(gate.metric.name, Arm.CANDIDATE)
    h, both = counts.histogram, counts.with_warmup().histogram
    k, effect = _effect(gate, merged, both.n, at)
    per_agent = {
        name: mean_harm(c.get(gate.metric.name, Arm.CANDIDATE).with_warmup().histogram, limit, effect)
        for name, c in agents.items()
    }
    log_fail = pool_and_agents(mean_harm(both, limit, effect), per_agent)

    def expected() -> float:
        law = [(0.0, 0.6), (min(1.0, 1.25 * limit), 0.4)]
        if h.n >= _ENOUGH_FOR_A_LAW:
            law = [(x, w / h.n) for x, w in h.cells(upper=True)]
        return forecast.units_for_law(limit, law, at.alpha_pass, k or effect.k_pass)

    return Measured(
        Evidence(mean_evidence(h, limit, effect).log_pass, log_fail),
        h.measured,
        k,
        bounds.sample_mean(h),
        lambda alpha: bounds.mean_upper(h, alpha, effect),
        lambda alpha: bounds.mean_lower(both, alpha, effect),
        expected,
    )


def _paired(gate: GateSpec, merged: WindowCounts, at: Setting) -> Measured:
    pairs = probe_pairs(gate, merged)
    scored = [p for p in pairs if not p.missing]
    # Prompts are drawn one by one, so they are not clustered unless someone says so.
    k = float(gate.design_effect) if gate.design_effect is not None else 1.0
    effect = Effect(k, k)
    limit = float(gate.limit)

    def expected() -> float:
        law = [(0.5, 1.0)]
        if len(pairs) >= _ENOUGH_FOR_A_LAW:
            law = [(x, w / len(pairs)) for x, w in paired_cells(pairs, upper=True)]
        return forecast.units_for_law((1.0 + limit) / 2.0, law, at.alpha_pass, k)

    return Measured(
        paired_evidence(pairs, limit, effect),
        len(scored),
        k,
        math.fsum((p.lo + p.hi) / 2.0 for p in scored) / len(scored) if scored else None,
        lambda alpha: bounds.paired_upper(pairs, alpha, effect),
        lambda alpha: bounds.paired_lower(pairs, alpha, effect),
        expected,
    )


def _percent(gate: GateSpec) -> Decimal:
    if gate.quantile is None:
        raise ValueError(f"gate {gate.name} has no quantile")
    return gate.quantile
