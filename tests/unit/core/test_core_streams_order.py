"""Copies in stream order on a device whose delays are chosen: what races without a wait does not race with
it."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_core.errors import CoreError, Reason
from kvtier_core.layout import ChunkLayout
from kvtier_core.tiers.base import BlockIdentity, SlotRef, SlotState, seal_checksum, slot_stride, tensor_bytes
from kvtier_core.tiers.gpu import GpuOptions, GpuTier
from kvtier_core.tiers.streams import InlineStream
from kvtier_core.tiers.transfer import EraseItem, Landing, TransferItem
from tests.unit.core.fake_streams import FakeDevice

LAYOUT = ChunkLayout(kv_heads=2, chunk_tokens=16, head_dim=16)
STRIDE = slot_stride(LAYOUT)
CPU = torch.device("cpu")
COPY = 1.0
NEVER = 1e9


class Sink:
    def __init__(self) -> None:
        self.outcome: dict[int, Reason | None] = {}
        self.drained_items: list[int] = []

    def done(self, index: int, error: CoreError | None) -> None:
        assert index not in self.outcome, "told twice"
        self.outcome[index] = error.reason if error else None

    def drained(self, index: int) -> None:
        assert index in self.outcome, "drained before it was done"
        assert index not in self.drained_items
        self.drained_items.append(index)


class Bench:
    """A pool, its two copy streams and the engine's compute stream on one device."""

    def __init__(self, slots: int = 4, *, deaf: bool = False, depth: int = 64, seconds: float = COPY) -> None:
        self.device = FakeDevice()
        self.compute = self.device.stream()
        self.tier = GpuTier(
            "hbm",
            LAYOUT,
            slots,
            device=CPU,
            clock=self.device.clock,
            options=GpuOptions(
                self.device.stream(seconds, deaf=deaf), self.device.stream(seconds, deaf=deaf), depth
            ),
        )
        self.host = mmap.mmap(-1, 16 * STRIDE)
        self.sink = Sink()

    def landing(self, place: int) -> Landing:
        view = memoryview(self.host)
        return Landing(view[place * STRIDE : place * STRIDE + LAYOUT.payload_bytes])

    def filled_landing(self, place: int, data: torch.Tensor) -> Landing:
        landing = self.landing(place)
        landing.body[:] = tensor_bytes(data)
        return landing

    def resident(self, data: torch.Tensor) -> SlotRef:
        """A published slot whose rows are there already."""
        ref = self.tier.reserve(7)
        self.tier.write(ref, data, named(data))
        self.tier.validate(ref, named(data))
        self.tier.publish(ref)
        return ref

    def advance(self, seconds: float) -> None:
        self.device.advance(seconds)
        self.tier.poll()


def payload(seed: int) -> torch.Tensor:
    return torch.randn(LAYOUT.shape, generator=torch.Generator().manual_seed(seed))


def named(data: torch.Tensor) -> BlockIdentity:
    return BlockIdentity(bytes(32), 7, 1, 16, LAYOUT.payload_bytes, seal_checksum(data))


def refused(reason: Reason, call: Callable[..., object], *args: object) -> CoreError:
    with pytest.raises(CoreError) as error:
        call(*args)
    assert error.value.reason is reason, error.value
    return error.value


def store_behind_a_writer(*, deaf: bool) -> tuple[Bench, torch.Tensor]:
    """The model's kernels write a slot in four pieces of 10 s; the store is asked for at once and takes 1
    s."""
    bench = Bench(deaf=deaf)
    final = payload(1)
    ref = bench.tier.reserve(7)
    bench.tier.adopt(ref)
    view = bench.tier.view(ref)
    for piece in range(4):
        rows = slice(4 * piece, 4 * piece + 4)
        bench.compute.kernel(10.0, partial(view[:, :, rows].copy_, final[:, :, rows]))
    bench.tier.written(ref, bench.compute.record())
    bench.tier.submit_read([TransferItem(ref, named(final), bench.landing(0))], NEVER, bench.sink)
    return bench, final


def test_vllm_45704_a_store_sees_the_last_bytes_of_a_delayed_writer() -> None:
    bench, final = store_behind_a_writer(deaf=False)
    bench.advance(40.5)
    assert bench.sink.outcome == {}
    bench.advance(1.0)
    assert bench.sink.outcome == {0: None}
    assert bench.sink.drained_items == [0]
    assert bytes(bench.landing(0).body) == bytes(tensor_bytes(final))


def test_vllm_45704_without_the_wait_half_written_rows_are_stored_and_found_out() -> None:
    bench, final = store_behind_a_writer(deaf=True)
    bench.advance(2.0)
    assert bytes(bench.landing(0).body) != bytes(tensor_bytes(final))
    assert bench.sink.outcome == {0: Reason.CHECKSUM_MISMATCH}


