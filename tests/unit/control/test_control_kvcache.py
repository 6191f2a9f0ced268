"""KVCache's reconcile against an API and agents in memory: adoption, crashes, drift, removal."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvtier.v1 import control_pb2 as control
from kvtier_operator.agents.recent import RecentAgents
from kvtier_operator.lastreads import LastReads, Seen
from kvtier_operator.ports import (
    CACHE_FINALIZER,
    AgentError,
    AgentTarget,
    Conflict,
    JsonObject,
    Kind,
    ObjectKey,
    PatchOp,
    Requeue,
    add_op,
)
from kvtier_operator.reconcile.kvcache import (
    AFTER_BEAT_SECONDS,
    QUIET_SECONDS,
    REMOVAL_GRACE,
    KVCacheReconciler,
)
from kvtier_operator.reconcile.kvcache_nodes import PROOF_SECONDS
from kvtier_operator.reconcile.kvcache_orphans import ORPHAN_SECONDS
from kvtier_operator.reconcile.kvcache_refs import resolve
from kvtier_operator.revisions import Role, revision_manifest
from kvtier_operator.rollout.beats import PoolBeats, next_beat
from kvtier_operator.rollout.moves import MAX_TICK
from tests.unit.control.control_fakes import Bench, Crash
from tests.unit.control.control_objects import (
    agent_pool,
    conditions,
    kv_cache,
    kv_rollout,
    kv_selector,
)
from tests.unit.control.kvcache_bench import KEY, UID, bench_with, settle


async def test_the_first_exact_spec_becomes_the_proved_baseline_at_once() -> None:
    bench = bench_with()
    await KVCacheReconciler(bench.deps).reconcile(KEY)
    cache = bench.api.objects[KEY]
    assert cache["status"]["fence"] == 1
    assert conditions(cache) == {
        "Ready": ("True", "BaselineServed"),
        "Feasible": ("True", "FitsEveryNode"),
        "Servable": ("True", "BaselineServed"),
        "SpecApplied": ("True", "Applied"),
        "BaselineVerified": ("True", "Proved"),
        "Degraded": ("False", "AllWell"),
    }
    digest = cache["status"]["baseline"]["digest"]
    assert {node: held[UID] for node, held in bench.agents.caches.items()} == {
        "a": [1, digest],
        "b": [1, digest],
    }
    assert cache["metadata"]["finalizers"] == [CACHE_FINALIZER]


async def test_a_quiet_cache_costs_one_question_a_node_and_no_write() -> None:
    bench = bench_with()
    reconciler = KVCacheReconciler(bench.deps)
    await settle(bench, reconciler)
    bench.api.writes.clear()
    bench.agents.calls.clear()
    outcome = await reconciler.reconcile(KEY)
    assert bench.api.writes == []
    assert bench.agents.calls == ["GetState", "GetState"]
    assert isinstance(outcome, Requeue)


@pytest.mark.parametrize("said", ["sha256:" + "6" * 64, ""], ids=["another", "cannot-say"])
async def test_what_an_agent_recomputes_ends_an_earlier_proof_at_the_next_look(said: str) -> None:
    """Though it was proved a moment ago, and is said to be applied."""
    bench = bench_with()
    reconciler = KVCacheReconciler(bench.deps)
    cache = await settle(bench, reconciler)
    bench.agents.runs = {"a": cache["status"]["baseline"]["digest"]}
    bench.agents.calls.clear()
    await reconciler.reconcile(KEY)
    assert bench.agents.calls == ["GetState", "GetState"]
    bench.agents.runs = {"a": said}
    bench.agents.calls.clear()
    await reconciler.reconcile(KEY)
    assert sorted(bench.agents.calls) == ["GetState", "GetState", "Prove"]
    found = conditions(bench.api.objects[KEY])["Ready"]
    assert found == (("False", "BaselineNotProved") if said else ("True", "BaselineServed"))


@pytest.mark.parametrize("crash_at", range(1, 5))
async def test_a_crash_after_any_write_is_completed_by_the_next_operator(crash_at: int) -> None:
    """Finalizer, revision, baseline and fence, status: the operator dies right after each was accepted."""
    calm = await settle(bench_with())
    bench = bench_with()
    bench.api.crash_at = crash_at
    with pytest.raises(Crash):
        await settle(bench)
    bench.api.crash_at = 0
    cache = await settle(bench)
    assert cache["status"]["baseline"] == calm["status"]["baseline"]
    assert conditions(cache) == conditions(calm)
    # A crash may burn numbers; it never goes back.
    assert cache["status"]["fence"] >= 1
    revisions = [key for key in bench.api.objects if key.kind is Kind.CONTROLLER_REVISION]
    assert len(revisions) == 1


async def adopted_by_a_rollout(bench: Bench) -> str:
    """Settled, then edited, and its edited spec swapped in as a rollout does it; returns the new digest."""
    await settle(bench)
    cache = bench.api.objects[KEY]
    cache["spec"]["placement"] = {"policy": "headGroups", "headGroups": {"stagingBytes": "8Mi"}}
    cache["metadata"]["generation"] = 2
    bench.api.catch_up()
    assert conditions(await settle(bench))["SpecApplied"] == ("False", "RolloutRequired")
    wanted = resolve(cache, bench.store).exact
    assert wanted is not None
    digest = wanted.digest()
    kept = revision_manifest(cache, wanted.canonical(), digest, Role.CANDIDATE, 2)
    await bench.api.apply(kept)
    swap = {"digest": digest, "revision": kept["metadata"]["name"]}
    fence = cache["status"]["fence"]
    ops = [add_op("/status/baseline", swap), add_op("/status/fence", fence + 5)]
    await bench.api.compare_and_swap(KEY, ops)
    return digest


async def test_a_baseline_that_a_rollout_brought_is_applied_and_the_spec_with_it() -> None:
    bench = bench_with()
    digest = await adopted_by_a_rollout(bench)
    cache = await settle(bench)
    assert {node: held[UID] for node, held in bench.agents.caches.items()} == {
        node: [cache["status"]["fence"], digest] for node in ("a", "b")
    }
    assert conditions(cache)["SpecApplied"] == ("True", "Applied")
    assert conditions(cache)["BaselineVerified"] == ("True", "Proved")


async def test_a_status_lost_after_an_adoption_is_rebuilt_with_the_adopted_baseline() -> None:
    bench = bench_with()
    digest = await adopted_by_a_rollout(bench)
    cache = await settle(bench)
    del cache["status"]
    bench.api.catch_up()
    assert (await settle(bench))["status"]["baseline"]["digest"] == digest


async def test_a_baseline_that_comes_back_is_the_newest_label_again() -> None:
    """Forth and back by two rollouts: the labels follow `status.baseline`, not the order of creation."""
    bench = bench_with()
    first = (await settle(bench))["status"]["baseline"]
    await adopted_by_a_rollout(bench)
    cache = await settle(bench)
    await bench.api.compare_and_swap(KEY, [add_op("/status/baseline", first)])
    await settle(bench)
    del cache["status"]
    bench.api.catch_up()
    assert (await settle(bench))["status"]["baseline"]["digest"] == first["digest"]


async def test_a_damaged_revision_of_another_manifest_is_no_fault_of_the_baseline() -> None:
    bench = bench_with()
    await settle(bench)
    damaged = revision_manifest(bench.api.objects[KEY], b"{}", f"sha256:{'0' * 64}", Role.CANDIDATE, 9)
    await bench.api.apply(damaged)
    assert conditions(await settle(bench))["Ready"] == ("True", "BaselineServed")


async def test_of_all_baselines_that_a_cache_has_had_the_last_is_remembered() -> None:
    """Each exact candidate that completes is another one, of a few KB."""
    bench = bench_with()
    reconciler = KVCacheReconciler(bench.deps)
    cache = await settle(bench, reconciler)
    for number in range(2, 2_000):
        data = b'{"number":%d}' % number
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        kept = await bench.api.apply(revision_manifest(cache, data, digest, Role.BASELINE, number))
        found = await reconciler._read(KEY, UID, kept["metadata"]["name"], digest)
        again = await reconciler._read(KEY, UID, "not asked for", digest)
        assert found.data == again.data == data
        assert len(reconciler._revisions) == 1


async def test_a_label_that_another_leader_gave_meanwhile_is_no_newer_than_the_baselines() -> None:
    """It adopted another baseline and the first again, and ended before it labelled that."""
    bench = bench_with()
    reconciler = KVCacheReconciler(bench.deps)
    cache = await settle(bench, reconciler)
    data = b'{"number":2}'
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    await bench.api.apply(revision_manifest(cache, data, digest, Role.BASELINE, 9))
    await settle(bench, reconciler)
    bench.leader.since = 7.0
    await settle(bench, reconciler)
    named = cache["status"]["baseline"]["revision"]
    revisions = {
        key.name: obj["revision"]
        for key, obj in bench.api.objects.items()
        if key.kind is Kind.CONTROLLER_REVISION
    }
    assert max(revisions, key=lambda name: revisions[name]) == named


async def test_of_a_cache_that_is_deleted_nothing_is_remembered() -> None:
    bench = bench_with()
    reconciler = KVCacheReconciler(bench.deps)
    await settle(bench, reconciler)
    kept = [value for value in vars(reconciler).values() if isinstance(value, dict)]
    assert any(UID in of for of in kept)
    bench.api.mark_deleted(KEY, bench.clock.now())
    await reconciler.reconcile(KEY)
    assert KEY not in bench.api.objects
    assert [of for of in kept if UID in of] == []


async def test_a_stale_view_cannot_adopt_twice() -> None:
    bench = bench_with()
    bench.api.lag = True
    await KVCacheReconciler(bench.deps).reconcile(KEY)
    with pytest.raises(Conflict):
        await KVCacheReconciler(bench.deps).reconcile(KEY)
    assert bench.api.objects[KEY]["status"]["fence"] == 1


async def test_a_selector_in_the_first_spec_gives_the_exact_baseline_and_waits_for_a_rollout() -> None:
    cache = kv_cache(selectorRef={"name": "quest-64"}, contract={"exactness": "approximate"})
    bench = bench_with(cache)
    bench.api.add(kv_selector())
    found = await settle(bench)
    plain = await settle(bench_with(kv_cache(contract={"exactness": "approximate"})))
    assert found["status"]["baseline"]["digest"] == plain["status"]["baseline"]["digest"]
    assert conditions(found)["SpecApplied"] == ("False", "RolloutRequired")
    assert conditions(found)["Ready"] == ("True", "BaselineServed")
    assert conditions(plain)["SpecApplied"] == ("True", "Applied")


@pytest.mark.parametrize(
    "drop, named",
    [
        pytest.param(ObjectKey(Kind.TIER_CLASS, "", "cpu-dram"), "TierClass cpu-dram", id="tier-class"),
        pytest.param(ObjectKey(Kind.AGENT_POOL, "serving", "default"), "AgentPool default", id="pool"),
    ],
)
async def test_a_missing_reference_is_named_and_nothing_is_adopted(drop: ObjectKey, named: str) -> None:
    bench = bench_with()
    del bench.api.objects[drop]
    bench.store.remove(drop)
    cache = await settle(bench)
    assert "baseline" not in cache["status"]
    assert conditions(cache)["Ready"] == ("False", "ReferenceMissing")
    ready = next(c for c in cache["status"]["conditions"] if c["type"] == "Ready")
    assert named in ready["message"]
    assert "ApplyBaseline" not in bench.agents.calls


@pytest.mark.parametrize(
    "spec, words",
    [
        pytest.param(
            {"deletion": {"policy": "retain"}},
            "spec.deletion.policy retain cannot be carried out: a cache's blocks are named by its uid",
            id="retain",
        ),
        pytest.param({"sessions": {"interruption": "preserve"}}, "interruption preserve", id="preserve"),
        pytest.param({"sessions": {"ttl": "0"}}, "spec.sessions.ttl 0 leaves", id="ttl-zero"),
        pytest.param({"sessions": {"ttl": "0m0s"}}, "spec.sessions.ttl 0m0s leaves", id="ttl-zero-long"),
    ],
)
async def test_what_is_not_carried_out_is_said_before_anything_is_served(
    spec: JsonObject, words: str
) -> None:
    cache = await settle(bench_with(kv_cache(**spec)))
    assert conditions(cache)["Feasible"] == ("False", "NotImplemented")
    feasible = next(c for c in cache["status"]["conditions"] if c["type"] == "Feasible")
    assert words in feasible["message"]
    assert "baseline" not in cache["status"]


async def test_a_node_that_does_not_answer_is_named_and_the_others_serve() -> None:
    bench = bench_with()
    bench.agents.down.add("b")
    cache = await settle(bench)
    assert cache["status"]["servingNodes"] == 1
    assert conditions(cache)["Servable"] == ("True", "BaselineServed")
    assert conditions(cache)["Ready"] == ("False", "BaselineNotProved")
    assert conditions(cache)["Degraded"] == ("True", "AgentProblem")
    bench.agents.down.clear()
    assert conditions(await settle(bench))["Ready"] == ("True", "BaselineServed")


@pytest.mark.parametrize(
    ("late", "ready"), [(0, "True"), (1, "True"), (2, "False")], ids=["in-time", "late-once", "late-twice"]
)
async def test_a_node_that_has_proved_itself_is_asked_twice_before_it_is_called_unreachable(
    late: int, ready: str
) -> None:
    bench = bench_with()
    reconciler = KVCacheReconciler(bench.deps)
    await settle(bench, reconciler)
    bench.agents.late["b"] = late
    await reconciler.reconcile(KEY)
    bench.api.catch_up()
    assert conditions(bench.api.objects[KEY])["Ready"][0] == ready
    assert bench.agents.late["b"] == 0
    # One that goes on being silent holds nobody up for longer than one deadline.
    bench.agents.late["b"] = 1
    await reconciler.reconcile(KEY)
    bench.api.catch_up()
    assert conditions(bench.api.objects[KEY])["Ready"][0] == ("False" if late == 2 else "True")
    bench.agents.late["b"] = 0
    assert conditions(await settle(bench, reconciler))["Ready"] == ("True", "BaselineServed")


async def test_a_node_that_never_proved_itself_is_asked_once() -> None:
    bench = bench_with()
    bench.agents.late["b"] = 1
    await KVCacheReconciler(bench.deps).reconcile(KEY)
    assert bench.agents.late["b"] == 0
    bench.api.catch_up()
    assert conditions(bench.api.objects[KEY])["Ready"] == ("False", "BaselineNotProved")


async def test_a_node_that_lost_its_disk_during_a_rollout_gets_the_baseline_under_a_burned_fence() -> None:
    """The current number belongs to the rollout's grant on that node."""
    bench = bench_with()
    await settle(bench)
    bench.api.objects[KEY]["status"]["fence"] = 5
    bench.api.catch_up()
    bench.api.add(kv_rollout(fence=5))
    bench.agents.caches["a"].clear()
    cache = await settle(bench)
    assert bench.agents.caches["a"][UID][0] == 4
    assert cache["status"]["fence"] == 5
    assert conditions(cache)["Ready"] == ("True", "BaselineServed")


