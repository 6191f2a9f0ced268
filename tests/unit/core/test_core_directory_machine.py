"""The directory against a plain model: a dict of keys, with copies as small objects, over thousands of steps.

The keys have seven hashes among them, so probing, closing gaps and growth happen at sizes of tens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier_core.directory import (
    NO_LINE,
    NO_TIER,
    ChunkState,
    Directory,
    ReplicaState,
    logical_id,
)
from kvtier_core.errors import CoreError, Reason

TIERS = 3
CAPACITY = 40
KEYS = 64
tiers = st.integers(0, TIERS - 1)
picks = st.integers(0, KEYS - 1)


@dataclass
class Copy:
    state: ReplicaState
    slot: int
    slot_generation: int
    generation: int
    stamp: int = 0
    leases: int = 0


@dataclass
class Block:
    line: int
    logical: int
    epoch: int
    key: bytes | None
    state: ChunkState = ChunkState.SEALED
    authority: int = NO_TIER
    txn: int = 0
    copies: dict[int, Copy] = field(default_factory=dict)

    def counts(self, tier: int) -> bool:
        copy = self.copies.get(tier)
        return copy is not None and copy.state is ReplicaState.PUBLISHED and copy.stamp == self.epoch

    def survivors(self, without: int = NO_TIER) -> int:
        return sum(tier != without and self.counts(tier) for tier in self.copies)

    def advance(self, tier: int) -> None:
        valid = [one for number, one in self.copies.items() if self.counts(number)]
        self.epoch += 1
        for one in valid:
            one.stamp = self.epoch
        self.authority = tier


@cache
def key_of(pick: int) -> bytes:
    """Few different tags, so that equal tags of different keys are common."""
    return (pick % 7).to_bytes(4, "little") + bytes(4) + bytes([pick]) * 24


ALL_KEYS = np.frombuffer(b"".join(map(key_of, range(KEYS))), dtype=np.uint8).reshape(KEYS, 32)


class DirectoryMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = Directory(lines=2, tiers=TIERS, capacity=CAPACITY)
        self.blocks: dict[int, Block] = {}
        self.chunks: dict[int, Block] = {}
        self.dead: list[int] = []
        self.born: dict[int, int] = {}
        self.turn = 0

    @initialize()
    def start(self) -> None:
        self.directory.check()

    def all(self) -> list[Block]:
        return [*self.blocks.values(), *self.chunks.values()]

    def refused(self, reason: Reason | None, action: object) -> bool:
        """Runs the action; it must be refused with exactly that reason, or succeed when there is none."""
        assert callable(action)
        if reason is None:
            action()
            return False
        with pytest.raises(CoreError) as caught:
            action()
        assert caught.value.reason is reason
        return True

    # Blocks.

    @rule(pick=picks, namespace=st.integers(0, 2))
    def insert(self, pick: int, namespace: int) -> None:
        directory, key = self.directory, key_of(pick)
        reason = None
        if pick in self.blocks:
            reason = Reason.IDENTITY_MISMATCH
        elif len(self.all()) == CAPACITY:
            reason = Reason.NO_DESTINATION_CAPACITY
        made: list[int] = []
        if self.refused(
            reason,
            lambda: made.append(directory.insert_block(key, namespace=namespace, checksum=pick, rows=9)),
        ):
            return
        line = made[0]
        assert line not in {block.line for block in self.all()}
        logical = int(directory.logical[line])
        assert logical not in self.dead and logical not in {block.logical for block in self.all()}
        epoch = int(directory.epoch[line])
        assert epoch > self.born.get(line, 0), "an epoch that a former occupant had"
        self.born[line] = epoch
        self.blocks[pick] = Block(line, logical, epoch, key)
        assert int(directory.checksum[line]) == pick and int(directory.rows[line]) == 9

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), tier=tiers)
    def add(self, data: st.DataObject, tier: int) -> None:
        block = self.some(data)
        generation = self.directory.issue_generation()
        reason = None
        if block.state is ChunkState.TOMBSTONED:
            reason = Reason.NOT_VISIBLE
        elif tier in block.copies:
            reason = Reason.IDENTITY_MISMATCH
        slot = generation * 3 % 1000
        if not self.refused(
            reason, lambda: self.directory.add_replica(block.line, tier, slot, generation + 1, generation)
        ):
            block.copies[tier] = Copy(ReplicaState.RESERVED, slot, generation + 1, generation)

    def some(self, data: st.DataObject) -> Block:
        return self.blocks[data.draw(st.sampled_from(sorted(self.blocks)))]

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), tier=tiers, authority=st.booleans())
    def publish(self, data: st.DataObject, tier: int, authority: bool) -> None:
        block = self.some(data)
        copy = block.copies.get(tier)
        ready = block.state is not ChunkState.TOMBSTONED and copy and copy.state is ReplicaState.RESERVED
        if not self.refused(
            None if ready else Reason.NOT_VISIBLE,
            lambda: self.directory.publish_replica(block.line, tier, authority=authority),
        ):
            assert copy is not None
            copy.state, copy.stamp = ReplicaState.PUBLISHED, block.epoch
            if authority or block.authority == NO_TIER:
                block.advance(tier)

    def expected_to_count(self, block: Block, tier: int) -> Reason | None:
        copy = block.copies.get(tier)
        if block.state is ChunkState.TOMBSTONED or copy is None or copy.state is not ReplicaState.PUBLISHED:
            return Reason.NOT_VISIBLE
        return None if block.counts(tier) else Reason.STALE_AUTHORITY_EPOCH

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), tier=tiers)
    def move_authority(self, data: st.DataObject, tier: int) -> None:
        block = self.some(data)
        reason = self.expected_to_count(block, tier)
        if not self.refused(reason, lambda: self.directory.move_authority(block.line, tier)):
            block.advance(tier)

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), tier=tiers)
    def expire(self, data: st.DataObject, tier: int) -> None:
        block = self.some(data)
        copy = block.copies.get(tier)
        reason: Reason | None = None
        if copy is None or copy.state is not ReplicaState.PUBLISHED:
            reason = Reason.NOT_VISIBLE
        elif not block.counts(tier):
            reason = Reason.STALE_AUTHORITY_EPOCH
        elif block.authority == tier:
            reason = Reason.SURVIVAL_VIOLATION
        if not self.refused(reason, lambda: self.directory.expire_replica(block.line, tier)):
            assert copy is not None
            copy.stamp = 0

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), tier=tiers)
    def invalidate(self, data: st.DataObject, tier: int) -> None:
        block = self.some(data)
        copy = block.copies.get(tier)
        bad = copy is None or copy.state is not ReplicaState.PUBLISHED
        left: list[int] = []
        if self.refused(
            Reason.NOT_VISIBLE if bad else None,
            lambda: left.append(self.directory.invalidate_replica(block.line, tier)),
        ):
            return
        assert copy is not None
        copy.state, copy.stamp = ReplicaState.INVALID, 0
        if block.authority == tier:
            block.authority = NO_TIER
            heirs = [one for one in sorted(block.copies) if block.counts(one)]
            if heirs:
                block.advance(heirs[0])
        assert left == [block.survivors()]

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), tier=tiers, r_min=st.integers(1, 2), last=st.booleans())
    def drop(self, data: st.DataObject, tier: int, r_min: int, last: bool) -> None:
        block = self.some(data)
        copy = block.copies.get(tier)
        others = block.survivors(tier)
        reason: Reason | None = None
        if copy is None:
            reason = Reason.NOT_VISIBLE
        elif copy.leases:
            reason = Reason.LEASES_HELD
        elif block.state is not ChunkState.TOMBSTONED and block.counts(tier):
            lost = last and not others
            if (block.authority == tier and others) or (others < r_min and not lost):
                reason = Reason.SURVIVAL_VIOLATION
        if not self.refused(
            reason, lambda: self.directory.drop_replica(block.line, tier, r_min=r_min, last=last)
        ):
            del block.copies[tier]
            if block.authority == tier:
                block.authority = NO_TIER

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), tier=tiers)
    def lease(self, data: st.DataObject, tier: int) -> None:
        block = self.some(data)
        reason = self.expected_to_count(block, tier)
        if not self.refused(reason, lambda: self.directory.lease(block.line, tier)):
            block.copies[tier].leases += 1

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), tier=tiers)
    def unlease(self, data: st.DataObject, tier: int) -> None:
        block = self.some(data)
        copy = block.copies.get(tier)
        held = copy.leases if copy else 0
        if not self.refused(
            None if held else Reason.GENERATION_NOT_OWNED,
            lambda: self.directory.unlease(block.line, tier),
        ):
            assert copy is not None
            copy.leases -= 1

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), txn=st.integers(1, 3))
    def claim(self, data: st.DataObject, txn: int) -> None:
        block = self.some(data)
        reason = None
        if block.state is ChunkState.TOMBSTONED:
            reason = Reason.NOT_VISIBLE
        elif block.txn not in (0, txn):
            reason = Reason.WRITE_TXN_BUSY
        if not self.refused(reason, lambda: self.directory.claim(block.line, txn)):
            block.txn = txn

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), txn=st.integers(1, 3))
    def unclaim(self, data: st.DataObject, txn: int) -> None:
        block = self.some(data)
        assert self.directory.unclaim(block.line, txn) is (block.txn == txn)
        if block.txn == txn:
            block.txn = 0

    def tombstone_many(self, line: int) -> int:
        return self.directory.tombstone_many(np.array([line], dtype=np.int64))

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def tombstone(self, data: st.DataObject) -> None:
        block = self.some(data)
        first, second = data.draw(st.permutations((self.directory.tombstone, self.tombstone_many)))
        generation = first(block.line)
        assert second(block.line) == generation > 0
        block.state = ChunkState.TOMBSTONED

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        pick = data.draw(st.sampled_from(sorted(self.blocks)))
        block = self.blocks[pick]
        reason = None
        if block.txn:
            reason = Reason.WRITE_TXN_BUSY
        elif block.copies:
            reason = Reason.SURVIVAL_VIOLATION
        if not self.refused(reason, lambda: self.directory.remove(block.line)):
            del self.blocks[pick]
            self.forget(block)

    def forget(self, block: Block) -> None:
        self.dead.append(block.logical)
        assert self.directory.line_of(block.logical) is None
        self.born[block.line] = max(self.born.get(block.line, 0), block.epoch)

    # Session chunks live among them.

    @rule(number=st.integers(0, 5), tier=tiers)
    def insert_chunk(self, number: int, tier: int) -> None:
        reason = None
        if number in self.chunks:
            reason = Reason.IDENTITY_MISMATCH
        elif len(self.all()) == CAPACITY:
            reason = Reason.NO_DESTINATION_CAPACITY
        generation = self.directory.issue_generation()
        made: list[int] = []
        if self.refused(
            reason,
            lambda: made.append(
                self.directory.insert(
                    logical_id(0, 0, number),
                    tier=tier,
                    slot=number,
                    slot_generation=7,
                    generation=generation,
                    state=ChunkState.SEALED,
                )
            ),
        ):
            return
        line = made[0]
        epoch = int(self.directory.epoch[line])
        assert epoch > self.born.get(line, 0)
        copy = Copy(ReplicaState.PUBLISHED, number, 7, generation, epoch)
        chunk = Block(line, logical_id(0, 0, number), epoch, None, authority=tier, copies={tier: copy})
        self.chunks[number] = chunk

    @precondition(lambda self: self.chunks)
    @rule(data=st.data(), tier=tiers)
    def publish_chunk(self, data: st.DataObject, tier: int) -> None:
        chunk = self.chunks[data.draw(st.sampled_from(sorted(self.chunks)))]
        generation = self.directory.issue_generation()
        self.directory.publish(chunk.line, tier=tier, slot=5, slot_generation=2, generation=generation)
        chunk.epoch += 1
        chunk.authority = tier
        chunk.copies = {tier: Copy(ReplicaState.PUBLISHED, 5, 2, generation, chunk.epoch)}
        assert (self.directory.slot[chunk.line], self.directory.generation[chunk.line]) == (5, generation)

    @precondition(lambda self: self.chunks)
    @rule(data=st.data())
    def remove_chunk(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.chunks)))
        chunk = self.chunks.pop(number)
        self.directory.remove(chunk.line)
        assert self.directory.line_of(chunk.logical) is None
        self.born[chunk.line] = max(self.born.get(chunk.line, 0), chunk.epoch)

    # What must be true after every step.

    @invariant()
    def equals_the_model(self) -> None:
        directory = self.directory
        assert len(directory) == len(self.all())
        for block in self.all():
            line = block.line
            assert directory.line_of(block.logical) == line == directory.line_of(int(directory.logical[line]))
            assert (int(directory.epoch[line]), int(directory.tier[line])) == (block.epoch, block.authority)
            assert int(directory.state[line]) == block.state
            assert directory.survivors(line) == block.survivors()
            for tier in range(TIERS):
                seen, copy = directory.replica(line, tier), block.copies.get(tier)
                assert directory.counts(line, tier) == block.counts(tier)
                assert directory.survivors(line, tier) == block.survivors(tier)
                if copy is None:
                    assert seen.state is ReplicaState.ABSENT and not seen.leases and not seen.stamp
                else:
                    assert (seen.state, seen.slot, seen.slot_generation) == (
                        copy.state,
                        copy.slot,
                        copy.slot_generation,
                    )
                    assert (seen.generation, seen.stamp, seen.leases) == (
                        copy.generation,
                        copy.stamp,
                        copy.leases,
                    )

    @invariant()
    def finds_what_is_there(self) -> None:
        many = self.directory.find_many(ALL_KEYS).tolist()
        for pick in range(KEYS):
            block = self.blocks.get(pick)
            there = NO_LINE if block is None else block.line
            visible = NO_LINE if block is None or block.state is ChunkState.TOMBSTONED else there
            assert self.directory.locate(key_of(pick)) == there
            assert self.directory.find(key_of(pick)) == many[pick] == visible
            if block is not None:
                assert self.directory.key_of(there) == key_of(pick)
                readable = block.state is ChunkState.SEALED and block.authority != NO_TIER
                assert self.directory.readable(there) is readable

    @invariant()
    def scans_agree(self) -> None:
        directory = self.directory
        self.turn += 1
        for tier in range(TIERS):
            published = [
                one.line
                for one in self.all()
                if tier in one.copies and one.copies[tier].state is ReplicaState.PUBLISHED
            ]
            assert directory.lines_in(tier).tolist() == sorted(published)
            free = [
                one.line
                for one in self.all()
                if one.line in published
                and one.state is ChunkState.SEALED
                and not one.copies[tier].leases
                and not one.txn
            ]
            assert directory.evictable(tier).tolist() == sorted(free)
            # Piece by piece for one tier a step, in turn.
            if tier == self.turn % TIERS:
                pieces = [directory.evictable(tier, first=first, limit=7) for first in range(0, 42, 7)]
                assert np.concatenate(pieces).tolist() == sorted(free)
            assert directory.replicas.counts[tier] == sum(tier in one.copies for one in self.all())
        directory.check()

    @invariant()
    def the_dead_stay_dead(self) -> None:
        for logical in self.dead[-20:]:
            assert self.directory.line_of(logical) is None


TestDirectory = DirectoryMachine.TestCase
TestDirectory.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
