"""Moves between tiers: guards in order, faults at every I/O, any interleaving, nothing lost or leaked."""

from __future__ import annotations

import dataclasses
import errno
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier_core.credits import CreditLedger
from kvtier_core.directory import ChunkState, Directory, logical_id
from kvtier_core.errors import CoreError, Reason
from kvtier_core.layout import ChunkLayout
from kvtier_core.tiers.base import BlockIdentity, PoolTier, SlotRef, SlotState, Tier, seal_checksum
from kvtier_core.tiers.cpu import CpuTier
from kvtier_core.tiers.fileops import FileOps, OsFileOps
from kvtier_core.tiers.gpu import GpuTier
from kvtier_core.tiers.nvme import NvmeTier
from kvtier_core.tiers.staging import StagingBuffer
from kvtier_core.transactions import (
    Completion,
    LiveView,
    Move,
    MoveKind,
    MoveReason,
    MoveRefused,
    Transactions,
    TxnState,
    completion_reason,
)
from kvtier_core.transactions.moves import completion_of
from tests.unit.core.builders import DISK_ERRORS, Fault, FaultyFiles

LAYOUT = ChunkLayout(1, 16, 4)
GPU, CPU, NVME = 0, 1, 2
SLOTS = (2, 3, 3)


class Bench:
    """Three tiers, a directory and chunks whose bytes are known."""

    def __init__(
        self, folder: Path, files: FileOps | None = None, slots: tuple[int, int, int] = SLOTS
    ) -> None:
        self.tiers: list[Tier] = [
            GpuTier("hbm", LAYOUT, slots[0], device=torch.device("cpu")),
            CpuTier("ram", LAYOUT, slots[1]),
            NvmeTier("flash", LAYOUT, slots[2], folder=folder, file_key="k", files=files or OsFileOps()),
        ]
        self.directory = Directory()
        self.ledger = CreditLedger(slots)
        self.identities: dict[int, BlockIdentity] = {}
        self.bytes: dict[int, torch.Tensor] = {}
        self.moves = Transactions(
            self.directory, self.ledger, self.tiers, self._identity, self.identities.__setitem__
        )
        self._count = 0

    def _identity(self, line: int, generation: int) -> BlockIdentity:
        return dataclasses.replace(self.identities[line], replica_generation=generation)

    def ref(self, line: int) -> SlotRef:
        return SlotRef(int(self.directory.slot[line]), int(self.directory.slot_generation[line]))

    def add(self, tier: int) -> int:
        """A sealed chunk in a pool tier."""
        pool = self.tiers[tier]
        assert isinstance(pool, PoolTier)
        self._count += 1
        credit = self.ledger.acquire({tier: 1})
        logical = logical_id(1, 0, self._count)
        ref = pool.reserve(logical)
        pool.adopt(ref)
        data = torch.full(LAYOUT.shape, float(self._count))
        pool.view(ref).copy_(data)
        generation = self.directory.issue_generation()
        line = self.directory.insert(
            logical,
            tier=tier,
            slot=ref.slot,
            slot_generation=ref.generation,
            generation=generation,
            state=ChunkState.SEALED,
        )
        self.directory.credit[line] = credit
        digest = self._count.to_bytes(32, "big")
        self.identities[line] = BlockIdentity(
            digest, logical, generation, 16, LAYOUT.payload_bytes, seal_checksum(data)
        )
        self.bytes[line] = data
        return line

    def drop(self, line: int) -> None:
        """As a closing session does."""
        self.directory.state[line] = ChunkState.TOMBSTONED
        self.moves.cancel_line(line)
        self.tiers[int(self.directory.tier[line])].release(self.ref(line))
        self.ledger.release(int(self.directory.credit[line]))
        self.directory.remove(line)
        del self.bytes[line]

    def check(self) -> None:
        """Every chunk is whole where the directory says; capacity is conserved; nothing else is held."""
        self.ledger.check()
        buffer = StagingBuffer(LAYOUT)
        for line, data in self.bytes.items():
            tier = self.tiers[int(self.directory.tier[line])]
            tier.read(self.ref(line), self.identities[line], buffer)
            assert torch.equal(buffer.payload, data)
        extra = [0, 0, 0]
        for move in self.moves.open_moves():
            extra[move.source_tier if move.state is TxnState.PUBLISHED else move.tier] += 1
        for index, tier in enumerate(self.tiers):
            held = sum(int(self.directory.tier[line]) == index for line in self.bytes) + extra[index]
            assert tier.slots.used == self.ledger.granted(index) == held

    def settled(self) -> bool:
        leased = self.directory.readers.any() or self.directory.write_txn.any()
        leased = leased or any(tier.leases.array.any() for tier in self.directory.replicas.tiers)
        return not self.moves.open_moves() and not leased


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def started(bench: Bench, line: int, tier: int = NVME, kind: MoveKind = MoveKind.DEMOTE) -> Move:
    move = bench.moves.begin(kind, line, tier)
    bench.moves.submit(move)
    return move


