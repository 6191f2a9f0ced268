"""Edits of sessions from request to answer: checks, preparation, commit, and what goes stale with it.

Why it exists: after an edit a row index, a plan or a page box of before describes a history that is no more.
Every edit therefore ends in one place that moves the position epoch and everything that names it. It must not
know how rows move nor the wire.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

from kvtier_core.appends import NO_LINE, LayerState, Session
from kvtier_core.edits.branching import Branching, Patience
from kvtier_core.edits.checks import (
    bad_argument,
    check_between_steps,
    check_epoch,
    dropped,
    repositioned,
)
from kvtier_core.edits.history import record
from kvtier_core.edits.requests import Drop, EditAnswer, EditRequest, ForkRequest, Reposition, Truncate
from kvtier_core.identity import SourceBinding
from kvtier_core.positions import PositionView
from kvtier_core.rope import rope_table
from kvtier_core.selectors.base import LayerIndex, SelectorFamily, close_indexes
from kvtier_core.selectors.fixedcontext import FixedContext
from kvtier_core.selectors.lateevidence import LateEvidence
from kvtier_core.sessions import RowStore
from kvtier_crds.manifest import Model


class Context(Protocol):
    """What a session's steps need besides its rows."""

    session: Session
    source_digest: bytes
    family: SelectorFamily | None
    indexes: list[LayerIndex | None]
    late: LateEvidence | None
    fixed: FixedContext | None

    def forget_views(self) -> None:
        """Lets go of what frames keep of where rows lie."""

    def end_audit(self) -> None:
        """Grades none of its selections from now on."""


