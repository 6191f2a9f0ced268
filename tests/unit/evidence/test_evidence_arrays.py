"""What is computed where counts change is what is found by looking everywhere, in arrays."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from kvtier_evidence import bounds
from kvtier_evidence.evalues import Side, growth, log_e
from kvtier_evidence.gates import Effect, RatioEvidence
from kvtier_evidence.grid import Histogram
from tests.unit.evidence import evidence_arrays as arrays

ALPHAS = (0.04, 1e-3, 1e-9)
SHARES = (0.5, 0.25, 0.05, 0.01)


def drawn(rng: random.Random, n: int, scale: float, spread: float, shift: int) -> Histogram:
    h = Histogram()
    for _ in range(n):
        odd = rng.random()
        value = 0.0 if odd < 0.02 else None if odd < 0.04 else rng.lognormvariate(math.log(scale), spread)
        h.add(value)
    h.coarsen(shift)
    return h


LAWS = {
    # candidate's units, baseline's units, ratio of their scales, spread, resolution
    "alike": (300, 300, 1.0, 0.3, 0),
    "slower": (300, 300, 1.4, 0.3, 0),
    "faster": (400, 100, 0.5, 0.1, 0),
    "one bin each": (80, 80, 1.0, 1e-4, 0),
    "apart": (200, 200, 8.0, 0.05, 0),
    "wide": (500, 500, 1.1, 1.5, 2),
    "coarse": (300, 300, 1.2, 0.5, 8),
    "few": (3, 5, 1.0, 0.5, 3),
    "nothing of the baseline": (100, 0, 1.0, 0.3, 0),
    "nothing of the candidate": (0, 100, 1.0, 0.3, 0),
}


def same(got: float, want: float) -> bool:
    return got == want or abs(got - want) <= 1e-11 * max(1.0, abs(want))


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("effect", [Effect(), Effect(2.5, 3.0)], ids=["plain", "clustered"])
def test_a_ratio_is_least_where_it_is_least_of_all_places(
    law: tuple[int, int, float, float, int], share: float, effect: Effect
) -> None:
    n_c, n_b, ratio, spread, shift = law
    rng = random.Random(7)
    c, b = drawn(rng, n_c, 0.1 * ratio, spread, shift), drawn(rng, n_b, 0.1, spread, shift)
    got, want = RatioEvidence(c, b, share, effect), arrays.RatioByArrays(c, b, share, effect)
    for r in range(-3 * want.per_octave, 3 * want.per_octave + 1, max(1, want.per_octave // 7)):
        exact = 2.0 ** (r / want.per_octave)
        assert same(got.log_pass(exact), want.log_pass(r))
        assert same(got.log_fail(exact), want.log_fail(r))


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
@pytest.mark.parametrize("share", [0.5, 0.05])
def test_bounds_on_ratios_and_quantiles_are_those_of_all_edges(
    law: tuple[int, int, float, float, int], share: float
) -> None:
    n_c, n_b, ratio, spread, shift = law
    rng = random.Random(11)
    c, b = drawn(rng, n_c, 0.1 * ratio, spread, shift), drawn(rng, n_b, 0.1, spread, shift)
    effect = Effect(1.5, 2.0)
    ratios, everywhere = RatioEvidence(c, b, share, effect), arrays.RatioByArrays(c, b, share, effect)
    found = []
    # At full resolution thousands of ratios are tried one by one: once.
    for alpha in ALPHAS if shift else ALPHAS[:1] if share < 0.5 else ():
        assert ratios.upper(alpha) == everywhere.upper(alpha)
        assert ratios.lower(alpha) == everywhere.lower(alpha)
    for h in (c, b):
        for alpha in ALPHAS:
            if h.bins:
                found.append(bounds.quantile_upper(h, share, alpha, effect))
                assert found[-1] == arrays.quantile_upper(h, share, alpha, effect.k_pass)
                found.append(bounds.quantile_lower(h, share, alpha, effect))
                assert found[-1] == arrays.quantile_lower(h, share, alpha, effect.k_fail)
    assert max(n_c, n_b) < 80 or any(0.0 < x < math.inf for x in found), "all of them without an answer"


MEANS = {
    "one value": [(0.3, 40.0)],
    "zeros": [(0.0, 500.0)],
    "ones": [(1.0, 500.0)],
    "zeros and ones": [(0.0, 980.0), (1.0, 20.0)],
    "small": [(2.0 ** (-i / 16), 1.0 + i % 7) for i in range(60, 160)],
    "all over": [(i / 200, 1.0 + i % 3) for i in range(201)],
    "few": [(0.2, 1.0), (0.9, 1.0)],
    "many": [(0.01, 2e6), (0.02, 1e5)],
}


@pytest.mark.parametrize("cells", MEANS.values(), ids=MEANS)
@pytest.mark.parametrize("side", Side)
def test_means_are_those_of_arrays(cells: list[tuple[float, float]], side: Side) -> None:
    total = sum(w for _, w in cells)
    for m in (1e-4, 0.02, 0.3, 0.5, 0.97):
        for k in (1.0, 2.5):
            assert same(log_e(side, m, cells, k), arrays.log_e_cells(side, m, cells, k))
        factors = arrays.log_factors(side, m, np.array([x for x, _ in cells]))
        want = float((factors @ np.array([w / total for _, w in cells])).max())
        assert same(growth(side, m, [(x, w / total) for x, w in cells]), want)


@pytest.mark.parametrize("cells", MEANS.values(), ids=MEANS)
@pytest.mark.parametrize("side", Side)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_a_bound_on_a_mean_is_the_one_that_halves_find(
    cells: list[tuple[float, float]], side: Side, alpha: float
) -> None:
    asked = 0

    def evidence(m: float) -> float:
        nonlocal asked
        asked += 1
        return log_e(side, m, cells)

    found = (bounds._smallest if side is Side.PASS else bounds._largest)(evidence, alpha)
    assert found == arrays.halved(side, cells, alpha, 1.0)
    assert asked <= 40
