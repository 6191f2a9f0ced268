"""The pure halves: pools, nodes, selectors, classes, feasibility, conditions and events, as tables."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from kvtier_agent.config import TierConfig
from kvtier_crds.manifest import RuntimeManifest
from kvtier_crds.models.families import Family
from kvtier_crds.models.kvselector import Guarantee, Need
from kvtier_operator import conditions as c
from kvtier_operator.events import changes
from kvtier_operator.feasible import feasibility, open_chunk_bytes
from kvtier_operator.fleet import StoreFleet, lease_key
from kvtier_operator.ports import ApiError, Conflict, Done, EventType, JsonObject, Kind, ObjectKey, Requeue
from kvtier_operator.reconcile import agentpool, kvnode, kvselector, tierclass
from kvtier_operator.reconcile.agentpool import Observed
from kvtier_operator.reconcile.kvcache_plan import ledger_moved
from kvtier_operator.reconcile.kvcache_refs import resolve
from kvtier_operator.reconcile.kvnode import Liveness
from kvtier_operator.reconcile.pool_objects import daemon_set, tier_arguments
from kvtier_operator.selectorfacts import FAMILIES, TIMES_DENSE, VARIANTS
from tests.unit.control.control_fakes import START, Bench
from tests.unit.control.control_objects import (
    agent_pool,
    conditions,
    kv_cache,
    kv_selector,
    tier_class,
    with_meta,
)

NOW = datetime(2026, 1, 2, tzinfo=UTC)
MIB = 2**20


def node(
    name: str, labels: dict[str, str] | None = None, taints: list[JsonObject] | None = None
) -> JsonObject:
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels or {}},
        "spec": {"taints": taints or []},
    }


# --- which nodes a pool selects -------------------------------------------------------------------------

TAINT = {"key": "gpu", "value": "yes", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    "spec, labels, taints, selected",
    [
        pytest.param({}, {}, [], True, id="no-selector"),
        pytest.param({"nodeSelector": {"a": "1"}}, {"a": "1", "b": "2"}, [], True, id="label"),
        pytest.param({"nodeSelector": {"a": "1"}}, {"a": "2"}, [], False, id="other-value"),
        pytest.param({}, {}, [TAINT], False, id="taint"),
        pytest.param({"tolerations": [{"key": "gpu", "operator": "Exists"}]}, {}, [TAINT], True, id="exists"),
        pytest.param({"tolerations": [{"operator": "Exists"}]}, {}, [TAINT], True, id="exists-all"),
        pytest.param({"tolerations": [{"key": "gpu", "value": "yes"}]}, {}, [TAINT], True, id="equal"),
        pytest.param({"tolerations": [{"key": "gpu", "value": "no"}]}, {}, [TAINT], False, id="other"),
        pytest.param(
            {"tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoExecute"}]},
            {}, [TAINT], False, id="other-effect",
        ),
        pytest.param({}, {}, [TAINT | {"effect": "PreferNoSchedule"}], True, id="soft-taint"),
        pytest.param(
            {}, {}, [{"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}], True, id="cordoned"
        ),
    ],
)  # fmt: skip
def test_a_pool_selects_nodes_as_its_daemonset_would(
    spec: JsonObject, labels: dict[str, str], taints: list[JsonObject], selected: bool
) -> None:
    assert agentpool.selects(agent_pool(**spec), node("n", labels, taints)) is selected


# --- AgentPool --------------------------------------------------------------------------------------------


def observed(**changes_: Any) -> Observed:
    bench = Bench()
    for name in ("a", "b"):
        bench.add_node(name)
    base: dict[str, Any] = {
        "pool": with_meta(agent_pool()),
        "other_pools": (),
        "nodes": (node("a"), node("b")),
        "members": tuple(StoreFleet(bench.store, bench.clock).members("serving", "default")),
        "tier_classes": {"gpu-sim": tier_class(), "cpu-dram": tier_class("cpu-dram", "cpu")},
        "daemon_set": None,
        "rollouts": (),
    }
    return Observed(**(base | changes_))


def test_a_pool_with_all_agents_alive_is_available_and_still() -> None:
    decided = agentpool.plan(observed(), NOW)
    assert [one["kind"] for one in decided.objects] == [
        "ServiceAccount",
        "RoleBinding",
        "Service",
        "DaemonSet",
    ]
    assert (decided.status["desired"], decided.status["ready"]) == (2, 2)
    assert "updated" not in decided.status
    assert conditions({"status": decided.status}) == {
        "Available": ("True", "AllAgentsLive"),
        "Progressing": ("False", "Stable"),
        "NoOverlap": ("True", "NodesAreOwn"),
    }


async def test_a_pool_tells_once_that_agents_are_missing_and_once_that_they_are_back() -> None:
    bench = Bench()
    bench.api.add(tier_class("gpu-sim", "gpu"))
    bench.api.add(tier_class("cpu-dram", "cpu"))
    bench.api.add(agent_pool())
    key = ObjectKey(Kind.AGENT_POOL, "serving", "default")
    reconciler = agentpool.AgentPoolReconciler(bench.deps)

    async def told() -> list[str]:
        for _ in range(3):
            await reconciler.reconcile(key)
        seen = [reason for reason, _ in bench.api.events]
        bench.api.events.clear()
        return seen

    bench.api.add({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "a"}})
    assert await told() == [], "a pool is born without agents"
    bench.add_node("b")
    bench.store.remove(ObjectKey(Kind.NODE, "", "a"))
    assert await told() == ["Available"]
    bench.clock.advance(61)
    assert await told() == ["AgentsMissing"]
    bench.renew("b")
    assert await told() == ["Available"]
    other = with_meta(agent_pool("older"), creationTimestamp="2020-01-01T00:00:00Z")
    bench.api.add(other)
    assert await told() == ["NodesShared"]


async def test_what_a_pool_became_is_applied_once_and_again_when_it_is_deleted() -> None:
    bench = Bench()
    for obj in (tier_class("gpu-sim", "gpu"), tier_class("cpu-dram", "cpu"), agent_pool()):
        bench.api.add(obj)
    bench.api.add({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "a"}})
    key = ObjectKey(Kind.AGENT_POOL, "serving", "default")
    reconciler = agentpool.AgentPoolReconciler(bench.deps)

    async def written() -> list[str]:
        bench.api.writes.clear()
        for _ in range(3):
            await reconciler.reconcile(key)
        return [what for what in bench.api.writes if what.startswith("apply ")]

    first = await written()
    assert sorted(first) == sorted(set(first)), "each once"
    assert "apply DaemonSet" in first and "apply ServiceAccount" in first
    assert await written() == []
    where = ObjectKey(Kind.DAEMON_SET, "serving", "kvtier-agent-default")
    await bench.api.delete(where)
    assert await written() == ["apply DaemonSet"]


async def test_what_the_api_server_refuses_of_a_pool_is_said_and_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A selector that no DaemonSet may have, for example: the pool is valid, and what it becomes is not."""
    bench = Bench()
    for obj in (tier_class("gpu-sim", "gpu"), tier_class("cpu-dram", "cpu"), agent_pool()):
        bench.api.add(obj)
    key = ObjectKey(Kind.AGENT_POOL, "serving", "default")
    reconciler = agentpool.AgentPoolReconciler(bench.deps)
    apply, said = bench.api.apply, "spec.template.spec.nodeSelector: Invalid value"

    async def refuses(manifest: JsonObject, **options: Any) -> JsonObject:
        if said and manifest["kind"] == "DaemonSet":
            raise ApiError(422, "Invalid", said)
        return await apply(manifest, **options)

    monkeypatch.setattr(bench.api, "apply", refuses)
    for _ in range(2):
        assert await reconciler.reconcile(key) == Requeue(agentpool.REFUSED_SECONDS)
    found = {one["type"]: one for one in bench.api.objects[key]["status"]["conditions"]}
    assert (found["Progressing"]["status"], found["Progressing"]["reason"]) == ("False", "ObjectRefused")
    assert f"DaemonSet kvtier-agent-default: {said}" in found["Progressing"]["message"]
    assert {"Available", "NoOverlap"} <= set(found), "the other conditions are told all the same"
    assert [reason for reason, _ in bench.api.events] == ["ObjectRefused"]
    said = ""
    assert await reconciler.reconcile(key) == Done()
    assert conditions(bench.api.objects[key])["Progressing"] == ("False", "Stable")


