"""What a gate will need of a stage's traffic, said before any of it has come.

Forecasts for people (`Feasible`); no verdict depends on them. Where nothing is known yet, the light tail of
the specification's tables is assumed. Knows gates and fractions; no cluster and no clock.

Sections 4.5, 6.1 and 9 of the evidence specification.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Final

from kvtier_evidence import forecast
from kvtier_evidence.evalues import Side, log_e
from kvtier_evidence.gatespec import GateSpec
from kvtier_evidence.limits import share_above
from kvtier_evidence.metrics import Kind, Scope

PLANNED_SIGMA: Final = 0.35
"""Of the lognormal time per token that a ratio gate is planned for: the light tail of the tables."""
PLANNED_ZEROS: Final = 0.6
"""Share of requests without any stall that a stall gate is planned for."""
_NO_CHANGE: Final = 0.5
"""(1 + D) / 2 of a prompt with the same score in both arms."""


@dataclass(frozen=True, slots=True)
class Need:
    """units: of the gate, until Pass (median), its floor included; infinite: it never will. per_request:
    units that one request of the blast radius gives on average; None: they do not come from traffic. never:
    why it cannot pass in such a step; empty where it can."""

    gate: str
    units: float
    per_request: float | None
    never: str = ""

    @property
    def requests(self) -> float:
        """Requests of the blast radius, whichever arm; 0 where traffic does not decide."""
        if self.never:
            return math.inf
        return self.units / self.per_request if self.per_request else 0.0


def need(gate: GateSpec, *, fraction: float, sample: float, alpha: float) -> Need:
    """`fraction` of the requests are on the candidate, `sample` of all are answered twice and leave the
    latency gates. A design effect that is not declared counts as 1."""
    found = _need(gate, fraction, sample, alpha)
    if found.per_request == 0.0:
        return replace(found, never=_without_units(gate, sample))
    if gate.metric.kind is Kind.RATIO and not fraction < 1.0:
        return replace(found, never="no request is left on the baseline to compare with")
    return found if math.isfinite(found.units) else replace(found, never="its limit leaves no room")


def _without_units(gate: GateSpec, sample: float) -> str:
    compares = gate.metric.kind is Kind.QUANTILE or gate.metric.exact_only
    if compares or sample < 1.0:
        return "no request is answered twice" if compares else "no request is served by the candidate"
    return "every request is answered twice, which leaves none to be timed"


def _need(gate: GateSpec, fraction: float, sample: float, alpha: float) -> Need:
    k = float(gate.design_effect or 1)
    served = fraction * (1.0 - sample)
    floor = gate.min_samples * k
    match gate.metric.kind:
        case Kind.QUANTILE:
            units = forecast.units_for_share(_share(gate), 0.0, 0, alpha, k)
            return Need(gate.name, max(floor, units), sample)
        case Kind.RATIO:
            share = _share(gate)
            variance = planned_variance(1.0 - share)
            units = forecast.units_for_variance(variance, share, float(gate.limit), fraction, k)
            return Need(gate.name, max(floor, units), served)
        case Kind.MEAN:
            limit = float(gate.limit)
            law = [(0.0, PLANNED_ZEROS), (min(1.0, 1.25 * limit), 1.0 - PLANNED_ZEROS)]
            return Need(gate.name, max(floor, forecast.units_for_law(limit, law, alpha, k)), served)
        case Kind.ZERO if gate.metric.exact_only:
            return Need(gate.name, float(gate.min_samples), sample)
        case Kind.ZERO:
            return Need(gate.name, float(gate.min_samples), fraction + (1.0 - fraction) * sample)
        case Kind.EXTERNAL:
            # How many of its units one request gives is its source's affair.
            return Need(gate.name, floor, None)
        case Kind.PAIRED if gate.scope is Scope.PROBE_SET:
            return Need(gate.name, float(gate.probe_set_size), None)
        case _:
            return Need(gate.name, float(min_prompts(float(gate.limit), alpha)), None)


def planned_variance(p: float) -> float:
    """V = p(1 - p)/(Q f(Q))^2 of a lognormal, where Q f(Q) is the normal density at z_p over sigma."""
    normal = NormalDist()
    return p * (1.0 - p) * (PLANNED_SIGMA / normal.pdf(normal.inv_cdf(p))) ** 2


def min_prompts(limit: float, alpha: float) -> int:
    """Prompts, all with the same score in both arms, until a paired gate can Pass (N6)."""
    m, enough = (1.0 + limit) / 2.0, math.log(1.0 / alpha)
    low, high = 0, 1
    while log_e(Side.PASS, m, [(_NO_CHANGE, high)]) < enough:
        low, high = high, 2 * high
    while low + 1 < high:
        middle = (low + high) // 2
        if log_e(Side.PASS, m, [(_NO_CHANGE, middle)]) < enough:
            low = middle
        else:
            high = middle
    return high


def _share(gate: GateSpec) -> float:
    if gate.quantile is None:
        raise ValueError(f"gate {gate.name} has no quantile")
    return share_above(gate.quantile)
