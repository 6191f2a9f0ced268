"""A session's rows from one engine into another of the same cache: read here, appended there, bit by bit.

Why it exists: a candidate with other tiers has an engine of its own, and its sessions come back in the middle
of a generation. What they computed is carried, not computed again. The two engines never hold their locks at
once: rows are read in parts under one and written under the other, so whoever carries sees to it that nobody
else steps the session meanwhile. It must not know why a session moves, nor who asks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvtier_core.appends import session_of
from kvtier_core.errors import CoreError, Reason
from kvtier_core.receipts import ExactnessClass, SessionHandle, SessionSpec
from kvtier_core.sessions import RowStore, Session
from kvtier_core.step import StepRunner
from kvtier_core.stepcontext import StepContext

PART_CHUNKS = 8
"""Chunks of one layer that are in memory twice while a session is carried."""


@dataclass(frozen=True, slots=True)
class CarriedSession:
    """Where a session stands between two frames. frontiers: rows [0, n) of each layer. chunk_tokens: by which
    its answers were merged so far; another engine with the same makes the same rows, bit for bit. histories:
    (first position, producer's digest), ascending. started: see `Session`."""

    spec: SessionSpec
    frontiers: tuple[int, ...]
    chunk_tokens: int
    histories: tuple[tuple[int, str], ...]
    step: int
    step_first: int
    layer: int
    committed: int
    position_epoch: int
    started: tuple[bytes, int] | None = None


@dataclass(frozen=True, slots=True)
class CarriedRows:
    """Rows [first, first + n) of a layer: k, v float32 [n, Hk, d] in host memory, verified."""

    layer: int
    k: Tensor
    v: Tensor


class Carriage:
    """Of one engine. sessions, contexts: its own, by session id; lock: its own. opens, closes: as the
    engine's `open_session` and `close_session`."""

    def __init__(
        self,
        store: RowStore,
        lock: threading.RLock,
        sessions: Mapping[str, Session],
        contexts: Mapping[str, StepContext],
        runner: StepRunner,
        opens: Callable[[SessionSpec], SessionHandle],
        closes: Callable[[str, int], int],
    ) -> None:
        self._store = store
        self._lock = lock
        self._sessions = sessions
        self._contexts = contexts
        self._runner = runner
        self._opens = opens
        self._closes = closes

    # Out.

    def state(self, session_id: str, generation: int) -> CarriedSession:
        """SESSION_UNKNOWN, GENERATION_STALE; UNSUPPORTED for a session with a selector, whose index would be
        left behind, and for one whose history was edited."""
        with self._lock:
            session = session_of(self._sessions, session_id, generation)
            if self._contexts[session_id].family is not None or session.edits or session.positions.edited:
                raise CoreError(
                    Reason.UNSUPPORTED, "a session with a selector or an edited history stays where it is"
                )
            spec = replace(session.spec, session_id=session_id, lane="", candidate_digest=None, audit=0.0)
            return CarriedSession(
                spec=spec,
                frontiers=tuple(state.frontier for state in session.layers),
                chunk_tokens=self._store.layout.chunk_tokens,
                histories=tuple((at, self._runner.digest_of(one)) for at, one in session.producers),
                step=session.step,
                step_first=session.step_first,
                layer=session.layer,
                committed=session.committed,
                position_epoch=session.position_epoch,
                started=session.started,
            )

    def rows(self, session_id: str, generation: int, deadline: float | None = None) -> Iterator[CarriedRows]:
        """Every row, layer by layer and ascending, in parts. Between two parts no lock is held.
        CHECKSUM_MISMATCH, STORAGE_UNAVAILABLE, DEADLINE."""
        layers = len(session_of(self._sessions, session_id, generation).layers)
        for layer in range(layers):
            chunk = 0
            while (part := self._part(session_id, generation, layer, chunk, deadline)) is not None:
                yield part
                chunk += PART_CHUNKS

    def _part(
        self, session_id: str, generation: int, layer: int, chunk: int, deadline: float | None
    ) -> CarriedRows | None:
        size = self._store.layout.chunk_tokens
        with self._lock, torch.inference_mode():
            state = session_of(self._sessions, session_id, generation).layers[layer]
            ks, vs = [], []
            for at, line in enumerate(state.lines[chunk : chunk + PART_CHUNKS], start=chunk):
                payload = self._store.read_rows(line, deadline)
                k, v = self._store.layout.rows(payload, min(size, state.frontier - at * size))
                ks.append(k)
                vs.append(v)
            return CarriedRows(layer, torch.cat(ks), torch.cat(vs)) if ks else None

    # In.

    def helped(self, session_id: str, generation: int, digest: str, first: int) -> None:
        """Rows from `first` on follow answers of another engine, which runs the manifest of that digest and
        merges other chunks: they are not those of this one's exact run, and answers over them say so."""
        with self._lock:
            session, producer = (
                session_of(self._sessions, session_id, generation),
                self._runner.producer(digest),
            )
            if session.producers[-1][1] == producer:
                return
            session.producers.append((first, producer))
            for state in session.layers:
                for line in state.lines[first // self._store.layout.chunk_tokens :]:
                    self._store.directory.producer[line] = producer

    def receive(
        self, carried: CarriedSession, parts: Iterator[CarriedRows], deadline: float | None = None
    ) -> SessionHandle:
        """Opens a session of the same name with these rows; the next frame goes on where the last one ended.
        Rows that engines of another chunk size helped to compute are not those of this one's exact run, and
        answers over them say so. NO_DESTINATION_CAPACITY and what reading refuses; nothing is held then."""
        handle = self._opens(carried.spec)
        try:
            with self._lock:
                self._store.start_step(session_of(self._sessions, handle.session_id, handle.generation))
            for part in parts:
                self._append(handle, part, deadline)
            self._settle(handle, carried)
        except BaseException:
            self._closes(handle.session_id, handle.generation)
            raise
        return handle

    def _append(self, handle: SessionHandle, part: CarriedRows, deadline: float | None) -> None:
        with self._lock, torch.inference_mode():
            session = session_of(self._sessions, handle.session_id, handle.generation)
            append = self._store.reserve(session, part.layer, part.k, part.v, deadline)
            try:
                self._store.settle(append)
            except BaseException:
                self._store.abort(append)
                raise
            self._store.commit(append)

    def _settle(self, handle: SessionHandle, carried: CarriedSession) -> None:
        with self._lock:
            session = session_of(self._sessions, handle.session_id, handle.generation)
            frontiers = tuple(state.frontier for state in session.layers)
            if frontiers != carried.frontiers:
                raise CoreError(Reason.SHORT_COPY, f"rows to {frontiers} came of {carried.frontiers}")
            session.step, session.step_first = carried.step, carried.step_first
            session.layer, session.committed = carried.layer, carried.committed
            session.position_epoch, session.started = carried.position_epoch, carried.started
            session.snapshot_generation += 1
            later = list(carried.histories[1:])
            if carried.chunk_tokens != self._store.layout.chunk_tokens and any(carried.frontiers):
                later = list(carried.histories)
            session.producers += [(at, self._runner.producer(one)) for at, one in later]
            if session.history is not ExactnessClass.EXACT:
                for state in session.layers:
                    for chunk, line in enumerate(state.lines):
                        last = min(state.frontier, (chunk + 1) * self._store.layout.chunk_tokens) - 1
                        self._store.directory.producer[line] = session.producer_at(last)