@pytest.mark.parametrize("error", [ApiError(500, "InternalError", ""), Conflict(422, "Invalid", "a test")])
async def test_what_is_no_fault_of_a_pools_spec_is_not_said_to_be(
    monkeypatch: pytest.MonkeyPatch, error: ApiError
) -> None:
    bench = Bench()
    for obj in (tier_class("gpu-sim", "gpu"), tier_class("cpu-dram", "cpu"), agent_pool()):
        bench.api.add(obj)

    async def refuses(manifest: JsonObject, **options: Any) -> JsonObject:
        raise error

    monkeypatch.setattr(bench.api, "apply", refuses)
    with pytest.raises(ApiError):
        await agentpool.AgentPoolReconciler(bench.deps).reconcile(
            ObjectKey(Kind.AGENT_POOL, "serving", "default")
        )


OTHER = {"name": "other", "namespace": "serving"}


@pytest.mark.parametrize(
    "changed, condition, expected, applied",
    [
        pytest.param({"tier_classes": {}}, "Available", ("False", "ReferenceMissing"), False, id="no-class"),
        pytest.param({"members": ()}, "Available", ("False", "AgentsMissing"), True, id="no-agent"),
        pytest.param({"members": ()}, "Progressing", ("True", "WaitingForAgents"), True, id="waiting"),
        pytest.param({"members": (), "nodes": ()}, "Available", ("False", "NoNodes"), True, id="no-node"),
        pytest.param(
            {"other_pools": (with_meta(agent_pool("other"), creationTimestamp="2025-01-01T00:00:00Z"),)},
            "NoOverlap", ("False", "NodesShared"), False, id="the-younger-gives-way",
        ),
        pytest.param(
            {"other_pools": (with_meta(agent_pool("other"), creationTimestamp="2027-01-01T00:00:00Z"),)},
            "NoOverlap", ("False", "NodesShared"), True, id="the-older-stays",
        ),
        pytest.param(
            {"daemon_set": {"metadata": {"generation": 3}, "status": {"observedGeneration": 2}}},
            "Progressing", ("True", "TemplateChanged"), True, id="template-not-observed",
        ),
        pytest.param(
            {"pool": with_meta(agent_pool(updateStrategy="RollingUpdate")), "rollouts": ("go",)},
            "Progressing", ("False", "HeldByRollout"), True, id="held",
        ),
    ],
)  # fmt: skip
def test_what_a_pool_says(
    changed: dict[str, Any], condition: str, expected: tuple[str, str], applied: bool
) -> None:
    decided = agentpool.plan(observed(**changed), NOW)
    assert conditions({"status": decided.status})[condition] == expected
    assert bool(decided.objects) is applied


