"""The work queue as a value: which key is due, which is running, which failed how often.

A pure state machine over an injected time, so that its promises can be tested as properties: a key runs at
most once at a time; a key that was added while it ran runs again; nothing that was accepted is lost; due
keys leave in the order in which they became due; the number of keys is bounded. It must not know asyncio,
Kubernetes or what a reconcile does; `kvtier_operator.controller` drives it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from kvtier_operator.ports import ObjectKey


class Added(StrEnum):
    """What became of an `add`."""

    QUEUED = "queued"
    MERGED = "merged"  # the key was waiting or running already
    REFUSED = "refused"  # the queue is full; the caller must arrange a relist


EVENT_LEAD_SECONDS = 5.0


@dataclass(frozen=True)
class Backoff:
    """Delay after the n-th failure in a row: base * 2^(n-1), at most `limit`, times a jitter in [1/2, 1)."""

    base_seconds: float = 0.2
    limit_seconds: float = 60.0

    def delay(self, failures: int, randomness: float) -> float:
        raw = min(self.limit_seconds, self.base_seconds * 2.0 ** min(failures - 1, 30))
        return raw * (0.5 + randomness / 2)


@dataclass(frozen=True)
class Taken:
    """told: somebody has made it due, and not its own time."""

    key: ObjectKey
    waited_seconds: float
    told: bool = False


class QueueState:
    """Keys of one kind. Times are seconds on one monotonic clock; calls must not go back in time."""

    def __init__(
        self, *, bound: int, backoff: Backoff, randomness: Callable[[], float], settle_seconds: float = 0.05
    ) -> None:
        """`settle_seconds`: a key that has just failed is not run again sooner than this, whatever arrives;
        an event may cut a long backoff short, but cannot turn it into a hot loop."""
        if bound < 1:
            raise ValueError("the bound must be positive")
        self._bound = bound
        self._backoff = backoff
        self._randomness = randomness
        self._settle = settle_seconds
        self._due: dict[ObjectKey, float] = {}
        self._rank: dict[ObjectKey, float] = {}
        self._told: set[ObjectKey] = set()
        self._order: dict[ObjectKey, int] = {}
        # By rank: of keys that came by themselves, and of those that somebody has made due.
        self._heaps: dict[bool, list[tuple[float, int, ObjectKey]]] = {False: [], True: []}
        self._sequence = 0
        self._running: dict[ObjectKey, float | None] = {}
        self._failures: dict[ObjectKey, int] = {}
        self._not_before: dict[ObjectKey, float] = {}

    def __len__(self) -> int:
        """Waiting keys, running ones not included."""
        return len(self._due)

    @property
    def running(self) -> frozenset[ObjectKey]:
        return frozenset(self._running)

    def runs(self, key: ObjectKey) -> bool:
        return key in self._running

    def failures(self, key: ObjectKey) -> int:
        return self._failures.get(key, 0)

    def add(self, key: ObjectKey, now: float, after_seconds: float = 0.0) -> Added:
        """Makes `key` due at `now + after_seconds` at the latest. What is due at once goes before looks that
        are late by less than `EVENT_LEAD_SECONDS`: somebody waits for it."""
        when = max(now + after_seconds, self._not_before.get(key, 0.0))
        # Also of one that has just failed and may not run yet: then at its turn, but on a worker kept for it.
        rank, told = _rank(when, now), after_seconds <= 0.0
        if key in self._running:
            again = self._running[key]
            self._running[key] = when if again is None else min(again, when)
            return Added.MERGED
        waiting = self._due.get(key)
        if waiting is not None:
            if when < waiting or rank < self._rank[key] or (told and key not in self._told):
                told = told or key in self._told
                self._schedule(key, min(when, waiting), min(rank, self._rank[key]), told=told)
            return Added.MERGED
        if len(self._due) + len(self._running) >= self._bound:
            return Added.REFUSED
        self._schedule(key, when, rank, told=told)
        return Added.QUEUED

    def take(self, now: float, *, told_only: bool = False) -> Taken | None:
        """The key that has been due for longest, now running; None when nothing is due. See `add`. told_only:
        of those alone that somebody has made due."""
        found = self._first(told_only=told_only)
        if found is None or self._due[found[1]] > now:
            return None
        told, key = found
        heapq.heappop(self._heaps[told])
        when = self._due.pop(key)
        del self._rank[key], self._order[key]
        self._told.discard(key)
        self._running[key] = None
        return Taken(key, now - when, told)

    def next_due(self, *, told_only: bool = False) -> float | None:
        """When `take` will have something, if nothing is added."""
        found = self._first(told_only=told_only)
        return None if found is None else self._due[found[1]]

    def _first(self, *, told_only: bool) -> tuple[bool, ObjectKey] | None:
        """Whether it was made due, and the key, of the earliest rank."""
        tops = []
        for told, heap in self._heaps.items():
            while heap and self._order.get(heap[0][2]) != heap[0][1]:
                heapq.heappop(heap)  # rescheduled since
            if heap and (told or not told_only):
                tops.append((heap[0], told))
        if not tops:
            return None
        (_, _, key), told = min(tops)
        return told, key

    def succeeded(self, key: ObjectKey, now: float, requeue_after_seconds: float | None) -> None:
        """Ends a run. Forgets failures; runs again after the delay, or sooner if it was added meanwhile."""
        self._failures.pop(key, None)
        self._not_before.pop(key, None)
        again = self._running.pop(key)
        wanted = [again] if again is not None else []
        if requeue_after_seconds is not None:
            wanted.append(now + max(0.0, requeue_after_seconds))
        if wanted:
            when = min(wanted)
            rank = when if again is None else min(when, _rank(again, now))
            self._schedule(key, when, rank, told=again is not None and again <= now)

    def failed(self, key: ObjectKey, now: float, asked_seconds: float = 0.0) -> float:
        """Ends a run that failed; returns the delay in seconds until the next. asked_seconds: how long the
        other side wants to be left alone, at most the backoff's limit; no event cuts that short."""
        count = self._failures[key] = self._failures.get(key, 0) + 1
        again = self._running.pop(key)
        asked = min(asked_seconds, self._backoff.limit_seconds)
        delay = max(asked, self._backoff.delay(count, self._randomness()))
        floor = now + max(asked, min(delay, self._settle * count))
        self._not_before[key] = floor
        when = now + delay
        if again is not None:
            when = max(min(again, when), floor)
        # Who came meanwhile still waits; often it is his edit that made the run fail.
        self._schedule(key, when, when, told=again is not None and again <= now)
        return when - now

    def forget(self, key: ObjectKey) -> None:
        """Drops the failure memory of a key that is waiting or unknown, e.g. of a deleted object."""
        if key not in self._running:
            self._failures.pop(key, None)
            self._not_before.pop(key, None)

    def _schedule(self, key: ObjectKey, when: float, rank: float, *, told: bool) -> None:
        """rank: when it would have to be due to come at its turn; earlier than `when` only if that is now."""
        self._sequence += 1
        self._due[key], self._rank[key] = when, rank
        self._order[key] = self._sequence
        (self._told.add if told else self._told.discard)(key)
        heapq.heappush(self._heaps[told], (rank, self._sequence, key))


def _rank(when: float, now: float) -> float:
    return when - EVENT_LEAD_SECONDS if when <= now else when
