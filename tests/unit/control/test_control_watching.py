"""What watches and relists leave in the read cache, and which keys a change wakes."""

from __future__ import annotations

import asyncio
import copy
import json
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_operator.budgets import budgets_of_others
from kvtier_operator.lastreads import LastReads
from kvtier_operator.packed import unpacked
from kvtier_operator.ports import ApiError, JsonObject, Kind, Known, ObjectKey, Store
from kvtier_operator.reconcile.selector_indexes import holdings
from kvtier_operator.store import WatchStore
from kvtier_operator.watch import triggers
from kvtier_operator.watch import trimmed as trimming
from kvtier_operator.watch.kopf_thread import WatchDeps, accept
from kvtier_operator.watch.relist import INTERVAL_SECONDS, RESYNC_SECONDS, Relist, Relisted, looks_after
from kvtier_operator.watch.triggers import RECONCILED, WATCHED
from kvtier_operator.watch.trimmed import trimmed
from tests.unit.control.control_fakes import Bench, FakeClock
from tests.unit.control.control_objects import agent_pool, kv_cache, kv_rollout, kv_selector, tier_class


def key(kind: Kind, name: str, namespace: str = "serving") -> ObjectKey:
    return ObjectKey(kind, namespace, name)


CACHE = key(Kind.KV_CACHE, "chat")
POOL = key(Kind.AGENT_POOL, "default")
ROLLOUT = key(Kind.KV_ROLLOUT, "go")
NODE_A = ObjectKey(Kind.KV_NODE, "", "a")


def version(number: int, uid: str = "u", **fields: Any) -> JsonObject:
    return {"metadata": {"name": "chat", "uid": uid, "resourceVersion": str(number)}, **fields}


# --- the store --------------------------------------------------------------------------------------------


def test_an_older_version_does_not_replace_a_newer_one() -> None:
    store = WatchStore()
    store.put(CACHE, version(9))
    assert store.put(CACHE, version(8)) == version(9)
    assert store.get(CACHE) == version(9)


def test_a_recreated_object_replaces_the_old_one_whatever_its_version() -> None:
    store = WatchStore()
    store.put(CACHE, version(9))
    store.put(CACHE, version(3, uid="other"))
    assert store.get(CACHE) == version(3, uid="other")


def test_a_relist_removes_what_has_vanished_unseen() -> None:
    """After an expired watch nobody says DELETED."""
    store = WatchStore()
    store.put(CACHE, version(1))
    repaired = store.repair(Kind.KV_CACHE, [], store.moment())
    assert repaired.vanished == {CACHE}
    assert store.get(CACHE) is None


def test_a_relist_does_not_undo_what_the_watch_said_meanwhile() -> None:
    store = WatchStore()
    gone, came = key(Kind.KV_CACHE, "gone"), key(Kind.KV_CACHE, "came")
    store.put(gone, version(1))
    since = store.moment()  # the list is requested here
    store.remove(gone)
    store.put(came, version(5))
    repaired = store.repair(Kind.KV_CACHE, [(gone, version(1))], since)
    assert store.get(gone) is None
    assert store.get(came) == version(5)
    assert not repaired.vanished
    assert not repaired.changed


KEYS = [key(Kind.KV_CACHE, name) for name in "abc"]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["create", "delete", "watch", "list"]), st.integers(0, 2)), max_size=60
    )
)
def test_after_a_full_list_the_cache_is_the_truth(steps: list[tuple[str, int]]) -> None:
    """A server, a watch that may lose deletions, and lists that arrive late."""
    server: dict[ObjectKey, JsonObject] = {}
    store = WatchStore()
    for number, (what, index) in enumerate(steps, start=1):
        one = KEYS[index]
        if what == "create":
            server[one] = version(number, uid=f"uid-{number}")
        elif what == "delete":
            server.pop(one, None)  # and the watch does not tell
        elif what == "watch" and one in server:
            store.put(one, server[one])
        elif what == "list":
            since, listed = store.moment(), list(server.items())
            store.repair(Kind.KV_CACHE, listed, since)
            assert {found: store.get(found) for found in server} == server
            assert len(store.list_all(Kind.KV_CACHE)) == len(server)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.sampled_from("ab"), st.sampled_from("xyz")), max_size=40))