@pytest.mark.parametrize("rollouts, strategy", [((), "RollingUpdate"), (("go",), "OnDelete")])
def test_an_unfinished_rollout_holds_the_update_of_agents(rollouts: tuple[str, ...], strategy: str) -> None:
    pool = with_meta(agent_pool(updateStrategy="RollingUpdate"))
    decided = agentpool.plan(observed(pool=pool, rollouts=rollouts), NOW)
    assert decided.objects[-1]["spec"]["updateStrategy"] == {"type": strategy}


def test_the_daemonset_starts_agents_with_everything_they_need() -> None:
    pool = with_meta(
        agent_pool(
            nodeSelector={"gpu": "yes"},
            resources={"requests": {"cpu": "1"}},
            telemetry={"otlpEndpoint": "http://collector:4317"},
            tiers=[
                {"tierClassName": "gpu-sim", "capacity": "256Mi", "device": {"cudaIndex": 1}},
                {
                    "tierClassName": "nvme",
                    "capacity": "1Gi",
                    "reserve": "1Mi",
                    "device": {"path": "/mnt/kv/"},
                },
            ],
        )
    )
    classes = {"gpu-sim": tier_class(), "nvme": tier_class("nvme", "nvme")}
    pod = agentpool.plan(observed(pool=pool, tier_classes=classes), NOW).objects[-1]["spec"]["template"][
        "spec"
    ]
    arguments = pod["containers"][0]["args"]
    assert "--pool=serving/default" in arguments
    assert not [one for one in arguments if one.startswith("--node-uid")], "no template knows a uid"
    assert "--otlp-endpoint=http://collector:4317" in arguments
    assert (
        '--tier={"capacity":268435456,"className":"gpu-sim","device":{"cudaIndex":1},'
        '"deviceKind":"simulated","medium":"gpu","reserve":0}'
    ) in arguments
    assert {volume["hostPath"]["path"] for volume in pod["volumes"]} == {
        "/var/lib/kvtier",
        "/run/kvtier",
        "/mnt/kv",
    }
    assert pod["serviceAccountName"] == "kvtier-agent-default"
    assert pod["nodeSelector"] == {"gpu": "yes"}


