"""Reads which candidates may be held now, from the API server itself: one by one, or a namespace at a time.

A renewal is sent only for what the server says at that moment, never for what a watch has said. Where many of
a namespace are due together two lists are far cheaper than two requests each, and as fresh. It must not send
anything to an agent.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvtier_operator.kube.resources import key_of
from kvtier_operator.ports import ApiError, Deps, JsonObject, Kind, NotFound, ObjectKey
from kvtier_operator.rollout.pairs import cache_key_of

_log = logging.getLogger(__name__)

MAX_READS = 16
LIST_FROM = 8
SLOW_SECONDS = 60.0
"""For so long a namespace is not listed whose lists came too late."""
LIST_SHARE = 1 / 4
"""Of all objects of a kind in the namespace: below, most of a list would be read for nothing."""


@dataclass(frozen=True)
class BothRead:
    """A rollout and its cache as the server gave them, asked for at `at`."""

    rollout: JsonObject
    cache: JsonObject
    at: float


class LeaseReads:
    """One per renewer. Notes all that it reads, for looks that would ask the same."""

    def __init__(self, deps: Deps) -> None:
        self._deps = deps
        self._slots = asyncio.Semaphore(MAX_READS)
        self._slow: dict[str, float] = {}

    def groups(self, seen: Sequence[JsonObject]) -> list[list[JsonObject]]:
        """What one read is for, so that nobody waits for the reads of others: a namespace that is listed, or
        as many as are read at a time."""
        by_space: dict[str, list[JsonObject]] = defaultdict(list)
        for rollout in seen:
            by_space[rollout["metadata"]["namespace"]].append(rollout)
        groups: list[list[JsonObject]] = []
        for namespace, rollouts in by_space.items():
            size = len(rollouts) if self._worth_listing(namespace, len(rollouts)) else MAX_READS
            groups += [rollouts[at : at + size] for at in range(0, len(rollouts), size)]
        return groups

    async def read(self, seen: Sequence[JsonObject], within: float = float("inf")) -> list[BothRead | None]:
        """In the order of `seen`, rollouts of the read cache; None where the server gave no answer. within:
        seconds that an answer is good for; where lists take longer, objects are read one by one next time."""
        by_space: dict[str, list[JsonObject]] = defaultdict(list)
        for rollout in seen:
            by_space[rollout["metadata"]["namespace"]].append(rollout)
        found: dict[ObjectKey, BothRead] = {}
        parts = await asyncio.gather(*(self._space(name, group, within) for name, group in by_space.items()))
        for part in parts:
            found |= part
        return [found.get(key_of(rollout)) for rollout in seen]

    async def _space(
        self, namespace: str, seen: list[JsonObject], within: float
    ) -> dict[ObjectKey, BothRead]:
        if self._worth_listing(namespace, len(seen)):
            return await self._listed(namespace, seen, within)
        pairs = await asyncio.gather(*(self._one(rollout) for rollout in seen))
        return {key: both for key, both in pairs if both is not None}

    def _worth_listing(self, namespace: str, due: int) -> bool:
        store = self._deps.store
        all_of_them = max(len(store.list_all(kind, namespace)) for kind in (Kind.KV_ROLLOUT, Kind.KV_CACHE))
        quick = self._deps.clock.monotonic() >= self._slow.get(namespace, 0.0)
        return quick and due >= LIST_FROM and due >= all_of_them * LIST_SHARE

    async def _listed(
        self, namespace: str, seen: list[JsonObject], within: float
    ) -> dict[ObjectKey, BothRead]:
        api = self._deps.api
        try:
            async with self._slots:
                at = self._deps.clock.monotonic()
                rollouts, caches = await asyncio.gather(
                    *(
                        api.list_all(kind, namespace, known=self._deps.store.get)
                        for kind in (Kind.KV_ROLLOUT, Kind.KV_CACHE)
                    )
                )
        except ApiError as error:
            told = {"namespace": namespace, "rollouts": len(seen), "error": str(error)}
            _log.warning("leases not renewed", extra=told)
            return {}
        now = self._deps.clock.monotonic()
        self._slow = {name: until for name, until in self._slow.items() if until > now}
        if now - at > within:
            self._slow[namespace] = now + SLOW_SECONDS
        self._note(rollouts, at)
        self._note(caches, at)
        by_key = {key_of(obj): obj for obj in (*rollouts, *caches)}
        found = {}
        for one in seen:
            key = key_of(one)
            cache_key = cache_key_of(key, one)
            rollout, cache = by_key.get(key), by_key.get(cache_key)
            for where, there in ((key, rollout), (cache_key, cache)):
                if there is None:
                    self._deps.reads.forget(where)
            if rollout is not None and cache is not None:
                found[key] = BothRead(rollout, cache, at)
        return found

    async def _one(self, seen: JsonObject) -> tuple[ObjectKey, BothRead | None]:
        key = key_of(seen)
        try:
            async with self._slots:
                at = self._deps.clock.monotonic()
                rollout, cache = await asyncio.gather(self._get(key), self._get(cache_key_of(key, seen)))
        except ApiError as error:
            if isinstance(error, NotFound):
                # One of the two, nobody says which.
                self._deps.reads.forget(key)
                self._deps.reads.forget(cache_key_of(key, seen))
            _log.warning("lease not renewed", extra={"rollout": str(key), "error": str(error)})
            return key, None
        self._note((rollout, cache), at)
        return key, BothRead(rollout, cache, at)

    async def _get(self, key: ObjectKey) -> JsonObject:
        if not key.name:
            raise NotFound(404, "NotFound", "nobody can read which KVCache it is of")
        return await self._deps.api.get(key, known=self._deps.store.get(key))

    def _note(self, objects: Iterable[JsonObject], at: float) -> None:
        for obj in objects:
            self._deps.reads.note(key_of(obj), obj, at)
