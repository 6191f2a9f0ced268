"""Measured tiers, paths and plans: each number redone by hand on a clock that is chosen."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier_core.cacheplan import PlanInputs, plan_cache
from kvtier_core.cost import KvGeometry
from kvtier_core.errors import CoreError, Reason
from kvtier_core.measure import MAX_ROUNDS, measure, measure_memmove, measure_path
from kvtier_core.schedules import Schedule
from kvtier_core.tiers.base import SlotState, Tier
from kvtier_core.tiers.cpu import CpuTier
from kvtier_core.tiers.fileops import OsFileOps
from kvtier_core.tiers.nvme import NvmeTier
from kvtier_core.units import GIB, MIB, BytesPerSecond, FlopPerSecond, FlopPerToken
from tests.unit.core.builders import FakeClock
from tests.unit.core.remote_double import READ_SECONDS, RemoteTier, VirtualTime
from tests.unit.core.test_core_memory_contract import PLACES, Place, cpu
from tests.unit.core.test_core_pipeline import VirtualWaiter
from tests.unit.core.test_core_streams_order import LAYOUT


class PlaceWaiter:
    """Waiting is what lets the place's time pass."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def wait(self, seconds: float) -> None:
        self._place.advance(min(seconds, READ_SECONDS / 2))

    def notify(self) -> None:
        pass


def test_a_tier_is_measured_with_every_copy_it_made_and_leaves_no_slot() -> None:
    clock = FakeClock(tick=0.001)
    tier = CpuTier("ram", LAYOUT, 1)
    measure(tier, clock)
    assert tier.measured.read_bytes_per_second == pytest.approx(LAYOUT.payload_bytes / 0.001)
    assert tier.measured.write_bytes_per_second == pytest.approx(LAYOUT.payload_bytes / 0.001)
    assert tier.slots.used == 0
    tier.close()


@pytest.mark.parametrize("name", [name for name in PLACES if name != "cpu"])
def test_a_path_is_as_fast_as_its_slower_end(name: str) -> None:
    """50 ms a block, whichever end they are spent at."""
    place = PLACES[name]()
    ram = CpuTier("ram", LAYOUT, 2, clock=place.now)
    out = measure_path(place.tier, ram, place.now, PlaceWaiter(place))
    back = measure_path(ram, place.tier, place.now, PlaceWaiter(place))
    for rate in (out, back):
        assert rate.value == pytest.approx(LAYOUT.payload_bytes / READ_SECONDS, rel=0.5)
    assert (place.tier.slots.used, ram.slots.used) == (0, 0)
    ram.close()


def test_a_path_of_storage_is_read_straight_into_host_memory(tmp_path: Path) -> None:
    clock = FakeClock(tick=0.0001)
    flash = NvmeTier("flash", LAYOUT, 4, folder=tmp_path, file_key="cache", files=OsFileOps())
    ram = CpuTier("ram", LAYOUT, 2)
    for source, target in ((flash, ram), (ram, flash)):
        assert measure_path(source, target, clock).value > 0
    assert (flash.slots.used, ram.slots.used) == (0, 0)
    flash.close()
    ram.close()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("break", Reason.STORAGE_UNAVAILABLE),
        ("hang", Reason.DEADLINE),
        ("full", Reason.NO_DESTINATION_CAPACITY),
    ],
)
def test_a_path_that_fails_is_a_typed_refusal_and_gives_its_slots_back(fault: str, reason: Reason) -> None:
    time = VirtualTime()
    tier: Tier = RemoteTier(LAYOUT, 2, time)
    assert isinstance(tier, RemoteTier)
    ram = CpuTier("ram", LAYOUT, 1, clock=time.clock)
    if fault == "break":
        tier.weather.fail_after = 10
    elif fault == "hang":
        tier.weather.hang = 100.0
    else:
        ram.reserve(1)
    used = ram.slots.used
    with pytest.raises(CoreError) as error:
        measure_path(tier, ram, time.clock, VirtualWaiter(time))
    assert error.value.reason is reason
    assert tier.slots.used == 0
    if fault == "hang":
        # Bytes may still arrive in the target's slot: it is nobody's until they have.
        assert ram.slots.used == used + 1
        assert int(ram.slots._state[0]) == SlotState.QUARANTINED
    else:
        assert ram.slots.used == used
    ram.close()


def test_the_floor_counts_what_was_moved() -> None:
    ticks = FakeClock(tick=0.5)
    rate = measure_memmove(1 << 20, ticks)
    assert rate is not None
    assert rate.value == pytest.approx((8 << 20) / 0.5)
    assert measure_memmove(1 << 20, FakeClock()) is None
    small = measure_memmove(4096, FakeClock(tick=0.5))
    assert small is not None
    assert small.value == pytest.approx(MAX_ROUNDS * 4096 / 0.5)


def test_a_place_for_every_name() -> None:
    assert set(PLACES) == {"cpu", "gpu in stream order", "remote"}
    assert cpu().inline


GEOMETRY = KvGeometry(layers=4, query_heads=8, kv_heads=8, head_dim=128, k_bytes=2, v_bytes=2)
INPUTS = PlanInputs(
    geometry=GEOMETRY,
    context=4096,
    resident=1024,
    block_tokens=64,
    link=BytesPerSecond.gib(24),
    setup=0.1e-3,
    row_seconds=0.2e-6,
    staging=32 * MIB,
    prefill=FlopPerToken(12.890625e9),
    compute=FlopPerSecond.tera(300),
)


def test_a_plan_states_its_numbers_and_what_they_came_from() -> None:
    plan = plan_cache(INPUTS)
    fetch = 0.1e-3 + 3072 * 4096 / (24 * GIB)
    assert plan.kappa == pytest.approx(67.584, abs=5e-4)
    assert plan.schedule == Schedule.LAYERWISE_TWO_SLOT.value
    assert plan.stall == pytest.approx(fetch)
    assert plan.refused == {}
    assert plan.inputs["coldTokens"] == "3072"
    assert float(plan.inputs["linkBytesPerSecond"]) == pytest.approx(24 * GIB, rel=1e-5)
    assert float(plan.inputs["serviceSeconds"]) == pytest.approx(fetch + 4 * 4096 * 0.2e-6, rel=1e-5)
    # What a status takes: at most 16 inputs of at most 63 characters.
    assert len(plan.inputs) <= 16
    assert all(len(name) <= 63 and len(value) <= 63 for name, value in plan.inputs.items())


def test_a_plan_without_a_measured_link_says_so_and_has_no_numbers() -> None:
    import dataclasses

    plan = plan_cache(dataclasses.replace(INPUTS, link=None))
    assert (plan.kappa, plan.stall, plan.schedule) == (None, None, None)
    assert plan.inputs["linkBytesPerSecond"] == "not measured"
    assert set(plan.refused.values()) == {"UNMEASURED"}
    near = plan_cache(dataclasses.replace(INPUTS, near_seconds=0.1e-6))
    assert near.schedule == Schedule.PARTITION_COMPUTE.value
    with pytest.raises(CoreError) as error:
        plan_cache(dataclasses.replace(INPUTS, resident=4097))
    assert error.value.reason is Reason.COST_MODEL
