"""The endurance of a TierClass on its way into an agent: one budget for all caches of a tier, and what a
person sees when it is used up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kvtier_agent import kvnode
from kvtier_agent.config import ConfigError, TierConfig
from kvtier_agent.core_engine import CoreEngine, mount_of
from kvtier_agent.tierdirs import PACED, PACED_SECONDS, NodeTiers
from kvtier_agent.tiermetrics import WriteBudgetCollector
from kvtier_core.assembly import MAX_IO_THREADS, nvme_options
from kvtier_core.errors import CoreError, Reason
from kvtier_core.tiers.nvme.endurance import DAY_SECONDS
from kvtier_core.tiers.nvme.pace import Load, Way
from kvtier_crds.models.kvnode import KVNode
from tests.unit.agent.agent_fakes import Bench
from tests.unit.core.builders import FakeClock, cpu, manifest, nvme

DRIVE = 1 << 28
HALF = {"driveWritesPerDay": "1", "targetFraction": "50%"}


def flash(folder: Path, **more: Any) -> TierConfig:
    fields = {"className": "flash", "medium": "nvme", "capacity": "4Mi", "device": {"path": str(folder)}}
    return TierConfig.parse(json.dumps({**fields, **more}))


def claimed(folder: Path, clock: FakeClock, *configs: TierConfig) -> NodeTiers:
    return NodeTiers(configs, "uid-a", clock, lambda path: DRIVE)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"endurance": "much"}, "endurance must hold driveWritesPerDay and targetFraction"),
        ({"endurance": {"driveWritesPerDay": "1"}}, "endurance must hold"),
        ({"endurance": {**HALF, "driveWritesPerDay": "-1"}}, "endurance.driveWritesPerDay"),
        ({"endurance": {**HALF, "targetFraction": "2"}}, "endurance.targetFraction"),
        ({"endurance": HALF, "medium": "cpu"}, "endurance is only for medium nvme"),
        ({"queueDepth": 0}, "queueDepth 0 must be in"),
        ({"queueDepth": True}, "queueDepth True must be in"),
        ({"queueDepth": "8"}, "queueDepth '8' must be in"),
        ({"readBytesPerSecond": "fast"}, "readBytesPerSecond 'fast' is not a quantity"),
        ({"writeBytesPerSecond": 0}, "writeBytesPerSecond 0 must be at least 1"),
        ({"readBytesPerSecond": "1G", "medium": "cpu"}, "readBytesPerSecond is only for medium nvme"),
    ],
    ids=[
        *("text", "half", "negative", "over-one", "medium", "depth-0", "depth-bool", "depth-text"),
        *("rate-text", "rate-0", "rate-medium"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(tmp_path: Path, more: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        flash(tmp_path, **more)


@pytest.mark.parametrize(
    ("depth", "threads"), [(None, 4), (1, 1), (32, 32), (65536, MAX_IO_THREADS)], ids=str
)
def test_a_queue_depth_is_so_many_threads_within_bounds(
    tmp_path: Path, depth: int | None, threads: int
) -> None:
    more = {} if depth is None else {"queueDepth": depth}
    tiers = claimed(tmp_path, FakeClock(), flash(tmp_path, **more))
    assert nvme_options(mount_of(tiers.all()[0]), None).threads == threads
    tiers.close()


def test_a_class_without_endurance_has_no_budget(tmp_path: Path) -> None:
    tiers = claimed(tmp_path, FakeClock(), flash(tmp_path))
    assert tiers.all()[0].budget is None and mount_of(tiers.all()[0]).budget is None
    tiers.close()


def test_all_caches_of_a_tier_move_at_one_pace(tmp_path: Path) -> None:
    clock = FakeClock()
    tiers = claimed(tmp_path, clock, flash(tmp_path, writeBytesPerSecond="10M"))
    mounts = [mount_of(tiers.all()[0]) for _ in range(2)]
    paces = [nvme_options(mount, None).pace for mount in mounts]
    assert paces[0] is paces[1] is not None
    assert paces[0].take(Load(Way.WRITE, 1_000_000)) == 0.0
    assert paces[0].take(Load(Way.WRITE, 1_000_000)) == pytest.approx(0.1)
    assert paces[0].take(Load(Way.READ, 1 << 40)) == 0.0
    tiers.close()


def test_a_class_without_rates_has_no_pace(tmp_path: Path) -> None:
    tiers = claimed(tmp_path, FakeClock(), flash(tmp_path))
    assert mount_of(tiers.all()[0]).pace is None
    tiers.close()


def test_a_class_that_allows_no_write_leaves_a_tier_that_cannot_be_used(tmp_path: Path) -> None:
    none = flash(tmp_path, endurance={**HALF, "driveWritesPerDay": "0"})
    tiers = claimed(tmp_path, FakeClock(), none)
    assert tiers.all()[0].report().condition.startswith("EnduranceZero: ")
    tiers.close()


def test_all_caches_of_a_tier_write_on_one_budget(tmp_path: Path) -> None:
    clock = FakeClock()
    memory = TierConfig.parse('{"className":"ram","medium":"cpu","capacity":"4Mi"}')
    tiers = claimed(tmp_path, clock, flash(tmp_path, endurance=HALF), memory)
    node_tier = tiers.all()[0]
    budget = node_tier.budget
    assert budget is not None and budget.available_bytes == DRIVE // 2
    one = manifest([cpu(2), nvme(16)])
    two = one.model_copy(update={"tenancy": one.tenancy.model_copy(update={"cache_uid": "another"})})
    engines = [CoreEngine(each, tiers.all(), clock) for each in (one, two)]
    stores = [engine.shared().store for engine in engines]
    levels = [budget.available_bytes]
    for store in stores:
        (at,) = store.parts.storage
        store.parts.tiers[at].reserve(1)
        levels.append(budget.available_bytes)
    slot = levels[0] - levels[1]
    assert slot > 0 and levels[1] - levels[2] == slot
    assert budget.take(budget.available_bytes) == 0.0
    with pytest.raises(CoreError) as refused:
        stores[1].parts.tiers[stores[1].parts.storage[0]].reserve(1)
    assert refused.value.reason is Reason.WRITE_BUDGET
    assert node_tier.report().condition == PACED
    clock.now += DAY_SECONDS
    assert budget.available_bytes == DRIVE // 2
    for engine in engines:
        engine.close()
    tiers.close()


async def test_a_paced_tier_is_degraded_until_no_write_was_put_off_for_a_while(tmp_path: Path) -> None:
    clock = FakeClock()
    tiers = claimed(tmp_path / "t", clock, flash(tmp_path / "t", endurance=HALF))
    node_tier = tiers.all()[0]
    assert node_tier.budget is not None and node_tier.report().condition == "Ready"
    assert node_tier.budget.take(DRIVE // 2) == 0.0 and node_tier.budget.take(1) > 0
    bench = Bench(tmp_path / "node")
    found = kvnode.tier_of(node_tier.report(), bench.node)
    assert (found["state"], found["reason"]) == ("Degraded", "WriteBudget")
    verified = kvnode.conditions_of(bench.node, [found])[2]
    assert (verified.type, verified.status) == ("CapabilitiesVerified", "True")
    spec = kvnode.spec_of("node-a", "10.0.0.1:7443", "serving", "pool")
    KVNode.model_validate(
        {
            "apiVersion": "kvtier.dev/v1alpha1",
            "kind": "KVNode",
            "metadata": {"name": "node-a"},
            "spec": spec,
            "status": {"tiers": [found]},
        }
    )
    clock.now += PACED_SECONDS
    assert node_tier.paced
    clock.now += 1
    assert node_tier.report().condition == "Ready"
    await bench.close()
    tiers.close()


@pytest.mark.parametrize(
    ("engine", "says"),
    [("Ready", PACED), ("STORAGE_UNAVAILABLE: EIO", "STORAGE_UNAVAILABLE: EIO")],
    ids=["engine-well", "engine-failing"],
)
async def test_a_failing_engine_outranks_a_paced_tier(
    tmp_path: Path, engine: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path)
    await bench.apply()
    tier = next(each for each in bench.node.tiers.all() if each.config.class_name == "nvme")
    paced = replace(tier.report(), condition=PACED)
    monkeypatch.setattr(
        bench.node.tiers, "all", lambda: [type("Paced", (), {"report": lambda self: paced})()]
    )
    monkeypatch.setattr(bench.engine, "tiers", lambda: [replace(tier.report(), condition=engine)])
    await bench.node.refresh_reports()
    assert [report.condition for report in bench.node.tier_reports()] == [says]
    monkeypatch.undo()
    await bench.close()


def test_metrics_tell_a_used_up_budget_from_lack_of_room(tmp_path: Path) -> None:
    tiers = claimed(tmp_path, FakeClock(), flash(tmp_path, endurance=HALF))
    budget = tiers.all()[0].budget
    assert budget is not None
    budget.take(DRIVE // 2)
    budget.take(1)
    registry = CollectorRegistry()
    WriteBudgetCollector(registry, tiers)
    name = "kvtier_agent_tier_write_budget"
    values = [
        registry.get_sample_value(f"{name}_{what}", {"tier_class": "flash"})
        for what in ("bytes", "charged_bytes", "refusals_total")
    ]
    assert values == [0, DRIVE // 2, 1]
    tiers.close()
