"""chunk_state against the fp64 reference, and what it does with hostile inputs."""

from __future__ import annotations

import math

import pytest
import torch

from kvtier_kernels.ops.chunk_attention import ShapeError, chunk_state, chunk_state_ref
from kvtier_kernels.state import LogitFrame, finalize


def rand(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


CASES = [
    pytest.param(1, 3, 1, 64, 1, 10, 10, id="one-query-one-row"),
    pytest.param(1, 9, 3, 64, 17, 40, 24, id="decode-g3"),
    pytest.param(5, 4, 4, 64, 20, 18, 16, id="mha-diagonal"),
    pytest.param(3, 16, 2, 128, 130, 300, 171, id="g8-d128-over-128-rows"),
    pytest.param(4, 7, 1, 64, 16, 2, 0, id="g7-causal-edge"),
    pytest.param(6, 6, 3, 64, 8, 0, 3, id="first-queries-see-nothing"),
    pytest.param(2, 3, 3, 64, 9, 5, 100, id="chunk-after-all-queries"),
    pytest.param(2, 3, 3, 64, 0, 5, 0, id="no-rows"),
]


@pytest.mark.parametrize(("nq", "hq", "hk", "d", "rows", "q0", "r0"), CASES)
def test_equals_the_reference(nq: int, hq: int, hk: int, d: int, rows: int, q0: int, r0: int) -> None:
    q, k, v = rand(nq, hq, d, seed=1), rand(rows, hk, d, seed=2), rand(rows, hk, d, seed=3)
    got = chunk_state(q, k, v, scale=d**-0.5, q_pos0=q0, row_pos0=r0)
    m, l, u = chunk_state_ref(q, k, v, scale=d**-0.5, q_pos0=q0, row_pos0=r0)
    torch.testing.assert_close(got.m.double(), m, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.l.double(), l, rtol=2e-5, atol=0)
    torch.testing.assert_close(got.u.double(), u, rtol=2e-5, atol=1e-4)


def test_gathered_positions_are_causal_by_position() -> None:
    q, k, v = rand(4, 6, 64, seed=4), rand(5, 2, 64, seed=5), rand(5, 2, 64, seed=6)
    positions = torch.tensor([0, 3, 10, 11, 40])
    got = chunk_state(q, k, v, scale=0.125, q_pos0=9, row_pos0=positions)
    m, _l, u = chunk_state_ref(q, k, v, scale=0.125, q_pos0=9, row_pos0=positions)
    torch.testing.assert_close(got.m.double(), m, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.u.double(), u, rtol=2e-5, atol=1e-5)
    consecutive = chunk_state(q, k, v, scale=0.125, q_pos0=9, row_pos0=7)
    as_tensor = chunk_state(q, k, v, scale=0.125, q_pos0=9, row_pos0=torch.arange(7, 12))
    assert torch.equal(consecutive.u, as_tensor.u)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf], ids=["nan", "inf", "-inf"])
@pytest.mark.parametrize("where", ["k", "v"])
def test_poison_in_a_hidden_row_reaches_nobody_else(poison: float, where: str) -> None:
    q, k, v = rand(8, 6, 64, seed=7), rand(64, 2, 64, seed=8), rand(64, 2, 64, seed=9)
    clean = chunk_state(q, k, v, scale=0.125, q_pos0=56, row_pos0=0)
    bad = {"k": k.clone(), "v": v.clone()}
    bad[where][60, 1, 3] = poison  # queries 0..3 (positions 56..59) must not see it
    got = chunk_state(q, bad["k"], bad["v"], scale=0.125, q_pos0=56, row_pos0=0)
    assert torch.equal(got.m[:4], clean.m[:4])
    assert torch.equal(got.l[:4], clean.l[:4])
    assert torch.equal(got.u[:4], clean.u[:4])
    assert torch.equal(got.u[:, :3], clean.u[:, :3])  # the other KV head
    if poison != -math.inf or where == "v":
        assert not torch.isfinite(got.u[4:, 3:]).all()  # and is not swallowed either


