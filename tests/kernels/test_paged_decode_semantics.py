"""What is particular to paged decode: batch and splits, and the bits of the chunk path."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvtier_kernels.ops.chunk_attention import chunk_state
from kvtier_kernels.ops.paged_decode.spec import paged_decode_spec
from kvtier_kernels.state import AttentionState, finalize, merge_ascending

SPEC = paged_decode_spec()


@pytest.fixture(params=tuple(SPEC.implementations))
def run(request: pytest.FixtureRequest) -> Any:
    return SPEC.implementations[request.param]()


def case(id: str) -> dict[str, Any]:
    return SPEC.make_inputs(SPEC.case(id))


def bits(s: AttentionState) -> tuple[torch.Tensor, ...]:
    return s.m, s.l, s.u


def same(a: AttentionState, b: AttentionState) -> bool:
    return all(torch.equal(x, y) for x, y in zip(bits(a), bits(b), strict=True))


def test_the_batch_changes_no_bit(run: Any) -> None:
    inputs = case("split-edges")
    whole = run(**inputs)
    for b in range(3):
        one = {n: inputs[n][b : b + 1] for n in ("q", "page_table", "seq_lens")}
        got = run(**(inputs | one))
        assert all(torch.equal(x, y[b : b + 1]) for x, y in zip(bits(got), bits(whole), strict=True))


def test_another_split_is_another_order_but_the_same_answer(run: Any) -> None:
    inputs = case("three-splits")
    a, b = run(**inputs), run(**inputs, split_tokens=64)
    torch.testing.assert_close(finalize(a)[0], finalize(b)[0], rtol=0, atol=2e-5)
    torch.testing.assert_close(finalize(a)[1], finalize(b)[1], rtol=2e-5, atol=0)


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
