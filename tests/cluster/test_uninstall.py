"""`kubectl kvtier uninstall` against a real API server: with an operator, without one, and in between.

Every run is a process with the rights that docs/guides/kubectl-role.yaml gives, and no more.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from kubectl_kvtier.outcomes import Exit
from tests.cluster.kvtier_localplane import Cluster, eventually
from tests.cluster.kvtier_localplane.cluster import kubectl_environment
from tests.cluster.operator_harness import (
    REPOSITORY,
    agent_pool,
    apply,
    install,
    kv_cache,
    operator,
    tier_class,
    wait_condition,
)
from tests.cluster.rollout_fake_agent import RolloutFakeAgent
from tests.cluster.test_controllers import PLAN, long_rollout, probes, selector

pytestmark = pytest.mark.timeout(600, func_only=True)
PROGRAM = str(Path(sys.executable).parent / "kubectl-kvtier")
ROLE = REPOSITORY / "docs" / "guides" / "kubectl-role.yaml"
FINALIZERS = {"KVRollout": "kvtier.dev/rollout", "KVCache": "kvtier.dev/cache"}


@dataclass(frozen=True)
class Person:
    """A ServiceAccount, and the program as it runs with its rights."""

    cluster: Cluster
    kubeconfig: Path

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [PROGRAM, "uninstall", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=kubectl_environment(self.kubeconfig, os.environ),
            # A shell that runs the tests in the background has them, and so this, ignore it.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def uninstall(self, *words: str) -> tuple[int, str, str]:
        """(exit status, stdout, stderr)."""
        with self.start(*words) as running:
            out, err = running.communicate(timeout=150)
            return running.returncode, out, err


def person(cluster: Cluster, folder: Path, name: str, *rules: dict[str, Any]) -> Person:
    """Of the shipped role, or of these rules."""
    cluster.ensure_namespace("people")
    apply(cluster, *_account(name, *rules))
    kubeconfig = cluster.service_account_kubeconfig("people", name, folder / f"{name}.kubeconfig")
    return Person(cluster, kubeconfig)


def _account(name: str, *rules: dict[str, Any]) -> list[dict[str, Any]]:
    rbac = "rbac.authorization.k8s.io"
    [shipped] = [
        one
        for one in yaml.safe_load_all(ROLE.read_text(encoding="utf-8"))
        if one["metadata"]["name"] == "kvtier-uninstaller"
    ]
    role = {**shipped, "metadata": {"name": f"test-{name}"}, "rules": list(rules) or shipped["rules"]}
    subject = {"kind": "ServiceAccount", "name": name, "namespace": "people"}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name, "namespace": "people"}},
        role,
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": f"test-{name}"},
            "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": f"test-{name}"},
            "subjects": [subject],
        },
    ]


def held(document: dict[str, Any], *others: str) -> dict[str, Any]:
    """As an operator that has gone has left it."""
    metadata = {**document["metadata"], "finalizers": [*others, FINALIZERS[document["kind"]]]}
    return {**document, "metadata": metadata}


def quick_rollout(namespace: str) -> dict[str, Any]:
    made = long_rollout(namespace)
    return {**made, "spec": {**made["spec"], "leaseTTL": "5s"}}


def canary(namespace: str) -> dict[str, Any]:
    """It goes to Canary, and stays there. A lease outlasts the start of a program on a busy machine."""
    made = long_rollout(namespace)
    stages = [dict(one) for one in made["spec"]["stages"]]
    stages[0]["minDuration"], stages[1]["minDuration"] = "1s", "30m"
    return {**made, "spec": {**made["spec"], "stages": stages, "leaseTTL": "30s"}}


def left(cluster: Cluster, namespace: str) -> list[str]:
    return [
        f"{one['kind']}/{one['metadata']['name']}"
        for kind in ("kvrollouts", "kvcaches")
        for one in cluster.get(kind, "-n", namespace)["items"]
    ]


@dataclass(frozen=True)
class Served:
    """A cache whose candidate an agent serves in Canary."""

    namespace: str
    uid: str
    agent: RolloutFakeAgent


@pytest.fixture
def served(control_plane: Cluster, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    """Not begun yet: an agent needs what an operator makes for it, and a test starts its own."""
    namespace = f"uninstall-{hashlib.sha256(request.node.name.encode()).hexdigest()[:8]}"
    install(control_plane)
    control_plane.ensure_namespace(namespace)
    apply(control_plane, tier_class("gpu-sim", "gpu"), tier_class("cpu-dram", "cpu"))
    apply(control_plane, agent_pool(namespace, namespace))
    agent = RolloutFakeAgent(
        control_plane,
        tmp_path,
        f"{namespace}-a",
        namespace=namespace,
        pool=namespace,
        lease_seconds=6 * 3600,
        probe_digest=f"sha256:{hashlib.sha256(PLAN.encode()).hexdigest()}",
    )
    try:
        apply(control_plane, selector(namespace), probes(namespace))
        apply(control_plane, kv_cache("cache", namespace, namespace, contract={"exactness": "approximate"}))
        uid = control_plane.get("kvcache/cache", "-n", namespace)["metadata"]["uid"]
        yield Served(namespace, uid, agent)
    finally:
        agent.stop(release=False)
        agent.cleanup()


def reach_canary(cluster: Cluster, served: Served) -> None:
    served.agent.start()
    wait_condition(cluster, "kvcache/cache", served.namespace, "Ready", "True", timeout=60)
    apply(cluster, canary(served.namespace))

    def there() -> bool:
        status = cluster.get("kvrollout/rollout", "-n", served.namespace).get("status") or {}
        return status.get("stage") == "Canary" and bool(served.agent.state.candidate(served.uid))

    def shown() -> str:
        return cluster.kubectl("get", "kvr", "-n", served.namespace, "-o", "yaml", check=False).stdout

    eventually(there, 120, what="the agent serves the candidate in Canary", on_failure=shown)


def test_with_an_operator_a_rollout_in_canary_ends_by_itself(
    control_plane: Cluster, served: Served, tmp_path: Path
) -> None:
    """The candidate is revoked first, the agent forgets the cache, and nothing is dropped."""
    someone = person(control_plane, tmp_path, "with-operator")
    scope = ("-n", served.namespace)
    with operator(control_plane, tmp_path, "uninstalled"):
        reach_canary(control_plane, served)
        status, preview, _ = someone.uninstall(*scope, "--dry-run")
        assert status == Exit.OK and "the least --deadline is 33s" in preview
        assert left(control_plane, served.namespace) == ["KVRollout/rollout", "KVCache/cache"]
        status, told, said = someone.uninstall(*scope, "--deadline", "2m", "--all-kinds")
    assert status == Exit.OK, told + said
    assert [line.partition(",")[0] for line in told.splitlines()] == [
        f"deleted: KVRollout {served.namespace}/rollout",
        f"gone: KVRollout {served.namespace}/rollout",
        f"deleted: KVCache {served.namespace}/cache",
        f"gone: KVCache {served.namespace}/cache",
        f"deleted: KVSelector {served.namespace}/quest-64",
        f"deleted: AgentPool {served.namespace}/{served.namespace}",
        f"gone: KVSelector {served.namespace}/quest-64",
        f"gone: AgentPool {served.namespace}/{served.namespace}",
        "4 objects gone",
    ]
    assert ", in Progressing" in told.splitlines()[0]
    assert served.agent.state.candidate(served.uid) == ""
    assert served.uid in served.agent.state.removed


def test_without_an_operator_finalizers_go_when_every_lease_has_ended(
    control_plane: Cluster, served: Served, tmp_path: Path
) -> None:
    """The operator goes away in Canary. Its agent has returned by itself before a finalizer is dropped; the
    next operator makes it forget the cache."""
    someone = person(control_plane, tmp_path, "without-operator")
    with operator(control_plane, tmp_path, "scaled-to-zero"):
        reach_canary(control_plane, served)
        status, _, said = someone.uninstall("-n", served.namespace, "--deadline", "32s")
        assert status == Exit.USAGE and "The least is --deadline 33s" in said
    assert served.agent.state.candidate(served.uid), "nobody has revoked it"
    seen: list[tuple[bool, bool]] = []

    with someone.start("-n", served.namespace, "--deadline", "33s", "-o", "json") as running:

        def ended() -> bool:
            # First whether it is held, then whether the lease runs: a lease never comes back.
            here = bool(left(control_plane, served.namespace))
            seen.append((here, bool(served.agent.state.candidate(served.uid))))
            return running.poll() is not None

        eventually(ended, 120, what="the uninstall ends")
        assert running.stdout is not None
        told = json.loads(running.stdout.read())
    assert running.returncode == Exit.NEGATIVE
    assert [(one["kind"], one["finalizer"], one["gone"]) for one in told["dropped"]] == [
        ("KVRollout", "kvtier.dev/rollout", True),
        ("KVCache", "kvtier.dev/cache", True),
    ]
    assert (told["gone"], told["left"]) == ([], [])
    assert (False, True) not in seen, "gone while its candidate was still served"
    assert (True, True) in seen and left(control_plane, served.namespace) == []
    assert served.uid not in served.agent.state.removed
    with operator(control_plane, tmp_path, "installed-again"):
        eventually(lambda: served.uid in served.agent.state.removed, 120, what="the agent is told to forget")


def test_it_goes_on_where_another_was_interrupted_and_names_a_missing_right(
    control_plane: Cluster, tmp_path: Path
) -> None:
    install(control_plane)
    namespace = "uninstall-again"
    control_plane.ensure_namespace(namespace)
    cache = held(kv_cache("cache", namespace, "none"), "example.com/audit")
    apply(control_plane, held(quick_rollout(namespace)), cache)
    scope = ("-n", namespace)
    first = person(control_plane, tmp_path, "interrupted")
    with first.start(*scope, "--deadline", "60s") as running:
        assert running.stdout is not None
        assert running.stdout.readline() == f"deleted: KVRollout {namespace}/rollout\n"
        running.send_signal(signal.SIGINT)
        rest = running.stdout.read()
    assert running.returncode == 130
    assert "interrupted: 2 objects are left; run it again to go on" in rest
    assert left(control_plane, namespace) == ["KVRollout/rollout", "KVCache/cache"]
    group = {"apiGroups": ["kvtier.dev"]}
    may_not = person(
        control_plane, tmp_path, "may-not",
        {**group, "resources": ["kvrollouts"], "verbs": ["list", "delete", "patch"]},
        {**group, "resources": ["kvcaches"], "verbs": ["list", "delete"]},
    )  # fmt: skip
    status, told, _ = may_not.uninstall(*scope, "--deadline", "6s")
    assert status == Exit.FAILED
    assert "the right to patch kvcaches.kvtier.dev is missing (ClusterRole kvtier-uninstaller" in told
    assert left(control_plane, namespace) == ["KVCache/cache"]
    sees_nothing = person(
        control_plane, tmp_path, "sees-nothing", {**group, "resources": ["kvcaches"], "verbs": ["list"]}
    )
    status, _, said = sees_nothing.uninstall(*scope)
    assert status == Exit.FAILED and "the right to list kvrollouts.kvtier.dev is missing" in said
    # The cache has no rollout any more that says how long leases last.
    status, told, _ = first.uninstall(*scope, "--deadline", "66s")
    assert status == Exit.TIMED_OUT
    assert "dropped kvtier.dev/cache of KVCache" in told
    assert "held by example.com/audit, which is not kvtier's to drop" in told
    found = control_plane.get("kvcache/cache", *scope)
    assert found["metadata"]["finalizers"] == ["example.com/audit"]
    drop = '[{"op": "remove", "path": "/metadata/finalizers"}]'
    control_plane.kubectl("patch", "kvc", "cache", *scope, "--type=json", "-p", drop)
    assert first.uninstall(*scope)[:2] == (Exit.OK, "nothing to delete, in 0s\n")


def test_a_namespace_that_waits_for_an_operator_which_is_gone_is_ended(
    control_plane_with_controllers: Cluster, tmp_path: Path
) -> None:
    cluster, namespace = control_plane_with_controllers, "uninstall-namespace"
    cluster.ensure_namespace(namespace)
    apply(cluster, held(quick_rollout(namespace)), held(kv_cache("cache", namespace, "none")))
    cluster.kubectl("delete", "namespace", namespace, "--wait=false")

    def waits() -> bool:
        found = [cluster.get(kind, "-n", namespace) for kind in ("kvrollout/rollout", "kvcache/cache")]
        return all("deletionTimestamp" in one["metadata"] for one in found)

    eventually(waits, 60, what="the namespace's objects are deleted, and held")
    someone = person(cluster, tmp_path, "of-a-namespace")
    status, told, said = someone.uninstall("-n", namespace, "--deadline", "6s")
    assert status == Exit.NEGATIVE, told + said
    assert "2 objects gone, 0 by themselves" in told
    gone = ("get", "namespace", namespace, "--ignore-not-found", "-o", "name")
    eventually(lambda: not cluster.kubectl(*gone).stdout, 60, what="the namespace ends")
