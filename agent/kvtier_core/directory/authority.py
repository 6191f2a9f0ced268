"""The directory: which copy of a block answers for it, which copies survive it, who is reading them.

Why it exists: a published location must change in one step that readers either see or do not, and the last
good copy must not be dropped by mistake. It must not know bytes, tiers' insides or sessions' meaning.

One caller at a time: who composes it holds the lock. Methods that refuse have changed nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvtier_core.directory import checks, scans
from kvtier_core.directory.ids import NO_TIER, ChunkState, ReplicaState
from kvtier_core.directory.replicas import PUBLISHED, Replica
from kvtier_core.directory.storing import StoringTable
from kvtier_core.directory.table import mix
from kvtier_core.errors import CoreError, Reason

MAX_REUSE = (1 << 16) - 1
_TOMBSTONED = int(ChunkState.TOMBSTONED)


class Directory(StoringTable):
    """Lines, each belonging to one block or session chunk from its insertion to `remove`.

    `capacity` lines and `tiers` tiers are reserved as address space; memory is committed where it is used.

    Columns by line, for reading: state, tier (of the authoritative copy, NO_TIER: nothing is published),
    epoch (authority epoch, grows over all lives of the line), rows, checksum, producer, namespace, cost (of
    recomputing, seconds), last_use (ticks of the caller's coarse clock), reuse (saturates at 65535),
    droppable (1: the loss of its last copy is only a recomputation), write_txn (id of the one open
    transaction, 0 for none), tombstone_generation. replicas: the copies. Of the session engine: readers,
    credit, recency; slot, slot_generation and generation of the authoritative copy; logical, the id of the
    line's occupant.
    """

    # Copies.

    def replica(self, line: int, tier: int) -> Replica:
        """The line's copy in a tier, ABSENT included. MISS when the line holds no block."""
        self._expect(line)
        return self.replicas.get(line, tier)

    def authority(self, line: int) -> Replica | None:
        """The authoritative copy; None when nothing is published."""
        self._expect(line)
        tier = self._authority[line]
        return None if tier < 0 else self.replicas.get(line, tier)

    def add_replica(
        self, line: int, tier: int, slot: int, slot_generation: int, replica_generation: int
    ) -> None:
        """Records a copy that is being written: RESERVED, read by nobody. NOT_VISIBLE on a tombstoned line,
        IDENTITY_MISMATCH when the tier has a copy already, BAD_ARGUMENT."""
        self._expect_live(line)
        state = self.replicas.of(tier).state.cells[line]
        if state:
            raise CoreError(
                Reason.IDENTITY_MISMATCH,
                f"tier {tier} has a copy of line {line} already, {ReplicaState(state).name}",
                {"line": line, "tier": tier},
            )
        self.replicas.put(line, tier, slot, slot_generation, replica_generation, ReplicaState.RESERVED)

    def publish_replica(self, line: int, tier: int, *, authority: bool = False) -> None:
        """Makes a RESERVED copy readable and lets it count. The first published copy becomes the authority, a
        later one only when asked (D3: publish and move authority in one step). NOT_VISIBLE when the line is
        tombstoned or the copy is not RESERVED."""
        self._expect_live(line)
        columns = self.replicas.of(tier)
        if columns.state.cells[line] != ReplicaState.RESERVED:
            raise self._not_visible(line, tier, "RESERVED")
        columns.state.cells[line] = PUBLISHED
        columns.stamp.cells[line] = self._epochs[line]
        if authority or self._authority[line] < 0:
            self._advance(line, tier)
        self._is_resident(line, tier)
        self.directory_generation += 1

    def move_authority(self, line: int, tier: int) -> None:
        """Another copy answers from now on: a new epoch, and every copy that is still valid carries it.
        NOT_VISIBLE when the copy is not published, STALE_AUTHORITY_EPOCH when it no longer counts."""
        self._expect_live(line)
        self._expect_counting(line, tier)
        self._advance(line, tier)
        self.directory_generation += 1

    def _advance(self, line: int, tier: int) -> None:
        old = self._epochs[line]
        self.replicas.restamp(line, old, old + 1)
        self._epochs[line] = old + 1
        self._authority[line] = tier

    def invalidate_replica(self, line: int, tier: int) -> int:
        """A copy was found bad: it is no longer read and never counts again, though its slot is still taken.
        When it was the authority, the fastest copy that still counts takes over, in a new epoch, or none
        does. Returns the number of surviving copies. NOT_VISIBLE when it is not published."""
        self._expect(line)
        columns = self.replicas.of(tier)
        if columns.state.cells[line] != PUBLISHED:
            raise self._not_visible(line, tier, "PUBLISHED")
        self._not_resident(line, tier)
        columns.state.cells[line] = ReplicaState.INVALID
        columns.stamp.cells[line] = 0
        if self._authority[line] == tier:
            self._authority[line] = NO_TIER
            heir = self._fastest(line)
            if heir != NO_TIER:
                self._advance(line, heir)
        self.directory_generation += 1
        return self.survivors(line)

    def _fastest(self, line: int) -> int:
        epoch = self._epochs[line]
        for tier, columns in enumerate(self.replicas.tiers):
            if columns.state.cells[line] == PUBLISHED and columns.stamp.cells[line] == epoch:
                return tier
        return NO_TIER

    def expire_replica(self, line: int, tier: int) -> None:
        """Takes a published copy's stamp away without dropping it: it stays in its slot and no longer counts.
        SURVIVAL_VIOLATION for the authority."""
        self._expect(line)
        self._expect_counting(line, tier)
        if self._authority[line] == tier:
            raise CoreError(Reason.SURVIVAL_VIOLATION, f"tier {tier} is the authority of line {line}")
        self._not_resident(line, tier)
        self.replicas.tiers[tier].stamp.cells[line] = 0

    def drop_replica(self, line: int, tier: int, *, r_min: int = 1, last: bool = False) -> None:
        """Forgets a copy; its slot is the caller's again. LEASES_HELD while it is read. A copy that counts
        goes only if `r_min` others do (SURVIVAL_VIOLATION) and it is not the authority (move that first).
        `last` says that the block may be lost (a cache block whose loss is a recompute): then also the only
        copy goes. On a tombstoned line every copy may go."""
        self._expect(line)
        columns = self.replicas.of(tier)
        if not columns.state.cells[line]:
            raise self._not_visible(line, tier, "there")
        if columns.leases.cells[line] or self._lines.readers.cells[line]:
            held = columns.leases.cells[line] + self._lines.readers.cells[line]
            raise CoreError(
                Reason.LEASES_HELD,
                f"{held} readers hold the copy of line {line} in tier {tier}",
                {"line": line, "tier": tier, "readers": held},
            )
        answers = self._authority[line] == tier
        if self._states[line] != _TOMBSTONED and self._counts(line, tier):
            others = self.survivors(line, tier)
            if (answers and others) or (others < r_min and not (last and not others)):
                role = "the authority" if answers else "a copy"
                raise CoreError(
                    Reason.SURVIVAL_VIOLATION,
                    f"tier {tier} holds {role} of line {line}; {others} others count",
                    {"line": line, "tier": tier, "survivors": others, "authority": answers},
                )
        self._not_resident(line, tier)
        self.replicas.clear(line, tier)
        if answers:
            self._authority[line] = NO_TIER
        self.directory_generation += 1

    def survivors(self, line: int, without_tier: int | None = None) -> int:
        """Copies that count: published and stamped with the authority epoch (A.9). Index entries never do."""
        without = NO_TIER if without_tier is None else without_tier
        return self.replicas.survivors(line, self._epochs[line], without)

    def survivors_of(self, lines: NDArray[np.int64], without_tier: int | None = None) -> NDArray[np.int64]:
        """The same for lines [n]."""
        without = NO_TIER if without_tier is None else without_tier
        return self.replicas.survivors_of(lines, self._lines.epoch.array[lines], without)

    def counts(self, line: int, tier: int) -> bool:
        """Whether the copy in that tier may be read and counts for survival."""
        return bool(self._states[line]) and self._counts(line, tier)

    def _counts(self, line: int, tier: int) -> bool:
        columns = self.replicas.of(tier)
        return bool(
            columns.state.cells[line] == PUBLISHED and columns.stamp.cells[line] == self._epochs[line]
        )

    def _expect_counting(self, line: int, tier: int) -> None:
        if self.replicas.of(tier).state.cells[line] != PUBLISHED:
            raise self._not_visible(line, tier, "PUBLISHED")
        if not self._counts(line, tier):
            raise CoreError(
                Reason.STALE_AUTHORITY_EPOCH,
                f"the copy of line {line} in tier {tier} is of epoch "
                f"{self.replicas.tiers[tier].stamp.cells[line]}, not {self._epochs[line]}",
                {"line": line, "tier": tier},
            )

    def _not_visible(self, line: int, tier: int, wanted: str) -> CoreError:
        state = ReplicaState(self.replicas.tiers[tier].state.cells[line])
        return CoreError(
            Reason.NOT_VISIBLE,
            f"the copy of line {line} in tier {tier} is {state.name}, not {wanted}",
            {"line": line, "tier": tier, "state": state.name},
        )

    def _expect_live(self, line: int) -> None:
        self._expect(line)
        if self._states[line] == _TOMBSTONED:
            raise CoreError(
                Reason.NOT_VISIBLE, f"line {line} is tombstoned", {"line": line, "state": "TOMBSTONED"}
            )

    def tombstone(self, line: int) -> int:
        generation = super().tombstone(line)
        self._not_resident(line, self.resident_tier)
        return generation

    def tombstone_many(self, lines: NDArray[np.int64]) -> int:
        generation = super().tombstone_many(lines)
        self._none_resident(lines)
        return generation

    # Readers, writers, use.

    def lease(self, line: int, tier: int) -> None:
        """One more reader of a copy that counts; until `unlease` it is not dropped. NOT_VISIBLE,
        STALE_AUTHORITY_EPOCH, QUEUE_FULL."""
        self._expect_live(line)
        self._expect_counting(line, tier)
        self.replicas.lease(line, tier)

    def unlease(self, line: int, tier: int) -> None:
        """One reader fewer, whatever became of the line. GENERATION_NOT_OWNED when nobody reads it."""
        self.replicas.unlease(line, tier)

    def leases(self, line: int, tier: int) -> int:
        """Readers of the copy; 0 where there is none."""
        return int(self.replicas.of(tier).leases.cells[line])

    def claim(self, line: int, txn: int) -> None:
        """Gives the line's one write transaction to `txn` (> 0). WRITE_TXN_BUSY when another has it."""
        self._expect_live(line)
        cells = self._lines.write_txn.cells
        if cells[line] and cells[line] != txn:
            raise CoreError(
                Reason.WRITE_TXN_BUSY, f"transaction {cells[line]} holds line {line}", {"line": line}
            )
        cells[line] = txn

    def unclaim(self, line: int, txn: int) -> bool:
        """Ends the claim if it is still `txn`'s; says whether it was."""
        cells = self._lines.write_txn.cells
        if cells[line] != txn:
            return False
        cells[line] = 0
        return True

    def touch(self, lines: NDArray[np.int64], tick: int) -> None:
        """Notes one use of each of `lines` [n], which differ, at `tick` (uint32)."""
        self._lines.last_use.array[lines] = tick
        reuse = self._lines.reuse.array
        reuse[lines] += reuse[lines] < MAX_REUSE

    # Whole columns, from line `first`, at most `limit` lines of them.

    def lines_in(self, tier: int, *, first: int = 0, limit: int | None = None) -> NDArray[np.int64]:
        """Lines with a published copy in the tier, ascending."""
        return scans.published(self._lines, self.replicas, tier, first, limit)

    def lines_of(self, namespace: int, *, first: int = 0, limit: int | None = None) -> NDArray[np.int64]:
        """Lines of a namespace, tombstoned ones included, ascending."""
        return scans.of_namespace(self._lines, namespace, first, limit)

    def evictable(self, tier: int, *, first: int = 0, limit: int | None = None) -> NDArray[np.int64]:
        """Sealed lines with a published copy in the tier that no reader and no transaction holds, ascending.
        Whether the copy is the last one is not asked: see `survivors_of`."""
        return scans.evictable(self._lines, self.replicas, tier, first, limit)

    def sealed_in(self, tier: int) -> NDArray[np.int64]:
        """Lines of sessions' sealed chunks whose authority is in a tier and which neither a reader nor a
        transaction holds, least recent first."""
        return scans.sealed_in(self._lines, tier)

    def check(self) -> None:
        """Invariants over all lines; raises AssertionError. For tests and `inspect`."""
        checks.check(self._lines, self.replicas, self._index, self._chunk_index)
        if self.resident_tier != NO_TIER:
            checks.check_resident(self._lines, self.replicas, self.resident, self.resident_tier)

    # Session chunks: one copy each, moved as a whole.

    def insert(
        self, logical: int, *, tier: int, slot: int, slot_generation: int, generation: int, state: ChunkState
    ) -> int:
        """Publishes a session's chunk at its first place and returns its line. IDENTITY_MISMATCH if it
        exists."""
        if self.line_of(logical) is not None:
            raise CoreError(Reason.IDENTITY_MISMATCH, f"chunk {logical:#x} is already in the directory")
        columns = self._lines
        line = columns.take()
        try:
            self.replicas.put(line, tier, slot, slot_generation, generation, ReplicaState.PUBLISHED)
            self._chunk_index.insert(mix(logical + 1), line)
        except BaseException:
            self.replicas.clear(line, tier)
            columns.give_back(line)
            raise
        self._begin(line)
        columns.chunk.cells[line] = logical + 1
        self.replicas.tiers[tier].stamp.cells[line] = self._epochs[line]
        self._authority[line] = tier
        columns.namespace.cells[line] = -1
        columns.rows.cells[line] = 0
        columns.checksum.cells[line] = 0
        columns.producer.cells[line] = -1
        columns.cost.cells[line] = 0.0
        columns.last_use.cells[line] = 0
        self._states[line] = state
        return line

    def publish(self, line: int, *, tier: int, slot: int, slot_generation: int, generation: int) -> None:
        """Moves authority of a session's chunk to another copy and forgets the old one: one step, a new
        epoch."""
        self._expect(line)
        old = self._authority[line]
        if old != NO_TIER:
            self.replicas.expect_unread(line, old)
        self.replicas.put(line, tier, slot, slot_generation, generation, ReplicaState.PUBLISHED)
        if old not in (NO_TIER, tier):
            self.replicas.clear(line, old)
        self._epochs[line] += 1
        self.replicas.tiers[tier].stamp.cells[line] = self._epochs[line]
        self._authority[line] = tier
        self.directory_generation += 1