@pytest.mark.parametrize(
    ("capabilities", "limits", "more"),
    [
        ({}, None, {}),
        ({}, {"readBytesPerSecond": "2G"}, {"readBytesPerSecond": "2G"}),
        ({"persistence": "durable"}, None, {"persistence": "durable"}),
        (
            {"persistence": "node"},
            {"queueDepth": 32, "endurance": {"driveWritesPerDay": "1", "targetFraction": "50%"}},
            {
                "persistence": "node",
                "queueDepth": 32,
                "endurance": {"driveWritesPerDay": "1", "targetFraction": "50%"},
            },
        ),
    ],
    ids=["as-before", "paced", "durable", "all"],
)
def test_an_agent_is_told_what_an_nvme_class_says_and_can_read_it(
    capabilities: JsonObject, limits: JsonObject | None, more: JsonObject
) -> None:
    tier = tier_class("nvme", "nvme")
    tier["spec"]["capabilities"].update(capabilities)
    if limits is not None:
        tier["spec"]["limits"] = limits
    pool = agent_pool(tiers=[{"tierClassName": "nvme", "capacity": "1Gi", "device": {"path": "/mnt/kv"}}])
    (argument,) = tier_arguments(pool, {"nvme": tier})
    told = json.loads(argument.removeprefix("--tier="))
    known = ("className", "medium", "capacity", "reserve", "device")
    assert {name: value for name, value in told.items() if name not in known} == more
    TierConfig.parse(json.dumps(told))


# --- KVNode ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "age, before, boot_before, liveness, changed, rebooted",
    [
        pytest.param(0, Liveness.NEVER, "", Liveness.LIVE, True, True, id="first-seen"),
        pytest.param(10, Liveness.LIVE, "boot-a", Liveness.LIVE, False, False, id="still-alive"),
        pytest.param(10, Liveness.LIVE, "boot-0", Liveness.LIVE, False, True, id="rebooted"),
        pytest.param(61, Liveness.LIVE, "boot-a", Liveness.LOST, True, False, id="lost"),
        pytest.param(61, Liveness.LOST, "boot-a", Liveness.LOST, False, False, id="still-lost"),
        pytest.param(1, Liveness.LOST, "boot-a", Liveness.LIVE, True, False, id="back"),
    ],
)
def test_liveness_is_the_leases(
    age: float, before: Liveness, boot_before: str, liveness: Liveness, changed: bool, rebooted: bool
) -> None:
    bench = Bench()
    bench.add_node("a")
    bench.clock.advance(age)
    view = StoreFleet(bench.store, bench.clock).members("serving", "default")[0]
    lease = bench.store.get(lease_key("serving", "a"))
    decided = kvnode.plan(view, lease, bench.clock.now(), before, boot_before)
    assert (decided.liveness, decided.changed, decided.rebooted) == (liveness, changed, rebooted)
    if liveness is Liveness.LIVE:
        assert decided.look_again_seconds == pytest.approx(60.5 - age)
    else:
        assert decided.look_again_seconds is None


