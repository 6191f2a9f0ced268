"""Golden values of the statistics: grid, e-values, kinds of gates, design effect, sample sizes.

The ids are those of the specification's vectors; the figures are literals, computed by its reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

from kvtier_evidence import bounds, forecast, gates
from kvtier_evidence.design import BlockSums, Estimate, design_effect, design_effect_pair, used_effect
from kvtier_evidence.evalues import (
    Side,
    bets,
    growth,
    log_e,
    log_e_counts,
    min_units_without_event,
)
from kvtier_evidence.gates import ONE, Effect, Pair, RatioEvidence
from kvtier_evidence.grid import GAMMA, Histogram, edge, index
from kvtier_evidence.limits import share_above
from tests.unit.evidence.evidence_arrays import log_e_array

P99 = share_above(Decimal(99))
LN_30MS = math.log(0.03)


def close(got: Any, want: Any, tol: float = 1e-9) -> None:
    """Exact for integers, flags and infinities; relative `tol` (absolute under 1) for floats."""
    got = list(got) if isinstance(got, (tuple, list)) else [got]
    want = list(want) if isinstance(want, (tuple, list)) else [want]
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        if isinstance(w, float) and math.isfinite(w):
            assert abs(g - w) <= tol * max(1.0, abs(w)), (got, want)
        else:
            assert g == w, (got, want)


def lognormal(n: int, mu: float, sigma: float) -> Histogram:
    """The n mid-quantiles of a lognormal law."""
    h, normal = Histogram(), NormalDist()
    for i in range(n):
        h.add(math.exp(mu + sigma * normal.inv_cdf((i + 0.5) / n)))
    return h


def many(parts: Sequence[tuple[float, int]]) -> Histogram:
    h = Histogram()
    for x, c in parts:
        h.add(x, c)
    return h


# ---------------------------------------------------------------- grid


def g7() -> list[int]:
    h = Histogram()
    for x in (0.0, 0.01, 0.02, 0.04, 0.04, math.nan, math.inf, -1.0, None):
        h.add(x)
    at = index(0.02) + 1
    return [h.n, h.zero, h.missing, h.exceed(at, worst=False), h.exceed(at, worst=True)]


GRID = {
    "G1": (lambda: index(1.0), -1),
    "G2": (lambda: index(2.0), 255),
    "G3": (lambda: index(1.0000000001), 0),
    "G4": (lambda: [index(0.02), index(0.05), index(1e-9), index(3600.0)], [-1445, -1107, -7654, 3024]),
    "G5": (lambda: [edge(0), edge(18), edge(256)], [1.0, 1.0499440858, 2.0]),
    "G6": (lambda: GAMMA - 1, 0.0027112750502),
    "G7": (g7, [9, 1, 4, 2, 6]),
}

# ---------------------------------------------------------------- e-values

CELLS = [(0.0, 600), (0.01, 300), (0.05, 100)]


def expectation(side: Side, m: float, n: int) -> float:
    """E[e] under Binomial(n, m)."""
    total = 0.0
    for s in range(n + 1):
        pmf = math.lgamma(n + 1) - math.lgamma(s + 1) - math.lgamma(n - s + 1)
        pmf += s * math.log(m) + (n - s) * math.log1p(-m)
        total += math.exp(log_e_counts(side, m, n, s) + pmf)
    return total


def e13() -> float:
    law = np.array([1.0])
    for q in [0.002] * 30 + [0.018] * 30:
        law = np.convolve(law, [1 - q, q])
    return float(sum(p * math.exp(log_e_counts(Side.PASS, 0.01, 60, s)) for s, p in enumerate(law)))


def crossing(side: Side, m: float, q: float, alpha: float, last: int) -> float:
    """Exact probability that the e-value of Bernoulli(q) units ever reaches 1/alpha within `last` units."""
    p, hit = np.zeros(last + 2), 0.0
    p[0], top = 1.0, 1
    for n in range(1, last + 1):
        nxt = np.zeros_like(p)
        nxt[: top + 1] += p[: top + 1] * (1 - q)
        nxt[1 : top + 2] += p[: top + 1] * q
        top = min(last, top + 1)
        live = np.nonzero(nxt[: top + 1] > 1e-16)[0]
        over = live[log_e_array(side, m, float(n), live.astype(float)) >= -math.log(alpha)]
        hit += nxt[over].sum()
        nxt[over] = 0.0
        p = nxt
    return float(hit)


E_VALUES = {
    "E1": (
        lambda: bets(Side.PASS, 0.01),
        [
            1.0101010101,
            0.505050505051,
            0.252525252525,
            0.126262626263,
            0.0631313131313,
            0.0315656565657,
            0.0157828282828,
            0.00789141414141,
            0.0,
        ],
    ),
    "E2": (
        lambda: [len(bets(Side.FAIL, 0.01)), bets(Side.FAIL, 0.01)[0], bets(Side.FAIL, 0.01)[-1]],
        [13, 100.0, 0.0],
    ),
    "E3": (lambda: log_e_counts(Side.PASS, 0.01, 1000, 2), 1.79081509663),
    "E4": (lambda: log_e_counts(Side.PASS, 0.01, 1000, 10), -0.292500694706),
    "E5": (lambda: log_e_counts(Side.FAIL, 0.01, 1000, 30), 10.4826174966),
    "E6": (lambda: log_e_counts(Side.FAIL, 0.01, 1000, 10), -1.06774217143),
    "E7": (lambda: [log_e_counts(Side.PASS, 0.01, 0, 0), log_e_counts(Side.FAIL, 0.01, 0, 0)], [0.0, 0.0]),
    "E8": (lambda: log_e_counts(Side.PASS, 0.01, 3000, 6, 3.0), 1.79081509663),
    "E9": (
        lambda: [log_e(Side.PASS, 0.02, CELLS), log_e(Side.FAIL, 0.02, CELLS)],
        [9.86376036708, -1.80690129587],
    ),
    "E10": (lambda: expectation(Side.PASS, 0.01, 400), 1.0, 1e-7),
    "E11": (lambda: expectation(Side.FAIL, 0.01, 400), 1.0, 1e-7),
    "E12": (lambda: expectation(Side.PASS, 0.505, 60), 1.0, 1e-7),
    "E13": (e13, 0.999710004316),
    "E14": (lambda: crossing(Side.PASS, 0.01, 0.01, 0.05, 3000), 0.00975455324732, 1e-6),
    "E15": (lambda: crossing(Side.PASS, 0.01, 0.005, 0.05, 3000), 0.580713928525, 1e-6),
    "E16": (lambda: crossing(Side.FAIL, 0.01, 0.01, 0.05, 1500), 0.0128873166216, 1e-6),
    "E17": (lambda: crossing(Side.FAIL, 0.01, 0.03, 1 / 3000, 1500), 0.945128164949, 1e-6),
}

# ---------------------------------------------------------------- sample sizes


def grown(side: Side, shares: Sequence[float]) -> list[float]:
    return [growth(side, 0.01, [(1.0, q), (0.0, 1.0 - q)]) for q in shares]


def n6() -> int:
    return next(
        n
        for n in range(1, 2000)
        if gates.paired_evidence([Pair.of(0.0)] * n, 0.01).log_pass >= math.log(1 / 0.04)
    )


SIZES = {
    "N1": (
        lambda: [min_units_without_event(0.01, a) for a in (0.05, 0.04, 0.008, 0.001)],
        [503, 527, 695, 905],
    ),
    "N2": (lambda: [min_units_without_event(0.05, 0.04), min_units_without_event(0.001, 0.04)], [104, 5294]),
    "N4": (
        lambda: grown(Side.PASS, (0, 0.0025, 0.005, 0.0075)),
        [0.0100503358535, 0.00329233159348, 0.00154686915701, 0.000345538368576],
    ),
    "N5": (
        lambda: grown(Side.FAIL, (0.015, 0.02, 0.05, 0.1)),
        [0.00104891434362, 0.00377208115943, 0.0403118076212, 0.139160475916],
    ),
    "N6": (n6, 527),
    "N7": (
        lambda: [gates.zero_rate_bound(2000, 0.05), gates.zero_rate_bound(100000, 0.05)],
        [0.00149674489519, 2.99568740194e-05],
    ),
}

# ---------------------------------------------------------------- quantiles


def errors() -> tuple[Histogram, int]:
    """4,000 mid-quantiles of lognormal(ln .02, .5) and how many lie above .08."""
    h = lognormal(4000, math.log(0.02), 0.5)
    normal = NormalDist()
    above = sum(0.02 * math.exp(0.5 * normal.inv_cdf((i + 0.5) / 4000)) > 0.08 for i in range(4000))
    return h, above


def quantile(missing: int) -> list[float]:
    h, above = errors()
    h.add(None, missing)
    e = gates.quantile_evidence(P99, h.n, above * ONE, above * ONE, h.missing)
    return [e.log_pass, e.log_fail]


def q2() -> list[float]:
    h, _ = errors()
    return [bounds.quantile_lower(h, P99, 0.04), bounds.quantile_upper(h, P99, 0.04)]


QUANTILES = {
    "Q1": (lambda: [errors()[1], *quantile(0)], [11, 10.2778831244, -2.30378245566]),
    "Q2": (q2, [0.0585677385659, 0.0717547799275], 1e-12),
    "Q3": (lambda: q2()[0] < 0.0640014801589 < q2()[1], True),
    "Q4": (lambda: quantile(20), [0.29156092606, -2.30649931956]),
    "Q5": (lambda: bounds.quantile_upper(many([(0.01, 250)]), P99, 0.05), math.inf),
}

# ---------------------------------------------------------------- ratios


@pytest.fixture(scope="module")
def baseline() -> Histogram:
    return lognormal(40000, LN_30MS, 0.35)


def ratio_at(candidate: Histogram, baseline: Histogram, limit: float) -> list[float]:
    e = RatioEvidence(candidate, baseline, P99).evidence(limit)
    return [e.log_pass, e.log_fail]


def times(h: Histogram, n: int) -> Histogram:
    out = Histogram()
    for _ in range(n):
        out.merge(h)
    return out


def same() -> Histogram:
    return lognormal(10000, LN_30MS, 0.35)


def r5(b: Histogram) -> list[float]:
    r = RatioEvidence(same(), b, P99)
    return [r.lower(0.04), r.upper(0.04)]


def r7(b: Histogram) -> float:
    return bounds.quantile_upper(same(), P99, 0.02) / bounds.quantile_lower(b, P99, 0.02)


def r9() -> list[float]:
    slow = lognormal(2000, math.log(0.03 * 4), 0.35)
    return [ratio_at(slow, lognormal(n, LN_30MS, 0.35), 1.05)[1] for n in (600, 1400)]


def r10() -> int:
    return next(
        n for n in range(1, 5000) if log_e_counts(Side.PASS, 0.01, n, 0) - math.log(13) >= math.log(3000)
    )


RATIOS: dict[str, tuple[Callable[[Histogram], Any], Any]] = {
    "R1": (lambda b: ratio_at(same(), b, 1.05), [0.87468788272, -3.82604087599]),
    "R2": (lambda b: ratio_at(lognormal(10000, math.log(0.027), 0.35), b, 1.05)[0], 25.2391342488),
    "R3": (
        lambda b: ratio_at(lognormal(10000, math.log(0.03 * 1.05), 0.35), b, 1.05),
        [-2.75733953851, -2.60711197727],
    ),
    "R4": (lambda b: ratio_at(lognormal(100, math.log(0.063), 0.35), b, 1.05)[1], 89.7737352099),
    "R5": (r5, [0.947287990793, 1.06714040068]),
    "R6": (lambda b: ratio_at(same(), Histogram(), 1.05)[0] < math.log(25), True),
    "R7": (r7, 1.07876079776),
    "R8": (lambda b: ratio_at(times(same(), 2), times(b, 10), 1.10)[0], 27.677644576),
    "R9": (lambda b: r9(), [1.77538472354, 9.74013151568]),
    "R10": (lambda b: r10(), 1271),
}

# ---------------------------------------------------------------- means, pairs, split, design effect, agents

STALLS = [(0.0, 1200), (0.004, 500), (0.012, 250), (0.03, 50)]


def stalls() -> list[float]:
    e = gates.mean_evidence(many(STALLS), 0.02)
    return [e.log_pass, e.log_fail]


def paired(lost: int, won: int, equal: int) -> list[float]:
    pairs = [Pair.of(1.0)] * lost + [Pair.of(-1.0)] * won + [Pair.of(0.0)] * equal
    e = gates.paired_evidence(pairs, 0.01)
    return [e.log_pass, e.log_fail]


def one_arm(blocks: Sequence[tuple[int, float]]) -> float:
    sums = BlockSums()
    for n, x in blocks:
        sums.add_one_arm(n, x)
    return design_effect(sums)


def two_arm(blocks: Sequence[tuple[int, float, int, float]]) -> float:
    sums = BlockSums()
    for block in blocks:
        sums.add_two_arm(*block)
    return design_effect_pair(sums, 0.5)


def d5() -> list[float | None]:
    used = [used_effect(Estimate(*e)) for e in ((2.0, 300, 20.0), (0.9, 300, 20.0), (2.0, 80, 20.0))]
    return [k for u in used for k in (u.k_pass, u.k_fail)]


def over_agents(pooled: tuple[int, int], agents: Sequence[tuple[int, int]]) -> list[float]:
    pool = log_e_counts(Side.FAIL, 0.01, *pooled)
    each = {str(i): log_e_counts(Side.FAIL, 0.01, n, s) for i, (n, s) in enumerate(agents)}
    return [pool, gates.pool_and_agents(pool, each)]


OTHERS = {
    "M1": (stalls, [31.6574083388, -2.27483920032]),
    "M2": (lambda: log_e_counts(Side.PASS, 0.02, 2000, 0.004 * 500 + 0.012 * 250 + 0.03 * 50), 13.5366599486),
    "P1": (lambda: paired(15, 12, 973), [0.179523847995, -0.90587231821]),
    "P2": (lambda: paired(60, 10, 930), [-1.24123712567, 10.4502165592]),
    "S1": (lambda: gates.split_log_e(520, 10000, 0.05), -1.9306950672),
    "S2": (lambda: gates.split_log_e(650, 10000, 0.05), 19.0826708257),
    "S3": (lambda: gates.split_log_e(0, 200, 0.05), 4.66307825852),
    "D1": (lambda: one_arm([(10, 0)] * 8 + [(10, 5)] * 2), 4.93827160494),
    "D2": (lambda: one_arm([(10, 1)] * 10), 1.0),
    "D3": (
        lambda: [
            two_arm([(10, 5, 10, 5)] * 20 + [(10, 0, 10, 0)] * 80),
            one_arm([(10, 5)] * 20 + [(10, 0)] * 80),
        ],
        [1.0, 4.48933782267],
    ),
    "D4": (
        lambda: two_arm([(10, 5, 10, 0)] * 20 + [(10, 0, 10, 5)] * 20 + [(10, 0, 10, 0)] * 60),
        5.61167227834,
    ),
    "D5": (d5, [3.0, 3.0, 1.0, 1.0, None, 20]),
    "A1": (lambda: over_agents((5000, 85), [(500, 5)] * 9 + [(500, 40)]), [7.77703046105, 43.6469385069]),
    "A2": (lambda: over_agents((25000, 216), [(500, 4)] * 49 + [(500, 20)]), [-2.41455188018, 5.94596787906]),
}

PLAIN = GRID | E_VALUES | SIZES | QUANTILES | OTHERS


@pytest.mark.parametrize("vid", PLAIN)
def test_vector(vid: str) -> None:
    compute, want, *tol = PLAIN[vid]
    close(compute(), want, *tol)


@pytest.mark.parametrize("vid", RATIOS)
def test_ratio_vector(vid: str, baseline: Histogram) -> None:
    compute, want = RATIOS[vid]
    close(compute(baseline), want, 1e-8)


def test_n3_the_fixed_sample_minimum_is_smaller() -> None:
    """N3, for contrast: one look at a sample of fixed size could do with 299 units."""
    fixed = math.ceil(math.log(0.05) / math.log(0.99))
    assert fixed == 299
    assert fixed < min_units_without_event(0.01, 0.05)


def test_y1_looks_at_every_unit_stay_under_the_budget() -> None:
    """Y1: 2,000 runs at the limit, 20,000 units each, a look at every unit, alpha .05."""
    rng = np.random.default_rng(20240)
    t = np.cumsum(rng.geometric(0.01, size=(2000, 330)), 1)
    before = np.minimum(t - 1, 20000).astype(float)
    alive = np.concatenate([np.ones((2000, 1), bool), t[:, :-1] <= 20000], 1)
    seen = np.broadcast_to(np.arange(330.0), t.shape)
    e = np.stack([log_e_array(Side.PASS, 0.01, before[:, j], seen[:, j].copy()) for j in range(330)], 1)
    rate = float(((e >= math.log(20)) & alive).any(1).mean())
    assert rate == pytest.approx(0.0155, abs=6e-3)
    assert rate <= 0.05


def test_edges_hold_every_value_between_them() -> None:
    for e in range(-600, 400):
        x = 10 ** (e / 97)
        assert edge(index(x)) < x <= edge(index(x) + 1)
    assert [index(edge(i)) for i in range(-3000, 3000)] == [i - 1 for i in range(-3000, 3000)]


def test_halving_the_resolution_is_an_exact_merge() -> None:
    h = lognormal(2000, LN_30MS, 0.35)
    for shift in (1, 3):
        coarse = h.copy()
        coarse.coarsen(shift)
        direct = Histogram(shift=shift)
        normal = NormalDist()
        for i in range(2000):
            direct.add(math.exp(LN_30MS + 0.35 * normal.inv_cdf((i + 0.5) / 2000)))
        assert coarse == direct
        assert coarse.consistent()


def test_ratio_with_a_coarse_arm_is_never_sharper(baseline: Histogram) -> None:
    fine = RatioEvidence(same(), baseline, P99)
    halved = same()
    halved.coarsen(2)
    coarse = RatioEvidence(halved, baseline, P99)
    assert coarse.upper(0.04) >= fine.upper(0.04)
    assert coarse.lower(0.04) <= fine.lower(0.04)


@pytest.mark.parametrize("k", [1.0, 2.0, 5.0], ids=lambda k: f"k{k:g}")
def test_bounds_are_where_the_evidence_is_enough(baseline: Histogram, k: float) -> None:
    """Each displayed bound is the limit at which the verdict's own inequality turns."""
    effect, alpha, need = Effect(k, k), 0.04, math.log(25)
    r = RatioEvidence(same(), baseline, P99, effect)
    assert r.log_pass(r.upper(alpha)) >= need > r.log_pass(r.upper(alpha) / GAMMA)
    h = many(STALLS)
    up, low = bounds.mean_upper(h, alpha, effect), bounds.mean_lower(h, alpha, effect)
    assert (
        gates.mean_evidence(h, up, effect).log_pass
        >= need
        > gates.mean_evidence(h, up - 1e-4, effect).log_pass
    )
    assert gates.mean_evidence(h, low, effect).log_fail >= need
    assert low < sum(x * c for x, c in STALLS) / 2000 < up
    pairs = [Pair.of(1.0)] * 60 + [Pair.of(-1.0)] * 10 + [Pair.of(0.0)] * 930
    assert bounds.paired_lower(pairs, alpha, effect) < 0.05 < bounds.paired_upper(pairs, alpha, effect)