@pytest.mark.parametrize("in_rollout", [False, True], ids=["quiet", "in-rollout"])
async def test_only_without_a_rollout_a_refused_fence_is_advanced(in_rollout: bool) -> None:
    bench = bench_with()
    await settle(bench)
    bench.agents.caches["a"][UID] = [9, f"sha256:{'0' * 64}"]
    if in_rollout:
        bench.api.add(kv_rollout(fence=1))
    cache = await settle(bench)
    if in_rollout:
        assert cache["status"]["fence"] == 1
        assert conditions(cache)["Degraded"] == ("True", "AgentProblem")
    else:
        assert cache["status"]["fence"] == 10
        assert bench.agents.caches["a"][UID] == [10, cache["status"]["baseline"]["digest"]]


async def test_deletion_raises_the_fence_then_empties_every_agent_then_lets_go() -> None:
    bench = bench_with()
    reconciler = KVCacheReconciler(bench.deps)
    await settle(bench, reconciler)
    bench.api.mark_deleted(KEY, bench.clock.now())
    bench.agents.down.add("b")
    outcome = await reconciler.reconcile(KEY)
    assert isinstance(outcome, Requeue)
    assert KEY in bench.api.objects
    assert bench.api.objects[KEY]["status"]["fence"] == 2
    assert UID not in bench.agents.caches["a"]
    await reconciler.reconcile(KEY)
    assert bench.api.objects[KEY]["status"]["fence"] == 2  # once, not with every try
    bench.agents.down.clear()
    await reconciler.reconcile(KEY)
    assert KEY not in bench.api.objects
    assert UID not in bench.agents.caches["b"]


