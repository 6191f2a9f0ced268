"""The condition of a storage tier: set by a failure, cleared when the same kind of I/O works again.

Why it exists: an operator reads one line per tier, and it must say what is wrong now. It must not know
blocks.
"""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Protocol

from kvtier_core.errors import CoreError, Reason
from kvtier_core.tiers.base import CONDITION_CLOSED, CONDITION_READY
from kvtier_core.tiers.slots import SlotRef


class Conditioned(Protocol):
    """What of a tier is needed here."""

    name: str
    path: Path
    condition: str

    @property
    def hung_threads(self) -> int: ...


class TierHealth:
    """Keeps the tier's condition: set by a failure, cleared when the same kind of I/O works again."""

    def __init__(self, tier: Conditioned) -> None:
        self._tier = tier
        self._of = ""
        self._lock = threading.Lock()

    def failed(self, what: str, error: OSError) -> CoreError:
        code = errno.errorcode.get(error.errno or 0, "unknown")
        tier = self._tier
        message = f"tier {tier.name}: {what} of {tier.path.name}: {code} ({os.strerror(error.errno or 0)})"
        refusal = CoreError(Reason.STORAGE_UNAVAILABLE, message, {"tier": tier.name, "errno": code})
        self.note(refusal, what)
        return refusal

    def short(self, what: str, done: int, wanted: int, ref: SlotRef) -> CoreError:
        tier = self._tier
        refusal = CoreError(
            Reason.SHORT_COPY,
            f"tier {tier.name}: {what} of {wanted} bytes ended after {done}, slot {ref.slot} is not whole",
            {"tier": tier.name, "slot": ref.slot},
        )
        self.note(refusal, what)
        return refusal

    def note(self, refusal: CoreError, what: str = "sync") -> None:
        with self._lock:
            self._of = what
            self._say(f"{refusal.reason.value}: {refusal.message}")

    def worked(self, what: str) -> None:
        """A write that works clears all but a hang; a read clears a read's failure."""
        if self._of and (self._of == what or (what == "write" and self._of != "hang")):
            with self._lock:
                self._clear()

    def hung_changed(self) -> None:
        hung = self._tier.hung_threads
        with self._lock:
            if hung:
                self._of = "hang"
                self._say(
                    f"{Reason.STORAGE_UNAVAILABLE.value}: tier {self._tier.name}: {hung} I/O threads hang"
                )
            elif self._of == "hang":
                self._clear()

    def _clear(self) -> None:
        self._of = ""
        self._say(CONDITION_READY)

    def _say(self, condition: str) -> None:
        # Calls that hung return after the tier was closed, well or not.
        if self._tier.condition != CONDITION_CLOSED:
            self._tier.condition = condition

    def closed(self) -> None:
        """Nothing that returns later changes the condition."""
        with self._lock:
            self._tier.condition = CONDITION_CLOSED
