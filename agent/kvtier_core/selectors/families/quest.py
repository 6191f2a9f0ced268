"""Quest: pages ranked by an upper bound of any row's logit, from the box around each page's keys.

Why it exists: a small index of pages whose rank is a bound. It must not know tiers, V, or what the rows that
it leaves out hold.

Formula (specification D.2): with box [m, M] of a page, U = sum_j max(q_j m_j, q_j M_j) = relu(q).M -
relu(-q).m, unscaled. Per KV head, the bound of a page is the largest over the query heads of its group, which
keeps it an upper bound for each of them. In float32 it holds within d 2^-22 |q|_1 max|k|, which `bounds`
adds; ranks are of U as it is.

Published paths differ. `kernel`: the last page, which may still grow, takes one slot of the budget and is
read whole; the P - 1 best others take the rest. `evaluation`: the last page competes like all others, and at
least three pages are read. Rows that every query reads are read besides; pages of such rows alone do not
compete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtier_core.errors import CoreError, Reason
from kvtier_core.selectors.contract import (
    Budget,
    CapPolicy,
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
from kvtier_core.selectors.families.parameters import Parameters, budget_of, digest_of
from kvtier_core.selectors.growing import Growing
from kvtier_core.selectors.picking import Persistent, Picked, best
from kvtier_crds.manifest import PersistentRows, Selector
from kvtier_kernels.ops.quest import quest_boxes, quest_score

KERNEL, EVALUATION = "kernel", "evaluation"
_LEAST_PAGES = 3
_F32 = 4
FACTS = FamilyFacts(
    family="quest",
    unit=Unit.PAGE,
    scope=Scope.KV_HEAD,
    needs=frozenset([Need.QUERY]),
    guarantee=Guarantee.UPPER_BOUND,
    appendable=True,
    edit=EditCost.UNIT,
    incremental=True,
)


@dataclass(frozen=True, slots=True)
class PageBoxes:
    """low, high: float32 entries [Hk, d], one a full page. open_low, open_high: float32 [1, Hk, d], of the
    rows behind them; [0, Hk, d] without such rows. largest: the largest finite |k| of any row."""

    facts: IndexFacts
    low: Growing
    high: Growing
    open_low: Tensor
    open_high: Tensor
    largest: float

    def boxes(self, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Smallest and largest keys float32 [end - first, Hk, d] of pages [first, end)."""
        low, high = self.low.tensor[first:end], self.high.tensor[first:end]
        if end <= len(self.low):
            return low, high
        return torch.cat([low, self.open_low]), torch.cat([high, self.open_high])


