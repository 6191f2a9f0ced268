"""What only a cluster with controllers shows: owned objects go with their owner, namespaces end, Pods appear.

There is no kubelet here either, so Pods that are bound to a Node are ended by the test.
"""

from __future__ import annotations

import base64
import hashlib
import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.kvtier_localplane import Cluster, eventually
from tests.cluster.operator_harness import (
    RunningOperator,
    agent_pool,
    apply,
    kv_cache,
    operator,
    tier_class,
    wait_condition,
)
from tests.cluster.rollout_fake_agent import RolloutFakeAgent

# The fixture may have to build a program first; that wait has its own deadline.
pytestmark = pytest.mark.timeout(600, func_only=True)
PLAN = json.dumps({"prompts": [{"digest": "a"}, {"digest": "b"}]})
POLICIES = Path(__file__).resolve().parents[2] / "charts" / "kvtier" / "rbac" / "policies.yaml"


@dataclass(frozen=True)
class World:
    cluster: Cluster
    operator: RunningOperator
    folder: Path

    def names(self, resource: str, namespace: str) -> list[str]:
        """As `kubectl get -o name` has them."""
        found = []
        for made in self.cluster.get(resource, "-n", namespace)["items"]:
            group, slash, _ = made["apiVersion"].rpartition("/")
            kind = made["kind"].lower() + (f".{group}" if slash else "")
            found.append(f"{kind}/{made['metadata']['name']}")
        return found

    def pool(self, namespace: str) -> str:
        """A pool in a new namespace of the same name, and the namespace itself."""
        self.cluster.ensure_namespace(namespace)
        apply(self.cluster, agent_pool(namespace, namespace))
        return namespace

    def node(self, name: str, pool: str) -> None:
        """Without the taint that a Node has until its kubelet reports: no DaemonSet would use it."""
        metadata = {"name": name, "labels": {"kvtier.dev/test-pool": pool}}
        apply(self.cluster, {"apiVersion": "v1", "kind": "Node", "metadata": metadata})
        self.cluster.kubectl("patch", "node", name, "--type=merge", '-p={"spec": {"taints": null}}')


@dataclass(frozen=True)
class Served:
    """A cache that is served in a namespace, and the agent that serves it."""

    namespace: str
    uid: str
    agent: RolloutFakeAgent


def probes(namespace: str) -> dict[str, Any]:
    metadata = {"name": "golden", "namespace": namespace}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"plan.json": PLAN}}


def selector(namespace: str) -> dict[str, Any]:
    return {
        "apiVersion": "kvtier.dev/v1alpha1",
        "kind": "KVSelector",
        "metadata": {"name": "quest-64", "namespace": namespace},
        "spec": {
            "family": "quest",
            "quest": {},
            "budget": {"tokens": 64, "capPolicy": "truncate"},
            "persistentRows": {"sink": 4, "recent": 8},
        },
    }


def long_rollout(namespace: str) -> dict[str, Any]:
    """It stays in its first stage for as long as a test may last."""
    output = {"name": "output", "metric": "outputRelativeError", "max": "0.5", "quantile": 75}
    quality = {"name": "quality", "metric": "taskScoreDrop", "max": "0.25", "probeRef": {"name": "golden"}}
    return {
        "apiVersion": "kvtier.dev/v1alpha1",
        "kind": "KVRollout",
        "metadata": {"name": "rollout", "namespace": namespace},
        "spec": {
            "cacheRef": {"name": "cache"},
            "candidate": {"selectorRef": {"name": "quest-64"}},
            "stages": [
                {"name": "Shadow", "minDuration": "10m", "sampleFraction": "100%", "minSamples": 30},
                {"name": "Canary", "trafficFraction": "50%", "minDuration": "1s", "minSamples": 30},
                {"name": "Full", "soak": "1s", "holdback": "50%", "minSamples": 30},
            ],
            "gates": [
                {**output, "minSamples": 30, "designEffect": "1"},
                {**quality, "scope": "ProbeSet"},
            ],
            "evidence": {"settle": "1s", "warmup": "0s"},
            "leaseTTL": "12s",
            "progressDeadline": "30m",
        },
    }


