"""A family of the contract at work in a session: its indexes follow the rows, its gate judges each selection.

Why it exists: a step hands over rows and asks for a selection; a family is pure and its indexes never change.
Here the two meet: rows go to the works that build indexes beside the steps, and a selection is made with
whatever index is published when it is asked. It must not know tiers, plans or threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from kvtier_core.errors import CoreError, Reason
from kvtier_core.rowevidence import NO_EVIDENCE, ONLY_QUERIES, Evidence, LayerWeights, Need
from kvtier_core.selectors.audit import SessionAudit, audited
from kvtier_core.selectors.base import LayerIndex, Selection
from kvtier_core.selectors.contract import Family, Query, Scope, Shape, Source
from kvtier_core.selectors.contract import Selection as Chosen
from kvtier_core.selectors.families.certified_scan import CertifiedScan
from kvtier_core.selectors.families.registry import make_family
from kvtier_core.selectors.gates import NO_LIMITS, GateFailed, Judged, gate_of, judged
from kvtier_core.selectors.lifecycle.life import Block, LayerLife
from kvtier_core.selectors.lifecycle.told import SessionLives
from kvtier_core.selectors.lifecycle.works import IndexWorks, Name
from kvtier_crds.manifest import Selector

GIVEN = ONLY_QUERIES
"""What every session gives to an index besides its rows."""
FROM_FRAMES = frozenset([Need.PREFILL_QUERIES, Need.SURPRISAL])
"""What comes with a frame's rows and is kept nowhere."""
APPEND_ROWS = 16
"""Rows of one append, at most: each is a job, and those that wait for it are read by every query."""
OUTSIDE_ROWS = 64
"""Rows behind the published index that a query may read without it; with more it is answered exactly."""

_LATE = (Reason.DEPENDENCY_UNPUBLISHED, Reason.INDEX_FRONTIER_LAG)
"""Refusals that end when the index has caught up."""


