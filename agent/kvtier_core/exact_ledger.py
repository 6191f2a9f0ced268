"""The ledger of one exact offload: every number that a plan or a receipt states, held against the others.

Why it exists: bytes, times and peaks of an offload follow from a few facts, so that one wrong number can be
told from the rest and named (specification N.3, items 8 to 24; F18). A frame whose rows come from storage
holds its own against `check_layer`. Pure: it must not know tiers, clocks
or requests' content.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvtier_core.cost import (
    DESCRIPTOR_BYTES,
    GpuPeak,
    KvGeometry,
    blocks,
    fixed_staging,
    kappa_crit,
    variable_staging,
)
from kvtier_core.errors import CoreError, Reason
from kvtier_core.pipeline import Timeline, check_timeline
from kvtier_core.units import BytesPerSecond, FlopPerSecond, FlopPerToken

_RELATIVE = 1e-9


@dataclass(frozen=True, slots=True)
class LayerLedger:
    """One layer of one request. rows: of the legal support; cold: of those not visible on the device;
    blocks: transfer blocks that were moved; received: bytes that the receipts of those blocks state."""

    rows: int
    cold: int
    blocks: int
    received: int


@dataclass(frozen=True, slots=True)
class LinkStatement:
    """A bandwidth as a person or a probe states it, and the bytes per second that were computed with."""

    value: float
    unit: str
    used: BytesPerSecond


@dataclass(frozen=True, slots=True)
class OffloadLedger:
    """What is stated. Bytes of one request unless named; times in seconds.

    row_bytes: B_row of each layer. h2d, d2h: payload without descriptors. iteration_h2d: of all `requests`,
    which are alike. amplification: A_read. staging: bytes reserved; staging_fixed: whether as two fixed
    slots. ttft: reported; queue: the scheduler's. kappa: kappa_crit as stated."""

    geometry: KvGeometry
    block_tokens: int
    row_bytes: tuple[int, ...]
    layers: tuple[LayerLedger, ...]
    new_tokens: int
    h2d: int
    d2h: int
    d2h_received: int
    descriptors: int
    requests: int
    iteration_h2d: int
    amplification: float
    link: LinkStatement
    prefill: FlopPerToken
    compute: FlopPerSecond
    kappa: float
    timeline: Timeline
    queue: float
    ttft: float
    staging: int
    staging_fixed: bool
    peak: GpuPeak
    peak_total: int
    pinned: int
    pinned_budget: int


@dataclass(frozen=True, slots=True)
class OffloadDemand:
    """F18, left side: what an exact offload needs. Bandwidths in bytes per second."""

    support_recoverable: bool
    gpu_peak: int
    host_peak: int
    pinned: int
    h2d: float
    d2h: float
    jobs: int


@dataclass(frozen=True, slots=True)
class OffloadSupply:
    """F18, right side: what is free."""

    gpu: int
    host: int
    pinned: int
    h2d: float
    d2h: float
    jobs: int


def admit_offload(demand: OffloadDemand, supply: OffloadSupply) -> None:
    """F18; guards in its order: SUPPORT_GAP, NO_DESTINATION_CAPACITY (GPU, then host), ADMISSION_PINNED,
    CREDIT_PRESSURE (H2D, then D2H), QUEUE_FULL. The facts name resource, wanted and available."""
    if not demand.support_recoverable:
        raise CoreError(Reason.SUPPORT_GAP, "a row of the support is recoverable from no tier")
    for resource, wanted, available, reason in (
        ("gpu", demand.gpu_peak, supply.gpu, Reason.NO_DESTINATION_CAPACITY),
        ("host", demand.host_peak, supply.host, Reason.NO_DESTINATION_CAPACITY),
        ("pinned", demand.pinned, supply.pinned, Reason.ADMISSION_PINNED),
        ("h2d", demand.h2d, supply.h2d, Reason.CREDIT_PRESSURE),
        ("d2h", demand.d2h, supply.d2h, Reason.CREDIT_PRESSURE),
        ("jobs", demand.jobs, supply.jobs, Reason.QUEUE_FULL),
    ):
        if wanted > available:
            raise CoreError(
                reason,
                f"{resource}: {wanted} wanted, {available} free",
                {"resource": resource, "wanted": wanted, "available": available},
            )


def check_ledger(ledger: OffloadLedger) -> None:
    """The first statement that does not follow from the others, as CoreError; nothing when all do. Guards
    in order:

    PAYLOAD_GEOMETRY, BLOCK_COVERAGE, LEDGER_MIXED, TRAFFIC_MISMATCH, ITERATION_TRAFFIC, READ_AMPLIFICATION,
    UNIT_MISMATCH (link, then kappa), SLOT_REUSE and SCHEDULE_VIOLATION, LATENCY_LEDGER, STAGING_TOO_SMALL,
    PEAK_INCOMPLETE, ADMISSION_PINNED."""
    _check_payload(ledger)
    _check_traffic(ledger)
    _check_units(ledger)
    check_timeline(ledger.timeline)
    if ledger.ttft < ledger.queue + ledger.timeline.service - _RELATIVE:
        raise CoreError(
            Reason.LATENCY_LEDGER,
            f"a first token after {ledger.ttft} s precedes its queue and pipeline",
            {"queue": ledger.queue, "pipeline": ledger.timeline.service},
        )
    _check_capacity(ledger)


def _cold_bytes(ledger: OffloadLedger) -> list[int]:
    """M_H2D of each layer (F5)."""
    pairs = zip(ledger.layers, ledger.row_bytes, strict=True)
    return [layer.blocks * ledger.block_tokens * row for layer, row in pairs]


