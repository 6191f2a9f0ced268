"""Who holds what for a move: slots, credits, leases and claims, taken together and given back once, by owner.

Why it exists: cleanup is ownership-conditional (B.0 rule 4): a slot, a copy or a claim goes back only while
it is still this move's, and a slot into which bytes may still arrive is quarantined instead. It must not
know guards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from kvtier_core.credits import CreditLedger
from kvtier_core.directory import Directory
from kvtier_core.errors import CoreError
from kvtier_core.tiers.base import Tier
from kvtier_core.tiers.slots import BlockIdentity, SlotRef
from kvtier_core.transactions.guards import Guards, full_reason
from kvtier_core.transactions.moves import Move
from kvtier_core.transactions.reasons import MoveKind, MoveReason, MoveRefused, TxnState, refusal
from kvtier_core.transactions.surroundings import (
    FreeLink,
    LedgerPurse,
    LinkCredits,
    LiveState,
    QuietState,
    SlotPurse,
)


class Holdings:
    """All open moves of one cache on one node, and what they hold. `identity_of(line, replica_generation)`
    names what a copy must be; `on_published(line, identity)` hears of each newly published replica.
    survival: R_min."""

    def __init__(
        self,
        directory: Directory,
        ledger: CreditLedger | None,
        tiers: Sequence[Tier],
        identity_of: Callable[[int, int], BlockIdentity],
        on_published: Callable[[int, BlockIdentity], None],
        *,
        purse: SlotPurse | None = None,
        link: LinkCredits | None = None,
        live: LiveState | None = None,
        survival: int = 1,
    ) -> None:
        if purse is None and ledger is None:
            raise ValueError("slots are paid by a ledger or by a purse")
        self._directory = directory
        self._tiers = tiers
        self._identity_of = identity_of
        self._on_published = on_published
        self._purse = purse or LedgerPurse(ledger, directory)  # type: ignore[arg-type]
        self._link = link or FreeLink()
        self._live = live or QuietState()
        self._guards = Guards(directory, tiers, self._live)
        self.survival = survival
        self._moves: dict[int, Move] = {}
        self._by_owner: dict[int, list[Move]] = {}
        self._next = 1
        self._next_transfer = 1
        self._condemned: list[tuple[int, int, int]] = []
        self._detached: list[Move] = []
        self.cache_generation = 1
        self.moved_bytes: dict[tuple[str, str], int] = {}
        self.counts: Counter[tuple[str, str]] = Counter()
        """(kind, reason) of every move that ended."""

    def open_moves(self) -> tuple[Move, ...]:
        return tuple(self._moves.values())

    def moves_of(self, owner: int) -> tuple[Move, ...]:
        """Open moves of a block or chunk, dead ones that still drain included."""
        return tuple(self._by_owner.get(owner, ()))

    def _reserve(
        self, kind: MoveKind, line: int, source: int, tier: int, owner: int, identity: BlockIdentity
    ) -> tuple[SlotRef, int, int]:
        full = full_reason(kind)
        try:
            credit = self._purse.take(line, tier)
        except CoreError as error:
            code = refusal(error, full).code
            quota = code is MoveReason.QUOTA_EXCEEDED
            raise MoveRefused(code if quota else full, error.message, error.facts) from error
        try:
            destination = self._tiers[tier].reserve(owner, identity.namespace)
        except CoreError as error:
            self._purse.give(line, tier, credit)
            code = refusal(error, full).code
            room = code is MoveReason.NO_DESTINATION_CAPACITY
            raise MoveRefused(full if room else code, error.message, error.facts) from error
        try:
            link = self._take_link(source, tier, identity, line) if kind is MoveKind.PROMOTE else 0
        except MoveRefused:
            self._tiers[tier].release(destination)
            self._purse.give(line, tier, credit)
            raise
        return destination, credit, link

    def _take_link(self, source: int, tier: int, identity: BlockIdentity, line: int) -> int:
        try:
            return self._link.acquire(source, tier, identity.length, int(self._directory.namespace[line]))
        except CoreError as error:
            raise refusal(error, MoveReason.CREDIT_PRESSURE) from error

    # Cleaning up, by owner.

    def _abort(self, move: Move, reason: MoveReason, copying: bool = False) -> None:
        """D3f: the source was never given up, so it stays the authority. `copying`: a copy that runs here and
        now has not reported yet, so its slot waits for that as for a drain."""
        move.reason = reason
        if self._mine(move):
            self._directory.replicas.clear(move.line, move.tier)
            self._directory.unclaim(move.line, move.id)
        move.state = TxnState.DEAD
        if move.asynchronous and not move.drained:
            if move.detached:
                self._drop_lease(move)
                self._detached.append(move)
            self._quarantine(move)
            return
        self._drop_lease(move)
        if copying and not move.asynchronous:
            self._quarantine(move)
            return
        self._bury(move)

    def _mine(self, move: Move) -> bool:
        """Whether the line is still the block's and its copy in the destination is still this move's."""
        if int(self._directory.logical[move.line]) != move.owner or not self._directory.state[move.line]:
            return False
        copy = self._directory.replica(move.line, move.tier)
        return (copy.slot, copy.slot_generation) == (move.destination.slot, move.destination.generation)

    def _quarantine(self, move: Move) -> None:
        tier = self._tiers[move.tier]
        if tier.slots.generation(move.destination.slot) == move.destination.generation:
            tier.quarantine(move.destination)

    def _bury(self, move: Move) -> None:
        """The last of a dead move: what is still its own goes back, once."""
        self._drop_lease(move)
        tier = self._tiers[move.tier]
        if tier.slots.generation(move.destination.slot) == move.destination.generation:
            tier.release(move.destination)
        self._purse.give(move.line, move.tier, move.credit)
        self._end(move, TxnState.DEAD, move.reason)

    def _end(self, move: Move, state: TxnState, reason: MoveReason) -> None:
        move.state = state
        if move.link:
            self._link.release(move.link)
            move.link = 0
        self._directory.unclaim(move.line, move.id)
        del self._moves[move.id]
        mine = self._by_owner[move.owner]
        mine.remove(move)
        if not mine:
            del self._by_owner[move.owner]
        self.counts[(move.kind.value, reason.value)] += 1

    def _drop_lease(self, move: Move) -> None:
        if move.leased:
            move.leased = False
            self._directory.unlease(move.line, move.source_tier)

    def _slot(self, line: int, tier: int) -> SlotRef:
        copy = self._directory.replica(line, tier)
        return SlotRef(copy.slot, copy.slot_generation)

    def _expect(self, move: Move, state: TxnState) -> None:
        if move.state is not state:
            raise MoveRefused(MoveReason.CANCELLED, f"transaction {move.id} is {move.state}, not {state}")