# B1.01: the four published reasons of a promotion's completion, then ours, one fewer wrong each time.
EXPECTED = {
    "cache_generation": 23,
    "slot_generation": 85,
    "owner": 11,
    "bytes": 512,
    "transfer_generation": 4,
}
WRONG = [
    (["cache_generation", "slot_generation", "owner", "bytes"], MoveReason.STALE_CACHE_GENERATION),
    (["slot_generation", "owner", "bytes"], MoveReason.RECYCLED_DESTINATION),
    (["owner", "bytes"], MoveReason.IDENTITY_MISMATCH),
    (["bytes", "transfer_generation"], MoveReason.SHORT_COPY),
    (["transfer_generation"], MoveReason.TRANSFER_STALE),
    ([], MoveReason.READY),
]


@pytest.mark.parametrize(("wrong", "reason"), WRONG, ids=[reason.value for _, reason in WRONG])
def test_b1_01_completion_guards_in_order(wrong: list[str], reason: MoveReason) -> None:
    move = Move(
        id=1,
        kind=MoveKind.PROMOTE,
        line=0,
        owner=EXPECTED["owner"],
        cache_generation=EXPECTED["cache_generation"],
        epoch=1,
        source_tier=NVME,
        source=SlotRef(0, 0),
        tier=GPU,
        destination=SlotRef(42, EXPECTED["slot_generation"]),
        identity=BlockIdentity(bytes(32), 11, 1, 16, EXPECTED["bytes"], 0),
        credit=1,
        state=TxnState.COPYING,
        transfer_generation=EXPECTED["transfer_generation"],
    )
    now = {name: value + (name in wrong) for name, value in EXPECTED.items()}
    live = LiveView(now["cache_generation"], now["slot_generation"], now["owner"])
    done = Completion(1, 11, 23, 42, 85, now["transfer_generation"], now["bytes"])
    assert completion_reason(move, live, done) is reason
    move.state = TxnState.DEAD
    assert completion_reason(move, live, done) is MoveReason.CANCELLED


def test_a_move_keeps_the_old_copy_until_the_new_one_is_published(bench: Bench) -> None:
    line = bench.add(GPU)
    old = bench.ref(line)
    move = started(bench, line)
    done = bench.moves.copy(move)
    bench.check()
    bench.moves.complete(done)
    assert int(bench.directory.tier[line]) == GPU
    assert bench.tiers[GPU].slots.state(old) is SlotState.PUBLISHED
    before = int(bench.directory.epoch[line]), int(bench.directory.generation[line])
    bench.moves.publish(move)
    assert int(bench.directory.tier[line]) == NVME
    assert bench.tiers[GPU].slots.state(old) is SlotState.PUBLISHED
    assert int(bench.directory.epoch[line]) == before[0] + 1
    assert int(bench.directory.generation[line]) > before[1]
    bench.check()
    bench.moves.release(move)
    with pytest.raises(CoreError):
        bench.tiers[GPU].slots.state(old)
    bench.check()
    assert bench.settled()
    assert bench.moves.moved_bytes == {("hbm", "flash"): LAYOUT.payload_bytes}


