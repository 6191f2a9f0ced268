"""One tier of a node out of what its caches say of it: added up, and the worst condition.

It must not know caches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from kvtier_agent.engine_port import TierReport
from kvtier_agent.tierdirs import PACED, READY
from kvtier_core.receipts import TierBytes


def add_report(node: TierReport, engine: TierReport) -> TierReport:
    return with_engines(node, (engine,))


def with_engines(node: TierReport, engines: Iterable[TierReport]) -> TierReport:
    """Of what engines say of any tier, that of this one is added."""
    mine = [one for one in engines if one.class_name == node.class_name]
    if not mine:
        return node
    every = [node, *mine]
    condition = node.condition
    probes = dict(node.probes)
    for one in mine:
        condition = _worse(condition, one.condition)
        for name, value in one.probes.items():
            probes.setdefault(name, value)
    return TierReport(
        class_name=node.class_name,
        medium=node.medium,
        simulated=any(one.simulated for one in every),
        capacity_bytes=node.capacity_bytes,
        used_bytes=sum(one.used_bytes for one in every),
        pinned_bytes=sum(one.pinned_bytes for one in every),
        read_bytes_per_second=max(one.read_bytes_per_second for one in every),
        write_bytes_per_second=max(one.write_bytes_per_second for one in every),
        probes=probes,
        condition=condition,
        held=_held(every),
    )


def _held(reports: Sequence[TierReport]) -> TierBytes:
    held = [one.held for one in reports]
    return TierBytes(
        sum(one.rows for one in held),
        sum(one.blocks for one in held),
        sum(one.quarantined for one in held),
        sum(one.free for one in held),
        sum(one.held for one in held),
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
