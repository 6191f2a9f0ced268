"""Moving one chunk between tiers: reserve, copy, validate, publish, release (specification B.1, B.3).

Why it exists: a copy that fails must cost nothing but time, and a completion that comes late must not touch
whoever owns the slot by then. The old copy stays until the new one is published (R_min = 1). It must not know
why a chunk moves (placement), nor attention.

States: RESERVED > COPYING > VALIDATED > PUBLISHED > RELEASED, and DEAD from each before PUBLISHED. The steps
are separate calls, so that a copy may run elsewhere; `run` does them in a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from kvtier_core.credits import CreditLedger
from kvtier_core.directory import ChunkState, Directory
from kvtier_core.errors import CoreError
from kvtier_core.layout import CODEC_IDENTITY, LAYOUT_ID
from kvtier_core.tiers.base import BlockIdentity, SlotRef, SlotState, Tier
from kvtier_core.tiers.staging import StagingBuffer
from kvtier_core.transactions.moves import Completion, LiveView, Move, completion_reason
from kvtier_core.transactions.reasons import MoveKind, MoveReason, MoveRefused, TxnState, refusal


class Transactions:
    """All moves of one engine. `identity_of(line, replica_generation)` names what a copy must be; `sealed`
    receives the identity of each newly published replica."""

    def __init__(
        self,
        directory: Directory,
        ledger: CreditLedger,
        tiers: Sequence[Tier],
        identity_of: Callable[[int, int], BlockIdentity],
        on_published: Callable[[int, BlockIdentity], None],
    ) -> None:
        self._directory = directory
        self._ledger = ledger
        self._tiers = tiers
        self._identity_of = identity_of
        self._on_published = on_published
        self._moves: dict[int, Move] = {}
        self._next = 1
        self._next_transfer = 1
        self.cache_generation = 1
        self.moved_bytes: dict[tuple[str, str], int] = {}

    def open_moves(self) -> tuple[Move, ...]:
        return tuple(self._moves.values())

    def begin(self, kind: MoveKind, line: int, tier: int) -> Move:
        """D1/P1: reserves the destination, exposed to nobody. Raises MoveRefused; nothing is held then."""
        directory = self._directory
        state = ChunkState(int(directory.state[line]))
        if state is ChunkState.OPEN:
            raise MoveRefused(
                MoveReason.UNCOMMITTED_ROWS, "an open chunk stays in its tier until it is sealed"
            )
        if state is not ChunkState.SEALED:
            raise MoveRefused(MoveReason.MISS, f"line {line} holds no chunk")
        if directory.write_txn[line]:
            raise MoveRefused(
                MoveReason.WRITE_TXN_BUSY, f"transaction {directory.write_txn[line]} moves it already"
            )
        source_tier = int(directory.tier[line])
        if source_tier == tier:
            raise MoveRefused(MoveReason.WRITE_TXN_BUSY, "source and destination are the same tier")
        self._check_path(kind, self._tiers[source_tier], self._tiers[tier])
        owner = int(directory.logical[line])
        if self._ledger.pressure({tier: 1}) is not None:
            raise MoveRefused(
                MoveReason.NO_DESTINATION_CAPACITY,
                f"tier {self._tiers[tier].name} has 0 of {self._ledger.capacity(tier)} slots free",
            )
        credit = self._ledger.acquire({tier: 1})
        try:
            destination = self._tiers[tier].reserve(owner)
        except CoreError as error:
            self._ledger.release(credit)
            raise refusal(error) from error
        move = Move(
            id=self._next,
            kind=kind,
            line=line,
            owner=owner,
            cache_generation=self.cache_generation,
            epoch=int(directory.epoch[line]),
            source_tier=source_tier,
            source=SlotRef(int(directory.slot[line]), int(directory.slot_generation[line])),
            tier=tier,
            destination=destination,
            identity=self._identity_of(line, directory.issue_generation()),
            credit=credit,
        )
        self._next += 1
        self._moves[move.id] = move
        directory.write_txn[line] = move.id
        return move

    def _check_path(self, kind: MoveKind, source: Tier, destination: Tier) -> None:
        for tier, role, able in (
            (source, "source", source.capability.dma_source),
            (destination, "destination", destination.capability.dma_destination),
        ):
            stored = CODEC_IDENTITY in tier.capability.codecs and LAYOUT_ID in tier.capability.layouts
            if not (able and stored):
                code = MoveReason.TIER_INCAPABLE if kind is MoveKind.DEMOTE else MoveReason.NO_LEGAL_PATH
                raise MoveRefused(
                    code, f"tier {tier.name} may not be the {role} of a copy in layout {LAYOUT_ID}"
                )

    def submit(self, move: Move) -> None:
        """D2/P2: takes a read lease on the source and names the transfer."""
        self._expect(move, TxnState.RESERVED)
        self._directory.readers[move.line] += 1
        move.leased = True
        move.transfer_generation = self._next_transfer
        self._next_transfer += 1
        move.state = TxnState.COPYING

    def copy(self, move: Move) -> Completion:
        """Moves the bytes; touches no state but the destination slot. Raises CoreError of the tier."""
        self._expect(move, TxnState.COPYING)
        done = self._tiers[move.tier].write(move.destination, self._payload(move), move.identity)
        return Completion(
            txn=move.id,
            owner=move.owner,
            cache_generation=move.cache_generation,
            slot=move.destination.slot,
            slot_generation=move.destination.generation,
            transfer_generation=move.transfer_generation,
            bytes=done,
        )

    def _payload(self, move: Move) -> Tensor:
        source = self._tiers[move.source_tier]
        if source.capability.kernel_readable:
            return source.view(move.source)
        buffer = StagingBuffer(source.layout)
        current = int(self._directory.generation[move.line])
        source.read(move.source, self._identity_of(move.line, current), buffer)
        return buffer.payload

    def complete(self, done: Completion) -> Move:
        """D3/P3: validates a copy that ended. A completion of a dead or unknown transaction only cleans up
        what is still its own, and is refused. Raises MoveRefused after the abort."""
        move = self._moves.get(done.txn)
        if move is None:
            raise MoveRefused(MoveReason.CANCELLED, f"transaction {done.txn} is not open")
        if move.state not in (TxnState.COPYING, TxnState.DEAD):
            # A replay, or a completion of something else: it has no second effect.
            raise MoveRefused(MoveReason.CANCELLED, f"transaction {done.txn} awaits no completion")
        tier = self._tiers[move.tier]
        slot_generation = tier.slots.generation(move.destination.slot)
        owned = slot_generation == move.destination.generation
        live = LiveView(
            self.cache_generation, slot_generation, tier.slots.owner(move.destination) if owned else 0
        )
        reason = completion_reason(move, live, done)
        if reason is not MoveReason.READY:
            self._abort(move)
            raise MoveRefused(reason, f"the copy of chunk {move.owner:#x} is refused")
        try:
            tier.validate(move.destination, move.identity)
        except CoreError as error:
            self._abort(move)
            raise refusal(error) from error
        if int(self._directory.epoch[move.line]) != move.epoch:
            self._abort(move)
            raise MoveRefused(
                MoveReason.STALE_AUTHORITY_EPOCH, f"authority of chunk {move.owner:#x} moved on"
            )
        move.state = TxnState.VALIDATED
        return move

    def publish(self, move: Move) -> None:
        """P4: authority moves in one step of the directory. From here the move cannot be cancelled."""
        self._expect(move, TxnState.VALIDATED)
        self._tiers[move.tier].publish(move.destination)
        old_credit = int(self._directory.credit[move.line])
        self._directory.publish(
            move.line,
            tier=move.tier,
            slot=move.destination.slot,
            slot_generation=move.destination.generation,
            generation=move.identity.replica_generation,
        )
        self._directory.credit[move.line] = move.credit
        move.credit = old_credit
        self._on_published(move.line, move.identity)
        self._drop_lease(move)
        move.state = TxnState.PUBLISHED
        pair = (self._tiers[move.source_tier].name, self._tiers[move.tier].name)
        self.moved_bytes[pair] = self.moved_bytes.get(pair, 0) + move.identity.length

    def release(self, move: Move) -> None:
        """D4/P5: gives the old copy's slot and credit back once nobody reads it. LEASES_HELD: call again."""
        self._expect(move, TxnState.PUBLISHED)
        if self._directory.readers[move.line]:
            raise MoveRefused(MoveReason.LEASES_HELD, f"{self._directory.readers[move.line]} readers remain")
        survivor = self._tiers[move.tier].slots.state(move.destination)
        if survivor is not SlotState.PUBLISHED:
            raise MoveRefused(MoveReason.SURVIVAL_VIOLATION, "the new copy is not published")
        self._tiers[move.source_tier].release(move.source)
        self._ledger.release(move.credit)
        move.state = TxnState.RELEASED
        self._directory.write_txn[move.line] = 0
        del self._moves[move.id]

    def cancel(self, move: Move) -> None:
        """D5/P6. While a copy may still be writing, the destination is quarantined until its completion comes
        (`complete` cleans up then). GENERATION_NOT_OWNED once published."""
        if move.state in (TxnState.PUBLISHED, TxnState.RELEASED):
            raise MoveRefused(MoveReason.GENERATION_NOT_OWNED, "a published move is not cancelled")
        if move.state is TxnState.DEAD:
            return
        if move.state is TxnState.COPYING:
            move.state = TxnState.DEAD
            self._tiers[move.tier].quarantine(move.destination)
            self._drop_lease(move)
            self._clear_line(move)
            return
        self._abort(move)

    def cancel_line(self, line: int) -> None:
        """Cancels whatever moves the line; a published move is released instead. For a closing session."""
        for move in [item for item in self._moves.values() if item.line == line]:
            if move.state is TxnState.PUBLISHED:
                self.release(move)
            else:
                self.cancel(move)

    def run(self, kind: MoveKind, line: int, tier: int) -> None:
        """The whole move at once. Raises MoveRefused; the chunk is then still where it was."""
        move = self.begin(kind, line, tier)
        self.submit(move)
        try:
            done = self.copy(move)
        except CoreError as error:
            self._abort(move)
            raise refusal(error) from error
        except BaseException:
            self._abort(move)
            raise
        self.complete(done)
        self.publish(move)
        self.release(move)

    def _abort(self, move: Move) -> None:
        """Frees what is still ours, once. The source was never given up, so it stays the authority."""
        tier = self._tiers[move.tier]
        if tier.slots.generation(move.destination.slot) == move.destination.generation:
            tier.release(move.destination)
        self._ledger.release(move.credit)
        self._drop_lease(move)
        self._clear_line(move)
        move.state = TxnState.DEAD
        del self._moves[move.id]

    def _drop_lease(self, move: Move) -> None:
        if move.leased:
            self._directory.readers[move.line] -= 1
            move.leased = False

    def _clear_line(self, move: Move) -> None:
        if int(self._directory.write_txn[move.line]) == move.id:
            self._directory.write_txn[move.line] = 0

    def _expect(self, move: Move, state: TxnState) -> None:
        if move.state is not state:
            raise MoveRefused(MoveReason.CANCELLED, f"transaction {move.id} is {move.state}, not {state}")
