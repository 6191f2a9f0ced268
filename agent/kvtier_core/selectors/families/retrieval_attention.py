"""RetrievalAttention: rows found by walking a graph of keys that prefill queries bridged (Liu et al., 2024).

Why it exists: the family that scores few keys, each by its true product with the query. It must not know
tiers or requests, nor RetroInfer, which the authors' later repository holds.

Build and search (specification D.5): `keygraph`. One graph per query head over the keys of its KV head, which
the heads of a group share. Rows of the sink are in no graph. Queries: the last `sampleQueries` of the rows
indexed, each against all keys, later ones too; one of 16 is held out. On those the recall of the search
against the exact best is measured, which is the receipt's confidence (the worst head's), and how far queries
lie from keys: the mean cosine of a key with its nearest other key less that of a query with its nearest key.

Life: built once; rows behind are always read. An append is refused: a key that no query of the build ranked
has no edge to it, so a row that only a later question needs would never be found. GQA: a graph and a list per
query head. Guarantee: heuristic. The index holds its own copy of K, since a walk reads keys.
"""

from __future__ import annotations

import hashlib
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
    Scope,
    Selection,
    SelectionReceipt,
    Shape,
    Source,
    Unit,
    check_index,
    check_needs,
)
from kvtier_core.selectors.families.keygraph import KeyGraph, build_graph, ranked, search
from kvtier_core.selectors.families.kmeans import finite, unit
from kvtier_core.selectors.families.parameters import Parameters, budget_of, digest_of
from kvtier_core.selectors.picking import Persistent, best
from kvtier_crds.manifest import PersistentRows, Selector

FACTS = FamilyFacts(
    family="retrievalAttention",
    unit=Unit.ROW,
    scope=Scope.QUERY_HEAD,
    needs=frozenset([Need.QUERY, Need.PREFILL_QUERIES]),
    guarantee=Guarantee.HEURISTIC,
    appendable=False,
    edit=EditCost.REBUILD,
)
_HELD_OUT = 16
_CALIBRATED = 16


@dataclass(frozen=True, slots=True)
class GraphIndex:
    """graphs: one a query head, of the rows [first, covered). keys float32 [covered - first, Hk, d]. sampled:
    the rows whose queries were taken. recall, shift: of each query head, from queries held out."""

    facts: IndexFacts
    first: int
    keys: NDArray[np.float32]
    graphs: tuple[KeyGraph, ...]
    sampled: tuple[int, int]
    recall: tuple[float, ...]
    shift: tuple[float, ...]

    def __post_init__(self) -> None:
        rows = self.facts.covered - self.first
        if len(self.keys) != rows or any(graph.size != rows for graph in self.graphs):
            raise CoreError(Reason.PARTIAL_INDEX, f"a graph or its keys end before the {rows} rows indexed")
        if self.graphs and not 0 <= self.sampled[0] < self.sampled[1] <= self.facts.covered:
            raise CoreError(Reason.RECEIPT_INCOMPLETE, "the index does not say whose queries made it")
        if len(self.recall) != len(self.graphs) or len(self.shift) != len(self.graphs):
            raise CoreError(Reason.RECEIPT_INCOMPLETE, "the index does not say how well its search does")
        if self.facts.parts != _parts(self.keys, self.graphs):
            raise CoreError(Reason.SELECTOR_STATE_MIXED, "a part is not the one published with the index")


