"""The demo on a cluster that is the user's: it comes up there, by KUBECONFIG, and only when asked to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.kvtier_localplane import LocalControlPlane, open_cluster
from tests.e2e.demo import objects
from tests.e2e.demo.__main__ import bring_up, parse
from tests.e2e.demo.otlp_sink import OtlpSink
from tests.e2e.demo.stack import NODES, SERVING, condition, stack, until

ROOT = Path(__file__).resolve().parents[2]


def test_the_demo_comes_up_on_the_cluster_of_kubeconfig(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything before the first claim, on an API server that the demo has not started."""
    with LocalControlPlane() as users:
        monkeypatch.setenv("KUBECONFIG", str(users.admin_kubeconfig))
        options = parse(["--cluster", "own"])
        with (
            OtlpSink() as sink,
            open_cluster(options.kubeconfig, wish=options.cluster) as cluster,
            stack(cluster, sink.endpoint) as running,
        ):
            assert cluster.url == users.url
            assert cluster.admin_kubeconfig != users.admin_kubeconfig
            bring_up(running, sink.endpoint)
            until(
                "the agents to serve the cache",
                lambda: condition(running.get("kvcache", objects.CACHE), "Ready").get("status") == "True",
                90,
                running,
            )
        seen = users.get("kvnodes")["items"]
        assert {one["metadata"]["name"] for one in seen} == set(NODES)
        assert users.get("kvcache", objects.CACHE, "-n", SERVING)["status"]["baseline"]["digest"]
        assert not cluster.folder.exists()
        assert users.kubectl("get", "--raw", "/readyz").stdout == "ok"


def test_without_a_kubeconfig_the_demo_says_so_and_starts_nothing() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "KUBECONFIG"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.demo", "--cluster", "own"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert "KUBECONFIG names no file" in done.stderr and "(KubeconfigUnset)" in done.stderr
    assert done.stdout == ""
