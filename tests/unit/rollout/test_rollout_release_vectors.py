"""The specification's release vectors (C11.17 to C11.19): measured values become counts, an agent tells them
by the delta protocol, the operator reads and judges them, and the machine moves. Nothing here decides.

Thresholds are those that the vectors state. Their stall is in ms of a token; this API gates its share of the
time, here of tokens that take TOKEN_MS. Their logit error is the output error of one request in a hundred.
This API counts a recovery that failed and a replay that differed in one number, `replayFailures`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest

from kvtier.v1 import control_pb2 as control
from kvtier_agent.evidence_convert import delta_message
from kvtier_evidence import metrics
from kvtier_evidence.delta import DeltaLog
from kvtier_evidence.gates import ONE
from kvtier_evidence.grid import Histogram
from kvtier_evidence.window import WindowCounts
from kvtier_operator.ports import AgentTarget
from kvtier_operator.rollout.feed import EvidenceFeed
from kvtier_operator.rollout.probesets import probe_set
from kvtier_operator.rollout.spec import parse_spec
from tests.unit.evidence.evidence_builders import Counts, lognormal
from tests.unit.rollout.rollout_world import World, held

TOKEN_MS = 50.0
UNITS = 2000
EXACT = {"overrides": {"placement": {"policy": "headGroups", "headGroups": {"stagingBytes": "8Mi"}}}}
GATES = [
    {"name": "output", "metric": metrics.OUTPUT_RELATIVE_ERROR, "quantile": 99, "max": "0.001"},
    {"name": "tail", "metric": metrics.TPOT_RATIO, "quantile": 99, "max": "1.05"},
    {"name": "stall", "metric": metrics.EXPOSED_STALL_FRACTION, "max": str(1.0 / TOKEN_MS)},
]
QUALITY = {
    "name": "quality",
    "metric": metrics.TASK_SCORE_DROP,
    "max": "0.01",
    "probeRef": {"name": "golden"},
}
PLAN = json.dumps({"prompts": [{"digest": f"prompt-{index}"} for index in range(UNITS)]})
GOLDEN = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {"name": "golden", "namespace": "serving"},
    "data": {"plan.json": PLAN},
}
LIVE = [("Shadow", 0), ("Canary", 0), ("Ramp", 0), ("Ramp", 1), ("Full", 0)]


@dataclass(frozen=True)
class Measures:
    """What the vectors call a candidate's measures, in their units."""

    tpot_ratio: float = 1.02
    stall_ms: float = 0.4
    logit_error: float = 2e-4
    quality_drop: float = 0.002
    events: dict[str, int] = field(default_factory=dict)


OK = Measures()


@cache
def times(ratio: float) -> Histogram:
    """Each of 500 quantiles 800 times: at 1.02 of 1.05 fewer requests decide nothing."""
    single, many = lognormal(500, 0.05 * ratio), Histogram()
    for _ in range(800):
        many.merge(single)
    return many


def counts_of(found: Measures, stage: str, fraction: float, *, exact: bool) -> WindowCounts:
    made = Counts()
    limit = float(GATES[0]["max"])  # type: ignore[arg-type]
    output = made.counts.of(metrics.OUTPUT_RELATIVE_ERROR, metrics.Arm.CANDIDATE)
    output.histogram.add(found.logit_error, UNITS)
    above = UNITS * ONE if found.logit_error > limit else 0
    output.above_up["output"] = output.above_down["output"] = above
    made.requests(UNITS)
    made.counts.of(metrics.OUTPUT_MISMATCHES, metrics.Arm.CANDIDATE).histogram.add(0.0, UNITS)
    if not exact:
        made.probes([found.quality_drop] * UNITS, probe_set=probe_set(GOLDEN).digest)
    for name, count in found.events.items():
        made.event(name, count)
    if stage != "Shadow":
        made.tpot(times(found.tpot_ratio), times(1.0)).stall([(found.stall_ms / TOKEN_MS, UNITS)])
        made.sessions(round(UNITS * fraction), UNITS)
    return made.counts


