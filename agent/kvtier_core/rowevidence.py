"""What an engine gives with the rows of a frame, besides K and V.

Why it exists: selectors learn from more than keys (queries of the prefill, hidden states, weights, surprise),
and only the engine has it. Frames carry it and indexes are built from it, so both know this. It must not know
any selector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Need(StrEnum):
    """What a family must see to build or to select, besides the rows."""

    QUERY = "query"
    PREFILL_QUERIES = "prefillQueries"
    PREVIOUS_HIDDEN_STATE = "previousHiddenState"
    WEIGHTS = "weights"
    SURPRISAL = "surprisal"


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """What a rehearsal of this layer needs: q = (h @ query) + bias, before RoPE. query float32
    [d_model, Hq * d]; bias float32 [Hq * d] or None; norm_weight float32 [d_model] and norm_eps: the RMS norm
    that stands before the projection. inv_freq: float64 or float32 [rotated / 2], RoPE's angle a position, of
    pairs that lie side by side (interleaved) or half of the rotated channels apart; None: the projection is
    attended as it is. digest: names all of this; empty: not said."""

    query: Tensor
    bias: Tensor | None
    norm_weight: Tensor
    norm_eps: float
    inv_freq: Tensor | None = None
    interleaved: bool = False
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the engine gives with rows, one entry a row where not said otherwise; None: it cannot.

    queries: float32 [n, Hq, d], as attended (after RoPE), of the rows themselves. hidden: float32
    [n, d_model], the input of the previous layer. surprisal: float64 [n], nats, -log P(token | before).
    weights: of this layer."""

    queries: Tensor | None = None
    hidden: Tensor | None = None
    surprisal: NDArray[np.float64] | None = None
    weights: LayerWeights | None = None

    def has(self) -> frozenset[Need]:
        given = {
            Need.PREFILL_QUERIES: self.queries,
            Need.PREVIOUS_HIDDEN_STATE: self.hidden,
            Need.SURPRISAL: self.surprisal,
            Need.WEIGHTS: self.weights,
        }
        return frozenset([Need.QUERY, *(need for need, value in given.items() if value is not None)])

    def first(self, rows: int) -> Evidence:
        """Of the first `rows` rows."""
        return self.cut(0, rows)

    def cut(self, first: int, last: int) -> Evidence:
        """Of rows [first, last) of these, views of the same memory."""
        return replace(
            self,
            queries=None if self.queries is None else self.queries[first:last],
            hidden=None if self.hidden is None else self.hidden[first:last],
            surprisal=None if self.surprisal is None else self.surprisal[first:last],
        )

    def of(self, needs: frozenset[Need]) -> Evidence:
        """Without what a family with these needs does not learn from. Nobody learns from hidden states: they
        are of queries."""
        return replace(
            self,
            queries=self.queries if Need.PREFILL_QUERIES in needs else None,
            hidden=None,
            surprisal=self.surprisal if Need.SURPRISAL in needs else None,
        )

    def kept(self) -> Evidence:
        """A copy that outlives the frame: what came may be views of a frame's memory. Weights are shared."""
        return replace(
            self,
            queries=None if self.queries is None else self.queries.clone(),
            hidden=None if self.hidden is None else self.hidden.clone(),
            surprisal=None if self.surprisal is None else self.surprisal.copy(),
        )


NO_EVIDENCE = Evidence()


@dataclass(frozen=True, slots=True)
class Surprisal:
    """Of rows that came before, or come with it. values: float64 [n], nats, of rows [first, first + n)."""

    first: int
    values: NDArray[np.float64]


ONLY_QUERIES = frozenset([Need.QUERY])
"""What every engine gives."""


def joined(parts: Sequence[Evidence]) -> Evidence:
    """Of rows that follow each other, at least one part: what every part has of a kind, and of the weights
    the newest. What some part lacks nobody has."""

    def rows(of: Sequence[Tensor | None]) -> Tensor | None:
        known = [one for one in of if one is not None]
        return torch.cat(known) if known and len(known) == len(of) else None

    surprisal = [one.surprisal for one in parts if one.surprisal is not None]
    weights = [one.weights for one in parts if one.weights is not None]
    return Evidence(
        queries=rows([one.queries for one in parts]),
        hidden=rows([one.hidden for one in parts]),
        surprisal=np.concatenate(surprisal) if surprisal and len(surprisal) == len(parts) else None,
        weights=weights[-1] if weights else None,
    )
