"""The specification's mutations of a release (N.11 from 22 on).

Its codes as this API writes them are in docs/guides/rollouts.md: the same words in CamelCase, as conditions
have them, where a rollout is refused; the cause of its return where one is under way. N.11.36 and 37 are of
the data plane as well (docs/release.md names those tests): here what they mean for a release.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvtier.v1 import control_pb2 as control
from kvtier_core.errors import CoreError, Reason
from kvtier_evidence import metrics
from kvtier_evidence.limits import LimitError
from kvtier_operator.ports import JsonObject, Kind, ObjectKey, PatchOp
from kvtier_operator.proofs import nonce_digest
from kvtier_operator.reconcile.kvrollout import KVRolloutReconciler
from kvtier_operator.rollout.messenger import checked
from kvtier_operator.rollout.spec import SpecError, parse_spec
from kvtier_operator.rollout.vocabulary import STAGE_ORDER, Cause, Stage, Verdict
from tests.unit.agent.agent_fakes import Bench
from tests.unit.rollout.rollout_world import World, copied, held

EXACT = {"overrides": {"placement": {"policy": "headGroups", "headGroups": {"stagingBytes": "8Mi"}}}}
LIVE = [("Shadow", 0), ("Canary", 0), ("Ramp", 0), ("Full", 0)]
ZERO = [name for name in metrics.ZERO_TOLERANCE if name != metrics.OUTPUT_MISMATCHES]


def spec_of(**changes: Any) -> dict[str, Any]:
    world = World()
    spec: dict[str, Any] = copied(world.api.objects[world.rollout]["spec"])
    return {**spec, **changes}


def stages(*names: str, steps: tuple[str, ...] = ("10%", "50%")) -> list[dict[str, Any]]:
    known = {stage["name"]: stage for stage in spec_of()["stages"]}
    known["Ramp"] = {**known["Ramp"], "steps": list(steps)}
    return [known[name] for name in names]


@pytest.mark.parametrize("gate", ["output", "quality", "tail"])
async def test_a_gate_of_stages_that_are_not_passed_is_refused(gate: str) -> None:
    """No step would wait for it, so a candidate would be released as if it had passed. Of a definition that
    does not refuse it yet."""
    gates = [{**one, "stages": ["Ramp"]} if one["name"] == gate else one for one in spec_of()["gates"]]
    world = World(stages=stages("Shadow", "Canary", "Full"), gates=gates)
    await world.run(3)
    found = world.condition("Feasible")
    assert (world.where[0], found["reason"]) == ("Invalid", "SpecInvalid")
    assert f"spec.gates[{gate}].stages: Ramp" in found["message"]
    world.edit(stages=stages("Shadow", "Canary", "Ramp", "Full"))
    await world.until("Progressing", "Shadow")


async def test_a_rollout_under_way_with_a_gate_that_nothing_waits_for_stays_where_it_is() -> None:
    """An operator finds it so whose predecessor took it: it has done no harm, and has not earned a step."""
    world = World(stages=stages("Shadow", "Canary", "Full"))
    await world.until("Progressing", "Canary")
    gates = [{**one, "stages": ["Ramp"]} if one["name"] == "output" else one for one in spec_of()["gates"]]
    world.edit(gates=gates)
    world.restart()
    await world.run(120)
    assert world.where[:2] == ("Progressing", "Canary")
    assert len(held(world)) == 2
    for name in ("Feasible", "Progressing"):
        found = world.condition(name)
        assert (found["status"], found["reason"]) == ("False", "SpecInvalid")
        assert "held: spec.gates[output].stages: Ramp" in found["message"]
    told = [text for reason, text in world.api.events if reason == "SpecInvalid"]
    assert len(told) == 1 and "spec.gates[output].stages: Ramp" in told[0]
    world.intent("Promote", 1)
    await world.run(3)
    answer = world.status["lastIntent"]
    assert answer["result"] == "NotApplicable" and "spec.gates[output].stages: Ramp" in answer["message"]
    world.intent("Pause", 2)
    await world.until("Paused")
    world.intent("Resume", 3)
    world.edit(stages=stages("Shadow", "Canary", "Ramp", "Full"))
    await world.until("Completed")


@pytest.mark.parametrize("end", ["a gate fails", "its deadline comes", "it is aborted"])
async def test_one_that_is_held_so_returns_for_every_other_reason(end: str) -> None:
    world = World(stages=stages("Shadow", "Canary", "Full"))
    await world.until("Progressing", "Canary")
    gates = [{**one, "stages": ["Ramp"]} if one["name"] == "output" else one for one in spec_of()["gates"]]
    world.edit(gates=gates)
    await world.run(5)
    if end == "a gate fails":
        world.feed.gates["output"] = Verdict.FAIL
    elif end == "it is aborted":
        world.intent("Abort", 1)
    await world.until("RolledBack", limit=4000)
    cause = {"a gate fails": "GateFailed", "it is aborted": "IntentAbort"}.get(end, "DeadlineExceeded")
    assert world.status["rollback"]["cause"] == cause


async def test_a_gate_of_another_system_waits_in_no_stage_in_which_it_is_not_counted() -> None:
    slo = {"name": "slo", "metric": "external", "max": "0.5", "query": "counters(errors; requests)"}
    gates = [*spec_of()["gates"], {**slo, "stages": ["Shadow", "Ramp"]}]
    world = World(stages=stages("Shadow", "Canary", "Full"), gates=gates)
    await world.run(3)
    found = world.condition("Feasible")
    assert (world.where[0], found["reason"]) == ("Invalid", "SpecInvalid")
    assert "spec.gates[slo].stages: Shadow, Ramp" in found["message"]


async def test_an_approval_outlives_a_rule_that_came_after_it() -> None:
    world = World(stages=stages("Shadow", "Canary", "Full"))
    await world.until("Completed")
    gates = [{**one, "stages": ["Ramp"]} if one["name"] == "output" else one for one in spec_of()["gates"]]
    world.edit(gates=gates)
    world.restart()
    await world.run(60)
    assert world.where[0] == "Completed"
    assert len(held(world)) == 2


async def test_a_limit_of_a_stage_that_is_not_passed_is_said() -> None:
    """It is of no effect, which whoever wrote it does not expect."""
    idle = [{"stage": "Ramp", "max": "0.5"}, {"stage": "Canary", "max": "0.5"}]
    gates = [{**one, "perStage": idle} if one["name"] == "output" else one for one in spec_of()["gates"]]
    world = World(stages=stages("Shadow", "Canary", "Full"), gates=gates)
    await world.until("Progressing", "Shadow")
    said = "no effect, since spec.stages has no such stage: spec.gates[output].perStage Ramp"
    for stage in ("Shadow", "Canary"):
        await world.until("Progressing", stage)
        found = world.condition("Feasible")
        assert found["status"] == "True" and found["message"].endswith(said)
    await world.until("Completed")


async def test_of_many_such_limits_some_are_named_and_the_message_is_not_cut() -> None:
    idle = [{"stage": "Ramp", "max": "0.5"}]
    gates = [{**one, "perStage": idle} for one in spec_of()["gates"]]
    names = [one["name"] for one in gates]
    assert len(names) > 3
    world = World(stages=stages("Shadow", "Canary", "Full"), gates=gates)
    await world.until("Progressing", "Shadow")
    message = world.condition("Feasible")["message"]
    assert len(message) <= 512 and message.endswith(f"perStage Ramp and {len(names) - 3} more")


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(stages("Canary", "Ramp", "Full"), id="N.11.22-skips-shadow"),
        # With fractions that grow all the same.
        pytest.param(
            stages("Shadow", "Ramp", "Canary", "Full", steps=("1%", "2%")), id="N.11.22-another-order"
        ),
        pytest.param(stages("Shadow", "Canary", "Canary", "Full"), id="N.11.22-a-stage-twice"),
        pytest.param([], id="N.11.22-no-stage"),
        pytest.param(
            stages("Shadow", "Canary", "Ramp", "Full", steps=("1%", "50%")), id="N.11.23-below-canary"
        ),
        pytest.param(
            stages("Shadow", "Canary", "Ramp", "Full", steps=("50%", "10%")), id="N.11.23-goes-down"
        ),
    ],
)
async def test_an_order_that_is_none_is_refused(wrong: list[dict[str, Any]]) -> None:
    with pytest.raises(SpecError, match=r"spec\.stages"):
        parse_spec(spec_of(stages=wrong))
    world = World(stages=wrong)
    await world.run(3)
    assert (world.where[0], world.condition("Feasible")["reason"]) == ("Invalid", "ReleaseOrder")
    assert all(sim.grants == [] for sim in world.sims.values())


@pytest.mark.parametrize("verb", ["Promote", "Skip"])
async def test_n_11_23_a_person_moves_one_fraction_too(verb: str) -> None:
    world = World()
    await world.until("Progressing", "Canary")
    world.intent(verb, 1)
    await world.pass_()
    assert world.where[1:] == ("Ramp", 0)


@pytest.mark.parametrize(("stage", "step"), LIVE)
async def test_n_11_24_a_manifest_that_changes_in_mid_stage_returns(stage: str, step: int) -> None:
    world = World()
    await world.until("Progressing", stage, step)
    selector = copied(world.object(Kind.KV_SELECTOR, "quest-64"))
    selector["spec"]["budget"]["tokens"] = 48
    world.api.put(selector)
    await world.until("RolledBack", limit=15)
    assert world.status["rollback"]["cause"] == "InputDrift"


def test_n_11_25_an_exact_candidate_cannot_be_without_its_output_gate() -> None:
    for stage in STAGE_ORDER:
        spec = parse_spec(spec_of(candidate=EXACT, gates=[]))
        step = next(step for step in spec.ladder if step.stage is stage)
        gates = {gate.name: gate.required for gate in spec.gates_of(step)}
        assert gates[metrics.OUTPUT_MISMATCHES] is True


def test_n_11_25_nor_hide_it_behind_a_gate_of_its_name() -> None:
    fake = {"name": metrics.OUTPUT_MISMATCHES, "metric": "exposedStallFraction", "max": "0.9"}
    with pytest.raises((SpecError, LimitError), match="used twice"):
        parse_spec(spec_of(candidate=EXACT, gates=[fake])).gates_of(
            parse_spec(spec_of(candidate=EXACT, gates=[])).ladder[0]
        )


@pytest.mark.parametrize("missing", ["outputRelativeError", "taskScoreDrop"])
async def test_n_11_26_an_approximate_candidate_needs_output_and_quality(missing: str) -> None:
    world = World(gates=[gate for gate in spec_of()["gates"] if gate["metric"] != missing])
    await world.run(3)
    assert (world.where[0], world.condition("Feasible")["reason"]) == ("Invalid", "GateMissing")
    assert missing in world.condition("Feasible")["message"]


@pytest.mark.parametrize(
    "metric",
    [
        pytest.param(metrics.TPOT_RATIO, id="N.11.27"),
        pytest.param(metrics.EXPOSED_STALL_FRACTION, id="N.11.28"),
    ],
)
@pytest.mark.parametrize("stage", [Stage.CANARY, Stage.RAMP, Stage.FULL], ids=str)
async def test_tail_and_stall_gates_are_there_though_nobody_declares_them(metric: str, stage: Stage) -> None:
    declared = [gate for gate in spec_of()["gates"] if gate["metric"] != metric]
    spec = parse_spec(spec_of(gates=declared))
    step = next(step for step in spec.ladder if step.stage is stage)
    gate = next(gate for gate in spec.gates_of(step) if gate.metric.name == metric)
    assert gate.required
    world = World(gates=declared)
    await world.until("Progressing", str(stage))
    world.feed.gates[gate.name] = Verdict.INSUFFICIENT
    await world.run(60)
    assert world.where == ("Progressing", str(stage), 0)


@pytest.mark.parametrize("gate", ZERO, ids=lambda gate: f"N.11.29-33-{gate}")
@pytest.mark.parametrize(("stage", "step"), LIVE)
async def test_one_event_of_zero_tolerance_returns_from_every_stage(gate: str, stage: str, step: int) -> None:
    world = World()
    await world.until("Progressing", stage, step)
    world.feed.gates[gate] = Verdict.FAIL
    await world.until("RolledBack")
    assert (world.status["rollback"]["cause"], world.status["rollback"]["gate"]) == ("GateFailed", gate)


@pytest.mark.parametrize("verdict", [Verdict.INSUFFICIENT, Verdict.PROVIDER_ERROR], ids=str)
async def test_n_11_32_recovery_that_was_not_seen_is_waited_for(verdict: Verdict) -> None:
    world = World()
    world.feed.gates[metrics.REPLAY_FAILURES] = verdict
    await world.run(90)
    assert world.where == ("Progressing", "Shadow", 0)


def lose_the_candidate(world: World) -> None:
    del world.api.objects[next(key for key in world.api.objects if key.kind is Kind.KV_SELECTOR)]


def a_gate_fails(world: World) -> None:
    world.feed.gates["output"] = Verdict.FAIL


def a_person_aborts(world: World) -> None:
    world.intent("Abort", 1)


def an_agent_is_full(world: World) -> None:
    world.sims["node-0"].refuse = "NO_DESTINATION_CAPACITY"
    world.sims["node-0"].boot()


def an_agent_computes_otherwise(world: World) -> None:
    world.sims["node-0"].refuse = "NUMERICS_MISMATCH"
    world.sims["node-0"].boot()


def an_agent_is_lost(world: World) -> None:
    world.edit(onLeaseExpired="RollBack")
    world.sims["node-0"].cut_off = True


def the_leases_end(world: World) -> None:
    world.edit(onLeaseExpired="RollBack")
    world.clock.seconds += 15


def the_time_is_over(world: World) -> None:
    world.clock.seconds += 3600


def it_is_deleted(world: World) -> None:
    world.api.objects[world.rollout]["metadata"]["finalizers"].append("example.com/somebody-elses")
    world.api.ask_to_delete(world.rollout)


def its_cache_is_deleted(world: World) -> None:
    del world.api.objects[world.cache_key]


RETURNS: list[tuple[Cause, Callable[[World], None]]] = [
    (Cause.GATE_FAILED, a_gate_fails),
    (Cause.INTENT_ABORT, a_person_aborts),
    (Cause.INPUT_DRIFT, lose_the_candidate),
    (Cause.INFEASIBLE_NODE, an_agent_is_full),
    (Cause.MANIFEST_MISMATCH, an_agent_computes_otherwise),
    (Cause.AGENT_LOST, an_agent_is_lost),
    (Cause.LEASE_EXPIRED, the_leases_end),
    (Cause.DEADLINE_EXCEEDED, the_time_is_over),
    (Cause.OBJECT_DELETED, it_is_deleted),
    (Cause.OBJECT_DELETED, its_cache_is_deleted),
]


@pytest.mark.parametrize(("cause", "harm"), RETURNS, ids=lambda value: getattr(value, "__name__", value))
async def test_n_11_34_every_return_is_to_the_exact_baseline(
    cause: Cause, harm: Callable[[World], None]
) -> None:
    world = World()
    await world.until("Progressing", "Canary")
    await world.run(3)
    swap, told = world.api.compare_and_swap, set[tuple[str, str]]()

    async def heard(key: ObjectKey, ops: Sequence[PatchOp], *, subresource: str = "status") -> JsonObject:
        answer = await swap(key, ops, subresource=subresource)
        rollback = (answer.get("status") or {}).get("rollback")
        if key == world.rollout and rollback:
            told.add((rollback["cause"], rollback["targetDigest"]))
        return answer

    world.api.compare_and_swap = heard  # type: ignore[method-assign]
    harm(world)
    await world.run(60)
    assert world.where[1] == "ExactBaseline"
    assert told == {(cause, world.baseline)}, "from the first moment on"
    assert held(world) == []


def test_n_11_34_no_cause_of_a_return_is_left_out() -> None:
    assert {cause for cause, _ in RETURNS} == set(Cause)


@pytest.mark.parametrize("completed", [False, True], ids=["in-full", "after-completed"])
async def test_n_11_35_full_is_reversible(completed: bool) -> None:
    world = World()
    await world.until("Completed" if completed else "Progressing", "Full")
    world.feed.gates["output"] = Verdict.FAIL
    await world.until("RolledBack")
    assert world.status["rollback"]["fromStage"] == "Full"
    assert "approved" not in world.cache_status
    assert held(world) == []


async def test_n_11_36_a_proof_that_is_not_of_our_nonce_restores_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    await world.until("Progressing", "Canary")
    monkeypatch.setattr("tests.unit.rollout.rollout_world.nonce_digest", lambda *parts: b"forged")
    world.intent("Abort", 1)
    await world.run(5)
    assert world.condition("CandidateRevoked")["status"] == "False", "before its leases have ended"
    await world.run(60)
    assert world.where[0] == "RollingBack"
    assert world.condition("BaselineRestored")["status"] == "False"


@pytest.mark.parametrize(
    ("nonce", "life", "made_over", "counts"),
    [
        pytest.param(b"ours", "boot-1", "sha256:b", True, id="ours"),
        pytest.param(b"of another time", "boot-1", "sha256:b", False, id="another-nonce"),
        pytest.param(b"ours", "boot-0", "sha256:b", False, id="another-life"),
        pytest.param(b"ours", "boot-1", "sha256:c", False, id="another-digest-than-it-says"),
    ],
)
def test_n_11_36_what_a_proof_must_be_of(nonce: bytes, life: str, made_over: str, counts: bool) -> None:
    proof = control.Proof(node="node-0", boot_id=life, baseline_digest="sha256:b")
    proof.nonce_digest = nonce_digest(nonce, made_over, "", life)
    assert checked(proof, b"ours", "boot-1").valid is counts
    proof.nonce_digest = b""
    assert not checked(proof, b"ours", "boot-1").valid


async def test_n_11_36_no_two_questions_have_one_nonce() -> None:
    """Or the answer to an earlier one would be a proof."""
    world = World()
    numbers = itertools.count(1)
    world.deps = replace(world.deps, nonce=lambda: next(numbers).to_bytes(16, "big"))
    world.operator = KVRolloutReconciler(world.deps, feed=world.feed)
    asked: list[bytes] = []
    for sim in world.sims.values():
        for verb in ("grant", "revoke"):
            original = getattr(sim, verb)

            def heard(request: Any, original: Any = original) -> Any:
                asked.append(request.nonce)
                return original(request)

            setattr(sim, verb, heard)
    await world.until("Progressing", "Canary")
    world.sims["node-1"].lie_about_baseline = "sha256:" + "f" * 64
    world.intent("Abort", 1)
    await world.run(5)
    assert len(asked) > 6 and len(set(asked)) == len(asked)


async def test_n_11_37_a_deletion_waits_for_the_lease_of_who_cannot_be_asked() -> None:
    world = World()
    await world.until("Progressing", "Canary")
    world.sims["node-0"].cut_off = True
    world.api.ask_to_delete(world.rollout)
    await world.run(8)
    assert world.rollout in world.api.objects
    await world.run(6)
    assert world.rollout not in world.api.objects
    assert held(world) == []
    assert "ReleasedUnproved" in {reason for reason, _ in world.api.events}


async def test_n_11_38_what_was_removed_is_not_served_after_a_restart(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    await bench.apply()
    await bench.node.remove_cache(bench.command())
    assert not await bench.node.close(5.0)
    again = Bench(tmp_path)
    await again.node.restore()
    assert again.node.caches == {}
    with pytest.raises(CoreError) as unknown:
        again.node.host(bench.command().cache)
    assert unknown.value.reason is Reason.CACHE_UNKNOWN
    # Nor does the command bring it back that first brought it: an older operator may repeat that.
    with pytest.raises(CoreError) as stale:
        await again.apply()
    assert stale.value.reason is Reason.FENCE_STALE
    assert again.node.caches == {}


# What each row is answered with, read from what production code has written.


async def refused(world: World) -> str:
    await world.run(3)
    assert world.where[0] == "Invalid" and all(sim.grants == [] for sim in world.sims.values())
    return str(world.condition("Feasible")["reason"])


async def returned(harm: str, stage: str = "Canary") -> str:
    world = World()
    await world.until("Progressing", stage)
    if harm == "selector":
        lose_the_candidate(world)
    else:
        world.feed.gates[harm] = Verdict.FAIL
    await world.until("RolledBack", limit=60)
    assert world.where[1] == "ExactBaseline" and held(world) == []
    return str(world.status["rollback"]["cause"])


async def waited_for(gate: str, stage: str, **spec: Any) -> str:
    """The gate that a promotion waits for, though no gate of that name was declared."""
    world = World(**spec)
    await world.until("Progressing", stage)
    world.feed.gates[gate] = Verdict.INSUFFICIENT
    await world.run(60)
    assert world.where[1] == stage
    (row,) = [row for row in world.status["gates"] if row["name"] == gate]
    return f"{row['verdict']} {row['name']}"


async def proved_by_whom_nobody_asked() -> str:
    world = World()
    await world.until("Progressing", "Canary")
    for sim in world.sims.values():
        original = sim.revoke

        def forged(request: Any, original: Any = original) -> Any:
            answer = original(request)
            answer.proof.nonce_digest = b"of another nonce"
            return answer

        sim.revoke = forged  # type: ignore[method-assign]
    world.intent("Abort", 1)
    await world.run(60)
    return str(world.condition("BaselineRestored")["reason"])


async def deleted_while_a_lease_runs() -> str:
    world = World()
    await world.until("Progressing", "Canary")
    world.sims["node-0"].cut_off = True
    world.api.ask_to_delete(world.rollout)
    await world.run(8)
    return str(world.condition("CandidateRevoked")["reason"])


async def asked_for_after_a_removal() -> str:
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        await bench.apply()
        await bench.node.remove_cache(bench.command())
        assert not await bench.node.close(5.0)
        again = Bench(Path(folder))
        await again.node.restore()
        with pytest.raises(CoreError) as refused:
            again.node.host(bench.command().cache)
        assert not await again.node.close(5.0)
        return str(refused.value.reason)


def without(*metrics_left_out: str) -> list[dict[str, Any]]:
    return [gate for gate in spec_of()["gates"] if gate["metric"] not in metrics_left_out]


ANSWERS: dict[str, tuple[str, str, Any]] = {
    "22": (
        "RELEASE_ORDER",
        "ReleaseOrder",
        lambda: refused(World(stages=stages("Canary", "Ramp", "Full"))),
    ),
    "23": (
        "RELEASE_ORDER",
        "ReleaseOrder",
        lambda: refused(World(stages=stages("Shadow", "Ramp", steps=("50%", "10%")))),
    ),
    "24": ("RELEASE_MANIFEST", "InputDrift", lambda: returned("selector")),
    "25": (
        "GATE_MISSING",
        "Insufficient outputMismatches",
        lambda: waited_for(metrics.OUTPUT_MISMATCHES, "Shadow", candidate=EXACT, gates=[]),
    ),
    "26": ("GATE_MISSING", "GateMissing", lambda: refused(World(gates=without("taskScoreDrop")))),
    "27": (
        "GATE_MISSING",
        "Insufficient tail",
        lambda: waited_for("tail", "Canary", gates=without("tpotRatio")),
    ),
    "28": (
        "GATE_MISSING",
        "Insufficient stall",
        lambda: waited_for("stall", "Canary", gates=without("exposedStallFraction")),
    ),
    "29": ("GATE_FAILED", "GateFailed", lambda: returned(metrics.ALLOCATION_FAILURES)),
    "30": ("GATE_FAILED", "GateFailed", lambda: returned(metrics.ILLEGAL_FALLBACKS)),
    "31": ("GATE_FAILED", "GateFailed", lambda: returned(metrics.ISOLATION_FAILURES)),
    "32": (
        "GATE_MISSING",
        "Insufficient replayFailures",
        lambda: waited_for(metrics.REPLAY_FAILURES, "Shadow"),
    ),
    "33": ("GATE_FAILED", "GateFailed", lambda: returned(metrics.REPLAY_FAILURES)),
    "35": ("RELEASE_ORDER", "GateFailed", lambda: returned("output", "Full")),
    "36": ("AUTH_FAILED", "Proving", proved_by_whom_nobody_asked),
    "37": ("LEASES_HELD", "Revoking", deleted_while_a_lease_runs),
    "38": ("DELETED_SERVED", "CACHE_UNKNOWN", asked_for_after_a_removal),
}


@pytest.mark.parametrize("row", ANSWERS)
async def test_each_row_is_answered_with_the_reason_that_the_guide_names(row: str) -> None:
    code, reason, happen = ANSWERS[row]
    assert await happen() == reason
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "rollouts.md").read_text()
    assert f"| N.11.{row} | `{code}` | `{reason}` |" in guide