class Agent:
    """One that counts as many requests again, of what `measures` says now, whenever that has changed. None:
    there is no traffic."""

    def __init__(self, world: World, measures: Measures | None) -> None:
        self.measures = measures
        self._world = world
        self._windows: dict[int, tuple[WindowCounts, DeltaLog]] = {}
        self._counted: dict[int, Measures] = {}

    async def read_evidence(
        self, node: AgentTarget, request: control.ReadEvidenceRequest
    ) -> control.ReadEvidenceResponse:
        window = request.window
        at = window.opening_fence
        if at not in self._windows:
            fresh = WindowCounts()
            self._windows[at] = fresh, DeltaLog("life", fresh)
        counts, log = self._windows[at]
        if self.measures is not None and self._counted.get(at) != self.measures:
            spec = parse_spec(self._world.api.objects[self._world.rollout]["spec"])
            step = next(one for one in spec.ladder if (one.stage, one.index) == (window.stage, window.step))
            fraction = float(step.traffic)
            counts.merge(counts_of(self.measures, window.stage, fraction, exact=spec.exact))
            self._counted[at] = self.measures
            log.changed()
        assigned = UNITS if self.measures is not None else 0
        delta = log.read(request.epoch, request.ack_seq, settled_cohort=1000, assigned_units=assigned)
        return delta_message(delta)


def judged(measures: Measures | None = OK, *, exact: bool = True) -> tuple[World, Agent]:
    """A world whose looks are of the production feed, which reads what its only agent has counted."""
    spec: dict[str, Any] = {
        "gates": GATES if exact else [*GATES, QUALITY],
        "evidence": {"settle": "5s", "warmup": "0s", "designEffect": "1"},
        **({"candidate": EXACT} if exact else {}),
    }
    world = World(nodes=1, **spec)
    world.api.put(GOLDEN)
    agent = Agent(world, measures)
    world.feed = EvidenceFeed(agent, world.clock)  # type: ignore[arg-type, assignment]
    world.restart()
    return world, agent


def verdicts(world: World) -> dict[str, str]:
    return {row["name"]: row["verdict"] for row in world.status["gates"]}


async def test_c11_17_an_exact_candidate_that_passes_shadow_goes_to_canary() -> None:
    world, _ = judged()
    await world.until("Progressing", "Shadow")
    await world.until("Progressing", "Canary", limit=60)
    assert world.status["candidate"]["class"] == "exact"


async def test_its_measures_pass_every_gate_of_every_stage() -> None:
    """Without this the returns below could be of anything."""
    world, _ = judged()
    for stage, step in LIVE:
        await world.until("Progressing", stage, step, limit=90)
    await world.until("Completed", limit=90)


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "approximate"])
async def test_without_a_request_nothing_passes_and_nothing_fails(exact: bool) -> None:
    """Of an agent that answers, and has nothing to count."""
    world, agent = judged(None, exact=exact)
    await world.until("Progressing", "Shadow")
    await world.run(120)
    assert world.where == ("Progressing", "Shadow", 0)
    assert "rollback" not in world.status
    found = verdicts(world)
    assert found.pop("manifestIdentity") == "Pass"
    assert len(found) > 4 and set(found.values()) == {"Insufficient"}
    agent.measures = OK
    await world.until("Progressing", "Canary", limit=60)
    # And where the candidate serves: what is compared with a baseline has none either.
    agent.measures = None
    await world.run(60)
    assert world.where == ("Progressing", "Canary", 0)
    found = verdicts(world)
    named = ("tail", "stall", "output", metrics.ILLEGAL_FALLBACKS)
    assert {found[name] for name in named} == {"Insufficient"}


C11_18 = Measures(tpot_ratio=0.8, quality_drop=0.021, events={metrics.ILLEGAL_FALLBACKS: 1})


