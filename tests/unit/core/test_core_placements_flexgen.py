"""FlexGen's joint placement: worked layer times, an exact search with what bound it, and the zig-zag schedule
run by events."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_core.exact_placements import PlacementReason, PlacementRefused
from kvtier_core.placements.events import NANOSECONDS
from kvtier_core.placements.flexgen import (
    AttentionSite,
    Bound,
    EngineConstants,
    JointInputs,
    JointPlan,
    LayerTerms,
    Paths,
    Point,
    Split,
    Term,
    block_seconds,
    grid_points,
    layer_terms,
    price,
    refused,
    search,
)
from kvtier_core.placements.zigzag import run_block
from kvtier_core.units import GIB, MIB, BytesPerRow, BytesPerSecond

ALL_GPU = Split(1.0, 0.0, 0.0)
ENGINE = EngineConstants(
    weight_bytes=100_000_000,
    weights=Split(0.0, 1.0, 0.0),
    activation_bytes=1000,
    activations=ALL_GPU,
    prefill_seconds=1e-5,
    decode_seconds=1e-4,
    memory=(8 * GIB, 64 * GIB, 0),
)
PATHS = Paths(BytesPerSecond.gb(10), BytesPerSecond.gb(10), BytesPerSecond.gb(1), BytesPerSecond.gb(0.5))
GIVEN = JointInputs(
    layers=4,
    row=BytesPerRow(4000),
    budgets=(256 * MIB, 1 * GIB, 8 * GIB),
    paths=PATHS,
    engine=ENGINE,
    prompt=1000,
    output=200,
    batch=4,
    max_batches=8,
    site=AttentionSite.DEVICE,
    device_row=1e-8,
    host_row=1e-7,
    grid=10,
)
POINT = Point(Split(0.5, 0.25, 0.25), 2)


def test_the_five_terms_of_a_prefill_layer_by_hand() -> None:
    """8 sequences of 1000 tokens: weights in over the link, half of the rows out, a quarter on to disk."""
    terms = layer_terms(GIVEN, POINT, decode=False)
    assert terms == LayerTerms(
        cpu_to_gpu=pytest.approx(100e6 / 10e9),
        gpu_to_cpu=pytest.approx(0.5 * 4000 * 8000 / 10e9),
        disk_to_cpu=0.0,
        cpu_to_disk=pytest.approx(0.25 * 4000 * 8000 / 0.5e9),
        compute=pytest.approx(8000 * 1e-5),
    )
    assert (terms.seconds, terms.bound) == (pytest.approx(0.08), Term.COMPUTE)


def test_the_five_terms_of_a_decode_layer_by_hand() -> None:
    """Mean context 1100: half of 8800 rows come in, a quarter from disk, one row a sequence goes out."""
    terms = layer_terms(GIVEN, POINT, decode=True)
    assert terms == LayerTerms(
        cpu_to_gpu=pytest.approx((100e6 + 0.5 * 4000 * 8800) / 10e9),
        gpu_to_cpu=pytest.approx(0.5 * 4000 * 8 / 10e9),
        disk_to_cpu=pytest.approx(0.25 * 4000 * 8800 / 1e9),
        cpu_to_disk=pytest.approx(0.25 * 4000 * 8 / 0.5e9),
        compute=pytest.approx(8 * 1e-4 + 8800 * 1e-8),
    )
    assert terms.bound is Term.CPU_TO_GPU


def test_rows_that_the_host_attends_do_not_move() -> None:
    moved = layer_terms(GIVEN, POINT, decode=True)
    stay = layer_terms(replace(GIVEN, site=AttentionSite.HOST), POINT, decode=True)
    assert moved is not None and stay is not None
    assert stay.cpu_to_gpu == pytest.approx(100e6 / 10e9)
    assert stay.compute == pytest.approx(8 * 1e-4 + 4400 * 1e-8 + 4400 * 1e-7)
    assert stay.disk_to_cpu == moved.disk_to_cpu


def test_weights_are_loaded_once_for_a_whole_block() -> None:
    """Zig-zag: eight batches pay for one load of the weights, so a token costs less."""
    one, eight = (price(GIVEN, Point(ALL_GPU, batches)) for batches in (1, 8))
    assert one.decode is not None and eight.decode is not None
    assert one.decode.cpu_to_gpu == eight.decode.cpu_to_gpu
    assert eight.rate > 4 * one.rate


MEMORY: dict[str, tuple[JointInputs, Point, Bound | None]] = {
    # 4 layers * 4000 B * 4800 tokens of a batch = 76.8 MB.
    "fits": (GIVEN, Point(ALL_GPU, 3), None),
    "one batch too many": (GIVEN, Point(ALL_GPU, 4), Bound.GPU_BUDGET),
    "two slots from below count": (
        replace(GIVEN, budgets=(2 * 4000 * 4800 - 1, 8 * GIB, 0)),
        Point(Split(0.0, 1.0, 0.0), 1),
        Bound.GPU_BUDGET,
    ),
    "attended by the host, no slot": (
        replace(GIVEN, budgets=(0, 8 * GIB, 0), site=AttentionSite.HOST),
        Point(Split(0.0, 1.0, 0.0), 1),
        None,
    ),
    "host memory": (
        replace(GIVEN, budgets=(256 * MIB, 76_799_999, 0)),
        Point(Split(0.0, 1.0, 0.0), 1),
        Bound.CPU_BUDGET,
    ),
    "disk": (
        replace(GIVEN, budgets=(256 * MIB, GIB, 76_799_999)),
        Point(Split(0.0, 0.0, 1.0), 1),
        Bound.DISK_BUDGET,
    ),
    "the engine's weights": (
        replace(GIVEN, engine=replace(ENGINE, memory=(8 * GIB, 399_999_999, 0))),
        Point(ALL_GPU, 1),
        Bound.ENGINE_MEMORY,
    ),
    "the block's activations": (
        replace(GIVEN, engine=replace(ENGINE, memory=(200_000_000 + 11_999_999, 64 * GIB, 0))),
        Point(ALL_GPU, 3),
        Bound.ENGINE_MEMORY,
    ),
}


@pytest.mark.parametrize(("inputs", "point", "bound"), MEMORY.values(), ids=MEMORY.keys())
def test_each_memory_constraint_to_the_byte(inputs: JointInputs, point: Point, bound: Bound | None) -> None:
    assert refused(inputs, point) is bound


def test_the_plan_says_what_bound_it_and_why_each_corner_lost() -> None:
    plan = search(GIVEN)
    assert plan.best.point == Point(Split(0.3, 0.7, 0.0), 8)
    assert plan.limit is Bound.GPU_BUDGET and plan.gain > 1.0
    assert plan.points == 8 * 66
    assert sum(plan.counts.values()) == plan.points - 1
    told = {name: item.refused for name, item in plan.corners}
    assert told == {"allOnGpu": Bound.GPU_BUDGET, "allOnCpu": Bound.SLOWER, "allOnDisk": Bound.SLOWER}


def test_with_room_for_all_everything_stays_on_the_gpu_and_nothing_limits() -> None:
    plan = search(replace(GIVEN, budgets=(8 * GIB, 8 * GIB, 8 * GIB)))
    assert plan.best.point == Point(ALL_GPU, 8)
    assert (plan.limit, plan.gain) == (None, 1.0)
    assert {name for name, _ in plan.corners} == {"allOnCpu", "allOnDisk"}


def test_a_path_that_nobody_measured_is_not_used() -> None:
    plan = search(replace(GIVEN, paths=replace(PATHS, disk_to_cpu=None)))
    assert plan.best.point.kv.disk == 0.0
    assert plan.counts[Bound.UNMEASURED] > 0


def test_no_point_is_a_refusal_with_the_counts_of_why() -> None:
    with pytest.raises(PlacementRefused) as error:
        search(replace(GIVEN, budgets=(MIB, MIB, 0)))
    assert error.value.reason is PlacementReason.COST_MODEL
    assert "GPU_BUDGET" in str(error.value)


@pytest.mark.parametrize("parts", [(0.5, 0.4, 0.0), (1.5, -0.5, 0.0)])
def test_shares_make_one_whole(parts: tuple[float, float, float]) -> None:
    with pytest.raises(PlacementRefused):
        Split(*parts)


def brute_force(given: JointInputs) -> float:
    """An oracle: every point, its own arithmetic for the rate."""
    best = 0.0
    for batches in range(1, given.max_batches + 1):
        for gpu in range(given.grid + 1):
            for cpu in range(given.grid + 1 - gpu):
                # Of whole steps: a remainder of rounding would be a share of a tier that is not there.
                shares = [steps / given.grid for steps in (gpu, cpu, given.grid - gpu - cpu)]
                point = Point(Split(*shares), batches)
                if any(s and not b for s, b in zip(shares, given.budgets, strict=True)):
                    continue
                pre = layer_terms(given, point, decode=False)
                gen = layer_terms(given, point, decode=True)
                if pre is None or gen is None or refused(given, point) is not None:
                    continue
                seconds = given.layers * (
                    max(pre.named.values()) + (given.output - 1) * max(gen.named.values())
                )
                best = max(best, given.batch * batches * given.output / seconds)
    return best


searches = st.builds(
    replace,
    st.just(GIVEN),
    budgets=st.tuples(*[st.sampled_from([0, 64 * MIB, 256 * MIB, GIB, 8 * GIB])] * 3),
    prompt=st.integers(1, 3000),
    output=st.integers(1, 300),
    batch=st.integers(1, 4),
    max_batches=st.integers(1, 4),
    grid=st.integers(1, 6),
    site=st.sampled_from(AttentionSite),
    device_row=st.floats(0.0, 1e-6),
    host_row=st.floats(0.0, 1e-6),
)


@settings(max_examples=60, deadline=None)
@given(searches)
def test_the_search_is_exact_over_its_grid(given_: JointInputs) -> None:
    try:
        plan: JointPlan | None = search(given_)
    except PlacementRefused:
        plan = None
    best = brute_force(given_)
    if plan is None:
        assert best == 0.0
        return
    assert plan.best.rate == pytest.approx(best)
    assert plan.best.refused is None and refused(given_, plan.best.point) is None
    assert plan.points == sum(1 for _ in grid_points(given_))


# The schedule, simulated.


def test_the_zigzag_run_of_the_example_agrees_with_the_closed_form_and_not_below_the_floor() -> None:
    plan = search(GIVEN).best
    run = run_block(GIVEN, plan, tokens=4)
    assert plan.prefill is not None and plan.decode is not None
    assert run.closed == pytest.approx(block_seconds(replace(GIVEN, output=4), plan.prefill, plan.decode))
    assert -run.shorter <= run.simulated.seconds - run.closed <= run.longer
    assert run.longer + run.shorter < 0.06 * run.closed
    assert run.simulated.makespan >= run.simulated.floor


def test_one_after_the_other_is_not_what_the_schedule_does() -> None:
    """The test fails where the streams of a block do not overlap."""
    even = LayerTerms(0.01, 0.01, 0.01, 0.01, 0.01)
    run = run_block(GIVEN, replace(price(GIVEN, POINT), prefill=even, decode=even), tokens=4)
    assert run.simulated.seconds < 0.3 * sum(run.simulated.busy.values()) / NANOSECONDS


seconds = st.floats(0.0, 0.01)
terms = st.builds(LayerTerms, seconds, seconds, seconds, seconds, seconds)


@settings(max_examples=100, deadline=None)
@given(terms, terms, st.integers(1, 4), st.integers(2, 4), st.integers(1, 4))
def test_simulated_and_closed_form_differ_by_filling_and_draining_only(
    prefill: LayerTerms, decode: LayerTerms, layers: int, batches: int, tokens: int
) -> None:
    given_ = replace(GIVEN, layers=4 * layers)
    plan = replace(price(given_, Point(ALL_GPU, batches)), prefill=prefill, decode=decode)
    run = run_block(given_, plan, tokens)
    rounding = len(run.simulated.spans) / NANOSECONDS
    assert run.simulated.makespan >= run.simulated.floor
    assert -run.shorter - rounding <= run.simulated.seconds - run.closed <= run.longer + rounding


def test_what_was_not_priced_is_not_run() -> None:
    unpriced = price(replace(GIVEN, paths=replace(PATHS, cpu_to_gpu=None)), POINT)
    assert unpriced.refused is Bound.UNMEASURED
    with pytest.raises(PlacementRefused) as error:
        run_block(GIVEN, unpriced, tokens=1)
    assert error.value.reason is PlacementReason.TIME_MODEL
