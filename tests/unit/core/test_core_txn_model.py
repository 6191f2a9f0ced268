"""Asynchronous moves against a plain model: sets of tiers, and what each flight has said so far."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier_core.errors import Reason
from kvtier_core.transactions.moves import Move
from kvtier_core.transactions.reasons import MoveKind, MoveReason, MoveRefused
from tests.unit.core.txnbench import CPU, GPU, NVME, BlockBench, HeldItem, block_key

TIERS = (GPU, CPU, NVME)
SLOTS = (2, 3, 4)


@dataclass
class Block:
    """copies: tiers that may be read; pins: by tier."""

    copies: set[int]
    authority: int
    pins: dict[int, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))


@dataclass
class Flight:
    """phase: flying, published (its source not yet given up) or dead. told: what its tier said. over: that it
    is drained was noticed, and its source is no longer held."""

    name: int
    move: Move
    item: HeldItem
    source: int
    tier: int
    keep: bool
    takes: bool
    phase: str = "flying"
    told: str = ""
    drained: bool = False
    over: bool = False


class MoveModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.bench = BlockBench(SLOTS)
        self.blocks: dict[int, Block] = {}
        self.flights: list[Flight] = []

    # The model.

    def busy(self, name: int) -> bool:
        return any(flight.name == name and flight.phase != "dead" for flight in self.flights)

    def held(self, name: int, tier: int) -> int:
        reading = sum(f.name == name and f.source == tier and not f.over for f in self.flights)
        return self.blocks[name].pins[tier] + reading

    def used(self, tier: int) -> int:
        copies = sum(tier in block.copies for block in self.blocks.values())
        return copies + sum(f.tier == tier and f.phase != "published" for f in self.flights)

    def line(self, name: int) -> int:
        return self.bench.directory.find(block_key(name))

    # What happens.

    @rule(name=st.integers(0, 4))
    def put(self, name: int) -> None:
        if name not in self.blocks and self.used(CPU) < SLOTS[CPU]:
            self.bench.put(name, CPU)
            self.blocks[name] = Block({CPU}, CPU)

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), tier=st.sampled_from(TIERS), keep=st.booleans())
    def begin(self, data: st.DataObject, tier: int, keep: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.blocks)))
        block = self.blocks[name]
        kind = MoveKind.DEMOTE if tier > block.authority else MoveKind.PROMOTE
        full = MoveReason.NO_DESTINATION_CAPACITY if kind is MoveKind.DEMOTE else MoveReason.NO_STAGING
        expected = MoveReason.READY
        if self.busy(name) or tier in block.copies:
            expected = MoveReason.WRITE_TXN_BUSY
        elif self.used(tier) == SLOTS[tier]:
            expected = full
        begin = lambda: self.bench.moves.begin(kind, self.line(name), tier, keep_source=keep)  # noqa: E731
        if expected is not MoveReason.READY:
            with pytest.raises(MoveRefused) as refused:
                begin()
            assert refused.value.code is expected
            return
        move = begin()
        assert self.bench.moves.start([move]) == []
        source = block.authority if kind is MoveKind.DEMOTE else min(block.copies)
        assert move.source_tier == source
        takes = kind is MoveKind.DEMOTE or not keep
        self.flights.append(Flight(name, move, self.bench.held(move), source, tier, keep, takes))

    @precondition(lambda self: any(not flight.told for flight in self.flights))
    @rule(data=st.data(), good=st.booleans())
    def tell(self, data: st.DataObject, good: bool) -> None:
        flight = data.draw(st.sampled_from([f for f in self.flights if not f.told]))
        if good and flight.phase == "flying":
            flight.item.arrive()
            flight.told = "good"
        else:
            flight.item.fail(Reason.STORAGE_UNAVAILABLE)
            flight.told = "bad"

    @precondition(lambda self: any(flight.told and not flight.drained for flight in self.flights))
    @rule(data=st.data(), twice=st.booleans())
    def drain(self, data: st.DataObject, twice: bool) -> None:
        flight = data.draw(st.sampled_from([f for f in self.flights if f.told and not f.drained]))
        flight.item.drain()
        if twice:
            flight.item.again()
            flight.item.sink.drained(flight.item.index)
        flight.drained = True

    @precondition(lambda self: any(flight.phase == "flying" for flight in self.flights))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        flight = data.draw(st.sampled_from([f for f in self.flights if f.phase == "flying"]))
        self.bench.moves.cancel(flight.move)
        flight.phase = "dead"

    @rule()
    def reap(self) -> None:
        settled = {item.move.id: item.reason for item in self.bench.moves.reap()}
        for flight in list(self.flights):
            flight.over = flight.drained
            if flight.phase == "flying" and flight.told:
                reason = settled.pop(flight.move.id)
                if flight.told == "good":
                    assert reason is MoveReason.READY
                    flight.phase = "published"
                    self.blocks[flight.name].copies.add(flight.tier)
                    if flight.takes:
                        self.blocks[flight.name].authority = flight.tier
                else:
                    assert reason is MoveReason.STORAGE_UNAVAILABLE
                    flight.phase = "dead"
            if flight.drained and flight.phase == "dead":
                self.flights.remove(flight)
        assert settled == {}
        for flight in list(self.flights):
            if flight.phase == "published" and flight.drained:
                block = self.blocks[flight.name]
                if not flight.keep and self.held(flight.name, flight.source):
                    continue
                if not flight.keep:
                    block.copies.discard(flight.source)
                self.flights.remove(flight)

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), tier=st.sampled_from(TIERS))
    def pin(self, data: st.DataObject, tier: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.blocks)))
        if tier in self.blocks[name].copies:
            self.bench.directory.lease(self.line(name), tier)
            self.blocks[name].pins[tier] += 1

    @precondition(lambda self: any(any(block.pins.values()) for block in self.blocks.values()))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        held = [(n, t) for n, block in self.blocks.items() for t, count in block.pins.items() if count]
        name, tier = data.draw(st.sampled_from(held))
        self.bench.directory.unlease(self.line(name), tier)
        self.blocks[name].pins[tier] -= 1

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), tier=st.sampled_from(TIERS), last=st.booleans())
    def drop(self, data: st.DataObject, tier: int, last: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.blocks)))
        block = self.blocks[name]
        others = block.copies - {tier}
        if tier not in block.copies:
            expected = MoveReason.MISS
        elif self.busy(name):
            expected = MoveReason.WRITE_TXN_BUSY
        elif self.held(name, tier):
            expected = MoveReason.WOULD_EVICT_PINNED
        elif not others and not last:
            expected = MoveReason.SURVIVAL_VIOLATION
        else:
            expected = MoveReason.READY
        if expected is not MoveReason.READY:
            with pytest.raises(MoveRefused) as refused:
                self.bench.moves.drop(self.line(name), tier, last=last)
            assert refused.value.code is expected
            return
        assert self.bench.moves.drop(self.line(name), tier, last=last) is (not others)
        block.copies = others
        if not others:
            del self.blocks[name]
        elif block.authority == tier:
            block.authority = max(others)

    @invariant()
    def agrees(self) -> None:
        directory = self.bench.directory
        self.bench.check()
        for name, block in self.blocks.items():
            line = self.line(name)
            assert {tier for tier in TIERS if directory.counts(line, tier)} == block.copies
            assert int(directory.tier[line]) == block.authority
            for tier in block.copies:
                assert directory.leases(line, tier) == self.held(name, tier)
        for tier in TIERS:
            assert self.bench.tiers[tier].slots.used == self.used(tier)

    def teardown(self) -> None:
        for name, block in self.blocks.items():
            for tier, count in block.pins.items():
                for _ in range(count):
                    self.bench.directory.unlease(self.line(name), tier)
        for _ in range(2):
            self.bench.settle()
        self.bench.check()
        assert self.bench.at_rest()


TestMoveModel = MoveModel.TestCase
TestMoveModel.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
