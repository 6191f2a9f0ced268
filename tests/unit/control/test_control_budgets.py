"""What other caches of a pool have for themselves: declared, adopted, held beside a baseline."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier_operator.budgets import budgets_of_others
from kvtier_operator.ports import JsonObject
from kvtier_operator.reconcile.kvcache import KVCacheReconciler
from tests.unit.control.control_objects import kv_cache, with_meta
from tests.unit.control.kvcache_bench import KEY, bench_with, settle

MIB = 1 << 20


def test_of_two_caches_the_older_keeps_its_place() -> None:
    old = with_meta(kv_cache("old"), creationTimestamp="2025-01-01T00:00:00Z")
    new = with_meta(kv_cache("new"), creationTimestamp="2026-01-01T00:00:00Z")
    elsewhere = with_meta(kv_cache("elsewhere", poolRef={"name": "other"}))
    assert budgets_of_others(new, [old, new, elsewhere], []) == {"gpu-sim": 32 * MIB, "cpu-dram": 64 * MIB}
    assert budgets_of_others(old, [old, new, elsewhere], []) == {}


@pytest.mark.parametrize(
    ("phase", "stage", "baseline", "counted"),
    [
        pytest.param("Pending", "Off", "b", 64, id="not-begun"),
        pytest.param("Progressing", "Shadow", "b", 64 + 96, id="held-beside"),
        pytest.param("Paused", "Canary", "b", 64 + 96, id="paused"),
        pytest.param("RollingBack", "ExactBaseline", "b", 64 + 96, id="until-it-has-returned"),
        pytest.param("RolledBack", "ExactBaseline", "b", 64, id="returned"),
        pytest.param("Progressing", "Full", "c", 96, id="adopted-and-not-told"),
        pytest.param("Completed", "Full", "c", 96, id="adopted-and-larger-than-declared"),
        pytest.param("Completed", "Full", "later", 64, id="adopted-and-left-behind"),
    ],
)
def test_an_engine_beside_the_baselines_counts_where_another_cache_is_judged(
    phase: str, stage: str, baseline: str, counted: int
) -> None:
    old = with_meta(kv_cache("old"), creationTimestamp="2025-01-01T00:00:00Z")
    old["status"] = {"baseline": {"digest": baseline}}
    new = with_meta(kv_cache("new"), creationTimestamp="2026-01-01T00:00:00Z")
    budgets = [{"tierClassName": "cpu-dram", "bytes": 96 * MIB}]

    def of(cache: str) -> dict[str, Any]:
        return {
            "metadata": {"name": f"of-{cache}", "namespace": old["metadata"]["namespace"]},
            "spec": {"cacheRef": {"name": cache}},
            "status": {"phase": phase, "stage": stage, "candidate": {"digest": "c", "budgets": budgets}},
        }

    taken = budgets_of_others(new, [old, new], [of("old"), of("new"), of("nobody")])
    assert taken == {"gpu-sim": 32 * MIB, "cpu-dram": counted * MIB}


LARGER = [{"tierClassName": "cpu-dram", "bytes": 96 * MIB}]


@pytest.mark.parametrize(
    ("recorded", "declared", "counted"),
    [
        pytest.param(LARGER, "64Mi", 96, id="its-rollout-has-gone"),
        pytest.param(LARGER, "96Mi", 96, id="the-spec-says-so"),
        pytest.param(LARGER, "128Mi", 128, id="the-spec-asks-for-more"),
        pytest.param([], "64Mi", 64, id="an-earlier-version-wrote-none"),
    ],
)
def test_what_a_baseline_runs_with_counts_without_its_rollout(
    recorded: list[JsonObject], declared: str, counted: int
) -> None:
    old = with_meta(kv_cache("old"), creationTimestamp="2025-01-01T00:00:00Z")
    old["spec"]["tiers"][1]["budget"] = declared
    old["status"] = {"baseline": {"digest": "c", "budgets": recorded}}
    new = with_meta(kv_cache("new"), creationTimestamp="2026-01-01T00:00:00Z")
    taken = budgets_of_others(new, [old, new], [])
    assert taken == {"gpu-sim": 32 * MIB, "cpu-dram": counted * MIB}


BOTH = [{"tierClassName": "gpu-sim", "bytes": 32 * MIB}, {"tierClassName": "cpu-dram", "bytes": 64 * MIB}]


async def test_a_first_baseline_says_its_budgets_whatever_the_spec_says_later() -> None:
    bench = bench_with()
    cache = await settle(bench)
    assert cache["status"]["baseline"]["budgets"] == BOTH
    cache["spec"]["tiers"][1]["budget"] = "16Mi"
    bench.api.catch_up()
    cache = await settle(bench)
    assert cache["status"]["baseline"]["budgets"] == BOTH


async def test_a_baseline_that_is_rebuilt_says_its_budgets() -> None:
    bench = bench_with()
    cache = await settle(bench)
    del cache["status"]
    cache["spec"]["tiers"][1]["budget"] = "16Mi"
    bench.api.catch_up()
    assert (await settle(bench))["status"]["baseline"]["budgets"] == BOTH


@pytest.mark.parametrize(("declared", "kept"), [("16Mi", BOTH), ("64Mi", None)], ids=["others", "the-specs"])
async def test_a_baseline_of_an_earlier_version_is_told_its_budgets_where_the_spec_has_others(
    declared: str, kept: list[JsonObject] | None
) -> None:
    """Once; where the spec has the same there is nothing to lose, and nothing is written."""
    bench = bench_with()
    cache = await settle(bench)
    del cache["status"]["baseline"]["budgets"]
    cache["spec"]["tiers"][1]["budget"] = declared
    bench.api.catch_up()
    reconciler = KVCacheReconciler(bench.deps)
    cache = await settle(bench, reconciler)
    assert cache["status"]["baseline"].get("budgets") == kept
    bench.api.writes.clear()
    await reconciler.reconcile(KEY)
    assert bench.api.writes == []
