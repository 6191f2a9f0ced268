"""From the process' start until everything that exists has been listed once: what is waited for, how long.

Before that nothing is decided. CRDs are often installed after the operator, rights mended while it waits, and
an API server may still be starting; so it waits, and says what for in words by which it can be mended: in the
log, at /readyz and as an Event. It must not know what a listed object means.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeVar

from kvtier_operator.kube.resources import RESOURCES
from kvtier_operator.ports import GROUP, VERSION, ApiError, Clock, Forbidden, JsonObject, Kind, NotFound
from kvtier_operator.schemas import lacking, unpublished
from kvtier_operator.watch.triggers import WATCHED

_log = logging.getLogger(__name__)

START_SECONDS = 600.0
"""After so long the process ends, so that whoever looks at its restarts sees it, too."""
TELL_SECONDS = 10.0
"""A CRD that comes with the operator, some seconds later, is no news."""
PAUSE_SECONDS = (0.2, 5.0)
PUBLISH_SECONDS = 60.0
"""For so long an API server that has just begun, or has just been told of a CRD, may publish none of it."""
CANCEL_SECONDS = 3.0
UNAUTHORIZED = 401
T = TypeVar("T")


class NotStarted(Exception):
    """What was waited for did not come."""


class Listed(Protocol):
    """Takes over all objects of a kind; raises ApiError."""

    def __call__(self, kind: Kind, /) -> Awaitable[object]: ...


class Starting:
    """published: what the API server says of our kinds, as OpenAPI v3; raises ApiError. tell: an Event."""

    def __init__(
        self,
        listed: Listed,
        published: Callable[[], Awaitable[JsonObject]],
        tell: Callable[[str], Awaitable[None]],
        clock: Clock,
    ) -> None:
        self._listed = listed
        self._published = published
        self._tell = tell
        self._clock = clock
        self._unpublished_since: float | None = None
        self._older_once = False
        self.waits_for = "the first lists"

    async def run(self) -> None:
        """Raises NotStarted when it has waited for `START_SECONDS`. A list that goes on is no wait: each of
        its pages has a deadline, and of ten thousand objects there are a hundred."""
        since: float | None = None
        pause, longest = PAUSE_SECONDS
        while missing := await self._missing():
            now = self._clock.monotonic()
            since = now if since is None else since
            self.waits_for = "; ".join(missing)
            _log.warning("waiting to start", extra={"for": self.waits_for})
            if now - since >= START_SECONDS:
                raise NotStarted(f"waited {START_SECONDS:g} s for {self.waits_for}")
            if now - since >= TELL_SECONDS:
                await self._tell(f"the operator waits for {self.waits_for}")
            await self._clock.sleep(pause)
            pause = min(longest, pause * 2)
        self.waits_for = ""

    async def _missing(self) -> list[str]:
        """All at once, so that they can be mended at once. A server that does not answer is asked no more."""
        found = []
        for kind in WATCHED:
            resource = RESOURCES[kind]
            name = f"{resource.plural}.{resource.group}" if resource.group else resource.plural
            try:
                await self._listed(kind)
            except NotFound:
                found.append(f"the CRD {name}, which is not installed or does not serve {VERSION}")
            except Forbidden as error:
                if error.status == UNAUTHORIZED:
                    return [f"an API server that accepts its token: {error}"]
                found.append(f"the right to list {name}: {error.message}")
            except ApiError as error:
                return [f"the API server: {error}"]
        return found or await self._older()

    async def _older(self) -> list[str]:
        """A CRD that was found older stays so until the server says otherwise."""
        try:
            document = await self._published()
        except (Forbidden, NotFound) as error:
            if isinstance(error, NotFound) and not self._has_had_time():
                return [f"what the API server publishes of {GROUP} (/openapi/v3): {error}"]
            if self._older_once:
                return [f"what the API server publishes of {GROUP}, whose CRDs were older: {error}"]
            _log.warning("CRDs not compared with this version", extra={"error": str(error)})
            return []
        except ApiError as error:
            return [f"the API server: {error}"]
        if (absent := unpublished(document)) and (self._older_once or not self._has_had_time()):
            return [f"what the API server publishes of {', '.join(absent)} (/openapi/v3)"]
        older = await asyncio.to_thread(lacking, document)
        self._older_once = bool(older)
        if absent:
            _log.warning("CRDs not compared with this version", extra={"error": ", ".join(absent)})
        return [f"newer CRDs: {one}" for one in older]

    def _has_had_time(self) -> bool:
        """To publish what it lists already."""
        now = self._clock.monotonic()
        if self._unpublished_since is None:
            self._unpublished_since = now
        return now - self._unpublished_since >= PUBLISH_SECONDS


async def before(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` returns or raises; None, and the work is cancelled, where `stop` is set first."""
    task, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for one in (task, stopping):
            one.cancel()
        await asyncio.wait({task, stopping}, timeout=CANCEL_SECONDS)
