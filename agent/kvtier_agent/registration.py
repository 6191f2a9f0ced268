"""Keeps this agent's KVNode and Lease in the cluster: server-side apply, deadlines, backoff, never a crash.

The API server may be away for as long as it likes; the agent keeps serving. It must not know caches beyond
what `kvnode` reads of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Protocol
from urllib.request import getproxies_environment

import aiohttp
from kubernetes.aio import client as aio_client
from kubernetes.aio import config as aio_config

from kvtier_agent import kvnode
from kvtier_agent.config import AgentConfig, KubernetesMode
from kvtier_agent.node import Node
from kvtier_agent.server import Endpoints, Registration
from kvtier_agent.telemetry import Metrics

Json = dict[str, Any]
log = logging.getLogger(__name__)

FIELD_MANAGER = "kvtier-agent"
LEASE_SECONDS = 30
RENEW_SECONDS = 10.0
REQUEST_SECONDS = 4.0
POLL_SECONDS = 5.0
"""Between looks for what nobody tells of: numbers, a tier that has failed, a lease that has ended alone."""
VERIFY_SECONDS = 60.0
MAX_BACKOFF_SECONDS = 30.0
MIN_SPREAD_SECONDS, MAX_SPREAD_SECONDS = 1.0, 5.0
"""By how long candidates that came or went are told later, by chance: a fleet changes all at once."""
_APPLY = "application/apply-patch+yaml"


class KubeError(Exception):
    """An answer that is not a success (`status`), or none (`status` 0)."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class KubeTransport(Protocol):
    """The verbs that an agent needs."""

    async def apply(self, path: str, body: Json) -> Json:
        """Forced server-side apply; raises KubeError."""

    async def get(self, path: str) -> Json:
        """Raises KubeError."""

    async def create(self, path: str, body: Json) -> Json:
        """Raises KubeError."""

    async def close(self) -> None: ...


class KubernetesTransport:
    """`kubernetes.aio` for authentication, TLS and pooling. Connects at the first call."""

    def __init__(self, kubeconfig: str | None) -> None:
        self._kubeconfig = kubeconfig
        self._client: Any = None

    async def apply(self, path: str, body: Json) -> Json:
        query = [("fieldManager", FIELD_MANAGER), ("force", "true")]
        return await self._request("PATCH", path, body, query)

    async def get(self, path: str) -> Json:
        return await self._request("GET", path, None, [])

    async def create(self, path: str, body: Json) -> Json:
        return await self._request("POST", path, body, [], "application/json")

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    async def _request(
        self,
        method: str,
        path: str,
        body: Json | None,
        query: list[tuple[str, str]],
        content_type: str = _APPLY,
    ) -> Json:
        try:
            client = await self._connected()
            _, url, headers, payload, _ = await client.param_serialize(
                method=method,
                resource_path=path,
                query_params=query,
                header_params={"Accept": "application/json", "Content-Type": content_type},
                body=body,
                auth_settings=["BearerToken"],
            )
            response = await client.call_api(method, url, headers, payload, _request_timeout=REQUEST_SECONDS)
            data = await response.read()
        except (TimeoutError, aiohttp.ClientError, OSError, aio_config.ConfigException) as error:
            raise KubeError(0, f"{method} {path}: {type(error).__name__}: {error}") from error
        if not 200 <= response.status <= 299:
            raise KubeError(response.status, f"{method} {path}: {data[:500]!r}")
        answer: Json = json.loads(data)
        return answer

    async def _connected(self) -> Any:
        if self._client is None:
            configuration = aio_client.Configuration()
            if self._kubeconfig is None:
                aio_config.load_incluster_config(  # type: ignore[no-untyped-call]
                    client_configuration=configuration
                )
            else:
                await aio_config.load_kube_config(  # type: ignore[no-untyped-call]
                    config_file=self._kubeconfig, client_configuration=configuration, persist_config=False
                )
            # Else aiohttp has threads look for a proxy and a ~/.netrc at each request.
            configuration.client_session_kwargs = {"trust_env": bool(getproxies_environment())}
            self._client = aio_client.ApiClient(configuration=configuration)
        return self._client


