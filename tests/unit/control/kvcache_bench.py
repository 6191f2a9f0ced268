"""A KVCache, its pool and its nodes in memory, and the reconcile over them."""

from __future__ import annotations

from kvtier_operator.ports import Conflict, JsonObject, Kind, ObjectKey
from kvtier_operator.reconcile.kvcache import KVCacheReconciler
from tests.unit.control.control_fakes import Bench
from tests.unit.control.control_objects import agent_pool, kv_cache, tier_class

KEY = ObjectKey(Kind.KV_CACHE, "serving", "chat")
UID = "uid-chat"


def bench_with(cache: JsonObject | None = None, *, nodes: tuple[str, ...] = ("a", "b")) -> Bench:
    bench = Bench()
    bench.api.add(tier_class("gpu-sim", "gpu"))
    bench.api.add(tier_class("cpu-dram", "cpu"))
    bench.api.add(agent_pool())
    for node in nodes:
        bench.add_node(node)
    bench.api.add(cache or kv_cache())
    return bench


async def settle(bench: Bench, reconciler: KVCacheReconciler | None = None, runs: int = 6) -> JsonObject:
    reconciler = reconciler or KVCacheReconciler(bench.deps)
    for _ in range(runs):
        try:
            await reconciler.reconcile(KEY)
        except Conflict:
            bench.api.catch_up()
    return bench.api.objects[KEY]
