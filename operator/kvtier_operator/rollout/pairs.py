"""The two objects that a pass over a rollout is about, read at the server or in the read cache.

The read cache will do for a look that finds nothing to do, and only while it holds exactly what the server
gave when it was asked last, by whomever, not long ago. What is decided to be written is decided once more on
what the server itself says. It must not know what either object means.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from kvtier_operator.ports import Deps, JsonObject, Kind, NotFound, ObjectKey
from kvtier_operator.store import cache_of, is_older

VOUCHED_SECONDS = 30.0
"""Half of the default lease: for so long a rollout may be looked at without a request to the server. Its
leases are renewed oftener, and each renewal reads both objects."""


@dataclass(frozen=True)
class Pair:
    """A KVRollout and its KVCache, where there is one."""

    key: ObjectKey
    rollout: JsonObject
    cache_key: ObjectKey
    cache: JsonObject | None

    @property
    def versions(self) -> tuple[str, str]:
        return _version(self.rollout), _version(self.cache)


class Pairs:
    def __init__(self, deps: Deps) -> None:
        self._deps = deps

    def vouched(self, key: ObjectKey) -> Pair | None:
        """From the read cache; None when it may be behind, lacks one of them, or one of them is leaving."""
        deps = self._deps
        rollout = deps.store.get(key)
        if rollout is None:
            return None
        cache_key = cache_key_of(key, rollout)
        cache = deps.store.get(cache_key)
        if cache is None or any("deletionTimestamp" in obj["metadata"] for obj in (rollout, cache)):
            return None
        since = deps.clock.monotonic() - VOUCHED_SECONDS
        if not (deps.reads.vouch(key, rollout, since) and deps.reads.vouch(cache_key, cache, since)):
            return None
        return Pair(key, rollout, cache_key, cache)

    async def live(self, key: ObjectKey) -> Pair | None:
        """From the server; None when the rollout does not exist. Which cache is its, the read cache mostly
        knows: then both are asked for at once."""
        known = self._deps.store.get(key)
        if known is None:
            rollout = await self._get(key)
            pair = None if rollout is None else Pair(key, rollout, cache_key_of(key, rollout), None)
        else:
            pair = await self.again(key, cache_key_of(key, known), rollout=None, cache=None)
        if pair is None:
            return None
        cache_key = cache_key_of(key, pair.rollout)
        if known is None or cache_key != pair.cache_key:
            pair = Pair(key, pair.rollout, cache_key, await self._get(cache_key))
        return pair

    async def again(
        self, key: ObjectKey, cache_key: ObjectKey, *, rollout: JsonObject | None, cache: JsonObject | None
    ) -> Pair | None:
        """Both from the server, at once. rollout and cache: as the server gave or took them last. Of what was
        written a moment ago the read cache hears later than whoever wrote it."""
        rollout, cache = await asyncio.gather(self._get(key, rollout), self._get(cache_key, cache))
        return None if rollout is None else Pair(key, rollout, cache_key, cache)

    async def _get(self, key: ObjectKey, held: JsonObject | None = None) -> JsonObject | None:
        if not key.name:
            # A cache that cannot be told: without a name the server would be asked for all.
            return None
        deps = self._deps
        asked = deps.clock.monotonic()
        cached = deps.store.get(key)
        known = cached if held is None or (cached is not None and is_older(held, cached)) else held
        try:
            obj = await deps.api.get(key, known=known)
        except NotFound:
            deps.reads.forget(key)
            return None
        deps.reads.note(key, obj, asked)
        return obj


def cache_key_of(key: ObjectKey, rollout: JsonObject) -> ObjectKey:
    return ObjectKey(Kind.KV_CACHE, key.namespace, cache_of(rollout))


def _version(obj: JsonObject | None) -> str:
    return "" if obj is None else f"{obj['metadata'].get('uid')}/{obj['metadata'].get('resourceVersion')}"
