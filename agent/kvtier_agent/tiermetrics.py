"""Metrics of what storage may still write: the write budgets of this node's tiers.

Why it exists: a demotion that was put off to spare flash looks like lack of room, and a person must be able
to tell the two apart. Labels are this node's tier classes. It must not know caches.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvtier_agent.tierdirs import NodeTiers


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
