"""The operator as a process: its end on SIGTERM, its restart, and two at once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvtier_operator.election import Timing
from tests.cluster.fake_agent import FakeAgent
from tests.cluster.kvtier_localplane import Cluster, eventually
from tests.cluster.operator_harness import (
    SYSTEM,
    agent_pool,
    apply,
    install,
    kv_cache,
    operator,
    start_operator,
    tier_class,
    wait_condition,
)
from tests.ports import free_port

pytestmark = pytest.mark.timeout(600)
NAMESPACE = "op-process"
POOL = "op-process"
NODE = "op-process-a"
PATIENT = Timing(duration=600.0, renew=1.0, retry=0.5, margin=2.0)
"""Of a Lease that ends in no test."""


@dataclass(frozen=True)
class World:
    cluster: Cluster
    folder: Path
    agent: FakeAgent


@pytest.fixture(scope="module")
def world(control_plane: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A pool with one live agent and no operator."""
    folder = tmp_path_factory.mktemp("op-process")
    install(control_plane)
    control_plane.ensure_namespace(NAMESPACE)
    apply(control_plane, tier_class("gpu-sim", "gpu"), tier_class("cpu-dram", "cpu"))
    agent = FakeAgent(control_plane, folder, NODE, namespace=NAMESPACE, pool=POOL, lease_seconds=6 * 3600)
    try:
        with operator(control_plane, folder, "op-process-0"):
            apply(control_plane, agent_pool(POOL, NAMESPACE))
            agent.start()
        yield World(control_plane, folder, agent)
    finally:
        agent.cleanup()


def test_a_restarted_operator_goes_on_and_writes_nothing_for_what_stands(world: World) -> None:
    with operator(world.cluster, world.folder, "restart-1"):
        apply(world.cluster, kv_cache("stands", NAMESPACE, POOL))
        wait_condition(world.cluster, "kvcache/stands", NAMESPACE, "Ready", "True")
    version = world.cluster.get("kvcache", "stands", "-n", NAMESPACE)["metadata"]["resourceVersion"]
    world.agent.state.calls.clear()
    with operator(world.cluster, world.folder, "restart-2") as second:
        # A new operator believes nothing: it takes a proof of its own before it is calm.
        eventually(lambda: "Prove" in world.agent.state.calls, 60)
        eventually(second.idle, 60)
        assert "ApplyBaseline" not in world.agent.state.calls
        found = world.cluster.get("kvcache", "stands", "-n", NAMESPACE)
        assert found["metadata"]["resourceVersion"] == version
        world.cluster.kubectl("delete", "kvcache", "stands", "-n", NAMESPACE, "--timeout=60s")


def test_of_two_operators_one_leads_and_the_other_takes_over_at_once(world: World) -> None:
    with operator(world.cluster, world.folder, "two-1", PATIENT) as first:
        second = start_operator(world.cluster, world.folder, "two-2", PATIENT)
        try:
            eventually(second.operator.ready.is_set, 60)
            apply(world.cluster, kv_cache("one-writer", NAMESPACE, POOL))
            wait_condition(world.cluster, "kvcache/one-writer", NAMESPACE, "Ready", "True")
            assert not second.leading()
            assert second.writes() == {}
            first.stop()
            # Released, not expired: the successor does not wait for the end of the Lease.
            eventually(second.leading, 60)
            world.cluster.kubectl("delete", "kvcache", "one-writer", "-n", NAMESPACE, "--timeout=60s")
        finally:
            second.stop()


def test_an_agent_forgets_a_cache_that_went_while_no_operator_ran(world: World) -> None:
    """Its finalizer was removed by hand, so that nobody has told the agent; the next operator does."""
    with operator(world.cluster, world.folder, "orphan-1"):
        apply(world.cluster, kv_cache("orphan", NAMESPACE, POOL))
        cache = wait_condition(world.cluster, "kvcache/orphan", NAMESPACE, "Ready", "True")
        uid = cache["metadata"]["uid"]
    held = world.agent.state.caches[uid]
    world.cluster.kubectl("delete", "kvcache", "orphan", "-n", NAMESPACE, "--wait=false")
    world.cluster.kubectl(
        "patch", "kvcache", "orphan", "-n", NAMESPACE, "--type=json",
        '-p=[{"op":"remove","path":"/metadata/finalizers"}]',
    )  # fmt: skip
    assert world.agent.state.caches[uid] is held
    with operator(world.cluster, world.folder, "orphan-2"):
        eventually(lambda: uid not in world.agent.state.caches, 60)
    assert world.agent.state.removed[uid] == held.fence + 1


