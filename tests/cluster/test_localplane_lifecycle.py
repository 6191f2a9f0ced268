"""The control plane leaves nothing behind, however its user ends, and never builds without need."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.kvtier_localplane import (
    ControlPlaneBinaries,
    LocalControlPlane,
    StartError,
    build,
    eventually,
)

REPOSITORY = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(120)

_HOLDER = """
import json, signal, sys
from tests.cluster.kvtier_localplane import LocalControlPlane
with LocalControlPlane() as plane:
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


@contextlib.contextmanager
def _plane_in_another_process() -> Iterator[tuple[subprocess.Popen[str], dict[str, int], Path]]:
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER],
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
        pytest.param("holder", signal.SIGKILL, id="parent-killed"),
        pytest.param("holder", signal.SIGINT, id="ctrl-c"),
        pytest.param("supervisor", signal.SIGKILL, id="supervisor-killed"),
        pytest.param("supervisor", signal.SIGTERM, id="supervisor-terminated"),
        pytest.param("etcd", signal.SIGKILL, id="etcd-killed"),
    ],
)
def test_no_process_outlives_its_user(victim: str, number: signal.Signals) -> None:
    with _plane_in_another_process() as (holder, pids, folder):
        assert set(pids) == {"supervisor", "etcd", "kube-apiserver"}
        assert all(_alive(pid) for pid in pids.values()) and folder.is_dir()
        os.kill(holder.pid if victim == "holder" else pids[victim], number)
        eventually(lambda: not any(_alive(pid) for pid in pids.values()), 20, what="processes gone")
        if victim != "supervisor" or number != signal.SIGKILL:
            eventually(lambda: not folder.exists(), 10, what="folder removed")


def test_leaving_the_context_removes_everything() -> None:
    with LocalControlPlane() as plane:
        pids, folder = plane.pids, plane.cluster.folder
        assert folder.stat().st_mode & 0o077 == 0
        assert plane.kubectl("get", "--raw", "/readyz").stdout == "ok"
    assert not any(_alive(pid) for pid in pids.values())
    assert not folder.exists()


def test_a_server_that_cannot_start_is_reported_with_its_log(tmp_path: Path) -> None:
    broken = tmp_path / "kube-apiserver"
    broken.write_text("#!/bin/sh\necho cannot go on\nexit 3\n")
    broken.chmod(0o755)
    real = build.find_binaries()
    with (
        pytest.raises(StartError, match=r"(?s)kube-apiserver ended with 3.*cannot go on"),
        LocalControlPlane(binaries=ControlPlaneBinaries(real.etcd, broken, "assets"), ready_deadline_s=20),
    ):
        pass
