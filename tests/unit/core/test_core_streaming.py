"""Blocks through a bounded set of buffers: in order, whatever their tier does with their reads."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtier_core import streaming
from kvtier_core.arrivals import Arrival, Block, BufferPool, Meter, launch
from kvtier_core.errors import CoreError, Reason
from kvtier_core.streaming import ArrivedStream, BlockStream, stream_of
from kvtier_core.tiers.cpu import CpuTier
from kvtier_core.tiers.slots import SlotRef
from kvtier_core.tiers.transfer import TransferItem, TransferSink
from tests.unit.core.builders import FakeClock
from tests.unit.core.tierdoubles import LAYOUT, Read, ScriptedTier


def blocks(tier: ScriptedTier, count: int | None = None) -> list[Block]:
    wanted = range(len(tier.payloads) if count is None else count)
    return [Block(tier, SlotRef(slot, 1), tier.identity(slot)) for slot in wanted]


def stream(tier: ScriptedTier, pool: BufferPool, **options: object) -> BlockStream:
    settings: dict[str, object] = {"window": 2, **options}
    return BlockStream(blocks(tier), pool, FakeClock(), **settings)  # type: ignore[arg-type]


def drained(pool: BufferPool) -> bool:
    return pool.available == pool.limit


@given(st.integers(1, 8), st.integers(2, 4), st.integers(0, 2), st.data())
def test_order_bounds_and_bytes_hold_for_any_order_of_completions(
    count: int, window: int, spare: int, data: st.DataObject
) -> None:
    tier = ScriptedTier(count)
    pool = BufferPool(LAYOUT, window + spare)
    with BlockStream(blocks(tier), pool, FakeClock(), window=window) as reads:
        for at in range(count):
            begun = [read for read in tier.reads if not read.sink.over]
            assert len(begun) <= window
            for read in data.draw(st.permutations(begun)):
                read.end()
                if data.draw(st.booleans()):
                    read.sink.done(0, CoreError(Reason.CHECKSUM_MISMATCH, "said twice"))
                    read.sink.drained(0)
            assert torch.equal(reads.next().payload, tier.payloads[at])
        assert reads.peak <= window
        assert reads.buffer_bytes == reads.peak * pool.block_bytes
    assert drained(pool)


def test_what_had_not_begun_when_a_frame_ended_is_never_read() -> None:
    tier = ScriptedTier(8)
    pool = BufferPool(LAYOUT, 4)
    with stream(tier, pool):
        assert len(tier.reads) == 2
    assert not drained(pool)
    for read in tier.reads:
        read.end()
    assert len(tier.reads) == 2
    assert drained(pool)


def test_memory_is_copied_on_the_executor_and_not_for_a_frame_that_ended() -> None:
    tier = CpuTier("ram", LAYOUT, 4)
    pool, release, ran = BufferPool(LAYOUT, 4), threading.Event(), []
    refs, identities = [], []
    source = ScriptedTier(2)
    for slot in range(2):
        ref = tier.reserve(0)
        tier.write(ref, source.payloads[slot], source.identity(slot))
        tier.validate(ref, source.identity(slot))
        tier.publish(ref)
        refs.append(ref)
        identities.append(source.identity(slot))
    wanted = [Block(tier, ref, identity) for ref, identity in zip(refs, identities, strict=True)]
    with ThreadPoolExecutor(1) as executor:
        with BlockStream(wanted, pool, FakeClock(), window=2, executor=executor) as reads:
            assert torch.equal(reads.next().payload, source.payloads[0])
            assert torch.equal(reads.next().payload, source.payloads[1])
        executor.submit(release.wait, 20)
        with BlockStream(wanted, pool, FakeClock(), window=2, executor=executor):
            pass
        release.set()
        executor.submit(ran.append, "next").result(timeout=20)
    assert ran == ["next"]
    assert drained(pool)
    tier.close()


class Ending(Executor):
    """Takes `left` calls more, as one of an engine that ends meanwhile."""

    def __init__(self, left: int) -> None:
        self.left = left
        self.taken: list[Callable[[], object]] = []

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if not self.left:
            raise RuntimeError("cannot schedule new futures after shutdown")
        self.left -= 1
        self.taken.append(partial(function, *args))
        return Future()


@pytest.mark.parametrize("left", [0, 1, 2])
def test_blocks_of_memory_come_when_the_executor_takes_no_more(left: int) -> None:
    """What one that took a read will write is nobody else's before it has."""
    source, tier = ScriptedTier(3), CpuTier("ram", LAYOUT, 3)
    wanted = []
    for slot in range(3):
        ref, identity = tier.reserve(0), source.identity(slot)
        tier.write(ref, source.payloads[slot], identity)
        tier.validate(ref, identity)
        tier.publish(ref)
        wanted.append(Block(tier, ref, identity))
    ending, pool = Ending(left), BufferPool(LAYOUT, 3)
    with BlockStream(wanted, pool, FakeClock(), window=3, executor=ending) as reads:
        for run in ending.taken:
            run()
        for at in range(3):
            assert torch.equal(reads.next().payload, source.payloads[at])
    assert drained(pool)
    tier.close()


