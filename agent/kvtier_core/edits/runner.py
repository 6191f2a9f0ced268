"""Edits of sessions from request to answer: checks, preparation, commit, and what goes stale with it.

Why it exists: after an edit a row index, a plan or a page box of before describes a history that is no more.
Every edit therefore ends in one place that moves the position epoch and everything that names it. It must not
know how rows move nor the wire.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

from kvtier_core.appends import LayerState, Session
from kvtier_core.edits.branching import Branching
from kvtier_core.edits.requests import EditAnswer, EditRequest, ForkRequest, Truncate
from kvtier_core.errors import CoreError, Reason
from kvtier_core.identity import SourceBinding
from kvtier_core.selectors.base import LayerIndex, SelectorFamily
from kvtier_core.sessions import RowStore


class Context(Protocol):
    """What a session's steps need besides its rows."""

    session: Session
    source_digest: bytes
    family: SelectorFamily | None
    indexes: list[LayerIndex | None]


class Edits:
    """Edits the sessions of one store; the engine's lock is held. issue: a number that no session has had,
    which names lines and histories."""

    def __init__(self, store: RowStore, clock: Callable[[], float], issue: Callable[[], int]) -> None:
        self._store = store
        self._clock = clock
        self._issue = issue
        self._branching = Branching(store)

    def apply(self, context: Context, request: EditRequest) -> EditAnswer:
        """All or nothing. POSITION_CONTRACT_MISMATCH: a stale epoch. BAD_ARGUMENT names the field and what is
        legal. STEP_ORDER, NO_DESTINATION_CAPACITY, DEADLINE, STORAGE_UNAVAILABLE, CHECKSUM_MISMATCH."""
        session = context.session
        check_epoch(session, request.position_epoch)
        changed = self._truncate(context, request.operation, self._alive(request.deadline))
        return EditAnswer(
            changed=changed,
            position_epoch=session.position_epoch,
            next_position=session.layers[0].frontier,
            rows=session.layers[0].frontier,
        )

    def _alive(self, deadline: float | None) -> Callable[[], None]:
        def check() -> None:
            if deadline is not None and self._clock() > deadline:
                raise CoreError(Reason.DEADLINE, "the deadline passed before the edit was done")

        return check

    def _truncate(self, context: Context, operation: Truncate, alive: Callable[[], None]) -> bool:
        """Between layers of a step too: it ends a step that stopped half-way."""
        session, to = context.session, operation.to
        least = min(state.frontier for state in session.layers)
        if not 0 <= to <= least:
            raise CoreError(
                Reason.BAD_ARGUMENT,
                f"truncate.to {to} is not a position of the session; legal: 0 to {least}",
                {"to": to, "legal": f"0..{least}"},
            )
        if all(state.frontier == to for state in session.layers):
            return False
        number = self._issue()
        cut = self._branching.prepare_cut(session, to, number, alive)
        try:
            source = dataclasses.replace(session.source, publication_generation=number)
            indexes = self._indexed(context, source, to, alive)
        except BaseException:
            self._branching.abort_cut(cut)
            raise
        self._branching.commit_cut(cut)
        session.producers[1:] = [item for item in session.producers[1:] if item[0] < to]
        self._changed(context, source, indexes)
        return True

    def _changed(self, context: Context, source: SourceBinding, indexes: list[LayerIndex | None]) -> None:
        """What was derived from the former history is of another source now."""
        session = context.session
        session.source = source
        session.position_epoch += 1
        session.snapshot_generation += 1
        session.committed = session.layers[0].frontier
        session.layer = len(session.layers) - 1
        context.source_digest = source.digest()
        context.indexes[:] = indexes

    def _indexed(
        self, context: Context, source: SourceBinding, rows: int, alive: Callable[[], None]
    ) -> list[LayerIndex | None]:
        """Indexes of rows [0, rows) under another source, built again from the rows themselves."""
        family = context.family
        if family is None:
            return list(context.indexes)
        size = self._store.layout.chunk_tokens
        digest = source.digest()
        built: list[LayerIndex | None] = []
        for former, state in zip(context.indexes, context.session.layers, strict=True):
            if former is None:
                built.append(None)
                continue
            index = family.index(digest)
            for chunk, first in enumerate(range(0, rows, size)):
                alive()
                payload = self._store.read_rows(state.lines[chunk])
                index.append(first, self._store.layout.rows(payload, min(size, rows - first))[0])
            built.append(index)
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
        alive = self._alive(request.deadline)
        homes, grant = store.placement.reserve_open(len(parent.layers), request.deadline)
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
            )
            branch = self._branching.prepare_branch(parent, child, alive)
            try:
                indexes = self._indexed(context, source, parent.layers[0].frontier, alive)
            except BaseException:
                self._branching.abort_branch(branch)
                raise
        except BaseException:
            with store.lock:
                store.ledger.release(grant)
            raise
        self._branching.commit_branch(branch)
        return child, indexes


def check_epoch(session: Session, stated: int) -> None:
    """POSITION_CONTRACT_MISMATCH when the caller states another position epoch than the session's."""
    if stated and stated != session.position_epoch:
        raise CoreError(
            Reason.POSITION_CONTRACT_MISMATCH,
            f"position_epoch {stated} is not the session's {session.position_epoch}",
            {"position_epoch": session.position_epoch},
        )


def check_between_steps(session: Session, what: str) -> None:
    """STEP_ORDER while layers disagree about the frontier."""
    frontiers = {state.frontier for state in session.layers}
    if len(frontiers) > 1:
        raise CoreError(
            Reason.STEP_ORDER,
            f"{what} stands between steps; layer {session.layer} was the last that has its rows",
            {"step": session.step, "layer": session.layer},
        )
