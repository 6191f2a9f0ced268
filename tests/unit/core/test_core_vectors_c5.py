"""The worked numbers C5 of the specification: bytes, times, groups and states of exact placements."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from kvtier_core.cost import KvGeometry
from kvtier_core.errors import Reason
from kvtier_core.exact_placements import OverlapProfile
from kvtier_core.placements.flexgen import LayerTerms, Term
from kvtier_core.placements.headgroups import BUFFERS, members
from kvtier_core.placements.traffic import AttentionShape, NearLink
from kvtier_core.receiptcheck.states import (
    STATE_SCHEMA,
    Producer,
    StateMerge,
    StateReceipt,
    StateTerms,
    ranges_digest,
    states_checksum,
)
from kvtier_core.units import MIB, BytesPerSecond
from kvtier_kernels.ops.chunk_attention.ref import chunk_state_ref
from kvtier_kernels.ops.merge_states.ref import merge_state_ref
from kvtier_kernels.state import AttentionState, LogitFrame, finalize, merge
from tests.unit.core.blockkey_cases import binding
from tests.unit.core.fixture_f2 import refusal

GEOMETRY = KvGeometry(layers=4, query_heads=8, kv_heads=8, head_dim=128, k_bytes=2, v_bytes=2)
GROUPED = KvGeometry(layers=4, query_heads=32, kv_heads=8, head_dim=128, k_bytes=2, v_bytes=2)
SHAPE = AttentionShape(GEOMETRY, sequences=1, tokens=4096, activation_bytes=2)
LINK = NearLink(0.02e-3, BytesPerSecond.gb(24), 0.02e-3, BytesPerSecond.gb(24))
BINARY = NearLink(0.02e-3, BytesPerSecond.gib(24), 0.02e-3, BytesPerSecond.gib(24))
NEO = OverlapProfile(linear_0=0.65, linear_1=0.22, cpu_0=0.45, cpu_1=0.55, gpu_0=0.28)
FLEXGEN = LayerTerms(cpu_to_gpu=1.2, gpu_to_cpu=0.7, disk_to_cpu=0.9, cpu_to_disk=0.4, compute=1.1)

EXACT: dict[str, tuple[Callable[[], object], object]] = {
    "C5.01": (lambda: SHAPE.kv, 16777216),
    "C5.02": (lambda: SHAPE.slice(1), 2097152),
    "C5.03": (lambda: len(members(GEOMETRY, 1)) * SHAPE.slice(1), 16777216),
    "C5.04": (lambda: SHAPE.near, 8192),
    "C5.05": (lambda: [SHAPE.query, SHAPE.append, SHAPE.query], [2048, 4096, 2048]),
    "C5.06": (lambda: SHAPE.state, 4160),
    "C5.07": (lambda: SHAPE.returned(2), 8320),
    "C5.12": (NEO.balanced, True),
    "C5.14": (lambda: [len(members(GROUPED, group)) for group in (1, 2, 3, 8)], [8, 4, 3, 1]),
    "C5.15": (lambda: [SHAPE.slice(group) // MIB for group in (1, 2, 4, 8)], [2, 4, 8, 16]),
    "C5.16": (lambda: [BUFFERS * SHAPE.slice(1) // MIB, SHAPE.kv // MIB], [4, 16]),
    "C5.17": (lambda: (FLEXGEN.seconds, FLEXGEN.bound), (1.2, Term.CPU_TO_GPU)),
}
TIMES: dict[str, tuple[Callable[[], float], float, float]] = {
    "C5.08": (lambda: LINK.seconds(SHAPE) * 1e3, 0.040341, 5e-7),
    "C5.09": (lambda: BINARY.seconds(SHAPE) * 1e3, 0.040318, 5e-7),
    "C5.10": (NEO.layer_seconds, 1.15, 1e-12),
    "C5.11": (lambda: 4 * NEO.layer_seconds(), 4.60, 1e-12),
}


@pytest.mark.parametrize(("got", "expected"), EXACT.values(), ids=EXACT.keys())
def test_counts(got: Callable[[], object], expected: object) -> None:
    assert got() == expected


@pytest.mark.parametrize(("got", "expected", "within"), TIMES.values(), ids=TIMES.keys())
def test_times(got: Callable[[], float], expected: float, within: float) -> None:
    assert got() == pytest.approx(expected, abs=within)


def test_c5_13_all_stages_added_is_another_number() -> None:
    added = 4 * (NEO.linear_0 + NEO.linear_1 + NEO.cpu_0 + NEO.cpu_1 + NEO.gpu_0)
    assert added == pytest.approx(8.60)
    assert added > 1.8 * 4 * NEO.layer_seconds()


# C5.18 to C5.24: four rows with logits S and values V, one query, one head.

S = [1.2, -0.4, 0.9, 2.1]
V = [[1.0, 0.0], [0.5, -1.0], [-0.25, 2.0], [0.75, 0.5]]
DENSE = [0.6270437827, 0.5700500429]
FP64 = 1e-9
FP32 = 1e-6

State = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def of_rows(rows: Sequence[int]) -> State:
    """The fp64 reference over `rows`: keys whose first channel is the logit."""
    k = torch.tensor([[[S[row], 0.0]] for row in rows], dtype=torch.float64)
    v = torch.tensor([[V[row]] for row in rows], dtype=torch.float64)
    q = torch.tensor([[[1.0, 0.0]]], dtype=torch.float64)
    return chunk_state_ref(q, k, v, scale=1.0, q_pos0=9, row_pos0=0)


def output(state: State) -> list[float]:
    return [float(value) for value in (state[2] / state[1].unsqueeze(-1)).flatten()]


def both(first: State, second: State) -> State:
    return merge_state_ref(*first, *second)


def shipped(state: State) -> AttentionState:
    m, l, u = (part.float() for part in state)
    return AttentionState(m, l, u, LogitFrame(1.0))


def test_c5_18_dense_output() -> None:
    assert output(of_rows(range(4))) == pytest.approx(DENSE, abs=FP64)


def test_c5_19_two_partitions_equal_dense_in_the_reference_and_in_what_ships() -> None:
    parts = of_rows([0, 3]), of_rows([1, 2])
    assert output(both(*parts)) == pytest.approx(DENSE, abs=FP64)
    out, _ = finalize(merge(shipped(parts[0]), shipped(parts[1])))
    assert out.flatten().tolist() == pytest.approx(DENSE, abs=FP32)


def test_c5_20_merged_m_and_l() -> None:
    m, l, _ = both(of_rows([0, 3]), of_rows([1, 2]))
    assert (float(m), float(l)) == pytest.approx((2.1, 1.7898488703), abs=FP64)


def test_c5_21_every_order_of_merging_agrees() -> None:
    for order in itertools.permutations(range(4)):
        whole = of_rows([order[0]])
        kept = shipped(whole)
        for row in order[1:]:
            whole = both(whole, of_rows([row]))
            kept = merge(kept, shipped(of_rows([row])))
        assert output(whole) == pytest.approx(DENSE, abs=1e-9)
        assert finalize(kept)[0].flatten().tolist() == pytest.approx(DENSE, abs=FP32)


SOURCE = binding(request_generation=3)
TERMS = StateTerms(
    binding=SOURCE,
    request_id="r1",
    layer=0,
    query_to_kv=(0,),
    kv_heads=1,
    value_dim=2,
    first_query_position=9,
    queries=1,
    query_sha256=bytes(32),
    mask_sha256=bytes(32),
    position_epoch=0,
    score_scale=1.0,
    merge_revision="f32-chunk-merge/2",
    producers=(Producer("0", 1), Producer("1", 1)),
    visible=4,
)


def receipt(name: str, rows: Sequence[int]) -> StateReceipt:
    """Of a producer that attended these rows, a state of each; none is declared."""
    states = [shipped(of_rows([row])) for row in rows]
    if states:
        m, l, u = (torch.stack([getattr(one, part) for one in states]).numpy() for part in "mlu")
    else:
        m, l, u = np.full((1, 1, 1), -np.inf, np.float32), *(np.zeros(n, np.float32) for n in ONE)
    support = tuple((row, row + 1) for row in rows)
    return StateReceipt(
        tenant_namespace=SOURCE.tenant_namespace,
        request_id="r1",
        request_generation=3,
        checkpoint_generation=SOURCE.checkpoint_generation,
        layer=0,
        query_heads=(0, 1),
        kv_heads=(0, 1),
        query_to_kv=(0,),
        first_query_position=9,
        queries=1,
        query_sha256=bytes(32),
        support=support,
        support_sha256=ranges_digest(support),
        mask_sha256=bytes(32),
        position_contract_sha256=SOURCE.position_contract_sha256,
        position_epoch=0,
        score_scale=1.0,
        state_schema=STATE_SCHEMA,
        m=m,
        l=l,
        u=u,
        producer=name,
        producer_generation=1,
        merge_revision="f32-chunk-merge/2",
        checksum=states_checksum(m, l, u),
        completed=1.0,
    )


ONE = (1, 1, 1), (1, 1, 1, 2)


def reduced(parts: Sequence[Sequence[int]]) -> None:
    """What an engine does with two producers' states before it merges them."""
    reduction = StateMerge(TERMS)
    for at, rows in enumerate(parts):
        reduction.take(receipt(str(at), rows))
    reduction.close(sum(max(1, len(rows)) for rows in parts) * TERMS.state_bytes)


