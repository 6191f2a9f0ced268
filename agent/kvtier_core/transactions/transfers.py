"""Moves whose bytes a tier's own threads carry: started in batches, reaped as they end (B.1 D6 and P7, B.3).

Why it exists: a tier may take 50 ms, fail halfway or hang, and the metadata lock must not be held meanwhile.
So a tier's report is stamped with the whole tuple it was started under and put into an inbox; `reap`, under
the lock, gives each report to the move it belongs to, or to nobody. It must not know who waits for a block.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvtier_core.credits import CreditLedger
from kvtier_core.directory import NO_TIER, Directory, ReplicaState, is_block_id
from kvtier_core.errors import CoreError, Reason
from kvtier_core.tiers.base import Tier
from kvtier_core.tiers.slots import BlockIdentity, SlotRef, SlotState
from kvtier_core.tiers.staging import StagingBuffer
from kvtier_core.tiers.transfer import Landing, TransferItem
from kvtier_core.transactions.copies import Copies
from kvtier_core.transactions.flights import OrphanPolicy
from kvtier_core.transactions.moves import Completion, Move, completion_of, is_foreign
from kvtier_core.transactions.reasons import MoveKind, MoveReason, MoveRefused, TxnState, refusal
from kvtier_core.transactions.surroundings import LinkCredits, LiveState, SlotPurse


@dataclass(frozen=True, slots=True)
class Settled:
    """A move that is over for whoever waits for it. reason: READY when its copy is published. late: its
    deadline had passed, so that it is a replica now and no answer to the request that fetched it. lost: what
    it read was found bad and no copy of the block survives."""

    move: Move
    reason: MoveReason
    late: bool = False
    lost: bool = False

    @property
    def event(self) -> str:
        """The specification's name: DEMOTION_FAILED(reason) for a failed demotion (D3f), else the reason."""
        failed = self.reason is not MoveReason.READY and self.move.kind is MoveKind.DEMOTE
        return f"DEMOTION_FAILED({self.reason.value})" if failed else self.reason.value


@dataclass(frozen=True, slots=True)
class _Report:
    """What a tier said, stamped with what the copy was started under. drained: no byte can still arrive."""

    stamp: Completion
    error: CoreError | None = None
    drained: bool = False


class _Batch:
    """The sink of one batch: stamps are fixed when it starts, so a late report cannot borrow a new one."""

    def __init__(self, stamps: Sequence[Completion], inbox: deque[_Report], wake: Callable[[], None]) -> None:
        self._stamps = tuple(stamps)
        self._inbox = inbox
        self._wake = wake

    def done(self, index: int, error: CoreError | None) -> None:
        self._inbox.append(_Report(self._stamps[index], error))
        self._wake()

    def drained(self, index: int) -> None:
        self._inbox.append(_Report(self._stamps[index], drained=True))
        self._wake()


