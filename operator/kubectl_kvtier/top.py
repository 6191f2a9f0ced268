"""Bytes by tier: of nodes from KVNode status, of caches from the ledger in KVCache status. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kubectl_kvtier.tables import rate, share, size, table
from kvtier_crds.models import KVCache, KVNode

Json = dict[str, Any]


def node_facts(nodes: Sequence[KVNode]) -> list[Json]:
    """One entry a node and tier."""
    return [
        {
            "node": node.metadata.name,
            "tier": tier.class_name,
            "medium": str(tier.medium or ""),
            "simulated": tier.simulated,
            "state": str(tier.state),
            "capacity": tier.capacity,
            "used": tier.used,
            "pinned": tier.pinned,
            "readBytesPerSecond": tier.read_bytes_per_second,
            "writeBytesPerSecond": tier.write_bytes_per_second,
        }
        for node in nodes
        for tier in (node.status.tiers if node.status else ())
    ]


def cache_facts(caches: Sequence[KVCache]) -> list[Json]:
    """One entry a cache and tier, over all nodes that serve it. budget is per node."""
    return [
        {
            "namespace": cache.metadata.namespace,
            "cache": cache.metadata.name,
            "tier": tier.tier_class_name,
            "servingNodes": (cache.status.serving_nodes or 0) if cache.status else 0,
            "budgetPerNode": tier.budget,
            "used": tier.used,
            "pinned": tier.pinned,
        }
        for cache in caches
        for tier in (cache.status.ledger if cache.status else ())
    ]


def node_table(facts: Sequence[Json]) -> list[str]:
    head = ("NODE", "TIER", "MEDIUM", "USED", "PINNED", "CAPACITY", "USE", "READ", "WRITE", "STATE")
    return table(
        head,
        [
            (
                one["node"],
                one["tier"],
                one["medium"] + (" (simulated)" if one["simulated"] else ""),
                size(one["used"]),
                size(one["pinned"]),
                size(one["capacity"]),
                share(one["used"], one["capacity"]),
                rate(one["readBytesPerSecond"]),
                rate(one["writeBytesPerSecond"]),
                one["state"],
            )
            for one in facts
        ],
    )


def cache_table(facts: Sequence[Json]) -> list[str]:
    head = ("NAMESPACE", "CACHE", "TIER", "NODES", "USED", "PINNED", "BUDGET/NODE", "USE")
    return table(
        head,
        [
            (
                one["namespace"],
                one["cache"],
                one["tier"],
                str(one["servingNodes"]),
                size(one["used"]),
                size(one["pinned"]),
                size(one["budgetPerNode"]),
                share(one["used"], one["budgetPerNode"] * one["servingNodes"]),
            )
            for one in facts
        ],
    )
