"""Starting and ending on a real API server: rights that are missing, and who leads next."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtier_operator import starting
from kvtier_operator.election import Timing
from kvtier_operator.ports import Kind
from tests.cluster.kvtier_localplane import Cluster, eventually
from tests.cluster.operator_harness import (
    REPOSITORY,
    SYSTEM,
    RunningOperator,
    agent_pool,
    apply,
    install,
    operator,
    start_operator,
    tier_class,
)

pytestmark = pytest.mark.timeout(600)
NAMESPACE = "op-starting"
SELDOM = Timing(duration=600.0, renew=1.0, retry=500.0, margin=2.0)
"""Of a standby that looks at the Lease by itself in no test."""
SELECTOR = {
    "apiVersion": "kvtier.dev/v1alpha1",
    "kind": "KVSelector",
    "metadata": {"name": "half-watching", "namespace": NAMESPACE},
    "spec": {"family": "quest", "quest": {"pageTokens": 16}, "budget": {"tokens": 64}},
}
Rule = dict[str, Any]


@pytest.fixture(scope="module")
def installed(control_plane: Cluster) -> Cluster:
    install(control_plane)
    control_plane.ensure_namespace(NAMESPACE)
    return control_plane


@dataclass(frozen=True)
class Account:
    """One whose role is the operator's less some verbs. Not the operator itself: what that is refused counts
    as a defect of its role."""

    cluster: Cluster
    name: str
    folder: Path

    def may(self, **less: tuple[str, ...]) -> None:
        """less: verbs taken away, by the plural of what they are on."""
        rules: list[Rule] = []
        for rule in _operators_rules():
            for plural in rule["resources"]:
                verbs = [verb for verb in rule["verbs"] if verb not in less.get(plural, ())]
                if verbs:
                    rules.append({**rule, "resources": [plural], "verbs": verbs})
        role: dict[str, Any] = {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRole",
            "metadata": {"name": self.name},
            "rules": rules,
        }
        apply(self.cluster, role)

    def start(self, identity: str) -> RunningOperator:
        token = self.folder / f"{identity}.token"
        token.write_text(self.cluster.service_account_token(SYSTEM, self.name))
        return start_operator(self.cluster, self.folder, identity, token_file=token)


def _operators_rules() -> list[Rule]:
    """Of both its roles, for the whole cluster."""
    text = (REPOSITORY / "charts" / "kvtier" / "rbac" / "operator.yaml").read_text()
    found = [one for one in yaml.safe_load_all(text) if one["kind"] in ("ClusterRole", "Role")]
    return [rule for one in found for rule in one["rules"]]


@pytest.fixture
def account(installed: Cluster, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Account]:
    name = "half-" + str(abs(hash(request.node.name)) % 10**8)
    made = Account(installed, name, tmp_path)
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name, "namespace": SYSTEM}}
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": SYSTEM}],
    }
    apply(installed, account, binding)
    yield made
    installed.kubectl("delete", "clusterrole,clusterrolebinding", name)


def told(cluster: Cluster, namespace: str, reason: str) -> list[str]:
    found = cluster.get("events.events.k8s.io", "-n", namespace)["items"]
    return [str(one["note"]) for one in found if one["reason"] == reason]


def test_a_right_to_list_that_is_missing_is_named_and_waited_for(
    account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starting, "TELL_SECONDS", 0.0)
    account.may(nodes=("list",), tierclasses=("list",))
    running = account.start("half-started")
    try:

        def said() -> bool:
            words = [one for one in told(account.cluster, SYSTEM, "NotStarted") if account.name in one]
            return any("tierclasses.kvtier.dev" in one and "the right to list nodes" in one for one in words)

        eventually(said, 60)
        assert not running.operator.ready.is_set()
        account.may()
        eventually(running.leading, 60)
    finally:
        running.stop()


def test_with_a_right_to_write_missing_its_object_says_so_and_all_else_goes_on(account: Account) -> None:
    account.may(daemonsets=("patch",))
    cluster = account.cluster
    running = account.start("half-writing")
    try:
        eventually(running.leading, 60)
        apply(cluster, tier_class("gpu-sim", "gpu"), tier_class("cpu-dram", "cpu"))
        apply(cluster, agent_pool("half-writing", NAMESPACE))
        words = 'cannot patch resource "daemonsets"'
        eventually(lambda: any(words in one for one in told(cluster, NAMESPACE, "Forbidden")), 60)
        apply(cluster, tier_class("half-writing", "cpu"))
        eventually(lambda: "status" in cluster.get("tierclass", "half-writing"), 60)
        account.may()
        # Tried again by itself.
        eventually(lambda: _exists(cluster, "daemonset", "-n", NAMESPACE), 120)
    finally:
        running.stop()
        cluster.kubectl("delete", "agentpool", "half-writing", "-n", NAMESPACE, "--wait=false")
        cluster.kubectl("delete", "tierclass", "half-writing")


def test_with_a_right_to_watch_missing_the_lists_tell_and_all_other_watches_go_on(account: Account) -> None:
    account.may(kvselectors=("watch",))
    cluster = account.cluster
    running = account.start("half-watching")
    try:
        eventually(running.leading, 60)
        apply(cluster, tier_class("half-watching", "cpu"))
        eventually(lambda: "status" in cluster.get("tierclass", "half-watching"), 60)
        apply(cluster, SELECTOR)
        running.loop.call_soon_threadsafe(running.operator.relist_soon)
        eventually(lambda: running.operator.store.list_all(Kind.KV_SELECTOR), 120)
    finally:
        running.stop()
        cluster.kubectl("delete", "tierclass", "half-watching")
        cluster.kubectl("delete", "kvselector", "half-watching", "-n", NAMESPACE)


def test_a_standby_leads_when_its_leader_ends_and_not_when_it_next_looks(
    installed: Cluster, tmp_path: Path
) -> None:
    """Its watch says that the Lease is free."""
    with operator(installed, tmp_path, "leaving", SELDOM) as first:
        second = start_operator(installed, tmp_path, "following", SELDOM)
        try:
            eventually(second.operator.ready.is_set, 60)
            assert not second.leading()
            first.stop()
            eventually(second.leading, 60)
        finally:
            second.stop()


def _exists(cluster: Cluster, *what: str) -> bool:
    return bool(cluster.get(*what)["items"])
