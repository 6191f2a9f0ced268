"""One file of semantics for every implementation of paged decode, driven by its registry entry."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvtier_kernels.ops.chunk_attention import ShapeError, chunk_state
from kvtier_kernels.ops.paged_decode.spec import paged_decode_spec
from kvtier_kernels.spec import Case
from kvtier_kernels.state import AttentionState, finalize, merge_ascending
from kvtier_kernels.testing.interp_bf16 import correct_bf16

SPEC = paged_decode_spec()
BACKENDS = tuple(SPEC.implementations)
# Gates of o against fp64, as a factor on max|V|: p is rounded once to the working dtype.
O_GATE = {"float32": 1e-5, "float16": 2**-10, "bfloat16": 2**-8}

Run = Callable[..., AttentionState]


@pytest.fixture(params=BACKENDS)
def run(request: pytest.FixtureRequest) -> Run:
    implementation = SPEC.implementations[request.param]()

    def call(**inputs: Any) -> AttentionState:
        with correct_bf16():
            return implementation(**inputs)

    return call


def case(id: str) -> dict[str, Any]:
    return SPEC.make_inputs(next(c for c in SPEC.cases if c.id == id))


def bits(s: AttentionState) -> tuple[torch.Tensor, ...]:
    return s.m, s.l, s.u


def same(a: AttentionState, b: AttentionState) -> bool:
    return all(torch.equal(x, y) for x, y in zip(bits(a), bits(b), strict=True))


@pytest.mark.parametrize("case", [pytest.param(c, id=c.id) for c in SPEC.cases])
def test_equals_the_fp64_reference(run: Run, case: Case) -> None:
    """lse is the sharpest: it never sees the rounding of p, and masking errors that hide in o show."""
    inputs = SPEC.make_inputs(case)
    got = run(**inputs)
    m, l, u = SPEC.reference(**inputs)
    lse = m + torch.log(l)
    o, got_lse = finalize(got)
    empty = l == 0
    want_o = torch.where(empty.unsqueeze(-1), 0.0, u / torch.where(empty, 1.0, l).unsqueeze(-1))
    bound = 2e-5 * (1 + m.abs().nan_to_num(posinf=0, neginf=0))
    assert torch.equal(got.l == 0, empty)
    assert torch.equal(got_lse[empty].double(), lse[empty])
    assert torch.all((got_lse.double() - lse)[~empty].abs() <= bound[~empty])
    finite = torch.isfinite(want_o)
    assert torch.equal(torch.isfinite(o), finite)
    rows = torch.nan_to_num(inputs["v_cache"].float(), nan=0.0, posinf=0.0, neginf=0.0)
    gate = O_GATE[case.dtype] * max(1.0, float(rows.abs().max()))
    if finite.any():
        assert float((o.double() - want_o)[finite].abs().max()) <= gate


@pytest.mark.parametrize("id", ["nan-beyond-the-length", "nan-in-unmapped-pages"])
def test_poison_outside_the_rows_changes_no_bit(run: Run, id: str) -> None:
    dirty = case(id)
    clean = dirty | {n: torch.nan_to_num(dirty[n], 0.0, 0.0, 0.0) for n in ("k_cache", "v_cache")}
    assert same(run(**dirty), run(**clean))


def test_where_pages_lie_changes_no_bit(run: Run) -> None:
    inputs = case("three-splits")
    table = inputs["page_table"]
    order = table.flatten().long()
    straight = inputs | {
        "k_cache": inputs["k_cache"][order],
        "v_cache": inputs["v_cache"][order],
        "page_table": torch.arange(order.numel(), dtype=torch.int32).view_as(table),
    }
    assert same(run(**inputs), run(**straight))


def test_the_batch_changes_no_bit(run: Run) -> None:
    inputs = case("split-edges")
    whole = run(**inputs)
    for b in range(3):
        one = {n: inputs[n][b : b + 1] for n in ("q", "page_table", "seq_lens")}
        got = run(**(inputs | one))
        assert all(torch.equal(x, y[b : b + 1]) for x, y in zip(bits(got), bits(whole), strict=True))


def test_running_again_gives_the_same_bits(run: Run) -> None:
    inputs = case("d128-gqa8")
    assert same(run(**inputs), run(**inputs))


def test_another_split_is_another_order_but_the_same_answer(run: Run) -> None:
    inputs = case("three-splits")
    a, b = run(**inputs), run(**inputs, split_tokens=64)
    torch.testing.assert_close(finalize(a)[0], finalize(b)[0], rtol=0, atol=2e-5)
    torch.testing.assert_close(finalize(a)[1], finalize(b)[1], rtol=2e-5, atol=0)


BAD = [
    pytest.param({"seq_lens": torch.tensor([1], dtype=torch.int64)}, "int32", id="dtype-of-lengths"),
    pytest.param({"seq_lens": torch.tensor([-1], dtype=torch.int32)}, r"\[0, ", id="negative-length"),
    pytest.param({"seq_lens": torch.tensor([999], dtype=torch.int32)}, r"\[0, ", id="past-the-table"),
    pytest.param({"split_tokens": 24}, "whole pages", id="split-inside-a-page"),
    pytest.param({"q": torch.zeros(1, 8, 64)}, "heads", id="heads"),
]


@pytest.mark.parametrize(("change", "text"), BAD)
def test_bad_inputs_are_refused(run: Run, change: dict[str, Any], text: str) -> None:
    with pytest.raises(ShapeError, match=text):
        run(**(case("one-token") | change))


def test_torch_gives_the_bits_of_the_chunk_path() -> None:
    """What the agent computes from chunks in its tiers is what paged decode computes from pages."""
    inputs = case("three-splits")
    n = int(inputs["seq_lens"][0])
    pages = inputs["page_table"][0].long()
    k = inputs["k_cache"][pages].flatten(0, 1)[:n]
    v = inputs["v_cache"][pages].flatten(0, 1)[:n]
    scale = inputs["scale"]
    parts = [
        chunk_state(inputs["q"], k[a : a + 256], v[a : a + 256], scale=scale, q_pos0=n - 1, row_pos0=a)
        for a in range(0, n, 256)
    ]
    assert same(SPEC.implementations["torch"]()(**inputs), merge_ascending(parts))


def test_costs_are_counted_from_shapes() -> None:
    inputs = case("d128-gqa8")  # 430 rows, one KV head of 128, 8 query heads, 2 requests, float32
    assert SPEC.bytes_moved(inputs) == 2 * 430 * 128 * 4 + 2 * 8 * 128 * 4 + 2 * 8 * 130 * 4
    assert SPEC.flops(inputs) == 4 * 430 * 8 * 128
    assert math.isclose(SPEC.flops(inputs) / (2 * 430 * 128 * 4), 4.0)
