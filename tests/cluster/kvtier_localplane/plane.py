"""Starts and stops a real control plane on loopback, for one test run or demo: etcd and kube-apiserver, and
kube-controller-manager when it is asked for.

A port is held by a socket of ours from before the start of its server (SO_REUSEPORT), so nobody can take it
in between. A supervisor process ends all processes when this one goes away, however it goes. It must not know
our resources.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from .build import ControlPlaneBinaries, Say, find_binaries, say_to_stderr
from .choice import chosen_kubeconfig
from .cluster import Cluster, existing_cluster, remove_folder
from .controllers import NAME as CONTROLLERS_NAME
from .controllers import ask, controllers_argv
from .programs import apiserver_argv, etcd_argv, prepare

READY_DEADLINE_S = 120.0
ATTEMPTS = 3
_SUPERVISOR = Path(__file__).with_name("supervisor.py")
_LONGEST_SOCKET_PATH = 100


class StartError(RuntimeError):
    """The control plane did not become ready; the message ends with the last lines of its logs."""


class PortTaken(StartError):
    """Somebody else listens on the port that was chosen; worth another attempt."""


@dataclass
class _Running:
    """ports: bound sockets by the name of the process that listens there."""

    supervisor: subprocess.Popen[bytes]
    ports: dict[str, socket.socket]
    folder: Path
    pids: dict[str, int]

    def port(self, name: str) -> int:
        return int(self.ports[name].getsockname()[1])


class LocalControlPlane:
    """Context manager around one control plane; inside it, `cluster` and what a `Cluster` has are valid.

    Not thread-safe; usable once. `ready_after_s` is the time from start to /readyz and, with
    `controller_manager`, to that one's /healthz. `before_controllers` is called in between: the garbage
    collector knows kinds that are there by then at once, and looks for others every 30 s only.
    """

    def __init__(
        self,
        *,
        binaries: ControlPlaneBinaries | None = None,
        controller_manager: bool = False,
        before_controllers: Callable[[Cluster], None] | None = None,
        say: Say = say_to_stderr,
        ready_deadline_s: float = READY_DEADLINE_S,
        restarts: bool = False,
    ) -> None:
        """restarts: the API server may be killed by `restart_api_server`; else its end ends everything."""
        self._restarts = restarts
        self._binaries = binaries
        self._controller_manager = controller_manager
        self._before_controllers = before_controllers
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
        binaries = self._binaries or find_binaries(controller_manager=self._controller_manager, say=self._say)
        if self._controller_manager and binaries.kube_controller_manager is None:
            raise StartError("the binaries given hold no kube-controller-manager")
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
        """Ends all processes and removes their folder. Safe to call twice."""
        running, self._running, self._cluster = self._running, None, None
        if running is None:
            return
        assert running.supervisor.stdin is not None and running.supervisor.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            running.supervisor.stdin.close()
        try:
            running.supervisor.wait(15)
        except subprocess.TimeoutExpired:
            running.supervisor.kill()
            running.supervisor.wait(15)
        running.supervisor.stdout.close()
        for holder in running.ports.values():
            holder.close()
        remove_folder(running.folder)

    def restart_api_server(self) -> None:
        """SIGKILL, and another process on the same store and port, ready when this returns."""
        assert self._restarts and self._running is not None
        os.kill(self._running.pids["kube-apiserver"], signal.SIGKILL)
        self._read_pids("kube-apiserver")
        self._wait_until_ready("kube-apiserver", "/readyz", self.cluster)

    def log_tail(self, name: str, lines: int = 20) -> str:
        """The last lines of the log of ``etcd``, ``kube-apiserver`` or ``kube-controller-manager``."""
        return _tail(self.cluster.folder / f"{name}.log", lines)

    def _start_once(self, binaries: ControlPlaneBinaries) -> None:
        started = time.monotonic()
        folder = _private_folder()
        ports = {"kube-apiserver": _held_port()}
        if self._controller_manager:
            ports[CONTROLLERS_NAME] = _held_port()
        try:
            cluster = prepare(folder, ports["kube-apiserver"].getsockname()[1], self._controller_manager)
            spec_file = folder / "supervisor.json"
            spec = _spec(binaries, cluster, ports)
            spec["again"] = ["kube-apiserver"] if self._restarts else []
            spec_file.write_text(json.dumps(spec))
            supervisor = subprocess.Popen(
                [sys.executable, "-I", str(_SUPERVISOR), str(spec_file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # Its lines are read with a deadline, so none may wait in a buffer of ours.
                bufsize=0,
                cwd=folder,
                env=_child_environment(),
                start_new_session=True,
            )
        except BaseException:
            for holder in ports.values():
                holder.close()
            remove_folder(folder)
            raise
        self._running = _Running(supervisor, ports, folder, {"supervisor": supervisor.pid})
        try:
            self._read_pids("etcd", "kube-apiserver")
            self._wait_until_ready("kube-apiserver", "/readyz", cluster)
            if self._controller_manager:
                self._start_controllers(cluster)
        except BaseException:
            self.stop()
            raise
        self._cluster = cluster
        self.ready_after_s = time.monotonic() - started

    def _start_controllers(self, cluster: Cluster) -> None:
        """After the API server: it waits for that one for a few seconds only."""
        assert self._running is not None and self._running.supervisor.stdin is not None
        if self._before_controllers is not None:
            self._before_controllers(cluster)
        # One that has ended says so in what is read next.
        with contextlib.suppress(BrokenPipeError):
            self._running.supervisor.stdin.write(b"go on\n")
            self._running.supervisor.stdin.flush()
        self._read_pids(CONTROLLERS_NAME)
        self._wait_until_ready(CONTROLLERS_NAME, "/healthz", cluster)

    def _read_pids(self, *names: str) -> None:
        """One line of the supervisor for each; it writes them at once, or that a process has ended."""
        assert self._running is not None and self._running.supervisor.stdout is not None
        for _ in names:
            line = read_line(self._running.supervisor.stdout.fileno(), self._ready_deadline_s)
            if not line:
                raise StartError("the supervisor ended at once")
            event = json.loads(line)
            if event["event"] != "started":
                raise self._ended_early(event)
            self._running.pids[event["name"]] = event["pid"]

    def _ended_early(self, event: dict[str, Any] | None = None) -> StartError:
        assert self._running is not None and self._running.supervisor.stdout is not None
        if event is None:
            line = read_line(self._running.supervisor.stdout.fileno(), self._ready_deadline_s)
            event = json.loads(line) if line else {"name": "the supervisor", "rc": None, "log": ""}
        name = event["name"]
        if "address already in use" in event["log"] and name in self._running.ports:
            return PortTaken(f"port {self._running.port(name)} is taken")
        return StartError(f"{name} ended with {event['rc']} while it started:\n{event['log']}")

    def _wait_until_ready(self, name: str, path: str, cluster: Cluster) -> None:
        assert self._running is not None
        started = time.monotonic()
        context = ssl.create_default_context(cafile=str(cluster.ca_file))
        answer = "no answer yet"
        while time.monotonic() - started < self._ready_deadline_s:
            if self._running.supervisor.poll() is not None:
                raise self._ended_early()
            answer = ask(self._running.port(name), path, context)
            if answer == "ok":
                return
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._running.supervisor.wait(0.05)
        logs = "\n".join(
            f"--- {one}\n{_tail(self._running.folder / f'{one}.log', 15)}"
            for one in self._running.pids
            if one != "supervisor"
        )
        raise StartError(f"{name} is not ready after {self._ready_deadline_s:g} s: {answer}\n{logs}")


def read_line(descriptor: int, seconds: float) -> bytes:
    """The next line of a pipe, empty at its end. Raises StartError when it does not come in time."""
    until = time.monotonic() + seconds
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    line = b""
    while not line.endswith(b"\n"):
        if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
            raise StartError(f"the supervisor said nothing for {seconds:g} s")
        part = os.read(descriptor, 1)
        if not part:
            return b""
        line += part
    return line


@contextlib.contextmanager
def open_cluster(
    kubeconfig: str | None = None,
    *,
    wish: str = "",
    controller_manager: bool = False,
    before_controllers: Callable[[Cluster], None] | None = None,
    say: Say = say_to_stderr,
) -> Iterator[Cluster]:
    """The cluster to work on: the user's own when it is asked for (see choice.py), else a local one.

    The user's own is taken to have its controllers. Raises ChoiceError, BuildError, StartError.
    """
    named = chosen_kubeconfig(os.environ, named=kubeconfig, wish=wish)
    if named is not None:
        folder = _private_folder()
        try:
            cluster = existing_cluster(named, folder)
            say(f"your own cluster is used: {cluster.url}, by {named}")
            if before_controllers is not None:
                before_controllers(cluster)
            yield cluster
        finally:
            remove_folder(folder)
    else:
        with LocalControlPlane(
            controller_manager=controller_manager, before_controllers=before_controllers, say=say
        ) as plane:
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


def _spec(
    binaries: ControlPlaneBinaries, cluster: Cluster, ports: dict[str, socket.socket]
) -> dict[str, object]:
    """What the supervisor runs: `children` at once, `later` when it is told to go on."""
    folder = cluster.folder
    numbers = {name: int(holder.getsockname()[1]) for name, holder in ports.items()}
    later = []
    if binaries.kube_controller_manager is not None and CONTROLLERS_NAME in numbers:
        argv = controllers_argv(
            binaries.kube_controller_manager, folder, numbers[CONTROLLERS_NAME], cluster.ca_file
        )
        later.append(_child(CONTROLLERS_NAME, argv, folder))
    return {
        "parent": os.getpid(),
        "remove": str(folder),
        "children": [
            _child("etcd", etcd_argv(binaries.etcd, folder), folder),
            _child(
                "kube-apiserver",
                apiserver_argv(binaries.kube_apiserver, folder, numbers["kube-apiserver"]),
                folder,
            ),
        ],
        "later": later,
    }


def _tail(path: Path, lines: int) -> str:
    try:
        with path.open("rb") as handle:
            handle.seek(max(0, path.stat().st_size - 64_000))
            return "\n".join(handle.read().decode(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""