PROBE_SETS = {
    "all scored, mean at the limit": ([0.0] * 9 + [0.1], 10, "0.01", (True, False)),
    "all scored, just over": ([0.0] * 9 + [0.11], 10, "0.01", (False, True)),
    "one to come, can still win": ([0.0] * 9, 10, "0.01", (False, False)),
    "the rest cannot bring it back": ([1.0] * 6, 10, "0.01", (False, True)),
    "a missing one is never a Pass": ([0.0] * 9 + [None], 10, "0.5", (False, False)),
    "gains outweigh": ([1.0, -1.0, -1.0, 0.0], 4, "0.01", (True, False)),
}


@pytest.mark.parametrize("case", PROBE_SETS)
def test_probe_set_is_exact(case: str) -> None:
    differences, size, limit, want = PROBE_SETS[case]
    pairs = [Pair.of(d) for d in differences]
    found = gates.probe_set_outcome(pairs, size, Fraction(Decimal(limit)))
    assert (found.inside, found.outside) == want


FORECASTS = {
    "f5-1.05": (0.05, 1.05, 18000),
    "f5-1.10": (0.05, 1.10, 4720),
    "f25-1.05": (0.25, 1.05, 16800),
    "f50-1.05": (0.5, 1.05, 22500),
    "f50-1.10": (0.5, 1.10, 6750),
}


@pytest.mark.parametrize("case", FORECASTS)
def test_ratio_forecast_fits_the_simulated_medians(case: str, baseline: Histogram) -> None:
    """Section 6.1: the formula fits the measured 1.05 and 1.10 columns within a fifth."""
    fraction, ratio, want = FORECASTS[case]
    assert forecast.units_for_ratio(baseline, P99, ratio, fraction) == pytest.approx(want, rel=0.2)


def test_forecast_of_other_kinds() -> None:
    assert forecast.units_for_share(0.01, 0, 100_000, 0.04) == pytest.approx(530, abs=60)
    assert forecast.units_for_share(0.01, 50, 10_000, 0.04) == pytest.approx(3500, rel=0.05)
    assert forecast.units_for_law(0.02, [(0.0, 0.6), (0.025, 0.4)], 0.04) == pytest.approx(539, rel=0.05)
    assert forecast.units_for_law(0.02, [(0.03, 1.0)], 0.04) == math.inf
    assert forecast.units_for_ratio(Histogram(), P99, 1.05, 0.05) is None
    assert forecast.hours(3600, 0.5) == 2.0
