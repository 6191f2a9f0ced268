"""AgentPool: which nodes run agents, and the devices behind each tier there."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from kvtier_crds.models.common import (
    AGE,
    ATOMIC_LIST,
    NAME_BECOMES_LABEL,
    Column,
    DnsName,
    Fraction,
    Int64,
    Json,
    Label,
    LocalRef,
    Quantity,
    Resource,
    Scope,
    Status,
    Struct,
    cel,
    condition_path,
    map_list,
    positive_quantity,
    rules,
    struct_config,
    when_changed,
)

_NO_PARENT = cel("!self.contains('..')", "the path must not contain '..'")

HostPath = Annotated[
    str,
    Field(
        min_length=2,
        max_length=1024,
        pattern=r"^(/[A-Za-z0-9._-]+)+/?$",
        json_schema_extra=rules(_NO_PARENT),
    ),
]
LabelKey = Annotated[str, Field(min_length=1, max_length=316)]


class UpdateStrategy(StrEnum):
    ON_DELETE = "OnDelete"
    ROLLING_UPDATE = "RollingUpdate"


class TolerationOperator(StrEnum):
    EXISTS = "Exists"
    EQUAL = "Equal"


class TaintEffect(StrEnum):
    NO_SCHEDULE = "NoSchedule"
    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    NO_EXECUTE = "NoExecute"


class Toleration(Struct):
    """As in a Pod."""

    key: Annotated[str, Field(max_length=316)] | None = None
    operator: TolerationOperator | None = None
    value: Annotated[str, Field(max_length=63)] | None = None
    effect: TaintEffect | None = None
    toleration_seconds: Int64 | None = None


ResourceQuantity = Annotated[
    str,
    Field(
        min_length=1, max_length=32, pattern=r"^[0-9]{1,18}(\.[0-9]{1,9})?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$"
    ),
]


class Resources(Struct):
    """As in a container; quantities as strings ("2", "500m", "4Gi")."""

    requests: Annotated[dict[LabelKey, ResourceQuantity], Field(max_length=16)] = Field(default={})
    limits: Annotated[dict[LabelKey, ResourceQuantity], Field(max_length=16)] = Field(default={})


class Device(Struct):
    model_config = struct_config(
        cel(
            "has(self.cudaIndex) != has(self.path)",
            "spec.tiers[].device needs exactly one of cudaIndex (gpu) and path (nvme)",
        )
    )

    cuda_index: Annotated[int, Field(ge=0, le=63)] | None = None
    path: HostPath | None = None
    """A folder on the device; each agent uses a subfolder of its own under a lock."""


class PoolTier(Struct):
    model_config = struct_config(
        cel(
            positive_quantity("self.capacity"),
            "spec.tiers[].capacity must be greater than 0",
        ),
        cel(
            "!isQuantity(string(self.reserve)) || !isQuantity(string(self.capacity)) || "
            "quantity(string(self.reserve)).isLessThan(quantity(string(self.capacity)))",
            "spec.tiers[].reserve must be less than spec.tiers[].capacity",
        ),
    )

    tier_class_name: DnsName
    capacity: Quantity
    """Bytes on each node, what `reserve` keeps free included."""
    device: Device | None = None
    """Absent for cpu, and for a simulated gpu."""
    reserve: Quantity = 0
    """Bytes of the capacity that no cache may use."""


class PoolTelemetry(Struct):
    otlp_endpoint: (
        Annotated[str, Field(min_length=1, max_length=512, pattern=r"^(https?://)?[A-Za-z0-9._\[\]:-]+$")]
        | None
    ) = None
    """OTLP over gRPC, for example http://collector.telemetry:4317."""


class PoolIndexes(Struct):
    """What selectors' indexes may take on each node; they are built beside the steps."""

    model_config = struct_config(
        cel(
            "!has(self.cpuShare) || string(self.cpuShare).matches('[1-9]')",
            "spec.indexes.cpuShare must be greater than 0 and at most 100%",
        ),
        cel(
            f"!has(self.memory) || {positive_quantity('self.memory')}",
            "spec.indexes.memory must be greater than 0",
        ),
    )

    cpu_share: Fraction | None = None
    """Of one processor; absent: the agent's default, a quarter."""
    memory: Quantity | None = None
    """Bytes of indexes and of rows that wait for them; a session beyond it is exact. Absent: 1Gi."""


class AgentPoolSpec(Struct):
    node_selector: Annotated[dict[LabelKey, Annotated[str, Field(max_length=63)]], Field(max_length=32)] = (
        Field(default={})
    )
    """Nodes that carry all these labels; empty: every node."""
    tolerations: Annotated[tuple[Toleration, ...], Field(max_length=16, json_schema_extra=ATOMIC_LIST)] = ()
    image: Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:@-]*$")]
    resources: Resources = Resources()
    tiers: Annotated[
        tuple[PoolTier, ...], Field(min_length=1, max_length=8, json_schema_extra=map_list("tierClassName"))
    ]
    state_dir: HostPath = "/var/lib/kvtier"
    """On the host: manifests and fences, durable before they are acknowledged."""
    key_secret_refs: Annotated[
        tuple[LocalRef, ...], Field(max_length=16, json_schema_extra=map_list("name"))
    ] = ()
    """Secrets that agents mount: keys of encryption at rest, for caches that name them in keySecretRef. An
    entry CURRENT of a Secret names the entry whose key is used for what is written now."""
    telemetry: PoolTelemetry = PoolTelemetry()
    indexes: PoolIndexes | None = None
    update_strategy: UpdateStrategy = UpdateStrategy.ON_DELETE
    """RollingUpdate is held while a rollout on these nodes is unfinished."""


class AgentPoolStatus(Status):
    """Conditions: Available, Progressing, NoOverlap."""

    desired: Annotated[int, Field(ge=0)] | None = None
    """Nodes that should run an agent."""
    ready: Annotated[int, Field(ge=0)] | None = None
    """KVNodes of this pool with a live Lease."""
    updated: Annotated[int, Field(ge=0)] | None = None
    """Agents that run the current template."""


class AgentPool(Resource):
    """The agents of a set of nodes; reconciled into a DaemonSet, a ServiceAccount and a Service."""

    KIND: ClassVar[str] = "AgentPool"
    PLURAL: ClassVar[str] = "agentpools"
    SHORT: ClassVar[str] = "ap"
    SCOPE: ClassVar[Scope] = Scope.NAMESPACED
    COLUMNS: ClassVar[tuple[Column, ...]] = (
        Column(name="Desired", path=".status.desired", type="integer"),
        Column(name="Ready", path=".status.ready", type="integer"),
        Column(name="Updated", path=".status.updated", type="integer"),
        Column(name="Available", path=condition_path("Available")),
        Column(name="Image", path=".spec.image", wide=True),
        Column(name="NoOverlap", path=condition_path("NoOverlap"), wide=True),
        AGE,
    )
    ROOT_RULES: ClassVar[tuple[Json, ...]] = (
        NAME_BECOMES_LABEL,
        when_changed(
            cel(
                "!self.metadata.name.contains('.')",
                "metadata.name must not contain a dot: a Service is named after it",
            )
        ),
    )

    spec: AgentPoolSpec
    status: AgentPoolStatus | None = None


__all__ = ["AgentPool", "AgentPoolSpec", "AgentPoolStatus", "Device", "Label", "PoolTier", "UpdateStrategy"]
