"""Cost formulas against the vectors C2 and C3 (rows that pass there), and units that cannot be mixed."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from kvtier_core import cost
from kvtier_core.cost import GpuPeak, HostLedger, KvGeometry, Regime, Traffic
from kvtier_core.errors import CoreError, Reason
from kvtier_core.layout import ChunkLayout
from kvtier_core.units import (
    GIB,
    KIB,
    MIB,
    BytesPerRow,
    BytesPerSecond,
    BytesPerToken,
    FlopPerSecond,
    FlopPerToken,
)

TOY = KvGeometry(layers=2, query_heads=4, kv_heads=2, head_dim=4, k_bytes=2, v_bytes=2)
LARGE = KvGeometry(layers=32, query_heads=32, kv_heads=8, head_dim=128, k_bytes=2, v_bytes=2)
LOOP3 = KvGeometry(layers=4, query_heads=8, kv_heads=8, head_dim=128, k_bytes=2, v_bytes=2)
LINK = BytesPerSecond.gib(24)
PREFILL, RATE = FlopPerToken(12.890625e9), FlopPerSecond.tera(300)
SURVIVORS = [("gpu", True, 5), ("host", True, 5), ("disk", True, 4), ("proxy", True, 5)]


def refused(reason: Reason, call: Callable[..., object], *args: object) -> None:
    with pytest.raises(CoreError) as error:
        call(*args)
    assert error.value.reason is reason, error.value


def sentinel(layer: int, head: int, position: int, value: bool) -> list[int]:
    return [
        100000 * layer + 10000 * head + 10 * position + channel + (500000 if value else 0)
        for channel in range(4)
    ]


def sentinel_payload() -> tuple[ChunkLayout, list[torch.Tensor]]:
    """Two layers of eight rows as `ChunkLayout` lays them, each scalar naming its place."""
    layout = ChunkLayout(kv_heads=2, chunk_tokens=8, head_dim=4)
    payloads = []
    for layer in range(2):
        rows = [
            torch.tensor(
                [[sentinel(layer, head, row, value) for head in range(2)] for row in range(8)],
                dtype=torch.float32,
            )
            for value in (False, True)
        ]
        payloads.append(layout.assemble(*rows))
    return layout, payloads


EXACT: dict[str, tuple[Callable[[], object], object]] = {
    "C2.01": (lambda: TOY.payload(8), 512),
    "C2.02": (lambda: LARGE.token.value, 131072),
    "C2.03": (lambda: LARGE.payload(32768), 4 * GIB),
    "C2.04": (lambda: [TOY.kv_head_of(head) for head in range(4)], [0, 0, 1, 1]),
    "C2.05": (lambda: sentinel_payload()[1][1][0, 1, 3].tolist(), [110030, 110031, 110032, 110033]),
    "C2.06": (lambda: sentinel_payload()[1][1][1, 1, 3].tolist(), [610030, 610031, 610032, 610033]),
    "C2.11": (
        lambda: [LARGE.payload(tokens) for tokens in (1, 128, 4096, 32768)],
        [128 * KIB, 16 * MIB, 512 * MIB, 4 * GIB],
    ),
    "C3.01": (lambda: LOOP3.row.value, 4096),
    "C3.02": (lambda: cost.covering_bytes(64, 64, LOOP3.row), 262144),
    "C3.03": (lambda: LOOP3.payload(4096), 67108864),
    "C3.04": (lambda: LOOP3.payload(2304), 37748736),
    "C3.05": (lambda: cost.written_bytes(64, [LOOP3.row] * 4), 1048576),
    "C3.06": (lambda: cost.iteration_bytes([[16 * MIB, 12 * MIB, 0, 8 * MIB]] * 3), 113246208),
    "C3.07": (
        lambda: [cost.blocks(tokens, 64) for tokens in (4 * 2304, 4 * 64, 4 * 4096)],
        [144, 4, 256],
    ),
    "C3.08": (lambda: [Traffic(0, count).descriptors for count in (144, 4, 148)], [9216, 256, 9472]),
    "C3.09": (lambda: cost.read_amplification(cost.covering_bytes(2304, 64, LOOP3.row), 2304 * 4096), 1.0),
    "C3.10": (
        lambda: cost.read_amplification(
            cost.covering_bytes(1, 64, LOOP3.row), cost.logical_bytes(1, LOOP3.row)
        ),
        64.0,
    ),
    "C3.11": (lambda: LOOP3.payload(4096) - LOOP3.payload(2304), 29360128),
    "C3.15": (lambda: [4096 / 64, 2304 / 64], [64, 36]),
    "C3.17": (
        lambda: cost.regime(2304, 64, cost.kappa_crit(PREFILL, LOOP3.token, LINK, RATE)),
        Regime.COMPUTE,
    ),
    "C3.25": (lambda: cost.fixed_staging([16 * MIB, 12 * MIB, 0, 8 * MIB]), 32 * MIB),
    "C3.30": (
        lambda: [
            sum(cold := [16, 12, 0, 8]),
            cost.fixed_staging(cold) // 2,
            cost.variable_staging(cold),
        ],
        [36, 16, 28],
    ),
    "C3.41": (lambda: cost.chunked_seconds([2.0, 3.0, 1.0], 5), 18.0),
    "C3.43": (lambda: [cost.partial_overlap_seconds(2.0, 3.0, eta) for eta in (0, 0.5, 1)], [5.0, 4.0, 3.0]),
    "C5.14": (lambda: [LARGE.head_groups(group) for group in (1, 2, 3, 8)], [8, 4, 3, 1]),
}


@pytest.mark.parametrize(("call", "expected"), EXACT.values(), ids=EXACT.keys())
def test_vectors_that_are_equal(call: Callable[[], object], expected: object) -> None:
    assert call() == expected


NEAR: dict[str, tuple[Callable[[], float], float, float]] = {
    "C3.12": (lambda: LINK.seconds(36 * MIB) * 1e3, 1.465, 5e-4),
    "C3.13": (lambda: (BytesPerSecond.gib(1).value / BytesPerSecond.gb(1).value - 1) * 100, 7.4, 0.05),
    "C3.14": (lambda: cost.kappa_crit(PREFILL, LOOP3.token, LINK, RATE), 67.584, 5e-4),
    "C3.16 transfer": (lambda: cost.ideal_transfer_seconds(4096, LOOP3.token, LINK) * 1e3, 2.604, 5e-4),
    "C3.16 compute": (lambda: cost.ideal_compute_seconds(64, PREFILL, RATE) * 1e3, 2.750, 5e-4),
    "C3.22": (lambda: 1.845 - LINK.seconds(36 * MIB) * 1e3, 0.380, 6e-4),
    "C3.24": (lambda: 64.26 - 28 - cost.variable_staging([16, 12, 0, 8]), 8.26, 1e-9),
    "C3.23": (
        lambda: float(cost.fixed_staging([16, 12, 0, 8]) - cost.variable_staging([16, 12, 0, 8])),
        4.0,
        1e-9,
    ),
    "VI.02": (lambda: Traffic(0, 148).descriptors / LOOP3.payload(4096), 1.411438e-4, 1e-9),
}


@pytest.mark.parametrize(("call", "expected", "tolerance"), NEAR.values(), ids=NEAR.keys())
def test_vectors_within_their_tolerance(call: Callable[[], float], expected: float, tolerance: float) -> None:
    assert call() == pytest.approx(expected, abs=tolerance)


def test_c2_07_a_packed_row_keeps_its_original_position() -> None:
    layout, payloads = sentinel_payload()
    k, _ = layout.rows(payloads[1], 8)
    packed = k[[0, 3, 7], 1]
    assert int(packed[1, 0]) % 1000 // 10 == 3


def test_c2_08_element_counts() -> None:
    proxy, gather = torch.zeros(2, 2, 8, 2), torch.zeros(3, 4)
    partial = [torch.zeros(()), torch.zeros(()), torch.zeros(4)]
    assert [proxy.numel(), gather.numel(), sum(part.numel() for part in partial)] == [64, 12, 6]


def test_c2_10_proxies_and_stale_epochs_keep_nothing_alive() -> None:
    assert sum(valid and epoch == 5 and tier != "proxy" for tier, valid, epoch in SURVIVORS) == 2


def test_c3_42_chunked_staging_is_what_an_event_simulation_gives() -> None:
    for stages, chunks in itertools.product(([2.0, 3.0, 1.0], [1.0], [0.5, 0.5, 4.0, 0.1]), (1, 2, 5)):
        done = [0.0] * len(stages)
        for _ in range(chunks):
            before = 0.0
            for place, seconds in enumerate(stages):
                done[place] = max(done[place], before) + seconds
                before = done[place]
        assert cost.chunked_seconds(stages, chunks) == pytest.approx(done[-1])


def test_ledgers_keep_their_terms_apart_and_add_up() -> None:
    traffic = Traffic(payload=1000, blocks=2, protocol=7)
    assert (traffic.descriptors, traffic.total) == (128, 1135)
    assert GpuPeak(1, 2, 4, 8, 16).total == 31
    assert HostLedger(1, 2, 4, 8, 16, 32).total == 63


@pytest.mark.parametrize(
    "swap",
    [
        (FlopPerSecond(1.0), LOOP3.token, LINK, RATE),
        (PREFILL, LOOP3.row, LINK, RATE),
        (PREFILL, 16384, LINK, RATE),
        (PREFILL, LOOP3.token, 24 * GIB, RATE),
        (PREFILL, LOOP3.token, RATE, RATE),
        (PREFILL, LOOP3.token, LINK, LINK),
        (PREFILL, LOOP3.token, LINK, 300e12),
    ],
    ids=[
        "rate for work",
        "row for token",
        "bare bytes",
        "bare link",
        "flop for link",
        "link for flop",
        "bare flop",
    ],
)
def test_the_regime_takes_no_operand_of_another_unit(swap: tuple[object, ...]) -> None:
    refused(Reason.UNIT_MISMATCH, cost.kappa_crit, *swap)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("unit", [BytesPerSecond, FlopPerSecond, FlopPerToken, BytesPerToken, BytesPerRow])
def test_a_unit_holds_no_impossible_value(unit: Callable[[float], object], value: float) -> None:
    refused(Reason.UNIT_MISMATCH, unit, value)


REFUSALS: dict[str, tuple[Reason, Callable[[], object]]] = {
    "less than needed moved": (Reason.READ_AMPLIFICATION, lambda: cost.read_amplification(99, 100)),
    "nothing needed": (Reason.READ_AMPLIFICATION, lambda: cost.read_amplification(1, 0)),
    "overlap above one": (Reason.COST_MODEL, lambda: cost.partial_overlap_seconds(1, 1, 1.1)),
    "no chunk": (Reason.COST_MODEL, lambda: cost.chunked_seconds([1.0], 0)),
    "no stage": (Reason.COST_MODEL, lambda: cost.chunked_seconds([], 1)),
    "no new token": (Reason.COST_MODEL, lambda: cost.regime(1, 0, 1.0)),
    "uneven heads": (Reason.PAYLOAD_GEOMETRY, lambda: KvGeometry(1, 3, 2, 4, 2, 2)),
    "no V": (Reason.PAYLOAD_GEOMETRY, lambda: KvGeometry(1, 2, 2, 4, 2, 0)),
    "group of no head": (Reason.PAYLOAD_GEOMETRY, lambda: TOY.head_groups(0)),
    "group of query heads": (Reason.PAYLOAD_GEOMETRY, lambda: TOY.head_groups(4)),
    "no such head": (Reason.HEAD_MAPPING_MISMATCH, lambda: TOY.kv_head_of(4)),
}


@pytest.mark.parametrize(("reason", "call"), REFUSALS.values(), ids=REFUSALS.keys())
def test_what_no_formula_can_mean_is_refused(reason: Reason, call: Callable[[], object]) -> None:
    refused(reason, call)