def load_over_a_reader(*, deaf: bool) -> tuple[Bench, SlotRef, torch.Tensor, list[torch.Tensor]]:
    """A kernel of 20 s reads a slot; the host gives the slot up and loads another block into it at once."""
    bench = Bench(slots=1, deaf=deaf)
    old, new = payload(1), payload(2)
    ref = bench.resident(old)
    view = bench.tier.view(ref)
    seen: list[torch.Tensor] = []
    bench.compute.kernel(20.0, lambda: seen.append(view.clone()))
    bench.tier.reader_done(ref, bench.compute.record())
    bench.tier.release(ref)
    loaded = bench.tier.reserve(8)
    assert loaded.slot == ref.slot
    item = TransferItem(loaded, named(new), bench.filled_landing(0, new))
    bench.tier.submit_write([item], NEVER, bench.sink)
    return bench, loaded, new, seen


def test_vllm_47282_a_load_waits_for_the_last_reader() -> None:
    bench, loaded, new, seen = load_over_a_reader(deaf=False)
    bench.advance(20.5)
    assert torch.equal(seen[0], payload(1))
    assert bench.sink.outcome == {}
    bench.advance(1.0)
    assert bench.sink.outcome == {0: None}
    bench.tier.publish(loaded)
    assert torch.equal(bench.tier.view(loaded), new)


def test_vllm_47282_without_the_wait_a_load_destroys_rows_under_their_reader() -> None:
    bench, _, _, seen = load_over_a_reader(deaf=True)
    bench.advance(30.0)
    assert torch.equal(seen[0], payload(2))


def test_a_load_waits_for_a_store_that_still_reads_the_slots_former_life() -> None:
    """The host gave the slot up although its store had not ended: the store is a reader like any other."""
    bench = Bench(slots=1)
    old, new = payload(1), payload(2)
    ref = bench.resident(old)
    blocker = bench.device.stream()
    blocker.kernel(50.0, lambda: None)
    bench.tier.written(ref, blocker.record())
    bench.tier.submit_read([TransferItem(ref, named(old), bench.landing(0))], NEVER, bench.sink)
    bench.tier.release(ref)
    loaded, later = bench.tier.reserve(8), Sink()
    item = TransferItem(loaded, named(new), bench.filled_landing(1, new))
    bench.tier.submit_write([item], NEVER, later)
    bench.advance(51.5)
    assert bytes(bench.landing(0).body) == bytes(tensor_bytes(old))
    # The slot lives another life: the store's bytes are whole, and still nobody may believe them.
    assert bench.sink.outcome == {0: Reason.RECYCLED_DESTINATION}
    assert later.outcome == {}
    bench.advance(1.0)
    assert later.outcome == {0: None}


def test_a_load_waits_for_a_writer_that_was_cancelled_on_the_host_only() -> None:
    """The request is gone and its slot given up, but its kernel still runs and would write over what was
    loaded."""
    bench = Bench(slots=1)
    new = payload(2)
    ref = bench.tier.reserve(7)
    bench.tier.adopt(ref)
    bench.compute.kernel(20.0, partial(bench.tier.view(ref).fill_, 1.0))
    bench.tier.written(ref, bench.compute.record())
    bench.tier.release(ref)
    loaded = bench.tier.reserve(8)
    item = TransferItem(loaded, named(new), bench.filled_landing(0, new))
    bench.tier.submit_write([item], NEVER, bench.sink)
    bench.advance(20.5)
    assert bench.sink.outcome == {}
    bench.advance(1.0)
    assert bench.sink.outcome == {0: None}
    bench.tier.publish(loaded)
    assert torch.equal(bench.tier.view(loaded), new)


def test_nothing_is_published_before_its_visibility_event() -> None:
    bench = Bench()
    data = payload(3)
    ref = bench.tier.reserve(7)
    item = TransferItem(ref, named(data), bench.filled_landing(0, data))
    bench.tier.submit_write([item], NEVER, bench.sink)
    for _ in range(2):
        refused(Reason.NOT_VISIBLE, bench.tier.publish, ref)
        refused(Reason.NOT_VISIBLE, bench.tier.view, ref)
        bench.advance(COPY * 0.4)
    bench.advance(COPY)
    bench.tier.publish(ref)
    assert torch.equal(bench.tier.view(ref), data)


def test_a_late_copy_is_over_for_its_caller_and_its_slot_stays_quarantined_until_it_is_drained() -> None:
    bench = Bench(seconds=10.0)
    data = payload(3)
    ref = bench.tier.reserve(7)
    item = TransferItem(ref, named(data), bench.filled_landing(0, data))
    bench.tier.submit_write([item], 5.0, bench.sink)
    bench.advance(5.0)
    assert (bench.sink.outcome, bench.sink.drained_items) == ({0: Reason.DEADLINE}, [])
    bench.tier.quarantine(ref)
    bench.advance(5.0)
    assert bench.sink.drained_items == [0]
    # The bytes are all there now, and the slot is published by nobody.
    assert bench.tier.slots.state(ref) is SlotState.QUARANTINED
    refused(Reason.NOT_VISIBLE, bench.tier.publish, ref)
    bench.tier.release(ref)