def test_lists_are_in_order_whatever_came_and_went(steps: list[tuple[bool, str, str]]) -> None:
    """By namespace and name; of one namespace, or of all."""
    store, truth, counts = WatchStore(lambda _, count: counts.append(count)), {}, list[int]()
    for number, (put, namespace, name) in enumerate(steps):
        one = key(Kind.KV_CACHE, name, namespace)
        if put:
            truth[one] = version(number, uid=f"uid-{number}")
            store.put(one, truth[one])
        else:
            truth.pop(one, None)
            store.remove(one)
        assert counts[-1] == len(truth)
        assert store.list_all(Kind.KV_CACHE) == [truth[found] for found in sorted(truth)]
        mine = [truth[found] for found in sorted(truth) if found.namespace == "a"]
        assert store.list_all(Kind.KV_CACHE, "a") == mine


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["put", "remove", "list"]), st.sampled_from("xyz"), st.sampled_from("ab")),
        max_size=40,
    )
)
def test_the_rollouts_of_a_cache_are_those_that_name_it_now(steps: list[tuple[str, str, str]]) -> None:
    """Also one that is made anew for another cache, and after a list that lacks one."""
    store, truth = WatchStore(), dict[ObjectKey, JsonObject]()
    for number, (what, name, cache) in enumerate(steps):
        one = key(Kind.KV_ROLLOUT, name)
        if what == "put":
            spec = {"cacheRef": {"name": cache}}
            truth[one] = {
                "metadata": {"name": name, "uid": f"u-{number}", "resourceVersion": "1"},
                "spec": spec,
            }
            store.put(one, truth[one])
        else:
            truth.pop(one, None)
            if what == "remove":
                store.remove(one)
            else:
                store.repair(Kind.KV_ROLLOUT, truth.items(), store.moment())
        for of in "ab":
            mine = [truth[found] for found in sorted(truth) if truth[found]["spec"]["cacheRef"]["name"] == of]
            assert store.rollouts_of(one.namespace, of) == mine
            assert store.rollouts_of("elsewhere", of) == []


FOREIGN = [
    pytest.param({"cacheRef": "chat", "candidate": "quest-64"}, id="texts"),
    pytest.param({"cacheRef": ["chat"], "candidate": [{"selectorRef": "quest-64"}]}, id="lists"),
    pytest.param({"cacheRef": {"name": {"of": "chat"}}, "candidate": {"selectorRef": "quest-64"}}, id="deep"),
    pytest.param({"candidate": {"selectorRef": ["quest-64"]}}, id="absent"),
    pytest.param({"cacheRef": None, "candidate": None}, id="none"),
]


@pytest.mark.parametrize("spec", FOREIGN)
def test_a_rollout_in_another_versions_form_is_nobody_elses_trouble(bench: Bench, spec: JsonObject) -> None:
    """Everyone who looks for the rollouts of a cache, a pool or a selector passes it."""
    foreign = kv_rollout("foreign")
    foreign["spec"] = spec
    bench.api.add(foreign)
    bench.api.add(kv_rollout())
    bench.api.catch_up()
    store = bench.store
    where = key(Kind.KV_ROLLOUT, "foreign")
    assert [one["metadata"]["name"] for one in store.rollouts_of("serving", "chat")] == ["go"]
    assert triggers.affected(where, None, trimmed(Kind.KV_ROLLOUT, foreign), store) >= {where}
    for kind, name in ((Kind.KV_CACHE, "chat"), (Kind.AGENT_POOL, "default"), (Kind.KV_SELECTOR, "quest-64")):
        changed = store.get(key(kind, name))
        assert changed is not None
        woken = triggers.affected(key(kind, name), changed, None, store)
        assert ROLLOUT in woken and where not in woken
    selector, cache = store.get(key(Kind.KV_SELECTOR, "quest-64")), store.get(CACHE)
    assert selector is not None and cache is not None
    holdings(selector, store)
    budgets_of_others(cache, store.list_all(Kind.KV_CACHE), store.list_all(Kind.KV_ROLLOUT))
    store.remove(where)
    assert store.get(where) is None


