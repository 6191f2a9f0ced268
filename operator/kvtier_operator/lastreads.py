"""Which version of an object the API server itself gave last, and when it was asked; and which is our own.

Why it exists: the read cache may be behind, and nobody can see from it by how much. A look that finds there
exactly the version which the server had a moment ago need not ask again; whoever asks notes it here for all.
Of a version that a run wrote, and went on from, a watch tells nothing new. It must not keep objects, nor know
what a version means.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from dataclasses import dataclass

from kvtier_operator.kube.resources import version_of
from kvtier_operator.ports import JsonObject, ObjectKey

MAX_KEPT = 16_384
"""Objects remembered; to forget one costs a request."""
MAX_VERSIONS = 6
"""Of one object that were written here: a run writes several before a watch has told of the first."""


@dataclass(frozen=True, slots=True)
class _Read:
    uid: str
    version: str
    at: float


@dataclass(frozen=True, slots=True)
class Seen:
    """The version of an object that a watch has told of."""

    key: ObjectKey
    uid: str
    version: str

    @classmethod
    def of(cls, key: ObjectKey, obj: JsonObject) -> Seen:
        return cls(key, *version_of(obj))


class LastReads:
    """In the operator's loop only. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._known: OrderedDict[ObjectKey, _Read] = OrderedDict()
        self._ours: OrderedDict[ObjectKey, tuple[tuple[str, str, ObjectKey], ...]] = OrderedDict()

    def note(self, key: ObjectKey, obj: JsonObject, at: float) -> None:
        """The server's answer. at: when it was asked; of two answers the one that was asked for later
        counts."""
        known = self._known.get(key)
        if known is not None and known.at > at:
            return
        self._known[key] = _Read(*version_of(obj), at)
        self._known.move_to_end(key)
        while len(self._known) > MAX_KEPT:
            self._known.popitem(last=False)

    def vouch(self, key: ObjectKey, cached: JsonObject | None, since: float) -> bool:
        """Whether `cached` is what the server gave when it was asked last, which was at `since` or later."""
        known = self._known.get(key)
        if known is None or cached is None or known.at < since:
            return False
        return (known.uid, known.version) == version_of(cached)

    def forget(self, key: ObjectKey) -> None:
        self._known.pop(key, None)

    def wrote(self, key: ObjectKey, obj: JsonObject, by: ObjectKey) -> None:
        """The server's answer to a write. by: whose run it was, which looks at what it wrote, or comes again
        by itself."""
        uid, version = version_of(obj)
        self._ours[key] = (*self._ours.get(key, ()), (sys.intern(uid), version, by))[-MAX_VERSIONS:]
        self._ours.move_to_end(key)
        while len(self._ours) > MAX_KEPT:
            self._ours.popitem(last=False)

    def writer(self, seen: Seen) -> ObjectKey | None:
        """Whose run wrote this version, one of the last that were written here. None, too, where a watch is
        faster than the server's answer, which may yet come while that run is under way."""
        for uid, version, by in self._ours.get(seen.key, ()):
            if (uid, version) == (seen.uid, seen.version):
                return by
        return None
