"""Who asks the API server, where a kubeconfig has another program say so (`exec`).

What the program gives ends, or is taken back: it is asked again then, with a deadline for each run and a
pause between two of them. The plugin logs in by this too, so it takes nothing but the standard library. It
must not know what is asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import signal
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)

VERSIONS = ("client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1")
CLUSTER_EXTENSION = "client.authentication.k8s.io/exec"
LOGIN_SECONDS = 30.0
"""For one run of the program."""
PAUSE_SECONDS = 5.0
"""Between the end of a run and the next, also where the server goes on refusing what the program gives."""
KILL_SECONDS = 5.0
"""How long one that was killed is waited for."""
EARLY_SECONDS, EARLY_SHARE = 60.0, 0.25
"""How long before its end a credential is renewed, while it still serves; of one that is short, a share."""
MAX_BYTES = 1 << 20
MAX_TOLD = 300


class LoginError(OSError):
    """The program gave no credential. The message names it, and nothing that it gave."""


@dataclass(frozen=True)
class Credential:
    """certificate, key: PEM, where the program gives these. ends, renew_at: seconds since the epoch."""

    token: str = field(default="", repr=False)
    certificate: bytes = field(default=b"", repr=False)
    key: bytes = field(default=b"", repr=False)
    ends: float = math.inf
    renew_at: float = math.inf


class ExecLogin:
    """An `access.Authorization`, once `ready` has returned. config: `exec` of the user. folder: that of the
    kubeconfig. cluster: that of the context, for a program which asks for it. Raises ValueError for a config
    that cannot be run. Of one event loop."""

    def __init__(
        self,
        config: Mapping[str, Any],
        folder: Path,
        cluster: Mapping[str, Any],
        *,
        seconds: float = LOGIN_SECONDS,
        now: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._version = str(config.get("apiVersion") or "")
        if self._version not in VERSIONS:
            raise ValueError(f"exec.apiVersion {self._version!r} is none of {', '.join(VERSIONS)}")
        command = str(config.get("command") or "")
        if not command:
            raise ValueError("exec.command is missing")
        if config.get("interactiveMode") == "Always":
            raise ValueError(f"exec: {command} wants to ask a person (interactiveMode: Always)")
        # As kubectl: a path is one from the kubeconfig's folder, a mere name is looked for.
        self._command = str(folder / command) if os.sep in command else command
        self._args = [str(one) for one in config.get("args") or ()]
        spec: dict[str, Any] = {"interactive": False}
        if config.get("provideClusterInfo"):
            spec["cluster"] = _cluster_info(cluster, folder)
        info = {"apiVersion": self._version, "kind": "ExecCredential", "spec": spec}
        extra = {str(one["name"]): str(one["value"]) for one in config.get("env") or ()}
        self._env = {**os.environ, **extra, "KUBERNETES_EXEC_INFO": json.dumps(info)}
        self._hint = str(config.get("installHint") or "")
        self._seconds = seconds
        self._now, self._monotonic = now, monotonic
        self._credential: Credential | None = None
        self._refused = False
        self._failure: LoginError | None = None
        self._not_before = -math.inf
        self._run: asyncio.Task[None] | None = None

    def __call__(self) -> str:
        return self.held

    @property
    def held(self) -> str:
        """The value of the header; empty without a token."""
        token = self.credential.token
        return f"Bearer {token}" if token else ""

    @property
    def credential(self) -> Credential:
        return self._credential or Credential()

    def forget(self) -> None:
        """The server does not believe it: the program is asked at the next request."""
        self._refused = True

    async def ready(self) -> None:
        """Sees that there is a credential that has not ended. Renews it: before it ends beside whoever asks,
        who goes on with what there is; else while they wait. All share one run. Raises LoginError."""
        serves = self._serves()
        if serves and not self._refused and self._now() < self.credential.renew_at:
            return
        if self._run is None and self._monotonic() < self._not_before:
            if not serves:
                raise self._failure or LoginError(f"{self._command}: what it gave has ended")
            return
        if self._run is None:
            self._run = asyncio.create_task(self._log_in())
            self._run.add_done_callback(self._ran)
        if not serves or self._refused:
            # Who asks may give up by a deadline of their own; the others wait on.
            await asyncio.shield(self._run)

    async def close(self) -> None:
        """Ends a run that is under way."""
        run = self._run
        if run is not None:
            run.cancel()
            await asyncio.wait([run])

    def _serves(self) -> bool:
        return self._credential is not None and self._now() < self._credential.ends

    def _ran(self, run: asyncio.Task[None]) -> None:
        self._run = None
        if not run.cancelled() and run.exception() is not None:
            _log.warning("not logged in", extra={"error": str(run.exception())})

    async def _log_in(self) -> None:
        try:
            self._credential = self._parsed(await self._output())
            self._refused, self._failure = False, None
        except LoginError as error:
            self._failure = error
            raise
        finally:
            self._not_before = self._monotonic() + PAUSE_SECONDS

    async def _output(self) -> bytes:
        """What the program writes. When this ends, however it does, it is gone with all that it started."""
        try:
            process = await self._started()
        except OSError as error:
            hint = f"; {self._hint[:MAX_TOLD]}" if self._hint else ""
            raise LoginError(f"{self._command}: {error.strerror or error}{hint}") from error
        ended = False
        try:
            async with asyncio.timeout(self._seconds):
                out, told = await asyncio.gather(_read(process.stdout), _read(process.stderr))
                status = await process.wait()
            ended = True
        except TimeoutError:
            raise LoginError(f"{self._command} gave no credential within {self._seconds:g} s") from None
        finally:
            if not ended:
                await _kill(process)
        if len(out) > MAX_BYTES:
            raise LoginError(f"{self._command} wrote more than {MAX_BYTES} bytes")
        if status:
            said = " ".join(told[:MAX_TOLD].decode("utf-8", "replace").split())
            raise LoginError(f"{self._command} ended with status {status}" + (f": {said}" if said else ""))
        return out

    async def _started(self) -> Process:
        starting = asyncio.create_task(
            asyncio.create_subprocess_exec(
                self._command,
                *self._args,
                env=self._env,
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=PIPE,
                start_new_session=True,
            )
        )
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            # asyncio would end the program alone, and may wait for ever where what that started holds its
            # pipes: it is let start, and then ended with all of it.
            await asyncio.wait([starting], timeout=KILL_SECONDS)
            if starting.done() and starting.exception() is None:
                await _kill(starting.result())
            raise

    def _parsed(self, out: bytes) -> Credential:
        try:
            answer = json.loads(out)
            version, status = answer["apiVersion"], answer["status"]
            token = str(status.get("token") or "")
            certificate = str(status.get("clientCertificateData") or "").encode()
            key = str(status.get("clientKeyData") or "").encode()
            end = status.get("expirationTimestamp")
            ends = math.inf if end is None else _seconds(end)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise LoginError(f"{self._command} wrote no ExecCredential: {type(error).__name__}") from error
        if version != self._version:
            raise LoginError(f"{self._command} wrote a credential of {version}, not of {self._version}")
        if bool(certificate) != bool(key) or not (token or key):
            raise LoginError(f"{self._command} gave neither a token nor a certificate with its key")
        left = ends - self._now()
        if left <= 0:
            raise LoginError(f"{self._command} gave a credential that had ended at {end}")
        early = min(EARLY_SECONDS, left * EARLY_SHARE)
        return Credential(token, certificate, key, ends, ends - early)


async def _read(stream: asyncio.StreamReader | None) -> bytes:
    """To its end; of more than MAX_BYTES one byte too many, and the rest is dropped."""
    found = b""
    while stream is not None and (part := await stream.read(65536)):
        found = (found + part)[: MAX_BYTES + 1]
    return found


async def _kill(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(KILL_SECONDS):
            await process.wait()


def _seconds(text: str) -> float:
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _cluster_info(cluster: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Of a kubeconfig's cluster, in the program's terms. OSError where its authority cannot be read."""
    names = (
        "server",
        "tls-server-name",
        "insecure-skip-tls-verify",
        "certificate-authority-data",
        "proxy-url",
    )
    info = {name: cluster[name] for name in names if cluster.get(name)}
    authority = cluster.get("certificate-authority")
    if authority and "certificate-authority-data" not in info:
        info["certificate-authority-data"] = b64encode((folder / authority).read_bytes()).decode()
    for extension in cluster.get("extensions") or ():
        if extension.get("name") == CLUSTER_EXTENSION:
            info["config"] = extension.get("extension")
    return info
