"""One chunk's state with plain tensor operations: what the compiled kernels are held to, bit for bit.

Why it exists: it is the path of machines for which nothing is compiled, and the definition in a form that
another implementation can be compared with. It is several times slower. It must not know where rows live.

Every product is a chain of fused multiply-adds, as the library computes it when its shapes are regular
(queries padded to a multiple of 4, rows to one of 64, at most 128 rows summed at once); a library that rounds
otherwise fails test_compiled_bits.py. Order: see `kvtier_kernels.compiled.attention`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvtier_kernels.numerics import LANES, exp_plain, sum_plain, tanh_plain

QUERY_PAD = 4
ROW_PAD = 64
VALUE_BLOCK = 128

_LOWEST = torch.finfo(torch.float32).min

States = tuple[Tensor, Tensor, Tensor]


def state_plain(
    scaled: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    bias: Tensor | None = None,
    softcap: float | None = None,
) -> States:
    """(m, l [Nq, Hq], u [Nq, Hq, d]) of queries [Nq, Hq, d] times their scale over rows [R, Hk, d].

    seen: int64 [Nq], how many rows each query sees, from the first; ascending. What it does not see cannot
    reach it, whatever it holds. softcap: logits s become softcap tanh(s / softcap), each of these operations
    rounded. bias: float32 [R], added to the logits of each row after that."""
    nq, hq, d = scaled.shape
    heads = k.shape[1]
    group = hq // heads
    used = nq * group
    visible = int(seen[-1])
    q = scaled.view(nq, heads, group, d).transpose(0, 1).reshape(heads, used, d)
    if spare := -used % QUERY_PAD:
        q = pad(q, (0, 0, 0, spare))
    keys, values = _rows(k, visible), _rows(v, visible)
    s = _logits(q, keys)
    if softcap is not None:
        s = tanh_plain(s / softcap).mul_(softcap)
    if bias is not None:
        s += pad(bias[:visible], (0, keys.shape[1] - visible))
    hidden = torch.arange(keys.shape[1]) >= seen.repeat_interleave(group).unsqueeze(1)
    s[:, :used].masked_fill_(hidden, -torch.inf)
    m = s.amax(-1)
    p = exp_plain(s - m.clamp_min(_LOWEST).unsqueeze(-1))
    u = _weighted(p, values)
    if int(seen[0]) != visible and not bool(torch.isfinite(u).all()):
        one = [state_plain(scaled[i : i + 1], k, v, seen[i : i + 1], bias, softcap) for i in range(nq)]
        m, l, u = (torch.cat(part) for part in zip(*one, strict=True))
        return m, l, u
    l = sum_plain(p)

    def unpack(x: Tensor) -> Tensor:
        rest = x.shape[2:]
        return x[:, :used].reshape(heads, nq, group, *rest).transpose(0, 1).reshape(nq, hq, *rest)

    return unpack(m), unpack(l), unpack(u)


def _rows(x: Tensor, visible: int) -> Tensor:
    """The first `visible` rows as [Hk, padded rows, d]; rows beyond are zeros, never foreign memory."""
    out = x.new_zeros(x.shape[1], -(-visible // ROW_PAD) * ROW_PAD, x.shape[2])
    out[:, :visible].copy_(x[:visible].transpose(0, 1))
    return out


def _logits(q: Tensor, keys: Tensor) -> Tensor:
    """q [Hk, M, d] times keys [Hk, R, d]: 16 sums over every 16th dimension, then added in halves."""
    if spare := -q.shape[2] % LANES:
        q, keys = pad(q, (0, spare)), pad(keys, (0, spare))
    turned = keys.transpose(1, 2)
    sums = [
        torch.bmm(q[:, :, lane::LANES].contiguous(), turned[:, lane::LANES].contiguous())
        for lane in range(LANES)
    ]
    while len(sums) > 1:
        half = len(sums) // 2
        sums = [sums[i] + sums[i + half] for i in range(half)]
    return sums[0]


def _weighted(p: Tensor, v: Tensor) -> Tensor:
    """p [Hk, M, R] @ v [Hk, R, d] in fixed blocks of rows, ascending."""
    u = torch.bmm(p[:, :, :VALUE_BLOCK], v[:, :VALUE_BLOCK])
    for lo in range(VALUE_BLOCK, p.shape[2], VALUE_BLOCK):
        hi = lo + VALUE_BLOCK
        u += torch.bmm(p[:, :, lo:hi], v[:, lo:hi])
    return u
