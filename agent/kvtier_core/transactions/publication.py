"""Units that become visible together or not at all: reserve, write, validate, publish, tombstone, reclaim
(B.2).

Why it exists: a block restored longer than its sidecar, or an index that names rows which are not there, is
wrong although each part is right. So the parts of a unit are published by one step, after the units they
need, and are reclaimed when nobody can reach them any more. It must not know what the parts are.

The caller holds the metadata lock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum

from kvtier_core.transactions.reasons import MoveReason, MoveRefused


class UnitState(StrEnum):
    RESERVED = "RESERVED"
    WRITTEN_UNPUBLISHED = "WRITTEN_UNPUBLISHED"
    VALIDATED = "VALIDATED"
    PUBLISHED = "PUBLISHED"
    TOMBSTONED = "TOMBSTONED"
    RECLAIMED = "RECLAIMED"


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a member is, in the order in which it is compared. source: digest of the source binding.
    coverage: first and past-last position."""

    identity: bytes
    length: int
    layout: str
    checksum: int
    source: bytes
    coverage: tuple[int, int]

    def difference(self, other: Evidence) -> str:
        """Name of the first field that differs; empty when none does."""
        for entry in fields(self):
            if getattr(self, entry.name) != getattr(other, entry.name):
                return entry.name
        return ""


@dataclass(slots=True, eq=False)
class Unit:
    """Members that publish together. name: what readers ask for; generation: of this attempt, never repeated.
    needs: units that must be published first. leases: readers; lookups: searches that may still return it."""

    name: str
    generation: int
    expected: Mapping[str, Evidence]
    needs: tuple[Unit, ...]
    state: UnitState = UnitState.RESERVED
    found: dict[str, Evidence] = field(default_factory=dict)
    leases: int = 0
    lookups: int = 0


class Publications:
    """All units of one kind on one node. At most one unit of a name is visible."""

    def __init__(self) -> None:
        self._visible: dict[str, Unit] = {}
        self._units: dict[int, Unit] = {}
        self._next = 1

    def reserve(self, name: str, expected: Mapping[str, Evidence], needs: Sequence[Unit] = ()) -> Unit:
        """A unit that nobody sees. expected: what each member must be."""
        unit = Unit(name, self._next, dict(expected), tuple(needs))
        self._next += 1
        self._units[unit.generation] = unit
        return unit

    def visible(self, name: str) -> Unit | None:
        """What readers get: the whole published unit or nothing."""
        return self._visible.get(name)

    def write(self, unit: Unit, generation: int, member: str, found: Evidence) -> None:
        """A member's bytes are there, unpublished. GENERATION_NOT_OWNED for a writer of another attempt, or
        when the unit is past writing; VALIDATION_FAILED(member) for one that it has not."""
        self._own(unit, generation, UnitState.RESERVED, UnitState.WRITTEN_UNPUBLISHED)
        if member not in unit.expected:
            raise _invalid(unit, "member", member)
        unit.found[member] = found
        unit.state = UnitState.WRITTEN_UNPUBLISHED

    def validate(self, unit: Unit, generation: int) -> None:
        """Compares every member with what it must be. VALIDATION_FAILED names the field and the member; a
        missing member is a failed coverage. The unit stays as it was then."""
        self._own(unit, generation, UnitState.WRITTEN_UNPUBLISHED)
        for member, wanted in unit.expected.items():
            found = unit.found.get(member)
            different = "coverage" if found is None else wanted.difference(found)
            if different:
                raise _invalid(unit, different, member)
        unit.state = UnitState.VALIDATED

    def publish(self, unit: Unit, generation: int) -> None:
        """All members at once, and the unit that was visible under the name is tombstoned.
        DEPENDENCY_UNPUBLISHED when a unit that it needs is not published."""
        self._own(unit, generation, UnitState.VALIDATED)
        for needed in unit.needs:
            if needed.state is not UnitState.PUBLISHED:
                raise MoveRefused(
                    MoveReason.DEPENDENCY_UNPUBLISHED,
                    f"{unit.name} needs {needed.name}, which is {needed.state}",
                    {"needs": needed.name},
                )
        former = self._visible.get(unit.name)
        if former is not None:
            if former.generation > generation:
                raise MoveRefused(
                    MoveReason.GENERATION_NOT_OWNED, f"a newer {unit.name} is published already"
                )
            former.state = UnitState.TOMBSTONED
        self._visible[unit.name] = unit
        unit.state = UnitState.PUBLISHED

    def tombstone(self, unit: Unit) -> None:
        """No new reader finds it. An unpublished unit is given up the same way; again: no effect."""
        if unit.state is UnitState.RECLAIMED:
            return
        if self._visible.get(unit.name) is unit:
            del self._visible[unit.name]
        unit.state = UnitState.TOMBSTONED

    def reclaim(self, unit: Unit, *, receipt: bool) -> None:
        """Its memory may go. Guards in the order of B.5: LEASES_HELD, LOOKUP_IN_FLIGHT, NO_TOMBSTONE,
        NO_DELETE_RECEIPT."""
        reason = reclaim_reason(unit.leases, unit.lookups, unit.state is UnitState.TOMBSTONED, receipt)
        if reason is not MoveReason.READY:
            raise MoveRefused(reason, f"{unit.name} of generation {unit.generation} is not reclaimed")
        unit.state = UnitState.RECLAIMED
        del self._units[unit.generation]

    def _own(self, unit: Unit, generation: int, *legal: UnitState) -> None:
        if unit.generation != generation or unit.state not in legal:
            raise MoveRefused(
                MoveReason.GENERATION_NOT_OWNED,
                f"generation {generation} does not own {unit.name} of {unit.generation}, {unit.state}",
            )


def reclaim_reason(leases: int, lookups: int, tombstoned: bool, receipt: bool) -> MoveReason:
    """The first guard of garbage collection that fails, in the order of B.5 and G.6, or READY."""
    if leases:
        return MoveReason.LEASES_HELD
    if lookups:
        return MoveReason.LOOKUP_IN_FLIGHT
    if not tombstoned:
        return MoveReason.NO_TOMBSTONE
    if not receipt:
        return MoveReason.NO_DELETE_RECEIPT
    return MoveReason.READY


def _invalid(unit: Unit, name: str, member: str) -> MoveRefused:
    return MoveRefused(
        MoveReason.VALIDATION_FAILED,
        f"{member} of {unit.name}: {name} is not what it must be",
        {"field": name, "member": member},
    )
