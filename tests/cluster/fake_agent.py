"""A node agent without an engine: the real Control protocol over mTLS, a real KVNode and Lease, no rows.

It obeys the fence and boot rules of the wire (the operator's tests depend on being refused), but holds no
rows and measures nothing. It must not know the operator.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from kvtier.v1 import common_pb2 as common
from kvtier.v1 import control_pb2 as control
from kvtier.v1.control_pb2_grpc import ControlServicer, add_ControlServicer_to_server
from tests.cluster.kvtier_localplane import Cluster, eventually
from tests.ports import free_port

NUMERICS = "f32-chunk-merge/2"
MIB = 1024 * 1024
DEFAULT_TIERS = (
    {
        "class": "gpu-sim",
        "medium": "gpu",
        "deviceKind": "simulated",
        "simulated": True,
        "capacity": 256 * MIB,
    },
    {"class": "cpu-dram", "medium": "cpu", "capacity": 512 * MIB},
    {"class": "nvme-local", "medium": "nvme", "capacity": 4096 * MIB},
)


@dataclass
class Held:
    """One cache on this agent. `content` is the last mutating command, without nonce and boot id."""

    ref: common.CacheRef
    fence: int
    kind: str
    content: bytes
    digest: str
    candidate: str = ""


class Refusal(Exception):
    def __init__(self, reason: str, message: str, **facts: str) -> None:
        super().__init__(message)
        self.detail = common.ErrorDetail(reason=common.Reason.Value(reason), message=message, facts=facts)


@dataclass
class AgentState:
    """What survives a restart (caches) and what does not (boot id)."""

    node: str
    tiers: tuple[dict[str, Any], ...] = DEFAULT_TIERS
    caches: dict[str, Held] = field(default_factory=dict)
    removed: dict[str, int] = field(default_factory=dict)
    admissions: dict[str, tuple[int, str]] = field(default_factory=dict)
    boot_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    calls: list[str] = field(default_factory=list)
    used: dict[str, int] = field(default_factory=dict)
    stall: float = 0.25
    lie: bool = False


class FakeControl(ControlServicer):
    def __init__(self, state: AgentState) -> None:
        self.state = state

    async def GetState(self, request: Any, context: Any) -> control.GetStateResponse:
        state = self.state
        answer = control.GetStateResponse(
            node=state.node, boot_id=state.boot_id, agent_version="fake", numerics_version=NUMERICS
        )
        for held in state.caches.values():
            answer.caches.append(
                control.CacheState(
                    cache=held.ref,
                    highest_fence=held.fence,
                    baseline_digest=held.digest,
                    used_by_tier=state.used,
                    plan=control.PlanState(
                        predicted_stall_seconds=state.stall,
                        schedule="layerwiseTwoSlot",
                        link_bytes_per_second=2.0**30,
                        compute_flop_per_second=1e12,
                        bytes_per_token=1024,
                        inputs={"contextTokens": "4096", "coldTokens": "1024"},
                    ),
                )
            )
        for tier in state.tiers:
            answer.tiers.append(
                control.TierState(tier_class=tier["class"], medium=tier["medium"], condition="Ready")
            )
        return answer

    async def ApplyBaseline(self, request: control.ApplyBaselineRequest, context: Any) -> Any:
        async def run() -> control.ApplyBaselineResponse:
            actual = f"sha256:{hashlib.sha256(request.manifest).hexdigest()}"
            if actual != request.digest:
                raise Refusal("MANIFEST_MISMATCH", f"bytes hash to {actual}")
            held = self._judge(request, "Apply")
            held.digest = request.digest
            self.state.caches[request.cache.uid] = held
            self.state.admissions[request.cache.uid] = (request.admission.queue, request.admission.policy)
            return control.ApplyBaselineResponse(running_digest=actual, boot_id=self.state.boot_id)

        return await self._answer("ApplyBaseline", context, run)

    async def RemoveCache(self, request: control.RemoveCacheRequest, context: Any) -> Any:
        async def run() -> control.RemoveCacheResponse:
            self._judge(request, "Remove")
            # Whoever sees that it is gone finds under which fence.
            self.state.removed[request.cache.uid] = request.fence.value
            self.state.caches.pop(request.cache.uid, None)
            return control.RemoveCacheResponse()

        return await self._answer("RemoveCache", context, run)

    async def Prove(self, request: control.ProveRequest, context: Any) -> Any:
        async def run() -> control.ProveResponse:
            held = self.state.caches.get(request.cache.uid)
            if held is None:
                raise Refusal("CACHE_UNKNOWN", "no such cache")
            if request.fence.value < held.fence:
                raise Refusal("FENCE_STALE", "below the highest", highest_fence=str(held.fence))
            digest = f"sha256:{'0' * 64}" if self.state.lie else held.digest
            joined = request.nonce + digest.encode() + held.candidate.encode() + self.state.boot_id.encode()
            return control.ProveResponse(
                proof=control.Proof(
                    node=self.state.node,
                    boot_id=self.state.boot_id,
                    baseline_digest=digest,
                    candidate_digest=held.candidate,
                    highest_fence=held.fence,
                    nonce_digest=hashlib.sha256(joined).digest(),
                )
            )

        return await self._answer("Prove", context, run)

    def _judge(self, request: Any, kind: str) -> Held:
        """The fence and boot rules of release.md; returns the record to keep."""
        state, uid = self.state, request.cache.uid
        if request.boot_id != state.boot_id:
            raise Refusal("BOOT_ID_MISMATCH", "another boot", boot_id=state.boot_id)
        bare = type(request)()
        bare.CopyFrom(request)
        bare.boot_id = ""
        content = bare.SerializeToString(deterministic=True)
        held = state.caches.get(uid)
        if held is not None:
            highest = str(held.fence)
            if request.fence.value < held.fence:
                raise Refusal("FENCE_STALE", f"below {highest}", highest_fence=highest)
            if request.fence.value == held.fence and (kind, content) != (held.kind, held.content):
                raise Refusal("FENCE_CONFLICT", f"{highest} was used", highest_fence=highest)
        kept = common.CacheRef()
        kept.CopyFrom(request.cache)
        digest = held.digest if held is not None else ""
        return Held(kept, request.fence.value, kind, content, digest)

    async def _answer(self, method: str, context: Any, run: Callable[[], Any]) -> Any:
        self.state.calls.append(method)
        try:
            return await run()
        except Refusal as refusal:
            context.set_trailing_metadata((("kvtier-error-bin", refusal.detail.SerializeToString()),))
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(refusal))


class FakeAgent:
    """One agent process' worth: a server in a thread of its own, registration as that agent's
    ServiceAccount with a Pod-bound token. `start` and `stop` may alternate; caches survive, the boot id does
    not. A subclass may serve more of Control."""

    servicer: type[FakeControl] = FakeControl

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        node: str,
        *,
        namespace: str,
        pool: str,
        lease_seconds: int = 3600,
    ) -> None:
        self.cluster = cluster
        self.state = AgentState(node)
        self._folder = folder
        self._namespace = namespace
        self._pool = pool
        self._lease_seconds = lease_seconds
        self._kubeconfig: Path | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._started = threading.Event()
        self._reached_at = 0
        # Its own, so that nobody has it when it comes back.
        self.port = free_port()

    def start(self) -> None:
        """Serves, then registers: KVNode, its status, its Lease."""
        self.state.boot_id = str(uuid.uuid4())
        self._started.clear()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._started.wait(60), "the fake agent did not start"
        self._register()

    def stop(self, *, release: bool = True) -> None:
        """Ends serving. With `release`, its Lease ends at once; without, as if the node had lost power."""
        if self._thread is None:
            return
        assert self._loop is not None and self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)
        self._thread = None
        if release and self._kubeconfig is not None:
            released = self._lease()
            released["spec"] = {"leaseDurationSeconds": 1, "renewTime": released["spec"]["renewTime"]}
            self._apply(released)

    def register_at(self, port: int) -> None:
        """Registers once more, to be reached at that port of the loopback from now on."""
        self._reached_at = port
        self._register()

    def renew(self) -> None:
        self._apply(self._lease())

    async def _serve(self) -> None:
        certificate = self.cluster.issue_certificate(self.state.node, self._folder / self.state.node)
        credentials = grpc.ssl_server_credentials(
            [(certificate.key_file.read_bytes(), certificate.cert_file.read_bytes())],
            root_certificates=certificate.ca_file.read_bytes(),
            require_client_auth=True,
        )
        server = grpc.aio.server()
        add_ControlServicer_to_server(self.servicer(self.state), server)
        self.port = server.add_secure_port(f"127.0.0.1:{self.port}", credentials)
        assert self.port, "no port"
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        await server.start()
        self._started.set()
        await self._stop.wait()
        await server.stop(0.2)

    def _register(self) -> None:
        if self._kubeconfig is None:
            self._prepare_identity()
        node = self.state.node
        self._apply(
            {
                "apiVersion": "kvtier.dev/v1alpha1",
                "kind": "KVNode",
                "metadata": {"name": node},
                "spec": {
                    "nodeName": node,
                    "address": f"127.0.0.1:{self._reached_at or self.port}",
                    "poolRef": {"namespace": self._namespace, "name": self._pool},
                },
            }
        )
        self._apply(
            {
                "apiVersion": "kvtier.dev/v1alpha1",
                "kind": "KVNode",
                "metadata": {"name": node},
                "status": {
                    "bootID": self.state.boot_id,
                    "numericsVersion": NUMERICS,
                    "agentVersion": "fake",
                    "tiers": [dict(tier) for tier in self.state.tiers],
                },
            },
            "status",
        )
        self.renew()

    def _prepare_identity(self) -> None:
        """Node and Pod by the admin, as kubelet and scheduler would; the ServiceAccount is the operator's."""
        node, account = self.state.node, f"kvtier-agent-{self._pool}"
        labels = {"kvtier.dev/agent": "true", "kvtier.dev/test-pool": self._pool}
        self._admin({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node, "labels": labels}})
        eventually(
            lambda: self.cluster.get("serviceaccount", account, "-n", self._namespace),
            60,
            what=f"the operator made ServiceAccount {account}",
        )
        pod = f"agent-{node}"
        self._admin(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": pod, "namespace": self._namespace},
                "spec": {
                    "nodeName": node,
                    "serviceAccountName": account,
                    "containers": [{"name": "agent", "image": "kvtier/agent"}],
                },
            }
        )
        self._kubeconfig = self.cluster.service_account_kubeconfig(
            self._namespace,
            account,
            self._folder / f"{node}.kubeconfig",
            bound_pod=pod,
            duration_s=max(3600, self._lease_seconds),
        )

    def _lease(self) -> dict[str, Any]:
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {
                "name": f"kvnode-{self.state.node}",
                "namespace": self._namespace,
                "labels": {"kvtier.dev/component": "agent"},
            },
            "spec": {
                "holderIdentity": self.state.boot_id,
                "leaseDurationSeconds": self._lease_seconds,
                "renewTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            },
        }

    def _apply(self, manifest: dict[str, Any], subresource: str = "") -> None:
        self.cluster.apply(manifest, manager="agent", subresource=subresource, kubeconfig=self._kubeconfig)

    def _admin(self, manifest: dict[str, Any]) -> None:
        self.cluster.apply(manifest, force=False)

    def cleanup(self) -> None:
        self.stop()
        with contextlib.suppress(Exception):
            self.cluster.kubectl("delete", "kvnode", self.state.node, "--wait=false", check=False)
            self.cluster.kubectl("delete", "node", self.state.node, "--wait=false", check=False)
