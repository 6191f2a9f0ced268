"""The read cache: what the watches have seen, shared by all reconcilers.

Written from the watching thread, read from the operator's loop, so every access takes one short lock. Lists
are asked for with each event and in each reconcile, so the names of a kind are kept in order, by namespace,
and those of the rollouts of a cache apart: of a thousand in a namespace, nearly all ask for one or two.
A relist repairs what a watch has missed: after an expired watch, kopf lists what exists and never says what
has vanished meanwhile. This module must not know what any object means, but for the cache that a rollout is
of.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from kvtier_operator.ports import JsonObject, Kind, ObjectKey


@dataclass(frozen=True)
class Repair:
    """What a relist found to be different. changed: with what was there before."""

    changed: Mapping[ObjectKey, JsonObject | None]
    vanished: frozenset[ObjectKey]


@dataclass
class _Space:
    """The objects of one kind in one namespace; `names` are theirs, sorted."""

    objects: dict[str, JsonObject] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)

    def put(self, name: str, obj: JsonObject) -> None:
        if name not in self.objects:
            insort(self.names, name)
        self.objects[name] = obj

    def pop(self, name: str) -> JsonObject | None:
        found = self.objects.pop(name, None)
        if found is not None:
            del self.names[bisect_left(self.names, name)]
        return found

    def in_order(self) -> list[JsonObject]:
        return [self.objects[name] for name in self.names]


class WatchStore:
    """Implements `kvtier_operator.ports.Store`."""

    def __init__(self, observe: Callable[[str, int], None] = lambda _kind, _count: None) -> None:
        self._lock = threading.Lock()
        self._spaces: dict[Kind, dict[str, _Space]] = {kind: {} for kind in Kind}
        self._counts: dict[Kind, int] = dict.fromkeys(Kind, 0)
        self._revisions: dict[Kind, int] = dict.fromkeys(Kind, 0)
        self._moment = 0
        self._changed_at: dict[ObjectKey, int] = {}
        self._of_cache: dict[tuple[str, str], set[str]] = {}
        self._observe = observe

    def get(self, key: ObjectKey) -> JsonObject | None:
        with self._lock:
            return self._get(key)

    def list_all(self, kind: Kind, namespace: str = "") -> list[JsonObject]:
        with self._lock:
            spaces = self._spaces[kind]
            if namespace:
                found = spaces.get(namespace)
                return [] if found is None else found.in_order()
            return [obj for name in sorted(spaces) for obj in spaces[name].in_order()]

    def rollouts_of(self, namespace: str, cache: str) -> list[JsonObject]:
        """KVRollouts, by name."""
        with self._lock:
            names = self._of_cache.get((namespace, cache), ())
            return [self._spaces[Kind.KV_ROLLOUT][namespace].objects[name] for name in sorted(names)]

    def count(self, kind: Kind) -> int:
        with self._lock:
            return self._counts[kind]

    def revision(self, kind: Kind) -> int:
        with self._lock:
            return self._revisions[kind]

    def put(self, key: ObjectKey, obj: JsonObject) -> JsonObject | None:
        """From a watch. Returns what was there before; an older version of the same object is ignored."""
        with self._lock:
            before = self._get(key)
            if before is not None and is_older(obj, before):
                return before
            self._put(key, obj)
            self._touch(key)
            count = self._counts[key.kind]
        self._observe(key.kind.value, count)
        return before

    def remove(self, key: ObjectKey) -> JsonObject | None:
        with self._lock:
            before = self._pop(key)
            self._touch(key)
            count = self._counts[key.kind]
        self._observe(key.kind.value, count)
        return before

    def moment(self) -> int:
        """To be taken before a list is requested, and handed to `repair` with its answer."""
        with self._lock:
            return self._moment

    def repair(self, kind: Kind, listed: Iterable[tuple[ObjectKey, JsonObject]], since: int) -> Repair:
        """Takes over a full list. What a watch has said since the list was requested outranks it."""
        fresh = dict(listed)
        changed: dict[ObjectKey, JsonObject | None] = {}
        vanished: set[ObjectKey] = set()
        with self._lock:
            for key, obj in fresh.items():
                before = self._get(key)
                if self._changed_at.get(key, 0) > since or (before is not None and is_older(obj, before)):
                    continue
                if before is None or _version(before) != _version(obj):
                    self._put(key, obj)
                    changed[key] = before
            known = [
                ObjectKey(kind, namespace, name)
                for namespace, space in self._spaces[kind].items()
                for name in space.names
            ]
            for key in known:
                if key not in fresh and self._changed_at.get(key, 0) <= since:
                    self._pop(key)
                    vanished.add(key)
            for key in (*changed, *vanished):
                self._touch(key)
            # A tombstone matters only while a list that started before it may still arrive.
            self._changed_at = {
                key: moment
                for key, moment in self._changed_at.items()
                if key.kind is not kind or moment > since or self._get(key) is not None
            }
            count = self._counts[kind]
        self._observe(kind.value, count)
        return Repair(changed, frozenset(vanished))

    def _get(self, key: ObjectKey) -> JsonObject | None:
        space = self._spaces[key.kind].get(key.namespace)
        return None if space is None else space.objects.get(key.name)

    def _put(self, key: ObjectKey, obj: JsonObject) -> None:
        space = self._spaces[key.kind].setdefault(key.namespace, _Space())
        self._counts[key.kind] += key.name not in space.objects
        if key.kind is Kind.KV_ROLLOUT:
            self._leave_cache(key, space.objects.get(key.name))
            self._of_cache.setdefault((key.namespace, cache_of(obj)), set()).add(key.name)
        space.put(key.name, obj)

    def _pop(self, key: ObjectKey) -> JsonObject | None:
        space = self._spaces[key.kind].get(key.namespace)
        found = None if space is None else space.pop(key.name)
        if space is not None and found is not None:
            self._counts[key.kind] -= 1
            if key.kind is Kind.KV_ROLLOUT:
                self._leave_cache(key, found)
            if not space.objects:
                del self._spaces[key.kind][key.namespace]
        return found

    def _leave_cache(self, key: ObjectKey, rollout: JsonObject | None) -> None:
        if rollout is None:
            return
        group = key.namespace, cache_of(rollout)
        self._of_cache[group].discard(key.name)
        if not self._of_cache[group]:
            del self._of_cache[group]

    def _touch(self, key: ObjectKey) -> None:
        self._moment += 1
        self._revisions[key.kind] += 1
        self._changed_at[key] = self._moment


def cache_of(rollout: JsonObject) -> str:
    """Name of the KVCache that a KVRollout is of; empty where that cannot be read."""
    return name_in(rollout.get("spec"), "cacheRef")


def name_in(holder: object, reference: str) -> str:
    """The name in a reference by name; empty where there is none, or another version has written it in a form
    of its own. All objects of a kind are asked by whoever looks for those that name one, and what one of them
    says must not be the others' trouble."""
    found = holder.get(reference) if isinstance(holder, Mapping) else None
    name = found.get("name") if isinstance(found, Mapping) else None
    return name if isinstance(name, str) else ""


def _version(obj: JsonObject) -> str:
    return str(obj["metadata"].get("resourceVersion", ""))


def is_older(obj: JsonObject, than: JsonObject) -> bool:
    """Only for the same object (uid); its resource versions grow."""
    if obj["metadata"].get("uid") != than["metadata"].get("uid"):
        return False
    mine, theirs = _version(obj), _version(than)
    return mine.isdigit() and theirs.isdigit() and int(mine) < int(theirs)
