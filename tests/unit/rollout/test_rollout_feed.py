"""Evidence as agents send it becomes one look: also what the window says to the next one."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace
from typing import Any

import pytest

from kvtier.v1 import common_pb2 as common
from kvtier.v1 import control_pb2 as control
from kvtier.v1 import evidence_pb2 as evidence
from kvtier_agent.evidence_convert import counts_message
from kvtier_evidence import metrics
from kvtier_evidence.bounds import quantile_upper
from kvtier_evidence.delta import DeltaLog
from kvtier_evidence.design import BlockSums
from kvtier_evidence.grid import Histogram
from kvtier_evidence.window import WindowCounts
from kvtier_operator.ports import AgentError, AgentTarget, AgentUnreachable
from kvtier_operator.rollout import feed as feed_module
from kvtier_operator.rollout.beatreads import BeatReads
from kvtier_operator.rollout.evidencewire import counts_of
from kvtier_operator.rollout.feed import EvidenceFeed, thresholds_of
from kvtier_operator.rollout.grants import counted_gates, fence_of, window_key
from kvtier_operator.rollout.inputs import Look
from kvtier_operator.rollout.readings import Reading
from kvtier_operator.rollout.spec import RolloutSpec, parse_spec
from kvtier_operator.rollout.state import RolloutState, Schedule
from kvtier_operator.rollout.status import from_status, to_status
from kvtier_operator.rollout.vocabulary import Verdict
from tests.unit.rollout.rollout_world import World

SLOW, FAST = 0.08, 0.02


class EvidenceOf:
    """Every agent answers with the same counts, whole."""

    def __init__(self, counts: WindowCounts, assigned: int = 0) -> None:
        self._counts, self._assigned = counts, assigned

    async def read_evidence(self, node: AgentTarget, request: Any) -> control.ReadEvidenceResponse:
        return control.ReadEvidenceResponse(
            epoch="boot",
            to_seq=1,
            full=True,
            increments=counts_message(self._counts),
            total_units=self._counts.total(),
            settled_cohort=1,
            assigned_units=self._assigned,
        )


def tpot(*values: float | None) -> WindowCounts:
    counts = WindowCounts()
    for value in values:
        counts.of(metrics.TPOT_RATIO, metrics.Arm.BASELINE).histogram.add(value)
    return counts


def errors(blocks: int) -> WindowCounts:
    """Ten requests a block, and all of every tenth block above the limit: they share what happens to them."""
    counts, sums = WindowCounts(), BlockSums()
    for block in range(blocks):
        above = 10 if block % 10 == 0 else 0
        sums.add_one_arm(10, above)
        for index in range(10):
            into = counts.of(metrics.OUTPUT_RELATIVE_ERROR, metrics.Arm.CANDIDATE)
            into.histogram.add(1.0 if index < above else 0.0)
    counts.blocks["output"] = sums
    return counts


def ratio_gates(spec: RolloutSpec) -> set[str]:
    return {
        gate.name
        for step in spec.ladder
        for gate in spec.gates_of(step)
        if gate.metric.kind is metrics.Kind.RATIO
    }


def quantile(share: float) -> str:
    histogram = Histogram()
    for value in [FAST] * 90 + [SLOW] * 10:
        histogram.add(value)
    found = histogram.quantile(share)
    assert found is not None
    return f"{found:.9g}"


async def test_a_look_says_the_baselines_quantiles_of_every_ratio_gate_of_the_ladder() -> None:
    world = World()
    await world.until("Progressing", "Shadow")
    spec = parse_spec(world.api.objects[world.rollout]["spec"])
    state = from_status(world.status)
    counts = tpot(*[FAST] * 90, *[SLOW] * 10)
    feed = EvidenceFeed(EvidenceOf(counts), world.clock)  # type: ignore[arg-type]
    uid = world.api.objects[world.rollout]["metadata"]["uid"]
    reading = Reading(
        cache=common.CacheRef(namespace="serving", name="chat"),
        fence=fence_of(state, uid),
        key=window_key(state, spec, uid),
        nodes=(AgentTarget("node-0", "uid-0", "10.0.0.1:7443", "boot"),),
    )
    look = await feed.look(reading, state, spec, world.clock.seconds)
    told = dict(look.pair_thresholds)
    assert set(told) == ratio_gates(spec) != set()
    assert set(told.values()) == {quantile(0.99), quantile(0.5)}, "a tail and its median guard"
    assert look.pair_thresholds == tuple(sorted(told.items()))
    # A thousand looks are kept, which all say the same few words, and their statuses say them too.
    again = EvidenceFeed(EvidenceOf(counts), world.clock)  # type: ignore[arg-type]
    same = await again.look(reading, state, spec, world.clock.seconds)
    assert {"DesignEffectUnknown", "inf"} < set(words(look)) and words(look) == words(same)
    assert [id(word) for word in words(look)] == [id(word) for word in words(same)]


def words(look: Look) -> list[str]:
    return [
        word
        for one in look.verdicts
        for word in (one.reason, one.value, one.bound, one.limit, one.k, one.basis)
    ]


async def test_looks_whose_answers_come_at_once_are_judged_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop turns between any two of them: others need not wait until all are judged."""
    world = World()
    await world.until("Progressing", "Shadow")
    spec = parse_spec(world.api.objects[world.rollout]["spec"])
    state = from_status(world.status)
    feed = EvidenceFeed(EvidenceOf(tpot(*[FAST] * 90)), world.clock)  # type: ignore[arg-type]
    turns, judged_at, judge = 0, list[int](), feed_module.judge

    def noted(*given: Any) -> Any:
        judged_at.append(turns)
        return judge(*given)

    monkeypatch.setattr(feed_module, "judge", noted)

    async def look(number: int) -> None:
        uid = f"u{number}"
        reading = Reading(
            cache=common.CacheRef(namespace="serving", name="chat"),
            fence=fence_of(state, uid),
            key=window_key(state, spec, uid),
            nodes=(AgentTarget("node-0", "uid-0", "10.0.0.1:7443", "boot"),),
        )
        await feed.look(reading, state, spec, world.clock.seconds)

    looks = asyncio.gather(*(look(number) for number in range(5)))
    while not looks.done():
        turns += 1
        await asyncio.sleep(0)
    await looks
    assert len(set(judged_at)) == len(judged_at) == 5