def test_a_released_lease_is_not_alive() -> None:
    bench = Bench()
    bench.add_node("a")
    lease = bench.api.objects[lease_key("serving", "a")]
    del lease["spec"]["holderIdentity"]
    bench.api.catch_up()
    assert not StoreFleet(bench.store, bench.clock).members("serving", "default")[0].live


@pytest.mark.parametrize(
    "indexes, arguments",
    [
        pytest.param(None, [], id="absent"),
        pytest.param({"cpuShare": "5%"}, ["--index-cpu-share=0.05"], id="percent"),
        pytest.param(
            {"cpuShare": 1, "memory": "2Gi"},
            ["--index-cpu-share=1", f"--index-memory={2 << 30}"],
            id="both",
        ),
    ],
)
def test_what_indexes_may_take_is_told_to_agents(indexes: JsonObject | None, arguments: list[str]) -> None:
    pool = with_meta(agent_pool(**({} if indexes is None else {"indexes": indexes})))
    classes = {name: tier_class(name) for name in ("gpu-sim", "cpu-dram")}
    (container,) = daemon_set(pool, classes, hold=False)["spec"]["template"]["spec"]["containers"]
    assert [one for one in container["args"] if one.startswith("--index-")] == arguments


async def test_channels_are_kept_for_the_nodes_that_are_left() -> None:
    bench = Bench()
    bench.add_node("a")
    bench.add_node("b")
    bench.store.remove(ObjectKey(Kind.KV_NODE, "", "b"))
    await kvnode.KVNodeReconciler(bench.deps).reconcile(ObjectKey(Kind.KV_NODE, "", "b"))
    assert bench.agents.retained == {"a"}


# --- Selectors and classes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family, accepted, guarantee",
    [
        ("quest", ("True", "Valid"), "upperBound"),
        ("sparq", ("True", "Valid"), "heuristic"),
        ("magicPig", ("True", "Valid"), "sampled"),
        ("emLlm", ("True", "Valid"), "heuristic"),
        ("squeezedAttention", ("True", "Valid"), "heuristic"),
        ("fromTheFuture", ("False", "UnknownFamily"), None),
    ],
)
def test_a_selector_is_accepted_only_when_agents_implement_it(
    family: str, accepted: tuple[str, str], guarantee: str | None
) -> None:
    status = kvselector.plan(with_meta(kv_selector(family=family)), NOW)
    assert conditions({"status": status})["Accepted"] == accepted
    assert status.get("guarantee") == guarantee


@pytest.mark.parametrize(
    "edit, message",
    [
        pytest.param(
            {"gate": {"widenSteps": 0}},
            "not implemented: spec.gate: quest has no estimator of omitted mass; legal: absent",
            id="gate",
        ),
        pytest.param(
            {"calibration": {"configMapRef": {"name": "table"}}},
            "not implemented: spec.calibration: quest takes none; legal: absent",
            id="calibration",
        ),
        pytest.param(
            {"budget": {"tokens": 64, "capPolicy": "error"}},
            "not implemented: spec.budget.capPolicy error; legal: truncate",
            id="cap-policy-error",
        ),
        pytest.param(
            {"budget": {"tokens": 64, "capPolicy": "dense"}, "gate": {"minConfidence": "0.9"}},
            "not implemented: spec.gate: quest has no estimator of omitted mass; legal: absent; "
            "spec.budget.capPolicy dense; legal: truncate",
            id="two-fields",
        ),
    ],
)
def test_a_field_that_no_agent_carries_out_is_named_with_what_is_legal(
    edit: JsonObject, message: str
) -> None:
    selector = with_meta(kv_selector())
    selector["spec"] |= edit
    status = kvselector.plan(selector, NOW)
    [accepted] = [one for one in status["conditions"] if one["type"] == "Accepted"]
    assert (accepted["status"], accepted["reason"], accepted["message"]) == (
        "False",
        "NotImplemented",
        message,
    )
    assert conditions({"status": status})["IndexReady"] == ("Unknown", "NotImplemented")


