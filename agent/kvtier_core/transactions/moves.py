"""One move and the completion that ends its copy: the guards of D3 and P3 as pure functions.

Why it exists: a completion is believed only when the whole tuple fits (specification B.3); which guard speaks
first is part of the contract, so it stands apart from the machine that acts on it. It must not know tiers'
insides or credits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvtier_core.tiers.slots import BlockIdentity, SlotRef
from kvtier_core.transactions.reasons import MoveKind, MoveReason, TxnState

NO_SLOT = SlotRef(-1, 0)


@dataclass(frozen=True, slots=True)
class Binding:
    """What a block is bound to besides its bytes. position_contract: its digest; namespace: index of the
    directory; both are compared when a copy ends."""

    namespace: int = -1
    position_contract: bytes = b""


NO_BINDING = Binding()


@dataclass(slots=True)
class Move:
    """One transaction. `owner` is the logical id of the block or chunk; generations are those at `begin`.

    source_tier: NO_TIER for a STORE. keep_source: the source stays as a replica, and stays the authority of a
    promotion. request: whose fetch this is, 0 for nobody's; it is refused when that request's generation
    moved on. deadline: absolute seconds. asynchronous: a tier's threads move the bytes, so that until
    `drained` the destination is nobody's and the source stays leased. detached: what may still arrive is no
    longer read from the source. by_write: the destination writes, rather than the source reads. late: its
    deadline passed while it flew (P7).
    ahead: a read that goes before those that wait in the source's queue."""

    id: int
    kind: MoveKind
    line: int
    owner: int
    cache_generation: int
    epoch: int
    source_tier: int
    source: SlotRef
    tier: int
    destination: SlotRef
    identity: BlockIdentity
    credit: int
    state: TxnState = TxnState.RESERVED
    transfer_generation: int = 0
    leased: bool = False
    keep_source: bool = False
    binding: Binding = NO_BINDING
    request: int = 0
    request_generation: int = 0
    deadline: float = math.inf
    link: int = 0
    asynchronous: bool = False
    by_write: bool = False
    drained: bool = True
    detached: bool = False
    late: bool = False
    ahead: bool = False
    reason: MoveReason = MoveReason.READY

    @property
    def takes_authority(self) -> bool:
        return self.kind is not MoveKind.PROMOTE or not self.keep_source

    @property
    def releases_source(self) -> bool:
        return self.kind is not MoveKind.STORE and not self.keep_source


@dataclass(frozen=True, slots=True)
class Completion:
    """What a finished copy reports. Matched as a whole: fewer fields would let a late one through."""

    txn: int
    owner: int
    cache_generation: int
    slot: int
    slot_generation: int
    transfer_generation: int
    bytes: int


@dataclass(frozen=True, slots=True)
class LiveView:
    """What is true now at the places a completion names."""

    cache_generation: int
    slot_generation: int
    owner: int
    tombstoned: bool = False


def completion_of(move: Move, done: int) -> Completion:
    """The completion that this move's copy, as it is now, ends with."""
    return Completion(
        txn=move.id,
        owner=move.owner,
        cache_generation=move.cache_generation,
        slot=move.destination.slot,
        slot_generation=move.destination.generation,
        transfer_generation=move.transfer_generation,
        bytes=done,
    )


def is_foreign(move: Move, done: Completion) -> bool:
    """Whether the completion is of another copy than the one that is awaited: it names this transaction, but
    not its slot, slot generation, owner, cache or transfer generation. It must touch nothing."""
    return completion_of(move, done.bytes) != done


def completion_reason(move: Move, live: LiveView, done: Completion) -> MoveReason:
    """The first guard of D3/P3 that fails, in the specification's order, or READY. Vector B1.01."""
    if move.state is not TxnState.COPYING:
        return MoveReason.CANCELLED
    if live.tombstoned:
        return MoveReason.TOMBSTONED
    if live.cache_generation != move.cache_generation or done.cache_generation != move.cache_generation:
        return MoveReason.STALE_CACHE_GENERATION
    if live.slot_generation != move.destination.generation or (
        (done.slot, done.slot_generation) != (move.destination.slot, move.destination.generation)
    ):
        return MoveReason.RECYCLED_DESTINATION
    if live.owner != move.owner or done.owner != move.owner:
        return MoveReason.IDENTITY_MISMATCH
    if done.bytes != move.identity.length:
        return MoveReason.SHORT_COPY
    if done.transfer_generation != move.transfer_generation:
        return MoveReason.TRANSFER_STALE
    return MoveReason.READY