async def test_of_a_window_that_no_agent_has_been_granted_under_nobody_is_asked() -> None:
    world = World()
    await world.until("Progressing", "Shadow")
    spec = parse_spec(world.api.objects[world.rollout]["spec"])
    state = from_status(world.status)
    uid = world.api.objects[world.rollout]["metadata"]["uid"]
    reading = Reading(
        cache=common.CacheRef(namespace="serving", name="chat"),
        fence=fence_of(state, uid),
        key=window_key(state, spec, uid),
        nodes=(AgentTarget("node-0", "uid-0", "10.0.0.1:7443", "boot"),),
    )
    # They would say that they know no such window; this has no answer at all.
    found = []
    for agents, unopened in ((object(), True), (Unknowing(), False)):
        feed = EvidenceFeed(agents, world.clock)  # type: ignore[arg-type]
        found.append(await feed.look(replace(reading, unopened=unopened), state, spec, world.clock.seconds))
    assert found[0] == found[1]
    assert {verdict.verdict for verdict in found[0].verdicts if verdict.required} == {Verdict.INSUFFICIENT}


class Unknowing:
    async def read_evidence(self, node: AgentTarget, request: object) -> None:
        raise AgentError(node.name, "WINDOW_UNKNOWN", "no such window", 0.0, {})