@pytest.mark.parametrize(
    "edit",
    [{"budget": {"tokens": 64}}, {"gate": None, "calibration": None}, {"persistentRows": {"sink": 4}}],
    ids=["default-cap-policy", "null", "persistent-rows"],
)
def test_what_agents_carry_out_is_accepted(edit: JsonObject) -> None:
    selector = with_meta(kv_selector())
    selector["spec"] |= edit
    assert conditions({"status": kvselector.plan(selector, NOW)})["Accepted"] == ("True", "Valid")


def test_every_family_of_the_vocabulary_has_its_facts() -> None:
    assert set(FAMILIES) == {family.value for family in Family}
    for facts in (*FAMILIES.values(), *VARIANTS.values()):
        Guarantee(facts.guarantee)
        assert facts.needs
        for need in facts.needs:
            Need(need)


@pytest.mark.parametrize("family", ["magicPig", "quest"])
def test_a_family_that_is_slower_than_dense_attention_says_so(family: str) -> None:
    times = TIMES_DENSE[family]
    status = kvselector.plan(with_meta(kv_selector(family=family)), NOW)
    [accepted] = [one for one in status["conditions"] if one["type"] == "Accepted"]
    assert f"slower than dense attention on CPUs: {times} times its time over 8,192" in accepted["message"]
    assert accepted["message"].endswith("docs/benchmarks/selectors.md")


def test_a_variant_that_is_another_method_has_its_own_facts() -> None:
    selector = with_meta(kv_selector(family="retrievalAttention"))
    selector["spec"]["retrievalAttention"] = {"variant": "retroInfer"}
    selector["spec"]["gate"] = {"maxEstimatedOmittedMass": "0.1"}
    status = kvselector.plan(selector, NOW)
    assert (status["guarantee"], status["needs"], status["appendable"]) == ("estimate", ["query"], True)
    assert conditions({"status": status})["Accepted"] == ("True", "Valid")
    selector["spec"]["retrievalAttention"] = {}
    status = kvselector.plan(selector, NOW)
    assert status["needs"] == ["query", "prefillQueries"]
    assert conditions({"status": status})["Accepted"] == ("False", "NotImplemented")


@pytest.mark.parametrize(
    "medium, accepted",
    [("gpu", ("True", "Valid")), ("nvme", ("True", "Valid")), ("remote", ("False", "NotImplemented"))],
)
def test_a_tier_class_is_accepted_when_an_agent_can_offer_it(medium: str, accepted: tuple[str, str]) -> None:
    status = tierclass.plan(with_meta(tier_class("t", medium)), NOW)
    assert conditions({"status": status}) == {"Accepted": accepted}


# --- Feasibility -----------------------------------------------------------------------------------------


def manifest(cache: JsonObject) -> RuntimeManifest:
    bench = Bench()
    for one in (tier_class(), tier_class("cpu-dram", "cpu"), agent_pool()):
        bench.api.add(one)
    exact = resolve(with_meta(cache), bench.store).exact
    assert exact is not None
    return exact


def budgets(gpu: str, cpu: str) -> JsonObject:
    return kv_cache(
        tiers=[
            {"tierClassName": "gpu-sim", "budget": gpu, "role": "resident"},
            {"tierClassName": "cpu-dram", "budget": cpu, "role": "resident"},
        ]
    )


def test_open_chunks_are_k_and_v_of_each_layer() -> None:
    # 2 layers, 256 rows, 2 KV heads of 16 fp32 values, once for K and once for V.
    assert open_chunk_bytes(manifest(kv_cache())) == 2 * 2 * 256 * 2 * 16 * 4


