"""spec.placement of a KVCache: a policy and the typed parameters of that policy.

Why it exists: a placement search is as good as the numbers that it is given, so each number has a field, a
unit and a range. It must not know how a policy decides: the agent's core does. All policies are exact: they
choose where rows lie and where they are attended, never which rows are.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from kvtier_crds.models.common import (
    ATOMIC_LIST,
    DecimalString,
    Json,
    Quantity,
    Struct,
    cel,
    positive_quantity,
    rules,
    struct_config,
)

Parameters = Annotated[
    dict[Annotated[str, Field(max_length=63)], Annotated[str, Field(max_length=253)]], Field(max_length=16)
]


class PlacementPolicy(StrEnum):
    """recency: the newest chunks in the fastest tier that has room, older ones further down. flexGen: shares
    of K/V in each tier by a search for throughput. headGroups: history moves in slices of KV heads.
    wholeRequest: each request's cache on one side, attended there."""

    RECENCY = "recency"
    FLEX_GEN = "flexGen"
    HEAD_GROUPS = "headGroups"
    WHOLE_REQUEST = "wholeRequest"


Percent = Annotated[int, Field(ge=0, le=100)]


def _split(path: str) -> Json:
    return cel(
        "self.gpuPercent + self.cpuPercent + self.diskPercent == 100",
        f"{path}: gpuPercent, cpuPercent and diskPercent must add up to 100",
    )


class EngineWeights(Struct):
    """The engine's, not the cache's: declared, since they share the links with K/V."""

    model_config = struct_config(_split("spec.placement.flexGen.weights"))

    bytes_per_layer: Quantity
    gpu_percent: Percent = 100
    cpu_percent: Percent = 0
    disk_percent: Percent = 0


class EngineActivations(Struct):
    """What passes from layer to layer; the engine's, declared."""

    model_config = struct_config(_split("spec.placement.flexGen.activations"))

    bytes_per_token: Quantity
    gpu_percent: Percent = 100
    cpu_percent: Percent = 0
    disk_percent: Percent = 0


class EngineLinear(Struct):
    """One layer's work besides attention on the engine's device, as measured there."""

    prefill_seconds_per_token: DecimalString
    decode_seconds_per_sequence: DecimalString


class EngineMemory(Struct):
    """What the engine has for weights and activations on each node, apart from the cache's budgets."""

    gpu: Quantity
    cpu: Quantity = 0
    disk: Quantity = 0


class AttentionSite(StrEnum):
    """device: rows outside the gpu tier move to it for every step. host: they are attended where they lie."""

    DEVICE = "device"
    HOST = "host"


class FlexGenParameters(Struct):
    """A search for throughput over shares of K/V and the number of GPU batches in a zig-zag block, exact over
    its grid; the cost of a layer is the largest of five overlapping terms."""

    prompt_tokens: Annotated[int, Field(ge=1, le=1_048_576)]
    output_tokens: Annotated[int, Field(ge=1, le=1_048_576)]
    batch_sequences: Annotated[int, Field(ge=1, le=1024)]
    """Sequences of one GPU batch."""
    max_batches: Annotated[int, Field(ge=1, le=32)] = 8
    """Blocks of 1 to so many GPU batches are tried."""
    grid_steps: Annotated[int, Field(ge=1, le=50)] = 20
    """Shares are multiples of 1/gridSteps."""
    attention: AttentionSite = AttentionSite.HOST
    weights: EngineWeights
    activations: EngineActivations
    linear: EngineLinear
    engine_memory: EngineMemory


class HeadGroupsParameters(Struct):
    """Slices of KV heads through two buffers of stagingBytes together, attended one after the other."""

    model_config = struct_config(
        cel(
            positive_quantity("self.stagingBytes"),
            "spec.placement.headGroups.stagingBytes must be greater than 0",
        )
    )

    staging_bytes: Quantity
    group_heads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """KV heads of a slice; absent: as many as fit, adapted to the context."""
    launch_seconds: DecimalString | None = None
    """What a slice costs besides its bytes and its attention. Present: the grouping of least predicted time;
    absent: the one with fewest slices."""


class ProfilePoint(Struct):
    """amount: new tokens (linear) or attended rows (attention); seconds: of one layer."""

    amount: Annotated[int, Field(ge=1, le=1_000_000_000)]
    seconds: DecimalString


def _curve(path: str) -> Json:
    return ATOMIC_LIST | rules(
        cel(
            "self.all(p, self.exists_one(o, o.amount == p.amount)) && self.map(p, p.amount).isSorted()",
            f"{path} must have ascending amounts, each once",
        )
    )


Linear = Annotated[
    tuple[ProfilePoint, ...],
    Field(min_length=1, max_length=16, json_schema_extra=_curve("spec.placement.wholeRequest.linear")),
]
GpuAttention = Annotated[
    tuple[ProfilePoint, ...],
    Field(min_length=1, max_length=16, json_schema_extra=_curve("spec.placement.wholeRequest.gpuAttention")),
]
CpuAttention = Annotated[
    tuple[ProfilePoint, ...],
    Field(max_length=16, json_schema_extra=_curve("spec.placement.wholeRequest.cpuAttention")),
]


class WholeRequestParameters(Struct):
    """Each request's cache on the gpu tier or in host memory, whole. The profile is measured offline; between
    two of its points it is a straight line, beyond the last there is no plan."""

    context_tokens: Annotated[int, Field(ge=1, le=1_048_576)]
    """Rows of the request that status.plan is stated for."""
    linear: Linear
    """By new tokens of a sub-batch."""
    gpu_attention: GpuAttention
    """By rows that a sub-batch's requests attend on the GPU."""
    cpu_attention: CpuAttention = ()
    """The same in host memory; absent: what the agent measures."""


def _typed(policy: PlacementPolicy) -> Json:
    name = policy.value
    return cel(
        f"(self.policy == '{name}') == has(self.{name})",
        f"spec.placement.{name} must be there if spec.placement.policy is {name}, and only then",
    )


class Placement(Struct):
    """Exact whatever the policy: all of it is part of the manifest's digest, since a change of placement is
    released like any other candidate, but none of it changes an answer."""

    model_config = struct_config(
        _typed(PlacementPolicy.FLEX_GEN),
        _typed(PlacementPolicy.HEAD_GROUPS),
        _typed(PlacementPolicy.WHOLE_REQUEST),
        cel(
            "self.policy == 'recency' || !has(self.parameters) || size(self.parameters) == 0",
            "spec.placement.parameters must be empty unless spec.placement.policy is recency",
        ),
    )

    policy: PlacementPolicy = PlacementPolicy.RECENCY
    parameters: Parameters = Field(default={})
    flex_gen: FlexGenParameters | None = None
    head_groups: HeadGroupsParameters | None = None
    whole_request: WholeRequestParameters | None = None