def test_rows_past_the_last_query_are_never_read() -> None:
    q, k, v = rand(1, 3, 64, seed=1), rand(256, 1, 64, seed=2), rand(256, 1, 64, seed=3)
    want = chunk_state(q, k, v, scale=0.125, q_pos0=99, row_pos0=0)
    k[100:], v[100:] = math.nan, math.nan
    got = chunk_state(q, k, v, scale=0.125, q_pos0=99, row_pos0=0)
    assert torch.equal(got.u, want.u)
    assert torch.equal(got.l, want.l)


@pytest.mark.parametrize("size", [1e2, 1e4, 1e18], ids=str)
def test_huge_logits_stay_finite(size: float) -> None:
    q, k, v = rand(2, 3, 64, seed=1) * size, rand(32, 1, 64, seed=2), rand(32, 1, 64, seed=3)
    o, lse = finalize(chunk_state(q, k, v, scale=0.125, q_pos0=40, row_pos0=0))
    assert torch.isfinite(o).all()
    assert torch.isfinite(lse).all()
    assert float(o.abs().max()) <= float(v.abs().max()) * (1 + 1e-6)


def test_a_row_of_minus_infinity_counts_nothing() -> None:
    q = torch.ones(1, 1, 64)
    k = torch.full((2, 1, 64), -math.inf)
    s = chunk_state(q, k, torch.ones(2, 1, 64), scale=0.125, q_pos0=5, row_pos0=0)
    assert torch.all(s.m == -math.inf)
    assert torch.all(s.l == 0)
    assert torch.all(s.u == 0)


def test_duplicate_keys_share_the_mass() -> None:
    k = rand(1, 1, 64, seed=2).expand(7, 1, 64)
    v = rand(7, 1, 64, seed=3)
    o, _ = finalize(chunk_state(rand(1, 1, 64, seed=1), k, v, scale=0.125, q_pos0=9, row_pos0=0))
    torch.testing.assert_close(o[0, 0], v.mean(0)[0], rtol=1e-5, atol=1e-6)


BAD = [
    pytest.param((1, 3, 64), (4, 2, 64), (4, 2, 64), "do not divide", id="heads"),
    pytest.param((1, 3, 64), (4, 3, 32), (4, 3, 32), "want q", id="head-dim"),
    pytest.param((1, 3, 64), (4, 3, 64), (5, 3, 64), "want q", id="kv-rows"),
]


@pytest.mark.parametrize(("qs", "ks", "vs", "text"), BAD)
def test_shapes_are_refused(qs: tuple[int, ...], ks: tuple[int, ...], vs: tuple[int, ...], text: str) -> None:
    with pytest.raises(ShapeError, match=text):
        chunk_state(torch.zeros(qs), torch.zeros(ks), torch.zeros(vs), scale=1.0, q_pos0=0, row_pos0=0)


@pytest.mark.parametrize("which", range(3), ids="qkv")
def test_memory_of_another_device_is_refused(which: int) -> None:
    given = [torch.zeros(1, 1, 64)] * 3
    given[which] = given[which].to("meta")
    with pytest.raises(ShapeError, match="CPU memory"):
        chunk_state(*given, scale=1.0, q_pos0=0, row_pos0=0)


def test_dtype_frame_and_positions_are_refused() -> None:
    x = torch.zeros(1, 1, 64)
    with pytest.raises(ShapeError, match="float32"):
        chunk_state(x.double(), x, x, scale=1.0, q_pos0=0, row_pos0=0)
    with pytest.raises(ShapeError, match="frame says"):
        chunk_state(x, x, x, scale=1.0, q_pos0=0, row_pos0=0, frame=LogitFrame(0.5))
    with pytest.raises(ShapeError, match="int64 positions"):
        chunk_state(x, x, x, scale=1.0, q_pos0=0, row_pos0=torch.zeros(2, dtype=torch.int64))
