"""What a family says on its own of the rows and evidence that a client sent, beside what receipts say.

A recorder keeps each frame's tensors as they were handed to the session; a replay builds the family's index
of them without any engine. An agent builds beside its steps, so a receipt says where the index that was asked
ended, and the replay's ends there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvtier_client.pipe import Part
from kvtier_client.rowevidence import RowEvidence
from kvtier_client.session import AttentionSession
from kvtier_core.identity import selected_support_digest
from kvtier_core.rowevidence import Evidence, LayerWeights
from kvtier_core.selectors.contract import Family, Index, Query, Scope, Shape, Source
from kvtier_core.selectors.families.registry import make_family
from kvtier_crds.manifest import Contract, Exactness, RuntimeManifest, Selector

# Parameters with which the families select something else than everything, or the newest rows, of some
# hundred rows.
FAMILIES: dict[str, dict[str, Any]] = {
    "retrievalAttention": {"buildNeighbours": 8, "searchWidth": 24, "outDegree": 8},
    "emLlm": {
        "window": 8,
        "gamma": "1",
        "maxEventTokens": 16,
        "contiguityRadius": 1,
        "contiguityShare": "0.3",
    },
    "infinigen": {"partialDimensions": 16, "alpha": "4", "trainTokens": 16},
    "infLlm": {"unitTokens": 8, "representatives": 2},
    "squeezedAttention": {"clusters": 12, "threshold": "0.001"},
}


def selector(family: str, tokens: int = 40, dense: tuple[int, ...] = ()) -> Selector:
    body = {
        "family": family,
        "parameters": FAMILIES[family],
        "budget": {"tokens": tokens, "capPolicy": "truncate"},
        "persistentRows": {"sink": 2, "recent": 8},
        "denseLayers": list(dense),
    }
    return Selector.model_validate_json(json.dumps(body))


def candidate(baseline: RuntimeManifest, chosen: Selector) -> RuntimeManifest:
    contract = Contract(
        exactness=Exactness.APPROXIMATE,
        allowed_fallbacks=baseline.contract.allowed_fallbacks,
        tolerance=baseline.contract.tolerance,
    )
    return baseline.model_copy(update={"selector": chosen, "contract": contract})


@dataclass
class Layer:
    """Rows of one layer, as they were sent; states by the position of their query."""

    k: list[Tensor] = field(default_factory=list)
    v: list[Tensor] = field(default_factory=list)
    q: list[Tensor] = field(default_factory=list)
    hidden: dict[int, Tensor] = field(default_factory=dict)


@dataclass
class Recorder:
    """One session's frames and outputs. surprisal: by row. outs: by step and layer."""

    layers: dict[int, Layer] = field(default_factory=dict)
    surprisal: np.ndarray[Any, np.dtype[np.float64]] = field(default_factory=lambda: np.empty(0))
    outs: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def rows(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        kept = self.layers[layer]
        return torch.cat(kept.k), torch.cat(kept.v), torch.cat(kept.q)

    def note(
        self, layer: int, position: int, q: Tensor, k: Tensor, v: Tensor, evidence: RowEvidence | None
    ) -> None:
        kept = self.layers.setdefault(layer, Layer())
        kept.k.append(k.clone())
        kept.v.append(v.clone())
        kept.q.append(q.clone())
        if evidence is None:
            return
        if evidence.hidden is not None:
            assert evidence.hidden_layer == layer - 1
            kept.hidden[position] = evidence.hidden.clone()
        if evidence.surprisal is not None:
            assert evidence.surprisal_first == len(self.surprisal)
            self.surprisal = np.concatenate([self.surprisal, evidence.surprisal])


@contextmanager
def recording() -> Iterator[Recorder]:
    """Of the sessions of this process, of which there must be one at a time."""
    recorder = Recorder()
    whole, within = AttentionSession.attend, [False]

    def attend(
        self: AttentionSession,
        step: int,
        layer: int,
        position: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        committed: int,
        next_layer_follows: bool = False,
        evidence: RowEvidence | None = None,
    ) -> Tensor:
        """One frame, which may go a way of its own."""
        recorder.note(layer, position, q, k, v, evidence)
        within[0] = True
        try:
            out = whole(self, step, layer, position, q, k, v, committed, next_layer_follows, evidence)
        finally:
            within[0] = False
        recorder.outs[step, layer] = out
        return out

    plain = AttentionSession.part

    def part(
        self: AttentionSession,
        step: int,
        layer: int,
        position: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        committed: int,
        next_layer_follows: bool = False,
        evidence: RowEvidence | None = None,
    ) -> Any:
        if not within[0]:
            recorder.note(layer, position, q, k, v, evidence)
        return plain(self, step, layer, position, q, k, v, committed, next_layer_follows, evidence)

    attended = AttentionSession.attend_part

    def attend_part(self: AttentionSession, asked: Part) -> Tensor:
        recorder.outs[asked.step, asked.layer] = out = attended(self, asked)
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AttentionSession, "attend", attend)
        patch.setattr(AttentionSession, "part", part)
        patch.setattr(AttentionSession, "attend_part", attend_part)
        yield recorder


class Replay:
    """A family over recorded rows of one layer."""

    def __init__(
        self, chosen: Selector, shape: Shape, recorder: Recorder, layer: int, weights: LayerWeights | None
    ) -> None:
        self.family: Family = make_family(chosen, shape, 16)
        self._k, self._v, self._q = recorder.rows(layer)
        self._recorder = recorder
        self._source = Source(b"replay", layer)
        self._layer = layer
        self._weights = weights
        self._indexes: dict[int, Index] = {}

    def _evidence(self, first: int, last: int) -> Evidence:
        known = self._recorder.surprisal[first:last]
        return Evidence(
            queries=self._q[first:last],
            surprisal=known if len(known) == last - first else None,
            weights=self._weights,
        )

    def index(self, built: int, covered: int) -> Index:
        """Built over rows [0, built), with those behind them appended one by one."""
        found = self._indexes.get(covered)
        if found is None:
            first = 0 if covered == built else covered - 1
            k, v, evidence = self._k[first:covered], self._v[first:covered], self._evidence(first, covered)
            if covered == built:
                found = self.family.build(self._source, k, v, evidence)
            else:
                found = self.family.append(self.index(built, covered - 1), k, v, evidence)
            self._indexes[covered] = found
        return found

    def digest(self, prompt: int, position: int, end: int) -> str:
        """The support digest of the query at `position` under an index of rows [0, end)."""
        facts = self.family.facts
        built = min(prompt, end) if facts.incremental else prompt
        hidden = self._recorder.layers[self._layer].hidden.get(position)
        query = Query(
            self._q[position : position + 1],
            position + 1,
            self._source,
            hidden=hidden,
            tail=self._k[end : position + 1],
            hidden_layer=None if hidden is None else self._layer - 1,
            outside=position + 1,
        )
        selection = self.family.select(self.index(built, end), query)
        copies = self.family.shape.kv_heads if selection.scope is Scope.LAYER else 1
        return selected_support_digest(position + 1, selection.positions * copies)
