"""One move and the completion that ends its copy: the guards of D3 and P3 as pure functions.

Why it exists: a completion is believed only when the whole tuple fits (specification B.3); which guard speaks
first is part of the contract, so it stands apart from the machine that acts on it. It must not know tiers'
insides or credits.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtier_core.tiers.base import BlockIdentity, SlotRef
from kvtier_core.transactions.reasons import MoveKind, MoveReason, TxnState


@dataclass(slots=True)
class Move:
    """One transaction. `owner` is the logical chunk id; generations are those at `begin`."""

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


def completion_reason(move: Move, live: LiveView, done: Completion) -> MoveReason:
    """The first guard of D3/P3 that fails, in the specification's order, or READY. Vector B1.01."""
    if move.state is not TxnState.COPYING:
        return MoveReason.CANCELLED
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