@pytest.mark.parametrize(
    ("measures", "gates"),
    [
        pytest.param(C11_18, {metrics.ILLEGAL_FALLBACKS, "quality"}, id="both"),
        pytest.param(replace(C11_18, events={}), {"quality"}, id="quality-alone"),
        pytest.param(replace(C11_18, quality_drop=0.002), {metrics.ILLEGAL_FALLBACKS}, id="fallback-alone"),
    ],
)
async def test_c11_18_better_latency_does_not_pay_for_quality_and_a_fallback(
    measures: Measures, gates: set[str]
) -> None:
    world, _ = judged(measures, exact=False)
    await world.until("RolledBack", limit=60)
    rollback = world.status["rollback"]
    assert (rollback["cause"], rollback["fromStage"]) == ("GateFailed", "Shadow")
    assert rollback["gate"] in gates
    assert {name for name, verdict in verdicts(world).items() if verdict == "Fail"} == gates
    assert world.where[1] == "ExactBaseline" and held(world) == []


async def test_c11_18_with_its_measures_mended_the_same_candidate_goes_on() -> None:
    world, _ = judged(replace(C11_18, quality_drop=0.002, events={}), exact=False)
    await world.until("Progressing", "Canary", limit=60)


def another_manifest(world: World, agent: Agent) -> None:
    """The node recomputes another digest of the candidate that it runs."""
    (sim,) = world.sims.values()
    honest = sim.state

    def state() -> Any:
        answer = honest()
        if answer.caches[0].candidate.digest:
            answer.caches[0].candidate.digest = "sha256:" + "6" * 64
        return answer

    sim.state = state  # type: ignore[method-assign]


def events(name: str) -> Callable[[World, Agent], None]:
    def happen(world: World, agent: Agent) -> None:
        agent.measures = replace(OK, events={name: 1})

    return happen


def measured(**values: float) -> Callable[[World, Agent], None]:
    def happen(world: World, agent: Agent) -> None:
        agent.measures = replace(OK, **values)  # type: ignore[arg-type]

    return happen


FAILS: dict[str, tuple[Callable[[World, Agent], None], tuple[str, str]]] = {
    "manifest_ok": (another_manifest, ("ManifestMismatch", "")),
    "p99_tpot_ratio": (measured(tpot_ratio=1.2), ("GateFailed", "tail")),
    "stall_ms": (measured(stall_ms=3.0), ("GateFailed", "stall")),
    "alloc_fail": (events(metrics.ALLOCATION_FAILURES), ("GateFailed", metrics.ALLOCATION_FAILURES)),
    "illegal_fallback": (events(metrics.ILLEGAL_FALLBACKS), ("GateFailed", metrics.ILLEGAL_FALLBACKS)),
    "tenant_fail": (events(metrics.ISOLATION_FAILURES), ("GateFailed", metrics.ISOLATION_FAILURES)),
    "recovery_and_replay": (events(metrics.REPLAY_FAILURES), ("GateFailed", metrics.REPLAY_FAILURES)),
    "logit_err": (measured(logit_error=0.1), ("GateFailed", "output")),
    "logit_bits": (events(metrics.OUTPUT_MISMATCHES), ("GateFailed", metrics.OUTPUT_MISMATCHES)),
}


@pytest.mark.parametrize("fail", FAILS)
@pytest.mark.parametrize(("stage", "step"), LIVE)
async def test_c11_19_every_single_failed_gate_returns_from_every_live_state(
    fail: str, stage: str, step: int
) -> None:
    if stage == "Shadow" and fail in ("p99_tpot_ratio", "stall_ms"):
        stage = "Canary"  # latency is not judged where no candidate serves
    world, agent = judged()
    await world.until("Progressing", stage, step)
    happen, (cause, gate) = FAILS[fail]
    happen(world, agent)
    await world.until("RolledBack", limit=60)
    rollback = world.status["rollback"]
    assert (rollback["cause"], rollback.get("gate", ""), rollback["fromStage"]) == (cause, gate, stage)
    assert world.where[1] == "ExactBaseline" and held(world) == []
    if gate:
        assert {name for name, verdict in verdicts(world).items() if verdict == "Fail"} == {gate}
