"""One simulated agent: a production Node with its Control service on mutual TLS, registered as any agent is.

What `kvtier_agent.server` adds for engines (attention, blocks, local channels) is left out. It must not know
how many others are in its process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
from prometheus_client import CollectorRegistry

from kvtier.v1 import control_pb2, control_pb2_grpc
from kvtier_agent.boottime import boottime_ns
from kvtier_agent.caller import OperatorOnly
from kvtier_agent.config import AgentConfig, KubernetesMode, Limits, TierConfig, TlsFiles
from kvtier_agent.control_service import AGENT_VERSION, ControlService
from kvtier_agent.engine_port import EnginePort
from kvtier_agent.node import Node
from kvtier_agent.registration import ClusterRegistration, KubernetesTransport
from kvtier_agent.rpc import RpcScope, ServicerContext
from kvtier_agent.server import server_credentials
from kvtier_agent.statedir import StateDir
from kvtier_agent.telemetry import Metrics, Telemetry
from kvtier_agent.tierdirs import NodeTier, NodeTiers
from kvtier_crds.manifest import RuntimeManifest
from tests.release_agents.engine import EmptyEngine
from tests.release_agents.evidence import Harm, MadeUpEvidence, Readings

TIERS = (
    {"className": "gpu-sim", "medium": "gpu", "deviceKind": "simulated", "capacity": "64Gi"},
    {"className": "cpu-dram", "medium": "cpu", "capacity": "256Gi"},
)
END_SECONDS = 5.0


@dataclass(frozen=True)
class Place:
    """Where an agent runs, and by which files it is known. uid: of its Node."""

    node: str
    uid: str
    namespace: str
    pool: str
    cert: str
    key: str
    ca: str
    kubeconfig: str
    state: str


@dataclass
class Observed:
    """What the simulated agents of one process have seen, for whoever measures. revoked: node to the moment
    its last Revoke was answered with a proof of the baseline; calls: how often each verb was answered."""

    readings: Readings
    revoked: dict[str, float]
    calls: dict[str, int]


class CountedControl(ControlService):
    """The production service; what it answered is noted after the fact."""

    def __init__(self, node: Node, scope: RpcScope, observed: Observed) -> None:
        super().__init__(node, scope)
        self._name = node.name
        self._observed = observed

    async def GetState(
        self, request: control_pb2.GetStateRequest, context: ServicerContext
    ) -> control_pb2.GetStateResponse:
        self._count("GetState")
        return await super().GetState(request, context)

    async def Grant(
        self, request: control_pb2.GrantRequest, context: ServicerContext
    ) -> control_pb2.GrantResponse:
        self._count("Grant")
        return await super().Grant(request, context)

    async def Renew(
        self, request: control_pb2.RenewRequest, context: ServicerContext
    ) -> control_pb2.RenewResponse:
        self._count("Renew")
        self._count("Renew.items", len(request.items))
        return await super().Renew(request, context)

    async def Revoke(
        self, request: control_pb2.RevokeRequest, context: ServicerContext
    ) -> control_pb2.RevokeResponse:
        answer = await super().Revoke(request, context)
        self._count("Revoke")
        if answer.proof.baseline_digest and not answer.proof.candidate_digest:
            self._observed.revoked[self._name] = time.monotonic()
        return answer

    async def ReadEvidence(
        self, request: control_pb2.ReadEvidenceRequest, context: ServicerContext
    ) -> control_pb2.ReadEvidenceResponse:
        self._count("ReadEvidence")
        return await super().ReadEvidence(request, context)

    async def ReadEvidenceMany(
        self, request: control_pb2.ReadEvidenceManyRequest, context: ServicerContext
    ) -> control_pb2.ReadEvidenceManyResponse:
        self._count("ReadEvidenceMany")
        self._count("ReadEvidenceMany.items", len(request.items))
        return await super().ReadEvidenceMany(request, context)

    def _count(self, verb: str, times: int = 1) -> None:
        self._observed.calls[verb] = self._observed.calls.get(verb, 0) + times


class SimulatedAgent:
    """`start`, then `close`. reads: whether this one's windows are noted in `observed`."""

    def __init__(
        self,
        place: Place,
        operator_name: str,
        harm: Harm,
        probe_digest: str,
        observed: Observed,
        *,
        reads: bool,
    ) -> None:
        self._place = place
        readings = observed.readings if reads else None
        configs = [TierConfig.parse(json.dumps(tier)) for tier in TIERS]
        self._config = _config(place, operator_name, tuple(configs))
        self.node = Node(
            name=place.node,
            state=StateDir(Path(place.state)),
            tiers=NodeTiers(configs, place.uid),
            limits=self._config.limits,
            clock=boottime_ns,
            engine_factory=_engine,
            evidence_factory=lambda epoch: MadeUpEvidence(epoch, harm, probe_digest, readings),
        )
        self._operator_name = operator_name
        self._observed = observed
        self._server: grpc.aio.Server | None = None
        self._registering: asyncio.Task[None] | None = None

    async def start(self, *, register: bool = True) -> str:
        """Serves, and registers in its own time; returns where Control listens."""
        place, node = self._place, self.node
        await node.restore()
        telemetry = Telemetry(place.node, f"{place.namespace}/{place.pool}", node.boot_id, AGENT_VERSION, [])
        metrics = Metrics(CollectorRegistry())
        scope = RpcScope(
            telemetry,
            metrics,
            self._config.limits.control_deadline_seconds,
            OperatorOnly(self._operator_name),
        )
        server = self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        control_pb2_grpc.add_ControlServicer_to_server(  # type: ignore[no-untyped-call]
            CountedControl(node, scope, self._observed), server
        )
        tls = self._config.tls
        port = server.add_secure_port("127.0.0.1:0", server_credentials(tls))
        await server.start()
        address = f"127.0.0.1:{port}"
        if register:
            transport = KubernetesTransport(place.kubeconfig)
            registration = ClusterRegistration(self._config, node, metrics, address, transport)
            name = f"registration-{place.node}"
            self._registering = asyncio.create_task(registration.run(), name=name)
        return address

    async def close(self) -> Sequence[str]:
        """What did not end in time."""
        if self._registering is not None:
            self._registering.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._registering
        if self._server is not None:
            await self._server.stop(0.5)
        return await self.node.close(END_SECONDS)


def _engine(manifest: RuntimeManifest, tiers: Sequence[NodeTier], key_secret: str) -> EnginePort:
    return EmptyEngine(manifest)


def _config(place: Place, operator_name: str, tiers: tuple[TierConfig, ...]) -> AgentConfig:
    return AgentConfig(
        node_name=place.node,
        node_uid=place.uid,
        pool_namespace=place.namespace,
        pool_name=place.pool,
        state_dir=Path(place.state),
        run_dir=Path(place.state),
        listen="127.0.0.1:0",
        advertise="127.0.0.1:0",
        tls=TlsFiles(Path(place.cert), Path(place.key), Path(place.ca)),
        operator_name=operator_name,
        tiers=tiers,
        kubernetes=KubernetesMode.KUBECONFIG,
        kubeconfig=Path(place.kubeconfig),
        otlp_endpoint="",
        metrics_port=0,
        log_level="warning",
        limits=Limits(),
    )