async def test_another_operator_judges_by_the_design_effects_of_the_status() -> None:
    """One operator measured them, wrote them and died; the next one has read nothing but the open window."""
    world = World()
    await world.until("Progressing", "Shadow")
    spec = replace(parse_spec(world.api.objects[world.rollout]["spec"]), design_effect=None)
    state = from_status(world.status)
    assert state.window is not None
    uid = world.api.objects[world.rollout]["metadata"]["uid"]
    nodes = (AgentTarget("node-0", "uid-0", "10.0.0.1:7443", "boot"),)

    async def look(counts: WindowCounts, at: RolloutState) -> Look:
        key = window_key(at, spec, uid)
        reading = Reading(common.CacheRef(namespace="serving", name="chat"), fence_of(at, uid), key, nodes)
        feed = EvidenceFeed(EvidenceOf(counts), world.clock)  # type: ignore[arg-type]
        return await feed.look(reading, at, spec, world.clock.seconds)

    def k_of(found: Look) -> tuple[str, str]:
        gate = next(one for one in found.verdicts if one.name == "output")
        return gate.k, gate.reason

    first = await look(errors(blocks=300), state)
    assert k_of(first) == ("", "DesignEffectUnknown")
    measured = {one.gate: one for one in first.effects}
    assert measured["output"].blocks == 300
    later = replace(state, window=replace(state.window, opening_fence=99, effects=first.effects))
    second = await look(errors(blocks=0), from_status(to_status(later)))
    assert float(k_of(second)[0]) == pytest.approx(1.5 * float(measured["output"].k), rel=1e-3)
    assert k_of(second)[1] != "DesignEffectUnknown"


@pytest.mark.parametrize(("age", "rate"), [(20, 0.0), (40, 2.5)], ids=["too-young", "old-enough"])
async def test_a_look_says_how_many_requests_come(age: int, rate: float) -> None:
    """What the agents have assigned since the window opened, also for an operator that has just started."""
    world = World()
    await world.until("Progressing", "Shadow")
    spec = parse_spec(world.api.objects[world.rollout]["spec"])
    state = from_status(world.status)
    assert state.window is not None
    uid = world.api.objects[world.rollout]["metadata"]["uid"]
    nodes = tuple(AgentTarget(f"node-{i}", f"uid-{i}", "10.0.0.1:7443", "boot") for i in range(2))
    key = window_key(state, spec, uid)
    reading = Reading(common.CacheRef(namespace="serving", name="chat"), fence_of(state, uid), key, nodes)
    feed = EvidenceFeed(EvidenceOf(WindowCounts(), assigned=50), world.clock)  # type: ignore[arg-type]
    look = await feed.look(reading, state, spec, state.window.opened_at + age)
    assert look.requests_per_second == rate


def with_absolute(raw: dict[str, Any]) -> dict[str, Any]:
    out = copy.deepcopy(raw)
    tail = {"name": "tail", "metric": "tpotRatio", "quantile": 99, "max": "1.25", "designEffect": "1"}
    others = [gate for gate in out["gates"] if gate["metric"] != "tpotRatio"]
    out["gates"] = [*others, {**tail, "absoluteInFull": "1.5"}]
    return out


def test_a_window_before_full_says_what_the_absolute_limit_there_is_a_multiple_of() -> None:
    """And none that is judged by it: a candidate that slows its neighbours would move its own limit."""
    world = World()
    spec = parse_spec(with_absolute(world.api.objects[world.rollout]["spec"]))
    counts = tpot(*[FAST] * 2970, *[SLOW] * 30)
    before = dict(thresholds_of(spec, counts, spec.gates_of(spec.ladder[1])))
    baseline = counts.get(metrics.TPOT_RATIO, metrics.Arm.BASELINE).histogram
    assert before.pop("tail-absolute") == f"{quantile_upper(baseline, 0.01, 0.01):.9g}"
    last = dict(thresholds_of(spec, counts, spec.gates_of(spec.ladder[-1])))
    assert last == before and set(last) == ratio_gates(spec)


