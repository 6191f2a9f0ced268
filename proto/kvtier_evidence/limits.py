"""Limits as people write them: exact decimals, with the range that each kind of metric allows.

Knows the notation only; binary floats never enter, so a limit on an atom (0.05) means what it says.

Section 6, "Limits", of the evidence specification.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from typing import Final

_LIMIT: Final = re.compile(r"(0|[1-9][0-9]{0,5})(\.[0-9]{1,9})?(%|m)?", re.ASCII)
_DIVISOR: Final = {"%": Decimal(100), "m": Decimal(1000), None: Decimal(1)}
_MAX: Final = 10**6


class LimitError(ValueError):
    """A limit that does not say what it means; the message names the legal values."""


class LimitRange(StrEnum):
    """Legal ranges by kind of metric."""

    FRACTION = "a fraction strictly between 0 and 1"
    RATIO = "a ratio of at least 0.5"
    POSITIVE = "a value over 0"
    ZERO = "exactly 0"


@dataclass(frozen=True, slots=True)
class _Bounds:
    low: Decimal
    low_open: bool
    high: Decimal
    high_open: bool


_RANGES: Final = {
    LimitRange.FRACTION: _Bounds(Decimal(0), True, Decimal(1), True),
    LimitRange.RATIO: _Bounds(Decimal("0.5"), False, Decimal(_MAX), True),
    LimitRange.POSITIVE: _Bounds(Decimal(0), True, Decimal(_MAX), True),
    LimitRange.ZERO: _Bounds(Decimal(0), False, Decimal(0), False),
}


def parse_limit(value: object) -> Decimal:
    """An integer, or a string of digits with at most 9 decimals, or with a suffix % or (integers) m."""
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise LimitError("a limit is an integer or a string, never a float")
    if isinstance(value, int):
        if not 0 <= value < _MAX:
            raise LimitError(f"an integer limit lies between 0 and {_MAX - 1}")
        return Decimal(value)
    found = _LIMIT.fullmatch(value)
    if found is None or (found[3] == "m" and found[2]):
        raise LimitError(
            'a limit is digits with at most 9 decimals, or with a suffix % or m: "0.05", "5%", "50m"'
        )
    return Decimal(found[1] + (found[2] or "")) / _DIVISOR[found[3]]


def check_range(limit: Decimal, legal: LimitRange) -> Decimal:
    """The limit itself, or LimitError when its metric does not allow it."""
    r = _RANGES[legal]
    below = limit < r.low or (r.low_open and limit == r.low)
    above = limit > r.high or (r.high_open and limit == r.high)
    if below or above:
        raise LimitError(f"{limit} is not {legal.value}")
    return limit


def parse_quantile(value: object) -> Decimal:
    """A quantile in percent, over 50 and at most 99.9 ("99" is the 99th percentile, not 0.99)."""
    q = parse_limit(value)
    if isinstance(value, str) and value[-1:] in {"%", "m"}:
        raise LimitError("a quantile is a plain number of percent: 99, not 99%")
    if not Decimal(50) < q <= Decimal("99.9"):
        raise LimitError(f"{q} is not a quantile in percent over 50 and at most 99.9")
    return q


def share_above(quantile: Decimal) -> float:
    """1 - p for a quantile in percent, rounded once."""
    return float((Decimal(100) - quantile) / Decimal(100))
