"""One submitted batch: which items have been reported, and how neighbours become runs.

Why it exists: a deadline, an I/O thread and a commit may all end the same item, and its caller must hear of
it once. It must not know what is read or written.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from kvtier_core.errors import CoreError
from kvtier_core.tiers.transfer import TransferSink

_TELLING, _TOLD, _DRAINED = 1, 2, 4


class Batch:
    """Per item one `done` and one `drained` after it, whoever comes first. Thread-safe; the sink is called
    without the lock."""

    def __init__(self, sink: TransferSink, count: int) -> None:
        self._sink = sink
        self._state = bytearray(count)
        self._lock = threading.Lock()

    def done(self, index: int, error: CoreError | None) -> None:
        """The first report counts."""
        with self._lock:
            if self._state[index] & (_TELLING | _TOLD):
                return
            self._state[index] |= _TELLING
        self._sink.done(index, error)
        with self._lock:
            self._state[index] |= _TOLD
            drained = self._state[index] & _DRAINED
        if drained:
            self._sink.drained(index)

    def is_done(self, index: int) -> bool:
        return bool(self._state[index] & _TELLING)

    def drained(self, index: int) -> None:
        """After `done`; when another thread is just telling `done`, it tells this as well."""
        with self._lock:
            state = self._state[index]
            self._state[index] |= _DRAINED
        if state & _TOLD and not state & _DRAINED:
            self._sink.drained(index)

    def over(self, index: int, error: CoreError | None) -> None:
        """Done, and nothing can arrive any more."""
        with self._lock:
            state = self._state[index]
            self._state[index] = state | _TELLING | _TOLD | _DRAINED
        if not state & _TELLING:
            self._sink.done(index, error)
            self._sink.drained(index)
        elif state & _TOLD and not state & _DRAINED:
            self._sink.drained(index)


def runs(slots: Mapping[int, int], indexes: Iterable[int], limit: int) -> list[list[int]]:
    """Indexes in order of their slots, cut where slots are not neighbours and after `limit` of them."""
    out: list[list[int]] = []
    last = None
    for index in sorted(indexes, key=slots.__getitem__):
        slot = slots[index]
        if last is None or slot != last + 1 or len(out[-1]) >= limit:
            out.append([])
        out[-1].append(index)
        last = slot
    return out
