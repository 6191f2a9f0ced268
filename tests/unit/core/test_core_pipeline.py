"""The layer pipeline: recurrence against vectors C3, and a runner whose measured times are predicted ones."""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_core.errors import CoreError, Reason
from kvtier_core.layer_runner import LayerJob, LayerRunner, read_blocks
from kvtier_core.pipeline import LayerCost, Timeline, check_timeline, closed_form, timeline
from kvtier_core.tiers.transfer import TransferSink
from kvtier_core.units import MIB, BytesPerSecond
from tests.unit.core.remote_double import READ_SECONDS, VirtualTime
from tests.unit.core.test_core_memory_contract import far, landings, stored
from tests.unit.core.test_core_streams_order import named, payload

LINK = BytesPerSecond.gib(24)
COLD, FIXED, COMPUTE = [16, 12, 0, 8], [0.068, 0.148, 0.0, 0.164], [0.65, 0.70, 0.70, 0.70]


def witness() -> list[LayerCost]:
    """W3, in milliseconds."""
    return [
        LayerCost(LINK.seconds(cold * MIB) * 1e3 + fixed if cold else None, compute)
        for cold, fixed, compute in zip(COLD, FIXED, COMPUTE, strict=True)
    ]


def mutant(layers: Sequence[LayerCost], slots: int) -> float:
    """The recurrence with the mistake that the source warns of: a_l = 0 at a resident layer."""
    free, ends = 0.0, []
    for index, layer in enumerate(layers):
        ready = 0.0
        if layer.fetch is None:
            free = 0.0
        else:
            ready = free = max(free, ends[index - slots] if index >= slots else 0.0) + layer.fetch
        ends.append(max(ends[-1] if ends else 0.0, ready) + layer.compute)
    return ends[-1]


def test_c3_18_to_c3_21_and_c3_31_to_c3_34_the_sums_belong_together() -> None:
    times = timeline(witness())
    assert times.no_overlap == pytest.approx(4.595, abs=5e-4)
    assert times.service == pytest.approx(3.469, abs=5e-4)
    assert times.stall == pytest.approx(0.719, abs=5e-4)
    assert times.hidden == pytest.approx(1.126, abs=5e-4)
    assert times.compute == pytest.approx(2.750)
    assert times.fetch == pytest.approx(1.845, abs=5e-4)
    assert times.service == pytest.approx(times.compute + times.stall, abs=1e-9)
    assert times.hidden == pytest.approx(times.no_overlap - times.service, abs=1e-9)
    assert times.service + 1.400 == pytest.approx(4.869, abs=5e-4)
    assert 1 - times.stall / times.fetch == pytest.approx(0.6102981, abs=5e-4)


def test_c3_35_to_c3_37_event_times() -> None:
    layers = timeline(witness()).layers
    ready = [0.7190416667, 1.3553229167, 0.0, 2.5585625]
    free = [0.7190416667, 1.3553229167, 1.3553229167, 2.5585625]
    ends = [1.3690416667, 2.0690416667, 2.7690416667, 3.4690416667]
    assert [layer.data_ready for layer in layers] == pytest.approx(ready, abs=1e-6)
    assert [layer.engine_free for layer in layers] == pytest.approx(free, abs=1e-6)
    assert [layer.compute_end for layer in layers] == pytest.approx(ends, abs=1e-6)


def test_c3_38_constant_times_have_a_closed_form() -> None:
    for count in range(1, 9):
        for fetch in (0.3, 0.4, 0.5):
            for compute in (0.3, 0.4, 0.5):
                service = timeline([LayerCost(fetch, compute)] * count).service
                assert service == pytest.approx(closed_form(fetch, compute, count), abs=1e-12)


def test_c3_39_a_reset_at_resident_layers_shows_with_three_slots_and_not_with_two() -> None:
    chance = random.Random(1)
    differs = dict.fromkeys((1, 2, 3, 4), 0)
    for _ in range(4000):
        count = chance.randint(2, 8)
        fetches = [None if chance.random() < 0.4 else chance.uniform(0.1, 5) for _ in range(count)]
        computes = [chance.uniform(0.05, 2) for _ in range(count)]
        layers = [LayerCost(*pair) for pair in zip(fetches, computes, strict=True)]
        for slots in differs:
            differs[slots] += abs(timeline(layers, slots).service - mutant(layers, slots)) > 1e-9
    assert (differs[1], differs[2]) == (0, 0)
    assert differs[3] > 0
    assert differs[4] > 0


def test_c3_40_the_case_that_kills_the_mutant() -> None:
    layers = [LayerCost(2.0, 0.5), LayerCost(None, 0.5), LayerCost(2.0, 0.5)]
    assert timeline(layers, 3).service == pytest.approx(4.5, abs=1e-12)
    assert mutant(layers, 3) == pytest.approx(3.5, abs=1e-12)


