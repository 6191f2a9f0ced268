"""A gate on a metric of another system, from the spec to the look."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvtier.v1 import common_pb2 as common
from kvtier_evidence.external import Above, ExternalReading, Form
from kvtier_evidence.gatespec import GateSpec
from kvtier_evidence.metrics import EXTERNAL
from kvtier_evidence.verdicts import Basis, Reason
from kvtier_evidence.window import WindowCounts, WindowKey
from kvtier_operator.external.query import Query
from kvtier_operator.rollout.feed import EvidenceFeed
from kvtier_operator.rollout.foresight import step_needs
from kvtier_operator.rollout.grants import fence_of, grant_request, window_key
from kvtier_operator.rollout.inputs import GateVerdict, Look
from kvtier_operator.rollout.readings import Reading
from kvtier_operator.rollout.spec import RolloutSpec, SpecError, parse_spec
from kvtier_operator.rollout.state import RolloutState
from kvtier_operator.rollout.status import from_status
from kvtier_operator.rollout.vocabulary import Verdict
from tests.unit.rollout.rollout_world import World
from tests.unit.rollout.test_rollout_feed import EvidenceOf

ERRORS = {
    "name": "errors",
    "metric": "external",
    "max": "5%",
    "query": "counters(errors; requests)",
    "designEffect": "1",
}
DEPTH = {"name": "depth", "metric": "external", "max": "2", "query": "max(depth)", "canFail": True}


class Told:
    """Answers every gate with one reading."""

    def __init__(self, reading: ExternalReading) -> None:
        self.reading = reading
        self.asked: list[tuple[float, str, Query]] = []
        self.forgotten: list[str] = []

    async def read(
        self,
        key: WindowKey,
        gates: Sequence[tuple[GateSpec, Query]],
        *,
        opened_at: float,
        now: float,
        interval: float,
    ) -> Mapping[str, ExternalReading]:
        self.asked += [(opened_at, gate.name, query) for gate, query in gates]
        return {gate.name: self.reading for gate, _ in gates}

    def forget(self, uid: str) -> None:
        self.forgotten.append(uid)


async def canary() -> World:
    """A rollout in Canary; the gate joins its spec by `raw_with`."""
    world = World()
    await world.until("Progressing", "Canary")
    return world


def raw_with(world: World, gate: Mapping[str, Any]) -> dict[str, Any]:
    raw = dict(world.api.objects[world.rollout]["spec"])
    return {**raw, "gates": [*(raw.get("gates") or []), dict(gate)]}


async def judged(told: Told | None, gate: Mapping[str, Any]) -> GateVerdict:
    world = await canary()
    spec, state = parse_spec(raw_with(world, gate)), from_status(world.status)
    assert state.window is not None
    uid = world.api.objects[world.rollout]["metadata"]["uid"]
    key = window_key(state, spec, uid)
    reading = Reading(common.CacheRef(namespace="serving", name="chat"), fence_of(state, uid), key, ())
    feed = EvidenceFeed(EvidenceOf(WindowCounts()), world.clock, told)  # type: ignore[arg-type]
    look = await feed.look(reading, state, spec, world.clock.seconds)
    if told is not None:
        assert [(at, name) for at, name, _ in told.asked] == [(state.window.opened_at, gate["name"])]
        feed.forget(uid)
        assert told.forgotten == [uid]
    return next(one for one in look.verdicts if one.name == gate["name"])


GOOD = ExternalReading(Form.COUNTER_PAIR, Basis.ANYTIME, above=Above(5000, 40, 40, True))
BAD = ExternalReading(Form.COUNTER_PAIR, Basis.ANYTIME, above=Above(5000, 600, 600, True))
DOWN = ExternalReading(Form.COUNTER_PAIR, Basis.ANYTIME, Reason.QUERY_FAILED, "HTTP 503")
HIGH = ExternalReading(Form.EXPRESSION, Basis.GUARD_ONLY, value=3.0, breaches=3)
LOOKS: dict[str, tuple[Told | None, Mapping[str, Any], str, bool]] = {
    "good counts": (Told(GOOD), ERRORS, "BoundInsideLimit", True),
    "bad counts": (Told(BAD), ERRORS, "BoundOutsideLimit", True),
    "unreadable": (Told(DOWN), ERRORS, "QueryFailed", True),
    "no source at all": (None, ERRORS, "QueryFailed", True),
    "a value that was over its limit three times": (Told(HIGH), DEPTH, "BoundOutsideLimit", False),
}


@pytest.mark.parametrize("case", LOOKS)
async def test_a_look_judges_what_the_source_says(case: str) -> None:
    told, gate, reason, required = LOOKS[case]
    got = await judged(told, gate)
    assert (got.reason, got.metric, got.required) == (reason, EXTERNAL, required)
    assert got.detail == (told.reading.detail if told is not None else "")


async def test_the_condition_says_why_a_source_cannot_be_read() -> None:
    world = World()
    await world.until("Progressing", "Canary")
    said = world.feed.look

    async def unreadable(reading: Reading, state: RolloutState, spec: RolloutSpec, now: float) -> Look:
        look = await said(reading, state, spec, now)
        bad = GateVerdict("errors", Verdict.PROVIDER_ERROR, "QueryFailed", detail="HTTP 503 from https://p")
        return replace(look, verdicts=(*look.verdicts, bad))

    world.feed.look = unreadable  # type: ignore[method-assign]
    await world.run(20)
    degraded = next(one for one in world.status["conditions"] if one["type"] == "Degraded")
    assert degraded["reason"] == "ProviderError"
    assert degraded["message"] == "errors: QueryFailed, HTTP 503 from https://p"


async def test_agents_are_not_told_of_it_and_the_window_is_another_one_with_another_query() -> None:
    world = await canary()
    state = from_status(world.status)
    one = parse_spec(raw_with(world, ERRORS))
    other = parse_spec(raw_with(world, {**ERRORS, "query": "counters(failures; requests)"}))
    assert one.gates_digest != other.gates_digest
    assert one.window_hash != other.window_hash
    request = grant_request(
        state,
        one,
        cache=common.CacheRef(namespace="serving", name="chat"),
        rollout_uid="uid",
        manifest=b"",
        boot_id="boot",
        nonce=b"n",
    )
    assert EXTERNAL not in {gate.metric for gate in request.gates}
    assert len(request.gates) > 3


async def test_a_forecast_says_nothing_of_its_traffic() -> None:
    world = await canary()
    with_it, without = (
        parse_spec(raw_with(world, ERRORS)),
        parse_spec(world.api.objects[world.rollout]["spec"]),
    )
    assert [one.requests for one in step_needs(with_it, 1)] == [
        one.requests for one in step_needs(without, 1)
    ]
    assert with_it.cells > without.cells


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a query that is none": ({"query": "counters(a)"}, r"spec.gates\[errors\].query"),
    "rates are no counts": ({"query": "counters(rate(a[5m]); b)"}, "raw series"),
    "a share over one": ({"max": "2"}, "fraction"),
    "counts with a quantile": ({"quantile": 99}, "takes no quantile"),
    "a histogram without one": ({"query": "buckets(latency_bucket)"}, "needs a quantile"),
    "a point without its count": ({"query": "max(x)", "inference": "PointThreshold"}, "count"),
    "counts by their value": ({"inference": "PointThreshold"}, "judged as counts"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_specs_that_cannot_be(case: str) -> None:
    change, message = REFUSED[case]
    world = World()
    raw = dict(world.api.objects[world.rollout]["spec"])
    with pytest.raises(SpecError, match=message):
        parse_spec({**raw, "gates": [*(raw.get("gates") or []), {**ERRORS, **change}]})
