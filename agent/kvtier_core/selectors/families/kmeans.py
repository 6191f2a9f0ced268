"""K-means that gives the same clusters every time.

Why it exists: families group keys, and an index must be reproducible from its rows and its seed. Starts are
given or drawn from a seeded generator, sums run in row order in float64, ties go to the lowest cluster. A
cluster that runs empty keeps its centre while iterations last and is dropped at the end. It must not know
what clusters are for.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvtier_core.errors import CoreError, Reason

Matrix = NDArray[np.float64]
Labels = NDArray[np.int64]
_AT_ONCE = 4096


def finite(k: NDArray[np.float32]) -> Matrix:
    """k in float64. CENTROID_INVALID: a key is not finite, so no centre is near it."""
    if not np.isfinite(k).all():
        raise CoreError(Reason.CENTROID_INVALID, "a key that is not finite belongs to no cluster")
    return k.astype(np.float64)


def unit(x: Matrix) -> Matrix:
    """Rows of x [n, d] over their Euclidean norm; a row of zeros becomes the first axis."""
    norm = np.linalg.norm(x, axis=1, keepdims=True)
    axis = np.zeros(x.shape[1])
    axis[0] = 1.0
    return np.where(norm > 0, x / np.where(norm > 0, norm, 1.0), axis)


def even_starts(rows: int, clusters: int) -> Labels:
    """`clusters` row ids at equal distances from the first to the last of `rows`, rounded half up."""
    if clusters == 1:
        return np.zeros(1, dtype=np.int64)
    steps = np.arange(clusters, dtype=np.int64) * (rows - 1)
    return (2 * steps + clusters - 1) // (2 * (clusters - 1))


def spread_starts(x: Matrix, clusters: int, random: np.random.Generator) -> Labels:
    """k-means++: each next row of x [n, d] with probability in proportion to its squared distance from the
    nearest one so far; the lowest unused row once all distances are 0."""
    chosen = [int(random.integers(len(x)))]
    nearest = ((x - x[chosen[0]]) ** 2).sum(1)
    while len(chosen) < clusters:
        total = nearest.sum()
        if total > 0:
            at = int(np.searchsorted(np.cumsum(nearest), random.random() * total, side="right"))
            at = min(at, len(x) - 1)
        else:
            at = int(np.setdiff1d(np.arange(len(x)), chosen)[0])
        chosen.append(at)
        nearest = np.minimum(nearest, ((x - x[at]) ** 2).sum(1))
    return np.array(chosen, dtype=np.int64)


def means(x: Matrix, labels: Labels, clusters: int) -> tuple[Matrix, Labels]:
    """[clusters, d] and counts [clusters]; the mean of an empty cluster is 0."""
    counts = np.bincount(labels, minlength=clusters)
    sums = np.zeros((clusters, x.shape[1]))
    order = np.argsort(labels, kind="stable")
    there = np.flatnonzero(counts)
    if len(there):
        sums[there] = np.add.reduceat(x[order], (np.cumsum(counts) - counts)[there], axis=0)
    return sums / np.maximum(counts, 1)[:, None], counts


def lloyd(x: Matrix, starts: Labels, iterations: int, *, spherical: bool) -> Labels:
    """Labels [n] of rows x [n, d], numbered without gaps. spherical: the nearest centre has the largest inner
    product with the normalised mean; else of the smallest Euclidean distance to the mean."""
    centres = unit(x[starts]) if spherical else x[starts].copy()
    labels = np.full(len(x), -1, dtype=np.int64)
    for _ in range(iterations):
        found = _nearest(x, centres, spherical)
        if np.array_equal(found, labels):
            break
        labels = found
        fresh, counts = means(x, labels, len(centres))
        there = counts > 0
        centres[there] = unit(fresh[there]) if spherical else fresh[there]
    return np.unique(labels, return_inverse=True)[1].astype(np.int64).reshape(-1)


def _nearest(x: Matrix, centres: Matrix, spherical: bool) -> Labels:
    half = np.zeros(len(centres)) if spherical else 0.5 * (centres**2).sum(1)
    parts = [(x[at : at + _AT_ONCE] @ centres.T - half).argmax(axis=1) for at in range(0, len(x), _AT_ONCE)]
    return np.concatenate(parts).astype(np.int64)
