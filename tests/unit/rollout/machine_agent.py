"""An agent as the rules of fences and leases alone make it, for the fuzz of the machine.

It must not know rollouts, evidence or the operator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Agent:
    """An agent by the rules of fences and leases alone. Times are of its own clock, which never jumps."""

    name: str
    ttl: float
    baseline: str
    boot: int = 1
    highest: int = 0
    last: tuple[Any, ...] = ()
    lease: tuple[int, str, float] | None = None
    granted_in_this_life: int = 0
    returned: tuple[str, int] = ("", 0)
    cut: bool = False
    cordoned: bool = False
    refuses: str = ""

    def look(self, now: float) -> None:
        if self.lease is not None and now >= self.lease[2]:
            self.returned, self.lease = ("LeaseExpired", self.lease[0]), None

    def judge(self, fence: int, content: tuple[Any, ...]) -> str:
        if fence < self.highest:
            return "FENCE_STALE"
        if fence == self.highest and content != self.last:
            return "FENCE_CONFLICT"
        self.highest, self.last = fence, content
        return ""

    def grant(self, fence: int, content: tuple[Any, ...], digest: str, now: float) -> str:
        self.look(now)
        if self.refuses:
            return self.refuses
        repeat = fence == self.highest
        refused = self.judge(fence, content)
        if refused:
            return refused
        if repeat and self.granted_in_this_life == fence:
            return "" if self.lease is not None else "LEASE_EXPIRED"
        self.lease, self.granted_in_this_life, self.returned = (fence, digest, now + self.ttl), fence, ("", 0)
        return ""

    def revoke(self, fence: int, content: tuple[Any, ...]) -> str:
        refused = self.judge(fence, content)
        if not refused:
            self.lease, self.returned = None, ("", 0)
        return refused

    def renew(self, fence: int, digest: str, now: float) -> None:
        self.look(now)
        if self.lease is not None and self.lease[:2] == (fence, digest) and self.highest == fence:
            self.lease = (fence, digest, now + self.ttl)

    def restart(self) -> None:
        self.boot += 1
        if self.lease is not None:
            self.returned = ("BootRestart", self.lease[0])
        self.lease, self.granted_in_this_life = None, 0
