"""kopf, for what it does best: watching, reconnecting, authenticating. Nothing else of it is used.

Its handlers are `on.event` only, so it stores nothing on objects and sets no finalizer. It has a thread and
a loop of its own, since at its end it cancels every task in its loop. It tries for ever to reach the server.
Should one of its watches end all the same, kopf would go on without it; the supervisor here ends kopf and
starts it again, and says how long the watches have been down.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import itertools
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kvtier_operator.execlogin import PAUSE_SECONDS
from kvtier_operator.kube import RESOURCES, load_access
from kvtier_operator.kube.access import Pem
from kvtier_operator.lastreads import Seen
from kvtier_operator.ports import Clock, JsonObject, Kind, ObjectKey
from kvtier_operator.store import WatchStore
from kvtier_operator.watch.kopf_alone import kopf
from kvtier_operator.watch.nothing_kept import NoDiffBase, NoProgress
from kvtier_operator.watch.triggers import (
    WATCH_SELECTORS,
    WATCHED,
    affected,
    is_operators_lease,
    relevant,
)
from kvtier_operator.watch.trimmed import trimmed

_log = logging.getLogger(__name__)

OnKeys = Callable[[set[ObjectKey], Seen | None], None]
"""Keys that have to be looked at, and the version that says so; None: an object is gone."""
Sleep = Callable[[float], Awaitable[None]]
STOP_SECONDS = 8.0
LOOK_SECONDS = 1.0
WATCHER = "watcher for "
"""How kopf calls the task that watches a kind."""
RELOGIN = datetime.timedelta(minutes=10)


@dataclass(frozen=True)
class WatchDeps:
    """`on_keys` is called in kopf's thread, and `on_free` when an operator's Lease of that namespace has no
    holder any more. `kubeconfig` None: the pod's service account."""

    store: WatchStore
    on_keys: OnKeys
    kubeconfig: str | None
    clock: Clock
    on_free: Callable[[str], None] = lambda _namespace: None


def register(registry: kopf.OperatorRegistry, deps: WatchDeps) -> None:
    """Adds one login and one event handler per watched kind; called once for each start of kopf."""

    @kopf.on.login(registry=registry, id="login", backoff=PAUSE_SECONDS)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        return await connection_info(deps.kubeconfig)

    for kind in WATCHED:
        resource = RESOURCES[kind]
        kopf.on.event(
            resource.group,
            resource.version,
            resource.plural,
            registry=registry,
            id=f"watch-{resource.plural}",
            param=kind,
        )(_handler(deps))


def _handler(deps: WatchDeps) -> Callable[..., Any]:
    async def observe(event: Any, param: Kind, **_: Any) -> None:
        accept(deps, param, event["type"] == "DELETED", dict(event["object"]))

    return observe


def accept(deps: WatchDeps, kind: Kind, deleted: bool, obj: JsonObject) -> None:
    """Takes one event of a watch into the store and passes on the keys it concerns."""
    key = ObjectKey(kind, obj["metadata"].get("namespace", ""), obj["metadata"]["name"])
    if is_operators_lease(key):
        if deleted or not (obj.get("spec") or {}).get("holderIdentity"):
            deps.on_free(key.namespace)
        return
    if not relevant(key):
        return
    obj = trimmed(kind, obj)
    before = deps.store.remove(key) if deleted else deps.store.put(key, obj)
    keys = affected(key, before, None if deleted else obj, deps.store)
    if keys:
        deps.on_keys(keys, None if deleted else Seen.of(key, obj))


async def connection_info(kubeconfig: str | None) -> kopf.ConnectionInfo:
    """What `kube.access` found, in kopf's terms. It ends after some minutes, so that a rotated token is read
    again, and before what another program gave: kopf then asks anew, as it does where it is refused."""
    access = await load_access(kubeconfig)
    scheme, _, token = access.authorization().partition(" ")
    certificate, key = access.client_certificate()
    now = datetime.datetime.now(datetime.UTC)
    until = now + RELOGIN
    if access.login is not None and access.login.credential.renew_at < until.timestamp():
        until = datetime.datetime.fromtimestamp(access.login.credential.renew_at, datetime.UTC)
        until = max(until, now + datetime.timedelta(seconds=PAUSE_SECONDS))
    return kopf.ConnectionInfo(
        server=access.server,
        **_pem("ca", access.ca),
        **_pem("certificate", certificate),
        **_pem("private_key", key),
        insecure=not access.verify,
        scheme=scheme or None,
        token=token or None,
        expiration=until,
    )


def _pem(name: str, pem: Pem) -> dict[str, Any]:
    return {f"{name}_data" if isinstance(pem, bytes) else f"{name}_path": pem}


