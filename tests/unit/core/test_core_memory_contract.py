"""One contract of batches for every tier that is no storage: inline, in stream order, or 50 ms away."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from kvtier_core.errors import Reason
from kvtier_core.tiers.base import SlotRef, SlotState, Tier, seal_checksum, slot_stride, tensor_bytes
from kvtier_core.tiers.cpu import CpuTier
from kvtier_core.tiers.gpu import GpuOptions, GpuTier
from kvtier_core.tiers.transfer import Landing, TransferItem
from tests.unit.core.fake_streams import FakeDevice
from tests.unit.core.remote_double import READ_SECONDS, RemoteTier, VirtualTime
from tests.unit.core.test_core_streams_order import LAYOUT, Sink, named, payload, refused


@dataclass
class Place:
    """A tier and the time it lives in."""

    tier: Tier
    advance: Callable[[float], None]
    now: Callable[[], float]
    inline: bool


def cpu() -> Place:
    time = VirtualTime()
    return Place(CpuTier("ram", LAYOUT, 4, clock=time.clock), time.advance, time.clock, inline=True)


def gpu() -> Place:
    device = FakeDevice()
    options = GpuOptions(device.stream(READ_SECONDS), device.stream(READ_SECONDS))
    tier = GpuTier("hbm", LAYOUT, 4, device=torch.device("cpu"), clock=device.clock, options=options)

    def advance(seconds: float) -> None:
        device.advance(seconds)
        tier.poll()

    return Place(tier, advance, device.clock, inline=False)


def remote() -> Place:
    time = VirtualTime()
    return Place(RemoteTier(LAYOUT, 4, time), time.advance, time.clock, inline=False)


PLACES = {"cpu": cpu, "gpu in stream order": gpu, "remote": remote}


@pytest.fixture(params=PLACES.values(), ids=PLACES.keys())
def place(request: pytest.FixtureRequest) -> Place:
    return request.param()  # type: ignore[no-any-return]


def landings(count: int) -> list[Landing]:
    stride = slot_stride(LAYOUT)
    view = memoryview(mmap.mmap(-1, count * stride))
    return [Landing(view[at * stride : at * stride + LAYOUT.payload_bytes]) for at in range(count)]


def stored(place: Place, count: int) -> list[SlotRef]:
    """`count` blocks written as one batch and published."""
    refs = [place.tier.reserve(seed) for seed in range(count)]
    sources = landings(count)
    for seed, source in enumerate(sources):
        source.body[:] = tensor_bytes(payload(seed))
    sink = Sink()
    items = [TransferItem(ref, named(payload(seed)), sources[seed]) for seed, ref in enumerate(refs)]
    place.tier.submit_write(items, place.now() + 1.0, sink)
    if not place.inline:
        assert sink.outcome == {}
        for ref in refs:
            refused(Reason.NOT_VISIBLE, place.tier.publish, ref)
    place.advance(0.5)
    assert sink.outcome == dict.fromkeys(range(count))
    assert sorted(sink.drained_items) == list(range(count))
    for ref in refs:
        assert place.tier.slots.state(ref) is SlotState.VALIDATED
        place.tier.publish(ref)
    return refs


def test_a_batch_goes_out_and_comes_back(place: Place) -> None:
    refs = stored(place, 3)
    targets, sink = landings(3), Sink()
    items = [TransferItem(ref, named(payload(seed)), targets[seed]) for seed, ref in enumerate(refs)]
    place.tier.submit_read(items, place.now() + 1.0, sink)
    place.advance(0.5)
    assert sink.outcome == dict.fromkeys(range(3))
    for seed, target in enumerate(targets):
        assert bytes(target.body) == bytes(tensor_bytes(payload(seed)))


def test_every_item_is_told_on_its_own_and_drained_after(place: Place) -> None:
    refs = stored(place, 3)
    place.tier.release(refs[1])
    targets, sink = landings(3), Sink()
    identities = [named(payload(0)), named(payload(1)), named(payload(9))]
    items = [TransferItem(*parts) for parts in zip(refs, identities, targets, strict=True)]
    place.tier.submit_read(items, place.now() + 1.0, sink)
    place.advance(0.5)
    assert sink.outcome == {0: None, 1: Reason.RECYCLED_DESTINATION, 2: Reason.CHECKSUM_MISMATCH}
    assert sorted(sink.drained_items) == [0, 1, 2]


def test_what_is_asked_for_too_late_is_late(place: Place) -> None:
    (ref,) = stored(place, 1)
    sink = Sink()
    item = TransferItem(ref, named(payload(0)), landings(1)[0])
    place.tier.submit_read([item], place.now(), sink)
    place.advance(0.5)
    assert sink.outcome == {0: Reason.DEADLINE}
    assert sink.drained_items == [0]


def test_a_late_write_publishes_nothing(place: Place) -> None:
    sink = Sink()
    ref = place.tier.reserve(1)
    source = landings(1)[0]
    source.body[:] = tensor_bytes(payload(1))
    place.tier.submit_write([TransferItem(ref, named(payload(1)), source)], place.now(), sink)
    place.tier.quarantine(ref)
    place.advance(0.5)
    assert sink.outcome == {0: Reason.DEADLINE}
    assert sink.drained_items == [0]
    refused(Reason.NOT_VISIBLE, place.tier.publish, ref)
    place.tier.release(ref)


# Only far away.


def far() -> tuple[Place, RemoteTier]:
    place = remote()
    assert isinstance(place.tier, RemoteTier)
    return place, place.tier


def test_a_read_that_breaks_halfway_is_no_block_and_the_next_try_is() -> None:
    place, tier = far()
    refs = stored(place, 2)
    targets, sink = landings(2), Sink()
    tier.weather.fail_after = LAYOUT.payload_bytes // 2
    items = [TransferItem(ref, named(payload(at)), targets[at]) for at, ref in enumerate(refs)]
    tier.submit_read(items, place.now() + 1.0, sink)
    place.advance(READ_SECONDS * 0.9)
    assert sink.outcome == {}
    place.advance(READ_SECONDS * 0.2)
    assert sink.outcome == {0: Reason.STORAGE_UNAVAILABLE}
    half = LAYOUT.payload_bytes // 2
    assert bytes(targets[0].body[:half]) == bytes(tensor_bytes(payload(0))[:half])
    place.advance(READ_SECONDS)
    assert sink.outcome == {0: Reason.STORAGE_UNAVAILABLE, 1: None}
    again = Sink()
    tier.submit_read(items[:1], place.now() + 1.0, again)
    place.advance(READ_SECONDS)
    assert again.outcome == {0: None}
    assert seal_checksum(torch.frombuffer(targets[0].body, dtype=torch.float32)) == named(payload(0)).checksum


def test_a_read_that_hangs_is_late_at_once_and_drained_when_it_ends() -> None:
    place, tier = far()
    (ref,) = stored(place, 1)
    target, sink = landings(1)[0], Sink()
    tier.weather.hang = 60.0
    tier.submit_read([TransferItem(ref, named(payload(0)), target)], place.now() + 1.0, sink)
    place.advance(1.0)
    assert (sink.outcome, sink.drained_items) == ({0: Reason.DEADLINE}, [])
    # Until it is drained, bytes may still land here: nobody else may be given this buffer.
    assert not any(target.body)
    place.advance(60.0)
    assert any(target.body)
    assert (sink.outcome, sink.drained_items) == ({0: Reason.DEADLINE}, [0])


def test_a_queue_that_is_full_refuses_before_anything_starts() -> None:
    time = VirtualTime()
    tier = RemoteTier(LAYOUT, 4, time, queue_depth=2)
    place = Place(tier, time.advance, time.clock, inline=False)
    refs = stored(place, 2)
    targets, sink = landings(3), Sink()
    items = [TransferItem(refs[at % 2], named(payload(at % 2)), targets[at]) for at in range(3)]
    refused(Reason.QUEUE_FULL, tier.submit_read, items, 10.0, sink)
    place.advance(1.0)
    assert (sink.outcome, tier.weather.reads) == ({}, [])
