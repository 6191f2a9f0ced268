"""A selector in the place of full attention, on the rows and tokens of a prepared prompt.

Why it exists: led along the same tokens, the steps of an answer are one call of the model, exact for both
regimes: rows from full attention, which isolates the selector, or the selector's own, in which its errors add
up. Leading tokens that match are the tokens that free decoding would give. It must not know tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvtier_core.selectors.contract import (
    Edit,
    Evidence,
    Family,
    Index,
    Need,
    NeedsRebuild,
    Query,
    Scope,
    Selection,
    Shape,
    Source,
)
from kvtier_eval.forward import Decoder
from kvtier_eval.metrics import Collector, persistent_mask
from kvtier_eval.prepare import Forced, Prepared, Recorder, causal_attention
from kvtier_eval.proof import Asked
from kvtier_kernels.state import AttentionState, LogitFrame, finalize

_BUILT_AT_ONCE = 64


class Regime(StrEnum):
    """Whose K/V the answer's tokens have. The context's are always full attention's."""

    FULL_ROWS = "fullRows"
    OWN_ROWS = "ownRows"


@dataclass(frozen=True, slots=True)
class Setup:
    """What is the same for every selector. append_every: rows that wait before an index takes them; at most
    `recent`. detail_every: steps between two whose heads are measured."""

    sink: int
    recent: int
    regime: Regime
    append_every: int = 16
    detail_every: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.append_every <= max(1, self.recent):
            raise ValueError(f"append_every {self.append_every} with {self.recent} recent rows")