async def test_deletion_empties_a_node_that_has_lost_its_lease_but_answers() -> None:
    """As all do whose namespace is deleted: Leases go at once, caches wait for their finalizer."""
    bench = bench_with()
    reconciler = KVCacheReconciler(bench.deps)
    await settle(bench, reconciler)
    bench.clock.advance(3600)
    bench.api.mark_deleted(KEY, bench.clock.now())
    bench.renew("a")
    assert [view.live for view in bench.deps.fleet.members("serving", "default")] == [True, False]
    await reconciler.reconcile(KEY)
    assert KEY not in bench.api.objects
    assert UID not in bench.agents.caches["a"]
    assert UID not in bench.agents.caches["b"]


async def test_deletion_does_not_wait_for_ever_for_a_node_that_is_gone() -> None:
    bench = bench_with()
    reconciler = KVCacheReconciler(bench.deps)
    await settle(bench, reconciler)
    bench.api.mark_deleted(KEY, bench.clock.now())
    bench.agents.down.add("b")
    await reconciler.reconcile(KEY)
    bench.clock.advance(REMOVAL_GRACE + 1)
    for node in ("a", "b"):
        bench.renew(node)
    await reconciler.reconcile(KEY)
    assert KEY not in bench.api.objects
    reason, message = bench.api.events[-1]
    assert reason == "RemovedWithoutNodes"
    assert "b (UNAVAILABLE)" in message