class Edits:
    """Edits the sessions of one store; the engine's lock is held. issue: a number that no session has had,
    to name lines. intern, digest_of: producers by index and back."""

    def __init__(
        self,
        store: RowStore,
        model: Model,
        clock: Callable[[], float],
        issue: Callable[[], int],
        intern: Callable[[str], int],
        digest_of: Callable[[int], str],
    ) -> None:
        self._store = store
        self._model = model
        self._clock = clock
        self._issue = issue
        self._intern = intern
        self._digest_of = digest_of
        self._branching = Branching(store)

    def apply(self, context: Context, request: EditRequest) -> EditAnswer:
        """All or nothing. POSITION_CONTRACT_MISMATCH: a stale epoch, or rows that are stored unrotated.
        UNSUPPORTED: a model whose rows cannot be moved. BAD_ARGUMENT; each names the field and what is legal.
        STEP_ORDER, NO_DESTINATION_CAPACITY, DEADLINE, STORAGE_UNAVAILABLE, CHECKSUM_MISMATCH."""
        session, operation = context.session, request.operation
        asked = (operation, session.layers[0].frontier)
        again = request.position_epoch == session.position_epoch - 1 and asked == session.last_edit
        if not again:
            check_epoch(session, request.position_epoch)
        changed = again
        if not again:
            if isinstance(operation, Truncate):
                changed = self._truncate(context, operation, Patience(self._clock, request.deadline))
            else:
                changed = self._view(context, operation)
            if changed:
                session.last_edit = (operation, session.layers[0].frontier)
        frontier = session.layers[0].frontier
        return EditAnswer(
            changed=changed,
            position_epoch=session.position_epoch,
            next_position=session.positions.next_position(frontier),
            rows=session.positions.count(frontier),
            chunks=sum(line != NO_LINE for state in session.layers for line in state.lines),
        )

    def _truncate(self, context: Context, operation: Truncate, patience: Patience) -> bool:
        """Between layers of a step too: it ends a step that stopped half-way."""
        session, to = context.session, operation.to
        least = min(state.frontier for state in session.layers)
        legal = session.positions.next_position(least)
        if not 0 <= to <= legal:
            raise bad_argument("truncate.to", to, f"0 to {legal}")
        row, view = session.positions.truncate(least, to)
        nothing = view == session.positions and all(state.frontier == row for state in session.layers)
        if nothing and not operation.anew:
            return False
        # A line that goes may live on elsewhere, or in a late completion: its name is not given again.
        number = self._issue() if self._branching.loses_lines(session, row) else session.number
        cut = self._branching.prepare_cut(session, row, number, patience)
        try:
            source = _next_history(session.source)
            kept = self._kept(context, source, row, view)
            indexes = self._indexed(context, source, row, view, patience) if kept is None else kept
        except BaseException:
            self._branching.abort_cut(cut)
            raise
        self._branching.commit_cut(cut)
        edits = {point.producer for point in session.edits}
        session.producers[1:] = [item for item in session.producers[1:] if item[0] < row or item[1] in edits]
        self._changed(context, source, view, indexes, goes_on=kept is not None)
        return True

    def _kept(
        self, context: Context, source: SourceBinding, rows: int, view: PositionView
    ) -> list[LayerIndex | None] | None:
        """Indexes of rows [0, rows) that go on with what they learnt; None: they are to be built anew."""
        if context.family is None or view.edited:
            return None
        kept = context.family.truncated(context.indexes, source.digest(), rows)
        return None if kept is None else list(kept)

    def _view(self, context: Context, operation: Drop | Reposition) -> bool:
        session = context.session
        check_between_steps(session, "an edit")
        frontier = session.layers[0].frontier
        if isinstance(operation, Drop):
            view = dropped(session.positions, frontier, operation)
        else:
            # Asked for first, so that it does not depend on the rows whether a model may be edited.
            session.turning = session.turning or rope_table(self._model)
            view = repositioned(session.positions, frontier, operation)
        if view == session.positions:
            return False
        source = _next_history(session.source)
        for chunk in view.hidden_chunks(self._store.layout.chunk_tokens, frontier):
            self._branching.forget_chunk(session, chunk)
        self._changed(context, source, view, [None] * len(session.layers))
        return True

    def _changed(
        self,
        context: Context,
        source: SourceBinding,
        view: PositionView,
        indexes: list[LayerIndex | None],
        *,
        goes_on: bool = False,
    ) -> None:
        """What was derived from the former history is of another source now. Rows that an edit leaves are
        committed by it. goes_on: the indexes with what they learnt."""
        session = context.session
        frontier = session.layers[0].frontier
        record(session, view, frontier, self._intern, self._digest_of)
        session.source = source
        session.position_epoch += 1
        session.snapshot_generation += 1
        session.committed = frontier
        # What comes next begins a step, of any number; what was sent before is no repeat of it.
        session.step = -1
        context.source_digest = source.digest()
        context.end_audit()
        close_indexes(context.indexes)
        context.indexes[:] = indexes
        if context.late is not None:
            context.late.cut(frontier, goes_on=goes_on)
        if context.fixed is not None:
            context.fixed.cut(frontier)
        # Views of the former rows would keep memory that the tier may have given to others.
        context.forget_views()

    def _indexed(
        self,
        context: Context,
        source: SourceBinding,
        rows: int,
        view: PositionView,
        patience: Patience,
    ) -> list[LayerIndex | None]:
        """Indexes of rows [0, rows) under another source, built again from the rows themselves: a view that
        is edited has none."""
        family = context.family
        layers = context.session.layers
        if family is None or view.edited:
            return [None] * len(layers)
        size = self._store.layout.chunk_tokens
        digest = source.digest()
        if context.fixed is not None:
            rows = min(rows, context.fixed.extent)
        built = list(family.indexes(digest, len(layers), context.session.spec.score_scale))
        try:
            for index, state in zip(built, layers, strict=True):
                if index is None:
                    continue
                for chunk, first in enumerate(range(0, rows, size)):
                    patience.check()
                    payload = self._store.read_rows(state.lines[chunk], patience.deadline)
                    index.append(first, *self._store.layout.rows(payload, min(size, rows - first)))
                index.end_rows()
        except BaseException:
            close_indexes(built)
            raise
        return built

    # Fork.

    def fork(
        self, context: Context, request: ForkRequest, session_id: str, source: SourceBinding, number: int
    ) -> tuple[Session, list[LayerIndex | None]]:
        """A session of the same rows, which neither side can change for the other, and its indexes. `source`
        and `number` are the child's. STEP_ORDER in the middle of a step; POSITION_CONTRACT_MISMATCH, and
        what reserving, reading and writing may refuse. Nothing is held then."""
        parent, store = context.session, self._store
        check_epoch(parent, request.position_epoch)
        check_between_steps(parent, "fork")
        patience = Patience(self._clock, request.deadline)
        slots = store.placement.check_fits(parent.spec.max_tokens, len(parent.layers), store.layout)
        homes, grant = store.placement.reserve_session(number, len(parent.layers), slots, request.deadline)
        try:
            child = Session(
                number=number,
                session_id=session_id,
                generation=number,
                spec=dataclasses.replace(parent.spec, session_id=session_id),
                source=source,
                layers=[LayerState(open_tier=home) for home in homes],
                open_grant=grant,
                producers=list(parent.producers),
                committed=parent.committed,
                position_epoch=parent.position_epoch,
                positions=parent.positions,
                edits=list(parent.edits),
                turning=parent.turning,
            )
            branch = self._branching.prepare_branch(parent, child, patience)
            indexes: list[LayerIndex | None] = [None] * len(parent.layers)
            try:
                if context.family is not None:
                    indexes = list(context.family.forked(context.indexes, source.digest()))
                # Whoever asked has given up by then, and would not know of it.
                patience.check()
            except BaseException:
                close_indexes(indexes)
                self._branching.abort_branch(branch)
                raise
        except BaseException:
            with store.lock:
                store.ledger.release(grant)
            store.placement.rule.closed(number)
            raise
        self._branching.commit_branch(branch)
        return child, indexes


def _next_history(source: SourceBinding) -> SourceBinding:
    """Of the same session after an edit: what its rows are named by does not come again."""
    return dataclasses.replace(source, publication_generation=source.publication_generation + 1)
