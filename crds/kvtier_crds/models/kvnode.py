"""KVNode: one agent, as it registered itself. Its liveness is a coordination Lease, not a field here."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from kvtier_crds.manifest import Medium
from kvtier_crds.models.common import (
    AGE,
    ATOMIC_OBJECT,
    Column,
    DnsName,
    Int64,
    Json,
    NamespacedRef,
    Number,
    Resource,
    Scope,
    Sha256,
    Status,
    Struct,
    cel,
    condition_path,
    map_list,
)
from kvtier_crds.models.stages import StatusStage


class TierState(StrEnum):
    READY = "Ready"
    DEGRADED = "Degraded"
    FAILED = "Failed"


class Probes(Struct):
    """What the agent found out about a device when it started."""

    o_direct: Annotated[bool | None, Field(alias="oDirect")] = None
    fsync_seconds: Number | None = None
    gds: bool | None = None
    """GPUDirect Storage."""


class NodeTier(Struct):
    """One tier on this node: what it is, and what was measured beside what its class declares."""

    class_name: Annotated[DnsName, Field(alias="class")]
    """The TierClass."""
    medium: Medium | None = None
    device_kind: Annotated[str, Field(max_length=32)] | None = None
    simulated: bool = False
    """A gpu tier on a cpu device: its bandwidth is a memcpy's."""
    capacity: Int64 = 0
    """Bytes."""
    used: Int64 = 0
    pinned: Int64 = 0
    read_bytes_per_second: Int64 | None = None
    """Measured; absent: not measured."""
    write_bytes_per_second: Int64 | None = None
    probes: Probes | None = None
    state: TierState = TierState.READY
    reason: Annotated[str, Field(max_length=64)] | None = None
    """Why the state is not Ready, for example StorageUnavailable."""
    message: Annotated[str, Field(max_length=512)] | None = None


class HeldCandidate(Struct):
    """A candidate for which this agent holds a lease."""

    namespace: DnsName
    cache: DnsName
    cache_uid: Annotated[str, Field(min_length=1, max_length=64, alias="cacheUID")]
    digest: Sha256
    stage: StatusStage
    step: Annotated[int, Field(ge=0, le=64)] = 0
    fence: Int64


class KVNodeSpec(Struct):
    node_name: DnsName
    """The Kubernetes Node; the KVNode has the same name."""
    address: Annotated[
        str, Field(min_length=3, max_length=261, pattern=r"^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+):[0-9]{1,5}$")
    ]
    """host:port of the agent's Control service."""
    pool_ref: NamespacedRef


class KVNodeStatus(Status):
    """Conditions: Ready, Draining, CapabilitiesVerified, ManifestsVerified."""

    model_config = ConfigDict(json_schema_extra=ATOMIC_OBJECT)

    tiers: Annotated[tuple[NodeTier, ...], Field(max_length=8, json_schema_extra=map_list("class"))] = ()
    agent_version: Annotated[str, Field(max_length=128)] | None = None
    numerics_version: Annotated[str, Field(max_length=128)] | None = None
    boot_id: Annotated[Annotated[str, Field(max_length=64)] | None, Field(alias="bootID")] = None
    manifest_set_digest: Sha256 | None = None
    candidates: Annotated[
        tuple[HeldCandidate, ...], Field(max_length=64, json_schema_extra=map_list("cacheUID"))
    ] = ()


class KVNode(Resource):
    """One agent. Registered by the agent, owned by its Node; only that node's agent may write it."""

    KIND: ClassVar[str] = "KVNode"
    PLURAL: ClassVar[str] = "kvnodes"
    SHORT: ClassVar[str] = "kvn"
    SCOPE: ClassVar[Scope] = Scope.CLUSTER
    COLUMNS: ClassVar[tuple[Column, ...]] = (
        Column(name="Pool", path=".spec.poolRef.name"),
        Column(name="Ready", path=condition_path("Ready")),
        Column(name="Draining", path=condition_path("Draining")),
        Column(name="Address", path=".spec.address"),
        Column(name="Version", path=".status.agentVersion", wide=True),
        Column(name="Numerics", path=".status.numericsVersion", wide=True),
        Column(name="Simulated", path=".status.tiers[*].simulated", wide=True),
        AGE,
    )
    ROOT_RULES: ClassVar[tuple[Json, ...]] = (
        cel(
            "self.metadata.name == self.spec.nodeName",
            "metadata.name must equal spec.nodeName: an agent's certificate carries that name",
        ),
    )

    spec: KVNodeSpec
    status: KVNodeStatus | None = None
