"""A candidate's answer for one frame: its selection, what the gate allows of it, and the answer over it.

Why it exists: between an index that may be late, absent or uncertain and an answer stand the fixed steps of
specification B.8, and each of them leaves facts that a receipt must state. It must not know when a candidate
may be published.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtier_core.appends import Append
from kvtier_core.attend import Attended, Attention
from kvtier_core.errors import CoreError, Reason
from kvtier_core.folding import Query
from kvtier_core.identity import selected_support_digest
from kvtier_core.layout import ChunkLayout
from kvtier_core.planner import Plan, plan_rows
from kvtier_core.receiptcheck.contract import check_selected
from kvtier_core.receipts import SelectionFacts, StepMode, StepRequest
from kvtier_core.selectors.base import Selection, SelectorFamily, check_fresh
from kvtier_core.selectors.gates import GateFailed, estimate_of
from kvtier_core.sessions import RowStore
from kvtier_core.stepcontext import StepContext, decodes
from kvtier_core.supports import Support
from kvtier_crds.manifest import Fallback

SERVED_EXACTLY = frozenset(
    {Reason.GATE_FAILED.value, Reason.DEPENDENCY_UNPUBLISHED.value, Reason.INDEX_FRONTIER_LAG.value}
)
"""Reasons of an exact answer that are part of how a candidate serves; any other is a want of it."""


@dataclass(frozen=True, slots=True)
class ArmAnswer:
    """One arm's answer with what it read. selection None: every visible row. failed: plans that were run for
    it before, each with why it ended."""

    attended: Attended
    plan: Plan
    support_digest: str
    rows: int
    selection: Selection | None
    failed: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Selected:
    """What came of asking a selector. selection None: none was asked, or it refused. fallback: the reason of
    an exact fetch in its place (B.8, row 3: always allowed); empty for none."""

    selection: Selection | None = None
    fallback: str = ""


ALL_ROWS = Selected()


class Selecting:
    """Selections and answers over them of one engine. Its lock is held."""

    def __init__(self, store: RowStore, attention: Attention) -> None:
        self._store = store
        self._attention = attention

    def ask(
        self,
        context: StepContext,
        request: StepRequest,
        family: SelectorFamily | None,
        append: Append,
        query: Query,
        visible: int,
        mode: StepMode,
    ) -> Selected:
        """What the candidate's selector reads for the frame. ALL_ROWS: every row, so that the exact answer is
        its answer."""
        decode = decodes(context.session, request)
        if family is None or not decode or request.layer in family.dense_layers or not family.omits(visible):
            return ALL_ROWS
        index = context.indexes[request.layer]
        try:
            if context.session.positions.edited:
                raise CoreError(Reason.INDEX_STALE, "no index is of rows that were dropped or moved")
            if index is None:
                raise CoreError(
                    Reason.NO_CANDIDATE, "the session was not opened under a grant: it has no index"
                )
            check_fresh(index, family, context.source_digest)
            if context.fixed is not None:
                context.fixed.check_complete()
            hidden = request.evidence.hidden
            selection = index.select(
                request.q,
                visible,
                query.frame.scale,
                append.k if append.k.shape[0] else None,
                None if hidden is None else hidden[-1:],
                request.hidden_layer,
                may_widen=Fallback.WIDEN in mode.allowed,
            )
            for rows in selection.positions:
                check_selected(rows, visible)
        except GateFailed as error:
            return Selected(error.selection, error.reason.value)
        except CoreError as error:
            return Selected(None, error.reason.value)
        return Selected(selection)

    def attend(self, selection: Selection, append: Append, query: Query, visible: int) -> ArmAnswer:
        """The answer over the rows of a selection. DEADLINE, NO_LEGAL_PATH, typed errors of tiers."""
        plan = plan_rows(self._store, append, visible, self._chunks(selection.positions))
        support = Support(selection.positions, selection.log_weight, selection.complete)
        attended = self._attention.selected(plan, append, query, support)
        digest = selected_support_digest(visible, selection.positions)
        most = max(len(rows) for rows in selection.positions)
        return ArmAnswer(attended, plan, digest, most, selection)

    def _chunks(self, positions: Sequence[NDArray[np.int64]]) -> list[int]:
        size = self._store.layout.chunk_tokens
        found = np.unique(np.concatenate([rows // size for rows in positions]))
        return [int(chunk) for chunk in found]


def selected_bytes(positions: Sequence[NDArray[np.int64]], layout: ChunkLayout) -> int:
    """Of the rows that the lists name, one list a KV head or a query head, each row once a KV head."""
    group = len(positions) // layout.kv_heads
    rows = 0
    for first in range(0, len(positions), group):
        lists = positions[first : first + group]
        rows += len(lists[0]) if group == 1 else len(np.unique(np.concatenate(lists)))
    return rows * layout.row_bytes // layout.kv_heads


def facts_of(
    selection: Selection | None, answer: ArmAnswer | None, visible: int, layout: ChunkLayout
) -> SelectionFacts | None:
    """What a receipt says of a selection. answer: over its rows, None where another one was published."""
    if selection is None or selection.receipt is None:
        return None
    read = None if answer is None else answer.attended.read
    receipt, asked = selection.receipt, selection.receipt.asked
    certified = None
    if read is not None and selection.certified is not None:
        certified = selection.certified(read)
    omitted, confidence = estimate_of(receipt)
    return SelectionFacts(
        family=receipt.family,
        variant=receipt.variant,
        guarantee=receipt.guarantee.value,
        selector_digest=receipt.selector_digest,
        index_digest=receipt.index_digest,
        index_epoch=receipt.index_epoch,
        index_covered=selection.covered,
        unindexed=visible - selection.covered,
        asked_tokens=(asked.tokens or 0) >> selection.widened,
        asked_bytes=(asked.bytes or 0) >> selection.widened,
        asked_units=(asked.units or 0) >> selection.widened,
        got_units=max(receipt.got_units, default=0),
        got_rows=max(receipt.got_rows, default=0),
        uncapped=max(receipt.uncapped, default=0),
        dropped_by_cap=max(receipt.dropped_by_cap, default=0),
        scanned_units=receipt.scanned_units,
        index_bytes=receipt.index_bytes,
        threshold=min(receipt.threshold, default=math.nan),
        runner_up=max(receipt.runner_up, default=math.nan),
        ties=max(receipt.ties, default=0),
        seed=receipt.seed or 0,
        omitted_mass=omitted,
        confidence=confidence,
        certified_mass=math.nan if certified is None else min(certified),
        widened=selection.widened,
        max_omitted_mass=selection.limits[0],
        min_confidence=selection.limits[1],
        failed=selection.uncertain,
        hot_bytes=0 if answer is None else answer.attended.hot_bytes,
        selected_bytes=selected_bytes(selection.positions, layout),
    )
