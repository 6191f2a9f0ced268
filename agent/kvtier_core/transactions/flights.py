"""What single-flight reads are made of: the key that must be equal, the flight, the ticket of who waits.

Why it exists: whether two requests may share one read is a comparison of every field (specification B.4), and
a request waits for its own blocks only. It must not know how a read is started.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Enum, StrEnum

from kvtier_core.transactions.reasons import MoveReason


@dataclass(frozen=True, slots=True)
class FlightKey:
    """All that two requests must share before they share a read; a token hash alone is never a key.

    block: the block key, which seals model, revision, adapter, tokens, positions, producer. namespace: digest
    of tenancy and authorisation domain. representation: layout, dtype and codec. layers: first and past-last.
    generation: of the cache. authority_epoch: of the block's source. integrity: checksum of the payload.
    destination: index of the tier that receives."""

    namespace: bytes
    block: bytes
    representation: str
    layers: tuple[int, int]
    generation: int
    authority_epoch: int
    integrity: int
    destination: int

    def difference(self, other: FlightKey) -> str:
        """Name of the first field that differs; empty when none does."""
        for entry in fields(self):
            if getattr(self, entry.name) != getattr(other, entry.name):
                return entry.name
        return ""


class OrphanPolicy(StrEnum):
    """What becomes of a read that nobody waits for any more. KEEP: it ends and its block stays as a replica.
    DISCARD: it is cancelled; its destination stays quarantined until no byte can arrive."""

    KEEP = "keep"
    DISCARD = "discard"


class FlightState(StrEnum):
    INFLIGHT = "INFLIGHT"
    ORPHAN = "ORPHAN"


class TicketState(StrEnum):
    """WAITING: some block of the wanted prefix is still on its way. SETTLED: over; `ready` and `reason` say
    how. CANCELLED: the request went. LATE: its deadline passed first (P7)."""

    WAITING = "WAITING"
    SETTLED = "SETTLED"
    CANCELLED = "CANCELLED"
    LATE = "LATE"


class BlockState(Enum):
    PENDING = 0
    READY = 1
    FAILED = 2


@dataclass(frozen=True, slots=True)
class Asker:
    """Who wants blocks. namespace: its authorisation; priority: higher goes first; deadline: absolute seconds
    after which an answer is of no use."""

    request: int
    request_generation: int
    namespace: bytes
    priority: int
    deadline: float


@dataclass(slots=True, eq=False)
class Ticket:
    """One request's wait for the blocks `keys`, in the order of its prefix.

    blocks[i]: what became of block i. limit: blocks from here on are no longer wanted, since an earlier one
    failed. reason: READY, or why the prefix ends at `ready`."""

    number: int
    asker: Asker
    keys: tuple[FlightKey, ...]
    blocks: list[BlockState]
    limit: int
    pending: int = 0
    state: TicketState = TicketState.WAITING
    reason: MoveReason = MoveReason.READY
    separate: dict[int, str] = field(default_factory=dict)
    """Blocks read apart from another flight of the same block, with the field that differed
    (COALESCE_KEY_MISMATCH)."""

    @property
    def over(self) -> bool:
        return self.state is not TicketState.WAITING

    @property
    def ready(self) -> int:
        """How many leading blocks are visible to this request."""
        for index, block in enumerate(self.blocks[: self.limit]):
            if block is not BlockState.READY:
                return index
        return self.limit


@dataclass(slots=True, eq=False)
class Flight:
    """One backend read of one block.

    priority and deadline: the most urgent of its waiters, by which its I/O is ordered. expiry: the latest
    deadline of its waiters, at which the I/O itself may give up. place: where it first stands in the prefix
    of a waiter. leader: number of the ticket that pays for the read; 0 for an orphan."""

    number: int
    key: FlightKey
    leader: int
    waiters: dict[int, tuple[Ticket, list[int]]] = field(default_factory=dict)
    state: FlightState = FlightState.INFLIGHT
    priority: int = 0
    deadline: float = 0.0
    expiry: float = 0.0
    place: int = 0
