"""What etcd and kube-apiserver of a local control plane need on disk, and how they are called.

etcd listens on Unix sockets in the plane's private folder only, the API server on 127.0.0.1. This module must
not know how they are started or watched.
"""

from __future__ import annotations

import json
from pathlib import Path

from .cluster import Cluster, certificate_user, write_kubeconfig
from .controllers import prepare_controllers
from .pki import CertificateAuthority, service_account_key

_ISSUER = "https://kubernetes.default.svc"

# Requests that the API server sends to itself say nothing about us, so they are left out.
_AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "None", "users": ["system:apiserver", "system:anonymous"]},
        {"level": "None", "nonResourceURLs": ["/healthz*", "/livez*", "/readyz*", "/openapi*", "/version"]},
        {"level": "Metadata"},
    ],
}


def prepare(folder: Path, port: int, controller_manager: bool) -> Cluster:
    pki = folder / "pki"
    authority = CertificateAuthority("kvtier-local-ca", pki)
    # Users authenticate by another CA than the one of servers, or an agent's certificate would be a user's.
    users = CertificateAuthority("kvtier-user-ca", pki)
    authority.issue(
        "kube-apiserver",
        pki,
        client=False,
        san_dns=["localhost", "kubernetes", "kubernetes.default.svc"],
        san_ip=["127.0.0.1", "10.0.0.1"],
    )
    admin = users.issue("kvtier-admin", pki, server=False, organizations=["system:masters"])
    service_account_key(pki)
    (folder / "audit-policy.json").write_text(json.dumps(_AUDIT_POLICY))
    url = f"https://127.0.0.1:{port}"
    kubeconfig = folder / "admin.kubeconfig"
    write_kubeconfig(kubeconfig, url, authority.ca_file, certificate_user(admin), user="admin")
    if controller_manager:
        prepare_controllers(folder, url, authority, users)
    return Cluster(url, authority.ca_file, kubeconfig, folder, authority, folder / "audit.log")


def etcd_argv(program: Path, folder: Path) -> list[str]:
    # etcd wants host:port in what it advertises, and takes it for a file name in its folder.
    return [
        str(program),
        "--name=local",
        f"--data-dir={folder / 'etcd'}",
        f"--listen-client-urls=unix://{folder / 'etcd.sock'}",
        "--advertise-client-urls=unix://localhost:2",
        "--listen-peer-urls=unix://localhost:1",
        "--initial-advertise-peer-urls=unix://localhost:1",
        "--initial-cluster=local=unix://localhost:1",
        "--unsafe-no-fsync=true",
        "--log-level=warn",
    ]


def apiserver_argv(program: Path, folder: Path, port: int) -> list[str]:
    pki = folder / "pki"
    return [
        str(program),
        "--bind-address=127.0.0.1",
        f"--secure-port={port}",
        "--permit-port-sharing=true",
        "--endpoint-reconciler-type=none",
        f"--etcd-servers=unix://{folder / 'etcd.sock'}",
        f"--tls-cert-file={pki / 'kube-apiserver.crt'}",
        f"--tls-private-key-file={pki / 'kube-apiserver.key'}",
        f"--client-ca-file={pki / 'kvtier-user-ca.crt'}",
        "--authorization-mode=Node,RBAC",
        f"--service-account-issuer={_ISSUER}",
        f"--service-account-key-file={pki / 'service-account.pub'}",
        f"--service-account-signing-key-file={pki / 'service-account.key'}",
        "--service-cluster-ip-range=10.0.0.0/24",
        "--allow-privileged=true",
        "--profiling=false",
        f"--audit-policy-file={folder / 'audit-policy.json'}",
        f"--audit-log-path={folder / 'audit.log'}",
    ]
