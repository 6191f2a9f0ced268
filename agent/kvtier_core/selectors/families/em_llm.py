"""EM-LLM: events cut at surprises, recalled whole with their neighbours in time (Fountas et al., 2024).

Why it exists: the family whose units follow the text instead of a size, and that reads what happened next to
what it looked for. It must not know tiers or requests, nor the model that was surprised.

Formulas (specification D.9; segmentation.py has those of cuts, representatives.py of influence and scores).
Events of largest score are read, in that order, until the next does not fit into the budget's tokens less
`contiguityShare`. Then neighbours within `contiguityRadius` events of them, clipped to events that exist,
while they fit into the whole budget: nearer before farther, earlier before later, so that what is trimmed are
the farther and later ones, never a similar event.

Variants: "paper", influence is a mean of logits and an event's score the sum over its representatives;
"referenceCode", influence is the attention received and the score is of the mean of the representatives, so
short events are not at a disadvantage. The code keeps neighbours in a queue over queries; here they are a
function of one query, so that the same call gives the same rows.

Guarantee: heuristic. GQA: representatives for each query head, over the keys of its KV head; cuts and the
list of events are one for all heads of a layer. Wrong when a cut goes through what belongs together, and when
surprises never stand out: then every event is a slab of `maxEventTokens` rows. The surprises are evidence of
what was sampled: without the same ones an index cannot be rebuilt.
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
from kvtier_core.selectors.families.segmentation import METRICS, Boundaries, Cut, check_refined
from kvtier_core.selectors.growing import Growing
from kvtier_core.selectors.picking import Persistent, capped
from kvtier_crds.manifest import PersistentRows, Selector

FACTS = FamilyFacts(
    family="emLlm",
    unit=Unit.EVENT,
    scope=Scope.LAYER,
    needs=frozenset([Need.QUERY, Need.PREFILL_QUERIES, Need.SURPRISAL]),
    guarantee=Guarantee.HEURISTIC,
    appendable=True,
    edit=EditCost.UNIT,
    order_sensitive=True,
    fixed_size=False,
    incremental=True,
)


@dataclass(frozen=True, slots=True)
class SealedEvents:
    """surprise: float64 entries, of rows [0, covered). cuts: int64 entries [2], candidate row and whether it
    was forced. events: sealed, from the sink on, one a cut of the first ones. pending: what seals more."""

    facts: IndexFacts
    surprise: Growing
    cuts: Growing
    events: Runs
    pending: Pending


@dataclass(frozen=True, slots=True)
class Recall:
    """similar: by falling score. neighbours: by rising distance. trimmed: neighbours that did not fit."""

    similar: tuple[int, ...]
    neighbours: tuple[int, ...]
    trimmed: tuple[int, ...]

    @property
    def ids(self) -> Rows:
        return np.array(sorted({*self.similar, *self.neighbours}), dtype=np.int64)


@dataclass(frozen=True, slots=True)
class EmLlm:
    """allowed: rows that the budget pays; for_similar: of them, those that neighbours cannot take."""

    digest: str
    shape: Shape
    budget: Budget
    persistent: PersistentRows
    dense_layers: frozenset[int]
    boundaries: Boundaries
    rule: Rule
    radius: int
    allowed: int
    for_similar: int
    facts: FamilyFacts

    @classmethod
    def from_manifest(cls, selector: Selector, shape: Shape, page_tokens: int) -> EmLlm:
        """MANIFEST_INVALID names the field; TOKEN_BUDGET: events counted, or one may not fit; EVENT_SIZE,
        EVENT_BOUNDARY, EVENT_WINDOW, EVENT_METRIC, REP_BUDGET: of `Boundaries.check` and the limits."""
        parameters = Parameters(selector)
        recent = max(1, selector.persistent_rows.recent)
        metric = parameters.choice("refinement", METRICS, "none")
        search = parameters.integer("searchRadius", 0, 64, 0)
        boundaries = Boundaries(
            window=parameters.integer("window", 2, 65536),
            gamma=parameters.number("gamma", -1000.0, 1000.0),
            least=parameters.integer("minEventTokens", 1, 65536, 1),
            most=parameters.integer("maxEventTokens", 1, 65536),
            metric=metric,
            radius=search or None,
        )
        radius = parameters.integer("contiguityRadius", 0, 64, 0)
        share = parameters.number("contiguityShare", 0.0, 1.0, "0")
        count = parameters.integer("representatives", 1, 4096, 1)
        following = parameters.integer("influenceTokens", 1, 65536, min(65536, recent))
        variant = parameters.choice("variant", VARIANTS, "paper")
        parameters.done()
        boundaries.check()
        if count > boundaries.most:
            raise CoreError(
                Reason.REP_BUDGET,
                f"emLlm.representatives {count} of emLlm.maxEventTokens {boundaries.most} rows",
            )
        budget = budget_of(selector)
        allowed = budget.rows(shape)
        if allowed is None:
            raise CoreError(
                Reason.TOKEN_BUDGET, "events differ in size: a budget is of tokens or bytes, not units"
            )
        for_similar = allowed - int(share * allowed)
        if boundaries.most > for_similar:
            raise CoreError(
                Reason.TOKEN_BUDGET,
                f"an event of emLlm.maxEventTokens {boundaries.most} rows does not fit into {for_similar}",
            )
        return cls(
            digest=digest_of(selector),
            shape=shape,
            budget=budget,
            persistent=selector.persistent_rows,
            dense_layers=frozenset(selector.dense_layers),
            boundaries=boundaries,
            rule=Rule(shape, count, following, variant, mean=variant == "referenceCode"),
            radius=radius,
            allowed=allowed,
            for_similar=for_similar,
            facts=replace(FACTS, variant="" if variant == "paper" else variant),
        )

    def omits(self, rows: int) -> bool:
        """Whether it could: more rows may be sealed and distant than similar events may fill."""
        near = self.persistent.sink + max(1, self.persistent.recent, self.rule.following)
        return rows - near > self.for_similar

    def build(self, source: Source, k: Tensor, v: Tensor, evidence: Evidence) -> SealedEvents:
        empty = SealedEvents(
            IndexFacts(self.digest, source, epoch=0, covered=0),
            Growing((), np.float64),
            Growing((2,), np.int64),
            Runs.none(self.shape, self.rule.count),
            Pending.none(self.shape),
        )
        return self.append(empty, k, v, evidence)

    def append(self, index: Index, k: Tensor, v: Tensor, evidence: Evidence) -> SealedEvents:
        """EVENT_BOUNDARY: surprises of other rows, or that are no numbers (that of row 0 is 0 then)."""
        own = _own(index)
        check_needs(self, evidence)
        check_rows(self.shape, k, v, evidence)
        assert evidence.queries is not None and evidence.surprisal is not None
        fresh = _surprises(evidence.surprisal, len(k), own.facts.covered)
        surprise = own.surprise.plus(fresh)
        pending = own.pending.plus(
            k.detach().to("cpu").float().numpy(), evidence.queries.detach().to("cpu").float().numpy()
        )
        start = int(own.cuts.entries[-1, 0]) if len(own.cuts) else self.persistent.sink
        made = self.boundaries.candidates(surprise.entries, start, own.facts.covered)
        self.boundaries.check_candidates(surprise.entries, start, made)
        cuts = own.cuts.plus(np.array([(cut.row, cut.forced) for cut in made], np.int64).reshape(-1, 2))
        events = self._sealed(own.events, cuts, pending)
        kept = pending.since(events.end(self.persistent.sink) - self.rule.history)
        return self._made(own, surprise, cuts, events, kept)

    def _sealed(self, events: Runs, cuts: Growing, pending: Pending) -> Runs:
        """Events whose cut can move no more and whose rows have all queries that decide about them."""
        for at in range(len(events), len(cuts)):
            first = events.end(self.persistent.sink)
            last, waits = self._cut(first, at, cuts, pending)
            if waits or last + self.rule.following > pending.end:
                break
            events = events.plus(self.rule.run(pending, first, last))
        return events

    def _cut(self, first: int, at: int, cuts: Growing, pending: Pending) -> tuple[int, bool]:
        """The final row of cut `at`, and whether it is not final yet."""
        row, forced = cuts.entries[at].tolist()
        if forced or self.boundaries.metric == "none":
            return row, False
        if at + 1 == len(cuts):
            return row, True
        after = int(cuts.entries[at + 1, 0])
        keys = pending.keys.entries[first - pending.base : after - pending.base]
        return self.boundaries.refined(keys, first, Cut(row, False), after), False

    def edit(self, index: Index, edit: Edit) -> Index | NeedsRebuild:
        """Events that nothing at or behind the first changed row decided about stay. When one goes whose rows
        are no longer held, the index ends before it, and its rows are appended anew."""
        own = _own(index)
        kept = 0
        while kept < len(own.events) and self._decided(own, kept) <= edit.first:
            kept += 1
        events = own.events.first(kept)
        end = events.end(self.persistent.sink)
        if own.pending.base <= max(0, end - self.rule.history):
            pending = own.pending.until(edit.first)
            cuts = own.cuts.first(int(np.searchsorted(own.cuts.entries[:, 0], pending.end)))
        elif kept and self.rule.history:
            return NeedsRebuild("attention received needs rows before the events, which are no longer held")
        else:
            pending = replace(Pending.none(self.shape), base=end if kept else 0)
            cuts = own.cuts.first(kept)
        made = self._made(own, own.surprise.first(pending.end), cuts, events, pending)
        return replace(
            made, facts=replace(made.facts, source=replace(made.facts.source, position_epoch=edit.epoch))
        )

    def _decided(self, own: SealedEvents, at: int) -> int:
        """The row behind the last that event `at` depends on."""
        cuts = own.cuts.entries
        behind = int(own.events.bounds.entries[at, 1]) + self.rule.following
        moved = self.boundaries.metric != "none" and not cuts[at, 1]
        return max(behind, int(cuts[at + 1 if moved else at, 0]) + 1)

    @staticmethod
    def _made(
        own: SealedEvents, surprise: Growing, cuts: Growing, events: Runs, pending: Pending
    ) -> SealedEvents:
        parts = (
            ("events", str(len(events))),
            ("cuts", str(len(cuts))),
            ("surprise", str(len(surprise))),
            ("pending", f"{pending.base}:{pending.end}"),
        )
        facts = replace(own.facts, epoch=own.facts.epoch + 1, covered=pending.end, parts=parts)
        return SealedEvents(facts, surprise, cuts, events, pending)

    def check(self, index: SealedEvents) -> None:
        """SELECTOR_STATE_MIXED, UNIT_PARTITION, EVENT_BOUNDARY: parts that do not belong together."""
        if not index.pending.end == len(index.surprise) == index.facts.covered:
            raise CoreError(
                Reason.SELECTOR_STATE_MIXED,
                f"rows to {index.pending.end}, surprises of {len(index.surprise)}, the index covers "
                f"{index.facts.covered}",
            )
        sizes = (self.boundaries.least, self.boundaries.most)
        index.events.check(self.persistent.sink, sizes, index.facts.covered)
        sealed = index.cuts.entries[: len(index.events), 0].tolist()
        check_refined(sealed, index.events.bounds.entries[:, 1].tolist())

    def recall(self, events: Runs, scores: NDArray[np.float64]) -> Recall:
        """Which of `events` are read, by their scores [events]."""
        sizes = (events.bounds.entries[:, 1] - events.bounds.entries[:, 0]).tolist()
        ranked = np.argsort(-np.where(np.isnan(scores), np.inf, scores), kind="stable").tolist()
        total, similar = 0, []
        for event in ranked:
            if total + sizes[event] > self.for_similar:
                break
            similar.append(event)
            total += sizes[event]
        wanted = [
            event
            for distance in range(1, self.radius + 1)
            for side in (-distance, distance)
            for event in (one + side for one in similar)
            if 0 <= event < len(events)
        ]
        near = [event for event in dict.fromkeys(wanted) if event not in set(similar)]
        taken = 0
        for event in near:
            if total + sizes[event] > self.allowed:
                break
            total += sizes[event]
            taken += 1
        return Recall(tuple(similar), tuple(near[:taken]), tuple(near[taken:]))

    def check_events(self, recall: Recall, ids: Rows, events: Runs) -> None:
        """EVENT_NEIGHBOUR: an event that does not exist, or lies outside the radius of all similar ones.
        TOKEN_BUDGET: more rows than the budget pays."""
        for event in ids.tolist():
            near = any(abs(event - one) <= self.radius for one in recall.similar)
            if not 0 <= event < len(events) or not near:
                raise CoreError(Reason.EVENT_NEIGHBOUR, f"event {event} is no neighbour of a similar one")
        rows = len(events.members(ids))
        if rows > self.allowed:
            raise CoreError(Reason.TOKEN_BUDGET, f"events of {rows} rows, the budget pays {self.allowed}")

    def select(self, index: Index, query: Query) -> Selection:
        own = _own(index)
        check_index(own, self, query, tail=max(1, self.persistent.recent))
        self.check(own)
        distant = own.events.outside(query.rows - max(1, self.persistent.recent))
        events = own.events.first(distant)
        frontier = events.end(self.persistent.sink)
        persistent = Persistent.of(self.persistent, query.rows, frontier)
        scores = events.scores(query.q.to("cpu").float().numpy())
        recall = self.recall(events, scores)
        ids = recall.ids
        self.check_events(recall, ids, events)
        wanted = len(ids) + len(recall.trimmed)
        if capped(wanted, len(ids), self.budget) < 0:
            ids = np.arange(distant)
        positions, rows = persistent.joined(events.members(ids))
        left = [float(scores[event]) for event in range(distant) if event not in set(recall.similar)]
        chosen = [float(scores[event]) for event in recall.similar]
        receipt = SelectionReceipt.of(
            self,
            own.facts,
            query,
            self.budget,
            got_units=(len(ids),),
            got_rows=(rows,),
            uncapped=(wanted,),
            dropped_by_cap=(max(0, wanted - len(ids)),),
            scanned_units=distant,
            index_bytes=4 * distant * self.shape.query_heads * self.shape.head_dim,
            threshold=(min(chosen, default=-np.inf),),
            runner_up=(max(left, default=-np.inf),),
            ties=(left.count(min(chosen)) if chosen else 0,),
            unindexed=max(0, query.rows - max(frontier, self.persistent.sink)),
            detail=self._detail(own, recall, ids, rows),
        )
        selection = Selection(self.facts.scope, (positions,), (ids,), receipt)
        check_recall(selection, events, persistent.rows)
        return selection

    def _detail(self, own: SealedEvents, recall: Recall, ids: Rows, rows: int) -> dict[str, str]:
        bounds, cuts = own.events.bounds.entries[ids], own.cuts.entries[ids, 0]
        return {
            "window": str(self.boundaries.window),
            "gamma": f"{self.boundaries.gamma:g}",
            "refinement": self.boundaries.metric,
            "representatives": str(self.rule.count),
            "influenceTokens": str(self.rule.following),
            "similar": ",".join(map(str, recall.similar)),
            "neighbours": ",".join(map(str, recall.neighbours)),
            "trimmed": ",".join(map(str, recall.trimmed)),
            "candidates": ",".join(map(str, cuts.tolist())),
            "bounds": ",".join(f"{low}:{high}" for low, high in bounds.tolist()),
            "tokens": f"{rows}/{self.allowed}",
            "positionPolicy": "original",
        }


def _surprises(given: NDArray[np.float64], rows: int, first: int) -> NDArray[np.float64]:
    fresh = np.array(given, dtype=np.float64)
    if fresh.shape != (rows,):
        raise CoreError(Reason.EVENT_BOUNDARY, f"surprises {fresh.shape} of {rows} rows")
    if first == 0 and rows and not np.isfinite(fresh[0]):
        fresh[0] = 0.0
    if not np.isfinite(fresh).all():
        raise CoreError(Reason.EVENT_BOUNDARY, "a surprise is no number")
    return fresh


def _own(index: Index) -> SealedEvents:
    if not isinstance(index, SealedEvents):
        raise CoreError(Reason.SELECTOR_STALE, "this is no index of EM-LLM")
    return index
