"""N.3, items 8 to 24: one wrong number in the ledger of an offload has one name. VG.01: admission."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvtier_core.cost import GpuPeak, KvGeometry, kappa_crit
from kvtier_core.errors import CoreError, Reason
from kvtier_core.exact_ledger import (
    LayerLedger,
    LinkStatement,
    OffloadDemand,
    OffloadLedger,
    OffloadSupply,
    admit_offload,
    check_layer,
    check_ledger,
)
from kvtier_core.pipeline import LayerCost, Timeline, timeline
from kvtier_core.units import GIB, MIB, BytesPerSecond, BytesPerToken, FlopPerSecond, FlopPerToken

GEOMETRY = KvGeometry(layers=4, query_heads=8, kv_heads=8, head_dim=128, k_bytes=2, v_bytes=2)
LINK = BytesPerSecond.gib(24)
PREFILL, RATE = FlopPerToken(12.890625e9), FlopPerSecond.tera(300)
COLD = [4096, 3072, 0, 2048]
FIXED, COMPUTE = [0.068e-3, 0.148e-3, 0.0, 0.164e-3], [0.65e-3, 0.70e-3, 0.70e-3, 0.70e-3]


def w3(slots: int = 2) -> Timeline:
    return timeline(
        [
            LayerCost(LINK.seconds(cold * 4096) + fixed if cold else None, compute)
            for cold, fixed, compute in zip(COLD, FIXED, COMPUTE, strict=True)
        ],
        slots,
    )


def loop3() -> OffloadLedger:
    """The fixture of Loop 3 with the layer split of witness W3."""
    peak = GpuPeak(28 * MIB, 28 * MIB, 1 * MIB, 9472, 7 * MIB)
    return OffloadLedger(
        geometry=GEOMETRY,
        block_tokens=64,
        row_bytes=(4096,) * 4,
        layers=tuple(LayerLedger(4096, cold, cold // 64, cold * 4096) for cold in COLD),
        new_tokens=64,
        h2d=36 * MIB,
        d2h=MIB,
        d2h_received=MIB,
        descriptors=9472,
        requests=3,
        iteration_h2d=108 * MIB,
        amplification=1.0,
        link=LinkStatement(24.0, "GiB/s", LINK),
        prefill=PREFILL,
        compute=RATE,
        kappa=kappa_crit(PREFILL, GEOMETRY.token, LINK, RATE),
        timeline=w3(),
        queue=1.4e-3,
        ttft=4.9e-3,
        staging=28 * MIB,
        staging_fixed=False,
        peak=peak,
        peak_total=peak.total,
        pinned=64 * MIB,
        pinned_budget=64 * MIB,
    )


def timed(ledger: OffloadLedger, layer: int, **change: float) -> OffloadLedger:
    layers = list(ledger.timeline.layers)
    layers[layer] = replace(layers[layer], **change)
    return replace(ledger, timeline=Timeline(tuple(layers), ledger.timeline.slots))


def rows(ledger: OffloadLedger, layer: int, **change: int) -> OffloadLedger:
    layers = list(ledger.layers)
    layers[layer] = replace(layers[layer], **change)
    return replace(ledger, layers=tuple(layers))


MUTATIONS: dict[str, tuple[Callable[[OffloadLedger], OffloadLedger], Reason]] = {
    "8 block tokens 63": (lambda it: replace(it, block_tokens=63), Reason.BLOCK_COVERAGE),
    "8 a block is missing": (lambda it: rows(it, 0, blocks=63), Reason.BLOCK_COVERAGE),
    "9 row of K only": (lambda it: replace(it, row_bytes=(2048,) * 4), Reason.PAYLOAD_GEOMETRY),
    "10 h2d is not its receipts": (lambda it: replace(it, h2d=it.h2d - 4096), Reason.TRAFFIC_MISMATCH),
    "10 a receipt is missing": (lambda it: rows(it, 3, received=0), Reason.TRAFFIC_MISMATCH),
    "11 d2h omitted": (lambda it: replace(it, d2h=0), Reason.TRAFFIC_MISMATCH),
    "11 d2h receipts omitted": (lambda it: replace(it, d2h_received=0), Reason.TRAFFIC_MISMATCH),
    "12 three requests as one": (lambda it: replace(it, iteration_h2d=36 * MIB), Reason.ITERATION_TRAFFIC),
    "13 descriptors in payload": (
        lambda it: replace(it, h2d=it.h2d + it.descriptors),
        Reason.LEDGER_MIXED,
    ),
    "13 descriptors dropped": (lambda it: replace(it, descriptors=0), Reason.LEDGER_MIXED),
    "14 computed before its rows": (
        lambda it: timed(it, 3, data_ready=it.timeline.layers[3].compute_start + 1e-4),
        Reason.SCHEDULE_VIOLATION,
    ),
    "15 slot reused too early": (
        lambda it: timed(it, 3, fetch_start=it.timeline.layers[1].compute_end - 1e-4),
        Reason.SLOT_REUSE,
    ),
    "16 reset at a resident layer": (
        lambda it: timed(replace(it, timeline=w3(3)), 2, engine_free=0.0),
        Reason.SCHEDULE_VIOLATION,
    ),
    "17 GB for GiB": (
        lambda it: replace(it, link=LinkStatement(24.0, "GB/s", it.link.used)),
        Reason.UNIT_MISMATCH,
    ),
    "17 GiB computed as GB": (
        lambda it: replace(
            it,
            link=LinkStatement(24.0, "GiB/s", BytesPerSecond.gb(24)),
            kappa=kappa_crit(PREFILL, GEOMETRY.token, BytesPerSecond.gb(24), RATE),
        ),
        Reason.UNIT_MISMATCH,
    ),
    "17 no unit": (lambda it: replace(it, link=LinkStatement(24.0, "", LINK)), Reason.UNIT_MISMATCH),
    "18 first token before its pipeline": (lambda it: replace(it, ttft=4.8e-3), Reason.LATENCY_LEDGER),
    "19 fixed staging below the largest layer": (
        lambda it: replace(it, staging_fixed=True, staging=31 * MIB),
        Reason.STAGING_TOO_SMALL,
    ),
    "19 variable staging below two neighbours": (
        lambda it: replace(it, staging=27 * MIB),
        Reason.STAGING_TOO_SMALL,
    ),
    "20 peak without hits": (
        lambda it: replace(it, peak=replace(it.peak, persistent_hits=0), peak_total=it.peak_total - 28 * MIB),
        Reason.PEAK_INCOMPLETE,
    ),
    "20 total below its terms": (
        lambda it: replace(it, peak_total=it.peak_total - MIB),
        Reason.PEAK_INCOMPLETE,
    ),
    "21 pinned over budget": (lambda it: replace(it, pinned=64 * MIB + 1), Reason.ADMISSION_PINNED),
    "22 amplification below one": (lambda it: replace(it, amplification=0.5), Reason.READ_AMPLIFICATION),
    "23 negative stall": (lambda it: timed(it, 1, stall=-1e-3), Reason.SCHEDULE_VIOLATION),
    "24 kappa by row": (
        lambda it: replace(it, kappa=kappa_crit(PREFILL, BytesPerToken(GEOMETRY.row.value), LINK, RATE)),
        Reason.UNIT_MISMATCH,
    ),
}


def test_the_fixture_itself_is_sound_with_either_staging() -> None:
    check_ledger(loop3())
    fixed = replace(loop3().peak, staging=32 * MIB)
    check_ledger(replace(loop3(), staging_fixed=True, staging=32 * MIB, peak=fixed, peak_total=fixed.total))
    check_ledger(replace(loop3(), timeline=w3(3)))


@pytest.mark.parametrize(("mutate", "reason"), MUTATIONS.values(), ids=MUTATIONS.keys())
def test_each_wrong_number_is_named(mutate: Callable[[OffloadLedger], OffloadLedger], reason: Reason) -> None:
    with pytest.raises(CoreError) as error:
        check_ledger(mutate(loop3()))
    assert error.value.reason is reason, error.value


def test_each_item_of_the_catalogue_from_8_to_24_is_there() -> None:
    assert {int(name.split()[0]) for name in MUTATIONS} == set(range(8, 25))


FRAME = LayerLedger(rows=1000, cold=700, blocks=3, received=3 * 256 * 4096)
FRAMES: dict[str, tuple[LayerLedger, int, Reason]] = {
    "8 a block is missing": (replace(FRAME, blocks=2), FRAME.received, Reason.BLOCK_COVERAGE),
    "8 more rows than there are": (replace(FRAME, rows=600), FRAME.received, Reason.BLOCK_COVERAGE),
    "10 a block of K only": (
        replace(FRAME, received=FRAME.received - 128 * 4096),
        FRAME.received,
        Reason.TRAFFIC_MISMATCH,
    ),
    "10 counted short": (FRAME, FRAME.received - 4096, Reason.TRAFFIC_MISMATCH),
}


@pytest.mark.parametrize(("layer", "counted", "reason"), FRAMES.values(), ids=FRAMES.keys())
def test_a_frames_own_ledger_is_held_to_the_same(layer: LayerLedger, counted: int, reason: Reason) -> None:
    check_layer(FRAME, FRAME.received, 256, 4096)
    with pytest.raises(CoreError) as error:
        check_layer(layer, counted, 256, 4096)
    assert error.value.reason is reason


DEMAND = OffloadDemand(True, 60 * GIB, 70 * GIB, 20 * GIB, 10e9, 5e9, 2)
SUPPLY = OffloadSupply(64 * GIB, 100 * GIB, 32 * GIB, 24e9, 20e9, 4)
VIOLATIONS: dict[str, tuple[dict[str, object], Reason]] = {
    "support": ({"support_recoverable": False}, Reason.SUPPORT_GAP),
    "gpu": ({"gpu_peak": SUPPLY.gpu + 1}, Reason.NO_DESTINATION_CAPACITY),
    "host": ({"host_peak": SUPPLY.host + 1}, Reason.NO_DESTINATION_CAPACITY),
    "pinned": ({"pinned": SUPPLY.pinned + 1}, Reason.ADMISSION_PINNED),
    "h2d": ({"h2d": SUPPLY.h2d + 1}, Reason.CREDIT_PRESSURE),
    "d2h": ({"d2h": SUPPLY.d2h + 1}, Reason.CREDIT_PRESSURE),
    "jobs": ({"jobs": SUPPLY.jobs + 1}, Reason.QUEUE_FULL),
}


@pytest.mark.parametrize(("change", "reason"), VIOLATIONS.values(), ids=VIOLATIONS.keys())
def test_vg_01_each_single_violation_is_refused(change: dict[str, object], reason: Reason) -> None:
    admit_offload(DEMAND, SUPPLY)
    with pytest.raises(CoreError) as error:
        admit_offload(replace(DEMAND, **change), SUPPLY)  # type: ignore[arg-type]
    assert error.value.reason is reason


def test_exactly_what_is_free_is_admitted() -> None:
    names = [field.name for field in dataclasses.fields(SUPPLY)]
    values = [getattr(SUPPLY, name) for name in names]
    admit_offload(OffloadDemand(True, *values), SUPPLY)