@pytest.fixture(scope="module")
def world(
    control_plane_with_controllers: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    cluster, folder = control_plane_with_controllers, tmp_path_factory.mktemp("controllers")
    apply(cluster, tier_class("gpu-sim", "gpu"), tier_class("cpu-dram", "cpu"))
    with operator(cluster, folder, "controllers") as running:
        yield World(cluster, running, folder)


def test_a_namespace_gets_its_account_and_the_clusters_ca(world: World) -> None:
    """By these two, Pods of a real cluster find and trust the API server."""
    world.cluster.ensure_namespace("accounts")
    eventually(lambda: "serviceaccount/default" in world.names("serviceaccounts", "accounts"), 60)
    eventually(lambda: "configmap/kube-root-ca.crt" in world.names("configmaps", "accounts"), 60)
    ca = world.cluster.get("configmap", "kube-root-ca.crt", "-n", "accounts")["data"]["ca.crt"]
    assert ca.strip() in world.cluster.ca_file.read_text()


def test_a_token_secret_is_filled_and_is_that_account(world: World, tmp_path: Path) -> None:
    world.cluster.ensure_namespace("accounts")
    eventually(lambda: "serviceaccount/default" in world.names("serviceaccounts", "accounts"), 60)
    annotations = {"kubernetes.io/service-account.name": "default"}
    secret: dict[str, Any] = {"apiVersion": "v1", "kind": "Secret"}
    secret["metadata"] = {"name": "legacy", "namespace": "accounts", "annotations": annotations}
    secret["type"] = "kubernetes.io/service-account-token"
    apply(world.cluster, secret)
    token = eventually(
        lambda: world.cluster.get("secret", "legacy", "-n", "accounts").get("data", {}).get("token"), 60
    )
    config = json.loads(world.cluster.admin_kubeconfig.read_text())
    config["users"][0]["user"] = {"tokenFile": str(tmp_path / "token")}
    (tmp_path / "token").write_bytes(base64.b64decode(token))
    (tmp_path / "config").write_text(json.dumps(config))
    asked = world.cluster.kubectl("auth", "whoami", "-o", "json", kubeconfig=tmp_path / "config").stdout
    assert json.loads(asked)["status"]["userInfo"]["username"] == "system:serviceaccount:accounts:default"


def test_the_shipped_admission_policies_type_check(world: World) -> None:
    """The API server takes an expression that can never be evaluated; the controller says so."""
    names = [
        one["metadata"]["name"]
        for one in yaml.safe_load_all(POLICIES.read_text())
        if one and one["kind"] == "ValidatingAdmissionPolicy"
    ]
    assert names

    def status(name: str) -> dict[str, Any]:
        found = world.cluster.get("validatingadmissionpolicy", name)
        seen = found.get("status") or {}
        return dict(seen) if seen.get("observedGeneration") == found["metadata"]["generation"] else {}

    for name in names:
        checked = eventually(lambda name=name: status(name), 60, what=f"{name} is checked")
        assert checked.get("typeChecking", {}).get("expressionWarnings", []) == []


def test_the_pods_of_a_pool_are_made_and_counted(world: World) -> None:
    """The DaemonSet's template passes admission, and what its controller reports is in the pool's status."""
    namespace = world.pool("ctl-pods")
    world.node("ctl-pods-a", namespace)
    [pod] = eventually(lambda: world.names("pods", namespace), 60)
    assert pod.startswith(f"pod/kvtier-agent-{namespace}-")
    eventually(
        lambda: world.cluster.get("agentpool", namespace, "-n", namespace)["status"].get("updated") == 1,
        60,
        what="the pool's status has what the DaemonSet controller reported",
    )


def test_a_deleted_pool_takes_all_that_it_became_with_it(world: World) -> None:
    namespace = world.pool("ctl-pool")
    world.node("ctl-pool-a", namespace)
    name = f"kvtier-agent-{namespace}"
    owned = {
        f"daemonset.apps/{name}",
        f"serviceaccount/{name}",
        f"service/{name}",
        f"rolebinding.rbac.authorization.k8s.io/{name}",
    }
    kinds = "daemonsets,serviceaccounts,services,rolebindings"
    eventually(lambda: owned <= set(world.names(kinds, namespace)), 60, what="the pool's objects")
    eventually(lambda: world.names("pods", namespace), 60, what="the DaemonSet's Pod")
    world.cluster.kubectl("delete", "agentpool", namespace, "-n", namespace, "--timeout=60s")
    eventually(lambda: not owned & set(world.names(kinds, namespace)), 60, what="the objects are collected")
    eventually(lambda: not world.names("pods", namespace), 60, what="its Pod is collected")
    eventually(world.operator.idle, 60)
    assert not owned & set(world.names(kinds, namespace)), "the operator made them again"


@pytest.fixture
def served(world: World) -> Iterator[Served]:
    """A namespace with a pool, one agent, a ready cache and a rollout that holds a candidate in Shadow."""
    namespace = world.pool(f"ctl-served-{uuid.uuid4().hex[:6]}")
    agent = RolloutFakeAgent(
        world.cluster,
        world.folder,
        f"{namespace}-a",
        namespace=namespace,
        pool=namespace,
        lease_seconds=6 * 3600,
        probe_digest=f"sha256:{hashlib.sha256(PLAN.encode()).hexdigest()}",
    )
    try:
        agent.start()
        apply(world.cluster, selector(namespace), probes(namespace))
        apply(world.cluster, kv_cache("cache", namespace, namespace, contract={"exactness": "approximate"}))
        cache = wait_condition(world.cluster, "kvcache/cache", namespace, "Ready", "True", timeout=60)
        uid = cache["metadata"]["uid"]
        apply(world.cluster, long_rollout(namespace))
        eventually(lambda: agent.state.candidate(uid), 60, what="the agent holds the candidate")
        yield Served(namespace, uid, agent)
    finally:
        # Its Lease is not given back: a test may have deleted the namespace and with it the agent's identity.
        agent.stop(release=False)
        agent.cleanup()


def test_a_probe_job_gets_a_pod_without_rights_and_goes_with_its_rollout(
    world: World, served: Served
) -> None:
    """Also: an edited plan ends the Job of the one before."""
    namespace = served.namespace

    def edit(seed: int) -> None:
        body = {"model": {"path": "/models/tiny"}, "tasks": ["passkey"], "lengths": [128], "seeds": [seed]}
        apply(world.cluster, {**probes(namespace), "data": {"plan.json": json.dumps(body)}})

    def jobs() -> list[dict[str, Any]]:
        return list(world.cluster.get("jobs", "-n", namespace)["items"])

    edit(1)
    first = eventually(lambda: [job["metadata"]["name"] for job in jobs()], 60, what="a Job is made")
    own = ("pods", "-n", namespace, "-l", f"batch.kubernetes.io/job-name={first[0]}")
    [pod] = eventually(lambda: world.cluster.get(*own)["items"], 60, what="the Job controller makes its Pod")
    assert pod["spec"]["serviceAccountName"] == first[0]
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert not any("projected" in volume for volume in pod["spec"]["volumes"]), "no token is mounted"
    [container] = pod["spec"]["containers"]
    assert container["image"] == "kvtier/agent:test"
    assert f"--candidate={served.agent.state.candidate(served.uid)}" in container["args"]
    account = f"system:serviceaccount:{namespace}:{first[0]}"
    asked = ("auth", "can-i", "get", "configmaps", "-n", namespace, f"--as={account}")
    assert world.cluster.kubectl(*asked, check=False).stdout.strip() == "no"
    edit(2)
    eventually(
        lambda: [job["metadata"]["name"] for job in jobs() if job["metadata"]["name"] not in first],
        60,
        what="the edited plan has a Job of its own",
    )
    eventually(lambda: first[0] not in [job["metadata"]["name"] for job in jobs()], 60, what="the old ends")
    world.cluster.kubectl("delete", "kvrollout", "rollout", "-n", namespace, "--timeout=60s")
    eventually(lambda: not jobs(), 60, what="the Job is collected")
    for kind in ("serviceaccounts", "pods"):
        eventually(
            lambda kind=kind: not [one for one in world.names(kind, namespace) if "-probe-" in one],
            60,
            what=f"its {kind} are collected",
        )


def test_revisions_go_with_their_cache(world: World, served: Served) -> None:
    world.cluster.kubectl("delete", "kvrollout", "rollout", "-n", served.namespace, "--timeout=60s")

    def revisions() -> list[str]:
        listed = world.cluster.get("controllerrevisions", "-n", served.namespace)["items"]
        return [
            one["metadata"]["name"]
            for one in listed
            if any(owner["uid"] == served.uid for owner in one["metadata"].get("ownerReferences", []))
        ]

    assert len(revisions()) == 2, "the baseline's and the candidate's"
    world.cluster.kubectl("delete", "kvcache", "cache", "-n", served.namespace, "--timeout=60s")
    eventually(lambda: not revisions(), 60, what="the revisions are collected")
    assert served.uid in served.agent.state.removed


def test_a_namespace_ends_while_its_cache_is_served(world: World, served: Served) -> None:
    """All its objects are deleted at once, in no order; the operator releases what has a finalizer."""
    world.cluster.kubectl("delete", "namespace", served.namespace, "--wait=false")
    # A kubelet's part: without one the agent's Pod stays.
    world.cluster.kubectl("delete", "pod", "--all", "-n", served.namespace, "--force", "--grace-period=0")

    def explain() -> str:
        kinds = "kvcaches,kvrollouts,agentpools,daemonsets,pods,leases"
        left = world.cluster.kubectl("get", kinds, "-n", served.namespace, "-o", "yaml", check=False).stdout
        return world.cluster.kubectl("get", "namespace", served.namespace, "-o", "yaml").stdout + left

    gone = ("get", "namespace", served.namespace, "--ignore-not-found", "-o", "name")
    eventually(lambda: not world.cluster.kubectl(*gone).stdout, 90, on_failure=explain)
    assert served.uid in served.agent.state.removed