WRONG: dict[str, tuple[list[list[int]], list[float], Reason]] = {
    "C5.22-overlap": ([[0, 3], [1, 2, 3]], [0.6711164988, 0.5449411405], Reason.SUPPORT_OVERLAP),
    "C5.23-gap": ([[0, 3], []], [0.8222626243, 0.3554747513], Reason.SUPPORT_GAP),
}


@pytest.mark.parametrize(("parts", "wrong", "reason"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_partition_changes_the_output_and_is_refused(
    parts: list[list[int]], wrong: list[float], reason: Reason
) -> None:
    states = [of_rows(part) for part in parts if part]
    merged = states[0] if len(states) == 1 else both(*states)
    assert output(merged) == pytest.approx(wrong, abs=FP64)
    assert abs(wrong[0] - DENSE[0]) > 0.04
    reduced([[0, 3], [1, 2]])
    assert refusal(lambda: reduced(parts)) is reason


def test_c5_24_the_mean_of_two_right_outputs_is_wrong() -> None:
    """Its receipts have no m and no l: NO_NORMALISATION_MASS."""
    pairs = zip(output(of_rows([0, 3])), output(of_rows([1, 2])), strict=True)
    assert [(a + b) / 2 for a, b in pairs] == pytest.approx([0.3664431935, 0.8564898502], abs=FP64)
    only = dataclasses.replace(receipt("1", [1, 2]), m=None, l=None)
    only = dataclasses.replace(only, checksum=states_checksum(None, None, only.u))
    assert refusal(lambda: StateMerge(TERMS).take(only)) is Reason.NO_NORMALISATION_MASS
