"""exp, tanh and sums of attention states, as they are defined: each rounding of them is written down here.

Why it exists: a library's exp and the order of its sums differ between versions and processors, and a state
must not. Here all are made of single operations that IEEE 754 defines, so that plain tensor operations and
the compiled kernels give the same bits. They are part of the numerics version. It must not know what is
summed.

exp: x is reduced by the nearest multiple of ln 2 (Cody and Waite, in two steps), the rest is the polynomial
of Cephes' expf. Within 2 units in the last place; 0 below LOWEST_EXPONENT, where float32 has no normal
numbers. tanh: below 5/8 the polynomial of Cephes' tanhf, from there on (1 - e) / (1 + e) with e =
exp(-2 |x|), of x's sign; within 2 units in the last place. Sums: lane i adds numbers i, i + 16, i + 32 and so
on, ascending; then lanes i and i + 8, i + 4, i + 2, i + 1.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

LANES = 16
LOG2_E = 1.44269504088896341
MAGIC = 12582912.0
"""1.5 x 2^23: a small number plus this is rounded to an integer, which stands in the low bits."""
LN2_HIGH = 0.693359375
LN2_LOW = -2.12194440e-4
POLYNOMIAL = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
TANH_POLYNOMIAL = (
    -5.70498872745e-3,
    2.06390887954e-2,
    -5.37397155531e-2,
    1.33314422036e-1,
    -3.33332819422e-1,
)
TANH_SPLIT = 0.625
LOWEST_EXPONENT = -87.0
ONE_BITS = 0x3F800000


def exp_plain(x: Tensor) -> Tensor:
    """exp(x), float32, for x <= 0; NaN of NaN and of +inf."""
    t = x * LOG2_E + MAGIC
    n = t - MAGIC
    r = x - n * LN2_HIGH
    r -= n * LN2_LOW
    y = r * POLYNOMIAL[0] + POLYNOMIAL[1]
    for coefficient in POLYNOMIAL[2:]:
        y = y.mul_(r).add_(coefficient)
    y = y.mul_(r * r).add_(r).add_(1.0)
    power = (t.view(torch.int32) << 23).add_(ONE_BITS).view(torch.float32)
    return y.mul_(power).masked_fill_(x < LOWEST_EXPONENT, 0.0)


def tanh_plain(x: Tensor) -> Tensor:
    """tanh(x), float32; NaN of NaN."""
    size = x.abs()
    e = exp_plain(size * -2.0)
    square = x * x
    y = square * TANH_POLYNOMIAL[0] + TANH_POLYNOMIAL[1]
    for coefficient in TANH_POLYNOMIAL[2:]:
        y = y.mul_(square).add_(coefficient)
    y = y.mul_(square).mul_(x).add_(x)
    return torch.where(size < TANH_SPLIT, y, ((1.0 - e) / (e + 1.0)).copysign(x))


def sum_plain(x: Tensor) -> Tensor:
    """Sum over the last dimension, float32."""
    spare = -x.shape[-1] % LANES
    padded = pad(x, (0, spare)) if spare else x
    lanes = padded.reshape(*padded.shape[:-1], -1, LANES)
    total: Tensor = lanes[..., 0, :].clone()
    for i in range(1, lanes.shape[-2]):
        total += lanes[..., i, :]
    width = LANES
    while width > 1:
        width //= 2
        total = total[..., :width] + total[..., width : 2 * width]
    return total[..., 0]
