"""Write-through: copies of published blocks in storage that their writers wait for.

Why it exists: a writer that is told "durable" will not write again, so it is told only when a copy is
flushed, published and found in storage, and after that storage gives no such copy up while the block may not
be lost. Writers that come at once share batches and flushes; a block that another moves already is waited for
and not written twice. It must not know who asks, nor how a tier makes bytes durable.

A block that could not be made durable stays what it was: published in memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from kvtier_core.blockstore.outcomes import PutOutcome, Stored
from kvtier_core.blockstore.parts import Parts
from kvtier_core.directory import ChunkState
from kvtier_core.errors import CoreError, Reason
from kvtier_core.transactions import Move, MoveKind, MoveReason, MoveRefused, Transactions, TxnState
from kvtier_core.transactions.eviction import Room
from kvtier_core.transactions.transfers import Settled

# Ends of an attempt after which another may succeed while there is time.
_PASSING = (
    MoveReason.CANCELLED,
    MoveReason.CREDIT_PRESSURE,
    MoveReason.QUEUE_FULL,
    MoveReason.WRITE_TXN_BUSY,
    MoveReason.WOULD_EVICT_PINNED,
    MoveReason.TRANSFER_TIMEOUT,
    MoveReason.STALE_AUTHORITY_EPOCH,
)

THERE = (PutOutcome.STORED, PutOutcome.EXISTED)
"""Outcomes of blocks that can be written through."""


class Lasting:
    """A writer's wait for some blocks, in the order of its keys. reasons[i]: READY once block i is durable,
    what stands in the way when it will not be, None while it is under way. Read it whenever the store was
    pumped."""

    __slots__ = ("deadline", "left", "messages", "reasons")

    def __init__(self, count: int, deadline: float) -> None:
        self.deadline = deadline
        self.left = count
        self.reasons: list[MoveReason | None] = [None] * count
        self.messages = [""] * count

    def __len__(self) -> int:
        return len(self.reasons)

    @property
    def over(self) -> bool:
        return not self.left

    def end(self, index: int, reason: MoveReason, message: str = "") -> None:
        if self.reasons[index] is None:
            self.reasons[index], self.messages[index] = reason, message
            self.left -= 1


@dataclass(slots=True, eq=False)
class _Wanted:
    """A block that somebody waits for. last: why it is not under way."""

    line: int
    owner: int
    waiters: list[tuple[Lasting, int]] = field(default_factory=list)
    move: Move | None = None
    last: MoveReason = MoveReason.READY

    @property
    def patience(self) -> float:
        return max((scope.deadline for scope, _ in self.waiters), default=-math.inf)


class WriteThrough:
    """All waits of one store, of at most `max_blocks` blocks, of which `at_once` are on their way at a time:
    a tier takes a batch whole or not at all, and nobody may hold the lock for a long call. Called with the
    lock held; never waits."""

    def __init__(
        self,
        parts: Parts,
        moves: Transactions,
        make_room: Callable[[int, int], Room],
        free: Callable[[int], int],
        *,
        max_blocks: int = 65536,
        at_once: int = 512,
    ) -> None:
        self._at_once = at_once
        self._parts = parts
        self._moves = moves
        self._make_room = make_room
        self._free = free
        self._max_blocks = max_blocks
        self._target = parts.storage[0] if parts.durable else -1
        self._wanted: dict[int, _Wanted] = {}
        self._of_move: dict[int, _Wanted] = {}
        self.counts: Counter[str] = Counter()
        """asked, durable, and refusals by reason: blocks since start."""

    def __len__(self) -> int:
        return len(self._wanted)

    def check(self) -> None:
        """TIER_INCAPABLE where nothing outlives the process: before anything is stored."""
        if self._target < 0:
            raise CoreError(Reason.TIER_INCAPABLE, "no tier of this cache outlives its agent")

    def ask(self, keys: Sequence[bytes], namespace: bytes, deadline: float) -> Lasting:
        """Waits for durable copies of published blocks. Per block: READY, or MISS (not published, or another
        namespace's), TOMBSTONED, NO_DESTINATION_CAPACITY, WRITE_BUDGET, what the tier refused it for, or
        DEADLINE. Raises TIER_INCAPABLE, DEADLINE, QUEUE_FULL; nothing is begun then."""
        self.check()
        if self._parts.clock() >= deadline:
            raise CoreError(Reason.DEADLINE, "the deadline passed before the blocks were written through")
        if len(self._wanted) + len(keys) > self._max_blocks:
            raise CoreError(
                Reason.QUEUE_FULL,
                f"{len(self._wanted)} blocks are written through, {self._max_blocks} may be",
            )
        scope = Lasting(len(keys), deadline)
        self.counts["asked"] += len(keys)
        directory = self._parts.directory
        owner = self._parts.namespaces.known(namespace)
        for index, key in enumerate(keys):
            line = directory.find(key)
            if line < 0 or not directory.readable(line) or int(directory.namespace[line]) != owner:
                self._end(scope, index, MoveReason.MISS, "it is not published")
            elif directory.counts(line, self._target):
                self._end(scope, index, MoveReason.READY)
            else:
                logical = int(directory.logical[line])
                wanted = self._wanted.setdefault(logical, _Wanted(line, logical))
                wanted.waiters.append((scope, index))
                if wanted.move is not None:
                    wanted.move.deadline = wanted.patience
        self._go_on()
        return scope

    def leave(self, scope: Lasting) -> None:
        """Its writer waits no more; what is on its way goes on."""
        for wanted in list(self._wanted.values()):
            wanted.waiters = [each for each in wanted.waiters if each[0] is not scope]
            if not wanted.waiters:
                self._forget(wanted)

    def next_deadline(self) -> float | None:
        waits = [scope.deadline for wanted in self._wanted.values() for scope, _ in wanted.waiters]
        return min(waits, default=None)

    # Going on. The lock is held.

    def pump(self, now: float) -> None:
        """Tells whose blocks are durable, gone or late, and begins what is not under way."""
        directory = self._parts.directory
        for wanted in list(self._wanted.values()):
            if directory.line_of(wanted.owner) != wanted.line:
                self._tell(wanted, MoveReason.MISS, "it is no longer here")
            elif directory.state[wanted.line] == ChunkState.TOMBSTONED:
                self._tell(wanted, MoveReason.TOMBSTONED, "it was deleted meanwhile")
            elif directory.counts(wanted.line, self._target):
                self._tell(wanted, MoveReason.READY)
            else:
                self._expire(wanted, now)
        self._go_on()

    def on_settled(self, settled: Settled) -> bool:
        """A move of ours ended; False when it is none."""
        wanted = self._of_move.pop(settled.move.id, None)
        if wanted is None:
            return False
        wanted.move = None
        if settled.reason is not MoveReason.READY:
            self._failed(wanted, settled.reason, f"its copy in storage failed: {settled.reason}")
        return True

    def _expire(self, wanted: _Wanted, now: float) -> None:
        late = [each for each in wanted.waiters if now >= each[0].deadline]
        if not late:
            return
        wanted.waiters = [each for each in wanted.waiters if each not in late]
        why = "" if wanted.last is MoveReason.READY else f" ({wanted.last})"
        for scope, index in late:
            self._end(scope, index, MoveReason.DEADLINE, f"it is stored, and was not durable in time{why}")
        if not wanted.waiters:
            self._forget(wanted)

    def _go_on(self) -> None:
        """Begins what nobody moves, one batch for all writers."""
        directory = self._parts.directory
        for wanted in self._of_move.copy().values():
            # A move that others ended is not reported.
            if wanted.move is not None and wanted.move.state is TxnState.DEAD:
                del self._of_move[wanted.move.id]
                wanted.move = None
        waiting = (
            wanted
            for wanted in self._wanted.values()
            if wanted.move is None and not directory.write_txn[wanted.line]
        )
        idle = list(islice(waiting, max(0, self._at_once - len(self._of_move))))
        if not idle:
            return
        room = Room(self._target, len(idle), self._free(self._target), 0, MoveReason.READY)
        if not room.now:
            room = self._make_room(self._target, len(idle))
        begun: list[Move] = []
        for wanted in idle:
            try:
                move = self._begin(wanted)
            except MoveRefused as refused:
                full = refused.code is MoveReason.NO_DESTINATION_CAPACITY
                passing = full and (room.leaving > 0 or room.reason in _PASSING)
                self._failed(wanted, MoveReason.CREDIT_PRESSURE if passing else refused.code, refused.message)
                continue
            wanted.move = move
            self._of_move[move.id] = wanted
            begun.append(move)
        for settled in self._moves.start(begun):
            self.on_settled(settled)
        if self._wanted:
            self._parts.waiting = True

    def _begin(self, wanted: _Wanted) -> Move:
        parts = self._parts
        return self._moves.begin(
            MoveKind.DEMOTE,
            wanted.line,
            self._target,
            source_tier=parts.readable(wanted.line),
            keep_source=True,
            now=parts.clock(),
            deadline=wanted.patience,
        )

    def _failed(self, wanted: _Wanted, reason: MoveReason, message: str) -> None:
        wanted.last = reason
        if reason not in _PASSING:
            self._tell(wanted, reason, message)

    def _tell(self, wanted: _Wanted, reason: MoveReason, message: str = "") -> None:
        for scope, index in wanted.waiters:
            self._end(scope, index, reason, message)
        wanted.waiters = []
        self._forget(wanted)

    def _end(self, scope: Lasting, index: int, reason: MoveReason, message: str = "") -> None:
        if scope.reasons[index] is None:
            self.counts["durable" if reason is MoveReason.READY else reason.value] += 1
            scope.end(index, reason, message)

    def _forget(self, wanted: _Wanted) -> None:
        """Its move, if there is one, ends by itself: as a copy like any other."""
        if self._wanted.get(wanted.owner) is wanted:
            del self._wanted[wanted.owner]
        if wanted.move is not None:
            self._of_move.pop(wanted.move.id, None)


def answered(stored: Stored, scope: Lasting, index: int) -> Stored:
    """What its writer is told of a stored block when it waits no more."""
    reason = scope.reasons[index] or MoveReason.DEADLINE
    if reason is MoveReason.READY:
        return stored._replace(durable=True)
    message = scope.messages[index] or "it is stored, and was not durable in time"
    return stored._replace(reason=reason, message=message)