async def test_a_clock_that_is_set_forth_ends_no_wait_for_a_node_that_is_gone() -> None:
    """It may serve a candidate until its lease has ended, whatever the operator's node takes the time for."""
    bench = bench_with()
    reconciler = KVCacheReconciler(bench.deps)
    await settle(bench, reconciler)
    bench.api.mark_deleted(KEY, bench.clock.now())
    bench.agents.down.add("b")
    bench.clock.ahead = 3600.0
    await reconciler.reconcile(KEY)
    bench.clock.advance(REMOVAL_GRACE - 1)
    await reconciler.reconcile(KEY)
    assert KEY in bench.api.objects
    bench.clock.advance(2)
    await reconciler.reconcile(KEY)
    assert KEY not in bench.api.objects


async def test_a_next_operator_waits_for_a_node_that_is_gone_from_its_own_start() -> None:
    """What another has renewed a moment before it ended nobody knows."""
    bench = bench_with()
    await settle(bench, KVCacheReconciler(bench.deps))
    bench.api.mark_deleted(KEY, bench.clock.now())
    bench.agents.down.add("b")
    bench.clock.advance(REMOVAL_GRACE + 1)
    second = KVCacheReconciler(bench.deps)
    await second.reconcile(KEY)
    assert KEY in bench.api.objects
    bench.clock.advance(REMOVAL_GRACE + 1)
    await second.reconcile(KEY)
    assert KEY not in bench.api.objects


