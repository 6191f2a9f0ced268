"""A graph over keys whose edges come from queries, and the search in it.

Why it exists: RetrievalAttention's arithmetic apart from its life. Queries and keys are distributed
differently, so that an edge between keys is worth walking only where a query ranked both. Deterministic: ties
go to the lowest id. It must not know roles of rows, budgets or heads.

Build: L_t, the keys of largest inner product with query t, best first. Edges, both ways: L_t[0] with every
other of L_t, and each of L_t with the next. A node keeps the out_degree edges that the most queries bridge,
then of the best rank, then of the lowest id. The first entry is the key that is L_t[0] most often; while keys
with edges cannot be reached, the one in the most lists is an entry too, up to a bound. A key in no list has
no edge and is never found: that is the published construction, and its failure.

Search: best first with a pool of `width`; it ends when the best key not expanded is worse than the worst of a
full pool.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier_core.errors import CoreError, Reason

Ids = NDArray[np.int64]
Matrix = NDArray[np.float64]
_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class KeyGraph:
    """Of keys 0 to size - 1. lists int64 [S, n]: L_t of each query. starts int64 [size + 1]: node i has the
    edges [starts[i], starts[i + 1]) of targets and via, int64 [E]; via: the query that bridges them. entries:
    where a search starts. None that contradicts itself can be made: CoreError says what is wrong."""

    size: int
    lists: Ids
    starts: Ids
    targets: Ids
    via: Ids
    entries: Ids

    def __post_init__(self) -> None:
        if len(self.starts) != self.size + 1 or int(self.starts[-1]) != len(self.targets):
            raise CoreError(Reason.PARTIAL_INDEX, f"edges of {len(self.starts) - 1} of {self.size} keys")
        for ids in (self.lists, self.targets, self.entries):
            if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self.size:
                raise CoreError(Reason.DANGLING_ID, f"the graph names a key outside its {self.size}")
        if len(self.via) != len(self.targets) or (
            len(self.via) and not 0 <= int(self.via.min()) <= int(self.via.max()) < len(self.lists)
        ):
            raise CoreError(Reason.INDEX_BUILD_CONTRACT, "an edge names no query that bridges it")
        if len(self.via):
            source = np.repeat(np.arange(self.size), np.diff(self.starts))
            bridge = self.lists[self.via]
            both = (bridge == source[:, None]).any(1) & (bridge == self.targets[:, None]).any(1)
            if not both.all():
                raise CoreError(Reason.INDEX_BUILD_CONTRACT, "an edge joins keys that its query did not rank")

    @property
    def unranked(self) -> int:
        """Keys in no query's list."""
        return self.size - int(np.count_nonzero(np.bincount(self.lists.reshape(-1), minlength=self.size)))

    def neighbours(self, node: int) -> Ids:
        return self.targets[self.starts[node] : self.starts[node + 1]]


class Found(NamedTuple):
    """ids: keys that were scored, ascending, and their scores; expanded: of how many the edges were read."""

    ids: Ids
    scores: Matrix
    expanded: int


def ranked(q: Matrix, k: Matrix, count: int) -> Ids:
    """int64 [S, count]: the keys of largest inner product with each query, best first."""
    count = min(count, len(k))
    found = np.empty((len(q), count), dtype=np.int64)
    for at in range(0, len(q), _AT_ONCE):
        scores = -(q[at : at + _AT_ONCE] @ k.T)
        cut = np.partition(scores, count - 1, axis=1)[:, count - 1]
        for row, one in enumerate(scores):
            ids = np.flatnonzero(one <= cut[row])
            found[at + row] = ids[np.argsort(one[ids], kind="stable")][:count]
    return found


def build_graph(q: Matrix, k: Matrix, *, neighbours: int, out_degree: int, entries: int) -> KeyGraph:
    """The graph of keys k [n, d], n > 0, bridged by queries q [S, d], S > 0."""
    size = len(k)
    lists = ranked(q, k, neighbours)
    pairs = []
    for rank in range(1, lists.shape[1]):
        for other in sorted({0, rank - 1}):
            pairs.append((lists[:, other], lists[:, rank], rank))
    order = np.arange(len(lists))
    source = np.concatenate([end for a, b, _ in pairs for end in (a, b)] or [np.empty(0, np.int64)])
    target = np.concatenate([end for a, b, _ in pairs for end in (b, a)] or [np.empty(0, np.int64)])
    via = np.tile(order, 2 * len(pairs))
    rank_of = np.repeat([rank for _, _, rank in pairs for _ in range(2)], len(lists)).astype(np.int64)
    first = np.lexsort((rank_of, via))
    source, target, via, rank_of = source[first], target[first], via[first], rank_of[first]
    code, at, count = np.unique(source * size + target, return_index=True, return_counts=True)
    source, target = code // size, code % size
    best = np.lexsort((target, rank_of[at], -count, source))
    source, target, via = source[best], target[best], via[at][best]
    place = np.arange(len(source)) - np.searchsorted(source, source)
    kept = place < out_degree
    source, target, via = source[kept], target[kept], via[kept]
    starts = np.searchsorted(source, np.arange(size + 1)).astype(np.int64)
    chosen = _entries(lists, starts, target, size, entries)
    return KeyGraph(size, lists, starts, target.astype(np.int64), via.astype(np.int64), chosen)


def _entries(lists: Ids, starts: Ids, targets: Ids, size: int, most: int) -> Ids:
    wins = np.bincount(lists[:, 0], minlength=size)
    seen = np.bincount(lists.reshape(-1), minlength=size)
    reached = np.zeros(size, dtype=np.bool_)
    chosen = [int(np.argmax(wins))]
    while True:
        frontier = np.array([chosen[-1]])
        reached[frontier] = True
        while len(frontier):
            spans = [targets[starts[node] : starts[node + 1]] for node in frontier]
            fresh = np.unique(np.concatenate(spans))
            frontier = fresh[~reached[fresh]]
            reached[frontier] = True
        left = np.where(reached, 0, seen)
        if len(chosen) >= most or not left.any():
            return np.array(chosen, dtype=np.int64)
        chosen.append(int(np.argmax(left)))


def search(graph: KeyGraph, k: NDArray[np.float32], q: Matrix, width: int) -> Found:
    """The keys that a search for q [d] scores, from k [size, d]; the best `width` of them are its answer."""
    scores = np.full(graph.size, -np.inf)
    seen = np.zeros(graph.size, dtype=np.bool_)
    waiting: list[tuple[float, int]] = []
    pool: list[tuple[float, int]] = []
    expanded = 0
    fresh = np.unique(graph.entries)
    while True:
        seen[fresh] = True
        found = k[fresh].astype(np.float64) @ q
        scores[fresh] = found
        if len(pool) >= width:
            # A key worse than a full pool's worst would end the search instead of being expanded.
            able = ~(found < pool[0][0])
            fresh, found = fresh[able], found[able]
        for node, score in zip(fresh.tolist(), found.tolist(), strict=True):
            if len(pool) < width:
                heapq.heappush(pool, (score, -node))
            elif (score, -node) < pool[0]:
                continue
            else:
                heapq.heapreplace(pool, (score, -node))
            heapq.heappush(waiting, (-score, node))
        if not waiting:
            break
        negative, node = heapq.heappop(waiting)
        if len(pool) >= width and (-negative, -node) < pool[0]:
            break
        expanded += 1
        near = graph.neighbours(node)
        fresh = near[~seen[near]]
    ids = np.flatnonzero(seen)
    return Found(ids, scores[ids], expanded)
