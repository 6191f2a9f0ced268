"""One tier of a node out of what its caches say of it: added up, and the worst condition.

It must not know caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvtier_agent.engine_port import TierReport
from kvtier_agent.tierdirs import PACED, READY


def add_report(node: TierReport, engine: TierReport) -> TierReport:
    if node.class_name != engine.class_name:
        return node
    return TierReport(
        class_name=node.class_name,
        medium=node.medium,
        simulated=node.simulated or engine.simulated,
        capacity_bytes=node.capacity_bytes,
        used_bytes=node.used_bytes + engine.used_bytes,
        pinned_bytes=node.pinned_bytes + engine.pinned_bytes,
        read_bytes_per_second=max(node.read_bytes_per_second, engine.read_bytes_per_second),
        write_bytes_per_second=max(node.write_bytes_per_second, engine.write_bytes_per_second),
        probes={**engine.probes, **node.probes},
        condition=_worse(node.condition, engine.condition),
        held=node.held + engine.held,
    )


def summed(reports: Sequence[TierReport], others: Sequence[TierReport]) -> list[TierReport]:
    """Of two engines of one cache, by class."""
    known = {one.class_name for one in reports}
    added = [_capacities(one, others) for one in reports]
    return added + [one for one in others if one.class_name not in known]


def _capacities(report: TierReport, others: Sequence[TierReport]) -> TierReport:
    for other in others:
        if other.class_name == report.class_name:
            both = add_report(report, other)
            report = replace(both, capacity_bytes=report.capacity_bytes + other.capacity_bytes)
    return report


def _worse(node: str, engine: str) -> str:
    """A tier that fails outranks one whose writes are paced."""
    return engine if node == READY or (node == PACED and engine != READY) else node
