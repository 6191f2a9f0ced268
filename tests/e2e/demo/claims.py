"""Claims the demo makes, each with the evidence it was checked on.

The exit status is 0 only when every claim that was planned has been checked and
holds: a claim that nobody reached counts as failed.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Claim:
    """One sentence that the demo must show to be true."""

    key: str
    sentence: str


@dataclass(frozen=True)
class Checked:
    """The outcome of one claim with the facts that decided it."""

    claim: Claim
    holds: bool
    facts: str


@dataclass
class Ledger:
    """Planned claims and their outcomes, in the order of the plan."""

    planned: tuple[Claim, ...]
    outcomes: dict[str, Checked] = field(default_factory=dict)

    def check(self, key: str, holds: bool, facts: str) -> bool:
        """Record a claim. A second record can only lower it: once false, false."""
        claim = next((c for c in self.planned if c.key == key), None)
        if claim is None:
            raise KeyError(f"claim {key!r} was never planned")
        before = self.outcomes.get(key)
        if before is not None and not before.holds:
            return False
        self.outcomes[key] = Checked(claim, holds, facts)
        return holds

    def holds(self, key: str) -> bool:
        """Whether a claim was checked and held."""
        return key in self.outcomes and self.outcomes[key].holds

    @property
    def results(self) -> tuple[Checked, ...]:
        """Every planned claim; those not reached are false and say so."""
        return tuple(self.outcomes.get(c.key, Checked(c, False, "not reached")) for c in self.planned)

    @property
    def all_hold(self) -> bool:
        return all(r.holds for r in self.results)
