"""A control plane, the operator and simulated agents for a bench: started in order, ended together.

Agents are registered as production ones are: a Node, a Pod on it, and a token that is bound to that Pod.
Their state directories lie in memory, since as many nodes would have as many disks. It must not measure.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.bench.release_api import Admin, ApiFailed, Json, at_once, until
from tests.bench.release_objects import (
    GROUP,
    PROBES,
    SELECTORS,
    Sizes,
    agent_pool,
    collection,
    node_name,
    pool_name,
    probe_plan,
    selector,
)
from tests.bench.release_processes import OPERATOR, Child, start_agents, start_operator
from tests.cluster.kvtier_localplane import Cluster, LocalControlPlane
from tests.cluster.kvtier_localplane.cluster import write_kubeconfig
from tests.cluster.operator_harness import SYSTEM, install, tier_class
from tests.release_agents.agent import Place

LIVE_SECONDS = 900.0
COLLECTS_AT = "400"
"""GOGC of the API server, etcd and the peer, unless the environment says another: by default a third of what
a write costs the API server is the collection of garbage, on processors that all share here."""
TOKEN_SECONDS = 24 * 3600
MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class World:
    sizes: Sizes
    cluster: Cluster
    admin: Admin
    operator: Child
    agents: Child
    folder: Path
    api_server: int
    """Its process."""


@contextlib.asynccontextmanager
async def open_world(sizes: Sizes, *, all_read: bool = False) -> AsyncIterator[World]:
    """Everything but caches and rollouts; every agent is live when it is yielded. all_read: every agent notes
    when it is read, not only the first one of its pool."""
    async with contextlib.AsyncExitStack() as stack:
        os.environ.setdefault("GOGC", COLLECTS_AT)
        plane = LocalControlPlane()
        await asyncio.to_thread(plane.start)
        stack.callback(plane.stop)
        cluster = plane.cluster
        folder = _folder()
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        admin = Admin(cluster.url, cluster.admin_kubeconfig, folder)
        stack.push_async_callback(admin.close)
        await asyncio.to_thread(install, cluster)
        operator = await _operator(cluster, folder)
        stack.push_async_callback(operator.close)
        await _pools(admin, sizes)
        places = await _places(cluster, admin, sizes, folder)
        agents = await start_agents(_agents_spec(places, all_read=all_read), folder)
        stack.push_async_callback(agents.close)
        await _all_live(admin, sizes)
        yield World(sizes, cluster, admin, operator, agents, folder, plane.pids["kube-apiserver"])


def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="kvtier-bench-", dir=MEMORY if MEMORY.is_dir() else None))


async def _operator(cluster: Cluster, folder: Path) -> Child:
    kubeconfig = folder / "operator.kubeconfig"
    await asyncio.to_thread(
        cluster.service_account_kubeconfig, SYSTEM, OPERATOR, kubeconfig, duration_s=TOKEN_SECONDS
    )
    tls = cluster.issue_certificate(OPERATOR, folder / "operator-tls")
    return await start_operator(kubeconfig, SYSTEM, tls, folder)


async def _pools(admin: Admin, sizes: Sizes) -> None:
    """Classes, selectors, probe sets and pools; and the ServiceAccounts that the operator makes for them."""
    for name, medium in (("gpu-sim", "gpu"), ("cpu-dram", "cpu")):
        await admin.create(f"{GROUP}/tierclasses", tier_class(name, medium))
    for space in sizes.spaces:
        named = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": space}}
        await admin.create("/api/v1/namespaces", named)
        await admin.create(f"/api/v1/namespaces/{space}/configmaps", probe_plan(space))
        for name in SELECTORS:
            await admin.create(collection(space, "kvselectors"), selector(name, space))
    for pool in range(sizes.pools):
        space = sizes.namespace(pool)
        await admin.create(collection(space, "agentpools"), agent_pool(pool_name(pool), space))
    for pool in range(sizes.pools):
        await _account(admin, sizes.namespace(pool), _account_name(pool))


def _account_name(pool: int) -> str:
    return f"kvtier-agent-{pool_name(pool)}"


async def _account(admin: Admin, namespace: str, name: str) -> None:
    async with asyncio.timeout(LIVE_SECONDS):
        while True:
            try:
                await admin.get(f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}")
                return
            except ApiFailed as error:
                if error.status != 404:
                    raise
            await asyncio.sleep(0.1)


async def _places(cluster: Cluster, admin: Admin, sizes: Sizes, folder: Path) -> list[Place]:
    async def place(index: int) -> Place:
        name, pool = node_name(index), sizes.pool_of_agent(index)
        space, account = sizes.namespace(pool), _account_name(pool)
        labels = {"kvtier.dev/test-pool": pool_name(pool)}
        body: Json = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}
        node = await admin.create("/api/v1/nodes", body)
        pod = await admin.create(
            f"/api/v1/namespaces/{space}/pods",
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": f"agent-{name}", "namespace": space},
                "spec": {
                    "nodeName": name,
                    "serviceAccountName": account,
                    "containers": [{"name": "agent", "image": "kvtier/agent:bench"}],
                },
            },
        )
        bound = {"kind": "Pod", "apiVersion": "v1", "name": f"agent-{name}", "uid": pod["metadata"]["uid"]}
        asked = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": TOKEN_SECONDS, "boundObjectRef": bound},
        }
        path = f"/api/v1/namespaces/{space}/serviceaccounts/{account}/token"
        token = (await admin.create(path, asked))["status"]["token"]
        file = folder / "agents" / f"{name}.kubeconfig"
        write_kubeconfig(file, cluster.url, cluster.ca_file, {"token": token}, user=account)
        tls = cluster.issue_certificate(name, folder / "agents-tls")
        uid, state = node["metadata"]["uid"], folder / "state" / name
        return Place(
            *(name, uid, space, pool_name(pool)),
            *(str(tls.cert_file), str(tls.key_file), str(tls.ca_file)),
            *(str(file), str(state)),
        )

    return await at_once([lambda n=index: place(n) for index in range(sizes.agents)])  # type: ignore[misc]


def _agents_spec(places: list[Place], *, all_read: bool) -> Json:
    """Of each pool the first agent speaks for all: the operator reads those of a pool at once."""
    first: dict[tuple[str, str], str] = {}
    for one in places:
        first.setdefault((one.namespace, one.pool), one.node)
    return {
        "operator": OPERATOR,
        "probeDigest": PROBES,
        "agents": [asdict(one) for one in places],
        "reads": [one.node for one in places] if all_read else sorted(first.values()),
    }


async def _all_live(admin: Admin, sizes: Sizes) -> None:
    """By the pools' own statuses, so that the operator has seen them."""
    ready = 0

    async def look() -> None:
        nonlocal ready
        while ready < sizes.agents:
            found = await admin.items(f"{GROUP}/agentpools")
            ready = sum(int((one.get("status") or {}).get("ready") or 0) for one in found)
            await asyncio.sleep(0.5)

    looking = asyncio.create_task(look())
    try:
        await until(looking.done, LIVE_SECONDS, lambda: f"{ready} of {sizes.agents} agents are live")
        await looking
    finally:
        looking.cancel()
