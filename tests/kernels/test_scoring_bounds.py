"""What the scoring kernels promise beyond equality: bounds that hold, sides that turn only within rounding,
and a code past its codebook that is seen and never reads a neighbour's table."""

from __future__ import annotations

import math

import pytest
import torch

from kvtier_kernels.ops.int8_sieve import int8_rows, radius_factor
from kvtier_kernels.ops.int8_sieve.triton_impl import int8_scan_triton
from kvtier_kernels.ops.lsh.triton_impl import lsh_hash_triton
from kvtier_kernels.ops.pq.triton_impl import pq_score_triton
from kvtier_kernels.testing.interp_bf16 import correct_bf16
from tests.kernels.harness import DEVICE

SIZES = [1.0, 2.0**-149, 2.0**-120, 2.0**-60, 2.0**60, 2.0**100]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("d", [64, 96, 256])
def test_the_scan_holds_its_bound_with_all_errors_on_one_side(d: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(d)
    q = torch.randn(1, 1, 2, d, generator=g).to(dtype)
    image = torch.randint(0, 127, (len(SIZES), d), generator=g).float()
    image[:, 0] = 127
    off = torch.where(q[0, 0, 0].float() > 0, 0.499, -0.499)
    off[0] = 0
    keys = torch.cat(
        [(image + off) * torch.tensor(SIZES)[:, None], torch.randn(16 - len(SIZES), d, generator=g)]
    )
    cq, step = int8_rows(keys[None, None])
    n = torch.tensor([16], dtype=torch.int32)
    with correct_bf16():
        got = int8_scan_triton(*(x.to(DEVICE) for x in (q, cq, step, n)))
    for h in range(2):
        for c in range(16):
            s = math.fsum((q[0, 0, h].double() * keys[c].double()).tolist())
            assert float(got.lower[0, 0, h, c]) <= s <= float(got.upper[0, 0, h, c]), (h, c)
    width = (got.upper - got.lower)[0, 0, 0, 6:].cpu() / 2
    reach = step[0, 0, 6:] * float(q[0, 0, 0].float().abs().sum()) * radius_factor(d)
    torch.testing.assert_close(width, reach, rtol=1e-3, atol=0)


def test_sides_turn_only_where_the_product_is_within_rounding_of_zero() -> None:
    g = torch.Generator().manual_seed(9)
    x, planes = torch.randn(40, 64, generator=g), torch.randn(64, 40, generator=g)
    codes = lsh_hash_triton(x.to(DEVICE), planes.to(DEVICE), bits=8).cpu().long()
    bit = (codes.unsqueeze(-1) >> torch.arange(8)) & 1
    side = x.double() @ planes.double()
    room = 64 * 2.0**-24 * (x.abs().double() @ planes.abs().double())
    assert torch.all((bit.flatten(1) == (side > 0))[side.abs() > room])


def test_a_code_past_the_codebook_is_nan_in_its_heads_and_harms_no_other() -> None:
    lut = torch.randn(1, 2, 2, 3, 10)
    codes = torch.randint(0, 10, (1, 2, 2, 16), dtype=torch.uint8)
    codes[0, 0, 1, 5] = 10
    n = torch.tensor([16], dtype=torch.int32)
    score, lse = (x.cpu() for x in pq_score_triton(*(x.to(DEVICE) for x in (lut, codes, n)), scale=1.0))
    assert bool(lse[0, :3].isnan().all()) and bool(lse[0, 3:].isfinite().all())
    assert bool(score[0, 0, 5].isnan()) and bool(score[0, 1].isfinite().all())