class Backoffs:
    """Seconds between tries of one request, without end: kopf takes the last of a finite list for the end of
    the watch, and an API server may be away for longer than any."""

    def __iter__(self) -> Iterator[float]:
        return itertools.chain((0.2, 0.5, 1.0, 2.0), itertools.repeat(4.0))


class WatchEnded(Exception):
    """kopf does not watch some kind any more."""


async def until_a_watch_ends(sleep: Sleep = asyncio.sleep) -> None:
    """Raises WatchEnded once a watcher that was seen in this loop is gone."""
    seen: set[str] = set()
    while True:
        await sleep(LOOK_SECONDS)
        names = {task.get_name() for task in asyncio.all_tasks()}
        alive = {name for name in names if name.startswith(WATCHER)}
        if lost := seen - alive:
            raise WatchEnded(", ".join(sorted(lost)))
        seen |= alive


def settings() -> kopf.OperatorSettings:
    made = kopf.OperatorSettings()
    made.process.ultimate_exiting_timeout = None
    made.posting.enabled = False
    made.posting.loggers = False
    made.peering.standalone = True
    made.scanning.disabled = True
    made.persistence.finalizer = "kvtier.dev/kopf-is-not-used-for-finalizers"
    # kopf's own copy the whole object with each event, for handlers that compare it with what was before.
    made.persistence.diffbase_storage = NoDiffBase()
    made.persistence.progress_storage = NoProgress()
    made.watching.server_timeout = 300
    made.watching.client_timeout = 330
    made.watching.connect_timeout = 10
    made.watching.chunk_size = 100
    made.networking.request_timeout = 30
    made.networking.connect_timeout = 10
    made.networking.error_backoffs = Backoffs()
    made.queueing.exit_timeout = 1.0
    # For so long kopf keeps the last event of an object, whole, after it was handled.
    made.queueing.idle_timeout = 0.5
    for kind, selector in WATCH_SELECTORS.items():
        resource = RESOURCES[kind]
        made.watching.label_selectors[resource.group, resource.plural] = selector
    return made


class KopfThread:
    """Starts kopf, and again whenever it ends by itself, until `stop`."""

    def __init__(
        self,
        deps: WatchDeps,
        *,
        restart_seconds: tuple[float, ...] = (0.5, 1, 2, 5, 10),
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        """sleep: between two looks at the watches."""
        self._deps = deps
        self._sleep = sleep
        self._restart_seconds = restart_seconds
        self._stop = threading.Event()
        self._down_since: float | None = None
        self._thread = threading.Thread(target=self._supervise, name="kopf", daemon=True)

    def start(self) -> None:
        self._down_since = self._deps.clock.monotonic()
        self._thread.start()

    def down_seconds(self) -> float:
        """How long kopf has not been running since `start`; 0 while it is."""
        down = self._down_since
        return 0.0 if down is None else self._deps.clock.monotonic() - down

    def stop(self) -> bool:
        """Blocks for at most STOP_SECONDS. False: the thread is still there (it is a daemon)."""
        self._stop.set()
        self._thread.join(STOP_SECONDS)
        return not self._thread.is_alive()

    def _supervise(self) -> None:
        failures = 0
        while not self._stop.is_set():
            started = self._deps.clock.monotonic()
            try:
                asyncio.run(self._run())
            except BaseException as error:
                _log.warning("watching ended", extra={"error": f"{type(error).__name__}: {error}"})
            if self._stop.is_set():
                return
            now = self._deps.clock.monotonic()
            if self._down_since is None:
                self._down_since = now
            failures = 0 if now - started > 60 else failures + 1
            self._stop.wait(self._restart_seconds[min(failures, len(self._restart_seconds) - 1)])

    async def _run(self) -> None:
        ready = asyncio.Event()
        noting = asyncio.ensure_future(self._note_ready(ready))
        watching = asyncio.ensure_future(self._watch(ready))
        looking = asyncio.ensure_future(until_a_watch_ends(self._sleep))
        try:
            await asyncio.wait({watching, looking}, return_when=asyncio.FIRST_COMPLETED)
            ended = watching if watching.done() else looking
            await ended
        finally:
            for task in (noting, looking, watching):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching

    async def _watch(self, ready: asyncio.Event) -> None:
        registry = kopf.OperatorRegistry()
        register(registry, self._deps)
        await kopf.operator(
            registry=registry,
            settings=settings(),
            clusterwide=True,
            ready_flag=ready,
            stop_flag=self._stop,
        )

    async def _note_ready(self, ready: asyncio.Event) -> None:
        await ready.wait()
        self._down_since = None