async def test_an_edit_of_admission_reaches_every_agent_under_a_fence_of_its_own() -> None:
    bench = bench_with(kv_cache(admission={"link": "64Mi", "queue": 32, "policy": "earliestDeadline"}))
    reconciler = KVCacheReconciler(bench.deps)
    cache = await settle(bench, reconciler)
    sessions = control.CacheSessions(idle="demote", ttl_ms=3_600_000)
    wanted = control.CacheAdmission(
        link_bytes=64 << 20, queue=32, policy="earliestDeadline", sessions=sessions
    )
    assert bench.agents.admissions == {"a": wanted, "b": wanted}
    fence = cache["status"]["fence"]
    cache["spec"]["admission"] = {"staging": "1Gi"}
    cache["spec"]["sessions"] = {"idle": "drop", "ttl": "90s"}
    bench.api.catch_up()
    cache = await settle(bench, reconciler)
    sessions = control.CacheSessions(idle="drop", ttl_ms=90_000)
    wanted = control.CacheAdmission(staging_bytes=1 << 30, queue=256, policy="fifo", sessions=sessions)
    assert bench.agents.admissions == {"a": wanted, "b": wanted}
    assert cache["status"]["fence"] > fence
    assert conditions(cache)["Ready"] == ("True", "BaselineServed")
    assert {held[UID][1] for held in bench.agents.caches.values()} == {cache["status"]["baseline"]["digest"]}


async def test_a_number_that_an_edit_of_admission_lacks_is_no_problem_of_any_agent() -> None:
    bench = bench_with()
    reconciler = KVCacheReconciler(bench.deps)
    cache = await settle(bench, reconciler)
    bench.api.events.clear()
    bench.api.writes.clear()
    cache["spec"]["admission"] = {"queue": 9}
    cache["metadata"]["generation"] = 2
    bench.api.catch_up()
    cache = await settle(bench, reconciler)
    assert [reason for reason, _ in bench.api.events] == []
    assert len(bench.api.writes) == 2, "the number, and that the edit was seen"
    assert cache["status"]["observedGeneration"] == 2
    assert {one.queue for one in bench.agents.admissions.values()} == {9}


async def test_an_edit_of_admission_is_told_in_one_run_and_each_agent_once() -> None:
    """No agent is told what it can only refuse, and none is asked again what it has just said; the run is not
    woken by the number that it took."""
    bench = bench_with()
    reads = LastReads()
    deps = replace(bench.deps, agents=RecentAgents(bench.agents, bench.clock), reads=reads)
    reconciler = KVCacheReconciler(deps)
    cache = await settle(bench, reconciler)
    cache["spec"]["admission"] = {"queue": 9}
    cache["metadata"]["generation"] = 2
    bench.api.catch_up()
    bench.clock.advance(1)
    bench.agents.calls.clear()
    numbers = []

    async def swapped(key: ObjectKey, ops: Sequence[PatchOp], **more: str) -> JsonObject:
        numbers.append(await swap(key, ops, **more))
        return numbers[-1]

    swap = bench.api.compare_and_swap
    bench.api.compare_and_swap = swapped  # type: ignore[assignment, method-assign]
    await reconciler.reconcile(KEY)
    assert {one.queue for one in bench.agents.admissions.values()} == {9}
    assert bench.api.objects[KEY]["status"]["observedGeneration"] == 2
    told = Counter(bench.agents.calls)
    assert told == {"GetState": 2, "ApplyBaseline": 2, "Prove": 2}, "once, since no engine was built"
    assert [reads.writer(Seen.of(KEY, obj)) for obj in numbers] == [KEY]


