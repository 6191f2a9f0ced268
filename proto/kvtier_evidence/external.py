"""What an external metric's shape allows anyone to conclude from it.

Section 8 of the evidence specification. Knows kinds of series; queries nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class SourceKind(StrEnum):
    COUNTER_PAIR = "counterPair"
    CLASSIC_HISTOGRAM = "classicHistogram"
    EXPONENTIAL_HISTOGRAM = "exponentialHistogram"
    GAUGE = "gauge"
    SUMMARY = "summary"
    EXPRESSION = "expression"


class Basis(StrEnum):
    """What a verdict rests on."""

    ANYTIME = "Anytime"
    BRACKET = "Bracket"
    POINT = "Point"
    GUARD_ONLY = "GuardOnly"
    PROVIDER_ERROR = "ProviderError"
    PROBE_SET = "ProbeSet"
    """An exact statement on one finite set; no error budget."""
    EVENT_COUNT = "EventCount"
    """Events among units."""
    CARRIED = "Carried"
    """A Pass on the same candidate and probe set earlier in the attempt."""


@dataclass(frozen=True, slots=True)
class Source:
    kind: SourceKind
    edge_at_limit: bool = False
    cumulative: bool = False
    resets_marked: bool = False
    declared_point: bool = False
    has_count: bool = False


def basis_of(source: Source) -> Basis:
    """Counts allow all verdicts; a point value allows a guard, or a declared point threshold."""
    if source.kind in (SourceKind.GAUGE, SourceKind.SUMMARY, SourceKind.EXPRESSION):
        return Basis.POINT if source.declared_point and source.has_count else Basis.GUARD_ONLY
    if source.kind is SourceKind.CLASSIC_HISTOGRAM and not source.edge_at_limit:
        return Basis.BRACKET
    if source.cumulative and not source.resets_marked:
        return Basis.PROVIDER_ERROR
    return Basis.ANYTIME