def test_what_nobody_reads_is_not_kept() -> None:
    """Neither from a watch nor from a list; what is read stays as it was."""
    store = WatchStore()
    deps = WatchDeps(store, lambda _keys, _seen: None, None, FakeClock())
    managed = version(1, spec={"a": 1}, status={"b": 2})
    managed["metadata"]["managedFields"] = [{"manager": "kubectl", "fieldsV1": {}}]
    node = {"metadata": {"name": "a", "uid": "n", "labels": {"x": "y"}}, "spec": {"unschedulable": True}}
    ready = [{"type": "Ready", "status": "True"}]
    accept(deps, Kind.KV_CACHE, False, managed)
    accept(deps, Kind.NODE, False, {**node, "status": {"conditions": ready, "images": [{"names": ["i"]}]}})
    assert store.list_all(Kind.KV_CACHE) == [version(1, spec={"a": 1}, status={"b": 2})]
    assert store.list_all(Kind.NODE) == [{**node, "status": {"conditions": ready}}]
    assert "managedFields" in managed["metadata"], "it is the watch's own object"


def test_names_and_short_values_of_all_objects_are_held_once() -> None:
    store = WatchStore()
    deps = WatchDeps(store, lambda _keys, _seen: None, None, FakeClock())
    for name in ("a", "b"):
        text = json.dumps(version(1, spec={"tierClassName": "cpu dram", "rows": [{"text": "x" * 99}]}))
        obj = json.loads(text)
        obj["metadata"]["name"] = name
        accept(deps, Kind.KV_CACHE, False, obj)
    first, second = (obj["spec"] for obj in store.list_all(Kind.KV_CACHE))
    assert first == second == {"tierClassName": "cpu dram", "rows": [{"text": "x" * 99}]}
    assert [id(key) for key in first] == [id(key) for key in second]
    assert first["tierClassName"] is second["tierClassName"]


def test_what_specs_say_alike_is_held_once_and_what_they_say_otherwise_is_not() -> None:
    def told(name: str, limit: object) -> JsonObject:
        gates = [{"name": "output", "max": limit, "minSamples": 30}]
        spec = {"cacheRef": {"name": name}, "gates": gates, "leaseTTL": "60s"}
        return trimmed(Kind.KV_ROLLOUT, {"metadata": {"name": name}, "spec": spec})

    one, two, other, number = told("a", "0.5"), told("b", "0.5"), told("c", "0.50"), told("d", 0.5)
    assert one["spec"]["gates"] is two["spec"]["gates"]
    assert one["spec"]["cacheRef"] == {"name": "a"} and two["spec"]["cacheRef"] == {"name": "b"}
    assert other["spec"]["gates"][0]["max"] == "0.50"
    assert repr(number["spec"]["gates"][0]["max"]) == "0.5"


def test_parts_of_specs_are_kept_to_be_shared_in_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trimming, "ALIKE", 2)
    monkeypatch.setattr(trimming, "_known", OrderedDict())

    def gates(limit: str) -> object:
        told = {"metadata": {"name": "a"}, "spec": {"gates": [{"name": "output", "max": limit}]}}
        return trimmed(Kind.KV_ROLLOUT, told)["spec"]["gates"]

    first, second = gates("1"), gates("2")
    assert gates("1") is first, "and is the latest again"
    gates("3")
    assert gates("1") is first and gates("2") is not second
    assert len(trimming._known) == 2


def test_rows_that_only_a_rollouts_own_run_reads_are_packed() -> None:
    rows = [{"name": f"gate-{i}", "at": "2026-11-30T21:25:22.606Z", "n": 4500 + i} for i in range(11)]
    status = {"phase": "Progressing", "fence": 3, "gates": rows, "carry": {"cells": []}, "conditions": []}
    told = {"metadata": {"name": "a"}, "spec": {}, "status": status}
    kept = trimmed(Kind.KV_ROLLOUT, told)["status"]
    assert {name: unpacked(part) for name, part in kept.items()} == status
    assert (kept["phase"], kept["fence"], kept["conditions"]) == ("Progressing", 3, [])
    assert kept["gates"] == trimmed(Kind.KV_ROLLOUT, told)["status"]["gates"]
    rows[0]["n"] = 1
    assert kept["gates"] != trimmed(Kind.KV_ROLLOUT, told)["status"]["gates"]
    assert trimmed(Kind.KV_CACHE, told)["status"] == status, "others read those of a cache"
    with pytest.raises(TypeError, match="unpacked"):
        bool(kept["gates"])


