"""Looks of one pool's rollouts fall on the same moments, and none comes later than it would by itself."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvtier_evidence.carry import Carry
from kvtier_operator.ports import JsonObject, Kind
from kvtier_operator.rollout.beats import PoolBeats, next_beat
from kvtier_operator.rollout.evaluation import next_due, record_look
from kvtier_operator.rollout.inputs import CacheView, CandidateView, Inputs, Look
from kvtier_operator.rollout.moves import tick_seconds
from kvtier_operator.rollout.state import RolloutState, Window
from kvtier_operator.rollout.status import format_stamp, parse_stamp
from kvtier_operator.rollout.vocabulary import Phase, Stage, Verdict
from tests.unit.rollout.machine_world import BASELINE, EPOCH, spec_of
from tests.unit.rollout.rollout_world import StoreView, World

SPEC = spec_of("a")
MOMENTS = st.floats(1.6e9, 4e9)
LEASES = st.floats(3.0, 90.0)
SHARES = st.floats(0.0, 1.0, exclude_max=True)
EXACT = 2e-5


@given(SHARES, LEASES, MOMENTS)
@example(0.25, 10.0, EPOCH + 10.0 / 3)
def test_the_next_beat_is_within_an_interval_and_the_following_ones_are_an_interval_apart(
    share: float, lease: float, now: float
) -> None:
    interval = tick_seconds(replace(SPEC, lease_ttl=lease))
    beats = [next_beat(share, interval, now)]
    for _ in range(3):
        beats.append(next_beat(share, interval, beats[-1]))
    assert 0.0 < beats[0] - now <= interval + EXACT
    for before, after in pairwise(beats):
        assert interval - 0.0011 <= after - before <= interval + EXACT
    assert all(abs(beat * 1000 - round(beat * 1000)) < 1e-3 for beat in beats), "whole milliseconds"


@given(SHARES, LEASES, MOMENTS, st.floats(0.0, 100.0))
def test_whoever_looks_in_between_has_the_same_next_beat(
    share: float, lease: float, now: float, later: float
) -> None:
    """Rollouts of one pool began at any moments: from their next look on they are together."""
    interval = tick_seconds(replace(SPEC, lease_ttl=lease))
    beat, other = next_beat(share, interval, now), next_beat(share, interval, now + later)
    step = math.floor(interval * 1000 + 1e-6) / 1000
    assert (other - beat) / step == pytest.approx(round((other - beat) / step), abs=1e-3)
    assert other >= beat


@given(SHARES, LEASES, MOMENTS)
def test_a_beat_that_was_written_down_and_read_again_is_the_same(
    share: float, lease: float, now: float
) -> None:
    """Else the next operator would look twice, or not with the others."""
    interval = tick_seconds(replace(SPEC, lease_ttl=lease))
    beat = next_beat(share, interval, now)
    read = parse_stamp(format_stamp(beat))
    assert read == pytest.approx(beat, abs=1e-6)
    assert next_beat(share, interval, read) == next_beat(share, interval, beat) > beat + interval / 2


def test_beats_are_the_same_for_every_version() -> None:
    assert next_beat(0.25, 10.0, 1_800_000_000.0) == 1_800_000_002.5


class Pools(StoreView):
    """AgentPools alone, by namespace and name, in the order in which they were made."""

    def __init__(self, *names: str) -> None:
        self.names = list(names)
        self.changes = 0

    def revision(self, kind: Kind) -> int:
        return self.changes

    def list_all(self, kind: Kind, namespace: str = "") -> list[JsonObject]:
        assert kind is Kind.AGENT_POOL
        return [
            {
                "metadata": dict(zip(("namespace", "name"), where.split("/"), strict=True))
                | {"creationTimestamp": f"2027-01-15T08:{number // 60:02d}:{number % 60:02d}Z"}
            }
            for number, where in sorted(enumerate(self.names), key=lambda one: one[1])
        ]

    def shares(self, beats: PoolBeats) -> list[float]:
        return [beats.share(*where.split("/")) for where in self.names]


@pytest.mark.parametrize("count", [1, 2, 3, 8, 40, 64, 100, 400])
def test_no_two_pools_lie_closer_together_than_half_of_an_even_share(count: int) -> None:
    """By chance some lie far closer, and their looks wait for each other at every beat."""
    pools = Pools(*(f"team-{n % 10}/pool-{n:03d}" for n in range(count)))
    shares = sorted(pools.shares(PoolBeats(pools)))
    gaps = [after - before for before, after in pairwise([*shares, shares[0] + 1.0])]
    assert all(0.0 <= one < 1.0 for one in shares)
    assert min(gaps) >= 0.5 / count - 1e-9 and max(gaps) <= 2.0 / count + 1e-9


def test_a_pool_that_is_new_changes_none_of_the_others_and_every_operator_has_the_same() -> None:
    pools = Pools("b/x", "a/y", "a/x")
    beats = PoolBeats(pools)
    before = pools.shares(beats)
    pools.names.append("a/a")
    pools.changes += 1
    assert pools.shares(beats)[:3] == before
    assert pools.shares(PoolBeats(pools)) == pools.shares(beats)
    assert 0.0 <= beats.share("a", "not-there") < 1.0


def holding(opened_at: float, phase: Phase = Phase.PROGRESSING) -> RolloutState:
    window = Window(7, opened_at, SPEC.window_hash)
    return RolloutState(phase=phase, stage=Stage.SHADOW, attempt=1, fence=7, window=window)


def looked(state: RolloutState, now: float, share: float, spec: object = SPEC) -> RolloutState:
    """The state after a look that is taken now."""
    inputs = Inputs(
        now=now,
        uid="u",
        name="quest",
        generation=1,
        spec=None,
        spec_error="",
        deleting=False,
        cache=CacheView("c", 7, BASELINE, None, beat=share),
        busy_with="",
        superseded_by="",
        candidate=CandidateView(),
        agents=(),
        look=Look(7, now, (), Carry(), ""),
    )
    return record_look(state, inputs, spec)  # type: ignore[arg-type]


@given(SHARES, LEASES, st.floats(0.0, 1000.0))
def test_no_look_comes_later_than_on_a_beat_of_ones_own(share: float, lease: float, begun: float) -> None:
    """One's own: an interval after the first look, and so on."""
    spec = replace(SPEC, lease_ttl=lease)
    first = EPOCH + begun
    state, now = holding(first), first
    for count in range(1, 20):
        state = looked(state, now, share, spec)
        assert state.schedule is not None and state.schedule.ran_at == now
        assert next_due(state, spec, now) == state.schedule.due_at, "no clock was set back"
        now = state.schedule.due_at
        assert now <= first + count * tick_seconds(spec) + EXACT


