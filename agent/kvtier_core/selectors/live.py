"""A family of the contract at work in a session: its index follows the rows, its gate judges each selection.

Why it exists: a step appends rows and asks for a selection; a family is pure and its indexes never change.
Here is the one place that holds the current index of a layer. It must not know tiers or plans.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from decimal import Decimal

import torch
from torch import Tensor

from kvtier_core.errors import CoreError, Reason
from kvtier_core.rowevidence import NO_EVIDENCE, ONLY_QUERIES, Evidence, LayerWeights, Need, joined
from kvtier_core.selectors.base import Selection
from kvtier_core.selectors.contract import (
    Family,
    Index,
    Query,
    Scope,
    SelectionReceipt,
    Shape,
    Source,
)
from kvtier_core.selectors.contract import Selection as Chosen
from kvtier_core.selectors.families.registry import make_family
from kvtier_crds.manifest import Selector

GIVEN = ONLY_QUERIES
"""What every session gives to an index besides its rows."""


@dataclass(frozen=True, slots=True)
class Gate:
    """When a selection is too uncertain to be published (B.8). None: not judged."""

    max_omitted: float | None
    min_confidence: float | None

    def check(self, receipt: SelectionReceipt) -> None:
        """GATE_FAILED with the numbers."""
        omitted = max(receipt.omitted_mass or (0.0,))
        if self.max_omitted is not None and omitted > self.max_omitted:
            raise CoreError(
                Reason.GATE_FAILED,
                f"an estimated {omitted:.4g} of the attention is left out, {self.max_omitted:g} may be",
                {"omitted": omitted, "limit": self.max_omitted},
            )
        if self.min_confidence is not None and (receipt.confidence or 0.0) < self.min_confidence:
            raise CoreError(
                Reason.GATE_FAILED,
                f"the confidence is {receipt.confidence}, {self.min_confidence:g} is wanted",
            )


class LiveFamily:
    """A SelectorFamily over one of the contract. The factor on q.k is the session's, so it comes with each
    query; no index depends on it."""

    def __init__(
        self, selector: Selector, shape: Shape, page_tokens: int, given: frozenset[Need] = ONLY_QUERIES
    ) -> None:
        """given: what the engine sends with its frames. MANIFEST_INVALID for what the manifest promises and
        this agent cannot keep; UNSUPPORTED, with the fact `missing`, for what the family needs and the engine
        does not send."""
        self._selector = selector
        self._page_tokens = page_tokens
        self._by_scale: dict[float, Family] = {}
        self.family = self._family = make_family(selector, shape, page_tokens)
        missing = sorted(self._family.facts.needs - given)
        if missing:
            raise CoreError(
                Reason.UNSUPPORTED,
                f"{selector.family} needs {', '.join(missing)}, which this engine does not send",
                {"missing": ",".join(missing)},
            )
        self.gate = _gate(selector, self._family)
        self._by_scale[shape.scale] = self._family

    @property
    def digest(self) -> str:
        return self._family.digest

    @property
    def dense_layers(self) -> frozenset[int]:
        return self._family.dense_layers

    def omits(self, rows: int) -> bool:
        return self._family.omits(rows)

    def index(self, source_digest: bytes, layer: int) -> LiveIndex:
        return LiveIndex(self, Source(source_digest, layer))

    def at(self, scale: float) -> Family:
        """The family for attention with that factor on q.k."""
        found = self._by_scale.get(scale)
        if found is None:
            shape = replace(self._family.shape, scale=scale)
            found = make_family(self._selector, shape, self._page_tokens)
            self._by_scale = {scale: found}
        return found


class LiveIndex:
    """One layer of one session: the newest index, published as a whole by one assignment.

    Rows wait until somebody asks: a family that learns from the prompt (codebooks, clusters) is built once
    over all of it, however the prefill was cut into frames. The first selection pays for the build. A family
    of fixed contexts keeps that index; it reads all rows behind it."""

    def __init__(self, live: LiveFamily, source: Source) -> None:
        self._live = live
        self._source = source
        self.source_digest = source.digest
        self.selector_digest = live.digest
        self._index: Index | None = None
        self._waiting: list[tuple[Tensor, Tensor, Evidence]] = []
        self._weights: LayerWeights | None = None
        self._covered = 0

    @property
    def generation(self) -> int:
        return 0 if self._index is None else self._index.facts.epoch

    @property
    def covered(self) -> int:
        """Rows that are in the index or wait for it."""
        return self._covered

    def weights(self, weights: LayerWeights) -> None:
        """What evidence that comes without weights is completed by."""
        self._weights = weights

    def append(self, first: int, k: Tensor, v: Tensor, evidence: Evidence = NO_EVIDENCE) -> None:
        """Rows k, v [n, Hk, d] at [first, first + n), and what the engine gives with them. SUPPORT_GAP unless
        first is `covered`."""
        if first != self._covered:
            raise CoreError(
                Reason.SUPPORT_GAP,
                f"the index covers rows [0, {self._covered}), these start at {first}",
                {"covered": self._covered, "first": first},
            )
        # Copies: rows of a frame may be a view of all that came with it, queries included.
        self._waiting.append((k.clone(), v.clone(), evidence.kept()))
        if evidence.weights is not None:
            self._weights = evidence.weights
        self._covered += int(k.shape[0])

    def _current(self) -> Index:
        """The index over all rows that came. SUPPORT_GAP without any."""
        index, family = self._index, self._live.family
        if self._waiting:
            k, v = (
                torch.cat([rows[0] for rows in self._waiting]),
                torch.cat([rows[1] for rows in self._waiting]),
            )
            evidence = replace(joined([rows[2] for rows in self._waiting]), weights=self._weights)
            if index is None:
                index = family.build(self._source, k, v, evidence)
            elif family.facts.appendable:
                index = family.append(index, k, v, evidence)
            self._index = index
            self._waiting.clear()
        if index is None:
            raise CoreError(Reason.SUPPORT_GAP, "the index covers no row yet")
        return index

    def select(
        self,
        q: Tensor,
        rows: int,
        scale: float,
        tail: Tensor | None = None,
        hidden: Tensor | None = None,
        hidden_layer: int | None = None,
    ) -> Selection:
        """Rows for q [1, Hq, d] over rows [0, rows). tail: keys of rows that are not covered yet. hidden:
        [1, d_model], the input of layer `hidden_layer`, None: not said. UNSUPPORTED for more queries,
        SUPPORT_GAP without rows, GATE_FAILED, and what the family refuses."""
        if q.shape[0] != 1:
            raise CoreError(Reason.UNSUPPORTED, f"one query at a time is selected for, not {q.shape[0]}")
        index = self._current()
        lag = rows - self._covered
        seen = tail if tail is not None and lag and tail.shape[0] == lag else None
        query = Query(q, rows, self._source, hidden=hidden, tail=seen, hidden_layer=hidden_layer)
        chosen = self._live.at(scale).select(index, query)
        if self._live.gate is not None:
            self._live.gate.check(chosen.receipt)
        return _stated(chosen, self._covered, self._live.family.shape)


def _stated(chosen: Chosen, covered: int, shape: Shape) -> Selection:
    receipt = chosen.receipt
    shared = chosen.scope is Scope.LAYER
    copies = shape.kv_heads if shared else 1
    return Selection(
        positions=chosen.positions * copies,
        chosen_units=chosen.units * copies,
        chosen_rows=max(receipt.got_rows, default=0),
        threshold=receipt.threshold * copies,
        runner_up=receipt.runner_up * copies,
        index_generation=receipt.index_epoch,
        covered=covered,
        log_weight=None if chosen.log_weight is None else chosen.log_weight * copies,
        complete=None if chosen.remainder is None else chosen.remainder.complete,
        receipt=receipt,
    )


def _gate(selector: Selector, family: Family) -> Gate | None:
    given = selector.gate
    if given is None:
        return None
    if not family.facts.estimates:
        raise CoreError(
            Reason.MANIFEST_INVALID,
            f"selector.gate cannot be kept: {selector.family} has no estimator of omitted mass",
        )
    if given.widen_steps:
        raise CoreError(Reason.MANIFEST_INVALID, "selector.gate.widenSteps must be 0: no family widens here")
    limits = (given.max_estimated_omitted_mass, given.min_confidence)
    return Gate(*(None if limit is None else float(Decimal(limit)) for limit in limits))
