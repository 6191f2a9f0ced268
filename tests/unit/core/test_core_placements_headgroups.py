"""HeadInfer's head groups: which grouping, at what price, and the slices run by events."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_core.cost import KvGeometry
from kvtier_core.exact_placements import PlacementReason, PlacementRefused
from kvtier_core.pipeline import check_timeline, closed_form
from kvtier_core.placements.events import NANOSECONDS
from kvtier_core.placements.headgroups import (
    GroupingLost,
    HeadInputs,
    groupings,
    longest_context,
    members,
    plan_groups,
    run_step,
    slices,
)
from kvtier_core.units import MIB, BytesPerSecond

GEOMETRY = KvGeometry(layers=4, query_heads=32, kv_heads=8, head_dim=128, k_bytes=2, v_bytes=2)
LINK = BytesPerSecond.gib(16)
GIVEN = HeadInputs(
    geometry=GEOMETRY, tokens=4096, cold=4096, staging=32 * MIB, link=LINK, launch=None, row_seconds=1e-7
)


def test_one_size_for_each_number_of_groups() -> None:
    """Three groups of eight heads need three heads each, and so do not reserve four."""
    assert groupings(GEOMETRY) == [8, 4, 3, 2, 1]
    assert [GEOMETRY.head_groups(heads) for heads in groupings(GEOMETRY)] == [1, 2, 3, 4, 8]


def test_groups_follow_kv_heads_in_the_models_order() -> None:
    assert members(GEOMETRY, 3) == [(0, 1, 2), (3, 4, 5), (6, 7)]
    assert len(members(GEOMETRY, 1)) == GEOMETRY.kv_heads


# 4096 rows of one head are 2 MiB (C5.02); two buffers.
STAGING: dict[str, tuple[int, int, int]] = {
    "all heads at once": (32 * MIB, 8, 1),
    "a byte too few for all": (32 * MIB - 1, 4, 2),
    "four heads": (16 * MIB, 4, 2),
    "three heads": (12 * MIB, 3, 3),
    "two heads": (11 * MIB, 2, 4),
    "one head": (4 * MIB, 1, 8),
}


@pytest.mark.parametrize(("staging", "heads", "groups"), STAGING.values(), ids=STAGING.keys())
def test_without_a_launch_cost_the_fewest_groups_that_fit(staging: int, heads: int, groups: int) -> None:
    plan = plan_groups(replace(GIVEN, staging=staging))
    assert (plan.chosen.heads, plan.chosen.groups) == (heads, groups)
    assert plan.chosen.reserved == 2 * plan.chosen.slice_bytes <= staging
    for item in plan.considered:
        if item.reserved > staging:
            assert item.lost is GroupingLost.STAGING_TOO_SMALL
        elif item is not plan.chosen:
            assert item.lost is GroupingLost.MORE_LAUNCHES


def test_grouping_adapts_as_the_context_grows_until_one_head_does_not_fit() -> None:
    contexts = [longest_context(GEOMETRY, heads, GIVEN.staging) for heads in groupings(GEOMETRY)]
    assert contexts == [4096, 8192, 10922, 16384, 32768]
    for heads, most in zip(groupings(GEOMETRY), contexts, strict=True):
        grown = replace(GIVEN, tokens=most, cold=most)
        assert plan_groups(grown).chosen.heads == heads
        more = replace(GIVEN, tokens=most + 1, cold=most + 1)
        if heads > 1:
            assert plan_groups(more).chosen.heads < heads
    with pytest.raises(PlacementRefused) as refused:
        plan_groups(replace(GIVEN, tokens=32769, cold=32769))
    assert refused.value.reason is PlacementReason.COST_MODEL
    assert "STAGING_TOO_SMALL" in str(refused.value)


# 16 MiB a layer take 0.977 ms, attention 0.410 ms.
LAUNCHES: dict[str, tuple[float, int]] = {
    "launches for nothing: wait for one head only": (0.0, 1),
    "launches that cost: larger groups": (0.5e-3, 8),
    "in between": (3e-5, 4),
}


@pytest.mark.parametrize(("launch", "heads"), LAUNCHES.values(), ids=LAUNCHES.keys())
def test_with_a_launch_cost_the_least_time(launch: float, heads: int) -> None:
    plan = plan_groups(replace(GIVEN, launch=launch))
    assert plan.chosen.heads == heads
    assert all(item.service >= plan.chosen.service for item in plan.considered)
    assert {item.lost for item in plan.considered if item is not plan.chosen} == {GroupingLost.SLOWER}


def test_the_price_by_hand() -> None:
    """Two groups, four layers: eight fetches of 8 MiB, and the last slice's attention after them."""
    half = 8 * MIB / LINK.value + 1e-4
    attend = 4096 * 1e-7 / 2
    chosen = plan_groups(replace(GIVEN, staging=16 * MIB, launch=1e-4)).chosen
    assert chosen.groups == 2
    assert chosen.service == pytest.approx(closed_form(half, attend, 8)) == pytest.approx(8 * half + attend)
    assert chosen.stall == pytest.approx(chosen.service - 8 * attend)


