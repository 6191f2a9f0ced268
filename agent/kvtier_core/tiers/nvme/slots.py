"""Slots of a store: generations that outlive the process, and what evicted blocks still lie on the device.

Why it exists: a slot's generation must never repeat, whoever opened the store before, and a deletion must
reach copies that were only evicted. Lowest slots are given out first, so that blocks stored together are
neighbours. It must not know files or threads of I/O.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from kvtier_core.tiers.slots import SlotRef, SlotState, SlotTable

EPOCH_SHIFT = 32
_WORD = 8


class NvmeSlots(SlotTable):
    """Generations start at store epoch * 2^32. A remnant is a durable block whose slot was released and whose
    header may still lie on the device: below that of a block which is being written over it, too, and below
    one whose write failed."""

    def __init__(self, slots: int, store_epoch: int) -> None:
        super().__init__(slots)
        self._first = store_epoch << EPOCH_SHIFT
        self._generation[:] = self._first
        self._free = list(range(slots))
        self._key = np.zeros(slots, dtype=np.uint64)
        self._namespace = np.zeros(slots, dtype=np.uint64)
        self._durable = np.zeros(slots, dtype=np.bool_)
        self._below: dict[int, set[tuple[int, int]]] = {}

    def _take(self, namespace: bytes) -> int:
        if not self._free:
            return super()._take(namespace)
        return heapq.heappop(self._free)

    def _give(self, slot: int) -> None:
        # A block of an earlier process had a generation of that process's.
        self._generation[slot] = max(self._first, int(self._generation[slot]))
        heapq.heappush(self._free, slot)

    def check(self, ref: SlotRef, *legal: SlotState) -> None:
        slot = ref.slot
        alive = 0 <= slot < self.capacity and int(self._generation[slot]) == ref.generation
        if not alive or (legal and int(self._state[slot]) not in legal):
            super().check(ref, *legal)

    def restore(self, refs: NDArray[np.int64], owners: NDArray[np.int64]) -> None:
        """Takes slots as published, at the generations they had: [n, 2] slot and generation, [n] owners.
        Once, before anything is reserved."""
        self._generation[refs[:, 0]] = refs[:, 1]
        self._owner[refs[:, 0]] = owners
        self._state[refs[:, 0]] = SlotState.PUBLISHED
        self._free = np.flatnonzero(self._state == SlotState.FREE).tolist()

    # What lies on the device.

    def mark(self, slot: int, key: bytes, namespace: bytes) -> None:
        """A header of a durable block may lie in the slot from now on, and until `written` or `clean` what
        lay there before."""
        key_word, namespace_word = _word(key), _word(namespace)
        with self._lock:
            if self._durable[slot]:
                former = (int(self._key[slot]), int(self._namespace[slot]))
                self._below.setdefault(slot, set()).add(former)
            self._key[slot] = key_word
            self._namespace[slot] = namespace_word
            self._durable[slot] = True

    def written(self, slot: int) -> None:
        """The marked block lies in the slot as a whole: the next flush leaves nothing of what was there."""
        with self._lock:
            self._below.pop(slot, None)

    def clean(self, slot: int) -> None:
        """No header of a durable block lies in the slot any more."""
        with self._lock:
            self._durable[slot] = False
            self._below.pop(slot, None)

    def is_remnant(self, slot: int, key: bytes | None, namespace: bytes | None) -> bool:
        """Whether `remnants` still names the slot."""
        with self._lock:
            if not self._durable[slot] or self._state[slot] == SlotState.PUBLISHED:
                return False
            there = {(int(self._key[slot]), int(self._namespace[slot])), *self._below.get(slot, ())}
            return any(_is(words, key, namespace) for words in there)

    def remnants(self, key: bytes | None = None, namespace: bytes | None = None) -> list[int]:
        """Slots that nobody reads and whose header on the device may be of that key or namespace. By prefixes
        of 8 bytes: one too many may be named, none too few."""
        with self._lock:
            found = self._durable & (self._state != SlotState.PUBLISHED)
            if key is not None:
                found &= self._key == _word(key)
            if namespace is not None:
                found &= self._namespace == _word(namespace)
            named = set(np.flatnonzero(found).tolist())
            named.update(
                slot
                for slot, former in self._below.items()
                if self._state[slot] != SlotState.PUBLISHED
                and any(_is(words, key, namespace) for words in former)
            )
            return sorted(named)


def _is(words: tuple[int, int], key: bytes | None, namespace: bytes | None) -> bool:
    return (key is None or words[0] == _word(key)) and (namespace is None or words[1] == _word(namespace))


def _word(name: bytes) -> int:
    return int.from_bytes(name[:_WORD], "little")
