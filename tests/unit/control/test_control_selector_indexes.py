"""IndexReady of a KVSelector: from what agents report, and when its numbers are worth a write."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier.v1 import common_pb2 as common
from kvtier.v1 import control_pb2 as control
from kvtier_operator.ports import Done, JsonObject, Kind, ObjectKey, Requeue
from kvtier_operator.reconcile import kvselector
from kvtier_operator.reconcile.kvselector import LOOK_SECONDS, KVSelectorReconciler, must_write
from kvtier_operator.reconcile.selector_indexes import CacheIndexes, Holding, holdings, index_ready
from tests.unit.control.control_fakes import Bench
from tests.unit.control.control_objects import agent_pool, kv_cache, kv_rollout, kv_selector

DIGEST = "sha256:" + "c" * 64
KEY = ObjectKey(Kind.KV_SELECTOR, "serving", "quest-64")


def found(**changes: Any) -> CacheIndexes:
    return CacheIndexes("chat", **{"agents": 1, **changes})


@pytest.mark.parametrize(
    "indexes, status, reason, part",
    [
        pytest.param([], "Unknown", "NotHeld", "no agent holds", id="nobody"),
        pytest.param([found(agents=0, silent=["b", "a"])], "Unknown", "AgentsSilent", "a, b", id="silent"),
        pytest.param([found()], "Unknown", "NoSessions", "no session is open", id="no-sessions"),
        pytest.param([found(building=2)], "False", "Building", "2 building", id="building"),
        pytest.param(
            [found(refused=3, refusals={"UNSUPPORTED": 3})],
            "False",
            "Refused",
            "refused by UNSUPPORTED 3",
            id="refused",
        ),
        pytest.param([found(ready=4)], "True", "Ready", "4 sessions ready", id="ready"),
        pytest.param([found(ready=4, building=1)], "True", "Partly", "1 building", id="one-builds"),
        pytest.param([found(ready=4, refused=1)], "True", "Partly", "1 exact for good", id="one-refused"),
        pytest.param(
            [found(ready=1, hidden_seconds=4.2, exposed_seconds=0.25, bytes=3 << 20, silent=["c"])],
            "True",
            "Ready",
            "4.20 s hidden and 0.25 s exposed, 3.0 MiB, no answer from c",
            id="numbers",
        ),
        pytest.param(
            [found(building=1), CacheIndexes("code", agents=1, ready=1)],
            "True",
            "Partly",
            "KVCache code on 1 agents",
            id="two-caches",
        ),
    ],
)
def test_what_the_condition_says(indexes: list[CacheIndexes], status: str, reason: str, part: str) -> None:
    condition = index_ready(indexes)
    assert (condition.status.value, condition.reason) == (status, reason)
    assert part in condition.message


def test_only_the_selector_of_the_candidate_that_is_held_counts() -> None:
    holding = Holding("chat", "uid-1", ("serving", "default"), DIGEST)

    def state(digest: str, uid: str = "uid-1") -> control.GetStateResponse:
        rows = [
            control.IndexState(family="quest", of_candidate=True, ready=2, hidden_seconds=1.5, index_bytes=7),
            control.IndexState(family="quest", of_candidate=False, ready=9, refusals={"UNSUPPORTED": 1}),
        ]
        held = control.CacheState(
            cache=common.CacheRef(uid=uid), candidate=control.CandidateState(digest=digest), indexes=rows
        )
        return control.GetStateResponse(caches=[held])

    total = CacheIndexes("chat")
    for one in (state(DIGEST), state(DIGEST), state("sha256:other"), state(DIGEST, "uid-2")):
        total.add(one, holding)
    assert (total.agents, total.ready, total.hidden_seconds, total.bytes) == (2, 4, 3.0, 14)
    assert total.refusals == {}


def holder(stage: str = "Shadow", digest: str = DIGEST, **candidate: Any) -> JsonObject:
    rollout = kv_rollout()
    rollout["spec"]["candidate"] = candidate or {"selectorRef": {"name": "quest-64"}}
    rollout["status"] |= {"stage": stage, "candidate": {"digest": digest}}
    return rollout


@pytest.mark.parametrize(
    "rollout, held",
    [
        pytest.param(holder(), True, id="shadow"),
        pytest.param(holder("Full"), True, id="full"),
        pytest.param(holder("Off"), False, id="off"),
        pytest.param(holder("ExactBaseline"), False, id="returned"),
        pytest.param(holder(digest=""), False, id="no-candidate"),
        pytest.param(holder(selectorRef={"name": "other"}), False, id="another-selector"),
        pytest.param(holder(fromCacheSpec=True), True, id="of-the-caches-spec"),
        pytest.param(holder(overrides={"placement": {}}), False, id="exact"),
    ],
)
def test_who_holds_a_candidate_with_this_selector(rollout: JsonObject, held: bool) -> None:
    bench = Bench()
    for one in (agent_pool(), kv_cache(selectorRef={"name": "quest-64"}), kv_selector(), rollout):
        bench.api.add(one)
    selector = bench.store.get(KEY)
    assert selector is not None
    assert [one.cache for one in holdings(selector, bench.store)] == (["chat"] if held else [])


def served(ready: int, seconds: float = 1.0) -> tuple[Bench, ObjectKey]:
    """An agent that holds the candidate, with sessions."""
    bench = Bench()
    for one in (agent_pool(), kv_cache(), kv_selector(), holder()):
        bench.api.add(one)
    bench.add_node("a")
    bench.renew("a", seconds=3600)
    cache = bench.store.get(ObjectKey(Kind.KV_CACHE, "serving", "chat"))
    assert cache is not None
    uid = cache["metadata"]["uid"]
    bench.agents.refs[uid] = common.CacheRef(namespace="serving", name="chat", uid=uid)
    bench.agents.caches["a"] = {uid: [5, "sha256:base"]}
    report(bench, ready, seconds)
    return bench, KEY


def report(bench: Bench, ready: int, seconds: float = 1.0) -> None:
    bench.agents.candidates["a"] = control.CandidateState(digest=DIGEST)
    row = control.IndexState(family="quest", of_candidate=True, ready=ready, hidden_seconds=seconds)
    bench.agents.indexes["a"] = [row]


async def test_a_held_selector_says_how_its_indexes_stand_and_is_looked_at_again() -> None:
    bench, key = served(3)
    reconciler = KVSelectorReconciler(bench.deps)
    assert await reconciler.reconcile(key) == Requeue(LOOK_SECONDS, "indexes")
    selector = bench.store.get(key)
    assert selector is not None
    status = selector["status"]
    assert status["indexes"] == [
        {
            "cache": "chat",
            "agents": 1,
            "ready": 3,
            "building": 0,
            "refused": 0,
            "hiddenSeconds": "1.00",
            "exposedSeconds": "0.00",
            "bytes": 0,
        }
    ]
    ready = next(one for one in status["conditions"] if one["type"] == "IndexReady")
    assert (ready["status"], ready["reason"]) == ("True", "Ready")
    bench.agents.down.add("a")
    bench.clock.advance(LOOK_SECONDS)
    await reconciler.reconcile(key)
    selector = bench.store.get(key)
    assert selector is not None
    ready = next(one for one in selector["status"]["conditions"] if one["type"] == "IndexReady")
    assert (ready["status"], ready["reason"]) == ("Unknown", "AgentsSilent")


async def test_an_agent_is_asked_once_for_all_selectors() -> None:
    bench, key = served(3)
    bench.api.add(kv_selector("quest-32"))
    second = holder(selectorRef={"name": "quest-32"})
    second["metadata"]["name"] = "other"
    second["spec"]["cacheRef"]["name"] = "code"
    bench.api.add(kv_cache("code"))
    bench.api.add(second)
    reconciler = KVSelectorReconciler(bench.deps)
    await reconciler.reconcile(key)
    await reconciler.reconcile(ObjectKey(Kind.KV_SELECTOR, "serving", "quest-32"))
    assert bench.agents.calls == ["GetState"]
    bench.clock.advance(LOOK_SECONDS)
    await reconciler.reconcile(key)
    assert bench.agents.calls == ["GetState", "GetState"]


async def test_one_that_nobody_holds_is_not_asked_about() -> None:
    bench = Bench()
    bench.api.add(kv_selector())
    assert await KVSelectorReconciler(bench.deps).reconcile(KEY) == Done()
    assert bench.agents.calls == []


async def test_numbers_alone_are_written_once_a_minute() -> None:
    bench, key = served(3)
    reconciler = KVSelectorReconciler(bench.deps)

    async def ready() -> int:
        await reconciler.reconcile(key)
        selector = bench.store.get(key)
        assert selector is not None
        return int(selector["status"]["indexes"][0]["ready"])

    assert await ready() == 3
    report(bench, 9)
    bench.clock.advance(LOOK_SECONDS)
    assert await ready() == 3
    bench.clock.advance(kvselector.QUIET_WRITE_SECONDS)
    assert await ready() == 9
    bench.clock.advance(kvselector.QUIET_WRITE_SECONDS)
    report(bench, 9, 1.01)
    before = len(bench.api.writes)
    assert await ready() == 9
    assert len(bench.api.writes) == before, "1 % is no news"


@pytest.mark.parametrize(
    "after, quiet_for, due",
    [
        pytest.param([found(ready=3)], 0.0, False, id="same"),
        pytest.param([found(ready=4)], 59.0, False, id="moved-too-soon"),
        pytest.param([found(ready=4)], 60.0, True, id="moved"),
        pytest.param([found(ready=0, building=3)], 0.0, True, id="another-reason"),
        pytest.param([found(ready=3), CacheIndexes("code", agents=1)], 0.0, True, id="another-cache"),
    ],
)
def test_what_is_written_when(after: list[CacheIndexes], quiet_for: float, due: bool) -> None:
    selector = {**kv_selector(), "metadata": {"name": "quest-64", "namespace": "serving", "uid": "u"}}
    now = Bench().clock.now()
    before = kvselector.plan(selector, now, [found(ready=3)])
    assert must_write(before, kvselector.plan({**selector, "status": before}, now, after), quiet_for) is due