async def test_a_relist_keeps_no_more_than_a_watch() -> None:
    store = WatchStore()
    managed = version(1)
    managed["metadata"] |= {"namespace": "serving", "managedFields": [{"manager": "kubectl"}]}
    lister = Lister(found={Kind.KV_CACHE: [{**managed, "kind": "KVCache", "apiVersion": "kvtier.dev/v1"}]})
    await Relist(lister, store, FakeClock(), lambda: 0.5, lambda _: None).one(Kind.KV_CACHE)
    assert [list(obj["metadata"]) for obj in store.list_all(Kind.KV_CACHE)] == [
        ["name", "uid", "resourceVersion", "namespace"]
    ]


# --- which keys ------------------------------------------------------------------------------------------


def affected(
    key: ObjectKey, before: JsonObject | None, after: JsonObject | None, store: Store
) -> set[ObjectKey]:
    assert key.kind in WATCHED, "or nobody would tell of it"
    return triggers.affected(key, before, after, store)


@pytest.fixture
def bench() -> Bench:
    made = Bench()
    for obj in (
        tier_class(),
        agent_pool(),
        agent_pool("other"),
        kv_cache(selectorRef={"name": "quest-64"}),
        kv_cache("elsewhere", poolRef={"name": "other"}, tiers=[{"tierClassName": "x", "budget": "1Mi"}]),
        kv_selector(),
        kv_rollout(),
    ):
        made.api.add(obj)
    made.add_node("a")
    return made


@pytest.mark.parametrize(
    "changed, woken",
    [
        pytest.param(ObjectKey(Kind.TIER_CLASS, "", "gpu-sim"), {CACHE}, id="tier-class"),
        pytest.param(key(Kind.KV_SELECTOR, "quest-64"), {CACHE, ROLLOUT}, id="selector"),
        pytest.param(NODE_A, {POOL, CACHE, ROLLOUT}, id="kvnode"),
        pytest.param(POOL, {POOL, key(Kind.AGENT_POOL, "other"), CACHE, ROLLOUT}, id="pool"),
        pytest.param(CACHE, {CACHE, ROLLOUT}, id="cache"),
    ],
)
def test_a_new_object_wakes_those_that_depend_on_it(
    bench: Bench, changed: ObjectKey, woken: set[ObjectKey]
) -> None:
    obj = bench.store.get(changed)
    assert affected(changed, None, obj, bench.store) == {changed} | woken
    assert affected(changed, obj, None, bench.store) == {changed} | woken


@pytest.mark.parametrize(
    "changed, woken",
    [
        pytest.param(ObjectKey(Kind.TIER_CLASS, "", "gpu-sim"), {CACHE}, id="tier-class"),
        pytest.param(key(Kind.KV_SELECTOR, "quest-64"), {CACHE, ROLLOUT}, id="selector"),
        pytest.param(POOL, {key(Kind.AGENT_POOL, "other"), CACHE, ROLLOUT}, id="pool"),
    ],
)
def test_a_status_wakes_nobody_else_and_a_spec_does(
    bench: Bench, changed: ObjectKey, woken: set[ObjectKey]
) -> None:
    """A selector's is written once a minute, a pool's with each agent that comes."""
    before = bench.store.get(changed)
    assert before is not None
    told = before | {"status": {"ready": 3}}
    assert affected(changed, before, told, bench.store) == {changed}
    for fact in ({"generation": 2}, {"uid": "another"}, {"deletionTimestamp": "now"}, {"labels": {"a": "b"}}):
        after = told | {"metadata": before["metadata"] | fact}
        assert affected(changed, before, after, bench.store) == {changed} | woken, fact


def test_a_rollout_that_moves_wakes_its_cache_pool_and_selector(bench: Bench) -> None:
    """A pool holds its updates while a rollout is unfinished, and lets them go after it; a selector says how
    its indexes stand while agents hold its candidate."""
    before = bench.store.get(ROLLOUT)
    assert before is not None
    after = before | {"status": {"phase": "Completed", "stage": "Full"}}
    selector = key(Kind.KV_SELECTOR, "quest-64")
    assert affected(ROLLOUT, before, after, bench.store) == {ROLLOUT, CACHE, POOL, selector}
    for moved in ({"verdict": "Pass"}, {"stage": "Ramp"}):
        later = after | {"status": after["status"] | moved}
        assert affected(ROLLOUT, after, later, bench.store) == {ROLLOUT}, "nobody else goes by that"


OWNING = {"phase": "RollingBack", "stage": "ExactBaseline", "fence": 4}


