"""Pins: taken where the lookup found it, ended once, never leaked."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtier_core.errors import CoreError, Reason
from kvtier_core.transactions.pins import Pin, Pins
from kvtier_core.transactions.reasons import MoveKind, MoveReason, MoveRefused
from tests.unit.core.txnbench import CPU, GPU, NVME, BlockBench, block_key, content


@pytest.fixture
def bench() -> BlockBench:
    return BlockBench()


def keys(*names: int) -> np.ndarray:
    return np.frombuffer(b"".join(block_key(name) for name in names), dtype=np.uint8).reshape(-1, 32)


def test_vllm_39702_hit_is_pinned_before_use(bench: BlockBench) -> None:
    """A is found; room is wanted before A is loaded: A stays, byte for byte, until its scope ends."""
    line = bench.spread(1, CPU, NVME)
    pins = Pins(bench.directory)
    with pins.lookup(keys(1), tier=CPU) as pin:
        assert len(pin) == 1
        with pytest.raises(MoveRefused) as refused:
            bench.moves.drop(line, CPU)
        assert refused.value.code is MoveReason.WOULD_EVICT_PINNED
        assert bench.serve(pin.lines[0], pin.tiers[0]) == content(1)
    pins.reap()
    bench.moves.drop(line, CPU)
    bench.check()


def test_a_lookup_pins_the_leading_blocks_that_can_be_read(bench: BlockBench) -> None:
    for name in (1, 2, 4):
        bench.put(name, CPU)
    bench.insert(3)
    pins = Pins(bench.directory)
    pin = pins.lookup(keys(1, 2, 3, 4))
    assert [bench.directory.key_of(line) for line in pin.lines] == [block_key(1), block_key(2)]
    assert len(pins.lookup(keys(9, 1))) == 0
    bench.directory.tombstone(pin.lines[0])
    assert len(pins.lookup(keys(1, 2))) == 0
    pin.close()


def test_a_lookup_takes_the_fastest_copy_or_that_of_the_tier_asked_for(bench: BlockBench) -> None:
    bench.spread(1, NVME, GPU)
    bench.put(2, NVME)
    pins = Pins(bench.directory)
    assert pins.lookup(keys(1, 2)).tiers == (GPU, NVME)
    assert len(pins.lookup(keys(1, 2), tier=GPU)) == 1
    gc.collect()
    pins.reap()
    assert pins.open == 0


def test_sglang_35769_the_source_of_a_load_is_owned_until_it_is_drained(bench: BlockBench) -> None:
    """A copy in flight holds its source: nobody frees the slots that it reads, nor those that it fills."""
    line = bench.spread(1, CPU, NVME)
    move = bench.fly(line, GPU, source_tier=CPU, keep_source=True)
    for tier in (CPU, NVME):
        with pytest.raises(MoveRefused) as refused:
            bench.moves.drop(line, tier)
        assert refused.value.code is MoveReason.WRITE_TXN_BUSY
    bench.moves.cancel(move)
    with pytest.raises(MoveRefused) as refused:
        bench.moves.drop(line, CPU)
    assert refused.value.code is MoveReason.WOULD_EVICT_PINNED
    bench.held(move).land()
    bench.moves.reap()
    bench.moves.drop(line, CPU)
    bench.check()


@pytest.mark.parametrize("broken", ["missing", "unpublished", "tombstoned", "expired"])
def test_a_hold_is_all_or_nothing(bench: BlockBench, broken: str) -> None:
    good, bad = bench.put(1, CPU), bench.spread(2, CPU, NVME)
    tier = CPU
    if broken == "missing":
        tier = GPU
    if broken == "unpublished":
        move = bench.begin(bad, GPU, source_tier=CPU)
        tier = move.tier
    if broken == "tombstoned":
        bench.directory.tombstone(bad)
    if broken == "expired":
        bench.directory.expire_replica(bad, CPU)
    pins = Pins(bench.directory)
    with pytest.raises(MoveRefused):
        pins.hold([good, bad], [CPU, tier])
    assert bench.directory.leases(good, CPU) == 0
    assert bench.directory.leases(bad, tier) == 0 and pins.open == 0


def test_a_line_named_twice_is_held_twice(bench: BlockBench) -> None:
    line = bench.put(1, CPU)
    pins = Pins(bench.directory)
    pin = pins.hold([line, line], CPU)
    assert bench.directory.leases(line, CPU) == 2
    pin.close()
    pin.close()
    assert pins.reap() == 1 and bench.directory.leases(line, CPU) == 0


def test_lmcache_2951_a_pin_that_is_dropped_is_found_given_back_and_counted(bench: BlockBench) -> None:
    """A failed allocation that forgets its pin does not hold the pool for ever."""
    line = bench.put(1, CPU)
    pins = Pins(bench.directory)

    def forgetful() -> None:
        pins.hold([line], CPU)
        raise CoreError(Reason.NO_DESTINATION_CAPACITY, "no staging for this read")

    with pytest.raises(CoreError):
        forgetful()
    gc.collect()
    assert bench.directory.leases(line, CPU) == 1
    assert pins.reap() == 1
    assert bench.directory.leases(line, CPU) == 0
    assert pins.counts == {"taken": 1, "leaked": 1} and pins.open == 0
    assert bench.moves.drop(line, CPU, last=True)


def test_a_scope_that_fails_ends_and_is_no_leak(bench: BlockBench) -> None:
    line = bench.put(1, CPU)
    pins = Pins(bench.directory)
    with pytest.raises(RuntimeError), pins.hold([line], CPU):
        raise RuntimeError("the caller's own")
    assert pins.reap() == 1 and pins.counts["leaked"] == 0


def test_a_pin_that_ends_on_another_thread_comes_back_at_the_next_step(bench: BlockBench) -> None:
    line = bench.put(1, CPU)
    pins = Pins(bench.directory)
    pin = pins.hold([line], CPU)
    thread = threading.Thread(target=pin.close)
    thread.start()
    thread.join(60)
    assert not pin.open
    # The next hold reaps what ended before.
    pins.hold([line], CPU).close()
    assert pins.reap() == 1 and bench.directory.leases(line, CPU) == 0


def test_a_pin_past_its_deadline_is_overdue_and_no_longer_answers(bench: BlockBench) -> None:
    line = bench.put(1, CPU)
    pins = Pins(bench.directory)
    pin = pins.hold([line], CPU, deadline=5.0)
    pin.check(4.9)
    assert pins.overdue(4.9) == 0 and pins.overdue(5.0) == 1
    with pytest.raises(MoveRefused) as refused:
        pin.check(5.0)
    assert refused.value.code is MoveReason.LEASE_EXPIRED
    # It is not broken by force: somebody may still be reading.
    assert bench.directory.leases(line, CPU) == 1
    pin.close()
    with pytest.raises(MoveRefused):
        pin.check(0.0)


def test_a_pin_outlives_deletion_and_deletion_waits_for_it(bench: BlockBench) -> None:
    line = bench.put(1, CPU)
    pins = Pins(bench.directory)
    pin = pins.hold([line], CPU)
    bench.directory.tombstone(line)
    assert bench.serve(line, CPU) == content(1)
    with pytest.raises(MoveRefused) as refused:
        bench.moves.discard(line)
    assert refused.value.code is MoveReason.LEASES_HELD
    pin.close()
    pins.reap()
    bench.moves.discard(line)
    bench.directory.remove(line)
    bench.check()


class PinMachine(RuleBasedStateMachine):
    """Holds, ends, drops and evictions in any order: leases are what the live pins say, and no more."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = BlockBench((3, 4, 4))
        self.pins = Pins(self.bench.directory)
        self.live: list[Pin] = []
        self.ended = 0
        self.leaked = 0

    @rule(name=st.integers(0, 5), tier=st.sampled_from([CPU, NVME]))
    def put(self, name: int, tier: int) -> None:
        bench = self.bench
        slots = bench.tiers[tier].slots
        if bench.directory.locate(block_key(name)) < 0 and slots.used < slots.capacity:
            bench.put(name, tier)

    @rule(names=st.lists(st.integers(0, 5), max_size=4))
    def lookup(self, names: list[int]) -> None:
        pin = self.pins.lookup(keys(*names)) if names else self.pins.hold([], CPU)
        found = 0
        for name in names:
            if not self.bench.directory.readable(self.bench.directory.find(block_key(name))):
                break
            found += 1
        assert len(pin) == found
        self.live.append(pin)

    @rule(data=st.data(), how=st.sampled_from(["close", "twice", "drop"]))
    def end(self, data: st.DataObject, how: str) -> None:
        if not self.live:
            return
        pin = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        if how == "drop":
            self.leaked += 1
        for _ in range({"close": 1, "twice": 2, "drop": 0}[how]):
            pin.close()
        del pin
        gc.collect(0)

    @rule()
    def reap(self) -> None:
        self.pins.reap()
        assert self.pins.open == len(self.live)
        assert self.pins.counts["leaked"] == self.leaked

    @rule(name=st.integers(0, 5), last=st.booleans())
    def evict(self, name: int, last: bool) -> None:
        bench = self.bench
        line = bench.directory.find(block_key(name))
        if line < 0 or bench.directory.tier[line] < 0:
            return
        tier = int(bench.directory.tier[line])
        held = bench.directory.leases(line, tier)
        busy = bool(bench.directory.write_txn[line])
        if held or busy or not last:
            with pytest.raises(MoveRefused) as refused:
                bench.moves.drop(line, tier, last=last)
            alone = MoveReason.WOULD_EVICT_PINNED if held else MoveReason.SURVIVAL_VIOLATION
            assert refused.value.code is (MoveReason.WRITE_TXN_BUSY if busy else alone)
        else:
            assert bench.moves.drop(line, tier, last=True)

    @rule(name=st.integers(0, 5))
    def demote(self, name: int) -> None:
        bench = self.bench
        line = bench.directory.find(block_key(name))
        full = bench.tiers[NVME].slots.used == bench.tiers[NVME].slots.capacity
        if line >= 0 and bench.directory.tier[line] == CPU and not full and not bench.moves.open_moves():
            move = bench.moves.begin(MoveKind.DEMOTE, line, NVME)
            assert bench.moves.start([move]) == []
            bench.settle()

    @invariant()
    def agrees(self) -> None:
        self.bench.check()
        for pin in self.live:
            for line, tier in zip(pin.lines, pin.tiers, strict=True):
                assert self.bench.directory.leases(line, tier) > 0
                self.bench.serve(line, tier)
        held = sum(len(pin) for pin in self.live)
        leases = sum(int(tier.leases.array[:64].sum()) for tier in self.bench.directory.replicas.tiers)
        assert leases >= held
        if self.pins.open == len(self.live):
            assert leases == held


TestPins = PinMachine.TestCase
TestPins.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
