"""Runs of rows that are recalled as a whole, each known by a few of its rows: for units and for events.

Why it exists: families that cut a sequence into runs differ in where they cut; how rows come to represent a
run, how a run is scored and what a selection of runs must look like is the same. It must not know where cuts
come from, budgets or tiers.

Formulas (specification D.8). Influence of row m on query head h, from the l queries behind it:

    "paper"           (1/l) sum over j = 1..l of q_{m+j} . k_m
    "referenceCode"   the attention that m receives from them, each a softmax over its last l + 1 rows

The r rows of largest influence, for each query head over the key of its KV head, ties to the lower row,
represent their run; a run's vector is the sum of their keys (or their mean) and its score the sum over query
heads of q . vector.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvtier_core.errors import CoreError, Reason
from kvtier_core.selectors.contract import Evidence, Guarantee, Rows, Scope, Selection, Shape
from kvtier_core.selectors.growing import Growing

VARIANTS = ("paper", "referenceCode")
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Influence:
    """values: float64 [Hq, last - first] of rows [first, last). queries: the rows [from, to) whose queries
    decided."""

    first: int
    last: int
    values: Floats
    queries: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Run:
    """Rows [first, last). rows: int64 [Hq, r], those that represent it, by falling influence, -1 where the
    run has fewer. vector: float32 [Hq, d]."""

    first: int
    last: int
    rows: NDArray[np.int64]
    vector: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Runs:
    """What is sealed, run by run. bounds: int64 entries [2]; rows: int64 entries [Hq, r]; vectors: float32
    entries [Hq, d]."""

    bounds: Growing
    rows: Growing
    vectors: Growing

    @classmethod
    def none(cls, shape: Shape, count: int) -> Runs:
        return cls(
            Growing((2,), np.int64),
            Growing((shape.query_heads, count), np.int64),
            Growing((shape.query_heads, shape.head_dim), np.float32),
        )

    def __len__(self) -> int:
        return len(self.bounds)

    def plus(self, run: Run) -> Runs:
        return Runs(
            self.bounds.plus(np.array([[run.first, run.last]])),
            self.rows.plus(run.rows[None]),
            self.vectors.plus(run.vector[None]),
        )

    def first(self, count: int) -> Runs:
        return Runs(self.bounds.first(count), self.rows.first(count), self.vectors.first(count))

    def end(self, origin: int) -> int:
        """The row behind the last run."""
        return int(self.bounds.entries[-1, 1]) if len(self) else origin

    def outside(self, rows: int) -> int:
        """How many runs end at or before row `rows`."""
        return int(np.searchsorted(self.bounds.entries[:, 1], rows, side="right"))

    def members(self, ids: Rows) -> Rows:
        """The rows of runs `ids`, ascending."""
        bounds = self.bounds.entries[np.sort(ids)]
        return np.concatenate([np.empty(0, np.int64), *(np.arange(low, high) for low, high in bounds)])

    def scores(self, q: NDArray[np.float32]) -> Floats:
        """float64 [runs] for queries [m, Hq, d], summed over them (D.8)."""
        total = q.astype(np.float64).sum(0).reshape(-1)
        wide = self.vectors.entries.reshape(len(self), len(total)).astype(np.float64)
        return np.asarray(wide @ total)

    def check(self, origin: int, sizes: tuple[int, int], covered: int) -> None:
        """SELECTOR_STATE_MIXED: parts of different lengths. UNIT_PARTITION: runs overlap, leave a gap, lie
        behind the covered rows or have another size than `sizes` (least, most) allows."""
        if not len(self.bounds) == len(self.rows) == len(self.vectors):
            raise CoreError(
                Reason.SELECTOR_STATE_MIXED,
                f"{len(self.bounds)} bounds, {len(self.rows)} representatives, {len(self.vectors)} vectors",
            )
        bounds = self.bounds.entries
        starts = np.concatenate([[origin], bounds[:-1, 1]]) if len(bounds) else bounds[:, 0]
        length = bounds[:, 1] - bounds[:, 0]
        if (bounds[:, 0] != starts).any() or self.end(min(origin, covered)) > covered:
            raise CoreError(Reason.UNIT_PARTITION, "runs overlap, leave a gap or pass the covered rows")
        if ((length < sizes[0]) | (length > sizes[1])).any():
            raise CoreError(Reason.UNIT_PARTITION, f"a run is not of {sizes[0]} to {sizes[1]} rows")


@dataclass(frozen=True, slots=True)
class Pending:
    """Rows [base, base + n) that are not all sealed. keys: float32 entries [Hk, d]; queries: float32 entries
    [Hq, d]."""

    base: int
    keys: Growing
    queries: Growing

    @classmethod
    def none(cls, shape: Shape) -> Pending:
        return cls(
            0,
            Growing((shape.kv_heads, shape.head_dim), np.float32),
            Growing((shape.query_heads, shape.head_dim), np.float32),
        )

    @property
    def end(self) -> int:
        return self.base + len(self.keys)

    def plus(self, keys: NDArray[np.float32], queries: NDArray[np.float32]) -> Pending:
        return Pending(self.base, self.keys.plus(keys), self.queries.plus(queries))

    def until(self, row: int) -> Pending:
        """Without rows from `row` on."""
        kept = min(len(self.keys), max(0, row - self.base))
        return Pending(self.base, self.keys.first(kept), self.queries.first(kept))

    def since(self, row: int) -> Pending:
        """Without rows before `row`."""
        gone = min(len(self.keys), max(0, row - self.base))
        if not gone:
            return self
        return Pending(
            self.base + gone,
            Growing.of(self.keys.entries[gone:]),
            Growing.of(self.queries.entries[gone:]),
        )


@dataclass(frozen=True, slots=True)
class Rule:
    """How rows come to represent a run. count: r; following: l; variant: of influence; mean: of their keys
    instead of the sum."""

    shape: Shape
    count: int
    following: int
    variant: str
    mean: bool = False

    @property
    def history(self) -> int:
        """Rows before a run that its influence needs."""
        return self.following if self.variant == "referenceCode" else 0

    def influence(self, pending: Pending, first: int, last: int) -> Influence:
        """Of rows [first, last). REP_MEMBERSHIP: the queries behind them are not there."""
        to = last + self.following
        if pending.base > max(0, first - self.history) or pending.end < to:
            raise CoreError(
                Reason.REP_MEMBERSHIP,
                f"rows {first} to {last} need queries to row {to}, there are rows {pending.base} "
                f"to {pending.end}",
            )
        base = max(0, first - self.history)
        keys = pending.keys.entries[base - pending.base : to - pending.base].astype(np.float64)
        queries = pending.queries.entries[base - pending.base : to - pending.base].astype(np.float64)
        values = np.zeros((self.shape.query_heads, last - first))
        for head in range(self.shape.query_heads):
            mine = keys[:, head // self.shape.group]
            if self.variant == "paper":
                ahead = np.concatenate([np.zeros((1, mine.shape[1])), np.cumsum(queries[:, head], axis=0)])
                at = np.arange(first, last) - base
                mean = (ahead[at + 1 + self.following] - ahead[at + 1]) / self.following
                values[head] = np.einsum("nd,nd->n", mine[at], mean)
            else:
                values[head] = self._received(mine, queries[:, head], base, first, last)
        return Influence(first, last, values, (first + 1, to))

    def _received(self, keys: Floats, queries: Floats, base: int, first: int, last: int) -> Floats:
        """float64 [last - first]: attention from the queries of rows (m, m + l]."""
        found = np.zeros(last - first)
        for row in range(first + 1, last + self.following):
            low = max(0, row - self.following)
            logits = self.shape.scale * (keys[low - base : row + 1 - base] @ queries[row - base])
            weights = np.exp(logits - logits.max())
            weights /= weights.sum()
            start, stop = max(low, first), min(row, last)
            found[start - first : stop - first] += weights[start - low : stop - low]
        return found

    def run(self, pending: Pending, first: int, last: int) -> Run:
        influence = self.influence(pending, first, last)
        count = min(self.count, last - first)
        order = np.argsort(-influence.values, axis=1, kind="stable")[:, :count] + first
        rows = np.full((self.shape.query_heads, self.count), -1, dtype=np.int64)
        rows[:, :count] = order
        keys = pending.keys.entries
        heads = np.arange(self.shape.query_heads)[:, None] // self.shape.group
        picked = keys[order - pending.base, heads].astype(np.float64)
        vector = picked.mean(1) if self.mean else picked.sum(1)
        made = Run(first, last, rows, vector.astype(np.float32))
        check_run(made, influence)
        return made


def check_run(run: Run, influence: Influence) -> None:
    """REP_BUDGET: no representatives, or more than rows. REP_MEMBERSHIP: one lies outside its run, is there
    twice, has less influence than a row that is none, or was judged by queries that do not follow it."""
    if (influence.first, influence.last) != (run.first, run.last):
        raise CoreError(Reason.REP_MEMBERSHIP, "the influence is of another run's rows")
    if influence.queries[0] <= run.first:
        raise CoreError(Reason.REP_MEMBERSHIP, "queries before a row say nothing of its influence")
    for rows, values in zip(run.rows, influence.values, strict=True):
        there = rows[rows >= 0]
        if not 1 <= len(there) <= run.last - run.first:
            raise CoreError(Reason.REP_BUDGET, f"{len(there)} representatives of {run.last - run.first} rows")
        if ((there < run.first) | (there >= run.last)).any() or len(set(there.tolist())) != len(there):
            raise CoreError(Reason.REP_MEMBERSHIP, f"a representative lies outside rows {run.first} on")
        others = np.delete(values, there - run.first)
        if len(others) and others.max() > values[there - run.first].min():
            raise CoreError(Reason.REP_MEMBERSHIP, "a row of more influence represents nothing")


def check_rows(shape: Shape, k: Tensor, v: Tensor, evidence: Evidence) -> None:
    """PAYLOAD_GEOMETRY: k, v are not float [n, Hk, d] alike. COVERAGE_GAP: queries of other rows."""
    if k.dim() != 3 or tuple(k.shape[1:]) != (shape.kv_heads, shape.head_dim):
        raise CoreError(Reason.PAYLOAD_GEOMETRY, f"keys {tuple(k.shape)} are not of this layer")
    if v.shape[0] != k.shape[0]:
        raise CoreError(Reason.PAYLOAD_GEOMETRY, f"{v.shape[0]} values for {k.shape[0]} keys")
    queries = evidence.queries
    if queries is None or tuple(queries.shape) != (k.shape[0], shape.query_heads, shape.head_dim):
        raise CoreError(Reason.COVERAGE_GAP, f"the queries are not those of {k.shape[0]} rows")


def check_recall(selection: Selection, runs: Runs, persistent: Rows) -> None:
    """Whether `selection` recalls whole runs beside `persistent` rows. UNIT_BUDGET: a run that is not there.
    DUPLICATE_POSITION: one twice. ROLE_OVERLAP: one that holds a persistent row.
    CANDIDATE_USED_AS_PAYLOAD: one of which rows are missing. UNDECLARED_APPROXIMATION: claimed to be more
    than a heuristic. HEAD_MAPPING_MISMATCH: not one list for all heads."""
    if selection.receipt.guarantee is not Guarantee.HEURISTIC:
        raise CoreError(Reason.UNDECLARED_APPROXIMATION, "recalled runs are answered as something else")
    if selection.scope is not Scope.LAYER or len(selection.positions) != 1 or len(selection.units) != 1:
        raise CoreError(Reason.HEAD_MAPPING_MISMATCH, "runs are chosen once for all heads of a layer")
    units, positions = selection.units[0], selection.positions[0]
    if len(units) and not 0 <= int(units.min()) <= int(units.max()) < len(runs):
        raise CoreError(Reason.UNIT_BUDGET, f"a run is chosen that is none of {len(runs)}")
    if any(low >= high for low, high in itertools.pairwise(units.tolist())):
        raise CoreError(Reason.DUPLICATE_POSITION, "a run is chosen twice, or not in order")
    members = runs.members(units)
    if np.isin(members, persistent).any():
        raise CoreError(Reason.ROLE_OVERLAP, "a chosen run holds a row that is always read")
    if not np.isin(members, positions).all():
        raise CoreError(Reason.CANDIDATE_USED_AS_PAYLOAD, "a run is read in part, by what represents it")
