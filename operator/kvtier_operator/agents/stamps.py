"""What an agent's clock says at least, so that a permission counts from when it was sent.

Why it exists: a message may wait in the socket of an agent that is stopped, and its end, or its connection's,
may never arrive. The operator counts a lease from its sending, and so must the agent. Each answer carries the
agent's clock; from then on it has gone on by no less than the operator's has since the answer came. It must
not know leases.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass

NANOS = 1_000_000_000


@dataclass(frozen=True)
class _Heard:
    boot_id: str
    stamp_ns: int
    at: float


class Stamps:
    """Of all agents. clock: seconds, monotonic."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heard: dict[str, _Heard] = {}

    def hear(self, node: str, boot_id: str, stamp_ns: int) -> None:
        """An answer came now. The newest counts, so that two clocks of unlike pace do not drift apart; 0: an
        agent that says none."""
        self._heard[node] = _Heard(boot_id, max(0, stamp_ns), self._clock())

    def heard(self, node: str, boot_id: str) -> bool:
        """Whether this life of the agent has answered, with its clock or without."""
        heard = self._heard.get(node)
        return heard is not None and heard.boot_id == boot_id

    def now_ns(self, node: str, boot_id: str) -> int:
        """At most what that agent's clock says now, nanoseconds; 0 when none was told of this life of it."""
        heard = self._heard.get(node)
        if heard is None or heard.boot_id != boot_id or not heard.stamp_ns:
            return 0
        return heard.stamp_ns + int((self._clock() - heard.at) * NANOS)

    def retain(self, names: Container[str]) -> None:
        self._heard = {name: heard for name, heard in self._heard.items() if name in names}
