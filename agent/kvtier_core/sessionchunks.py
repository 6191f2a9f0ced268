"""Chunks of sessions as others may see them: listed, and read whole.

Why it exists: what an engine publishes of a session is less than what it holds. Only sealed chunks of
committed rows leave, each verified. It must not know how a step reads rows.
"""

from __future__ import annotations

from collections.abc import Callable

from kvtier_core.appends import NO_LINE, Session
from kvtier_core.directory import ChunkState
from kvtier_core.errors import CoreError, Reason
from kvtier_core.receipts import ChunkInfo
from kvtier_core.sessions import RowStore
from kvtier_core.tiers.base import tensor_bytes


class SessionChunks:
    """Of one engine; its lock is held. digest_of: a producer's digest by its index."""

    def __init__(self, store: RowStore, digest_of: Callable[[int], str]) -> None:
        self._store = store
        self._digest_of = digest_of

    def all(self, session: Session) -> list[ChunkInfo]:
        """Published chunks of committed rows, by layer and chunk."""
        return [
            self._info(session, layer, chunk)
            for layer, state in enumerate(session.layers)
            for chunk, line in enumerate(state.lines)
            if self._listed(session, chunk, line)
        ]

    def read(
        self, session: Session, layer: int, chunk: int, generation: int, until: float
    ) -> tuple[ChunkInfo, bytes]:
        """A published chunk's payload, float32 [2, Hk, C, d], verified before a byte leaves. NOT_VISIBLE when
        not listed, GENERATION_STALE when it has moved since, CHECKSUM_MISMATCH, DEADLINE."""
        if not 0 <= layer < len(session.layers) or not 0 <= chunk < len(session.layers[layer].lines):
            raise CoreError(Reason.NOT_VISIBLE, f"layer {layer} has no chunk {chunk}")
        line = session.layers[layer].lines[chunk]
        if not self._listed(session, chunk, line):
            raise CoreError(Reason.NOT_VISIBLE, f"chunk {chunk} of layer {layer} is not published")
        info = self._info(session, layer, chunk)
        if info.generation != generation:
            stale = f"chunk {chunk} of layer {layer}: generation {info.generation}, not {generation}"
            raise CoreError(Reason.GENERATION_STALE, stale, {"generation": info.generation})
        return info, bytes(tensor_bytes(self._store.read_rows(line, until)))

    def _listed(self, session: Session, chunk: int, line: int) -> bool:
        """Of an edited session only what came before its first edit: rows from there on are those of its own
        history, and stand elsewhere than their chunk says."""
        directory, end = self._store.directory, (chunk + 1) * self._store.layout.chunk_tokens
        ends = min(session.committed, session.edits[0].row) if session.edits else session.committed
        return line != NO_LINE and end <= ends and int(directory.state[line]) == ChunkState.SEALED

    def _info(self, session: Session, layer: int, chunk: int) -> ChunkInfo:
        store, line = self._store, session.layers[layer].lines[chunk]
        directory = store.directory
        rows = int(directory.rows[line])
        last = chunk * store.layout.chunk_tokens + rows - 1
        return ChunkInfo(
            session_id=session.session_id,
            session_generation=session.generation,
            layer=layer,
            chunk=chunk,
            generation=int(directory.generation[line]),
            tier_class=store.tiers[int(directory.tier[line])].name,
            rows=rows,
            bytes=store.layout.payload_bytes,
            checksum=f"xxh3:{int(directory.checksum[line]):016x}",
            producer_digest=self._digest_of(session.producer_at(last)),
            sealed=True,
        )