@pytest.mark.parametrize(
    "rollout, changed, wakes",
    [
        pytest.param(OWNING, {"fence": 5}, False, id="the-number-of-a-rollout-that-owns-it"),
        pytest.param({}, {"fence": 5}, True, id="a-number-that-is-its-own"),
        pytest.param(OWNING | {"phase": "RolledBack"}, {"fence": 5}, True, id="of-one-that-has-ended"),
        pytest.param(OWNING, {"fence": 5, "approved": {"digest": "d"}}, True, id="with-an-approval"),
        pytest.param(OWNING, {"baseline": {"digest": "e"}}, True, id="another-baseline"),
        pytest.param(OWNING, {"fence": None}, True, id="the-number-was-lost"),
        pytest.param(
            {}, {"conditions": [{"type": "Ready", "status": "False"}]}, False, id="its-own-condition"
        ),
        pytest.param({}, {"conditions": []}, True, id="the-conditions-were-lost"),
    ],
)
def test_a_cache_is_not_woken_by_what_it_wrote_nor_by_the_number_of_the_rollout_that_owns_it(
    bench: Bench, rollout: JsonObject, changed: JsonObject, wakes: bool
) -> None:
    """It would ask all agents what they run while they are told of that number; the rollout is woken."""
    bench.store.put(ROLLOUT, (bench.store.get(ROLLOUT) or {}) | {"status": rollout})
    told = {"fence": 4, "baseline": {"digest": "d"}, "conditions": [{"type": "Ready", "status": "True"}]}
    before = (bench.store.get(CACHE) or {}) | {"status": told}
    after = before | {"status": before["status"] | changed}
    assert affected(CACHE, before, after, bench.store) == {ROLLOUT} | ({CACHE} if wakes else set())


@pytest.mark.parametrize(
    "changed, wakes",
    [
        pytest.param({"observedGeneration": 9}, False, id="has-seen-an-edit"),
        pytest.param({"ledger": [{"tierClassName": "cpu-dram", "used": 7}]}, False, id="bytes"),
        pytest.param({"servingNodes": 2}, True, id="serves-on-another-node"),
        pytest.param({"conditions": [{"type": "Ready", "status": "False"}]}, True, id="ready-no-more"),
        pytest.param(
            {"conditions": [{"type": "Ready", "status": "True", "message": "x"}]}, False, id="a-text"
        ),
        pytest.param({"digestBudget": [{"digest": "d", "attempts": 2}]}, True, id="a-share-was-spent"),
        pytest.param({"fence": 5}, True, id="the-number"),
    ],
)
def test_a_rollout_is_woken_by_what_it_goes_by_of_its_cache(
    bench: Bench, changed: JsonObject, wakes: bool
) -> None:
    bench.store.put(ROLLOUT, (bench.store.get(ROLLOUT) or {}) | {"status": OWNING})
    told = {"fence": 4, "baseline": {"digest": "d"}, "conditions": [{"type": "Ready", "status": "True"}]}
    before = (bench.store.get(CACHE) or {}) | {"status": told | {"servingNodes": 1}}
    after = before | {"status": before["status"] | changed}
    assert (ROLLOUT in affected(CACHE, before, after, bench.store)) is wakes


def test_a_return_wakes_its_cache_when_it_ends(bench: Bench) -> None:
    base = bench.store.get(ROLLOUT)
    assert base is not None
    walking, returning, ended = (
        base | {"status": {"phase": phase, "stage": stage, "fence": 4, "candidate": {"digest": "d"}}}
        for phase, stage in (
            ("Progressing", "Canary"),
            ("RollingBack", "ExactBaseline"),
            ("RolledBack", "ExactBaseline"),
        )
    )
    selector = key(Kind.KV_SELECTOR, "quest-64")
    assert affected(ROLLOUT, walking, returning, bench.store) == {ROLLOUT, selector}
    assert affected(ROLLOUT, returning, ended, bench.store) == {ROLLOUT, CACHE, POOL, selector}


def agent(**status: Any) -> JsonObject:
    spec = {"address": "a:1", "poolRef": {"namespace": "serving", "name": "default"}}
    tier = {"class": "cpu-dram", "state": "Ready", "capacity": 10, "used": 1}
    return {"metadata": {"name": "a"}, "spec": spec, "status": {"bootID": "b", "tiers": [tier], **status}}


