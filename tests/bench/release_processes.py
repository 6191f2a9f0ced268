"""The two processes that a bench of release control measures: the operator, and all simulated agents.

Each ends when its handle is closed. It must not know what is measured.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bench.release_api import Json
from tests.cluster.kvtier_localplane import Certificate
from tests.ports import free_port

READY_SECONDS = 180.0
ANSWER_SECONDS = 60.0
END_SECONDS = 30.0
OPERATOR = "kvtier-operator"
LINE_BYTES = 64 * 1024 * 1024


def rss_of(pid: int) -> int:
    """Bytes of a process's memory that are in RAM, its own and shared ones, as the kernel counts them."""
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def cpu_of(pid: int) -> float:
    """Seconds of the processor that a process has used, in user and kernel mode."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Child:
    """A Python process of ours that says when it is ready; its standard error goes to a file."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self._log = log
        self.pid = process.pid
        self.metrics_url = ""

    @classmethod
    async def start(cls, argv: Sequence[str], log: Path, **environment: str) -> tuple[Child, Json]:
        """The process, and the line by which it said that it is ready."""
        with log.open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
                preexec_fn=end_with_parent,
                limit=LINE_BYTES,
            )
        child = cls(process, log)
        try:
            return child, await child.line(READY_SECONDS)
        except BaseException:
            await child.close()
            raise

    async def line(self, seconds: float) -> Json:
        assert self._process.stdout is not None
        async with asyncio.timeout(seconds):
            line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"process {self.pid} ended early:\n{self.log_tail()}")
        found: Json = json.loads(line)
        return found

    async def ask(self, question: Json) -> Json:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question).encode() + b"\n")
        await self._process.stdin.drain()
        return await self.line(ANSWER_SECONDS)

    def rss(self) -> int:
        """See `rss_of`."""
        return rss_of(self.pid)

    def cpu_seconds(self) -> float:
        """See `cpu_of`."""
        return cpu_of(self.pid)

    def log_tail(self, size: int = 3000) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")[-size:]

    async def close(self) -> None:
        if self._process.returncode is not None:
            return
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.terminate()
        try:
            async with asyncio.timeout(END_SECONDS):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


def end_with_parent() -> None:
    """However this process ends: PR_SET_PDEATHSIG."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


async def start_operator(kubeconfig: Path, namespace: str, tls: Certificate, folder: Path) -> Child:
    """As it is shipped: its command line, its ServiceAccount."""
    port = free_port()
    argv = [
        *("-m", "kvtier_operator.cli", f"--kubeconfig={kubeconfig}", f"--namespace={namespace}"),
        *("--identity=bench", f"--agent-tls-cert={tls.cert_file}", f"--agent-tls-key={tls.key_file}"),
        *(f"--agent-tls-ca={tls.ca_file}", f"--metrics-port={port}", "--bind-address=127.0.0.1"),
        "--log-level=warning",
    ]
    child, _ = await Child.start(argv, folder / "operator.log", PYTHONUNBUFFERED="1")
    child.metrics_url = f"http://127.0.0.1:{port}/metrics"
    return child


async def start_agents(spec: dict[str, Any], folder: Path) -> Child:
    file = folder / "agents.json"
    file.write_text(json.dumps(spec), encoding="utf-8")
    child, _ = await Child.start(["-m", "tests.release_agents", str(file)], folder / "agents.log")
    return child
