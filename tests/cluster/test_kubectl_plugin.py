"""`kubectl kvtier` as kubectl runs it, against a real API server. No operator: a test plays its part where an
answer is needed, so that what it answers, and whether, is the test's.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from kubectl_kvtier.cli import main
from kubectl_kvtier.outcomes import Exit
from tests.cluster.kvtier_localplane import Cluster, eventually
from tests.cluster.kvtier_localplane.cluster import kubectl_environment
from tests.cluster.operator_harness import install
from tests.unit.crds.crds_samples import example

NAMESPACE = "kubectl-plugin"
BASE, CANDIDATE = "sha256:" + "b1" * 32, "sha256:" + "c2" * 32
pytestmark = pytest.mark.timeout(600)


class Plugin:
    """Ours by itself (`run`), or by kubectl with our programs on its PATH (`kubectl`)."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        environment = kubectl_environment(cluster.admin_kubeconfig, os.environ)
        ours = Path(sys.executable).parent
        self._environment = environment | {"PATH": f"{ours}:{environment['PATH']}"}

    def kubectl(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.cluster.kubectl_path), *words],
            capture_output=True,
            text=True,
            timeout=60,
            env=self._environment,
            stdin=subprocess.DEVNULL,
        )

    def run(self, *words: str, kubeconfig: Path | None = None) -> tuple[int, str, str]:
        """(exit status, stdout, stderr), in this process."""
        config = kubeconfig or self.cluster.admin_kubeconfig
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main([*words, "-n", NAMESPACE, "--kubeconfig", str(config)])
        return status, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def plugin(control_plane: Cluster) -> Plugin:
    install(control_plane)
    control_plane.ensure_namespace(NAMESPACE)
    return Plugin(control_plane)


def make(cluster: Cluster, name: str, **status: Any) -> None:
    made = example("KVRollout", "quest-on-chat")
    made["metadata"] |= {"name": name, "namespace": NAMESPACE}
    cluster.kubectl("apply", "-f", "-", input=json.dumps(made))
    write_status(
        cluster,
        name,
        observedGeneration=1,
        phase="Progressing",
        stage="Canary",
        step=0,
        attempt=1,
        fence=3,
        baseline={"digest": BASE},
        candidate={"digest": CANDIDATE, "class": "approximate"},
        **status,
    )


def write_status(cluster: Cluster, name: str, **status: Any) -> None:
    patch = json.dumps({"status": status})
    cluster.kubectl(
        "patch", "kvr", name, "-n", NAMESPACE, "--subresource=status", "--type=merge", "-p", patch
    )


def answer(cluster: Cluster, name: str, result: str) -> threading.Thread:
    """Echoes the next intent as an operator does; joined by the caller."""

    def run() -> None:
        intent = eventually(
            lambda: cluster.get("kvr", name, "-n", NAMESPACE)["spec"].get("intent"), 60, what="an intent"
        )
        write_status(
            cluster, name, lastIntent={"seq": intent["seq"], "verb": intent["verb"], "result": result}
        )

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_kubectl_finds_it_and_shows_one_rollout_and_all(plugin: Plugin) -> None:
    make(plugin.cluster, "shown")
    one = plugin.kubectl("kvtier", "status", "shown", "-n", NAMESPACE)
    assert one.returncode == Exit.OK, one.stderr
    assert f"KVRollout {NAMESPACE}/shown  Progressing  Canary" in one.stdout and "b1b1b1b1b1b1" in one.stdout
    _, every, _ = plugin.run("status", "-A", "-o", "json")
    assert "shown" in [one["name"] for one in json.loads(every)]
    code, _, said = plugin.run("explain", "nobody")
    assert code == Exit.NOT_FOUND and '"nobody" not found' in said


@pytest.mark.parametrize(
    "result,code", [("Accepted", Exit.OK), ("WrongStep", Exit.NEGATIVE)], ids=["accepted", "refused"]
)
def test_an_intent_passes_the_servers_rules_and_its_answer_is_waited_for(
    plugin: Plugin, result: str, code: Exit
) -> None:
    name = f"intent-{result.lower()}"
    make(plugin.cluster, name)
    # The server judges a dry run by the same rules, and keeps nothing.
    judged, said, _ = plugin.run("promote", f"kvrollout.kvtier.dev/{name}", "--dry-run")
    assert judged == Exit.OK and "Promote seq 1 of Canary step 0, attempt 1 would be written" in said
    assert "intent" not in plugin.cluster.get("kvr", name, "-n", NAMESPACE)["spec"]
    operator = answer(plugin.cluster, name, result)
    found, out, err = plugin.run("promote", name, "--timeout", "50")
    operator.join(60)
    assert found == code, out + err
    assert plugin.cluster.get("kvr", name, "-n", NAMESPACE)["spec"]["intent"] == {
        "seq": 1, "verb": "Promote", "attempt": 1, "expectedStage": "Canary", "expectedStep": 0,
    }  # fmt: skip
    # The next one counts on, and an unanswered one says so.
    late, _, said = plugin.run("abort", name, "--timeout", "0.5")
    assert late == Exit.TIMED_OUT and "seq 2" in said


