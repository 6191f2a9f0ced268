"""When evidence is looked at next: on beats that all rollouts of one pool with the same interval share.

The agents are the same for all of them, so that what is asked of one at the same moment goes as one call, and
one answer about its state serves all. Pools are spread over the interval in the order in which they were
made: by chance some would lie close together, and their looks wait for each other at every beat. Beats lie on
whole milliseconds of the wall clock, as a status writes them, so that an operator that goes on has the same.
It must not know what is looked at.
"""

from __future__ import annotations

import hashlib
import math

from kvtier_operator.ports import JsonObject, Kind, Store

_SLACK_MILLIS = 0.01
"""More than a moment of this century can be off as a float of seconds, and less than anything takes."""
BEAT_SLACK = 0.001
"""Seconds. By less than this a beat may be further away than the interval, as floats go."""
AFTER_BEAT_SECONDS = 0.5
"""Behind those who look at evidence on the beat, while what agents told them is young enough to be shared."""
_BITS = 32


def next_beat(share: float, interval: float, now: float) -> float:
    """The first beat after `now`, seconds since the epoch; share: of the interval, where beats lie in it. It
    is never further away than the interval (seconds, cut to whole milliseconds), and from one beat to the
    next it is the interval exactly."""
    step = max(1, math.floor(interval * 1000.0 + 1e-6))
    phase = math.floor(share * step) % step
    passed = math.floor(now * 1000.0 + _SLACK_MILLIS)
    return (passed + step - (passed - phase) % step) / 1000.0


class PoolBeats:
    """Where in an interval the beats of each pool lie. A pool that is new changes none of the others; one
    that goes may, once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._revision = -1
        self._shares: dict[tuple[str, str], float] = {}

    def share(self, namespace: str, name: str) -> float:
        """From 0 to 1."""
        revision = self._store.revision(Kind.AGENT_POOL)
        if revision != self._revision:
            self._shares = _spread(self._store.list_all(Kind.AGENT_POOL))
            self._revision = revision
        known = self._shares.get((namespace, name))
        return _chance(f"{namespace}/{name}") if known is None else known


def _spread(pools: list[JsonObject]) -> dict[tuple[str, str], float]:
    """Each in the middle of the longest gap that those before it leave, up to an order among equal gaps. The
    first lies somewhere by chance: other clusters' operators may ask the same systems."""
    made = sorted(
        (
            str(one["metadata"].get("creationTimestamp") or ""),
            one["metadata"]["namespace"],
            one["metadata"]["name"],
        )
        for one in pools
    )
    first = _chance("/".join(made[0][1:])) if made else 0.0
    return {
        (namespace, name): (first + _halved(rank)) % 1.0 for rank, (_, namespace, name) in enumerate(made)
    }


def _halved(rank: int) -> float:
    """0, 1/2, 1/4, 3/4, 1/8 and so on: the rank's bits, the last one first."""
    return int(f"{rank:0{_BITS}b}"[::-1], 2) / float(1 << _BITS)


def _chance(name: str) -> float:
    told = hashlib.sha256(f"kvtier.dev/beats/v1|{name}".encode()).digest()
    return int.from_bytes(told[:6], "big") / 2**48
