"""How many candidate units the median guard needs, apart from how often somebody looks.

The goal of section 7 counts units at looks after every unit, of one law for all agents. A window of the
simulation has five unlike agents and a look every 25 units, and what comes before the next look is counted
too. Here both are varied alone, for a slowdown of everything by 2.1 against the guard's limit.

    python -m tests.soak.gates.guard --runs 400
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Final

import numpy as np

from kvtier_evidence.evalues import Side, bets, growth
from kvtier_evidence.gates import RatioEvidence
from kvtier_evidence.grid import SUB, Histogram
from kvtier_evidence.metrics import MEDIAN_GUARD_LIMIT
from tests.soak.gates.traffic import AGENT_SCALES, grid_index

SLOWER: Final = 2.1
SIGMA: Final = 0.35
NEED: Final = math.log(3000.0)
"""A cell of 1/30 of the budget of 1 %."""
LIMIT: Final = float(MEDIAN_GUARD_LIMIT)
ONE_LAW: Final = (1.0,)
FIVE_AGENTS: Final = tuple(float(one) for one in AGENT_SCALES)


def growth_rate(fraction: float, scales: Sequence[float]) -> float:
    """Of log e for each candidate unit, at the place of the baseline's median where it is least (4.3)."""

    def above(x: float) -> float:
        normal = NormalDist(sigma=SIGMA)
        return sum(1.0 - normal.cdf(math.log(x / scale)) for scale in scales) / len(scales)

    # The two bins are what 4.3 gives up to the grid.
    ratio = LIMIT * 2.0 ** (2.0 / SUB) / SLOWER
    rates = []
    for place in range(-2 * SUB, 3 * SUB):
        b, c = (above(2.0 ** (place / SUB) * r) for r in (1.0, ratio))
        mine = growth(Side.FAIL, 0.5, [(1.0, c), (0.0, 1.0 - c)])
        others = growth(Side.PASS, 0.5, [(1.0, b), (0.0, 1.0 - b)])
        rates.append(mine + (1.0 - fraction) / fraction * others)
    return min(rates)


def expected_units(fraction: float, scales: Sequence[float]) -> float:
    """What is needed, and what the two mixtures of bets cost, over the growth rate: about the median."""
    need = NEED + math.log(len(bets(Side.FAIL, 0.5))) + math.log(len(bets(Side.PASS, 0.5)))
    return need / growth_rate(fraction, scales)


def units_until_fail(rng: np.random.Generator, fraction: float, scales: Sequence[float], look: int) -> int:
    """Candidate units that had come by the look at which the guard fails; a look after every `look` of
    them on average, after each single one where that is 1."""
    arms = {False: Histogram(), True: Histogram()}
    while True:
        total = 1 if look == 1 else round(look / fraction)
        candidate = rng.random(total) < fraction
        times = np.exp(SIGMA * rng.standard_normal(total)) * rng.choice(np.asarray(scales), total)
        bins = grid_index(np.where(candidate, times * SLOWER, times))
        for one, mine in zip(bins.tolist(), candidate.tolist(), strict=True):
            arm = arms[mine]
            arm.bins[one] = arm.bins.get(one, 0) + 1
            arm.n += 1
        if look == 1 and not candidate[-1]:
            continue
        if RatioEvidence(arms[True], arms[False], 0.5).log_fail(LIMIT) >= NEED:
            return arms[True].n


def quantiles(runs: int, seed: int, fraction: float, scales: Sequence[float], look: int) -> tuple[int, int]:
    """Median and 95 %."""
    rng = np.random.default_rng(seed)
    got = sorted(units_until_fail(rng, fraction, scales, look) for _ in range(runs))
    return got[math.ceil(0.5 * runs) - 1], got[math.ceil(0.95 * runs) - 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    print("| f | agents | by the growth rate | look every | median | 95 % |\n|---|---|---|---|---|---|")
    for fraction in (0.25, 0.05):
        for name, scales in (("one law", ONE_LAW), ("five unlike", FIVE_AGENTS)):
            for look in (1, 10, 25):
                middle, high = quantiles(given.runs, given.seed, fraction, scales, look)
                rate = expected_units(fraction, scales)
                print(f"| {fraction:.0%} | {name} | {rate:.0f} | {look} | {middle} | {high} |", flush=True)


if __name__ == "__main__":
    main()
