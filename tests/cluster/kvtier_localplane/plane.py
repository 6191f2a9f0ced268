"""Starts and stops a real control plane: etcd and kube-apiserver on loopback, for one test run or demo.

etcd listens on Unix sockets in a private folder only. The API server's port is held by a socket of ours from
before its start (SO_REUSEPORT), so nobody can take it in between. A supervisor process ends both when this
process goes away, however it goes. It must not know our resources.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from .build import ControlPlaneBinaries, Say, find_binaries, say_to_stderr
from .cluster import (
    Cluster,
    certificate_user,
    existing_cluster,
    remove_folder,
    write_kubeconfig,
)
from .pki import CertificateAuthority, service_account_key

READY_DEADLINE_S = 120.0
ATTEMPTS = 3
EXTERNAL_VARIABLE = "KVTIER_KUBECONFIG"
_SUPERVISOR = Path(__file__).with_name("supervisor.py")
_LONGEST_SOCKET_PATH = 100
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


class StartError(RuntimeError):
    """The control plane did not become ready; the message ends with the last lines of its logs."""


class PortTaken(StartError):
    """Somebody else listens on the port that was chosen; worth another attempt."""


@dataclass
class _Running:
    supervisor: subprocess.Popen[bytes]
    port_holder: socket.socket
    folder: Path
    pids: dict[str, int]


class LocalControlPlane:
    """Context manager around one control plane; inside it, `cluster` and what a `Cluster` has are valid.

    Not thread-safe; usable once. `ready_after_s` is the time from start to /readyz.
    """

    def __init__(
        self,
        *,
        binaries: ControlPlaneBinaries | None = None,
        say: Say = say_to_stderr,
        ready_deadline_s: float = READY_DEADLINE_S,
    ) -> None:
        self._binaries = binaries
        self._say = say
        self._ready_deadline_s = ready_deadline_s
        self._running: _Running | None = None
        self._cluster: Cluster | None = None
        self.ready_after_s = 0.0

    @property
    def cluster(self) -> Cluster:
        if self._cluster is None:
            raise RuntimeError("the control plane is not started")
        return self._cluster

    def __getattr__(self, name: str) -> Any:
        """Everything that a Cluster has, this has too: .url, .kubectl(), .apply_files(), ..."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.cluster, name)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name, the supervisor's among them."""
        return dict(self._running.pids) if self._running else {}

    def __enter__(self) -> LocalControlPlane:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        binaries = self._binaries or find_binaries(say=self._say)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self._start_once(binaries)
                return
            except PortTaken as error:
                if attempt == ATTEMPTS:
                    raise
                self._say(f"control plane: {error}; trying another port")
            except BaseException:
                self.stop()
                raise

    def stop(self) -> None:
        """Ends both processes and removes their folder. Safe to call twice."""
        running, self._running, self._cluster = self._running, None, None
        if running is None:
            return
        assert running.supervisor.stdin is not None and running.supervisor.stdout is not None
        running.supervisor.stdin.close()
        try:
            running.supervisor.wait(15)
        except subprocess.TimeoutExpired:
            running.supervisor.kill()
            running.supervisor.wait(15)
        running.supervisor.stdout.close()
        running.port_holder.close()
        remove_folder(running.folder)

    def log_tail(self, name: str, lines: int = 20) -> str:
        """The last lines of the log of ``etcd`` or ``kube-apiserver``."""
        return _tail(self.cluster.folder / f"{name}.log", lines)

    def _start_once(self, binaries: ControlPlaneBinaries) -> None:
        started = time.monotonic()
        folder = _private_folder()
        holder = _held_port()
        port = holder.getsockname()[1]
        try:
            cluster = _prepare(folder, port)
            spec = {
                "parent": os.getpid(),
                "remove": str(folder),
                "children": [
                    _child("etcd", _etcd_argv(binaries, folder), folder),
                    _child("kube-apiserver", _apiserver_argv(binaries, folder, port), folder),
                ],
            }
            spec_file = folder / "supervisor.json"
            spec_file.write_text(json.dumps(spec))
            supervisor = subprocess.Popen(
                [sys.executable, "-I", str(_SUPERVISOR), str(spec_file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=folder,
                env=_child_environment(),
                start_new_session=True,
            )
        except BaseException:
            holder.close()
            remove_folder(folder)
            raise
        self._running = _Running(supervisor, holder, folder, {"supervisor": supervisor.pid})
        try:
            self._read_pids()
            self._wait_until_ready(cluster, started)
        except BaseException:
            self.stop()
            raise
        self._cluster = cluster
        self.ready_after_s = time.monotonic() - started

    def _read_pids(self) -> None:
        """The supervisor's first two lines; it writes them at once, or its output ends."""
        assert self._running is not None and self._running.supervisor.stdout is not None
        for _ in range(2):
            line = self._running.supervisor.stdout.readline()
            if not line:
                raise StartError("the supervisor ended at once")
            event = json.loads(line)
            self._running.pids[event["name"]] = event["pid"]

    def _ended_early(self, port: int) -> StartError:
        assert self._running is not None and self._running.supervisor.stdout is not None
        line = self._running.supervisor.stdout.readline()
        event: dict[str, Any] = {"name": "the supervisor", "rc": None, "log": ""}
        if line:
            event = json.loads(line)
        if "address already in use" in event["log"]:
            return PortTaken(f"port {port} is taken")
        return StartError(f"{event['name']} ended with {event['rc']} while it started:\n{event['log']}")

    def _wait_until_ready(self, cluster: Cluster, started: float) -> None:
        assert self._running is not None
        folder = self._running.folder
        context = ssl.create_default_context(cafile=str(cluster.ca_file))
        port = self._running.port_holder.getsockname()[1]
        answer = "no answer yet"
        while time.monotonic() - started < self._ready_deadline_s:
            if self._running.supervisor.poll() is not None:
                raise self._ended_early(port)
            answer = _readyz(port, context)
            if answer == "ok":
                return
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._running.supervisor.wait(0.05)
        logs = "\n".join(
            f"--- {one}\n{_tail(folder / f'{one}.log', 15)}" for one in ("etcd", "kube-apiserver")
        )
        raise StartError(f"not ready after {self._ready_deadline_s:g} s: {answer}\n{logs}")


@contextlib.contextmanager
def open_cluster(kubeconfig: str | None = None, *, say: Say = say_to_stderr) -> Iterator[Cluster]:
    """The cluster to work on: the user's own when named (argument or KVTIER_KUBECONFIG), else a local one."""
    named = kubeconfig or os.environ.get(EXTERNAL_VARIABLE)
    if named:
        folder = _private_folder()
        try:
            yield existing_cluster(Path(named).expanduser(), folder)
        finally:
            remove_folder(folder)
    else:
        with LocalControlPlane(say=say) as plane:
            yield plane.cluster


def _private_folder() -> Path:
    """A new folder, mode 0700, with a path short enough for a Unix socket in it."""
    folder = tempfile.mkdtemp(prefix="kvtier-plane-")
    if len(folder) > _LONGEST_SOCKET_PATH - len("/etcd.sock"):
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="kvtier-plane-", dir="/tmp")
    return Path(folder)


def _held_port() -> socket.socket:
    """A free loopback port, held by a bound socket that never listens. The API server shares it."""
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    holder.bind(("127.0.0.1", 0))
    return holder


def _child_environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(("KUBE", "ETCD_"))}


def _child(name: str, argv: list[str], folder: Path) -> dict[str, object]:
    return {"name": name, "argv": argv, "cwd": str(folder), "log": str(folder / f"{name}.log")}


def _prepare(folder: Path, port: int) -> Cluster:
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
    return Cluster(url, authority.ca_file, kubeconfig, folder, authority, folder / "audit.log")


def _etcd_argv(binaries: ControlPlaneBinaries, folder: Path) -> list[str]:
    # etcd wants host:port in what it advertises, and takes it for a file name in its folder.
    return [
        str(binaries.etcd),
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


def _apiserver_argv(binaries: ControlPlaneBinaries, folder: Path, port: int) -> list[str]:
    pki = folder / "pki"
    return [
        str(binaries.kube_apiserver),
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


def _readyz(port: int, context: ssl.SSLContext) -> str:
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=5, context=context)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().read(4096).decode(errors="replace").strip()
    except (OSError, http.client.HTTPException) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        connection.close()


def _tail(path: Path, lines: int) -> str:
    try:
        with path.open("rb") as handle:
            handle.seek(max(0, path.stat().st_size - 64_000))
            return "\n".join(handle.read().decode(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""
