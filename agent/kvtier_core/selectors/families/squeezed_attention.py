"""SqueezedAttention: clusters of a fixed context, kept by a calibrated threshold (Hooper et al., 2024).

Why it exists: the family for a prefix that many queries share and that never changes. It must not know tiers
or requests, nor how the threshold was found.

Formulas (specification D.6). Offline: k-means++ and Lloyd's iterations on normalised keys; C_i is the plain
mean of the raw keys of cluster i, N_i its rows. Per query head: z_i = q . C_i scale; D = sum_j N_j e^z_j;
S_i = e^z_i / D, so that sum_i N_i S_i = 1; clusters with S_i > threshold are read, every row of them. One
threshold serves all heads and layers: a diffuse head keeps more. levels 2: coarse centroids, row-weighted
means of groups of fine ones, are tested first against coarseThreshold, with D over all of them; only the
children of those that pass are scored, and their D is over the children that are scored.

`scoreScale`: the paper's lookup writes the plain product, its calibration applies 1/sqrt(d). "scaled" uses
the attention's factor, "unscaled" 1. A threshold means nothing under the other.

Variable size: none or all rows may pass. Over the budget, `truncate` keeps the best clusters that fit whole.
Rows behind the context are always read; an append or an edit inside it is refused. GQA: centroids per KV
head, a decision and a list per query head. Guarantee: heuristic: S_i knows a mean, not a cluster's best row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
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
from kvtier_core.selectors.families.kmeans import finite, lloyd, means, spread_starts, unit
from kvtier_core.selectors.families.parameters import Parameters, budget_of, digest_of
from kvtier_core.selectors.picking import Persistent, capped
from kvtier_crds.manifest import PersistentRows, Selector

FACTS = FamilyFacts(
    family="squeezedAttention",
    unit=Unit.CLUSTER,
    scope=Scope.QUERY_HEAD,
    needs=frozenset([Need.QUERY]),
    guarantee=Guarantee.HEURISTIC,
    appendable=False,
    edit=EditCost.REBUILD,
    randomised=True,
    fixed_size=False,
    estimates=True,
)
SCALES = ("scaled", "unscaled")
Scores = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class FixedClusters:
    """One KV head's clusters of the rows [0, n). labels int64 [n]; centroids float32 [C, d]; counts int64
    [C]. parents int64 [C], coarse float32 [G, d] and coarse_counts int64 [G]: the level above, G = 0 without
    one. None that contradicts itself can be made: CoreError says what is wrong."""

    labels: Rows
    centroids: NDArray[np.float32]
    counts: Rows
    parents: Rows
    coarse: NDArray[np.float32]
    coarse_counts: Rows

    def __post_init__(self) -> None:
        if len(self.counts) != len(self.centroids) or (self.counts <= 0).any():
            raise CoreError(Reason.CENTROID_MASS, "each centroid needs the number of its rows")
        if len(self.labels) and not 0 <= int(self.labels.min()) <= int(self.labels.max()) < len(self.counts):
            raise CoreError(Reason.PQ_GEOMETRY, f"a label is outside the {len(self.counts)} clusters")
        if int(self.counts.sum()) != len(self.labels):
            raise CoreError(
                Reason.COVERAGE_GAP,
                f"clusters of {int(self.counts.sum())} rows, there are {len(self.labels)}",
            )
        if not np.array_equal(np.bincount(self.labels, minlength=len(self.counts)), self.counts):
            raise CoreError(Reason.CENTROID_MASS, "a count is not that of the rows with its label")
        if len(self.coarse):
            self._check_hierarchy()

    def _check_hierarchy(self) -> None:
        groups = len(self.coarse)
        known = (
            len(self.parents) == len(self.counts) and ((self.parents >= 0) & (self.parents < groups)).all()
        )
        if not known or len(self.coarse_counts) != groups:
            raise CoreError(Reason.HIERARCHY_COVERAGE, "a fine cluster has no coarse one above it")
        rows = np.bincount(self.parents, weights=self.counts, minlength=groups)
        if not np.array_equal(rows, self.coarse_counts):
            raise CoreError(
                Reason.HIERARCHY_COVERAGE, "a coarse cluster's rows are not those of its children"
            )

    def digests(self) -> tuple[tuple[str, str], ...]:
        return (
            ("labels", _sha(self.labels)),
            ("centroids", _sha(self.centroids)),
            ("hierarchy", _sha(self.parents) + _sha(self.coarse)),
        )


@dataclass(frozen=True, slots=True)
class FixedIndex:
    """heads: one `FixedClusters` a KV head. context: SHA-256 of the keys. scale: factor on q.C that the
    threshold was calibrated with."""

    facts: IndexFacts
    heads: tuple[FixedClusters, ...]
    context: str
    scale: float

    @classmethod
    def published(
        cls, facts: IndexFacts, heads: tuple[FixedClusters, ...], context: str, scale: float
    ) -> FixedIndex:
        return cls(replace(facts, parts=_parts(heads, context)), heads, context, scale)

    def __post_init__(self) -> None:
        if dict(self.facts.parts).get("context") != self.context:
            raise CoreError(Reason.CONTEXT_HASH_MISMATCH, "the index was made of another context")
        if any(len(head.labels) != self.facts.covered for head in self.heads):
            raise CoreError(Reason.COVERAGE_GAP, f"not all heads cover {self.facts.covered} rows")
        if self.facts.parts != _parts(self.heads, self.context):
            raise CoreError(
                Reason.SELECTOR_STATE_MIXED, "an array of the index is not the one published with it"
            )


@dataclass(frozen=True, slots=True)
class _Choice:
    clusters: Rows
    rows: Rows
    wanted: int
    dropped: int
    threshold: float
    runner_up: float
    ties: int
    omitted: float
    scanned: int
    log_mass: float
    coarse: int


@dataclass(frozen=True, slots=True)
class SqueezedAttention:
    """clusters, coarse: of each KV head, at most. threshold, coarse_threshold: S must exceed it. calibration:
    the quantile and the data that the threshold comes from, or that it was declared."""

    digest: str
    shape: Shape
    budget: Budget
    persistent: PersistentRows
    dense_layers: frozenset[int]
    clusters: int
    threshold: float
    coarse: int
    coarse_threshold: float
    iterations: int
    score_scale: str
    calibration: str
    seed: int
    facts: FamilyFacts = FACTS

    @classmethod
    def from_manifest(cls, selector: Selector, shape: Shape, page_tokens: int) -> SqueezedAttention:
        """MANIFEST_INVALID names the field; THRESHOLD_INVALID: no score exceeds it; RECEIPT_INCOMPLETE: a
        quantile of no data."""
        parameters = Parameters(selector)
        clusters = parameters.integer("clusters", 1, 65536)
        threshold = parameters.number("threshold", 0.0, 1e9)
        levels = parameters.integer("levels", 1, 2, 1)
        coarse = parameters.integer("coarseClusters", 1, 65536, max(1, -(-clusters // 5)))
        coarse_threshold = parameters.number("coarseThreshold", 0.0, 1e9, "0" if levels == 1 else None)
        iterations = parameters.integer("iterations", 1, 1000, 300)
        score_scale = parameters.choice("scoreScale", SCALES, SCALES[0])
        quantile = parameters.number("calibrationQuantile", 0.0, 1.0, "0")
        dataset = parameters.text("calibrationDataset", 253, "")
        parameters.done()
        if max(threshold, coarse_threshold) >= 1:
            raise CoreError(
                Reason.THRESHOLD_INVALID,
                f"no score passes a threshold of {max(threshold, coarse_threshold):g}: N S adds up to 1",
            )
        if ("calibrationQuantile" in selector.parameters) != bool(dataset):
            raise CoreError(
                Reason.RECEIPT_INCOMPLETE,
                "squeezedAttention.calibrationQuantile and calibrationDataset are stated together",
            )
        if levels == 2 and coarse > clusters:
            raise CoreError(
                Reason.MANIFEST_INVALID, f"squeezedAttention.coarseClusters {coarse} of {clusters} clusters"
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
            clusters=clusters,
            threshold=threshold,
            coarse=coarse if levels == 2 else 0,
            coarse_threshold=coarse_threshold,
            iterations=iterations,
            score_scale=score_scale,
            calibration=f"{quantile:g} of {dataset}" if dataset else "declared",
            seed=selector.seed,
        )

    @property
    def scale(self) -> float:
        """On q.C."""
        return self.shape.scale if self.score_scale == "scaled" else 1.0

    def omits(self, rows: int) -> bool:
        """Whether it could: any cluster may fall below the threshold."""
        return rows > self.persistent.sink + max(1, self.persistent.recent)

    def build(self, source: Source, k: Tensor, v: Tensor, evidence: Evidence) -> FixedIndex:
        if k.shape != v.shape:
            raise CoreError(Reason.ROW_INCOMPLETE, f"{tuple(k.shape)} keys and {tuple(v.shape)} values")
        keys = np.ascontiguousarray(k.detach().to("cpu").numpy())
        heads = tuple(self._clustered(keys[:, at], source, at) for at in range(self.shape.kv_heads))
        facts = IndexFacts(self.digest, source, epoch=1, covered=len(keys), seed=self.seed)
        return FixedIndex.published(facts, heads, _sha(keys), self.scale)

    def _clustered(self, keys: NDArray[np.float32], source: Source, head: int) -> FixedClusters:
        d = self.shape.head_dim
        raw = finite(keys)
        nothing = np.empty(0, np.int64)
        if not len(raw):
            return FixedClusters(
                nothing, np.empty((0, d), np.float32), nothing, nothing, np.empty((0, d), np.float32), nothing
            )
        random = np.random.default_rng([self.seed, source.layer, head])
        labels = self._labels(unit(raw), self.clusters, random)
        centroids, counts = means(raw, labels, int(labels.max()) + 1)
        if not self.coarse:
            none = np.empty((0, d), np.float32)
            return FixedClusters(labels, centroids.astype(np.float32), counts, nothing, none, nothing)
        parents = self._labels(unit(centroids), self.coarse, random)
        coarse, rows = means(raw, parents[labels], int(parents.max()) + 1)
        return FixedClusters(
            labels, centroids.astype(np.float32), counts, parents, coarse.astype(np.float32), rows
        )

    def _labels(self, x: NDArray[np.float64], clusters: int, random: np.random.Generator) -> Rows:
        starts = spread_starts(x, min(clusters, len(x)), random)
        return lloyd(x, starts, self.iterations, spherical=False)

    def verify(self, index: FixedIndex, k: Tensor) -> None:
        """Whether `index`, made elsewhere, is of the rows k [n, Hk, d]. CONTEXT_HASH_MISMATCH: of others,
        equal in number or not; CENTROID_INVALID: a centroid is not the mean of its rows."""
        keys = np.ascontiguousarray(k.detach().to("cpu").numpy())
        if _sha(keys) != index.context:
            raise CoreError(Reason.CONTEXT_HASH_MISMATCH, "the rows are not those that the index was made of")
        for at, head in enumerate(index.heads):
            mean, _ = means(keys[:, at].astype(np.float64), head.labels, len(head.counts))
            if not np.allclose(
                head.centroids, mean, rtol=1e-5, atol=1e-6 * (1 + np.abs(mean).max(initial=0))
            ):
                raise CoreError(Reason.CENTROID_INVALID, "a centroid is not the mean of its rows")

    def append(self, index: Index, k: Tensor, v: Tensor, evidence: Evidence) -> Index:
        raise CoreError(Reason.CONTEXT_HASH_MISMATCH, "an index of a fixed context takes no more rows")

    def edit(self, index: Index, edit: Edit) -> Index | NeedsRebuild:
        """Behind the context nothing of it changes."""
        own = _own(index)
        if edit.first < own.facts.covered:
            return NeedsRebuild("the context changed: its centroids and the threshold's meaning with them")
        source = replace(own.facts.source, position_epoch=edit.epoch)
        return replace(own, facts=replace(own.facts, source=source, epoch=own.facts.epoch + 1))

    def select(self, index: Index, query: Query) -> Selection:
        """As the contract, and SCORE_SCALE_MISMATCH: the threshold belongs to another factor on q.C."""
        own = _own(index)
        lag = check_index(own, self, query, tail=query.rows)
        if own.scale != self.scale:
            raise CoreError(
                Reason.SCORE_SCALE_MISMATCH,
                f"the threshold was calibrated with a factor of {own.scale:g} on q.C, not {self.scale:g}",
            )
        persistent = Persistent.of(self.persistent, query.rows, own.facts.covered)
        q = query.q[0].to("cpu").double().numpy()
        found = [
            self._choose(own.heads[head // self.shape.group], q[head], persistent)
            for head in range(self.shape.query_heads)
        ]
        joined = [persistent.joined(one.rows) for one in found]
        receipt = SelectionReceipt.of(
            self,
            own.facts,
            query,
            self.budget,
            got_units=tuple(len(one.clusters) for one in found),
            got_rows=tuple(beyond for _, beyond in joined),
            uncapped=tuple(one.wanted for one in found),
            dropped_by_cap=tuple(one.dropped for one in found),
            scanned_units=sum(one.scanned for one in found),
            index_bytes=sum(one.scanned for one in found) // self.shape.group * (4 * self.shape.head_dim + 8),
            threshold=tuple(one.threshold for one in found),
            runner_up=tuple(one.runner_up for one in found),
            ties=tuple(one.ties for one in found),
            unindexed=lag,
            seed=self.seed,
            omitted_mass=tuple(one.omitted for one in found),
            detail={
                "context": own.context,
                "threshold": f"{self.threshold:g}",
                "coarseThreshold": f"{self.coarse_threshold:g}" if self.coarse else "",
                "scoreScale": self.score_scale,
                "calibration": self.calibration,
                "logMass": ",".join(f"{one.log_mass:.6f}" for one in found),
                "coarseChosen": ",".join(str(one.coarse) for one in found) if self.coarse else "",
                "gather": "perQueryHead",
            },
        )
        return Selection(
            self.facts.scope,
            tuple(rows for rows, _ in joined),
            tuple(np.sort(one.clusters) for one in found),
            receipt,
        )

    def _choose(self, head: FixedClusters, q: Scores, persistent: Persistent) -> _Choice:
        expanded = np.arange(len(head.counts))
        below, opened, tested = 0.0, 0, 0
        if len(head.coarse):
            top, _ = scores(head.coarse, head.coarse_counts, q, self.scale)
            passed = top > self.coarse_threshold
            below = float((top * head.coarse_counts)[~passed].sum())
            opened, tested = int(passed.sum()), len(top)
            expanded = np.flatnonzero(passed[head.parents])
        share, log_mass = scores(head.centroids[expanded], head.counts[expanded], q, self.scale)
        order = np.argsort(-share, kind="stable")
        wanted = int((share > self.threshold).sum())
        free = np.bincount(
            head.labels, weights=~persistent.mask[: len(head.labels)], minlength=len(head.counts)
        ).astype(np.int64)
        sizes = free[expanded]
        rows = self.budget.rows(self.shape)
        fits = self.budget.units if rows is None else _fitting(sizes[order[:wanted]], rows)
        assert fits is not None
        count = capped(wanted, fits, self.budget)
        if count < 0:
            ids, rest = np.arange(len(head.counts)), np.empty(0, np.int64)
            omitted = 0.0
        else:
            ids, rest = expanded[order[:count]], order[count:]
            omitted = below + (1 - below) * float((share * sizes)[rest].sum())
        taken = np.zeros(len(head.counts), dtype=np.bool_)
        taken[ids] = True
        last = float(share[order[count - 1]]) if count > 0 else self.threshold
        return _Choice(
            clusters=ids,
            rows=np.flatnonzero(taken[head.labels]),
            wanted=wanted,
            dropped=max(0, wanted - count) if count >= 0 else 0,
            threshold=last,
            runner_up=float(share[rest[0]]) if len(rest) else -np.inf,
            ties=int(np.count_nonzero(share[rest] == last)) if count > 0 else 0,
            omitted=omitted,
            scanned=len(expanded) + tested,
            log_mass=log_mass,
            coarse=opened,
        )


def scores(centroids: NDArray[np.float32], counts: Rows, q: Scores, scale: float) -> tuple[Scores, float]:
    """S [C] of one query head's q [d], and ln D. Of no cluster: nothing, and -inf."""
    if not len(counts):
        return np.empty(0), -np.inf
    z = centroids.astype(np.float64) @ q * scale
    top = float(z.max())
    log_mass = top + float(np.log((counts * np.exp(z - top)).sum()))
    return np.exp(z - log_mass), log_mass