async def test_a_number_that_is_refused_again_is_told() -> None:
    bench = bench_with()
    reconciler = KVCacheReconciler(bench.deps)
    cache = await settle(bench, reconciler)

    async def refused(node: AgentTarget, request: object, **_: object) -> control.ApplyBaselineResponse:
        raise AgentError(node.name, "FENCE_CONFLICT", "used", 0.0, {"highest_fence": "1"})

    bench.agents.apply_baseline = refused  # type: ignore[assignment, method-assign]
    cache["spec"]["admission"] = {"queue": 9}
    bench.api.catch_up()
    cache = await settle(bench, reconciler)
    assert conditions(cache)["Ready"] == ("False", "BaselineNotProved")


async def test_a_rollouts_fence_is_not_spent_on_an_edit_of_admission() -> None:
    bench = bench_with()
    reconciler = KVCacheReconciler(bench.deps)
    cache = await settle(bench, reconciler)
    fence = cache["status"]["fence"]
    bench.api.add(kv_rollout(fence=fence))
    cache["spec"]["admission"] = {"queue": 9}
    bench.api.catch_up()
    cache = await settle(bench, reconciler)
    assert cache["status"]["fence"] == fence
    assert {said.queue for said in bench.agents.admissions.values()} == {256}
    assert conditions(cache)["Degraded"] == ("False", "AllWell")


def approved_by(uid: str) -> JsonObject:
    return {"digest": "sha256:" + "c" * 64, "rollout": "go", "evidence": f"{uid}/1/sha256:{'e' * 64}"}


async def test_an_approval_whose_rollout_is_gone_ends_when_no_lease_of_it_can_run() -> None:
    """A finalizer that was removed by hand leaves one behind, and with it a number that nobody may use."""
    bench = bench_with()
    reconciler = KVCacheReconciler(bench.deps)
    cache = await settle(bench, reconciler)
    cache["status"]["approved"] = approved_by("uid-that-was")
    cache["spec"]["admission"] = {"queue": 9}
    bench.api.add(kv_rollout(phase="Invalid"))
    bench.api.catch_up()
    fence = cache["status"]["fence"]
    await settle(bench, reconciler)
    bench.clock.ahead = 7 * 24 * 3600.0
    bench.clock.advance(ORPHAN_SECONDS - 1)
    cache = await settle(bench, reconciler)
    assert cache["status"]["approved"] and cache["status"]["fence"] == fence
    bench.clock.ahead = 0.0
    bench.clock.advance(2)
    for node in ("a", "b"):
        bench.renew(node)
    cache = await settle(bench, reconciler)
    assert "approved" not in cache["status"] and cache["status"]["fence"] > fence
    assert {said.queue for said in bench.agents.admissions.values()} == {9}
    assert "ApprovalEnded" in [reason for reason, _ in bench.api.events]


async def test_an_approval_is_missed_anew_by_a_leader_that_was_none_meanwhile() -> None:
    """An early one says only a name: of what bore it while another led, the leases may last."""
    bench = bench_with()
    reconciler = KVCacheReconciler(bench.deps)
    cache = await settle(bench, reconciler)
    cache["status"]["approved"] = approved_by("uid-that-was") | {"evidence": ""}
    bench.api.catch_up()
    await settle(bench, reconciler)
    bench.clock.advance(ORPHAN_SECONDS + 1)
    bench.leader.since = bench.clock.monotonic()
    cache = await settle(bench, reconciler)
    assert cache["status"]["approved"]
    bench.clock.advance(ORPHAN_SECONDS + 1)
    cache = await settle(bench, reconciler)
    assert "approved" not in cache["status"]


async def test_an_approval_whose_rollout_is_there_stands_however_old() -> None:
    bench = bench_with()
    reconciler = KVCacheReconciler(bench.deps)
    cache = await settle(bench, reconciler)
    bench.api.add(kv_rollout(phase="Completed"))
    owner = next(obj for key, obj in bench.api.objects.items() if key.kind is Kind.KV_ROLLOUT)
    cache["status"]["approved"] = approved_by(owner["metadata"]["uid"])
    bench.api.catch_up()
    for _ in range(3):
        await settle(bench, reconciler)
        bench.clock.advance(ORPHAN_SECONDS)
    assert bench.api.objects[KEY]["status"]["approved"]


