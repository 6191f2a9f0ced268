"""The agent process: sockets, housekeeping, and an orderly end. Wires the rooms; holds no rule of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc
from prometheus_client import CollectorRegistry

from kvtier.v1 import attention_pb2_grpc, blocks_pb2_grpc, control_pb2_grpc
from kvtier_agent.attendframes import FrameCount, FrameDesk
from kvtier_agent.attention_service import AttentionService
from kvtier_agent.attentionkernels import prepare_kernels
from kvtier_agent.blockcalls import BlockCalls
from kvtier_agent.blockhost import BlockHost
from kvtier_agent.blockmetrics import BlockMetrics, StoreCollector
from kvtier_agent.blocks_service import BlocksService
from kvtier_agent.blocktending import tend_blocks
from kvtier_agent.boottime import boottime_ns
from kvtier_agent.caller import OperatorOnly
from kvtier_agent.candidateengines import BlocksOf, EngineFactory
from kvtier_agent.config import AgentConfig, ConfigError, TlsFiles
from kvtier_agent.control_service import AGENT_VERSION, ControlService
from kvtier_agent.evidence_port import EvidencePort
from kvtier_agent.indexworker import IndexCollector
from kvtier_agent.localchannel.listener import ChannelServer
from kvtier_agent.metricshttp import MetricsHttp
from kvtier_agent.node import Node
from kvtier_agent.rpc import RpcScope
from kvtier_agent.statedir import DirectoryLock, StateDir
from kvtier_agent.telemetry import Metrics, Telemetry, otlp_processor
from kvtier_agent.tierdirs import NodeTiers
from kvtier_agent.tiermetrics import HolderCollector, WriteBudgetCollector
from kvtier_core.selectors.lifecycle.works import IndexWorks

log = logging.getLogger(__name__)
_TICK_SECONDS = 1.0
_QUIET_SECONDS = 1.0


class Registration(Protocol):
    """Keeps the cluster's picture of this agent; `kvtier_agent.registration` is the real one."""

    async def run(self) -> None:
        """Until cancelled; failures of the API server are retried inside."""

    async def drain(self) -> None:
        """Says Draining=True and releases the Lease, within a short deadline of its own."""


@dataclass(frozen=True)
class Endpoints:
    """Where the agent listens; the port that was asked for as 0 is the real one here."""

    control: str
    socket: str
    metrics_port: int


RegistrationFactory = Callable[[AgentConfig, Node, Metrics, Endpoints], Registration | None]


