"""The control plane leaves nothing behind, however its user ends, and never builds without need."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cluster.kvtier_localplane import (
    Cluster,
    ControlPlaneBinaries,
    LocalControlPlane,
    StartError,
    build,
    eventually,
)
from tests.cluster.kvtier_localplane.plane import read_line

REPOSITORY = Path(__file__).resolve().parents[2]
# A fixture may have to build a program first; that wait has its own deadline.
pytestmark = pytest.mark.timeout(600, func_only=True)
PLAIN = {"supervisor", "etcd", "kube-apiserver"}
CONTROLLERS = "kube-controller-manager"

_HOLDER = """
import json, signal, sys
from tests.cluster.kvtier_localplane import LocalControlPlane
# Whoever was started in the background by a shell ignores Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
with LocalControlPlane(controller_manager="controllers" in sys.argv) as plane:
    print(json.dumps({"pids": plane.pids, "folder": str(plane.folder)}), flush=True)
    signal.pause()
"""


def _alive(pid: int) -> bool:
    """A zombie counts as gone: it holds nothing but its number."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


@pytest.fixture(scope="module")
def with_controllers() -> ControlPlaneBinaries:
    return build.find_binaries(controller_manager=True)


@contextlib.contextmanager
def _plane_in_another_process(*options: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, int], Path]]:
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, *options],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert holder.stdout is not None
        facts = json.loads(holder.stdout.readline())
        folder = Path(facts["folder"])
        yield holder, facts["pids"], folder
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        holder.kill()
        holder.wait(10)
        assert holder.stdout is not None
        holder.stdout.close()


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        pytest.param("holder", signal.SIGINT, id="ctrl-c"),
        pytest.param("supervisor", signal.SIGTERM, id="supervisor-terminated"),
        pytest.param("etcd", signal.SIGKILL, id="etcd-killed"),
    ],
)
def test_no_process_outlives_its_user(victim: str, number: signal.Signals) -> None:
    """Other ends are tried below, with controllers among the processes."""
    with _plane_in_another_process() as (holder, pids, folder):
        assert set(pids) == PLAIN
        assert all(_alive(pid) for pid in pids.values()) and folder.is_dir()
        os.kill(holder.pid if victim == "holder" else pids[victim], number)
        eventually(lambda: not any(_alive(pid) for pid in pids.values()), 60, what="processes gone")
        eventually(lambda: not folder.exists(), 60, what="folder removed")


@pytest.mark.parametrize("said", [b"", b"half a line"], ids=["nothing", "half-a-line"])
def test_a_supervisor_that_says_nothing_is_not_waited_for_without_end(said: bytes) -> None:
    reading, writing = os.pipe()
    try:
        os.write(writing, b"first\n" + said)
        assert read_line(reading, 60.0) == b"first\n"
        with pytest.raises(StartError, match="said nothing for"):
            read_line(reading, 0.01)
    finally:
        os.close(writing)
    assert read_line(reading, 60.0) == b""
    os.close(reading)


def test_a_server_that_cannot_start_is_reported_with_its_log(tmp_path: Path) -> None:
    broken = tmp_path / "kube-apiserver"
    broken.write_text("#!/bin/sh\necho cannot go on\nexit 3\n")
    broken.chmod(0o755)
    real = build.find_binaries()
    with (
        pytest.raises(StartError, match=r"(?s)kube-apiserver ended with 3.*cannot go on"),
        LocalControlPlane(binaries=ControlPlaneBinaries(real.etcd, broken, "assets"), ready_deadline_s=60),
    ):
        pass


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        pytest.param("holder", signal.SIGKILL, id="parent-killed"),
        pytest.param("supervisor", signal.SIGKILL, id="supervisor-killed"),
        pytest.param(CONTROLLERS, signal.SIGKILL, id="controllers-killed"),
    ],
)
def test_controllers_end_with_their_plane_and_the_plane_with_them(
    with_controllers: ControlPlaneBinaries, victim: str, number: signal.Signals
) -> None:
    with _plane_in_another_process("controllers") as (holder, pids, folder):
        assert set(pids) == PLAIN | {CONTROLLERS}
        assert all(_alive(pid) for pid in pids.values()) and folder.is_dir()
        os.kill(holder.pid if victim == "holder" else pids[victim], number)
        eventually(lambda: not any(_alive(pid) for pid in pids.values()), 60, what="processes gone")
        if victim != "supervisor":
            eventually(lambda: not folder.exists(), 60, what="folder removed")


def test_controllers_run_as_their_own_user_on_loopback_only_and_leaving_removes_everything(
    with_controllers: ControlPlaneBinaries,
) -> None:
    seen: list[str] = []

    def before(cluster: Cluster) -> None:
        seen.append(cluster.kubectl("get", "--raw", "/readyz").stdout)

    with LocalControlPlane(
        binaries=with_controllers, controller_manager=True, before_controllers=before
    ) as plane:
        assert seen == ["ok"]
        pids, folder = plane.pids, plane.cluster.folder
        assert folder.stat().st_mode & 0o077 == 0
        kubeconfig = plane.folder / f"{CONTROLLERS}.kubeconfig"
        who = plane.kubectl("auth", "whoami", "-o", "json", kubeconfig=kubeconfig).stdout
        user = json.loads(who)["status"]["userInfo"]
        assert user["username"] == f"system:{CONTROLLERS}"
        assert "system:masters" not in user["groups"]
        listens = _listening(plane.pids[CONTROLLERS])
        assert {address for address, _ in listens} == {"127.0.0.1"}
        [(_, port)] = listens
        context = ssl.create_default_context(cafile=str(plane.ca_file))
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=10, context=context)
        connection.request("GET", "/metrics")
        assert connection.getresponse().status in (401, 403)
        connection.close()
    assert not any(_alive(pid) for pid in pids.values())
    assert not folder.exists()


def test_controllers_that_cannot_start_are_reported_with_their_log(tmp_path: Path) -> None:
    broken = tmp_path / CONTROLLERS
    broken.write_text("#!/bin/sh\necho no controllers today\nexit 4\n")
    broken.chmod(0o755)
    real = build.find_binaries()
    given = ControlPlaneBinaries(real.etcd, real.kube_apiserver, "assets", broken)
    with (
        pytest.raises(StartError, match=r"(?s)kube-controller-manager ended with 4.*no controllers today"),
        LocalControlPlane(binaries=given, controller_manager=True, ready_deadline_s=60),
    ):
        pass


def test_binaries_without_controllers_are_refused_before_anything_starts() -> None:
    given = ControlPlaneBinaries(Path("etcd"), Path("kube-apiserver"), "assets")
    with pytest.raises(StartError, match="hold no kube-controller-manager"):
        LocalControlPlane(binaries=given, controller_manager=True).start()


def _listening(pid: int) -> set[tuple[str, int]]:
    """Addresses and ports on which the process accepts TCP connections."""
    return {
        (one.laddr.ip, one.laddr.port)
        for one in psutil.Process(pid).net_connections("tcp")
        if one.status == psutil.CONN_LISTEN
    }
