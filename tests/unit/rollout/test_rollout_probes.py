"""Probe Jobs of a rollout: made once for an attempt, candidate and plan, ended with them, and told about."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from kvtier_evidence.carry import Carry, ProbePass
from kvtier_evidence.probeplan import parse_plan
from kvtier_operator.ports import ApiError, Forbidden, JsonObject, Kind, ObjectKey
from kvtier_operator.rollout.effects import Subject
from kvtier_operator.rollout.probejob import PLAN_FOLDER, ProbeRun, command_by_hand, probe_objects
from kvtier_operator.rollout.probesets import probe_set
from kvtier_operator.rollout.probing import IDLE_SECONDS, JobView, Wanted, plan_jobs, wanted_runs
from kvtier_operator.rollout.spec import RolloutSpec, parse_spec
from kvtier_operator.rollout.state import RolloutState
from kvtier_operator.rollout.status import from_status
from kvtier_operator.rollout.vocabulary import Phase, Verdict
from tests.unit.rollout.rollout_world import EPOCH, World

PLAN = {
    "model": {"path": "llama-1b", "claimName": "models"},
    "tasks": ["passkey"],
    "lengths": [512],
    "seeds": [1],
    "promptsPerCell": 8,
    "job": {"cpu": "2", "memory": "6Gi"},
}
GOLDEN = ObjectKey(Kind.CONFIG_MAP, "serving", "golden")
NOW = datetime(2027, 1, 15, tzinfo=UTC)


def edit_plan(world: World, text: str) -> None:
    world.api.put({**world.api.objects[GOLDEN], "data": {"plan.json": text}})


def world_with(plan: object = PLAN, **spec: Any) -> World:
    world = World(**spec)
    world.api.objects[GOLDEN]["data"] = {"plan.json": json.dumps(plan)}
    world.api.put(
        {
            "apiVersion": "kvtier.dev/v1alpha1",
            "kind": "AgentPool",
            "metadata": {"name": cache_pool(world), "namespace": "serving"},
            "spec": {"image": "kvtier/agent:9", "tolerations": [{"key": "gpu", "operator": "Exists"}]},
        }
    )
    return world


def cache_pool(world: World) -> str:
    return str(world.api.objects[world.cache_key]["spec"]["poolRef"]["name"])


def jobs_of(world: World) -> list[JsonObject]:
    return [obj for key, obj in sorted(world.api.objects.items()) if key.kind is Kind.JOB]


def reasons(world: World) -> list[str]:
    return [reason for reason, _ in world.api.events]


def hold(world: World) -> None:
    """The probes' gate waits, as it does until its prompts are scored."""
    gates = world.api.objects[world.rollout]["spec"]["gates"]
    name = next(gate["name"] for gate in gates if gate["metric"] == "taskScoreDrop")
    world.feed.gates[name] = Verdict.INSUFFICIENT


# --- in a rollout ----------------------------------------------------------------------------------------


