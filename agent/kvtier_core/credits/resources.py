"""What is counted, up to where, and how a refusal says so.

Why it exists: one number for "transfer bytes" cannot say which stage is short, and a refusal without numbers
cannot be acted on. Units: bytes for PINNED, STAGING and LINK; requests for QUEUE; slots for SLOTS. It must
not know who asks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import NamedTuple

from kvtier_core.errors import CoreError, Reason

NO_TENANT = -1


class ResourceKind(StrEnum):
    PINNED = "pinned"
    STAGING = "staging"
    LINK = "link"
    QUEUE = "queue"
    SLOTS = "slots"

    # An enumeration's own is a call of Python, and a put looks resources up ten times.
    __hash__ = str.__hash__


class LinkStage(IntEnum):
    """The stages of a transfer, each with bytes in flight of its own (specification G.3)."""

    STORAGE_READ = 0
    STORAGE_WRITE = 1
    HOST_TO_DEVICE = 2
    DEVICE_TO_HOST = 3


class Resource(NamedTuple):
    """number: the stage of a LINK, the tier of SLOTS; 0 otherwise."""

    kind: ResourceKind
    number: int = 0

    @property
    def label(self) -> str:
        if self.kind is ResourceKind.LINK:
            return f"link:{LinkStage(self.number).name.lower()}"
        return f"slots:{self.number}" if self.kind is ResourceKind.SLOTS else self.kind.value


PINNED = Resource(ResourceKind.PINNED)
STAGING = Resource(ResourceKind.STAGING)
QUEUE = Resource(ResourceKind.QUEUE)


def link(stage: LinkStage) -> Resource:
    return Resource(ResourceKind.LINK, int(stage))


def slots(tier: int) -> Resource:
    return Resource(ResourceKind.SLOTS, tier)


@dataclass(frozen=True, slots=True)
class Limit:
    """total: how much there is. Above `high` of it, room is made until at most `low` is used (fractions)."""

    total: int
    high: float = 1.0
    low: float = 1.0

    def __post_init__(self) -> None:
        if self.total < 0 or not 0.0 <= self.low <= self.high <= 1.0:
            raise CoreError(
                Reason.BAD_ARGUMENT, f"a limit of {self.total} with marks {self.low} and {self.high}"
            )


@dataclass(frozen=True, slots=True)
class Unit:
    """Immutable bytes that are fetched once however many wait for them: `backend` is charged with the first
    grant and given back with the last. key: equal only if the reads may be one (specification B.4)."""

    key: bytes
    backend: Mapping[Resource, int]


class Grant(NamedTuple):
    """What was acquired; the ledger keeps what is left of it. epoch: of the ledger's job epoch."""

    id: int
    tenant: int
    epoch: int
    want: Mapping[Resource, int]
    unit: bytes | None = None


class Release(StrEnum):
    """RELEASED: given back now. DOUBLE: it had been already, nothing changed, counted. STALE: it is of a job
    epoch before the last rebuild, which gave it back; nothing changed, counted."""

    RELEASED = "RELEASED"
    DOUBLE = "CREDIT_DOUBLE_RELEASE"
    STALE = "TRANSFER_STALE"


class CreditRefused(CoreError):
    """Nothing was taken. reason: QUOTA_EXCEEDED (the tenant's own limit), ADMISSION_PINNED (more pinned bytes
    than there are at all), QUEUE_FULL, else CREDIT_PRESSURE. retry_after_ms: None when waiting cannot
    help."""

    def __init__(
        self,
        reason: Reason,
        resource: Resource,
        wanted: int,
        available: int,
        capacity: int,
        retry_after_ms: int | None,
    ) -> None:
        facts: dict[str, object] = {
            "resource": resource.label,
            "wanted": wanted,
            "available": available,
            "capacity": capacity,
        }
        if retry_after_ms is not None:
            facts["retry_after_ms"] = retry_after_ms
        super().__init__(
            reason, f"{wanted} of {resource.label} wanted, {available} of {capacity} are free", facts
        )
        self.resource = resource
        self.wanted = wanted
        self.available = available
        self.capacity = capacity
        self.retry_after_ms = retry_after_ms
