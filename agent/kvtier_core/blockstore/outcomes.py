"""What calls on the block store answer: closed sets and frozen records, never bytes.

Why it exists: a caller decides by outcome and a person reads the reason. It must not know how an outcome
comes about.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from kvtier_core.transactions.reasons import MoveReason


class PutOutcome(StrEnum):
    """STORED: published by this call. EXISTED: equal bytes were published before. IN_FLIGHT: another writer
    is storing this key now. REFUSED: not published, `reason` says why."""

    STORED = "STORED"
    EXISTED = "EXISTED"
    IN_FLIGHT = "IN_FLIGHT"
    REFUSED = "REFUSED"


class Stored(NamedTuple):
    """generation: of the published replica, 0 when nothing was published. durable: a restart keeps it, and
    its writer waited for that; where it waited in vain, `reason` says why. checksum: XXH3-64 of the published
    bytes, where they EXISTED."""

    outcome: PutOutcome
    generation: int = 0
    reason: MoveReason = MoveReason.READY
    message: str = ""
    durable: bool = False
    checksum: int = 0


_REST = Stored(PutOutcome.STORED)[2:]


def all_stored(generations: Iterable[int]) -> list[Stored]:
    """STORED, each at its replica generation; half of what the calls of the class would take."""
    done, (reason, message, durable, checksum), make = PutOutcome.STORED, _REST, tuple.__new__
    return [make(Stored, (done, each, reason, message, durable, checksum)) for each in generations]


def compared(there: Stored, found: int) -> Stored:
    """What becomes of a block that is there already when its writer's bytes have the checksum `found`."""
    if there.outcome is not PutOutcome.EXISTED or there.checksum == found:
        return there
    return Stored(
        PutOutcome.REFUSED,
        reason=MoveReason.IDENTITY_MISMATCH,
        message=f"its bytes are xxh3:{there.checksum:016x}, not xxh3:{found:016x}; the key lacks something",
    )


@dataclass(frozen=True, slots=True)
class Found:
    """One block of a lookup: the fastest tier that holds it."""

    tier: int
    generation: int
    checksum: int


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    tier: str
    state: str
    slot: int
    slot_generation: int
    generation: int
    counts: bool
    authority: bool
    readers: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a key is served or not. state: published, storing, moving, evicted, lost, deleted
    or unknown."""

    key: bytes
    state: str
    reason: MoveReason
    message: str
    replicas: tuple[ReplicaFacts, ...] = ()
    facts: dict[str, str] = field(default_factory=dict)
