"""Agents as forks of one process that has imported the agent already.

Importing torch, gRPC and the agent takes three seconds of a core, more than an agent then works for in most
tests. So a process imports all of it once, before it has any thread, and forks an agent for each order: the
program is the same from its command line to its exit status, with a pid, signals, memory, files and threads
of its own. That it also starts from nothing is for those tests that do so (`from_nothing`), for the demo and
for the commands' own tests. It must not know what an agent is asked.

`python -m tests.engine.agent_forks FD` is that process. On the socket FD come one JSON object for each agent
({"arguments", "environment", "folder"}) with two descriptors, its standard output and error; back go
{"pid"} when it was born and {"pid", "code"} when it has ended. When the socket closes all agents are killed.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

_PR_SET_PDEATHSIG = 1
_MOST_BYTES = 1 << 17
_ORDER_SECONDS = 500.0
# What `kvtier_agent.cli` imports when it serves.
IMPORTED = (
    "kvtier_agent.cli",
    "kvtier_agent.blockhost",
    "kvtier_agent.core_engine",
    "kvtier_agent.evidence_windows",
    "kvtier_agent.indexworker",
    "kvtier_agent.keyfiles",
    "kvtier_agent.registration",
    "kvtier_agent.server",
)


class Fork:
    """One agent, with what `subprocess.Popen` has of it. `stdout`: what it prints."""

    def __init__(self, pid: int, stdout: IO[str]) -> None:
        self.pid = pid
        self.stdout: IO[str] | None = stdout
        self.returncode: int | None = None
        self._ended = threading.Event()

    def end(self, code: int) -> None:
        """Its maker has seen it end; code: as Popen's, a negative signal number for a death by signal."""
        self.returncode = code
        self._ended.set()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout) or self.returncode is None:
            raise subprocess.TimeoutExpired("kvtier-agent", timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Nothing once it has ended, as Popen does."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class AgentForks:
    """The process that forks, from the side that orders; it starts with the first order. Thread-safe."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._ordering = threading.Lock()
        self._born: list[int] = []
        self._codes: dict[int, int] = {}
        self._forks: dict[int, Fork] = {}
        self._lost = False
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], log: IO[bytes]) -> Fork:
        """An agent with that command line. Raises AssertionError when none is born."""
        order = {"arguments": list(arguments), "environment": dict(environment), "folder": str(Path.cwd())}
        with self._ordering:
            if self._socket is None:
                self._begin(environment)
            assert self._socket is not None
            reading, writing = os.pipe()
            try:
                with self._news:
                    before = len(self._born)
                socket.send_fds(self._socket, [json.dumps(order).encode()], [writing, log.fileno()])
            finally:
                os.close(writing)
            with self._news:
                self._news.wait_for(lambda: self._lost or len(self._born) > before, _ORDER_SECONDS)
                assert len(self._born) > before, "no agent was forked"
                fork = Fork(self._born[-1], os.fdopen(reading))
                self._forks[fork.pid] = fork
                if fork.pid in self._codes:
                    fork.end(self._codes.pop(fork.pid))
            return fork

    def close(self) -> None:
        """Ends the process, and by that every agent which is left."""
        if self._socket is None or self._process is None or self._reader is None:
            return
        self._socket.shutdown(socket.SHUT_WR)
        self._process.wait(120)
        self._reader.join(60)
        self._socket.close()

    def _begin(self, environment: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.engine.agent_forks", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env=dict(environment),
                cwd=Path(__file__).resolve().parents[2],
            )
        self._reader = threading.Thread(target=self._read, args=(self._socket,), daemon=True)
        self._reader.start()

    def _read(self, ours: socket.socket) -> None:
        while data := ours.recv(_MOST_BYTES):
            told = json.loads(data)
            with self._news:
                if "code" not in told:
                    self._born.append(told["pid"])
                elif (fork := self._forks.pop(told["pid"], None)) is not None:
                    fork.end(told["code"])
                else:
                    self._codes[told["pid"]] = told["code"]
                self._news.notify_all()
        with self._news:
            self._lost = True
            for fork in self._forks.values():
                fork.end(-signal.SIGKILL)
            self._news.notify_all()


def main() -> int:
    """Until the socket closes; in a fork, until its agent ends, whose status it returns."""
    own = socket.socket(fileno=int(sys.argv[1]))
    for name in IMPORTED:
        importlib.import_module(name)
    threads = os.listdir("/proc/self/task")
    if len(threads) != 1:
        raise RuntimeError(f"importing the agent began {len(threads) - 1} threads: it cannot be forked")
    gc.freeze()
    me = os.getpid()
    alive: dict[int, int] = {}
    poller = select.poll()
    poller.register(own, select.POLLIN)
    try:
        while True:
            for descriptor, _ in poller.poll():
                if descriptor != own.fileno():
                    poller.unregister(descriptor)
                    pid = alive.pop(descriptor)
                    os.close(descriptor)
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    own.send(json.dumps({"pid": pid, "code": code}).encode())
                    continue
                data, given = _receive(own)
                if not data:
                    return 0
                pid = os.fork()
                if pid == 0:
                    for inherited in (own.detach(), *alive):
                        os.close(inherited)
                    alive.clear()
                    return _live(json.loads(data), given, me)
                for one in given:
                    os.close(one)
                watched = os.pidfd_open(pid)
                alive[watched] = pid
                own.send(json.dumps({"pid": pid}).encode())
                poller.register(watched, select.POLLIN)
    finally:
        for pid in alive.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _receive(own: socket.socket) -> tuple[bytes, list[int]]:
    data, ancillary, _, _ = own.recvmsg(_MOST_BYTES, socket.CMSG_SPACE(2 * array.array("i").itemsize))
    given = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            given.frombytes(content[: len(content) - len(content) % given.itemsize])
    return data, list(given)


def _live(order: Mapping[str, Any], given: Sequence[int], parent: int) -> int:
    """The agent, in its fork."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return 1
    for number, descriptor in zip((1, 2), given, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    sys.argv = ["kvtier-agent", *order["arguments"]]
    from kvtier_agent.cli import main as agent

    return agent(order["arguments"])


if __name__ == "__main__":
    sys.exit(main())