async def test_a_slow_tail_in_full_fails_by_what_the_status_remembers_of_the_step_before() -> None:
    world = World()
    raw = with_absolute(world.api.objects[world.rollout]["spec"])
    spec = parse_spec(raw)
    await world.until("Progressing", "Full")
    state = from_status(world.status)
    assert state.window is not None
    uid = world.api.objects[world.rollout]["metadata"]["uid"]
    counts = WindowCounts()
    h = counts.of(metrics.TPOT_RATIO, metrics.Arm.CANDIDATE).histogram
    h.add(FAST, 80)
    h.add(SLOW, 20)

    async def judged(known: tuple[tuple[str, str], ...]) -> Look:
        assert state.window is not None
        reading = Reading(
            common.CacheRef(namespace="serving", name="chat"),
            fence_of(state, uid),
            window_key(state, spec, uid),
            (AgentTarget("node-0", "uid-0", "10.0.0.1:7443", "boot"),),
        )
        feed = EvidenceFeed(EvidenceOf(counts), world.clock)  # type: ignore[arg-type]
        held = replace(state, window=replace(state.window, pair_thresholds=known))
        held = from_status(to_status(held))
        return await feed.look(reading, held, spec, world.clock.seconds)

    slow = await judged((("tail", "0.02"), ("tail-absolute", "0.025")))
    assert slow.failed == "tail-absolute"
    unknown = await judged((("tail", "0.02"),))
    row = next(one for one in unknown.verdicts if one.name == "tail-absolute")
    assert (unknown.failed, row.reason, row.required, row.metric) == ("", "NoData", False, "tpotReference")


def test_agents_are_not_asked_to_count_for_the_absolute_limit() -> None:
    """One of an earlier version does not know the metric, and would refuse the grant."""
    world = World()
    spec = parse_spec(with_absolute(world.api.objects[world.rollout]["spec"]))
    step = spec.ladder[-1]
    assert "tail-absolute" in [gate.name for gate in spec.gates_of(step)]
    told = [gate.name for gate in counted_gates(spec, step)]
    assert "tail" in told and "tail-absolute" not in told


@pytest.mark.parametrize("counts", [WindowCounts(), tpot(None)], ids=["no-metric", "no-value"])
def test_a_window_without_times_says_nothing(counts: WindowCounts) -> None:
    world = World()
    spec = parse_spec(world.api.objects[world.rollout]["spec"])
    assert thresholds_of(spec, counts, spec.gates_of(spec.ladder[1])) == ()


async def test_a_window_is_judged_again_when_something_was_counted_and_not_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    await world.until("Progressing", "Shadow")
    spec = parse_spec(world.api.objects[world.rollout]["spec"])
    state = from_status(world.status)
    uid = world.api.objects[world.rollout]["metadata"]["uid"]
    nodes = (AgentTarget("node-0", "uid-0", "10.0.0.1:7443", "boot"),)
    reading = Reading(
        common.CacheRef(namespace="serving", name="chat"),
        fence_of(state, uid),
        window_key(state, spec, uid),
        nodes,
    )
    counts = errors(blocks=30)
    log = DeltaLog("boot", counts)
    log.changed()

    class Told:
        async def read_evidence(self, node: AgentTarget, request: Any) -> control.ReadEvidenceResponse:
            delta = log.read(request.epoch, request.ack_seq, settled_cohort=1, assigned_units=300)
            return control.ReadEvidenceResponse(
                epoch=delta.epoch,
                from_seq=delta.from_seq,
                to_seq=delta.to_seq,
                full=delta.full,
                increments=counts_message(delta.increments),
                total_units=delta.total_units,
                settled_cohort=delta.settled_cohort,
                assigned_units=delta.assigned_units,
            )

    judged: list[int] = []
    original = feed_module.judge

    def counted(gates: Any, evidence: Any, *rest: Any) -> Any:
        judged.append(evidence.merged.total())
        return original(gates, evidence, *rest)

    monkeypatch.setattr(feed_module, "judge", counted)
    feed = EvidenceFeed(Told(), world.clock)  # type: ignore[arg-type]
    looks = []
    for _ in range(3):
        looks.append(await feed.look(reading, state, spec, world.clock.seconds))
        world.clock.seconds += 1
    assert len(judged) == 1
    assert looks[0].verdicts is looks[2].verdicts and looks[0].carry is looks[2].carry
    assert looks[2].at == looks[0].at + 2
    into = counts.of(metrics.OUTPUT_RELATIVE_ERROR, metrics.Arm.CANDIDATE)
    into.histogram.add(1.0)
    log.changed()
    after = await feed.look(reading, state, spec, world.clock.seconds)
    assert len(judged) == 2
    assert judged[1] == judged[0] + 1
    assert after.verdicts != looks[0].verdicts
    await feed.look(reading, replace(state, shares=state.shares + 1), spec, world.clock.seconds)
    assert len(judged) == 3, "another part of the error budget is another question"
    log = DeltaLog("another life", counts)
    log.changed()
    await feed.look(reading, state, spec, world.clock.seconds)
    assert len(judged) == 4