class LiveFamily:
    """A SelectorFamily over one of the contract. The factor on q.k is the session's, so it comes with its
    indexes and with each query."""

    def __init__(
        self,
        selector: Selector,
        shape: Shape,
        page_tokens: int,
        given: frozenset[Need] = ONLY_QUERIES,
        works: IndexWorks | None = None,
        cache: str = "",
    ) -> None:
        """given: what the engine sends with its frames. works: where indexes are built; None: in the thread
        that brings rows or asks. cache: names the cache in what is counted. MANIFEST_INVALID for what the
        manifest promises and this agent cannot keep; UNSUPPORTED, with the fact `missing`, for what the
        family needs and the engine does not send."""
        self._selector = selector
        self._page_tokens = page_tokens
        self._block = min(page_tokens, APPEND_ROWS)
        self._made: dict[tuple[float, int], Family | None] = {}
        self.family = make_family(selector, shape, page_tokens)
        missing = sorted(self.family.facts.needs - given)
        if missing:
            raise CoreError(
                Reason.UNSUPPORTED,
                f"{selector.family} needs {', '.join(missing)}, which this engine does not send",
                {"missing": ",".join(missing)},
            )
        self.most_behind = max(OUTSIDE_ROWS, selector.persistent_rows.recent)
        """Rows behind an index whose keys a query may need: with more it is answered exactly."""
        self.gate = gate_of(selector, self.family.facts.estimates)
        self.works = works or IndexWorks(lambda: 0.0)
        self.name = Name(cache, self.family.facts.family, self.family.digest)

    @property
    def digest(self) -> str:
        return self.family.digest

    @property
    def dense_layers(self) -> frozenset[int]:
        return self.family.dense_layers

    def omits(self, rows: int) -> bool:
        return self.family.omits(rows)

    def index(self, source_digest: bytes, layer: int, scale: float | None = None) -> LiveIndex:
        """One layer, as if the session had no other."""
        return self._opened(source_digest, [layer], scale)[0]

    def indexes(
        self, source_digest: bytes, layers: int, scale: float | None = None
    ) -> list[LiveIndex | None]:
        """Of a session of a model of `layers` layers; None for those that read every row. scale: the
        session's factor on q.k, None: 1/sqrt(d)."""
        own = [layer for layer in range(layers) if layer not in self.dense_layers]
        found: list[LiveIndex | None] = [None] * layers
        for layer, index in zip(own, self._opened(source_digest, own, scale), strict=True):
            found[layer] = index
        return found

    def forked(self, indexes: Sequence[LayerIndex | None], source_digest: bytes) -> list[LiveIndex | None]:
        """Of a session of the same rows: what the given indexes of its parent learnt is not learnt again."""
        own = [index for index in indexes if isinstance(index, LiveIndex)]
        if not own:
            return [None] * len(indexes)
        return self._taken_over(indexes, self.works.fork(own[0].session, source_digest))

    def truncated(
        self, indexes: Sequence[LayerIndex | None], source_digest: bytes, rows: int
    ) -> list[LiveIndex | None] | None:
        """Of the same session with its first `rows` rows alone; None where they are to be built from these.
        Only a family that learns from what is not kept goes on with what it has learnt: any other builds what
        a session of these rows would."""
        own = [index for index in indexes if isinstance(index, LiveIndex)]
        if not own or not self.family.facts.needs & FROM_FRAMES:
            return None
        session = self.works.truncate(own[0].session, source_digest, rows)
        return None if session is None else self._taken_over(indexes, session)

    def _taken_over(
        self, indexes: Sequence[LayerIndex | None], session: SessionLives
    ) -> list[LiveIndex | None]:
        of = {life.source.layer: life for life in session.lives}
        return [
            LiveIndex(self, session, of[index.life.source.layer]) if isinstance(index, LiveIndex) else None
            for index in indexes
        ]

    def _opened(self, source_digest: bytes, layers: Sequence[int], scale: float | None) -> list[LiveIndex]:
        # A threshold that was calibrated under one factor means nothing under another.
        family = None if scale is None else self.at(scale)
        family = family or self.family
        lives = [LayerLife(family, Source(source_digest, layer), self._block) for layer in layers]
        session = self.works.open(self.name, lives)
        return [LiveIndex(self, session, life) for life in lives]

    def audit(
        self, session_id: str, source_digest: bytes, layers: int, candidate_digest: str, share: float
    ) -> SessionAudit | None:
        """What grades selections of a new session; None for those that are not in the sample, and for a
        family that certifies its own. share: of sessions, [0, 1]."""
        if isinstance(self.family, CertifiedScan) or not audited(candidate_digest, session_id, share):
            return None
        own = [layer for layer in range(layers) if layer not in self.dense_layers]
        shape, block = self.family.shape, self._block
        return SessionAudit(self.works, self.name, shape, session_id, source_digest, own, block)

    def at(self, scale: float, doublings: int = 0) -> Family | None:
        """The family for attention with that factor on q.k and its budget doubled so often; None when the
        family takes no such budget."""
        key = (scale, doublings)
        if key not in self._made:
            if len(self._made) > 16:
                self._made.clear()
            self._made[key] = self._family(scale, doublings)
        return self._made[key]

    def _family(self, scale: float, doublings: int) -> Family | None:
        selector = self._selector
        if doublings:
            budget = selector.budget
            given = {"tokens": budget.tokens, "bytes": budget.bytes, "units": budget.units}
            wider = {name: count << doublings for name, count in given.items() if count is not None}
            selector = selector.model_copy(update={"budget": budget.model_copy(update=wider)})
        try:
            made = make_family(selector, replace(self.family.shape, scale=scale), self._page_tokens)
        except CoreError:
            if not doublings:
                raise
            return None
        if not doublings:
            return made
        # No index depends on the budget, so that one serves them all; receipts say how often it was doubled.
        return cast(Family, replace(cast(Any, made), digest=self.family.digest))