def _check_payload(ledger: OffloadLedger) -> None:
    count = ledger.geometry.layers
    if len(ledger.row_bytes) != count or len(ledger.layers) != count:
        raise CoreError(Reason.PAYLOAD_GEOMETRY, f"{count} layers need {count} rows of each statement")
    for index, (layer, row) in enumerate(zip(ledger.layers, ledger.row_bytes, strict=True)):
        if row != ledger.geometry.row.value:
            raise CoreError(
                Reason.PAYLOAD_GEOMETRY,
                f"layer {index}: a row of K and V is {ledger.geometry.row.value} bytes, not {row}",
            )
        check_cover(layer, ledger.block_tokens)


def check_cover(layer: LayerLedger, block_tokens: int) -> None:
    """BLOCK_COVERAGE unless the blocks are just those of the rows that are not here."""
    if not 0 <= layer.cold <= layer.rows or layer.blocks != blocks(layer.cold, block_tokens):
        raise CoreError(
            Reason.BLOCK_COVERAGE,
            f"{layer.blocks} blocks of {block_tokens} rows do not cover just {layer.cold} rows",
        )


def check_layer(layer: LayerLedger, counted: int, block_tokens: int, row_bytes: int) -> None:
    """One layer of one frame. counted: bytes that its receipt states. BLOCK_COVERAGE; TRAFFIC_MISMATCH unless
    the blocks that came are as large as their rows, K and V, and the receipt says so."""
    check_cover(layer, block_tokens)
    moved = layer.blocks * block_tokens * row_bytes
    if layer.received != moved or counted != moved:
        raise CoreError(
            Reason.TRAFFIC_MISMATCH,
            f"{counted} bytes counted, {layer.received} in blocks that came, {moved} are what was to move",
        )


def _check_traffic(ledger: OffloadLedger) -> None:
    received = sum(layer.received for layer in ledger.layers)
    moved = sum(_cold_bytes(ledger))
    count = sum(layer.blocks for layer in ledger.layers)
    count += ledger.geometry.layers * blocks(ledger.new_tokens, ledger.block_tokens)
    if ledger.descriptors != count * DESCRIPTOR_BYTES or ledger.h2d == received + ledger.descriptors:
        raise CoreError(
            Reason.LEDGER_MIXED,
            f"{ledger.h2d} bytes of payload and {ledger.descriptors} of descriptors are two ledgers",
            {"received": received, "blocks": count},
        )
    if ledger.h2d != received or received != moved:
        raise CoreError(
            Reason.TRAFFIC_MISMATCH,
            f"H2D of {ledger.h2d} bytes, {received} in receipts, {moved} in blocks",
        )
    new_blocks = blocks(ledger.new_tokens, ledger.block_tokens)
    written = sum(new_blocks * ledger.block_tokens * row for row in ledger.row_bytes)
    if ledger.d2h != written or ledger.d2h_received != written:
        raise CoreError(
            Reason.TRAFFIC_MISMATCH,
            f"D2H of {ledger.d2h} bytes, {ledger.d2h_received} in receipts, {written} in blocks",
        )
    if ledger.iteration_h2d != ledger.requests * ledger.h2d:
        raise CoreError(
            Reason.ITERATION_TRAFFIC,
            f"{ledger.requests} requests of {ledger.h2d} bytes are not {ledger.iteration_h2d}",
        )
    logical = sum(layer.cold * row for layer, row in zip(ledger.layers, ledger.row_bytes, strict=True))
    if ledger.amplification < 1.0 or not _same(ledger.amplification * logical, moved):
        raise CoreError(
            Reason.READ_AMPLIFICATION,
            f"{moved} bytes for {logical} are no amplification of {ledger.amplification}",
        )


def _check_units(ledger: OffloadLedger) -> None:
    units = {"GiB/s": BytesPerSecond.gib, "GB/s": BytesPerSecond.gb}
    build = units.get(ledger.link.unit)
    if build is None or not _same(build(ledger.link.value).value, ledger.link.used.value):
        raise CoreError(
            Reason.UNIT_MISMATCH,
            f"{ledger.link.value} {ledger.link.unit} are not {ledger.link.used.value} bytes per second",
        )
    kappa = kappa_crit(ledger.prefill, ledger.geometry.token, ledger.link.used, ledger.compute)
    if not _same(kappa, ledger.kappa):
        raise CoreError(
            Reason.UNIT_MISMATCH, f"kappa_crit is {kappa} with a token of all layers, not {ledger.kappa}"
        )


def _check_capacity(ledger: OffloadLedger) -> None:
    cold = _cold_bytes(ledger)
    needed = fixed_staging(cold) if ledger.staging_fixed else variable_staging(cold)
    if ledger.staging < needed:
        raise CoreError(
            Reason.STAGING_TOO_SMALL,
            f"{ledger.staging} bytes of staging do not hold {needed}",
            {"needed": needed},
        )
    pairs = zip(ledger.layers, ledger.row_bytes, strict=True)
    hits = sum((layer.rows - layer.cold) * row for layer, row in pairs)
    peak = ledger.peak
    if peak.persistent_hits != hits or peak.staging < needed or ledger.peak_total != peak.total:
        raise CoreError(
            Reason.PEAK_INCOMPLETE,
            f"a peak of {ledger.peak_total} bytes leaves out some of {peak.total} with {hits} of hits",
            {"hits": hits, "staging": needed},
        )
    if ledger.pinned > ledger.pinned_budget:
        raise CoreError(
            Reason.ADMISSION_PINNED,
            f"{ledger.pinned} pinned bytes exceed the budget of {ledger.pinned_budget}",
            {"wanted": ledger.pinned, "available": ledger.pinned_budget},
        )


def _same(first: float, second: float) -> bool:
    return math.isclose(first, second, rel_tol=_RELATIVE, abs_tol=0.0)