@pytest.mark.parametrize("path", [(GPU, CPU), (GPU, NVME), (CPU, NVME), (CPU, GPU)], ids=str)
def test_chunks_go_down_and_come_back_up(bench: Bench, path: tuple[int, int]) -> None:
    line = bench.add(path[0])
    bench.moves.run(MoveKind.DEMOTE, line, path[1])
    bench.check()
    bench.moves.run(MoveKind.PROMOTE, line, path[0])
    bench.check()
    assert bench.settled()
    assert int(bench.directory.tier[line]) == path[0]


def test_begin_guards_in_order(bench: Bench) -> None:
    line = bench.add(GPU)

    def refused(reason: MoveReason, kind: MoveKind = MoveKind.DEMOTE, tier: int = CPU) -> None:
        with pytest.raises(MoveRefused) as error:
            bench.moves.begin(kind, line, tier)
        assert error.value.code is reason
        bench.check()

    bench.directory.state[line] = ChunkState.OPEN
    bench.directory.write_txn[line] = 9
    bench.tiers[CPU].capability = dataclasses.replace(bench.tiers[CPU].capability, dma_destination=False)
    others = [bench.add(CPU) for _ in range(3)]
    refused(MoveReason.UNCOMMITTED_ROWS)
    bench.directory.state[line] = ChunkState.SEALED
    refused(MoveReason.WRITE_TXN_BUSY)
    bench.directory.write_txn[line] = 0
    refused(MoveReason.TIER_INCAPABLE)
    refused(MoveReason.NO_LEGAL_PATH, MoveKind.PROMOTE)
    bench.tiers[CPU].capability = dataclasses.replace(bench.tiers[CPU].capability, dma_destination=True)
    refused(MoveReason.NO_DESTINATION_CAPACITY)
    bench.drop(others[0])
    bench.moves.run(MoveKind.DEMOTE, line, CPU)
    bench.check()


@pytest.mark.parametrize("after", ["begin", "submit", "copy", "complete"])
def test_cancel_at_any_point_gives_everything_back(bench: Bench, after: str) -> None:
    line = bench.add(GPU)
    move = bench.moves.begin(MoveKind.DEMOTE, line, NVME)
    done = None
    if after != "begin":
        bench.moves.submit(move)
    if after in ("copy", "complete"):
        done = bench.moves.copy(move)
    if after == "complete":
        assert done is not None
        bench.moves.complete(done)
    bench.moves.cancel(move)
    bench.check()
    if after == "submit":
        assert bench.tiers[NVME].slots.state(move.destination) is SlotState.QUARANTINED
        late = Completion(move.id, move.owner, 1, move.destination.slot, move.destination.generation, 1, 128)
        with pytest.raises(MoveRefused) as refused:
            bench.moves.complete(late)
        assert refused.value.code is MoveReason.CANCELLED
    elif after == "copy":
        assert done is not None
        with pytest.raises(MoveRefused):
            bench.moves.complete(done)
    bench.check()
    assert bench.settled()
    bench.moves.cancel(move)
    bench.moves.run(MoveKind.DEMOTE, line, NVME)
    bench.check()


def test_b3_01_a_late_completion_leaves_the_next_owner_alone(tmp_path: Path) -> None:
    """R1's move is cancelled, its completion cleans up, R2 gets the slot; R1's completion comes once more."""
    bench = Bench(tmp_path, slots=(2, 2, 1))
    first, second = bench.add(GPU), bench.add(GPU)
    move = started(bench, first)
    done = bench.moves.copy(move)
    bench.moves.cancel(move)
    # Quarantined: the slot is nobody's while R1's bytes may still arrive.
    with pytest.raises(MoveRefused) as full:
        bench.moves.begin(MoveKind.DEMOTE, second, NVME)
    assert full.value.code is MoveReason.NO_DESTINATION_CAPACITY
    with pytest.raises(MoveRefused):
        bench.moves.complete(done)
    next_move = started(bench, second)
    assert next_move.destination.slot == move.destination.slot
    bench.moves.complete(bench.moves.copy(next_move))
    bench.moves.publish(next_move)
    for _ in range(2):
        with pytest.raises(MoveRefused) as refused:
            bench.moves.complete(done)
        assert refused.value.code is MoveReason.CANCELLED
    forged = dataclasses.replace(done, txn=next_move.id)
    with pytest.raises(MoveRefused):
        bench.moves.complete(forged)
    bench.moves.release(next_move)
    bench.check()
    assert bench.settled()