@pytest.mark.parametrize(
    "cache, others, status, reasons",
    [
        pytest.param(budgets("32Mi", "64Mi"), {}, {}, [], id="fits"),
        pytest.param(budgets("256Mi", "448Mi"), {}, {}, [], id="fits-to-the-byte"),
        pytest.param(budgets("32Mi", "449Mi"), {}, {}, ["BudgetExceedsCapacity"], id="reserve-is-kept"),
        pytest.param(
            budgets("32Mi", "64Mi"), {"gpu-sim": 240 * MIB}, {}, ["BudgetExceedsCapacity"], id="beside-others"
        ),
        pytest.param(budgets("128Ki", "64Mi"), {}, {}, [], id="one-session-just-fits"),
        pytest.param(budgets("127Ki", "64Mi"), {}, {}, ["BudgetTooSmall"], id="no-session-fits"),
        pytest.param(
            budgets("32Mi", "64Mi"), {}, {"tiers": [{"class": "gpu-sim", "capacity": 256 * MIB}]},
            ["TierMissing"], id="tier-missing",
        ),
        pytest.param(
            budgets("32Mi", "64Mi"), {}, {"numericsVersion": "f16/9"}, ["NumericsMismatch"], id="numerics"
        ),
        pytest.param(budgets("1Gi", "64Mi"), {}, {"tiers": []}, [], id="nothing-reported-yet"),
    ],
)  # fmt: skip
def test_what_fits_on_a_node(
    cache: JsonObject, others: dict[str, int], status: JsonObject, reasons: list[str]
) -> None:
    bench = Bench()
    bench.add_node("a", **status)
    views = StoreFleet(bench.store, bench.clock).members("serving", "default")
    found = feasibility(manifest(cache), cache, agent_pool(), views, others)
    assert [problem.reason for problem in found.problems] == reasons
    condition = found.condition()
    assert condition.status is (c.Truth.FALSE if reasons else c.Truth.TRUE)
    if reasons == ["BudgetExceedsCapacity"] and others:
        assert condition.message == (
            f"a: tier gpu-sim has {256 * MIB} bytes, this cache needs {32 * MIB} and others hold {240 * MIB}"
        )


@pytest.mark.parametrize(
    ("mounted", "reasons"),
    [
        pytest.param([], ["KeyNotMounted"], id="none"),
        pytest.param([{"name": "other"}], ["KeyNotMounted"], id="another"),
        pytest.param([{"name": "other"}, {"name": "chat-keys"}], [], id="mounted"),
    ],
)
def test_keys_must_be_mounted_by_the_pool(mounted: list[JsonObject], reasons: list[str]) -> None:
    bench = Bench()
    bench.add_node("a")
    views = StoreFleet(bench.store, bench.clock).members("serving", "default")
    cache = kv_cache(keySecretRef={"name": "chat-keys"})
    found = feasibility(manifest(cache), cache, agent_pool(keySecretRefs=mounted), views, {})
    assert [problem.reason for problem in found.problems] == reasons
    if reasons:
        assert "Secret chat-keys, which AgentPool default does not mount" in found.condition().message