def test_the_command_ends_on_sigterm_and_gives_its_lease_back(world: World) -> None:
    with command(world, "cli-1") as process:
        ready = json.loads(process.lines.pop(0))
        assert ready == {"event": "ready", "identity": "cli-1"}
        eventually(lambda: holder(world.cluster) == "cli-1", 60)
        apply(world.cluster, kv_cache("by-cli", NAMESPACE, POOL))
        wait_condition(world.cluster, "kvcache/by-cli", NAMESPACE, "Ready", "True")
        assert process.get("healthz")[0] == 200
        eventually(lambda: process.get("readyz") == (200, "leading"), 60)
        assert "kvtier_operator_api_writes_total" in process.get("metrics")[1]
        world.cluster.kubectl("delete", "kvcache", "by-cli", "-n", NAMESPACE, "--timeout=60s")
        process.popen.send_signal(signal.SIGTERM)
        assert process.popen.wait(60) == 0
    assert holder(world.cluster) == ""
    for line in process.errors:
        assert isinstance(json.loads(line), dict), line


def test_after_a_killed_leader_the_next_waits_for_the_lease_and_then_goes_on(world: World) -> None:
    with command(world, "killed") as process:
        eventually(lambda: holder(world.cluster) == "killed", 60)
        apply(world.cluster, kv_cache("survives", NAMESPACE, POOL))
        before = wait_condition(world.cluster, "kvcache/survives", NAMESPACE, "Ready", "True")
        process.popen.kill()
        process.popen.wait(10)
    assert holder(world.cluster) == "killed"
    started = time.monotonic()
    successor = start_operator(world.cluster, world.folder, "successor")
    try:
        eventually(successor.operator.ready.is_set, 60)
        eventually(successor.leading, 60)
        # Its own view of the Lease is what counts, so it waits for the whole duration of 6 s.
        assert time.monotonic() - started > 6
        after = world.cluster.get("kvcache", "survives", "-n", NAMESPACE)
        assert after["status"]["baseline"] == before["status"]["baseline"]
        world.cluster.kubectl("delete", "kvcache", "survives", "-n", NAMESPACE, "--timeout=60s")
    finally:
        successor.stop()


def holder(cluster: Cluster) -> str:
    lease = cluster.get("lease", "kvtier-operator", "-n", SYSTEM)
    return str(lease["spec"].get("holderIdentity") or "")


@dataclass
class Command:
    popen: subprocess.Popen[str]
    lines: list[str]
    errors: list[str]
    liveness_port: int
    metrics_port: int

    def get(self, path: str) -> tuple[int, str]:
        port = self.metrics_port if path == "metrics" else self.liveness_port
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


@contextlib.contextmanager
def command(world: World, identity: str) -> Iterator[Command]:
    """`kvtier-operator` as a process of its own, once it has said that it is ready."""
    kubeconfig = world.cluster.service_account_kubeconfig(
        SYSTEM, "kvtier-operator", world.folder / f"{identity}.kubeconfig"
    )
    certificate = world.cluster.issue_certificate(identity, world.folder / "cli-tls")
    liveness, metrics = free_port(), free_port()
    popen = subprocess.Popen(
        [sys.executable, "-m", "kvtier_operator.cli", f"--kubeconfig={kubeconfig}", f"--namespace={SYSTEM}",
         f"--identity={identity}", f"--agent-tls-cert={certificate.cert_file}",
         f"--agent-tls-key={certificate.key_file}", f"--agent-tls-ca={certificate.ca_file}",
         f"--metrics-port={metrics}", f"--liveness-port={liveness}", "--election-lease-seconds=6",
         "--bind-address=127.0.0.1"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    lines: list[str] = []
    errors: list[str] = []
    assert popen.stdout is not None and popen.stderr is not None
    readers = [
        threading.Thread(target=lambda: lines.extend(popen.stdout or []), daemon=True),
        threading.Thread(target=lambda: errors.extend(popen.stderr or []), daemon=True),
    ]
    for reader in readers:
        reader.start()
    try:
        eventually(lambda: lines or popen.poll() is not None, 90, on_failure=lambda: "".join(errors))
        assert lines, "".join(errors)
        yield Command(popen, lines, errors, liveness, metrics)
    finally:
        if popen.poll() is None:
            popen.kill()
        popen.wait(10)
        for reader in readers:
            reader.join(5)