def test_names_of_what_agents_counted_are_one_object_however_many_tell_of_them() -> None:
    """Each of the agents of a thousand windows sends the same few names."""

    def received() -> WindowCounts:
        counts = tpot(SLOW)
        counts.of(metrics.TPOT_RATIO, metrics.Arm.BASELINE).above_up["a gate"] = 1
        return counts_of(evidence.WindowCounts.FromString(counts_message(counts).SerializeToString()))

    ((one, first),), ((other, second),) = (received().metrics.items() for _ in range(2))
    assert one == (metrics.TPOT_RATIO, metrics.Arm.BASELINE) and one is other
    ((gate,), (same,)) = first.above_up, second.above_up
    assert gate == "a gate" and gate is same


class Counted(EvidenceOf):
    """Notes when it was asked; `down` has it answer nobody."""

    def __init__(self, counts: WindowCounts, world: World) -> None:
        super().__init__(counts)
        self.world, self.at, self.down = world, list[float](), False

    async def read_evidence(self, node: AgentTarget, request: Any) -> control.ReadEvidenceResponse:
        self.at.append(self.world.clock.seconds)
        if self.down:
            raise AgentUnreachable(node.name, "UNAVAILABLE", "down")
        return await super().read_evidence(node, request)


@pytest.mark.parametrize(
    "late, down, asked",
    [
        pytest.param(0.0, False, ["beat"], id="in-time"),
        pytest.param(0.5, False, ["beat"], id="late"),
        pytest.param(9.0, False, ["beat", "look"], id="too-late-to-be-used"),
        pytest.param(0.5, True, ["beat"], id="an-agent-that-did-not-answer-was-asked-all-the-same"),
    ],
)
async def test_a_look_is_judged_by_what_was_asked_on_its_beat(
    late: float, down: bool, asked: list[str]
) -> None:
    world = World()
    await world.until("Progressing", "Shadow")
    spec = parse_spec(world.api.objects[world.rollout]["spec"])
    spec = replace(spec, lease_ttl=60.0)
    state = from_status(world.status)
    uid = world.api.objects[world.rollout]["metadata"]["uid"]
    nodes = (AgentTarget("node-0", "uid-0", "10.0.0.1:7443", "boot"),)
    cache = common.CacheRef(namespace="serving", name="chat")
    reading = Reading(cache, fence_of(state, uid), window_key(state, spec, uid), nodes)
    agents = Counted(tpot(*[FAST] * 90, *[SLOW] * 10), world)
    beats = BeatReads(agents, world.deps.leader, world.clock, shared_from=1)  # type: ignore[arg-type]
    feed = EvidenceFeed(agents, world.clock, beats=beats)  # type: ignore[arg-type]
    first = await feed.look(reading, state, spec, world.clock.seconds)
    beat = world.clock.seconds + 10.0
    state = replace(state, schedule=Schedule(beat, world.clock.seconds, 0.0))
    feed.expect(uid, reading, beat)
    agents.at.clear()
    agents.down = down
    world.clock.seconds = beat
    beats.tick()
    await asyncio.sleep(0)
    world.clock.seconds = beat + late
    look = await feed.look(reading, state, spec, world.clock.seconds)
    assert agents.at == [{"beat": beat, "look": beat + late}[moment] for moment in asked]
    assert len(beats) == 0 and look.at == beat + late
    assert [one.verdict for one in look.verdicts] == [one.verdict for one in first.verdicts]


class Gapped(Counted):
    """Its next answer does not follow on what was read of it."""

    gap = False

    async def read_evidence(self, node: AgentTarget, request: Any) -> control.ReadEvidenceResponse:
        reply = await super().read_evidence(node, request)
        if self.gap:
            reply.from_seq, reply.to_seq, self.gap = 5, 6, False
        return reply


