"""Quest: pages ranked by an upper bound of any row's logit, from the box around each page's keys.

Why it exists: the first selector family. It must not know tiers, V, or what the rows it leaves out hold.
Formula (specification D.2): with box [m, M] of a page, U = sum_j max(q_j m_j, q_j M_j) = relu(q).M -
relu(-q).m, unscaled. Per KV head, the bound of a page is the largest over the query heads of its group, which
keeps it an upper bound for each of them.

Policy: with P pages in budget, the last page (which may still grow) takes one slot and the P-1 best others
the rest; sink and recent rows are read besides; pages wholly inside them do not compete. Ties: lower id.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtier_core.errors import CoreError, Reason
from kvtier_core.rowevidence import NO_EVIDENCE, Evidence
from kvtier_core.selectors.base import Selection, merge_rows
from kvtier_crds.manifest import CapPolicy, Selector
from kvtier_kernels.ops.quest import quest_boxes, quest_score

F32_BYTES = 4
_FIRST_PAGES = 64


@dataclass(frozen=True, slots=True)
class QuestFamily:
    """pages: budget in pages per KV head, the last page's slot included. sink, recent: rows always read."""

    page_tokens: int
    pages: int
    sink: int
    recent: int
    dense_layers: frozenset[int]
    kv_heads: int
    head_dim: int
    digest: str

    @classmethod
    def from_manifest(
        cls, selector: Selector, *, page_tokens: int, kv_heads: int, head_dim: int
    ) -> QuestFamily:
        """Reads parameter `pageTokens` (default: the cache's) and the budget. MANIFEST_INVALID, also for what
        the manifest promises and Quest cannot keep."""
        unknown = sorted(set(selector.parameters) - {"pageTokens"})
        if unknown:
            raise CoreError(
                Reason.MANIFEST_INVALID, f"quest has no parameters {', '.join(unknown)}; legal: pageTokens"
            )
        if selector.gate is not None:
            raise CoreError(
                Reason.MANIFEST_INVALID,
                "selector.gate cannot be kept: quest has no estimator of omitted mass",
            )
        if selector.budget.cap_policy is not CapPolicy.TRUNCATE:
            raise CoreError(
                Reason.MANIFEST_INVALID,
                f"selector.budget.capPolicy {selector.budget.cap_policy} cannot run; legal: truncate",
            )
        size = selector.parameters.get("pageTokens", page_tokens)
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise CoreError(
                Reason.MANIFEST_INVALID, f"quest.pageTokens must be a positive integer, not {size!r}"
            )
        budget = selector.budget
        page_bytes = size * kv_heads * head_dim * 2 * F32_BYTES
        if budget.units is not None:
            pages = budget.units
        elif budget.tokens is not None:
            pages = budget.tokens // size
        else:
            pages = (budget.bytes or 0) // page_bytes
        if pages < 1:
            raise CoreError(
                Reason.MANIFEST_INVALID,
                f"the budget pays no page; one page is {size} tokens or {page_bytes} bytes",
                {"page_tokens": size, "page_bytes": page_bytes},
            )
        body = selector.model_dump_json(by_alias=True).encode() + f"|{size}".encode()
        return cls(
            page_tokens=size,
            pages=pages,
            sink=selector.persistent_rows.sink,
            recent=selector.persistent_rows.recent,
            dense_layers=frozenset(selector.dense_layers),
            kv_heads=kv_heads,
            head_dim=head_dim,
            digest="sha256:" + hashlib.sha256(body).hexdigest(),
        )

    def omits(self, rows: int) -> bool:
        return len(self.competitors(rows)) > self.pages - 1

    def competitors(self, rows: int) -> NDArray[np.int64]:
        """Pages that a score decides about: not the last one, and with a row that is neither sink nor
        recent."""
        last = self.last_page(rows)
        if self.sink >= rows - self.recent:
            return np.empty(0, dtype=np.int64)
        first = self.sink // self.page_tokens
        end = min(last, -(-max(0, rows - self.recent) // self.page_tokens))
        return np.arange(min(first, end), end, dtype=np.int64)

    def last_page(self, rows: int) -> int:
        return (rows - 1) // self.page_tokens

    def index(self, source_digest: bytes, layer: int = 0) -> PageBoxes:
        return PageBoxes(self, source_digest)


class PageBoxes:
    """Boxes of one layer's pages, for one session: `low`, `high` float32 [pages, Hk, d].

    Everything here is versioned together by `generation`, which grows with each append; `covered` rows are
    inside the boxes. A page's first row starts its box, later rows widen it.
    """

    def __init__(self, family: QuestFamily, source_digest: bytes) -> None:
        self._family = family
        self.source_digest = source_digest
        self.selector_digest = family.digest
        self.generation = 0
        self._covered = 0
        shape = (_FIRST_PAGES, family.kv_heads, family.head_dim)
        self.low = torch.empty(shape, dtype=torch.float32)
        self.high = torch.empty(shape, dtype=torch.float32)

    @property
    def covered(self) -> int:
        return self._covered

    def append(
        self, first: int, k: Tensor, v: Tensor | None = None, evidence: Evidence = NO_EVIDENCE
    ) -> None:
        """Widens the boxes by keys k [n, Hk, d]; nothing else has a part in them. SUPPORT_GAP."""
        if first != self._covered:
            raise CoreError(
                Reason.SUPPORT_GAP,
                f"the boxes cover rows [0, {self._covered}), these start at {first}",
                {"covered": self._covered, "first": first},
            )
        size = self._family.page_tokens
        rows = k.to("cpu")
        done, count = 0, int(k.shape[0])
        self._grow((first + count - 1) // size + 1)
        while done < count:
            page, at = divmod(first + done, size)
            # Whole pages at once, or what one page still takes.
            part = rows[done : done + (size - at if at else max(size, (count - done) // size * size))]
            low, high = quest_boxes(part, size)
            if at:
                low = torch.minimum(low, self.low[page])
                high = torch.maximum(high, self.high[page])
            self.low[page : page + low.shape[0]] = low
            self.high[page : page + low.shape[0]] = high
            done += part.shape[0]
        self._covered = first + count
        self.generation += 1

    def _grow(self, pages: int) -> None:
        have = self.low.shape[0]
        if pages <= have:
            return
        shape = (max(pages, 2 * have), self._family.kv_heads, self._family.head_dim)
        for name in ("low", "high"):
            grown = torch.empty(shape, dtype=torch.float32)
            grown[:have] = getattr(self, name)
            setattr(self, name, grown)

    def scores(self, q: Tensor, pages: NDArray[np.int64]) -> Tensor:
        """Upper bounds float32 [Hk, len(pages)] of q.k over a group's query heads; q [1, Hq, d], unscaled."""
        lo, hi = (int(pages[0]), int(pages[-1]) + 1) if len(pages) else (0, 0)
        return quest_score(q[0], self.low[lo:hi], self.high[lo:hi])

    def select(
        self,
        q: Tensor,
        rows: int,
        scale: float = 1.0,
        tail: Tensor | None = None,
        hidden: Tensor | None = None,
        hidden_layer: int | None = None,
    ) -> Selection:
        """Rows for one query [1, Hq, d] over rows [0, rows). UNSUPPORTED for more queries; SUPPORT_GAP when a
        page before the last is not covered."""
        family = self._family
        if q.shape[0] != 1:
            raise CoreError(Reason.UNSUPPORTED, f"quest selects for one query at a time, not {q.shape[0]}")
        size = family.page_tokens
        last = family.last_page(rows)
        if self._covered < min(rows, last * size):
            raise CoreError(
                Reason.SUPPORT_GAP,
                f"the boxes cover rows [0, {self._covered}), pages before row {last * size} are needed",
                {"covered": self._covered, "needed": last * size},
            )
        pages = family.competitors(rows)
        keep = min(len(pages), family.pages - 1)
        scores = self.scores(q, pages)
        # A stable sort of descending scores leaves equal ones by ascending id.
        order = torch.sort(scores, dim=1, descending=True, stable=True).indices.numpy()
        values = scores.numpy()
        always = np.zeros(rows, dtype=np.bool_)
        merge_rows(rows, ((0, family.sink), (rows - family.recent, rows), (last * size, rows)), always)
        positions, chosen, threshold, runner_up = [], [], [], []
        most = 0
        for head in range(family.kv_heads):
            picked = np.sort(pages[order[head, :keep]])
            mask = always.copy()
            mask[(picked[:, None] * size + np.arange(size)).reshape(-1)] = True
            most = max(most, int(mask.sum() - always.sum()))
            positions.append(np.flatnonzero(mask))
            chosen.append(picked)
            threshold.append(float(values[head, order[head, keep - 1]]) if keep else -np.inf)
            runner_up.append(float(values[head, order[head, keep]]) if keep < len(pages) else -np.inf)
        return Selection(
            positions=tuple(positions),
            chosen_units=tuple(chosen),
            chosen_rows=most,
            threshold=tuple(threshold),
            runner_up=tuple(runner_up),
            index_generation=self.generation,
            covered=self._covered,
        )