@dataclass(frozen=True, slots=True)
class RetrievalAttention:
    """neighbours: of a query in a build. out_degree: edges of a key. width: of a search. sample: queries."""

    digest: str
    shape: Shape
    budget: Budget
    persistent: PersistentRows
    dense_layers: frozenset[int]
    neighbours: int
    out_degree: int
    width: int
    sample: int
    facts: FamilyFacts = FACTS

    @classmethod
    def from_manifest(cls, selector: Selector, shape: Shape, page_tokens: int) -> RetrievalAttention:
        """MANIFEST_INVALID names the field."""
        parameters = Parameters(selector)
        parameters.choice("variant", ("paper",), "paper")
        neighbours = parameters.integer("buildNeighbours", 1, 1024)
        width = parameters.integer("searchWidth", 1, 4096)
        out_degree = parameters.integer("outDegree", 1, 512)
        sample = parameters.integer("sampleQueries", 1, 65536, 1024)
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
            neighbours=neighbours,
            out_degree=out_degree,
            width=width,
            sample=sample,
        )

    @property
    def allowed(self) -> int:
        """Rows of one query head that the budget pays for, beyond the persistent ones."""
        rows = self.budget.units if self.budget.units is not None else self.budget.rows(self.shape)
        assert rows is not None
        return rows

    def omits(self, rows: int) -> bool:
        """Whether it could: rows behind the build are always read, and how many they are is the index's."""
        persistent = min(rows, self.persistent.sink) + min(rows, max(1, self.persistent.recent))
        return rows > persistent

    def build(self, source: Source, k: Tensor, v: Tensor, evidence: Evidence) -> GraphIndex:
        """HEAD_MAPPING_MISMATCH: queries of other heads; COVERAGE_GAP: of other rows."""
        check_needs(self, evidence)
        assert evidence.queries is not None
        if k.shape != v.shape:
            raise CoreError(Reason.ROW_INCOMPLETE, f"{tuple(k.shape)} keys and {tuple(v.shape)} values")
        queries = evidence.queries.detach().to("cpu").numpy()
        if queries.ndim != 3 or queries.shape[1] != self.shape.query_heads:
            raise CoreError(
                Reason.HEAD_MAPPING_MISMATCH,
                f"queries {queries.shape} for an index of each of {self.shape.query_heads} query heads",
            )
        if len(queries) != len(k):
            raise CoreError(Reason.COVERAGE_GAP, f"{len(queries)} queries of {len(k)} rows")
        first = min(self.persistent.sink, len(k))
        keys = np.ascontiguousarray(k.detach().to("cpu").numpy()[first:])
        facts = IndexFacts(self.digest, source, epoch=1, covered=len(k))
        if not len(keys):
            return GraphIndex(replace(facts, parts=_parts(keys, ())), first, keys, (), (0, 0), (), ())
        sampled = (max(0, len(k) - self.sample), len(k))
        made = [
            self._graph(queries[sampled[0] :, head], keys[:, head // self.shape.group])
            for head in range(self.shape.query_heads)
        ]
        graphs = tuple(graph for graph, _, _ in made)
        return GraphIndex(
            replace(facts, parts=_parts(keys, graphs)),
            first,
            keys,
            graphs,
            sampled,
            tuple(recall for _, recall, _ in made),
            tuple(shift for _, _, shift in made),
        )

    def _graph(
        self, queries: NDArray[np.float32], keys: NDArray[np.float32]
    ) -> tuple[KeyGraph, float, float]:
        """A head's graph, the recall of its search, and how far queries lie from keys."""
        q, k = finite(queries), finite(keys)
        held = np.zeros(len(q), dtype=np.bool_)
        held[_HELD_OUT - 1 :: _HELD_OUT] = True
        held[-1] = True
        used = ~held if len(q) > 1 else held
        graph = build_graph(
            q[used], k, neighbours=self.neighbours, out_degree=self.out_degree, entries=self.width
        )
        asked = q[held][-_CALIBRATED:]
        exact = ranked(asked, k, self.allowed)
        hits = 0
        for one, true in zip(asked, exact, strict=True):
            found = search(graph, keys, one, max(self.width, self.allowed))
            hits += len(np.intersect1d(best(found.scores, found.ids, self.allowed).ids, true))
        return graph, hits / exact.size, _shift(asked, k)

    def append(self, index: Index, k: Tensor, v: Tensor, evidence: Evidence) -> Index:
        raise CoreError(
            Reason.CONTEXT_HASH_MISMATCH, "a key that no query of the build ranked would never be found"
        )

    def edit(self, index: Index, edit: Edit) -> Index | NeedsRebuild:
        """Behind the build nothing of it changes."""
        own = _own(index)
        if edit.first < own.facts.covered:
            return NeedsRebuild("edges join keys that queries ranked together, and other rows have others")
        source = replace(own.facts.source, position_epoch=edit.epoch)
        return replace(own, facts=replace(own.facts, source=source, epoch=own.facts.epoch + 1))

    def select(self, index: Index, query: Query) -> Selection:
        """As the contract, and HEAD_MAPPING_MISMATCH: not one graph a query head."""
        own = _own(index)
        lag = check_index(own, self, query, tail=query.rows)
        heads, group = self.shape.query_heads, self.shape.group
        if len(own.graphs) != (heads if len(own.keys) else 0):
            raise CoreError(Reason.HEAD_MAPPING_MISMATCH, f"{len(own.graphs)} graphs for {heads} query heads")
        persistent = Persistent.of(self.persistent, query.rows, own.facts.covered)
        q = query.q[0].to("cpu").double().numpy()
        nothing = best(np.empty(0), np.empty(0, np.int64), 0)
        picked, scanned, expanded, unreached = [nothing] * heads, [0] * heads, [0] * heads, [0] * heads
        for head, graph in enumerate(own.graphs):
            found = search(graph, own.keys[:, head // group], q[head], max(self.width, self.allowed))
            ids = found.ids + own.first
            free = ~persistent.mask[ids]
            picked[head] = best(found.scores[free], ids[free], self.allowed)
            scanned[head], expanded[head] = len(ids), found.expanded
            unreached[head] = graph.unranked
        counts = tuple(len(one.ids) for one in picked)
        edges = sum(expanded) * self.out_degree
        receipt = SelectionReceipt.of(
            self,
            own.facts,
            query,
            self.budget,
            got_units=counts,
            got_rows=counts,
            uncapped=counts,
            dropped_by_cap=(0,) * heads,
            scanned_units=sum(scanned),
            index_bytes=4 * self.shape.head_dim * sum(scanned) + 8 * edges,
            threshold=tuple(one.threshold for one in picked),
            runner_up=tuple(one.runner_up for one in picked),
            ties=tuple(one.ties for one in picked),
            unindexed=lag,
            confidence=min(own.recall, default=None),
            detail={
                "queries": f"{own.sampled[0]}..{own.sampled[1]}",
                "buildNeighbours": str(self.neighbours),
                "recall": ",".join(f"{one:.3f}" for one in own.recall),
                "shift": ",".join(f"{one:.3f}" for one in own.shift),
                "visited": ",".join(map(str, scanned)),
                "expanded": ",".join(map(str, expanded)),
                "withoutEdges": ",".join(map(str, unreached)),
            },
        )
        return Selection(
            self.facts.scope,
            tuple(persistent.joined(one.ids)[0] for one in picked),
            tuple(one.ids for one in picked),
            receipt,
        )


def _shift(q: NDArray[np.float64], k: NDArray[np.float64]) -> float:
    """Mean cosine of a key with its nearest other key less that of a query with its nearest key."""
    keys = unit(k)
    near = unit(q) @ keys.T
    at = np.linspace(0, len(keys) - 1, min(len(keys), _CALIBRATED)).astype(np.int64)
    among = keys[at] @ keys.T
    among[np.arange(len(at)), at] = -1.0
    return float(among.max(1).mean() - near.max(1).mean())


def _parts(keys: NDArray[np.float32], graphs: tuple[KeyGraph, ...]) -> tuple[tuple[str, str], ...]:
    return (
        ("keys", _sha(keys)),
        *(
            (f"graph{at}", _sha(graph.lists, graph.starts, graph.targets, graph.via, graph.entries))
            for at, graph in enumerate(graphs)
        ),
    )


def _sha(*arrays: NDArray[np.generic]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.shape}{array.dtype}".encode() + np.ascontiguousarray(array).tobytes())
    return "sha256:" + digest.hexdigest()


def _own(index: Index) -> GraphIndex:
    if not isinstance(index, GraphIndex):
        raise CoreError(Reason.SELECTOR_STALE, "this is no index of RetrievalAttention")
    return index