async def test_what_a_beat_has_found_torn_is_read_from_the_start_at_its_look() -> None:
    world = World()
    await world.until("Progressing", "Shadow")
    spec = parse_spec(world.api.objects[world.rollout]["spec"])
    state = from_status(world.status)
    uid = world.api.objects[world.rollout]["metadata"]["uid"]
    nodes = (AgentTarget("node-0", "uid-0", "10.0.0.1:7443", "boot"),)
    cache = common.CacheRef(namespace="serving", name="chat")
    reading = Reading(cache, fence_of(state, uid), window_key(state, spec, uid), nodes)
    agents = Gapped(tpot(*[FAST] * 90, *[SLOW] * 10), world)
    beats = BeatReads(agents, world.deps.leader, world.clock, shared_from=1)  # type: ignore[arg-type]
    feed = EvidenceFeed(agents, world.clock, beats=beats)  # type: ignore[arg-type]
    first = await feed.look(reading, state, spec, world.clock.seconds)
    beat = world.clock.seconds + 10.0
    state = replace(state, schedule=Schedule(beat, world.clock.seconds, 0.0))
    feed.expect(uid, reading, beat)
    agents.at.clear()
    agents.gap = True
    world.clock.seconds = beat
    beats.tick()
    await asyncio.sleep(0)
    look = await feed.look(reading, state, spec, beat)
    assert agents.at == [beat, beat]
    assert look.verdicts == first.verdicts and look.pair_thresholds == first.pair_thresholds


async def test_a_beat_reads_nothing_for_a_window_that_another_has_followed() -> None:
    """Counts of the one that is closed would be taken for the other's."""
    world = World()
    await world.until("Progressing", "Shadow")
    spec = parse_spec(world.api.objects[world.rollout]["spec"])
    state = from_status(world.status)
    uid = world.api.objects[world.rollout]["metadata"]["uid"]
    nodes = (AgentTarget("node-0", "uid-0", "10.0.0.1:7443", "boot"),)
    cache = common.CacheRef(namespace="serving", name="chat")
    reading = Reading(cache, fence_of(state, uid), window_key(state, spec, uid), nodes)
    agents = Counted(tpot(FAST), world)
    beats = BeatReads(agents, world.deps.leader, world.clock, shared_from=1)  # type: ignore[arg-type]
    feed = EvidenceFeed(agents, world.clock, beats=beats)  # type: ignore[arg-type]
    await feed.look(reading, state, spec, world.clock.seconds)
    feed.expect(uid, reading, world.clock.seconds + 10.0)
    followed = replace(reading, key=replace(reading.key, opening_fence=reading.key.opening_fence + 1))
    await feed.look(followed, state, spec, world.clock.seconds)
    agents.at.clear()
    world.clock.seconds += 10.0
    beats.tick()
    await asyncio.sleep(0)
    assert agents.at == []


@pytest.mark.parametrize("why", ["first-look", "closed", "another-window", "forgotten"])
async def test_nothing_is_expected_of_a_window_that_nobody_has_read_or_that_is_closed(why: str) -> None:
    """The first look at a window begins its reader, from when on agents count as not read."""
    world = World()
    await world.until("Progressing", "Shadow")
    spec = parse_spec(world.api.objects[world.rollout]["spec"])
    state = from_status(world.status)
    uid = world.api.objects[world.rollout]["metadata"]["uid"]
    nodes = (AgentTarget("node-0", "uid-0", "10.0.0.1:7443", "boot"),)
    cache = common.CacheRef(namespace="serving", name="chat")
    reading = Reading(cache, fence_of(state, uid), window_key(state, spec, uid), nodes)
    agents = Counted(tpot(FAST), world)
    beats = BeatReads(agents, world.deps.leader, world.clock, shared_from=1)  # type: ignore[arg-type]
    feed = EvidenceFeed(agents, world.clock, beats=beats)  # type: ignore[arg-type]
    due_at = world.clock.seconds + 10.0
    if why != "first-look":
        await feed.look(reading, state, spec, world.clock.seconds)
        feed.expect(uid, reading, due_at)
        assert len(beats) == 1
    followed = replace(reading, key=replace(reading.key, opening_fence=reading.key.opening_fence + 1))
    if why == "forgotten":
        feed.forget(uid)
    else:
        feed.expect(uid, {"first-look": reading, "closed": None, "another-window": followed}[why], due_at)
    assert len(beats) == 0
