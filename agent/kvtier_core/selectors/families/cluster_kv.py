"""ClusterKV: rows ranked by the centre of the keys that they resemble (Liu et al., 2025).

Why it exists: the family whose units are not contiguous, built while the sequence grows. It must not know
tiers or requests.

Formulas (specification D.10). x_i = k_i / |k_i|; label_i = argmax_c x_i . mu_c; mu_c = mean(x of c), then
normalised. A query ranks clusters by a_c = q . mu_c: an inner product, not a cosine, and without the number
of rows in it. Clusters are read from the best on until the budget is spent; the one that crosses it is
trimmed, not dropped. The prefill makes ceil(rows / tokensPerCluster) clusters; later rows wait, always read,
until sealTokens of them are there and become clustersPerSeal more. Nothing is clustered twice. Sink rows are
in no cluster. Starts are evenly spaced rows; an empty cluster is dropped when its segment is sealed.

`memberOrder` decides what the trim keeps: "position" (ascending rows, as the authors' code truncates) or
"centrality" (nearest to the centre first). A trim by true score would need K, which a selection never reads.

GQA: clusters per KV head, ranked per query head; each query head has its own list and budget, so a KV head
may fetch up to a group times as many rows. Guarantee: heuristic. Wrong when a small cluster holds the row
that matters far from its centre, when norms mix (the centre forgets |k|), and when the trim drops the best
key of the last cluster.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvtier_core.errors import CoreError, Reason
from kvtier_core.selectors.contract import (
    Budget,
    Edit,
    EditCost,
    Evidence,
    FamilyFacts,
    Guarantee,
    Index,
    IndexFacts,
    Need,
    NeedsRebuild,
    Query,
    Rows,
    Scope,
    Selection,
    SelectionReceipt,
    Shape,
    Source,
    Unit,
    check_index,
)
from kvtier_core.selectors.families.kmeans import even_starts, finite, lloyd, means, unit
from kvtier_core.selectors.families.parameters import Parameters, budget_of, digest_of
from kvtier_core.selectors.growing import Growing
from kvtier_core.selectors.picking import Persistent
from kvtier_crds.manifest import PersistentRows, Selector

FACTS = FamilyFacts(
    family="clusterKv",
    unit=Unit.CLUSTER,
    scope=Scope.QUERY_HEAD,
    needs=frozenset([Need.QUERY]),
    guarantee=Guarantee.HEURISTIC,
    appendable=True,
    edit=EditCost.UNIT,
)
MEMBER_ORDERS = ("position", "centrality")


@dataclass(frozen=True, slots=True)
class Clusters:
    """One KV head's clusters of the rows [first, end). centroids float32 [C, d], of norm 1; ends int64 [C],
    prefix sums of their sizes; members int64 [end - first], cluster by cluster in the order of a trim. None
    that contradicts itself can be made: CoreError says what is wrong."""

    first: int
    end: int
    centroids: NDArray[np.float32]
    ends: Rows
    members: Rows

    def __post_init__(self) -> None:
        if len(self.centroids) != len(self.ends):
            raise CoreError(
                Reason.SELECTOR_STATE_MIXED,
                f"{len(self.centroids)} centroids beside prefix sums of {len(self.ends)} clusters",
            )
        sizes = np.diff(self.ends, prepend=0)
        total = int(self.ends[-1]) if len(self.ends) else 0
        if (sizes < 0).any() or total != len(self.members):
            raise CoreError(
                Reason.CLUSTER_SIZES, f"prefix sums end at {total}, there are {len(self.members)} members"
            )
        if (sizes == 0).any():
            raise CoreError(Reason.CLUSTER_EMPTY, "a cluster without rows must not be published")
        if len(self.members) and int(self.members.min()) < self.first:
            raise CoreError(Reason.CLUSTER_ROLE, f"a row before {self.first} is always read, in no cluster")
        if not np.array_equal(np.sort(self.members), np.arange(self.first, self.end)):
            raise CoreError(
                Reason.COVERAGE_GAP,
                f"the clusters do not hold each of the rows {self.first}..{self.end} once",
            )
        norms = np.linalg.norm(self.centroids.astype(np.float64), axis=1)
        if not (np.abs(norms - 1) < 1e-5).all():
            raise CoreError(Reason.CENTROID_INVALID, "a centroid is normalised after its mean is taken")

    @property
    def sizes(self) -> Rows:
        return np.diff(self.ends, prepend=0)

    def plus(self, other: Clusters) -> Clusters:
        return Clusters(
            self.first,
            other.end,
            np.concatenate([self.centroids, other.centroids]),
            np.concatenate([self.ends, other.ends + len(self.members)]),
            np.concatenate([self.members, other.members]),
        )

    def cut(self, end: int, count: int) -> Clusters:
        """The first `count` clusters, which hold [first, end)."""
        kept = int(self.ends[count - 1]) if count else 0
        return Clusters(self.first, end, self.centroids[:count], self.ends[:count], self.members[:kept])


@dataclass(frozen=True, slots=True)
class ClusterIndex:
    """heads: one `Clusters` a KV head, all of rows [first, sealed). segments: where each ends and how many
    clusters every head has by then. waiting: keys float32 entries [Hk, d] of rows [sealed, covered)."""

    facts: IndexFacts
    heads: tuple[Clusters, ...]
    segments: tuple[tuple[int, tuple[int, ...]], ...]
    waiting: Growing

    def __post_init__(self) -> None:
        counts = tuple(len(head.ends) for head in self.heads)
        last = self.segments[-1] if self.segments else (self.sealed, counts)
        if {head.end for head in self.heads} != {last[0]} or counts != last[1]:
            raise CoreError(
                Reason.SELECTOR_STATE_MIXED, "clusters of another segment than the last sealed one"
            )
        if self.sealed + len(self.waiting) != self.facts.covered:
            raise CoreError(
                Reason.SELECTOR_STATE_MIXED,
                f"clusters to row {self.sealed} and {len(self.waiting)} rows behind, "
                f"in an index that covers {self.facts.covered}",
            )

    @property
    def sealed(self) -> int:
        return self.heads[0].end


@dataclass(frozen=True, slots=True)
class _Choice:
    clusters: Rows
    rows: Rows
    read: int
    trimmed: int
    threshold: float
    runner_up: float
    ties: int


@dataclass(frozen=True, slots=True)
class ClusterKv:
    """per_cluster: rows of a cluster of the prefill, on average. seal, per_seal: rows that become clusters
    together, and how many."""

    digest: str
    shape: Shape
    budget: Budget
    persistent: PersistentRows
    dense_layers: frozenset[int]
    per_cluster: int
    seal: int
    per_seal: int
    iterations: int
    member_order: str
    facts: FamilyFacts = FACTS

    @classmethod
    def from_manifest(cls, selector: Selector, shape: Shape, page_tokens: int) -> ClusterKv:
        """MANIFEST_INVALID names the field; CLUSTER_TRIM: a trim of no defined order; CLUSTER_SIZES: more
        clusters than rows that they are made of."""
        parameters = Parameters(selector)
        per_cluster = parameters.integer("tokensPerCluster", 1, 4096)
        seal = parameters.integer("sealTokens", 1, 65536)
        per_seal = parameters.integer("clustersPerSeal", 1, 4096)
        iterations = parameters.integer("iterations", 1, 1000, 20)
        order = selector.parameters.get("memberOrder", MEMBER_ORDERS[0])
        if order not in MEMBER_ORDERS:
            raise CoreError(
                Reason.CLUSTER_TRIM,
                f"clusterKv.memberOrder must be {' or '.join(MEMBER_ORDERS)}, not {order!r}",
            )
        parameters.choice("memberOrder", MEMBER_ORDERS, MEMBER_ORDERS[0])
        parameters.done()
        if per_seal > seal:
            raise CoreError(
                Reason.CLUSTER_SIZES, f"clusterKv.clustersPerSeal {per_seal} of sealTokens {seal} rows"
            )
        budget = budget_of(selector)
        if not (budget.units if budget.units is not None else budget.rows(shape)):
            raise CoreError(Reason.MANIFEST_INVALID, "the budget pays no row")
        return cls(
            digest=digest_of(selector),
            shape=shape,
            budget=budget,
            persistent=selector.persistent_rows,
            dense_layers=frozenset(selector.dense_layers),
            per_cluster=per_cluster,
            seal=seal,
            per_seal=per_seal,
            iterations=iterations,
            member_order=str(order),
        )

    def prefill_clusters(self, rows: int) -> int:
        """Clusters made of a prefill of `rows` rows."""
        return max(1, -(-rows // self.per_cluster))

    def omits(self, rows: int) -> bool:
        persistent = min(rows, self.persistent.sink) + min(rows, max(1, self.persistent.recent))
        allowed = self.budget.rows(self.shape)
        return rows - persistent > (self.budget.units or 1 if allowed is None else allowed)

    def build(self, source: Source, k: Tensor, v: Tensor, evidence: Evidence) -> ClusterIndex:
        heads, d = self.shape.kv_heads, self.shape.head_dim
        if k.shape != v.shape:
            raise CoreError(Reason.ROW_INCOMPLETE, f"{tuple(k.shape)} keys and {tuple(v.shape)} values")
        keys = k.detach().to("cpu").numpy()
        first = self.persistent.sink
        none = Clusters(
            first, first, np.empty((0, d), np.float32), np.empty(0, np.int64), np.empty(0, np.int64)
        )
        facts = IndexFacts(self.digest, source, epoch=0, covered=first)
        empty = ClusterIndex(facts, (none,) * heads, (), Growing((heads, d), np.float32))
        if len(keys) <= first:
            # A sink that is not full yet: nothing to cluster, and the rows that come next are sink rows too.
            short = (replace(none, first=len(keys), end=len(keys)),) * heads
            return replace(empty, facts=replace(facts, epoch=1, covered=len(keys)), heads=short)
        return self._sealed(empty, keys[first:], self.prefill_clusters(len(keys)), len(keys))

    def append(self, index: Index, k: Tensor, v: Tensor, evidence: Evidence) -> ClusterIndex:
        own = _own(index)
        if k.shape != v.shape:
            raise CoreError(Reason.ROW_INCOMPLETE, f"{tuple(k.shape)} keys and {tuple(v.shape)} values")
        keys = k.detach().to("cpu").numpy()
        covered = own.facts.covered + len(keys)
        if not own.segments and own.sealed < self.persistent.sink:
            start = min(covered, self.persistent.sink)
            keys = keys[start - own.sealed :]
            heads = tuple(replace(head, first=start, end=start) for head in own.heads)
            own = replace(own, facts=replace(own.facts, covered=start), heads=heads)
        epoch = own.facts.epoch + 1
        own = replace(
            own,
            facts=replace(own.facts, covered=covered, epoch=epoch, parts=self._parts(own)),
            waiting=own.waiting.plus(keys),
        )
        while len(own.waiting) >= self.seal:
            rows = own.waiting.entries
            made = self._sealed(own, rows[: self.seal], self.per_seal, covered)
            own = replace(made, facts=replace(made.facts, epoch=epoch))
        return own

    def _sealed(
        self, own: ClusterIndex, keys: NDArray[np.float32], clusters: int, covered: int
    ) -> ClusterIndex:
        """`own` with the rows behind the last sealed one, keys [n, Hk, d], as `clusters` more clusters."""
        start, end = own.sealed, own.sealed + len(keys)
        heads = tuple(
            head.plus(self._made(keys[:, at], clusters, start)) for at, head in enumerate(own.heads)
        )
        rest = own.waiting.entries[len(keys) :]
        made = replace(
            own,
            facts=replace(own.facts, covered=covered, epoch=own.facts.epoch + 1),
            heads=heads,
            segments=(*own.segments, (end, tuple(len(head.ends) for head in heads))),
            waiting=Growing(own.waiting.entries.shape[1:], np.float32).plus(rest),
        )
        return replace(made, facts=replace(made.facts, parts=self._parts(made)))

    def _made(self, keys: NDArray[np.float32], clusters: int, start: int) -> Clusters:
        x = unit(finite(keys))
        labels = lloyd(x, even_starts(len(x), min(clusters, len(x))), self.iterations, spherical=True)
        count = int(labels.max()) + 1
        centres, sizes = means(x, labels, count)
        centres = unit(centres)
        near = np.einsum("nd,nd->n", x, centres[labels])
        by = -near if self.member_order == "centrality" else np.zeros(len(x))
        order = np.lexsort((np.arange(len(x)), by, labels))
        return Clusters(
            start,
            start + len(x),
            centres.astype(np.float32),
            np.cumsum(sizes),
            (start + order).astype(np.int64),
        )

    @staticmethod
    def _parts(own: ClusterIndex) -> tuple[tuple[str, str], ...]:
        return tuple((f"head{at}", f"{len(head.ends)}/{head.end}") for at, head in enumerate(own.heads))

    def edit(self, index: Index, edit: Edit) -> Index | NeedsRebuild:
        """Whole segments are kept. A change inside the prefill moves all of its centres."""
        own = _own(index)
        kept = min(edit.first, own.facts.covered)
        source = replace(own.facts.source, position_epoch=edit.epoch)
        segments = tuple(one for one in own.segments if one[0] <= kept)
        if kept >= own.sealed:
            waiting = own.waiting.first(kept - own.sealed)
            facts = replace(own.facts, source=source, epoch=own.facts.epoch + 1, covered=kept)
            return replace(own, facts=facts, waiting=waiting)
        if not segments:
            return NeedsRebuild(f"the clusters of the first {own.segments[0][0]} rows were made together")
        end, counts = segments[-1]
        heads = tuple(head.cut(end, count) for head, count in zip(own.heads, counts, strict=True))
        facts = replace(own.facts, source=source, epoch=own.facts.epoch + 1, covered=end)
        cut = ClusterIndex(facts, heads, segments, own.waiting.first(0))
        return replace(cut, facts=replace(facts, parts=self._parts(cut)))

    def select(self, index: Index, query: Query) -> Selection:
        own = _own(index)
        lag = check_index(own, self, query, tail=max(1, self.persistent.recent))
        persistent = Persistent.of(self.persistent, query.rows, own.sealed)
        q = query.q[0].to("cpu").double().numpy()
        found = [
            self._choose(own.heads[head // self.shape.group], q[head], persistent)
            for head in range(self.shape.query_heads)
        ]
        scanned = sum(len(head.ends) for head in own.heads)
        receipt = SelectionReceipt.of(
            self,
            own.facts,
            query,
            self.budget,
            got_units=tuple(len(one.clusters) for one in found),
            got_rows=tuple(one.read for one in found),
            uncapped=tuple(len(one.clusters) for one in found),
            dropped_by_cap=tuple(int(one.trimmed > 0) for one in found),
            scanned_units=scanned,
            index_bytes=scanned * (4 * self.shape.head_dim + 8) + 8 * sum(one.read for one in found),
            threshold=tuple(one.threshold for one in found),
            runner_up=tuple(one.runner_up for one in found),
            ties=tuple(one.ties for one in found),
            unindexed=lag,
            detail={
                "memberOrder": self.member_order,
                "clusters": ";".join(",".join(map(str, one.clusters)) for one in found),
                "prefixSums": ";".join(
                    str(int(head.ends[-1]) if len(head.ends) else 0) for head in own.heads
                ),
                "trimmedRows": ",".join(str(one.trimmed) for one in found),
                "waiting": str(len(own.waiting)),
            },
        )
        return Selection(
            self.facts.scope,
            tuple(persistent.joined(one.rows)[0] for one in found),
            tuple(np.sort(one.clusters) for one in found),
            receipt,
        )

    def _choose(self, head: Clusters, q: NDArray[np.float64], persistent: Persistent) -> _Choice:
        """clusters: best first. The rows of a cluster that are always read cost it nothing."""
        if not len(head.ends):
            none = np.empty(0, np.int64)
            return _Choice(none, none, 0, 0, -np.inf, -np.inf, 0)
        scores = head.centroids.astype(np.float64) @ q
        order = np.argsort(-scores, kind="stable")
        free = ~persistent.mask[head.members]
        begins = head.ends - head.sizes
        sizes = np.add.reduceat(free.astype(np.int64), begins)
        filled = np.cumsum(sizes[order])
        rows = self.budget.rows(self.shape)
        if rows is None:
            assert self.budget.units is not None
            count, rows = min(self.budget.units, len(order)), int(filled[-1])
        else:
            count = min(int(np.searchsorted(filled, rows)) + 1, len(order))
        chosen, rest = order[:count], order[count:]
        taken = np.concatenate(
            [
                head.members[head.ends[c] - head.sizes[c] : head.ends[c]][
                    free[head.ends[c] - head.sizes[c] : head.ends[c]]
                ]
                for c in chosen
            ]
        )
        threshold = float(scores[chosen[-1]])
        return _Choice(
            clusters=chosen,
            rows=taken[:rows],
            read=min(rows, len(taken)),
            trimmed=max(0, len(taken) - rows),
            threshold=threshold,
            runner_up=float(scores[rest[0]]) if len(rest) else -np.inf,
            ties=int(np.count_nonzero(scores[rest] == threshold)),
        )


def _own(index: Index) -> ClusterIndex:
    if not isinstance(index, ClusterIndex):
        raise CoreError(Reason.SELECTOR_STALE, "this is no index of ClusterKV")
    return index
