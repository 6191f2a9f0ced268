"""A node's plan: where the rows of the longest session lie, over which link, and what the probe measures."""

from __future__ import annotations

import dataclasses

import pytest

from kvtier_core.computeprobe import MAX_CHUNKS, ComputeFigures, measure_compute
from kvtier_core.layout import ChunkLayout
from kvtier_core.nodeplan import NodePlan, TierFigures, node_plan
from kvtier_core.schedules import Schedule
from kvtier_core.units import MIB, BytesPerSecond, FlopPerSecond
from tests.unit.core.builders import FakeClock

LAYERS, QUERY_HEADS = 4, 4
LAYOUT = ChunkLayout(2, 64, 16)
ROW_SECONDS = 1e-7
COMPUTE = ComputeFigures(ROW_SECONDS, FlopPerSecond(5e10))


def tier(
    name: str, slots: int, mib: float | None = 100.0, *, in_place: bool = True, rows: bool = True
) -> TierFigures:
    return TierFigures(name, in_place, slots, rows, None if mib is None else BytesPerSecond(mib * MIB))


GPU, DRAM = tier("gpu", 40), tier("dram", 80)
DISK = tier("disk", 4000, in_place=False)


def planned(*tiers: TierFigures, layers: int = LAYERS, compute: ComputeFigures = COMPUTE) -> NodePlan:
    plan = node_plan(layers, QUERY_HEADS, LAYOUT, tiers, compute)
    assert plan is not None
    return plan


@pytest.mark.parametrize(
    ("tiers", "context", "cold", "staging", "away"),
    [
        # 10 chunks of each of 4 layers, and nowhere else to go.
        pytest.param((GPU,), 10, 0, 0, "none", id="one-tier"),
        pytest.param((GPU, DRAM), 30, 20, 0, "dram", id="in-place-tiers"),
        # 7 * 4 + 2 * 6 = 40.
        pytest.param((GPU, tier("disk", 24, in_place=False)), 13, 6, 12, "disk", id="storage-below"),
        # A place for two slots of one chunk costs as much room as that chunk gives.
        pytest.param((GPU, tier("disk", 4, in_place=False)), 10, 0, 0, "disk", id="storage-too-small"),
        # Two slots carry 20 chunks at most, however large the storage is.
        pytest.param((GPU, DISK), 20, 20, 40, "disk", id="storage-without-end"),
        # The 20 chunks in host memory stay where they are read.
        pytest.param((GPU, DRAM, DISK), 40, 20, 40, "disk", id="three-tiers"),
        # A tier that is nobody's home gives its places to the slots.
        pytest.param(
            (GPU, tier("slots", 20, rows=False), tier("disk", 40, in_place=False)),
            20,
            10,
            20,
            "disk",
            id="staging-tier",
        ),
        # Memory that the host does not read is away too; 20 of its and the storage's chunks fit two slots.
        pytest.param(
            (tier("real", 40, in_place=False), tier("dram", 40), DISK), 20, 20, 40, "real,disk", id="device"
        ),
    ],
)
def test_the_longest_session_that_the_tiers_and_two_slots_can_carry(
    tiers: tuple[TierFigures, ...], context: int, cold: int, staging: int, away: str
) -> None:
    inputs = planned(*tiers).inputs
    tokens = LAYOUT.chunk_tokens
    assert int(inputs["contextTokens"]) == context * tokens
    assert int(inputs["coldTokens"]) == cold * tokens
    assert int(inputs["stagingBytes"]) == staging * LAYOUT.payload_bytes
    assert inputs["awayTiers"] == away
    assert len(inputs) <= 14, "the operator adds the node, and a status holds 16"
    assert all(len(value) <= 63 for value in inputs.values())


@pytest.mark.parametrize("layers", [1, 2, 3, 30])
@pytest.mark.parametrize("slots", [0, 29, 30, 95, 600])
@pytest.mark.parametrize("below", [1, 40, 5000])
def test_what_lies_away_has_a_legal_schedule_and_never_more_staging_than_there_is(
    layers: int, slots: int, below: int
) -> None:
    disk = tier("disk", below, in_place=False)
    plan = node_plan(layers, QUERY_HEADS, LAYOUT, (tier("gpu", slots), disk), COMPUTE, buffers=2)
    if plan is None:
        assert slots < layers and below < layers
        return
    cold = int(plan.inputs["coldTokens"]) // LAYOUT.chunk_tokens
    resident = int(plan.inputs["contextTokens"]) // LAYOUT.chunk_tokens - cold
    staging = int(plan.inputs["stagingBytes"]) // LAYOUT.payload_bytes
    assert resident * layers + staging == slots + 2
    assert cold <= below // layers
    assert (plan.schedule is None) == (cold == 0)
    assert plan.stall is not None