def holding(cache: str, digest: str = "d") -> JsonObject:
    return {"namespace": "serving", "cache": cache, "digest": digest, "fence": 3}


@pytest.mark.parametrize(
    "before, after, woken",
    [
        pytest.param(agent(), agent(candidates=[holding("chat")]), set(), id="a-grant"),
        pytest.param(
            agent(candidates=[holding("chat")]),
            agent(candidates=[holding("chat") | {"fence": 4, "stage": "Ramp"}]),
            set(),
            id="the-same-candidate-at-another-stage",
        ),
        pytest.param(agent(candidates=[holding("chat")]), agent(), {ROLLOUT}, id="let-go"),
        pytest.param(
            agent(candidates=[holding("chat")]),
            agent(candidates=[holding("chat", "e")]),
            {ROLLOUT},
            id="another-candidate",
        ),
        pytest.param(agent(candidates=[holding("elsewhere")]), agent(), set(), id="of-a-cache-alone"),
        pytest.param(
            agent(), agent(tiers=[{"class": "cpu-dram", "state": "Ready", "capacity": 10, "used": 9}]), set(),
            id="bytes",
        ),
        pytest.param(
            agent(),
            agent(tiers=[{"class": "cpu-dram", "state": "Failed", "capacity": 10, "used": 1}]),
            {POOL, CACHE, ROLLOUT},
            id="a-tier-failed",
        ),
        pytest.param(agent(), agent(bootID="c"), {POOL, CACHE, ROLLOUT}, id="restarted"),
        pytest.param(
            agent(),
            agent(conditions=[{"type": "Draining", "status": "True"}]),
            {POOL, CACHE, ROLLOUT},
            id="draining",
        ),
    ],
)  # fmt: skip
def test_of_an_agents_status_only_what_others_decide_by_wakes_them(
    bench: Bench, before: JsonObject, after: JsonObject, woken: set[ObjectKey]
) -> None:
    """Its own reconcile goes by those, too: 200 agents that let go at once are not looked at one by one."""
    itself = {NODE_A} if POOL in woken else set()
    assert affected(NODE_A, before, after, bench.store) == itself | woken


@pytest.mark.parametrize(
    "status, woken",
    [
        pytest.param({"candidate": {"digest": "e"}}, False, id="goes-on-with-another"),
        pytest.param({"candidate": {"digest": "d"}}, True, id="its-own-is-gone"),
        pytest.param({"candidate": {"digest": "e"}, "phase": "RollingBack"}, True, id="returns"),
        pytest.param({"candidate": {"digest": "e"}, "revoking": {}}, True, id="waits-for-another-to-end"),
        pytest.param({}, True, id="has-none-yet"),
    ],
)
def test_an_agent_that_let_go_wakes_whom_it_is_news_to(bench: Bench, status: JsonObject, woken: bool) -> None:
    """Each of them says so some seconds later, one after another, and every time all would be asked."""
    rollout = copy.deepcopy(bench.store.get(ROLLOUT))
    assert rollout is not None
    bench.api.add(rollout | {"status": {"phase": "Progressing", "stage": "Shadow", "fence": 5} | status})
    before, after = agent(candidates=[holding("chat")]), agent(candidates=[holding("chat", "e")])
    assert affected(NODE_A, before, after, bench.store) == ({ROLLOUT} if woken else set())


LEASE = key(Kind.LEASE, "kvnode-a")


EARLY, SOON, LATE = "2027-01-15T08:00:00.0Z", "2027-01-15T08:00:29.9Z", "2027-01-15T08:00:30.1Z"


def lease(holder: str, renewed: str = "1") -> JsonObject:
    return {"metadata": {"name": "kvnode-a"}, "spec": {"holderIdentity": holder, "renewTime": renewed}}


@pytest.mark.parametrize(
    "before, after, wakes",
    [
        pytest.param(lease("x"), lease("x", "2"), False, id="renewed"),
        pytest.param(None, lease("x"), True, id="new"),
        pytest.param(lease("x", EARLY), lease("x", SOON), False, id="renewed-in-time"),
        pytest.param(lease("x", EARLY), lease("x", LATE), True, id="renewed-after-its-end"),
        pytest.param(lease("x"), lease("y"), True, id="another-boot"),
        pytest.param(lease("x"), lease(""), True, id="released"),
        pytest.param(lease("x"), None, True, id="deleted"),
    ],
)
def test_a_renewal_wakes_nobody(
    bench: Bench, before: JsonObject | None, after: JsonObject | None, wakes: bool
) -> None:
    woken = affected(LEASE, before, after, bench.store)
    assert woken == ({NODE_A, POOL, CACHE, ROLLOUT} if wakes else set())