@given(SHARES, st.floats(0.0, 1000.0), st.floats(0.0, 100.0))
def test_beats_that_were_missed_are_made_up_for_once(share: float, begun: float, late: float) -> None:
    state = looked(holding(EPOCH), EPOCH + begun, share)
    assert state.schedule is not None
    due = state.schedule.due_at
    state = looked(state, due + late, share)
    assert state.schedule is not None
    assert state.schedule.late_by == pytest.approx(late, abs=1e-3)
    assert due + late < state.schedule.due_at <= due + late + tick_seconds(SPEC) + EXACT
    before = state.schedule
    again = looked(state, due + late, share)
    assert again.schedule == before, "not a second time"


LEAST = max(SPEC.ladder[0].min_seconds, SPEC.warmup + SPEC.settle)


@given(SHARES, LEASES, st.floats(0.0, 1000.0))
def test_a_step_is_looked_at_as_it_has_lasted(share: float, lease: float, begun: float) -> None:
    """On time for a step of any length, wherever the pool's beats lie; once, and then on beats again."""
    spec = replace(SPEC, lease_ttl=lease)
    now = opened_at = EPOCH + begun
    state, ran = holding(opened_at), []
    for _ in range(8):
        state = looked(state, now, share, spec)
        ran.append(now)
        now = next_due(state, spec, now)
    assert sum(one == opened_at + LEAST for one in ran) == 1
    for before, after in pairwise(ran):
        assert after == opened_at + LEAST or after == next_beat(share, tick_seconds(spec), before)


@pytest.mark.parametrize("phase", [Phase.PAUSED, Phase.COMPLETED])
def test_a_step_that_does_not_end_by_itself_is_looked_at_on_beats_alone(phase: Phase) -> None:
    state = looked(holding(EPOCH, phase), EPOCH, 0.75)
    assert state.schedule is not None
    assert state.schedule.due_at == next_beat(0.75, tick_seconds(SPEC), EPOCH)


async def test_rollouts_of_a_pool_that_began_at_other_moments_look_together() -> None:
    """Of two that begin 3.7 s apart, and an operator that goes on with one of them."""
    due = []
    for begin in (0.0, 3.7):
        world = World(leaseTTL="60s")
        world.clock.seconds += begin
        world.feed.default = Verdict.INSUFFICIENT
        await world.until("Progressing", "Shadow")
        await world.run(25)
        if begin:
            world.restart()
            await world.run(12)
        schedule = world.operator._kept["uid-quest"].schedule
        assert schedule is not None
        due.append(schedule.due_at)
    assert (due[1] - due[0]) % 10.0 == pytest.approx(0.0, abs=1e-6)
