"""Agents that hold a cache whose object is gone, since they could not be reached as it was deleted."""

from __future__ import annotations

from kvtier_operator.ports import Kind, ObjectKey, Requeue
from kvtier_operator.reconcile.kvcache import REMOVAL_GRACE, KVCacheReconciler
from kvtier_operator.reconcile.kvnode import ORPHANS_SECONDS, KVNodeReconciler
from tests.unit.control.control_fakes import Bench
from tests.unit.control.kvcache_bench import KEY, UID, bench_with, settle

NODE = ObjectKey(Kind.KV_NODE, "", "b")


async def deleted_while_away(bench: Bench, nodes: KVNodeReconciler) -> None:
    """The cache is deleted while b cannot be asked; its process goes on."""
    caches = KVCacheReconciler(bench.deps)
    await settle(bench, caches)
    await nodes.reconcile(NODE)
    bench.agents.down.add("b")
    bench.api.mark_deleted(KEY, bench.clock.now())
    await caches.reconcile(KEY)
    bench.clock.advance(REMOVAL_GRACE + 1)
    await caches.reconcile(KEY)
    assert KEY not in bench.api.objects
    assert UID in bench.agents.caches["b"]


async def test_an_agent_that_comes_back_in_the_same_life_forgets_what_was_deleted_meanwhile() -> None:
    bench = bench_with()
    nodes = KVNodeReconciler(bench.deps)
    await deleted_while_away(bench, nodes)
    await nodes.reconcile(NODE)
    bench.agents.down.clear()
    bench.renew("b")
    await nodes.reconcile(NODE)
    assert UID not in bench.agents.caches["b"]


async def test_an_agent_whose_lease_went_on_meanwhile_forgets_it_within_some_minutes() -> None:
    bench = bench_with()
    nodes = KVNodeReconciler(bench.deps)
    bench.renew("b", seconds=3600)
    await deleted_while_away(bench, nodes)
    await nodes.reconcile(NODE)
    bench.agents.down.clear()
    bench.clock.advance(ORPHANS_SECONDS)
    await nodes.reconcile(NODE)
    assert UID not in bench.agents.caches["b"]


async def test_an_agent_is_asked_seldom_and_the_server_only_of_what_is_not_known_to_be_there() -> None:
    bench = bench_with()
    nodes = KVNodeReconciler(bench.deps)
    bench.renew("b", seconds=3600)
    await settle(bench)
    await nodes.reconcile(NODE)
    asked, bench.agents.calls = list(bench.agents.calls), []
    bench.api.objects.pop(KEY)
    for _ in range(10):
        bench.clock.advance(ORPHANS_SECONDS / 10 - 1)
        await nodes.reconcile(NODE)
    assert "GetState" in asked and bench.agents.calls == []
    bench.clock.advance(10)
    await nodes.reconcile(NODE)
    assert bench.agents.calls == ["GetState"], "the read cache has it still, and the next time will do"


async def test_the_end_of_a_lease_is_not_missed_while_a_silent_agent_is_asked_again() -> None:
    bench = bench_with()
    bench.renew("b", seconds=3)
    bench.agents.down.add("b")
    outcome = await KVNodeReconciler(bench.deps).reconcile(NODE)
    assert isinstance(outcome, Requeue)
    assert outcome.after_seconds < 5