def test_buffers_of_reads_that_may_have_begun_stay_theirs_when_a_tier_breaks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tier, pool = ScriptedTier(2), BufferPool(LAYOUT, 3)
    submit = tier.submit_read

    def breaks(items: Sequence[TransferItem], deadline: float, sink: TransferSink) -> None:
        submit(items, deadline, sink)
        raise ValueError("a defect")

    monkeypatch.setattr(tier, "submit_read", breaks)
    with pytest.raises(ValueError, match="defect"):
        stream(tier, pool)
    assert pool.available == 1
    for read in tier.reads:
        read.end()
    assert drained(pool)


def test_a_copy_that_breaks_is_its_blocks_error_and_hangs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    tier, pool, source = CpuTier("ram", LAYOUT, 1), BufferPool(LAYOUT, 1), ScriptedTier(1)

    def breaks(*_: object) -> None:
        raise ValueError("a defect")

    monkeypatch.setattr(tier, "submit_read", breaks)
    wanted = [Block(tier, SlotRef(0, 1), source.identity(0))]
    with (
        ThreadPoolExecutor(1) as executor,
        BlockStream(wanted, pool, FakeClock(), window=1, executor=executor) as reads,
        pytest.raises(CoreError, match="a defect") as broken,
    ):
        reads.next()
    assert broken.value.reason is Reason.INTERNAL
    assert drained(pool)
    tier.close()


def test_a_read_that_outlasts_the_deadline_keeps_its_buffer() -> None:
    """Were the buffer used again, the read might write into another frame's rows."""
    tier, clock, pool = ScriptedTier(2), FakeClock(), BufferPool(LAYOUT, 2)
    with BlockStream(blocks(tier), pool, clock, window=1, deadline=100.5) as reads:
        clock.now = 101.0
        with pytest.raises(CoreError) as late:
            reads.next()
    assert late.value.reason is Reason.DEADLINE
    assert pool.available == 1
    tier.reads[0].sink.done(0, CoreError(Reason.DEADLINE, "storage did not end in time"))
    assert pool.available == 1
    tier.reads[0].land()
    tier.reads[0].sink.drained(0)
    assert drained(pool)


def test_a_hang_before_a_far_deadline_is_the_storages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "READ_TIMEOUT_SECONDS", 0.01)
    tier, pool = ScriptedTier(1), BufferPool(LAYOUT, 1)
    with stream(tier, pool, deadline=200.0) as reads, pytest.raises(CoreError) as hung:
        reads.next()
    assert hung.value.reason is Reason.STORAGE_UNAVAILABLE
    with stream(tier, pool) as reads, pytest.raises(CoreError) as none_left:
        reads.next()
    assert none_left.value.reason is Reason.NO_STAGING
    tier.reads[0].end()
    assert drained(pool)


def test_a_full_queue_is_waited_for_while_own_reads_run_and_is_refused_otherwise() -> None:
    tier, pool = ScriptedTier(3, depth=1), BufferPool(LAYOUT, 4)
    with stream(tier, pool) as reads:
        for at in range(3):
            tier.reads[at].end()
            assert torch.equal(reads.next().payload, tier.payloads[at])
    closed = ScriptedTier(1, depth=0)
    with pytest.raises(CoreError) as full:
        stream(closed, pool)
    assert full.value.reason is Reason.QUEUE_FULL
    assert drained(pool)


def test_an_error_comes_in_its_blocks_turn() -> None:
    tier, pool = ScriptedTier(2), BufferPool(LAYOUT, 2)
    with stream(tier, pool) as reads:
        tier.reads[1].end(CoreError(Reason.CHECKSUM_MISMATCH, "flipped"))
        tier.reads[0].end()
        assert torch.equal(reads.next().payload, tier.payloads[0])
        with pytest.raises(CoreError) as flipped:
            reads.next()
    assert flipped.value.reason is Reason.CHECKSUM_MISMATCH
    assert drained(pool)


