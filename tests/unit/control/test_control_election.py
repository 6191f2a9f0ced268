"""The Lease and its gate, on a fake clock: one leader, in every order of pauses and failures."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_operator.election import Callbacks, LeaseElection, Timing
from kvtier_operator.ports import (
    AlreadyExists,
    ApiError,
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

    async def get(self, key: ObjectKey) -> JsonObject:
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
    def __init__(self, server: LeaseServer, identity: str, clock: FakeClock) -> None:
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
            timing=TIMING,
        )

    def leads(self) -> bool:
        try:
            self.election.check()
        except NotLeader:
            return False
        return True


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