def attend_rows(q: Tensor, k: Tensor, v: Tensor, selection: Selection, shape: Shape) -> AttentionState:
    """q [Hq, d] over the rows [n, Hk, d] that were selected, with their log weights: a state of one query,
    without what a remainder would add."""
    shared = {Scope.LAYER: shape.query_heads, Scope.KV_HEAD: shape.group, Scope.QUERY_HEAD: 1}
    each = shared[selection.scope]
    lists = [selection.positions[head // each] for head in range(shape.query_heads)]
    longest = max(map(len, lists))
    ids = np.zeros((len(lists), longest), dtype=np.int64)
    bias = np.full((len(lists), longest), -np.inf, dtype=np.float32)
    for head, rows in enumerate(lists):
        ids[head, : len(rows)] = rows
        bias[head, : len(rows)] = 0.0 if selection.log_weight is None else selection.log_weight[head // each]
    heads = torch.arange(shape.query_heads)[:, None] // shape.group
    picked = torch.from_numpy(ids)
    logits = (k[picked, heads] @ q[:, :, None])[..., 0] * shape.scale + torch.from_numpy(bias)
    m = logits.amax(-1)
    weights = (logits - m[:, None]).exp()
    u = (weights[:, None] @ v[picked, heads])[:, 0]
    return AttentionState(m[None], weights.sum(-1)[None], u[None], LogitFrame(shape.scale))


class Indexes:
    """Those of one prompt, each built once for all budgets and replays of a selector: no build depends on a
    budget, and no handle ever changes. Holds one selector's at a time."""

    def __init__(self) -> None:
        self._selector: object = None
        self._made: dict[int, Index] = {}

    def of(self, selector: object, layer: int, family: Family, build: Callable[[], Index]) -> Index:
        """selector: names family and parameters, not the budget."""
        if selector != self._selector:
            self._selector, self._made = selector, {}
        if layer not in self._made:
            self._made[layer] = build()
        return rebound(self._made[layer], family)


def rebound(index: Index, family: Family) -> Index:
    """The same index for a family that differs in the budget alone."""
    made: Any = index
    other: Index = replace(made, facts=replace(index.facts, selector_digest=family.digest))
    return other


class Replay:
    """An attention function that reads what `family` selects. indexes: that were built already."""

    def __init__(
        self,
        decoder: Decoder,
        family: Family,
        prepared: Prepared,
        forced: Forced,
        setup: Setup,
        *,
        seed: int,
        collector: Collector | None,
        indexes: Indexes | None = None,
        selector: object = None,
    ) -> None:
        """selector: what `indexes` knows this family by, whatever its budget."""
        self._indexes = Indexes() if indexes is None else indexes
        self._selector = selector
        self._decoder = decoder
        self._family = family
        self._prepared = prepared
        self._forced = forced
        self._setup = setup
        self._seed = seed
        self._collector = collector
        self._before: Tensor | None = None
        self._weights = Need.WEIGHTS in family.facts.needs

    def logs(self) -> Tensor:
        """ln P float32 [T, vocabulary]. CoreError when the family refuses."""
        states = self._decoder.run(list(self._forced.inputs), self._prepared.mark, self)
        return self._decoder.logits(states).log_softmax(-1)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        own = self._setup.regime is Regime.OWN_ROWS
        rows = self._prepared.rows
        k = torch.cat([rows.k[layer], k if own else self._forced.k[layer]])
        v = torch.cat([rows.v[layer], v if own else self._forced.v[layer]])
        before, self._before = self._before, hidden
        if layer in self._family.dense_layers:
            return causal_attention(q, k, v, self._decoder.shape.scale)
        return self._selected(layer, q, k, v, hidden, before)

    def _selected(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, before: Tensor | None
    ) -> Tensor:
        mark, family, setup = self._prepared.mark, self._family, self._setup
        index = self._indexes.of(self._selector, layer, family, lambda: self._index(layer))
        answers = []
        for step in range(len(q)):
            count = mark + step + 1
            covered = index.facts.covered
            asked = Asked(index.facts.source, index.facts.epoch, q[step], count)
            selection = family.select(
                index,
                Query(
                    q[step : step + 1],
                    count,
                    index.facts.source,
                    hidden=None if before is None else before[step : step + 1],
                    seed=self._seed + step,
                    tail=k[covered:count],
                    hidden_layer=None if before is None else layer - 1,
                ),
            )
            state = attend_rows(q[step], k[:count], v[:count], selection, self._decoder.shape)
            whole = selection.remainder.complete(state) if selection.remainder is not None else state
            answer = finalize(whole)[0][0]
            answers.append(answer)
            self._note(
                asked, layer, step, q[step], k[:count], v[:count], selection, state, answer, hidden[step]
            )
            if family.facts.appendable and count - covered >= setup.append_every:
                new = slice(covered, count)
                steps = slice(covered - mark, count - mark)
                evidence = self._evidence(layer, q[steps], before, steps)
                index = family.append(index, k[new], v[new], evidence)
        return torch.stack(answers)

    def _evidence(self, layer: int, queries: Tensor, before: Tensor | None, steps: slice) -> Evidence:
        """Of rows that were decoded."""
        return Evidence(
            queries,
            None if before is None else before[steps],
            self._forced.surprisal[steps].numpy(),
            self._decoder.weights(layer) if self._weights else None,
        )

    def _note(
        self,
        asked: Asked,
        layer: int,
        step: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        selection: Selection,
        state: AttentionState,
        answer: Tensor,
        hidden: Tensor,
    ) -> None:
        if self._collector is None:
            return
        persistent = persistent_mask(len(k), self._setup.sink, self._setup.recent)
        self._collector.traffic(layer, selection, persistent)
        if step % self._setup.detail_every == 0:
            unit = self._family.facts.unit
            delta = self._collector.observe(asked, layer, q, k, v, selection, state, answer, persistent, unit)
            moved = self._decoder.projected(layer, delta[None])[0].norm()
            self._collector.residual(float(moved / hidden.double().norm()))

    def _index(self, layer: int) -> Index:
        """Over the context but its last token, in the order in which a session would have made it."""
        prepared, prompt = self._prepared, self._prepared.prompt
        digest = bytes(32)
        if prepared.before is None or prompt.dropped is None:
            source = Source(digest, layer)
            index = self._built(prepared.rows, source, prompt.indexed)
            return self._appended(index, prepared.rows, layer, prompt.indexed)
        first = prompt.dropped[0]
        index = self._built(prepared.before, Source(digest, layer), prompt.indexed)
        edited = self._family.edit(index, Edit(first, epoch=1, truncated=False))
        if isinstance(edited, NeedsRebuild):
            return self._built(prepared.rows, Source(digest, layer, 1), prepared.mark)
        return self._appended(edited, prepared.rows, layer, edited.facts.covered)

    def _built(self, rows: Recorder, source: Source, count: int) -> Index:
        layer = source.layer
        return self._family.build(
            source, rows.k[layer][:count], rows.v[layer][:count], self._kept(rows, layer, slice(0, count))
        )

    def _appended(self, index: Index, rows: Recorder, layer: int, first: int) -> Index:
        for start in range(first, self._prepared.mark, _BUILT_AT_ONCE):
            part = slice(start, min(start + _BUILT_AT_ONCE, self._prepared.mark))
            evidence = self._kept(rows, layer, part)
            index = self._family.append(index, rows.k[layer][part], rows.v[layer][part], evidence)
        return index

    def _kept(self, rows: Recorder, layer: int, part: slice) -> Evidence:
        """Of rows of the context; what the family needs and nobody kept is None, which it refuses."""
        surprisal = rows.surprisal
        hidden = rows.hidden[layer - 1] if layer else torch.empty(0)
        return Evidence(
            rows.q[layer][part] if len(rows.q[layer]) else None,
            hidden[part] if len(hidden) else None,
            surprisal[part].numpy() if len(surprisal) else None,
            self._decoder.weights(layer) if self._weights else None,
        )


def needs_of(families: Sequence[Family]) -> frozenset[Need]:
    return frozenset[Need]().union(*(family.facts.needs for family in families))
