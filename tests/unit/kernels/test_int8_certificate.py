"""The certified scan never violates its bound, rounding included; what it certifies is true."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvtier_kernels.ops.int8_sieve import (
    certified_mass,
    int8_rows,
    int8_scan_torch,
    int8_select_ref,
    int8_select_torch,
    radius_factor,
)

I32 = torch.int32
FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
# Sizes from subnormal to near overflow, and the ordinary ones most often.
SCALES = st.sampled_from(
    [1.0, 1.0, 1.0, 2.0**-149, 2.0**-130, 2.0**-70, 2.0**-20, 2.0**20, 2.0**60, 2.0**100]
)


def exact(q: Tensor, k: Tensor) -> float:
    """q.k as float64 rounds it once: each product of two float32 is exact in float64."""
    return math.fsum(a * b for a, b in zip(q.double().tolist(), k.double().tolist(), strict=True))


def scan(q: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds [C] of one query over keys [C, d]."""
    cq, step = int8_rows(keys)
    n = torch.tensor([len(keys)], dtype=I32)
    b = int8_scan_torch(q.view(1, 1, 1, -1), cq[None, None], step[None, None], n)
    return b.upper.flatten(), b.lower.flatten()


def assert_bounded(q: Tensor, keys: Tensor) -> None:
    upper, lower = scan(q, keys)
    for i, k in enumerate(keys):
        assert float(lower[i]) <= exact(q, k) <= float(upper[i]), i


@settings(max_examples=150)
@given(st.data(), st.sampled_from([1, 3, 16, 64]), SCALES, SCALES)
def test_the_bound_holds_for_any_finite_numbers(data: Any, d: int, q_size: float, k_size: float) -> None:
    values = st.floats(-1, 1, width=32)
    q = torch.tensor(data.draw(st.lists(values, min_size=d, max_size=d))) * q_size
    keys = torch.tensor(data.draw(st.lists(st.lists(values, min_size=d, max_size=d), min_size=1, max_size=3)))
    assert_bounded(q, keys * k_size)


@settings(max_examples=40)
@given(st.lists(FLOAT32, min_size=8, max_size=8), st.lists(FLOAT32, min_size=8, max_size=8))
def test_the_bound_holds_where_products_overflow(q: list[float], k: list[float]) -> None:
    assert_bounded(torch.tensor(q), torch.tensor([k]))


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_bound_holds_at_its_worst(d: int, dtype: torch.dtype) -> None:
    """Every channel half a step off, all errors of one sign, images at the end of their range."""
    g = torch.Generator().manual_seed(d)
    q = (torch.rand(d, generator=g) + 0.5).to(dtype).float()
    image = torch.randint(0, 127, (4, d), generator=g).float()
    image[:, 0] = 127
    worst = image + torch.where(torch.arange(d) > 0, 0.5 - 2.0**-10, 0.0)
    keys = torch.cat([worst, -worst, worst * 2.0**-90, worst * 3.0]) / 127
    assert_bounded(q, keys)
    upper, _ = scan(q, keys[:4])
    for i in range(4):
        reach = float(upper[i]) - exact(q, int8_rows(keys[i])[0].float() * int8_rows(keys[i])[1])
        assert exact(q, keys[i]) > float(upper[i]) - 0.02 * reach, "the worst case is not near the bound"


@settings(max_examples=100)
@given(st.lists(FLOAT32, min_size=5, max_size=5))
def test_an_image_is_half_a_step_off_at_most(k: list[float]) -> None:
    keys = torch.tensor([k])
    image, step = int8_rows(keys)
    for x, c in zip(keys[0].double().tolist(), image[0].tolist(), strict=True):
        assert abs(x - float(step) * c) <= float(step) / 2 * (1 + 2**-15)
        assert -127 <= c <= 127


def test_the_radius_is_half_a_step_and_hardly_more() -> None:
    """A bound can hold by being vacuous: this one adds less than 1 % for rounding."""
    assert all(0.5 < radius_factor(d) < 0.5045 for d in (64, 128, 256))
    g = torch.Generator().manual_seed(0)
    q, keys = torch.randn(64, generator=g), torch.randn(10, 64, generator=g)
    upper, lower = scan(q, keys)
    _, step = int8_rows(keys)
    torch.testing.assert_close((upper - lower) / 2, step * float(q.abs().sum()) * radius_factor(64))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_bounded_by_infinity_and_harms_no_other(bad: float) -> None:
    keys = torch.ones(3, 4)
    keys[1, 2] = bad
    upper, lower = scan(torch.ones(4), keys)
    assert (float(upper[1]), float(lower[1])) == (math.inf, -math.inf)
    assert float(upper[0]) == float(upper[2]) == pytest.approx(4.0, abs=0.04)
    clean, _ = scan(torch.tensor([1.0, bad, 1, 1]), torch.ones(1, 4))
    assert float(clean) == math.inf


def trace(seed: int, n: int = 400) -> tuple[Tensor, Tensor, Tensor]:
    """q [1,4,64], keys [2,n,64] with a few strong ones, scale: a peaked but not certain softmax."""
    g = torch.Generator().manual_seed(seed)
    q, keys = torch.randn(1, 4, 64, generator=g), torch.randn(2, n, 64, generator=g)
    strong = torch.randint(0, n, (12,), generator=g)
    keys[:, strong] += q[0, ::2, None] * 0.6
    return q, keys, torch.tensor(0.125)


