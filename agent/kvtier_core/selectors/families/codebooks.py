"""Product quantisation: centroids of parts of keys, codes of rows, and logits by table.

Why it exists: PQCache's arithmetic apart from its life. Everything is deterministic: ties go to the lowest
id, randomness is given, sums run in row order. It must not know rows' roles, indexes or queries' budgets.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtier_kernels.ops.pq import pq_lut_torch, pq_score_torch

NARROW_BITS = 8
_CHUNK = 4096


def tables(q: Tensor, entries: NDArray[np.float32]) -> Tensor:
    """float32 [Hk, m, G, C]: products of the parts of q [1, Hq, d] with the centroids [Hk, m, C, d/m]."""
    books = torch.from_numpy(entries)
    if books.shape[2] <= 2**NARROW_BITS:
        return pq_lut_torch(q, books.unsqueeze(0))[0]
    heads, parts, _, width = books.shape
    return q[0].view(heads, -1, parts, width).transpose(1, 2) @ books.transpose(-1, -2)


def scored(lut: Tensor, codes: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Scores float32 [Hk, n], the sum over the group of softmax over the rows, and the log of each softmax's
    sum, float64 [Hk, G]. lut [Hk, m, G, C]; codes [Hk, m, n]."""
    heads, group = lut.shape[0], lut.shape[2]
    if codes.dtype == torch.uint8:
        lens = torch.tensor([codes.shape[2]], dtype=torch.int32)
        scores = pq_score_torch(lut.unsqueeze(0), codes.unsqueeze(0), lens, scale=scale)
        return scores.score[0], scores.lse.view(heads, group).double()
    logits = torch.stack([approximate(lut[head], codes[head], scale) for head in range(heads)])
    lse = torch.logsumexp(logits, dim=2)
    return torch.exp(logits - lse[..., None]).sum(1).float(), lse


def approximate(lut: Tensor, codes: Tensor, scale: float) -> Tensor:
    """Logits float64 [G, n] of rows by their codes [m, n]; lut [m, G, C]."""
    total = torch.zeros(lut.shape[1], codes.shape[1], dtype=torch.float64)
    for part in range(lut.shape[0]):
        total += lut[part].index_select(1, codes[part].int()).double()
    return total * scale


def coded(keys: NDArray[np.float32], entries: NDArray[np.float32]) -> NDArray[np.integer]:
    """Codes [Hk, m, n] of keys [n, Hk, d]: the nearest of centroids [Hk, m, C, d/m]."""
    heads, parts, count, width = entries.shape
    kind = np.uint8 if count <= 2**NARROW_BITS else np.uint16
    codes = np.empty((heads, parts, len(keys)), dtype=kind)
    for head in range(heads):
        for part in range(parts):
            mine = finite(keys[:, head, part * width : (part + 1) * width])
            codes[head, part] = nearest(mine, entries[head, part].astype(np.float64))
    return codes


def nearest(x: NDArray[np.float64], centres: NDArray[np.float64]) -> NDArray[np.int64]:
    """The id of the nearest of centres [C, w] for each x [n, w]; the lowest of equals."""
    half = 0.5 * (centres * centres).sum(axis=1)
    found = np.empty(len(x), dtype=np.int64)
    for first in range(0, len(x), _CHUNK):
        rows = slice(first, first + _CHUNK)
        found[rows] = np.argmin(half - x[rows] @ centres.T, axis=1)
    return found


def k_means(
    x: NDArray[np.float64], count: int, iterations: int, random: np.random.Generator
) -> NDArray[np.float64]:
    """Lloyd's algorithm from `count` different rows of x [n, w], drawn by `random`: [count, w]. It ends when
    no row changes its centre, or after `iterations`; a centre that lost all rows stays where it was."""
    centres = x[np.sort(random.choice(len(x), count, replace=False))].copy()
    labels = nearest(x, centres)
    for _ in range(iterations):
        size = np.bincount(labels, minlength=count)
        sums = np.stack([np.bincount(labels, column, minlength=count) for column in x.T], axis=1)
        filled = size > 0
        centres[filled] = sums[filled] / size[filled, None]
        moved = nearest(x, centres)
        if np.array_equal(moved, labels):
            break
        labels = moved
    return centres


def most_iterations(
    rows: int, cluster: tuple[float, float], layer: tuple[float, float, float], low: int = 1, high: int = 20
) -> int:
    """The most iterations of k-means that hide behind a layer's prefill, in [low, high] (D.4). cluster
    (a, b): a build of n rows and I iterations takes a + b n I; layer (a, b, c): a layer takes
    a + b n + c n^2, the same unit of time. A schedule, no statement about quality."""
    base, each = cluster
    raw = (layer[2] * rows**2 + layer[1] * rows + layer[0] - base) / (each * rows)
    return max(low, min(high, int(np.floor(raw + 1e-12))))


def finite(keys: NDArray[np.float32]) -> NDArray[np.float64]:
    """Float64, with 0 for what is not finite: one such key must not spoil every centroid."""
    return np.nan_to_num(keys.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
