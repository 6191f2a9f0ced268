"""The chart's RBAC and policies on a real API server: who may write what, and what a refusal says."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.kvtier_localplane import Cluster, eventually

REPOSITORY = Path(__file__).resolve().parents[2]
POOL_NAMESPACE = "rbac-pool"
pytestmark = pytest.mark.timeout(600)

NODE_A, NODE_B = "node-a", "node-b"


@dataclass(frozen=True)
class Installed:
    """The cluster with CRDs, RBAC and policies applied, and kubeconfigs of those who act in the tests."""

    cluster: Cluster
    identities: dict[str, Path]

    def apply(self, who: str, manifest: dict[str, Any], *options: str) -> subprocess.CompletedProcess[str]:
        return self.cluster.kubectl(
            "apply", "--server-side", "--validate=false", *options, "-f", "-",
            input=json.dumps(manifest), kubeconfig=self.identities.get(who), check=False,
        )  # fmt: skip

    def can(self, who: str, verb: str, resource: str, namespace: str = POOL_NAMESPACE) -> bool:
        asked = self.cluster.kubectl(
            "auth", "can-i", verb, resource, "-n", namespace, kubeconfig=self.identities[who], check=False
        )
        return asked.stdout.strip() == "yes"


@pytest.fixture(scope="module")
def installed(control_plane: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("identities")
    control_plane.ensure_namespace("kvtier-system")
    control_plane.ensure_namespace(POOL_NAMESPACE)
    control_plane.apply_files(sorted((REPOSITORY / "charts" / "kvtier" / "crds").glob("*.yaml")))
    control_plane.apply_files(sorted((REPOSITORY / "charts" / "kvtier" / "rbac").glob("*.yaml")))
    identities = {
        "operator": control_plane.service_account_kubeconfig(
            "kvtier-system", "kvtier-operator", folder / "operator"
        )
    }
    as_admin = Installed(control_plane, {})
    for account in ("kvtier-agent-pool", "kvtier-agent-other"):
        assert as_admin.apply("admin", service_account(account)).returncode == 0
        assert as_admin.apply("admin", agent_binding(account)).returncode == 0
    for account, node, who in (
        ("kvtier-agent-pool", NODE_A, "agent-a"),
        ("kvtier-agent-pool", NODE_B, "agent-b"),
        ("kvtier-agent-other", NODE_A, "agent-of-other-pool"),
    ):
        pod = f"{who}-pod"
        assert as_admin.apply("admin", agent_pod(pod, account, node)).returncode == 0
        identities[who] = control_plane.service_account_kubeconfig(
            POOL_NAMESPACE, account, folder / who, bound_pod=pod
        )
    identities["unbound"] = control_plane.service_account_kubeconfig(
        POOL_NAMESPACE, "kvtier-agent-pool", folder / "unbound"
    )
    made = Installed(control_plane, identities)
    # A new policy takes a moment: wait until it is seen to refuse, as a dry run.
    eventually(lambda: made.apply("admin", kv_node("probe"), "--dry-run=server").returncode != 0, 60)
    eventually(lambda: made.apply("unbound", lease("kvnode-probe"), "--dry-run=server").returncode != 0, 60)
    return made


def service_account(name: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": _meta(name)}


def agent_binding(account: str) -> dict[str, Any]:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": _meta(account),
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "kvtier-agent"},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": POOL_NAMESPACE}],
    }


def agent_pod(name: str, account: str, node: str) -> dict[str, Any]:
    containers = [{"name": "agent", "image": "kvtier/agent"}]
    spec = {"nodeName": node, "serviceAccountName": account, "containers": containers}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": _meta(name), "spec": spec}


def kv_node(name: str) -> dict[str, Any]:
    spec = {
        "nodeName": name,
        "address": "127.0.0.1:7000",
        "poolRef": {"namespace": POOL_NAMESPACE, "name": "pool"},
    }
    return {"apiVersion": "kvtier.dev/v1alpha1", "kind": "KVNode", "metadata": {"name": name}, "spec": spec}


def lease(name: str) -> dict[str, Any]:
    spec = {"holderIdentity": "boot", "leaseDurationSeconds": 10}
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": _meta(name), "spec": spec}


def _meta(name: str) -> dict[str, str]:
    return {"name": name, "namespace": POOL_NAMESPACE}


@pytest.mark.parametrize(
    "who, manifest",
    [
        pytest.param("agent-a", kv_node(NODE_A), id="own-kvnode"),
        pytest.param("agent-b", kv_node(NODE_B), id="own-kvnode-of-the-other"),
        pytest.param("agent-a", lease(f"kvnode-{NODE_A}"), id="own-lease"),
    ],
)
def test_an_agent_writes_what_is_its_own(installed: Installed, who: str, manifest: dict[str, Any]) -> None:
    done = installed.apply(who, manifest)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "who, manifest, message",
    [
        pytest.param(
            "agent-b",
            kv_node(NODE_A),
            "KVNode node-a may be written by the agent on that node only; this token names node node-b",
            id="kvnode-of-another-node",
        ),
        pytest.param("unbound", kv_node(NODE_A), "this token names no node", id="token-without-a-pod"),
        pytest.param("admin", kv_node(NODE_A), "this token names no node", id="cluster-admin"),
        pytest.param(
            "agent-of-other-pool",
            kv_node(NODE_A),
            "agents of pool rbac-pool/pool run as ServiceAccount kvtier-agent-pool there",
            id="account-of-another-pool",
        ),
        pytest.param("operator", kv_node(NODE_A), "this token names no node", id="operator"),
        pytest.param(
            "agent-b",
            lease(f"kvnode-{NODE_A}"),
            "Lease kvnode-node-a is not this agent's; its own is kvnode-node-b",
            id="lease-of-another-node",
        ),
        pytest.param("agent-b", lease("kvtier-operator"), "is not this agent's", id="lease-of-an-operator"),
    ],
)
def test_a_write_to_what_is_not_ones_own_is_refused(
    installed: Installed, who: str, manifest: dict[str, Any], message: str
) -> None:
    done = installed.apply(who, manifest, "--force-conflicts")
    assert done.returncode != 0
    assert message in done.stderr


def test_an_agents_token_tells_its_nodes_uid_without_a_right_to_read_nodes(installed: Installed) -> None:
    assert installed.can("agent-a", "create", "selfsubjectreviews.authentication.k8s.io")


@pytest.mark.parametrize(
    "who, verb, resource, namespace",
    [
        pytest.param("operator", "get", "secrets", POOL_NAMESPACE, id="operator-secrets"),
        pytest.param("operator", "create", "pods", POOL_NAMESPACE, id="operator-pods"),
        pytest.param("operator", "update", "leases", POOL_NAMESPACE, id="operator-leases-of-agents"),
        pytest.param(
            "operator", "bind", "clusterroles/cluster-admin", POOL_NAMESPACE, id="operator-bind-admin"
        ),
        pytest.param(
            "operator", "create", "clusterrolebindings", POOL_NAMESPACE, id="operator-cluster-bindings"
        ),
        pytest.param("operator", "delete", "kvnodes", POOL_NAMESPACE, id="operator-deletes-a-kvnode"),
        pytest.param("agent-a", "get", "kvcaches", POOL_NAMESPACE, id="agent-caches"),
        pytest.param("agent-a", "get", "leases", "kvtier-system", id="agent-leases-elsewhere"),
        pytest.param("agent-a", "delete", "kvnodes", POOL_NAMESPACE, id="agent-deletes-a-kvnode"),
        pytest.param("agent-a", "get", f"nodes/{NODE_A}", POOL_NAMESPACE, id="agent-reads-its-node"),
        pytest.param("agent-a", "list", "nodes", POOL_NAMESPACE, id="agent-lists-nodes"),
        pytest.param("agent-a", "patch", "nodes", POOL_NAMESPACE, id="agent-patches-a-node"),
    ],
)
def test_a_right_that_nobody_needs_is_not_given(
    installed: Installed, who: str, verb: str, resource: str, namespace: str
) -> None:
    assert not installed.can(who, verb, resource, namespace)