def calibrated_threshold(found: Sequence[tuple[Scores, Rows]], quantile: float) -> float:
    """The threshold over all heads, layers and queries of a calibration, S [C] and counts [C] each: the least
    score that `quantile` of all rows do not exceed. THRESHOLD_INVALID: nothing to calibrate on."""
    if not found or not 0 <= quantile < 1:
        raise CoreError(Reason.THRESHOLD_INVALID, f"no {quantile:g} quantile of {len(found)} sets of scores")
    every = np.concatenate([share for share, _ in found])
    rows = np.concatenate([counts for _, counts in found])
    order = np.argsort(every, kind="stable")
    filled = np.cumsum(rows[order])
    return float(every[order[int(np.searchsorted(filled, quantile * filled[-1]))]])


def _fitting(sizes: Rows, rows: int) -> int:
    """How many of the first clusters fit whole."""
    return int(np.searchsorted(np.cumsum(sizes), rows, side="right"))


def _parts(heads: tuple[FixedClusters, ...], context: str) -> tuple[tuple[str, str], ...]:
    named = [(f"{name}{at}", sha) for at, head in enumerate(heads) for name, sha in head.digests()]
    return (("context", context), *named)


def _sha(array: NDArray[np.generic]) -> str:
    body = f"{array.shape}{array.dtype}".encode() + np.ascontiguousarray(array).tobytes()
    return "sha256:" + hashlib.sha256(body).hexdigest()


def _own(index: Index) -> FixedIndex:
    if not isinstance(index, FixedIndex):
        raise CoreError(Reason.SELECTOR_STALE, "this is no index of SqueezedAttention")
    return index