def promised(tier: ScriptedTier, pool: BufferPool, meter: Meter, wanted: Sequence[Block]) -> list[Arrival]:
    arrivals = []
    for block in wanted:
        buffer = pool.take()
        assert buffer is not None
        arrival = Arrival(block, buffer, pool, meter)
        launch([arrival], 200.0, None)
        arrivals.append(arrival)
    return arrivals


def test_promised_blocks_are_used_and_others_are_let_go() -> None:
    tier, pool, clock = ScriptedTier(4), BufferPool(LAYOUT, 6), FakeClock()
    meter = Meter(clock)
    moved = Block(tier, SlotRef(1, 9), tier.identity(1))
    early = promised(tier, pool, meter, [blocks(tier)[0], moved, blocks(tier)[2]])
    tier.answer = Read.end
    clock.now += 3.0
    tier.reads[0].end()
    tier.reads[1].end()
    tier.reads[2].end(CoreError(Reason.STORAGE_UNAVAILABLE, "gone"))
    with BlockStream(blocks(tier), pool, clock, window=2, promised=early, meter=meter) as reads:
        for at in range(4):
            assert torch.equal(reads.next().payload, tier.payloads[at])
        assert reads.promised_blocks == 1
        assert reads.transfer_seconds == 3.0
        assert reads.stall_seconds == 0.0
    assert [read.item.ref.slot for read in tier.reads] == [0, 1, 2, 1, 2, 3]
    assert drained(pool)


def test_what_is_here_counts_beyond_the_window_and_nothing_that_has_not_begun() -> None:
    tier, pool, clock = ScriptedTier(4), BufferPool(LAYOUT, 6), FakeClock()
    meter = Meter(clock)
    early = promised(tier, pool, meter, blocks(tier)[:3])
    for read in tier.reads[:2]:
        read.end()
    with BlockStream(blocks(tier), pool, clock, window=1, promised=early, meter=meter) as reads:
        assert [reads.here(most) for most in (1, 2, 3)] == [True, True, False]
        tier.reads[2].end()
        assert [reads.here(most) for most in (3, 4)] == [True, False]
        tier.answer = Read.end
        for _ in range(4):
            reads.next()
        assert not reads.here(1)
    assert drained(pool)


def test_a_promise_that_fails_while_it_is_awaited_is_read_again() -> None:
    tier, pool, clock = ScriptedTier(1), BufferPool(LAYOUT, 4), FakeClock()
    meter = Meter(clock)
    early = promised(tier, pool, meter, blocks(tier))
    tier.answer = Read.end
    with BlockStream(blocks(tier), pool, clock, window=2, promised=early, meter=meter) as reads:
        tier.reads[0].end(CoreError(Reason.CHECKSUM_MISMATCH, "flipped"))
        assert torch.equal(reads.next().payload, tier.payloads[0])
        assert reads.promised_blocks == 0
    assert drained(pool)


def test_the_meter_counts_time_once_however_many_blocks_fly() -> None:
    clock = FakeClock()
    meter = Meter(clock)
    meter.begin()
    clock.now += 1.0
    meter.begin()
    clock.now += 1.0
    meter.end()
    clock.now += 1.0
    meter.end()
    clock.now += 5.0
    assert meter.seconds == 3.0


def test_a_buffer_is_free_when_all_its_readers_are_done_and_no_byte_can_come() -> None:
    tier, pool = ScriptedTier(1), BufferPool(LAYOUT, 1)
    for order in itertools.permutations(range(4)):
        [first] = promised(tier, pool, Meter(FakeClock()), blocks(tier))
        second, third = first.join(), first.join()
        assert second is not None and third is not None
        ends = [first.leave, second.leave, third.leave, tier.reads[-1].end]
        for number in order:
            assert not drained(pool)
            ends[number]()
            if number < 3:
                ends[number]()
        assert drained(pool)
        assert first.join() is None


def test_only_what_is_read_and_awaited_is_joined() -> None:
    tier, pool = ScriptedTier(2), BufferPool(LAYOUT, 2)
    first, second = promised(tier, pool, Meter(FakeClock()), blocks(tier))
    held = first.join()
    assert held is not None
    first.leave()
    again = held.join()
    assert again is not None and not again.over and again.is_of(blocks(tier)[0])
    held.leave()
    tier.reads[0].end()
    assert again.wait(0.0) and again.error is None
    assert torch.equal(again.buffer.payload, tier.payloads[0])
    # Its bytes are used twice and were read once.
    assert [again.count(), first.count()] == [True, False]
    again.leave()
    assert first.join() is None
    tier.reads[1].end(CoreError(Reason.CHECKSUM_MISMATCH, "flipped"))
    assert second.join() is None
    second.leave()
    assert drained(pool)


