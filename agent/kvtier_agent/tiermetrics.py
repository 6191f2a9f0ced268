"""Metrics of this node's tiers: who has their slots, and what storage may still write.

Why it exists: one number for "used" cannot say whether a tier is full of sessions' rows or of shared blocks,
and a demotion that was put off to spare flash looks like lack of room; a person must be able to tell these
apart. Labels are this node's tier classes and a closed set of holders. It must not know caches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvtier_agent.engine_port import TierReport
from kvtier_agent.tierdirs import NodeTiers

HOLDERS = ("rows", "blocks", "quarantined", "free")


class WriteBudgetCollector(Collector):
    """Read at each scrape; tiers whose class states no endurance have no samples."""

    def __init__(self, registry: CollectorRegistry, tiers: NodeTiers) -> None:
        self._tiers = tiers
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        labels = ["tier_class"]
        free = GaugeMetricFamily(
            "kvtier_agent_tier_write_budget_bytes", "Bytes that may be written now", labels=labels
        )
        # What is reserved is charged and may be given back, so this one can fall.
        written = GaugeMetricFamily(
            "kvtier_agent_tier_write_budget_charged_bytes",
            "Bytes charged since the agent's start",
            labels=labels,
        )
        refused = CounterMetricFamily(
            "kvtier_agent_tier_write_budget_refusals", "Blocks whose write was put off", labels=labels
        )
        for tier in self._tiers.all():
            if tier.budget is not None:
                name = [tier.config.class_name]
                free.add_metric(name, tier.budget.available_bytes)
                written.add_metric(name, tier.budget.written_bytes)
                refused.add_metric(name, tier.budget.refused)
        yield from (free, written, refused)


class HolderCollector(Collector):
    """`reports`: the tiers as they were last asked, all caches of the node added up."""

    def __init__(self, registry: CollectorRegistry, reports: Callable[[], Sequence[TierReport]]) -> None:
        self._reports = reports
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        held = GaugeMetricFamily(
            "kvtier_agent_tier_slot_bytes",
            "Bytes of slots by who has them: rows of sessions, shared blocks, quarantined, free; they add up",
            labels=["tier_class", "holder"],
        )
        read = GaugeMetricFamily(
            "kvtier_agent_tier_read_block_bytes",
            "Of the bytes of blocks, those that somebody reads, so that they cannot leave",
            labels=["tier_class"],
        )
        for report in self._reports():
            for holder in HOLDERS:
                held.add_metric([report.class_name, holder], getattr(report.held, holder))
            read.add_metric([report.class_name], report.held.held)
        yield from (held, read)
