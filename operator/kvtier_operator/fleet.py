"""The nodes of a pool as the control plane sees them: KVNode, its Lease, its Node. Pure over a Store.

Liveness is the Lease's and nothing else's: a KVNode's conditions are what its agent last said, and a dead
agent says nothing. This module must not call an agent.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from kvtier_operator.ports import (
    LEASE_PREFIX,
    AgentTarget,
    Clock,
    JsonObject,
    Kind,
    NodeView,
    ObjectKey,
    Store,
)

DEFAULT_LEASE_SECONDS = 30.0


def parse_time(text: str | None) -> datetime | None:
    """RFC 3339, with or without microseconds; None when absent or broken."""
    if not text:
        return None
    try:
        parsed = datetime.fromisoformat(text)
    except ValueError:
        return None
    return parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)


def format_time(moment: datetime) -> str:
    """Seconds, as metav1.Time is written."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def format_micro_time(moment: datetime) -> str:
    """Microseconds, as metav1.MicroTime is written (Leases, Events)."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def lease_key(pool_namespace: str, node: str) -> ObjectKey:
    return ObjectKey(Kind.LEASE, pool_namespace, f"{LEASE_PREFIX}{node}")


def lease_end(lease: JsonObject | None) -> datetime | None:
    """When the Lease ends unless it is renewed."""
    spec: dict[str, Any] = (lease or {}).get("spec") or {}
    renewed = parse_time(spec.get("renewTime"))
    if renewed is None:
        return None
    return renewed + timedelta(seconds=float(spec.get("leaseDurationSeconds") or DEFAULT_LEASE_SECONDS))


def in_service(member: NodeView) -> bool:
    """Whether it may hold candidates. Leases of no other one are renewed, whatever else it is asked."""
    return member.live and not member.cordoned and not member.draining


def condition_of(obj: JsonObject, type: str) -> JsonObject | None:
    for condition in (obj.get("status") or {}).get("conditions") or []:
        if condition.get("type") == type:
            found: JsonObject = condition
            return found
    return None


def pool_of(kv_node: JsonObject) -> tuple[str, str]:
    reference = (kv_node.get("spec") or {}).get("poolRef") or {}
    return reference.get("namespace", ""), reference.get("name", "")


class StoreFleet:
    """Implements `kvtier_operator.ports.Fleet`."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._grouped: tuple[int, dict[tuple[str, str], list[JsonObject]]] = -1, {}

    def members(self, pool_namespace: str, pool_name: str) -> list[NodeView]:
        return [self.view(node) for node in self._by_pool().get((pool_namespace, pool_name), ())]

    def _by_pool(self) -> dict[tuple[str, str], list[JsonObject]]:
        """Grouped once for each state of the read cache."""
        state = self._store.revision(Kind.KV_NODE)
        if self._grouped[0] != state:
            grouped: dict[tuple[str, str], list[JsonObject]] = {}
            for node in self._store.list_all(Kind.KV_NODE):
                grouped.setdefault(pool_of(node), []).append(node)
            # Of what came between the two, the next call sees the number.
            self._grouped = state, grouped
        return self._grouped[1]

    def view(self, kv_node: JsonObject) -> NodeView:
        """One KVNode with what its Lease and its Node add."""
        metadata, spec = kv_node["metadata"], kv_node.get("spec") or {}
        status = kv_node.get("status") or {}
        namespace, _ = pool_of(kv_node)
        lease = self._store.get(lease_key(namespace, metadata["name"]))
        lease_spec = (lease or {}).get("spec") or {}
        end = lease_end(lease)
        node = self._store.get(ObjectKey(Kind.NODE, "", spec.get("nodeName", metadata["name"])))
        draining = condition_of(kv_node, "Draining")
        return NodeView(
            target=AgentTarget(
                name=metadata["name"],
                uid=metadata.get("uid", ""),
                address=spec.get("address", ""),
                boot_id=lease_spec.get("holderIdentity") or status.get("bootID", ""),
            ),
            live=end is not None and self._clock.now() < end and bool(lease_spec.get("holderIdentity")),
            draining=draining is not None and draining.get("status") == "True",
            cordoned=bool(((node or {}).get("spec") or {}).get("unschedulable")),
            lease_renewed=parse_time(lease_spec.get("renewTime")),
            lease_seconds=float(lease_spec.get("leaseDurationSeconds") or DEFAULT_LEASE_SECONDS),
            raw=kv_node,
        )
