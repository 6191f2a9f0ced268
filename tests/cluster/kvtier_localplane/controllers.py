"""kube-controller-manager of a local control plane: what it needs, how it is called, whether it is up.

Garbage collection, namespaces, DaemonSets, Jobs and service accounts are controllers, not the API server:
without them owner references are not collected and namespaces stay Terminating. It must not know our
resources.
"""

from __future__ import annotations

import http.client
import ssl
from pathlib import Path

from .cluster import certificate_user, write_kubeconfig
from .pki import CertificateAuthority

NAME = "kube-controller-manager"

# All that works without a kubelet and a scheduler. Node lifecycle is left out on purpose: it would find every
# Node without heartbeats, taint it and evict its Pods.
CONTROLLERS = (
    "clusterrole-aggregation-controller",
    "daemonset-controller",
    "garbage-collector-controller",
    "job-controller",
    "namespace-controller",
    "root-ca-certificate-publisher-controller",
    "serviceaccount-controller",
    "serviceaccount-token-controller",
    "ttl-after-finished-controller",
    "validatingadmissionpolicy-status-controller",
)


def prepare_controllers(
    folder: Path, url: str, servers: CertificateAuthority, users: CertificateAuthority
) -> None:
    """Writes its client certificate and kubeconfig, and the certificate that it serves /healthz with.

    It is the user that the API server's default roles know; each controller then acts as a ServiceAccount of
    its own, with that controller's rights only.
    """
    pki = folder / "pki"
    client = users.issue(f"system:{NAME}", pki, server=False)
    servers.issue(NAME, pki, client=False, san_dns=["localhost"], san_ip=["127.0.0.1"])
    write_kubeconfig(
        folder / f"{NAME}.kubeconfig", url, servers.ca_file, certificate_user(client), user=f"system:{NAME}"
    )


def controllers_argv(program: Path, folder: Path, port: int, ca_file: Path) -> list[str]:
    """It listens on 127.0.0.1 only; ca_file goes into every namespace as kube-root-ca.crt."""
    pki, kubeconfig = folder / "pki", folder / f"{NAME}.kubeconfig"
    return [
        str(program),
        f"--kubeconfig={kubeconfig}",
        f"--authentication-kubeconfig={kubeconfig}",
        # The local API server has no front proxy whose CA could be looked up.
        "--authentication-skip-lookup=true",
        f"--authorization-kubeconfig={kubeconfig}",
        "--bind-address=127.0.0.1",
        f"--secure-port={port}",
        "--permit-port-sharing=true",
        f"--tls-cert-file={pki / f'{NAME}.crt'}",
        f"--tls-private-key-file={pki / f'{NAME}.key'}",
        f"--controllers={','.join(CONTROLLERS)}",
        "--leader-elect=false",
        "--use-service-account-credentials=true",
        f"--service-account-private-key-file={pki / 'service-account.key'}",
        f"--root-ca-file={ca_file}",
        "--kube-api-qps=200",
        "--kube-api-burst=400",
        "--profiling=false",
    ]


def ask(port: int, path: str, context: ssl.SSLContext) -> str:
    """The body of an anonymous GET on 127.0.0.1, or what went wrong. ``ok`` is a healthy server's answer."""
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=5, context=context)
    try:
        connection.request("GET", path)
        return connection.getresponse().read(4096).decode(errors="replace").strip()
    except (OSError, http.client.HTTPException) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        connection.close()
