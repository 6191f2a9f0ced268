"""Pins that outlive a call: by id, for one namespace, until a deadline, and never more than so many.

Why it exists: an engine looks up now and loads when its turn comes, and what it found must still be there. A
client that never comes back may not hold a cache, so each pin ends by itself. It must not know the wire.

A block is pinned where it is slowest, and in memory only when it is nowhere else: a pin must not take the
room through which its own blocks are read.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtier_core.blockstore.outcomes import Found
from kvtier_core.blockstore.reads import leading
from kvtier_core.blockstore.store import BlockStore
from kvtier_core.errors import CoreError, Reason
from kvtier_core.transactions.pins import Pin, Pins

MAX_PINS = 1024
MAX_PINNED_BLOCKS = 1 << 17
MAX_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class _Entry:
    namespace: bytes
    pin: Pin


class PinBook:
    """Pins of one cache. Thread-safe: each step is one hold of the store's lock."""

    def __init__(
        self,
        store: BlockStore,
        clock: Callable[[], float],
        *,
        max_pins: int = MAX_PINS,
        max_blocks: int = MAX_PINNED_BLOCKS,
        memory_share: float = 0.5,
        name: Callable[[], str] = lambda: secrets.token_hex(16),
    ) -> None:
        """memory_share: of the slots of a memory tier, that pins by id may hold together."""
        self._store = store
        self._clock = clock
        self._max_pins = max_pins
        self._max_blocks = max_blocks
        self._name = name
        self._pins = Pins(store.directory)
        self._open: dict[str, _Entry] = {}
        self._blocks = 0
        parts = store.parts
        self._room = {tier: int(parts.tiers[tier].slots.capacity * memory_share) for tier in parts.memory}

    def __len__(self) -> int:
        return len(self._open)

    @property
    def blocks(self) -> int:
        """Blocks that are pinned by id, counted once for each pin."""
        return self._blocks

    def take(self, keys: NDArray[np.uint8], namespace: bytes, seconds: float) -> tuple[str, list[Found]]:
        """The leading published blocks of keys [n, 32], each pinned in the step that found it. No id when
        there are none. QUEUE_FULL, ADMISSION_PINNED."""
        parts, directory = self._store.parts, self._store.directory
        with parts.lock:
            self._expire(self._clock())
            lines = directory.published_prefix(keys)
            owner = parts.namespaces.known(namespace)
            same = directory.namespace[lines] == (-2 if owner is None else owner)
            found = lines[: leading(same)].tolist()
            if not found:
                return "", []
            if len(self._open) >= self._max_pins or self._blocks + len(found) > self._max_blocks:
                raise CoreError(
                    Reason.QUEUE_FULL,
                    f"{len(self._open)} pins hold {self._blocks} blocks",
                    {"bound": self._max_pins, "bound_blocks": self._max_blocks},
                )
            tiers = [self._slowest(line) for line in found]
            self._check_room(tiers)
            pin = self._pins.hold(found, tiers, self._clock() + min(seconds, MAX_SECONDS))
            pin_id = self._name()
            self._open[pin_id] = _Entry(namespace, pin)
            self._blocks += len(found)
            self._count(pin, -1)
            return pin_id, [self._found(line, tier) for line, tier in zip(found, tiers, strict=True)]

    def _slowest(self, line: int) -> int:
        directory = self._store.directory
        counting = (tier for tier in reversed(range(directory.tiers)) if directory.counts(line, tier))
        return next(counting, int(directory.tier[line]))

    def _found(self, line: int, pinned: int) -> Found:
        """The fastest tier that has it, and the generation of the copy that stays."""
        directory = self._store.directory
        counting = (tier for tier in range(directory.tiers) if directory.counts(line, tier))
        generation = directory.replica(line, pinned).generation
        return Found(next(counting, pinned), generation, int(directory.checksum[line]))

    def _check_room(self, tiers: list[int]) -> None:
        for tier, left in self._room.items():
            wanted = tiers.count(tier)
            if wanted > left:
                name = self._store.parts.tiers[tier].name
                raise CoreError(
                    Reason.ADMISSION_PINNED,
                    f"{wanted} blocks are in tier {name} alone, and {left} more may be pinned there",
                    {"tier_class": name, "wanted": wanted, "left": left},
                )

    def _count(self, pin: Pin, sign: int) -> None:
        for tier in self._room:
            self._room[tier] += sign * pin.tiers.count(tier)

    def use(self, pin_id: str, namespace: bytes) -> Callable[[], None]:
        """Takes a pin over: it holds until the returned function is called, once or more. LEASE_EXPIRED when
        it has ended or is not this namespace's: one cannot tell which."""
        with self._store.parts.lock:
            self._expire(self._clock())
            entry = self._open.get(pin_id)
            if entry is None or entry.namespace != namespace:
                raise CoreError(Reason.LEASE_EXPIRED, "no such pin, or its time is over")
            self._forget(pin_id)

        def give_back() -> None:
            with self._store.parts.lock:
                if entry.pin.open:
                    self._close(entry.pin)
                    self._reap()

        return give_back

    def expire(self) -> int:
        """Ends pins whose time is over; returns how many."""
        with self._store.parts.lock:
            return self._expire(self._clock())

    def _expire(self, now: float) -> int:
        late = [pin_id for pin_id, entry in self._open.items() if entry.pin.deadline <= now]
        for pin_id in late:
            self._close(self._forget(pin_id).pin)
        self._reap()
        return len(late)

    def _close(self, pin: Pin) -> None:
        pin.close()
        self._count(pin, 1)

    def _forget(self, pin_id: str) -> _Entry:
        entry = self._open.pop(pin_id)
        self._blocks -= len(entry.pin)
        return entry

    def _reap(self) -> None:
        if self._pins.reap():
            # What waits for room may have it now.
            self._store.parts.wake()

    def close(self) -> None:
        with self._store.parts.lock:
            for pin_id in list(self._open):
                self._close(self._forget(pin_id).pin)
            self._reap()
