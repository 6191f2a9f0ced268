"""Sessions that start from published blocks, and blocks that are published from sessions.

Why it exists: a prompt's first rows are often there already, of the same tenant and source, computed exactly.
A session that starts from them attends the very bytes in the slots where they lie: nothing is computed,
copied or moved. Each chunk that it borrows holds the block's copy in its place until the last session over it
ends. It must not know keys, tokens or who asks; what a block is, its key has said.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from kvtier_core.appends import NO_LINE, Session, session_of
from kvtier_core.blockstore.reads import Fetch
from kvtier_core.errors import CoreError, Reason
from kvtier_core.receipts import ExactnessClass
from kvtier_core.sessions import RowStore
from kvtier_core.stepcontext import StepContext
from kvtier_core.tiers.base import tensor_bytes


class Prefixes:
    """Of one engine. sessions, contexts: the engine's own, by session id; lock: the engine's."""

    def __init__(
        self,
        store: RowStore,
        lock: threading.RLock,
        sessions: Mapping[str, Session],
        contexts: Mapping[str, StepContext],
    ) -> None:
        self._store = store
        self._lock = lock
        self._sessions = sessions
        self._contexts = contexts

    def start(self, session_id: str, generation: int, fetch: Fetch, asked: bytes = b"") -> int:
        """Lets a session that has no rows start from the ready blocks of `fetch`, which are in the order of
        chunks and, of each, of layers, one layer each. Returns how many rows it starts with: those of whole
        chunks that are there in all layers, fewer where sessions would hold more than half of a tier's slots
        by blocks: CREDIT_PRESSURE when not one chunk may be held. The scope may be left afterwards.
        SESSION_UNKNOWN, GENERATION_STALE, STEP_ORDER once it has rows, UNSUPPORTED, with the fact `missing`,
        where its selector learns from more than rows, BAD_ARGUMENT beyond max_tokens, NOT_VISIBLE when the
        scope is left meanwhile or is of another engine's blocks; no row is there then. asked: names the
        blocks that were asked for. A call that names those from which the session started, before its first
        frame, gets the same answer: the first may have been lost."""
        with self._lock:
            session, store = session_of(self._sessions, session_id, generation), self._store
            layers, size = len(session.layers), store.layout.chunk_tokens
            frontier = session.layers[0].frontier
            begun = session.step >= 0 or bool(session.edits)
            if asked and frontier and not begun and session.started == (asked, frontier):
                return frontier
            if begun or frontier:
                raise CoreError(Reason.STEP_ORDER, "a session starts from blocks before its first frame")
            context = self._contexts[session_id]
            lacking = sorted(context.lacking())
            if lacking:
                raise CoreError(
                    Reason.UNSUPPORTED,
                    f"the session's selector learns from {', '.join(lacking)}, which no block has",
                    {"missing": ",".join(lacking)},
                )
            chunks = fetch.ready // layers
            most = session.spec.max_tokens
            if most and chunks * size > most:
                raise CoreError(
                    Reason.BAD_ARGUMENT, f"{chunks * size} rows pass the session's max_tokens {most}"
                )
            if not self.reads(fetch):
                # The session moved while they were read.
                raise CoreError(Reason.NOT_VISIBLE, "these blocks are of an engine that the session has left")
            chunks = self._lendable(chunks, layers, fetch)
            store.start_step(session)
            try:
                self._borrow(session, chunks, fetch)
                self._index(session, context, chunks)
            except BaseException:
                # A scope that was left meanwhile, or a full directory: a prefix of some layers is none.
                self._let_go(session)
                context.begin_anew()
                raise
            for state in session.layers:
                state.frontier = chunks * size
            session.committed = chunks * size
            session.started = (asked, chunks * size)
            session.snapshot_generation += 1
            return chunks * size

    def reads(self, fetch: Fetch) -> bool:
        """Whether the blocks of `fetch` are this engine's."""
        return fetch.of(self._store.directory)

    def _lendable(self, chunks: int, layers: int, fetch: Fetch) -> int:
        """The leading chunks whose blocks sessions may hold."""
        places: list[list[tuple[int, int]]] = []
        for chunk in range(chunks):
            with self._store.lock:
                found = [fetch.place(chunk * layers + layer) for layer in range(layers)]
            places.append([(line, tier) for line, tier, _ in found])
        with self._store.lock:
            fit = self._store.lendable(places)
        if chunks and not fit:
            raise CoreError(
                Reason.CREDIT_PRESSURE, "sessions hold as many slots by blocks as they may, half of a tier"
            )
        return fit

    def _borrow(self, session: Session, chunks: int, fetch: Fetch) -> None:
        store, layers = self._store, len(session.layers)
        for layer in range(layers):
            # A layer at a time, as everywhere: nobody may hold the lock for a long prefix.
            with store.lock:
                for chunk in range(chunks):
                    store.borrow(session, layer, chunk, *fetch.place(chunk * layers + layer))

    def _index(self, session: Session, context: StepContext, chunks: int) -> None:
        """Hands the rows on to what a selector has of them, as frames would have."""
        if context.family is None:
            return
        layout = self._store.layout
        size = layout.chunk_tokens
        for layer, state in enumerate(session.layers):
            for chunk, line in enumerate(state.lines[:chunks]):
                k, v = layout.rows(self._store.read_rows(line, None), size)
                context.adopt(layer, chunk * size, k, v)
            index = context.indexes[layer]
            if index is not None:
                index.end_rows()

    def _let_go(self, session: Session) -> None:
        for state in session.layers:
            with self._store.lock:
                for line in state.lines:
                    self._store.let_go(session, line)
                state.lines.clear()

    def payload(
        self, session_id: str, generation: int, layer: int, chunk: int, until: float | None = None
    ) -> bytes:
        """A verified copy of a sealed chunk's payload, as a block holds it. NOT_VISIBLE when it is not there,
        sealed and committed; UNCOMMITTED_ROWS when the session's rows are those of its own history only:
        after approximate answers or edits nobody else may start from them. DEADLINE: not read by `until`,
        since nobody else is served meanwhile."""
        with self._lock:
            session, store = session_of(self._sessions, session_id, generation), self._store
            if session.history is not ExactnessClass.EXACT or session.positions.edited:
                raise CoreError(
                    Reason.UNCOMMITTED_ROWS,
                    "rows after an approximate answer or an edit are the session's own",
                )
            size = store.layout.chunk_tokens
            if not 0 <= layer < len(session.layers) or not 0 <= (chunk + 1) * size <= session.committed:
                raise CoreError(Reason.NOT_VISIBLE, f"layer {layer} has no committed chunk {chunk}")
            state = session.layers[layer]
            line = state.lines[chunk] if chunk < len(state.lines) else NO_LINE
            if line in (NO_LINE, state.open_line):
                raise CoreError(Reason.NOT_VISIBLE, f"chunk {chunk} of layer {layer} is not sealed")
            return bytes(tensor_bytes(store.read_rows(line, until)))
