"""Products of queries with keys and of weights with values, over many chunks in one call, with the bits of
`torch.bmm` on queries padded as `chunk_state` pads them.

Why it exists: a decode step reads each row once and multiplies it with a handful of queries. torch's batched
product costs a call for each chunk, and on rows that no cache holds it runs at a fifth of the memory's
speed; numpy's takes any regular distance between chunks and keeps nearer to it. Both add up one product
after the other with fused multiply-adds, so their bits are the same as long as neither takes a path of its
own for small shapes. Which path a library takes is not promised, so `agrees` compares them for a shape when
it first comes, and where they differ everything runs on torch. Rows that are not finite give what they give,
without numpy's warnings. It must not know which chunks these are.

Measured (torch 2.15 with MKL, numpy 2 with OpenBLAS 0.3.31, fp32): keys differ when rows x queries <= 1,200,
values and states when there is a single query, and states whose width is not whole vectors.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float32]

QUERY_PAD = 4
VALUE_BLOCK = 128
_SMALL_PRODUCT = 1200
_LARGEST_PRODUCT = 1 << 18
_VECTOR = 16
_FOLD_LENGTHS = (2, 3, 4, 7, 16, 33, 128)


def padded(queries: int) -> int:
    """Queries of a product of `torch.bmm`: of 1 to 3 it takes other paths."""
    return -(-queries // QUERY_PAD) * QUERY_PAD


def key_width(rows: int, queries: int) -> int:
    """Queries of a product of numpy with `rows` keys: beyond what OpenBLAS treats as small."""
    return max(queries, _SMALL_PRODUCT // rows + 1)


def at_once(rows: int, head_dim: int) -> int:
    """Queries of one product with `rows` rows. A larger one is shared out to threads by OpenBLAS, which for
    products as small as these takes fifty times as long; 0: none is small enough."""
    return _LARGEST_PRODUCT // (rows * head_dim)


def key_products(q: Floats, keys: Floats) -> Floats:
    """[n, Hk, R, queries]: keys [n, Hk, R, d] at any distances, rows contiguous, times q [Hk, queries, d]."""
    heads, queries, d = q.shape
    rows = keys.shape[2]
    most = max(1, at_once(rows, d))
    found = []
    with np.errstate(all="ignore"):
        for lo in range(0, queries, most):
            part = q[:, lo : lo + most]
            width = key_width(rows, part.shape[1])
            if width != part.shape[1]:
                wide = np.zeros((heads, width, d), np.float32)
                wide[:, : part.shape[1]] = part
            else:
                wide = part
            logits: Floats = np.matmul(keys, wide.transpose(0, 2, 1))
            found.append(logits[..., : part.shape[1]])
    return found[0] if len(found) == 1 else np.concatenate(found, -1)


def value_products(p: Floats, values: Floats, out: Floats | None = None) -> Floats:
    """[..., queries, d]: p [..., queries, R] times values [..., R, d], summed in fixed blocks of rows,
    ascending, into `out` where that is given. queries >= 2."""
    queries = p.shape[-2]
    most = max(2, at_once(VALUE_BLOCK, values.shape[-1]))
    if queries > most:
        into = out if out is not None else np.empty((*p.shape[:-1], values.shape[-1]), np.float32)
        for lo in range(0, queries, most):
            # A single query left over would take another path, so the last two parts overlap.
            first = min(lo, queries - 2)
            part = slice(first, lo + most)
            into[..., part, :] = value_products(p[..., part, :], values)
        return into
    with np.errstate(all="ignore"):
        u: Floats = np.matmul(p[..., :VALUE_BLOCK], values[..., :VALUE_BLOCK, :], out=out)
        for lo in range(VALUE_BLOCK, p.shape[-1], VALUE_BLOCK):
            hi = lo + VALUE_BLOCK
            u += np.matmul(p[..., lo:hi], values[..., lo:hi, :])
    return u


def torch_key_products(q: Tensor, keys: Tensor) -> Tensor:
    """[Hk, padded queries, R]: q [Hk, padded queries, d] times the keys [Hk, R, d] of one chunk."""
    return torch.bmm(q, keys.transpose(1, 2))


def torch_value_products(p: Tensor, values: Tensor, rows: int) -> Tensor:
    """[Hk, padded queries, d]: p [Hk, padded queries, R] times the first `rows` values [Hk, R, d] of one
    chunk, in the blocks of `value_products`; weights beyond are 0 and change nothing."""
    u = torch.bmm(p[:, :, :VALUE_BLOCK], values[:, :VALUE_BLOCK])
    for lo in range(VALUE_BLOCK, rows, VALUE_BLOCK):
        hi = lo + VALUE_BLOCK
        u += torch.bmm(p[:, :, lo:hi], values[:, lo:hi])
    return u


@lru_cache(maxsize=256)
def agrees(queries: int, rows: int, head_dim: int) -> bool:
    """Whether numpy gives torch's bits for `queries` (at least 2) queries of one KV head over chunks of
    `rows` rows."""
    if not at_once(rows, head_dim) or key_width(rows, 1) > at_once(rows, head_dim):
        return False
    generator = torch.Generator().manual_seed(rows * 1009 + queries * 31 + head_dim)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    with torch.inference_mode(mode=False), torch.no_grad():
        q, chunk, p = (
            random(2, queries, head_dim),
            random(2, 3, 2, rows, head_dim),
            random(3, 2, queries, rows),
        )
        spare = padded(queries) - queries
        wide_q = torch.nn.functional.pad(q, (0, 0, 0, spare))
        wide_p = torch.nn.functional.pad(p, (0, 0, 0, spare))
        logits = key_products(q.numpy(), chunk[0].numpy()).transpose(0, 1, 3, 2)
        values = value_products(p.numpy(), chunk[1].numpy())
        for i in range(3):
            want = torch_key_products(wide_q, chunk[0, i])[:, :queries]
            if not np.array_equal(logits[i], want.numpy()):
                return False
            want = torch_value_products(wide_p[i], chunk[1, i], rows)[:, :queries]
            if not np.array_equal(values[i], want.numpy()):
                return False
    return True


def fold_width(head_dim: int) -> int:
    """Numbers of a state for `fold`: u, l, and zeros up to whole vectors, since what is left over by them is
    added up in another order."""
    return (head_dim // _VECTOR + 1) * _VECTOR


@lru_cache(maxsize=64)
def folds(width: int) -> bool:
    """Whether a product of numpy over states of `width` numbers has the bits of adding them up one by one
    with torch.addcmul."""
    generator = torch.Generator().manual_seed(width)
    with torch.inference_mode(mode=False), torch.no_grad():
        for count in _FOLD_LENGTHS:
            weights = torch.rand(5, count, generator=generator)
            weights[:, 0] = 1.0
            states = torch.randn(5, count, width, generator=generator)
            total = states[:, 0]
            for i in range(1, count):
                total = torch.addcmul(total, weights[:, i, None], states[:, i])
            if not np.array_equal(fold(weights.numpy(), states.numpy()), total.numpy()):
                return False
    return True


def fold(weights: Floats, states: Floats) -> Floats:
    """[H, width]: the sum over n of weights [H, n] times states [H, n, width], ascending."""
    twice = np.broadcast_to(weights[:, None], (weights.shape[0], 2, weights.shape[1]))
    with np.errstate(all="ignore"):
        total: Floats = np.matmul(np.ascontiguousarray(twice), states)
    return total[:, 0]