async def test_a_job_is_made_when_an_agent_holds_the_candidate_and_never_again() -> None:
    world = world_with()
    hold(world)
    await world.until("Progressing", "Shadow")
    await world.run(60)
    (job,) = jobs_of(world)
    account = world.api.objects[ObjectKey(Kind.SERVICE_ACCOUNT, "serving", job["metadata"]["name"])]
    owner = {"name": "quest", "uid": "uid-quest", "controller": True, "kind": "KVRollout"}
    for made in (job, account):
        (reference,) = made["metadata"]["ownerReferences"]
        assert owner.items() <= reference.items()
    assert reasons(world).count("ProbeJobCreated") == 1
    assert world.faults.names.count("apply Job") == 1
    world.restart()
    await world.run(30)
    assert world.faults.names.count("apply Job") == 1, "another operator found it"
    terms = job["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    (required,) = terms.values()
    found = [term["matchFields"][0]["values"] for term in required["nodeSelectorTerms"]]
    assert found == [["node-0"], ["node-1"]]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("effect", ["apply ServiceAccount", "apply Job"])
async def test_an_operator_that_dies_at_a_write_leaves_one_job(effect: str, after: bool) -> None:
    counted = world_with()
    hold(counted)
    await counted.until("Progressing", "Shadow")
    await counted.run(30)
    world = world_with()
    hold(world)
    world.faults.kill_at, world.faults.after = counted.faults.names.index(effect) + 1, after
    await world.until("Progressing", "Shadow")
    await world.run(30)
    assert [job["metadata"]["name"] for job in jobs_of(world)] == [
        job["metadata"]["name"] for job in jobs_of(counted)
    ]


async def test_whoever_serves_reports_a_plan_without_a_model() -> None:
    world = world_with({"prompts": [{"digest": "a"}, {"digest": "b"}]})
    hold(world)
    await world.until("Progressing", "Shadow")
    await world.run(60)
    assert jobs_of(world) == []
    assert world.condition("Degraded")["status"] == "False"


async def test_a_job_that_nobody_takes_up_is_told_with_the_command() -> None:
    world = world_with()
    hold(world)
    await world.until("Progressing", "Shadow")
    await world.run(IDLE_SECONDS - 15)
    assert world.condition("Degraded")["status"] == "False"
    await world.run(60)
    (job,) = jobs_of(world)
    found = world.condition("Degraded")
    assert (found["status"], found["reason"]) == ("True", "ProbeJobIdle")
    assert job["metadata"]["name"] in found["message"]
    (note,) = {message for reason, message in world.api.events if reason == "ProbeJobIdle"}
    command = job["metadata"]["annotations"]["kvtier.dev/by-hand"]
    assert note.endswith(command), "whole, although an Event's note is bounded"
    job["status"] = {"startTime": "2027-01-15T08:00:00Z", "active": 1}
    await world.run(30)
    assert world.condition("Degraded")["status"] == "False"


async def test_a_failed_job_is_told_and_a_removed_one_is_made_again() -> None:
    world = world_with()
    hold(world)
    await world.until("Progressing", "Shadow")
    await world.run(15)
    (job,) = jobs_of(world)
    failed = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded", "message": "4 tries"}
    job["status"] = {"startTime": "2027-01-15T08:00:00Z", "conditions": [failed]}
    await world.run(30)
    found = world.condition("Degraded")
    assert (found["status"], found["reason"]) == ("True", "ProbeJobFailed")
    assert "BackoffLimitExceeded: 4 tries" in found["message"]
    # What the TTL controller does.
    world.api.ask_to_delete(ObjectKey(Kind.JOB, "serving", job["metadata"]["name"]))
    await world.run(15)
    assert [one["metadata"]["name"] for one in jobs_of(world)] == [job["metadata"]["name"]]


async def test_an_edited_plan_has_a_job_of_its_own_and_the_old_one_ends() -> None:
    world = world_with()
    hold(world)
    await world.until("Progressing", "Shadow")
    await world.run(15)
    (before,) = jobs_of(world)
    fence = world.status["fence"]
    edit_plan(world, json.dumps({**PLAN, "seeds": [2]}))
    await world.run(30)
    (after,) = jobs_of(world)
    assert after["metadata"]["name"] != before["metadata"]["name"]
    assert world.status["fence"] > fence, "the gates' digest has changed: a new window"


async def test_an_abort_ends_the_job() -> None:
    world = world_with()
    hold(world)
    await world.until("Progressing", "Shadow")
    await world.run(15)
    assert len(jobs_of(world)) == 1
    world.intent("Abort", 1)
    await world.until("RolledBack")
    await world.run(15)
    assert jobs_of(world) == []


async def test_a_job_ends_with_its_rollout_though_it_was_looked_at_a_moment_before() -> None:
    world = world_with()
    hold(world)
    await world.comes_by_itself(lambda: len(jobs_of(world)) == 1)
    world.intent("Abort", 1)
    await world.comes_by_itself(lambda: world.where[0] == "RolledBack" and not jobs_of(world))


async def test_a_refusal_of_the_api_server_does_not_stop_the_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_with()
    listing = world.api.list_all

    async def refuse(kind: Kind, *arguments: str, **more: str) -> list[JsonObject]:
        if kind is Kind.JOB:
            raise Forbidden(403, "Forbidden", "jobs.batch is forbidden")
        return await listing(kind, *arguments, **more)

    monkeypatch.setattr(world.api, "list_all", refuse)
    hold(world)
    await world.until("Progressing", "Shadow")
    await world.run(30)
    found = world.condition("Degraded")
    assert (found["status"], found["reason"]) == ("True", "ProbeJobRefused")
    assert "jobs.batch is forbidden" in found["message"]
    assert any("kvtier-eval probe" in message for _, message in world.api.events)
    world.feed.gates.clear()
    await world.until("Completed")
    assert isinstance(Forbidden(403, "", ""), ApiError)


BAD = [
    pytest.param(None, "ReferenceMissing", "ConfigMap golden: does not exist", id="missing"),
    pytest.param(
        {"a": "1", "b": "2"},
        "ProbePlanInvalid",
        "ConfigMap golden: data holds a, b; legal: plan.json, or one key of any name",
        id="two-keys",
    ),
    pytest.param(
        {"plan.json": json.dumps({**PLAN, "lengths": [9]})},
        "ProbePlanInvalid",
        "ConfigMap golden: plan.json: lengths[0] 9; legal: 128 to 131072",
        id="length",
    ),
    pytest.param(
        {"mine.json": json.dumps({**PLAN, "tasks": ["poem"]})},
        "ProbePlanInvalid",
        "mine.json: tasks[0] 'poem'; legal: passkey, multiKey",
        id="task",
    ),
]


@pytest.mark.parametrize("data, reason, message", BAD)
async def test_a_plan_that_cannot_be_used_waits_and_says_what_is_legal(
    data: dict[str, str] | None, reason: str, message: str
) -> None:
    world = world_with()
    kept = world.api.objects.pop(GOLDEN)
    if data is not None:
        world.api.put({**kept, "data": data})
    await world.run(3)
    assert world.where[:2] == ("Pending", "Off")
    feasible = world.condition("Feasible")
    assert (feasible["status"], feasible["reason"]) == ("False", reason)
    assert message in feasible["message"]
    world.api.put(kept)
    await world.until("Progressing", "Shadow")


async def test_a_plan_that_breaks_in_mid_step_is_told() -> None:
    world = world_with()
    hold(world)
    await world.until("Progressing", "Shadow")
    edit_plan(world, "{")
    await world.run(30)
    found = world.condition("Degraded")
    assert (found["status"], found["reason"]) == ("True", "ProbePlanInvalid")


# --- pure ------------------------------------------------------------------------------------------------


def run_of(**changes: Any) -> ProbeRun:
    metadata = {"name": "quest-on-chat", "namespace": "serving", "uid": "uid-1"}
    rollout = {"apiVersion": "kvtier.dev/v1alpha1", "kind": "KVRollout", "metadata": metadata}
    run = ProbeRun(
        rollout=rollout,
        attempt=1,
        candidate_digest="sha256:" + "c" * 64,
        cache="chat",
        gates=("quality",),
        plan=parse_plan(json.dumps(PLAN)),
        config_map="golden",
        key="plan.json",
        image="kvtier/agent:9",
        nodes=("node-a",),
    )
    return replace(run, **changes)


def test_a_job_has_no_rights_and_bounds_on_all_it_may_take() -> None:
    account, job = probe_objects(run_of())
    assert account["automountServiceAccountToken"] is False
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (spec["backoffLimit"], spec["activeDeadlineSeconds"], spec["ttlSecondsAfterFinished"]) == (
        3,
        14_400,
        3_600,
    )
    assert pod["automountServiceAccountToken"] is False
    assert pod["serviceAccountName"] == account["metadata"]["name"] == job["metadata"]["name"]
    assert pod["restartPolicy"] == "Never"
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"] == {"requests": {"cpu": "2", "memory": "6Gi"}, "limits": {"memory": "6Gi"}}
    assert container["image"] == "kvtier/agent:9"
    assert {mount["name"] for mount in container["volumeMounts"] if not mount.get("readOnly")} == {"scratch"}
    host = [volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume]
    assert host == ["/run/kvtier"]
    assert "--model-root=/models" in container["args"]


def test_a_job_and_a_person_run_the_same_command() -> None:
    run = run_of()
    (container,) = probe_objects(run)[1]["spec"]["template"]["spec"]["containers"]
    typed = command_by_hand(run)
    assert typed.startswith(
        "kubectl get configmap golden -n serving -o jsonpath='{.data.plan\\.json}' > plan"
    )
    for argument in container["args"]:
        if argument.startswith("--model-root"):
            continue
        here = argument.replace(f"{PLAN_FOLDER}/", "").replace("$(NODE_NAME)", "node-a")
        assert here in typed, argument


@pytest.mark.parametrize(
    "change",
    [
        {"attempt": 2},
        {"candidate_digest": "sha256:" + "d" * 64},
        {"plan": parse_plan(json.dumps({**PLAN, "seeds": [9]}))},
    ],
    ids=["attempt", "candidate", "plan"],
)
def test_a_name_is_one_attempts_candidates_and_plans(change: dict[str, Any]) -> None:
    run = run_of()
    assert run.name == run_of(nodes=("node-b",), image="other").name, "what it runs on does not matter"
    assert replace(run, **change).name != run.name


def test_a_long_name_stays_a_label() -> None:
    metadata = {"name": "a" * 39 + "." + "b" * 200, "namespace": "serving", "uid": "uid-1"}
    name = run_of(rollout={"apiVersion": "v1", "kind": "KVRollout", "metadata": metadata}).name
    assert len(name) <= 63
    assert name.startswith("a" * 39 + "-probe-")


def _walking(**changes: Any) -> tuple[Subject, RolloutSpec, RolloutState]:
    """A rollout in Shadow and its spec with the plan above."""
    world = World()
    rollout = world.api.objects[world.rollout]
    cache = world.api.objects[world.cache_key]
    config = {"data": {"plan.json": json.dumps(PLAN)}}
    spec = parse_spec(rollout["spec"], {"golden": probe_set(config)})
    status = {
        "phase": "Progressing",
        "stage": "Shadow",
        "attempt": 1,
        "candidate": {"digest": "sha256:" + "c" * 64, "revision": "chat-c", "class": "approximate"},
    }
    state = replace(from_status(status), **changes)
    return Subject(world.rollout, rollout, world.cache_key, cache), spec, state


def test_a_set_that_has_passed_needs_no_job_and_keeps_the_one_it_has() -> None:
    subject, spec, state = _walking()
    digest = spec.probes[0][1].digest
    gate = next(one.name for one in spec.gates if one.probe_set_digest == digest)
    first = wanted_runs(subject, spec, state, image="i", nodes=("node-0",))
    (name,) = first.missing
    passed = Carry(probe_passes={gate: ProbePass("sha256:" + "c" * 64, digest, "0.01", 0.0, 0.0, 8)})
    after = wanted_runs(subject, spec, replace(state, carry=passed), image="i", nodes=("node-0",))
    assert (dict(after.missing), after.current) == ({}, {name})
    other = Carry(probe_passes={gate: ProbePass("sha256:" + "d" * 64, digest, "0.01", 0.0, 0.0, 8)})
    again = wanted_runs(subject, spec, replace(state, carry=other), image="i", nodes=("node-0",))
    assert set(again.missing) == {name}, "another candidate's Pass is nobody's"


def test_nothing_is_made_before_an_agent_holds_the_candidate_or_after_the_end() -> None:
    subject, spec, state = _walking()
    assert wanted_runs(subject, spec, state, image="i", nodes=()).missing == {}
    done = replace(state, phase=Phase.COMPLETED, grant_expires=EPOCH)
    assert wanted_runs(subject, spec, done, image="i", nodes=("node-0",)) == Wanted()


@pytest.mark.parametrize(
    "status, age, troubles",
    [
        pytest.param({}, 10, [], id="young"),
        pytest.param({}, 31, ["ProbeJobIdle"], id="idle"),
        pytest.param({"startTime": "2027-01-15T00:00:00Z"}, 4000, [], id="runs"),
        pytest.param({"conditions": [{"type": "Complete", "status": "True"}]}, 4000, [], id="complete"),
        pytest.param(
            {"conditions": [{"type": "Failed", "status": "True", "reason": "DeadlineExceeded"}]},
            4000,
            ["ProbeJobFailed"],
            id="failed",
        ),
        pytest.param(
            {"conditions": [{"type": "Failed", "status": "False"}]}, 4000, ["ProbeJobIdle"], id="not-failed"
        ),
    ],
)
def test_what_a_job_says_of_itself(status: JsonObject, age: int, troubles: list[str]) -> None:
    run = run_of()
    created = (NOW - timedelta(seconds=age)).strftime("%Y-%m-%dT%H:%M:%SZ")
    job = {**probe_objects(run)[1], "status": status}
    job["metadata"] |= {"creationTimestamp": created, "uid": "job-uid"}
    wanted = Wanted(frozenset({run.name}), {run.name: run})
    decided = plan_jobs(wanted, [JobView.of(job)], NOW)
    assert [reason for reason, *_ in decided.troubles] == troubles
    assert (decided.create, decided.delete) == ((), ())


def test_only_what_is_unfinished_and_of_no_use_is_deleted() -> None:
    run = run_of()
    views = [
        JobView("old-running", "1", NOW, "", taken=True, finished=False, failed=""),
        JobView("old-done", "2", NOW, "", taken=True, finished=True, failed=""),
        JobView(run.name, "3", NOW, "", taken=True, finished=False, failed=""),
    ]
    decided = plan_jobs(Wanted(frozenset({run.name})), views, NOW)
    assert decided.delete == (("old-running", "1"),)
    assert plan_jobs(Wanted(), views, NOW).delete == (("old-running", "1"), (run.name, "3"))