def test_a_swapped_cache_generation_refuses_copies_in_flight(bench: Bench) -> None:
    line = bench.add(GPU)
    move = started(bench, line)
    done = bench.moves.copy(move)
    bench.moves.cache_generation += 1
    with pytest.raises(MoveRefused) as refused:
        bench.moves.complete(done)
    assert refused.value.code is MoveReason.STALE_CACHE_GENERATION
    assert refused.value.reason is Reason.STALE_CACHE_GENERATION
    bench.check()
    assert bench.settled()


def test_the_old_copy_waits_for_its_readers(bench: Bench) -> None:
    line = bench.add(GPU)
    move = started(bench, line)
    bench.moves.complete(bench.moves.copy(move))
    bench.directory.readers[line] += 1
    bench.moves.publish(move)
    with pytest.raises(MoveRefused) as refused:
        bench.moves.release(move)
    assert refused.value.code is MoveReason.LEASES_HELD
    bench.check()
    with pytest.raises(MoveRefused) as late:
        bench.moves.cancel(move)
    assert late.value.code is MoveReason.GENERATION_NOT_OWNED
    bench.directory.readers[line] -= 1
    bench.moves.release(move)
    bench.check()
    assert bench.settled()


def test_a_source_that_changed_since_its_seal_is_not_copied_on(bench: Bench) -> None:
    line = bench.add(GPU)
    pool = bench.tiers[GPU]
    pool.view(bench.ref(line))[0, 0, 0, 0] = 99.0
    with pytest.raises(MoveRefused) as refused:
        bench.moves.run(MoveKind.DEMOTE, line, NVME)
    assert refused.value.code is MoveReason.CHECKSUM_MISMATCH
    assert bench.settled()
    assert bench.tiers[NVME].slots.used == 0


FAULTS: list[tuple[str, int | str, Reason]] = [
    *[
        (operation, kind, Reason.STORAGE_UNAVAILABLE)
        for operation in ("allocate", "write", "read")
        for kind in DISK_ERRORS.values()
    ],
    ("write", "short", Reason.SHORT_COPY),
    ("read", "short", Reason.SHORT_COPY),
    ("read", "flip", Reason.CHECKSUM_MISMATCH),
]


@pytest.mark.parametrize(
    ("operation", "kind", "reason"),
    FAULTS,
    ids=[f"{o}-{errno.errorcode[k] if isinstance(k, int) else k}" for o, k, _ in FAULTS],
)
def test_a_fault_in_a_demotion_costs_nothing_but_time(
    tmp_path: Path, operation: str, kind: int | str, reason: Reason
) -> None:
    skip = 0 if operation == "allocate" else 1
    bench = Bench(tmp_path, files=FaultyFiles(Fault(operation, skip, kind), seed=3))
    line = bench.add(CPU)
    with pytest.raises(MoveRefused) as refused:
        bench.moves.run(MoveKind.DEMOTE, line, NVME)
    assert refused.value.reason is reason
    bench.check()
    assert bench.settled()
    assert int(bench.directory.tier[line]) == CPU
    bench.moves.run(MoveKind.DEMOTE, line, NVME)
    bench.check()


