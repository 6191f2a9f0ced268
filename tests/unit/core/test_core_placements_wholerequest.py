"""NEO's whole requests: sides, the two sub-batches of an iteration, what it is chosen over, and its run by
events."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_core.exact_placements import (
    OverlapProfile,
    PlacementReason,
    PlacementRefused,
)
from kvtier_core.placements.events import NANOSECONDS
from kvtier_core.placements.wholerequest import (
    Curve,
    Iteration,
    IterationLost,
    Profile,
    Request,
    Side,
    choose_iteration,
    place,
    run_iteration,
)

LINEAR = Curve(((1, 0.4e-3), (64, 0.65e-3)))
GPU_ROWS = Curve(((100_000, 1e-3),))
CPU_ROWS = Curve(((50_000, 5e-3),))
PROFILE = Profile(LINEAR, GPU_ROWS, CPU_ROWS)
LAYERS = 4
# T_l0 = .65, T_ca1 = .55, T_l1 = .22, T_ga0 = .28, T_ca0 = .45 ms (C5.10).
WORKED = OverlapProfile(linear_0=0.65e-3, linear_1=0.22e-3, cpu_0=0.45e-3, cpu_1=0.55e-3, gpu_0=0.28e-3)


def on(side: Side, count: int, rows: int, tokens: int = 1) -> list[Request]:
    return [Request(f"{side.value}-{index}", side, tokens, rows) for index in range(count)]


CURVE: dict[str, tuple[int, float]] = {
    "nothing": (0, 0.0),
    "the first point": (1, 0.4e-3),
    "half way": (32, 0.4e-3 + 31 / 63 * 0.25e-3),
    "the last point": (64, 0.65e-3),
}


@pytest.mark.parametrize(("amount", "seconds"), CURVE.values(), ids=CURVE.keys())
def test_between_two_measured_points_is_a_straight_line(amount: int, seconds: float) -> None:
    assert LINEAR.seconds(amount) == pytest.approx(seconds)


def test_beyond_the_last_point_nothing_was_measured() -> None:
    with pytest.raises(PlacementRefused) as refused:
        LINEAR.seconds(65)
    assert refused.value.reason is PlacementReason.COST_MODEL


@pytest.mark.parametrize(
    "points", [(), ((0, 0.1),), ((2, 0.1), (2, 0.2)), ((2, 0.1), (1, 0.2)), ((1, -0.1),)]
)
def test_what_is_no_curve_is_refused(points: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(PlacementRefused):
        Curve(points)


MISSING: dict[str, Profile | None] = {
    "all": None,
    "linear": replace(PROFILE, linear=None),
    "gpuAttention": replace(PROFILE, gpu=None),
    "cpuAttention": replace(PROFILE, cpu=None),
}


@pytest.mark.parametrize(("name", "profile"), MISSING.items(), ids=MISSING.keys())
def test_without_a_measured_profile_there_is_no_choice(name: str, profile: Profile | None) -> None:
    with pytest.raises(PlacementRefused) as refused:
        choose_iteration(on(Side.GPU, 1, 100), profile, LAYERS)
    assert refused.value.reason is PlacementReason.COST_MODEL
    assert name in str(refused.value) or name == "all"


def test_a_request_lies_whole_on_one_side_in_the_schedulers_order() -> None:
    assert place([("a", 60), ("b", 50), ("c", 40), ("d", 1)], free_bytes=100) == {
        "a": Side.GPU,
        "b": Side.CPU,
        "c": Side.GPU,
        "d": Side.CPU,
    }


def test_cpu_requests_that_hide_ride_along_with_the_gpus() -> None:
    """Two of them hide behind GPU attention (0.16 ms a layer, 0.06 ms each) and need no second linear pass;
    a second sub-batch for the other six would cost 0.4 ms a layer."""
    plan = choose_iteration([*on(Side.GPU, 32, 500), *on(Side.CPU, 8, 600)], PROFILE, LAYERS)
    assert (plan.kind, plan.lost) == (Iteration.HETEROGENEOUS, IterationLost.FEWER_TOKENS_A_SECOND)
    assert (len(plan.first), len(plan.second), len(plan.waiting)) == (34, 0, 6)
    assert plan.terms.gpu_0 == pytest.approx(GPU_ROWS.seconds(32 * 500))
    assert plan.terms.cpu_0 == pytest.approx(CPU_ROWS.seconds(2 * 600))
    assert plan.rate == pytest.approx(34 / plan.seconds) and plan.rate > plan.other
    assert plan.other == pytest.approx(32 / (LAYERS * (LINEAR.seconds(32) + GPU_ROWS.seconds(16_000))))


def test_a_second_sub_batch_pays_where_it_carries_enough() -> None:
    """Forty short ones on the CPU all hide once a second linear pass gives them something to hide behind."""
    plan = choose_iteration([*on(Side.GPU, 24, 500), *on(Side.CPU, 40, 150)], PROFILE, LAYERS)
    assert plan.kind is Iteration.HETEROGENEOUS
    assert plan.second and not plan.waiting
    assert plan.rate > 1.3 * plan.other
    assert plan.terms.balanced()
    assert plan.seconds == pytest.approx(LAYERS * plan.terms.layer_seconds())


def test_none_is_overtaken_by_one_of_its_own_side() -> None:
    """The second CPU request hides nowhere, so the third waits too, though it would."""
    requests = [*on(Side.GPU, 32, 500), *on(Side.CPU, 3, 600)]
    requests[-2] = replace(requests[-2], rows=40_000)
    plan = choose_iteration(requests, PROFILE, LAYERS)
    assert [request.name for request in plan.waiting] == ["cpu-1", "cpu-2"]


def test_where_nothing_hides_the_gpu_runs_alone() -> None:
    plan = choose_iteration([*on(Side.GPU, 4, 500), *on(Side.CPU, 2, 40_000)], PROFILE, LAYERS)
    assert (plan.kind, plan.lost) == (Iteration.GPU_ONLY, IterationLost.NOTHING_HIDES)
    assert len(plan.waiting) == 2


def test_an_iteration_with_fewer_tokens_a_second_is_not_taken() -> None:
    """The CPU request hides in a sub-batch of its own only, whose linear pass costs more than its token
    brings."""
    steep = replace(PROFILE, linear=Curve(((1, 1e-3), (64, 1.1e-3))))
    plan = choose_iteration([*on(Side.GPU, 60, 10), *on(Side.CPU, 1, 9_500)], steep, LAYERS)
    assert (plan.kind, plan.lost) == (Iteration.GPU_ONLY, IterationLost.FEWER_TOKENS_A_SECOND)
    assert 0.0 < plan.other < plan.rate
    assert len(plan.waiting) == 1


def test_only_gpu_requests_have_nothing_to_choose() -> None:
    plan = choose_iteration(on(Side.GPU, 4, 500), PROFILE, LAYERS)
    assert (plan.kind, plan.lost, plan.waiting) == (Iteration.GPU_ONLY, IterationLost.NOTHING_ON_CPU, ())


def test_only_cpu_requests_are_served_though_nothing_hides_them() -> None:
    plan = choose_iteration(on(Side.CPU, 1, 500), PROFILE, LAYERS)
    assert (plan.kind, plan.lost) == (Iteration.HETEROGENEOUS, IterationLost.NOTHING_ON_GPU)
    assert not plan.terms.balanced()


@pytest.mark.parametrize(("tokens", "rows"), [(0, 1), (1, -1)])
def test_a_request_without_work_is_refused(tokens: int, rows: int) -> None:
    with pytest.raises(PlacementRefused):
        Request("a", Side.CPU, tokens, rows)


requests_ = st.lists(
    st.builds(
        Request,
        name=st.uuids().map(str),
        side=st.sampled_from(Side),
        tokens=st.integers(1, 3),
        rows=st.integers(0, 4000),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(requests_)
def test_every_iteration_keeps_the_contract_of_whole_requests(requests: list[Request]) -> None:
    plan = choose_iteration(requests, PROFILE, LAYERS)
    served = [*plan.first, *plan.second, *plan.waiting]
    assert sorted(r.name for r in served) == sorted(r.name for r in requests)
    assert all(request.side is Side.CPU for request in (*plan.second, *plan.waiting))
    assert plan.rate >= plan.other
    order = [r.name for r in requests if r.side is Side.CPU]
    waits = [r.name for r in plan.waiting]
    assert waits == order[len(order) - len(waits) :]
    plan.contract().check()
    if any(request.side is Side.GPU for request in requests):
        assert plan.contract().stated_feasible


# The schedule, simulated.


def test_the_worked_iteration_by_events() -> None:
    """4.60 ms by F32; the run adds sub-batch 1's first linear work, which has nothing beside it."""
    run = run_iteration(WORKED, LAYERS)
    assert run.closed == pytest.approx(4.60e-3)
    assert run.error == pytest.approx(0.22e-3)
    assert run.closed <= run.simulated.seconds <= run.closed + run.error + 1e-8
    assert run.simulated.floor / NANOSECONDS == pytest.approx(4.60e-3), "balanced: the GPU always works"


def test_without_overlap_the_run_would_take_the_sum() -> None:
    run = run_iteration(WORKED, LAYERS)
    assert run.simulated.seconds < 0.6 * 8.60e-3


seconds = st.floats(0.0, 5e-3)
profiles = st.builds(OverlapProfile, seconds, seconds, seconds, seconds, seconds)


@settings(max_examples=200, deadline=None)
@given(profiles, st.integers(1, 8))
def test_simulated_iterations_are_never_above_f32_by_more_than_stated_nor_below_their_floor(
    terms: OverlapProfile, layers: int
) -> None:
    run = run_iteration(terms, layers)
    rounding = len(run.simulated.spans) / NANOSECONDS
    assert run.simulated.makespan >= run.simulated.floor
    assert run.simulated.seconds <= run.closed + run.error + rounding
    if terms.balanced():
        assert run.simulated.seconds >= run.closed - rounding
