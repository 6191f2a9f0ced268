"""What the interpreter gets wrong or right that our tests lean on: bfloat16 and int32 wrap."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from kvtier_kernels.testing.interp_bf16 import correct_bf16, decode, encode


@triton.jit
def dot_kernel(a_ptr, b_ptr, out_ptr):
    i = tl.arange(0, 16)
    at = i[:, None] * 16 + i[None, :]
    a, b = tl.load(a_ptr + at), tl.load(b_ptr + at)
    tl.store(out_ptr + at, tl.dot(a, b, input_precision="ieee"))


@triton.jit
def cast_kernel(x_ptr, out_ptr):
    i = tl.arange(0, 1024)
    tl.store(out_ptr + i, tl.load(x_ptr + i).to(tl.bfloat16))


@triton.jit
def wrap_kernel(page_ptr, out_ptr, stride):
    page = tl.load(page_ptr)
    tl.store(out_ptr, (page * stride).to(tl.int64))
    tl.store(out_ptr + 1, page.to(tl.int64) * stride)


def bf16_dot() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(16, 16, generator=g).bfloat16(), torch.randn(16, 16, generator=g).bfloat16()
    out = torch.empty(16, 16)
    dot_kernel[(1,)](a, b, out)
    return out, a.float() @ b.float()


def test_canary_the_interpreter_still_needs_the_bf16_correction() -> None:
    """When this fails, upstream has learnt bfloat16: delete kvtier_kernels.testing.interp_bf16."""
    got, want = bf16_dot()
    assert not torch.allclose(got, want, rtol=0.1, atol=0.1)


def test_the_correction_makes_dot_and_cast_right_and_is_undone() -> None:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(1024, generator=g)
    out = torch.empty(1024, dtype=torch.bfloat16)
    with correct_bf16():
        got, want = bf16_dot()
        cast_kernel[(1,)](x, out)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-5)
    assert torch.equal(out, x.bfloat16())
    assert not torch.allclose(bf16_dot()[0], want, rtol=0.1, atol=0.1)


@pytest.mark.parametrize(
    "value", [0.0, -0.0, 1.0, 1.00390625, 1.01171875, 3.4e38, float("inf"), float("nan"), 1e-40]
)
def test_encode_rounds_to_nearest_even_like_torch(value: float) -> None:
    x = torch.tensor([value])
    want = x.bfloat16().view(torch.int16).numpy().view("uint16")
    got = encode(x.numpy())
    assert (got == want).all() or value != value
    torch.testing.assert_close(
        torch.from_numpy(decode(got)), x.bfloat16().float(), rtol=0, atol=0, equal_nan=True
    )


def test_the_interpreter_reproduces_int32_wrap() -> None:
    """So that a far case can fail for a kernel that multiplies ids in int32 (test_int32_wrap)."""
    out = torch.zeros(2, dtype=torch.int64)
    wrap_kernel[(1,)](torch.tensor([2**20], dtype=torch.int32), out, 2**12)
    assert out.tolist() == [0, 2**32]
