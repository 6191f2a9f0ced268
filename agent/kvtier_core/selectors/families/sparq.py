"""SparQ: rows ranked by the few channels of their keys in which the query is largest (Ribar et al., 2024).

Why it exists: the family that needs no index beyond a second layout of K. It must not know tiers or requests.

Formulas (specification D.1). Per KV head, I = the r channels with the largest sum of |q_j| over its query
heads. Per query head, s_i = t q_I . k_iI / sqrt(|q_I|_1 / |q|_1), t the factor on q.k (for t = 1/sqrt(d) it
is the paper's temperature sqrt(d |q_I|_1 / |q|_1)). Rows are ranked by the sum of s_i over the group: the
authors' code sums logits, not probabilities. With reallocation the answer is alpha y + (1 - alpha) mean(V),
alpha the share of softmax(s) that the rows read hold: what was left out is replaced by the mean of V over the
rows that the index covers, so the answer's l is an estimate.

Variants: "paper"; "llamaCpp", the two stages of a fork of llama.cpp without the correction, whatever
`meanReallocation` says; "sparF", InstInfer's: the same rows, read by whole pages of flash, a page when it
holds at least one of them, so more bytes move than are attended. All are approximate, wherever they run.

Guarantee: heuristic. Wrong when the deciding logit lies in channels that were dropped (cancellation), or when
one head of a group owns the sum of |q|.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
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
)
from kvtier_core.selectors.families.parameters import Parameters, budget_of, digest_of
from kvtier_core.selectors.growing import Growing, GrowingColumns
from kvtier_core.selectors.picking import Persistent, best, capped
from kvtier_crds.manifest import PersistentRows, Selector
from kvtier_kernels.ops.sparq_score import (
    sparq_alpha_torch,
    sparq_dims,
    sparq_remainder,
    sparq_score_torch,
)
from kvtier_kernels.state import AttentionState, merge

VARIANTS = ("paper", "llamaCpp", "sparF")
FACTS = FamilyFacts(
    family="sparq",
    unit=Unit.ROW,
    scope=Scope.KV_HEAD,
    needs=frozenset([Need.QUERY]),
    guarantee=Guarantee.HEURISTIC,
    appendable=True,
    edit=EditCost.UNIT,
    incremental=True,
)


@dataclass(frozen=True, slots=True)
class ColumnKeys:
    """keys: float32 [Hk, d, covered], channel by channel. sums: float64 entries [Hk, d], running sums of V
    after each row. Both of rows [0, covered)."""

    facts: IndexFacts
    keys: GrowingColumns
    sums: Growing

    def mean(self) -> Tensor:
        """float32 [1, Hk, d]: of V over the covered rows. MEAN_FRONTIER_MISMATCH when the sums are of
        others; SELECTOR_STATE_MIXED when K is."""
        if len(self.sums) != self.facts.covered:
            raise CoreError(
                Reason.MEAN_FRONTIER_MISMATCH,
                f"the mean of V is over {len(self.sums)} rows, the index covers {self.facts.covered}",
            )
        if len(self.keys) != self.facts.covered:
            raise CoreError(
                Reason.SELECTOR_STATE_MIXED,
                f"{len(self.keys)} keys in an index that covers {self.facts.covered}",
            )
        last = self.sums.entries[-1:] / max(1, self.facts.covered)
        return torch.from_numpy(last.astype(np.float32))


@dataclass(frozen=True, slots=True)
class MeanOfV:
    """alpha v + (1 - alpha) mean in the place of v: the rows that nobody read. alpha, lse float32 [1, Hq]."""

    alpha: Tensor
    lse: Tensor
    mean: Tensor

    def complete(self, exact: AttentionState) -> AttentionState:
        return merge(exact, sparq_remainder(exact, self.alpha, self.lse, self.mean))


@dataclass(frozen=True, slots=True)
class Sparq:
    """dimensions: channels read of each key. reallocate: the mean of V stands for rows left out. page: rows
    of one page of flash, for sparF's bytes."""

    digest: str
    shape: Shape
    budget: Budget
    persistent: PersistentRows
    dense_layers: frozenset[int]
    dimensions: int
    reallocate: bool
    page: int
    facts: FamilyFacts

    @classmethod
    def from_manifest(cls, selector: Selector, shape: Shape, page_tokens: int) -> Sparq:
        """MANIFEST_INVALID names the field; SPARQ_DIMS: more channels than a key has."""
        parameters = Parameters(selector)
        dimensions = parameters.integer("dimensions", 1, 1024)
        variant = parameters.choice("variant", VARIANTS, "paper")
        reallocate = parameters.flag("meanReallocation", default=True) and variant != "llamaCpp"
        parameters.done()
        if dimensions > shape.head_dim:
            raise CoreError(
                Reason.SPARQ_DIMS, f"sparq.dimensions {dimensions} of a head dim of {shape.head_dim}"
            )
        budget = budget_of(selector)
        if not (budget.units if budget.units is not None else budget.rows(shape)):
            raise CoreError(Reason.MANIFEST_INVALID, "the budget pays no row")
        return cls(
            digest=digest_of(selector, page_tokens if variant == "sparF" else ""),
            shape=shape,
            budget=budget,
            persistent=selector.persistent_rows,
            dense_layers=frozenset(selector.dense_layers),
            dimensions=dimensions,
            reallocate=reallocate,
            page=page_tokens,
            facts=replace(FACTS, variant=variant),
        )

    @property
    def allowed(self) -> int:
        """Rows of one KV head that the budget pays for, beyond the persistent ones."""
        rows = self.budget.units if self.budget.units is not None else self.budget.rows(self.shape)
        assert rows is not None
        return rows

    def omits(self, rows: int) -> bool:
        persistent = min(rows, self.persistent.sink) + min(rows, max(1, self.persistent.recent))
        return rows - persistent > self.allowed

    def build(self, source: Source, k: Tensor, v: Tensor, evidence: Evidence) -> ColumnKeys:
        heads, d = self.shape.kv_heads, self.shape.head_dim
        empty = ColumnKeys(
            IndexFacts(self.digest, source, epoch=0, covered=0),
            GrowingColumns((heads, d), np.float32),
            Growing((heads, d), np.float64),
        )
        return self.append(empty, k, v, evidence)

    def append(self, index: Index, k: Tensor, v: Tensor, evidence: Evidence) -> ColumnKeys:
        own = _own(index)
        if k.shape != v.shape:
            raise CoreError(Reason.ROW_INCOMPLETE, f"{tuple(k.shape)} keys and {tuple(v.shape)} values")
        before = own.sums.entries[-1] if len(own.sums) else 0.0
        sums = np.cumsum(v.to("cpu").double().numpy(), axis=0) + before
        covered = own.facts.covered + len(sums)
        columns = k.to("cpu").permute(1, 2, 0).numpy()
        return self._made(own, own.keys.plus(columns), own.sums.plus(sums), covered)

    def edit(self, index: Index, edit: Edit) -> Index | NeedsRebuild:
        """Rows that are gone are cut; rows that moved are appended anew, with their keys as they are now."""
        own = _own(index)
        kept = min(edit.first, own.facts.covered)
        cut = self._made(own, own.keys.first(kept), own.sums.first(kept), kept)
        return replace(
            cut, facts=replace(cut.facts, source=replace(cut.facts.source, position_epoch=edit.epoch))
        )

    @staticmethod
    def _made(own: ColumnKeys, keys: GrowingColumns, sums: Growing, covered: int) -> ColumnKeys:
        parts = (("keys", str(len(keys))), ("sums", str(len(sums))))
        facts = replace(own.facts, epoch=own.facts.epoch + 1, covered=covered, parts=parts)
        return ColumnKeys(facts, keys, sums)

    def select(self, index: Index, query: Query) -> Selection:
        own = _own(index)
        lag = check_index(own, self, query, tail=max(1, self.persistent.recent))
        mean = own.mean()
        q = query.q.to("cpu").float()
        dims = sparq_dims(q, self.shape.kv_heads, self.dimensions)
        keys = own.keys.tensor
        if query.tail is not None:
            if query.tail.shape[0] != lag:
                raise CoreError(Reason.COVERAGE_GAP, f"{query.tail.shape[0]} keys for {lag} rows outside")
            keys = torch.cat([keys, query.tail.to("cpu").float().permute(1, 2, 0)], dim=2)
        scored = keys.shape[2]
        scores = sparq_score_torch(
            q, keys.unsqueeze(0), dims, torch.tensor([scored], dtype=torch.int32), scale=self.shape.scale
        )
        persistent = Persistent.of(self.persistent, query.rows, own.facts.covered)
        others = persistent.others
        values = scores.score[0].numpy()
        wanted = capped(min(len(others), self.allowed), self.allowed, self.budget)
        picked = [best(values[head, others], others, wanted) for head in range(self.shape.kv_heads)]
        positions = tuple(persistent.joined(one.ids)[0] for one in picked)
        remainder = None
        detail = {
            "dims": ";".join(",".join(map(str, row)) for row in dims[0].tolist()),
            "reallocation": str(self.reallocate),
            "tailWeighed": str(query.tail is not None or not lag),
        }
        alpha = self._alpha(q, keys, dims, scores.lse, positions, scored)
        detail["alpha"] = ",".join(f"{share:.6f}" for share in alpha[0].tolist())
        if self.reallocate:
            remainder = MeanOfV(alpha, scores.lse, mean)
        if self.facts.variant == "sparF":
            detail["pagesRead"] = ",".join(str(len(np.unique(rows // self.page))) for rows in positions)
        counts = tuple(len(one.ids) for one in picked)
        receipt = SelectionReceipt.of(
            self,
            own.facts,
            query,
            self.budget,
            got_units=counts,
            got_rows=counts,
            uncapped=counts,
            dropped_by_cap=(0,) * len(counts),
            scanned_units=scored,
            index_bytes=4 * self.shape.kv_heads * (scored * self.dimensions + self.shape.head_dim),
            threshold=tuple(one.threshold for one in picked),
            runner_up=tuple(one.runner_up for one in picked),
            ties=tuple(one.ties for one in picked),
            unindexed=lag,
            detail=detail,
        )
        return Selection(
            self.facts.scope, positions, tuple(one.ids for one in picked), receipt, remainder=remainder
        )

    def _alpha(
        self,
        q: Tensor,
        keys: Tensor,
        dims: Tensor,
        lse: Tensor,
        positions: tuple[np.ndarray, ...],
        scored: int,
    ) -> Tensor:
        """float32 [1, Hq]: the share of the approximate softmax on rows that are read."""
        lists = [rows[rows < scored] for rows in positions]
        bounds = np.concatenate([[0], np.cumsum([len(rows) for rows in lists])]).astype(np.int32)
        ids = np.concatenate(lists).astype(np.int32)
        return sparq_alpha_torch(
            q,
            keys.unsqueeze(0),
            dims,
            lse,
            torch.from_numpy(bounds),
            torch.from_numpy(ids),
            scale=self.shape.scale,
        )


def _own(index: Index) -> ColumnKeys:
    if not isinstance(index, ColumnKeys):
        raise CoreError(Reason.SELECTOR_STALE, "this is no index of SparQ")
    return index
