"""What arithmetic says of a cache on a node: kappa_crit, the schedule for rows that lie away, the stall per
token.

Why it exists: a user reads three numbers in a status and must be able to redo them, so each comes with the
measured inputs it was made of. Pure: it must not know tiers, sessions or the status it ends in.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtier_core.cost import KvGeometry, blocks, kappa_crit
from kvtier_core.errors import CoreError, Reason
from kvtier_core.exact_placements import PlacementRefused
from kvtier_core.placements.traffic import AttentionShape, NearLink, check_near_seconds
from kvtier_core.schedules import Choice, LayerWork, Machine, choose, near_transfer
from kvtier_core.units import BytesPerSecond, FlopPerSecond, FlopPerToken


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """context: rows of each layer that a decode step attends; resident: of those on the compute device;
    block_tokens: rows of a transfer block. link: measured, from the tier that holds the others to the
    compute device; None: nobody measured it. setup: seconds of a transfer besides its bytes. row_seconds:
    attention over one row of one layer on the device, near_seconds: in the tier that holds the others
    (None: it cannot). staging: bytes. prefill, compute: arithmetic of a new token and its measured rate;
    either None: no kappa_crit."""

    geometry: KvGeometry
    context: int
    resident: int
    block_tokens: int
    link: BytesPerSecond | None
    setup: float
    row_seconds: float
    staging: int
    near_seconds: float | None = None
    head_group: int | None = None
    prefill: FlopPerToken | None = None
    compute: FlopPerSecond | None = None


@dataclass(frozen=True, slots=True)
class CachePlan:
    """kappa: dimensionless, None when an operand is unknown. choice: None when no schedule could be priced
    or is legal, `refused` then says why, an alternative at a time. stall: seconds per token."""

    kappa: float | None
    choice: Choice | None
    refused: dict[str, str]
    inputs: dict[str, str]

    @property
    def stall(self) -> float | None:
        return None if self.choice is None else self.choice.chosen.stall

    @property
    def schedule(self) -> str | None:
        return None if self.choice is None else self.choice.chosen.schedule.value


def plan_cache(given: PlanInputs) -> CachePlan:
    """The plan of one decode step over `context` rows. COST_MODEL for impossible counts."""
    if not 0 <= given.resident <= given.context or given.block_tokens < 1 or given.row_seconds < 0.0:
        raise CoreError(Reason.COST_MODEL, f"{given.resident} of {given.context} rows cannot be resident")
    geometry = given.geometry
    cold = given.context - given.resident
    count = blocks(cold, given.block_tokens)
    near = None if given.near_seconds is None else cold * given.near_seconds
    shape = AttentionShape(geometry, 1, given.context, geometry.k_bytes)
    layer = LayerWork(
        cold_bytes=count * given.block_tokens * geometry.row.value,
        blocks=count,
        compute=given.context * given.row_seconds,
        near=near,
        state_bytes=shape.state,
        sent_bytes=shape.query + shape.append,
    )
    machine = Machine(given.link, given.setup, given.staging, geometry.kv_heads, given.head_group)
    if near is not None and given.link is not None:
        _check_near(shape, near_transfer(layer, given.setup, given.link), given.setup, given.link)
    kappa = None
    if given.link is not None and given.prefill is not None and given.compute is not None:
        kappa = kappa_crit(given.prefill, geometry.token, given.link, given.compute)
    choice: Choice | None = None
    refused: dict[str, str] = {}
    try:
        choice = choose([layer] * geometry.layers, machine)
    except CoreError as error:
        refused = error.facts
    return CachePlan(kappa, choice, refused, _stated(given, cold, choice))


def _check_near(shape: AttentionShape, stated: float, setup: float, link: BytesPerSecond) -> None:
    """That the schedule's transfers are those of the shape: one producer's states, both ways paid."""
    try:
        check_near_seconds(shape, NearLink(setup, link, setup, link), 1, stated)
    except PlacementRefused as refused:
        raise CoreError(Reason.COST_MODEL, str(refused)) from refused


def _stated(given: PlanInputs, cold: int, choice: Choice | None) -> dict[str, str]:
    """The numbers that the plan came from, each with its unit in its name."""
    stated = {
        "contextTokens": str(given.context),
        "coldTokens": str(cold),
        "bytesPerToken": str(given.geometry.token.value),
        "linkBytesPerSecond": "not measured" if given.link is None else f"{given.link.value:.6g}",
        "setupSeconds": f"{given.setup:.6g}",
        "attentionSecondsPerRow": f"{given.row_seconds:.6g}",
        "stagingBytes": str(given.staging),
    }
    if given.near_seconds is not None:
        stated["nearSecondsPerRow"] = f"{given.near_seconds:.6g}"
    if given.prefill is not None:
        stated["prefillFlopPerToken"] = f"{given.prefill.value:.6g}"
    if given.compute is not None:
        stated["computeFlopPerSecond"] = f"{given.compute.value:.6g}"
    if choice is not None:
        stated["reason"] = choice.reason.value
        stated["serviceSeconds"] = f"{choice.chosen.service:.6g}"
    return stated
