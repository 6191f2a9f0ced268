"""Where the API server is and who asks it: of kubectl's kubeconfig, or of the pod's service account.

The Kubernetes client reads it, but for a program that logs in (`exec`): that is asked by `ExecLogin`, which
asks it again when what it gave has ended. It must not send anything.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from kubernetes.aio import client as aio_client
from kubernetes.aio import config as aio_config
from kubernetes.aio.config.kube_config import (
    KUBE_CONFIG_DEFAULT_LOCATION,
    KubeConfigLoader,
    KubeConfigMerger,
)

from kubectl_kvtier.outcomes import Exit, Failure
from kvtier_operator.execlogin import ExecLogin, LoginError

SERVICE_ACCOUNT_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


@dataclass(frozen=True)
class Found:
    """namespace: of the context. login: where a program says who asks; it has said so once."""

    configuration: Any
    namespace: str
    login: ExecLogin | None = None

    def client(self) -> Any:
        """What sends requests. Each of them sees to it that the login has not ended; a certificate that the
        program gave is that of the first run."""
        configuration, login = self.configuration, self.login
        if login is None:
            return aio_client.ApiClient(configuration=configuration)

        async def renew(known: Any) -> None:
            await login.ready()
            if login.held:
                known.api_key["BearerToken"] = login.held

        # It has to be there for the hook to be asked, and goes no further where a certificate says who asks.
        configuration.api_key["BearerToken"] = login.held or None
        configuration.refresh_api_key_hook = renew
        with _given(login) as files:
            if files is not None:
                configuration.cert_file, configuration.key_file = files
            return aio_client.ApiClient(configuration=configuration)


async def load(kubeconfig: str | None, context: str | None) -> Found:
    """Failure FAILED, in one line, for what cannot be read and who cannot log in."""
    try:
        return await _load(kubeconfig, context)
    except LoginError as error:
        raise Failure(Exit.FAILED, f"no cluster: not logged in: {error}") from error
    except (aio_config.ConfigException, OSError) as error:
        raise Failure(Exit.FAILED, f"no cluster: {error}") from error
    except (yaml.YAMLError, TypeError, KeyError, AttributeError, ValueError) as error:
        # What the library makes of a file that is no kubeconfig.
        told = " ".join(str(error).split())
        raise Failure(Exit.FAILED, f"no cluster: the kubeconfig cannot be read: {told}") from error


async def _load(kubeconfig: str | None, context: str | None) -> Found:
    configuration = aio_client.Configuration()
    try:
        contexts, active = aio_config.list_kube_config_contexts(  # type: ignore[no-untyped-call]
            config_file=kubeconfig
        )
    except aio_config.ConfigException:
        if kubeconfig or context:
            raise
        aio_config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        return Found(configuration, _own_namespace())
    merged = KubeConfigMerger(kubeconfig or KUBE_CONFIG_DEFAULT_LOCATION)  # type: ignore[no-untyped-call]
    loader = KubeConfigLoader(  # type: ignore[no-untyped-call]
        config_dict=merged.config, config_base_path=None, active_context=context
    )
    login = _login(merged.config, loader.current_context["context"])
    await loader.load_and_set(configuration)  # type: ignore[no-untyped-call]
    if login is not None:
        await login.ready()
    named = next((one for one in contexts if one["name"] == context), active)
    return Found(configuration, str(named["context"].get("namespace") or "default"), login)


def _login(config: Any, context: Any) -> ExecLogin | None:
    """Of the context's user; taken out of what the client reads, or it would run the program too, without a
    deadline, and go on as nobody where it fails."""
    name = context.get("user")
    owner = config["users"].get_with_name(name, safe=True) if name and config.safe_get("users") else None
    user = owner["user"].value if owner is not None and owner.safe_get("user") else {}
    if owner is None or not user.get("exec"):
        return None
    cluster = config["clusters"].get_with_name(context["cluster"])["cluster"].value
    return ExecLogin(user.pop("exec"), Path(owner.path).absolute().parent, cluster)


@contextmanager
def _given(login: ExecLogin) -> Iterator[tuple[str, str] | None]:
    """Files of the certificate and key that the program gave, for as long as it takes to load them."""
    credential = login.credential
    if not credential.key:
        yield None
        return
    with tempfile.NamedTemporaryFile() as certificate, tempfile.NamedTemporaryFile() as key:
        certificate.write(credential.certificate)
        certificate.flush()
        key.write(credential.key)
        key.flush()
        yield certificate.name, key.name


def _own_namespace() -> str:
    """A pod's, as its service account has it."""
    try:
        return SERVICE_ACCOUNT_NAMESPACE.read_text(encoding="utf-8").strip() or "default"
    except OSError:
        return "default"