def test_a_copy_that_ended_in_time_but_was_seen_late_is_late() -> None:
    bench = Bench()
    data = payload(3)
    ref = bench.tier.reserve(7)
    item = TransferItem(ref, named(data), bench.filled_landing(0, data))
    bench.tier.submit_write([item], 5.0, bench.sink)
    bench.advance(6.0)
    assert (bench.sink.outcome, bench.sink.drained_items) == ({0: Reason.DEADLINE}, [0])


def test_a_full_queue_refuses_a_whole_batch_before_anything_starts() -> None:
    bench = Bench(depth=3)
    refs = [bench.resident(payload(seed)) for seed in range(4)]
    items = [
        TransferItem(ref, named(payload(seed)), bench.landing(2 * seed)) for seed, ref in enumerate(refs)
    ]
    bench.tier.submit_read(items[:2], NEVER, bench.sink)
    started, other = bench.tier.copies_started, Sink()
    error = refused(Reason.QUEUE_FULL, bench.tier.submit_read, items[2:], NEVER, other)
    assert error.facts == {"in_flight": "2", "limit": "3", "wanted": "2"}
    assert (other.outcome, bench.tier.copies_started) == ({}, started)
    bench.advance(2 * COPY)
    bench.tier.submit_read(items[2:], NEVER, other)
    bench.advance(2 * COPY)
    assert (bench.sink.outcome, other.outcome) == ({0: None, 1: None}, {0: None, 1: None})


@pytest.mark.parametrize(
    ("slots", "places", "copies"),
    [
        ([0, 1, 2, 3], [0, 1, 2, 3], 1),
        ([0, 1, 2, 3], [4, 5, 7, 8], 2),
        ([0, 2, 1, 3], [0, 1, 2, 3], 4),
        ([1, 2, 0], [0, 1, 2], 2),
        ([3, 2, 1, 0], [3, 2, 1, 0], 4),
    ],
    ids=["all neighbours", "a gap in the landings", "slots out of order", "two runs", "descending"],
)
@pytest.mark.parametrize("way", ["store", "load"])
def test_vllm_38460_neighbouring_blocks_are_one_copy(
    way: str, slots: list[int], places: list[int], copies: int
) -> None:
    bench = Bench()
    taken = [bench.tier.reserve(seed) for seed in range(4)]
    by_slot = {ref.slot: ref for ref in taken}
    data = {slot: payload(slot) for slot in slots}
    items = []
    for slot, place in zip(slots, places, strict=True):
        ref, block = by_slot[slot], data[slot]
        if way == "store":
            bench.tier.write(ref, block, named(block))
            bench.tier.validate(ref, named(block))
            bench.tier.publish(ref)
            items.append(TransferItem(ref, named(block), bench.landing(place)))
        else:
            items.append(TransferItem(ref, named(block), bench.filled_landing(place, block)))
    (bench.tier.submit_read if way == "store" else bench.tier.submit_write)(items, NEVER, bench.sink)
    assert bench.tier.copies_started == copies
    bench.device.drain()
    bench.tier.poll()
    # The clock ran past nobody's deadline; each item is told on its own.
    assert bench.sink.outcome == dict.fromkeys(range(len(items)))
    for slot, place in zip(slots, places, strict=True):
        if way == "store":
            assert bytes(bench.landing(place).body) == bytes(tensor_bytes(data[slot]))
        else:
            bench.tier.publish(by_slot[slot])
            assert torch.equal(bench.tier.view(by_slot[slot]), data[slot])


def test_one_bad_item_of_a_batch_does_not_touch_the_others() -> None:
    bench = Bench()
    good, gone = bench.resident(payload(1)), bench.resident(payload(2))
    bench.tier.release(gone)
    short = Landing(bench.landing(3).body[:-4])
    items = [
        TransferItem(gone, named(payload(2)), bench.landing(0)),
        TransferItem(good, named(payload(1)), bench.landing(1)),
        TransferItem(good, named(payload(2)), bench.landing(2)),
        TransferItem(good, named(payload(1)), short),
    ]
    bench.tier.submit_read(items, NEVER, bench.sink)
    bench.advance(5 * COPY)
    assert bench.sink.outcome == {
        0: Reason.RECYCLED_DESTINATION,
        1: None,
        2: Reason.CHECKSUM_MISMATCH,
        3: Reason.SHORT_COPY,
    }
    assert sorted(bench.sink.drained_items) == [0, 1, 2, 3]


