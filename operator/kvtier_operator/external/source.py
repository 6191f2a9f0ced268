"""All external gates of all rollouts: providers by name, and one book per gate of the open window.

A cache: dropped with its window, begun anew after a restart. It must not know verdicts or agents.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

from kvtier_evidence.external import ExternalReading
from kvtier_evidence.gatespec import GateSpec
from kvtier_evidence.verdicts import Basis, Reason
from kvtier_evidence.window import WindowKey
from kvtier_operator.external.query import Query, Source
from kvtier_operator.external.reading import GateBook, Pace
from kvtier_operator.external.samples import Provider

MAX_WINDOWS = 4096


class ExternalSource(Protocol):
    """Where readings of external gates come from."""

    async def read(
        self,
        key: WindowKey,
        gates: Sequence[tuple[GateSpec, Query]],
        *,
        opened_at: float,
        now: float,
        interval: float,
    ) -> Mapping[str, ExternalReading]: ...

    def forget(self, uid: str) -> None: ...


class ExternalReader:
    """Implements ExternalSource. Calls for one rollout never overlap."""

    def __init__(self, providers: Mapping[Source, Provider], pace: Pace) -> None:
        self._providers, self._pace = providers, pace
        self._books: dict[str, tuple[WindowKey, dict[str, GateBook]]] = {}

    def forget(self, uid: str) -> None:
        self._books.pop(uid, None)

    async def read(
        self,
        key: WindowKey,
        gates: Sequence[tuple[GateSpec, Query]],
        *,
        opened_at: float,
        now: float,
        interval: float,
    ) -> Mapping[str, ExternalReading]:
        """By gate. A source that is not configured is an unreadable one."""
        books = self._of(key)
        names = [gate.name for gate, _ in gates]
        found = await asyncio.gather(
            *(self._one(books, gate, query, opened_at, now, interval) for gate, query in gates)
        )
        return dict(zip(names, found, strict=True))

    async def _one(
        self,
        books: dict[str, GateBook],
        gate: GateSpec,
        query: Query,
        opened_at: float,
        now: float,
        interval: float,
    ) -> ExternalReading:
        provider = self._providers.get(query.source)
        if provider is None:
            detail = f"no source {query.source} is configured (--external-metrics)"
            return ExternalReading(query.form, Basis.GUARD_ONLY, Reason.QUERY_FAILED, detail)
        book = books.get(gate.name)
        if book is None:
            book = books[gate.name] = GateBook(gate, query, opened_at, self._pace)
        return await book.read(provider, now, interval)

    def _of(self, key: WindowKey) -> dict[str, GateBook]:
        known = self._books.get(key.rollout_uid)
        if known is not None and known[0] == key:
            return known[1]
        while len(self._books) >= MAX_WINDOWS:
            self._books.pop(next(iter(self._books)))
        books: dict[str, GateBook] = {}
        self._books[key.rollout_uid] = (key, books)
        return books
