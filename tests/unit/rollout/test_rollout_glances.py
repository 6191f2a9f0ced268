"""A look that finds nothing to do needs no request, and nothing is decided on what the server may not say."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvtier_operator.agents.recent import RecentAgents
from kvtier_operator.agents.renewal import LeaseRenewer
from kvtier_operator.lastreads import LastReads, Seen
from kvtier_operator.ports import AgentTarget, JsonObject, Kind, ObjectKey, Requeue
from kvtier_operator.reconcile.kvrollout import KVRolloutReconciler
from kvtier_operator.rollout.pairs import VOUCHED_SECONDS, Pairs
from kvtier_operator.rollout.vocabulary import Verdict
from tests.unit.rollout.rollout_world import StoreView, World, copied, held

OURS = (Kind.KV_ROLLOUT, Kind.KV_CACHE)
KEY = ObjectKey(Kind.KV_CACHE, "serving", "chat")


class Behind(StoreView):
    """A read cache whose watches say nothing since it was made."""

    def __init__(self, world: World) -> None:
        super().__init__(world.api)
        self._then = copied(world.api.objects)

    def get(self, key: ObjectKey) -> JsonObject | None:
        return self._then.get(key)


async def resting(**spec: Any) -> tuple[World, list[ObjectKey]]:
    """In Canary with too little evidence, everything written; and what is asked of the server from now on."""
    world = World(**spec)
    await world.until("Progressing", "Canary")
    world.feed.default = Verdict.INSUFFICIENT
    await world.run(25)
    asked: list[ObjectKey] = []
    get = world.api.get

    async def noted(key: ObjectKey, *, known: JsonObject | None = None) -> JsonObject:
        if key.kind in OURS:
            asked.append(key)
        return await get(key, known=known)

    world.api.get = noted  # type: ignore[method-assign]
    return world, asked


def stop_watching(world: World) -> None:
    object.__setattr__(world.deps, "store", Behind(world))


async def test_looks_at_which_nothing_has_changed_ask_the_server_nothing() -> None:
    world, asked = await resting()
    looks, writes = world.feed.looks, world.api.writes
    await world.pass_()
    asked.clear()
    await world.run(VOUCHED_SECONDS / 2)
    assert world.feed.looks > looks
    assert (asked, world.api.writes) == ([], writes)


async def test_the_server_is_asked_when_it_was_not_for_long() -> None:
    world, asked = await resting()
    await world.pass_()
    asked.clear()
    await world.run(VOUCHED_SECONDS + 2)
    assert set(asked) == {world.rollout, world.cache_key}


async def test_an_edit_that_no_watch_tells_of_is_found() -> None:
    world, _ = await resting()
    await world.pass_()
    stop_watching(world)
    world.edit(progressDeadline="2h")
    generation = world.api.objects[world.rollout]["metadata"]["generation"]
    assert world.status["observedGeneration"] < generation
    await world.run(VOUCHED_SECONDS + 2)
    assert world.status["observedGeneration"] == generation


async def test_what_a_renewal_reads_tells_the_next_look_that_the_read_cache_is_behind() -> None:
    world, asked = await resting()
    await world.pass_()
    stop_watching(world)
    world.intent("Abort", 1)
    await world.pass_()
    assert world.status["phase"] == "Progressing", "nobody knows yet"
    await LeaseRenewer(world.deps).tick()
    asked.clear()
    await world.pass_()
    assert world.status["phase"] in ("RollingBack", "RolledBack")
    assert asked[0] == world.rollout


@pytest.mark.parametrize("verdict", [Verdict.FAIL, Verdict.PASS])
async def test_what_a_run_has_written_does_not_travel_again(verdict: Verdict) -> None:
    """A watch tells of it later; before agents hear of it the server is asked only if it is still there."""
    world, _ = await resting()
    await world.pass_()
    world.feed.default = verdict
    get, travelled = world.api.get, list[ObjectKey]()

    async def noted(key: ObjectKey, *, known: JsonObject | None = None) -> JsonObject:
        found = await get(key, known=known)
        if key.kind in OURS and found is not known:
            travelled.append(key)
        return found

    world.api.get = noted  # type: ignore[method-assign]
    stop_watching(world)
    fence, calls = world.cache_status["fence"], list(world.faults.names)
    world.clock.seconds += 12
    await world.pass_()
    assert world.cache_status["fence"] > fence
    verb = "Revoke" if verdict is Verdict.FAIL else "Grant"
    assert any(name.startswith(verb) for name in world.faults.names[len(calls) :])
    assert travelled == []


async def test_harm_is_written_down_without_another_request() -> None:
    world, asked = await resting()
    await world.pass_()
    asked.clear()
    world.feed.default = Verdict.FAIL
    order: list[str] = []
    swap = world.api.compare_and_swap

    async def noted(key: ObjectKey, *args: Any, **options: Any) -> JsonObject:
        order.append(f"{key.kind} after {len(asked)} requests")
        return await swap(key, *args, **options)

    world.api.compare_and_swap = noted  # type: ignore[method-assign]
    await world.run(3)
    assert order[:2] == ["KVCache after 0 requests", "KVRollout after 0 requests"]
    assert world.status["phase"] == "RolledBack"
    assert held(world) == []


@pytest.mark.parametrize("what", ["fence", "status"])
async def test_a_return_decided_on_what_has_passed_is_refused_and_decided_again(what: str) -> None:
    world, _ = await resting()
    await world.pass_()
    stop_watching(world)
    if what == "fence":
        cache = copied(world.api.objects[world.cache_key])
        cache["status"]["fence"] += 5
        world.api.put(cache)
    else:
        world.edit(progressDeadline="2h")
    before = world.cache_status["fence"]
    world.feed.default = Verdict.FAIL
    await world.run(3)
    assert world.status["phase"] == "RolledBack"
    assert world.status["fence"] == world.cache_status["fence"] > before
    assert held(world) == []


async def test_nothing_favourable_is_decided_on_the_read_cache() -> None:
    """It still shows a cache that may be changed; the server has had it suspended."""
    world, _ = await resting()
    await world.pass_()
    stop_watching(world)
    cache = copied(world.api.objects[world.cache_key])
    cache["spec"]["suspend"] = True
    world.api.put(cache)
    fence = world.cache_status["fence"]
    world.feed.default = Verdict.PASS
    await world.run(5)
    assert (world.status["stage"], world.cache_status["fence"]) == ("Canary", fence)


async def test_a_node_that_joins_is_granted_on_what_the_server_says() -> None:
    world, asked = await resting()
    await world.pass_()
    world.add_node("node-9")
    asked.clear()
    await world.run(2)
    assert "node-9" in held(world)
    assert {world.rollout, world.cache_key} <= set(asked)


async def test_nothing_goes_on_by_what_an_agent_told_another_before_it_fell_silent() -> None:
    """At a look what others were told a while ago will do; a step that passes there asks anew."""
    world = World(leaseTTL="60s")
    await world.until("Progressing", "Canary")
    world.feed.default = Verdict.INSUFFICIENT
    await world.run(25)
    agents = RecentAgents(world.deps.agents, world.clock)
    object.__setattr__(world.deps, "agents", agents)
    world.operator = KVRolloutReconciler(world.deps, feed=world.feed)
    due = await world.pass_()
    assert isinstance(due, Requeue) and due.after_seconds > 3.0
    world.clock.seconds += due.after_seconds - 1.0
    for member in world.deps.fleet.members("serving", "default"):
        await agents.recent_state(member.target, "another", 0.0, for_all=True)
    world.sims["node-0"].cut_off = True
    world.clock.seconds += 1.0
    world.feed.default = Verdict.PASS
    looks = world.feed.looks
    await world.pass_()
    assert world.feed.looks > looks
    assert world.where == ("Progressing", "Canary", 0)
    assert [one["node"] for one in world.status["unreachable"]] == ["node-0"]


@pytest.mark.parametrize(
    "earlier, times",
    [
        pytest.param(0.4, 0, id="just-told"),
        pytest.param(1.0, 1, id="told-a-while-ago"),
        pytest.param(9.0, 1, id="told-long-ago"),
    ],
)
async def test_a_step_that_passes_asks_agents_anew_where_what_they_said_is_old(
    earlier: float, times: int
) -> None:
    """Once, and not again where the look itself has just asked them."""
    world = World(leaseTTL="60s")
    await world.until("Progressing", "Canary")
    world.feed.default = Verdict.INSUFFICIENT
    await world.run(25)
    asked: list[str] = []
    said = world.deps.agents.get_state

    async def get_state(node: AgentTarget, cache_uid: str = "", **how: Any) -> Any:
        asked.append(node.name)
        return await said(node, cache_uid, **how)

    world.deps.agents.get_state = get_state  # type: ignore[method-assign]
    agents = RecentAgents(world.deps.agents, world.clock)
    object.__setattr__(world.deps, "agents", agents)
    world.operator = KVRolloutReconciler(world.deps, feed=world.feed)
    due = await world.pass_()
    assert isinstance(due, Requeue) and due.after_seconds > 0.5
    world.clock.seconds += due.after_seconds - earlier
    for member in world.deps.fleet.members("serving", "default"):
        await agents.recent_state(member.target, "another", 0.0, for_all=True)
    world.clock.seconds += earlier
    world.feed.default = Verdict.PASS
    before = world.where
    told: list[int] = []
    moved = world.api.compare_and_swap

    async def swap(key: ObjectKey, ops: Any, **how: Any) -> JsonObject:
        told.append(len(asked))
        return await moved(key, ops, **how)

    world.api.compare_and_swap = swap  # type: ignore[method-assign]
    asked.clear()
    await world.pass_()
    assert world.where != before
    assert told[0] == times * len(world.sims), "asked before the step was written"


async def test_rollout_and_cache_are_asked_for_at_once() -> None:
    world, _ = await resting()
    get, asked, both = world.api.get, set[ObjectKey](), asyncio.Event()

    async def together(key: ObjectKey, *, known: JsonObject | None = None) -> JsonObject:
        asked.add(key)
        if asked == {world.rollout, world.cache_key}:
            both.set()
        async with asyncio.timeout(60):
            await both.wait()
        return await get(key)

    world.api.get = together  # type: ignore[method-assign]
    pair = await Pairs(world.deps).live(world.rollout)
    assert pair is not None and pair.cache is not None
    assert (pair.cache_key, pair.cache["metadata"]["name"]) == (world.cache_key, "chat")


@pytest.mark.parametrize("known", [None, "elsewhere"])
async def test_its_cache_is_the_one_that_the_server_names(known: str | None) -> None:
    """Not the one of an older object of that name, which the read cache still has."""
    world, asked = await resting()
    behind = Behind(world)
    object.__setattr__(world.deps, "store", behind)
    if known is None:
        del behind._then[world.rollout]
    else:
        behind._then[world.rollout]["spec"]["cacheRef"]["name"] = known
        behind._then[world.rollout]["metadata"] |= {"uid": "before", "resourceVersion": "1"}
    pair = await Pairs(world.deps).live(world.rollout)
    assert pair is not None and pair.cache is not None
    assert (pair.cache_key, pair.cache["metadata"]["name"]) == (world.cache_key, "chat")
    assert asked[-1] == world.cache_key


async def test_a_look_on_a_beat_asks_for_all_that_look_then_and_one_in_between_for_itself() -> None:
    world = World(leaseTTL="60s")
    await world.until("Progressing", "Canary")
    world.feed.default = Verdict.INSUFFICIENT
    await world.run(25)
    simulated = world.deps.agents
    object.__setattr__(world.deps, "agents", RecentAgents(simulated, world.clock))
    world.operator = KVRolloutReconciler(world.deps, feed=world.feed)
    due = await world.pass_()
    assert isinstance(due, Requeue)
    world.clock.seconds += due.after_seconds + 0.01
    due = await world.pass_()
    assert isinstance(due, Requeue) and due.after_seconds > 9.0
    uid = world.api.objects[world.cache_key]["metadata"]["uid"]
    looks, nodes = world.feed.looks, len(world.sims)
    for after, wanted in ((1.0, uid), (due.after_seconds - 0.99, "")):
        simulated.wanted.clear()  # type: ignore[attr-defined]
        world.clock.seconds += after
        await world.pass_()
        assert simulated.wanted == [wanted] * nodes  # type: ignore[attr-defined]
    assert world.feed.looks == looks + 1


async def test_a_window_is_looked_at_as_it_opens_without_asking_agents_that_do_not_know_it() -> None:
    world = World(leaseTTL="60s")
    await world.until("Progressing", "Canary")
    assert world.feed.unopened[-1], "before anybody was granted under it"
    assert len(held(world)) == len(world.sims)
    world.feed.default = Verdict.INSUFFICIENT
    world.feed.unopened.clear()
    await world.run(12)
    assert set(world.feed.unopened) == {False}


async def test_an_operator_that_begins_in_a_window_which_agents_hold_asks_them() -> None:
    world = World(leaseTTL="60s")
    await world.until("Progressing", "Shadow")
    await world.pass_()
    world.feed.default = Verdict.INSUFFICIENT
    # As if it had been lost before the first look was written.
    obj = copied(world.api.objects[world.rollout])
    del obj["status"]["schedule"]["dueAt"]
    world.api.put(obj)
    world.feed.unopened.clear()
    world.restart()
    await world.pass_()
    assert world.feed.unopened == [False]


def read(version: str, uid: str = "u") -> JsonObject:
    return {"metadata": {"uid": uid, "resourceVersion": version}}


@pytest.mark.parametrize(
    ("noted", "cached", "since", "vouched"),
    [
        pytest.param([("1", 5.0)], read("1"), 5.0, True, id="the-same"),
        pytest.param([("1", 5.0)], read("1"), 5.1, False, id="too-long-ago"),
        pytest.param([("2", 5.0)], read("1"), 0.0, False, id="behind"),
        pytest.param([("1", 5.0)], read("2"), 0.0, False, id="ahead-is-not-known-either"),
        pytest.param([("1", 5.0)], read("1", "other"), 0.0, False, id="another-object"),
        pytest.param([("1", 5.0)], None, 0.0, False, id="not-there"),
        pytest.param([("2", 6.0), ("1", 5.0)], read("2"), 0.0, True, id="late-answer-is-older"),
        pytest.param([], read("1"), 0.0, False, id="never-asked"),
    ],
)
def test_what_is_vouched_for(
    noted: list[tuple[str, float]], cached: JsonObject | None, since: float, vouched: bool
) -> None:
    reads = LastReads()
    for version, at in noted:
        reads.note(KEY, read(version), at)
    assert reads.vouch(KEY, cached, since) is vouched


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier_operator.lastreads.MAX_KEPT", 2)
    reads = LastReads()
    keys = [ObjectKey(Kind.KV_CACHE, "serving", name) for name in "abc"]
    for key in keys:
        reads.note(key, read("1"), 1.0)
    assert [reads.vouch(key, read("1"), 0.0) for key in keys] == [False, True, True]
    reads.forget(keys[2])
    assert not reads.vouch(keys[2], read("1"), 0.0)


def test_of_what_was_written_the_last_versions_are_ours_and_the_number_of_them_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvtier_operator.lastreads.MAX_KEPT", 2)
    monkeypatch.setattr("kvtier_operator.lastreads.MAX_VERSIONS", 2)
    reads = LastReads()
    keys = [ObjectKey(Kind.KV_ROLLOUT, "serving", name) for name in "abc"]

    def writer(key: ObjectKey, version: str, uid: str = "u") -> ObjectKey | None:
        return reads.writer(Seen.of(key, read(version, uid)))

    for key in keys:
        reads.wrote(key, read("1"), key)
    assert [writer(key, "1") for key in keys] == [None, *keys[1:]]
    reads.wrote(keys[2], read("2"), keys[0])
    assert [writer(keys[2], version) for version in "12"] == [keys[2], keys[0]]
    reads.wrote(keys[2], read("3"), keys[0])
    assert [writer(keys[2], version) for version in "123"] == [None, keys[0], keys[0]]
    assert writer(keys[2], "2", "other") is None
    reads.note(keys[1], read("3"), 9.0)
    assert writer(keys[1], "3") is None, "what was read is somebody else's"
