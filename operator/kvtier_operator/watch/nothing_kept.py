"""Where kopf would keep what its handlers have done with an object: nowhere.

Why it exists: for each event kopf copies the object for its storages, once to compare it with what was there
before and again to find how far handlers had come. Handlers of events have neither. It must not keep
anything: a handler of another kind needs kopf's own storages, and would find here that it has none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Never

from kvtier_operator.watch.kopf_alone import kopf


class UnexpectedHandler(Exception):
    """kopf has something to keep, so that there is a handler which is not of events."""


def _nowhere() -> Never:
    raise UnexpectedHandler("only handlers of events are registered, and these keep nothing")


class NoDiffBase(kopf.DiffBaseStorage):
    """What an object was like when it was handled last: nobody asks."""

    def build(self, *, body: kopf.Body, extra_fields: Iterable[object] | None = None) -> kopf.BodyEssence:
        return {}

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        _nowhere()


class NoProgress(kopf.ProgressStorage):
    """How far handlers have come: each event is handled once, or never."""

    def fetch(self, *, key: kopf.HandlerId, body: kopf.Body) -> kopf.ProgressRecord | None:
        return None

    def store(
        self, *, key: kopf.HandlerId, record: kopf.ProgressRecord, body: kopf.Body, patch: kopf.Patch
    ) -> None:
        _nowhere()

    def purge(self, *, key: kopf.HandlerId, body: kopf.Body, patch: kopf.Patch) -> None:
        _nowhere()

    def touch(self, *, body: kopf.Body, patch: kopf.Patch, value: str | None) -> None:
        _nowhere()

    def clear(self, *, essence: kopf.BodyEssence) -> kopf.BodyEssence:
        return essence
