"""Design effect: how much less than n independent units a window's n units are worth.

Units of one block (a node's cohort, a session) share shocks. Block sums are quantised to 1/1024, so that
they are exact binary fractions and add up in any order. Knows blocks of counts; no time, no node.

Formulas: section 4.9 of the evidence specification.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import combinations_with_replacement
from typing import Final

MIN_BLOCKS: Final = 200
"""Blocks an estimate needs before a gate may Pass on it."""
SAFETY: Final = 1.5
"""Factor on the estimate."""
QUANTUM: Final = 1024
"""Exceedances of a block are kept in units of 1/QUANTUM."""

_ONE_ARM: Final = ("n", "x")
_TWO_ARM: Final = ("nc", "xc", "nb", "xb")


def quantise(x: float) -> float:
    """Nearest multiple of 1/QUANTUM."""
    return round(x * QUANTUM) / QUANTUM


@dataclass(slots=True)
class BlockSums:
    """Sums and products over blocks; `sums` has the names "a" and "a*b" of the block's variables."""

    blocks: int = 0
    sums: dict[str, float] = field(default_factory=dict)

    def add_one_arm(self, n: int, x: float) -> None:
        """A block of `n` units with `x` exceedances (a sum of fractions)."""
        self._add(dict(zip(_ONE_ARM, (float(n), quantise(x)), strict=True)))

    def add_two_arm(self, nc: int, xc: float, nb: int, xb: float) -> None:
        """A block with units and exceedances of the candidate's and the baseline's arm."""
        self._add(dict(zip(_TWO_ARM, (float(nc), quantise(xc), float(nb), quantise(xb)), strict=True)))

    def grow(self, before: tuple[int, float], after: tuple[int, float]) -> None:
        """Replaces a one-arm block that grew; `before` of (0, 0.0) is a new block."""
        self._grow(_ONE_ARM, before, after)

    def grow_arm(self, candidate: bool, before: tuple[int, float], after: tuple[int, float]) -> None:
        """The same for a two-arm block whose units are all of one arm, as a session's are."""
        self._grow(_TWO_ARM[:2] if candidate else _TWO_ARM[2:], before, after)

    def merge(self, other: BlockSums) -> None:
        self.blocks += other.blocks
        for name, v in other.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + v

    def since(self, earlier: BlockSums) -> BlockSums:
        """Increments from `earlier`. Raises ValueError when blocks were lost."""
        if earlier.blocks > self.blocks:
            raise ValueError("block sums decreased")
        was = earlier.sums
        sums = {a: v - was.get(a, 0.0) for a, v in self.sums.items() if a not in was or v != was[a]}
        return BlockSums(self.blocks - earlier.blocks, sums)

    def copy(self) -> BlockSums:
        return BlockSums(self.blocks, dict(self.sums))

    @property
    def units(self) -> float:
        """Units in all blocks, both arms."""
        return self.sums.get("n", 0.0) + self.sums.get("nc", 0.0) + self.sums.get("nb", 0.0)

    @property
    def mean_block(self) -> float:
        return self.units / self.blocks if self.blocks else 0.0

    def _grow(self, names: tuple[str, ...], before: tuple[int, float], after: tuple[int, float]) -> None:
        (n0, x0), (n1, x1) = before, after
        x0, x1 = quantise(x0), quantise(x1)
        self.blocks += n0 == 0
        n, x = names
        for name, d in (
            (n, float(n1 - n0)),
            (x, x1 - x0),
            (f"{n}*{n}", float(n1 * n1 - n0 * n0)),
            (f"{n}*{x}", n1 * x1 - n0 * x0),
            (f"{x}*{x}", x1 * x1 - x0 * x0),
        ):
            self.sums[name] = self.sums.get(name, 0.0) + d

    def _add(self, values: dict[str, float]) -> None:
        self.blocks += 1
        for name, v in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + v
        for (a, va), (b, vb) in combinations_with_replacement(values.items(), 2):
            name = f"{a}*{b}"
            self.sums[name] = self.sums.get(name, 0.0) + va * vb


def design_effect(sums: BlockSums) -> float:
    """One arm: ratio-estimator variance of the exceedances over the binomial one, at least 1."""
    n, x = sums.sums.get("n", 0.0), sums.sums.get("x", 0.0)
    if sums.blocks < 2 or not 0.0 < x < n:
        return 1.0
    q = x / n
    return max(1.0, _quadratic(sums, {"n": -q, "x": 1.0}) / (n * q * (1.0 - q)))


def one_arm(sums: BlockSums, *, candidate: bool) -> BlockSums:
    """The blocks of one arm among those of two; `design_effect` answers for them, shared shocks included."""
    mine = {"nc": "n", "xc": "x"} if candidate else {"nb": "n", "xb": "x"}
    found = {}
    for name, v in sums.sums.items():
        parts = name.split("*")
        if all(part in mine for part in parts):
            found["*".join(mine[part] for part in parts)] = v
    return BlockSums(sums.blocks, found)


def design_effect_pair(sums: BlockSums, fraction: float) -> float:
    """Two arms: the same for z = (1 - f) x_c - f x_b, in which shared shocks cancel; at least 1."""
    nc, xc, nb, xb = (sums.sums.get(name, 0.0) for name in _TWO_ARM)
    if sums.blocks < 2 or not (0.0 < xc < nc and 0.0 < xb < nb):
        return 1.0
    f, g, qc, qb = fraction, 1.0 - fraction, xc / nc, xb / nb
    z = _quadratic(sums, {"nc": -g * qc, "xc": g, "nb": f * qb, "xb": -f})
    return max(1.0, z / (g * g * nc * qc * (1.0 - qc) + f * f * nb * qb * (1.0 - qb)))


@dataclass(frozen=True, slots=True)
class Estimate:
    """A design effect measured in an earlier window of the same kind, fixed before this one opened."""

    k_hat: float
    blocks: int
    mean_block: float


@dataclass(frozen=True, slots=True)
class UsedEffect:
    """k of the Pass side (None: not known, so no Pass) and of the Fail side."""

    k_pass: float | None
    k_fail: float


def used_effect(estimate: Estimate) -> UsedEffect:
    """Half as much again on top of an estimate from enough blocks; else whole blocks for Fail."""
    k = max(1.0, SAFETY * estimate.k_hat) if estimate.k_hat > 1.0 else 1.0
    if estimate.blocks >= MIN_BLOCKS:
        return UsedEffect(k, k)
    return UsedEffect(None, max(k, estimate.mean_block))


def _quadratic(sums: BlockSums, weights: dict[str, float]) -> float:
    """g/(g - 1) times the sum over g blocks of (weights . variables)^2."""
    total = math.fsum(
        wa * wb * (1.0 if a == b else 2.0) * sums.sums.get(f"{a}*{b}", 0.0)
        for (a, wa), (b, wb) in combinations_with_replacement(weights.items(), 2)
    )
    return total * sums.blocks / (sums.blocks - 1)
