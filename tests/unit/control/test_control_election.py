"""The Lease and its gate, on a fake clock: one leader, in every order of pauses and failures."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_operator.clock import SystemClock
from kvtier_operator.election import Callbacks, LeaseElection, Timing
from kvtier_operator.ports import (
    AlreadyExists,
    ApiError,
    Clock,
    Conflict,
    JsonObject,
    NotFound,
    NotLeader,
    ObjectKey,
)
from tests.unit.control.control_fakes import FakeClock

TIMING = Timing(duration=15, renew=5, retry=2, margin=5, jitter=0)


class LeaseServer:
    """One Lease with resource versions. `down`: no request gets an answer."""

    def __init__(self) -> None:
        self.lease: JsonObject | None = None
        self.version = 0
        self.down = False
        self.asked: list[str] = []

    async def get(self, key: ObjectKey) -> JsonObject:
        self.asked.append("get")
        self._up()
        if self.lease is None:
            raise NotFound(404, "NotFound", str(key))
        return copy.deepcopy(self.lease)

    async def create(self, manifest: JsonObject) -> JsonObject:
        self._up()
        if self.lease is not None:
            raise AlreadyExists(409, "AlreadyExists", "")
        return self._put(manifest)

    async def replace(self, manifest: JsonObject) -> JsonObject:
        self.asked.append("replace")
        self._up()
        assert self.lease is not None
        if manifest["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
            raise Conflict(409, "Conflict", "")
        return self._put(manifest)

    def _put(self, manifest: JsonObject) -> JsonObject:
        self.version += 1
        self.lease = copy.deepcopy(manifest)
        self.lease["metadata"]["resourceVersion"] = str(self.version)
        return copy.deepcopy(self.lease)

    def _up(self) -> None:
        if self.down:
            raise ApiError(0, "Unreachable", "down")


class Candidate:
    def __init__(self, server: LeaseServer, identity: str, clock: Clock, timing: Timing = TIMING) -> None:
        self.changes: list[str] = []
        self.clock = clock
        self.election = LeaseElection(
            server,
            namespace="kvtier-system",
            identity=identity,
            clock=clock,
            randomness=lambda: 0.0,
            callbacks=Callbacks(
                lambda: self.changes.append("started"), lambda: self.changes.append("stopped")
            ),
            timing=timing,
        )

    def leads(self) -> bool:
        try:
            self.election.check()
        except NotLeader:
            return False
        return True


async def turn_until(reached: Callable[[], bool]) -> None:
    for _ in range(1_000_000):
        if reached():
            return
        await asyncio.sleep(0)
    raise AssertionError("never")


def two() -> tuple[LeaseServer, FakeClock, Candidate, Candidate]:
    server, clock = LeaseServer(), FakeClock()
    return server, clock, Candidate(server, "one", clock), Candidate(server, "two", clock)


async def test_the_first_leads_and_the_second_waits() -> None:
    _, _, one, two_ = two()
    await one.election.step()
    await two_.election.step()
    assert (one.leads(), two_.leads()) == (True, False)
    assert one.changes == ["started"]


async def test_the_gate_closes_before_the_lease_ends_for_others() -> None:
    server, clock, one, other = two()
    await one.election.step()
    await other.election.step()  # begins to watch the Lease
    server.down = True
    clock.advance(TIMING.duration - TIMING.margin + 0.1)
    assert not one.leads(), "a paused leader must stop by its own clock"
    server.down = False
    await other.election.step()
    assert not other.leads(), "the others still wait"
    clock.advance(TIMING.margin)
    await other.election.step()
    assert other.leads()


async def test_a_short_outage_does_not_end_a_lease_that_still_runs() -> None:
    server, clock, one, _ = two()
    await one.election.step()
    clock.advance(5)
    server.down = True
    assert await one.election.step() is False
    assert one.leads()
    clock.advance(5)
    await one.election.step()
    assert not one.leads()
    assert one.changes == ["started", "stopped"]
    server.down = False
    await one.election.step()
    assert one.leads()


async def test_a_released_lease_is_taken_without_waiting_for_its_end() -> None:
    _, clock, one, other = two()
    await one.election.step()
    await other.election.step()
    await one.election.release()
    assert not one.leads()
    clock.advance(0.1)
    await other.election.step()
    assert other.leads()


async def test_who_waits_for_a_lease_tries_at_once_when_it_is_said_to_be_free() -> None:
    server, clock = LeaseServer(), FakeClock()
    patient = Timing(duration=15, renew=5, retry=3600, margin=5, jitter=0)
    one, other = Candidate(server, "one", clock), Candidate(server, "two", clock, patient)
    await one.election.step()
    running = asyncio.create_task(other.election.run())
    await turn_until(lambda: server.asked.count("get") == 2)
    other.election.look()
    await turn_until(lambda: server.asked.count("get") == 3)
    assert not other.leads(), "it was not free"
    await one.election.release()
    other.election.look()
    await turn_until(other.leads)
    running.cancel()


async def test_operators_find_each_others_lease_by_its_label() -> None:
    """Also that of an operator that had set none."""
    server, clock, one, other = two()
    await one.election.step()
    assert server.lease is not None
    assert server.lease["metadata"]["labels"] == {"kvtier.dev/component": "operator"}
    server.lease["metadata"]["labels"] = {"team": "serving"}
    await other.election.step()
    clock.advance(TIMING.duration)
    await other.election.step()
    assert other.leads()
    labels = server.lease["metadata"]["labels"]
    assert labels == {"team": "serving", "kvtier.dev/component": "operator"}


async def test_a_renewal_is_one_request() -> None:
    """Two, each as slow as a server may be, would take longer than the Lease lasts."""
    server, clock, one, _ = two()
    await one.election.step()
    server.asked.clear()
    for _ in range(3):
        clock.advance(5)
        assert await one.election.step()
    assert server.asked == ["replace"] * 3


@pytest.mark.parametrize("seconds", [0.0, 2.5, 4.5])
async def test_the_gate_of_a_leader_whose_server_is_slow_stays_open(seconds: float) -> None:
    server, clock, one, _ = two()
    await one.election.step()
    replace = server.replace
    open_: list[bool] = []

    async def slow(manifest: JsonObject) -> JsonObject:
        clock.advance(seconds)
        open_.append(one.leads())
        return await replace(manifest)

    server.replace = slow  # type: ignore[method-assign]
    renewed, began = True, clock.monotonic()
    for _ in range(5):
        clock.advance(one.election.pause(renewed, began))
        open_.append(one.leads())
        began = clock.monotonic()
        renewed = await one.election.step()
    assert open_ == [True] * 10


@pytest.mark.parametrize("lost", [False, True], ids=["written by another", "its answer was lost"])
async def test_a_lease_that_has_another_version_is_looked_at_and_kept(lost: bool) -> None:
    server, clock, one, _ = two()
    await one.election.step()
    assert server.lease is not None
    if lost:
        replace = server.replace

        async def unheard(manifest: JsonObject) -> JsonObject:
            await replace(manifest)
            raise ApiError(0, "Unreachable", "no answer")

        server.replace = unheard  # type: ignore[method-assign]
        clock.advance(5)
        assert not await one.election.step()
        server.replace = replace  # type: ignore[method-assign]
    else:
        server._put(server.lease | {"metadata": server.lease["metadata"] | {"labels": {"by": "hand"}}})
    clock.advance(4)
    assert await one.election.step()
    clock.advance(9)
    assert one.leads()
    assert one.changes == ["started"]
    assert server.lease["spec"]["leaseTransitions"] == 0


async def test_a_lease_that_was_deleted_is_made_again() -> None:
    server, clock, one, _ = two()
    await one.election.step()
    server.lease = None
    replace = server.replace

    async def gone(manifest: JsonObject) -> JsonObject:
        if server.lease is None:
            raise NotFound(404, "NotFound", "")
        return await replace(manifest)

    server.replace = gone  # type: ignore[method-assign]
    clock.advance(5)
    assert await one.election.step()
    assert server.lease is not None and one.changes == ["started"]


async def test_a_lease_that_is_deleted_under_its_holder_makes_no_second_leader() -> None:
    """The others hear of it at once, the holder at its next renewal; till then it may write."""
    server, clock, one, other = two()
    await one.election.step()
    await other.election.step()
    server.lease = None
    for _ in range(2):
        assert not await other.election.step()
        assert (one.leads(), other.leads()) == (True, False)
        clock.advance(4)
    # It has gone, too, and its gate is closed.
    clock.advance(TIMING.duration - 8)
    assert not one.leads()
    assert await other.election.step()


async def test_a_lease_that_nobody_was_seen_to_hold_is_made_at_once() -> None:
    _, _, one, _ = two()
    assert await one.election.step()


async def test_a_release_that_meets_a_renewal_or_a_failure_is_tried_again() -> None:
    """A renewal that was cut off by the end arrives between the two requests of the release."""
    server, _, one, other = two()
    await one.election.step()
    await other.election.step()
    replace, troubles = server.replace, [Conflict(409, "Conflict", ""), ApiError(500, "InternalError", "")]

    async def troubled(manifest: JsonObject) -> JsonObject:
        if troubles:
            raise troubles.pop(0)
        return await replace(manifest)

    server.replace = troubled  # type: ignore[method-assign]
    await one.election.release()
    assert server.lease is not None and server.lease["spec"]["holderIdentity"] == ""
    await other.election.step()
    assert other.leads()


async def test_why_no_lease_was_taken_is_known_until_a_try_gets_an_answer() -> None:
    server, _, one, _ = two()
    server.down = True
    await one.election.step()
    assert one.election.trouble == "0 Unreachable: down"
    server.down = False
    await one.election.step()
    assert one.election.trouble == ""


async def test_another_clock_on_the_holders_node_does_not_matter() -> None:
    """Its renewTime lies far in the past by our clock; only what we have seen of changes counts."""
    server, clock, one, other = two()
    await one.election.step()
    assert server.lease is not None
    server.lease["spec"]["renewTime"] = "2001-01-01T00:00:00.000000Z"
    await other.election.step()
    clock.advance(TIMING.duration - 1)
    await other.election.step()
    assert not other.leads()


async def test_time_in_which_the_machine_was_suspended_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """CLOCK_MONOTONIC stands still meanwhile: the gate would still be open when others lead."""
    seconds = {time.CLOCK_BOOTTIME: 1000.0}
    monkeypatch.setattr(time, "clock_gettime", seconds.__getitem__)
    one = Candidate(LeaseServer(), "one", SystemClock())
    await one.election.step()
    assert one.leads()
    seconds[time.CLOCK_BOOTTIME] += TIMING.duration - TIMING.margin
    assert not one.leads()


async def test_losing_a_race_is_not_leading() -> None:
    server, clock, one, other = two()
    await one.election.step()
    assert server.lease is not None
    clock.advance(1)
    stale = copy.deepcopy(server.lease)

    async def old_read(key: ObjectKey) -> JsonObject:
        return copy.deepcopy(stale)

    server._put(stale | {"spec": stale["spec"] | {"holderIdentity": "two"}})
    server.get = old_read  # type: ignore[method-assign]
    await one.election.step()
    assert not one.leads()
    assert not other.leads()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["one", "two", "down", "up"]), st.floats(0.1, 9)), max_size=40))
async def test_there_are_never_two_leaders(events: list[tuple[str, float]]) -> None:
    server, clock, one, other = two()
    for what, seconds in events:
        if what in ("down", "up"):
            server.down = what == "down"
        else:
            await (one if what == "one" else other).election.step()
        assert not (one.leads() and other.leads())
        clock.advance(seconds)
        assert not (one.leads() and other.leads())


@pytest.mark.parametrize("seconds, leads", [(9.9, True), (10.0, False)])
async def test_the_gate_is_open_for_duration_less_margin(seconds: float, leads: bool) -> None:
    _, clock, one, _ = two()
    await one.election.step()
    clock.advance(seconds)
    assert one.leads() is leads
    assert (one.election.leading_since() is not None) is leads
