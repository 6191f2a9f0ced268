"""Candidate permission as time: a lease ends by itself, and only a grant begins one.

Times are nanoseconds of CLOCK_BOOTTIME (it counts suspend, CLOCK_MONOTONIC does not), read by the caller.
Nothing here waits: expiry is found by whoever looks, at every publication. Rules: release.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from kvtier_core.errors import CoreError, Reason

MAX_TTL_MS = 3_600_000
NANOS_PER_MS = 1_000_000


@dataclass(frozen=True)
class FenceToken:
    """The fence a command carried, with the rollout position it was sent for."""

    value: int
    rollout_uid: str = ""
    attempt: int = 0
    stage: str = "Off"
    step: int = 0


@dataclass(frozen=True)
class BlastRadius:
    """Which sessions a candidate may touch; an empty set admits all."""

    tenants: frozenset[str] = frozenset()
    request_classes: frozenset[str] = frozenset()

    def covers(self, tenant: str, request_class: str) -> bool:
        in_tenants = not self.tenants or tenant in self.tenants
        return in_tenants and (not self.request_classes or request_class in self.request_classes)


@dataclass(frozen=True)
class GrantTerms:
    """What one grant permits. `selector` and `fallbacks` are the candidate's (of its contract), `placement`
    too where it is another than the running one; all are opaque here. lane: names that placement, empty: the
    running one. own: it is answered by an engine of its own. tolerance: by what part of its norm an
    exact candidate's answer may differ from the baseline's. contract: the candidate's whole, opaque too.
    Fractions lie in [0, 1]."""

    fence: FenceToken
    candidate_digest: str
    baseline_digest: str
    ttl_ms: int
    traffic_fraction: Decimal
    sample_fraction: Decimal
    blast_radius: BlastRadius
    selector: Any
    approved: bool = False
    fallbacks: frozenset[Any] = frozenset()
    placement: Any = None
    lane: str = ""
    own: bool = False
    tolerance: float = 0.0
    contract: Any = None

    def check(self) -> None:
        """Raises BAD_ARGUMENT naming the field that is out of range."""
        if not 0 < self.ttl_ms <= MAX_TTL_MS:
            raise CoreError(Reason.BAD_ARGUMENT, f"ttl_ms {self.ttl_ms} must be in [1, {MAX_TTL_MS}]", {})
        for name in ("traffic_fraction", "sample_fraction"):
            value = getattr(self, name)
            if not (value.is_finite() and 0 <= value <= 1):
                raise CoreError(Reason.BAD_ARGUMENT, f"{name} {value} must be in [0, 1]", {})
        if self.fence.stage == "Shadow" and self.traffic_fraction != 0:
            message = f"traffic_fraction {self.traffic_fraction} must be 0 in Shadow"
            raise CoreError(Reason.BAD_ARGUMENT, message, {})


def since(sent_ns: int, now_ns: int) -> int:
    """When a permission begins to count, of a message that arrives now: as it was sent, 0 where nobody says
    when, and never later than now."""
    return min(now_ns, sent_ns) if sent_ns > 0 else now_ns


@dataclass(frozen=True)
class Lease:
    """A held candidate. `epoch` grows whenever permission was interrupted, so that sessions notice."""

    terms: GrantTerms
    expires_ns: int
    epoch: int

    def valid(self, now_ns: int) -> bool:
        return now_ns < self.expires_ns

    def remaining_ms(self, now_ns: int) -> int:
        return max(0, (self.expires_ns - now_ns) // NANOS_PER_MS)

    def extended(self, now_ns: int, ttl_ms: int) -> Lease:
        """The same lease ending a TTL from now; never shortened by a late message."""
        return replace(self, expires_ns=max(self.expires_ns, now_ns + ttl_ms * NANOS_PER_MS))
