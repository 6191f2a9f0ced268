"""docs/release.md names a test for each public complaint about release controllers and for each claim of our
own; here is seen that these tests exist. And what is shipped must not have what some of them were about."""

from __future__ import annotations

import re
from typing import Any

import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from kvtier_operator.metrics import Metrics
from tests.unit.house.named_tests import REPOSITORY, cases_of, missing_tests

PAGE = REPOSITORY / "docs" / "release.md"
_LISTED = """
argo-rollouts#4694 argo-rollouts#720 argo-rollouts#4073 argo-rollouts#3316 argo-rollouts#2522
argo-rollouts#1798 dynamo#3567 dynamo#14298 kserve#6043 LLMKube#1139 dynamo#4868
argo-rollouts#1297 argo-rollouts#2669 argo-rollouts#2675 argo-rollouts#1152 argo-rollouts#4461
argo-rollouts#1337 argo-rollouts#941 argo-rollouts#3120 argo-rollouts#841 argo-rollouts#2929
argo-rollouts#3304 openkruise/rollouts#257 kserve#2130 devantler-tech/platform#2387
argo-rollouts#1466 argo-rollouts#1905 argo-rollouts#2866 flagger#883 flagger#1035 flagger#1353 flagger#1689
flagger#1581 argo-rollouts#3220 argo-rollouts#1360 argo-rollouts#1411 argo-rollouts#3765
argo-rollouts#3283 argo-rollouts#1008 argo-rollouts#2117 kopf#51
kopf#833 kopf#1104 kopf#75 flagger#1357 flagger#1550 flagger#1562 flagger#1939 LMCache-DESIGN
kserve#4182 kserve#5037 dynamo#12255 opendatahub-operator#3808 kubeflow#4511 kueue#8719 kueue#7637
argo-rollouts#1205 argo-rollouts#3038 argo-rollouts#3259 kopf#372 argo-rollouts#3642
argo-rollouts#2855 argo-rollouts#3112 argo-rollouts#4571 argo-rollouts#2166 argo-rollouts#3929 flagger#638
flagger#724 argo-rollouts#2276 kserve#5725 kserve#6218 kserve#5443 dynamo#729 dynamo#15132 modelplane#72
"""
CASES = _LISTED.split()


def test_every_case_is_in_the_table_once_with_a_test_or_the_reason_why_not() -> None:
    assert cases_of(PAGE, CASES) == sorted(CASES)


def test_every_named_test_exists() -> None:
    assert missing_tests(PAGE, at_least=80) == []


def shipped() -> list[dict[str, Any]]:
    found = []
    for folder in ("charts/kvtier/rbac", "crds"):
        for path in sorted((REPOSITORY / folder).glob("*.yaml")):
            found += [obj for obj in yaml.safe_load_all(path.read_text(encoding="utf-8")) if obj]
    return found


def test_no_webhook_is_shipped_that_could_stand_between_a_user_and_the_api_server() -> None:
    kinds = {obj["kind"] for obj in shipped()}
    assert kinds & {"ValidatingWebhookConfiguration", "MutatingWebhookConfiguration"} == set()
    templates = "".join(path.read_text() for path in (REPOSITORY / "charts").rglob("*.yaml"))
    assert "WebhookConfiguration" not in templates


def test_no_policy_stands_before_a_deletion_or_a_pod() -> None:
    policies = [obj for obj in shipped() if obj["kind"] == "ValidatingAdmissionPolicy"]
    assert policies
    for policy in policies:
        for rule in policy["spec"]["matchConstraints"]["resourceRules"]:
            assert not {"DELETE", "*"} & set(rule["operations"]), policy["metadata"]["name"]
            assert not {"pods", "*"} & set(rule["resources"]), policy["metadata"]["name"]


def test_no_kind_needs_a_conversion_to_be_listed() -> None:
    definitions = [obj for obj in shipped() if obj["kind"] == "CustomResourceDefinition"]
    assert len(definitions) == 6
    for definition in definitions:
        assert [version["name"] for version in definition["spec"]["versions"]] == ["v1alpha1"]
        assert definition["spec"].get("conversion", {}).get("strategy", "None") == "None"


def test_the_operator_is_probed_elsewhere_than_at_its_metrics_and_loads_nothing_at_start() -> None:
    text = (REPOSITORY / "charts" / "kvtier" / "templates" / "operator.yaml").read_text(encoding="utf-8")
    paths = re.findall(r"path: (/\w+)", text)
    assert paths and "/metrics" not in paths
    ports = re.findall(r"path: /\w+, port: (\w+)", text)
    assert len(ports) == len(paths) and "metrics" not in ports
    assert "initContainers" not in text
    assert "readOnlyRootFilesystem: true" in text


def test_no_metric_of_the_operator_has_a_label_that_grows_with_the_cluster() -> None:
    registry = CollectorRegistry()
    Metrics(registry)
    found = set(registry._names_to_collectors.values())
    assert len(found) > 8 and all(isinstance(metric, MetricWrapperBase) for metric in found)
    labels = {label for metric in found for label in metric._labelnames}  # type: ignore[attr-defined]
    assert labels == {"kind", "verb", "code", "method", "result", "cause"}
