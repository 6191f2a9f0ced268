"""Copies of blocks: per tier one column of slots, generations, states, epoch stamps and read leases.

Why it exists: which copy is current, which may be dropped and which is being read must be three array
lookups. It must not know keys, sessions or bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtier_core.directory.columns import Column, Counters
from kvtier_core.directory.ids import ReplicaState
from kvtier_core.errors import CoreError, Reason

PUBLISHED = int(ReplicaState.PUBLISHED)
MAX_LEASES = (1 << 16) - 1

_STATES = tuple(ReplicaState)
"""By number: a call of the enumeration costs more than all other fields of a copy together."""


@dataclass(frozen=True, slots=True)
class Replica:
    """One copy as it was when asked. stamp: the authority epoch under which it was last found valid; 0:
    never."""

    tier: int
    state: ReplicaState
    slot: int
    slot_generation: int
    generation: int
    stamp: int
    leases: int


class TierColumns:
    """The copies in one tier. 19 bytes a line where a copy is or was, 23 or 27 with
    generations of more than 32 bits."""

    __slots__ = ("generation", "leases", "slot", "slot_generation", "stamp", "state")

    def __init__(self, capacity: int) -> None:
        self.state = Column(capacity, "uint8")
        self.slot = Column(capacity, "int32")
        self.slot_generation = Counters(capacity)
        self.generation = Counters(capacity)
        self.stamp = Column(capacity, "uint32")
        self.leases = Column(capacity, "uint16")


class ReplicaTable:
    """All tiers' copies. Methods do one step each; what may follow what is the directory's affair."""

    def __init__(self, tiers: int, capacity: int) -> None:
        self.tiers = tuple(TierColumns(capacity) for _ in range(tiers))
        self.counts = [0] * tiers

    def of(self, tier: int) -> TierColumns:
        """The columns of a tier. BAD_ARGUMENT for one that there is not, NO_TIER included."""
        if not 0 <= tier < len(self.tiers):
            raise CoreError(Reason.BAD_ARGUMENT, f"there is no tier {tier}")
        return self.tiers[tier]

    def get(self, line: int, tier: int) -> Replica:
        columns = self.of(tier)
        return Replica(
            tier=tier,
            state=_STATES[columns.state.cells[line]],
            slot=columns.slot.cells[line],
            slot_generation=columns.slot_generation.cells[line],
            generation=columns.generation.cells[line],
            stamp=columns.stamp.cells[line],
            leases=columns.leases.cells[line],
        )

    def put(
        self, line: int, tier: int, slot: int, slot_generation: int, generation: int, state: ReplicaState
    ) -> None:
        """Writes a copy's place; unstamped. BAD_ARGUMENT when a number does not fit its column."""
        columns = self.of(tier)
        self.expect_unread(line, tier)
        try:
            columns.slot.cells[line] = slot
            columns.slot_generation.cells[line] = slot_generation
            columns.generation.cells[line] = generation
        except ValueError as error:
            raise CoreError(
                Reason.BAD_ARGUMENT, f"slot {slot} of generation {slot_generation} does not fit the directory"
            ) from error
        if not columns.state.cells[line]:
            self.counts[tier] += 1
        columns.stamp.cells[line] = 0
        columns.state.cells[line] = state

    def clear(self, line: int, tier: int) -> None:
        """Forgets a copy, whatever its state. LEASES_HELD while it is read: a reader that ends later would
        end another's lease."""
        columns = self.of(tier)
        self.expect_unread(line, tier)
        if columns.state.cells[line]:
            self.counts[tier] -= 1
        columns.state.cells[line] = 0
        columns.stamp.cells[line] = 0

    def clear_all(self, line: int) -> None:
        """Forgets every copy of a line, or none: LEASES_HELD."""
        held = self.held_in(line)
        for tier in held:
            self.expect_unread(line, tier)
        for tier in held:
            self.clear(line, tier)

    def expect_unread(self, line: int, tier: int) -> None:
        """LEASES_HELD while anyone reads the copy."""
        held = self.tiers[tier].leases.cells[line]
        if held:
            raise CoreError(
                Reason.LEASES_HELD,
                f"{held} readers hold the copy of line {line} in tier {tier}",
                {"line": line, "tier": tier, "readers": held},
            )

    def lease(self, line: int, tier: int) -> None:
        """One more reader. QUEUE_FULL at 65535."""
        leases = self.of(tier).leases.cells
        if leases[line] == MAX_LEASES:
            raise CoreError(Reason.QUEUE_FULL, f"{MAX_LEASES} readers hold the copy of line {line}")
        leases[line] += 1

    def unlease(self, line: int, tier: int) -> None:
        """One reader fewer. GENERATION_NOT_OWNED when there is none: a lease given back twice."""
        leases = self.of(tier).leases.cells
        if not leases[line]:
            raise CoreError(Reason.GENERATION_NOT_OWNED, f"nobody reads line {line} in tier {tier}")
        leases[line] -= 1

    def restamp(self, line: int, old: int, new: int) -> int:
        """Carries every published copy of epoch `old` over to `new`; returns how many. Others stop
        counting."""
        moved = 0
        for columns in self.tiers:
            if columns.state.cells[line] == PUBLISHED and columns.stamp.cells[line] == old:
                columns.stamp.cells[line] = new
                moved += 1
        return moved

    def survivors(self, line: int, epoch: int, without: int) -> int:
        """Published copies stamped with `epoch`, in other tiers than `without` (specification A.9)."""
        return sum(
            tier != without and columns.state.cells[line] == PUBLISHED and columns.stamp.cells[line] == epoch
            for tier, columns in enumerate(self.tiers)
        )

    def survivors_of(
        self, lines: NDArray[np.int64], epochs: NDArray[np.uint32], without: int
    ) -> NDArray[np.int64]:
        """The same for many lines [n] at once."""
        found = np.zeros(len(lines), dtype=np.int64)
        for tier, columns in enumerate(self.tiers):
            if tier != without:
                found += (columns.state.array[lines] == PUBLISHED) & (columns.stamp.array[lines] == epochs)
        return found

    def held_in(self, line: int) -> tuple[int, ...]:
        """Tiers in which the line has a copy in any state."""
        return tuple(tier for tier, columns in enumerate(self.tiers) if columns.state.cells[line])


class AuthorityCells:
    """Reads one number of each line's authoritative copy; -1 for a line that has none."""

    __slots__ = ("_columns", "_tier")

    def __init__(self, tier: memoryview, columns: tuple[Column | Counters, ...]) -> None:
        self._tier = tier
        self._columns = tuple(column.cells for column in columns)

    def __getitem__(self, line: int) -> int:
        tier = self._tier[line]
        return -1 if tier < 0 else int(self._columns[tier][line])