def test_a_watch_draws_again_and_ends_with_the_rollout(plugin: Plugin) -> None:
    make(plugin.cluster, "watched")
    environment = plugin._environment
    with subprocess.Popen(
        [str(plugin.cluster.kubectl_path), "kvtier", "status", "watched", "-n", NAMESPACE, "-w"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as running:
        assert running.stdout is not None
        first = running.stdout.readline()
        assert "Progressing" in first
        write_status(plugin.cluster, "watched", phase="RolledBack", stage="ExactBaseline")
        rest = running.stdout.read()
        assert "RolledBack  ExactBaseline" in rest
        assert running.wait(30) == Exit.NEGATIVE


def test_a_watch_ends_with_its_time(plugin: Plugin) -> None:
    make(plugin.cluster, "slow")
    ended, out, err = plugin.run("status", "slow", "-w", "--timeout", "5s")
    assert ended == Exit.TIMED_OUT and out.count("KVRollout") == 1, out
    assert "slow has not ended within 5 s: slow stays in Canary" in err


def test_revisions_events_and_bytes_are_read_from_the_cluster(plugin: Plugin) -> None:
    make(plugin.cluster, "past")
    cache = example("KVCache", "chat")
    cache["metadata"] |= {"name": "chat", "namespace": NAMESPACE}
    plugin.cluster.kubectl("apply", "-f", "-", input=json.dumps(cache))
    for words in (("history", "past"), ("history", "cache/chat"), ("top",), ("top", "caches", "-A")):
        status, _, said = plugin.run(*words)
        assert status == Exit.OK, (words, said)
    assert "past" in plugin.run("history", "cache/chat")[1]
    # Neither manifest is there: that is said, with what there is.
    status, _, said = plugin.run("diff", "past")
    assert status == Exit.NOT_FOUND and "there are: none" in said


def test_kubectl_completes_names(plugin: Plugin) -> None:
    make(plugin.cluster, "completed-name")
    done = plugin.kubectl("__complete", "kvtier", "abort", "-n", NAMESPACE, "completed")
    assert done.stdout.splitlines()[0] == "completed-name", done.stderr


def test_a_service_account_needs_few_rights(plugin: Plugin, tmp_path: Path) -> None:
    """What docs/guides/kubectl.md gives a person: reading, and patching rollouts."""
    text = (Path(__file__).resolve().parents[2] / "docs/guides/kubectl-role.yaml").read_text(encoding="utf-8")
    role = next(yaml.safe_load_all(text))
    assert (role["kind"], role["metadata"]["name"]) == ("ClusterRole", "kvtier-release-engineer")
    plugin.cluster.kubectl("apply", "-f", "-", input=text)
    plugin.cluster.kubectl("create", "serviceaccount", "person", "-n", NAMESPACE)
    plugin.cluster.kubectl(
        "create", "clusterrolebinding", "kubectl-person", f"--clusterrole={role['metadata']['name']}",
        f"--serviceaccount={NAMESPACE}:person",
    )  # fmt: skip
    token = plugin.cluster.kubectl("create", "token", "person", "-n", NAMESPACE).stdout.strip()
    config = json.loads(plugin.cluster.kubectl("config", "view", "--raw", "-o", "json").stdout)
    config["users"] = [{"name": config["users"][0]["name"], "user": {"token": token}}]
    path = tmp_path / "person.kubeconfig"
    path.write_text(json.dumps(config), encoding="utf-8")
    make(plugin.cluster, "by-person")
    for words in (
        ("status", "by-person"), ("explain", "by-person"), ("history", "by-person"), ("top",),
        ("pause", "by-person", "--no-wait"),
    ):  # fmt: skip
        status, _, said = plugin.run(*words, kubeconfig=path)
        assert status == Exit.OK, (words, said)
