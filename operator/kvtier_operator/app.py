"""Wires the operator together and runs it: election, watches, one controller per kind, health, clean end.

The only place that knows every part. It must hold no rule of its own about any kind.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from prometheus_client import CollectorRegistry

from kvtier_operator.agents import GrpcAgents
from kvtier_operator.agents.recent import RecentAgents
from kvtier_operator.agents.renewal import LeaseRenewer
from kvtier_operator.clock import SystemClock
from kvtier_operator.controller import Controller, Limits
from kvtier_operator.election import LEASE_NAME, Callbacks, LeaseElection, Timing
from kvtier_operator.external.config import ExternalOptions
from kvtier_operator.external.serving import sources
from kvtier_operator.fleet import StoreFleet
from kvtier_operator.health import Health, HealthServer
from kvtier_operator.kube import RESOURCES, KubeClient, Transport, connect
from kvtier_operator.lastreads import LastReads, Seen
from kvtier_operator.metrics import Metrics
from kvtier_operator.ports import (
    Agents,
    AgentTls,
    Deps,
    EventType,
    Forbidden,
    JsonObject,
    Kind,
    KubeApi,
    NotLeader,
    ObjectKey,
    Reconciler,
)
from kvtier_operator.queue import Backoff
from kvtier_operator.reconcile import build_reconcilers
from kvtier_operator.rollout.beatreads import BeatReads
from kvtier_operator.rollout.feed import EvidenceFeed
from kvtier_operator.rollout.vocabulary import Cause
from kvtier_operator.starting import Starting, before
from kvtier_operator.store import WatchStore
from kvtier_operator.telemetry import Telemetry
from kvtier_operator.watch.kopf_thread import KopfThread, WatchDeps
from kvtier_operator.watch.relist import Relist, Relisted, looks_after
from kvtier_operator.watch.triggers import RECONCILED

_log = logging.getLogger(__name__)

# A reconcile of these waits for agents and the API server, seldom for the processor: some slow or silent
# agents must not hold up every cache, and of a thousand rollouts seventy look at their evidence each second.
# Leases are renewed only while the fences of cache and rollout agree, so a half-written step must not wait
# longer than a third of a common lease.
DEFAULT_LIMITS = {
    Kind.KV_CACHE: Limits(workers=16, reserved=4),
    Kind.KV_ROLLOUT: Limits(workers=32, reserved=8, backoff=Backoff(limit_seconds=10.0)),
}
WATCH_DOWN_SECONDS = 60.0
REST_SECONDS = 0.5
"""For reconciles to tell of what they have written, before the Lease is given back: the next leader waits."""
DRAIN_SECONDS = 3.0


@dataclass(frozen=True)
class Options:
    """What the command line says. Paths and addresses are not checked here."""

    kubeconfig: str | None
    namespace: str
    identity: str
    tls: AgentTls
    metrics_port: int | None = None
    liveness_port: int | None = None
    bind_address: str = "0.0.0.0"
    election: Timing = field(default_factory=Timing)
    limits: dict[Kind, Limits] = field(default_factory=dict)
    external: ExternalOptions | None = None


Through = Callable[[KubeApi, Agents], tuple[KubeApi, Agents]]
"""What stands between the reconciles and what they write to."""


def directly(api: KubeApi, agents: Agents) -> tuple[KubeApi, Agents]:
    return api, agents


class Operator:
    """One operator process (or, in tests, one of several in a process). `through`: tests count writes there,
    and end the process at one of them; the election's own Lease does not pass it."""

    def __init__(
        self,
        options: Options,
        telemetry: Telemetry,
        metrics: Metrics | None = None,
        through: Through = directly,
    ) -> None:
        self._options = options
        self._through = through
        self._telemetry = telemetry
        self.metrics = metrics or Metrics(CollectorRegistry())
        self.clock = SystemClock()
        self.store = WatchStore(self.metrics.watched)
        self._controllers: dict[Kind, Controller] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._random = random.Random()
        self.election: LeaseElection | None = None
        self.ready = asyncio.Event()
        self._relist: Relist | None = None
        self._reads = LastReads()

    def relist_soon(self) -> None:
        """Lists everything within seconds instead of minutes; in the loop's thread only."""
        if self._relist is not None:
            self._relist.request()

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set, or a part fails for good (then it raises, and the process should end)."""
        self._loop = asyncio.get_running_loop()
        async with contextlib.AsyncExitStack() as stack:
            transport = await before(stop, connect(self._options.kubeconfig))
            if transport is None:
                return
            stack.push_async_callback(transport.close)
            await self._run(stop, stack, transport)

    async def _run(self, stop: asyncio.Event, stack: contextlib.AsyncExitStack, transport: Transport) -> None:
        options, clock = self._options, self.clock
        ungated = KubeClient(
            transport, gate=lambda: None, metrics=self.metrics, clock=clock, instance=options.identity
        )
        election = LeaseElection(
            ungated,
            namespace=options.namespace,
            identity=options.identity,
            clock=clock,
            randomness=self._random.random,
            callbacks=Callbacks(self._started_leading, self._stopped_leading),
            timing=options.election,
        )
        self.election = election
        gated = KubeClient(
            transport, gate=election.check, metrics=self.metrics, clock=clock, instance=options.identity
        )
        clients = GrpcAgents(options.tls, election, self._telemetry, self.metrics)
        stack.push_async_callback(clients.close)
        api, agents = self._through(gated, clients)
        external = await stack.enter_async_context(sources(options.external))
        deps = Deps(
            api=api,
            store=self.store,
            fleet=StoreFleet(self.store, clock),
            agents=RecentAgents(agents, clock),
            leader=election,
            clock=clock,
            wake=self.wake,
            randomness=self._random.random,
            nonce=lambda: os.urandom(16),
            telemetry=self._telemetry,
            reads=self._reads,
            external=external,
            rolled_back=self.metrics.rolled_back,
            looked=self.metrics.looked,
        )
        relist = Relist(ungated, self.store, clock, self._random.random, self._relisted)
        self._relist = relist
        beats = BeatReads(deps.agents, election, clock)
        looks = EvidenceFeed(deps.agents, clock, external, beats)
        self._build(build_reconcilers(deps, looks), relist.request, partial(self._tell_forbidden, api))
        kopf_thread = KopfThread(
            WatchDeps(self.store, self._from_watch, options.kubeconfig, clock, self._lease_is_free)
        )
        starting = Starting(relist.one, ungated.schemas, partial(self._tell_waiting, ungated), clock)
        health = Health(
            alive=lambda: kopf_thread.down_seconds() < WATCH_DOWN_SECONDS,
            waits_for=lambda: "" if self.ready.is_set() else starting.waits_for or "its watches",
            standing_by=lambda: _standing_by(election),
        )
        server = HealthServer(
            health,
            self.metrics.registry,
            options.liveness_port,
            options.metrics_port,
            host=options.bind_address,
        )
        await stack.enter_async_context(_serving(server))
        await before(stop, starting.run())
        if stop.is_set():
            return
        kopf_thread.start()
        stack.push_async_callback(_stop_thread, kopf_thread)
        tasks = [
            asyncio.create_task(election.run(), name="election"),
            asyncio.create_task(relist.run(), name="relist"),
            asyncio.create_task(LeaseRenewer(deps).run(), name="lease-renewal"),
            asyncio.create_task(beats.run(), name="beat-reads"),
            *(
                asyncio.create_task(controller.run(), name=f"controller-{kind}")
                for kind, controller in self._controllers.items()
            ),
        ]
        self.ready.set()
        try:
            await _until(stop, tasks)
        finally:
            await asyncio.gather(*(one.rest(REST_SECONDS) for one in self._controllers.values()))
            await _cancel(tasks)
            await election.release()

    def wake(self, key: ObjectKey) -> None:
        """Puts one key into its queue; from any thread."""
        self._from_watch({key})

    def idle(self) -> bool:
        """Nothing is running and nothing is due; for tests that wait for calm."""
        return all(controller.idle for controller in self._controllers.values())

    def _build(
        self,
        reconcilers: Sequence[Reconciler],
        on_overflow: Callable[[], None],
        on_forbidden: Callable[[ObjectKey, Forbidden], Awaitable[None]],
    ) -> None:
        self.metrics.from_zero([one.kind for one in reconcilers], list(Cause))
        for reconciler in reconcilers:
            self._controllers[reconciler.kind] = Controller(
                reconciler,
                limits={**DEFAULT_LIMITS, **self._options.limits}.get(reconciler.kind, Limits()),
                clock=self.clock,
                randomness=self._random.random,
                telemetry=self._telemetry,
                metrics=self.metrics,
                on_overflow=on_overflow,
                on_forbidden=on_forbidden,
            )

    async def _tell_forbidden(self, api: KubeApi, key: ObjectKey, error: Forbidden) -> None:
        """Where people look: at the object that is not carried on."""
        obj = self.store.get(key)
        if obj is not None:
            with contextlib.suppress(NotLeader):
                await api.event(obj, EventType.WARNING, "Forbidden", error.message)

    async def _tell_waiting(self, api: KubeApi, message: str) -> None:
        """On the operator's Lease, which need not exist: it knows no other object that is its own."""
        lease: JsonObject = {
            "apiVersion": RESOURCES[Kind.LEASE].api_version,
            "kind": Kind.LEASE.value,
            "metadata": {"name": LEASE_NAME, "namespace": self._options.namespace},
        }
        await api.event(lease, EventType.WARNING, "NotStarted", message)

    def _lease_is_free(self, namespace: str) -> None:
        """From kopf's thread."""
        loop, election = self._loop, self.election
        if namespace == self._options.namespace and loop is not None and election is not None:
            with contextlib.suppress(RuntimeError):  # the loop has just been closed
                loop.call_soon_threadsafe(election.look)

    def _started_leading(self) -> None:
        self.metrics.leader(True)
        for controller in self._controllers.values():
            controller.lead()
        self.enqueue_all()

    def _stopped_leading(self) -> None:
        self.metrics.leader(False)
        for controller in self._controllers.values():
            controller.stand_by()

    def enqueue_all(self) -> None:
        """Looks at everything again; in the loop's thread."""
        for kind in RECONCILED:
            for obj in self.store.list_all(kind):
                self._add(ObjectKey(kind, obj["metadata"].get("namespace", ""), obj["metadata"]["name"]))

    def _relisted(self, found: Relisted) -> None:
        for key, seconds in looks_after(found, self.store, self._random.random):
            self._add(key, seconds)

    def _from_watch(self, keys: set[ObjectKey], seen: Seen | None = None) -> None:
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._add_all, keys, seen)

    def _add_all(self, keys: set[ObjectKey], seen: Seen | None) -> None:
        for key in sorted(keys):
            self._add(key, own=None if seen is None else partial(self._wrote, key, seen))

    def _wrote(self, key: ObjectKey, seen: Seen) -> bool:
        return self._reads.writer(seen) == key

    def _add(self, key: ObjectKey, after_seconds: float = 0.0, own: Callable[[], bool] | None = None) -> None:
        controller = self._controllers.get(key.kind)
        if controller is not None:
            controller.add(key, after_seconds, own)


def _standing_by(election: LeaseElection) -> str:
    if election.leading_since() is not None:
        return ""
    return f"standing by: {election.trouble}" if election.trouble else "standing by"


async def _until(stop: asyncio.Event, tasks: list[asyncio.Task[None]]) -> None:
    """Returns when `stop` is set; raises what the first task that ended raised."""
    waiting = asyncio.create_task(stop.wait(), name="stop")
    try:
        done, _ = await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if task is not waiting:
                task.result()
                raise RuntimeError(f"{task.get_name()} ended by itself")
    finally:
        await _cancel([waiting])


async def _cancel(tasks: Sequence[asyncio.Task[object]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=DRAIN_SECONDS)


async def _stop_thread(thread: KopfThread) -> None:
    if not await asyncio.to_thread(thread.stop):
        _log.warning("kopf did not stop in time")


@contextlib.asynccontextmanager
async def _serving(server: HealthServer) -> AsyncIterator[None]:
    await server.start()
    try:
        yield
    finally:
        await server.stop()
