"""Slots of a tier and their lives: who owns a slot now, and what a copy in it must be.

Why it exists: a late or repeated call must meet a generation that has moved on, so that a recycled slot can
never answer for its former owner. It must not know media, bytes or threads of I/O.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from kvtier_core.errors import CoreError, Reason


@dataclass(frozen=True, slots=True)
class SlotRef:
    """A slot at one of its lives. Every call on a slot carries both numbers."""

    slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class BlockIdentity:
    """What a copy must be to be believed: checked against the bytes, not against the request.

    chunk_digest: the block's key. checksum: XXH3-64 of the payload at sealing, whatever a tier adds of its
    own. namespace: digest of the tenancy namespace and its generation (32 bytes), b"" for a session's
    private rows. epoch: authority epoch at writing. durable: may be found again after the process ends.
    cost: seconds that a recomputation would take, and droppable: whether the loss of its last copy is only
    that, both for eviction; they prove nothing and are never compared."""

    chunk_digest: bytes
    logical: int
    replica_generation: int
    rows: int
    length: int
    checksum: int
    namespace: bytes = b""
    epoch: int = 0
    durable: bool = False
    cost: float = 0.0
    droppable: bool = False


class SlotState(IntEnum):
    FREE = 0
    RESERVED = 1
    WRITTEN = 2
    VALIDATED = 3
    PUBLISHED = 4
    QUARANTINED = 5


_STATES = tuple(SlotState)
_RESERVED, _PUBLISHED = int(SlotState.RESERVED), int(SlotState.PUBLISHED)


class SlotTable:
    """Generations and owners of a tier's slots. A released slot is a different slot from then on.

    Reserving and releasing are the metadata lock's; `advance` may also come from an I/O thread that ends
    while the slot is being quarantined or released, so a change of state is compared and set under a lock
    of its own.
    """

    def __init__(self, slots: int) -> None:
        self.capacity = slots
        self._lock = threading.Lock()
        self._generation = np.zeros(slots, dtype=np.int64)
        self._owner = np.zeros(slots, dtype=np.int64)
        self._state = np.zeros(slots, dtype=np.int8)
        self._free = list(range(slots - 1, -1, -1))
        # The same memory, several times faster for single numbers.
        self._generations = self._generation.data
        self._owners = self._owner.data
        self._states = self._state.data

    @property
    def used(self) -> int:
        return self.capacity - len(self._free)

    def count(self, state: SlotState) -> int:
        """How many slots are in a state now."""
        return int(np.count_nonzero(self._state == state))

    def reserve(self, owner: int, namespace: bytes = b"") -> SlotRef:
        """A free slot for `owner`. NO_DESTINATION_CAPACITY with the numbers."""
        slot = self._take(namespace)
        with self._lock:
            self._owner[slot] = owner
            self._state[slot] = SlotState.RESERVED
            return SlotRef(slot, int(self._generation[slot]))

    def begin(self, namespace: bytes) -> tuple[int, int]:
        """A free slot and its generation, RESERVED, as `reserve` gives it; its owner is named by `own`."""
        slot = self._take(namespace)
        with self._lock:
            self._states[slot] = _RESERVED
            return slot, self._generations[slot]

    def begin_many(self, namespace: bytes, count: int) -> list[tuple[int, int]]:
        """As many of `count` slots as there are now, as `begin` gives them. Who wants the rest asks one by
        one and hears why."""
        if count == 1:
            try:
                return [self.begin(namespace)]
            except CoreError:
                return []
        taken = self.take_many(namespace, count)
        states, generations = self._states, self._generations
        with self._lock:
            for slot in taken:
                states[slot] = _RESERVED
            return [(slot, generations[slot]) for slot in taken]

    def take_many(self, namespace: bytes, count: int) -> list[int]:
        """The slots of `begin_many`, FREE as yet: each is to be RESERVED before the metadata lock is left."""
        taken: list[int] = []
        try:
            for _ in range(count):
                taken.append(self._take(namespace))
        except CoreError:
            pass
        return taken

    def reserve_taken(self, slot: int) -> int:
        """RESERVED, a slot of `take_many`; returns its generation."""
        with self._lock:
            self._states[slot] = _RESERVED
            return self._generations[slot]

    @property
    def lock(self) -> threading.Lock:
        """Held by who changes states in `addresses`."""
        return self._lock

    def addresses(self) -> tuple[int, int]:
        """Of the states (int8) and of the generations (int64), by slot."""
        return self._state.ctypes.data, self._generation.ctypes.data

    def publish_filled(self, slot: int, generation: int) -> None:
        """RESERVED to PUBLISHED for a slot that was filled in place and whose bytes are its seal: nothing is
        left to validate. RECYCLED_DESTINATION, NOT_VISIBLE."""
        with self._lock:
            if self._generations[slot] != generation or self._states[slot] != _RESERVED:
                self.check(SlotRef(slot, generation), SlotState.RESERVED)
            self._states[slot] = _PUBLISHED

    def _take(self, namespace: bytes) -> int:
        if not self._free:
            raise CoreError(
                Reason.NO_DESTINATION_CAPACITY,
                f"all {self.capacity} slots are taken",
                {"capacity_slots": self.capacity},
            )
        return self._free.pop()

    def _give(self, slot: int) -> None:
        self._free.append(slot)

    def check(self, ref: SlotRef, *legal: SlotState) -> None:
        """RECYCLED_DESTINATION when the slot lives another life; NOT_VISIBLE when it is in no legal state."""
        slot = ref.slot
        alive = 0 <= slot < self.capacity and self._generations[slot] == ref.generation
        if alive and (not legal or self._states[slot] in legal):
            return
        if not alive:
            raise CoreError(
                Reason.RECYCLED_DESTINATION,
                f"slot {ref.slot} is no longer of generation {ref.generation}",
                {"slot": ref.slot, "generation": ref.generation},
            )
        state = SlotState(self._states[slot])
        raise CoreError(
            Reason.NOT_VISIBLE,
            f"slot {slot} is {state.name}, not {' or '.join(item.name for item in legal)}",
            {"slot": slot, "state": state.name},
        )

    def generation(self, slot: int) -> int:
        return int(self._generation[slot])

    def owner(self, ref: SlotRef) -> int:
        self.check(ref)
        return int(self._owner[ref.slot])

    def state(self, ref: SlotRef) -> SlotState:
        self.check(ref)
        return _STATES[self._states[ref.slot]]

    def set_state(self, ref: SlotRef, state: SlotState) -> None:
        with self._lock:
            self._state[ref.slot] = state

    def advance(self, ref: SlotRef, to: SlotState, *legal: SlotState) -> None:
        """Checks life and state and changes the state in one step. RECYCLED_DESTINATION, NOT_VISIBLE."""
        with self._lock:
            self.check(ref, *legal)
            self._states[ref.slot] = int(to)

    def release(self, ref: SlotRef) -> None:
        """Ends the slot's life: its generation moves on before anyone else can have it."""
        with self._lock:
            self.check(ref)
            if SlotState(int(self._state[ref.slot])) is SlotState.FREE:
                raise CoreError(Reason.RECYCLED_DESTINATION, f"slot {ref.slot} is free already")
            self._generation[ref.slot] += 1
            self._state[ref.slot] = SlotState.FREE
            self._owner[ref.slot] = 0
        self._give(ref.slot)
