"""Agents that do not answer in time are asked once more, for all caches that wait for them; and what is kept
of nodes and caches that are gone."""

from __future__ import annotations

import asyncio

import pytest

from kvtier_operator.ports import Kind, ObjectKey
from kvtier_operator.reconcile.kvcache import KVCacheReconciler
from tests.unit.control.control_fakes import Bench
from tests.unit.control.control_objects import conditions, kv_cache
from tests.unit.control.kvcache_bench import bench_with

NAMES = [f"chat-{number}" for number in range(4)]
KEYS = [ObjectKey(Kind.KV_CACHE, "serving", name) for name in NAMES]


async def served() -> tuple[Bench, KVCacheReconciler]:
    """Some caches, proved on the nodes a and b."""
    bench = bench_with(kv_cache(NAMES[0]))
    for name in NAMES[1:]:
        bench.api.add(kv_cache(name))
    reconciler = KVCacheReconciler(bench.deps)
    for _ in range(4):
        await look(bench, reconciler)
    assert ready(bench) == ["True"] * len(KEYS)
    return bench, reconciler


async def look(bench: Bench, reconciler: KVCacheReconciler) -> None:
    """All caches at the same moment."""
    await asyncio.gather(*(reconciler.reconcile(key) for key in KEYS))
    bench.api.catch_up()


def ready(bench: Bench) -> list[str]:
    return [conditions(bench.api.objects[key])["Ready"][0] for key in KEYS]


def silent_for(bench: Bench, calls: int) -> None:
    bench.agents.late["b"] = calls


async def test_all_caches_are_answered_by_one_second_question() -> None:
    bench, reconciler = await served()
    silent_for(bench, len(KEYS))
    bench.agents.calls.clear()
    bench.agents.wanted.clear()
    await look(bench, reconciler)
    assert ready(bench) == ["True"] * len(KEYS)
    assert bench.agents.late["b"] == 0
    assert bench.agents.wanted.count("") == 1, "of all caches"


async def test_a_dead_agent_is_asked_a_second_time_once_however_many_caches_wait_for_it() -> None:
    bench, reconciler = await served()
    silent_for(bench, 1000)
    await look(bench, reconciler)
    assert 1000 - bench.agents.late["b"] == len(KEYS) + 1
    assert ready(bench) == ["False"] * len(KEYS)
    silent_for(bench, 1000)
    await look(bench, reconciler)
    assert 1000 - bench.agents.late["b"] == len(KEYS), "and not again before it has answered anybody"
    silent_for(bench, 0)
    await reconciler.reconcile(KEYS[0])
    silent_for(bench, 1000)
    await look(bench, reconciler)
    assert 1000 - bench.agents.late["b"] == len(KEYS) + 1


async def test_who_is_cancelled_takes_the_answer_from_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, reconciler = await served()
    silent_for(bench, len(KEYS))
    get_state, asked, answer = bench.agents.get_state, asyncio.Event(), asyncio.Event()

    async def slow(node: object, cache_uid: str = "", **more: object) -> object:
        if not cache_uid:
            asked.set()
            await answer.wait()
        return await get_state(node, cache_uid)  # type: ignore[arg-type]

    monkeypatch.setattr(bench.agents, "get_state", slow)
    running = [asyncio.ensure_future(reconciler.reconcile(key)) for key in KEYS]
    async with asyncio.timeout(60):
        await asked.wait()
    running[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await running[0]
    answer.set()
    await asyncio.gather(*running[1:])
    bench.api.catch_up()
    assert ready(bench)[1:] == ["True"] * (len(KEYS) - 1)


async def test_nodes_that_have_left_the_pool_are_forgotten() -> None:
    bench, reconciler = await served()
    bench.add_node("c")
    await look(bench, reconciler)
    assert len(reconciler._nodes) == 3 * len(KEYS)
    silent_for(bench, 1000)
    await look(bench, reconciler)
    await bench.api.delete(ObjectKey(Kind.KV_NODE, "", "b"))
    bench.agents.late["c"] = len(KEYS) + 1
    await look(bench, reconciler)
    assert len(reconciler._nodes) == 2 * len(KEYS) + 1, "proofs of a and c, and that c is silent"


async def test_a_cache_that_goes_without_our_finalizer_is_forgotten() -> None:
    bench, reconciler = await served()
    assert len(reconciler._nodes) == 2 * len(KEYS)
    await bench.api.delete(KEYS[0])
    await look(bench, reconciler)
    assert len(reconciler._nodes) == 2 * (len(KEYS) - 1)
    other = kv_cache(NAMES[1])
    other["metadata"]["uid"] = "uid-other"
    bench.api.add(other)
    await reconciler.reconcile(KEYS[1])
    assert set(reconciler._labelled) == {f"uid-{name}" for name in NAMES[2:]}, "of neither that is gone"
