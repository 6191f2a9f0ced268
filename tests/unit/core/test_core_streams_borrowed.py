"""A pool that belongs to an engine: adopted slot by slot at its allocations, never guessed, never zeroed."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from kvtier_core.errors import Reason
from kvtier_core.layout import ChunkLayout
from kvtier_core.tiers.base import seal_checksum, tensor_bytes
from kvtier_core.tiers.gpu import GpuOptions, GpuTier
from kvtier_core.tiers.transfer import EraseItem, Landing, TransferItem
from tests.unit.core.fake_streams import FakeDevice
from tests.unit.core.test_core_streams_order import LAYOUT, NEVER, Sink, named, payload, refused


class Engine:
    """An allocator with a pool: each allocation and each release of a slot moves its generation on."""

    def __init__(self, slots: int = 3) -> None:
        self.device = FakeDevice()
        self.compute = self.device.stream()
        self.pool = torch.zeros((slots, *LAYOUT.shape))
        self.generations = [0] * slots
        self.tier = GpuTier.borrow(
            "hbm",
            LAYOUT,
            self.pool,
            self,
            clock=self.device.clock,
            options=GpuOptions(self.device.stream(1.0), self.device.stream(1.0)),
        )

    def generation(self, slot: int) -> int:
        return self.generations[slot]

    def allocate(self, slot: int) -> int:
        self.generations[slot] += 1
        return self.generations[slot]


def landing() -> Landing:
    return Landing(memoryview(bytearray(LAYOUT.payload_bytes)))


def test_a_store_of_an_engines_slot_waits_for_the_engines_kernels_and_leaves_its_rows_alone() -> None:
    engine = Engine()
    data, sink, target = payload(1), Sink(), landing()
    allocation = engine.allocate(1)
    engine.compute.kernel(10.0, partial(engine.pool[1].copy_, data))
    ref = engine.tier.adopt_allocation(1, 7, allocation, engine.compute.record())
    engine.tier.submit_read([TransferItem(ref, named(data), target)], NEVER, sink)
    engine.device.advance(12.0)
    engine.tier.poll()
    assert sink.outcome == {0: None}
    assert bytes(target.body) == bytes(tensor_bytes(data))
    engine.tier.release(ref)
    assert torch.equal(engine.pool[1], data)
    assert engine.tier.slots.used == 0


def test_a_load_into_an_engines_slot_is_seen_by_the_engine() -> None:
    engine = Engine()
    data, sink = payload(1), Sink()
    ref = engine.tier.adopt_allocation(2, 7, engine.allocate(2))
    source = Landing(memoryview(bytearray(tensor_bytes(data))))
    engine.tier.submit_write([TransferItem(ref, named(data), source)], NEVER, sink)
    refused(Reason.NOT_VISIBLE, engine.tier.publish, ref)
    engine.device.advance(2.0)
    engine.tier.poll()
    engine.tier.publish(ref)
    assert torch.equal(engine.pool[2], data)


@pytest.mark.parametrize("load", [False, True], ids=["store", "load"])
def test_vllm_46951_a_slot_the_engine_gives_away_while_a_copy_runs_is_refused(load: bool) -> None:
    engine = Engine()
    data, sink = payload(1), Sink()
    engine.pool[1].copy_(data)
    allocation = engine.allocate(1)
    item = Landing(memoryview(bytearray(tensor_bytes(data))))
    if load:
        ref = engine.tier.adopt_allocation(1, 7, allocation)
        engine.tier.submit_write([TransferItem(ref, named(data), item)], NEVER, sink)
    else:
        ref = engine.tier.adopt_allocation(1, 7, allocation, engine.compute.record())
        engine.tier.submit_read([TransferItem(ref, named(data), item)], NEVER, sink)
    engine.allocate(1)
    engine.device.advance(2.0)
    engine.tier.poll()
    assert sink.outcome == {0: Reason.RECYCLED_DESTINATION}
    for call in (engine.tier.publish, engine.tier.view, engine.tier.quarantine):
        refused(Reason.RECYCLED_DESTINATION, call, ref)
    # Our side of the adoption still ends, once.
    engine.tier.release(ref)
    refused(Reason.RECYCLED_DESTINATION, engine.tier.release, ref)
    again = engine.tier.adopt_allocation(1, 8, engine.generations[1])
    assert again != ref


def test_a_deletion_does_not_write_into_the_engines_memory() -> None:
    engine = Engine()
    engine.pool[1].copy_(payload(1))
    ref = engine.tier.adopt_allocation(1, 7, engine.allocate(1), engine.compute.record())
    sink = Sink()
    engine.tier.submit_erase([EraseItem(ref=ref)], NEVER, sink)
    engine.device.advance(5.0)
    engine.tier.poll()
    assert sink.outcome == {0: None}
    assert torch.equal(engine.pool[1], payload(1))


def test_an_allocation_is_adopted_once_and_only_as_it_is() -> None:
    engine = Engine()
    allocation = engine.allocate(0)
    refused(Reason.RECYCLED_DESTINATION, engine.tier.adopt_allocation, 0, 7, allocation - 1)
    refused(Reason.RECYCLED_DESTINATION, engine.tier.adopt_allocation, 3, 7, 0)
    engine.tier.adopt_allocation(0, 7, allocation)
    refused(Reason.RECYCLED_DESTINATION, engine.tier.adopt_allocation, 0, 8, allocation)
    refused(Reason.TIER_INCAPABLE, engine.tier.reserve, 7)
    own = GpuTier("own", LAYOUT, 1, device=torch.device("cpu"))
    refused(Reason.TIER_INCAPABLE, own.adopt_allocation, 0, 7, 0)


@pytest.mark.parametrize(
    "pool",
    [
        torch.zeros((3, 2, 16, 2, 16)),
        torch.zeros((3, *LAYOUT.shape), dtype=torch.float64),
        torch.zeros((3, 2, 2, 16, 32))[..., ::2],
        torch.zeros(5),
        torch.zeros(()),
    ],
    ids=["token major", "float64", "strided", "flat", "scalar"],
)
def test_lmcache_4463_a_pool_of_another_layout_is_refused_not_guessed(pool: torch.Tensor) -> None:
    refused(Reason.GEOMETRY_MISMATCH, GpuTier.borrow, "hbm", LAYOUT, pool, Engine())


def test_a_borrowed_slot_off_page_bounds_is_no_landing_for_storage() -> None:
    odd = ChunkLayout(kv_heads=1, chunk_tokens=16, head_dim=20)
    engine = Engine()
    tier = GpuTier.borrow("hbm", odd, torch.zeros((3, *odd.shape)), engine)
    ref = tier.adopt_allocation(0, 7, engine.allocate(0))
    assert "whole pages" in refused(Reason.TIER_INCAPABLE, tier.landing, ref).message
    assert seal_checksum(tier.payload(0)) == seal_checksum(torch.zeros(odd.shape))
