"""What a selector asks of an engine, and what of that an engine does not give.

Why it exists: it must be known before a session is opened under a grant, so that a need which nobody meets is
a refusal with names and never a surprise at the first selection. It must not know frames.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtier_core.errors import CoreError, Reason
from kvtier_core.rowevidence import ONLY_QUERIES, Need
from kvtier_core.selectors.base import SelectorFamily
from kvtier_core.selectors.live import LiveFamily

FIXED_CONTEXT = "fixedContext"
"""What the message calls the need of a family whose index takes no more rows."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """family: its name. needs: besides the queries that every frame has. layers: those that select,
    ascending. fixed: whether its index is of a context that never changes."""

    family: str
    needs: frozenset[Need]
    layers: tuple[int, ...]
    fixed: bool

    def refused(self, given: frozenset[Need], context_stated: bool) -> CoreError | None:
        """UNSUPPORTED with the fact `missing`, the names of what is needed and not given, comma separated."""
        missing: list[str] = sorted(self.needs - given)
        if self.fixed and not context_stated:
            missing.append(FIXED_CONTEXT)
        if not missing:
            return None
        return CoreError(
            Reason.UNSUPPORTED,
            f"{self.family} needs {', '.join(missing)}, which this session's engine does not give",
            {"family": self.family, "missing": ",".join(missing)},
        )


def wanted_by(family: SelectorFamily, layers: int) -> Wanted:
    """Of a model of `layers` layers."""
    facts = family.family.facts if isinstance(family, LiveFamily) else None
    return Wanted(
        family="" if facts is None else facts.family,
        needs=frozenset() if facts is None else facts.needs - ONLY_QUERIES,
        layers=tuple(layer for layer in range(layers) if layer not in family.dense_layers),
        fixed=facts is not None and not facts.appendable,
    )
