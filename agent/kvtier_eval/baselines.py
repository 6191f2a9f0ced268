"""What every selector is compared with, as families of the same contract.

Why it exists: retained mass and task scores mean nothing without full attention, the best choice at the same
unit, a choice at random, the latest rows, and the persistent rows alone. It must not know tasks or models.

The oracle knows K: per KV head it ranks units by the attention that the heads of the group put on them, in
float64, so no selector of that unit, scope and budget keeps more of a group's mass.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from enum import StrEnum

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
from kvtier_core.selectors.picking import Persistent, best


class Kind(StrEnum):
    FULL = "full"
    ORACLE_ROW = "oracleRow"
    ORACLE_PAGE = "oraclePage"
    RANDOM = "random"
    RECENT = "recent"
    PERSISTENT_ONLY = "persistentOnly"


@dataclass(frozen=True, slots=True)
class Keys:
    """k: float32 [covered, Hk, d]."""

    facts: IndexFacts
    k: Tensor


@dataclass(frozen=True, slots=True)
class Baseline:
    """tokens: rows of one KV head beyond the persistent ones. page: rows of one page, of the page oracle."""

    kind: Kind
    shape: Shape
    tokens: int
    sink: int
    recent: int
    dense_layers: frozenset[int]
    page: int = 16
    seed: int = 0

    @property
    def facts(self) -> FamilyFacts:
        return FamilyFacts(
            family=self.kind.value,
            unit=Unit.PAGE if self.kind is Kind.ORACLE_PAGE else Unit.ROW,
            scope=Scope.KV_HEAD,
            needs=frozenset([Need.QUERY]),
            guarantee=Guarantee.EXACT if self.kind is Kind.FULL else Guarantee.HEURISTIC,
            appendable=True,
            edit=EditCost.UNIT,
            randomised=self.kind is Kind.RANDOM,
        )

    @property
    def digest(self) -> str:
        body = [
            self.kind,
            self.tokens,
            self.sink,
            self.recent,
            sorted(self.dense_layers),
            self.page,
            self.seed,
        ]
        return "sha256:" + hashlib.sha256(json.dumps(body).encode()).hexdigest()

    def omits(self, rows: int) -> bool:
        always = min(rows, self.sink) + min(rows, max(1, self.recent))
        spent = 0 if self.kind is Kind.PERSISTENT_ONLY else self.tokens
        return self.kind is not Kind.FULL and rows - always > spent

    def build(self, source: Source, k: Tensor, v: Tensor, evidence: Evidence) -> Keys:
        return Keys(IndexFacts(self.digest, source, epoch=1, covered=len(k)), k)

    def append(self, index: Index, k: Tensor, v: Tensor, evidence: Evidence) -> Keys:
        own = _own(index)
        joined = torch.cat([own.k, k])
        return Keys(replace(own.facts, epoch=own.facts.epoch + 1, covered=len(joined)), joined)

    def edit(self, index: Index, edit: Edit) -> Index | NeedsRebuild:
        own = _own(index)
        kept = min(edit.first, own.facts.covered)
        source = replace(own.facts.source, position_epoch=edit.epoch)
        facts = replace(own.facts, source=source, epoch=own.facts.epoch + 1, covered=kept)
        return Keys(facts, own.k[:kept])

    def select(self, index: Index, query: Query) -> Selection:
        own = _own(index)
        lag = check_index(own, self, query, tail=max(1, self.recent))
        persistent = Persistent(_always(query.rows, own.facts.covered, self.sink, self.recent))
        picked = [self._pick(own, query, head, persistent.others) for head in range(self.shape.kv_heads)]
        joined = [persistent.joined(rows) for _, rows in picked]
        units = tuple(len(chosen) for chosen, _ in picked)
        none = (float("nan"),) * len(picked)
        receipt = SelectionReceipt(
            family=self.facts.family,
            variant="",
            selector_digest=self.digest,
            index_digest=own.facts.digest,
            index_epoch=own.facts.epoch,
            source=query.source,
            guarantee=self.facts.guarantee,
            scope=Scope.KV_HEAD,
            asked=Budget(tokens=self.tokens),
            got_units=units,
            got_rows=tuple(count for _, count in joined),
            uncapped=units,
            dropped_by_cap=(0,) * len(picked),
            scanned_units=0,
            index_bytes=0,
            threshold=none,
            runner_up=none,
            ties=(0,) * len(picked),
            unindexed=lag,
            seed=self.seed if self.kind is Kind.RANDOM else None,
        )
        return Selection(
            Scope.KV_HEAD, tuple(rows for rows, _ in joined), tuple(chosen for chosen, _ in picked), receipt
        )

    def _pick(self, index: Keys, query: Query, head: int, others: Rows) -> tuple[Rows, Rows]:
        """Units and rows of one KV head."""
        if self.kind is Kind.FULL:
            return others, others
        if self.kind is Kind.PERSISTENT_ONLY:
            return others[:0], others[:0]
        if self.kind is Kind.RECENT:
            rows = others[max(0, len(others) - self.tokens) :]
            return rows, rows
        if self.kind is Kind.RANDOM:
            name = [self.seed, query.seed, query.source.layer, head, query.rows]
            drawn = np.random.default_rng(name).permutation(others)[: self.tokens]
            return np.sort(drawn), np.sort(drawn)
        shares = self._shares(index, query, head)
        if self.kind is Kind.ORACLE_ROW:
            rows = best(shares[others], others, self.tokens).ids
            return rows, rows
        pages = others // self.page
        sums = np.bincount(pages, weights=shares[others]).astype(np.float64)
        there = np.unique(pages)
        chosen = best(sums[there], there, self.tokens // self.page).ids
        return chosen, others[np.isin(pages, chosen)]

    def _shares(self, index: Keys, query: Query, head: int) -> NDArray[np.float64]:
        """[covered]: the attention of the group's heads on each row, summed; of covered rows alone, since the
        others are read anyway."""
        group = slice(head * self.shape.group, (head + 1) * self.shape.group)
        logits = query.q[0, group].double() @ index.k[:, head].double().T * self.shape.scale
        if query.tail is not None and len(query.tail):
            tail = query.q[0, group].double() @ query.tail[:, head].double().T * self.shape.scale
            logits = torch.cat([logits, tail], dim=1)
        return logits.softmax(-1).sum(0).numpy()


def _always(rows: int, covered: int, sink: int, recent: int) -> NDArray[np.bool_]:
    mask = np.zeros(rows, dtype=np.bool_)
    mask[: min(rows, sink)] = True
    mask[max(0, min(rows - recent, covered)) :] = True
    mask[rows - 1 :] = True
    return mask


def _own(index: Index) -> Keys:
    if not isinstance(index, Keys):
        raise CoreError(Reason.SELECTOR_STALE, "this is no index of a baseline")
    return index
