"""Header pages of blocks that this process wrote or read, so that a part of a block can be verified alone.

Why it exists: what a segment must be stands in its block's header page, and a page for each of them would be
read again at every step. A page is kept for one life of its slot and is checked at each use as if storage had
just given it; what it says of a segment is older than the segment's bytes, never younger. It must not know
what it says.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from kvtier_core.tiers.slots import SlotRef

KNOWN_BYTES = 16 << 20
_OVERHEAD = 128


class KnownPages:
    """The pages used last, `limit` bytes of them. Thread-safe."""

    def __init__(self, limit: int = KNOWN_BYTES) -> None:
        self._limit = limit
        self._pages: OrderedDict[int, tuple[int, bytes]] = OrderedDict()
        self._held = 0
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        with self._lock:
            return self._held

    def remember(self, ref: SlotRef, page: bytes) -> None:
        with self._lock:
            self._drop(ref.slot)
            self._pages[ref.slot] = (ref.generation, page)
            self._held += len(page) + _OVERHEAD
            while self._held > self._limit:
                self._drop(next(iter(self._pages)))

    def find(self, ref: SlotRef) -> bytes | None:
        """None: it has to be read."""
        with self._lock:
            found = self._pages.get(ref.slot)
            if found is None or found[0] != ref.generation:
                return None
            self._pages.move_to_end(ref.slot)
            return found[1]

    def forget(self, slot: int) -> None:
        """What lies there now is another page."""
        with self._lock:
            self._drop(slot)

    def _drop(self, slot: int) -> None:
        found = self._pages.pop(slot, None)
        if found is not None:
            self._held -= len(found[1]) + _OVERHEAD