def k8s_node(**spec: Any) -> JsonObject:
    return {"metadata": {"name": "a"}, "spec": spec}


def test_a_cordon_wakes_and_a_heartbeat_does_not(bench: Bench) -> None:
    where = ObjectKey(Kind.NODE, "", "a")
    assert affected(where, k8s_node(), k8s_node() | {"status": {"images": []}}, bench.store) == set()
    assert {POOL, CACHE, ROLLOUT} <= affected(where, k8s_node(), k8s_node(unschedulable=True), bench.store)


def test_a_daemonset_wakes_the_pool_that_owns_it(bench: Bench) -> None:
    owner = {"kind": "AgentPool", "name": "default"}
    obj = {"metadata": {"name": "kvtier-agent-default", "ownerReferences": [owner]}}
    assert affected(key(Kind.DAEMON_SET, "kvtier-agent-default"), None, obj, bench.store) == {POOL}


@pytest.mark.parametrize(
    "name, holder, deleted, free",
    [
        pytest.param("kvtier-operator", "", False, ["kvtier-system"], id="given back"),
        pytest.param("kvtier-operator", None, False, ["kvtier-system"], id="without a holder"),
        pytest.param("kvtier-operator", "one", True, ["kvtier-system"], id="deleted"),
        pytest.param("kvtier-operator", "one", False, [], id="renewed"),
        pytest.param("kvnode-a", "", False, [], id="an agent's"),
    ],
)
def test_an_operators_lease_is_not_kept_and_who_waits_hears_that_it_is_free(
    name: str, holder: str | None, deleted: bool, free: list[str]
) -> None:
    store, told = WatchStore(), []
    deps = WatchDeps(store, lambda _keys, _seen: None, None, FakeClock(), told.append)
    spec = {} if holder is None else {"holderIdentity": holder}
    lease = {"metadata": {"name": name, "namespace": "kvtier-system", "resourceVersion": "1"}, "spec": spec}
    accept(deps, Kind.LEASE, deleted, lease)
    assert told == free
    assert len(store.list_all(Kind.LEASE)) == (name == "kvnode-a")


def test_leases_that_are_not_agents_are_not_kept() -> None:
    store, woken = WatchStore(), []
    deps = WatchDeps(store, lambda keys, _seen: woken.append(keys), None, FakeClock())
    other = {"metadata": {"name": "kube-scheduler", "namespace": "kube-system", "uid": "u"}}
    accept(deps, Kind.LEASE, False, other)
    assert store.list_all(Kind.LEASE) == []
    accept(deps, Kind.KV_CACHE, False, version(1) | {"spec": {}})
    assert woken == [{ObjectKey(Kind.KV_CACHE, "", "chat")}]


def test_with_its_keys_a_change_says_which_version_it_is(bench: Bench) -> None:
    """So that its own run is not told of what it wrote. Of an end everybody is told."""
    reads, woken = LastReads(), []
    deps = WatchDeps(bench.store, lambda keys, seen: woken.append((keys, seen)), None, FakeClock())
    rollout = copy.deepcopy(bench.store.get(ROLLOUT))
    assert rollout is not None
    spec, status = rollout["spec"], {"phase": "Completed", "fence": 3}
    for number, deleted in (("1000", False), ("1001", False), ("1002", True)):
        metadata = {**rollout["metadata"], "resourceVersion": number}
        accept(deps, Kind.KV_ROLLOUT, deleted, {"metadata": metadata, "spec": spec, "status": status})
    reads.wrote(ROLLOUT, {"metadata": {**rollout["metadata"], "resourceVersion": "1000"}}, ROLLOUT)
    (first, written), (_, other), (_, gone) = woken
    assert first == {ROLLOUT, CACHE, POOL, key(Kind.KV_SELECTOR, "quest-64")}, "its candidate is approved"
    assert (reads.writer(written), reads.writer(other), gone) == (ROLLOUT, None, None)


# --- the relist ------------------------------------------------------------------------------------------