def test_secrets_are_mounted_read_only_each_in_a_folder_of_its_name() -> None:
    pool = with_meta(agent_pool(keySecretRefs=[{"name": "a-keys"}, {"name": "b-keys"}]))
    classes = {tier["tierClassName"]: tier_class(tier["tierClassName"]) for tier in pool["spec"]["tiers"]}
    pod = daemon_set(pool, classes, hold=False)["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert "--key-secrets=/run/kvtier-keys" in container["args"]
    mounts = {m["name"]: m for m in container["volumeMounts"] if m["name"].startswith("keys-")}
    secrets = {v["name"]: v["secret"] for v in pod["volumes"] if "secret" in v}
    assert {secrets[name]["secretName"]: m["mountPath"] for name, m in mounts.items()} == {
        "a-keys": "/run/kvtier-keys/a-keys",
        "b-keys": "/run/kvtier-keys/b-keys",
    }
    assert all(m["readOnly"] for m in mounts.values())
    assert all(s["optional"] and s["defaultMode"] == 0o400 for s in secrets.values())
    plain = daemon_set(with_meta(agent_pool()), classes, hold=False)["spec"]["template"]["spec"]
    assert not any("key" in argument for argument in plain["containers"][0]["args"] if "tls" not in argument)


def test_feasibility_without_a_live_node_is_not_known() -> None:
    found = feasibility(manifest(kv_cache()), kv_cache(), agent_pool(), [], {})
    assert (found.condition().status, found.condition().reason) == (c.Truth.UNKNOWN, "NoLiveNodes")


# --- Conditions, events, ledger ---------------------------------------------------------------------------


def test_a_conditions_time_moves_only_with_its_status() -> None:
    first = c.merge([], [c.true("Ready", "A", "one")], generation=1, now=START)
    later = START + timedelta(minutes=5)
    same = c.merge(first, [c.true("Ready", "B", "two")], generation=2, now=later)
    assert same[0]["lastTransitionTime"] == first[0]["lastTransitionTime"]
    assert (same[0]["reason"], same[0]["observedGeneration"]) == ("B", 2)
    flipped = c.merge(same, [c.false("Ready", "C")], generation=2, now=later)
    assert flipped[0]["lastTransitionTime"] == "2026-01-01T00:05:00Z"


def test_merging_twice_is_merging_once() -> None:
    wanted = [c.true("Ready", "A"), c.false("Degraded", "B"), c.unknown("Feasible", "C")]
    once = c.merge([], wanted, generation=1, now=START)
    assert c.merge(once, wanted, generation=1, now=START + timedelta(hours=1)) == once
    assert [one["type"] for one in once] == ["Degraded", "Feasible", "Ready"]


def state(type: str, status: str, reason: str) -> JsonObject:
    return {"type": type, "status": status, "reason": reason, "message": "m"}


@pytest.mark.parametrize(
    "before, after, expected",
    [
        pytest.param(None, ("Ready", "True", "Served"), None, id="good-from-the-start-is-no-news"),
        pytest.param(
            None,
            ("Ready", "False", "ReferenceMissing"),
            (EventType.WARNING, "ReferenceMissing"),
            id="bad-start",
        ),
        pytest.param(None, ("Ready", "False", "NoLiveNodes"), None, id="expected-at-the-start"),
        pytest.param(
            ("Ready", "True", "Served"),
            ("Ready", "False", "NotProved"),
            (EventType.WARNING, "NotProved"),
            id="broke",
        ),
        pytest.param(("Ready", "True", "A"), ("Ready", "True", "A"), None, id="unchanged"),
        pytest.param(
            ("Degraded", "True", "AgentLost"), ("Degraded", "False", "AllWell"),
            (EventType.NORMAL, "DegradedEnded"), id="mended",
        ),
        pytest.param(None, ("Other", "False", "X"), None, id="not-a-type-of-interest"),
    ],
)  # fmt: skip
def test_which_changes_become_events(
    before: tuple[str, str, str] | None,
    after: tuple[str, str, str],
    expected: tuple[EventType, str] | None,
) -> None:
    found = changes([state(*before)] if before else [], [state(*after)], ("Ready", "Degraded"))
    assert [(one.type, one.reason) for one in found] == ([expected] if expected else [])


@pytest.mark.parametrize(
    "used, moved", [(0, False), (49, False), (51, True), (1000, True)], ids=["same", "4.9%", "5.1%", "full"]
)
def test_a_ledger_moves_by_more_than_a_twentieth_of_its_budget(used: int, moved: bool) -> None:
    before = [{"tierClassName": "t", "budget": 1000, "used": 0, "pinned": 0}]
    after = [{"tierClassName": "t", "budget": 1000, "used": used, "pinned": 0}]
    assert ledger_moved(before, after) is moved


def test_missing_references_are_all_named_at_once() -> None:
    bench = Bench()
    cache = with_meta(kv_cache(selectorRef={"name": "q"}, contract={"exactness": "approximate"}))
    assert resolve(cache, bench.store).missing == (
        "AgentPool default",
        "TierClass cpu-dram",
        "TierClass gpu-sim",
        "KVSelector q",
    )
    assert bench.store.get(ObjectKey(Kind.KV_CACHE, "serving", "chat")) is None
