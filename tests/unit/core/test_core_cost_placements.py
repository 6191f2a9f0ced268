"""Six schedules priced alike, and placements that are never taken for one another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_core import exact_placements as places
from kvtier_core.cost import KvGeometry, fixed_staging
from kvtier_core.errors import CoreError, Reason
from kvtier_core.exact_placements import (
    ComputeSite,
    HeadGroup,
    HeadGroupStaging,
    InStorage,
    OverlapProfile,
    PlacementReason,
    PlacementRefused,
    RequestOnCpu,
)
from kvtier_core.schedules import Chosen, LayerWork, Machine, Rejected, Schedule, choose
from kvtier_core.units import GIB, MIB, BytesPerSecond

LINK = BytesPerSecond.gib(1)
MACHINE = Machine(link=LINK, setup=0.0, staging_bytes=GIB, kv_heads=8)


def layers(count: int = 4, cold: int = 16 * MIB, compute: float = 0.02, **more: object) -> list[LayerWork]:
    return [LayerWork(cold, 64, compute, **more)] * count  # type: ignore[arg-type]


def rejected(work: list[LayerWork], machine: Machine) -> dict[Schedule, Rejected | None]:
    return {item.schedule: item.rejected for item in choose(work, machine).considered}


def test_two_slots_win_where_overlap_pays_and_the_price_of_each_is_told() -> None:
    """F = 15.625 ms, C = 20 ms: two slots hide all but the first fetch, and need half of the staging of all
    layers."""
    choice = choose(layers(), MACHINE)
    assert choice.chosen.schedule is Schedule.LAYERWISE_TWO_SLOT
    assert choice.reason is Chosen.LEAST_STAGING_AT_EQUAL_SERVICE
    assert choice.chosen.service == pytest.approx(0.015625 + 4 * 0.02)
    assert choice.chosen.stall == pytest.approx(0.015625)
    assert choice.chosen.staging_bytes == fixed_staging([16 * MIB] * 4)
    told = {item.schedule: item for item in choice.considered}
    assert told[Schedule.BULK_RESTORE].service == pytest.approx(4 * 0.015625 + 4 * 0.02)
    assert told[Schedule.ON_DEMAND_BLOCKS].service == pytest.approx(4 * (0.015625 + 0.02))
    assert told[Schedule.LAYER_PRELOAD].service == pytest.approx(choice.chosen.service)
    assert told[Schedule.HEAD_STAGING].rejected is Rejected.TIER_INCAPABLE
    assert told[Schedule.PARTITION_COMPUTE].rejected is Rejected.TIER_INCAPABLE
    losers = [item for item in choice.considered if item is not choice.chosen]
    assert all(item.rejected is not None for item in losers)


CHOICES: dict[str, tuple[list[LayerWork], Machine, Schedule, Chosen]] = {
    "one setup is all that counts": (
        layers(cold=MIB, compute=0.0),
        replace(MACHINE, setup=1.0),
        Schedule.BULK_RESTORE,
        Chosen.LEAST_SERVICE,
    ),
    "a layer of nothing, then much: preload runs ahead": (
        [LayerWork(16 * MIB, 64, compute) for compute in (0.1, 0.1, 0.0, 0.0, 0.0)],
        MACHINE,
        Schedule.LAYER_PRELOAD,
        Chosen.LEAST_SERVICE,
    ),
    "staging for one layer's quarter only": (
        layers(),
        replace(MACHINE, staging_bytes=8 * MIB, head_group=2),
        Schedule.HEAD_STAGING,
        Chosen.ONLY_LEGAL,
    ),
    "staging for one layer and no slices": (
        layers(),
        replace(MACHINE, staging_bytes=16 * MIB),
        Schedule.ON_DEMAND_BLOCKS,
        Chosen.ONLY_LEGAL,
    ),
    "rows whose tier attends them in time stay there": (
        layers(near=0.001, state_bytes=8192),
        MACHINE,
        Schedule.PARTITION_COMPUTE,
        Chosen.LEAST_SERVICE,
    ),
    "rows whose tier is far, where sending the query costs more than moving rows": (
        layers(near=0.001, state_bytes=8192, sent_bytes=1 << 30),
        MACHINE,
        Schedule.LAYERWISE_TWO_SLOT,
        Chosen.LEAST_STAGING_AT_EQUAL_SERVICE,
    ),
    "rows whose tier attends slowly move": (
        layers(near=1.0, state_bytes=8192),
        MACHINE,
        Schedule.LAYERWISE_TWO_SLOT,
        Chosen.LEAST_STAGING_AT_EQUAL_SERVICE,
    ),
}


@pytest.mark.parametrize(("work", "machine", "schedule", "reason"), CHOICES.values(), ids=CHOICES.keys())
def test_each_schedule_is_chosen_where_it_is_best(
    work: list[LayerWork], machine: Machine, schedule: Schedule, reason: Chosen
) -> None:
    choice = choose(work, machine)
    assert (choice.chosen.schedule, choice.reason) == (schedule, reason)


def test_head_groups_halve_the_first_wait_and_stage_a_part_of_a_layer() -> None:
    machine = replace(MACHINE, head_group=2)
    choice = choose(layers(), machine)
    told = {item.schedule: item for item in choice.considered}
    heads = told[Schedule.HEAD_STAGING]
    # C5.16: ping-pong reserves twice a slice; the history that moves is the same.
    assert heads.staging_bytes == 2 * 4 * MIB
    assert heads.stall == pytest.approx(0.015625 / 4)
    assert choice.chosen is heads


def test_resident_layers_cost_no_transfer() -> None:
    work = [LayerWork(0, 0, 0.02)] * 3
    choice = choose(work, MACHINE)
    assert (choice.chosen.service, choice.chosen.stall, choice.chosen.staging_bytes) == (
        pytest.approx(0.06),
        0.0,
        0,
    )


def test_what_nobody_measured_prices_nothing() -> None:
    with pytest.raises(CoreError) as error:
        choose(layers(), replace(MACHINE, link=None))
    assert error.value.reason is Reason.NO_LEGAL_PATH
    assert set(error.value.facts.values()) == {"UNMEASURED"}


def test_no_schedule_in_time_is_no_legal_path_with_each_reason() -> None:
    with pytest.raises(CoreError) as error:
        choose(layers(), MACHINE, deadline=0.01)
    assert error.value.reason is Reason.NO_LEGAL_PATH
    assert error.value.facts == {
        "layerwiseTwoSlot": "DEADLINE",
        "layerPreload": "DEADLINE",
        "bulkRestore": "DEADLINE",
        "headStaging": "TIER_INCAPABLE",
        "onDemandBlocks": "DEADLINE",
        "partitionCompute": "TIER_INCAPABLE",
    }
    late = choose(layers(), MACHINE, deadline=0.1)
    reasons = {item.schedule: item.rejected for item in late.considered}
    assert reasons[Schedule.BULK_RESTORE] is Rejected.DEADLINE
    assert reasons[Schedule.LAYER_PRELOAD] is Rejected.SLOWER


def test_a_link_without_its_unit_is_refused() -> None:
    with pytest.raises(CoreError) as error:
        choose(layers(), replace(MACHINE, link=24e9))  # type: ignore[arg-type]
    assert error.value.reason is Reason.UNIT_MISMATCH


@settings(max_examples=200, deadline=None)
@given(
    work=st.lists(
        st.builds(
            LayerWork,
            cold_bytes=st.integers(0, 64 * MIB),
            blocks=st.integers(1, 64),
            compute=st.floats(0.0, 0.1),
        ),
        min_size=1,
        max_size=6,
    ),
    setup=st.floats(0.0, 0.01),
    group=st.sampled_from([None, 1, 2, 4, 8]),
)
def test_predictions_are_never_below_their_bounds_and_the_choice_is_the_least(
    work: list[LayerWork], setup: float, group: int | None
) -> None:
    choice = choose(work, replace(MACHINE, setup=setup, head_group=group))
    compute = sum(layer.compute for layer in work)
    wire = LINK.seconds(sum(layer.cold_bytes for layer in work))
    for item in choice.considered:
        if item.rejected is Rejected.TIER_INCAPABLE:
            continue
        assert item.service >= max(compute, wire) - 1e-9
        assert item.service == pytest.approx(compute + item.stall)
        assert item.service >= choice.chosen.service - 1e-12
    told = {item.schedule: item for item in choice.considered}
    assert told[Schedule.LAYER_PRELOAD].service <= told[Schedule.LAYERWISE_TWO_SLOT].service + 1e-9
    assert told[Schedule.LAYERWISE_TWO_SLOT].service <= told[Schedule.ON_DEMAND_BLOCKS].service + 1e-9


# Placements.

GEOMETRY = KvGeometry(layers=1, query_heads=32, kv_heads=8, head_dim=128, k_bytes=2, v_bytes=2)
GROUPS = tuple(
    HeadGroup((2 * at, 2 * at + 1), at % 2, filled_at=float(at), consumed_at=float(at) + 1.5)
    for at in range(4)
)
HEADS = HeadGroupStaging(GEOMETRY, 2, GROUPS, tuple(range(8)))
PROFILE = OverlapProfile(linear_0=0.5, linear_1=0.4, cpu_0=0.6, cpu_1=0.45, gpu_0=0.25)
CPU = RequestOnCpu(
    frozenset({ComputeSite.CPU_FOR_THE_REQUEST}), PROFILE, 4, 4 * PROFILE.layer_seconds(), True
)
STORAGE = InStorage(stated_exact=False, approximation_allowed=True)

Plan = HeadGroupStaging | RequestOnCpu | InStorage
SOUND: dict[str, Plan] = {"head groups": HEADS, "request on cpu": CPU, "storage": STORAGE}


@pytest.mark.parametrize("plan", SOUND.values(), ids=SOUND.keys())
def test_a_sound_plan_of_each_placement_keeps_its_contract(plan: Plan) -> None:
    plan.check()


def test_the_five_contracts_are_five() -> None:
    contracts = [
        places.FULL_MOVE,
        HEADS.contract,
        CPU.contract,
        places.SUPPORT_PARTITION,
        STORAGE.contract,
    ]
    assert len(set(contracts)) == 5
    assert [contract.exact for contract in contracts] == [True, True, True, True, False]
    assert [contract.merge.value for contract in contracts] == [
        "none",
        "concatenationByHead",
        "none",
        "normalisationStates",
        "none",
    ]


def regrouped(at: int, **change: object) -> HeadGroupStaging:
    groups = list(GROUPS)
    groups[at] = replace(groups[at], **change)  # type: ignore[arg-type]
    return replace(HEADS, groups=tuple(groups))


REJECTS: dict[str, tuple[Callable[[], Plan], PlacementReason]] = {
    "groups counted by query heads": (
        lambda: replace(HEADS, groups=GROUPS * 4),
        PlacementReason.GROUP_COUNT,
    ),
    "a KV head in no group": (lambda: regrouped(3, heads=(6,)), PlacementReason.GROUP_COVERAGE),
    "a KV head in two groups": (lambda: regrouped(3, heads=(5, 6, 7)), PlacementReason.GROUP_COVERAGE),
    "heads out of order": (
        lambda: replace(HEADS, output_order=(1, 0, *range(2, 8))),
        PlacementReason.HEAD_ORDER,
    ),
    "a buffer filled while it was read": (lambda: regrouped(2, filled_at=1.0), PlacementReason.SLOT_REUSE),
    "head groups as CPU attention": (
        lambda: replace(HEADS, site=ComputeSite.CPU_FOR_THE_REQUEST),
        PlacementReason.PAPER_CLASSIFICATION,
    ),
    "a request split over sides": (
        lambda: replace(CPU, sides=frozenset({ComputeSite.CPU_FOR_THE_REQUEST, ComputeSite.GPU})),
        PlacementReason.PAPER_CLASSIFICATION,
    ),
    "fairness decided by placement": (
        lambda: replace(CPU, decides_fairness=True),
        PlacementReason.PAPER_CLASSIFICATION,
    ),
    "no profile": (lambda: replace(CPU, profile=None), PlacementReason.COST_MODEL),
    "stages summed": (
        lambda: replace(CPU, stated_seconds=4 * (0.5 + 0.45 + 0.4 + 0.25 + 0.6)),
        PlacementReason.TIME_MODEL,
    ),
    "feasible out of balance": (
        lambda: replace(
            CPU,
            profile=(slow := replace(PROFILE, cpu_1=0.9)),
            stated_seconds=4 * slow.layer_seconds(),
        ),
        PlacementReason.TIME_MODEL,
    ),
    "storage called exact": (
        lambda: replace(STORAGE, stated_exact=True),
        PlacementReason.PLACEMENT_IS_NOT_EXACTNESS,
    ),
    "storage for an exact request": (
        lambda: replace(STORAGE, approximation_allowed=False),
        PlacementReason.UNDECLARED_APPROXIMATION,
    ),
}


@pytest.mark.parametrize(("plan", "reason"), REJECTS.values(), ids=REJECTS.keys())
def test_a_plan_that_breaks_its_contract_has_one_reason(
    plan: Callable[[], Plan], reason: PlacementReason
) -> None:
    with pytest.raises(PlacementRefused) as refused:
        plan().check()
    assert refused.value.reason is reason


def test_neo_takes_maxima_and_not_sums() -> None:
    assert PROFILE.layer_seconds() == pytest.approx(0.5 + 0.65)
    assert PROFILE.balanced()
    assert not replace(PROFILE, cpu_0=0.66).balanced()