class ClusterRegistration:
    """Two loops: the Lease every ten seconds, the KVNode when it has something to say."""

    def __init__(
        self,
        config: AgentConfig,
        node: Node,
        metrics: Metrics,
        address: str,
        transport: KubeTransport,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        monotonic: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._config = config
        self._node = node
        self._metrics = metrics
        self._address = address
        self._transport = transport
        self._now = now
        self._monotonic = monotonic
        self._jitter = jitter
        self._acquired = micro_time(now())
        self._written: Json | None = None
        self._written_at = 0.0
        self._verified_at = 0.0
        self._generation = 0
        self._released = False
        self._due: float | None = None
        """When candidates that have changed are told at the latest."""
        self._status_lock = asyncio.Lock()
        # A renewal on its way must not arrive after the release.
        self._lease_lock = asyncio.Lock()

    async def run(self) -> None:
        """Until cancelled."""
        await asyncio.gather(self._keep_lease(), self._keep_node())

    async def drain(self) -> None:
        """Writes Draining=True and gives the Lease back; failures are logged, never raised."""
        self._released = True
        ends = (("KVNode", self.write_node), ("Lease", self._release), ("connection", self._transport.close))
        for name, call in ends:
            try:
                async with asyncio.timeout(2 * REQUEST_SECONDS):
                    await call()
            except Exception as error:
                # Also what is no answer of the API server: the next of the three is tried all the same.
                self._failed(name, error)

    async def renew_lease(self) -> None:
        """One renewal; raises KubeError."""
        spec = {
            "holderIdentity": self._node.boot_id,
            "leaseDurationSeconds": LEASE_SECONDS,
            "acquireTime": self._acquired,
            "renewTime": micro_time(self._now()),
        }
        await self._apply_lease(spec)

    async def write_node(self) -> None:
        """Brings the KVNode to what is true now, when the rule of `kvnode` asks for it; raises KubeError."""
        async with self._status_lock:
            if self._generation == 0:
                await self._apply_spec()
            elif self._monotonic() - self._verified_at >= VERIFY_SECONDS:
                await self._verify()
            stamp = self._now().strftime("%Y-%m-%dT%H:%M:%SZ")
            status = kvnode.status_of(self._node, self._generation, stamp, self._written)
            if not kvnode.must_write(self._written, status, self._monotonic() - self._written_at):
                self._due = None
                return
            if kvnode.may_wait(self._written, status) and not self._is_due():
                return
            body = self._node_object()
            body["status"] = status
            try:
                await self._transport.apply(f"{self._node_path()}/status", body)
            except KubeError as error:
                if error.status == 404:
                    self._generation, self._written = 0, None
                raise
            self._written, self._written_at = status, self._monotonic()
            self._due = None

    def _is_due(self) -> bool:
        """Whether candidates that have changed have waited long enough, from the first change on."""
        now = self._monotonic()
        if self._due is None:
            spread = MAX_SPREAD_SECONDS - MIN_SPREAD_SECONDS
            self._due = now + MIN_SPREAD_SECONDS + spread * self._jitter()
        return self._released or now >= self._due

    async def _keep_lease(self) -> None:
        failures = 0
        while not self._released:
            try:
                await self.renew_lease()
                failures = 0
            except Exception as error:
                # Also what is no answer of the API server: without renewals the agent would count as dead.
                failures += 1
                self._failed("Lease", error)
            await asyncio.sleep(
                RENEW_SECONDS if failures == 0 else min(RENEW_SECONDS, self._backoff(failures))
            )

    async def _keep_node(self) -> None:
        failures = 0
        while not self._released:
            self._node.changed.clear()
            try:
                await self.write_node()
                failures = 0
            except Exception as error:
                failures += 1
                self._failed("KVNode", error)
            if failures:
                await asyncio.sleep(self._backoff(failures))
                continue
            wait = POLL_SECONDS
            if self._due is not None:
                wait = min(wait, max(0.01, self._due - self._monotonic()))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._node.changed.wait(), wait)

    async def _verify(self) -> None:
        """Somebody may have deleted the object; then it is made again."""
        try:
            found = await self._transport.get(self._node_path())
        except KubeError as error:
            if error.status != 404:
                raise
            self._written = None
            await self._apply_spec()
            return
        self._verified_at = self._monotonic()
        if found.get("spec") != self._node_object()["spec"]:
            await self._apply_spec()

    async def _apply_spec(self) -> None:
        body = self._node_object()
        name, uid = self._config.node_name, self._config.node_uid
        body["metadata"]["ownerReferences"] = [{"apiVersion": "v1", "kind": "Node", "name": name, "uid": uid}]
        stored = await self._transport.apply(self._node_path(), body)
        self._generation = int(stored["metadata"].get("generation", 1))
        self._verified_at = self._monotonic()

    def _node_object(self) -> Json:
        config = self._config
        return {
            "apiVersion": "kvtier.dev/v1alpha1",
            "kind": "KVNode",
            "metadata": {"name": config.node_name},
            "spec": kvnode.spec_of(config.node_name, self._address, config.pool_namespace, config.pool_name),
        }

    def _node_path(self) -> str:
        return f"/apis/kvtier.dev/v1alpha1/kvnodes/{self._config.node_name}"

    async def _release(self) -> None:
        await self._apply_lease({"leaseDurationSeconds": 1, "renewTime": micro_time(self._now())})

    async def _apply_lease(self, spec: Json) -> None:
        name, namespace = f"kvnode-{self._config.node_name}", self._config.pool_namespace
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            # By this label the operator watches agents' Leases and no others.
            "metadata": {
                "name": name,
                "namespace": namespace,
                "labels": {"kvtier.dev/component": "agent"},
            },
            "spec": spec,
        }
        path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{name}"
        async with self._lease_lock:
            await self._transport.apply(path, body)

    def _failed(self, name: str, error: Exception) -> None:
        self._metrics.registration_failures.labels(name).inc()
        unexpected = not isinstance(error, (KubeError, TimeoutError))
        log.warning("%s: %s", name, error, exc_info=error if unexpected else None)

    def _backoff(self, failures: int) -> float:
        """Exponential from half a second, with up to half of it as jitter."""
        step = min(MAX_BACKOFF_SECONDS, 0.5 * 2.0 ** min(failures - 1, 10))
        return step * (0.5 + 0.5 * self._jitter())


def micro_time(moment: datetime) -> str:
    """metav1.MicroTime."""
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def transport_of(config: AgentConfig) -> KubernetesTransport:
    """By the in-cluster service account, or the kubeconfig that was named. Connects at its first call."""
    kubeconfig = str(config.kubeconfig) if config.kubernetes is KubernetesMode.KUBECONFIG else None
    return KubernetesTransport(kubeconfig)


def make_registration(
    config: AgentConfig, node: Node, metrics: Metrics, endpoints: Endpoints
) -> Registration | None:
    """Through the API server that `transport_of` reaches."""
    address = endpoints.control if config.advertise == config.listen else config.advertise
    return ClusterRegistration(config, node, metrics, address, transport_of(config))
