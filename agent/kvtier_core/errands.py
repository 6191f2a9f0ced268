"""One thread that runs disk work in order, for callers who hold a lock and must not wait for a disk.

Why it exists: a journal's entry needs a flush, and the lock of all metadata must not be held for that long.
It must not know what the work is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from kvtier_core.telling import report_defect


class Errands:
    """Work runs in the order of `run`. It is bounded by its callers: each waits for its own. Work that raises
    ends none behind it."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], None]) -> None:
        """Queues `work`, which reports its own errors."""
        self._queue.put(work)

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except Exception:
                report_defect()

    def close(self, seconds: float) -> bool:
        """Ends what is queued; whether that was done within `seconds`."""
        self._queue.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()
