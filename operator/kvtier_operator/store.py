"""The read cache: what the watches have seen, shared by all reconcilers.

Written from the watching thread, read from the operator's loop, so every access takes one short lock.
A relist repairs what a watch has missed: after an expired watch, kopf lists what exists and never says what
has vanished meanwhile. This module must not know what any object means.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvtier_operator.ports import JsonObject, Kind, ObjectKey


@dataclass(frozen=True)
class Repair:
    """What a relist found to be different: keys to reconcile."""

    changed: frozenset[ObjectKey]
    vanished: frozenset[ObjectKey]


class WatchStore:
    """Implements `kvtier_operator.ports.Store`."""

    def __init__(self, observe: Callable[[str, int], None] = lambda _kind, _count: None) -> None:
        self._lock = threading.Lock()
        self._objects: dict[Kind, dict[ObjectKey, JsonObject]] = {kind: {} for kind in Kind}
        self._moment = 0
        self._changed_at: dict[ObjectKey, int] = {}
        self._observe = observe

    def get(self, key: ObjectKey) -> JsonObject | None:
        with self._lock:
            return self._objects[key.kind].get(key)

    def list_all(self, kind: Kind, namespace: str = "") -> list[JsonObject]:
        with self._lock:
            found = [
                item
                for item in self._objects[kind].items()
                if not namespace or item[0].namespace == namespace
            ]
        return [value for _, value in sorted(found, key=lambda item: item[0])]

    def put(self, key: ObjectKey, obj: JsonObject) -> JsonObject | None:
        """From a watch. Returns what was there before; an older version of the same object is ignored."""
        with self._lock:
            before = self._objects[key.kind].get(key)
            if before is not None and _is_older(obj, before):
                return before
            self._objects[key.kind][key] = obj
            self._touch(key)
            count = len(self._objects[key.kind])
        self._observe(key.kind.value, count)
        return before

    def remove(self, key: ObjectKey) -> JsonObject | None:
        with self._lock:
            before = self._objects[key.kind].pop(key, None)
            self._touch(key)
            count = len(self._objects[key.kind])
        self._observe(key.kind.value, count)
        return before

    def moment(self) -> int:
        """To be taken before a list is requested, and handed to `repair` with its answer."""
        with self._lock:
            return self._moment

    def repair(self, kind: Kind, listed: Iterable[tuple[ObjectKey, JsonObject]], since: int) -> Repair:
        """Takes over a full list. What a watch has said since the list was requested outranks it."""
        fresh = dict(listed)
        changed: set[ObjectKey] = set()
        vanished: set[ObjectKey] = set()
        with self._lock:
            known = self._objects[kind]
            for key, obj in fresh.items():
                before = known.get(key)
                if self._changed_at.get(key, 0) > since or (before is not None and _is_older(obj, before)):
                    continue
                if before is None or _version(before) != _version(obj):
                    known[key] = obj
                    changed.add(key)
            for key in [key for key in known if key not in fresh]:
                if self._changed_at.get(key, 0) <= since:
                    del known[key]
                    vanished.add(key)
            for key in changed | vanished:
                self._touch(key)
            # A tombstone matters only while a list that started before it may still arrive.
            self._changed_at = {
                key: moment
                for key, moment in self._changed_at.items()
                if key.kind is not kind or moment > since or key in known
            }
            count = len(known)
        self._observe(kind.value, count)
        return Repair(frozenset(changed), frozenset(vanished))

    def _touch(self, key: ObjectKey) -> None:
        self._moment += 1
        self._changed_at[key] = self._moment


def _version(obj: JsonObject) -> str:
    return str(obj["metadata"].get("resourceVersion", ""))


def _is_older(obj: JsonObject, than: JsonObject) -> bool:
    """Only for the same object (uid); its resource versions grow."""
    if obj["metadata"].get("uid") != than["metadata"].get("uid"):
        return False
    mine, theirs = _version(obj), _version(than)
    return mine.isdigit() and theirs.isdigit() and int(mine) < int(theirs)
