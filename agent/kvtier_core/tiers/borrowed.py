"""Slots of an engine's own pool: the engine allocates, we only know at which allocation we took one.

Why it exists: an engine may give a slot to another request at any time, and a copy that is still on its way
then must be found out (vllm#46951). So every check compares the engine's allocation generation with the one
that was adopted. It must not know blocks or copies.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from kvtier_core.errors import CoreError, Reason
from kvtier_core.tiers.slots import SlotRef, SlotState, SlotTable


class AllocationGenerations(Protocol):
    """The engine's allocator: a number per slot that grows with every allocation and every release."""

    def generation(self, slot: int) -> int: ...


class BorrowedSlots(SlotTable):
    def __init__(self, slots: int, allocations: AllocationGenerations) -> None:
        super().__init__(slots)
        self._free.clear()
        self._allocations = allocations
        self._adopted = np.zeros(slots, dtype=np.int64)
        self._taken = 0

    @property
    def used(self) -> int:
        return self._taken

    def _take(self, namespace: bytes) -> int:
        raise CoreError(Reason.TIER_INCAPABLE, "slots of a borrowed pool are allocated by its engine")

    def _give(self, slot: int) -> None:
        self._taken -= 1

    def adopt(self, slot: int, owner: int, allocation_generation: int) -> SlotRef:
        """Reserves `slot` at the engine's allocation. RECYCLED_DESTINATION when that is another or when the
        slot is adopted already."""
        if not 0 <= slot < self.capacity or self._allocations.generation(slot) != allocation_generation:
            raise CoreError(
                Reason.RECYCLED_DESTINATION,
                f"slot {slot} is not of allocation {allocation_generation}",
                {"slot": slot, "generation": allocation_generation},
            )
        with self._lock:
            if SlotState(int(self._state[slot])) is not SlotState.FREE:
                raise CoreError(Reason.RECYCLED_DESTINATION, f"slot {slot} is adopted already")
            self._adopted[slot] = allocation_generation
            self._owner[slot] = owner
            self._state[slot] = SlotState.RESERVED
            self._taken += 1
            return SlotRef(slot, int(self._generation[slot]))

    def check(self, ref: SlotRef, *legal: SlotState) -> None:
        super().check(ref)
        live = self._allocations.generation(ref.slot)
        if self._state[ref.slot] != SlotState.FREE and live != self._adopted[ref.slot]:
            raise CoreError(
                Reason.RECYCLED_DESTINATION,
                f"the engine gave slot {ref.slot} to another: allocation {live}",
                {"slot": ref.slot, "generation": live},
            )
        super().check(ref, *legal)

    def publish_filled(self, slot: int, generation: int) -> None:
        self.check(SlotRef(slot, generation), SlotState.RESERVED)
        super().publish_filled(slot, generation)

    def release(self, ref: SlotRef) -> None:
        """Ends the adoption, whoever the engine gave the slot to by now."""
        if 0 <= ref.slot < self.capacity and int(self._generation[ref.slot]) == ref.generation:
            self._adopted[ref.slot] = self._allocations.generation(ref.slot)
        super().release(ref)
