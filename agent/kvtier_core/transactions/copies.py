"""Copies that go without another coming: dropped for room, found bad, or deleted.

Why it exists: the last good copy of a block must not go by mistake, a bad one must never be read again, and
a slot is free only when nobody holds what lies in it. It must not know which copy is worth least.
"""

from __future__ import annotations

from kvtier_core.directory import ChunkState, ReplicaState
from kvtier_core.errors import CoreError
from kvtier_core.tiers.slots import SlotRef
from kvtier_core.transactions.machine import MoveMachine
from kvtier_core.transactions.reasons import MoveReason, MoveRefused, refusal


class Copies(MoveMachine):
    """The residency machine, and the ways in which a copy ends."""

    def drop(self, line: int, tier: int, *, last: bool = False) -> bool:
        """Gives one copy up and its slot back. `last`: the block may be lost; then the line goes with its
        last copy and True is returned. Raises MoveRefused: WRITE_TXN_BUSY, WOULD_EVICT_PINNED,
        SURVIVAL_VIOLATION, MISS."""
        directory = self._directory
        copy = directory.replica(line, tier)
        if copy.state not in (ReplicaState.PUBLISHED, ReplicaState.INVALID):
            raise MoveRefused(MoveReason.MISS, f"tier {tier} has no copy of line {line}")
        busy = int(directory.write_txn[line])
        if busy:
            raise MoveRefused(MoveReason.WRITE_TXN_BUSY, f"transaction {busy} holds line {line}")
        held = copy.leases + int(directory.readers[line])
        if held:
            raise MoveRefused(
                MoveReason.WOULD_EVICT_PINNED, f"{held} readers hold line {line}", {"readers": held}
            )
        others = directory.survivors(line, tier)
        if directory.counts(line, tier) and others < self.survival and not (last and not others):
            raise MoveRefused(MoveReason.SURVIVAL_VIOLATION, f"{others} other copies of line {line} survive")
        if int(directory.tier[line]) == tier and others:
            directory.move_authority(line, self._heir(line, tier))
        directory.drop_replica(line, tier, r_min=self.survival, last=last)
        self._tiers[tier].release(SlotRef(copy.slot, copy.slot_generation))
        self._purse.give(line, tier, 0)
        # A tombstoned line is the deletion's, until its receipt is durable.
        deleted = int(directory.state[line]) == ChunkState.TOMBSTONED
        gone = not deleted and not directory.replicas.held_in(line)
        if gone:
            directory.remove(line)
        return gone

    def discard(self, line: int) -> None:
        """Gives every copy of a tombstoned line up, which nothing reads or moves any more. NO_TOMBSTONE,
        LEASES_HELD, WRITE_TXN_BUSY; copies before the one that is held are gone then."""
        directory = self._directory
        if directory.state[line] != ChunkState.TOMBSTONED:
            raise MoveRefused(MoveReason.NO_TOMBSTONE, f"line {line} is not being deleted")
        if directory.write_txn[line]:
            raise MoveRefused(MoveReason.WRITE_TXN_BUSY, f"transaction {directory.write_txn[line]} holds it")
        for tier in directory.replicas.held_in(line):
            ref = self._slot(line, tier)
            try:
                directory.drop_replica(line, tier)
            except CoreError as error:
                raise refusal(error, MoveReason.LEASES_HELD) from error
            self._tiers[tier].release(ref)
            self._purse.give(line, tier, 0)

    def _heir(self, line: int, tier: int) -> int:
        """The slowest copy that counts: it is the last to be evicted."""
        return max(
            found
            for found in range(len(self._tiers))
            if found != tier and self._directory.counts(line, found)
        )

    def condemn(self, line: int, tier: int) -> int:
        """A reader found the published copy bad: it is never read again and its slot comes back when nobody
        holds it. Returns how many copies survive; at 0 the block is a miss from now on."""
        left = self._directory.invalidate_replica(line, tier)
        self._condemned.append((line, int(self._directory.logical[line]), tier))
        return left

    def _sweep(self) -> None:
        still: list[tuple[int, int, int]] = []
        for line, owner, tier in self._condemned:
            if self._directory.line_of(owner) != line:
                continue
            if self._directory.replica(line, tier).state is not ReplicaState.INVALID:
                continue
            try:
                self.drop(line, tier)
            except MoveRefused:
                still.append((line, owner, tier))
        self._condemned = still

    def condemned(self) -> tuple[tuple[int, int], ...]:
        """(line, tier) of bad copies whose slots are still taken."""
        return tuple((line, tier) for line, _, tier in self._condemned)
