"""One leader by a Lease, and the gate that every write and every agent call passes.

The holder renews long before its Lease ends and closes the gate by its own monotonic clock while there is
still time, so that a paused or cut-off process stops writing before another may begin. Other processes judge
the Lease by how long they have seen it unchanged, not by its timestamps: clocks of two nodes may differ. The
fence of each cache (compare-and-swap) covers what a clock cannot. This module must not know a reconcile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from kvtier_operator.fleet import format_micro_time
from kvtier_operator.ports import (
    AlreadyExists,
    ApiError,
    Clock,
    Conflict,
    JsonObject,
    Kind,
    NotFound,
    NotLeader,
)
from kvtier_operator.ports import ObjectKey as Key

_log = logging.getLogger(__name__)

LEASE_NAME = "kvtier-operator"
LABELS = {"kvtier.dev/component": "operator"}
"""By which operators watch each other's Lease."""
# For both requests of a release: a server that is slow then is worth waiting for, or the next leader waits.
RELEASE_SECONDS = 8.0
RELEASE_AGAIN_SECONDS = 0.2
_DELETED: JsonObject = {"metadata": {"resourceVersion": "deleted"}, "spec": {}}
"""In place of a Lease that was held and is gone: for others it ends as one that nobody renews."""


class LeaseApi(Protocol):
    """What the election needs of an API client; its writes pass no gate."""

    async def get(self, key: Key) -> JsonObject: ...

    async def create(self, manifest: JsonObject) -> JsonObject: ...

    async def replace(self, manifest: JsonObject) -> JsonObject: ...


@dataclass(frozen=True)
class Timing:
    """All in seconds. The gate closes `margin` before the Lease ends for others: an answer to a write that
    was sent just before is then still inside."""

    duration: float = 15.0
    renew: float = 5.0
    retry: float = 2.0
    margin: float = 5.0
    jitter: float = 0.2


@dataclass
class _Seen:
    version: str = ""
    since: float = 0.0


@dataclass(frozen=True)
class Callbacks:
    """Called in the loop's thread, each change once."""

    started: Callable[[], None] = field(default=lambda: None)
    stopped: Callable[[], None] = field(default=lambda: None)


