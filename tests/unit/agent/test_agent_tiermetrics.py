"""Who has the slots of a tier, as a scrape shows it: rows of sessions apart from shared blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from kvtier_agent.engine_port import TierReport
from kvtier_agent.tiermetrics import HOLDERS, HolderCollector
from kvtier_agent.tiersums import add_report
from kvtier_core.engine import CacheEngine
from tests.unit.core.blockpump import LATER, NAMESPACE, key_rows, put
from tests.unit.core.builders import CHUNK, LAYERS, SLOT, Driver, Rows, cpu, engine, nvme


def reports_of(*engines: CacheEngine) -> list[TierReport]:
    """Of a node with these caches, as it adds them up."""
    total = [TierReport("ram", "cpu", False, 1 << 20), TierReport("flash", "nvme", False, 1 << 20)]
    for built in engines:
        for stats in built.stats().tiers:
            one = TierReport(stats.class_name, stats.medium, False, stats.capacity_bytes, held=stats.bytes)
            total = [add_report(report, one) for report in total]
    return total


def test_rows_and_blocks_are_told_apart_and_add_up_over_caches(tmp_path: Path) -> None:
    with engine(tmp_path / "a", [cpu(8), nvme(16)]) as one, engine(tmp_path / "b", [cpu(6), nvme(16)]) as two:
        driver = Driver.open(one, Rows.random(2 * CHUNK))
        driver.forward(CHUNK + 1)
        put(one, range(2))
        put(two, range(3))
        registry = CollectorRegistry()
        HolderCollector(registry, lambda: reports_of(one, two))

        def slots(holder: str, tier: str = "ram") -> float:
            labels = {"tier_class": tier, "holder": holder}
            return (registry.get_sample_value("kvtier_agent_tier_slot_bytes", labels) or 0.0) / SLOT

        assert (slots("rows"), slots("blocks"), slots("quarantined")) == (2 * LAYERS, 5, 0)
        assert sum(slots(holder) for holder in HOLDERS) == 14
        assert slots("blocks", "flash") == 0
        with two.blocks.store.pin(key_rows([0, 1]), NAMESPACE, LATER):
            read = registry.get_sample_value("kvtier_agent_tier_read_block_bytes", {"tier_class": "ram"})
            assert read == pytest.approx(2 * SLOT)
        driver.close()
        assert (slots("rows"), slots("blocks")) == (0, 5)