def test_closing_ends_each_item_for_its_caller_and_drains_it_later() -> None:
    bench = Bench()
    ref = bench.resident(payload(1))
    item = TransferItem(ref, named(payload(1)), bench.landing(0))
    bench.tier.submit_read([item], NEVER, bench.sink)
    bench.tier.close()
    assert (bench.sink.outcome, bench.sink.drained_items) == ({0: Reason.STORAGE_UNAVAILABLE}, [])
    late = Sink()
    bench.tier.submit_read([item], NEVER, late)
    assert (late.outcome, late.drained_items) == ({0: Reason.STORAGE_UNAVAILABLE}, [0])
    bench.advance(2 * COPY)
    assert bench.sink.drained_items == [0]


def test_a_deletion_zeroes_a_slot_after_its_last_reader() -> None:
    bench = Bench()
    ref, gone = bench.resident(payload(1)), bench.resident(payload(2))
    bench.tier.release(gone)
    view = bench.tier.view(ref)
    seen: list[torch.Tensor] = []
    bench.compute.kernel(20.0, lambda: seen.append(view.clone()))
    bench.tier.reader_done(ref, bench.compute.record())
    bench.tier.submit_erase([EraseItem(ref=ref), EraseItem(ref=gone)], NEVER, bench.sink)
    assert bench.sink.outcome == {1: Reason.RECYCLED_DESTINATION}
    bench.advance(25.0)
    assert torch.equal(seen[0], payload(1))
    assert bench.sink.outcome == {0: None, 1: Reason.RECYCLED_DESTINATION}
    assert not view.any()


def test_a_pool_with_streams_is_no_landing_that_would_go_past_them() -> None:
    bench = Bench()
    refused(Reason.TIER_INCAPABLE, bench.tier.landing, bench.resident(payload(1)))
    inline = GpuTier("hbm", LAYOUT, 1, device=CPU)
    assert len(inline.landing(inline.reserve(7)).body) == LAYOUT.payload_bytes


def test_host_memory_ends_a_batch_before_the_call_returns() -> None:
    tier = GpuTier("hbm", LAYOUT, 2, device=CPU)
    data, sink = payload(1), Sink()
    ref = tier.reserve(7)
    body = memoryview(bytearray(tensor_bytes(data)))
    tier.submit_write([TransferItem(ref, named(data), Landing(body))], 0.0, sink)
    assert sink.drained_items == [0]
    tier.publish(ref)
    assert torch.equal(tier.view(ref), data)
    pending = FakeDevice().stream()
    pending.kernel(1.0, lambda: None)
    with pytest.raises(RuntimeError, match="not passed"):
        InlineStream().wait(pending.record())


@settings(max_examples=150, deadline=None)
@given(
    writers=st.lists(st.floats(0.0, 5.0), min_size=1, max_size=4),
    readers=st.lists(st.floats(0.0, 5.0), max_size=3),
    copy=st.floats(0.1, 5.0),
    steps=st.lists(st.floats(0.0, 3.0), max_size=6),
)
def test_under_any_delays_stores_and_readers_see_final_rows(
    writers: list[float], readers: list[float], copy: float, steps: list[float]
) -> None:
    """Write, read and store one life of a slot, load the next: whatever takes how long, each sees its own."""
    bench = Bench(slots=1, seconds=copy)
    old, new = payload(1), payload(2)
    ref = bench.tier.reserve(7)
    bench.tier.adopt(ref)
    view = bench.tier.view(ref)
    for number, seconds in enumerate(writers):
        rows = old if number == len(writers) - 1 else torch.zeros_like(old)
        bench.compute.kernel(seconds, partial(view.copy_, rows))
    bench.tier.written(ref, bench.compute.record())
    seen: list[torch.Tensor] = []
    streams = [bench.device.stream() for _ in readers]
    written = bench.compute.record()
    for stream, seconds in zip(streams, readers, strict=True):
        stream.wait(written)
        stream.kernel(seconds, lambda: seen.append(view.clone()))
        bench.tier.reader_done(ref, stream.record())
    bench.tier.submit_read([TransferItem(ref, named(old), bench.landing(0))], NEVER, bench.sink)
    for seconds in steps:
        bench.advance(seconds)
    bench.tier.release(ref)
    loaded, later = bench.tier.reserve(8), Sink()
    item = TransferItem(loaded, named(new), bench.filled_landing(1, new))
    bench.tier.submit_write([item], NEVER, later)
    bench.device.drain()
    bench.tier.poll()
    assert bytes(bench.landing(0).body) == bytes(tensor_bytes(old))
    assert len(seen) == len(readers)
    assert all(torch.equal(rows, old) for rows in seen)
    assert later.outcome == {0: None}
    bench.tier.publish(loaded)
    assert torch.equal(bench.tier.view(loaded), new)