class LeaseElection:
    """Implements `kvtier_operator.ports.Leader`. `run` until cancelled; then `release`."""

    def __init__(
        self,
        api: LeaseApi,
        *,
        namespace: str,
        identity: str,
        clock: Clock,
        randomness: Callable[[], float],
        callbacks: Callbacks,
        timing: Timing | None = None,
        name: str = LEASE_NAME,
    ) -> None:
        self._api = api
        self._key = Key(Kind.LEASE, namespace, name)
        self._identity = identity
        self._clock = clock
        self._randomness = randomness
        self._callbacks = callbacks
        self._timing = timing or Timing()
        self._held_until = 0.0
        self._since: float | None = None
        self._seen = _Seen()
        self._mine: JsonObject | None = None
        self._free = asyncio.Event()
        self.trouble = ""
        """What the last try failed by; empty when it got an answer."""

    def check(self) -> None:
        if self._since is None or self._clock.monotonic() >= self._held_until:
            raise NotLeader(f"{self._identity} does not hold the Lease {self._key}")

    def leading_since(self) -> float | None:
        try:
            self.check()
        except NotLeader:
            return None
        return self._since

    async def run(self) -> None:
        """Tries for ever; a failed request is a try that did not succeed."""
        while True:
            self._free.clear()
            began = self._clock.monotonic()
            wait = self.pause(await self.step(), began)
            # Not wait_for: in Python 3.11 it may swallow a cancellation that comes with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._free.wait()

    def pause(self, renewed: bool, began: float) -> float:
        """Seconds until the next try. Counted from when the last one began, as the Lease is: from a slow
        server's answer on, the gate would close before the next answer comes."""
        now = self._clock.monotonic()
        wait = self._timing.renew if renewed else self._timing.retry
        wait *= 1.0 + self._timing.jitter * self._randomness()
        if renewed:
            wait = max(0.0, wait - (now - began))
        if self._since is not None:
            wait = min(wait, max(0.0, self._held_until - now))
        return wait

    def look(self) -> None:
        """The Lease is said to have no holder: who waits for it tries now. In the loop's thread."""
        if self._since is None:
            self._free.set()

    async def step(self) -> bool:
        """One try to take or renew, and the consequences. True when the Lease is ours by this try."""
        asked = self._clock.monotonic()
        try:
            async with asyncio.timeout(self._timing.duration - self._timing.margin):
                held = await self._renew() or await self._acquire()
            self.trouble = ""
        except (ApiError, TimeoutError) as error:
            self.trouble = str(error) or f"no answer within {self._timing.duration - self._timing.margin:g} s"
            _log.warning("election try failed", extra={"error": self.trouble})
            held = False
            if self._since is not None and self._clock.monotonic() < self._held_until:
                return False  # still ours by what was granted before
        if held:
            # Counted from before the request: the server's renewTime cannot be earlier.
            self._held_until = asked + self._timing.duration - self._timing.margin
            if self._since is None:
                self._since = self._clock.monotonic()
                _log.info("leading", extra={"identity": self._identity})
                self._callbacks.started()
        else:
            self._lose()
        return held

    async def release(self) -> None:
        """Gives the Lease back, so that the next leader need not wait for it to end."""
        held = self._since is not None
        self._lose()
        if not held:
            return
        with contextlib.suppress(NotFound, TimeoutError):
            async with asyncio.timeout(RELEASE_SECONDS):
                while not await self._released():
                    await self._clock.sleep(RELEASE_AGAIN_SECONDS)

    async def _released(self) -> bool:
        """False: it did not come to it, as when a renewal that was cut off arrived meanwhile."""
        try:
            lease = await self._api.get(self._key)
            if (lease["spec"].get("holderIdentity") or "") == self._identity:
                lease["spec"]["holderIdentity"] = ""
                lease["spec"]["leaseDurationSeconds"] = 1
                await self._api.replace(lease)
        except NotFound:
            raise
        except ApiError as error:
            _log.warning("the Lease is not given back yet", extra={"error": str(error)})
            return False
        return True

    def _lose(self) -> None:
        if self._since is None:
            return
        self._since = None
        self._held_until = 0.0
        self._mine = None
        _log.warning("not leading any more", extra={"identity": self._identity})
        self._callbacks.stopped()

    async def _renew(self) -> bool:
        """In one request, by the version that the last try has left: of two, each as slow as a server may be,
        the Lease would end between them. False: to be looked at, as when anybody else has written it."""
        if self._since is None or self._mine is None:
            return False
        lease, self._mine = self._mine, None
        lease["spec"]["renewTime"] = format_micro_time(self._clock.now())
        with contextlib.suppress(Conflict, NotFound):
            self._mine = await self._api.replace(lease)
        return self._mine is not None

    async def _acquire(self) -> bool:
        now = format_micro_time(self._clock.now())
        try:
            lease = await self._api.get(self._key)
        except NotFound:
            # Who held it may write for as long as it granted itself; it makes its own again long before that.
            if self._since is None and self._seen.version and not self._has_ended(_DELETED):
                return False
            return await self._create(now)
        spec = lease.setdefault("spec", {})
        holder = spec.get("holderIdentity") or ""
        if holder not in ("", self._identity) and not self._has_ended(lease):
            return False
        if holder != self._identity:
            spec["acquireTime"] = now
            spec["leaseTransitions"] = int(spec.get("leaseTransitions") or 0) + 1
        elif self._since is None and not self._has_ended(lease):
            # Our own name from an earlier life of this process: take it over, but say so.
            spec["acquireTime"] = now
            spec["leaseTransitions"] = int(spec.get("leaseTransitions") or 0) + 1
        spec["holderIdentity"] = self._identity
        spec["renewTime"] = now
        spec["leaseDurationSeconds"] = int(self._timing.duration)
        lease["metadata"]["labels"] = {**(lease["metadata"].get("labels") or {}), **LABELS}
        try:
            self._mine = await self._api.replace(lease)
        except Conflict:
            return False
        return True

    async def _create(self, now: str) -> bool:
        lease: JsonObject = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": Kind.LEASE.value,
            "metadata": {"name": self._key.name, "namespace": self._key.namespace, "labels": LABELS},
            "spec": {
                "holderIdentity": self._identity,
                "acquireTime": now,
                "renewTime": now,
                "leaseDurationSeconds": int(self._timing.duration),
                "leaseTransitions": 0,
            },
        }
        try:
            self._mine = await self._api.create(lease)
        except AlreadyExists:
            return False
        return True

    def _has_ended(self, lease: JsonObject) -> bool:
        version = str(lease["metadata"].get("resourceVersion", ""))
        now = self._clock.monotonic()
        if version != self._seen.version:
            self._seen = _Seen(version, now)
        duration = float(lease["spec"].get("leaseDurationSeconds") or self._timing.duration)
        return now - self._seen.since >= duration
