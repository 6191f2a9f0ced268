"""RetroInfer: clusters read by score, further ones answered for by their centres (Chen et al., 2025).

Why it exists: the repository of RetrievalAttention's authors holds this method now. It is another algorithm,
so it is a variant with a name of its own and nothing of it is attributed to that paper. It must not know
tiers or requests.

Formulas. Rows become clusters in segments of `segmentTokens`, ceil(rows / tokensPerCluster) each: spherical
k-means of the keys less the mean of the first build, evenly spaced starts. A cluster keeps c, the plain mean
of its raw keys, the sum of V and n. Per query head p_j = softmax_j(q . c_j scale), clusters unweighted; a KV
head ranks by the sum of p over its query heads and reads the best clusters that fit the budget whole. Of the
next `estimatedClusters` the answer gets, without their rows, l += n e^s and u += e^s sum V, s = q . c scale.
The rest is ignored. The state is marked estimated: by Jensen's inequality n e^s is at most the true sum.

Sink rows, the last `recent` (at least the newest) and rows that wait for a segment are read and in no
cluster, so that no row counts twice. An append makes a segment when segmentTokens rows wait beyond the recent
ones. GQA: one list a KV head. Guarantee: estimate. Omitted mass: the share of the ignored clusters in sum_j
n_j e^s_j.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

import numpy as np
import torch
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
from kvtier_core.selectors.families.kmeans import even_starts, finite, lloyd, means
from kvtier_core.selectors.families.parameters import Parameters, budget_of, digest_of
from kvtier_core.selectors.growing import Growing
from kvtier_core.selectors.picking import Persistent
from kvtier_crds.manifest import PersistentRows, Selector
from kvtier_kernels.ops.centroid_score import centroid_estimate_torch, centroid_score_torch
from kvtier_kernels.state import AttentionState, merge

FACTS = FamilyFacts(
    family="retrievalAttention",
    variant="retroInfer",
    unit=Unit.CLUSTER,
    scope=Scope.KV_HEAD,
    needs=frozenset([Need.QUERY]),
    guarantee=Guarantee.ESTIMATE,
    appendable=True,
    edit=EditCost.UNIT,
    key_frame="centred",
    estimates=True,
)


@dataclass(frozen=True, slots=True)
class Segment:
    """Clusters of the rows [first, end), padded to as many for each KV head; an absent one has 0 rows.
    centroids, sums float32 [Hk, C, d]; counts int32 [Hk, C]; members int64 [Hk, end - first], cluster by
    cluster, rows ascending. None that contradicts itself can be made: CoreError says what is wrong."""

    first: int
    end: int
    centroids: NDArray[np.float32]
    sums: NDArray[np.float32]
    counts: NDArray[np.int32]
    members: Rows
    sha: str = field(init=False, default="")

    def __post_init__(self) -> None:
        if not self.centroids.shape == self.sums.shape or self.centroids.shape[:2] != self.counts.shape:
            raise CoreError(
                Reason.SELECTOR_STATE_MIXED, "centroids, sums of V and counts of different builds"
            )
        if (self.counts < 0).any():
            raise CoreError(Reason.CENTROID_MASS, "a cluster of fewer than no rows")
        if (self.counts.sum(1) != self.end - self.first).any():
            raise CoreError(Reason.COVERAGE_GAP, f"clusters do not count the rows {self.first}..{self.end}")
        whole = np.arange(self.first, self.end)
        if any(not np.array_equal(np.sort(head), whole) for head in self.members):
            raise CoreError(
                Reason.COVERAGE_GAP, f"clusters do not hold the rows {self.first}..{self.end} once"
            )
        object.__setattr__(self, "sha", self._digest())

    def _digest(self) -> str:
        digest = hashlib.sha256(f"{self.first}:{self.end}".encode())
        for array in (self.centroids, self.sums, self.counts, self.members):
            digest.update(np.ascontiguousarray(array).tobytes())
        return "sha256:" + digest.hexdigest()


@dataclass(frozen=True, slots=True)
class RetroIndex:
    """segments: of the rows [first, sealed). mean: float64 [Hk, d], subtracted from keys before they are
    grouped; None before the first segment. k, v: float32 entries [Hk, d] of rows [sealed, covered)."""

    facts: IndexFacts
    first: int
    segments: tuple[Segment, ...]
    mean: NDArray[np.float64] | None
    k: Growing
    v: Growing

    def __post_init__(self) -> None:
        at = self.first
        for segment in self.segments:
            if segment.first != at:
                raise CoreError(Reason.COVERAGE_GAP, f"rows {at}..{segment.first} are in no cluster")
            at = segment.end
        if len(self.k) != len(self.v) or at + len(self.k) != self.facts.covered:
            raise CoreError(
                Reason.SELECTOR_STATE_MIXED,
                f"clusters to row {at}, {len(self.k)} keys and {len(self.v)} values behind, "
                f"in an index that covers {self.facts.covered}",
            )
        if dict(self.facts.parts) != dict(_parts(self.segments)):
            raise CoreError(Reason.SELECTOR_STATE_MIXED, "a segment is not the one published with the index")

    @property
    def sealed(self) -> int:
        return self.segments[-1].end if self.segments else self.first


@dataclass(frozen=True, slots=True)
class Estimate:
    """The state of clusters that nobody reads, from their centres."""

    state: AttentionState

    def complete(self, exact: AttentionState) -> AttentionState:
        """FrameMismatch for logits of another factor."""
        frame = self.state.frame._replace(rope_epoch=exact.frame.rope_epoch)
        return merge(exact, replace(self.state, frame=frame))


@dataclass(frozen=True, slots=True)
class RetroInfer:
    """per_cluster: rows of a cluster, on average. segment: rows clustered together, at most. estimated:
    clusters of a KV head that the estimate answers for."""

    digest: str
    shape: Shape
    budget: Budget
    persistent: PersistentRows
    dense_layers: frozenset[int]
    per_cluster: int
    segment: int
    estimated: int
    iterations: int
    facts: FamilyFacts = FACTS

    @classmethod
    def from_manifest(cls, selector: Selector, shape: Shape, page_tokens: int) -> RetroInfer:
        """MANIFEST_INVALID names the field."""
        parameters = Parameters(selector)
        parameters.choice("variant", ("retroInfer",))
        per_cluster = parameters.integer("tokensPerCluster", 1, 4096)
        segment = parameters.integer("segmentTokens", 1, 65536)
        estimated = parameters.integer("estimatedClusters", 0, 65536)
        iterations = parameters.integer("iterations", 1, 1000, 10)
        parameters.done()
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
            segment=segment,
            estimated=estimated,
            iterations=iterations,
        )

    def omits(self, rows: int) -> bool:
        """Whether it could: which rows are in clusters is the index's."""
        return rows > self.persistent.sink + max(1, self.persistent.recent)

    def build(self, source: Source, k: Tensor, v: Tensor, evidence: Evidence) -> RetroIndex:
        entry = (self.shape.kv_heads, self.shape.head_dim)
        nothing = Growing(entry, np.float32)
        facts = IndexFacts(self.digest, source, epoch=0, covered=0)
        empty = RetroIndex(facts, 0, (), None, nothing, nothing)
        return self._extended(empty, k, v, whole=True)

    def append(self, index: Index, k: Tensor, v: Tensor, evidence: Evidence) -> RetroIndex:
        return self._extended(_own(index), k, v, whole=False)

    def _extended(self, own: RetroIndex, k: Tensor, v: Tensor, *, whole: bool) -> RetroIndex:
        """whole: a last segment may be shorter than segmentTokens, as in a build."""
        if k.shape != v.shape:
            raise CoreError(Reason.ROW_INCOMPLETE, f"{tuple(k.shape)} keys and {tuple(v.shape)} values")
        keys = own.k.plus(k.detach().to("cpu").numpy())
        values = own.v.plus(v.detach().to("cpu").numpy())
        covered = own.facts.covered + len(k)
        first, segments, mean = own.first, list(own.segments), own.mean
        begin = 0
        if not segments and first < self.persistent.sink:
            begin = min(len(keys), self.persistent.sink - first)
            first += begin
        end = len(keys) - max(1, self.persistent.recent)
        base = own.sealed
        while end - begin >= (1 if whole else self.segment):
            size = min(self.segment, end - begin)
            here = slice(begin, begin + size)
            if mean is None:
                stop = end if whole else begin + size
                mean = finite(keys.entries[begin:stop]).mean(0)
            made = self._segment(keys.entries[here], values.entries[here], mean, base + begin)
            segments.append(made)
            begin += size
        facts = replace(own.facts, epoch=own.facts.epoch + 1, covered=covered, parts=_parts(tuple(segments)))
        if begin == 0:
            return RetroIndex(facts, first, tuple(segments), mean, keys, values)
        entry, nothing = keys.entries.shape[1:], np.float32
        return RetroIndex(
            facts,
            first,
            tuple(segments),
            mean,
            Growing(entry, nothing).plus(keys.entries[begin:]),
            Growing(entry, nothing).plus(values.entries[begin:]),
        )

    def _segment(
        self,
        keys: NDArray[np.float32],
        values: NDArray[np.float32],
        mean: NDArray[np.float64],
        first: int,
    ) -> Segment:
        heads, d = self.shape.kv_heads, self.shape.head_dim
        most = min(len(keys), max(1, -(-len(keys) // self.per_cluster)))
        centroids, sums = np.zeros((heads, most, d), np.float32), np.zeros((heads, most, d), np.float32)
        counts = np.zeros((heads, most), np.int32)
        members = np.empty((heads, len(keys)), np.int64)
        for head in range(heads):
            raw = finite(keys[:, head])
            labels = lloyd(raw - mean[head], even_starts(len(raw), most), self.iterations, spherical=True)
            found = int(labels.max()) + 1
            centres, rows = means(raw, labels, found)
            averages, _ = means(values[:, head].astype(np.float64), labels, found)
            centroids[head, :found], counts[head, :found] = centres, rows
            sums[head, :found] = averages * rows[:, None]
            members[head] = first + np.argsort(labels, kind="stable")
        return Segment(first, first + len(keys), centroids, sums, counts, members)

    def edit(self, index: Index, edit: Edit) -> Index | NeedsRebuild:
        """Segments that end before the change and before the rows that are recent then are kept."""
        own = _own(index)
        kept = min(edit.first, own.facts.covered)
        source = replace(own.facts.source, position_epoch=edit.epoch)
        held = tuple(one for one in own.segments if one.end <= kept - max(1, self.persistent.recent))
        if len(held) == len(own.segments) and kept >= own.sealed:
            facts = replace(own.facts, source=source, epoch=own.facts.epoch + 1, covered=kept)
            rows = kept - own.sealed
            return replace(own, facts=facts, k=own.k.first(rows), v=own.v.first(rows))
        if not held:
            return NeedsRebuild("the first segment's clusters were made of rows that changed")
        facts = replace(
            own.facts,
            source=source,
            epoch=own.facts.epoch + 1,
            covered=held[-1].end,
            parts=_parts(held),
        )
        return RetroIndex(facts, own.first, held, own.mean, own.k.first(0), own.v.first(0))

    def select(self, index: Index, query: Query) -> Selection:
        own = _own(index)
        lag = check_index(own, self, query, tail=max(1, self.persistent.recent))
        persistent = Persistent.of(self.persistent, query.rows, own.sealed)
        heads, group = self.shape.kv_heads, self.shape.group
        q = query.q.to("cpu").float()
        cent, sums, counts = (torch.from_numpy(array).unsqueeze(0) for array in self._joined(own))
        scored = centroid_score_torch(q, cent, counts, scale=self.shape.scale)
        values = scored.score[0].numpy()
        take = torch.zeros_like(counts, dtype=torch.bool)
        chosen: list[Rows] = []
        rows: list[Rows] = []
        cuts: list[tuple[float, float, int]] = []
        read = np.zeros(counts.shape[1:], dtype=np.bool_)
        for head in range(heads):
            there = np.flatnonzero(counts[0, head].numpy())
            order = there[np.argsort(-values[head, there], kind="stable")]
            count = self._fitting(counts[0, head].numpy()[order])
            mine, rest = order[:count], order[count:]
            take[0, head, torch.from_numpy(rest[: self.estimated].copy())] = True
            read[head, mine] = True
            chosen.append(np.sort(mine))
            rows.append(_members(own, head, mine))
            last = float(values[head, mine[-1]]) if count else -np.inf
            best_left = float(values[head, rest[0]]) if len(rest) else -np.inf
            cuts.append((last, best_left, int(np.count_nonzero(values[head, rest] == last)) if count else 0))
        state = centroid_estimate_torch(q, cent, counts, sums, take, scale=self.shape.scale)
        ignored = (counts[0] > 0) & ~take[0] & ~torch.from_numpy(read)
        omitted = self._share(q, cent, counts, ignored)
        joined = [persistent.joined(one) for one in rows]
        receipt = SelectionReceipt.of(
            self,
            own.facts,
            query,
            self.budget,
            got_units=tuple(len(one) for one in chosen),
            got_rows=tuple(beyond for _, beyond in joined),
            uncapped=tuple(len(one) for one in chosen),
            dropped_by_cap=(0,) * heads,
            scanned_units=int((counts > 0).sum()),
            index_bytes=4 * self.shape.head_dim * int((counts > 0).sum() + take.sum()) + 4 * counts.numel(),
            threshold=tuple(cut[0] for cut in cuts),
            runner_up=tuple(cut[1] for cut in cuts),
            ties=tuple(cut[2] for cut in cuts),
            unindexed=lag,
            omitted_mass=omitted,
            detail={
                "estimatedClusters": ",".join(str(int(one.sum())) for one in take[0]),
                "estimatedRows": ",".join(str(int(one)) for one in (counts[0] * take[0]).sum(1)),
                "ignoredClusters": ",".join(str(int(one.sum())) for one in ignored),
                "waiting": str(len(own.k)),
                "group": str(group),
            },
        )
        return Selection(
            self.facts.scope,
            tuple(positions for positions, _ in joined),
            tuple(chosen),
            receipt,
            remainder=Estimate(state) if bool(take.any()) else None,
        )

    def _joined(self, own: RetroIndex) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int32]]:
        """Centroids, sums of V and counts of all segments."""
        heads, d = self.shape.kv_heads, self.shape.head_dim
        none = np.empty((heads, 0, d), np.float32)
        return (
            np.concatenate([none, *(one.centroids for one in own.segments)], axis=1),
            np.concatenate([none, *(one.sums for one in own.segments)], axis=1),
            np.concatenate([np.empty((heads, 0), np.int32), *(one.counts for one in own.segments)], axis=1),
        )

    def _fitting(self, sizes: NDArray[np.int32]) -> int:
        """How many of the best clusters are read: those that fit whole."""
        allowed = self.budget.rows(self.shape)
        if allowed is None:
            assert self.budget.units is not None
            return min(self.budget.units, len(sizes))
        return int(np.searchsorted(np.cumsum(sizes), allowed, side="right"))

    def _share(self, q: Tensor, cent: Tensor, counts: Tensor, ignored: Tensor) -> tuple[float, ...]:
        """Of the mass of all clusters by their centres, what the ignored ones hold, a query head each."""
        whole = centroid_score_torch(q, cent, counts, scale=self.shape.scale, by_rows=True).lse
        left = torch.where(ignored.unsqueeze(0), counts, 0).to(torch.int32)
        part = centroid_score_torch(q, cent, left, scale=self.shape.scale, by_rows=True).lse
        share = torch.where(torch.isinf(part), 0.0, torch.exp((part - whole).double()))
        return tuple(float(one) for one in share[0])


def _members(own: RetroIndex, head: int, clusters: Rows) -> Rows:
    """Rows of the clusters of that KV head, numbered over all segments."""
    found, base = [np.empty(0, np.int64)], 0
    for segment in own.segments:
        size = segment.counts.shape[1]
        ends = np.cumsum(segment.counts[head], dtype=np.int64)
        for at in clusters[(clusters >= base) & (clusters < base + size)] - base:
            found.append(segment.members[head, ends[at] - segment.counts[head, at] : ends[at]])
        base += size
    return np.concatenate(found)


def _parts(segments: tuple[Segment, ...]) -> tuple[tuple[str, str], ...]:
    return tuple((f"segment{at}", one.sha) for at, one in enumerate(segments))


def _own(index: Index) -> RetroIndex:
    if not isinstance(index, RetroIndex):
        raise CoreError(Reason.SELECTOR_STALE, "this is no index of RetroInfer")
    return index