@pytest.mark.parametrize("budget", [0, 1, 32, 200, 400])
@pytest.mark.parametrize("seed", range(4))
def test_certified_mass_is_a_true_lower_bound(seed: int, budget: int) -> None:
    q, keys, scale = trace(seed)
    n = torch.tensor([keys.shape[1]], dtype=I32)
    cq, step = int8_rows(keys[None])
    upper = int8_scan_torch(q[:, None], cq, step, n).upper
    chosen = torch.zeros(1, 2, keys.shape[1], dtype=torch.bool)
    if budget:
        one = torch.tensor([1], dtype=I32)
        s = int8_select_torch(upper, n, one, hk=2, k=budget, cap=budget)
        for h in range(2):
            chosen[0, h, s.units[s.indptr[h] : s.indptr[h + 1]].long()] = True
    logits = torch.einsum("hgd,hnd->hgn", q.view(2, 2, 64).double(), keys.double()) * float(scale)
    mine = logits.masked_fill(~chosen[0, :, None], -math.inf)
    lse = torch.logsumexp(mine, -1).flatten()[None].float()
    true = torch.exp(torch.logsumexp(mine, -1) - torch.logsumexp(logits, -1)).flatten()
    got = certified_mass(lse, upper[:, 0], chosen, n, scale=float(scale)).flatten()
    assert torch.all(got <= true + 1e-12)
    assert torch.all(got == 1) if budget == 400 else torch.all(got < 1)
    if budget >= 32:
        assert torch.all(got > true - 0.05), "a certificate that says nothing"
    if budget == 0:
        assert torch.all(got == 0)


def test_int4_would_certify_next_to_nothing() -> None:
    """The bound's use comes from its tightness: with 4 bits the same rule keeps far less."""
    q, keys, scale = trace(1)
    x = q[0, 0]
    step = keys[0].abs().amax(-1) / 7
    image = (keys[0] / step[:, None]).round()
    coarse = step * (image @ x) + step * x.abs().sum() / 2
    fine, _ = scan(x, keys[0])
    true = keys[0] @ x
    assert float((coarse - true).mean()) > 10 * float((fine - true).mean())
    assert float(scale) > 0


SCORES = st.sampled_from([-math.inf, -2.0, -0.5, -0.0, 0.0, 0.25, 1.0, 1.0, 3.0, math.inf, math.nan])


@settings(max_examples=150)
@given(st.data())
def test_the_choice_for_drafts_equals_the_reference_and_keeps_its_promises(data: Any) -> None:
    drafts, n, k, cap = (data.draw(st.integers(*r)) for r in ((1, 4), (0, 9), (0, 4), (1, 12)))
    live = data.draw(st.integers(0, drafts))
    flat = data.draw(st.lists(SCORES, min_size=drafts * 2 * n, max_size=drafts * 2 * n))
    upper = torch.tensor(flat).view(1, drafts, 2, n)
    args = {"hk": 1, "k": k, "cap": cap}
    n_t, live_t = torch.tensor([n], dtype=I32), torch.tensor([live], dtype=I32)
    got = int8_select_torch(upper, n_t, live_t, **args)
    want = int8_select_ref(upper, n_t, live_t, **args)
    for name, x in got._asdict().items():
        assert torch.equal(x.double(), want[name].double()), name

    units = got.units[: int(got.indptr[-1])].tolist()
    assert len(units) == (min(cap, n) if live else 0) and units == sorted(set(units))
    for j in range(live):
        mine = [u for u, m in zip(units, got.member.tolist(), strict=False) if m >> j & 1]
        assert len(mine) + int(got.dropped[0, 0, j]) == min(k, n)
        score = torch.nan_to_num(upper[0, j], nan=math.inf, posinf=math.inf, neginf=-math.inf).amax(0)
        left = [float(score[u]) for u in range(n) if u not in units]
        assert float(got.runner_up[0, 0, j]) == max(left, default=-math.inf)
        if k and n and cap >= live:
            assert int(score.argmax()) in units or float(score.max()) in [float(score[u]) for u in mine]


def test_the_best_of_the_maximum_alone_starves_drafts() -> None:
    """Eight drafts of very different size: the 16 best of the maximum are all one draft's."""
    g = torch.Generator().manual_seed(3)
    upper = torch.randn(1, 8, 1, 64, generator=g) * torch.tensor([100.0, *[1.0] * 7]).view(1, 8, 1, 1)
    own_best = set(upper[0, :, 0].argmax(-1).tolist())
    of_maximum = set(torch.topk(upper[0, :, 0].amax(0), 16).indices.tolist())
    assert len(own_best & of_maximum) < len(own_best) / 2
    n, live = torch.tensor([64], dtype=I32), torch.tensor([8], dtype=I32)
    got = int8_select_torch(upper, n, live, hk=1, k=4, cap=16)
    assert own_best <= set(got.units.tolist())
    # 8 drafts of 4 would be up to 32 units: what did not fit is said, draft by draft.
    assert int(got.dropped.sum()) > 0 and got.indptr.tolist() == [0, 16]