MUTATIONS: dict[str, tuple[int, dict[str, float], Reason]] = {
    "computed before its rows": (3, {"data_ready": 9.0}, Reason.SCHEDULE_VIOLATION),
    "computed before the last layer": (2, {"compute_start": 1.0}, Reason.SCHEDULE_VIOLATION),
    "negative stall": (1, {"stall": -0.1}, Reason.SCHEDULE_VIOLATION),
    "another stall": (0, {"stall": 0.1}, Reason.SCHEDULE_VIOLATION),
    "reset at a resident layer": (2, {"engine_free": 0.0}, Reason.SCHEDULE_VIOLATION),
    "slot filled too early": (3, {"fetch_start": 1.9}, Reason.SLOT_REUSE),
    "two fetches at once": (1, {"fetch_start": 0.2}, Reason.SCHEDULE_VIOLATION),
}


@pytest.mark.parametrize(("layer", "change", "reason"), MUTATIONS.values(), ids=MUTATIONS.keys())
def test_a_timeline_that_cannot_have_happened_is_refused(
    layer: int, change: dict[str, float], reason: Reason
) -> None:
    times = timeline(witness())
    check_timeline(times)
    layers = list(times.layers)
    layers[layer] = dataclasses.replace(layers[layer], **change)
    with pytest.raises(CoreError) as error:
        check_timeline(Timeline(tuple(layers), times.slots))
    assert error.value.reason is reason, error.value


# The runner, on virtual time.


class VirtualWaiter:
    """Waiting is what lets virtual time pass, to the next thing that is due."""

    def __init__(self, time: VirtualTime) -> None:
        self._time = time

    def wait(self, seconds: float) -> None:
        due = self._time.next_due()
        self._time.advance(seconds if due is None else min(seconds, max(0.0, due - self._time.now)))

    def notify(self) -> None:
        pass


class Bench:
    """Layers of chosen costs on virtual time; what each slot holds is written down."""

    def __init__(self, layers: Sequence[LayerCost], slots: int = 2) -> None:
        self.time = VirtualTime()
        self.layers = layers
        self.runner = LayerRunner(self.time.clock, slots=slots, waiter=VirtualWaiter(self.time))
        self.holds: dict[int, int] = {}
        self.computed: list[int] = []

    def jobs(self) -> list[LayerJob]:
        return [self._job(index) for index in range(len(self.layers))]

    def _job(self, index: int) -> LayerJob:
        layer = self.layers[index]

        def compute(slot: int | None) -> None:
            if slot is not None:
                assert self.holds[slot] == index, "another layer's rows"
            self.time.advance(layer.compute)
            if slot is not None:
                assert self.holds[slot] == index, "overwritten while it was computed"
            self.computed.append(index)

        if layer.fetch is None:
            return LayerJob(compute)
        seconds = layer.fetch

        def fetch(slot: int, deadline: float, sink: TransferSink) -> None:
            self.holds[slot] = -1

            def arrive() -> None:
                self.holds[slot] = index
                sink.done(0, None)
                sink.drained(0)

            self.time.at(self.time.now + seconds, arrive)

        return LayerJob(compute, fetch, 1)


COSTS = st.builds(LayerCost, st.one_of(st.none(), st.floats(0.001, 5.0)), st.floats(0.0, 3.0))


@settings(max_examples=200, deadline=None)
@given(layers=st.lists(COSTS, min_size=1, max_size=8), slots=st.integers(1, 4))
def test_what_happens_is_what_the_recurrence_says(layers: list[LayerCost], slots: int) -> None:
    bench = Bench(layers, slots)
    measured = bench.runner.run(bench.jobs(), deadline=1e6)
    predicted = timeline(layers, slots)
    assert bench.computed == list(range(len(layers)))
    for have, want in zip(measured.layers, predicted.layers, strict=True):
        for name in ("engine_free", "data_ready", "compute_start", "compute_end", "stall"):
            assert getattr(have, name) == pytest.approx(getattr(want, name), abs=1e-6), name
    assert measured.stall == pytest.approx(predicted.stall, abs=1e-6)


def test_a_late_layer_ends_the_run_and_its_slot_is_quarantined_until_it_is_drained() -> None:
    layers = [LayerCost(1.0, 1.0), LayerCost(50.0, 1.0), LayerCost(1.0, 1.0)]
    bench = Bench(layers)
    with pytest.raises(CoreError) as error:
        bench.runner.run(bench.jobs(), deadline=10.0)
    assert error.value.reason is Reason.DEADLINE
    assert bench.computed == [0]
    assert bench.runner.quarantined() == {1}
    with pytest.raises(CoreError) as refused:
        bench.runner.run(bench.jobs(), deadline=1e6)
    assert refused.value.reason is Reason.NO_STAGING
    bench.time.advance(50.0)
    assert bench.runner.quarantined() == frozenset()
    # Nothing of the ended run was fetched any further.
    assert bench.holds == {0: 0, 1: 1}
    bench.layers = [LayerCost(1.0, 1.0)] * 3
    bench.computed.clear()
    bench.runner.run(bench.jobs(), deadline=1e6)
    assert bench.computed == [0, 1, 2]