async def test_a_crypto_erasure_ends_with_every_nodes_receipt_also_after_an_answer_that_was_lost() -> None:
    spec = {"deletion": {"policy": "delete", "cryptoErase": True}, "keySecretRef": {"name": "chat-keys"}}
    pool = agent_pool()
    pool["spec"]["keySecretRefs"] = [{"name": "chat-keys"}]
    bench = bench_with(kv_cache(**spec))
    bench.api.add(pool)
    reconciler = KVCacheReconciler(bench.deps)
    cache = await settle(bench, reconciler)
    assert conditions(cache)["Feasible"] == ("True", "FitsEveryNode")
    bench.agents.erasures = [control.KeyErasure(tier_class="nvme", file="x.keys", keys=["data:1", "data:2"])]
    bench.api.mark_deleted(KEY, bench.clock.now())
    # It removed the cache, and its answer did not arrive.
    bench.agents.caches["a"].pop(UID)
    await reconciler.reconcile(KEY)
    assert KEY not in bench.api.objects
    assert ("KeysErased", "data keys overwritten, durably: a (2), b (2)") in bench.api.events


async def test_deletion_waits_as_long_as_a_lease_of_the_cache_may_last() -> None:
    bench = bench_with()
    reconciler = KVCacheReconciler(bench.deps)
    await settle(bench, reconciler)
    rollout = kv_rollout(phase="RollingBack")
    rollout["spec"]["leaseTTL"] = "5m"
    bench.api.add(rollout)
    bench.api.mark_deleted(KEY, bench.clock.now())
    bench.agents.down.add("b")
    for waited, there in ((0, True), (REMOVAL_GRACE + 1, True), (300, False)):
        bench.clock.advance(waited)
        for node in ("a", "b"):
            bench.renew(node)
        await reconciler.reconcile(KEY)
        assert (KEY in bench.api.objects) is there


@pytest.mark.parametrize("left", ["approval", "unreadable-ttl"])
async def test_deletion_waits_for_the_longest_lease_where_nobody_says_how_long_one_may_last(
    left: str,
) -> None:
    bench = bench_with()
    reconciler = KVCacheReconciler(bench.deps)
    cache = await settle(bench, reconciler)
    if left == "approval":
        cache["status"]["approved"] = approved_by("uid-that-was")
    else:
        rollout = kv_rollout(phase="RollingBack")
        rollout["spec"]["leaseTTL"] = "soon"
        bench.api.add(rollout)
    bench.api.catch_up()
    bench.api.mark_deleted(KEY, bench.clock.now())
    bench.agents.down.add("b")
    for waited, there in ((0, True), (REMOVAL_GRACE + 1, True), (ORPHAN_SECONDS, False)):
        bench.clock.advance(waited)
        for node in ("a", "b"):
            bench.renew(node)
        await reconciler.reconcile(KEY)
        assert (KEY in bench.api.objects) is there


async def test_degraded_is_told_once_when_it_begins_and_once_when_it_ends() -> None:
    bench = bench_with()
    reconciler = KVCacheReconciler(bench.deps)
    await settle(bench, reconciler)
    bench.api.events.clear()
    bench.clock.advance(61)
    bench.renew("a")
    await settle(bench, reconciler)
    told = [(reason, message) for reason, message in bench.api.events if "Degraded" in message]
    assert told == [("AgentLost", "Degraded=True: the Lease has ended of b")]
    await settle(bench, KVCacheReconciler(bench.deps))
    bench.renew("b")
    await settle(bench, reconciler)
    told = [(reason, message) for reason, message in bench.api.events if "Degraded" in message]
    assert [reason for reason, _ in told] == ["AgentLost", "DegradedEnded"]