class AgentServer:
    """One agent from start to end; `run` returns after a drain."""

    def __init__(
        self,
        config: AgentConfig,
        engine_factory: EngineFactory,
        evidence_factory: Callable[[str], EvidencePort],
        registration_factory: RegistrationFactory,
        blocks_of: BlocksOf = lambda engine: None,
        indexes: IndexWorks | None = None,
    ) -> None:
        """Locks the state and tier folders and reads the fences; raises ConfigError naming the flag."""
        if not config.node_uid:
            raise ConfigError("--node-uid is not known")
        self._config = config
        self._registration_factory = registration_factory
        state = StateDir(config.state_dir)
        self._socket_lock = _own_socket_directory(config)
        self.node = Node(
            name=config.node_name,
            state=state,
            tiers=NodeTiers(config.tiers, config.node_uid),
            limits=config.limits,
            clock=boottime_ns,
            engine_factory=engine_factory,
            evidence_factory=evidence_factory,
            blocks_of=blocks_of,
        )
        processors = [otlp_processor(config.otlp_endpoint)] if config.otlp_endpoint else []
        pool = f"{config.pool_namespace}/{config.pool_name}"
        self._telemetry = Telemetry(config.node_name, pool, self.node.boot_id, AGENT_VERSION, processors)
        self._metrics = Metrics(CollectorRegistry())
        self._metrics.build_info.labels(AGENT_VERSION).set(1)
        self._frames = FrameCount(config.limits.agent_in_flight, self._metrics)
        desk = FrameDesk(self.node, self._telemetry, self._metrics, self._frames)
        self._channels = ChannelServer(desk, config.channels_path)
        self._block_metrics = BlockMetrics(self._metrics.registry)
        StoreCollector(self._metrics.registry, self._block_hosts, time.monotonic)
        WriteBudgetCollector(self._metrics.registry, self.node.tiers)
        HolderCollector(self._metrics.registry, self.node.tier_reports)
        if indexes is not None:
            IndexCollector(self._metrics.registry, indexes)
        self._metrics_http: MetricsHttp | None = None
        self._scopes: list[RpcScope] = []
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """Begins the drain; safe to call again."""
        self._stop.set()

    async def run(self) -> Sequence[str]:
        """Serves until `stop` or SIGTERM/SIGINT, then drains. Returns the names of what did not end in time:
        then the process must be ended, since nothing else ends it."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        await loop.run_in_executor(None, prepare_kernels)
        await self.node.restore()
        control, port = self._control_server()
        engine = self._engine_server()
        await control.start()
        await engine.start()
        os.chmod(self._config.socket_path, 0o600)
        endpoints = self._endpoints(port)
        registration = self._registration_factory(self._config, self.node, self._metrics, endpoints)
        tasks = [asyncio.create_task(self._housekeeping()), asyncio.create_task(self._tending())]
        if registration is not None:
            tasks.append(asyncio.create_task(registration.run()))
        _announce("ready", endpoints, self.node.boot_id)
        log.info("serving %s", endpoints)
        await self._stop.wait()
        await self._drain(registration)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        _, _, hanging = await asyncio.gather(control.stop(1.0), engine.stop(1.0), self._channels.close(1.0))
        left = [*hanging, *await self._end()]
        with contextlib.suppress(FileNotFoundError):
            self._config.socket_path.unlink()
        self._socket_lock.release()
        await loop.run_in_executor(None, self._telemetry.shutdown)
        log.info("drained")
        return left

    async def _end(self) -> Sequence[str]:
        """What still runs after the last call was answered, each within the ending's deadline."""
        seconds = self._config.limits.end_seconds
        going_on = sum(await asyncio.gather(*(scope.finish(seconds) for scope in self._scopes)))
        left = [f"{going_on} commands"] if going_on else []
        ends = [self.node.close(seconds)]
        if self._metrics_http is not None:
            ends.append(self._metrics_http.stop(seconds))
        for names in await asyncio.gather(*ends):
            left += names
        return left

    async def _drain(self, registration: Registration | None) -> None:
        """No new sessions; what is in flight ends, at most until the deadline."""
        self.node.draining = True
        self.node.changed.set()
        log.info("draining")
        told = asyncio.create_task(registration.drain()) if registration is not None else None
        deadline = time.monotonic() + self._config.limits.drain_seconds
        try:
            async with asyncio.timeout(self._config.limits.drain_seconds):
                # That an engine stopped using its stream is a matter of time; no event tells it.
                while self._busy() and time.monotonic() < deadline:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        except TimeoutError:
            log.warning("%d frames were still in flight at the drain's deadline", self._frames.count)
        if told is not None:
            with contextlib.suppress(Exception):
                await told

    def _busy(self) -> bool:
        """Frames or calls on blocks in flight, or a stream whose engine used it a moment ago."""
        quiet_ns = int(_QUIET_SECONDS * 1e9)
        now = boottime_ns()
        if any(blocks.calls for blocks in self._block_hosts()):
            return True
        return self._frames.count > 0 or any(
            session.streaming and now - session.last_used_ns < quiet_ns
            for host in self.node.caches.values()
            for session in host.sessions.values()
        )

    def _block_hosts(self) -> list[BlockHost]:
        return [each for host in list(self.node.caches.values()) for each in host.all_blocks]

    async def _housekeeping(self) -> None:
        """Expires idle sessions and late pins and refreshes gauges, once a second."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due += _TICK_SECONDS
            await asyncio.sleep(max(0.0, due - loop.time()))
            self._metrics.loop_lag_seconds.set(max(0.0, loop.time() - due))
            due = max(due, loop.time() - _TICK_SECONDS)
            try:
                expired = await self.node.expire_idle_sessions()
                if expired:
                    log.info("%d idle sessions expired", expired)
                    self._metrics.expired_sessions.inc(expired)
                self._metrics.idle_demoted_chunks.inc(await self.node.demote_idle_sessions())
                await self.node.refresh_reports()
                self._metrics.manifest_differences.set(len(self.node.differences()))
                await tend_blocks(self.node)
                self._metrics.sessions.set(self.node.session_count())
                for report in self.node.tier_reports():
                    self._metrics.tier_used_bytes.labels(report.class_name).set(report.used_bytes)
            except Exception:
                log.exception("housekeeping failed")

    async def _tending(self) -> None:
        """Ends second engines that no candidate needs; carrying sessions home may take longer than a tick."""
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            try:
                await self.node.tend_candidates()
            except Exception:
                log.exception("a second engine could not be tended")

    def _control_server(self) -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server(options=self._options())
        scope = RpcScope(
            self._telemetry,
            self._metrics,
            self._config.limits.control_deadline_seconds,
            OperatorOnly(self._config.operator_name),
        )
        self._scopes.append(scope)
        control_pb2_grpc.add_ControlServicer_to_server(ControlService(self.node, scope), server)  # type: ignore[no-untyped-call]
        try:
            port = server.add_secure_port(self._config.listen, server_credentials(self._config.tls))
        except (RuntimeError, ValueError) as error:
            raise ConfigError(f"--listen {self._config.listen}: {error}") from error
        return server, port

    def _engine_server(self) -> grpc.aio.Server:
        server = grpc.aio.server(options=self._options())
        scope = RpcScope(self._telemetry, self._metrics, self._config.limits.control_deadline_seconds)
        self._scopes.append(scope)
        attention = AttentionService(
            self.node, scope, self._telemetry, self._metrics, self._frames, self._channels
        )
        attention_pb2_grpc.add_AttentionServicer_to_server(attention, server)  # type: ignore[no-untyped-call]
        blocks = BlocksService(self.node, scope, BlockCalls(self.node, self._block_metrics))
        blocks_pb2_grpc.add_BlocksServicer_to_server(blocks, server)  # type: ignore[no-untyped-call]
        try:
            server.add_insecure_port(f"unix:{self._config.socket_path}")
        except RuntimeError as error:
            raise ConfigError(f"--run-dir: cannot listen on {self._config.socket_path}: {error}") from error
        return server

    def _options(self) -> list[tuple[str, int]]:
        size = self._config.limits.max_message_bytes
        return [
            ("grpc.max_receive_message_length", size),
            ("grpc.max_send_message_length", size),
            ("grpc.so_reuseport", 0),
        ]

    def _endpoints(self, port: int) -> Endpoints:
        host = self._config.listen.rpartition(":")[0]
        metrics_port = self._config.metrics_port
        if metrics_port:
            try:
                self._metrics_http = MetricsHttp(metrics_port, host, self._metrics.registry)
            except OSError as error:
                raise ConfigError(f"--metrics-port {metrics_port}: {error.strerror}") from error
        return Endpoints(f"{host}:{port}", str(self._config.socket_path), metrics_port)


def unregistered(
    config: AgentConfig, node: Node, metrics: Metrics, endpoints: Endpoints
) -> Registration | None:
    """With --no-kubernetes."""
    return None


def server_credentials(tls: TlsFiles) -> grpc.ServerCredentials:
    """Mutual TLS: a client without a certificate of the CA is refused in the handshake."""
    pair = (tls.key.read_bytes(), tls.certificate.read_bytes())
    return grpc.ssl_server_credentials([pair], tls.ca.read_bytes(), require_client_auth=True)


def _own_socket_directory(config: AgentConfig) -> DirectoryLock:
    directory = config.socket_path.parent
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.chmod(0o700)
        lock = DirectoryLock(directory)
        config.socket_path.unlink(missing_ok=True)
    except BlockingIOError as error:
        raise ConfigError(f"--run-dir: another agent holds {directory}") from error
    except OSError as error:
        raise ConfigError(f"--run-dir {config.run_dir}: {error.strerror}") from error
    return lock


def _announce(event: str, endpoints: Endpoints, boot_id: str) -> None:
    line = {
        "event": event,
        "control": endpoints.control,
        "socket": endpoints.socket,
        "metricsPort": endpoints.metrics_port,
        "bootID": boot_id,
        "pid": os.getpid(),
    }
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()
