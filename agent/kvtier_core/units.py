"""Rates and sizes with their unit in the type, so that GiB/s and GB/s, or a row and a token, are never mixed.

Why it exists: GiB and GB differ by 7.4 %, a row of one layer and a token of all layers by the number of
layers, and both mistakes give plausible numbers. It must not know tiers or models.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from kvtier_core.errors import CoreError, Reason

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def _positive(value: float, what: str) -> float:
    if not (math.isfinite(value) and value > 0.0):
        raise CoreError(Reason.UNIT_MISMATCH, f"{what} must be positive and finite, not {value}")
    return float(value)


def _of(value: object, kind: type, what: str) -> None:
    """UNIT_MISMATCH unless `value` is of exactly the unit `kind`: a bare number has none."""
    if type(value) is not kind:
        raise CoreError(
            Reason.UNIT_MISMATCH, f"{what} is stated in {kind.__name__}, not {type(value).__name__}"
        )


@dataclass(frozen=True, slots=True)
class BytesPerSecond:
    """A bandwidth. Built by the name of its unit only."""

    value: float

    def __post_init__(self) -> None:
        _positive(self.value, "a bandwidth")

    @classmethod
    def gib(cls, value: float) -> Self:
        """`value` GiB/s (2^30)."""
        return cls(value * GIB)

    @classmethod
    def gb(cls, value: float) -> Self:
        """`value` GB/s (10^9)."""
        return cls(value * 1e9)

    def seconds(self, size: int) -> float:
        return size / self.value


@dataclass(frozen=True, slots=True)
class FlopPerSecond:
    """An effective rate of arithmetic, as measured."""

    value: float

    def __post_init__(self) -> None:
        _positive(self.value, "a compute rate")

    @classmethod
    def tera(cls, value: float) -> Self:
        return cls(value * 1e12)


@dataclass(frozen=True, slots=True)
class FlopPerToken:
    """Prefill arithmetic of one token through all layers (F_pf)."""

    value: float

    def __post_init__(self) -> None:
        _positive(self.value, "arithmetic per token")


@dataclass(frozen=True, slots=True)
class BytesPerToken:
    """K and V of one token in all layers (B_KV, F2)."""

    value: int

    def __post_init__(self) -> None:
        _positive(self.value, "bytes per token")


@dataclass(frozen=True, slots=True)
class BytesPerRow:
    """K and V of one token in one layer (B_row, F3)."""

    value: int

    def __post_init__(self) -> None:
        _positive(self.value, "bytes per row")

    def of_layers(self, layers: int) -> BytesPerToken:
        """A token's bytes in `layers` equal layers."""
        return BytesPerToken(self.value * layers)


def require_bandwidth(value: object) -> None:
    _of(value, BytesPerSecond, "a bandwidth")


def require_regime_units(flop: object, kv: object, link: object, compute: object) -> None:
    """UNIT_MISMATCH unless each operand of the regime test is of its own unit."""
    _of(flop, FlopPerToken, "prefill arithmetic")
    _of(kv, BytesPerToken, "K/V of a token in all layers")
    _of(link, BytesPerSecond, "the link")
    _of(compute, FlopPerSecond, "the compute rate")
