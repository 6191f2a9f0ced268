"""One frame from request to answer: reserve rows, attend, compare, publish, commit.

Why it exists: the order of these decides what a failure costs and what a comparison means. Exact first, both
answers from one snapshot, rows committed only with an answer in hand. It must not know which frames may come
(steporder) nor how tiers work.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from kvtier_core.directory import NO_PRODUCER
from kvtier_core.errors import CoreError, Reason
from kvtier_core.folding import Query
from kvtier_core.identity import edited_support_digest, full_support_digest
from kvtier_core.planner import plan_rows
from kvtier_core.positions import PositionView
from kvtier_core.promises import AHEAD
from kvtier_core.receiptcheck.step import check_step
from kvtier_core.receipts import (
    Comparison,
    ExactnessClass,
    PublishArm,
    StepAnswer,
    StepMode,
    StepReceipt,
    StepRequest,
)
from kvtier_core.selectors.base import SelectorFamily
from kvtier_core.sessions import Append, RowStore, Session
from kvtier_core.stepcontext import StepContext, decodes
from kvtier_core.stepplans import StepPlans, Tried, plan_named
from kvtier_core.stepselect import ALL_ROWS, SERVED_EXACTLY, ArmAnswer, Selected, Selecting, facts_of
from kvtier_crds.manifest import Fallback
from kvtier_kernels.state import LogitFrame


class StepRunner:
    """Runs frames of one engine. The engine's lock is held; producers are interned digests."""

    def __init__(self, store: RowStore, plans: StepPlans, baseline_digest: str) -> None:
        self._store = store
        self._plans = plans
        self._attention = plans.attention
        self._selecting = Selecting(store, plans.attention)
        self.baseline_digest = baseline_digest
        self._producers: list[str] = []
        self._producer_index: dict[str, int] = {}

    def producer(self, digest: str) -> int:
        """The index of a producer's digest."""
        found = self._producer_index.get(digest)
        if found is None:
            found = len(self._producers)
            self._producers.append(digest)
            self._producer_index[digest] = found
        return found

    def digest_of(self, producer: int) -> str:
        return "" if producer == NO_PRODUCER else self._producers[producer]

    def run(
        self,
        context: StepContext,
        request: StepRequest,
        mode: StepMode,
        family: SelectorFamily | None,
        repeat: bool,
        tried: Tried | None = None,
    ) -> StepAnswer:
        """Answers the frame and takes its rows. On any CoreError nothing was taken. tried: an exact plan that
        was run for it before."""
        session = context.session
        store = self._store
        if mode.publish is PublishArm.CANDIDATE and mode.candidate_digest is None:
            raise CoreError(Reason.NO_CANDIDATE, "a candidate's answer needs the candidate's digest")
        if repeat and not store.rows_equal(
            session, request.layer, request.first_row_position, request.k, request.v, request.deadline
        ):
            raise CoreError(
                Reason.FRONTIER_MISMATCH,
                "these rows exist already with other bytes",
                {"frontier": session.layers[request.layer].frontier},
            )
        context.begin(request)
        if request.step != session.step:
            store.start_step(session)
            session.step_first = request.first_query_position
        k, v = (request.k[:0], request.v[:0]) if repeat else (request.k, request.v)
        kept = context.resident[request.layer]
        if kept is not None:
            # Rows that this frame writes beyond the frontier are there also when it fails.
            kept.clean = -1
        append = store.reserve(session, request.layer, k, v, request.deadline)
        try:
            answer, approximate = self._answer(context, request, mode, family, append, tried)
            store.settle(append)
        except BaseException:
            # A defect must cost an answer, not the capacity that this frame holds.
            store.abort(append)
            raise
        if approximate:
            self._mark_producer(session, request, mode)
        store.commit(append)
        context.take(append, request)
        if not repeat:
            session.step, session.layer = request.step, request.layer
        session.committed = max(session.committed, request.committed_frontier)
        session.snapshot_generation += 1
        return StepAnswer(answer.out, self._stamp(session, append, answer.receipt), answer.comparison, repeat)

    def _answer(
        self,
        context: StepContext,
        request: StepRequest,
        mode: StepMode,
        family: SelectorFamily | None,
        append: Append,
        tried: Tried | None,
    ) -> tuple[StepAnswer, bool]:
        """The answer, and whether this step publishes approximate answers (in any layer)."""
        visible = request.first_query_position + int(request.q.shape[0])
        frame = LogitFrame(context.session.spec.score_scale)
        query = Query(request.q, request.first_query_position, frame, request.deadline)
        wants_candidate = mode.publish is PublishArm.CANDIDATE or mode.compare
        selecting, session = self._selecting, context.session
        exact: ArmAnswer | None = None
        candidate: ArmAnswer | None = None
        chosen = ALL_ROWS
        if mode.publish is PublishArm.EXACT or mode.compare or not wants_candidate:
            exact = self._exact(append, query, visible, request, mode, tried=tried)
        if wants_candidate and mode.lane:
            candidate, chosen = self._placed(append, query, visible, request, mode, tried)
            if candidate is None and exact is None:
                exact = self._exact(append, query, visible, request, mode)
        elif wants_candidate:
            chosen = selecting.ask(context, request, family, append, query, visible, mode)
            if chosen.selection is not None and not chosen.fallback:
                candidate = selecting.attend(chosen.selection, append, query, visible)
            elif exact is None:
                exact, candidate = self._instead(append, query, visible, request, mode, chosen)
        fallback = chosen.fallback
        publishes = mode.publish is PublishArm.CANDIDATE and (not fallback or candidate is not None)
        if publishes and mode.may_publish is not None and not mode.may_publish():
            publishes, fallback = False, Reason.LEASE_EXPIRED.value
            exact = exact or self._exact(append, query, visible, request, mode)
        published = candidate if publishes and candidate is not None else exact
        assert published is not None
        comparison = None
        if mode.compare and exact is not None and (not fallback or fallback in SERVED_EXACTLY):
            comparison = self._compare(session, exact, candidate or exact, visible)
        decode = decodes(context.session, request)
        approximate = publishes and family is not None and decode and family.omits(visible)
        arm = PublishArm.CANDIDATE if publishes else PublishArm.EXACT
        digest = mode.candidate_digest if publishes and mode.candidate_digest else self.baseline_digest
        receipt = self._receipt(session, published, arm, digest, fallback, visible)
        told = facts_of(chosen.selection, candidate, visible, self._store.layout)
        receipt = dataclasses.replace(receipt, selection=told)
        self._grade(context, request, candidate, query.frame.scale, visible)
        view = context.session.positions
        check_step(
            receipt,
            visible=view.count(visible) if view.edited else visible,
            baseline_digest=self.baseline_digest,
            histories=len(context.session.producers),
            support=_view_digest(view, visible) if view.edited else None,
        )
        return StepAnswer(published.attended.out, receipt, comparison), approximate

    def _placed(
        self,
        append: Append,
        query: Query,
        visible: int,
        request: StepRequest,
        mode: StepMode,
        tried: Tried | None,
    ) -> tuple[ArmAnswer | None, Selected]:
        """An exact candidate's answer, by the plans of its own placement; None, with the reason of the
        baseline's answer in its place, when none of those is legal or ends in time."""
        try:
            return self._exact(append, query, visible, request, mode, mode.lane, tried), ALL_ROWS
        except CoreError as error:
            return None, Selected(fallback=error.reason.value)

    @staticmethod
    def _grade(
        context: StepContext, request: StepRequest, candidate: ArmAnswer | None, scale: float, visible: int
    ) -> None:
        """Has a sample of selections graded behind their answers."""
        audit = context.audit
        if audit is None or candidate is None or candidate.selection is None:
            return
        if audit.wants(request.step, request.layer):
            selection = candidate.selection
            read = None if selection.log_weight is not None else candidate.attended.read
            audit.grade(request.layer, request.q, scale, visible, selection.positions, read)

    def _instead(
        self,
        append: Append,
        query: Query,
        visible: int,
        request: StepRequest,
        mode: StepMode,
        chosen: Selected,
    ) -> tuple[ArmAnswer | None, ArmAnswer | None]:
        """What is published where no selection may be: the exact answer, and behind it, when no exact way
        ends in time and the contract says so, an uncertain selection as a declared degradation (B.8, rows 3
        to 6). DEADLINE, NO_LEGAL_PATH: neither."""
        try:
            return self._exact(append, query, visible, request, mode), None
        except CoreError as error:
            degraded = chosen.selection is not None and Fallback.DEGRADE in mode.allowed
            if not degraded or error.reason not in (Reason.DEADLINE, Reason.NO_LEGAL_PATH):
                raise
        assert chosen.selection is not None
        return None, self._selecting.attend(chosen.selection, append, query, visible)

    def promise_next(self, context: StepContext, request: StepRequest, waits: bool = False) -> None:
        """What a frame on the short way promised, now or when its answer has left. A layer that was in place
        when it was last attended has nothing to bring. Where promises may wait for answers, the last layer's
        is the first one of another token. waits: the frame itself waits for storage, which is better asked
        for both at once."""
        context.due = None
        step, layer = request.step, request.layer + 1
        if not request.next_layer_follows:
            if not request.promise_later or layer < len(context.resident):
                return
            step, layer = step + 1, 0
        if request.promise_later and not waits:
            known = context.resident[layer] if layer < len(context.resident) else None
            if known is None or not known.resident:
                context.due = step, layer
        else:
            self._promise(context, step, layer, request.promise_later)

    def keep_promise(self, context: StepContext) -> None:
        """What is due, if that layer still comes next."""
        session, due = context.session, context.due
        context.due = None
        if due is not None and due in ((session.step, session.layer + 1), _next_token(session)):
            self._promise(context, *due, True)

    def _promise(self, context: StepContext, step: int, layer: int, further: bool) -> None:
        """Of the next token only what is kept: its rows are those of this one and a row in place. further:
        also layers behind this one."""
        session = context.session
        if layer >= len(context.resident):
            return
        known = context.resident[layer]
        early = layer == 0
        if known is not None and known.streamed is not None:
            if known.stamp.holds(session.layers[layer].lines):
                self._plans.promise_kept(session.session_id, step, layer, known.streamed, early)
                if further:
                    self._promise_further(context, step, layer)
                return
        elif known is not None and known.resident:
            return
        if not early:
            self._plans.promise(session, step, layer)

    def _promise_further(self, context: StepContext, step: int, layer: int) -> None:
        """The layers behind one that is on its way: storage is busy also while nobody waits for it."""
        session, layers = context.session, len(context.resident)
        for _ in range(AHEAD - 1):
            step, layer = (step, layer + 1) if layer + 1 < layers else (step + 1, 0)
            known = context.resident[layer]
            if known is None or known.streamed is None:
                return
            holds = known.stamp.holds(session.layers[layer].lines)
            if not holds or not self._plans.promise_further(session.session_id, step, layer, known.streamed):
                return

    def _exact(
        self,
        append: Append,
        query: Query,
        visible: int,
        request: StepRequest,
        mode: StepMode,
        lane: str = "",
        tried: Tried | None = None,
    ) -> ArmAnswer:
        session = append.session
        view = session.positions
        if view.edited:
            chunks = sorted({piece.chunk for piece in view.pieces(self._store.layout.chunk_tokens, visible)})
            plan = plan_rows(self._store, append, visible, chunks)
            attended = self._attention.viewed(plan, append, query, view, session.turning)
            return ArmAnswer(attended, plan, _view_digest(view, visible), view.count(visible), None)
        planned = self._plans.exact(
            append,
            query,
            visible,
            step=request.step,
            forced=plan_named(mode.plan),
            next_layer_follows=request.next_layer_follows,
            lane=lane,
            tried=tried,
        )
        digest = full_support_digest(visible)
        return ArmAnswer(planned.attended, planned.plan, digest, visible, None, planned.failed)

    @staticmethod
    def _compare(session: Session, exact: ArmAnswer, candidate: ArmAnswer, visible: int) -> Comparison:
        difference = candidate.attended.out - exact.attended.out
        norm = float(torch.linalg.vector_norm(difference))
        if norm == 0.0 and not torch.equal(candidate.attended.out, exact.attended.out):
            # Squares that underflow must not make two answers the same.
            norm = float(torch.finfo(torch.float32).tiny)
        return Comparison(
            diff_norm=norm,
            exact_norm=float(torch.linalg.vector_norm(exact.attended.out)),
            frontier=visible,
            snapshot_generation=session.snapshot_generation,
            exact_support_digest=exact.support_digest,
            candidate_support_digest=candidate.support_digest,
            complete=candidate.selection is None,
        )

    def _receipt(
        self, session: Session, answer: ArmAnswer, arm: PublishArm, digest: str, fallback: str, visible: int
    ) -> StepReceipt:
        exactness = ExactnessClass.APPROXIMATE if answer.selection is not None else session.history
        return StepReceipt(
            exactness=exactness,
            arm=arm,
            manifest_digest=digest,
            support_digest=answer.support_digest,
            frontier=visible,
            rows_attended=answer.rows,
            selected_rows=0 if answer.selection is None else answer.selection.chosen_rows,
            bytes_by_tier=dict(answer.attended.bytes_by_tier),
            plan=answer.plan.labels,
            simulated=answer.plan.simulated,
            stall_seconds=answer.attended.stall_seconds,
            producer_digest="",
            estimated_omitted_mass=math.nan if answer.selection is None else answer.selection.omitted_mass,
            fallback=fallback,
            snapshot_generation=session.snapshot_generation,
            plan_kind=answer.plan.kind.value,
            hidden_seconds=answer.attended.hidden_seconds,
            peak_buffer_bytes=answer.attended.peak_buffer_bytes,
            promised_bytes=answer.attended.promised_bytes,
            shared_bytes_by_tier=answer.attended.shared or None,
            failed_plans=answer.failed,
        )

    def _stamp(self, session: Session, append: Append, receipt: StepReceipt) -> StepReceipt:
        """Producer and frontier are known once the rows are in."""
        frontier = session.layers[append.layer].frontier
        producer = self.digest_of(session.producer_at(max(0, frontier - 1)))
        return dataclasses.replace(
            receipt,
            producer_digest=producer,
            frontier=session.positions.next_position(frontier),
            position_epoch=session.position_epoch,
        )

    def _mark_producer(self, session: Session, request: StepRequest, mode: StepMode) -> None:
        """From the first approximate step on, rows of all layers are the candidate's (and stay so)."""
        assert mode.candidate_digest is not None
        producer = self.producer(mode.candidate_digest)
        if session.producers[-1][1] == producer:
            return
        # A frame may ask without bringing rows: those of later layers at its query come of its answer.
        first = min(request.first_row_position, request.first_query_position)
        session.producers.append((first, producer))
        size = self._store.layout.chunk_tokens
        for state in session.layers:
            for line in state.lines[first // size :]:
                self._store.directory.producer[line] = producer


def _next_token(session: Session) -> tuple[int, int] | None:
    """Step and layer of its first frame, once every layer has answered."""
    return (session.step + 1, 0) if session.layer == len(session.layers) - 1 else None


def _view_digest(view: PositionView, visible: int) -> str:
    return edited_support_digest([(part.first, part.last, part.position) for part in view.upto(visible)])
