"""The residency machine: reserve, copy, validate, publish, release, each behind its guards (B.1, B.3).

Why it exists: a copy that fails must cost nothing but time, and a completion that comes late must not touch
whoever owns the slot by then. The old copy stays until the new one is published and R_min copies survive
without it. It must not know why a block moves, nor attention. The caller holds the metadata lock.

States: RESERVED > COPYING > VALIDATED > PUBLISHED > RELEASED, and DEAD from each before PUBLISHED. A dead
move whose bytes may still arrive keeps its slot quarantined and its source leased until they are drained.
"""

from __future__ import annotations

import math

from torch import Tensor

from kvtier_core.directory import NO_TIER, ChunkState
from kvtier_core.errors import CoreError
from kvtier_core.tiers.base import Tier
from kvtier_core.tiers.slots import BlockIdentity, SlotState
from kvtier_core.tiers.staging import StagingBuffer
from kvtier_core.transactions.guards import stores_layout
from kvtier_core.transactions.holdings import Holdings
from kvtier_core.transactions.moves import (
    NO_SLOT,
    Completion,
    LiveView,
    Move,
    completion_of,
    completion_reason,
    is_foreign,
)
from kvtier_core.transactions.reasons import MoveKind, MoveReason, MoveRefused, TxnState, refusal


