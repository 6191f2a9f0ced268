"""How the API server is reached and who asks it: from the pod's service account, or from a kubeconfig.

Read here and not by the Kubernetes client, which is 9 MB that stay for as long as the operator runs. Only a
kubeconfig that logs in by an auth provider has it loaded. It must not send anything.
"""

from __future__ import annotations

import base64
import contextlib
import os
import ssl
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvtier_operator.execlogin import ExecLogin, LoginError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TOKEN_SECONDS = 60.0
"""For so long a token that was read from a file is used: whoever keeps the file renews it hours before."""

Pem = Path | bytes | None
Authorization = Callable[[], str]
"""The value of that header now; empty for none. Raises OSError where its file cannot be read."""


class AccessError(ValueError):
    """What was given says no server, or no readable file."""


@dataclass(frozen=True)
class Access:
    """server: its URL, without a slash at the end. ca: None for those of the machine. server_name: to expect
    in its certificate instead of the URL's host."""

    server: str
    authorization: Authorization
    ca: Pem = None
    certificate: Pem = None
    key: Pem = None
    verify: bool = True
    server_name: str | None = None
    proxy: str | None = None

    @property
    def login(self) -> ExecLogin | None:
        """Where another program says who asks: it has to be `ready` before each request."""
        return self.authorization if isinstance(self.authorization, ExecLogin) else None

    def refused(self, authorization: str) -> None:
        """The server does not believe who asked so. A token's file is read again at the next request, and
        another program is asked again: it may have been renewed early, as when it was taken back."""
        asks = self.authorization
        if isinstance(asks, TokenFile | ExecLogin) and asks.held == authorization:
            asks.forget()

    def client_certificate(self) -> tuple[Pem, Pem]:
        """With its key; what another program gave counts before that of the file."""
        given = self.login.credential if self.login is not None else None
        return (given.certificate, given.key) if given and given.key else (self.certificate, self.key)

    def ssl_context(self) -> ssl.SSLContext:
        data = self.ca.decode() if isinstance(self.ca, bytes) else None
        context = ssl.create_default_context(
            cafile=self.ca if isinstance(self.ca, Path) else None, cadata=data
        )
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        certificate, key = self.client_certificate()
        if certificate is not None:
            with _as_file(certificate) as certificate_file, _as_file(key) as key_file:
                context.load_cert_chain(certificate_file or "", key_file)
        return context


async def load_access(kubeconfig: str | None) -> Access:
    """Of a kubeconfig file, or of the pod's service account when None. Raises AccessError."""
    if kubeconfig is None:
        return in_cluster(os.environ, SERVICE_ACCOUNT)
    access = _from_file(kubeconfig)
    if access is None:
        return await _by_the_client(kubeconfig)
    if access.login is not None:
        try:
            await access.login.ready()
        except LoginError as error:
            raise AccessError(f"kubeconfig {kubeconfig}: {error}") from error
    return access


def _from_file(kubeconfig: str) -> Access | None:
    """None: its user logs in by an auth provider."""
    path = Path(kubeconfig).expanduser()
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        cluster, user = _current(config)
        if "auth-provider" in user:
            return None
        return _plain(cluster, user, path.parent)
    except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError, ValueError) as error:
        said = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise AccessError(f"kubeconfig {kubeconfig}: {said}") from error


def in_cluster(
    environment: Mapping[str, str], folder: Path, monotonic: Callable[[], float] = time.monotonic
) -> Access:
    """The pod's service account, whose files lie in `folder`."""
    host = environment.get("KUBERNETES_SERVICE_HOST", "")
    port = environment.get("KUBERNETES_SERVICE_PORT", "")
    if not host or not port:
        raise AccessError("no kubeconfig is given, and this is no pod: KUBERNETES_SERVICE_HOST is not set")
    for name in ("token", "ca.crt"):
        if not (folder / name).is_file():
            raise AccessError(f"the pod's service account has no file {folder / name}")
    where = f"[{host}]" if ":" in host else host
    return Access(f"https://{where}:{port}", TokenFile(folder / "token", monotonic), ca=folder / "ca.crt")


