"""Reads the ConfigMaps that probeRefs name: once for the rollouts that look in the same moment.

They are not watched, since a cluster has many that are none of ours. A plan of thousands of prompts travels,
and is parsed, once while its text stays. Nobody is shown one reading twice, so an edit is seen by the next
look. It must not judge.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kvtier_operator.ports import Clock, JsonObject, KubeApi, NotFound, ObjectKey
from kvtier_operator.rollout.gateset import ProbeSet
from kvtier_operator.rollout.probesets import probe_set

SHARED_SECONDS = 0.5
"""Half of the shortest interval between looks."""
MAX_KEPT = 1024


@dataclass(frozen=True)
class _Reading:
    """readers: uids of the rollouts that have seen it. obj: None where there is none."""

    at: float
    obj: JsonObject | None
    found: ProbeSet
    readers: set[str]


class ProbeReads:
    """One per reconciler. Raises ApiError."""

    def __init__(self, api: KubeApi, clock: Clock) -> None:
        self._api = api
        self._clock = clock
        self._known: OrderedDict[ObjectKey, _Reading] = OrderedDict()

    async def get(self, where: ObjectKey, reader: str, max_age: float = SHARED_SECONDS) -> ProbeSet:
        """reader: uid of the rollout that looks. max_age: seconds that what others were shown may be old."""
        started = self._clock.monotonic()
        known = self._known.get(where)
        if known is not None and started - known.at <= max_age and reader not in known.readers:
            known.readers.add(reader)
            return known.found
        try:
            obj = await self._api.get(where, known=None if known is None else known.obj)
        except NotFound:
            obj = None
        same = known is not None and _data(obj) is not None and _data(known.obj) == _data(obj)
        found = known.found if known is not None and same else probe_set(obj)
        self._known[where] = _Reading(started, obj, found, {reader})
        self._known.move_to_end(where)
        while len(self._known) > MAX_KEPT:
            self._known.popitem(last=False)
        return found


def _data(config_map: JsonObject | None) -> object:
    return None if config_map is None else config_map.get("data")
