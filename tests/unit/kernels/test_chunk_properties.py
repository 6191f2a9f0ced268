"""Properties over random geometry, fills and cuts: reference values, merges of any cut, bounds of o."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_kernels.ops.chunk_attention import chunk_state, chunk_state_ref
from kvtier_kernels.state import AttentionState, finalize, merge_ascending


@st.composite
def problems(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """(q, k, v, position of the first query): rows start at 0 and some may lie after all queries."""
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    hk, group = draw(st.integers(1, 3)), draw(st.integers(1, 8))
    d = draw(st.sampled_from([16, 64]))
    nq, rows = draw(st.integers(1, 4)), draw(st.integers(1, 70))
    spread = draw(st.sampled_from([0.1, 1.0, 8.0]))
    q = torch.randn(nq, hk * group, d, generator=g) * spread
    k, v = (torch.randn(rows, hk, d, generator=g) for _ in range(2))
    return q, k, v, draw(st.integers(0, rows + 3))


def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q0: int, r0: int = 0) -> AttentionState:
    return chunk_state(q, k, v, scale=q.shape[2] ** -0.5, q_pos0=q0, row_pos0=r0)


@settings(max_examples=60, deadline=None)
@given(problems())
def test_equals_the_reference(problem: tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]) -> None:
    q, k, v, q0 = problem
    got = run(q, k, v, q0)
    m, l, u = chunk_state_ref(q, k, v, scale=q.shape[2] ** -0.5, q_pos0=q0, row_pos0=0)
    size = 1 + m.abs().nan_to_num(neginf=0)
    assert torch.all((got.m.double() - m).abs().nan_to_num(nan=0) <= 2e-6 * size)
    assert torch.all((got.l.double() - l).abs() <= 2e-5 * size * l)
    assert torch.all((got.u.double() - u).abs() <= (2e-5 * size * l).unsqueeze(-1) * 5)


@settings(max_examples=60, deadline=None)
@given(problems(), st.lists(st.integers(0, 70), max_size=4))
def test_any_cut_merges_to_the_whole(
    problem: tuple[torch.Tensor, torch.Tensor, torch.Tensor, int], cuts: list[int]
) -> None:
    q, k, v, q0 = problem
    rows = k.shape[0]
    at = sorted({0, rows, *(c for c in cuts if c < rows)})
    parts = [run(q, k[a:b], v[a:b], q0, a) for a, b in itertools.pairwise(at)]
    got, got_lse = finalize(merge_ascending(parts))
    want, want_lse = finalize(run(q, k, v, q0))
    torch.testing.assert_close(got, want, rtol=0, atol=5e-5)
    torch.testing.assert_close(got_lse, want_lse, rtol=1e-5, atol=1e-5)
    assert float(got.abs().max()) <= float(v.abs().max()) * (1 + 1e-5)
