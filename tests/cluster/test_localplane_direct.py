"""What is read and applied without kubectl is what kubectl reads and applies, refusals included."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from typing import Any

import pytest

from tests.cluster.kvtier_localplane import Cluster, KubectlError
from tests.cluster.kvtier_localplane.direct import Direct, parse

NAMESPACE = "direct"


@pytest.fixture(scope="module")
def cluster(control_plane: Any) -> Cluster:
    """Two objects with labels, another of another kind, and an account that may do nothing."""
    made: Cluster = getattr(control_plane, "cluster", control_plane)
    made.ensure_namespace(NAMESPACE)
    for name, label in (("one", "odd"), ("two", "even")):
        metadata = {"name": name, "namespace": NAMESPACE, "labels": {"number": label}}
        made.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"k": name}})
    account = {"name": "nobody", "namespace": NAMESPACE}
    made.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": account})
    return made


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("configmap", "one", "-n", NAMESPACE), id="one"),
        pytest.param(("cm/two", "-n", NAMESPACE), id="slash-and-short-name"),
        pytest.param(("configmaps", "-n", NAMESPACE), id="all"),
        pytest.param(("configmaps,serviceaccounts", "-n", NAMESPACE), id="two-kinds"),
        pytest.param(("configmaps", "-l", "number=odd", "-n", NAMESPACE), id="label"),
        pytest.param(
            ("cm", "--field-selector", "metadata.name=two", "--namespace", NAMESPACE), id="field-selector"
        ),
        pytest.param(("cm", "-l", "number=even", "-A"), id="everywhere"),
        pytest.param(("namespace", NAMESPACE), id="of-no-namespace"),
        pytest.param(("clusterrole", "cluster-admin", "-n", NAMESPACE), id="namespace-that-means-nothing"),
        pytest.param(("roles.rbac.authorization.k8s.io", "-n", "kube-system"), id="full-name"),
        pytest.param(("deployments", "-n", NAMESPACE), id="none"),
    ],
)
def test_reads_what_kubectl_reads(cluster: Cluster, words: tuple[str, ...]) -> None:
    assert parse(words) is not None
    assert cluster.get(*words) == json.loads(cluster.kubectl("get", *words, "-o", "json").stdout)


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("configmap", "three", "-n", NAMESPACE), id="not-there"),
        pytest.param(("nonsense", "-n", NAMESPACE), id="no-such-kind"),
        pytest.param(("configmap", "-l", "((", "-n", NAMESPACE), id="bad-selector"),
    ],
)
def test_refuses_what_kubectl_refuses(cluster: Cluster, words: tuple[str, ...]) -> None:
    told = cluster.kubectl("get", *words, "-o", "json", check=False)
    with pytest.raises(KubectlError) as refused:
        cluster.get(*words)
    assert refused.value.returncode == told.returncode == 1
    assert refused.value.stderr.split(":")[0] == told.stderr.split(":")[0]


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("cm,sa", "one"), id="names-of-several-kinds"),
        pytest.param(("cm", "one", "two"), id="two-names"),
        pytest.param(("cm/one", "sa/two"), id="two-slashes"),
        pytest.param(("cm", "one", "--ignore-not-found"), id="another-option"),
        pytest.param(("--raw", "/readyz"), id="raw"),
    ],
)
def test_leaves_to_kubectl_what_it_does_not_know(words: tuple[str, ...]) -> None:
    assert parse(words) is None


def test_applies_as_kubectl_does(cluster: Cluster) -> None:
    """Owners and conflicts are those of the manager's name; a field that is not in the schema is refused."""
    metadata = {"name": "applied", "namespace": NAMESPACE}
    made = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"k": "first"}}
    cluster.apply(made, manager="first")
    with pytest.raises(KubectlError, match="conflict"):
        cluster.apply({**made, "data": {"k": "second"}}, manager="second", force=False)
    cluster.apply({**made, "data": {"k": "second"}}, manager="second")
    told = json.loads(
        cluster.kubectl("get", "cm", "applied", "-n", NAMESPACE, "-o", "json", "--show-managed-fields").stdout
    )
    assert told["data"] == {"k": "second"}
    owners = {(one["manager"], one["operation"]) for one in told["metadata"]["managedFields"]}
    assert ("second", "Apply") in owners
    with pytest.raises(KubectlError, match=r"unknown field|field not declared"):
        cluster.apply({**made, "surplus": 1})


def test_asks_as_the_user_of_the_kubeconfig(cluster: Cluster) -> None:
    nobody = cluster.service_account_kubeconfig(NAMESPACE, "nobody", cluster.folder / "nobody.kubeconfig")
    with pytest.raises(KubectlError, match=f"Forbidden.*system:serviceaccount:{NAMESPACE}:nobody"):
        cluster.get("cm", "one", "-n", NAMESPACE, kubeconfig=nobody)


def test_a_cluster_of_the_users_is_asked_by_kubectl(cluster: Cluster) -> None:
    """Its kubeconfig may name programs that log in."""
    theirs = replace(cluster, audit_log=None, _direct={})
    assert theirs.get("cm", "one", "-n", NAMESPACE) == cluster.get("cm", "one", "-n", NAMESPACE)
    theirs.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    assert theirs._direct == {}


def test_comes_again_when_the_server_asks_for_it_as_kubectl_does(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kind whose storage is being made ready answers 429 for a moment."""
    send, refusals = Direct._send, [429, 503]

    def busy(self: Direct, *request: Any) -> tuple[int, bytes, str]:
        if refusals:
            return refusals.pop(), b"{}", "0"
        return send(self, *request)

    monkeypatch.setattr(Direct, "_send", busy)
    assert cluster.get("cm", "one", "-n", NAMESPACE)["data"] == {"k": "one"}
    assert refusals == []


def test_threads_ask_beside_each_other(cluster: Cluster) -> None:
    seen: list[str] = []

    def ask() -> None:
        seen.append(cluster.get("cm", "one", "-n", NAMESPACE)["data"]["k"])

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seen == ["one"] * 8
