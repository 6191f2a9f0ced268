"""Every few minutes: list everything, repair the read cache, have everything looked at again.

After an expired watch, kopf lists what exists and never reports what vanished meanwhile; this does. The
moment is jittered, so that several operators and kinds do not list at once. It must not know who looks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from kvtier_operator.kube.resources import key_of
from kvtier_operator.ports import ApiError, Clock, JsonObject, Kind, Known, ObjectKey
from kvtier_operator.store import Repair, WatchStore
from kvtier_operator.watch.triggers import RECONCILED, SELECTORS, WATCHED, affected, relevant
from kvtier_operator.watch.trimmed import trimmed

_log = logging.getLogger(__name__)

INTERVAL_SECONDS = 300.0
SOONEST_SECONDS = 5.0
RESYNC_SECONDS = 120.0
"""Within which everything is looked at again, changed or not."""


class Lister(Protocol):
    async def list_all(
        self,
        kind: Kind,
        namespace: str = "",
        label_selector: str = "",
        field_selector: str = "",
        *,
        each: Callable[[JsonObject], JsonObject],
        known: Known | None,
    ) -> list[JsonObject]: ...


@dataclass(frozen=True)
class Relisted:
    """What a full pass has found. changed: what no watch has told yet, with what was there before. missed:
    whether something is gone that no watch will tell of, or a key was refused, so that nobody knows who has
    to look again."""

    changed: Mapping[ObjectKey, JsonObject | None]
    missed: bool


def looks_after(
    found: Relisted, store: WatchStore, randomness: Callable[[], float]
) -> Iterator[tuple[ObjectKey, float]]:
    """Who is looked at after a pass, and after how many seconds: at once whom a change concerns, the others
    in their own time. A thousand passes at once would stand before whatever somebody waits for."""
    for key, before in () if found.missed else found.changed.items():
        obj = store.get(key)
        if obj is not None:
            for one in sorted(affected(key, before, obj, store)):
                yield one, 0.0
    for kind in RECONCILED:
        for obj in store.list_all(kind):
            key = ObjectKey(kind, obj["metadata"].get("namespace", ""), obj["metadata"]["name"])
            yield key, 0.0 if found.missed else RESYNC_SECONDS * randomness()


class Relist:
    """`on_done` is called after each full pass, in the loop's thread."""

    def __init__(
        self,
        api: Lister,
        store: WatchStore,
        clock: Clock,
        randomness: Callable[[], float],
        on_done: Callable[[Relisted], None],
    ) -> None:
        self._api = api
        self._store = store
        self._clock = clock
        self._randomness = randomness
        self._on_done = on_done
        self._requested = asyncio.Event()

    def request(self) -> None:
        """Asks for a pass soon, because a queue had to refuse a key."""
        self._requested.set()

    async def run(self) -> None:
        while True:
            wait = INTERVAL_SECONDS * (0.8 + 0.4 * self._randomness())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._requested.wait()
                await self._clock.sleep(SOONEST_SECONDS * (1 + self._randomness()))
            requested = self._requested.is_set()
            self._requested.clear()
            await self.everything(refused=requested)

    async def everything(self, *, refused: bool = False) -> None:
        """One pass; a kind that cannot be listed keeps what it had. refused: a queue had no room."""
        changed: dict[ObjectKey, JsonObject | None] = {}
        missed = refused
        for kind in WATCHED:
            try:
                repaired = await self.one(kind)
            except ApiError as error:
                _log.warning("relist failed", extra={"kind": kind.value, "error": str(error)})
                continue
            changed |= repaired.changed
            missed = missed or bool(repaired.vanished)
        self._on_done(Relisted(changed, missed))

    async def _list(self, kind: Kind) -> list[JsonObject]:
        """Only what the read cache lacks, and trimmed as it comes: all of a thousand objects at once, whole,
        would be a third of the memory. Where nothing is known yet, metadata would only double the
        requests."""
        keep = partial(trimmed, kind)
        known = self._store.get if self._store.count(kind) else None
        return await self._api.list_all(kind, label_selector=SELECTORS.get(kind, ""), each=keep, known=known)

    async def one(self, kind: Kind) -> Repair:
        """Raises ApiError, and then changes nothing."""
        since = self._store.moment()
        listed = [(key_of(obj), obj) for obj in await self._list(kind)]
        repaired = self._store.repair(kind, [item for item in listed if relevant(item[0])], since)
        if repaired.vanished:
            _log.info("repaired", extra={"kind": kind.value, "vanished": len(repaired.vanished)})
        return repaired