class MoveMachine(Holdings):
    """All moves of one cache on one node, step by step."""

    # D1, P1.

    def begin(
        self,
        kind: MoveKind,
        line: int,
        tier: int,
        *,
        source_tier: int | None = None,
        keep_source: bool = False,
        request: int = 0,
        request_generation: int = 0,
        now: float = 0.0,
        deadline: float = math.inf,
    ) -> Move:
        """D1/P1: reserves the destination, exposed to nobody. Raises MoveRefused; nothing is held then.

        source_tier None: the authority for a demotion, the fastest copy with a legal path for a promotion."""
        directory = self._directory
        source = self._guards.admit(kind, line, tier, source_tier)
        identity = self._identity_of(line, directory.issue_generation())
        if kind is MoveKind.PROMOTE:
            ends = now + self._live.seconds(source, tier, identity.length)
            if ends > deadline:
                raise MoveRefused(MoveReason.DEADLINE, f"the copy would end at {ends}, after {deadline}")
        owner = int(directory.logical[line])
        destination, credit, link = self._reserve(kind, line, source, tier, owner, identity)
        move = Move(
            id=self._next,
            kind=kind,
            line=line,
            owner=owner,
            cache_generation=self.cache_generation,
            epoch=int(directory.epoch[line]),
            source_tier=source,
            source=NO_SLOT if source == NO_TIER else self._slot(line, source),
            tier=tier,
            destination=destination,
            identity=identity,
            credit=credit,
            keep_source=keep_source,
            binding=self._live.binding(line),
            request=request,
            request_generation=request_generation,
            deadline=deadline,
            link=link,
        )
        self._next += 1
        self._moves[move.id] = move
        self._by_owner.setdefault(owner, []).append(move)
        directory.claim(line, move.id)
        directory.add_replica(
            line, tier, destination.slot, destination.generation, identity.replica_generation
        )
        return move

    # D2, P2.

    def submit(self, move: Move) -> None:
        """D2/P2: takes link credits and a read lease on the source, and names the transfer. CREDIT_PRESSURE
        leaves the move RESERVED: try again or cancel it."""
        self._expect(move, TxnState.RESERVED)
        if move.kind is not MoveKind.PROMOTE:
            move.link = self._take_link(move.source_tier, move.tier, move.identity, move.line)
        self._launch(move)

    def _launch(self, move: Move) -> None:
        if move.source_tier != NO_TIER:
            self._directory.lease(move.line, move.source_tier)
            move.leased = True
        move.transfer_generation = self._next_transfer
        self._next_transfer += 1
        move.state = TxnState.COPYING

    def copy(self, move: Move, deadline: float | None = None) -> Completion:
        """Moves the bytes here and now; touches no state but the destination slot. Raises CoreError of the
        tier."""
        self._expect(move, TxnState.COPYING)
        payload = self._payload(move, deadline)
        done = self._tiers[move.tier].write(move.destination, payload, move.identity, deadline)
        return completion_of(move, done)

    def carry(self, move: Move, deadline: float | None = None) -> tuple[Completion, CoreError | None]:
        """`copy`, read back and validated where it landed, for a caller that does not hold the metadata lock
        meanwhile; `complete` takes both. After a DEADLINE the slot waits for what may still arrive."""
        move.asynchronous = move.by_write = True
        tier = self._tiers[move.tier]
        try:
            done = self.copy(move, deadline)
            if done.bytes == move.identity.length:
                tier.validate(move.destination, move.identity, deadline)
        except CoreError as error:
            if tier.arriving(move.destination):
                move.drained, move.detached = False, True
            return completion_of(move, move.identity.length), error
        return done, None

    def settle_detached(self) -> None:
        """Gives slots back in which, after a deadline, bytes could still arrive, and no longer can."""
        for move in self._detached.copy():
            if not self._tiers[move.tier].arriving(move.destination):
                self._detached.remove(move)
                move.drained = True
                self._bury(move)

    def _payload(self, move: Move, deadline: float | None = None) -> Tensor:
        source = self._tiers[move.source_tier]
        if source.capability.kernel_readable:
            return source.view(move.source)
        buffer = StagingBuffer(source.layout)
        source.read(move.source, self.source_identity(move), buffer, deadline)
        return buffer.payload

    def source_identity(self, move: Move) -> BlockIdentity:
        """What the copy that a move reads must be."""
        current = self._directory.replica(move.line, move.source_tier).generation
        return self._identity_of(move.line, current)

    # D3, P3.

    def complete(self, done: Completion, error: CoreError | None = None) -> Move:
        """D3/P3: validates a copy that ended, with `error` if it failed. Raises MoveRefused after the abort.

        A completion of a dead or unknown transaction, of another copy, or one that comes twice only cleans up
        what is still its own."""
        move = self._moves.get(done.txn)
        if move is None:
            raise MoveRefused(MoveReason.CANCELLED, f"transaction {done.txn} is not open")
        if move.state is TxnState.DEAD:
            if not move.asynchronous and not is_foreign(move, done):
                self._bury(move)
            raise MoveRefused(MoveReason.CANCELLED, f"transaction {done.txn} was cancelled")
        if move.state is not TxnState.COPYING:
            raise MoveRefused(MoveReason.CANCELLED, f"transaction {done.txn} awaits no completion")
        reason = completion_reason(move, self._view(move), done)
        if is_foreign(move, done):
            raise MoveRefused(reason, f"the completion is not of the copy of {move.owner:#x} that is awaited")
        failure: CoreError | None = error
        if reason is MoveReason.READY:
            reason, failure = self._validation(move, error)
        if reason is not MoveReason.READY:
            self._abort(move, reason)
            message = failure.message if failure else f"the copy of {move.owner:#x} is refused"
            raise MoveRefused(reason, message, failure.facts if failure else None) from failure
        move.state = TxnState.VALIDATED
        return move

    def _view(self, move: Move) -> LiveView:
        slots = self._tiers[move.tier].slots
        generation = slots.generation(move.destination.slot)
        owned = generation == move.destination.generation
        gone = int(self._directory.logical[move.line]) != move.owner
        state = ChunkState(int(self._directory.state[move.line]))
        return LiveView(
            self.cache_generation,
            generation,
            slots.owner(move.destination) if owned else 0,
            tombstoned=gone or state in (ChunkState.TOMBSTONED, ChunkState.FREE),
        )

    def _validation(self, move: Move, error: CoreError | None) -> tuple[MoveReason, CoreError | None]:
        """The guards after the tuple: the copy's own failure, layout, checksum, binding, request, epoch."""
        tier = self._tiers[move.tier]
        if error is not None:
            return self._failure(move, error), error
        if not stores_layout(tier) or move.identity.length != tier.layout.payload_bytes:
            return MoveReason.CODEC_OR_LAYOUT_MISMATCH, None
        try:
            self._settle_slot(move, tier)
        except CoreError as raised:
            return refusal(raised).code, raised
        return self._moved_on(move), None

    def _moved_on(self, move: Move) -> MoveReason:
        """Guards that are asked again at publication, since time has passed."""
        view = self._view(move)
        if view.tombstoned:
            return MoveReason.TOMBSTONED
        if view.cache_generation != move.cache_generation:
            return MoveReason.STALE_CACHE_GENERATION
        now = self._live.binding(move.line)
        if now.position_contract != move.binding.position_contract:
            return MoveReason.POSITION_CONTRACT_MISMATCH
        if now.namespace != move.binding.namespace:
            return MoveReason.TENANT_MISMATCH
        if move.request and self._live.request_generation(move.request) != move.request_generation:
            return MoveReason.REQUEST_STALE
        if int(self._directory.epoch[move.line]) != move.epoch:
            return MoveReason.STALE_AUTHORITY_EPOCH
        return MoveReason.READY

    def _failure(self, move: Move, error: CoreError) -> MoveReason:
        """D6, P7: how a failed copy is called."""
        code = refusal(error).code
        if code is MoveReason.DEADLINE:
            return MoveReason.FETCH_LATE if move.kind is MoveKind.PROMOTE else MoveReason.TRANSFER_TIMEOUT
        return code

    def _settle_slot(self, move: Move, tier: Tier) -> None:
        tier.validate(move.destination, move.identity)

    # P4.

    def publish(self, move: Move) -> None:
        """P4: the copy becomes readable and, but for a promotion that keeps its source, the authority: one
        step of the directory. From here the move cannot be cancelled."""
        self._expect(move, TxnState.VALIDATED)
        moved_on = self._moved_on(move)
        if moved_on is not MoveReason.READY:
            self._abort(move, moved_on)
            raise MoveRefused(moved_on, f"what {move.owner:#x} was validated against has moved on")
        try:
            self._tiers[move.tier].publish(move.destination)
            self._directory.publish_replica(move.line, move.tier, authority=move.takes_authority)
        except CoreError as error:
            self._abort(move, refusal(error).code)
            raise refusal(error) from error
        move.credit = self._purse.settle(move.line, move.tier, move.source_tier, move.credit)
        self._on_published(move.line, move.identity)
        move.state = TxnState.PUBLISHED
        if move.drained:
            self._drop_lease(move)
        if move.source_tier != NO_TIER:
            pair = (self._tiers[move.source_tier].name, self._tiers[move.tier].name)
            self.moved_bytes[pair] = self.moved_bytes.get(pair, 0) + move.identity.length

    # D4, P5.

    def release(self, move: Move) -> None:
        """D4/P5: gives the old copy's slot and credit back once nobody reads it and R_min others survive.
        LEASES_HELD: call again. SURVIVAL_VIOLATION: `keep` it. A move that keeps its source just ends."""
        self._expect(move, TxnState.PUBLISHED)
        if not move.drained:
            raise MoveRefused(MoveReason.LEASES_HELD, "its bytes are not drained yet")
        if move.releases_source:
            directory, line, source = self._directory, move.line, move.source_tier
            held = int(directory.readers[line]) + directory.leases(line, source)
            if held:
                raise MoveRefused(MoveReason.LEASES_HELD, f"{held} readers remain", {"readers": held})
            deleted = ChunkState(int(directory.state[line])) is ChunkState.TOMBSTONED
            published = self._tiers[move.tier].slots.state(move.destination) is SlotState.PUBLISHED
            if not deleted and not (published and directory.survivors(line, source) >= self.survival):
                raise MoveRefused(
                    MoveReason.SURVIVAL_VIOLATION, f"fewer than {self.survival} copies would remain"
                )
            directory.drop_replica(line, source, r_min=self.survival)
            self._tiers[source].release(move.source)
            self._purse.give(line, source, move.credit)
        self._end(move, TxnState.RELEASED, MoveReason.READY)

    def keep(self, move: Move) -> None:
        """Ends a published move and leaves its source as a replica."""
        self._expect(move, TxnState.PUBLISHED)
        move.keep_source = True
        self.release(move)

    # D5, P6.

    def cancel(self, move: Move, reason: MoveReason = MoveReason.CANCELLED) -> None:
        """D5/P6. While bytes may still arrive, the destination is quarantined until they are drained.
        GENERATION_NOT_OWNED once published; a dead move stays dead."""
        if move.state in (TxnState.PUBLISHED, TxnState.RELEASED):
            raise MoveRefused(MoveReason.GENERATION_NOT_OWNED, "a published move is not cancelled")
        if move.state is not TxnState.DEAD:
            self._abort(move, reason, copying=move.state is TxnState.COPYING)

    def cancel_line(self, line: int) -> None:
        """Cancels whatever moves the line; a published move is released instead. For a closing session."""
        for move in self.moves_of(int(self._directory.logical[line])):
            if move.state is TxnState.PUBLISHED:
                self.release(move)
            else:
                self.cancel(move)

    def run(self, kind: MoveKind, line: int, tier: int) -> None:
        """The whole move at once. Raises MoveRefused; the block is then still where it was."""
        move = self.begin(kind, line, tier)
        try:
            self.submit(move)
            done = self.copy(move)
        except CoreError as error:
            self._abort(move, refusal(error).code)
            raise refusal(error) from error
        except BaseException:
            self._abort(move, MoveReason.TRANSFER_FAILED)
            raise
        self.complete(done)
        self.publish(move)
        self.release(move)
