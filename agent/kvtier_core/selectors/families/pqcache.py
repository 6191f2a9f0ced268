"""PQCache: rows ranked by product-quantised keys, a byte or two each (Zhang et al., 2024).

Why it exists: the family with the smallest index that still sees every row. It must not know tiers or
requests.

Formulas (specification D.4). A key is split into m parts of d/m channels. For each KV head and part, k-means
(Euclidean) over the rows behind the sink gives 2^bits centroids c; code_j(i) = the nearest centroid of part j
of row i, the lowest id of equals. Per query head s_i = t sum_j q_j . c_{j, code_j(i)}, t the factor on q.k.
Rows of the middle, behind the sink and before the recent ones, are ranked by the sum over the group of
softmax(s), taken over the middle: the authors' code sums probabilities, not logits. Full rows are read.

Life. Codebooks are made once, of all rows behind the sink that are there when these are at least
`trainTokens` (a prefill, as published). Before that every row is read, as in the authors' code, and the keys
wait. Later rows take the nearest centroid there is: centroids never move, so appending is not training anew.
An edit cuts codes; one that leaves fewer rows than training needs asks for another build.

Estimate. What is left out of the middle, beside the exact weight of the sink, the coded weight of recent rows
and the exact weight of rows outside the index whose keys came with the query: as unsure as the ranking.
Guarantee: heuristic. A centroid may be the nearest and the order still be wrong: s errs by q . (k - k').
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

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
from kvtier_core.selectors.families.codebooks import (
    NARROW_BITS,
    approximate,
    coded,
    finite,
    k_means,
    scored,
    tables,
)
from kvtier_core.selectors.families.parameters import Parameters, budget_of, digest_of
from kvtier_core.selectors.growing import Growing, GrowingColumns
from kvtier_core.selectors.picking import Persistent, best, capped
from kvtier_crds.manifest import PersistentRows, Selector

FACTS = FamilyFacts(
    family="pqcache",
    unit=Unit.ROW,
    scope=Scope.KV_HEAD,
    needs=frozenset([Need.QUERY]),
    guarantee=Guarantee.HEURISTIC,
    appendable=True,
    edit=EditCost.UNIT,
    randomised=True,
)


@dataclass(frozen=True, slots=True)
class Codebooks:
    """entries: float32 [Hk, m, 2^bits, d / m]. rows: that they were made of. digest: names them."""

    entries: NDArray[np.float32]
    rows: int
    digest: str


@dataclass(frozen=True, slots=True)
class CodedRows:
    """sinks: float32 entries [Hk, d], keys of the first rows, which have no codes. waiting: float32 entries
    [Hk, d], keys behind them while there are no codebooks. codes: uint8 (uint16 above 8 bits) [Hk, m, n] of
    rows [sink, covered), made with the codebooks that `made_by` names."""

    facts: IndexFacts
    sinks: Growing
    waiting: Growing
    books: Codebooks | None
    codes: GrowingColumns
    made_by: str


@dataclass(frozen=True, slots=True)
class Pqcache:
    """subspaces: parts of a key. bits: of one code. iterations: most of k-means. train_tokens: rows behind
    the sink of which codebooks are made at the earliest."""

    digest: str
    shape: Shape
    budget: Budget
    persistent: PersistentRows
    dense_layers: frozenset[int]
    subspaces: int
    bits: int
    iterations: int
    train_tokens: int
    seed: int
    facts: FamilyFacts = FACTS

    @classmethod
    def from_manifest(cls, selector: Selector, shape: Shape, page_tokens: int) -> Pqcache:
        """MANIFEST_INVALID names the field; PQ_GEOMETRY: parts that do not divide a key."""
        parameters = Parameters(selector)
        subspaces = parameters.integer("subspaces", 1, 128)
        bits = parameters.integer("bits", 1, 12)
        iterations = parameters.integer("iterations", 1, 1000, 25)
        least = 2**bits + 1
        train_tokens = parameters.integer("trainTokens", 1, 1 << 24, least)
        parameters.done()
        if shape.head_dim % subspaces:
            raise CoreError(
                Reason.PQ_GEOMETRY,
                f"pqcache.subspaces {subspaces} does not divide a head dim of {shape.head_dim}",
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
            subspaces=subspaces,
            bits=bits,
            iterations=iterations,
            train_tokens=max(least, train_tokens),
            seed=selector.seed,
        )

    @property
    def allowed(self) -> int:
        """Rows of one KV head that the budget pays for, beyond the persistent ones."""
        rows = self.budget.units if self.budget.units is not None else self.budget.rows(self.shape)
        assert rows is not None
        return rows

    def omits(self, rows: int) -> bool:
        sink, recent = min(rows, self.persistent.sink), min(rows, max(1, self.persistent.recent))
        return rows - sink >= self.train_tokens and rows - sink - recent > self.allowed

    def build(self, source: Source, k: Tensor, v: Tensor, evidence: Evidence) -> CodedRows:
        heads, d = self.shape.kv_heads, self.shape.head_dim
        code = np.uint8 if self.bits <= NARROW_BITS else np.uint16
        empty = CodedRows(
            IndexFacts(self.digest, source, epoch=0, covered=0, seed=self.seed),
            Growing((heads, d), np.float32),
            Growing((heads, d), np.float32),
            None,
            GrowingColumns((heads, self.subspaces), code),
            "",
        )
        return self.append(empty, k, v, evidence)

    def append(self, index: Index, k: Tensor, v: Tensor, evidence: Evidence) -> CodedRows:
        own = _own(index)
        if k.shape != v.shape:
            raise CoreError(Reason.ROW_INCOMPLETE, f"{tuple(k.shape)} keys and {tuple(v.shape)} values")
        keys = k.detach().to("cpu").float().numpy()
        free = max(0, self.persistent.sink - own.facts.covered)
        own = replace(own, sinks=own.sinks.plus(keys[:free]))
        covered, rest = own.facts.covered + len(keys), keys[free:]
        if own.books is None:
            own = replace(own, waiting=own.waiting.plus(rest))
            rest = own.waiting.entries
            if len(rest) < self.train_tokens:
                return self._made(own, covered)
            # A prompt that was too short goes on row by row, in appends that are cut anyhow.
            learnt = rest if not own.facts.covered else rest[: self.train_tokens]
            books = self.train(learnt, own.facts.source.layer)
            own = replace(own, waiting=own.waiting.first(0), books=books, made_by=books.digest)
        assert own.books is not None
        return self._made(replace(own, codes=own.codes.plus(coded(rest, own.books.entries))), covered)

    def train(self, keys: NDArray[np.float32], layer: int) -> Codebooks:
        """Codebooks of keys [n, Hk, d], n at least 2^bits; the same for the same keys, seed and layer."""
        entries = np.empty(self._entries_shape, dtype=np.float32)
        width = entries.shape[3]
        for head in range(self.shape.kv_heads):
            for part in range(self.subspaces):
                random = np.random.default_rng([self.seed, layer, head, part])
                mine = finite(keys[:, head, part * width : (part + 1) * width])
                entries[head, part] = k_means(mine, 2**self.bits, self.iterations, random)
        digest = hashlib.sha256(entries.tobytes()).hexdigest()[:16]
        return Codebooks(entries, len(keys), digest)

    @property
    def _entries_shape(self) -> tuple[int, int, int, int]:
        return self.shape.kv_heads, self.subspaces, 2**self.bits, self.shape.head_dim // self.subspaces

    def edit(self, index: Index, edit: Edit) -> Index | NeedsRebuild:
        """Rows that are gone are cut; rows that moved are appended anew, coded by the centroids there are."""
        own = _own(index)
        kept = min(edit.first, own.facts.covered)
        behind = max(0, kept - self.persistent.sink)
        if own.books is not None and behind < self.train_tokens:
            return NeedsRebuild(
                f"codebooks were made of {own.books.rows} rows, {behind} coded rows are left and "
                f"{self.train_tokens} are needed to make others"
            )
        facts = replace(own.facts, source=replace(own.facts.source, position_epoch=edit.epoch))
        cut = replace(
            own,
            facts=facts,
            sinks=own.sinks.first(min(len(own.sinks), kept)),
            waiting=own.waiting.first(min(len(own.waiting), behind)),
            codes=own.codes.first(min(len(own.codes), behind)),
        )
        return self._made(cut, kept)

    @staticmethod
    def _made(own: CodedRows, covered: int) -> CodedRows:
        parts = (
            ("books", "" if own.books is None else own.books.digest),
            ("codes", f"{own.made_by}:{len(own.codes)}"),
            ("waiting", str(len(own.waiting))),
        )
        return replace(own, facts=replace(own.facts, epoch=own.facts.epoch + 1, covered=covered, parts=parts))

    def check(self, own: CodedRows) -> None:
        """Whether the parts of an index belong together. PARTIAL_INDEX, PQ_GEOMETRY, COVERAGE_GAP and
        SELECTOR_STATE_MIXED say what does not."""
        rows = len(own.sinks) + len(own.waiting) + len(own.codes)
        if rows != own.facts.covered:
            raise CoreError(
                Reason.COVERAGE_GAP, f"{rows} keys and codes in an index that covers {own.facts.covered} rows"
            )
        if own.books is None:
            if len(own.codes):
                raise CoreError(Reason.PARTIAL_INDEX, f"{len(own.codes)} codes without codebooks")
            return
        if own.books.entries.shape[0] != self.shape.kv_heads:
            raise CoreError(
                Reason.PARTIAL_INDEX,
                f"codebooks of {own.books.entries.shape[0]} of {self.shape.kv_heads} KV heads",
            )
        if own.books.entries.shape != self._entries_shape:
            raise CoreError(
                Reason.PQ_GEOMETRY, f"codebooks {own.books.entries.shape} are not {self._entries_shape}"
            )
        if own.made_by != own.books.digest:
            raise CoreError(
                Reason.SELECTOR_STATE_MIXED, f"codes of codebooks {own.made_by}, not {own.books.digest}"
            )
        largest = int(own.codes.entries.max(initial=0))
        if largest >= 2**self.bits:
            raise CoreError(Reason.PQ_GEOMETRY, f"code {largest} of {2**self.bits} centroids")

    def verify(self, index: Index, k: Tensor) -> None:
        """Whether the codes are those of keys k [covered, Hk, d]. COVERAGE_GAP: other rows; PQ_CODE_INVALID:
        a centroid that is not the nearest. For who restores an index or audits one."""
        own = _own(index)
        self.check(own)
        if k.shape[0] != own.facts.covered:
            raise CoreError(Reason.COVERAGE_GAP, f"{k.shape[0]} keys for {own.facts.covered} rows")
        if own.books is None:
            return
        keys = k.detach().to("cpu").float().numpy()[len(own.sinks) :]
        wrong = np.argwhere(coded(keys, own.books.entries) != own.codes.entries)
        if len(wrong):
            head, part, row = wrong[0].tolist()
            raise CoreError(
                Reason.PQ_CODE_INVALID,
                f"row {row + len(own.sinks)} of KV head {head} has a nearer centroid in part {part}",
            )

    def select(self, index: Index, query: Query) -> Selection:
        own = _own(index)
        lag = check_index(own, self, query, tail=max(1, self.persistent.recent))
        self.check(own)
        if query.tail is not None and query.tail.shape[0] != lag:
            raise CoreError(Reason.COVERAGE_GAP, f"{query.tail.shape[0]} keys for {lag} rows outside")
        persistent = Persistent.of(self.persistent, query.rows, own.facts.covered)
        others = persistent.others
        heads = range(self.shape.kv_heads)
        omitted: tuple[float, ...] | None
        if own.books is None:
            # What the authors' code does with too few rows for codebooks, whatever the budget.
            chosen: tuple[Rows, ...] = (others,) * len(heads)
            ties: tuple[int, ...] = (0,) * len(heads)
            threshold: tuple[float, ...] = (-np.inf,) * len(heads)
            runner_up = threshold
            omitted, read = (0.0,) * self.shape.query_heads, 0
        else:
            q = query.q.to("cpu").float()
            lut = tables(q, own.books.entries)
            codes = own.codes.tensor
            score, lse = scored(lut, codes[..., : len(others)], self.shape.scale)
            values = score.numpy()
            wanted = capped(min(len(others), self.allowed), self.allowed, self.budget)
            picked = [best(values[head], others, wanted) for head in heads]
            chosen = tuple(one.ids for one in picked)
            threshold = tuple(one.threshold for one in picked)
            runner_up = tuple(one.runner_up for one in picked)
            ties = tuple(one.ties for one in picked)
            read = len(others)
            omitted = self._omitted(own, query, q, lut, lse, chosen, len(others))
        counts = tuple(len(ids) for ids in chosen)
        books = own.books
        receipt = SelectionReceipt.of(
            self,
            own.facts,
            query,
            self.budget,
            got_units=counts,
            got_rows=counts,
            uncapped=counts,
            dropped_by_cap=(0,) * len(counts),
            scanned_units=read,
            index_bytes=self._bytes(own),
            threshold=threshold,
            runner_up=runner_up,
            ties=ties,
            unindexed=lag,
            seed=self.seed,
            omitted_mass=omitted,
            detail={
                "subspaces": str(self.subspaces),
                "bits": str(self.bits),
                "codebooks": "absent" if books is None else books.digest,
                "trainedRows": "0" if books is None else str(books.rows),
                "codeFrontier": str(own.facts.covered),
                "tailWeighed": str(query.tail is not None or not lag),
            },
        )
        return Selection(
            self.facts.scope, tuple(persistent.joined(ids)[0] for ids in chosen), chosen, receipt
        )

    def _bytes(self, own: CodedRows) -> int:
        if own.books is None:
            return 0
        return own.codes.entries.nbytes + own.books.entries.nbytes + own.sinks.entries.nbytes

    def _omitted(
        self,
        own: CodedRows,
        query: Query,
        q: Tensor,
        lut: Tensor,
        lse: Tensor,
        chosen: tuple[Rows, ...],
        middle: int,
    ) -> tuple[float, ...]:
        """The share of the attention that is thought to be left out, one a query head."""
        sinks, scale = len(own.sinks), self.shape.scale
        known = own.sinks.tensor
        if query.tail is not None:
            known = torch.cat([known, query.tail.to("cpu").float()])
        shares: list[float] = []
        for head in range(self.shape.kv_heads):
            codes = own.codes.tensor[head]
            mine = slice(head * self.shape.group, (head + 1) * self.shape.group)
            exact = (q[0, mine] @ known[:, head].T).double() * scale
            recent = approximate(lut[head], codes[:, middle:], scale)
            read = approximate(lut[head], codes[:, torch.from_numpy(chosen[head] - sinks)], scale)
            weight = torch.logsumexp(torch.cat([exact, recent, read], dim=1), dim=1)
            kept = torch.exp(torch.logsumexp(read, dim=1) - lse[head])
            left = torch.log((1.0 - kept).clamp(min=0.0)) + lse[head]
            total = torch.logaddexp(left, weight)
            shares.extend(torch.exp(left - total).nan_to_num(nan=0.0).tolist())
        return tuple(shares)


def _own(index: Index) -> CodedRows:
    if not isinstance(index, CodedRows):
        raise CoreError(Reason.SELECTOR_STALE, "this is no index of PQCache")
    return index