class Transactions(Copies):
    """The residency machine with asynchronous copies.

    `wake` is called from tiers' threads when `reap` has work; it must not block. The inbox is bounded by the
    moves in flight, two reports each. late: what becomes of a promotion whose deadline passes: KEEP lets it
    land as a replica, DISCARD cancels it."""

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
        wake: Callable[[], None] | None = None,
        late: OrphanPolicy = OrphanPolicy.KEEP,
    ) -> None:
        super().__init__(
            directory,
            ledger,
            tiers,
            identity_of,
            on_published,
            purse=purse,
            link=link,
            live=live,
            survival=survival,
        )
        self._wake = wake or (lambda: None)
        self._late = late
        self._inbox: deque[_Report] = deque()
        self._leaving: dict[int, Move] = {}
        self.ignored: Counter[str] = Counter()
        """Reports that had no effect, by why: unknown, foreign, cancelled, repeated."""

    # Starting.

    def start(self, moves: Sequence[Move], payloads: Mapping[int, Landing] | None = None) -> list[Settled]:
        """D2/P2 for a batch: submits each move and hands the copies to the tiers, one batch for each tier and
        direction. `payloads`: where the bytes of a STORE lie, by move id. Returns what could not start,
        cancelled: CREDIT_PRESSURE, QUEUE_FULL, NO_LEGAL_PATH, or the tier's reason."""
        refused: list[Settled] = []
        batches: dict[tuple[int, bool], list[tuple[Move, TransferItem]]] = {}
        for move in moves:
            try:
                self.submit(move)
                tier, item = self._item(move, (payloads or {}).get(move.id))
            except CoreError as error:
                refused.append(self._refuse(move, error))
            else:
                batches.setdefault((tier, move.by_write), []).append((move, item))
        for (tier, writes), batch in batches.items():
            refused += self._submit(self._tiers[tier], writes, batch)
        return refused

    def _submit(self, tier: Tier, writes: bool, batch: list[tuple[Move, TransferItem]]) -> list[Settled]:
        stamps = [completion_of(move, move.identity.length) for move, _ in batch]
        sink = _Batch(stamps, self._inbox, self._wake)
        items = [item for _, item in batch]
        # Who is less patient leaves by itself; the I/O lives as long as the most patient.
        deadline = max(move.deadline for move, _ in batch)
        for move, _ in batch:
            move.asynchronous, move.drained = True, False
        try:
            (tier.submit_write if writes else tier.submit_read)(items, deadline, sink)
        except CoreError as error:
            for move, _ in batch:
                move.drained = True
            return [self._refuse(move, error) for move, _ in batch]
        return []

    def _refuse(self, move: Move, error: CoreError) -> Settled:
        reason = refusal(error).code
        self.cancel(move, reason)
        if move.id in self._moves:
            self._bury(move)
        return Settled(move, reason)

    def _item(self, move: Move, payload: Landing | None) -> tuple[int, TransferItem]:
        """Which tier carries the bytes and what it is given. The side with memory is where they land."""
        if move.source_tier == NO_TIER:
            if payload is None:
                raise MoveRefused(MoveReason.MISS, "a store without its bytes")
            move.by_write = True
            return move.tier, TransferItem(move.destination, move.identity, payload)
        target = _landing(self._tiers[move.tier], move.destination)
        if target is not None:
            move.by_write = False
            return move.source_tier, TransferItem(move.source, self.source_identity(move), target, move.ahead)
        origin = _landing(self._tiers[move.source_tier], move.source)
        if origin is None:
            raise MoveRefused(MoveReason.NO_LEGAL_PATH, "neither tier has memory for the other to reach")
        move.by_write = True
        return move.tier, TransferItem(move.destination, move.identity, origin)

    def lend(self, move: Move) -> None:
        """Gives the landing of a STORE to a writer. Until `returned` its slot is nobody else's, also when
        the move dies: the writer may still be writing."""
        self._expect(move, TxnState.RESERVED)
        move.asynchronous, move.drained = True, False

    def returned(self, move: Move) -> None:
        """The writer will write no more; a dead store's slot goes back. A second call has no effect."""
        if not move.drained:
            self._on_drained(move)

    def seal(self, move: Move, checksum: int) -> None:
        """Publishes a STORE whose bytes were written in place, through the destination's `landing`: they are
        what they are, so `checksum` (XXH3-64 of them) becomes the block's. Raises MoveRefused after the
        abort."""
        self._expect(move, TxnState.RESERVED)
        move.drained = True
        # Bytes that were written in place took no link.
        self._launch(move)
        move.identity = replace(move.identity, checksum=checksum)
        self._directory.checksum[move.line] = checksum
        tier = self._tiers[move.tier]
        reason = self._moved_on(move)
        if reason is MoveReason.READY:
            tier.filled(move.destination)
            tier.slots.advance(move.destination, SlotState.VALIDATED, SlotState.WRITTEN)
            move.state = TxnState.VALIDATED
            self.publish(move)
            self.release(move)
            return
        self._abort(move, reason)
        raise MoveRefused(reason, f"block {move.owner:#x} may no longer be published")

    # Ending.

    def reap(self) -> list[Settled]:
        """Takes every report that has come, publishes what arrived whole, and gives back what is drained.
        Call it upstream of whatever needs room."""
        for tier in self._tiers:
            tier.poll()
        settled: list[Settled] = []
        while self._inbox:
            report = self._inbox.popleft()
            move = self._moves.get(report.stamp.txn)
            if move is None:
                self.ignored["unknown"] += 1
            elif is_foreign(move, report.stamp):
                self.ignored["foreign"] += 1
            elif report.drained:
                self._on_drained(move)
            else:
                settled += self._on_done(move, report)
        self._leave()
        self._sweep()
        return settled

    def _on_done(self, move: Move, report: _Report) -> list[Settled]:
        if move.state is not TxnState.COPYING:
            self.ignored["cancelled" if move.state is TxnState.DEAD else "repeated"] += 1
            return []
        try:
            self.complete(report.stamp, report.error)
            self.publish(move)
        except MoveRefused as refused:
            return [Settled(move, refused.code, move.late, self._suspect(move, refused.code))]
        self._leaving[move.id] = move
        return [Settled(move, MoveReason.READY, move.late)]

    def _on_drained(self, move: Move) -> None:
        if move.drained:
            self.ignored["repeated"] += 1
            return
        move.drained = True
        if move.state is TxnState.DEAD:
            self._bury(move)
        elif move.state is TxnState.PUBLISHED:
            self._drop_lease(move)

    @property
    def leaving(self) -> int:
        """Published moves whose sources wait for their readers."""
        return len(self._leaving)

    def _leave(self) -> None:
        """Releases the sources of published moves as their readers go."""
        for move in list(self._leaving.values()):
            if move.state is not TxnState.PUBLISHED:
                del self._leaving[move.id]
                continue
            try:
                self.release(move)
            except MoveRefused as refused:
                if refused.code is not MoveReason.SURVIVAL_VIOLATION:
                    continue
                self.keep(move)
            del self._leaving[move.id]

    def expire(self, now: float) -> list[Settled]:
        """D6/P7: what becomes of copies whose deadline has come. A demotion or store dies (TRANSFER_TIMEOUT).
        A promotion is late (FETCH_LATE, once): whoever waits goes to its fallback, and the policy says
        whether the copy still lands as a replica."""
        settled: list[Settled] = []
        for move in [item for item in self._moves.values() if item.state is TxnState.COPYING]:
            if now < move.deadline or move.late:
                continue
            if move.kind is MoveKind.PROMOTE:
                move.late = True
                if self._late is OrphanPolicy.DISCARD:
                    self.cancel(move, MoveReason.FETCH_LATE)
                settled.append(Settled(move, MoveReason.FETCH_LATE, late=True))
            else:
                self.cancel(move, MoveReason.TRANSFER_TIMEOUT)
                settled.append(Settled(move, MoveReason.TRANSFER_TIMEOUT))
        return settled

    def reset(self) -> list[Settled]:
        """A new job epoch: every move that is not published dies. Reports of their copies come under transfer
        generations that are never issued again; slots and credits come back as they drain."""
        gone = [
            move for move in self._moves.values() if move.state not in (TxnState.PUBLISHED, TxnState.DEAD)
        ]
        for move in gone:
            self.cancel(move)
        return [Settled(move, MoveReason.CANCELLED) for move in gone]

    def _settle_slot(self, move: Move, tier: Tier) -> None:
        if not move.asynchronous:
            super()._settle_slot(move, tier)
        elif move.by_write:
            tier.slots.check(move.destination, SlotState.VALIDATED)
        else:
            # The tier that read has verified the bytes where they lie.
            tier.filled(move.destination)
            tier.slots.advance(move.destination, SlotState.VALIDATED, SlotState.WRITTEN)

    def _suspect(self, move: Move, reason: MoveReason) -> bool:
        """A copy that was found bad is never read again. Returns whether the block is lost."""
        if reason not in (MoveReason.CHECKSUM_MISMATCH, MoveReason.IDENTITY_MISMATCH):
            return False
        if move.source_tier == NO_TIER or not is_block_id(move.owner):
            return False
        copy = self._directory.replica(move.line, move.source_tier)
        if copy.state is not ReplicaState.PUBLISHED or (move.by_write and not self._is_bad(move)):
            return False
        return self.condemn(move.line, move.source_tier) == 0

    def _is_bad(self, move: Move) -> bool:
        """Whether it was the source that spoiled a write: reads it once more."""
        source = self._tiers[move.source_tier]
        try:
            source.read(move.source, self.source_identity(move), StagingBuffer(source.layout))
        except CoreError as error:
            return error.reason is Reason.CHECKSUM_MISMATCH
        return False


def _landing(tier: Tier, ref: SlotRef) -> Landing | None:
    try:
        return tier.landing(ref)
    except CoreError as error:
        if error.reason is Reason.TIER_INCAPABLE:
            return None
        raise
