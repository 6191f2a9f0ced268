"""Jobs for callers who wait: an inline call with a deadline, an inline durable write, a flush for others.

Why it exists: the session engine's calls are inline, and they must end in time as well. It must not know
blocks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvtier_core.errors import CoreError, Reason
from kvtier_core.tiers.nvme.groupcommit import GroupCommit
from kvtier_core.tiers.nvme.pace import Load


class CallJob:
    """One inline call with a deadline: its caller waits, and leaves when the deadline comes."""

    items = 1

    def __init__(self, work: Callable[[], None], deadline: float, load: Load | None = None) -> None:
        self.deadline = deadline
        self.load = load
        self._work = work
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._ended = False
        self._error: CoreError | None = None
        self.returned = False
        """Its work is over, or will never begin: also after the caller has left."""

    def run(self) -> bool:
        error: CoreError | None = None
        try:
            self._work()
        except CoreError as raised:
            error = raised
        except BaseException as defect:
            self.refuse(CoreError(Reason.INTERNAL, f"{type(defect).__name__}: {defect}"))
            raise
        self.returned = True
        self._end(error)
        return True

    def expire(self) -> None:
        self._end(CoreError(Reason.DEADLINE, "storage did not end in time; it may still do so"))

    def refuse(self, error: CoreError) -> None:
        self.returned = True
        self._end(error)

    def _end(self, error: CoreError | None) -> None:
        with self._lock:
            if not self._ended:
                self._ended, self._error = True, error
        self._over.set()

    def wait(self) -> None:
        """Raises what the work raised, or DEADLINE: the pool ends it then."""
        self._over.wait()
        if self._error is not None:
            raise self._error


class SoloWriter:
    """An inline write that waits for its flush."""

    weight = 1

    def __init__(self) -> None:
        self._over = threading.Event()
        self._error: CoreError | None = None

    def committed(self, error: CoreError | None) -> None:
        self._error = error
        self._over.set()

    def wait(self) -> None:
        self._over.wait()
        if self._error is not None:
            raise self._error


class LeadJob:
    """Flushes for writers who wait, when the one who would have done it hangs."""

    items = 1
    load: Load | None = None

    def __init__(self, commit: GroupCommit, deadline: float) -> None:
        self.deadline = deadline
        self._commit = commit

    def run(self) -> bool:
        self._commit.lead()
        return True

    def expire(self) -> None: ...

    def refuse(self, error: CoreError) -> None: ...