def test_a_declared_size_is_taken_or_refused_and_nothing_else_is_tried() -> None:
    plan = plan_groups(replace(GIVEN, group_heads=3))
    assert [item.heads for item in plan.considered] == [3]
    with pytest.raises(PlacementRefused):
        plan_groups(replace(GIVEN, group_heads=3, staging=12 * MIB - 1))


def test_the_same_bytes_move_whatever_the_grouping() -> None:
    """C5.16: staging shrinks, traffic does not."""
    for heads in groupings(GEOMETRY):
        moved = sum(cost.fetch or 0.0 for cost in slices(GIVEN, heads)) * LINK.value
        assert moved == pytest.approx(4 * 16 * MIB)


def test_rows_that_are_there_are_attended_and_not_fetched() -> None:
    plan = plan_groups(replace(GIVEN, cold=0, staging=0))
    assert (plan.chosen.groups, plan.chosen.stall) == (1, 0.0)
    assert plan.chosen.service == pytest.approx(4 * 4096 * 1e-7)


# The schedule, simulated.


def test_the_simulated_step_keeps_its_contract_and_hides_fetches() -> None:
    run = run_step(replace(GIVEN, launch=1e-4), 2, append=LINK)
    for plan in run.plans:
        plan.check()
    assert len(run.plans) == GEOMETRY.layers
    assert run.simulated.seconds == pytest.approx(run.predicted.service, abs=1e-7)
    serial = run.simulated.busy["cpuToGpu"] + run.simulated.busy["gpu"]
    assert run.simulated.makespan < 0.8 * serial, "with one buffer, nothing would be hidden"


steps = st.builds(
    HeadInputs,
    geometry=st.builds(
        KvGeometry,
        layers=st.integers(1, 4),
        query_heads=st.sampled_from([24]),
        kv_heads=st.sampled_from([1, 2, 3, 4, 6, 8, 12]),
        head_dim=st.just(64),
        k_bytes=st.just(2),
        v_bytes=st.just(2),
    ),
    tokens=st.integers(2000, 4000),
    cold=st.integers(0, 2000),
    staging=st.integers(0, 64 * MIB),
    link=st.builds(BytesPerSecond, st.floats(1e8, 1e11)),
    launch=st.one_of(st.none(), st.floats(0.0, 1e-3)),
    row_seconds=st.floats(0.0, 1e-6),
)


@settings(max_examples=100, deadline=None)
@given(steps, st.data())
def test_every_step_agrees_with_the_recurrence_and_is_never_better_than_its_floor(
    step: HeadInputs, data: st.DataObject
) -> None:
    heads = data.draw(st.sampled_from(groupings(step.geometry)))
    run = run_step(step, heads)
    rounding = 2 * len(run.simulated.spans) / NANOSECONDS
    assert run.simulated.makespan >= run.simulated.floor
    assert run.simulated.seconds == pytest.approx(run.predicted.service, abs=rounding)
    check_timeline(run.predicted)
    for plan in run.plans:
        plan.check()


@settings(max_examples=100, deadline=None)
@given(steps)
def test_the_chosen_grouping_fits_and_no_rule_that_fits_is_better(step: HeadInputs) -> None:
    try:
        plan = plan_groups(step)
    except PlacementRefused:
        assert 2 * step.geometry.head_group(step.cold, 1) > step.staging
        return
    fits = [item for item in plan.considered if item.reserved <= step.staging]
    assert plan.chosen.reserved <= step.staging
    assert plan.chosen.groups == -(-step.geometry.kv_heads // plan.chosen.heads)
    if step.launch is None:
        assert plan.chosen.groups == min(item.groups for item in fits)
    else:
        assert plan.chosen.service == min(item.service for item in fits)
