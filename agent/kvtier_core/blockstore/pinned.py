"""Pinned reads of what is in memory: one dictionary lookup and one counter a block.

Why it exists: most reads of a warm cache end here, so finding and pinning are as short as they can be, in one
hold of the lock: between a hit and its use nothing can be evicted. It must not know storage or flights.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvtier_core.blockstore.parts import Parts
from kvtier_core.directory import KEY_BYTES
from kvtier_core.errors import CoreError, Reason
from kvtier_core.tiers.base import PoolTier
from kvtier_core.transactions import MoveReason, MoveRefused

MAX_REUSE = (1 << 16) - 1

Keys = Sequence[bytes] | NDArray[np.uint8]


class Pinned:
    """A scope over leading blocks in memory: their bytes stay where they are, as they are, until it is left.

    A scope that is dropped without being left is found by the collector, given back and counted."""

    __slots__ = ("_lines", "_pins", "deadline")

    def __init__(self, pins: MemoryPins, lines: list[int], deadline: float) -> None:
        self._pins = pins
        self._lines = lines
        self.deadline = deadline

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._lines)

    def __del__(self) -> None:
        if self._lines:
            # From the collector, at any point of any thread: nothing here may take a lock.
            self._pins.leaked.append(self._lines)

    def body(self, index: int) -> memoryview:
        """The payload of block `index`, in place, read only. LEASE_EXPIRED once the scope was left,
        STORAGE_UNAVAILABLE once the tier is closed."""
        if index >= len(self._lines):
            raise CoreError(Reason.LEASE_EXPIRED, f"block {index} is not pinned by this scope")
        return self._pins.view(self._lines[index])

    def check(self, now: float) -> None:
        """LEASE_EXPIRED when its deadline has come: before an answer from it is published."""
        if now >= self.deadline:
            raise MoveRefused(MoveReason.LEASE_EXPIRED, "the pin no longer holds")

    def close(self) -> None:
        """Lets the blocks go. A second call has no effect."""
        if self._lines:
            self._pins.release(self)


class MemoryPins:
    """Pins of blocks in the home tier."""

    def __init__(self, parts: Parts) -> None:
        home = parts.tiers[parts.home]
        assert isinstance(home, PoolTier)
        self._parts = parts
        self._home = home
        self._directory = parts.directory
        copies = parts.directory.replicas.tiers[parts.home]
        self._leases = copies.leases.cells
        self._slots = copies.slot.cells
        self._namespaces = parts.directory.cells("namespace")
        self._uses = parts.directory.cells("last_use")
        self._reuse = parts.directory.cells("reuse")
        self.leaked: deque[list[int]] = deque()
        self.counts: Counter[str] = Counter()
        """pins, blocks, leaked: since start."""

    def pin(self, keys: Keys, namespace: bytes, deadline: float) -> Pinned:
        """The leading blocks of `keys` (32 bytes each, or uint8 [n, 32]) that are in memory, found and pinned
        in this step. QUEUE_FULL when 65535 readers hold one."""
        if isinstance(keys, np.ndarray):
            raw = keys.tobytes()
            keys = [raw[at : at + KEY_BYTES] for at in range(0, len(raw), KEY_BYTES)]
        leases, namespaces = self._leases, self._namespaces
        uses, reuse = self._uses, self._reuse
        lines: list[int] = []
        with self._parts.lock:
            owner = self._parts.namespaces.known(namespace)
            tick = self._parts.next_tick()
            resident = self._directory.resident
            try:
                for key in keys:
                    line = resident.get(key, -1)
                    if line < 0 or namespaces[line] != owner:
                        break
                    leases[line] += 1
                    lines.append(line)
                    uses[line] = tick
                    used = reuse[line]
                    if used < MAX_REUSE:
                        reuse[line] = used + 1
            except (ValueError, TypeError) as error:
                for line in lines:
                    leases[line] -= 1
                if isinstance(error, TypeError):
                    raise CoreError(Reason.BAD_ARGUMENT, "a key is bytes") from error
                raise CoreError(Reason.QUEUE_FULL, "65535 readers hold the block") from error
        self.counts["pins"] += 1
        self.counts["blocks"] += len(lines)
        return Pinned(self, lines, deadline)

    def release(self, scope: Pinned) -> None:
        """Ends a scope, once, whoever does it too."""
        leases = self._leases
        with self._parts.lock:
            lines, scope._lines = scope._lines, []
            for line in lines:
                leases[line] -= 1
        if self._parts.waiting:
            self._parts.wake()

    def view(self, line: int) -> memoryview:
        return self._home.body(self._slots[line]).toreadonly()

    def reap(self) -> int:
        """Gives back what scopes held that nobody left. The lock is held. Returns how many pins that were."""
        count = 0
        while self.leaked:
            for line in self.leaked.popleft():
                self._leases[line] -= 1
            count += 1
        self.counts["leaked"] += count
        return count

    @property
    def held(self) -> int:
        """Blocks that are pinned now, counted once for each pin."""
        return int(sum(itertools.islice(self._leases, self._directory.used)))
