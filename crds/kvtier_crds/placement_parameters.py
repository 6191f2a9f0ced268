"""A placement's typed parameters as the flat map that a manifest carries.

Why it exists: a manifest knows names and scalars, so that its schema outlives policies; equal parameters
written otherwise (64Mi or 67108864, 0.10 or 0.1) must give equal bytes. It must not know what a parameter
means.

Names are paths ("weights.bytesPerLayer"); quantities are bytes; decimals are canonical; the points of a
measured curve are "linear.00": "64:0.00065", in order. An absent parameter has no entry.
"""

from __future__ import annotations

from kvtier_crds.canonical import Scalar, canonical_decimal
from kvtier_crds.models.placements import (
    FlexGenParameters,
    HeadGroupsParameters,
    Placement,
    ProfilePoint,
    WholeRequestParameters,
)
from kvtier_crds.quantity import parse_bytes

ROOT = "spec.placement"


def placement_parameters(placement: Placement) -> dict[str, Scalar]:
    """Raises QuantityError for a number that none is, and ValueError when the block of the policy is missing
    (the API server refuses both before)."""
    blocks = {
        "flexGen": placement.flex_gen,
        "headGroups": placement.head_groups,
        "wholeRequest": placement.whole_request,
    }
    name = placement.policy.value
    if name not in blocks:
        return dict(placement.parameters)
    block = blocks[name]
    if isinstance(block, FlexGenParameters):
        return _flex_gen(block)
    if isinstance(block, HeadGroupsParameters):
        return _head_groups(block)
    if isinstance(block, WholeRequestParameters):
        return _whole_request(block)
    raise ValueError(f"{ROOT}.{name} must be there if {ROOT}.policy is {name}")


def _flex_gen(block: FlexGenParameters) -> dict[str, Scalar]:
    found: dict[str, Scalar] = {
        "promptTokens": block.prompt_tokens,
        "outputTokens": block.output_tokens,
        "batchSequences": block.batch_sequences,
        "maxBatches": block.max_batches,
        "gridSteps": block.grid_steps,
        "attention": block.attention.value,
        "weights.bytesPerLayer": parse_bytes(block.weights.bytes_per_layer, f"{ROOT}.flexGen.weights"),
        "activations.bytesPerToken": parse_bytes(
            block.activations.bytes_per_token, f"{ROOT}.flexGen.activations"
        ),
        "linear.prefillSecondsPerToken": canonical_decimal(block.linear.prefill_seconds_per_token),
        "linear.decodeSecondsPerSequence": canonical_decimal(block.linear.decode_seconds_per_sequence),
    }
    for part, split in (("weights", block.weights), ("activations", block.activations)):
        found[f"{part}.gpuPercent"] = split.gpu_percent
        found[f"{part}.cpuPercent"] = split.cpu_percent
        found[f"{part}.diskPercent"] = split.disk_percent
    memory = block.engine_memory
    for tier, size in (("gpu", memory.gpu), ("cpu", memory.cpu), ("disk", memory.disk)):
        found[f"engineMemory.{tier}"] = parse_bytes(size, f"{ROOT}.flexGen.engineMemory.{tier}")
    return found


def _head_groups(block: HeadGroupsParameters) -> dict[str, Scalar]:
    found: dict[str, Scalar] = {
        "stagingBytes": parse_bytes(block.staging_bytes, f"{ROOT}.headGroups.stagingBytes")
    }
    if block.group_heads is not None:
        found["groupHeads"] = block.group_heads
    if block.launch_seconds is not None:
        found["launchSeconds"] = canonical_decimal(block.launch_seconds)
    return found


def _whole_request(block: WholeRequestParameters) -> dict[str, Scalar]:
    found: dict[str, Scalar] = {"contextTokens": block.context_tokens}
    curves: tuple[tuple[str, tuple[ProfilePoint, ...]], ...] = (
        ("linear", block.linear),
        ("gpuAttention", block.gpu_attention),
        ("cpuAttention", block.cpu_attention),
    )
    for name, points in curves:
        for index, point in enumerate(points):
            found[f"{name}.{index:02}"] = f"{point.amount}:{canonical_decimal(point.seconds)}"
    return found