def test_bytes_that_others_used_before_are_counted_as_shared() -> None:
    tier, pool, clock = ScriptedTier(3), BufferPool(LAYOUT, 6), FakeClock()
    tier.answer = Read.end
    meter = Meter(clock)
    early = promised(tier, pool, meter, blocks(tier)[:2])
    holds = [one for arrival in early if (one := arrival.join()) is not None]
    size = LAYOUT.payload_bytes
    for promise, shared in ((early, {}), (holds, {"flash": 2 * size})):
        with BlockStream(blocks(tier), pool, clock, window=4, promised=promise, meter=meter) as reads:
            reads.some(3)
            assert (reads.shared, reads.promised_blocks) == (shared, 2)
    assert len(tier.reads) == 2 + 2
    assert drained(pool)


@pytest.mark.parametrize("over", [True, False])
def test_blocks_that_have_all_come_need_no_stream(over: bool) -> None:
    tier, pool, clock = ScriptedTier(3), BufferPool(LAYOUT, 6), FakeClock()
    meter = Meter(clock)
    early = promised(tier, pool, meter, blocks(tier))
    for read in tier.reads[: 3 if over else 2]:
        read.end()
    made = stream_of(
        blocks(tier), pool, clock, window=2, executor=None, deadline=None, promised=early, meter=meter
    )
    assert isinstance(made, ArrivedStream) is over
    with made as reads:
        tier.reads[2].end()
        assert torch.equal(reads.next().payload, tier.payloads[0])
        assert reads.given() == [tier.identity(0)]
        assert [torch.equal(one.payload, tier.payloads[at]) for at, one in enumerate(reads.some(2), 1)]
        assert (reads.promised_blocks, reads.shared) == (3, {})
    assert drained(pool)
    [late] = promised(tier, pool, meter, blocks(tier)[:1])
    tier.reads[-1].end(CoreError(Reason.CHECKSUM_MISMATCH, "flipped"))
    tier.answer = Read.end
    with stream_of(
        blocks(tier, 1), pool, clock, window=2, executor=None, deadline=None, promised=[late], meter=meter
    ) as again:
        assert torch.equal(again.next().payload, tier.payloads[0])
    assert drained(pool)


def test_what_comes_is_given_in_the_order_in_which_it_comes_with_what_failed() -> None:
    tier, pool, clock = ScriptedTier(5), BufferPool(LAYOUT, 8), FakeClock()
    given: list[tuple[int, bool]] = []
    with BlockStream(blocks(tier), pool, clock, window=3) as reads:
        assert reads.come(2, clock.now) == []
        tier.reads[2].end()
        tier.reads[1].end(CoreError(Reason.SHORT_COPY, "short"))
        assert reads.some_here()
        while reads.left:
            for one, error in reads.come(2, clock.now):
                given.append((one.block.ref.slot, error is None))
                if error is None:
                    assert torch.equal(one.buffer.payload, tier.payloads[one.block.ref.slot])
            if len(tier.reads) == 5:
                for at in (4, 3, 0):
                    if not tier.reads[at].sink.over:
                        tier.reads[at].end()
                        break
        assert reads.peak <= 3
    assert sorted(given) == [(0, True), (1, False), (2, True), (3, True), (4, True)]
    assert {slot for slot, _ in given[:2]} == {1, 2} and given[2][0] == 4 and given[-1][0] == 0
    assert drained(pool)


def test_what_nobody_wants_any_more_is_let_go_and_not_begun() -> None:
    tier, pool, clock = ScriptedTier(5), BufferPool(LAYOUT, 8), FakeClock()
    with BlockStream(blocks(tier), pool, clock, window=2) as reads:
        reads.only(lambda block: block.ref.slot in (1, 4))
        assert reads.left == 2
        for read in tier.reads:
            read.end()
        assert [one.block.ref.slot for one, _ in reads.come(4, None)] == [1]
        assert [read.item.ref.slot for read in tier.reads] == [0, 1, 4]
        tier.reads[2].end()
        assert [one.block.ref.slot for one, _ in reads.come(4, None)] == [4]
    assert drained(pool)
