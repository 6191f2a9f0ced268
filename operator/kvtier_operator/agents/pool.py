"""The pool of mTLS channels to node agents: one per (name, address), each call gated, bounded and traced.

Implements `kvtier_operator.ports.Agents`. It never retries and remembers nothing but channels and what
agents' clocks said: what a call means is its caller's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Container
from dataclasses import dataclass
from typing import TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from kvtier.v1 import control_pb2 as control
from kvtier.v1.control_pb2_grpc import ControlStub
from kvtier_operator.agents.errors import error_for, reason_label
from kvtier_operator.agents.evidencereads import READ_SECONDS
from kvtier_operator.agents.stamps import Stamps
from kvtier_operator.ports import (
    AgentError,
    AgentTarget,
    AgentTls,
    AgentUnreachable,
    Leader,
    RpcMetrics,
    TelemetryPort,
)
from kvtier_operator.telemetry import current_traceparent

MAX_CONCURRENT = 64
MAX_PER_NODE = 4
MAX_RENEWALS = 64
DEADLINES = {
    "GetState": 3.0,
    "ApplyBaseline": 15.0,
    "RemoveCache": 15.0,
    "Grant": 5.0,
    "Renew": 2.0,
    "Revoke": 5.0,
    "Prove": 5.0,
    "ReadEvidence": READ_SECONDS,
    "ReadEvidenceMany": READ_SECONDS,
}
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Also how long a connection may take to be made: many handshakes at once take more than a moment.
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.enable_retries", 0),
    # Of what is encrypted at once: a buffer of 16 KiB of each channel else, and most requests are shorter.
    ("grpc.tsi.max_frame_size", 2048),
    # Nobody asks this process about its channels.
    ("grpc.enable_channelz", 0),
)
CLOSE_GRACE_SECONDS = 1.0

Answer = TypeVar("Answer", bound=Message)
# What begins or extends a permission says when it was sent, by the clock that an earlier answer told.
_COUNTED = (control.GrantRequest, control.RenewRequest)
_STAMPED = (control.GetStateResponse, control.GrantResponse, control.RenewResponse)


@dataclass(frozen=True)
class _Connection:
    address: str
    channel: grpc.aio.Channel
    stub: ControlStub
    slots: asyncio.Semaphore


ChannelFactory = Callable[[AgentTarget], grpc.aio.Channel]


def secure_channels(tls: AgentTls) -> ChannelFactory:
    """Channels whose server must carry the KVNode's name. The files are read for each new channel, so a
    renewed certificate is used from the next connection on."""

    def connect(node: AgentTarget) -> grpc.aio.Channel:
        credentials = grpc.ssl_channel_credentials(
            root_certificates=tls.authority.read_bytes(),
            private_key=tls.private_key.read_bytes(),
            certificate_chain=tls.certificate.read_bytes(),
        )
        options = [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", node.name)]
        return grpc.aio.secure_channel(node.address, credentials, options=options)

    return connect


class GrpcAgents:
    """See `ports.Agents`. Must be used from one event loop, the one that first calls it."""

    def __init__(
        self,
        tls: AgentTls,
        leader: Leader,
        telemetry: TelemetryPort,
        metrics: RpcMetrics,
        channels: ChannelFactory | None = None,
    ) -> None:
        self._connect = channels or secure_channels(tls)
        self._leader = leader
        self._telemetry = telemetry
        self._metrics = metrics
        self._connections: dict[str, _Connection] = {}
        self._stamps = Stamps(time.monotonic)
        self._slots = asyncio.Semaphore(MAX_CONCURRENT)
        # Of their own: many calls that hang on dead agents must not let the leases of live ones end.
        self._renewals = asyncio.Semaphore(MAX_RENEWALS)
        self._closing: set[asyncio.Task[None]] = set()

    async def get_state(
        self, node: AgentTarget, cache_uid: str = "", *, deadline_seconds: float | None = None
    ) -> control.GetStateResponse:
        request = control.GetStateRequest(cache_uids=[cache_uid] if cache_uid else [])
        return await self._call(node, "GetState", request, control.GetStateResponse, deadline_seconds)

    async def apply_baseline(
        self,
        node: AgentTarget,
        request: control.ApplyBaselineRequest,
        *,
        deadline_seconds: float | None = None,
    ) -> control.ApplyBaselineResponse:
        return await self._call(
            node, "ApplyBaseline", request, control.ApplyBaselineResponse, deadline_seconds
        )

    async def remove_cache(
        self, node: AgentTarget, request: control.RemoveCacheRequest, *, deadline_seconds: float | None = None
    ) -> control.RemoveCacheResponse:
        return await self._call(node, "RemoveCache", request, control.RemoveCacheResponse, deadline_seconds)

    async def grant(
        self, node: AgentTarget, request: control.GrantRequest, *, deadline_seconds: float | None = None
    ) -> control.GrantResponse:
        return await self._call(node, "Grant", request, control.GrantResponse, deadline_seconds)

    async def renew(
        self, node: AgentTarget, request: control.RenewRequest, *, deadline_seconds: float | None = None
    ) -> control.RenewResponse:
        return await self._call(node, "Renew", request, control.RenewResponse, deadline_seconds)

    async def revoke(
        self, node: AgentTarget, request: control.RevokeRequest, *, deadline_seconds: float | None = None
    ) -> control.RevokeResponse:
        return await self._call(node, "Revoke", request, control.RevokeResponse, deadline_seconds)

    async def prove(
        self, node: AgentTarget, request: control.ProveRequest, *, deadline_seconds: float | None = None
    ) -> control.ProveResponse:
        return await self._call(node, "Prove", request, control.ProveResponse, deadline_seconds)

    async def read_evidence(
        self,
        node: AgentTarget,
        request: control.ReadEvidenceRequest,
        *,
        deadline_seconds: float | None = None,
    ) -> control.ReadEvidenceResponse:
        return await self._call(node, "ReadEvidence", request, control.ReadEvidenceResponse, deadline_seconds)

    async def read_evidence_many(
        self,
        node: AgentTarget,
        request: control.ReadEvidenceManyRequest,
        *,
        deadline_seconds: float | None = None,
    ) -> control.ReadEvidenceManyResponse:
        return await self._call(
            node, "ReadEvidenceMany", request, control.ReadEvidenceManyResponse, deadline_seconds
        )

    def retain(self, names: Container[str]) -> None:
        self._stamps.retain(names)
        for name in [name for name in self._connections if name not in names]:
            self._retire(name, self._connections.pop(name))

    async def close(self) -> None:
        connections, self._connections = list(self._connections.values()), {}
        # At once: two hundred agents, one after the other, are two hundred graces.
        await asyncio.gather(*(connection.channel.close(CLOSE_GRACE_SECONDS) for connection in connections))
        for task in list(self._closing):
            await task

    async def _call(
        self,
        node: AgentTarget,
        method: str,
        request: Message,
        answer: type[Answer],
        deadline_seconds: float | None,
    ) -> Answer:
        self._leader.check()
        budget = DEADLINES[method] if deadline_seconds is None else deadline_seconds
        started = time.monotonic()
        code = "OK"
        attributes = {
            "rpc.system.name": "grpc",
            "rpc.method": f"kvtier.v1.Control/{method}",
            "server.address": node.address,
            "kvtier.node": node.name,
        }
        with self._telemetry.span(f"agent.{method}", attributes) as span:
            try:
                return await self._send(node, method, request, answer, budget)
            except AgentError as error:
                code = reason_label(error.reason)
                raise
            except AgentUnreachable as error:
                code = error.code
                raise
            except BaseException as error:
                code = type(error).__name__
                raise
            finally:
                span.set_attribute("rpc.response.status_code", code)
                self._metrics.observe_rpc(method, code, time.monotonic() - started)

    async def _send(
        self,
        node: AgentTarget,
        method: str,
        request: Message,
        answer: type[Answer],
        budget: float,
    ) -> Answer:
        """Waiting for a slot counts against the deadline, so a slow agent cannot stretch anyone's."""
        until = time.monotonic() + budget
        if not node.address:
            raise AgentUnreachable(node.name, "NO_ADDRESS", "the KVNode has no address")
        connection = self._connection(node)
        try:
            async with asyncio.timeout(budget), self._turn(connection, method):
                # Strictly after the wait: leadership may have been lost in the queue.
                self._leader.check()
                parent = current_traceparent()
                metadata = (("traceparent", parent),) if parent else ()
                if isinstance(request, _COUNTED):
                    if not self._stamps.heard(node.name, request.boot_id):
                        # A renewal of nothing asks for the time alone, and waits for no engine.
                        nothing = control.RenewRequest(boot_id=request.boot_id)
                        told = await connection.stub.Renew(nothing, timeout=_left(until), metadata=metadata)
                        self._stamps.hear(node.name, told.boot_id, told.stamp_ns)
                        self._leader.check()
                    request.sent_ns = self._stamps.now_ns(node.name, request.boot_id)
                call = getattr(connection.stub, method)
                received: Answer = await call(request, timeout=_left(until), metadata=metadata)
                if isinstance(received, _STAMPED):
                    self._stamps.hear(node.name, received.boot_id, received.stamp_ns)
                return received
        except grpc.aio.AioRpcError as error:
            trailing = [(key, value) for key, value in error.trailing_metadata() or ()]
            raise error_for(node.name, error.code().name, error.details() or "", trailing) from error
        except TimeoutError as error:
            message = f"{method} not answered within {budget:.1f} s"
            raise AgentUnreachable(node.name, "DEADLINE_EXCEEDED", message) from error
        except OSError as error:
            raise AgentUnreachable(node.name, "CREDENTIALS", str(error)) from error
        except (grpc.aio.UsageError, asyncio.CancelledError) as error:
            # A channel that is retired cancels its calls: that is not the caller's own cancellation, and on
            # its way up it would end loops that nobody has stopped.
            caller = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and (caller is None or caller.cancelling()):
                raise
            message = f"{method} was under way as its channel was closed"
            raise AgentUnreachable(node.name, "CHANNEL_CLOSED", message) from error

    @contextlib.asynccontextmanager
    async def _turn(self, connection: _Connection, method: str) -> AsyncIterator[None]:
        """Waits until the call may be sent: few at once to one agent, bounded over all."""
        if method == "Renew":
            async with self._renewals:
                yield
            return
        async with connection.slots, self._slots:
            yield

    def _connection(self, node: AgentTarget) -> _Connection:
        known = self._connections.get(node.name)
        if known is not None and known.address == node.address:
            return known
        try:
            channel = self._connect(node)
        except OSError as error:
            raise AgentUnreachable(node.name, "CREDENTIALS", str(error)) from error
        stub = ControlStub(channel)  # type: ignore[no-untyped-call]
        fresh = _Connection(node.address, channel, stub, asyncio.Semaphore(MAX_PER_NODE))
        self._connections[node.name] = fresh
        if known is not None:
            self._retire(node.name, known)
        return fresh

    def _retire(self, name: str, connection: _Connection) -> None:
        """Calls that are under way get a moment to end."""
        task = asyncio.create_task(connection.channel.close(CLOSE_GRACE_SECONDS), name=f"close-{name}")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def _left(until: float) -> float:
    return max(0.001, until - time.monotonic())
