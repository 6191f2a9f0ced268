"""The chart as helm sees it: it renders, each object passes the API server, a release comes and goes."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtier_operator.cli import parser
from tests.cluster.kvtier_localplane import Cluster, LocalControlPlane, eventually, find_helm
from tests.cluster.operator_harness import REPOSITORY, SYSTEM, operator

# A fixture may have to build helm first; that wait has its own deadline.
pytestmark = pytest.mark.timeout(600, func_only=True)
CHART = REPOSITORY / "charts" / "kvtier"
FULL = {
    "image": {"repository": "example.invalid/kvtier/operator", "tag": "1.2.3", "pullPolicy": "Always"},
    "replicas": 2,
    "telemetry": {"otlpEndpoint": "collector.observability:4317"},
    "nodeSelector": {"kubernetes.io/os": "linux"},
    "tolerations": [{"key": "dedicated", "operator": "Equal", "value": "control", "effect": "NoSchedule"}],
    "resources": {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "2Gi"}},
}
VALUES = [pytest.param({}, id="defaults"), pytest.param(FULL, id="everything-set")]


@dataclass(frozen=True)
class Helm:
    """The pinned helm with a home of its own: it sees no settings, repositories or clusters of the user."""

    program: Path
    home: Path

    def __call__(
        self, *args: str, kubeconfig: Path | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "KUBECONFIG": str(kubeconfig or self.home / "none"),
        }
        done = subprocess.run(
            [self.program, *args], capture_output=True, text=True, timeout=100, env=environment
        )
        assert not check or done.returncode == 0, f"helm {' '.join(args)}: {done.stderr or done.stdout}"
        return done

    def render(self, values: dict[str, Any], *options: str) -> list[dict[str, Any]]:
        file = self.home / "values.yaml"
        file.write_text(yaml.safe_dump(values))
        text = self("template", "kvtier", str(CHART), "-n", SYSTEM, "-f", str(file), *options).stdout
        return [one for one in yaml.safe_load_all(text) if one]


@pytest.fixture(scope="module")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    return Helm(find_helm(), tmp_path_factory.mktemp("helm"))


def _names(objects: list[dict[str, Any]]) -> set[tuple[str, str]]:
    return {(one["kind"], one["metadata"]["name"]) for one in objects}


@pytest.mark.parametrize("values", VALUES)
def test_each_rendered_object_passes_the_api_server(
    control_plane: Cluster, helm: Helm, values: dict[str, Any]
) -> None:
    """A dry run on the server: strict field validation, defaulting, admission and CEL; nothing is stored."""
    control_plane.ensure_namespace(SYSTEM)
    objects = helm.render(values, "--include-crds")
    taken = control_plane.kubectl(
        "apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict",
        "-o", "name", "-f", "-", input=yaml.safe_dump_all(objects),
    ).stdout.split()  # fmt: skip
    assert len(taken) == len(objects)
    crds = [one for one in taken if one.startswith("customresourcedefinition.")]
    assert len(crds) == len(list((CHART / "crds").glob("*.yaml")))
    assert "deployment.apps/kvtier-operator" in taken


def test_the_dry_run_refuses_a_field_that_does_not_exist(control_plane: Cluster, helm: Helm) -> None:
    """Else the test above could not fail."""
    control_plane.ensure_namespace(SYSTEM)
    [deployment] = [one for one in helm.render({}) if one["kind"] == "Deployment"]
    deployment["spec"]["template"]["spec"]["containers"][0]["livelinessProbe"] = {}
    refused = control_plane.kubectl(
        "apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-",
        input=yaml.safe_dump(deployment), check=False,
    )  # fmt: skip
    assert refused.returncode != 0
    assert "livelinessProbe" in refused.stderr


def test_helm_gives_the_rights_that_kubectl_gives(helm: Helm) -> None:
    """The plain files of the chart, unchanged, and beside them the Deployment only."""
    rendered = {(one["kind"], one["metadata"]["name"]): one for one in helm.render({})}
    plain = [
        one
        for file in sorted((CHART / "rbac").glob("*.yaml"))
        for one in yaml.safe_load_all(file.read_text())
        if one
    ]
    assert {key: rendered[key] for key in _names(plain)} == {
        (one["kind"], one["metadata"]["name"]): one for one in plain
    }
    assert set(rendered) - _names(plain) == {("Deployment", "kvtier-operator")}


@pytest.mark.parametrize("values", VALUES)
def test_the_rendered_command_line_is_one_that_the_operator_takes(helm: Helm, values: dict[str, Any]) -> None:
    [deployment] = [one for one in helm.render(values) if one["kind"] == "Deployment"]
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["kvtier-operator"]
    variables = {"NAMESPACE": SYSTEM, "POD_NAME": "kvtier-operator-0"}
    assert {one["name"] for one in container["env"]} == set(variables)
    args = [re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], one) for one in container["args"]]
    taken = parser().parse_args(args)
    assert (taken.namespace, taken.identity) == (SYSTEM, "kvtier-operator-0")
    assert (taken.otlp_endpoint or "") == values.get("telemetry", {}).get("otlpEndpoint", "")
    named = {one["name"]: one["containerPort"] for one in container["ports"]}
    assert named == {"metrics": taken.metrics_port, "liveness": taken.liveness_port}


def test_values_reach_the_deployment(helm: Helm) -> None:
    [deployment] = [one for one in helm.render(FULL) if one["kind"] == "Deployment"]
    spec, pod = deployment["spec"], deployment["spec"]["template"]["spec"]
    assert spec["replicas"] == FULL["replicas"]
    assert {name: pod[name] for name in ("nodeSelector", "tolerations")} == {
        name: FULL[name] for name in ("nodeSelector", "tolerations")
    }
    [container] = pod["containers"]
    assert container["image"] == "example.invalid/kvtier/operator:1.2.3"
    assert container["imagePullPolicy"] == "Always"
    assert container["resources"] == FULL["resources"]


def test_another_namespace_is_refused_with_the_reason(helm: Helm) -> None:
    refused = helm("template", "kvtier", str(CHART), "-n", "elsewhere", check=False)
    assert refused.returncode != 0
    assert "install kvtier into the namespace kvtier-system" in refused.stderr


def test_helm_finds_nothing_to_say_about_the_chart(helm: Helm) -> None:
    said = helm("lint", "--strict", "-n", SYSTEM, str(CHART))
    assert "0 chart(s) failed" in said.stdout


@pytest.fixture
def empty_cluster() -> Iterator[Cluster]:
    with LocalControlPlane() as plane:
        yield plane.cluster


def test_a_release_is_installed_upgraded_and_ended(
    empty_cluster: Cluster, helm: Helm, tmp_path: Path
) -> None:
    """With what helm has installed, and no more, the operator starts and leads. The CRDs stay, as helm has
    it: their objects are the user's."""
    admin = empty_cluster.admin_kubeconfig
    helm("install", "kvtier", str(CHART), "-n", SYSTEM, "--create-namespace", kubeconfig=admin)
    with operator(empty_cluster, tmp_path, "from-helm") as running:
        assert running.leading()
    helm("upgrade", "kvtier", str(CHART), "-n", SYSTEM, "--set", "replicas=2", kubeconfig=admin)
    deployment = empty_cluster.get("deployment", "kvtier-operator", "-n", SYSTEM)
    assert deployment["spec"]["replicas"] == 2
    helm("uninstall", "kvtier", "-n", SYSTEM, kubeconfig=admin)
    left = "deployments,serviceaccounts,roles,rolebindings"

    def gone() -> bool:
        return empty_cluster.kubectl("get", left, "-n", SYSTEM, "-o", "name").stdout.split() == []

    eventually(gone, 60, what="the release's objects are gone")
    crds = empty_cluster.kubectl("get", "crds", "-o", "name").stdout.split()
    assert len(crds) == len(list((CHART / "crds").glob("*.yaml")))