def test_a_damaged_block_is_not_promoted(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    line = bench.add(CPU)
    bench.moves.run(MoveKind.DEMOTE, line, NVME)
    nvme = bench.tiers[NVME]
    assert isinstance(nvme, NvmeTier)
    with nvme.path.open("r+b") as file:
        file.seek(4096)
        byte = file.read(1)
        file.seek(4096)
        file.write(bytes([byte[0] ^ 4]))
    with pytest.raises(MoveRefused) as refused:
        bench.moves.run(MoveKind.PROMOTE, line, CPU)
    assert refused.value.reason is Reason.CHECKSUM_MISMATCH
    assert bench.settled()
    assert bench.tiers[CPU].slots.used == 0


class MoveMachine(RuleBasedStateMachine):
    """Any interleaving of moves, cancellations, late and repeated completions and closing sessions."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self.bench = Bench(Path(self._folder.name))
        self.moves: list[Move] = []
        self.completions: list[Completion] = []

    def teardown(self) -> None:
        for move in list(self.bench.moves.open_moves()):
            if move.state is TxnState.PUBLISHED:
                self.bench.moves.release(move)
            else:
                self.bench.moves.cancel(move)
        for done in self.completions:
            with pytest.raises(MoveRefused):
                self.bench.moves.complete(done)
        for move in list(self.bench.moves.open_moves()):
            with pytest.raises(MoveRefused):
                self.bench.moves.complete(completion_of(move, 0))
        for line in list(self.bench.bytes):
            self.bench.drop(line)
        self.bench.check()
        assert self.bench.settled()
        assert self.bench.ledger.outstanding() == 0
        for tier in self.bench.tiers:
            tier.close()
        self._folder.cleanup()

    def pick(self, data: st.DataObject, state: TxnState) -> Move | None:
        found = [move for move in self.moves if move.state is state]
        return data.draw(st.sampled_from(found)) if found else None

    @rule(tier=st.sampled_from([GPU, CPU]))
    def add(self, tier: int) -> None:
        if self.bench.ledger.available(tier):
            self.bench.add(tier)

    @precondition(lambda self: self.bench.bytes)
    @rule(data=st.data(), tier=st.sampled_from([GPU, CPU, NVME]))
    def begin(self, data: st.DataObject, tier: int) -> None:
        line = data.draw(st.sampled_from(sorted(self.bench.bytes)))
        kind = MoveKind.DEMOTE if tier > int(self.bench.directory.tier[line]) else MoveKind.PROMOTE
        busy = bool(self.bench.directory.write_txn[line]) or int(self.bench.directory.tier[line]) == tier
        full = self.bench.ledger.available(tier) == 0
        if busy or full:
            with pytest.raises(MoveRefused) as refused:
                self.bench.moves.begin(kind, line, tier)
            full_reason = (
                MoveReason.NO_STAGING if kind is MoveKind.PROMOTE else MoveReason.NO_DESTINATION_CAPACITY
            )
            assert refused.value.code is (MoveReason.WRITE_TXN_BUSY if busy else full_reason)
        else:
            self.moves.append(self.bench.moves.begin(kind, line, tier))

    @rule(data=st.data())
    def submit(self, data: st.DataObject) -> None:
        if move := self.pick(data, TxnState.RESERVED):
            self.bench.moves.submit(move)

    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        move = self.pick(data, TxnState.COPYING)
        if move and not any(done.txn == move.id for done in self.completions):
            self.completions.append(self.bench.moves.copy(move))

    @precondition(lambda self: self.completions)
    @rule(
        data=st.data(),
        damage=st.sampled_from(["", "", "bytes", "owner", "transfer_generation", "slot_generation"]),
    )
    def complete(self, data: st.DataObject, damage: str) -> None:
        done = data.draw(st.sampled_from(self.completions))
        if damage:
            done = dataclasses.replace(done, **{damage: getattr(done, damage) + 1})
        move = next(move for move in self.moves if move.id == done.txn)
        if move.state is TxnState.COPYING and not damage:
            assert self.bench.moves.complete(done).state is TxnState.VALIDATED
        else:
            before = move.state
            with pytest.raises(MoveRefused):
                self.bench.moves.complete(done)
            dies = before is TxnState.COPYING and damage == "bytes"
            assert move.state is (TxnState.DEAD if dies else before)

    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        if move := self.pick(data, TxnState.VALIDATED):
            self.bench.moves.publish(move)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if move := self.pick(data, TxnState.PUBLISHED):
            self.bench.moves.release(move)

    @rule(data=st.data(), state=st.sampled_from([TxnState.RESERVED, TxnState.COPYING, TxnState.VALIDATED]))
    def cancel(self, data: st.DataObject, state: TxnState) -> None:
        if move := self.pick(data, state):
            self.bench.moves.cancel(move)

    @precondition(lambda self: self.bench.bytes)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        self.bench.drop(data.draw(st.sampled_from(sorted(self.bench.bytes))))

    @invariant()
    def whole(self) -> None:
        self.bench.check()


TestMoves = MoveMachine.TestCase
TestMoves.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