class TokenFile:
    """An Authorization that reads its file again every `TOKEN_SECONDS`."""

    def __init__(self, path: Path, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._monotonic = monotonic
        self._until = float("-inf")
        self._value = ""

    def __call__(self) -> str:
        now = self._monotonic()
        if now >= self._until:
            token = self._path.read_text(encoding="utf-8").strip()
            if not token:
                raise OSError(f"token file {self._path} is empty")
            self._value, self._until = f"Bearer {token}", now + TOKEN_SECONDS
        return self._value

    @property
    def held(self) -> str:
        """What it said last."""
        return self._value

    def forget(self) -> None:
        self._until = float("-inf")


def _current(config: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Cluster and user of the current context; KeyError names what is missing."""
    context = _named(config, "contexts", config["current-context"])["context"]
    cluster = _named(config, "clusters", context["cluster"])["cluster"]
    name = context.get("user")
    users = [one for one in config.get("users") or () if one["name"] == name]
    return cluster, (users[0].get("user") or {}) if users else {}


def _named(config: Any, kind: str, name: str) -> Mapping[str, Any]:
    for one in config.get(kind) or ():
        if one["name"] == name:
            found: Mapping[str, Any] = one
            return found
    raise KeyError(f"{name} in {kind}")


def _plain(cluster: Mapping[str, Any], user: Mapping[str, Any], folder: Path) -> Access:
    return Access(
        server=str(cluster["server"]).rstrip("/"),
        authorization=ExecLogin(user["exec"], folder, cluster)
        if user.get("exec")
        else _authorization(user, folder),
        ca=_pem(cluster, "certificate-authority", folder),
        certificate=_pem(user, "client-certificate", folder),
        key=_pem(user, "client-key", folder),
        verify=not cluster.get("insecure-skip-tls-verify", False),
        server_name=cluster.get("tls-server-name"),
        proxy=cluster.get("proxy-url"),
    )


def _authorization(user: Mapping[str, Any], folder: Path) -> Authorization:
    value = ""
    if user.get("token"):
        value = f"Bearer {user['token']}"
    elif user.get("tokenFile"):
        return TokenFile(folder / user["tokenFile"])
    elif "username" in user and "password" in user:
        pair = f"{user['username']}:{user['password']}".encode()
        value = f"Basic {base64.b64encode(pair).decode()}"
    return lambda: value


def _pem(section: Mapping[str, Any], name: str, folder: Path) -> Pem:
    """What is written in the file itself counts before a path to another; paths are from its folder."""
    if section.get(f"{name}-data"):
        return base64.b64decode(section[f"{name}-data"], validate=True)
    if not section.get(name):
        return None
    path: Path = folder / section[name]
    if not path.is_file():
        raise AccessError(f"no file {path}")
    return path


@contextlib.contextmanager
def _as_file(pem: Pem) -> Any:
    """A path for as long as it takes to load it: ssl takes keys from files only."""
    if not isinstance(pem, bytes):
        yield pem
        return
    with tempfile.NamedTemporaryFile() as file:
        file.write(pem)
        file.flush()
        yield file.name


async def _by_the_client(kubeconfig: str) -> Access:
    """As the Kubernetes client logs in: by an auth provider."""
    from kubernetes.aio.client import Configuration
    from kubernetes.aio.config import load_kube_config

    found = Configuration()
    await load_kube_config(  # type: ignore[no-untyped-call]
        config_file=kubeconfig, client_configuration=found, persist_config=False
    )
    value = str((found.api_key or {}).get("BearerToken") or "")

    def path(name: str | None) -> Path | None:
        return Path(name) if name else None

    return Access(
        server=str(found.host).rstrip("/"),
        authorization=lambda: value,
        ca=path(found.ssl_ca_cert),
        certificate=path(found.cert_file),
        key=path(found.key_file),
        verify=bool(found.verify_ssl),
        server_name=found.tls_server_name,
        proxy=found.proxy,
    )
