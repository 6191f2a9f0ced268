"""Identities on the local control plane: who a token or a certificate speaks for, and who not."""

from __future__ import annotations

import http.client
import json
import os
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.cluster.kvtier_localplane import (
    ChoiceError,
    Cluster,
    KubectlError,
    Refused,
    eventually,
    open_cluster,
)
from tests.cluster.kvtier_localplane.cluster import kubectl_environment

NAMESPACE = "identity"
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def namespace(control_plane: Cluster) -> str:
    control_plane.ensure_namespace(NAMESPACE)
    account: dict[str, Any] = {"apiVersion": "v1", "kind": "ServiceAccount"}
    account["metadata"] = {"name": "worker", "namespace": NAMESPACE}
    containers = [{"name": "c", "image": "none"}]
    pod: dict[str, Any] = {"apiVersion": "v1", "kind": "Pod"}
    pod["metadata"] = {"name": "worker-pod", "namespace": NAMESPACE}
    pod["spec"] = {"nodeName": "node-7", "serviceAccountName": "worker", "containers": containers}
    for manifest in (account, pod):
        control_plane.kubectl("apply", "--server-side", "-f", "-", input=json.dumps(manifest))
    return NAMESPACE


def _whoami(cluster: Cluster, kubeconfig: Path) -> dict[str, Any]:
    answer = cluster.kubectl("auth", "whoami", "-o", "json", kubeconfig=kubeconfig).stdout
    user: dict[str, Any] = json.loads(answer)["status"]["userInfo"]
    return user


def test_a_pod_bound_token_names_its_node(control_plane: Cluster, namespace: str, tmp_path: Path) -> None:
    bound = control_plane.service_account_kubeconfig(
        namespace, "worker", tmp_path / "bound", bound_pod="worker-pod", duration_s=600
    )
    user = _whoami(control_plane, bound)
    assert user["username"] == "system:serviceaccount:identity:worker"
    assert user["extra"]["authentication.kubernetes.io/node-name"] == ["node-7"]
    assert bound.stat().st_mode & 0o077 == 0

    free = control_plane.service_account_kubeconfig(namespace, "worker", tmp_path / "free")
    assert "authentication.kubernetes.io/node-name" not in _whoami(control_plane, free)["extra"]


def test_a_service_account_has_no_right_by_itself(
    control_plane: Cluster, namespace: str, tmp_path: Path
) -> None:
    bound = control_plane.service_account_kubeconfig(namespace, "worker", tmp_path / "bound")
    with pytest.raises(KubectlError, match="forbidden"):
        control_plane.kubectl("get", "configmaps", "-n", namespace, kubeconfig=bound)


def test_a_certificate_for_agents_is_no_user_of_the_api_server(
    control_plane: Cluster, tmp_path: Path
) -> None:
    """Else an agent's key would be a login, and its common name could be anybody's."""
    issued = control_plane.issue_certificate("system:masters", tmp_path, san_ip=["127.0.0.1"])
    context = ssl.create_default_context(cafile=str(control_plane.ca_file))
    context.load_cert_chain(issued.cert_file, issued.key_file)
    address = urlsplit(control_plane.url)
    connection = http.client.HTTPSConnection(
        address.hostname or "", address.port, timeout=10, context=context
    )
    connection.request("GET", "/api/v1/namespaces")
    assert connection.getresponse().status == 401
    connection.close()


def test_kubectl_does_not_see_the_users_settings(
    control_plane: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "not-there"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.1.1.1")
    assert "Server Version: v1." in control_plane.kubectl("version").stdout
    seen = kubectl_environment(tmp_path / "mine", os.environ)
    assert {name: value for name, value in seen.items() if name.startswith("KUBE")} == {
        "KUBECONFIG": str(tmp_path / "mine"),
        "KUBERC": "off",
    }


@pytest.mark.parametrize(
    ("environment", "wish"),
    [
        pytest.param({"KVTIER_KUBECONFIG": "config"}, "", id="named"),
        pytest.param({"KUBECONFIG": "config"}, "own", id="own"),
        pytest.param({"KUBECONFIG": "config", "KVTIER_CLUSTER": "own"}, "", id="own-by-environment"),
        pytest.param({"KUBECONFIG": "not-there:config"}, "own", id="own-in-a-list"),
    ],
)
def test_a_cluster_that_the_user_asks_for_is_used_and_left_alone(
    control_plane: Cluster,
    namespace: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    wish: str,
) -> None:
    """Here another handle on the same server, by a kubeconfig whose CA is a relative path."""
    monkeypatch.delenv("KVTIER_CLUSTER", raising=False)
    config = json.loads(control_plane.admin_kubeconfig.read_text())
    del config["clusters"][0]["cluster"]["certificate-authority-data"]
    config["clusters"][0]["cluster"]["certificate-authority"] = "ca.crt"
    (tmp_path / "ca.crt").write_bytes(control_plane.ca_file.read_bytes())
    (tmp_path / "config").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    said: list[str] = []
    with open_cluster(wish=wish, say=said.append) as named:
        assert control_plane.url in said[0]
        assert named.url == control_plane.url
        assert named.audit_log is None
        token = named.service_account_kubeconfig(namespace, "worker", tmp_path / "worker")
        assert _whoami(named, token)["username"] == "system:serviceaccount:identity:worker"
        issued = named.issue_certificate("agent", tmp_path / "tls")
        assert issued.ca_file.read_bytes() in named.ca_file.read_bytes()
    assert not named.folder.exists()
    assert control_plane.kubectl("get", "--raw", "/readyz").stdout == "ok"


@pytest.mark.parametrize(
    ("content", "reason", "message"),
    [
        pytest.param("{}", Refused.KUBECONFIG_UNUSABLE, "no cluster in it", id="no-context"),
        pytest.param("]", Refused.KUBECONFIG_UNUSABLE, "no cluster in it", id="no-yaml"),
        pytest.param(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}],
                    "contexts": [{"name": "c", "context": {"cluster": "c", "user": ""}}],
                    "current-context": "c",
                }
            ),
            Refused.CLUSTER_UNREACHABLE,
            "https://127.0.0.1:1 does not answer",
            id="nobody-answers",
        ),
    ],
)
def test_an_own_cluster_that_cannot_be_had_is_a_typed_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, reason: Refused, message: str
) -> None:
    (tmp_path / "config").write_text(content)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with pytest.raises(ChoiceError, match=message) as refused, open_cluster(wish="own"):
        pass
    assert refused.value.reason is reason


def test_requests_are_in_the_audit_log(control_plane: Cluster, namespace: str) -> None:
    assert control_plane.audit_log is not None
    control_plane.kubectl("get", "configmap", "only-for-the-audit-log", "-n", namespace, check=False)

    def mine() -> list[str]:
        # An answer may arrive before its line, and a line that is being written has no end yet.
        assert control_plane.audit_log is not None
        *whole, _ = control_plane.audit_log.read_text().split("\n")
        events = [json.loads(line) for line in whole]
        return [
            one["verb"] for one in events if one.get("objectRef", {}).get("name") == "only-for-the-audit-log"
        ]

    assert eventually(mine, 60) == ["get"]