@dataclass(frozen=True, slots=True)
class Quest:
    """page_tokens: rows of a page. pages: the budget in pages of a KV head; in path `kernel` one of them is
    the last page."""

    digest: str
    shape: Shape
    budget: Budget
    persistent: PersistentRows
    dense_layers: frozenset[int]
    page_tokens: int
    pages: int
    facts: FamilyFacts

    @classmethod
    def from_manifest(cls, selector: Selector, shape: Shape, page_tokens: int) -> Quest:
        """Reads `pageTokens` (default: the cache's), `variant` and the budget. MANIFEST_INVALID, also for
        what the manifest promises and Quest cannot keep."""
        parameters = Parameters(selector)
        size = parameters.integer("pageTokens", 1, 1 << 20, page_tokens)
        variant = parameters.choice("variant", (KERNEL, EVALUATION), KERNEL)
        parameters.done()
        if selector.gate is not None:
            raise CoreError(
                Reason.MANIFEST_INVALID,
                "selector.gate cannot be kept: quest has no estimator of omitted mass",
            )
        budget = budget_of(selector)
        if budget.cap_policy is not CapPolicy.TRUNCATE:
            raise CoreError(
                Reason.MANIFEST_INVALID,
                f"selector.budget.capPolicy {budget.cap_policy} cannot run; legal: truncate",
            )
        page_bytes = size * shape.kv_heads * shape.head_dim * 2 * _F32
        pages = budget.units if budget.units is not None else (budget.rows(shape) or 0) // size
        if pages < 1:
            raise CoreError(
                Reason.MANIFEST_INVALID,
                f"the budget pays no page; one page is {size} tokens or {page_bytes} bytes",
                {"page_tokens": size, "page_bytes": page_bytes},
            )
        return cls(
            digest=digest_of(selector, size),
            shape=shape,
            budget=budget,
            persistent=selector.persistent_rows,
            dense_layers=frozenset(selector.dense_layers),
            page_tokens=size,
            pages=pages,
            facts=replace(FACTS, variant="" if variant == KERNEL else variant),
        )

    @property
    def _competes(self) -> bool:
        """Whether the last page does."""
        return self.facts.variant == EVALUATION

    @property
    def slots(self) -> int:
        """Pages of a KV head that a score decides about."""
        return max(_LEAST_PAGES, self.pages) if self._competes else self.pages - 1

    def competitors(self, rows: int) -> Rows:
        """Pages that a score decides about: with a row that is neither sink nor recent, and in path `kernel`
        not the last one."""
        recent = self.persistent.recent if not self._competes else max(1, self.persistent.recent)
        if self.persistent.sink >= rows - recent:
            return np.empty(0, dtype=np.int64)
        first = self.persistent.sink // self.page_tokens
        end = -(-max(0, rows - recent) // self.page_tokens)
        if not self._competes:
            end = min(self.last_page(rows), end)
        return np.arange(min(first, end), end, dtype=np.int64)

    def last_page(self, rows: int) -> int:
        return (rows - 1) // self.page_tokens

    def omits(self, rows: int) -> bool:
        return len(self.competitors(rows)) > self.slots

    def build(self, source: Source, k: Tensor, v: Tensor, evidence: Evidence) -> PageBoxes:
        entry = (self.shape.kv_heads, self.shape.head_dim)
        none = torch.empty(0, *entry, dtype=torch.float32)
        facts = IndexFacts(self.digest, source, epoch=0, covered=0)
        empty = PageBoxes(facts, Growing(entry, np.float32), Growing(entry, np.float32), none, none, 0.0)
        return self.append(empty, k, v, evidence)

    def append(self, index: Index, k: Tensor, v: Tensor, evidence: Evidence) -> PageBoxes:
        """Rows widen the box of the last page until it is full; the first row of a page starts its box."""
        own = _own(index)
        rows = k.detach().to("cpu").float()
        covered = own.facts.covered + len(rows)
        started = own.facts.covered % self.page_tokens
        at = min(len(rows), self.page_tokens - started) if started else 0
        parts: list[tuple[Tensor, Tensor]] = []
        if at:
            low, high = quest_boxes(rows[:at], self.page_tokens)
            widened = torch.minimum(own.open_low, low), torch.maximum(own.open_high, high)
            parts.append(widened)
        elif started:
            parts.append((own.open_low, own.open_high))
        parts.append(quest_boxes(rows[at:], self.page_tokens))
        low, high = (torch.cat([part[side] for part in parts]) for side in (0, 1))
        full = covered // self.page_tokens - len(own.low)
        finite = torch.where(rows.isfinite(), rows.abs(), 0.0)
        largest = max(own.largest, float(finite.max()) if rows.numel() else 0.0)
        return PageBoxes(
            self._facts(own.facts, covered),
            own.low.plus(low[:full].numpy()),
            own.high.plus(high[:full].numpy()),
            low[full:].clone(),
            high[full:].clone(),
            largest,
        )

    def edit(self, index: Index, edit: Edit) -> Index | NeedsRebuild:
        """Boxes cannot shrink: the page in which the change begins goes whole, with all behind it. Its rows,
        from the new `covered` on, are appended anew."""
        own = _own(index)
        source = replace(own.facts.source, position_epoch=edit.epoch)
        if edit.first >= own.facts.covered:
            facts = self._facts(own.facts, own.facts.covered)
            return replace(own, facts=replace(facts, source=source))
        pages = edit.first // self.page_tokens
        facts = self._facts(own.facts, pages * self.page_tokens)
        return PageBoxes(
            replace(facts, source=source),
            own.low.first(pages),
            own.high.first(pages),
            own.open_low[:0],
            own.open_high[:0],
            own.largest,
        )

    @staticmethod
    def _facts(before: IndexFacts, covered: int) -> IndexFacts:
        return replace(before, epoch=before.epoch + 1, covered=covered, parts=(("boxes", str(covered)),))

    def scores(self, index: PageBoxes, q: Tensor, pages: Rows) -> Tensor:
        """U float32 [Hk, len(pages)] for q [1, Hq, d], unscaled; `pages` are neighbours, ascending."""
        first, end = (int(pages[0]), int(pages[-1]) + 1) if len(pages) else (0, 0)
        return quest_score(q[0].to("cpu").float(), *index.boxes(first, end))

    def bounds(self, index: PageBoxes, q: Tensor, scores: Tensor) -> NDArray[np.float64]:
        """[Hk, pages]: what no row's logit passes, rounding included; inf where a key is not finite."""
        d = self.shape.head_dim
        heads = q[0].to("cpu").double().abs().sum(-1).view(self.shape.kv_heads, -1).amax(1)
        # The second term is what products below the smallest normal number lose.
        room = d * 2.0**-22 * index.largest * heads + d * 2.0**-148
        upper = (scores.double() + room[:, None]).numpy() * self.shape.scale
        return np.where(np.isfinite(upper), upper, np.inf)

    def select(self, index: Index, query: Query) -> Selection:
        own = _own(index)
        if query.q.shape[0] != 1:
            raise CoreError(
                Reason.UNSUPPORTED, f"quest selects for one query at a time, not {query.q.shape[0]}"
            )
        start = self.last_page(query.rows) * self.page_tokens
        tail = max(1, self.persistent.recent, 0 if self._competes else query.rows - start)
        lag = check_index(own, self, query, tail=tail)
        persistent = Persistent.of(self.persistent, query.rows, own.facts.covered)
        if not self._competes:
            persistent.mask[start:] = True
        pages = self.competitors(query.rows)
        pages = pages[pages * self.page_tokens < own.facts.covered]
        scores = self.scores(own, query.q, pages)
        values = scores.numpy()
        upper = self.bounds(own, query.q, scores)
        picked = [best(values[head], pages, self.slots) for head in range(self.shape.kv_heads)]
        within = np.arange(self.page_tokens)
        rows = [(one.ids[:, None] * self.page_tokens + within).reshape(-1) for one in picked]
        joined = [persistent.joined(one[one < query.rows]) for one in rows]
        left = self._left(upper, pages, picked, persistent, query.rows)
        receipt = SelectionReceipt.of(
            self,
            own.facts,
            query,
            self.budget,
            got_units=tuple(len(one.ids) for one in picked),
            got_rows=tuple(count for _, count in joined),
            uncapped=tuple(len(one.ids) for one in picked),
            dropped_by_cap=(0,) * len(picked),
            scanned_units=len(pages),
            index_bytes=len(pages) * 2 * self.shape.kv_heads * self.shape.head_dim * _F32,
            threshold=tuple(one.threshold for one in picked),
            runner_up=tuple(one.runner_up for one in picked),
            ties=tuple(one.ties for one in picked),
            unindexed=lag,
            detail={"lastPage": "competes" if self._competes else "read"},
        )
        return Selection(
            self.facts.scope,
            tuple(found for found, _ in joined),
            tuple(one.ids for one in picked),
            receipt,
            left_out=np.repeat(np.array(left, dtype=np.float64), self.shape.group),
        )

    def _left(
        self,
        upper: NDArray[np.float64],
        pages: Rows,
        picked: Sequence[Picked],
        persistent: Persistent,
        rows: int,
    ) -> list[float]:
        """Of each KV head, ln of the sum of e^bound over the rows of pages that were not chosen."""
        if not len(pages):
            return [-np.inf] * len(picked)
        first, end = int(pages[0]), int(pages[-1]) + 1
        free = np.zeros((end - first) * self.page_tokens, dtype=np.bool_)
        stop = min(rows, end * self.page_tokens)
        free[: stop - first * self.page_tokens] = ~persistent.mask[first * self.page_tokens : stop]
        counts = np.count_nonzero(free.reshape(-1, self.page_tokens), axis=1)
        left = []
        for bounds, one in zip(upper, picked, strict=True):
            unread = counts.copy()
            unread[one.ids - first] = 0
            left.append(_log_sum(bounds, unread))
        return left


def _own(index: Index) -> PageBoxes:
    if not isinstance(index, PageBoxes):
        raise CoreError(Reason.SELECTOR_STALE, "this is no index of Quest")
    return index


def _log_sum(upper: NDArray[np.float64], rows: NDArray[np.int64]) -> float:
    """ln of sum rows e^upper over pages with rows; -inf of none."""
    there = rows > 0
    values, counts = upper[there], rows[there]
    top = float(values.max(initial=-np.inf))
    return top if not np.isfinite(top) else top + float(np.log((counts * np.exp(values - top)).sum()))
