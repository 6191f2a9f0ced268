"""TierClass: what a kind of memory can do. A declared capability is a permission, not a measurement."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from kvtier_crds.manifest import Checksum, Medium
from kvtier_crds.models.common import (
    AGE,
    SET_LIST,
    Column,
    DecimalString,
    FormatName,
    Fraction,
    Quantity,
    Resource,
    Scope,
    Status,
    Struct,
    cel,
    map_list,
    rules,
    struct_config,
)


class Persistence(StrEnum):
    """What a row in this tier outlives."""

    EPHEMERAL = "ephemeral"
    PROCESS = "process"
    NODE = "node"
    DURABLE = "durable"


class TenantIsolation(StrEnum):
    SHARED = "shared"
    PER_TENANT = "perTenant"


class Encryption(StrEnum):
    NONE = "none"
    AES256GCM = "aes256gcm"


class Visibility(StrEnum):
    """What must have happened before bytes written here may be read."""

    STREAM_EVENT = "streamEvent"
    HOST_FENCE = "hostFence"
    FSYNC = "fsync"


Alignment = Annotated[int, Field(json_schema_extra={"enum": [2**power for power in range(22)]})]
"""A power of two up to 2 MiB; the server checks it."""


class Codec(Struct):
    name: FormatName
    lossless: bool


class Capabilities(Struct):
    """An agent refuses every path that its class does not permit here."""

    kernel_readable: bool = False
    """An attention kernel may read rows in place (gpu and cpu only)."""
    dma_source: bool = False
    dma_destination: bool = False
    partial_attention: bool = False
    """Partial states (m, l, u) may be formed where the rows are (not on nvme)."""
    codecs: Annotated[
        tuple[Codec, ...], Field(min_length=1, max_length=16, json_schema_extra=map_list("name"))
    ]
    """How rows may be stored; the first lossless one is used for exact rows."""
    layouts: Annotated[tuple[FormatName, ...], Field(min_length=1, max_length=16, json_schema_extra=SET_LIST)]
    persistence: Persistence
    tenant_isolation: TenantIsolation
    encryption_at_rest: Encryption = Encryption.NONE
    """A capability; keys decide: a cache's spec.keySecretRef, or the `--key-dir` of its agents."""
    alignment_bytes: Alignment
    """A power of two up to 2 MiB."""
    checksum: Checksum
    visibility: Visibility


class Endurance(Struct):
    """Bounds on what is written to flash. What is beyond them is refused with WRITE_BUDGET, and the tier is
    Degraded on its KVNode for five minutes after a refusal."""

    drive_writes_per_day: DecimalString
    """The drive's rating. Its size is taken to be that of the filesystem on the node. At 0 the tier cannot be
    used."""
    target_fraction: Fraction
    """The share of that rate which all caches of the tier on a node may use together. A day's share may be
    saved up; an agent starts with it."""


class TierLimits(Struct):
    read_bytes_per_second: Quantity | None = None
    """How fast all caches of an nvme tier on a node may read together: what is beyond it waits, up to its
    deadline. Absent: as fast as it goes. Of other media it says nothing."""
    write_bytes_per_second: Quantity | None = None
    """As readBytesPerSecond, of writes."""
    queue_depth: Annotated[int, Field(ge=1, le=65536)] | None = None
    """How many reads and writes a cache has under way at a time on an nvme tier; at most 64 are used. Absent:
    4. Of other media it says nothing."""
    endurance: Endurance | None = None


class TierClassSpec(Struct):
    model_config = struct_config(
        cel(
            "(self.medium == 'gpu') == has(self.deviceKind)",
            "spec.deviceKind is required when spec.medium is gpu (simulated, cuda-sm90, ...) and must be "
            "absent for cpu, nvme and remote",
        ),
        cel(
            "!self.capabilities.kernelReadable || self.medium in ['gpu', 'cpu']",
            "spec.capabilities.kernelReadable may be true only for medium gpu or cpu",
        ),
        cel(
            "!self.capabilities.partialAttention || self.medium != 'nvme'",
            "spec.capabilities.partialAttention may be true only for medium gpu, cpu or remote",
        ),
        cel(
            "self.capabilities.checksum != 'none' || self.medium == 'cpu'",
            "spec.capabilities.checksum may be none only for medium cpu; use crc32c, xxh3 or blake3",
        ),
        cel(
            "self.capabilities.visibility != 'streamEvent' || self.medium == 'gpu'",
            "spec.capabilities.visibility may be streamEvent only for medium gpu; use hostFence or fsync",
        ),
        cel(
            "self.capabilities.visibility != 'fsync' || self.medium in ['nvme', 'remote']",
            "spec.capabilities.visibility may be fsync only for medium nvme or remote; use hostFence",
        ),
        cel(
            "self.medium != 'nvme' || !(self.capabilities.persistence in ['node', 'durable']) || "
            "self.capabilities.visibility == 'fsync'",
            "spec.capabilities.visibility must be fsync for medium nvme with persistence node or durable: "
            "what outlives the process must be on the device",
        ),
        cel(
            "self.medium != 'gpu' || self.capabilities.persistence in ['ephemeral', 'process']",
            "spec.capabilities.persistence must be ephemeral or process for medium gpu",
        ),
        cel(
            "self.capabilities.codecs.exists(c, c.lossless)",
            "spec.capabilities.codecs must have at least one with lossless true: exact rows need it",
        ),
        cel(
            "!has(self.limits) || !has(self.limits.endurance) || self.medium == 'nvme'",
            "spec.limits.endurance is only for medium nvme",
        ),
    )

    medium: Medium
    device_kind: (
        Annotated[str, Field(min_length=1, max_length=32, pattern=r"^(simulated|cuda-sm[0-9]{2,3}[a-z]?)$")]
        | None
    ) = None
    """Part of the numerics class: `simulated`, or `cuda-sm90` and the like. Required for medium gpu only."""
    capabilities: Capabilities
    limits: TierLimits | None = None


class TierClassStatus(Status):
    """Conditions: Accepted."""


class TierClass(Resource):
    """The capability record of a kind of memory. Immutable: a change is a new TierClass."""

    KIND: ClassVar[str] = "TierClass"
    PLURAL: ClassVar[str] = "tierclasses"
    SHORT: ClassVar[str] = "tc"
    SCOPE: ClassVar[Scope] = Scope.CLUSTER
    COLUMNS: ClassVar[tuple[Column, ...]] = (
        Column(name="Medium", path=".spec.medium"),
        Column(name="Device", path=".spec.deviceKind"),
        Column(name="Persistence", path=".spec.capabilities.persistence"),
        Column(name="Checksum", path=".spec.capabilities.checksum", wide=True),
        AGE,
    )

    spec: Annotated[
        TierClassSpec,
        Field(json_schema_extra=rules(cel("self == oldSelf", "spec is immutable: create a new TierClass"))),
    ]
    status: TierClassStatus | None = None