class Lister:
    def __init__(
        self, broken: tuple[Kind, ...] = (), found: dict[Kind, list[JsonObject]] | None = None
    ) -> None:
        self.broken = broken
        self.found = found or {}
        self.asked: list[tuple[Kind, str]] = []
        self.told: list[bool] = []

    async def list_all(
        self,
        kind: Kind,
        namespace: str = "",
        label_selector: str = "",
        field_selector: str = "",
        *,
        each: Callable[[JsonObject], JsonObject],
        known: Known | None,
    ) -> list[JsonObject]:
        self.asked.append((kind, label_selector))
        self.told.append(known is not None)
        if kind in self.broken:
            raise ApiError(500, "InternalError", "no")
        return [each(obj) for obj in self.found.get(kind, [])]


async def test_a_kind_that_cannot_be_listed_keeps_what_it_had() -> None:
    store = WatchStore()
    store.put(CACHE, version(1))
    store.put(POOL, version(1))
    done: list[Relisted] = []
    lister = Lister((Kind.KV_CACHE,))
    relist = Relist(lister, store, FakeClock(), lambda: 0.5, done.append)
    await relist.everything()
    assert store.get(CACHE) is not None
    assert store.get(POOL) is None
    assert done == [Relisted({}, missed=True)]
    assert [kind for kind, _ in lister.asked] == list(WATCHED)
    assert dict(lister.asked)[Kind.LEASE] == "kvtier.dev/component=agent"


async def test_where_nothing_is_known_whole_pages_are_asked_for_at_once() -> None:
    """At the start metadata would only double the requests: of ten thousand objects a hundred."""
    found = version(2, kind="KVCache", apiVersion="kvtier.dev/v1alpha1")
    found["metadata"]["namespace"] = "serving"
    lister = Lister(found={Kind.KV_CACHE: [found]})
    relist = Relist(lister, WatchStore(), FakeClock(), lambda: 0.5, lambda _: None)
    for _ in range(2):
        await relist.one(Kind.KV_CACHE)
    assert lister.told == [False, True]


async def test_an_overflowing_queue_brings_the_relist_forward() -> None:
    done: asyncio.Queue[Relisted] = asyncio.Queue()
    relist = Relist(Lister(), WatchStore(), FakeClock(), lambda: 0.0, done.put_nowait)
    task = asyncio.create_task(relist.run())
    relist.request()
    async with asyncio.timeout(60):
        assert (await done.get()).missed, "nobody knows which key it was"
    task.cancel()
    assert INTERVAL_SECONDS >= 60


async def test_a_relist_tells_what_no_watch_has_told() -> None:
    found = version(2, kind="KVCache", apiVersion="kvtier.dev/v1alpha1")
    found["metadata"]["namespace"] = "serving"
    done: list[Relisted] = []
    relist = Relist(
        Lister(found={Kind.KV_CACHE: [found]}), WatchStore(), FakeClock(), lambda: 0.5, done.append
    )
    for _ in range(2):
        await relist.everything()
    assert done == [Relisted({CACHE: None}, missed=False), Relisted({}, missed=False)]


@pytest.mark.parametrize("missed", [False, True], ids=["told", "missed"])
def test_after_a_relist_whom_a_change_concerns_is_looked_at_first_and_all_within_two_minutes(
    bench: Bench, missed: bool
) -> None:
    """A Lease that was renewed as the list came concerns nobody, or each list would wake whole pools."""
    lease = {"metadata": {"name": "node-a", "namespace": "serving", "resourceVersion": "8"}, "spec": {}}
    changed: dict[ObjectKey, JsonObject | None] = {CACHE: None}
    renewed = ObjectKey(Kind.LEASE, "serving", "node-a")
    bench.store.put(renewed, lease)
    changed[renewed] = copy.deepcopy(lease)
    found = list(looks_after(Relisted(changed, missed), bench.store, lambda: 0.5))
    everything = {
        ObjectKey(kind, obj["metadata"].get("namespace", ""), obj["metadata"]["name"])
        for kind in RECONCILED
        for obj in bench.store.list_all(kind)
    }
    at_once = {key for key, seconds in found if seconds == 0.0}
    if missed:
        assert at_once == everything
    else:
        assert at_once == affected(CACHE, None, bench.store.get(CACHE), bench.store) < everything
        assert {key for key, seconds in found if seconds == RESYNC_SECONDS / 2} == everything