class LiveIndex:
    """One layer of one session. Rows are taken at once and built into an index later; a selection is made
    with the index that is published, and reads the rows behind it besides."""

    def __init__(self, live: LiveFamily, session: SessionLives, life: LayerLife) -> None:
        self._live = live
        self.session = session
        self.life = life
        self.source_digest = life.source.digest
        self.selector_digest = live.digest

    @property
    def generation(self) -> int:
        """The epoch of the published index; 0: none."""
        published = self.life.published
        return 0 if published is None else published.epoch

    @property
    def covered(self) -> int:
        """Rows that are in the index or wait for it."""
        return self.life.arrived

    def weights(self, weights: LayerWeights) -> None:
        """What evidence that comes without weights is completed by."""
        self._live.works.give_weights(self.life, weights)

    def append(self, first: int, k: Tensor, v: Tensor, evidence: Evidence = NO_EVIDENCE) -> None:
        """Rows k, v [n, Hk, d] at [first, first + n), and what the engine gives with them. SUPPORT_GAP unless
        first is `covered`."""
        if evidence.weights is not None:
            self.weights(evidence.weights)
        # Copies: rows of a frame may be a view of all that came with it, queries included.
        kept = evidence.of(self._live.family.facts.needs).kept()
        self._live.works.arrive(self.life, Block(first, k.clone(), v.clone(), kept))

    def over(self) -> None:
        """Rows that would wait for their evidence have no room: QUOTA_EXCEEDED of every selection."""
        self._live.works.over(self.session)

    def end_rows(self) -> None:
        """All rows of a step are here."""
        self._live.works.end_rows(self.life)

    def decode(self) -> None:
        """A decode step asks of this session: what came until now is its prompt."""
        if not self.life.decoding:
            self._live.works.decode(self.session.lives)

    def caught_up(self, seconds: float) -> bool:
        """As if a decode step asked; then waits, at most for `seconds`, until the whole session's indexes are
        those of the rows that came. Whether they are."""
        self.decode()
        return self._live.works.caught_up(self.session.lives, seconds)

    def close(self) -> None:
        """Ends the whole session's indexes. Idempotent."""
        self._live.works.close(self.session)

    def select(
        self,
        q: Tensor,
        rows: int,
        scale: float,
        tail: Tensor | None = None,
        hidden: Tensor | None = None,
        hidden_layer: int | None = None,
        may_widen: bool = False,
    ) -> Selection:
        """Rows for q [1, Hq, d] over rows [0, rows). tail: keys of the last of them, which no index has.
        hidden: [1, d_model], the input of layer `hidden_layer`, None: not said. may_widen: whether the
        contract allows it. UNSUPPORTED for more queries; DEPENDENCY_UNPUBLISHED and INDEX_FRONTIER_LAG until
        the index has caught up; why there is none for good; GateFailed; and what the family refuses."""
        if q.shape[0] != 1:
            raise CoreError(Reason.UNSUPPORTED, f"one query at a time is selected for, not {q.shape[0]}")
        self.decode()
        try:
            with self._live.works.lease(self.life, self._live.most_behind) as (held, keys):
                behind = _behind(rows - held.covered, keys, tail)
                query = Query(
                    q,
                    rows,
                    self.life.source,
                    hidden=hidden,
                    tail=behind,
                    hidden_layer=hidden_layer,
                    outside=OUTSIDE_ROWS,
                )

                def choose(doublings: int) -> Chosen | None:
                    family = self._live.at(scale, doublings)
                    if family is None or (doublings and not family.omits(rows)):
                        return None
                    chosen = family.select(held.index, query)
                    # Beyond this the exact path is next, which says of itself that it is exact.
                    reads_all = all(len(one) == rows for one in chosen.positions)
                    return None if doublings and reads_all else chosen

                found = judged(self._live.gate, choose, may_widen=may_widen)
                covered = held.covered
        except CoreError as error:
            if error.reason in _LATE:
                self._live.works.missed(self.life)
            raise
        selection = _stated(found, covered, self._live)
        if found.uncertain:
            assert self._live.gate is not None
            raise GateFailed(self._live.gate, found, selection)
        return selection


def _behind(lag: int, keys: Tensor | None, tail: Tensor | None) -> Tensor | None:
    """Keys of the `lag` rows behind an index, from those that wait for it and those of the frame; None where
    some are not at hand."""
    parts = [part for part in (keys, tail) if part is not None]
    if not lag or sum(int(part.shape[0]) for part in parts) != lag:
        return None
    return torch.cat([part.to("cpu") for part in parts])


def _stated(found: Judged, covered: int, live: LiveFamily) -> Selection:
    chosen = found.selection
    receipt = chosen.receipt
    copies = live.family.shape.kv_heads if chosen.scope is Scope.LAYER else 1
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
        certified=chosen.certified,
        widened=found.widened,
        uncertain=found.uncertain,
        limits=NO_LIMITS if live.gate is None else live.gate.limits,
    )
