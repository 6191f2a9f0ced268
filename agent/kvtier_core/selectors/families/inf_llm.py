"""InfLLM: units of a fixed size, recalled whole by rows that later queries looked at (Xiao et al., 2024).

Why it exists: the family whose index is made of attention that has happened: what represents a unit is
decided by queries behind it. It must not know tiers or requests.

Formulas (specification D.8; representatives.py has those of influence and scores). Rows behind the sink are
cut into units of `unitTokens`. A unit is sealed when all its rows have `influenceTokens` queries behind them,
and can be recalled when it lies outside the recent rows. The units of largest score are read whole, one list
for all heads; rows of no sealed, distant unit are always read.

Variants: "paper", influence is a mean of logits; "referenceCode", the attention that a row receives. The
paper sums a unit's representatives and the code takes their mean: with as many in each unit the order is the
same. Both give recalled rows one common distance; here rows keep the positions that they have
(positionPolicy "original" in the receipt), so keys and queries are those of attention.

Guarantee: heuristic. GQA: representatives for each query head, over the keys of its KV head; scores are
summed over all query heads. Wrong when no query behind a row looked at it before it left the window, and when
one loud head decides for all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
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
from kvtier_core.selectors.families.parameters import Parameters, budget_of, digest_of
from kvtier_core.selectors.families.representatives import (
    VARIANTS,
    Pending,
    Rule,
    Runs,
    check_recall,
    check_rows,
)
from kvtier_core.selectors.picking import Persistent, best
from kvtier_crds.manifest import PersistentRows, Selector

FACTS = FamilyFacts(
    family="infLlm",
    unit=Unit.UNIT,
    scope=Scope.LAYER,
    needs=frozenset([Need.QUERY, Need.PREFILL_QUERIES]),
    guarantee=Guarantee.HEURISTIC,
    appendable=True,
    edit=EditCost.UNIT,
    order_sensitive=True,
    incremental=True,
)


@dataclass(frozen=True, slots=True)
class SealedUnits:
    """units: sealed, from the sink on. pending: rows up to `covered` that seal the next ones."""

    facts: IndexFacts
    units: Runs
    pending: Pending


@dataclass(frozen=True, slots=True)
class InfLlm:
    """unit: rows of one. rule: how rows come to represent it. allowed: units that the budget pays."""

    digest: str
    shape: Shape
    budget: Budget
    persistent: PersistentRows
    dense_layers: frozenset[int]
    unit: int
    rule: Rule
    allowed: int
    facts: FamilyFacts

    @classmethod
    def from_manifest(cls, selector: Selector, shape: Shape, page_tokens: int) -> InfLlm:
        """MANIFEST_INVALID names the field; REP_BUDGET: more representatives than rows."""
        parameters = Parameters(selector)
        unit = parameters.integer("unitTokens", 1, 4096)
        count = parameters.integer("representatives", 1, 4096)
        recent = max(1, selector.persistent_rows.recent)
        following = parameters.integer("influenceTokens", 1, 65536, min(65536, recent))
        variant = parameters.choice("variant", VARIANTS, "paper")
        parameters.done()
        if count > unit:
            raise CoreError(
                Reason.REP_BUDGET, f"infLlm.representatives {count} of infLlm.unitTokens {unit} rows"
            )
        budget = budget_of(selector)
        rows = budget.rows(shape)
        allowed = budget.units if budget.units is not None else (rows or 0) // unit
        if not allowed:
            raise CoreError(Reason.MANIFEST_INVALID, f"the budget pays no unit of {unit} rows")
        return cls(
            digest=digest_of(selector),
            shape=shape,
            budget=budget,
            persistent=selector.persistent_rows,
            dense_layers=frozenset(selector.dense_layers),
            unit=unit,
            rule=Rule(shape, count, following, variant),
            allowed=allowed,
            facts=replace(FACTS, variant="" if variant == "paper" else variant),
        )

    def omits(self, rows: int) -> bool:
        """Whether more units can be recalled than the budget pays, the index having seen all rows."""
        distant = rows - max(1, self.persistent.recent, self.rule.following) - self.persistent.sink
        return distant // self.unit > self.allowed

    def build(self, source: Source, k: Tensor, v: Tensor, evidence: Evidence) -> SealedUnits:
        empty = SealedUnits(
            IndexFacts(self.digest, source, epoch=0, covered=0),
            Runs.none(self.shape, self.rule.count),
            Pending.none(self.shape),
        )
        return self.append(empty, k, v, evidence)

    def append(self, index: Index, k: Tensor, v: Tensor, evidence: Evidence) -> SealedUnits:
        own = _own(index)
        check_needs(self, evidence)
        check_rows(self.shape, k, v, evidence)
        assert evidence.queries is not None
        pending = own.pending.plus(
            k.detach().to("cpu").float().numpy(), evidence.queries.detach().to("cpu").float().numpy()
        )
        units = own.units
        first = units.end(self.persistent.sink)
        while first + self.unit + self.rule.following <= pending.end:
            units = units.plus(self.rule.run(pending, first, first + self.unit))
            first += self.unit
        return self._made(own, units, pending.since(first - self.rule.history))

    def edit(self, index: Index, edit: Edit) -> Index | NeedsRebuild:
        """Units that no query at or behind the first changed row decided about stay. When one goes whose rows
        are no longer held, the index ends before it, and its rows are appended anew."""
        own = _own(index)
        ends = own.units.bounds.entries[:, 1] + self.rule.following
        kept = int(np.searchsorted(ends, edit.first, side="right"))
        units = own.units.first(kept)
        first = units.end(self.persistent.sink)
        if own.pending.base <= max(0, first - self.rule.history):
            pending = own.pending.until(edit.first)
        elif kept and self.rule.history:
            return NeedsRebuild("attention received needs rows before the units, which are no longer held")
        else:
            pending = replace(Pending.none(self.shape), base=first if kept else 0)
        made = self._made(own, units, pending)
        return replace(
            made, facts=replace(made.facts, source=replace(made.facts.source, position_epoch=edit.epoch))
        )

    @staticmethod
    def _made(own: SealedUnits, units: Runs, pending: Pending) -> SealedUnits:
        parts = (("units", str(len(units))), ("pending", f"{pending.base}:{pending.end}"))
        facts = replace(own.facts, epoch=own.facts.epoch + 1, covered=pending.end, parts=parts)
        return SealedUnits(facts, units, pending)

    def check(self, index: SealedUnits) -> None:
        """SELECTOR_STATE_MIXED, UNIT_PARTITION: parts that do not belong together."""
        if index.pending.end != index.facts.covered:
            raise CoreError(
                Reason.SELECTOR_STATE_MIXED,
                f"rows are held up to {index.pending.end}, the index covers {index.facts.covered}",
            )
        index.units.check(self.persistent.sink, (self.unit, self.unit), index.facts.covered)

    def select(self, index: Index, query: Query) -> Selection:
        own = _own(index)
        check_index(own, self, query, tail=max(1, self.persistent.recent))
        self.check(own)
        distant = own.units.outside(query.rows - max(1, self.persistent.recent))
        recalled = own.units.first(distant)
        frontier = recalled.end(self.persistent.sink)
        persistent = Persistent.of(self.persistent, query.rows, frontier)
        scores = recalled.scores(query.q.to("cpu").float().numpy())
        picked = best(scores, np.arange(distant), self.allowed)
        positions, rows = persistent.joined(recalled.members(picked.ids))
        receipt = SelectionReceipt.of(
            self,
            own.facts,
            query,
            self.budget,
            got_units=(len(picked.ids),),
            got_rows=(rows,),
            uncapped=(len(picked.ids),),
            dropped_by_cap=(0,),
            scanned_units=distant,
            index_bytes=4 * distant * self.shape.query_heads * self.shape.head_dim,
            threshold=(picked.threshold,),
            runner_up=(picked.runner_up,),
            ties=(picked.ties,),
            unindexed=max(0, query.rows - max(frontier, self.persistent.sink)),
            detail={
                "unitTokens": str(self.unit),
                "representatives": str(self.rule.count),
                "influenceTokens": str(self.rule.following),
                "unitBudget": str(self.allowed),
                "units": ",".join(map(str, picked.ids.tolist())),
                "scores": ",".join(f"{scores[unit]:.6g}" for unit in picked.ids),
                "positionPolicy": "original",
            },
        )
        selection = Selection(self.facts.scope, (positions,), (picked.ids,), receipt)
        check_recall(selection, recalled, persistent.rows)
        return selection


def _own(index: Index) -> SealedUnits:
    if not isinstance(index, SealedUnits):
        raise CoreError(Reason.SELECTOR_STALE, "this is no index of InfLLM")
    return index