def test_the_stall_is_the_first_copy_and_what_computing_cannot_hide() -> None:
    plan = planned(GPU, tier("disk", 24, in_place=False))
    copy = 6 * LAYOUT.payload_bytes / (100 * MIB)
    compute = 13 * LAYOUT.chunk_tokens * ROW_SECONDS
    # Copies take longer than computing here, and layer l + 2 waits for the slot of layer l.
    assert plan.schedule == Schedule.LAYERWISE_TWO_SLOT
    assert plan.stall == pytest.approx(copy + (LAYERS - 1) * (copy - compute))


def test_rows_in_memory_that_is_read_in_place_are_not_copied() -> None:
    plan = node_plan(LAYERS, QUERY_HEADS, LAYOUT, (GPU, DRAM), COMPUTE, buffers=2)
    assert plan is not None and plan.schedule == Schedule.PARTITION_COMPUTE
    # A thousandth of what copying them would take: the states alone move.
    assert plan.stall is not None and plan.stall < 20 * LAYERS * LAYOUT.payload_bytes / (100 * MIB) / 1000


def test_two_storage_tiers_make_one_link_of_their_shares() -> None:
    """Of 20 chunks 5 come at 100 MiB/s and 15 at 50 MiB/s."""
    fast, slow = tier("fast", 20, in_place=False), tier("slow", 4000, 50.0, in_place=False)
    link = planned(GPU, fast, slow).link
    assert link is not None
    assert link.value == pytest.approx(20 / (5 / 100 + 15 / 50) * MIB)


@pytest.mark.parametrize(
    ("tiers", "reason"),
    [
        pytest.param((GPU, tier("disk", 24, None, in_place=False)), "UNMEASURED", id="link-not-measured"),
        pytest.param((GPU, tier("disk", 0, in_place=False)), "NOTHING_AWAY", id="nothing-away"),
    ],
)
def test_a_plan_without_a_schedule_says_why(tiers: tuple[TierFigures, ...], reason: str) -> None:
    plan = planned(*tiers)
    assert plan.schedule is None
    assert plan.inputs["reason"] == reason
    assert (plan.stall is None) == (reason == "UNMEASURED")


def test_kappa_is_left_to_whoever_knows_the_models_arithmetic() -> None:
    plan = planned(GPU, DISK)
    assert plan.kappa is None
    assert plan.inputs["prefillFlopPerToken"].startswith("not stated")
    assert plan.bytes_per_token == LAYERS * LAYOUT.row_bytes
    assert plan.compute == COMPUTE.flops


def test_nothing_is_said_without_room_or_without_a_measurement() -> None:
    assert node_plan(LAYERS, QUERY_HEADS, LAYOUT, (tier("gpu", LAYERS - 1),), COMPUTE) is None
    unknown = dataclasses.replace(COMPUTE, row_seconds=None)
    assert node_plan(LAYERS, QUERY_HEADS, LAYOUT, (GPU,), unknown) is None


@pytest.mark.parametrize("chunk", [64, 80], ids=["in-place", "padded"])
def test_the_probe_divides_a_rounds_time_by_its_rows_and_its_arithmetic(chunk: int) -> None:
    """Each reading of the clock is a millisecond after the last, so every round takes one."""
    figures = measure_compute(ChunkLayout(2, chunk, 16), QUERY_HEADS, FakeClock(tick=0.001))
    assert figures.row_seconds == pytest.approx(0.001 / (MAX_CHUNKS * chunk))
    assert figures.flops is not None
    assert figures.flops.value == pytest.approx(2 * 128 * 512 * 512 / 0.001)


def test_a_clock_that_stands_measures_nothing_and_the_probe_ends() -> None:
    clock = FakeClock()
    assert measure_compute(LAYOUT, QUERY_HEADS, clock) == ComputeFigures(None, None)


def test_the_probe_ends_when_rounds_take_long_and_counts_the_least_of_them() -> None:
    """Rounds of 3, 1 and 2 seconds: no round is begun after the third."""
    readings = iter([0.0, 3.0, 10.0, 11.0, 20.0, 22.0] * 2)
    figures = measure_compute(LAYOUT, QUERY_HEADS, lambda: next(readings))
    assert figures.row_seconds == pytest.approx(1.0 / (MAX_CHUNKS * LAYOUT.chunk_tokens))
    assert list(readings) == []


def test_a_model_of_two_layers_copies_each_when_it_is_reached() -> None:
    """Two slots would hold both layers: nothing is gained. One of 12 chunks beside 14 of each layer: 40."""
    plan = planned(GPU, tier("disk", 24, in_place=False), layers=2)
    tokens = LAYOUT.chunk_tokens
    assert plan.schedule == Schedule.ON_DEMAND_BLOCKS
    assert (plan.inputs["coldTokens"], plan.inputs["contextTokens"]) == (str(12 * tokens), str(26 * tokens))
    assert plan.stall == pytest.approx(2 * 12 * LAYOUT.payload_bytes / (100 * MIB))