def test_a_defect_in_a_layer_leaves_what_is_on_its_way_quarantined() -> None:
    bench = Bench([LayerCost(1.0, 1.0), LayerCost(30.0, 1.0)])
    jobs = bench.jobs()

    def broken(slot: int | None) -> None:
        raise RuntimeError("a defect")

    jobs[0] = dataclasses.replace(jobs[0], compute=broken)
    with pytest.raises(RuntimeError, match="a defect"):
        bench.runner.run(jobs, deadline=1e6)
    assert bench.runner.quarantined() == {1}
    bench.time.advance(30.0)
    assert bench.runner.quarantined() == frozenset()


def test_layers_are_read_from_a_tier_50_ms_away_and_a_broken_read_is_the_runs_error() -> None:
    place, tier = far()
    refs = stored(place, 3)
    targets = landings(2)
    seen: list[bytes] = []

    def job(layer: int) -> LayerJob:
        blocks = [(refs[layer], named(payload(layer)))]
        fetch = read_blocks(tier, blocks, [[targets[0]], [targets[1]]])

        def compute(slot: int | None) -> None:
            assert slot is not None
            seen.append(bytes(targets[slot].body))
            tier.time.advance(READ_SECONDS / 2)

        return LayerJob(compute, fetch, 1)

    runner = LayerRunner(tier.time.clock, waiter=VirtualWaiter(tier.time))
    times = runner.run([job(layer) for layer in range(3)], deadline=place.now() + 10.0)
    assert times.stall == pytest.approx(2 * READ_SECONDS, abs=1e-9)
    assert times.hidden == pytest.approx(READ_SECONDS, abs=1e-9)
    assert [len(block) for block in seen] == [len(targets[0].body)] * 3
    assert len(set(seen)) == 3
    tier.weather.fail_after = 100
    with pytest.raises(CoreError) as error:
        runner.run([job(layer) for layer in range(3)], deadline=place.now() + 10.0)
    assert error.value.reason is Reason.STORAGE_UNAVAILABLE
    assert len(seen) == 3


@pytest.mark.parametrize("refusal", ["first", "second"])
def test_a_fetch_that_is_refused_before_it_starts_holds_no_slot(refusal: str) -> None:
    bench = Bench([LayerCost(1.0, 1.0)] * 3)
    jobs = bench.jobs()

    def full(slot: int, deadline: float, sink: TransferSink) -> None:
        raise CoreError(Reason.QUEUE_FULL, "no room")

    place = 0 if refusal == "first" else 1
    jobs[place] = dataclasses.replace(jobs[place], fetch=full)
    with pytest.raises(CoreError) as error:
        bench.runner.run(jobs, deadline=1e6)
    assert error.value.reason is Reason.QUEUE_FULL
    assert bench.computed == list(range(place))
    assert bench.runner.quarantined() == frozenset()


def test_after_a_fetch_that_failed_no_further_layer_is_fetched() -> None:
    bench = Bench([LayerCost(1.0, 10.0), LayerCost(1.0, 10.0), LayerCost(1.0, 1.0)], slots=3)
    jobs = bench.jobs()

    def fail(slot: int, deadline: float, sink: TransferSink) -> None:
        def end() -> None:
            sink.done(0, CoreError(Reason.STORAGE_UNAVAILABLE, "broken"))
            sink.drained(0)

        bench.time.at(bench.time.now + 1.0, end)

    jobs[1] = dataclasses.replace(jobs[1], fetch=fail)
    with pytest.raises(CoreError) as error:
        bench.runner.run(jobs, deadline=1e6)
    assert error.value.reason is Reason.STORAGE_UNAVAILABLE
    assert bench.computed == [0]
    assert bench.holds == {0: 0}


# The runner, on threads.


def test_the_next_layer_is_read_while_this_one_is_computed() -> None:
    """Each computation ends only once the next fetch has begun: without overlap this would never end."""
    begun = [threading.Event() for _ in range(5)]
    order: list[str] = []

    def job(index: int) -> LayerJob:
        def fetch(slot: int, deadline: float, sink: TransferSink) -> None:
            begun[index].set()
            order.append(f"fetch {index}")
            sink.done(0, None)
            sink.drained(0)

        def compute(slot: int | None) -> None:
            if index + 1 < 4:
                assert begun[index + 1].wait(30)
            order.append(f"compute {index}")

        return LayerJob(compute, fetch, 1)

    ticks = iter(range(10**6))
    with ThreadPoolExecutor(1) as executor:
        runner = LayerRunner(lambda: float(next(ticks)), issue=executor.submit)
        times = runner.run([job(index) for index in range(4)], deadline=1e9)
    assert [name for name in order if name.startswith("compute")] == [f"compute {at}" for at in range(4)]
    check_timeline(times)


def test_a_job_says_how_many_completions_it_has() -> None:
    nothing: Callable[[int | None], None] = lambda slot: None  # noqa: E731
    for options in ({"items": 1}, {"fetch": lambda slot, deadline, sink: None}):
        with pytest.raises(ValueError, match="items"):
            LayerJob(nothing, **options)  # type: ignore[arg-type]
