"""The placement policy of a manifest, as values with types.

Why it exists: a manifest carries names and scalars; a policy wants numbers in their units, and a parameter
that is missing or none must be refused before anything is placed by it. It must not decide anything.

The names are those that the operator writes (`kvtier_crds.placement_parameters`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvtier_core.errors import CoreError, Reason
from kvtier_core.exact_placements import PlacementRefused
from kvtier_core.placements.flexgen import AttentionSite, EngineConstants, Split
from kvtier_core.placements.wholerequest import Curve
from kvtier_crds.manifest import Geometry, Placement

MAX_POINTS = 16


@dataclass(frozen=True, slots=True)
class Recency:
    """The newest chunks in the fastest tier that has room."""

    name: str = "recency"


@dataclass(frozen=True, slots=True)
class FlexGen:
    """prompt, output: tokens of a sequence; batch: sequences of a GPU batch. site: where rows outside the GPU
    are attended."""

    prompt: int
    output: int
    batch: int
    max_batches: int
    grid: int
    site: AttentionSite
    engine: EngineConstants
    name: str = "flexGen"


@dataclass(frozen=True, slots=True)
class HeadGroups:
    """staging: bytes of both buffers. launch: seconds of a slice, None: not declared. group_heads: None:
    adaptive."""

    staging: int
    group_heads: int | None
    launch: float | None
    name: str = "headGroups"


@dataclass(frozen=True, slots=True)
class WholeRequest:
    """context: rows of the request that a plan is stated for. cpu: None: as the node measures it."""

    context: int
    linear: Curve | None
    gpu: Curve | None
    cpu: Curve | None
    name: str = "wholeRequest"


Policy = Recency | FlexGen | HeadGroups | WholeRequest


def policy_of(placement: Placement) -> Policy:
    """MANIFEST_INVALID for a policy that this version does not know, or a parameter that is missing, of
    another type or out of range; it names which."""
    read = _Reader(placement.policy, placement.parameters)
    try:
        if placement.policy == "recency":
            return Recency()
        if placement.policy == "flexGen":
            return _flex_gen(read)
        if placement.policy == "headGroups":
            return _head_groups(read)
        if placement.policy == "wholeRequest":
            return WholeRequest(
                read.count("contextTokens"),
                read.curve("linear"),
                read.curve("gpuAttention"),
                read.curve("cpuAttention"),
            )
    except PlacementRefused as refused:
        raise CoreError(Reason.MANIFEST_INVALID, f"placement {placement.policy}: {refused}") from refused
    raise CoreError(
        Reason.MANIFEST_INVALID,
        f"placement.policy {placement.policy} cannot run; legal: recency, flexGen, headGroups, wholeRequest",
        {"policy": placement.policy},
    )


def check_policy(placement: Placement, geometry: Geometry) -> None:
    """What `policy_of` refuses, and a slice of more KV heads than the model has: MANIFEST_INVALID."""
    policy = policy_of(placement)
    heads = policy.group_heads if isinstance(policy, HeadGroups) else None
    if heads is not None and heads > geometry.kv_heads:
        raise CoreError(
            Reason.MANIFEST_INVALID,
            f"placement headGroups: groupHeads {heads} of {geometry.kv_heads} KV heads",
        )


def _flex_gen(read: _Reader) -> FlexGen:
    engine = EngineConstants(
        weight_bytes=read.count("weights.bytesPerLayer", least=0),
        weights=read.split("weights"),
        activation_bytes=read.count("activations.bytesPerToken", least=0),
        activations=read.split("activations"),
        prefill_seconds=read.decimal("linear.prefillSecondsPerToken"),
        decode_seconds=read.decimal("linear.decodeSecondsPerSequence"),
        memory=(
            read.count("engineMemory.gpu", least=0),
            read.count("engineMemory.cpu", least=0),
            read.count("engineMemory.disk", least=0),
        ),
    )
    site = read.text("attention")
    if site not in list(AttentionSite):
        raise read.wrong("attention", "device or host")
    return FlexGen(
        prompt=read.count("promptTokens"),
        output=read.count("outputTokens"),
        batch=read.count("batchSequences"),
        max_batches=read.count("maxBatches", most=32),
        grid=read.count("gridSteps", most=50),
        site=AttentionSite(site),
        engine=engine,
    )


def _head_groups(read: _Reader) -> HeadGroups:
    heads = read.count("groupHeads") if read.has("groupHeads") else None
    launch = read.decimal("launchSeconds") if read.has("launchSeconds") else None
    return HeadGroups(read.count("stagingBytes"), heads, launch)


@dataclass(frozen=True, slots=True)
class _Reader:
    policy: str
    values: Mapping[str, object]

    def has(self, name: str) -> bool:
        return name in self.values

    def wrong(self, name: str, legal: str) -> CoreError:
        return CoreError(
            Reason.MANIFEST_INVALID,
            f"placement {self.policy}: {name} is {self.values.get(name)!r}, not {legal}",
            {"field": f"placement.parameters.{name}"},
        )

    def count(self, name: str, *, least: int = 1, most: int = 2**62) -> int:
        value = self.values.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.wrong(name, f"an integer from {least} to {most}")
        return value

    def text(self, name: str) -> str:
        value = self.values.get(name)
        if not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def decimal(self, name: str) -> float:
        return self._seconds(name, self.text(name))

    def split(self, part: str) -> Split:
        percents = [self.count(f"{part}.{tier}Percent", least=0, most=100) for tier in ("gpu", "cpu", "disk")]
        if sum(percents) != 100:
            raise self.wrong(f"{part}.gpuPercent", f"a part of 100 beside {percents[1:]}")
        return Split(percents[0] / 100, percents[1] / 100, percents[2] / 100)

    def curve(self, name: str) -> Curve | None:
        """The points "amount:seconds" from .00 on; None when there is not one."""
        points: list[tuple[int, float]] = []
        for index in range(MAX_POINTS):
            key = f"{name}.{index:02}"
            if not self.has(key):
                break
            amount, colon, seconds = self.text(key).partition(":")
            if not colon or not amount.isdigit():
                raise self.wrong(key, "amount:seconds")
            points.append((int(amount), self._seconds(key, seconds)))
        return Curve(tuple(points)) if points else None

    def _seconds(self, name: str, text: str) -> float:
        whole, _, part = text.partition(".")
        if not (whole + part).isdigit() or not whole.isascii() or not part.isascii():
            raise self.wrong(name, "a plain decimal of seconds")
        return float(text)
