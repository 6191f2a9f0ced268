"""What the simulation must show, and how surely: exact binomial bounds and the goals of section 7."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy import stats

from tests.soak.gates.ledger import Row
from tests.soak.gates.scenarios import BY_NAME, G2, GUARDED
from tests.soak.gates.walk import End

ALPHA_P, ALPHA_F = 0.05, 0.01
CONFIDENCE = 0.99
ENOUGH = 200
"""Fewer rollouts say nothing."""
FULL_SIZE = 10_000
"""Rollouts of a row that the specification asks for."""
KNOWN_MISSES = frozenset({"detect: tail 2x, f 25 %: G2, median guard"})
"""Goals that are not reached, as the page says. Another miss is news, and one of these that is reached."""


@dataclass(frozen=True)
class Claim:
    name: str
    held: bool
    value: str


def news(found: Sequence[Claim]) -> list[Claim]:
    """What is not as the page says."""
    return [claim for claim in found if claim.held is (claim.name in KNOWN_MISSES)]


def upper(events: int, n: int) -> float:
    """Clopper-Pearson: the probability that would give so few events with chance 1 %."""
    return 1.0 if events >= n else float(stats.beta.ppf(CONFIDENCE, events + 1, n - events))


def quantile_of(row: Row, end: End, q: float) -> float:
    """Of the units until `end`, over all rollouts: those that never came there have needed more."""
    got = sorted(row.units.get(end, []))
    place = math.ceil(q * row.rollouts) - 1
    return float(got[place]) if 0 <= place < len(got) else math.inf


def claims(rows: Mapping[str, Row]) -> list[Claim]:
    out = []
    for name, row in rows.items():
        scenario = BY_NAME.get(name)
        if scenario is None or row.rollouts < ENOUGH:
            continue
        n = row.rollouts
        # Even none in so few would not show it.
        too_few = upper(0, n) > ALPHA_F
        if scenario.group not in ("detect", "power"):
            promoted = row.ends[End.PROMOTED]
            high = upper(promoted, n)
            out.append(
                Claim(
                    f"{name}: false promotion", high <= ALPHA_P, f"{promoted} of {n}, 99 % bound {high:.3%}"
                )
            )
            if scenario.group == "harm" and not scenario.from_random:
                # It leaves no step but by a false promotion, so it is served nowhere but in Canary.
                out.append(Claim(f"{name}: G1", high <= ALPHA_P, f"left its first step in {promoted} of {n}"))
            if not scenario.harms and not (too_few and row.ends[End.ROLLED_BACK] <= 0.5 * ALPHA_F * n):
                back = row.ends[End.ROLLED_BACK]
                high = upper(back, n)
                out.append(
                    Claim(f"{name}: false rollback", high <= ALPHA_F, f"{back} of {n}, 99 % bound {high:.3%}")
                )
        if name in G2:
            units = quantile_of(row, End.ROLLED_BACK, 0.95)
            out.append(
                Claim(f"{name}: G2", units <= G2[name], f"95 % within {units:g} units, goal {G2[name]}")
            )
            out.append(
                Claim(
                    f"{name}: G3",
                    units <= G2[name],
                    f"at most 5 % of the planned requests from {20 * units:g} requests on",
                )
            )
        if name in GUARDED:
            units = quantile_of(row, End.ROLLED_BACK, 0.95)
            goal = GUARDED[name]
            out.append(
                Claim(f"{name}: G2, median guard", units <= goal, f"95 % within {units:g} units, goal {goal}")
            )
    return out