async def test_the_ledger_is_written_once_a_minute_and_only_when_it_moved() -> None:
    bench = bench_with()
    reconciler = KVCacheReconciler(bench.deps)
    await settle(bench, reconciler)

    async def used_after(used: int, seconds: float) -> int:
        bench.agents.used = {"gpu-sim": used}
        bench.clock.advance(seconds)
        for node in ("a", "b"):
            bench.renew(node)
        await reconciler.reconcile(KEY)
        return int(bench.api.objects[KEY]["status"]["ledger"][0]["used"])

    budget = 32 * 2**20
    assert await used_after(budget // 2, 61) == budget  # both nodes
    assert await used_after(budget, 30) == budget  # too soon
    assert await used_after(budget, 31) == 2 * budget
    assert await used_after(budget - budget // 40, 61) == 2 * budget  # 2.5 % is no news


async def test_agents_are_told_which_mounted_secret_holds_the_caches_keys() -> None:
    bench = bench_with(kv_cache(keySecretRef={"name": "chat-keys"}))
    refused = await settle(bench)
    assert conditions(refused)["Feasible"] == ("False", "KeyNotMounted")
    assert bench.agents.key_secrets == []
    bench.api.add(agent_pool(keySecretRefs=[{"name": "chat-keys"}]))
    found = await settle(bench)
    assert conditions(found)["Feasible"][0] == "True"
    assert set(bench.agents.key_secrets) == {"chat-keys"}


async def test_an_agent_that_has_restarted_since_it_was_asked_for_another_is_asked_again() -> None:
    bench = bench_with()
    agents = RecentAgents(bench.agents, bench.clock)
    prove = bench.agents.prove

    async def of_this_life(node: AgentTarget, request: control.ProveRequest, **options: object) -> object:
        boot = bench.agents.boots.get(node.name, node.boot_id)
        if request.boot_id != boot:
            raise AgentError(node.name, "BOOT_ID_MISMATCH", "restarted", 0.0, {"boot_id": boot})
        return await prove(node, request)

    bench.agents.prove = of_this_life  # type: ignore[assignment, method-assign]
    reconciler = KVCacheReconciler(replace(bench.deps, agents=agents))
    await settle(bench, reconciler)
    bench.clock.advance(PROOF_SECONDS + 1)
    for name in ("a", "b"):
        bench.renew(name)
    for view in bench.deps.fleet.members("serving", "default"):
        await agents.recent_state(view.target, "another", 0.0, for_all=True)
    bench.agents.boots["a"] = "boot-2"
    bench.agents.calls.clear()
    await reconciler.reconcile(KEY)
    assert sorted(bench.agents.calls) == ["GetState", "Prove", "Prove"]
    assert conditions(bench.api.objects[KEY])["BaselineVerified"] == ("True", "Proved")


@pytest.mark.parametrize(
    "after, asked", [pytest.param(50.0, 0, id="by-itself"), pytest.param(5.0, 2, id="for-a-reason")]
)
async def test_only_a_look_that_comes_by_itself_takes_what_an_agent_told_another(
    after: float, asked: int
) -> None:
    bench = bench_with()
    agents = RecentAgents(bench.agents, bench.clock)
    reconciler = KVCacheReconciler(replace(bench.deps, agents=agents))
    await settle(bench, reconciler)
    bench.clock.advance(after)
    for view in bench.deps.fleet.members("serving", "default"):
        await agents.recent_state(view.target, "another", 0.0, for_all=True)
    bench.agents.calls.clear()
    await reconciler.reconcile(KEY)
    assert bench.agents.calls == ["GetState"] * asked


@pytest.mark.parametrize("chance", [0.0, 0.3, 0.99])
async def test_a_quiet_cache_looks_again_a_moment_after_a_beat_of_its_pool(chance: float) -> None:
    """Whatever the chance, those of one pool share the moments, and with them what agents answer."""
    bench = bench_with()
    reconciler = KVCacheReconciler(replace(bench.deps, randomness=lambda: chance))
    await settle(bench, reconciler)
    outcome = await reconciler.reconcile(KEY)
    assert isinstance(outcome, Requeue)
    least = QUIET_SECONDS * (0.8 + 0.2 * chance)
    assert least < outcome.after_seconds <= least + MAX_TICK + AFTER_BEAT_SECONDS
    due = bench.clock.now().timestamp() + outcome.after_seconds - AFTER_BEAT_SECONDS
    share = PoolBeats(bench.deps.store).share("serving", "default")
    assert next_beat(share, MAX_TICK, due - 0.1) == pytest.approx(due, abs=0.002)


async def test_agents_are_asked_of_this_cache_and_by_itself_of_all_of_their_pool() -> None:
    bench = bench_with()
    reconciler = KVCacheReconciler(replace(bench.deps, agents=RecentAgents(bench.agents, bench.clock)))
    await settle(bench, reconciler)
    uid = bench.api.objects[KEY]["metadata"]["uid"]
    assert set(bench.agents.wanted) == {uid}
    bench.clock.advance(50.0)
    bench.agents.wanted.clear()
    await reconciler.reconcile(KEY)
    assert bench.agents.wanted == ["", ""]
